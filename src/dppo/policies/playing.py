"""Playing: episodes of a policy in one environment; and EpisodePlayer, which plays those of evaluations in training."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from dppo import streams
from dppo.config.parts import Env
from dppo.envs.checks.faults import making, user_traceback
from dppo.envs.checks.returned import BadResult, MaskReader
from dppo.envs.frames import SETTINGS, make_prepared
from dppo.envs.make import close_all
from dppo.envs.rows import Players
from dppo.envs.spaces import describe_spaces
from dppo.errors import CheckpointError, ClusterError, ConfigError, EnvironmentFault
from dppo.policies.policy import Policy, spaces_summary
from dppo.ppo.acting.agent import PPOAgent
from dppo.ppo.exchange.records import Episode, PolicySnapshot
from dppo.ppo.networks.network import NetworkSpec
from dppo.signals import INTERRUPTIONS
from dppo.spaces.spaces import Spaces, holds_float64
from dppo.streams import Stream
from dppo.user_code import in_a_line


class Playing:
    """Plays episodes one after the other. Each follows from the seed and its index, whichever were played before."""

    def __init__(self, policy: Policy, env: Any, env_name: str, seed: int, *, deterministic: bool) -> None:
        """Keep the arguments, as for `dppo.evaluate`; raise CheckpointError if the policy does not fit `env`."""
        self._players = Players(env)
        check_spaces(policy.spaces, self._players.rows[0], env_name)
        self._policy, self._env_name = policy, env_name
        self._seed, self._deterministic = seed, deterministic

    def play(self, episode: int) -> Iterator[Episode]:
        """Play an episode: yield it as it is after the reset and after each step; the last one is finished.

        The return of agents that share a policy is the mean of theirs.

        Raises:
            EnvironmentFault: the environment raised, or returned an invalid mask.
        """
        policy, spaces, rows = self._policy, self._policy.spaces, self._players.rows
        masks = MaskReader(rows[0], spaces) if spaces.mask in ("method", "info") else None
        generator = None if self._deterministic else streams.generator(self._seed, Stream.EVALUATION, episode)
        seed = streams.integer(self._seed, Stream.EVALUATION, episode)
        where = f"of episode {episode} (seed {seed})"
        total, length, done, states, successes = 0.0, 0, False, [None] * len(rows), list[bool]()
        at = f"reset {where}"
        seen = self._call(at, self._players.reset, seed)
        yield Episode(0, episode, total, length, None)
        while not done:
            actions = []
            for row, (obs, info) in enumerate(seen):
                mask = self._mask(masks, at, info)
                action = policy.act(obs, states[row], action_mask=mask, generator=generator)
                if policy.state_size:
                    action, states[row] = action
                actions.append(action)
            at = f"step {length} {where}"
            answers = self._call(at, self._players.step, actions)
            total += sum(float(answer[1]) for answer in answers)
            length += 1
            done = all(answer[2] or answer[3] for answer in answers)
            seen, ended = [one[::4] for one in answers], [one[4] for one in answers if one[2] or one[3]]
            ended = [info for info in ended if isinstance(info, dict) and info.get("is_success") is not None]
            successes += [bool(np.all(info["is_success"])) for info in ended]
            yield Episode(0, episode, total / len(rows), length, all(successes) if successes else None)

    def _mask(self, masks: MaskReader | None, where: str, info: Any) -> np.ndarray | None:
        try:
            return None if masks is None else masks.read(info)
        except BadResult as error:
            raise EnvironmentFault(f"{self._env_name}: {where} returned {error}.") from None

    def _call(self, where: str, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            fault = f"{self._env_name}: {where} raised {in_a_line(error)}"
            raise EnvironmentFault(fault, user_traceback(error)) from None


def check_spaces(trained: Spaces, env: Any, env_name: str) -> None:
    """Refuse an environment that the policy was not trained for."""
    setting: Any = "off" if trained.mask is None else "info" if trained.mask == "info" else "auto"
    obs_dtype: Any = "float64" if holds_float64(trained.obs) else "float32"
    found = describe_spaces(env, drop_obs=trained.dropped, action_mask=setting, obs_dtype=obs_dtype)
    if not trained.same_observations(found) or str(found.actions) != str(trained.actions):
        raise CheckpointError(
            f"{env_name} has {spaces_summary(found)}; the policy was trained with {spaces_summary(trained)}. Use the "
            f"environment of the run."
        )


class EpisodePlayer:
    """Plays episodes of evaluations, in any process, in an environment that it makes when it needs one."""

    def __init__(self, env: Env, spaces: Spaces, spec: NetworkSpec, seed: int, *, deterministic: bool) -> None:
        """Keep the settings of the environment, those of evaluations included, and the spaces of the training."""
        self._of, self._spaces, self._spec, self._seed, self._greedy = env, spaces, spec, seed, deterministic
        self._env: Any = None

    def play(self, policy: PolicySnapshot, episode: int, timeout_s: float, stepped: Any = int) -> Episode:
        """Play an episode; call `stepped` with its length so far after the reset and after each step.

        Raises:
            ConfigError: the environment cannot be made with these settings, or has other spaces.
            EnvironmentFault: the environment failed, and is closed.
            ClusterError: the episode was not over in time.
        """
        try:
            env, until = self._made(), time.monotonic() + timeout_s
            acting = Policy(self._spaces, PPOAgent(self._spec, self._spaces.mask), policy, {})
            for so_far in Playing(acting, env, self._of.env_name, self._seed, deterministic=self._greedy).play(episode):
                stepped(so_far.length)
                if time.monotonic() > until:
                    at = f"its return was {so_far.episode_return:.1f} after {so_far.length:,} steps"
                    raise ClusterError(f"episode {episode} was not over after eval_timeout_s={timeout_s:g}: {at}")
            return so_far
        except CheckpointError as error:
            raise ConfigError(f"eval_env_kwargs: {error}") from None
        except (ClusterError, ConfigError, EnvironmentFault, *INTERRUPTIONS):
            self.close()
            raise
        except BaseException as error:  # an environment may raise anything
            self.close()
            raise EnvironmentFault(f"{self._of.env_name}: {in_a_line(error)}", user_traceback(error)) from None

    def _made(self) -> Any:
        if self._env is None:
            of = self._of
            with making(f"evaluation ({of.env_name})"):
                prepared = {name: getattr(of, name) for name in SETTINGS}
                self._env = make_prepared(of.env_id, of.env_kwargs, prepared, rows=1, seed=self._seed)
        return self._env

    def close(self) -> None:
        """Close the environment; the next episode makes another one."""
        env, self._env = self._env, None
        if env is not None:
            close_all([env])
