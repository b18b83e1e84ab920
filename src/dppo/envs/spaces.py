"""Convert Gymnasium spaces to plain data, and refuse those that are not supported, with advice."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal

import gymnasium as gym
import numpy as np

from dppo.envs.checks.masks import MaskSetting, mask_source
from dppo.errors import ConfigError
from dppo.spaces.actions import (
    NO_BOUND,
    Actions,
    Bounds,
    BoxActions,
    DiscreteActions,
    MultiDiscreteActions,
    NestedActions,
    boxes,
    has_bounds,
    is_covered_at_first,
)
from dppo.spaces.spaces import (
    MASK,
    MAX_WHOLE,
    Categories,
    PartsOf,
    Spaces,
    joined,
    leaves,
    parts_of,
    walk,
)

ARRAYS = (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)
MAX_CHOICES = 1000  # choices of one number; with more, rounding continuous actions learns faster
PASSED = "from a function that you pass as `env_id` (module:function)."
ENCODED = (
    "Write a function encode(obs) that returns n numbers in float32. Then return gymnasium.wrappers."
    f"TransformObservation(env, encode, gymnasium.spaces.Box(-np.inf, np.inf, (n,))) {PASSED}"
)


def describe_spaces(
    env: gym.Env[Any, Any],
    *,
    drop_obs: Collection[str] = (),
    norm_obs_keys: Collection[str] = (),
    action_bounds: Bounds | Literal["auto"] = "clip",
    action_mask: MaskSetting = "auto",
    obs_dtype: str = "float32",
) -> Spaces:
    """Return the spaces of `env` as plain data; the other arguments are the settings of these names.

    Raise ConfigError if a space is not supported. The text names the part, and a setting or wrapper that helps.
    """
    space = env.observation_space
    _check_package(space, f"observation_space={short(space)}")
    dropped = _names_to_drop(space, drop_obs)
    _check_leaves(space, dropped)
    obs = dtype_of(space, drop=dropped, floats=obs_dtype)
    actions = actions_of(env.action_space, action_bounds)
    mask = mask_source(env, obs, actions, action_mask)
    stored = obs
    if mask in ("method", "info"):
        stored = np.dtype([("obs", obs), (MASK, np.bool_, (sum(actions.choices or ()),))])
    # an environment that does not inherit from gymnasium.Env may have none
    spec = getattr(env, "spec", None)
    return Spaces(
        stored,
        actions,
        deterministic=not getattr(spec, "nondeterministic", False),
        categories={
            name: choices_of(leaf)
            for name, leaf in leaves(space, _space_parts).items()
            if isinstance(leaf, gym.spaces.Discrete | gym.spaces.MultiDiscrete)
            and name in leaves(obs)
            and not (mask == "leaf" and _is_in(name, MASK))
        },
        one_of=tuple(
            name
            for name, part, _ in walk(space, _space_parts)
            if isinstance(part, gym.spaces.OneOf)
        ),
        dropped=dropped,
        normalized=_names_to_normalize(obs, norm_obs_keys),
        mask=mask,
    )


def with_critic_obs(spaces: Spaces, critic_obs: Collection[str]) -> Spaces:
    """Return the spaces of a network whose value alone reads the parts `critic_obs` of an observation.

    Raise ConfigError if one of them is not a part of the observation, or no leaf is left for the policy.
    """
    obs = spaces.of_network().obs
    all_leaves = list(leaves(obs))
    parts = [_known(name, "critic_obs", obs) for name in critic_obs]
    chosen = [leaf for leaf in all_leaves if any(_is_in(leaf, part) for part in parts)]
    if chosen == all_leaves:
        raise ConfigError(
            f"critic_obs={' '.join(parts)}: leaves nothing of the observation for the policy. Leave out at least one."
        )
    return replace(spaces, critic_obs=tuple(chosen))


def _check_leaves(space: gym.Space[Any], dropped: Collection[str]) -> None:
    """Refuse leaves that are not arrays of numbers, if the others can do without them."""
    leaves_by_name = leaf_spaces(space, dropped=dropped)
    odd = [
        name
        for name, leaf in leaves_by_name.items()
        if not isinstance(leaf, (*ARRAYS, gym.spaces.OneOf))
    ]
    if odd and len(odd) < len(leaves_by_name):
        pronoun = "it" if len(odd) == 1 else "them"
        raise ConfigError(
            f"observation_space, leaf {odd[0]!r}: is {short(leaves_by_name[odd[0]])}, which is not an array of numbers."
            f" Use `drop_obs={' '.join([*dropped, *odd])}` to leave {pronoun} out."
        )


def dtype_of(
    space: gym.Space[Any], name: str = "", drop: Collection[str] = (), floats: str = "float32"
) -> np.dtype[Any]:
    """Return the dtype in which one observation of `space` is stored, without the leaves named in `drop`.

    For a Box, Discrete, MultiDiscrete or MultiBinary it is `(dtype, shape)`. For a Dict or Tuple it is a structured
    dtype, packed because checksums must not include padding. The fields of a Tuple are named "0", "1", ..., of a OneOf
    "branch", "0", "1", ... Floats of 64 bits or more are stored as `floats`; if that is float64, so are integers
    of a Box that float32 cannot tell apart. The byte order is native. Raise ConfigError for a leaf that is not an array
    of numbers, or has none.
    """
    parts = _space_parts(space)
    if parts is not None:
        fields = [
            (part, dtype_of(inner, joined(name, part), drop, floats))
            for part, inner in parts
            if joined(name, part) not in drop
        ]
        if not fields:
            raise ConfigError(
                f"{_label(name)}: has no parts. Give it at least one{_or_drop(name, drop)}."
            )
        return _structured(fields, name)
    if not isinstance(space, ARRAYS) or space.shape is None or space.dtype is None:
        raise ConfigError(
            f"{_label(name)}: is {short(space)}, which is not an array of numbers. {ENCODED}"
        )
    if 0 in space.shape:
        fact = f"is {short(space)}, which has no elements"
        raise ConfigError(f"{_label(name)}: {fact}. Give it at least one{_or_drop(name, drop)}.")
    dtype = np.dtype(space.dtype)
    becomes_float = dtype.kind == "f" and dtype.itemsize > 4
    if floats == "float64" and dtype.kind in "iu" and isinstance(space, gym.spaces.Box):
        becomes_float = max(-int(space.low.min()), int(space.high.max())) > MAX_WHOLE
    stored = np.dtype(floats) if becomes_float else dtype.newbyteorder("=")
    return np.dtype((stored, space.shape))  # with shape () this is the scalar dtype itself


def _or_drop(name: str, dropped: Collection[str]) -> str:
    if not name:
        return ""
    return f", or use `drop_obs={' '.join([*dropped, name])}` to leave it out"


def _structured(fields: list[tuple[str, np.dtype[Any]]], name: str) -> np.dtype[Any]:
    names = [part for part, _ in fields]
    if "" in names or len(set(names)) < len(names):
        raise ConfigError(
            f"{_label(name)}: has the keys {names}. Keys must be different and not empty."
        )
    dtype = np.dtype(fields)
    dotted = [leaf for leaf, _, is_leaf in walk(dtype) if is_leaf]
    for leaf in dotted:
        if dotted.count(leaf) > 1:
            raise ConfigError(
                f"{_label(name)}: two leaves are named {leaf!r} when nested keys are joined. Rename a key."
            )
    return dtype


def _label(name: str) -> str:
    if name:
        return f"observation_space, leaf {name!r}"
    return "observation_space"


def _space_parts(space: gym.Space[Any]) -> list[tuple[str, gym.Space[Any]]] | None:
    """Return name and space of each part of a nested space, of a OneOf first the number of its branch; else None."""
    if isinstance(space, gym.spaces.OneOf):
        return [("branch", gym.spaces.Discrete(len(space.spaces))), *(parts_of(space.spaces) or ())]
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        return parts_of(space.spaces)
    return None


def _droppable_parts(space: gym.Space[Any]) -> list[tuple[str, gym.Space[Any]]] | None:
    """Return the parts of a space that can be left out: a OneOf is whole, as a leaf is."""
    if isinstance(space, gym.spaces.OneOf):
        return None
    return _space_parts(space)


def leaf_spaces(space: gym.Space[Any], dropped: Collection[str] = ()) -> dict[str, gym.Space[Any]]:
    """Return the leaves by name, without those `dropped`; a OneOf counts as one leaf."""
    leaves_by_name = leaves(space, _droppable_parts)
    return {
        name: leaf
        for name, leaf in leaves_by_name.items()
        if not any(_is_in(name, part) for part in dropped)
    }


def choices_of(space: gym.Space[Any]) -> Categories:
    """Return the choices of each element of a space, flat; none if these are not counted, or too many."""
    counts: Any = ()
    starts: Any = ()
    if isinstance(space, gym.spaces.Discrete):
        counts = space.n
        starts = space.start
    elif isinstance(space, gym.spaces.MultiDiscrete):
        counts = space.nvec
        starts = space.start
    elif isinstance(space, gym.spaces.MultiBinary):
        counts = np.full(space.shape, 2)
        starts = np.zeros(space.shape, int)
    elif isinstance(space, gym.spaces.Box):
        box_counts = space.high.astype(float) - space.low.astype(float) + 1
        if box_counts.max() <= MAX_CHOICES:
            counts = box_counts
            starts = space.low
    return Categories(tuple(map(int, np.ravel(counts))), tuple(map(int, np.ravel(starts))))


def limits_of(space: gym.Space[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and the highest value of each element of a space of `ARRAYS`."""
    if isinstance(space, gym.spaces.Box):
        return space.low, space.high
    return choices_of(space).limits(space.shape or ())


