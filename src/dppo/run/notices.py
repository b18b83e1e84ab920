"""Notices: decides when a wait is so long that a line is logged about it."""

from __future__ import annotations

import time

FIRST_S = 10.0  # duration of a wait after which it is logged
LATER = 4.0  # times that duration until the next line
MOST_S = 600.0  # longest time between two lines


class Notices:
    """Times the lines about a wait: after 10 s, 50 s and 250 s, then every ten minutes."""

    def __init__(self) -> None:
        """Begin to wait."""
        self._began = time.monotonic()
        self._due_s = FIRST_S

    def take_due(self) -> bool:
        """Return whether a line is due; if so, begin to wait for the next one."""
        waited_s = time.monotonic() - self._began
        if waited_s < self._due_s:
            return False
        self._due_s = waited_s + min(LATER * waited_s, MOST_S)
        return True
