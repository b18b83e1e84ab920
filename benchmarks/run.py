"""Compare dppo with Stable-Baselines3: the same work on the same machine, in turns.

python benchmarks/run.py [--only NAME ...] [--repeats 3] [--before CHECKOUT] [--json OUT]

Prints a table and the result against each bar, and writes everything as JSON. README.md describes the rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import rows
from measure import HERE, machine
from rich.console import Console
from rich.table import Table

BUSY = 0.5  # load average of the last minute


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(rows.ROWS),
        default=list(rows.ROWS),
        metavar="NAME",
        help="rows to measure",
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="measurements of each side; the median counts"
    )
    parser.add_argument(
        "--before", type=Path, help="checkout of an earlier commit, to measure beside this one"
    )
    parser.add_argument("--json", type=Path, default=HERE / "results.json", help="where to write")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    if options.before is not None and not (options.before / "benchmarks" / "ours_ppo.py").is_file():
        parser.error(
            f"--before {options.before}: not a checkout of dppo. Create one with: git worktree add DIR COMMIT"
        )
    options.before = options.before and options.before.resolve()

    report: dict[str, Any] = {"machine": machine(), "repeats": options.repeats, "rows": {}}
    console = Console(width=max(120, Console().width))
    busy = report["machine"]["load_before"]
    if busy > BUSY:
        print(
            f"This machine is busy (load {busy:.1f}): figures will be too low and ratios imprecise.",
            file=sys.stderr,
        )
    for name in options.only:
        print(f"{name}: {rows.ROWS[name].__doc__}", file=sys.stderr)
        report["rows"][name] = rows.ROWS[name](options.repeats, options.before)
        # after each row, so that a crash loses none
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    console.print(make_table(report["rows"]))
    console.print(
        f"Machine: {report['machine']['cpu']}, {report['machine']['cores']} cores. Written: {options.json}"
    )
    return 0


def make_table(measured: dict[str, dict[str, Any]]) -> Table:
    """Return a table of the sides and bars of every row."""
    table = Table("row", "what", "figure", "bar", "")
    for name, row in measured.items():
        for number, (side, figures) in enumerate(row["sides"].items()):
            table.add_row("" if number else name, side, in_words(figures), "", "")
        for bar in row["bars"]:
            verdict = {True: "pass", False: "FAIL", None: "not measured"}[bar["passed"]]
            figure = "" if bar["measured"] is None else f"{bar['measured']:.2f} {bar['unit']}"
            sign = "<=" if bar["at_most"] else ">="
            table.add_row(
                "", f"  {bar['what']}", figure, f"{sign} {bar['bar']:g} {bar['unit']}", verdict
            )
        table.add_section()
    return table


def rounded(value: float) -> str:
    """Return a figure as 12,345 or 12.3."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def in_words(figures: dict[str, Any]) -> str:
    """Return the medians of one side, or its errors."""
    parts = [
        f"{key.replace('_', ' ')} {rounded(value)}"
        for key, value in figures.get("median", {}).items()
    ]
    parts += [f"failed: {error}" for error in dict.fromkeys(figures.get("errors", []))]
    return "; ".join(parts) or "not measured"


if __name__ == "__main__":
    sys.exit(main())
