"""Answers to values and names of settings that are not valid: pydantic's errors in the words of users."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args, get_origin

from dppo.config.aliases import answer_to, meant_by
from dppo.config.parts import settings_by_name, types_by_name
from dppo.config.parts.ppo import ANNEALED
from dppo.errors import unknown_name

KINDS = {  # first letters of pydantic's error type -> fact and remedy
    "string_too_short": ("is empty", "Use at least one character."),
    "finite_number": ("must be a finite number", "Use a number such as 0.001 or 1e-3."),
    "int_": ("must be a whole number", "Use one such as 1000 or 1e3."),
    "float_": ("must be a number", "Use one such as 0.001 or 1e-3."),
    "bool_": ("is neither true nor false", "Use true or false."),
    "dict_": ("must have names and values", "Use `name: value` pairs."),
    "tuple_": ("is not a list", "Use a list."),
    "path_": ("is not a path", "Use text or a pathlib.Path."),
    "string_": ("is not text", "Use text."),
}
SEVERAL_KINDS = {  # settings that take text or something else
    "env_id": ("must be a name, or a function that makes an environment", "Use one such as CartPole-v1."),
    "wrappers": ("must be a name, a class or a function", "Use one such as module:Wrapper."),
    "prior": ("must be a name, a class or a function", "Use one such as module:controller."),
    "baseline": ("must be a name, a class or a function", "Use one such as module:controller."),
    "model": ("must be a name or a class", "Use one such as module:Class."),
    "num_actors": ("must be a number, auto, or bounds", "Use one such as 8, auto or 4..64."),
    "nodes_per_env": ("must be a number, or auto", "Use one such as 2."),
    "keep_checkpoints": ("must be a number, or one such as every=100", "Use one such as 3."),
    "actor_resources": ("must have names and amounts", "Use one such as {'licence': 1}."),
}  # fmt: skip


class Habit(NamedTuple):
    """A value that another library takes, and that is not valid here."""

    setting: str
    is_meant: Callable[[Any], bool]
    answer: str
    """Fact and remedy; settings are between backticks, as in errors."""


def _like(pattern: str) -> Callable[[Any], bool]:
    """Return a check of texts, and of objects whose text is like that."""
    return lambda value: re.fullmatch(pattern, str(value).lower()) is not None


def _is_environment(value: Any) -> bool:
    return hasattr(value, "step")


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _has_two_networks(value: Any) -> bool:
    nets = value[-1] if _is_list(value) and value else value
    return isinstance(nets, Mapping) and nets.keys() <= {"pi", "vf", "qf"}


HABITS = (
    Habit(
        "env_id",
        _is_environment,
        "is an environment. Pass its id, or a function that makes one for each sampler.",
    ),
    Habit(
        "env_id",
        _is_list,
        "is a list. Pass one id, or one function, which is called for each of the `num_samplers` environments.",
    ),
    Habit(
        "ent_coef",
        _like("auto.*"),
        "must be a number. With `algo=sac`, the temperature adapts by itself to `target_entropy`: leave `ent_coef` "
        "out. With `algo=ppo`, use a number such as 0.01.",
    ),
    Habit(
        "target_entropy",
        _like("auto"),
        "must be a number. -1 for each component of the action is the default, as there: leave `target_entropy` out.",
    ),
    Habit(
        "clip_vloss",
        _like(r"[\d.e-]+"),
        "is neither true nor false: it turns clipping on, with the range of `clip_coef`. Use `clip_vloss=True`.",
    ),
    Habit(
        "seed",
        _like("none|null"),
        "must be a whole number, so that the run can be repeated. Use one such as `seed=2`.",
    ),
    Habit(
        "gradient_steps",
        _like("-1"),
        "must be greater than 0: it is a number per env step. Use `gradient_steps=1` for as many as env steps.",
    ),
    Habit(
        "memory", _like("true"), "does not say which memory. Use `memory=lstm`, or `memory=gru`."
    ),
    Habit(
        "hidden_sizes",
        _has_two_networks,
        "has sizes for policy and value, which have the same here. Use a list such as [64, 64]; with `algo=sac`, "
        "critics have `critic_sizes`.",
    ),
    Habit(
        "device",
        _like("gpu|cuda:.*"),
        "must be 'auto', 'cpu' or 'cuda'. Use `device=cuda`; CUDA_VISIBLE_DEVICES=1 in the environment of the program "
        "chooses GPU 1.",
    ),
    Habit(
        "precision",
        _like(r"bf16.*|(?:torch\.)?(?:float16|half)|fp16|16.*"),
        "must be 'float32' or 'bfloat16'. Use `precision=bfloat16`.",
    ),
)
SCHEDULE = _like(
    r"lin.*|cos.*|const.*|exp.*|sched.*|piecewise.*|poly.*|step.*|anneal.*|.*decay|.*schedule"
)


def unknown_setting(name: str) -> str:
    """Say that a setting is not known, and what to use instead, if anything is known about its name."""
    dashed = name.replace("_", "-").lower()
    answer = answer_to(dashed, ())
    if answer is not None:
        return f"{name} is not a known setting. {answer}"
    meant = (flag[2:].replace("-", "_") for flag in meant_by(dashed))
    return unknown_name("setting", name, settings_by_name(), meant)


def description(error: Any) -> str:
    """Return one of pydantic's errors in the form `setting=value: fact. Remedy`."""
    name, *inner = error["loc"]
    value = error["input"]
    path = ".".join([str(name), *(str(index) for index in inner if isinstance(index, int))])
    if error["type"] == "extra_forbidden":
        return unknown_setting(path)
    if error["type"] == "value_error":  # raised by a validator of dppo
        return f"{path}={error['ctx']['error']}"
    if error["type"] == "missing":
        return f"{path} is missing. Pass {path}=..."
    if "[key]" in inner:
        return f"{path.partition('.')[0]}: the name {value!r} is not text. Use `name: value` pairs."
    return f"{path}={value!r}: {_answer(str(name), value, error)}"


