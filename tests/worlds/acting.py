"""Small environments with actions of all kinds, and with masks: they raise if an action is not one of theirs."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from worlds.observed import World

SPACES: dict[str, spaces.Space[Any]] = {
    "dials": spaces.MultiDiscrete([3, 2, 4], start=[-1, 0, 5]),
    "table": spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
    "switches": spaces.MultiBinary(3),
    "integers": spaces.Box(np.array([-2, 0], np.int16), np.array([3, 9], np.int16), dtype=np.int16),
    "number": spaces.Box(-1, 1, ()),
    "integer": spaces.Box(-3, 4, (), np.int64),
    "wide": spaces.Box(np.array([-500.0, 10.0]), np.array([100.0, 11.0]), dtype=np.float64),
    "valve": spaces.Box(0.2, 1, (1,)),
    "free": spaces.Box(np.array([-1, 0], np.float32), np.array([1, np.inf], np.float32)),
    "mixed": spaces.Box(
        np.array([10, -1, 0, -np.inf], np.float32), np.array([45, np.inf, 180, np.inf], np.float32)
    ),
    "dict": spaces.Dict(
        arm=spaces.Box(-2, 2, (2,), np.float64),
        gear=spaces.Discrete(4, start=2),
        lamps=spaces.MultiBinary((2, 2)),
    ),
    "tuple": spaces.Tuple(
        [
            spaces.Discrete(2),
            spaces.Dict(turn=spaces.MultiDiscrete([3, 3]), push=spaces.Box(0, 1, ())),
        ]
    ),
    "choices": spaces.Tuple([spaces.Discrete(3, start=1), spaces.Discrete(2)]),
}


class Checked(World):
    """Raises if an action is not in its space."""

    def step(self, action: Any) -> Any:
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is not in {self.action_space}")
        return super().step(self.push(action))

    def push(self, action: Any) -> float:
        return float(np.mean(spaces.flatten(self.action_space, action)))  # type: ignore[arg-type]

    def observation(self) -> Any:
        return self.at.astype(np.float32)


class Actuated(Checked):
    """Takes actions of the space `kind`."""

    observation_space = spaces.Box(-9, 9, (2,), np.float32)

    def __init__(self, kind: str) -> None:
        self.action_space = SPACES[kind]


def closed(obs: Any) -> np.ndarray:
    """Keep the valve at its lower bound."""
    return np.array([0.2], np.float32)


def opened(obs: Any) -> np.ndarray:
    """Keep the valve at its upper bound, with which the point of `World` does not drift."""
    return np.array([1.0], np.float32)


class Masked(World):
    """Allows one to three of four choices in each state: those of a MultiDiscrete apart, if `several`.

    Args:
        source: "leaf", "method" or "info".
        nothing_at: step of the second episode at which nothing is allowed.
    """

    def __init__(self, source: str, several: bool = False, nothing_at: int = -1) -> None:
        self._source = source
        self._several = several
        self._nothing_at = nothing_at
        self._episode = -1
        self.action_space = spaces.MultiDiscrete([4, 2]) if several else spaces.Discrete(4)
        self.observation_space = spaces.Box(-9, 9, (2,), np.float32)
        if source == "leaf":
            masks = spaces.MultiBinary(6 if several else 4)
            self.observation_space = spaces.Dict(action_mask=masks, at=self.observation_space)
        if source == "method":
            self.action_masks = self.mask  # as sb3-contrib's environments name it

    def mask(self) -> np.ndarray:
        turn = int(abs(self.at[0]) * 100) % 4
        mask = np.array([turn != 1, turn == 1, turn > 1, turn == 3])
        if self._several:
            mask = np.concatenate([mask, [turn < 2, turn >= 2]])
        return mask & (self._episode != 1 or self.steps != self._nothing_at)

    def begin(self) -> None:
        self._episode += 1
        super().begin()

    def step(self, action: Any) -> Any:
        choices = [action[0], 4 + action[1]] if self._several else [action]
        mask = self.mask()
        if not mask[choices].all():
            raise ValueError(f"{action} is not allowed by {mask}")
        return super().step(float(np.mean(action)))

    def info(self) -> dict[str, Any]:
        """Return the mask as Gymnasium's `MultiDiscrete.sample` takes it: one array for each element."""
        if self._source != "info":
            return {}
        mask = self.mask().astype(np.int8)
        return {"action_mask": (mask[:4], mask[4:]) if self._several else mask}

    def observation(self) -> Any:
        at = self.at.astype(np.float32)
        if self._source == "leaf":
            return {"action_mask": self.mask().astype(np.int8), "at": at}
        return at


