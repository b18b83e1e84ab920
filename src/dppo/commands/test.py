"""`dppo test`: run the tests of the source checkout that dppo was installed from."""

import os
import sys
import time
from pathlib import Path

from dppo.invocation import as_called

PROG = "dppo test"
USAGE = """\
usage: dppo test [--quick | --slow] [PYTEST ARGUMENT ...]

Run the tests of a source checkout.

  --quick   for users: one run of each kind, to check this installation, in one process; about a minute
  (nothing) for developers: the fast tests, in three processes; 3 minutes on an idle machine with two cores, longer on
            a busy one
  --slow    for developers: all tests, in two processes; hours

Other arguments are passed on to pytest, and paths are relative to the root of the checkout. For example, in one
process, where a debugger works:
dppo test -n 0 tests/test_launcher.py -k symlink -x"""
# tests are distributed by file, because tests of a file share fixtures
SPREAD = ["--dist", "loadfile", "-n"]
# processes: one of the three runs all tests on Ray, and mostly waits for actors
PROCESSES = {"fast": "3", "slow": "2"}
# runs of every kind in process, resumed, and with actors
QUICK = ["-n", "0", "tests/test_promise.py"]
ABOUT = {
    "quick": "One run of each kind, to check this installation: about a minute.",
    "fast": "The fast tests, for developers: 3 minutes on an idle machine with two cores, longer on a busy one. "
    "--quick takes a minute.",
    "slow": "All tests, for developers: hours.",
}


def main(argv: list[str]) -> int:
    """Become pytest, run in the source checkout. Return 0 after `--help`, and 2 without a checkout."""
    if argv[:1] in (["-h"], ["--help"]):
        print(as_called(USAGE))
        return 0
    checkout = Path(__file__).resolve().parents[3]
    if not (checkout / "tests" / "conftest.py").is_file():
        print(
            f"{PROG}: dppo was installed without its tests. Run ./dppo test in a clone.",
            file=sys.stderr,
        )
        return 2
    kind = "fast"
    if "--quick" in argv:
        kind = "quick"
    elif "--slow" in argv:
        kind = "slow"
    everything = ["-m", ""] if kind == "slow" else []  # undoes the -m "not slow" of pyproject.toml
    passed_on = [word for word in argv if word not in ("--quick", "--slow")]
    chosen = QUICK if kind == "quick" else [*SPREAD, PROCESSES[kind]]
    if not passed_on:
        print(f"{PROG}: {ABOUT[kind]} It is {time.strftime('%H:%M')} now.", flush=True)
    os.chdir(checkout)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile all tests again
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *chosen, *everything, *passed_on])
