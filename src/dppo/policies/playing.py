"""Playing: episodes of a policy in one environment; and EpisodePlayer, which plays those of evaluations in training."""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from dppo import streams
from dppo.config.parts import Env
from dppo.envs.activity import ActivityRecord, Phase, place_of
from dppo.envs.checks.faults import making, user_traceback
from dppo.envs.episode import numbers_in
from dppo.envs.frames import SETTINGS, make_prepared
from dppo.envs.group import EnvGroup
from dppo.envs.make import close_in_time, joint_kind
from dppo.envs.rows import joint_of
from dppo.envs.spaces import describe_spaces
from dppo.envs.statistics import check_statistics
from dppo.errors import CheckpointError, ClusterError, ConfigError, EnvironmentFault
from dppo.policies.bounds import BoundCounter
from dppo.policies.policy import Policy, spaces_summary
from dppo.ppo.acting.agent import PPOAgent
from dppo.ppo.exchange.records import Episode, EpisodeInfo, PolicySnapshot
from dppo.ppo.networks.network import NetworkSpec
from dppo.process_state.borders import dppo_computes, guarded_steps
from dppo.signals import INTERRUPTIONS
from dppo.spaces.actions import Actions, MultiDiscreteActions, NestedActions
from dppo.spaces.spaces import Spaces, holds_float64
from dppo.streams import Stream
from dppo.user_code import in_a_line


