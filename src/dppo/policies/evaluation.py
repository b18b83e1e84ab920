"""Play episodes with a policy or a controller; `dppo.evaluate` and the command `dppo eval` share this code."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from dppo.config.arguments import with_answers
from dppo.config.parts.processes import EVAL_EPISODES
from dppo.envs.activity import ActivityRecord, Phase, place_of
from dppo.envs.closing import close_in_time
from dppo.envs.names import EnvId
from dppo.envs.sharing import end_use
from dppo.envs.silence import SilenceWatch, name_env
from dppo.envs.statistics import describe_statistics, running_statistics
from dppo.errors import EnvironmentFault, counted
from dppo.files import user_path
from dppo.log import logger, showing_warnings
from dppo.numerics.arithmetic import limit_blas
from dppo.plugins import plugin
from dppo.policies.acting import PlaySettings
from dppo.policies.arguments import REPORT_EVERY_S, EvaluationArguments, PlayedEpisodes
from dppo.policies.bounds import element_at_bound
from dppo.policies.controller import Controller
from dppo.policies.player import Player, find_player, is_made
from dppo.policies.playing import Playing
from dppo.policies.policy import Policy
from dppo.ppo.exchange.records import Episode, success_rate
from dppo.ppo.networks.network import ModelClass
from dppo.process_state.borders import dppo_computes, guarded_steps, take_changes
from dppo.records.observer import Evaluation, Result
from dppo.records.terminal.figures import number
from dppo.signals import ending_on_signals


@with_answers
@showing_warnings()
@dppo_computes()
def evaluate(  # noqa: PLR0913  the one function for all ways to play
    policy: Policy | Result | str | Path | Any,
    env: EnvId | Any = None,
    episodes: int = EVAL_EPISODES,
    *,
    seed: int = 0,
    deterministic: bool = True,
    env_kwargs: Mapping[str, Any] | None = None,
    model: ModelClass | None = None,
    trust: bool = False,
    render: bool = False,
    video: str | Path | None = None,
    num_actors: int = 0,
    info_keys: Sequence[str] | None = None,
) -> Evaluation:
    """Play episodes with a trained policy or with a controller of your own, and return their returns and lengths.

    Args:
        policy: a policy, the result of a run, the folder of a run, or one of its checkpoints. Or a controller: a
            function `action = f(obs)`, a class or an object with `act(obs)` and perhaps `reset()`, or the name of one,
            `module:name` or `file.py:name`. It sees observations, and returns actions, as the environment defines them.
        env: an id, a callable that returns an environment, or an environment, which stays open; None: the run's own.
            For a controller, also the result of a run or the `Path` of its folder, whose environment it plays in.
        seed: seed of the episodes and of sampled actions; independent of the seed of the training.
        deterministic: take the most likely action; False samples actions, as in training.
        env_kwargs: arguments of the environment, added to those of the run's evaluations unless `env` is another one.
        model: the class of the run's own network, in place of the one that the checkpoint names.
        trust: import and call what the settings of a run's folder name. Not needed for plain Gymnasium ids, for a
            `Result`, or for an `env` and a `model` that you name.
        render: show the environment in a window.
        video: an MP4 file to write, with the first 9 episodes side by side; needs PyAV, and no display.
        num_actors: actors on Ray that play the episodes, with the same results; 0 plays them in this process.
        info_keys: names of numbers in the info of steps, for `Evaluation.info`; None: as in the run.

    Raises:
        ConfigError: an invalid argument, or a run whose code is not trusted.
        CheckpointError: there is no checkpoint, or the policy has other spaces than the environment.
        EnvironmentFault: the environment failed in its constructor or in all episodes, or it failed and `env` is an
            environment, which cannot be made again. Otherwise, the episode is left out. Carries its traceback.
        ControllerFault: the controller raised, or returned an invalid action.
    """
    film = None if video is None else user_path(video)
    play = PlaySettings(seed, deterministic)
    arguments = EvaluationArguments(episodes, play, render, film, num_actors)
    arguments.check()
    player = find_player(policy, env, env_kwargs, model, trust=trust)
    keys = tuple(player.settings.get("info_keys", ()) if info_keys is None else info_keys)
    arguments = replace(arguments, play=replace(play, info_keys=keys))
    player.check(play)
    results = PlayedEpisodes(episodes)
    with ending_on_signals(results.summary) as check_signals, results.logged_on_error():
        if num_actors:
            from dppo.policies.on_actors import play_on_actors

            play_on_actors(player, arguments, results, check_signals)
        else:
            _play_here(player, arguments, results, check_signals)
    _log_actions_at_bound(player.policy, results.episodes)
    return _result(player.env_name, results, keys)


def _result(env_name: str, results: PlayedEpisodes, keys: Sequence[str]) -> Evaluation:
    episodes = results.episodes
    infos = {
        key: tuple(episode.measured[key] for episode in episodes if key in episode.measured)
        for key in keys
    }
    for key, numbers in infos.items():
        if not numbers:
            logger.warning("info_keys=%s: is not a number in the info of any step", key)
    return Evaluation(
        env_name,
        tuple(episode.episode_return for episode in episodes),
        tuple(episode.length for episode in episodes),
        {key: numbers for key, numbers in infos.items() if numbers},
        tuple(sorted(results.faults)),
        success_rate(episodes),
    )


def _play_here(
    player: Player,
    arguments: EvaluationArguments,
    results: PlayedEpisodes,
    check_signals: Callable[[], None],
) -> None:
    """Play all episodes in an environment of this process, and add them to `results`."""
    progress = ActivityRecord()
    with (
        limit_blas(1),  # as in the evaluations of a run, whose returns are the same
        SilenceWatch(progress, name_env(player.env_name)),
        closing(_Stage(player, arguments, progress)) as stage,
    ):
        stage.make()
        stage.warn_of_running_statistics()
        arguments.log_beginning(player)
        film = None
        if arguments.video is not None:
            repeat = player.settings.get("action_repeat", 1)
            film = plugin("video")(arguments.video, stage.env, arguments.episodes, repeat)
        with guarded_steps(f"a step or reset of {player.env_name}"):
            for so_far in _episodes(stage, results):
                check_signals()
                if film is not None:
                    film.env = stage.env
                    film.add(so_far.index)
        for change in take_changes():
            logger.warning("%s.", change)
        if film is not None:
            film.write()


class _Stage:
    """An environment of this process, and what plays in it."""

    env: Any = None
    playing: Playing

    def __init__(
        self, player: Player, arguments: EvaluationArguments, progress: ActivityRecord
    ) -> None:
        self._player = player
        self._arguments = arguments
        self._progress = progress

    def make(self) -> None:
        """Make the environment; raise CheckpointError if the policy does not fit it."""
        player = self._player
        settings = self._arguments.play
        self._progress.enter(place_of(Phase.MAKE))
        self.env = player.make(self._arguments.render_mode, settings.seed)
        self._progress.enter(place_of(Phase.IDLE))
        acting = player.acting_for(settings)(player.snapshot)
        self.playing = Playing(acting, self.env, player.env_name, settings, self._progress)

    @property
    def is_callers(self) -> bool:
        """True if the caller has made the environment: it stays open, and cannot be made again."""
        return is_made(self._player.env)

    def warn_of_running_statistics(self) -> None:
        wrappers = running_statistics(self.env)
        if wrappers:
            logger.warning(
                "%s: %s: observations or rewards are not as in training",
                self._player.env_name,
                describe_statistics(wrappers),
            )

    def close(self) -> None:
        """Close the environment, if there is one and it is not the caller's."""
        env = self.env
        self.env = None
        if env is None:
            return
        if self.is_callers:
            end_use(env)
        else:
            self._progress.enter(place_of(Phase.CLOSE))
            close_in_time([env])


def _log_actions_at_bound(policy: Policy | Controller, episodes: list[Episode]) -> None:
    if not isinstance(policy, Policy):
        return
    element = element_at_bound(policy.spaces.actions, episodes)
    if element is not None and element.is_frequent:
        logger.warning("%s", element)


def _episodes(stage: _Stage, results: PlayedEpisodes) -> Iterator[Episode]:
    """Play and add to `results`; yield each episode after its reset and each step; log summaries."""
    began = time.monotonic()
    reported = began
    for episode in range(results.total):
        try:
            if stage.env is None:
                stage.make()
            for so_far in stage.playing.play(episode):
                yield so_far
                if so_far.length and time.monotonic() - reported >= REPORT_EVERY_S:
                    reported = time.monotonic()
                    current = f"{counted(so_far.length, 'step')}, return {number(so_far.episode_return)} so far"
                    summary = results.summary(reported - began)
                    logger.info("%s; the current one: %s", summary, current)
        except EnvironmentFault as fault:
            if stage.is_callers:
                raise
            results.leave_out(episode, fault)
            stage.close()
        else:
            results.episodes.append(so_far)
