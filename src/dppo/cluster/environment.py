"""What Ray finds in its surroundings while it starts: environment variables, and the handlers of signals."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dppo.cluster.token import use_private_token

# Ray ends this process so long after the GCS has gone: time for the update under way, and for a checkpoint.
RECONNECT_S = 3600
OUR_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def set_environment(*, start_here: bool, dashboard: bool = False) -> None:
    """Set what Ray reads from the environment when it is imported, unless the user has set it."""
    for name, value in {
        "RAY_USAGE_STATS_ENABLED": "0",  # send nothing anywhere
        "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # or each worker would build its own environment under `uv run`
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # an actor without a GPU sees none
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        # Ray prints a paragraph for each actor that dies, even without log_to_driver; we say it in a line.
        "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # nor a traceback for each call to it that nobody waits for any more
        "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",
        # How long to try to connect to a cluster that runs; where Ray starts here its head may need longer.
        **({} if start_here else {"RAY_NUM_REDIS_GET_RETRIES": "3"}),
        # Only the dashboard shows what Ray records of each call, in a thread of every process; and where the GCS has
        # gone, Ray waits at the end for 5 s to send it.
        **({"RAY_task_events_report_interval_ms": "0"} if start_here and not dashboard else {}),
    }.items():
        os.environ.setdefault(name, value)
    if start_here and "RAY_AUTH_MODE" not in os.environ:
        use_private_token(ray_imported="ray" in sys.modules)


@contextmanager
def signal_handlers_kept() -> Iterator[None]:
    """Keep the handlers of signals while Ray starts: its own handler of SIGTERM ends the process on the spot."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in OUR_SIGNALS}
    set_handler = signal.signal

    def keep(number: int, handler: Any) -> Any:
        return set_handler(number, handlers.get(signal.Signals(number), handler))

    signal.signal = keep  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = set_handler
        for number, handler in handlers.items():
            signal.signal(number, handler)  # Ray's C++ has set others, below Python's


@contextmanager
def long_reconnect() -> Iterator[None]:
    """Let this process outlive Ray's GCS by more than Ray's minute; the processes of Ray keep to that minute.

    They are given `os.environ`, while Ray's C++ reads the environment below it, once, when it connects.
    """
    name = "RAY_gcs_rpc_server_reconnect_timeout_s"
    if name in os.environ:
        yield
        return
    os.putenv(name, str(RECONNECT_S))
    try:
        yield
    finally:
        os.unsetenv(name)


@contextmanager
def one_hash_seed() -> Iterator[None]:
    """Give all actors the same hashes of strings, on which the order of a set depends, unless the user did."""
    name = "PYTHONHASHSEED"
    if name in os.environ:
        yield
        return
    os.environ[name] = "0"
    try:
        yield
    finally:
        os.environ.pop(name, None)