def _names_to_drop(space: gym.Space[Any], drop_obs: Collection[str]) -> tuple[str, ...]:
    """Return the names in `drop_obs` in dotted form; "a/b" is accepted for "a.b".

    Raise ConfigError if one of them is not a part of the observation, or nothing is left.
    """
    if not drop_obs:
        return ()
    all_parts = [name for name, _, _ in walk(space, _droppable_parts)]
    all_leaves = list(leaf_spaces(space))
    dropped = [_known(name, "drop_obs", space, _droppable_parts) for name in drop_obs]
    remaining = leaf_spaces(space, dropped)
    if not remaining:
        raise ConfigError(
            f"drop_obs={' '.join(dropped)}: leaves nothing of the observation. Keep at least one leaf."
        )
    nested = set(all_parts) - {"", *dropped, *all_leaves}
    return (
        *dropped,
        *(part for part in sorted(nested) if not any(_is_in(leaf, part) for leaf in remaining)),
    )


def _names_to_normalize(
    obs: np.dtype[Any], norm_obs_keys: Collection[str]
) -> tuple[str, ...] | None:
    """Return the names of the leaves of floats that `norm_obs_keys` selects; None for all.

    Raise ConfigError if one of them is not a part of the observation, or holds no floats.
    """
    if not norm_obs_keys:
        return None
    dtypes = leaves(obs)
    normalized: set[str] = set()
    for name in norm_obs_keys:
        part = _known(name, "norm_obs_keys", obs)
        inside = [leaf for leaf in dtypes if _is_in(leaf, part)]
        floats = [leaf for leaf in inside if dtypes[leaf].base.kind == "f"]
        if not floats:
            raise ConfigError(
                f"norm_obs_keys={name}: has no floating-point numbers ({dtypes[inside[0]].base}), and only those are "
                f"normalized. Leave it out."
            )
        normalized.update(floats)
    return tuple(leaf for leaf in dtypes if leaf in normalized)


