"""Environments of several rows: vectors with the API of gymnasium.vector, and parallel environments of PettingZoo."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

from dppo.envs.checks.masks import METHOD
from dppo.envs.checks.returned import BadResult
from dppo.envs.joint import JointEnv, Row
from dppo.envs.make import close_all, joint_kind
from dppo.envs.spaces import short
from dppo.errors import ConfigError
from dppo.spaces.spaces import MASK

PARTS = "observation", "reward", "terminated", "truncated", "info"


def check_parts(answer: Any, *, step: bool) -> None:
    """Raise BadResult unless a step or reset of several rows returned a tuple of five parts, or of two."""
    parts = PARTS if step else ("observation", "info")
    if not isinstance(answer, tuple | list) or len(answer) != len(parts):
        form = f"a tuple of {len(answer)}" if isinstance(answer, tuple) else type(answer).__name__
        raise BadResult(f"{form} instead of ({', '.join(parts)})")


def joined(made: Any, make: Callable[[], Any], num_envs: int, standby: int) -> JointEnv:
    """Return `made` as a `JointEnv`; close it and raise ConfigError if it does not fit the settings.

    `make` returns another one. `num_envs` and `standby` are the settings `envs_per_sampler` and `standby_envs`.
    """
    try:
        joint = joint_of(made, make)
        if len(joint.rows) != num_envs:
            rows = "agents, each of which is a row" if joint.shared else "rows"
            raise ConfigError(
                f"envs_per_sampler={num_envs}: the environment has {len(joint.rows)} {rows}. Use "
                f"`envs_per_sampler={len(joint.rows)}`."
            )
        if standby:
            raise ConfigError(
                f"standby_envs={standby}: copies cannot take turns with the rows of an environment that steps "
                f"{num_envs} at once. Leave it out."
            )
    except BaseException:
        close_all([made])
        raise
    return joint


def joint_of(made: Any, make: Callable[[], Any]) -> JointEnv:
    """Return `made` as a `JointEnv`; `make` returns another one."""
    return AgentRows(made, make) if joint_kind(made) == "agents" else VectorRows(made, make)


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
        self._mode = mode
        self._same_step, self._takes_seeds = mode is modes[1], isinstance(base, SyncVectorEnv | AsyncVectorEnv)
        self.unread_masks = any(base.call("has_wrapper_attr", METHOD)) if self._takes_seeds else hasattr(base, METHOD)
        # It does not reset a row again in the next step; that of Gymnasium does where it shares no memory.
        ale = type(base).__module__.startswith("ale_py")
        obeys = bool(getattr(base, "shared_memory", True)) if self._takes_seeds else ale
        self._seeded = mode is AutoresetMode.DISABLED or (obeys and not self._same_step)
        self._obeys, self.spec = obeys, made.spec if self._seeded else SimpleNamespace(nondeterministic=True)

    def step(self, actions: Sequence[Any]) -> None:
        """Step the vector, and reset rows whose episodes end."""
        batch: Any = create_empty_array(self.action_space, len(actions))
        answer = self.env.step(concatenate(self.action_space, actions, batch))
        self._check_step(answer)
        self.last, *columns, info = answer
        ended, masked = dict[int, int](), MASK in info
        for row, reward, *ends in zip(self.rows, *(np.asarray(one).tolist() for one in columns), strict=True):
            over, row.present = any(ends), True
            seen = self._row(self.last, row), self._of(info, row) if masked or over or row.waiting else {}
            if row.waiting:
                row.first = seen
                row.stand_still(ended=True)
                continue
            if over and self._same_step:
                if "final_obs" not in info:
                    raise BadResult(f"no info['final_obs'] in the step that ended an episode, as {self._mode} needs it")
                row.first = seen
                seen = self._row(info["final_obs"], row), self._of(info.get("final_info", {}), row)
            elif over and self._seeded:
                ended[row.index] = self.next_seed(row.index)
                seen = deepcopy(seen[0]), seen[1]  # the reset below may write to the same array
            row.answer = seen[0], reward, *ends, seen[1]
            row.waiting = over and not (self._same_step or self._seeded)
        if ended:
            self._reset(ended)

    def begin(self, row: Row, seed: int) -> None:
        """Reset this row; if that is impossible, or none has been reset, all rows."""
        seeds = {each.index: self.next_seed(each.index) for each in self.rows} | {row.index: seed}
        if self._seeded:
            self._reset(seeds if self.last is None else {row.index: seed})
        else:
            config = getattr(self.env.unwrapped, "config", None)  # with its seed, in EnvPool, when it was made
            fixed = isinstance(config, Mapping) and {"seed", "max_num_players"} <= config.keys()
            self.last, info = self._checked_reset(self.env.reset() if fixed else self.env.reset(seed=seed))
            self.restarts += 1
            for each in self.rows:
                each.first = self._row(self.last, each), self._of(info, each)

    def _reset(self, seeds: Mapping[int, int]) -> None:
        """Reset these rows and no others, at once where each may have a seed of its own."""
        if self.last is None and not self._takes_seeds:
            self.last, _ = self._checked_reset(
                self.env.reset(seed=min(seeds.values()))
            )  # some must begin with all rows
        for chosen in [seeds] if self._takes_seeds else [{index: seed} for index, seed in seeds.items()]:
            mask = np.isin(np.arange(len(self.rows)), list(chosen))
            before = self.last if self._obeys else copy(self.last)  # it may write to the same array
            given = [chosen.get(row.index) for row in self.rows] if self._takes_seeds else next(iter(chosen.values()))
            self.last, info = self._checked_reset(self.env.reset(seed=given, options={"reset_mask": mask}))
            if not self._obeys and isinstance(before, np.ndarray) and (before != self.last)[~mask].any():
                raise ValueError("reset(options={'reset_mask': ...}) changed observations of rows outside of the mask")
            for index in chosen:
                self.rows[index].first = self._row(self.last, self.rows[index]), self._of(info, self.rows[index])

    def _check_step(self, answer: Any) -> None:
        """Raise BadResult unless a step returned five parts, and a reward and two flags for each row."""
        check_parts(answer, step=True)
        for part, column in zip(PARTS[1:4], answer[1:4], strict=True):
            if np.shape(column) != (len(self.rows),):
                raise BadResult(
                    f"`{part}` of shape {np.shape(column)} instead of ({len(self.rows)},), one for each row"
                )
        self._check_rows(answer[0])

    def _checked_reset(self, answer: Any) -> Any:
        check_parts(answer, step=False)
        self._check_rows(answer[0])
        return answer

    def _check_rows(self, obs: Any) -> None:
        """Raise BadResult if the observations are an array of another number of rows."""
        if isinstance(obs, np.ndarray) and obs.shape[:1] != (len(self.rows),):
            raise BadResult(f"observations of shape {obs.shape} instead of ({len(self.rows)}, ...), one for each row")

    def _row(self, obs: Any, row: Row) -> Any:
        return _row_of(obs, row.index, self.observation_space)

    def _of(self, info: Mapping[str, Any], row: Row) -> dict[str, Any]:
        """Return the items of `info` that hold a value for each row, and that of this one, if it has one."""
        found: dict[str, Any] = {}
        for key, value in info.items():
            if str(key)[:1] == "_" and str(key)[1:] in info:  # says who has a value
                continue
            there = info.get(f"_{key}")
            if isinstance(value, Mapping):
                found[key] = self._of(value, row)
            elif getattr(value, "shape", ())[:1] == (len(self.rows),) and (there is None or there[row.index]):
                found[key] = value[row.index]
        return found


def _row_of(obs: Any, index: int, space: gym.Space[Any] | None) -> Any:
    """Return one row of many observations of `space`; those that are no arrays of numbers are in a tuple.

    Parts that the space does not have are refused later, by name.
    """
    if isinstance(space, gym.spaces.Dict) and isinstance(obs, Mapping):
        return {name: _row_of(one, index, space.spaces.get(name)) for name, one in obs.items()}
    if isinstance(space, gym.spaces.Tuple) and isinstance(obs, tuple):
        return tuple(_row_of(one, index, part) for one, part in zip_longest(obs, space.spaces[: len(obs)]))
    return obs[index]


class AgentRows(JointEnv):
    """A parallel environment. An agent that is gone, or not there yet, stands still until the next episode of all."""

    shared = True

    def __init__(self, made: Any, make: Callable[[], "AgentRows"]) -> None:
        """Take over `made`; raise ConfigError if its agents have different spaces."""
        self._names, self._ended = list(made.possible_agents), set[str]()  # until the next reset
        super().__init__(made, make, len(self._names))
        self.unread_masks = callable(getattr(made, METHOD, None))
        for kind in ("observation_space", "action_space"):
            first, *others = [(name, getattr(made, kind)(name)) for name in self._names]
            for name, space in others:
                if space != first[1]:
                    raise ConfigError(
                        f"env_id: agents share one policy, so that their spaces must be equal, but the {kind} of "
                        f"{first[0]} is {short(first[1])}, and that of {name} is {short(space)}. Pad them, with "
                        f"supersuit.pad_observations_v0 or pad_action_space_v0 for instance."
                    )
            setattr(self, kind, first[1])

    def step(self, actions: Sequence[Any]) -> None:
        """Step the agents that are there; if none is left, begin the next episode."""
        there = set(self.env.agents) - self._ended
        chosen = {name: action for name, action in zip(self._names, actions, strict=True) if name in there}
        answer = self.env.step(chosen)
        check_parts(answer, step=True)
        for part, by_agent in zip(PARTS, answer, strict=True):
            self._check_agents(part, by_agent, there if part != "info" else set())
        obs, rewards, terminated, truncated, infos = answer
        self._ended = {name for name in there if terminated[name] or truncated[name]} | self._ended  # listed or not
        left = set(self.env.agents) - self._ended
        over = not left
        self._ended &= set(self.env.agents)  # one that comes back acts again
        self._check_agents("observation", obs, left)
        if over:  # the reset below may write to the same objects
            obs, infos = deepcopy(obs), {name: copy(info) for name, info in infos.items()}
        for name, row in zip(self._names, self.rows, strict=True):
            if name in there:
                ends = [terminated[name], truncated[name] or (over and not terminated[name])]
                row.answer, row.present = (obs[name], rewards[name], *ends, infos.get(name, {})), True
                row.waiting = any(ends)
            else:
                row.stand_still(ended=over)
                if name in left:  # it acts from now on
                    row.answer, row.waiting = (obs[name], 0.0, False, False, infos.get(name, {})), False
        if over and not self.once:
            self._begin_all(self.next_seed(0))

    def begin(self, row: Row, seed: int) -> None:
        """Begin the next episode of all agents."""
        self._begin_all(seed)
        self.restarts += 1

    def _begin_all(self, seed: int) -> None:
        answer = self.env.reset(seed=seed)
        check_parts(answer, step=False)
        obs, infos = answer
        self._check_agents("observation", obs, set())
        self._check_agents("info", infos, set())
        if not obs.keys() & set(self._names):
            raise BadResult("no observation of any of the possible_agents")
        self._ended = set[str]()
        other = next(name for name in self._names if name in obs)
        for name, row in zip(self._names, self.rows, strict=True):
            shown = name if name in obs else other
            row.first = obs[shown], infos.get(shown, {})

    def _check_agents(self, part: str, by_agent: Any, needed: set[str]) -> None:
        """Raise BadResult unless a part of a result is a dict by agent that has all the `needed` ones."""
        if not isinstance(by_agent, Mapping):
            raise BadResult(f"{type(by_agent).__name__} as the {part} instead of a dict with an item for each agent")
        if needed <= by_agent.keys():
            return
        name = next(name for name in self._names if name in needed and name not in by_agent)
        raise BadResult(
            f"no `{part}` for agent {name!r}, which was among `agents`. Return its last observation, reward and flags "
            f"in the step in which it ends"
        )
