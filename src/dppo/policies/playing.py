"""Playing: episodes of a policy in one environment; and EpisodePlayer, for evaluations in training."""

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

from dppo import streams
from dppo.config.parts import Env
from dppo.envs.activity import ActivityRecord, Phase, place_of
from dppo.envs.checks.faults import making, user_traceback
from dppo.envs.closing import close_in_time
from dppo.envs.episode import GroupSettings, InfoMeter, SkippedStep
from dppo.envs.instance import Instance
from dppo.envs.preparation import make_prepared
from dppo.envs.statistics import check_statistics
from dppo.envs.sub_envs.choice import adapted, sub_envs_of
from dppo.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    ControllerFault,
    EnvironmentFault,
)
from dppo.policies.acting import Acting, ActingFor, PlaySettings
from dppo.ppo.exchange.records import ControllerTurn, Episode, EpisodeInfo, PolicySnapshot
from dppo.process_state.borders import dppo_computes, guarded_steps
from dppo.signals import INTERRUPTIONS
from dppo.slots.layout import PLAIN, Layout
from dppo.streams import Stream
from dppo.user_code import in_a_line


def mean_infos(meters: Sequence[InfoMeter]) -> dict[str, EpisodeInfo]:
    """Average each info over the sub-environments, such as agents, that report it."""
    by_key: dict[str, list[EpisodeInfo]] = {}
    for meter in meters:
        for key, info in meter.sums.items():
            mean_info = EpisodeInfo(info.total, info.total / info.steps, info.last)
            by_key.setdefault(key, []).append(mean_info)
    return {
        key: EpisodeInfo(*map(fmean, zip(*infos, strict=True))) for key, infos in by_key.items()
    }


class Playing:
    """Play episodes one after the other: of an environment, all agents, or the first sub-environment of a vector.

    Each follows from the seed and its index, whichever were played before.
    """

    def __init__(
        self,
        acting: Acting,
        env: Any,
        env_name: str,
        settings: PlaySettings,
        progress: ActivityRecord | None = None,
    ) -> None:
        """Prepare; raise CheckpointError if a policy does not fit `env`, whose activity `progress` records."""
        self._acting = acting
        self._settings = settings
        self._progress = ActivityRecord() if progress is None else progress
        env = adapted(env, lambda: env)
        spaces = acting.spaces_of(env, env_name)
        self._sub_envs = sub_envs_of([env], GroupSettings(env_name, spaces, self._seed_of))
        self._played_envs = self._sub_envs.played_envs()
        self._meters = [InfoMeter(settings.info_keys)]

    def _seed_of(self, _: int, episode: int) -> int:
        return streams.integer(self._settings.seed, Stream.EVALUATION, episode)

    def play(self, episode: int) -> Iterator[Episode]:
        """Play an episode: yield it as it is after the reset and after each step; the last one is finished.

        The return of agents that share a policy is the mean of theirs.

        Raises:
            EnvironmentFault: the environment raised, or returned something invalid.
            ControllerFault: a controller raised, or returned something invalid.
        """
        sub_envs = self._played_envs
        self._meters = [InfoMeter(self._settings.info_keys) for _ in sub_envs]
        self._acting.begin(sub_envs, episode)
        self._progress.enter(place_of(Phase.RESET), episode)
        for sub_env in sub_envs:
            sub_env.reset(episode)
        successes: list[bool] = []
        done = False
        while not done:
            yield self._episode(episode)
            actions = self._acting.actions(sub_envs)
            self._progress.enter(place_of(Phase.STEP), episode, sub_envs[0].length)
            done = self._step(actions, successes)
        yield self._episode(episode, all(successes) if successes else None)

    def _step(self, actions: Sequence[Any], successes: list[bool]) -> bool:
        """Step all sub-environments, and record the success of episodes that end; return whether all of them end."""
        num_sub_envs = len(self._sub_envs.envs)
        if len(actions) < num_sub_envs:  # the other sub-environments of a vector take some action
            actions = [*actions] * num_sub_envs
        step_arguments = self._sub_envs.step_arguments(actions)
        num_ended = 0
        for sub_env, meter, argument in zip(
            self._played_envs, self._meters, step_arguments, strict=False
        ):
            try:
                _, _, terminated, truncated, info = sub_env.step(argument)
            except SkippedStep as skipped:
                num_ended += int(skipped.is_last)
                continue
            meter.add(info)
            if terminated or truncated:
                num_ended += 1
                success = sub_env.finished(info, sub_env.length).success
                if success is not None:
                    successes.append(success)
        return num_ended == len(self._played_envs)

    def _episode(self, episode: int, success: bool | None = None) -> Episode:
        return Episode(
            env=0,
            index=episode,
            episode_return=fmean(sub_env.episode_return for sub_env in self._played_envs),
            length=self._played_envs[0].length,
            success=success,
            measured=mean_infos(self._meters),
            at_bounds=self._acting.at_bounds,
        )


