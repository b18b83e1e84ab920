"""Play the episodes of an evaluation on actors of Ray: the same results, in less time."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict

from dppo.config.parts import Actors, Env, Learners
from dppo.engine.actor_players import ActorPlayers
from dppo.engine.playing import PlayLimits
from dppo.engine.slots import ENDING_S
from dppo.envs.names import check_env_id
from dppo.envs.preparation import Preparation
from dppo.errors import ConfigError, DppoError, counted
from dppo.log import logger
from dppo.numerics.portable import in_force
from dppo.policies.player import Player, is_made
from dppo.policies.playing import EpisodePlayer
from dppo.policies.wanted import REPORT_EVERY_S, Wanted, summary
from dppo.ppo.exchange.records import Episode, PolicySnapshot
from dppo.transports.ray.session import RaySession, store_bytes_for

WAIT_S = 0.5  # longest single wait
EPISODE_S = 1800.0  # for an episode, where the run has no eval_timeout_s
HUNG_S = 600.0  # in one step, reset or constructor


def play_on_actors(
    player: Player, wanted: Wanted, played: list[Episode], check_signals: Callable[[], None]
) -> None:
    """Play all episodes, each on the next actor that is free, and leave them in `played`, in their order.

    Raises:
        ConfigError: the environment cannot be sent to actors, or there is no room for these.
        EnvironmentFault: the environment raised, or returned something invalid.
        ClusterError: Ray was lost, or an episode failed with several actors in a row.
    """
    if is_made(player.env):
        raise ConfigError(
            "num_actors: an environment that is already made stays in this process. Pass its id."
        )
    check_env_id(player.env)
    actors = min(wanted.num_actors, wanted.episodes)
    snapshot = PolicySnapshot(
        player.policy.state["iteration"], player.policy.weights, player.policy.obs_scale
    )
    settings = player.settings
    numerics = in_force(settings.get("numerics", "portable"))
    with numerics as variables, _session(actors, snapshot, check_signals) as session:
        # once the session has set Ray's variables
        from dppo.transports.ray.evaluating import players_on_ray

        if variables and not session.started_here:
            session.options = {"runtime_env": {"env_vars": variables}}
        logger.info("%s play", counted(actors, "Ray actor"))
        wanted.log_beginning(player)
        limits = PlayLimits(
            episodes=wanted.episodes,
            num_actors=actors,
            timeout_s=settings.get("eval_timeout_s", EPISODE_S),
            hung_s=HUNG_S,
            licence_s=0.0 if settings.get("licences") is None else ENDING_S,
        )
        with (
            tempfile.TemporaryDirectory(prefix="dppo-eval-") as logs,
            closing(players_on_ray(_sent(player, wanted), session, limits, logs)) as players,
        ):
            players.begin(0, snapshot)
            _collect(players, wanted.episodes, played, (check_signals, session.check))


def _session(
    actors: int, snapshot: PolicySnapshot, check_signals: Callable[[], None]
) -> closing[RaySession]:
    wanted = Actors(num_actors=actors)
    store_bytes = store_bytes_for(0, snapshot.weights.size)
    return closing(
        RaySession(
            wanted, Learners(), store_bytes=store_bytes, notify=logger.warning, check=check_signals
        )
    )


def _sent(player: Player, wanted: Wanted) -> EpisodePlayer:
    settings = player.settings | player.objects
    env = Env(
        env_id=player.env, env_kwargs=player.env_kwargs, **asdict(Preparation.by_names(settings))
    )
    policy = player.policy
    num_samplers = settings.get("num_samplers", 0)
    sent = EpisodePlayer(env, policy.spaces, policy.spec, wanted.play_settings, num_samplers)
    sent.setting = "env"
    return sent


def _collect(
    players: ActorPlayers,
    episodes: int,
    played: list[Episode],
    checks: Sequence[Callable[[], None]],
) -> None:
    """Wait for all episodes; report every few seconds."""
    began = time.monotonic()
    reported = began
    while len(played) < episodes:
        for check in checks:
            check()
        for _, _, outcome in players.outcomes(WAIT_S):
            if isinstance(outcome, DppoError):
                raise outcome
            played.append(outcome)
        now = time.monotonic()
        if now - reported >= REPORT_EVERY_S:
            reported = now
            logger.info("%s", summary(played, episodes, now - began))
    played.sort(key=lambda episode: episode.index)
