"""Check and convert the results of environments: observations to elements of a NumPy dtype, rewards, flags."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from dppo.spaces.spaces import joined, parts_of

Pack = Callable[[Any], np.ndarray]
LARGEST = np.finfo(np.float32).max  # observations are stored as float32
# the value loss squares returns, and the square of a hundred of these fits into float32
MAX_REWARD = 1e17


class Remedy(NamedTuple):
    """Advice about results that each environment of this kind returns."""

    fact: str
    by_wrapper: str
    """An instruction for single environments; sub-environments have no wrappers."""
    by_hand: str
    """An instruction for any environment."""

    def text(self, *, is_single: bool) -> str:
        """Return the advice for a single environment, or for a sub-environment."""
        if is_single:
            return f"{self.fact}{self.by_wrapper}, or {self.by_hand}"
        return f"{self.fact}{self.by_hand[0].upper()}{self.by_hand[1:]}"

    def ends(self, message: str) -> bool:
        """Return whether a message ends with this advice."""
        return message.endswith(self.by_hand[1:])


OLD_API = Remedy(
    "This is the API of Gym before 0.26. ",
    "Use `wrappers=dppo.envs.wrappers:old_api`",
    "let reset take a seed and return (observation, info), and step return (observation, reward, terminated, "
    "truncated, info)",
)
ONE_REWARD = Remedy(
    "The reward must be one number. ",
    "Use `wrappers=dppo.envs.wrappers:SummedReward`",
    "return reward.item(), or a weighted sum of several parts",
)


class BadResult(ValueError):
    """An invalid result of an environment. The message continues "... returned"."""

    def __init__(
        self, problem: str, row: tuple[int, ...] = (), remedy: Remedy | None = None
    ) -> None:
        """`row`: index of the invalid observation, if there are several."""
        super().__init__(problem)
        self.row = row
        self.remedy = remedy


PARTS = ("observation", "reward", "terminated", "truncated", "info")
"""Parts of the result of a step, in this order."""


def check_parts(answer: Any, *, step: bool) -> None:
    """Raise BadResult unless a step or reset of several environments returned a tuple of five parts, or of two."""
    if not isinstance(answer, tuple | list) or len(answer) != (5 if step else 2):
        raise BadResult(_wrong_form(answer, step=step))


def _wrong_form(answer: Any, *, step: bool) -> str:
    form = f"a tuple of {len(answer)}" if isinstance(answer, tuple) else type(answer).__name__
    parts = PARTS if step else ("observation", "info")
    return f"{form} instead of ({', '.join(parts)})"


def leaf_named(name: str, noun: str = "an observation") -> str:
    if not name:
        return noun
    return f"{noun} part {name!r}"


def packer(
    obs: np.dtype[Any],
    *,
    one_of: Collection[str] = (),
    dropped: Collection[str] = (),
    name: str = "",
) -> Pack:
    """Return a function that copies a returned observation, or a leaf of this `name`, into a new array, and checks it.

    For a Box, the array [*O] keeps the environment's own dtype, which checksums depend on. For a Dict or Tuple it is
    one packed element of shape (). The function raises BadResult if the shape or the kind of number differs from the
    space, a number is not finite or does not fit into the dtype, or a leaf is missing. `Spaces` explains `one_of` and
    `dropped`.
    """
    label = leaf_named(name)
    if obs.names is None:
        return leaf_packer(obs.base, obs.shape, label)
    packers = {
        part: packer(obs[part], one_of=one_of, dropped=dropped, name=joined(name, part))
        for part in obs.names
    }
    if name in one_of:
        parts = partial(_branch, label, packers)
    else:
        inside = joined(name, "")
        unread = {leaf.removeprefix(inside) for leaf in dropped if leaf.startswith(inside)}
        parts = partial(_parts, label, packers.keys(), unread)

    def pack(returned: Any) -> np.ndarray:
        row = np.zeros((), obs)  # a OneOf has one of its branches
        for part, value in parts(returned):
            row[part] = packers[part](value)
        return row

    return pack


def _parts(
    label: str, expected: Collection[str], unread: Collection[str], returned: Any
) -> list[tuple[str, Any]]:
    """Return names and values of the parts of a Dict or Tuple that was returned."""
    if isinstance(returned, list):
        returned = tuple(returned)
    if not isinstance(returned, Mapping | tuple):
        kind = type(returned).__name__
        raise BadResult(
            f"{label} of type {kind} instead of one with the parts {', '.join(expected)}"
        )
    parts = dict(parts_of(returned) or ())
    for key in sorted(parts.keys() ^ expected):
        if key in expected:
            raise BadResult(f"{label} without part {key!r}")
        if key not in unread:
            raise BadResult(f"{label} with the unexpected part {key!r}")
    return [(part, parts[part]) for part in expected]


def _branch(label: str, packers: Mapping[str, Pack], returned: Any) -> list[tuple[str, Any]]:
    """Return the branch of a returned OneOf and its value: `[("branch", 1), ("1", value)]`."""
    if not (isinstance(returned, tuple | list) and len(returned) == 2):
        raise BadResult(f"{label} of type {type(returned).__name__} instead of (branch, value)")
    number, value = returned
    branch = str(int(packers["branch"](number)))
    branches = [part for part in packers if part != "branch"]
    if branch not in branches:
        raise BadResult(f"{label} of branch {branch} instead of one of {', '.join(branches)}")
    return [("branch", number), (branch, value)]


def leaf_packer(
    dtype: np.dtype[Any], shape: tuple[int, ...], label: str = "an observation"
) -> Pack:
    """Return a function that copies and checks a leaf, with a shortcut for arrays; `label` names the leaf in errors."""
    shared = np.dtype(dtype.type)  # the object that arrays of this dtype share
    zeros = None
    if dtype.kind == "f":
        zeros = np.zeros(shape, shared)
    array_type = np.ndarray
    vdot = np.vdot

    def pack(returned: Any) -> np.ndarray:
        if type(returned) is array_type and returned.dtype is shared and returned.shape == shape:
            copied = returned.copy()
            if zeros is None or not vdot(copied, zeros):  # 0 for finite numbers, NaN for all others
                return copied
        return _checked(returned, dtype, shape, label)

    return pack


def _checked(returned: Any, dtype: np.dtype[Any], shape: tuple[int, ...], label: str) -> np.ndarray:
    try:
        array = np.array(returned)  # a copy, because the environment may reuse its own
    except Exception as error:  # ragged, or not convertible, as a tensor on a GPU
        raise BadResult(f"{label} that is not an array ({error})") from None
    if array.shape != shape:
        raise BadResult(f"{label} of shape {array.shape} instead of {shape}")
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise BadResult(f"{label} of dtype {array.dtype} instead of {dtype}")
    if dtype.kind in "iu" and array.dtype != dtype:
        _check_range(array, dtype, label)
    if array.dtype.kind == "f" or dtype == np.float16:
        _check_finite(array, dtype, label)
    return array


def _check_range(array: np.ndarray, dtype: np.dtype[Any], label: str) -> None:
    """Raise BadResult for an integer that would wrap around in `dtype`."""
    limits = np.iinfo(dtype)
    for extreme in (int(array.min()), int(array.max())):
        if not limits.min <= extreme <= limits.max:
            index = int(np.flatnonzero(array == extreme)[0])
            limits_text = f"{dtype} from {limits.min} to {limits.max}"
            raise BadResult(f"{label} that is {extreme} at index {index}, outside {limits_text}")


def _check_finite(array: np.ndarray, dtype: np.dtype[Any], label: str) -> None:
    """Raise BadResult for a number that is not finite in `dtype`, or too large for float32."""
    flat = array.ravel()
    if flat.dtype.kind != "f":
        flat = flat.astype(float)
    largest = min(LARGEST, np.finfo(dtype).max)
    # Ten times as fast as isfinite for few numbers; only a large sum of squares needs a look at each.
    if not flat.dot(flat) <= largest:
        indices = np.flatnonzero(~(np.abs(flat) <= largest))
        if len(indices):
            raise BadResult(f"{label} that is {flat[indices[0]]} at index {int(indices[0])}")


def reward_of(returned: Any) -> float:
    """Convert a reward to a float; raise BadResult if it is not a finite number, or too large to learn from."""
    try:
        if isinstance(returned, str | bytes):
            raise TypeError
        reward = float(returned)
    except (TypeError, ValueError):
        has_parts = isinstance(returned, list | tuple | np.ndarray)
        raise BadResult(
            f"{returned!r} as the reward, which is not a number",
            remedy=ONE_REWARD if has_parts else None,
        ) from None
    except OverflowError:
        raise BadResult("a reward too large for a float") from None
    if abs(reward) <= MAX_REWARD:
        return reward
    is_finite = reward - reward == 0
    limit = ""
    if is_finite:
        limit = f", and values cannot be learned from rewards above {MAX_REWARD:g}"
    raise BadResult(f"{reward} as the reward{limit}")


def flag_of(returned: Any) -> bool:
    """Convert `terminated` or `truncated` to a bool; raise TypeError for other values, which are usually a mistake."""
    if not isinstance(returned, bool | np.bool_):
        raise TypeError(type(returned))  # `bad_form` words the message
    return bool(returned)


def bad_form(result: Any, *, step: bool) -> BadResult:
    """Return the error of a result of a step, or of a reset, whose form is invalid."""
    num_parts = len(result) if isinstance(result, tuple | list) else 0
    if step and num_parts == 5:
        _, _, terminated, truncated, _ = result
        if isinstance(terminated, bool | np.bool_):
            return BadResult(f"truncated={truncated!r}, which is not a boolean")
        return BadResult(f"terminated={terminated!r}, which is not a boolean")
    is_old = not step or num_parts == 4
    return BadResult(_wrong_form(result, step=step), remedy=OLD_API if is_old else None)
