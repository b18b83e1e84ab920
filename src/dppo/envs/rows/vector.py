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
from dppo.envs.rows.joint import JointEnv, Row
from dppo.errors import ConfigError
from dppo.spaces.spaces import MASK


class JointVector(JointEnv):
    """A vector environment.

    One that resets some of its rows when asked to (`options={"reset_mask": ...}`) gives each episode a seed of its own,
    as a single environment does. Any other resets them by itself: in the mode SAME_STEP in the step that ends an
    episode, in the mode NEXT_STEP in the step after it, in which the row is skipped.
    """

    def __init__(self, made: Any, make: Callable[[], Any]) -> None:
        """Take over `made`; raise ConfigError if it does not declare when it resets its rows."""
        super().__init__(made, make, int(made.num_envs))
        self._num_rows = len(self.rows)
        self.observation_space = made.single_observation_space
        self.action_space = made.single_action_space
        base = made.unwrapped
        self._mode = made.metadata.get("autoreset_mode")
        if self._mode not in list(AutoresetMode):
            raise ConfigError(
                f"env_id: made a vector environment with metadata['autoreset_mode']={self._mode!r}, and it has to be "
                f"one of {', '.join(map(str, AutoresetMode))}."
            )
        self._same_step = self._mode is AutoresetMode.SAME_STEP
        self._takes_seeds = isinstance(base, SyncVectorEnv | AsyncVectorEnv)
        """True if the reset of the vector takes a seed for each row."""
        if self._takes_seeds:
            self.unread_masks = any(base.call("has_wrapper_attr", METHOD))
            self._obeys = bool(getattr(base, "shared_memory", True))
        else:
            self.unread_masks = hasattr(base, METHOD)
            self._obeys = type(base).__module__.startswith("ale_py")
        """A row that was reset on demand is not reset again in the next step; Gymnasium's is, without shared memory."""
        self._seeded = self._mode is AutoresetMode.DISABLED or (self._obeys and not self._same_step)
        """Each episode has a seed of its own."""
        self.spec = made.spec if self._seeded else SimpleNamespace(nondeterministic=True)

    def step(self, actions: Sequence[Any]) -> None:
        """Step the vector, and reset rows whose episodes end."""
        batch: Any = create_empty_array(self.action_space, len(actions))
        answer = self.env.step(concatenate(self.action_space, actions, batch))
        self._check_step(answer)
        self.last, rewards, terminated, truncated, info = answer
        columns = [np.asarray(column).tolist() for column in (rewards, terminated, truncated)]
        seeds: dict[int, int] = {}  # of rows that are reset after this step
        for row, reward, is_terminated, is_truncated in zip(self.rows, *columns, strict=True):
            ended = is_terminated or is_truncated
            reads_info = MASK in info or ended or row.waiting
            obs, row_info = self._row(self.last, info if reads_info else {}, row)
            if row.waiting:
                row.first = obs, row_info
                row.answer = SkippedStep(over=True)
                continue
            if ended and self._same_step:
                if "final_obs" not in info:
                    raise BadResult(
                        f"no info['final_obs'] in the step that ended an episode, as {self._mode} needs it"
                    )
                row.first = obs, row_info
                obs, row_info = self._row(info["final_obs"], info.get("final_info", {}), row)
            elif ended and self._seeded:
                seeds[row.index] = self.next_seed(row.index)
                obs = deepcopy(obs)  # the reset below may write to the same array
            row.answer = obs, reward, is_terminated, is_truncated, row_info
            row.waiting = bool(ended) and not (self._same_step or self._seeded)
        if seeds:
            self._reset(seeds)

    def begin(self, row: Row, seed: int) -> None:
        """Reset this row; reset all rows if a single one cannot be reset, or none has been reset yet."""
        if not self._seeded:
            self._reset_all(seed)
        elif self.last is None:
            seeds = {each.index: self.next_seed(each.index) for each in self.rows}
            self._reset(seeds | {row.index: seed})
        else:
            self._reset({row.index: seed})

    def _reset_all(self, seed: int) -> None:
        config = getattr(self.env.unwrapped, "config", None)
        # EnvPool
        has_fixed_seed = (
            isinstance(config, Mapping) and {"seed", "max_num_players"} <= config.keys()
        )
        self.last, info = self._checked_reset(
            self.env.reset() if has_fixed_seed else self.env.reset(seed=seed)
        )
        self.restarts += 1
        self._note_resets(self.rows, info)

    def _reset(self, seeds: Mapping[int, int]) -> None:
        """Reset these rows and no others, at once where each may have a seed of its own."""
        if self._takes_seeds:
            self._reset_rows(seeds, [seeds.get(row.index) for row in self.rows])
            return
        if self.last is None:  # some must begin with all rows
            self.last, _ = self._checked_reset(self.env.reset(seed=min(seeds.values())))
        for index, seed in seeds.items():
            self._reset_rows([index], seed)

    def _reset_rows(self, indices: Iterable[int], seed: Any) -> None:
        mask = np.isin(np.arange(len(self.rows)), list(indices))
        before = self.last if self._obeys else copy(self.last)  # it may write to the same array
        self.last, info = self._checked_reset(
            self.env.reset(seed=seed, options={"reset_mask": mask})
        )
        if (
            not self._obeys
            and isinstance(before, np.ndarray)
            and (before != self.last)[~mask].any()
        ):
            raise ValueError(
                "reset(options={'reset_mask': ...}) changed observations of rows outside of the mask"
            )
        self._note_resets([self.rows[index] for index in indices], info)

    def _note_resets(self, rows: Iterable[Row], info: Any) -> None:
        for row in rows:
            row.first = self._row(self.last, info, row)

    def _check_step(self, answer: Any) -> None:
        """Raise BadResult unless a step returned five parts, and a reward and two flags for each row."""
        check_parts(answer, step=True)
        obs, *columns, _ = answer
        for part, column in zip(PARTS[1:4], columns, strict=True):
            shape = np.shape(column)
            if shape != (self._num_rows,):
                raise BadResult(
                    f"`{part}` of shape {shape} instead of ({self._num_rows},), one for each row"
                )
        self._check_rows(obs)

    def _checked_reset(self, answer: Any) -> Any:
        check_parts(answer, step=False)
        self._check_rows(answer[0])
        return answer

    def _check_rows(self, obs: Any) -> None:
        """Raise BadResult if the observations are an array of another number of rows."""
        if isinstance(obs, np.ndarray) and obs.shape[:1] != (self._num_rows,):
            raise BadResult(
                f"observations of shape {obs.shape} instead of ({self._num_rows}, ...), one for each row"
            )

    def _row(self, obs: Any, info: Mapping[str, Any], row: Row) -> tuple[Any, dict[str, Any]]:
        return _row_of(obs, row.index, self.observation_space), _info_of(
            info, row.index, self._num_rows
        )


