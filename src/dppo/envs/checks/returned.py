"""Check what environments return, and convert it: observations to elements of a NumPy dtype, rewards, flags."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import numpy as np

from dppo.spaces.spaces import joined, parts_of

Pack = Callable[[Any], np.ndarray]
LARGEST = np.finfo(np.float32).max  # observations are stored as float32
MAX_REWARD = 1e17  # the value loss squares returns, and the square of a hundred of these fits into float32
OLD_API = (
    ". This is the API of Gym before 0.26. Use `wrappers=dppo.envs.wrappers:old_api`, or let reset take a seed and "
    "return (observation, info), and step return (observation, reward, terminated, truncated, info)"
)
ONE_REWARD = (
    "the reward must be one number. Use `wrappers=dppo.envs.wrappers:SummedReward`, or a gymnasium.RewardWrapper of "
    "your own, which weighs the parts"
)


LASTING = OLD_API, ONE_REWARD  # each episode of a new environment fails in the same way


class BadResult(ValueError):
    """An invalid result of an environment. The message continues "... returned"."""

    def __init__(self, what: str, row: tuple[int, ...] = ()) -> None:
        super().__init__(what)
        self.row = row  # of several observations, the one that is invalid


def leaf_named(name: str, whole: str = "an observation") -> str:
    """Return how messages call a leaf of observations, or all of it."""
    return f"observation leaf {name!r}" if name else whole


def packer(obs: np.dtype[Any], *, one_of: Collection[str] = (), dropped: Collection[str] = (), name: str = "") -> Pack:
    """Return a function that copies a returned observation, or a leaf of this `name`, into a new array, and checks it.

    For a Box, the array [*O] keeps the environment's own dtype, which checksums depend on. For a Dict or Tuple it is
    one packed element of shape (). The function raises BadResult if the shape or the kind of number is not that of
    the space, a number is not finite or does not fit into the dtype, or a leaf is missing. `one_of` and `dropped` are
    those of `Spaces`.
    """
    what, inside = leaf_named(name), joined(name, "")
    if obs.names is None:
        return leaf_packer(obs.base, obs.shape, what)
    packers = {part: packer(obs[part], one_of=one_of, dropped=dropped, name=joined(name, part)) for part in obs.names}
    unread = {one.removeprefix(inside) for one in dropped if one.startswith(inside)}
    parts = partial(_branch, what, packers) if name in one_of else partial(_parts, what, packers.keys(), unread)

    def pack(returned: Any) -> np.ndarray:
        row = np.zeros((), obs)  # a OneOf has one of its branches
        for part, value in parts(returned):
            row[part] = packers[part](value)
        return row

    return pack


def _parts(what: str, expected: Collection[str], unread: Collection[str], returned: Any) -> list[tuple[str, Any]]:
    """Return names and values of the parts of a Dict or Tuple that was returned."""
    if not isinstance(returned, Mapping | tuple | list):
        kind = type(returned).__name__
        raise BadResult(f"{what} of type {kind} instead of one with the parts {', '.join(expected)}")
    found = dict(parts_of(tuple(returned) if isinstance(returned, list) else returned) or ())
    for key in sorted(found.keys() ^ expected):
        if key not in unread:
            raise BadResult(f"{what} {'without' if key in expected else 'with the unexpected'} part {key!r}")
    return [(part, found[part]) for part in expected]


def _branch(what: str, packers: Mapping[str, Pack], returned: Any) -> list[tuple[str, Any]]:
    """Return the number of the branch of a OneOf that was returned, and its value, with their names."""
    if not (isinstance(returned, tuple | list) and len(returned) == 2):
        raise BadResult(f"{what} of type {type(returned).__name__} instead of (branch, value)")
    branch, branches = str(int(packers["branch"](returned[0]))), [part for part in packers if part != "branch"]
    if branch not in branches:
        raise BadResult(f"{what} of branch {branch} instead of one of {', '.join(branches)}")
    return [("branch", returned[0]), (branch, returned[1])]


def leaf_packer(dtype: np.dtype[Any], shape: tuple[int, ...], what: str = "an observation") -> Pack:
    """Return a function that copies and checks one leaf, with a short cut for arrays; `what` names it in errors."""
    shared = np.dtype(dtype.type)  # the object that arrays of this dtype share
    array, zeros = np.ndarray, np.zeros(shape, shared) if dtype.kind == "f" else None

    def pack(returned: Any) -> np.ndarray:
        if type(returned) is array and returned.dtype is shared and returned.shape == shape:
            copied = returned.copy()
            if zeros is None or not np.vdot(copied, zeros):  # 0 for finite numbers, NaN for all others
                return copied
        return _checked(returned, dtype, shape, what)

    return pack


def _checked(returned: Any, dtype: np.dtype[Any], shape: tuple[int, ...], what: str) -> np.ndarray:
    try:
        array = np.array(returned)  # a copy, because the environment may reuse its own
    except Exception as error:  # ragged, or not convertible, as a tensor on a GPU
        raise BadResult(f"{what} that is not an array ({error})") from None
    if array.shape != shape:
        raise BadResult(f"{what} of shape {array.shape} instead of {shape}")
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise BadResult(f"{what} of dtype {array.dtype} instead of {dtype}")
    if dtype.kind in "iu" and array.dtype != dtype:  # one that is out of range would wrap around
        limits = np.iinfo(dtype)
        for extreme in int(array.min()), int(array.max()):
            if not limits.min <= extreme <= limits.max:
                index = int(np.flatnonzero(array == extreme)[0])
                of = f"{dtype} from {limits.min} to {limits.max}"
                raise BadResult(f"{what} that is {extreme} at index {index}, outside {of}")
    if array.dtype.kind == "f" or dtype == np.float16:
        flat = array.ravel() if array.dtype.kind == "f" else array.ravel().astype(float)
        largest = min(LARGEST, np.finfo(dtype).max)
        # Ten times as fast as isfinite for few numbers; only a large sum of squares needs a look at each.
        if not flat.dot(flat) <= largest:
            wrong = np.flatnonzero(~(np.abs(flat) <= largest))
            if len(wrong):
                raise BadResult(f"{what} that is {flat[wrong[0]]} at index {int(wrong[0])}")
    return array


def reward_of(returned: Any) -> float:
    """Convert a reward to a float; raise BadResult if it is not a finite number, or too large to learn from."""
    try:
        if isinstance(returned, str | bytes):
            raise TypeError
        reward = float(returned)
    except (TypeError, ValueError):
        several = f"; {ONE_REWARD}" if isinstance(returned, list | tuple | np.ndarray) else ""
        raise BadResult(f"{returned!r} as the reward, which is not a number{several}") from None
    except OverflowError:
        raise BadResult("a reward too large for a float") from None
    if not abs(reward) <= MAX_REWARD:
        limit = f", and values cannot be learned from rewards above {MAX_REWARD:g}" if reward - reward == 0 else ""
        raise BadResult(f"{reward} as the reward{limit}")
    return reward


def flag_of(returned: Any) -> bool:
    """Convert `terminated` or `truncated` to a bool; raise TypeError for others, which are more often a mistake."""
    if not isinstance(returned, bool | np.bool_):
        raise TypeError(type(returned))  # the message is that of `describe_bad`
    return bool(returned)


def describe_bad(result: Any, *, step: bool) -> str:
    """Describe a result of a step, or of a reset, whose form is invalid."""
    in_parts = isinstance(result, tuple | list)
    if step and in_parts and len(result) == 5:
        name, flag = ("truncated", result[3]) if isinstance(result[2], bool | np.bool_) else ("terminated", result[2])
        return f"{name}={flag!r}, which is not a boolean"
    form = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
    expected = "(observation, reward, terminated, truncated, info)" if step else "(observation, info)"
    return f"{form} instead of {expected}{OLD_API if not step or (in_parts and len(result) == 4) else ''}"
