"""Check changed settings when a run is resumed or branched; the metadata of each setting decides what may change."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from dppo.config.config import Config
from dppo.config.effects import without_effect
from dppo.config.field import FlatSettings
from dppo.config.groups import flattened
from dppo.config.parts import about, annealed, annealed_settings, default_of
from dppo.config.plain import plain, plain_settings
from dppo.config.settings import Settings
from dppo.errors import ConfigError, refuse


def leave_out_ineffective(
    settings: FlatSettings, keep: FlatSettings, *, resume: Collection[str] = ("free",)
) -> dict[str, Any]:
    """Return settings | keep, without settings that have no effect with `keep` and change no result.

    With `num_actors=0` in `keep`, for example, the `cpus_per_actor` of a run with actors is left out, and so is all
    that has no effect without settings that are left out.

    Args:
        resume: settings to leave out, by how a resume may change them; with "close", also what changes last bits.
    """
    merged = dict(settings) | dict(keep)
    while True:
        ineffective = {name for name, _ in without_effect(Settings(**merged))} - keep.keys()
        idle = {name for name in ineffective & merged.keys() if about(name).resume in resume}
        if not idle:
            return merged
        # others may depend on these, such as never_worse on the baseline
        merged = {name: value for name, value in merged.items() if name not in idle}


def for_branch(settings: FlatSettings) -> dict[str, Any]:
    """Return the settings of a run folder for a run that starts with its weights.

    A `minibatch_size` that follows from the others is left out, and so is what the run itself started from.
    """
    start = ("prior", "prior_steps", "prior_noise", "init_from")
    branch_settings = {name: value for name, value in settings.items() if name not in start}
    without_size = {
        name: value for name, value in branch_settings.items() if name != "minibatch_size"
    }
    is_derived = Settings(**without_size).sizes.minibatch_rows == settings.get("minibatch_size")
    return without_size if is_derived else branch_settings


def changes_on_resume(
    stored_settings: FlatSettings,
    config: Config,
    checkpoint: Path,
    iteration: int,
    *,
    is_of_seeds: bool = False,
) -> tuple[str, ...]:
    """Return a sentence for each changed setting that affects the results of a resumed run.

    `checkpoint` was written with `stored_settings`, flat or in groups, after `iteration` iterations; `is_of_seeds`: by
    one of several seeds. Raise ConfigError if a setting differs that must not change.
    """
    notes = []
    refusals = []
    for name, was, value in changed_settings(stored_settings, config):
        policy = about(name).resume
        is_over = policy == "raised" and config.iterations < iteration and not is_of_seeds
        is_open = policy == "raised" and not annealed_settings(config.ppo)
        if policy == "free" or (is_open and not is_over):
            continue
        if policy == "close":
            notes.append(
                f"{name}={value} instead of {was}: from here on, results differ by rounding or by the order of rows"
            )
        elif policy == "raised" and isinstance(was, int) and value > was:
            notes.append(_longer(config, was, iteration))
        else:
            fact = (
                f"{checkpoint} was made with {was}, and a run cannot be resumed with another value"
            )
            if is_over:
                fact = f"{checkpoint} was made after {iteration * config.batch_size} env steps"
            remedy = "start a new run"
            if is_of_seeds:
                remedy = "use another `run_dir`"
            if about(name).branch and not is_of_seeds:
                remedy += " from that checkpoint: `branch=True`"
            refusals.append(ConfigError(f"{name}={value}: {fact}. Leave it out, or {remedy}."))
    refuse(refusals)
    return tuple(notes)


def changed_settings(
    stored_settings: FlatSettings, config: Config
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each setting that differs, its value before, and its value now."""
    flat_settings = flattened(stored_settings)
    both_lag_by_one = config.lag == 1 and (
        flat_settings.get("policy_lag") == 1 or flat_settings.get("overlap") is True
    )
    for name, value in plain_settings(config).items():
        if both_lag_by_one and name in ("policy_lag", "overlap"):  # two names of one setting
            continue
        was = flat_settings.get(name, plain(default_of(name)))
        if was != value:
            yield name, was, value


def check_branch(stored_settings: FlatSettings, config: Config, checkpoint: Path) -> None:
    """Raise ConfigError if settings do not fit weights and normalizers of `checkpoint`, which has `stored_settings`."""
    if config.prior is not None:
        raise ConfigError(
            f"prior={config.prior_name}: a branch starts with the weights of {checkpoint}, which a clone of the "
            f"controller would replace. Leave `prior` out, or start a new run."
        )
    refuse(
        ConfigError(
            f"{name}={value}: {checkpoint} was made with {was}, and its weights do not fit another value. Leave it "
            f"out, or start a new run from scratch."
        )
        for name, was, value in changed_settings(stored_settings, config)
        if not about(name).branch and (name, value) != ("init_from", None)
    )


def _longer(config: Config, was: int, iteration: int) -> str:
    """Describe the effect of a longer run on settings that are annealed."""
    planned = replace(config, total_timesteps=was)
    planned_values = annealed(config.ppo, min(iteration, planned.iterations) / planned.iterations)
    values = annealed(config.ppo, iteration / config.iterations)
    names = {
        "learning_rate": "learning rate",
        "clip_coef": "clipping range",
        "ent_coef": "weight of the entropy",
    }
    changes = " and ".join(
        f"the {names[name]} rises from {getattr(planned_values, name):.3g} to {getattr(values, name):.3g}"
        for name in annealed_settings(config.ppo)
    )
    end = f"reaches zero at {config.total_timesteps:,} steps instead of {was:,}"
    return f"total_timesteps={config.total_timesteps} instead of {was}: {changes}, and {end}"
