"""`dppo plot`: draw runs together, with mean and spread over the seeds that share settings."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from dppo.commands.flags import Parser, UsageError, asks_for_help
from dppo.errors import ConfigError, DppoError, counted, printable
from dppo.records.files.disk import cause, remedy
from dppo.records.together import Group, draw_together, grouped_by_settings, interval, read_curve, run_folders

PROG = "dppo plot"
DESCRIPTION = (
    "Draw runs together. Those that differ in their seeds only are one line, their mean, in a band from the lowest to "
    "the highest. RUN: the folder of a run, or one that holds the folders of several."
)
RETURN = "charts/episodic_return"
KINDS = (".png", ".svg")


def main(argv: list[str]) -> int:
    """Draw the picture, and print the last value of each group with its interval; return the exit code."""
    parser = Parser(PROG, "RUN ... [--flag value ...]", DESCRIPTION)
    parser.add_argument("--over", choices=["steps", "time"], help="Horizontal axis. (default: steps)")
    parser.add_argument("--metric", metavar="KEY", help=f"A key of metrics.jsonl. (default: {RETURN})")
    parser.add_argument("--out", type=Path, metavar="FILE", help="A .png or .svg. (default: plot.png)")
    if asks_for_help(argv):
        parser.print_help()
        return 0
    flags, words = parser.split(argv)
    if not words:
        raise UsageError(f"RUN is missing. For example: {PROG} runs/a runs/b")
    for line in plot([Path(word) for word in words], **{"out": Path("plot.png")} | flags):
        print(printable(line))
    return 0


def plot(runs: Sequence[Path], out: Path, over: str = "steps", metric: str = RETURN) -> Iterator[str]:
    """Draw a picture, and yield lines about it; raise a DppoError if there is nothing to draw."""
    if out.suffix not in KINDS:
        raise ConfigError(f"out={out}: must end in {' or '.join(KINDS)}.")
    read = {run: read_curve(run, metric) for run in run_folders(runs)}
    for run in (run for run, curve in read.items() if not len(curve.values)):
        yield f"{run}: has no value of {metric} yet, and is left out"
    groups = grouped_by_settings([curve for curve in read.values() if len(curve.values)])
    if not groups:
        raise DppoError(f"metric={metric}: there is nothing to draw yet in {counted(len(read), 'run')}.")
    environments = dict.fromkeys(str(curve.settings.get("env_id")) for group in groups for curve in group.curves)
    try:
        draw_together(groups, out, printable(", ".join(environments))[:90], metric, over_time=over == "time")
    except OSError as error:
        raise ConfigError(f"out={out}: cannot be written: {cause(error)} {remedy(error)}") from None
    yield from map(summary, groups)
    yield f"Picture: {out}"


def summary(group: Group) -> str:
    """Return one line: the mean of the last values, with an interval if there are several runs."""
    several = len(group.last) > 1
    shown = str(interval([group.last])) if several else f"{group.last[0]:.4g}"
    return f"{group.label}, {counted(len(group.last), 'seed')}: {'mean ' * several}{shown}"
