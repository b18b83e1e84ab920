"""Findings about the returns of zero, random and baseline actions: does the reward tell good actions from bad?"""

from statistics import fmean

from dppo.config import Config
from dppo.tools.doctor.controllers import RANDOM, ZERO, Returns, are_alike, differ, simple_actions
from dppo.tools.doctor.speed import Facts, Findings

SMALL_SHARE = 0.01  # share of returns


def findings_about_controllers(facts: Facts, config: Config) -> Findings:
    """Yield severity and text of each finding."""
    returns = facts.get("controllers")
    if returns and config.baseline is not None:
        yield from _about_a_baseline(returns, str(config.baseline_name))
    elif returns:
        yield from _without_a_baseline(returns, facts)
    if facts.get("controllers_failed"):
        yield (
            "warning",
            f"while {simple_actions(config)} were played: {facts['controllers_failed']}",
        )
    if facts.get("controllers_left_out"):
        yield (
            "note",
            f"the returns of {simple_actions(config)} were not measured: {facts['controllers_left_out']}",
        )


def _without_a_baseline(returns: Returns, facts: Facts) -> Findings:
    """Yield a note on equal returns only: returns of a hard task differ little at first."""
    is_known = facts["rewards"] == [0, 0]  # another finding reports this
    if returns[ZERO] == returns[RANDOM] and not is_known:
        yield (
            "note",
            f"{ZERO} and {RANDOM} get the same returns, {returns[ZERO][0]:.4g} in the first episode: so far, the "
            f"reward does not depend on the actions. Name a controller that works, --baseline module:name, to see "
            f"whether it gets more",
        )
    if not are_alike(returns):
        yield from _about_a_constant(returns)


def _about_a_baseline(returns: Returns, name: str) -> Findings:
    if are_alike(returns):
        yield (
            "warning",
            f"the reward does not tell {', '.join(returns)} apart: their returns differ by no more than chance. Let "
            f"the reward depend on what the actions change, also on the way to the goal",
        )
        return
    baseline = fmean(returns[name])
    for other in (ZERO, RANDOM):
        if not _is_better(returns, name, other):
            yield (
                "warning",
                f"the baseline {name} is not better than {other}. Check the units and the signs of its actions, and "
                f"the reward",
            )
            break
    yield from _about_a_constant(returns)
    random = fmean(returns[RANDOM])
    if random < baseline and abs(baseline) < SMALL_SHARE * abs(random):
        yield (
            "note",
            f"random actions get {random:.4g}, and the baseline {baseline:.4g}: on the scale of bad actions, good ones "
            f"hardly differ. Limit what a single step can cost",
        )


def is_better_than_chance(returns: Returns, name: str) -> bool:
    """Return whether a baseline has a higher mean return than zero and random actions, by more than chance."""
    return all(_is_better(returns, name, other) for other in (ZERO, RANDOM))


def _is_better(returns: Returns, name: str, other: str) -> bool:
    return fmean(returns[name]) > fmean(returns[other]) and differ(returns[name], returns[other])


def _about_a_constant(returns: Returns) -> Findings:
    means = [fmean(values) for values in returns.values()]
    spread = max(means) - min(means)
    if spread < SMALL_SHARE * max(map(abs, means)):
        yield (
            "warning",
            f"returns are all about {means[0]:.4g}, and actions change {spread:.2g} of it. Subtract the part of the "
            f"reward that no action changes",
        )