def _is_in(leaf: str, part: str) -> bool:
    return leaf == part or leaf.startswith(f"{part}.")


def _known(name: str, setting: str, tree: Any, parts: PartsOf = parts_of) -> str:
    """Return the dotted form of a name in a setting; raise ConfigError if it is no part of the observation `tree`."""
    names = {part for part, _, _ in walk(tree, parts)}
    for dotted in (name, name.replace("/", ".")):
        if dotted and dotted in names:
            return dotted
    all_leaves = list(leaves(tree, parts))
    remedy = f"Its leaves are {', '.join(all_leaves)}."
    if all_leaves == [""]:
        remedy = f"It is a single array, which has no names: leave `{setting}` out."
    raise ConfigError(f"{setting}={name}: is not a leaf of the observation. {remedy}")


def short(space: Any) -> str:
    """Describe a space in one line of at most 80 characters."""
    text = " ".join(str(space).split())
    if len(text) > 80:
        text = text[:77] + "..."
    return text


def _check_package(space: Any, label: str) -> None:
    """Raise ConfigError for a space of the package gym."""
    if type(space).__module__.partition(".")[0] == "gym":
        raise ConfigError(
            f"{label}: is a space of the package gym, which Gymnasium has replaced. Import gymnasium in the "
            f"environment, or wrap it with shimmy.GymV26CompatibilityV0 (gym 0.26) or shimmy.GymV21CompatibilityV0 "
            f"(older)."
        )


