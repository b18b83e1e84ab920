"""`Config`: all settings of a run, checked."""

import warnings
from typing import TYPE_CHECKING, Any

from dppo.config.checks import check
from dppo.config.groups import flattened
from dppo.config.settings import Settings
from dppo.errors import ConfigError


class Config(Settings):
    """Settings of one training run, checked before any process starts.

    Each setting is a keyword and an attribute: `Config(env_id="CartPole-v1", num_actors=8).num_actors`. A whole part
    can be given as a record or a dict, and read as an attribute: `Config(env_id="CartPole-v1",
    sampling={"num_steps": 64}).sampling`. `dataclasses.replace(config, seed=2)` returns a changed copy, checked again.
    Settings that are left out have the defaults of dppo, not those of a preset, as in `Config.preset("CartPole-v1")`.

    Raises:
        ConfigError: has one line for each invalid setting, with its value, the reason and a remedy.
    """

    if not TYPE_CHECKING:  # type checkers see the names of all settings

        def __init__(self, /, *unnamed: Any, **settings: Any) -> None:
            if unnamed:
                keywords = "".join(f", {name}=..." for name in settings)
                values = ", ".join(map(repr, unnamed))
                env_ids = [value for value in unnamed if not str(value).endswith("Policy")]
                env_id = next(iter(env_ids), "CartPole-v1")
                raise ConfigError(
                    f"dppo.Config({values}{keywords}): settings are passed by their names. Use "
                    f"dppo.Config(env_id={env_id!r}{keywords})."
                )
            super().__init__(**settings)
            check(self)

    @classmethod
    def preset(cls, name: str, /, **settings: Any) -> "Config":
        """Return the settings of a preset; `settings` replace some of them.

        A value of the preset that does not fit `settings` is changed, with a warning.

        Args:
            name: an environment that there are tuned settings for; or, as fast, for a purpose, with an `env_id`.

        Raises:
            ConfigError: there is no preset of this name, or a setting is invalid.
        """
        from dppo.config.presets import merge_preset, preset_named

        merged, notes = merge_preset(
            {"env_id": name} | flattened(settings), preset_named(name).settings
        )
        for note in notes:
            warnings.warn(note, stacklevel=2)
        return cls(**merged)
