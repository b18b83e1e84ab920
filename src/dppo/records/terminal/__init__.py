"""The display of a run: a live panel on a terminal, plain lines elsewhere, or nothing."""

import os
import sys
from typing import Literal, TextIO

from dppo.records.observer import Display
from dppo.records.terminal.plain import PlainLines


def make_display(mode: Literal["auto", "live", "plain", "off"], stream: TextIO | None = None) -> Display:
    """Return the display for `mode` on `stream` (default: standard output); auto is live on a terminal."""
    stream = stream or sys.stdout
    if mode == "off" or stream is None:  # a daemon may have no standard output
        return Display()
    if mode == "auto" and os.environ.get("CI"):
        return PlainLines(stream)
    unicode = (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"
    capable = stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown") and unicode
    if mode in ("auto", "live") and capable:
        from dppo.records.terminal.panel import LivePanel

        return LivePanel(stream)
    lines = PlainLines(stream)
    if mode == "live":
        lines.note("progress=live needs a terminal that shows Unicode; printing plain lines instead.")
    return lines
