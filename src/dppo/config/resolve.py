"""Defaults that depend on the task: chosen once, as soon as the spaces are known, each with its reason.

They depend on `action_dims`: the number of continuous components of an action; 0 if all actions are discrete.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from dppo.config.config import Config
from dppo.config.memory import replay_rows_of
from dppo.config.parts import reuse_clip_factor
from dppo.config.settings import Settings
from dppo.invocation import as_setting_and_flag

LARGE_KL = 0.04  # nats; an update that moves the policy further rather follows noise


@dataclass(frozen=True, slots=True)
class Default:
    """A value of a setting that is left open, under a condition."""

    setting: str
    value: Any
    """The value, or a function of the settings that returns it."""
    because: str
    """The condition in words; "" for the value of all other runs."""
    applies: Callable[[Config, int], bool]
    """Returns whether the condition holds for some settings and `action_dims`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The value of a setting that the user left open."""

    setting: str
    value: Any
    because: str
    """The condition under which the setting has this default; "" for the value of all other runs."""
    line: str
    """A line for the log, with an alternative; "" if the value needs no explanation."""


# ------------------------------------------------------------------ the table


def _always(config: Config, action_dims: int) -> bool:
    return True


def _needs_many_epochs(config: Config, action_dims: int) -> bool:
    return action_dims == 0 and not config.has_memory and config.reuse == 1 and config.lag == 0


def _needs_exploration(config: Config, action_dims: int) -> bool:
    return action_dims == 0 and config.reuse > 1 and not config.has_memory


def _starts_with_little_noise(config: Config, action_dims: int) -> bool:
    return config.prior is not None and action_dims > 0 and config.sizes.clone_kl > 0


def _reads_what_it_cloned(config: Config, action_dims: int) -> bool:
    return config.prior is not None and (config.norm_obs or config.norm_reward)


def steps_of_prior(config: Settings) -> int:
    """Return the env steps of all samplers in the iterations that a controller collects at the start."""
    return config.collected_by_prior * config.batch_size


def _may_move_too_far(config: Config, action_dims: int) -> bool:
    sensitive = action_dims > 0 or (config.has_memory and config.reuse > 1)
    adapts = bool(config.desired_kl) or _starts_with_little_noise(config, action_dims)
    return sensitive and config.update_epochs != 1 and not adapts


def _largest_kl(config: Config) -> float:
    """Return the limit of the KL, which grows with the square of the clipping range."""
    return round(LARGE_KL * reuse_clip_factor(config.reuse) ** 2, 6)


def _advantages_have_unit(config: Config, action_dims: int) -> bool:
    return action_dims > 0 and config.norm_reward and not config.norm_value


def _initializes_std(config: Config, action_dims: int) -> bool:
    is_own = config.model is None and not config.state_dependent_std and config.prior is None
    return action_dims > 0 and is_own


def _noise_adds_up(config: Config, action_dims: int) -> bool:
    return _initializes_std(config, action_dims) and action_dims > 1


CLONE_KEEPS_SCALE = Default(
    "freeze_norm_after",
    steps_of_prior,
    "the clone of a prior reads observations on the scale of the controller's env steps",
    _reads_what_it_cloned,
)

DEFAULTS = {
    "ppo": (
        CLONE_KEEPS_SCALE,
        Default(
            "update_epochs",
            20,
            "all actions are discrete, without memory, reuse and policy lag",
            _needs_many_epochs,
        ),
        Default("update_epochs", 10, "", _always),
        Default(
            "ent_coef",
            0.01,
            "all actions are discrete, with reuse and without memory",
            _needs_exploration,
        ),
        Default("ent_coef", 0.0, "", _always),
        Default(
            "desired_kl",
            lambda config: config.sizes.clone_kl,
            "the clone of a prior has little noise, and actions are continuous",
            _starts_with_little_noise,
        ),
        Default("desired_kl", 0.0, "", _always),
        Default(
            "target_kl",
            _largest_kl,
            "some actions are continuous, or memory is used with reuse; with several epochs and without desired_kl",
            _may_move_too_far,
        ),
        Default("target_kl", 0.0, "", _always),
        Default(
            "norm_adv",
            False,
            "some actions are continuous, and norm_reward without norm_value gives advantages a unit",
            _advantages_have_unit,
        ),
        Default("norm_adv", True, "", _always),
        Default(
            "log_std_init",
            -0.5,
            "actions have several continuous components, whose noise adds up",
            _noise_adds_up,
        ),
        Default("log_std_init", 0.0, "actions have one continuous component", _initializes_std),
    ),
    "sac": (
        CLONE_KEEPS_SCALE,
        Default(
            "replay_rows", replay_rows_of, "algo=sac: all of the run, up to 1,000,000", _always
        ),
    ),
}
"""Defaults of each algorithm. The first default that applies counts. If none does, the setting stays None: the network
has its own deviations."""

LINES: dict[str, tuple[str, Any]] = {
    "update_epochs": (
        "Epochs: {value}, because actions are discrete; {other} takes less time and more env steps.",
        10,
    ),
    "ent_coef": (
        "Entropy: a bonus of {value}, because reuse makes discrete actions deterministic sooner; {other}: none.",
        0.0,
    ),
    "desired_kl": (
        "Learning rate: lowered where steps move the clone too far (a KL of more than twice {value}); {other}: never.",
        0.0,
    ),
    "freeze_norm_after": (
        "Normalization: the statistics stay those of the controller's {value:,} env steps, so that the scale of the "
        "clone's inputs does not change.",
        None,
    ),
    "target_kl": (
        "Updates: an update that moves the policy too far (KL above {value}) ends early; with {other}, none does.",
        0.0,
    ),
    "norm_adv": (
        "Advantages: not standardized, so that an uninformative batch changes little; {other} standardizes them, as "
        "most tools do.",
        True,
    ),
    "log_std_init": (
        "Deviation: 0.61 at the start, because the noise of {action_dims} numbers adds up; {other} is 1.",
        0.0,
    ),
}
"""A line for the log about a default that depends on the task, and the value that it names as an alternative."""


# ------------------------------------------------------------------ its use


def resolve(config: Config, action_dims: int) -> tuple[Config, list[Choice]]:
    """Replace every open setting whose default depends on the task; return the settings and the choices.

    Raises:
        ConfigError: a setting of the user's has no effect beside these defaults.
    """
    choices = list(_choices(config, action_dims))
    values = {choice.setting: choice.value for choice in choices}
    return replace(config, **values), choices


def value_of(name: str, config: Config, action_dims: int) -> Any:
    """Return the value of a setting for this task: the user's, or its default."""
    for choice in _choices(config, action_dims):
        if choice.setting == name:
            return choice.value
    return getattr(config, name)


def _choices(config: Config, action_dims: int) -> Iterator[Choice]:
    chosen = set[str]()
    for default in DEFAULTS[config.algo]:
        name = default.setting
        is_open = getattr(config, name) is None and name not in chosen
        if is_open and default.applies(config, action_dims):
            chosen.add(name)
            value = default.value
            if callable(value):
                value = value(config)
            yield Choice(name, value, default.because, _line(config, action_dims, name, value))


def _line(config: Config, action_dims: int, name: str, value: Any) -> str:
    if name not in LINES:
        return ""
    text, alternative = LINES[name]
    if value == alternative:
        return ""
    # the policy starts with the deviations of another run
    if name == "log_std_init" and config.init_from is not None:
        return ""
    other = "" if alternative is None else as_setting_and_flag(name, alternative)
    return text.format(value=value, other=other, action_dims=action_dims)
