"""JointAgents: a parallel environment of PettingZoo, whose agents are sub-environments."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from typing import Any

from dppo.envs.checks.masks import METHOD
from dppo.envs.checks.returned import PARTS, BadResult, check_parts
from dppo.envs.episode import SkippedStep
from dppo.envs.spaces import short
from dppo.envs.sub_envs.joint import JointEnv, SubEnv
from dppo.errors import ConfigError


class JointAgents(JointEnv):
    """A parallel environment. An agent that is gone, or not there yet, is skipped until the next episode of all."""

    shared = True

    def __init__(self, env: Any, make: Callable[[], Any]) -> None:
        """Take over `env`; raise ConfigError if its agents have different spaces."""
        self._names: list[str] = list(env.possible_agents)
        # agents whose episode has ended, until the next reset, or until the environment no longer lists them
        self._ended = set[str]()
        super().__init__(env, make, len(self._names))
        self.unread_masks = callable(getattr(env, METHOD, None))
        self.observation_space = _common_space(env, self._names, "observation_space")
        self.action_space = _common_space(env, self._names, "action_space")

    def step(self, actions: Sequence[Any]) -> None:
        """Step the agents whose episodes are open; if none remains, begin the next episode."""
        acting = self._listed() - self._ended
        actions_by_name = zip(self._names, actions, strict=True)
        answer = self.env.step({name: action for name, action in actions_by_name if name in acting})
        check_parts(answer, step=True)
        for part, by_agent in zip(PARTS, answer, strict=True):
            is_optional = part == "info"
            self._check_agents(part, by_agent, set() if is_optional else acting)
        obs, rewards, terminated, truncated, infos = answer
        # an environment may still list an agent whose episode has ended
        self._ended |= {name for name in acting if terminated[name] or truncated[name]}
        remaining = self._listed() - self._ended
        lost_agents = acting - remaining - self._ended
        if lost_agents:
            raise BadResult(
                f"no end of agent {min(lost_agents)!r}, which was among `agents` and left it. Return True as its "
                f"`terminated` or `truncated` in the step in which it ends"
            )
        is_last = not remaining
        # an agent that is no longer listed may come back, and acts again then
        self._ended &= set(self.env.agents)
        self._check_agents("observation", obs, remaining)
        if is_last:
            # the reset below may write to the same objects
            obs = deepcopy(obs)
            infos = {name: copy(info) for name, info in infos.items()}
        for name, sub_env in zip(self._names, self.sub_envs, strict=True):
            if name in acting:
                sub_env.step_result = (
                    obs[name],
                    rewards[name],
                    terminated[name],
                    truncated[name],
                    infos.get(name, {}),
                )
                sub_env.is_waiting = bool(terminated[name] or truncated[name])
            elif name in remaining:
                # the agent has joined, and acts from the next step on
                sub_env.step_result = SkippedStep(
                    is_last=False, arrival=(obs[name], infos.get(name, {}))
                )
                sub_env.is_waiting = False
            else:
                sub_env.step_result = SkippedStep(is_last=is_last)
        if is_last and not self.plays_once:
            self._begin_all(self.next_seed(0))

    def _listed(self) -> set[str]:
        """Return the agents that the environment lists; raise BadResult if it lists an unknown one."""
        listed = set(self.env.agents)
        unknown = listed.difference(self._names)
        if unknown:
            raise BadResult(
                f"`agents` with {min(unknown)!r} instead of possible_agents alone. List it in possible_agents"
            )
        return listed

    def begin(self, sub_env: SubEnv, seed: int) -> None:
        """Begin the next episode of all agents."""
        self._begin_all(seed)
        self.restarts += 1

    def _begin_all(self, seed: int) -> None:
        answer = self.env.reset(seed=seed)
        check_parts(answer, step=False)
        obs, infos = answer
        self._check_agents("observation", obs, set())
        self._check_agents("info", infos, set())
        first_present = next((name for name in self._names if name in obs), None)
        if first_present is None:
            raise BadResult("no observation of any of the possible_agents")
        self._ended = set()
        for name, sub_env in zip(self._names, self.sub_envs, strict=True):
            # the sub-environment of an absent agent shows the observation of another one
            source = name if name in obs else first_present
            sub_env.reset_result = obs[source], infos.get(source, {})

    def _check_agents(self, part: str, by_agent: Any, needed: set[str]) -> None:
        """Raise BadResult unless a part of a result is a dict by agent that has all the `needed` ones."""
        if not isinstance(by_agent, Mapping):
            raise BadResult(
                f"{type(by_agent).__name__} as the {part} instead of a dict with an item for each agent"
            )
        if needed <= by_agent.keys():
            return
        missing = next(name for name in self._names if name in needed and name not in by_agent)
        raise BadResult(
            f"no `{part}` for agent {missing!r}, which was among `agents`. Return its last observation, reward and "
            f"flags in the step in which it ends"
        )


def _common_space(env: Any, names: Sequence[str], kind: str) -> Any:
    space_of = getattr(env, kind)
    common = space_of(names[0])
    for name in names[1:]:
        space = space_of(name)
        if space != common:
            raise ConfigError(
                f"env_id: agents share one policy, so that their spaces must be equal, but the {kind} of {names[0]} is "
                f"{short(common)}, and that of {name} is {short(space)}. Pad them, with "
                f"supersuit.pad_observations_v0 or pad_action_space_v0 for instance."
            )
    return common
