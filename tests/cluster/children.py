"""A simulator's children: detached, started by another one, or without a program of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path


def with_children(pids: str) -> None:
    """Start a detached child, one that another has started, and one without a program of its own."""
    started = subprocess.Popen(
        "setsid sleep 1000 & echo $!", shell=True, stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    children = [int(started.stdout.readline())]
    children.append(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
    if (forked := os.fork()) == 0:
        os.setsid()
        signal.pause()
    subprocess.run(["echo", "printed by a child"], check=True)
    with Path(pids).open("a") as file:
        file.write("".join(f"{pid}\n" for pid in (*children, forked)))