HYBRID = spaces.Dict(
    arm=spaces.Box(-1, 1, (2,), np.float32),
    gear=spaces.Discrete(4, start=2),
    inner=spaces.Tuple([spaces.Box(0, 1, ()), spaces.MultiDiscrete([2, 3])]),
    lamps=spaces.MultiBinary(2),
)
HYBRID_MASKS = spaces.Dict(
    gear=spaces.MultiBinary(4),
    inner=spaces.Tuple([spaces.MultiBinary(5)]),
    lamps=spaces.MultiBinary(4),
)


class Hybrid(Checked):
    """Takes choices together with real numbers, and raises if a choice is not allowed in the state.

    Args:
        source: "leaf", "method" or "info".
        form: "flat", or "nested" as the actions are.
    """

    action_space = HYBRID

    def __init__(self, source: str = "method", form: str = "flat") -> None:
        self._source = source
        self._form = form
        self.observation_space = spaces.Box(-9, 9, (2,), np.float32)
        if source == "leaf":
            masks = spaces.MultiBinary(13) if form == "flat" else HYBRID_MASKS
            self.observation_space = spaces.Dict(action_mask=masks, at=self.observation_space)
        if source == "method":
            self.action_masks = self.given

    def allowed(self) -> dict[str, np.ndarray]:
        turn = int(abs(self.at[0]) * 100) % 4
        return {
            "gear": np.arange(4) == turn,
            "dials": np.array([turn < 2, turn >= 2, True, turn == 1, turn != 1]),
            "lamps": np.array([True, turn > 1, turn == 1, True]),
        }

    def given(self) -> Any:
        allowed = {name: mask.astype(np.int8) for name, mask in self.allowed().items()}
        gear = allowed["gear"]
        dials = allowed["dials"]
        lamps = allowed["lamps"]
        if self._form == "flat":
            return np.concatenate([gear, dials, lamps])
        if self._source == "leaf":
            return {"gear": gear, "inner": (dials,), "lamps": lamps}
        # as Gymnasium has it
        may_be_off = lamps[0::2]
        may_be_on = lamps[1::2]
        forced = np.where(may_be_off & may_be_on, 2, may_be_on).astype(np.int8)
        return {"arm": None, "gear": gear, "inner": (None, (dials[:2], dials[2:])), "lamps": forced}

    def push(self, action: Any) -> float:
        allowed = self.allowed()
        first_dial, second_dial = action["inner"][1]
        chosen = [
            allowed["gear"][action["gear"] - 2],
            allowed["dials"][first_dial],
            allowed["dials"][2 + second_dial],
        ]
        for index, lamp in enumerate(action["lamps"]):
            chosen.append(allowed["lamps"][2 * index + lamp])
        if not all(chosen):
            raise ValueError(f"{action} is not allowed by {allowed}")
        return float(action["arm"].mean() + action["gear"])

    def info(self) -> dict[str, Any]:
        return {"action_mask": self.given()} if self._source == "info" else {}

    def observation(self) -> Any:
        at = super().observation()
        if self._source == "leaf":
            return {"action_mask": self.given(), "at": at}
        return at


class Combined(Checked):
    """Observations of one kind, actions of another, with a mask or without.

    Args:
        obs: "numbers", "picture" or "named" (a Dict).
        act: "discrete", "multidiscrete", "box" or "dict".
    """

    ACTIONS: ClassVar[dict[str, spaces.Space[Any]]] = {
        "discrete": spaces.Discrete(4, start=1),
        "multidiscrete": spaces.MultiDiscrete([4, 2]),
        "box": SPACES["wide"],
        "dict": SPACES["dict"],
    }
    SIZES: ClassVar[dict[str, tuple[int, ...]]] = {"discrete": (4,), "multidiscrete": (4, 2)}
    NUMBERS = spaces.Box(-9, 9, (2,), np.float32)
    OBSERVATIONS: ClassVar[dict[str, spaces.Space[Any]]] = {
        "numbers": NUMBERS,
        "picture": spaces.Box(0, 255, (8, 8, 3), np.uint8),
        "named": spaces.Dict(at=NUMBERS, turn=spaces.Discrete(3)),
    }

    def __init__(self, obs: str, act: str, masked: bool) -> None:
        self.action_space = self.ACTIONS[act]
        self.observation_space = self.OBSERVATIONS[obs]
        self._obs = obs
        self._sizes = self.SIZES.get(act, ())
        if masked:
            self.action_masks = self.masks

    def masks(self) -> list[np.ndarray]:
        """Allow the first choice of each element, and others by chance."""
        turn = int(abs(self.at[0]) * 100)
        masks = []
        for size in self._sizes:
            choices = np.arange(size)
            by_chance = (turn + choices) % 3 == 0
            masks.append(by_chance | (choices == 0))
        return masks

    def push(self, action: Any) -> float:
        return float(np.tanh(super().push(action)))

    def observation(self) -> Any:
        if self._obs == "picture":
            return self.pixels((8, 8, 3))
        at = super().observation()
        return at if self._obs == "numbers" else {"at": at, "turn": self.steps % 3}
