"""Prove that a change to dppo changes no result: record a table of short runs twice, and compare to the bit.

    python benchmarks/unchanged.py against main                # main, then this working tree: 2 x 90 s on 2 cores
    python benchmarks/unchanged.py against HEAD~1 --fast       # without the runs on Ray
    python benchmarks/unchanged.py record before.json          # or step by step
    python benchmarks/unchanged.py compare before.json after.json --ignore arrays

Only the public API and the files of the run folder are used, so that any revision can be recorded. `unchanged_runs.py`
holds the table. The environments are those of this working tree, for all revisions. Both records must be made on one
type of CPU with the same packages.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import HERE, REPO, machine
from unchanged_runs import MARKER, SMALL, TABLE, Run, Settings

if TYPE_CHECKING:
    import dppo

# columns of metrics.jsonl that depend on the clock, besides replay/s
TIMES = ("time/", "perf/", "charts/SPS")
# On a busy machine an actor may start so late that its samplers move, and are replayed.
BUSY = ("actors/alive", "replay/steps", "incidents/samplers_moved")
# zero or absent in process, by the version
ACTORS = ("actors/alive", "actors/memory_gb")
Record = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "against"):
        command = commands.add_parser(name)
        command.add_argument(
            "--only", nargs="+", default=[], metavar="TEXT", help="runs whose name contains a TEXT"
        )
        command.add_argument("--fast", action="store_true", help="leave out the runs on Ray")
        if name == "record":
            command.add_argument("out", type=Path)
            command.add_argument(
                "--source", type=Path, default=REPO / "src", help="folder that contains dppo"
            )
        else:
            command.add_argument("revision")
            command.add_argument("--ignore", nargs="+", default=[])
    command = commands.add_parser("compare")
    command.add_argument("before", type=Path)
    command.add_argument("after", type=Path)
    command.add_argument(
        "--ignore", nargs="+", default=[], metavar="ASPECT", help="such as arrays or files"
    )
    wanted = parser.parse_args()
    if wanted.command == "record":
        return record(wanted.out, wanted.source.resolve(), wanted.only, fast=wanted.fast)
    if wanted.command == "against":
        return against(wanted.revision, wanted.only, wanted.ignore, fast=wanted.fast)
    return compare(
        json.loads(wanted.before.read_text()), json.loads(wanted.after.read_text()), wanted.ignore
    )


# ------------------------------------------------------------------ recording


def record(out: Path, source: Path, only: list[str], *, fast: bool) -> int:
    """Write a record of each run of the table, made by the dppo in `source`; return 1 if one failed."""
    paths = [str(source), str(REPO / "tests"), str(HERE)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for Ray's workers
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    table = {
        name: run for name, run in TABLE.items() if not only or any(text in name for text in only)
    }
    if fast:
        table = {name: run for name, run in table.items() if not run.on_ray}
    _be_quiet(source)
    if any(run.on_ray for run in table.values()):
        _start_ray()
    runs: dict[str, Record] = {}
    began = time.monotonic()
    for name, run in table.items():
        started = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as folder:
                runs[name] = _recorded(run, Path(folder))
        except Exception as error:
            runs[name] = {"error": f"{type(error).__name__}: {error}"}
        print(
            f"{time.monotonic() - started:6.2f} s  {name}  {runs[name].get('error', '')}",
            flush=True,
        )
    out.write_text(
        json.dumps({"machine": machine(), "runs": runs}, indent=1, sort_keys=True) + "\n"
    )
    failed = sum("error" in run for run in runs.values())
    print(f"{len(runs)} runs in {time.monotonic() - began:.0f} s, {failed} failed: {out}")
    return int(failed > 0)


def _be_quiet(source: Path) -> None:
    import dppo

    if Path(dppo.__file__).resolve().parents[1] != source:
        raise SystemExit(f"{source}: contains no dppo")
    logging.getLogger("dppo").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")


def _start_ray() -> None:
    """Start one Ray, which the runs use because this process is connected to it."""
    os.environ |= {
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_IGNORE_UNHANDLED_ERRORS": "1",
        "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",  # one is, on purpose
    }
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        object_store_memory=256 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


def _recorded(run: Run, folder: Path) -> Record:
    """Train, and return all that must not change: the whole result without times."""
    import dppo

    result = _trained(run, folder)
    record: Record = {
        "weights": result.weights_sha256,
        "global_step": result.global_step,
        "episodes": result.episodes,
        "incidents": {
            kind: n for kind, n in result.incidents.items() if f"incidents/{kind}" not in BUSY
        },
        "rows": _rows(result.run_dir, on_ray=run.on_ray),
        "files": sorted(
            {_timeless(path.relative_to(result.run_dir)) for path in result.run_dir.rglob("*")}
        ),
        **_checkpoint(result.checkpoint),
    }
    played = dppo.evaluate(result, episodes=1, deterministic=False)
    return record | {"evaluation": [*played.returns, *played.lengths]}


def _trained(run: Run, folder: Path) -> dppo.Result:
    """Return the result of the run, or of its second part."""
    import dppo

    class Stop(dppo.Observer):
        def on_iteration(self, row: dict[str, float]) -> bool:
            return row["iteration"] >= run.stop_after

    first = _config(run, folder / "run", {})
    if run.then is None:
        return dppo.train(first)
    stopped = dppo.train(first, observers=[Stop()])
    if run.then == "branch":
        return dppo.train(
            _config(run, folder / "branch", run.changes), resume=stopped.run_dir, branch=True
        )
    start: dict[str, str | Path] = {
        "resume": stopped.run_dir,
        "auto": "auto",
        "older": stopped.checkpoint.with_stem("iter_000001"),
    }
    return dppo.train(_config(run, stopped.run_dir, run.changes), resume=start[run.then])


def _config(run: Run, run_dir: Path, changes: Settings) -> dppo.Config:
    import dppo

    settings: Settings = (
        ({"progress": "off"} if run.preset else SMALL)
        | run.settings
        | changes
        | {"run_dir": run_dir}
    )
    if MARKER in settings.get("env_kwargs", {}).values():
        settings["env_kwargs"] = {"marker": str(run_dir.with_name("marker"))}
    make = partial(dppo.Config.preset, settings.pop("env_id")) if run.preset else dppo.Config
    config: dppo.Config = make(**settings)
    return config


def _rows(run_dir: Path, *, on_ray: bool) -> list[Record]:
    """Return the rows of metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    left_out = ("replay/s", *(BUSY if on_ray else ACTORS))
    return [
        {
            key: value
            for key, value in row.items()
            if key not in left_out and not key.startswith(TIMES)
        }
        for row in lines
    ]