def _info_of(info: Mapping[str, Any], index: int, num_rows: int) -> dict[str, Any]:
    """Return the items of `info` that hold a value for each row, and that of this one, if it has one."""
    items: dict[str, Any] = {}
    for key, value in info.items():
        name = str(key)
        if name.startswith("_") and name[1:] in info:  # names the rows that have a value
            continue
        if isinstance(value, Mapping):
            items[key] = _info_of(value, index, num_rows)
            continue
        has_value = info.get(f"_{name}")
        is_by_row = getattr(value, "shape", ())[:1] == (num_rows,)
        if is_by_row and (has_value is None or has_value[index]):
            items[key] = value[index]
    return items


def _row_of(obs: Any, index: int, space: gym.Space[Any] | None) -> Any:
    """Return one row of many observations of `space`; observations that are not arrays of numbers are in a tuple.

    Parts that the space does not have are refused later, by name.
    """
    if isinstance(space, gym.spaces.Dict) and isinstance(obs, Mapping):
        return {name: _row_of(part, index, space.spaces.get(name)) for name, part in obs.items()}
    if isinstance(space, gym.spaces.Tuple) and isinstance(obs, tuple):
        return tuple(
            _row_of(part, index, inner)
            for part, inner in zip_longest(obs, space.spaces[: len(obs)])
        )
    return obs[index]