def actions_of(space: gym.Space[Any], bounds: Bounds | Literal["auto"] = "clip") -> Actions:
    """Return an action space as plain data; raise ConfigError, with a remedy, if it or its `bounds` do not fit."""
    actions = _converted(space, bounds, "action_space")
    continuous = list(boxes(actions))
    if bounds not in ("auto", "clip") and not continuous:
        raise ConfigError(
            f"action_bounds={bounds}: has no effect on {actions} actions, which are not real numbers. Leave "
            f"`action_bounds` out."
        )
    for box in continuous:
        infinite = np.flatnonzero(~(np.isfinite(box.low) & np.isfinite(box.high)))
        is_mapped_in_part = box.bounds == "rescale" and len(infinite) < box.width
        if box.bounds != "clip" and len(infinite) and not is_mapped_in_part:
            element = int(infinite[0])
            raise ConfigError(
                f"action_bounds={bounds}: needs finite bounds, and element {element} of an action lies between "
                f"{box.low.flat[element]} and {box.high.flat[element]}. Use `action_bounds=clip`, or give the Box "
                f"finite bounds."
            )
    return actions


def _converted(space: gym.Space[Any], bounds: Bounds | Literal["auto"], name: str) -> Actions:
    label = f"{name}={short(space)}"
    _check_package(space, label)
    if 0 in (space.shape or ()):
        raise ConfigError(f"{label}: has no elements. Give it at least one.")
    if isinstance(space, gym.spaces.Discrete):
        return DiscreteActions(int(space.n), int(space.start))
    if isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return _box_actions(space, bounds)
    choices = choices_of(space)
    if choices.counts:
        return MultiDiscreteActions(
            choices.counts, choices.starts, space.shape or (), str(space.dtype)
        )
    parts = dict(_space_parts(space) or ())
    has_names = isinstance(space, gym.spaces.Dict) and all(
        isinstance(key, str) for key in space.spaces
    )
    if parts and (has_names or isinstance(space, gym.spaces.Tuple)):
        converted = [
            _converted(part, bounds, f"{name}[{key!r}]" if has_names else f"{name}[{key}]")
            for key, part in parts.items()
        ]
        return NestedActions(tuple(converted), tuple(parts) if has_names else None)
    kind = ""
    if isinstance(space, gym.spaces.Box):
        kind = f" of {space.dtype} with shape {space.shape}"
    raise ConfigError(
        f"{label}: it is a {type(space).__name__}{kind}, which is not supported. {_wrapper_for(space)}"
    )


def _box_actions(space: gym.spaces.Box, bounds: Bounds | Literal["auto"]) -> BoxActions:
    """Return the actions of a Box of floats; with auto, an element without two finite bounds is not mapped."""
    low = np.asarray(space.low)
    high = np.asarray(space.high)
    if bounds != "auto":
        return BoxActions(low, high, bounds)
    is_bounded = has_bounds(low, high)
    if is_covered_at_first(low[is_bounded], high[is_bounded]):
        return BoxActions(low, high, "clip")
    # a bound that is so large that it stands for none is none
    unlimited = np.array(np.inf, low.dtype)
    low = np.where(low.astype(np.float64) < -NO_BOUND, -unlimited, low)
    high = np.where(high.astype(np.float64) > NO_BOUND, unlimited, high)
    return BoxActions(low, high, "rescale")


def _wrapper_for(space: gym.Space[Any]) -> str:
    """Return how to turn actions of `space` into actions of a Discrete or of a floating-point Box."""
    if (
        isinstance(space, gym.spaces.Box)
        and np.abs(np.array([space.low, space.high], np.float64)).max() <= MAX_WHOLE
    ):
        box = "gymnasium.spaces.Box(env.action_space.low, env.action_space.high, dtype=np.float32)"
        rounded = f"TransformAction(env, lambda a: np.array(np.rint(a), '{space.dtype}'), {box})"
        return f"Return gymnasium.wrappers.{rounded} {PASSED}"
    listed = "TransformAction(env, lambda a: CHOICES[a], gymnasium.spaces.Discrete(len(CHOICES)))"
    return f"Make a list CHOICES of the actions to choose from. Then return gymnasium.wrappers.{listed} {PASSED}"