def _timeless(path: Path) -> str:
    return "events.out.tfevents" if path.name.startswith("events.out.tfevents") else str(path)


def _checkpoint(path: Path) -> Record:
    """Return the arrays of a checkpoint, by name, and the names in its metadata."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
        metadata: dict[str, str] = file.metadata()
    described = {
        name: f"{array.dtype}{list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"
        for name, array in arrays.items()
    }
    return {
        "arrays": described,
        "state": sorted(key for text in metadata for key in _keys(text, metadata[text])),
    }


def _keys(name: str, value: Any) -> Iterator[str]:
    """Yield the name of a value of the metadata, and those inside it if it is a dict, or a dict as JSON."""
    yield name
    if isinstance(value, str) and value.startswith("{"):
        value = json.loads(value)
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _keys(f"{name}.{key}", inner)


# ------------------------------------------------------------------ comparing


def compare(before: Record, after: Record, ignore: list[str]) -> int:
    """Print a line for each run that differs; return 1 if one does, or if there is nothing to compare."""
    for name in ("cpu", "versions"):
        if before["machine"][name] != after["machine"][name]:
            print(
                f"Not comparable: {name}: {before['machine'][name]}, then {after['machine'][name]}"
            )
    old, new = before["runs"], after["runs"]
    common = [name for name in old if name in new]
    different = 0
    for name in common:
        found = [
            text
            for key in old[name] | new[name]
            if key not in ignore
            for text in _aspect(key, old[name], new[name])
        ]
        if found:
            different += 1
            print(f"{name}: {'; '.join(found)}")
    for which, names in (("before", old.keys() - new.keys()), ("after", new.keys() - old.keys())):
        if names:
            print(f"only {which}: {', '.join(sorted(names))}")
    print(f"{len(common)} runs: {f'{different} differ' if different else 'all equal'}")
    return int(different > 0 or not common)


def _aspect(key: str, before: Record, after: Record) -> Iterator[str]:
    """Yield a text if the two records differ in this aspect, or if it is a failure."""
    old, new = before.get(key), after.get(key)
    if key == "error":
        yield f"failed: {old or 'not before'}, then {new or 'not after'}"
    elif key == "rows" and old and new:
        pairs = enumerate(zip(old, new, strict=False))
        # new metrics
        first = next((number for number, (a, b) in pairs if not a.items() <= b.items()), None)
        if first is not None:
            yield f"row {first + 1} of metrics: {_named(old[first], new[first])}"
        elif len(old) != len(new):
            yield f"{len(old)} rows of metrics, then {len(new)}"
    elif isinstance(old, dict) and isinstance(new, dict):
        if old != new:
            yield f"{key}: {_named(old, new)}"
    elif key in ("files", "state") and old and new:
        if old != new:
            yield f"{key}: {_named(dict.fromkeys(old), dict.fromkeys(new))}"
    elif old != new and "error" not in before | after:
        yield f"{key}: {_short(old)}, then {_short(new)}"


def _named(old: Record, new: Record) -> str:
    """Describe the difference between two dicts: names removed, names added, the first other value."""
    texts = [f"without {name}" for name in old if name not in new] + [
        f"with {name}" for name in new if name not in old
    ]
    others = [name for name in old if name in new and old[name] != new[name]]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        texts.append(f"{others[0]} {_short(old[others[0]])}, then {_short(new[others[0]])}{more}")
    return ", ".join(texts)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 48 else f"{text[:12]}..."


def against(revision: str, only: list[str], ignore: list[str], *, fast: bool) -> int:
    """Record a revision in a temporary worktree, then the working tree, and compare them."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(REPO), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            records = []
            for name, source in (("before", tree / "src"), ("after", REPO / "src")):
                print(f"{name}: {source}", flush=True)
                out = Path(folder) / f"{name}.json"
                words = ["record", str(out), "--source", str(source), *(["--fast"] if fast else [])]
                words += ["--only", *only] if only else []
                # failures are in the record
                subprocess.run([sys.executable, __file__, *words], check=False)
                records.append(json.loads(out.read_text()))
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=False)
    return compare(records[0], records[1], ignore)


if __name__ == "__main__":
    sys.exit(main())
