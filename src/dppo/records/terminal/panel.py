"""The live panel: a thread redraws it while training runs."""

from __future__ import annotations

import threading
import time
from typing import TextIO, cast

from rich.console import Console, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.spinner import Spinner
from rich.text import Text

from dppo.ppo.exchange.records import CollectionProgress
from dppo.records.observer import Display, RunInfo
from dppo.records.result import Result, closing_lines
from dppo.records.terminal.drawing import draw
from dppo.records.terminal.output import PatientStream, ShowLog
from dppo.records.terminal.view import View

REFRESH_HZ = 4.0
MAX_WIDTH = 110
NOTES_SHOWN = 3


class LivePanel(Display):
    """Redraws a panel four times a second in a thread of its own; training only passes it the rows."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=cast(TextIO, PatientStream(stream)), highlight=False)
        self.view = View(began=time.monotonic())
        self._preparing: Live | None = None
        self._live: Live | None = None
        self._log = ShowLog(self.note)
        self._lock = threading.Lock()

    def prepare(self, text: str) -> None:
        """Show `text` with a spinner; `on_start` or `on_end` erases it."""
        self._log.hold()
        spinner = Spinner("dots", Text(text, style="dim"))
        self._preparing = Live(spinner, console=self._console, refresh_per_second=REFRESH_HZ, transient=True)
        self._preparing.start(refresh=True)

    def _end_preparing(self) -> None:
        preparing, self._preparing = self._preparing, None
        if preparing is not None:
            preparing.stop()

    def on_start(self, run: RunInfo) -> None:
        """Print the first lines of the run, and draw the panel below them."""
        self._end_preparing()
        self.view.start(run)
        self._print(*(Padding.indent(Text(line, style="dim"), 2) for line in run.lines))
        self._live = Live(console=self._console, get_renderable=self._draw, refresh_per_second=REFRESH_HZ)
        self._live.start()
        self._log.start()

    def on_progress(self, progress: CollectionProgress) -> None:
        """Show the progress of a long iteration."""
        self.view.add_progress(progress)

    def on_iteration(self, row: dict[str, float]) -> None:
        """Show the row when the panel is drawn next."""
        self.view.add_row(row)

    def note(self, text: str) -> None:
        """Show a note in the panel, and print the oldest one above the panel if there are too many. From any thread."""
        now = time.strftime("%H:%M:%S")
        if self._live is None:
            self._print(Text(f"  {now} {text}", style="yellow"))
            return
        with self._lock:
            notes = (*self.view.notes, (now, text))
            self.view.notes = notes[-NOTES_SHOWN:]
        self._print(*(Text(f"  {when} {what}", style="yellow") for when, what in notes[:-NOTES_SHOWN]))

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Draw the panel for the last time, restore the terminal, and print the result."""
        self._end_preparing()
        self._log.close(error)
        self.view.finished = True
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        if result is not None:
            self._print(*(Text(line) for line in closing_lines(result, error)))

    def _draw(self) -> RenderableType:
        colours = self._console.color_system is not None and not self._console.no_color
        width = min(MAX_WIDTH, self._console.width - 2)  # room for the ^C that the terminal echoes
        return draw(self.view, width, time.monotonic(), colours=colours)

    def _print(self, *lines: RenderableType) -> None:
        for line in lines:
            self._console.print(line)
