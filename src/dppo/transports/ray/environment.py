"""The environment variables, signal handlers and token that Ray starts with."""

import atexit
import ctypes
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from dppo.errors import ConfigError
from dppo.files import lock, remove_abandoned
from dppo.process_state.forks import FORKS

PREFIX = "dppo-token-"
PROGRESS = "dppo-progress-"  # begins the names of the files of `make_progress_file`
MODE = "RAY_AUTH_MODE"
PATH = "RAY_AUTH_TOKEN_PATH"
# Time after the loss of the GCS at which Ray ends this process; enough for the current update and a checkpoint.
RECONNECT_S = 3600
OUR_SIGNALS = (signal.SIGINT, signal.SIGTERM)
RAYS_HANDLER = "_ZN3ray6RayLog27InstallFailureSignalHandlerEPKcb"
YOUNG_S = 60.0  # a younger folder may belong to a process that has not locked it yet


def use_private_token(*, ray_imported: bool) -> None:
    """Set the token for the Ray that is about to start. A Ray imported earlier keeps the token it has."""
    if not private_token.cache_info().currsize:
        if ray_imported:
            return
        remove_abandoned(PREFIX, PROGRESS, older_than_s=YOUNG_S)
    os.environ[MODE] = "token"
    os.environ[PATH] = str(private_token())


def forget_private_token() -> None:
    """Remove the variables that `use_private_token` set: another cluster would not accept this token."""
    if private_token.cache_info().currsize and os.environ.get(PATH) == str(private_token()):
        del os.environ[PATH]
        os.environ.pop(MODE, None)


@cache  # Ray remembers the first token that it reads
def private_token() -> Path:
    """Create the token of this process, in a folder that is removed when the process ends; return its path."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    token = folder / "ray_token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    process = FORKS.number

    def remove() -> None:
        if process == FORKS.number:  # a fork also ends with what this process has registered
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    lock(folder)  # held until the process ends; systemd-tmpfiles skips locked folders, too
    return token


def check_encoding() -> None:
    """Raise ConfigError if this process has words or paths that Ray, which keeps them in UTF-8, cannot encode."""
    for text in (*sys.orig_argv, *sys.path):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"num_actors: Ray cannot start beside {text!a}, as this Python takes file names for "
                f"{sys.getfilesystemencoding()}. Set PYTHONUTF8=1, or use `num_actors=0`."
            ) from None


def set_environment(
    *, start_here: bool, dashboard: bool = False, env_threads: bool = False
) -> None:
    """Set the variables that Ray reads when it is imported; variables set by the user keep their values."""
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",  # send no usage statistics
        "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else each worker builds its own environment under `uv run`
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # an actor without a GPU sees none
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        # Ray prints a paragraph for each dead actor, a page for a dead raylet, even without log_to_driver, and a
        # traceback for each abandoned call; dppo logs one line instead.
        "RAY_IGNORE_UNHANDLED_ERRORS": "1",
        "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed|Raylet is terminated|has been marked dead",
    }
    if not start_here:
        # Attempts to connect to a running cluster; a head that is started here may need more.
        variables["RAY_NUM_REDIS_GET_RETRIES"] = "3"
    elif not dashboard:
        # Ray records each call for the dashboard, in a thread of every process; if the GCS is gone, it tries for 5 s at
        # the end to send the records.
        variables["RAY_task_events_report_interval_ms"] = "0"
    if start_here and env_threads:
        # Ray's 15 lets every other process go first: threads that wait for simulators would lose a little in each step.
        variables["RAY_worker_niceness"] = "0"
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    if start_here and "RAY_AUTH_MODE" not in os.environ:
        use_private_token(ray_imported="ray" in sys.modules)


@contextmanager
def signal_handlers_kept() -> Iterator[None]:
    """Keep the signal handlers while Ray starts: its own handler of SIGTERM ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in OUR_SIGNALS}
    _install_rays_handler()
    reinstall_handlers()
    set_handler = signal.signal

    def keep(number: int, handler: Any) -> Any:
        return set_handler(number, handlers.get(signal.Signals(number), handler))

    signal.signal = keep  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = set_handler
        reinstall_handlers()


def _install_rays_handler() -> None:
    """Let Ray's C++ code install its handler of fatal signals now. It does so once.

    Otherwise that code installs it while it connects. It then holds Python's global lock, for seconds on a busy
    machine, and its handler would end this process on SIGTERM, without a checkpoint and without a word.
    """
    with suppress(KeyError, AttributeError, OSError):  # another version of Ray
        library = ctypes.CDLL(sys.modules["ray._raylet"].__file__)
        library[RAYS_HANDLER](None, False)


def reinstall_handlers() -> None:
    """Give our signals the handlers that Python knows. Ray's C++ code sets others below Python's, also as it ends."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in OUR_SIGNALS:
        handler = signal.getsignal(number)
        if handler is not None:
            signal.signal(number, handler)


@contextmanager
def quiet_init() -> Iterator[None]:
    """Keep Ray from warning that it sets no handler of SIGTERM outside of the main thread: it must not."""
    ray_logger = logging.getLogger("ray._private.worker")
    level = ray_logger.level
    ray_logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        ray_logger.setLevel(level)


@contextmanager
def log_lines(lines: list[str]) -> Iterator[None]:
    """Add what Ray's Python code logs to `lines`, each record as one line, instead of printing it."""
    handler = _Lines(lines)
    rays_logger = logging.getLogger("ray._private")
    propagates = rays_logger.propagate
    rays_logger.addHandler(handler)
    rays_logger.propagate = False
    try:
        with quiet_init():
            yield
    finally:
        rays_logger.propagate = propagates
        rays_logger.removeHandler(handler)


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(" ".join(record.getMessage().split()))


def long_reconnect() -> AbstractContextManager[None]:
    """Let this process outlive Ray's GCS by `RECONNECT_S` instead of a minute; Ray's own processes keep the minute.

    They inherit `os.environ`, while Ray's C++ code reads the process environment itself, once, when it connects.
    """
    return _variable(
        "RAY_gcs_rpc_server_reconnect_timeout_s", str(RECONNECT_S), os.putenv, os.unsetenv
    )


def one_hash_seed() -> AbstractContextManager[None]:
    """Give all actors the same string hashes, which decide the order of sets; a value set by the user is kept."""
    return _variable("PYTHONHASHSEED", "0", os.environ.__setitem__, os.environ.pop)


@contextmanager
def _variable(
    name: str, value: str, put: Callable[[str, str], None], remove: Callable[[str], object]
) -> Iterator[None]:
    if name in os.environ:
        yield
        return
    put(name, value)
    try:
        yield
    finally:
        remove(name)
