"""Remedies for environments and networks that do not fit: a run refuses to start, and then starts."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from worlds.joint import Agents

from remedies.running import captured, settings_in
from remedies.worlds import BOX, TWO, Fine, Herd

Settings = dict[str, Any]
SAC: Settings = {"algo": "sac", "update_epochs": None, "minibatch_size": None}
Remedy = Callable[[str, Settings], Settings]
"""Returns settings as a message tells to change them."""


def as_named(message: str, settings: Settings) -> Settings:
    """Take the settings between backticks."""
    return {**settings, **settings_in(message)}


def as_meant(message: str, settings: Settings) -> Settings:
    """Take the name that the message suggests."""
    return {"env_id": Fine, captured(message, r"Did you mean (\w+)\?"): 16}


def without(*names: str) -> Remedy:
    return lambda message, settings: {
        name: value for name, value in settings.items() if name not in names
    }


def instead(**changes: Any) -> Remedy:
    return lambda message, settings: {**settings, **changes}


class Shaped(Fine):
    """An environment of any spaces."""

    def __init__(self, obs: Any = BOX, act: Any = TWO) -> None:
        super().__init__()
        self.observation_space = obs
        self.action_space = act

    def reset(self, **_: Any) -> Any:
        self.taken = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.taken += 1
        return self.observation_space.sample(), 1.0, False, self.taken == 5, {}


def shaped(obs: Any = BOX, act: Any = TWO) -> Callable[[], Shaped]:
    return lambda: Shaped(obs, act)


class Masked(Shaped):
    """Offers masks by a method."""

    def action_masks(self) -> Any:
        return np.ones(2, bool)


class MaskAttribute(Shaped):
    """Has an attribute of the name of the method."""

    action_masks = True


class OneAgent:
    """Like an environment of another library, without spaces."""


class Unlisted(Herd):
    """A parallel environment that does not list its agents."""

    def __init__(self) -> None:
        super().__init__()
        del self.possible_agents


class Nobody(Herd):
    """A parallel environment without agents."""

    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = []


class MultiAgentEnv(gym.Env[Any, Any]):
    """Like the base class of RLlib."""


class DictsOfSpaces(Herd):
    """A space for each agent in a dict, as in RLlib."""

    observation_space: Any = None
    action_space: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.observation_spaces = dict.fromkeys(self.possible_agents, BOX)
        self.action_spaces = dict.fromkeys(self.possible_agents, TWO)


class SingleDicts(gym.Env[Any, Any]):
    """Dicts of agents where a single environment has its spaces."""

    def __init__(self) -> None:
        self.observation_space: Any = {"a": BOX, "b": BOX}
        self.action_space: Any = {"a": TWO, "b": TWO}


def limited() -> gym.Env[Any, Any]:
    """Return a wrapped environment of several agents."""
    return gym.wrappers.TimeLimit(MultiAgentEnv(), 5)


class Takes(Fine):
    """Takes an argument."""

    def __init__(self, lock: Any) -> None:
        super().__init__()


class NoSpaces(gym.Env[Any, Any]):
    """Sets no space."""


class Duck:
    """Has what an environment needs, and is not derived from gymnasium.Env."""

    observation_space = BOX
    action_space = TWO

    def reset(self, **_: Any) -> Any:
        return Fine.obs, {}

    def step(self, action: Any) -> Any:
        return Fine.obs, 1.0, False, False, {}

    def close(self) -> None:
        pass


def vector(num_envs: int = 2, make: Any = Fine) -> Callable[[], Any]:
    return lambda: SyncVectorEnv([make] * num_envs)


FLOATS = spaces.Dict(a=spaces.Box(-1, 1, (2,), np.float64), b=spaces.Box(-1, 1, (2,), np.float64))
IMAGE = spaces.Box(0, 255, (16, 16, 3), np.uint8)
LARGE = spaces.Discrete(3, start=2**25)
TWICE = spaces.Dict({"a.b": BOX, "a": spaces.Dict(b=BOX)})
RENAMED = spaces.Dict({"c": BOX, "a": spaces.Dict(b=BOX)})
CLASS = "worlds.models:Plain"
MEMORY = "worlds.memory_models:Running"

STARTS: tuple[tuple[Any, ...], ...] = (
    (
        "hosts/environments.py: obs_dtype=float64 has no effect",
        {"env_id": Fine, "obs_dtype": "float64", "norm_obs": True},
        without("obs_dtype"),
    ),
    (
        "hosts/environments.py: Add {}, or use `obs_dtype=float32`",
        {
            "env_id": shaped(FLOATS),
            "obs_dtype": "float64",
            "norm_obs": True,
            "norm_obs_keys": ("a",),
        },
        as_named,
        instead(norm_obs_keys=("a", "b")),
    ),
    (
        "hosts/trainer_builder.py: Use `device=cpu`, or `num_learners=1` with",
        {"env_id": Fine, "device": "cuda"},
        instead(device="cpu"),
    ),
    (
        "hosts/environments.py: are not read from environments with sub-environments",
        {"env_id": Herd, "envs_per_sampler": 3, "info_keys": ("x",)},
        without("info_keys"),
    ),
    (
        "hosts/environments.py: a controller acts in single environments",
        {
            **{"env_id": Herd, "envs_per_sampler": 3, "total_timesteps": 128},
            "prior": "worlds.priors:balance",
        },
        without("prior"),
    ),
    (
        "hosts/environments.py: Subtract the start in the environment",
        {"env_id": shaped(LARGE)},
        as_named,
        instead(env_id=shaped(spaces.Discrete(3))),
    ),
    (
        "envs/preparation.py: prepares single environments",
        {"env_id": vector(), "envs_per_sampler": 2, "frame_stack": 2},
        without("frame_stack"),
    ),
    (
        "envs/preparation.py: does not fit the environment ({}). Leave `{}` out",
        {"env_id": Fine, "grayscale": True},
        without("grayscale"),
    ),
    (
        "envs/kinds.py: which is not an environment. Return the result of calling it",
        {"env_id": lambda: Fine},
        instead(env_id=Fine),
    ),
    (
        "envs/names.py: names no environment. Write {}:make",
        {"env_id": "remedies.worlds:"},
        instead(env_id="remedies.worlds:fixed_mode"),
    ),
    (
        "user_code.py: Did you mean {}:{}?",
        {"env_id": "remedies.worlds:Fin"},
        instead(env_id="remedies.worlds:Fine"),
    ),
    (
        "envs/names.py: Name a function or class that returns an environment",
        {"env_id": "remedies.worlds:BOX"},
        instead(env_id="remedies.worlds:Fine"),
    ),
    (
        "envs/make.py: truncates single environments",
        {"env_id": vector(), "envs_per_sampler": 2, "replay_limit": 9},
        without("replay_limit"),
    ),
    (
        "envs/make.py: replay_limit: truncates only a gymnasium.Env",
        {"env_id": Duck, "replay_limit": 9},
        instead(env_id=Fine),
    ),
    (
        "envs/make.py: Name a class or function env -> env",
        {"env_id": Fine, "wrappers": ("remedies.worlds:BOX",)},
        instead(wrappers=("dppo.envs.wrappers:no_limits",)),
    ),
    (
        "envs/kinds.py: set its possible_agents",
        {"env_id": Unlisted, "envs_per_sampler": 3},
        instead(env_id=Herd),
    ),
    (
        "envs/kinds.py: Set self.possible_agents in its constructor",
        {"env_id": Nobody, "envs_per_sampler": 3},
        instead(env_id=Herd),
    ),
    ("envs/kinds.py: Set self.{} in its constructor", {"env_id": NoSpaces}, instead(env_id=Fine)),
    (
        "envs/kinds.py: which is not a Gymnasium environment. Return a gymnasium.Env",
        {"env_id": OneAgent},
        instead(env_id=Fine),
    ),
    (
        "envs/sub_envs/choice.py: Use `envs_per_sampler={}`",
        {"env_id": vector(3), "envs_per_sampler": 2},
        as_named,
    ),
    (
        "envs/sub_envs/choice.py: copies cannot take turns with the sub-env",
        {"env_id": vector(), "envs_per_sampler": 2, "standby_envs": 1},
        without("standby_envs"),
    ),
    (
        "envs/sub_envs/agents.py: Pad them, with supersuit",
        {"env_id": lambda: Agents(odd=True), "envs_per_sampler": 3},
        instead(env_id=Herd),
    ),
    (
        "envs/spaces.py: It is a single array, which has no names: leave",
        {"env_id": Fine, "drop_obs": ("a",)},
        without("drop_obs"),
    ),
    (
        "envs/spaces.py: two leaves are named {} when nested keys are joined. Rename",
        {"env_id": shaped(TWICE)},
        instead(env_id=shaped(RENAMED)),
    ),
    (
        "envs/spaces.py: leaves nothing of the observation. Keep at least one leaf",
        {"env_id": shaped(FLOATS), "drop_obs": ("a", "b")},
        instead(drop_obs=("a",)),
    ),
    (
        "envs/spaces.py: leaves nothing of the observation for the policy. Leave out at least one",
        {"env_id": shaped(FLOATS), "critic_obs": ("a", "b")},
        instead(critic_obs=("a",)),
    ),
    (
        "hosts/environments.py: noise=pink has no effect on choices",
        {"env_id": Fine, "noise": "pink"},
        without("noise"),
    ),
    (
        "hosts/sac.py: learns the real-valued actions of a single Box",
        {"env_id": Fine, **SAC},
        as_named,
    ),
    (
        "hosts/sac.py: measures the entropy of actions within their bounds",
        {"env_id": shaped(act=spaces.Box(0, np.inf, (1,))), **SAC},
        instead(env_id=shaped(act=spaces.Box(0, 1, (1,)))),
    ),
    (
        "hosts/sac.py: its critics read numbers",
        {"env_id": shaped(spaces.Box(0, 255, (8, 8, 3), np.uint8), BOX), **SAC},
        instead(env_id=shaped(act=BOX)),
    ),
    (
        "envs/spaces.py: which are not real numbers. Leave",
        {"env_id": Fine, "action_bounds": "squash"},
        without("action_bounds"),
    ),
    (
        "envs/spaces.py: {}: has no elements. Give it at least one",
        {"env_id": shaped(act=spaces.Box(-1, 1, (0,)))},
        instead(env_id=shaped(act=spaces.Box(-1, 1, (1,)))),
    ),
    (
        "envs/spaces.py: and only those are normalized. Leave it out",
        {"env_id": shaped(spaces.Dict(a=BOX, n=TWO)), "norm_obs": True, "norm_obs_keys": ("n",)},
        without("norm_obs_keys"),
    ),
    (
        "envs/spaces.py: Use `action_bounds=clip`, or give the Box finite bounds",
        {"env_id": shaped(act=spaces.Box(0, np.inf, (1,))), "action_bounds": "squash"},
        as_named,
        instead(env_id=shaped(act=spaces.Box(0, 1, (1,)))),
    ),
    (
        "envs/checks/masks.py: which have no choices to allow. Leave it out of the environment, {}",
        {"env_id": lambda: Masked(act=BOX)},
        as_named,
    ),
    (
        "envs/checks/masks.py: or use `action_mask=off` in a new run",
        {"env_id": lambda: Masked(act=BOX)},
        instead(env_id=shaped(act=BOX)),
    ),
    (
        "envs/checks/masks.py: and not a method. Make it a method without arguments",
        {"env_id": MaskAttribute},
        instead(env_id=Masked),
    ),
    (
        "envs/checks/masks.py: of environments with sub-environments is not called",
        {"env_id": vector(make=Masked), "envs_per_sampler": 2},
        instead(action_mask="off"),
    ),
    (
        "envs/checks/masks.py: does not fit {} actions. Make it one array",
        {"env_id": shaped(spaces.Dict(a=BOX, action_mask=spaces.Box(0, 1, (3,), np.int8)))},
        as_named,
        instead(env_id=shaped(spaces.Dict(a=BOX, action_mask=spaces.Box(0, 1, (2,), np.int8)))),
    ),
    (
        "envs/checks/masks.py: Masks are for Discrete, MultiDiscrete and MultiBinary",
        {"env_id": shaped(act=BOX), "action_mask": "info"},
        without("action_mask"),
    ),
    (
        "ppo/networks/choice.py: Use `image_encoder=grid` or impala",
        {"env_id": shaped(IMAGE), "image_encoder": "nature"},
        as_named,
        instead(image_encoder="impala"),
    ),
    (
        "ppo/networks/choice.py: {}={} has no effect: {}. Leave `{}` out",
        {"env_id": Fine, "image_features": 8},
        without("image_features"),
    ),
    (
        "ppo/networks/choice.py: so it learns from sequences. Set `sequence_length` to a divisor",
        {"env_id": Fine, "model": MEMORY},
        instead(sequence_length=16),
    ),
    (
        "ppo/networks/choice.py: because it has no attribute state_size. Leave it out",
        {"env_id": Fine, "model": CLASS, "sequence_length": 16},
        without("sequence_length"),
    ),
    (
        "ppo/networks/modules.py: is a small MLP with a gradient written by hand in float32",
        {"env_id": Fine, "precision": "bfloat16"},
        as_named,
    ),
    (
        "ppo/networks/network.py: the default network fits the observations. Leave it out",
        {"env_id": Fine, "model": "MlpPolicy"},
        without("model"),
    ),
    (
        "user_code.py: Use {}:{}{}",
        {"env_id": Fine, "model": "worlds/models.py:Plain"},
        instead(model=CLASS),
    ),
    (
        "ppo/networks/network.py: is not a subclass of torch.nn.Module. Pass one",
        {"env_id": Fine, "model": "worlds.models:NotAModule"},
        instead(model=CLASS),
    ),
    (
        "run/building.py: a new run has no statistics to keep. Use a larger number",
        {"env_id": Fine, "norm_obs": True, "freeze_norm_after": 0},
        instead(freeze_norm_after=100),
    ),
    (
        "config/memory.py: Use smaller layers",
        {"env_id": Fine, "hidden_sizes": (1_000_000, 1_000_000)},
        instead(hidden_sizes=(8,)),
    ),
    (
        "ppo/learning/popart.py: Let values come from one, or use `norm_value=False`",
        {"env_id": Fine, "model": "worlds.models:Residual", "norm_value": True},
        as_named,
        instead(model=CLASS),
    ),
    (
        "ppo/learning/popart.py: Return the numbers of that layer as they are",
        {"env_id": Fine, "model": "remedies.networks:ScaledValues", "norm_value": True},
        as_named,
        instead(model=CLASS),
    ),
    (
        "user_code.py: Check the name, and that the module is installed",
        {"env_id": "remedies.world:Fine"},
        instead(env_id="remedies.worlds:Fine"),
    ),
    ("envs/names.py: Did you mean", {"env_id": "CartPol-v1"}, instead(env_id="CartPole-v1")),
    (
        "envs/kinds.py: Train one agent: write a gymnasium.Env",
        {"env_id": MultiAgentEnv},
        instead(env_id=Fine),
    ),
    *(
        (
            "envs/kinds.py: make it a parallel environment of PettingZoo",
            {"env_id": env_id},
            instead(env_id=Herd, envs_per_sampler=3),
            instead(env_id=Fine),
        )
        for env_id in (DictsOfSpaces, SingleDicts, MultiAgentEnv, limited)
    ),
    (
        "envs/make.py: Pass plain data, and create such objects inside",
        {"env_id": Takes, "env_kwargs": {"lock": Lock()}},
        instead(env_kwargs={"lock": [1]}),
    ),
    ("errors.py: Did you mean {}?", {"env_id": Fine, "num_step": 4}, as_meant),
)
"""A remedy, the settings that are refused with it, and ways to change them as it says."""
