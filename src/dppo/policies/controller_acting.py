"""ControllerActing: a user's controller plays episodes, and sees observations as the environment returned them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from dppo.envs.episode import CheckedEnv
from dppo.envs.spaces import ARRAYS, describe_spaces, leaf_spaces
from dppo.envs.witness import Witness, witness_of
from dppo.policies.acting import Acting, ActingFor, PlaySettings
from dppo.policies.controller import Controller, ControllerInstance
from dppo.ppo.exchange.records import ControllerTurn, PolicySnapshot
from dppo.spaces.spaces import Spaces


class ControllerActing:
    """A controller: an instance of its own for each sub-environment of the environment."""

    at_bounds = None
    """Not counted: many good controllers are at a bound most of the time."""

    def __init__(self, controller: Controller, settings: PlaySettings) -> None:
        self._controller = controller
        self._settings = settings
        self._instances: list[ControllerInstance] = []
        self._witnesses: list[Witness] = []
        self._actions: dict[int, Any] = {}
        """The latest action of each sub-environment."""

    def spaces_of(self, env: Any, env_name: str) -> Spaces:
        """Take any spaces that `env` has: see `Acting`."""
        return describe_spaces(
            env, drop_obs=_unstored_leaves(env), action_mask="off", obs_dtype="float64"
        )

    def begin(self, sub_envs: Sequence[CheckedEnv], episode: int) -> None:
        """Begin an episode of the instance of each sub-environment: see `Acting`."""
        self._witnesses = [witness_of(sub_env) for sub_env in sub_envs]
        if not self._instances:
            self._instances = [
                ControllerInstance(
                    self._controller, sub_env.env, deterministic=self._settings.deterministic
                )
                for sub_env in sub_envs
            ]
        for sub_env, instance in zip(sub_envs, self._instances, strict=True):
            instance.begin(episode, sub_env.settings.episode_seed(sub_env.index, episode))

    def actions(self, sub_envs: Sequence[CheckedEnv]) -> Sequence[Any]:
        for index, witness in enumerate(self._witnesses):
            if witness.is_present:  # otherwise its action is ignored
                self._actions[index] = self._instances[index].act(witness.obs)
        return [self._actions[index] for index in range(len(sub_envs))]


def controller_acting_for(controller: Controller, settings: PlaySettings) -> ActingFor:
    """Return a function that plays with the controller and ignores the snapshot."""
    return partial(_unchanged, ControllerActing(controller, settings))


def _unchanged(acting: Acting, _: PolicySnapshot | ControllerTurn) -> Acting:
    return acting


def acting_for_both(policy_for: ActingFor, controller_for: ActingFor) -> ActingFor:
    """Return a function: a snapshot's policy plays its episodes, and a controller plays in its turn."""
    return partial(_either, policy_for, controller_for)


def _either(
    policy_for: ActingFor, controller_for: ActingFor, turn: PolicySnapshot | ControllerTurn
) -> Acting:
    if isinstance(turn, ControllerTurn):
        return controller_for(turn)
    return policy_for(turn)


def _unstored_leaves(env: Any) -> list[str]:
    """Return the leaves of observations that are no arrays of numbers, such as texts; only the controller sees them."""
    spaces = leaf_spaces(env.observation_space)
    names = [name for name, space in spaces.items() if not isinstance(space, ARRAYS)]
    return [name for name in names if name]
