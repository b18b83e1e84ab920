"""`dppo plot`: draw runs together, with mean and spread over the seeds that share settings."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from dppo.commands.flags import Parser, UsageError, print_lines
from dppo.errors import ConfigError, counted, printable
from dppo.invocation import as_called
from dppo.records.files.disk import writing
from dppo.records.files.lock import training_notes
from dppo.tools.curves import (
    EVALUATED_RETURN,
    RETURN,
    Curve,
    CurveGroup,
    baselines_of,
    grouped_by_settings,
    interval,
    missing_metric,
    over_seeds,
    read_curve,
    run_folders,
)
from dppo.tools.pictures.comparison import draw_together
from dppo.tools.pictures.style import MEAN_OF_EPISODE, MEAN_RETURN, ON_EVALUATIONS

PROG = "dppo plot"
DESCRIPTION = (
    "Draw runs together. Those that differ in their seeds only are one line, their mean, in a band from the lowest to "
    "the highest. RUN: the folder of a run, or one that holds the folders of several."
)
KINDS = (".png", ".svg", ".pdf")
MAX_TITLE_LENGTH = 64
FLAGS = {
    "--over {steps,time}": "Horizontal axis. (default: steps)",
    "--metric KEY": f"A key of metrics.jsonl. (default: {RETURN})",
    "--label TEXT ...": "Names of the lines, in the order in which the command prints them. Without it, the settings "
    "that differ.",
    "--out FILE": "A .png, .svg or .pdf. (default: plot.png)",
}


def main(argv: list[str]) -> int:
    """Draw the picture, and print the mean of each group with an interval; return the exit code."""
    flags, words = Parser(
        PROG, "RUN ... [--flag value ...]", DESCRIPTION, {"options": FLAGS}
    ).split(argv)
    if not words:
        raise UsageError(f"RUN is missing. For example: {as_called(PROG)} runs/a runs/b")
    print_lines(*plot([Path(word) for word in words], **{"out": Path("plot.png")} | flags))
    return 0


def plot(
    runs: Sequence[Path],
    out: Path,
    over: str = "steps",
    metric: str = RETURN,
    label: Sequence[str] = (),
) -> Iterator[str]:
    """Draw a picture, and yield lines about it; raise a DppoError if there is nothing to draw."""
    if out.suffix.lower() not in KINDS:
        raise ConfigError(f"out={out}: must end in {', '.join(KINDS[:-1])} or {KINDS[-1]}.")
    curves = {run: read_curve(run, metric) for run in run_folders(runs)}
    yield from training_notes(*curves)
    groups = grouped_by_settings([curve for curve in curves.values() if len(curve.values)])
    if not groups:
        raise missing_metric(metric, curves)
    for run, curve in curves.items():
        if not len(curve.values):
            yield f"{run}: has no {metric} yet, and is left out"
    if label:
        groups = _named(groups, label)
    drawn = [run for group in groups for run in group.runs]
    title = _title(dict.fromkeys(str(run.settings.get("env_id")) for run in drawn))
    axis_label = printable(metric)
    if metric == RETURN:
        are_evaluated = any(group.evaluations for group in groups)
        axis_label = MEAN_OF_EPISODE if are_evaluated else MEAN_RETURN
        groups = [group._replace(kind=f", {group.runs[0].training_name}") for group in groups]
    baselines = baselines_of(groups) if metric in (RETURN, EVALUATED_RETURN) else []
    with writing(f"out={out}"):
        draw_together(groups, out, title, axis_label, over_time=over == "time", baselines=baselines)
    for group in groups:
        yield f"{group}, {_last_values(group.runs)}"
        if group.evaluations:
            kind = f", {group.evaluations[0].evaluations_name}"
            evaluated = group._replace(runs=group.evaluations, kind=kind)
            yield f"{evaluated}, {_last_values(evaluated.runs)}"
    for name, mean_return, _ in baselines:
        yield f"baseline {name}, {ON_EVALUATIONS}: {mean_return:.4g}"
    yield f"Picture: {out}"


def _title(environments: Collection[str]) -> str:
    title = printable(", ".join(environments))
    if len(title) > MAX_TITLE_LENGTH and len(environments) > 1:
        return f"{len(environments)} environments"
    return title[:MAX_TITLE_LENGTH]


def _last_values(curves: Sequence[Curve]) -> str:
    """Return the mean where the drawn line ends, the last step that all curves cover, with an interval over seeds."""
    steps = over_seeds(curves).steps
    longest = max(curve.steps[-1] for curve in curves)
    if not len(steps):
        return "at no common step"
    at = f"after {steps[-1]:,.0f}"
    if steps[-1] < longest:
        at += f" of {longest:,.0f}"
    values = [np.interp(steps[-1], curve.steps, curve.values) for curve in curves]
    mean, low, high = interval([np.array(values)])
    spread = ""
    seeds = Counter(str(curve.settings.get("seed")) for curve in curves)
    repeated = [seed for seed in seeds if seeds[seed] > 1]
    if repeated:
        spread = (
            f", no interval: several runs have seed {', '.join(repeated)}. Leave out the copies"
        )
    elif len(values) > 1:
        spread = f", 95 % interval {low:.4g} to {high:.4g}"
    return f"{at} steps: {mean:.4g}{spread}"


def _named(groups: Sequence[CurveGroup], labels: Sequence[str]) -> list[CurveGroup]:
    """Return the groups with these labels; raise ConfigError unless there is one for each."""
    if len(labels) != len(groups):
        lines = "; ".join(map(str, groups))
        count = counted(len(groups), "line")
        raise ConfigError(
            f"label={' '.join(labels)}: pass one name for each line, here {count}: {lines}."
        )
    return [group._replace(label=label) for group, label in zip(groups, labels, strict=True)]
