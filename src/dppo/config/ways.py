"""Ways to learn, as settings, and how many env steps known tasks need with them: for `dppo doctor`, and for flat runs.

This is the one place where that is decided. The figures are from benchmarks/results/samples.md, with 8 samplers;
tests/test_ways.py compares them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dppo.config.algorithms import SAC_DEFAULTS
from dppo.config.config import Config
from dppo.config.field import FlatSettings
from dppo.config.parts import default_of
from dppo.config.plain import plain, plain_settings
from dppo.errors import ConfigError
from dppo.invocation import flag
from dppo.spaces.actions import Actions, BoxActions, continuous_width
from dppo.spaces.bounds import clipped_off_centre


@dataclass(frozen=True, slots=True)
class KnownTasks:
    """Env steps to the good return of the known tasks with one kind of actions, each the median of its seeds."""

    count: int
    """Tasks that were learned."""
    fewest: int
    most: int
    not_learned: tuple[str, ...] = ()
    """Tasks of which half of the seeds or more did not get to the good return."""


@dataclass(frozen=True, slots=True)
class Way:
    """Settings to learn with, and what known tasks need with them."""

    settings: FlatSettings
    share: float
    """Env steps relative to the defaults, as the median of all tasks that it is for."""
    continuous: KnownTasks
    discrete: KnownTasks | None
    """None: not for discrete actions."""
    reason: str = ""
    """Why it needs fewer env steps than the defaults."""

    @property
    def flags(self) -> str:
        """The settings as they are typed; "" for the defaults."""
        pairs = self.settings.items()
        return " ".join(f"{flag(name)} {value}" for name, value in pairs)

    @property
    def algo(self) -> str:
        """The algorithm."""
        return str(self.settings.get("algo", "ppo"))

    def within(self, config: Config) -> Config | None:
        """Return `config` with the settings of this way; None if they are invalid with its other settings.

        Settings that are chosen for an algorithm are not carried over to another one: the result is None then, too.
        """
        chosen = {
            name: value
            for name, value in plain_settings(config).items()
            if value != plain(default_of(name))
        }
        chosen.pop("minibatch_size", None)
        if self.algo != config.algo and chosen.keys() & SAC_DEFAULTS.keys():
            return None
        try:
            return Config(**chosen | dict(self.settings))
        except ConfigError:
            return None


DEFAULTS = Way(
    {}, 1.0, continuous=KnownTasks(10, 12_000, 569_000), discrete=KnownTasks(7, 13_000, 177_000)
)
REUSE = Way(
    {"reuse": 4, "num_steps": 32},
    0.77,
    continuous=KnownTasks(10, 10_000, 184_000),
    discrete=KnownTasks(7, 10_000, 55_000),
    reason="trains on each step more often",
)
SAC = Way(
    {"algo": "sac"},
    0.29,
    continuous=KnownTasks(11, 8_000, 110_000),
    discrete=None,
    reason="learns from all env steps so far",
)
WAYS = (DEFAULTS, REUSE, SAC)
"""The ways between which the doctor decides, from the fewest to the most SGD for each env step."""
USUAL_BATCH = 512  # env steps with the defaults
LAGGING_SAC_STEPS = 16
"""`num_steps` for soft actor-critic with a policy lag: the lag is an iteration, which these steps make short."""


def suits_sac(actions: Actions) -> bool:
    """Return whether soft actor-critic can learn these actions: real numbers within finite bounds."""
    return isinstance(actions, BoxActions) and bool(
        np.isfinite(actions.low).all() and np.isfinite(actions.high).all()
    )


def first_to_try(config: Config, actions: Actions | None) -> Iterator[str]:
    """Yield advice for a new run if a run with `config` does not learn; the advice that helped most comes first.

    Without `actions`, which are not known then, yield only advice that fits any task.
    """
    ways = [REUSE] if config.reuse == 1 else []
    if config.algo == "ppo" and actions is not None and suits_sac(actions):
        ways.append(SAC)
    for way in sorted(ways, key=lambda way: way.share):
        if way.within(config) is not None:
            yield f"{way.flags}: {way.share} of the env steps on {_tasks_of(way)}"
    if config.algo == "sac":
        if config.lag and config.num_steps > LAGGING_SAC_STEPS:
            yield (
                f"--num-steps {LAGGING_SAC_STEPS}: with a policy lag, 0.7 to 1 of the env steps on four known tasks, "
                f"because the policy that collects is newer, but twice as many on MountainCarContinuous"
            )
        if config.noise != "wide":
            yield "--noise wide: explores farther, where rewards are far away or a policy stands still"
        return
    if actions is None:
        return
    if clipped_off_centre(actions):
        yield "--action-bounds rescale: actions are clipped to bounds that are not symmetric about 0"
    is_usual = config.algo == "ppo" and config.reuse == 1 and config.batch_size <= USUAL_BATCH
    if continuous_width(actions) and is_usual:
        yield (
            "--num-steps 128 --learning-rate 6e-4: 0.28 of the env steps on LunarLanderContinuous, but twice as many "
            "on BipedalWalker"
        )


def _tasks_of(way: Way) -> str:
    if way.discrete is None:
        return f"{way.continuous.count} known tasks with continuous actions, without images"
    return f"{way.continuous.count + way.discrete.count} known tasks"
