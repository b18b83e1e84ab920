"""`dppo test`: run the tests of the source tree that this installation was made from."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from dppo.commands.parser import Parser, asks_for_help

PROG = "dppo test"
DESCRIPTION = (
    "Run the tests of a source checkout with pytest: the fast set, or all of them with --slow. All other words go to "
    "pytest; paths count from the root of the checkout. For example: dppo test tests/test_launcher.py -k symlink -x"
)


def main(argv: list[str]) -> int:
    """Run pytest in the source tree; return its exit code, or 2 where tests or pytest are missing."""
    parser = Parser(PROG, "[--slow] [PYTEST ARGUMENT ...]", DESCRIPTION)
    parser.add_argument("--slow", action="store_true", help="run the slow tests (learning, soak) as well")
    if asks_for_help(argv[:1]):
        parser.print_help()
        return 0
    own, arguments = parser.parse_known_args(argv)
    root = find_source_tree([Path(__file__).resolve().parent, Path.cwd()])
    if root is None:
        print(
            "dppo test: there are no tests here: dppo was installed without its source tree "
            f"({Path(__file__).resolve().parents[1]}), and {Path.cwd()} is in none.\n"
            "  Run it in a clone of the repository: ./dppo test",
            file=sys.stderr,
        )
        return 2
    if find_spec("pytest") is None:
        print(
            f"dppo test: pytest is not installed for {sys.executable}.\n"
            f"  {sys.executable} -m pip install -c constraints.txt -e '.[test]'   (in {root})",
            file=sys.stderr,
        )
        return 2
    everything = ["-m", ""] if "slow" in own else []  # undoes the -m "not slow" of pyproject.toml
    return _run([sys.executable, "-m", "pytest", *everything, *arguments], root)


def find_source_tree(starts: list[Path]) -> Path | None:
    """Return the nearest folder at or above one of `starts` that is a checkout of dppo with its tests."""
    for start in starts:
        for folder in (start, *start.parents):
            if (folder / "tests").is_dir() and _project_name(folder / "pyproject.toml") == "dppo":
                return folder
    return None


def _project_name(pyproject: Path) -> str | None:
    # By hand, since Python 3.10 has no tomllib: the name under [project], before the next table.
    try:
        text = pyproject.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    found = re.search(r"""^\[project\](?:(?!^\[).)*?^name\s*=\s*["']([^"']*)["']""", text, re.MULTILINE | re.DOTALL)
    return found.group(1) if found else None


def _run(command: list[str], folder: Path) -> int:
    """Run to the end. Ctrl-C reaches pytest by itself, SIGTERM is handed on: pytest ends, then we do."""
    with subprocess.Popen(command, cwd=folder) as child:
        before = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        try:
            while True:
                try:
                    code = child.wait()
                    break
                except KeyboardInterrupt:
                    continue
        finally:
            signal.signal(signal.SIGTERM, before)
    return code if code >= 0 else 128 - code
