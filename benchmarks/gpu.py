"""Try and time learning on a GPU, in less than 8 minutes.

    python benchmarks/gpu.py                          all parts on the GPU
    python benchmarks/gpu.py --only pong memory
    python benchmarks/gpu.py --device cpu             the same, with small sizes, where there is no GPU

Needs dppo, or its checkout, and torch with CUDA; no network. Each part runs in a process of its own and is ended at its
limit. The JSON file has the rows of each part as soon as it ends. Prints a table; the exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import HERE, REPO, machine, ours_environment, stop

sys.path.insert(0, str(REPO / "src"))
from dppo import portable_numerics

portable_numerics()  # before NumPy is imported
from gpu_parts import PARTS, Setting, row  # noqa: E402

PATIENCE = 4  # times the limit of a part, on a CPU, which may be busy
ENDED = "ended at its limit of {} s"


def main() -> int:
    """Run the parts, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART"
    )
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="where to write")
    parser.add_argument(
        "--logs", type=Path, help="folder for the output of each part; default: it is dropped"
    )
    # of a child: run this part here
    parser.add_argument("--rows-of", choices=list(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rows_of is not None:
        return child(options.rows_of, options.device, options.json)
    report: dict[str, Any] = {
        "machine": machine(),
        "gpu": gpu_in_words(),
        "device": options.device,
        "parts": {},
    }
    for name in options.only:
        print(f"{name} ...", file=sys.stderr, flush=True)
        report["parts"][name] = part(name, options.device, options.logs)
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf8")
    print(table(report))
    return int(
        any(each["passed"] is False for one in report["parts"].values() for each in one["rows"])
    )


def part(name: str, device: str, logs: Path | None) -> dict[str, Any]:
    """Run a part in a process of its own; return its rows, also those from before it was ended, and its time."""
    limit_s = PARTS[name].limit_s * (1 if device == "cuda" else PATIENCE)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        command = [
            sys.executable,
            str(HERE / "gpu.py"),
            "--rows-of",
            name,
            "--device",
            device,
            "--json",
            str(file),
        ]
        began = time.perf_counter()
        output = open(logs / f"{name}.log", "wb") if logs else open(os.devnull, "wb")  # noqa: SIM115
        with output:
            process = subprocess.Popen(
                command,
                env=ours_environment(),
                cwd=folder,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                code = process.wait(limit_s)
                failure = f"exit code {code}" if code else ""
            except subprocess.TimeoutExpired:
                failure = ENDED.format(f"{limit_s:.0f}")
            finally:
                stop(process)
        rows = (
            [json.loads(line) for line in file.read_text("utf8").splitlines()]
            if file.exists()
            else []
        )
    if failure:
        rows.append(row("the part", False, error=failure))
    return {"rows": rows, "wall_s": round(time.perf_counter() - began, 1)}


def child(name: str, device: str, file: Path) -> int:
    """Run a part in this process, and write each row at once."""
    import traceback

    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder, open(file, "a", encoding="utf8") as rows:
        try:
            for made in PARTS[name].rows(Setting(device, cores, Path(folder))):
                print(json.dumps(made), file=rows, flush=True)
        except Exception as error:
            traceback.print_exc()
            failed = row("the part", False, error=f"{type(error).__name__}: {error}")
            print(json.dumps(failed), file=rows, flush=True)
    return 0


def gpu_in_words() -> str:
    """Return name, memory and versions of the GPU, without making a context of CUDA in this process."""
    program = (
        "import torch; p = torch.cuda.get_device_properties(0); "
        "print(f'{p.name}, {p.total_memory / 1e9:.0f} GB; torch {torch.__version__}, CUDA {torch.version.cuda}, '"
        "f'cuDNN {torch.backends.cudnn.version()}; {torch.cuda.device_count()} GPU')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    return done.stdout.strip() or "no GPU"


def table(report: dict[str, Any]) -> str:
    """Return the rows of all parts as a table of Markdown."""
    words = {True: "yes", False: "**no**", None: ""}
    lines = [f"{report['gpu']}; {report['machine']['cpu']}, {report['machine']['cores']} cores", ""]
    for name, one in report["parts"].items():
        lines += [f"{name} ({one['wall_s']:.0f} s)", "", "| | passed | |", "|---|---|---|"]
        for each in one["rows"]:
            figures = "; ".join(
                f"{key.replace('_', ' ')} {value}" for key, value in each["figures"].items()
            )
            lines.append(
                f"| {each['what']} | {words[each['passed']]} | {figures} |".replace("\n", " ")
            )
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
