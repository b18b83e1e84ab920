"""Play the episodes of an evaluation on Ray actors: the results are the same as without, in less time."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from dppo.config.parts import Actors, Learners
from dppo.engine.actor_players import ActorPlayers
from dppo.engine.playing import PlayLimits
from dppo.engine.slots import ENDING_S
from dppo.errors import ConfigError, DppoError, EnvironmentFault, counted
from dppo.log import logger
from dppo.numerics.portable import in_force
from dppo.policies.arguments import REPORT_EVERY_S, EvaluationArguments, PlayedEpisodes
from dppo.policies.controller import Controller
from dppo.policies.player import Player, is_made
from dppo.policies.playing import EpisodePlayer
from dppo.ppo.exchange.records import PolicySnapshot
from dppo.slots.layout import Layout
from dppo.transports.ray.session import RaySession, demand_of, store_bytes_for

WAIT_S = 0.5  # longest wait between two checks for signals
# time limit of an episode without a run, as in this process; one call has HUNG_S
EPISODE_S = math.inf
HUNG_S = 600.0  # time limit of a step, a reset or a constructor


def play_on_actors(
    player: Player,
    arguments: EvaluationArguments,
    results: PlayedEpisodes,
    check_signals: Callable[[], None],
) -> None:
    """Play each episode on the next free actor; add the episodes to `results`, sorted at the end.

    Raises:
        ConfigError: the environment cannot be sent to actors, or the cluster has no room for the actors.
        EnvironmentFault: the environment raised in its constructor, or failed in each episode.
        ClusterError: Ray was lost, or an episode failed with several actors in a row.
    """
    if is_made(player.env):
        raise ConfigError(
            "num_actors: an environment that is already made stays in this process. Pass its id."
        )
    player.check_env()
    num_actors = min(arguments.num_actors, arguments.episodes)
    snapshot = player.snapshot
    settings = player.settings
    numerics = in_force(settings.get("numerics", "portable"))
    with numerics as variables, _session(num_actors, snapshot, check_signals) as session:
        # imports Ray, so only after the session has set the environment variables of Ray
        from dppo.transports.ray.evaluating import players_on_ray

        if variables and not session.started_here:
            session.options = {"runtime_env": {"env_vars": variables}}
        logger.info("%s play", counted(num_actors, "Ray actor"))
        arguments.log_beginning(player)
        limits = PlayLimits(
            episodes=arguments.episodes,
            num_actors=num_actors,
            timeout_s=settings.get("eval_timeout_s", EPISODE_S),
            hung_s=HUNG_S,
            licence_s=0.0 if settings.get("licences") is None else ENDING_S,
        )
        episode_player = _episode_player(player, arguments)
        with (
            tempfile.TemporaryDirectory(prefix="dppo-eval-") as logs,
            closing(players_on_ray(episode_player, session, limits, logs)) as players,
        ):
            players.begin(0, snapshot)
            _collect(players, results, (check_signals, session.check))


def _session(
    num_actors: int, snapshot: PolicySnapshot, check_signals: Callable[[], None]
) -> closing[RaySession]:
    actors = Actors(num_actors=num_actors)
    store_bytes = store_bytes_for(batch_size=0, num_parameters=snapshot.weights.size)
    return closing(
        RaySession(
            actors,
            demand_of(actors, Learners()),
            store_bytes=store_bytes,
            notify=logger.warning,
            check=check_signals,
        )
    )


def _episode_player(player: Player, arguments: EvaluationArguments) -> EpisodePlayer:
    settings = player.settings | player.objects
    acting_for = player.acting_for(arguments.play)
    num_samplers = settings.get("num_samplers", 0)
    layout = Layout.by_names(settings)
    episode_player = EpisodePlayer(
        player.env_settings, acting_for, arguments.play, num_samplers, layout
    )
    # errors name the arguments that the caller has passed
    episode_player.setting = "policy and env" if isinstance(player.policy, Controller) else "env"
    return episode_player


def _collect(
    players: ActorPlayers, results: PlayedEpisodes, checks: Sequence[Callable[[], None]]
) -> None:
    """Add the results of all episodes to `results`, and sort them by index; log a summary every few seconds."""
    began = time.monotonic()
    reported_at = began
    while not results.is_complete:
        for check in checks:
            check()
        for _, index, outcome in players.outcomes(WAIT_S):
            if isinstance(outcome, EnvironmentFault):
                results.leave_out(index, outcome)
            elif isinstance(outcome, DppoError):
                raise outcome
            else:
                results.episodes.append(outcome)
        now = time.monotonic()
        if now - reported_at >= REPORT_EVERY_S:
            reported_at = now
            logger.info("%s", results.summary(now - began))
    results.episodes.sort(key=lambda episode: episode.index)