class InfoSums:
    """Sums up numbers in the info of the env steps of an episode."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys
        self._totals = dict[str, float]()
        self._counts = dict[str, int]()
        self._last = dict[str, float]()

    def add(self, info: Any) -> None:
        """Add those of a step."""
        if not self._keys or not isinstance(info, dict):
            return
        for key, value in numbers_in({key: info[key] for key in self._keys if key in info}).items():
            self._totals[key] = self._totals.get(key, 0.0) + value
            self._counts[key] = self._counts.get(key, 0) + 1
            self._last[key] = value

    def result(self) -> dict[str, EpisodeInfo]:
        """Return what the numbers that occurred come to."""
        return {
            key: EpisodeInfo(total, total / self._counts[key], self._last[key]) for key, total in self._totals.items()
        }


def mean_of(rows: Sequence[InfoSums]) -> dict[str, EpisodeInfo]:
    """Return the mean over rows, such as agents, that have a number."""
    results = [infos.result() for infos in rows]
    keys = dict.fromkeys(key for result in results for key in result)
    return {
        key: EpisodeInfo(*map(fmean, zip(*(result[key] for result in results if key in result), strict=True)))
        for key in keys
    }


class Playing:
    """Plays episodes one after the other: of one environment, of all agents, or of the first row of a vector.

    Each follows from the seed and its index, whichever were played before.
    """

    progress: ActivityRecord | None = None
    """Records what the environment is doing."""

    def __init__(
        self, policy: Policy, env: Any, env_name: str, seed: int, *, deterministic: bool, info_keys: Sequence[str] = ()
    ) -> None:
        """Keep the arguments, as for `dppo.evaluate`; raise CheckpointError if the policy does not fit `env`."""
        self._joint = joint = joint_of(env, lambda: env) if joint_kind(env) else None
        rows: list[Any] = [env]
        if joint is not None:
            joint.once, joint.next_seed = True, lambda _: 0
            rows = joint.rows if joint.shared else joint.rows[:1]  # else each has episodes of its own
        check_spaces(policy.spaces, rows[0], env_name)
        self._policy, self._seed, self._deterministic = policy, seed, deterministic
        self._info_keys = info_keys
        self._infos = [InfoSums(info_keys)]
        self._at_bounds: BoundCounter | None = None  # of the episode that is being played
        group = EnvGroup(rows, policy.spaces, episode_seed=self._seed_of, owner=env_name)
        self._rows = [group.checked(row) for row in range(len(rows))]

    def _seed_of(self, _: int, episode: int) -> int:
        return streams.integer(self._seed, Stream.EVALUATION, episode)

    def play(self, episode: int) -> Iterator[Episode]:
        """Play an episode: yield it as it is after the reset and after each step; the last one is finished.

        The return of agents that share a policy is the mean of theirs.

        Raises:
            EnvironmentFault: the environment raised, or returned something invalid.
        """
        policy, rows, done, successes = self._policy, self._rows, False, list[bool | None]()
        generator = None if self._deterministic else streams.generator(self._seed, Stream.EVALUATION, episode)
        self._at_bounds = BoundCounter(policy.spaces.actions) if self._deterministic else None
        stored, state = np.empty(len(rows), policy.spaces.obs), policy.start(len(rows))
        if self._joint is not None:
            rows[0].env.first = None  # it resets all, whatever earlier episodes have left
        progress = self.progress or ActivityRecord()
        progress.enter(place_of(Phase.RESET), episode)
        self._infos = [InfoSums(self._info_keys) for _ in rows]
        for row in rows:
            row.reset(episode)
        for other in self._joint.rows[len(rows) :] if self._joint else ():
            other.kept = rows[0].env.kept  # shown where an episode of its own has ended
        while not done:
            yield self._episode(episode)
            for number, row in enumerate(rows):
                stored[number] = row.last_obs
            actions, outputs = policy.decide(stored, state, generator)
            if self._at_bounds is not None:
                self._at_bounds.add(actions)
            given, state = list(policy.spaces.actions.each(actions)), outputs.state
            progress.enter(place_of(Phase.STEP), episode, rows[0].length)
            self._advance(given)
            answers = [(row, row.step(action)) for row, action in zip(rows, given, strict=True)]
            for infos, (_, (*_, info)) in zip(self._infos, answers, strict=True):
                infos.add(info)
            ended = [row.finished(info, row.length) for row, (_, _, over, cut, info) in answers if over or cut]
            successes += [one.success for one in ended if one.success is not None]
            done = len(ended) == len(rows)
        yield self._episode(episode, all(successes) if successes else None)

    def _episode(self, episode: int, success: bool | None = None) -> Episode:
        episode_return = fmean(row.episode_return for row in self._rows)
        at_bounds = None if self._at_bounds is None else self._at_bounds.counts / len(self._rows)
        return Episode(
            0,
            episode,
            episode_return,
            self._rows[0].length,
            success,
            measured=mean_of(self._infos),
            at_bounds=at_bounds,
        )

    def _advance(self, actions: list[Any]) -> None:
        """Step all rows of one environment, if there are several; the first one raises what goes wrong."""
        if self._joint is not None:
            try:
                others = actions[:1] * (len(self._joint.rows) - len(actions))
                self._rows[0].guard.call(partial(self._joint.step, actions + others))
            except BaseException as error:
                self._rows[0].env.answer = error


def _compared(actions: Actions) -> Any:
    """Return all of an action space but the bounds of real numbers, which may differ."""
    if isinstance(actions, NestedActions):
        return actions.keys, [_compared(part) for part in actions.parts]
    return (actions.counts, actions.starts) if isinstance(actions, MultiDiscreteActions) else str(actions)


def check_spaces(trained: Spaces, env: Any, env_name: str) -> None:
    """Refuse an environment that the policy was not trained for."""
    setting: Any = "off" if trained.mask is None else "info" if trained.mask == "info" else "auto"
    obs_dtype: Any = "float64" if holds_float64(trained.obs) else "float32"
    found = describe_spaces(env, drop_obs=trained.dropped, action_mask=setting, obs_dtype=obs_dtype)
    differs = any(getattr(found, name) != getattr(trained, name) for name in ("obs", "categories", "one_of", "mask"))
    if differs or _compared(found.actions) != _compared(trained.actions):
        here, there = spaces_summary(found), spaces_summary(trained)
        there += " that differ, as in numbers of choices" if here == there else ""
        raise CheckpointError(
            f"{env_name} has {here}; the policy was trained with {there}. Use the environment of the run."
        )


class EpisodePlayer:
    """Plays episodes of evaluations, in any process, in an environment that it makes when it needs one."""

    number = 0
    """Of the actor, among those of evaluations."""
    progress: ActivityRecord | None = None
    """Records what the environment is doing."""
    setting = "eval_env_kwargs"
    """The setting to name if the spaces of the environment are not those of the policy."""

    def __init__(
        self, env: Env, spaces: Spaces, spec: NetworkSpec, seed: int, samplers: int, *, deterministic: bool,
        info_keys: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Keep the settings of the environment, those of evaluations included, and the spaces of the training.

        `samplers`: of the run, whose environments exist at the same time, with other numbers.
        """
        self._samplers = samplers
        self._info_keys = info_keys
        self._of, self._spaces, self._spec, self._seed, self._greedy = env, spaces, spec, seed, deterministic
        self._env: Any = None

    def play(self, policy: PolicySnapshot, episode: int, timeout_s: float, stepped: Any = int) -> Episode:
        """Play an episode; call `stepped` with its length so far after the reset and after each step.

        Raises:
            ConfigError: the environment cannot be made with these settings, or has other spaces.
            EnvironmentFault: the environment failed, and is closed.
            ClusterError: the episode was not over in time.
        """
        with dppo_computes(), guarded_steps(f"a step or reset of {self._of.env_name}"):
            return self._play(policy, episode, timeout_s, stepped)

    def _play(self, policy: PolicySnapshot, episode: int, timeout_s: float, stepped: Any) -> Episode:
        of, acting = self._of, Policy(self._spaces, PPOAgent(self._spec, self._spaces.mask), policy, {})
        try:
            if self._env is None:
                if self.progress is not None:
                    self.progress.enter(place_of(Phase.MAKE))
                prepared = {name: getattr(of, name) for name in SETTINGS}
                with making(f"evaluation ({of.env_name})", env_name=of.env_name):
                    how: dict[str, Any] = {"place": (self._samplers, self.number), "rows": 1, "seed": self._seed}
                    self._env = make_prepared(of.env_id, of.env_kwargs, prepared, **how)
                    check_statistics(self._env, of.running_statistics)
            until = time.monotonic() + timeout_s
            playing = Playing(
                acting, self._env, of.env_name, self._seed, deterministic=self._greedy, info_keys=self._info_keys
            )
            playing.progress = self.progress
            for so_far in playing.play(episode):
                stepped(so_far.length)
                if time.monotonic() > until:
                    at = f"its return was {so_far.episode_return:.1f} after {so_far.length:,} steps"
                    raise ClusterError(f"episode {episode} was not over after eval_timeout_s={timeout_s:g}: {at}")
            return so_far
        except CheckpointError as error:
            raise ConfigError(f"{self.setting}: {error}") from None
        except (ClusterError, ConfigError, EnvironmentFault, *INTERRUPTIONS):
            self.close()
            raise
        except BaseException as error:  # an environment may raise anything
            self.close()
            raise EnvironmentFault(f"{of.env_name}: {in_a_line(error)}", user_traceback(error)) from None

    def close(self) -> None:
        """Close the environment; the next episode makes another one."""
        env, self._env = self._env, None
        if env is not None:
            close_in_time([env])
