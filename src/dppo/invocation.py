"""Commands that are printed for the user to type: they begin as this program was called."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "DPPO_CALLED_AS"
"""The launcher, and a command that starts others in its place, pass on how they were called."""
NAMES = "train|compare|tune|eval|export|doctor|diff|report|plot|replay|verify|presets|test"
TYPED = re.compile(rf"(?<![\w/.-])(?<!-m )dppo (?=(?:{NAMES}|COMMAND|--help)\b)")

_called_as: list[str] = []  # one at most
# the words of the command that runs in this process; none within a program
_commands: list[list[str]] = []


def take_called_as() -> None:
    """Take the variable out of the environment, so that no other process takes it for its own."""
    path = os.environ.pop(VARIABLE, "")
    if path:
        _called_as[:] = [path]


@contextmanager
def running(words: Sequence[str]) -> Iterator[None]:
    """Context of a command of `dppo`, whose messages name commands; those of a program name calls of Python."""
    _commands.append(list(words))
    try:
        yield
    finally:
        _commands.pop()


def typed_words() -> list[str] | None:
    """Return the words behind `dppo` of the command that runs in this process; None within a program of the user's."""
    return _commands[-1] if _commands else None


def typed_path() -> str:
    """Return the path of the launcher or script as it was typed; "" for `python -m dppo` and programs of users."""
    if _called_as:
        return _called_as[0]
    script = sys.argv[0] if sys.argv else ""
    return script if Path(script).name == "dppo" else ""


def program() -> str:
    """Return the word or words, quoted for a shell, with which the user can call `dppo`.

    That is the path that was typed, such as `./dppo`, its name if it is on the PATH, `dppo` if the one of this
    interpreter is on the PATH, or `python -m dppo`.
    """
    path = typed_path()
    if path:
        return shlex.quote(_short_path(path))
    bin_dir = Path(sys.executable).parent
    on_path = shutil.which("dppo")
    if on_path is not None and bin_dir in (
        Path(on_path).parent,
        Path(on_path).resolve().parent / ".venv" / "bin",
    ):
        return "dppo"
    python = shutil.which("python")
    if python is not None and Path(python).parent == bin_dir:
        return "python -m dppo"
    return f"{shlex.quote(sys.executable)} -m dppo"


def _short_path(path: str) -> str:
    """Return the name of a program if its path is that which the PATH leads to, otherwise the path."""
    name = Path(path).name
    return name if shutil.which(name) == path else path


def command(*words: object) -> str:
    """Return a command as the user would type it: `command("train", "--resume", run_dir)`."""
    return " ".join([program(), *(shlex.quote(str(word)) for word in words)])


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def as_setting_and_flag(name: str, value: object) -> str:
    """Return a setting as it is written in Python and on the command line: `num_actors=8 (--num-actors 8)`."""
    words = flag(name)
    if value is not True:
        words += f" {value}"
    return f"{name}={value} ({words})"


def as_called(text: str) -> str:
    """Return one of our own texts with its commands, such as `dppo presets`, as the user would type them."""
    return TYPED.sub(lambda _: f"{program()} ", text)
