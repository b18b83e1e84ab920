"""Ways to learn, as settings, and how many env steps known tasks need with them: for `dppo doctor`, and for flat runs.

This is the one place where that is decided. The figures are those of benchmarks/results/samples.md, with 8 samplers;
tests/test_ways.py compares them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dppo.config.config import Config
from dppo.config.plain import plain_settings
from dppo.config.resolve import facts_of
from dppo.errors import ConfigError
from dppo.spaces.actions import Actions, clipped_off_centre


@dataclass(frozen=True, slots=True)
class Way:
    """Settings to learn with, and env steps to the good return of known tasks, each the median of its seeds."""

    settings: Mapping[str, Any]
    share: float
    """Of the env steps of the defaults, in the median of all tasks."""
    continuous: tuple[int, int]
    """Fewest and most env steps of the ten tasks with continuous actions."""
    discrete: tuple[int, int]
    """Fewest and most env steps of the seven tasks with discrete actions."""

    @property
    def flags(self) -> str:
        """The settings as they are typed; "" for the defaults."""
        pairs = self.settings.items()
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in pairs)

    def within(self, config: Config) -> Config | None:
        """Return a config with these settings, too; None if they are refused beside its others."""
        try:
            return Config(**{**plain_settings(config), "minibatch_size": None, **self.settings})
        except ConfigError:
            return None


DEFAULTS = Way({}, 1.0, continuous=(12_000, 569_000), discrete=(13_000, 177_000))
REUSE = Way(
    {"reuse": 4, "num_steps": 32}, 0.77, continuous=(10_000, 184_000), discrete=(10_000, 55_000)
)
WAYS = (DEFAULTS, REUSE)
"""The ways between which the doctor decides, from the fewest to the most SGD for each env step."""
USUAL_BATCH = 512  # env steps with the defaults


def first_to_try(config: Config, actions: Actions | None) -> Iterator[str]:
    """Yield what to try in a new run if one with `config` does not learn, in the order of what helped most.

    Without `actions`, which are not known then, yield only what fits any task.
    """
    if config.reuse == 1 and REUSE.within(config) is not None:
        yield f"{REUSE.flags}: {REUSE.share} of the env steps on 17 known tasks"
    if config.algo == "sac":
        if config.entropy_start is None:
            yield "--entropy-start 0.5: explores for longer, where rewards are far away"
        return
    if actions is None:
        return
    if clipped_off_centre(actions):
        yield "--action-bounds rescale: actions are clipped to bounds that are not symmetric about 0"
    is_usual = config.algo == "ppo" and config.reuse == 1 and config.batch_size <= USUAL_BATCH
    if not facts_of(actions).discrete and is_usual:
        yield (
            "--num-steps 128 --learning-rate 6e-4: 0.28 of the env steps on LunarLanderContinuous, but twice as many "
            "on BipedalWalker"
        )
