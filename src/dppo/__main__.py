"""`dppo COMMAND ...`: run a command, and turn errors into messages and exit codes."""

import os
import sys
import threading
from io import TextIOWrapper

from dppo import __version__
from dppo.commands.discovery import CORE, command_modules, main_of, summary
from dppo.commands.versions import other_versions
from dppo.errors import DppoError, EnvironmentFault, printable, unknown_name
from dppo.invocation import as_called, program, running, take_called_as
from dppo.numerics.portable import portable_numerics
from dppo.signals import RaisingSignals, StopRequested, leave_if_noted
from dppo.user_code import check_current_folder, hidden_by, in_a_line

STUCK_S = 1.0  # longest wait for the end of a thread with nothing left to do
MEANT = {
    "resume": "train --resume RUN",
    "play": "eval RUN",
    "enjoy": "eval RUN",
    "evaluate": "eval RUN",
    "run": "train ENV_ID",
}
USAGE = """\
dppo: distributed PPO on Ray, and SAC with --algo sac. The number of actors changes the time, never the result.

usage: dppo COMMAND ...

{commands}

Examples:
  dppo train CartPole-v1
  dppo train mysim:make --num-actors 8     mysim.py is in the current folder
  dppo compare dppo/SlowCartPole-v0 --actors 1 8
  dppo eval runs/NAME
  dppo doctor mysim:make

`dppo COMMAND --help` lists the flags of a command."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit code: 0 success, 1 failure, 2 wrong usage, 128 + n stopped by signal n."""
    code = None
    _open_closed_streams()
    if isinstance(sys.stdout, TextIOWrapper):  # text that its encoding lacks must not end a command
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            with RaisingSignals():
                code = _run(argv)
            leave_if_noted(code)
            return code
        except SystemExit as ending:
            leave_if_noted(ending.code if isinstance(ending.code, int) else 1)
            raise
        finally:
            sys.stdout.flush()  # at exit, an error could not be handled any more
    except BrokenPipeError:  # the reader of our output has exited: `dppo ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141 if code is None else code
    finally:
        if argv is None and code is not None:
            _leave_stuck_calls(code)


def _open_closed_streams() -> None:
    """Open standard streams that are closed, as a daemon may leave them: Ray cannot start without stderr."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # gets the number of the stream, also in programs that are started, where a socket would get it
            stream = open(os.devnull, mode)  # noqa: SIM115 - until the process ends
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _leave_stuck_calls(code: int) -> None:
    """End this process if a call to a disk or a tracker is stuck: at exit, packages of trackers would wait for it."""
    for thread in threading.enumerate():
        if thread.name.startswith("dppo: "):
            thread.join(STUCK_S)
            if thread.is_alive():
                os._exit(code)


def _run(argv: list[str] | None) -> int:
    args = sys.argv[1:] if argv is None else argv
    take_called_as()
    if not args or args[0] in ("-h", "--help", "help"):
        print(as_called(USAGE.format(commands=_listed_commands())))
        return 0 if args else 2
    if args[0] == "version" or not {"-V", "--version"}.isdisjoint(args):
        print(f"dppo {__version__}")
        return 0
    if args[0] not in CORE and args[0] not in command_modules():
        problem = unknown_name("command", args[0], command_modules())
        if args[0] in MEANT:
            problem = f"{args[0]} is `{program()} {MEANT[args[0]]}`."
        print(f"dppo: {problem} `{program()} --help` lists them.", file=sys.stderr)
        return 2
    differences = other_versions()
    if differences is not None:
        fact, cannot_work = differences
        print(f"dppo: {fact}", file=sys.stderr)
        if cannot_work:
            return 2
    is_help = any(word in ("-h", "--help") for word in args)
    return _call(args[0], args[1:], find_modules=not is_help)


def _listed_commands() -> str:
    return "\n".join(f"  {name:8} {summary(name)}" for name in command_modules())


def _call(command: str, words: list[str], *, find_modules: bool) -> int:
    """Run a command; with `find_modules`, `module:Name` finds the user's own files, as with `python -m`."""
    try:
        if find_modules:
            check_current_folder()
            portable_numerics([command, *words])
            sys.path.insert(0, os.getcwd())
        with running([command, *words]):
            code: int = main_of(command)(words)
        return code
    except DppoError as error:
        print(f"dppo {command}: {_describe(error)}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        hint = hidden_by(os.getcwd()) if find_modules else ""
        if not hint:
            raise
        print(f"dppo {command}: {in_a_line(error)}: {hint}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupted:
        print(f"dppo {command}: interrupted{_after(str(interrupted))}", file=sys.stderr)
        return 130
    except StopRequested as request:
        print(
            f"dppo {command}: ended by {request.signal.name}{_after(request.progress)}",
            file=sys.stderr,
        )
        return 128 + request.signal


def _describe(error: DppoError) -> str:
    """Return an error with remedies as they are typed; a user's traceback stays unchanged."""
    from dppo.commands.flags import in_flags

    if isinstance(error, EnvironmentFault):
        return printable(f"{in_flags(error.message)}\n{error.remote_traceback}".rstrip())
    return in_flags(str(error))


def _after(progress: str) -> str:
    return f"; {progress}" if progress else ""


if __name__ == "__main__":
    sys.exit(main())
