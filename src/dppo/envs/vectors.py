"""Vector environments: those of Gymnasium, ale_py and EnvPool, and others with the API of gymnasium.vector."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from dppo.envs.joint import JointEnv, Row
from dppo.errors import ConfigError
from dppo.spaces.actions import Actions
from dppo.spaces.spaces import MASK


class VectorRows(JointEnv):
    """A vector environment.

    One that resets some of its rows when asked to (`options={"reset_mask": ...}`) gives each episode a seed of its own,
    as a single environment does. Any other resets them by itself: in the mode SAME_STEP in the step that ends an
    episode, in the mode NEXT_STEP in the step after it, in which the row stands still.
    """

    def __init__(self, made: Any, make: Callable[[], "VectorRows"]) -> None:
        """Take over `made`; raise ConfigError if it does not say when it resets its rows."""
        super().__init__(made, make, int(made.num_envs))
        self.observation_space, self.action_space = made.single_observation_space, made.single_action_space
        base, mode = made.unwrapped, made.metadata.get("autoreset_mode")
        if mode not in (modes := list(AutoresetMode)):
            raise ConfigError(
                f"env_id: made a vector environment with metadata['autoreset_mode']={mode!r}, and it has to be one of "
                f"{', '.join(map(str, modes))}."
            )
        self._same_step, self._takes_seeds = mode is modes[1], isinstance(base, SyncVectorEnv | AsyncVectorEnv)
        # It does not reset a row again in the next step; that of Gymnasium does where it shares no memory.
        obeys = getattr(base, "shared_memory", self._takes_seeds or type(base).__module__.startswith("ale_py"))
        self._seeded = mode is AutoresetMode.DISABLED or (obeys and not self._same_step)
        self._obeys, self.spec = obeys, made.spec if self._seeded else SimpleNamespace(nondeterministic=True)

    def step(self, actions: np.ndarray, space: Actions) -> None:
        """Step the vector, and reset rows whose episodes end."""
        self.last, *columns, info = self.env.step(space.to_env(actions))
        ended, masked = dict[int, int](), MASK in info
        for row, reward, *ends in zip(self.rows, *(np.asarray(one).tolist() for one in columns), strict=True):
            seen, row.present = part(self.last, row.index), True
            if row.waiting:
                row.first = seen, self._of(info, row)
                row.stand_still(ended=True)
                continue
            row.answer = seen, reward, *ends, self._of(info, row) if masked or any(ends) else {}
            if any(ends) and self._same_step:
                row.first = seen, self._of(info, row)
                row.answer = (
                    part(info["final_obs"], row.index),
                    reward,
                    *ends,
                    self._of(info.get("final_info", {}), row),
                )
            elif any(ends) and self._seeded:
                ended[row.index] = self.next_seed(row.index)
            row.waiting = any(ends) and not (self._same_step or self._seeded)
        if ended:
            self._reset(ended)

    def begin(self, row: Row, seed: int) -> None:
        """Reset this row; if that is impossible, or none has been reset, all rows."""
        seeds = {each.index: self.next_seed(each.index) for each in self.rows} | {row.index: seed}
        if self._seeded:
            return self._reset(seeds if self.last is None else {row.index: seed})
        fixed = "seed" in (getattr(self.env.unwrapped, "config", None) or {})  # when it was made, in EnvPool
        self.last, info = self.env.reset() if fixed else self.env.reset(seed=seed)
        self.restarts += 1
        for each in self.rows:
            each.first = part(self.last, each.index), self._of(info, each)
        return None

    def _reset(self, seeds: Mapping[int, int]) -> None:
        """Reset these rows and no others, at once where each may have a seed of its own."""
        if self.last is None and not self._takes_seeds:
            self.last, _ = self.env.reset(seed=min(seeds.values()))  # some must begin with all rows
        for chosen in [seeds] if self._takes_seeds else [{index: seed} for index, seed in seeds.items()]:
            mask, before = np.isin(np.arange(len(self.rows)), list(chosen)), self.last
            given = [chosen.get(row.index) for row in self.rows] if self._takes_seeds else next(iter(chosen.values()))
            self.last, info = self.env.reset(seed=given, options={"reset_mask": mask})
            if not self._obeys and isinstance(before, np.ndarray) and (before != self.last)[~mask].any():
                raise ValueError("reset(options={'reset_mask': ...}) changed observations of rows outside of the mask")
            for index in chosen:
                self.rows[index].first = part(self.last, index), self._of(info, self.rows[index])

    def _of(self, info: Mapping[str, Any], row: Row) -> dict[str, Any]:
        """Return the items of `info` that hold a value for each row, and that of this one, if it has one."""
        found: dict[str, Any] = {}
        for key, value in info.items():
            there = info.get(f"_{key}")
            if isinstance(value, Mapping):
                found[key] = self._of(value, row)
            elif getattr(value, "shape", ())[:1] == (len(self.rows),) and (there is None or there[row.index]):
                found[key] = value[row.index]
        return found


def part(obs: Any, index: int) -> Any:
    """Return one row of the observations of a vector environment."""
    if isinstance(obs, Mapping):
        return {name: part(one, index) for name, one in obs.items()}
    return tuple(part(one, index) for one in obs) if isinstance(obs, tuple) else obs[index]
