"""Train six short runs, and print the hash of their weights: with portable, strict and native numerics.

    python benchmarks/numerics.py [--kinds portable strict native]
    python benchmarks/numerics.py --write    store the hashes, for docs/generate.py

Two machines agree if the column "strict" agrees, and "portable" if both or neither have AVX-512. The stored hashes are
those of results/numerics.json; tests/test_generated.py compares them. Each run is a command of its own, because NumPy
and torch choose their code when they are loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

from dppo.numerics.fingerprint import Probe, cpu_name, fingerprint

HERE = Path(__file__).resolve().parent
STORE = HERE / "results" / "numerics.json"
SETTINGS = "--preset fast"
KINDS = ("portable", "strict", "native")
PACKAGES = ("numpy", "torch", "gymnasium")
COMMANDS = (
    "CartPole-v1 --total-timesteps 60000",
    "Pendulum-v1 --norm-obs --norm-reward --total-timesteps 16384",
    "CartPole-v1 --memory lstm --total-timesteps 16384",
    "bench_envs:Squares --image-encoder nature --total-timesteps 4096",
    "bench_envs:Squares --image-encoder impala --total-timesteps 2048",
    "Acrobot-v1 --total-timesteps 16384",
)


def hash_of(command: str, kind: str) -> str:
    """Return the first 16 digits of the hash of the weights that `dppo train COMMAND` ends with."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            *command.split(),
            *SETTINGS.split(),
            "--numerics",
            kind,
            "--run-dir",
            f"{folder}/run",
        ]
        paths = [str(HERE.parent / "src"), str(HERE)]
        done = subprocess.run(
            [sys.executable, "-m", "dppo", "train", *arguments],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            check=False,
        )
    digits = re.search(r"sha256 ([0-9a-f]{16})", done.stdout)
    if done.returncode or digits is None:
        sys.exit(f"{command}: {done.stderr or done.stdout}")
    return digits[1]


def installed_versions() -> dict[str, str]:
    """Return the versions on which the last bits depend."""
    return {name: version(name).partition("+")[0] for name in PACKAGES}


def milliseconds_of_a_fingerprint() -> float:
    """Return the time of one fingerprint with torch, images and 64 x 64 units; the first one also loads libraries."""
    times = []
    for _ in range(10):
        began = time.perf_counter()
        fingerprint(Probe(8, (64, 64), images=True), torch=True)
        times.append(1e3 * (time.perf_counter() - began))
    return median(times)


def main() -> None:
    """Print a table in Markdown, row by row, and the time of a fingerprint."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--write", action="store_true", help=f"store all kinds in {STORE.name}")
    options = parser.parse_args()
    kinds = KINDS if options.write else options.kinds
    print(
        f"| {cpu_name()}: `dppo train ... {SETTINGS}` | {' | '.join(kinds)} |\n|---|{'---|' * len(kinds)}"
    )
    weights = {}
    for command in COMMANDS:
        weights[command] = {kind: hash_of(command, kind) for kind in kinds}
        print(f"| `{command}` | {' | '.join(weights[command].values())} |", flush=True)
    print(f"\nA fingerprint takes {milliseconds_of_a_fingerprint():.0f} ms.")
    if options.write:
        stored = {
            "settings": SETTINGS,
            "cpu": cpu_name(),
            "versions": installed_versions(),
            "weights": weights,
        }
        STORE.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