def _answer(name: str, value: Any, error: Any) -> str:
    """Return fact and remedy for a value of a setting, or an item of a list."""
    for habit in HABITS:
        if habit.setting == name and habit.is_meant(value):
            return habit.answer
    if name in ANNEALED and (callable(value) or _is_list(value) or SCHEDULE(value)):
        return _instead_of_schedule(name, value)
    kind = next((start for start in KINDS if error["type"].startswith(start)), "")
    fact, remedy = KINDS.get(kind, ("", ""))
    if kind == "tuple_":
        remedy = _as_list(name, value)
    elif fact and name in SEVERAL_KINDS:
        fact, remedy = SEVERAL_KINDS[name]
    fact = fact or error["msg"].removeprefix("Input ").replace("should be", "must be", 1)
    return f"{fact[:1].lower()}{fact[1:]}. {remedy}".rstrip()


def _instead_of_schedule(name: str, value: Any) -> str:
    """Answer a function of the progress, a list of its points, or the name of one, perhaps with a number at its end."""
    fact = "a function of time is not supported"
    if isinstance(value, str):
        fact = "a schedule by name is not supported"
    number = re.search(r"_(\d.*)", str(value)) if isinstance(value, str) else None
    setting = f"`{name}={number[1]}`" if number else "a number"
    remedy = f"Use {setting}, with `{ANNEALED[name]}=True` for a linear decay to 0"
    if name == "learning_rate":
        remedy += ", or `desired_kl` to adapt it"
    return f"{fact}. {remedy}."


def _as_list(name: str, value: Any) -> str:
    """Return the remedy for a single item where a list is needed."""
    item = get_args(types_by_name()[name])[0]
    kinds = (get_origin(item) or item, *map(get_origin, get_args(item)), *get_args(item))
    fits = callable(value) if Callable in kinds and callable(value) else type(value) in kinds
    if isinstance(value, str) and re.fullmatch(r"\d+(?:, *\d+)+", value):
        return f"Use a list: {name}=[{value}]."
    if not fits or (isinstance(value, str) and "," in value):
        return "Use a list."
    return f"Use a list: {name}=[{getattr(value, '__name__', repr(value))}]."
