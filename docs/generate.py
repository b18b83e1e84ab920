"""Write the parts of the documents that follow from the source, from tests and from stored measurements.

    python docs/generate.py            write them
    python docs/generate.py --check    exit with 1 if one is not current

A page marks such a part with two comments, `<!-- generated: NAME -->` and `<!-- end -->`. The column of tests in
docs/FAULT_TABLE.md is filled from the marker `proves` of the tests.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks"), str(ROOT / "tests")]
FAULT_TABLE = "docs/FAULT_TABLE.md"
HASHES = ROOT / "benchmarks" / "results" / "numerics.json"
SAMPLES = ROOT / "benchmarks" / "samples.jsonl"
SIDES = {
    "dppo": "`dppo`",
    "reuse": "`--reuse 4 --num-steps 32`",
    "sac": "`--algo sac`",
    "sb3": "SB3, defaults",
}
OFF_POLICY_SIDES = {
    "sac": SIDES["sac"],
    "reuse": SIDES["reuse"],
    "sb3-sac": "SB3's SAC",
    "crossq": "CrossQ",
}
API: dict[str, tuple[str, ...]] = {
    "Training": (
        "dppo.train",
        "dppo.Result",
        "dppo.records.comparison.BaselineComparison",
        "dppo.records.differences.Difference",
    ),
    "Settings": ("dppo.Config",),
    "Policies": (
        "dppo.evaluate",
        "dppo.Evaluation",
        "dppo.export_onnx",
        "dppo.load_policy",
        "dppo.Policy",
    ),
    "Observe a run": ("dppo.Observer", "dppo.RunInfo"),
    "Numerics": ("dppo.portable_numerics",),
    "Networks": (
        "dppo.Spaces",
        "dppo.spaces.actions",
        "dppo.spaces.spaces.leaves",
        "dppo.over_time",
    ),
    "Errors": ("dppo.errors",),
}
"""Headings of the page of the API, and what mkdocstrings shows below each."""
API_OPTIONS = {
    "dppo.Result": "separate_signature: false",
    "dppo.Config": "show_bases: false",
    "dppo.spaces.actions": "members: [Actions, DiscreteActions, MultiDiscreteActions, BoxActions, NestedActions]",
    "dppo.errors": "members: [DppoError, ConfigError, CheckpointError, NotBetter, CheckpointNotWritten, "
    "EnvironmentFault, ControllerFault, ClusterError, TrainingDiverged, OutOfMemory, GPUFailed]",
}


def main() -> int:
    """Write the generated parts, or check them; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="change nothing, and exit with 1 if a page is not current",
    )
    check_only = parser.parse_args().check
    outdated = False
    for name, text in pages():
        page = ROOT / name
        if page.read_text(encoding="utf8") == text:
            continue
        outdated = True
        if check_only:
            print(f"{name} is not current: run python docs/generate.py")
        else:
            page.write_text(text, encoding="utf8")
            print(f"{name} has been written")
    return 1 if outdated and check_only else 0


def pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the current text of each page with generated parts."""
    for name, parts in PARTS_OF_PAGES.items():
        text = (ROOT / name).read_text(encoding="utf8")
        for part in parts:
            text = _replaced(text, part, PARTS[part]())
        yield name, text
    yield FAULT_TABLE, fault_table()


def settings() -> str:
    """Return a table of settings for each group: default, permission to change on resume, help."""
    from dppo.config.algorithms import SAC_DEFAULTS
    from dppo.config.parts import PARTS as GROUPS
    from dppo.config.parts import about, default_of, help_by_name, names_of, types_by_name

    texts = help_by_name()
    tables = []
    for group in GROUPS:
        rows = []
        for name in names_of(group):
            resume = about(name).resume
            default = _default(default_of(name))
            hint = types_by_name()[name]
            if get_origin(hint) is Literal:
                others = [choice for choice in get_args(hint) if choice != default_of(name)]
                default += f" (or {', '.join(map(_default, others))})"
            if name in SAC_DEFAULTS:
                default += f"; `algo` sac: {_default(SAC_DEFAULTS[name])}"
            cells = (f"`{name}`", default, "-" if resume == "fixed" else resume, texts[name])
            rows.append(cells)
        tables.append(f"## {group}\n\n{_table(('setting', 'default', 'resume', ''), rows)}")
    return "\n\n".join(tables)


def _default(value: Any) -> str:
    """Return a value as YAML has it."""
    if repr(value).startswith("<dataclasses"):
        return "required"
    text = value if isinstance(value, str) else json.dumps(value).replace("null", "none")
    return f"`{text}`"


def defaults() -> str:
    """Return a table of the defaults that depend on the task, in the order in which they are tried."""
    from dppo.config import Config
    from dppo.config.resolve import DEFAULTS

    usual = Config(env_id="CartPole-v1")
    reusing = Config(env_id="CartPole-v1", reuse=4, num_steps=32)
    rows = []
    for default in DEFAULTS["ppo"]:
        if callable(default.value):
            value = f"`{default.value(usual)}`; `{default.value(reusing)}` with `reuse` 4"
        else:
            value = _default(default.value)
        rows.append((f"`{default.setting}`", value, default.because or "otherwise"))
    rows += [
        (f"`{default.setting}`", "follows from the run", default.because)
        for default in DEFAULTS["sac"]
    ]
    return _table(("setting", "default", "where"), rows)


def metrics() -> str:
    """Return a table of metrics under each heading, and one of the kinds of incidents."""
    from dppo.records.metrics import registry

    tables = []
    for heading, group in registry.metrics().items():
        rows = []
        for metric in group:
            condition = f" ({metric.condition})" if metric.condition else ""
            rows.append((f"`{metric.key}`", metric.unit, metric.meaning + condition))
        tables.append(f"## {heading}\n\n{_table(('key', 'unit', 'meaning'), rows)}")
    kinds = [(f"`{kind}`", meaning) for kind, meaning in registry.incident_kinds().items()]
    tables.append(f"### Kinds of incidents\n\n{_table(('kind', 'meaning'), kinds)}")
    return "\n\n".join(tables)


class Formula(NamedTuple):
    """A function or class whose docstring names the source of its formula."""

    name: str
    file: str
    title: str
    source: str
    deviation: str


def formulas() -> str:
    """Return a table of the functions whose docstrings have `Source:` or `Deviation:`."""
    from proofs import proofs

    tests = proofs()
    rows = []
    for formula in found_formulas():
        title = formula.title.removeprefix("Return ").removeprefix("the ")
        evidence = [formula.source]
        if formula.deviation:
            evidence.append(f"*Deviation:* {formula.deviation}")
        if formula.name in tests:
            evidence.append("*Tests:* " + ", ".join(f"`{test}`" for test in tests[formula.name]))
        code = f"`{formula.file}::{formula.name}`"
        if title[1].isalpha():  # a formula begins with a variable
            title = title[0].upper() + title[1:]
        rows.append((f"{title}<br>{code}", "<br>".join(evidence)))
    return _table(("formula and code", "source"), rows)


def found_formulas() -> Iterator[Formula]:
    """Yield the documented formulas of the source, in the order of files."""
    for file in sorted((ROOT / "src" / "dppo").rglob("*.py")):
        source = file.read_text(encoding="utf8")
        if "Source:" not in source and "Deviation:" not in source:
            continue
        for name, node in _definitions(ast.parse(source)):
            text = ast.get_docstring(node) or ""
            cited = _labelled(text, "Source")
            deviation = _labelled(text, "Deviation")
            if cited or deviation:
                title = text.splitlines()[0].rstrip(".")
                yield Formula(name, file.relative_to(ROOT).as_posix(), title, cited, deviation)


def _definitions(
    tree: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield prefix + node.name, node
            yield from _definitions(node, f"{prefix}{node.name}.")


def _labelled(text: str, label: str) -> str:
    """Return what follows `label:` in a docstring, up to the next label or the end of the paragraph."""
    pattern = rf"{label}: (.*?)(?=\s(?:Source|Deviation|Returns|Args|Raises): |\n\s*\n|\Z)"
    return " ".join(" ".join(part.split()) for part in re.findall(pattern, text, re.DOTALL))


def fault_table() -> str:
    """Return the page of faults, its last column filled with the tests that prove each row."""
    from proofs import proofs

    tests = proofs()
    lines = []
    for line, cells in _lines_of_faults():
        if not cells:
            lines.append(line)
            continue
        proof = "<br>".join(f"`{test}`" for test in tests.get(fault_of(cells), ()))
        lines.append(_row([*cells[:-1], proof]))
    return "\n".join(lines) + "\n"


def faults() -> list[str]:
    """Return the key of each row of the page of faults, by which the marker `proves` names it."""
    return [fault_of(cells) for _, cells in _lines_of_faults() if cells]


def fault_of(cells: list[str]) -> str:
    """Return the key of a row: its first cell; for rows of the network with the moment and the duration."""
    return f"{cells[0]}: {cells[1]}, {cells[2]}" if len(cells) == 6 else cells[0]


def _lines_of_faults() -> Iterator[tuple[str, list[str]]]:
    """Yield each line of the page of faults, with its cells if it is a row of a table with a column of tests."""
    has_tests = False
    for line in (ROOT / FAULT_TABLE).read_text(encoding="utf8").splitlines():
        is_head = line.endswith("| test |")
        is_row = has_tests and line.startswith("| ")
        yield line, [cell.strip() for cell in line.strip().strip("|").split("|")] if is_row else []
        has_tests = is_head or (has_tests and line.startswith("|"))


def names() -> str:
    """Return the names of other libraries and ours."""
    from dppo.config.aliases import tables

    return "\n".join(tables())


def api() -> str:
    """Return a table of the names of `dppo`, and for each heading what mkdocstrings shows on the site."""
    import dppo

    shown = [name for names_shown in API.values() for name in names_shown]
    missing = [name for name in dppo.__all__ if f"dppo.{name}" not in shown]
    if missing:
        raise ValueError(f"API of docs/generate.py has no heading for {', '.join(missing)}")
    rows = []
    for name in (name.removeprefix("dppo.") for name in shown):
        if name in dppo.__all__:
            definition = inspect.unwrap(getattr(dppo, name))
            title = (inspect.getdoc(definition) or "").splitlines()[0]
            file = Path(inspect.getsourcefile(definition) or "").relative_to(ROOT)
            rows.append((f"`{name}`", title.removesuffix("."), f"`{file.as_posix()}`"))
    parts = [_table(("name", "is", "source"), rows)]
    for heading, names_shown in API.items():
        parts.append(f"## {heading}")
        for name in names_shown:
            options = API_OPTIONS.get(name)
            parts.append(f"::: {name}" + (f"\n    options:\n      {options}" if options else ""))
            if name == "dppo.Observer":
                parts.append(_observer_methods())
    return "\n\n".join(parts)


def _observer_methods() -> str:
    """Return a table of the methods of an observer, with the arguments that a run passes."""
    from dppo.records.observer import Observer
    from dppo.records.observer_checks import METHODS

    rows = []
    for name in METHODS:
        method = getattr(Observer, name)
        arguments = ", ".join(inspect.signature(method).parameters)
        title = (inspect.getdoc(method) or "").splitlines()[0]
        rows.append((f"`{name}({arguments})`", title))
    return _table(("method", ""), rows)


def hashes() -> str:
    """Return the hashes of weights that benchmarks/numerics.py has stored."""
    stored = json.loads(HASHES.read_text(encoding="utf8"))
    kinds = list(next(iter(stored["weights"].values())))
    rows = []
    for command, weights in stored["weights"].items():
        rows.append((f"`{command}`", *(weights[kind] for kind in kinds)))
    table = _table((f"command, with `{stored['settings']}`", *kinds), rows)
    versions = ", ".join(f"{name} {version}" for name, version in stored["versions"].items())
    return f"{table}\n\nMeasured on {stored['cpu']} with {versions}."


def samples() -> str:
    """Return env steps to the modest and the good return, and the end of the runs, for each task and side."""
    from samples_figures import describe_runs, stored
    from samples_tasks import TASKS

    runs = stored(SAMPLES)
    rows = []
    for name, task in TASKS.items():
        held_out = ", held out" if task.held_out else ""
        cells = [describe_runs(runs, side, name) for side in SIDES]
        if any(cells):
            rows.append((f"{name}{held_out} ({task.modest:g}, {task.good:g})", *cells))
    return _table(("task (modest, good)", *SIDES.values()), rows)


def greedy() -> str:
    """Return thousands of env steps to the first good evaluation without noise, and to good training, of each seed."""
    from samples_figures import stored
    from samples_tasks import TASKS

    runs = stored(SAMPLES)
    rows = []
    for name, task in TASKS.items():
        cells = []
        for side in OFF_POLICY_SIDES:
            lines = runs.get((side, name), {})
            seeds = [line for _, line in sorted(lines.items()) if "greedy" in line]
            first = ", ".join(_thousands(line["greedy"]) for line in seeds)
            in_training = ", ".join(_thousands(line["good"]) for line in seeds)
            cells.append(f"**{first}**; {in_training}" if seeds else "")
        if any(cells):
            rows.append((f"{name} ({task.good:g})", *cells))
    return _table(("task (good)", *OFF_POLICY_SIDES.values()), rows)


def _thousands(steps: int | None) -> str:
    return "-" if steps is None else f"{steps / 1000:.0f}"


def crossings() -> str:
    """Return from which step time on soft actor-critic is faster than reuse, for each task and number of actors."""
    from samples_crossing import ACTORS, rows_of_crossings
    from samples_figures import stored

    rows = list(rows_of_crossings(stored(SAMPLES), "sac", "reuse"))
    if not rows:
        return "Not measured yet: `samples.jsonl` has no rows of the side `sac`."
    actors = ["1 actor", *(f"{count} actors" for count in ACTORS[1:])]
    head = ("task", "env steps", "with reuse", "ms of updates", "with reuse", *actors)
    return _table(head, rows)


def shares() -> str:
    """Return the median share of Stable-Baselines3's env steps to the good return, with its interval."""
    from samples_figures import interval, median_ratio, reached, stored
    from samples_tasks import TASKS

    runs = stored(SAMPLES)
    compared = ("dppo", "reuse", "sb3")
    tasks = [name for name in TASKS if all(reached(runs, side, name, "good") for side in compared)]
    rows = []
    for side in compared[:-1]:
        low, high = interval(runs, side, "sb3", tasks, "good")
        steps = [step for name in tasks for step in reached(runs, side, name, "good")]
        good = sum(step < float("inf") for step in steps)
        share = f"{median_ratio(runs, side, 'sb3', tasks, 'good'):.2f}"
        settings_of_side = (
            "`dppo`, defaults" if side == "dppo" else "`dppo --reuse 4 --num-steps 32`"
        )
        rows.append(
            (settings_of_side, share, f"{low:.2f} to {high:.2f}", f"{good} of {len(steps)}")
        )
    head = (
        "",
        f"share of Stable-Baselines3's env steps (median of {len(tasks)} tasks)",
        "95 % interval",
        "seeds that get there",
    )
    return _table(head, rows)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [_row(head), "|---" * len(head) + "|"]
    for row in rows:
        lines.append(_row(cell.replace("|", "&#124;") for cell in row))
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def _replaced(text: str, part: str, generated: str) -> str:
    pattern = rf"(<!-- generated: {part} -->\n).*?(<!-- end -->)"
    if not re.search(pattern, text, re.DOTALL):
        raise ValueError(f"no page has the comment <!-- generated: {part} -->")
    return re.sub(
        pattern, lambda match: f"{match[1]}\n{generated}\n\n{match[2]}", text, flags=re.DOTALL
    )


PARTS: dict[str, Callable[[], str]] = {
    "settings": settings,
    "defaults": defaults,
    "metrics": metrics,
    "formulas": formulas,
    "names": names,
    "api": api,
    "hashes": hashes,
    "samples": samples,
    "shares": shares,
    "greedy": greedy,
    "crossings": crossings,
}
PARTS_OF_PAGES = {
    "docs/SETTINGS.md": ("defaults", "settings"),
    "docs/METRICS.md": ("metrics",),
    "docs/API.md": ("api",),
    "docs/ALGORITHM.md": ("formulas",),
    "docs/COMPARISON.md": ("names", "shares"),
    "docs/REPRODUCIBILITY.md": ("hashes",),
    "benchmarks/results/samples.md": ("samples", "greedy", "crossings"),
}

if __name__ == "__main__":
    sys.exit(main())
