"""Train six short runs, and print the hash of their weights and their speed: with portable, strict and native numerics.

    python benchmarks/numerics.py [--kinds portable strict native]

Two machines agree if the column "strict" agrees, and "portable" if both or neither have AVX-512. The hashes seen
so far are in docs/REPRODUCIBILITY.md. Each run is a command of its own, because NumPy and torch choose their code when
they are loaded.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from dppo.numerics.fingerprint import Probe, cpu_name, fingerprint

HERE = Path(__file__).resolve().parent
COMMANDS = (
    "CartPole-v1 --total-timesteps 60000",
    "Pendulum-v1 --norm-obs --norm-reward --total-timesteps 16384",
    "CartPole-v1 --memory lstm --total-timesteps 16384",
    "bench_envs:Squares --image-encoder nature --total-timesteps 4096",
    "bench_envs:Squares --image-encoder impala --total-timesteps 2048",
    "Acrobot-v1 --total-timesteps 16384",
)


def weights_of(command: str, kind: str) -> str:
    """Return the first 16 digits of the hash of the weights that `dppo train COMMAND` ends with, and its speed."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*command.split(), "--preset", "fast", "--numerics", kind, "--run-dir", f"{folder}/run"]
        paths = [str(HERE.parent / "src"), str(HERE)]
        done = subprocess.run(
            [sys.executable, "-m", "dppo", "train", *words],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            check=False,
        )
    found = re.search(r"sha256 ([0-9a-f]{16})", done.stdout)
    speed = re.search(r"\((\S+) steps/s", done.stdout)
    if done.returncode or found is None or speed is None:
        sys.exit(f"{command}: {done.stderr or done.stdout}")
    return f"{found.group(1)}, {speed.group(1)}/s"


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--kinds", nargs="+", choices=["portable", "strict", "native"], default=["portable", "strict", "native"]
    )
    kinds = parser.parse_args().kinds
    print(f"| {cpu_name()}: `dppo train ... --preset fast` | {' | '.join(kinds)} |\n|---|{'---|' * len(kinds)}")
    for command in COMMANDS:
        print(f"| `{command}` | {' | '.join(weights_of(command, kind) for kind in kinds)} |", flush=True)
    print(f"\nA fingerprint takes {milliseconds_of_a_fingerprint():.0f} ms.")


if __name__ == "__main__":
    main()
