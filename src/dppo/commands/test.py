"""`dppo test`: run the tests of the source checkout that dppo was installed from."""

import os
import sys
from pathlib import Path

USAGE = """\
usage: dppo test [--slow] [PYTEST ARGUMENT ...]

Run the fast tests of a source checkout, or all tests with --slow, in two processes. Other arguments are passed on to
pytest, and paths are relative to the root of the checkout. For example, in one process, where a debugger works:
dppo test -n 0 tests/test_launcher.py -k symlink -x"""
TWO_PROCESSES = ["-n", "2", "--dist", "loadfile"]  # by file, because tests of a file share what they set up


def main(argv: list[str]) -> int:
    """Become pytest, run in the source checkout. Return 0 after `--help`, and 2 without a checkout."""
    if argv[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    checkout = Path(__file__).resolve().parents[3]
    if not (checkout / "tests" / "conftest.py").is_file():
        print("dppo test: dppo was installed without its tests. Run ./dppo test in a clone.", file=sys.stderr)
        return 2
    everything = ["-m", ""] if "--slow" in argv else []  # undoes the -m "not slow" of pyproject.toml
    passed_on = [word for word in argv if word != "--slow"]
    os.chdir(checkout)
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *TWO_PROCESSES, *everything, *passed_on])
