"""`dppo COMMAND ...`: find the command, and turn errors into words and exit codes."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from dppo.errors import ConfigError, DppoError, unknown_name

COMMANDS = {
    "train": "train a policy: dppo train CartPole-v1 --num-actors 8",
    "compare": "what more actors gain, as a picture: dppo compare dppo/SlowCartPole-v0 --actors 1 8",
    "eval": "play with a trained policy: dppo eval runs/...",
    "test": "run the tests of a source checkout",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit code: 0 done, 1 failed, 2 wrong usage, 128 + n stopped by signal n."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if args else 2
    if args[0] in ("-V", "--version", "version"):
        from dppo import __version__

        print(f"dppo {__version__}")
        return 0
    if args[0] not in COMMANDS:
        print(f"dppo: {unknown_name('command', args[0], COMMANDS)} `dppo --help` lists them.", file=sys.stderr)
        return 2
    sys.path.insert(0, os.getcwd())  # so that `module:Name` finds the user's own files, as `python -m` would
    try:
        code: int = import_module(f"dppo.commands.{args[0]}").main(args[1:])
        return code
    except DppoError as error:
        print(f"dppo {args[0]}: {_as_typed(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"dppo {args[0]}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone: `dppo ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _as_typed(error: DppoError) -> str:
    """Return the text of an error, which is about settings, with remedies that can be typed."""
    if not isinstance(error, ConfigError):
        return str(error)
    from dppo.commands.settings_flags import in_flags

    return in_flags(str(error))


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "dppo: distributed PPO on Ray. The number of actors changes the time, never the result.",
            "",
            "usage: dppo COMMAND ...",
            "",
            *lines,
            "",
            "`dppo COMMAND --help` shows the settings of each.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
