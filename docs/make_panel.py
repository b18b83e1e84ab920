"""Make docs/panel.svg, the picture of the live panel in README: python docs/make_panel.py (about a minute).

Trains with the command in the picture's title, and draws the real panel of that run when it is 70 % done.
"""

import io
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

import dppo
from dppo.records.terminal.panel import draw
from dppo.records.terminal.view import View

WIDTH = 100
SHARE = 0.7


class Painter(dppo.Observer):
    """Keep what the live panel shows, and paint it once."""

    def on_start(self, run: dppo.RunInfo) -> None:
        """Take the title and the opening lines."""
        self.view = View()
        self.view.start(run)
        self.lines = [line for line in run.lines if not line.startswith("Run folder")]
        self.painted = ""

    def on_iteration(self, row: dict[str, float]) -> None:
        """Take a row; paint when the run has come far enough."""
        self.view.add_row(row)
        if not self.painted and row["global_step"] >= SHARE * self.view.total_steps:
            self.painted = self.paint()

    def paint(self) -> str:
        """Return the terminal as SVG."""
        console = Console(
            record=True,
            width=WIDTH,
            file=io.StringIO(),
            force_terminal=True,
            color_system="truecolor",
        )
        for line in self.lines:
            console.print(Text(f"  {line}", style="dim"))
        console.print(draw(self.view, WIDTH, time.monotonic()))
        return console.export_svg(
            title="dppo train dppo/SlowCartPole-v0 --num-actors 8", unique_id="panel"
        )


if __name__ == "__main__":
    painter = Painter()
    config = dppo.Config.preset(
        "dppo/SlowCartPole-v0", num_actors=8, progress="off", run_dir="runs/panel"
    )
    dppo.train(config, observers=[painter])
    Path(__file__).with_name("panel.svg").write_text(painter.painted, encoding="utf8")
