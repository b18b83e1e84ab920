"""Findings about the returns of zero, random and baseline actions: does the reward distinguish good from bad actions?

The functions are as those in `findings.py`.
"""

from collections.abc import Callable, Iterator
from statistics import fmean

from dppo.config import Config
from dppo.tools.doctor.controllers import RANDOM, ZERO, are_alike, differ
from dppo.tools.doctor.speed import Facts

SMALL_SHARE = 0.01  # share of returns


def returns_are_equal(facts: Facts, config: Config) -> Iterator[str]:
    """Without a baseline, only equal returns are worth a note: returns of a hard task differ little at first."""
    returns = facts["controllers"]
    is_known = facts["rewards"] == [0, 0]  # another finding reports this
    if config.baseline is None and returns[ZERO] == returns[RANDOM] and not is_known:
        yield (
            f"{ZERO} and {RANDOM} get the same returns, {returns[ZERO][0]:.4g} in the first episode: so far, the "
            f"reward does not depend on the actions. Name a controller that works, --baseline module:name, to see "
            f"whether it gets more"
        )


def returns_are_alike(facts: Facts, config: Config) -> Iterator[str]:
    returns = facts["controllers"]
    if config.baseline is not None and are_alike(returns):
        yield (
            f"the reward does not tell {', '.join(returns)} apart: their returns differ by no more than chance. Let "
            f"the reward depend on what the actions change, also on the way to the goal"
        )


def baseline_is_no_better(facts: Facts, config: Config) -> Iterator[str]:
    returns = facts["controllers"]
    if config.baseline is None or are_alike(returns):
        return
    baseline = returns[config.baseline_name]
    for name in (ZERO, RANDOM):
        is_better = fmean(baseline) > fmean(returns[name]) and differ(baseline, returns[name])
        if not is_better:
            yield (
                f"the baseline {config.baseline_name} is not better than {name}. Check the units and the signs of its "
                f"actions, and the reward"
            )
            return


def constant_part_of_returns(facts: Facts, config: Config) -> Iterator[str]:
    returns = facts["controllers"]
    means = [fmean(values) for values in returns.values()]
    size = max(map(abs, means))
    spread = max(means) - min(means)
    if not are_alike(returns) and spread < SMALL_SHARE * size:
        yield (
            f"returns are all about {means[0]:.4g}, and actions change {spread:.2g} of it. Subtract the part of the "
            f"reward that no action changes"
        )


def bad_actions_cost_most(facts: Facts, config: Config) -> Iterator[str]:
    returns = facts["controllers"]
    if config.baseline is None or are_alike(returns):
        return
    baseline = fmean(returns[config.baseline_name])
    random = fmean(returns[RANDOM])
    if random < baseline and abs(baseline) < SMALL_SHARE * abs(random):
        yield (
            f"random actions get {random:.4g}, and the baseline {baseline:.4g}: on the scale of bad actions, good ones "
            f"hardly differ. Limit what a single step can cost"
        )


def controllers_failed(facts: Facts, config: Config) -> Iterator[str]:
    if facts["controllers_failed"]:
        yield f"while zero, random or baseline actions were played: {facts['controllers_failed']}"


def controllers_left_out(facts: Facts, config: Config) -> Iterator[str]:
    if facts["controllers_left_out"]:
        yield (
            f"what zero, random and baseline actions get was not measured: {facts['controllers_left_out']}. To measure "
            f"it, raise --seconds"
        )


FINDINGS_ABOUT_CONTROLLERS: tuple[tuple[str, Callable[[Facts, Config], Iterator[str]]], ...] = (
    ("note", returns_are_equal),
    ("warning", returns_are_alike),
    ("warning", baseline_is_no_better),
    ("warning", constant_part_of_returns),
    ("note", bad_actions_cost_most),
    ("warning", controllers_failed),
    ("note", controllers_left_out),
)
