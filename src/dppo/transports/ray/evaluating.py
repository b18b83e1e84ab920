"""Evaluations on Ray: actors of their own play episodes, one each at a time, while training goes on."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

from dppo.engine.actor_players import ActorPlayers
from dppo.engine.playing import PlayEngine, PlayLimits
from dppo.errors import DppoError
from dppo.ppo.exchange.records import PolicySnapshot
from dppo.transports.ray.actor import PPOActor
from dppo.transports.ray.actor_class import ActorClass
from dppo.transports.ray.pickling import (
    PackedModel,
    pack,
    packed_model,
    sendable,
    unpack,
    unpacked_model,
)
from dppo.transports.ray.progress_file import ProgressFile
from dppo.transports.ray.session import RaySession
from dppo.transports.ray.transport import ActorKind, RayTransport


class EvaluationActor:
    """Plays episodes on request, in a process of its own."""

    def __init__(self, player: PackedModel, number: int) -> None:
        self._packed = player
        self._process = PPOActor(b"")  # an actor without samplers
        self._player: Any = None
        self._number = number

    def configure_process(
        self, keep_gpus: bool, log: str, node_id: str, driver: int, group: Any = None
    ) -> ProgressFile:
        """Configure the process as `PPOActor` does, and load the player in advance."""
        file = self._process.configure_process(keep_gpus, log, node_id, driver, group)
        with suppress(DppoError):  # which `play` reports
            self._loaded()
        return file

    def play(self, policy: bytes | PolicySnapshot, episode: int, timeout_s: float) -> bytes:
        """Play an episode, or pack the fault that ended it."""
        try:
            return pack(self._loaded().play(unpack(policy), episode, timeout_s))
        except DppoError as error:
            return pack(sendable(error))

    def close(self) -> None:
        """Close the environment."""
        self._process.close()

    def _loaded(self) -> Any:
        if self._player is None:
            player: Any = unpacked_model(self._packed)
            player.number = self._number
            player.progress = self._process.progress
            player.layout = self._process.on_nodes(player.layout)
            self._process.keep(player)  # so that SIGTERM closes it
            self._player = player
        return self._player


def players_on_ray(player: Any, session: RaySession, limits: PlayLimits, logs: str) -> ActorPlayers:
    """Return what plays the episodes of evaluations on actors of their own, and start these.

    `player` is an EpisodePlayer; `logs` is the folder of the actors' logs on this node.
    """
    packed = packed_model(player, player.setting)
    kind = ActorKind(
        name="evaluation",
        classes=[ActorClass(EvaluationActor, session.demand.actor, session.options)],
        arguments=lambda actor_id: (packed, actor_id),
        logs=logs,
    )
    link = session.link("evaluations")
    transport = RayTransport(kind, replace(session.demand, alternatives=()), link)
    return ActorPlayers(PlayEngine(limits), transport, link.clock.patience)