class EpisodePlayer:
    """Play episodes of evaluations, in any process, in an environment that it makes when it needs one."""

    number = 0
    """Index of the actor among the actors for evaluations."""
    progress: ActivityRecord | None = None
    """Records what the environment is doing."""
    setting = "eval_env_kwargs"
    """The setting to name if the policy has other spaces than the environment."""

    def __init__(
        self,
        env: Env,
        acting_for: ActingFor,
        settings: PlaySettings,
        num_samplers: int,
        layout: Layout = PLAIN,
    ) -> None:
        """Keep the settings of the environment, with its settings for evaluations, and what plays in it.

        `num_samplers`: samplers of the run, whose environments exist at the same time, with other numbers. `layout`:
        ranks of the environment, and their cores.
        """
        self._env_settings = env
        self._acting_for = acting_for
        self._settings = settings
        self._num_samplers = num_samplers
        self.layout = layout
        self._env: Any = None

    def play(
        self,
        policy: PolicySnapshot | ControllerTurn,
        episode: int,
        timeout_s: float,
        stepped: Callable[[int], object] = int,
    ) -> Episode:
        """Play an episode; call `stepped` with its length so far after the reset and after each step.

        Raises:
            ConfigError: the environment cannot be made with these settings, or has other spaces.
            EnvironmentFault: the environment failed, and is closed.
            ControllerFault: a controller failed.
            ClusterError: the episode was not over in time.
        """
        env_name = self._env_settings.env_name
        try:
            with dppo_computes(), guarded_steps(f"a step or reset of {env_name}"):
                return self._play(policy, episode, timeout_s, stepped)
        except CheckpointError as error:
            raise ConfigError(f"{self.setting}: {error}") from None
        except (ClusterError, ConfigError, ControllerFault, EnvironmentFault, *INTERRUPTIONS):
            self.close()
            raise
        except BaseException as error:  # an environment may raise anything
            self.close()
            raise EnvironmentFault(
                f"{env_name}: {in_a_line(error)}", user_traceback(error)
            ) from None

    def _play(
        self,
        policy: PolicySnapshot | ControllerTurn,
        episode: int,
        timeout_s: float,
        stepped: Callable[[int], object],
    ) -> Episode:
        acting = self._acting_for(policy)
        if self._env is None:
            self._env = self._make()
        until = time.monotonic() + timeout_s
        playing = Playing(
            acting, self._env, self._env_settings.env_name, self._settings, self.progress
        )
        for so_far in playing.play(episode):
            stepped(so_far.length)
            if so_far.length and isinstance(policy, ControllerTurn) and policy.first_step_only:
                break
            if time.monotonic() > until:
                at = f"its return was {so_far.episode_return:,.6g} after {so_far.length:,} steps"
                raise ClusterError(
                    f"episode {episode} was not over after eval_timeout_s={timeout_s:g}: {at}"
                )
        return so_far

    def _make(self) -> Any:
        if self.progress is not None:
            self.progress.enter(place_of(Phase.MAKE))
        env_settings = self._env_settings
        instance = Instance(
            self._num_samplers,
            self.number,
            self._settings.seed,
            num_sub_envs=1,
            layout=self.layout,
            progress=self.progress or ActivityRecord(),
        )
        with making(f"evaluation ({env_settings.env_name})", env_name=env_settings.env_name):
            env = make_prepared(env_settings, instance)
            check_statistics(env, env_settings.running_statistics)
        if self.progress is not None:
            self.progress.enter(place_of(Phase.IDLE))
        return env

    def close(self) -> None:
        """Close the environment; the next episode makes another one."""
        env = self._env
        self._env = None
        if env is not None:
            close_in_time([env])
