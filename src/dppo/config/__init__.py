"""`Config`: all settings of a run, checked.

Importing this loads neither pydantic nor yaml: parts travel to actors.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import FrozenInstanceError, dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from dppo.config.checks import check
from dppo.config.files import flattened, grouped, preset, presets, read_settings, resolved, with_atari
from dppo.config.parts import PARTS, PPO, Actors, Env, FlatSettings, Learners, Network, Run, Sampling, default_of
from dppo.errors import ConfigError

__all__ = [
    "PPO", "Actors", "Config", "Env", "Learners", "Network", "Run", "Sampling",
    "flattened", "grouped", "presets", "read_settings", "resolved",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, repr=False)
class Config(FlatSettings):
    """Settings of one training run, checked before any process starts.

    Each setting is a keyword and an attribute: `Config(env_id="CartPole-v1", num_actors=8).num_actors`. A whole part
    can be given as a record or a dict, and read as an attribute: `Config(env_id="CartPole-v1",
    sampling={"num_steps": 64}).sampling`. `dataclasses.replace(config, seed=2)` returns a changed copy, checked again.

    Raises:
        ConfigError: has one line for each invalid setting, with its value, the reason and a remedy.
    """

    if TYPE_CHECKING:  # type checkers see the signature that dataclass generates, with the parts as keywords
        env: Env = ...  # type: ignore[assignment]
        sampling: Sampling = ...  # type: ignore[assignment]
        ppo: PPO = ...  # type: ignore[assignment]
        network: Network = ...  # type: ignore[assignment]
        actors: Actors = ...  # type: ignore[assignment]
        learners: Learners = ...  # type: ignore[assignment]
        run: Run = ...  # type: ignore[assignment]
    else:

        def __init__(self, *unnamed: Any, **settings: Any) -> None:
            if unnamed:
                rest = "".join(f", {name}=..." for name in settings)
                raise ConfigError(
                    f"dppo.Config({unnamed[0]!r}{rest}): settings are passed by their names. Use "
                    f"dppo.Config(env_id={unnamed[0]!r}{rest})."
                )
            self.__dict__.update(draft(settings).__dict__)
            check(self)
            self.__dict__.update({name: PARTS[name](**own) for name, own in grouped(self.__dict__).items()})

    @classmethod
    def preset(cls, name: str, /, **settings: Any) -> Config:
        """Return the settings of a preset; `settings` replace some of them.

        A value of the preset that does not fit `settings` is changed, with a warning.

        Args:
            name: an environment that there are tuned settings for; or, as fast, for a purpose, with an `env_id`.

        Raises:
            ConfigError: there is no preset of this name, or a setting is invalid.
        """
        fitted, notes = fitted_to({"env_id": name} | flattened(settings), preset(name).settings)
        for note in notes:
            warnings.warn(note, stacklevel=2)
        return cls(**fitted)


def _refuse_assignment(config: Config, name: str, value: Any) -> NoReturn:
    raise FrozenInstanceError(
        f"{name}={value!r}: a Config does not change. Make a copy: dataclasses.replace(config, {name}={value!r})."
    )


Config.__setattr__ = _refuse_assignment  # type: ignore[assignment]  # a frozen dataclass must not define it


def draft(settings: Mapping[str, Any]) -> FlatSettings:
    """Return settings that are not checked against each other yet; raise ConfigError if one of them is not valid."""
    from dppo.config.values import validated  # imports pydantic, which an actor must not load

    return FlatSettings(**validated(with_atari(flattened(settings))))


def fitted_to(own: Mapping[str, Any], tuned: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return flat settings tuned | own, where tuned values that are refused beside `own` give way; and these changes.

    The default takes their place, and minibatches larger than the batch become the batch. So does that of the first
    value without which a setting of `own` is accepted. Errors in `own` remain.
    """
    if isinstance(of_env := own.get("env_kwargs"), Mapping):
        own = {**own, "env_kwargs": {**tuned.get("env_kwargs", {}), **of_env}}
    kept, notes = {name: value for name, value in tuned.items() if name not in own}, list[str]()
    while kept and (error := _refusal({**kept, **own})) is not None:
        name = str(error).partition("=")[0]
        if name not in kept:
            name = next((one for one in kept if _refusal({**_without(one, kept), **own}) is None), "")
        if not name:
            break
        value, kept = kept[name], _without(name, kept)
        if name == "minibatch_size":
            with suppress(ConfigError):  # of another setting, which the next round is about
                batch = draft({**kept, **own}).batch_size
                kept |= {name: batch} if value > batch else {}
        fact = str(error).partition(". ")[0]
        notes.append(f"preset: {fact}; using {name}={kept.get(name, default_of(name))}")
    return {**kept, **own}, tuple(notes)


def _refusal(settings: Mapping[str, Any]) -> ConfigError | None:
    """Return the error that these settings raise; None if they are accepted."""
    try:
        check(draft(settings))
    except ConfigError as error:
        return error
    return None


def _without(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {each: value for each, value in settings.items() if each != name}
