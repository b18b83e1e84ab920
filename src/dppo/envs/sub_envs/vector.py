"""JointVector: a vector environment with the API of gymnasium.vector."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

from dppo.envs.checks.masks import METHOD
from dppo.envs.checks.returned import PARTS, BadResult, check_parts
from dppo.envs.episode import SkippedStep
from dppo.envs.sub_envs.joint import JointEnv, SubEnv
from dppo.errors import ConfigError
from dppo.spaces.spaces import MASK


class JointVector(JointEnv):
    """A vector environment.

    If the vector resets single sub-environments on demand (`options={"reset_mask": ...}`), each episode has its own
    seed, as in a single environment. Any other vector resets them by itself: in the mode SAME_STEP in the step that
    ends an episode, in the mode NEXT_STEP in the following step, in which the sub-environment is skipped.
    """

    def __init__(self, env: Any, make: Callable[[], Any]) -> None:
        """Take over `env`; raise ConfigError if it does not declare when it resets its sub-environments."""
        super().__init__(env, make, int(env.num_envs))
        self._num_sub_envs = len(self.sub_envs)
        self.observation_space = env.single_observation_space
        self.action_space = env.single_action_space
        base = env.unwrapped
        self._mode = env.metadata.get("autoreset_mode")
        if self._mode not in list(AutoresetMode):
            raise ConfigError(
                f"env_id: made a vector environment with metadata['autoreset_mode']={self._mode!r}, and it has to be "
                f"one of {', '.join(map(str, AutoresetMode))}."
            )
        self._same_step = self._mode is AutoresetMode.SAME_STEP
        self._takes_seeds = isinstance(base, SyncVectorEnv | AsyncVectorEnv)
        """True if the reset of the vector takes a seed for each sub-environment."""
        if self._takes_seeds:
            self.unread_masks = any(base.call("has_wrapper_attr", METHOD))
            self._obeys = bool(getattr(base, "shared_memory", True))
        else:
            self.unread_masks = hasattr(base, METHOD)
            self._obeys = type(base).__module__.startswith("ale_py")
        """A sub-environment that was reset on demand is not reset again in the next step, as Gymnasium does without
        shared memory."""
        self._seeded = self._mode is AutoresetMode.DISABLED or (self._obeys and not self._same_step)
        """Each episode has a seed of its own."""
        self.spec = env.spec if self._seeded else SimpleNamespace(nondeterministic=True)

    def step(self, actions: Sequence[Any]) -> None:
        """Step the vector, and reset sub-environments whose episodes end."""
        batch: Any = create_empty_array(self.action_space, len(actions))
        answer = self.env.step(concatenate(self.action_space, actions, batch))
        self._check_step(answer)
        self.last_obs, rewards, terminated, truncated, info = answer
        columns = [np.asarray(column).tolist() for column in (rewards, terminated, truncated)]
        seeds: dict[int, int] = {}  # of sub-environments that are reset after this step
        for sub_env, reward, is_terminated, is_truncated in zip(
            self.sub_envs, *columns, strict=True
        ):
            ended = is_terminated or is_truncated
            reads_info = MASK in info or ended or sub_env.is_waiting
            obs, sub_env_info = self._result(self.last_obs, info if reads_info else {}, sub_env)
            if sub_env.is_waiting:
                sub_env.reset_result = obs, sub_env_info
                sub_env.step_result = SkippedStep(is_last=True)
                continue
            if ended and self._same_step:
                if "final_obs" not in info:
                    raise BadResult(
                        f"no info['final_obs'] in the step that ended an episode, as {self._mode} needs it. If it is "
                        "reset in the following step, set metadata['autoreset_mode'] to AutoresetMode.NEXT_STEP"
                    )
                sub_env.reset_result = obs, sub_env_info
                obs, sub_env_info = self._result(
                    info["final_obs"], info.get("final_info", {}), sub_env
                )
                if isinstance(obs, np.ndarray) and obs.dtype.hasobject:
                    raise BadResult(
                        "an info['final_obs'] with dtype object inside each observation, which np.array([...], "
                        "dtype=object) makes of observations of one shape. Fill np.empty(num_envs, dtype=object)"
                    )
            elif ended and self._seeded:
                seeds[sub_env.index] = self.next_seed(sub_env.index)
                obs = deepcopy(obs)  # the reset below may write to the same array
            sub_env.step_result = obs, reward, is_terminated, is_truncated, sub_env_info
            sub_env.is_waiting = bool(ended) and not (self._same_step or self._seeded)
        if seeds:
            self._reset(seeds)

    def begin(self, sub_env: SubEnv, seed: int) -> None:
        """Reset this sub-environment; reset all if a single one cannot be reset, or none has been reset yet."""
        if not self._seeded:
            self._reset_all(seed)
        elif self.last_obs is None:
            seeds = {other.index: self.next_seed(other.index) for other in self.sub_envs}
            self._reset(seeds | {sub_env.index: seed})
        else:
            self._reset({sub_env.index: seed})

    def _reset_all(self, seed: int) -> None:
        config = getattr(self.env.unwrapped, "config", None)
        arguments = {"seed": seed}
        if isinstance(config, Mapping) and {"seed", "max_num_players"} <= config.keys():
            arguments = {}  # EnvPool takes its seed when it is made
        self.last_obs, info = self._checked_reset(self.env.reset(**arguments))
        self.restarts += 1
        self._note_resets(self.sub_envs, info)

    def _reset(self, seeds: Mapping[int, int]) -> None:
        """Reset only these sub-environments: in one call if the vector accepts a seed for each."""
        if self._takes_seeds:
            self._reset_sub_envs(seeds, [seeds.get(sub_env.index) for sub_env in self.sub_envs])
            return
        if self.last_obs is None:  # some vectors must begin with all sub-environments
            self.last_obs, _ = self._checked_reset(self.env.reset(seed=min(seeds.values())))
        for index, seed in seeds.items():
            self._reset_sub_envs([index], seed)

    def _reset_sub_envs(self, indices: Iterable[int], seed: Any) -> None:
        mask = np.isin(np.arange(len(self.sub_envs)), list(indices))
        # the reset may write to the same array
        obs_before = None if self._obeys else copy(self.last_obs)
        self.last_obs, info = self._checked_reset(
            self.env.reset(seed=seed, options={"reset_mask": mask})
        )
        if isinstance(obs_before, np.ndarray) and (obs_before != self.last_obs)[~mask].any():
            raise ValueError(
                "reset(options={'reset_mask': ...}) changed observations of sub-environments outside of the mask"
            )
        self._note_resets([self.sub_envs[index] for index in indices], info)

    def _note_resets(self, sub_envs: Iterable[SubEnv], info: Any) -> None:
        for sub_env in sub_envs:
            sub_env.reset_result = self._result(self.last_obs, info, sub_env)

    def _check_step(self, answer: Any) -> None:
        """Raise BadResult unless a step returned five parts, and a reward and two flags for each sub-environment."""
        check_parts(answer, step=True)
        obs, *columns, _ = answer
        for part, column in zip(PARTS[1:4], columns, strict=True):
            shape = np.shape(column)
            if shape != (self._num_sub_envs,):
                raise BadResult(
                    f"`{part}` of shape {shape} instead of ({self._num_sub_envs},), one for each sub-environment"
                )
        self._check_size(obs)

    def _checked_reset(self, answer: Any) -> Any:
        check_parts(answer, step=False)
        self._check_size(answer[0])
        return answer

    def _check_size(self, obs: Any) -> None:
        """Raise BadResult if the observations are an array of another number of sub-environments."""
        if isinstance(obs, np.ndarray) and obs.shape[:1] != (self._num_sub_envs,):
            raise BadResult(
                f"observations of shape {obs.shape} instead of ({self._num_sub_envs}, ...), one for "
                f"each sub-environment"
            )

    def _result(
        self, obs: Any, info: Mapping[str, Any], sub_env: SubEnv
    ) -> tuple[Any, dict[str, Any]]:
        return _part_of(obs, sub_env.index, self.observation_space), _info_of(
            info, sub_env.index, self._num_sub_envs
        )


def _info_of(info: Mapping[str, Any], index: int, num_sub_envs: int) -> dict[str, Any]:
    """Return the items of `info` that hold a value for each sub-environment, and that of this one, if it has one."""
    items: dict[str, Any] = {}
    for key, value in info.items():
        name = str(key)
        # `_name` holds, for each sub-environment, whether `name` has a value
        if name.startswith("_") and name[1:] in info:
            continue
        if isinstance(value, Mapping):
            items[key] = _info_of(value, index, num_sub_envs)
            continue
        has_value = info.get(f"_{name}")
        is_by_sub_env = getattr(value, "shape", ())[:1] == (num_sub_envs,)
        if is_by_sub_env and (has_value is None or has_value[index]):
            items[key] = value[index]
    return items


def _part_of(obs: Any, index: int, space: gym.Space[Any] | None) -> Any:
    """Return one of many observations of `space`; observations that are not arrays of numbers are in a tuple.

    Parts that the space does not have are refused later, by name.
    """
    if isinstance(space, gym.spaces.Dict) and isinstance(obs, Mapping):
        return {name: _part_of(part, index, space.spaces.get(name)) for name, part in obs.items()}
    if isinstance(space, gym.spaces.Tuple) and isinstance(obs, tuple):
        return tuple(
            _part_of(part, index, inner)
            for part, inner in zip_longest(obs, space.spaces[: len(obs)])
        )
    return obs[index]
