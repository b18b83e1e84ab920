"""The picture of learners.py: speed-up over the size of the model, and the time of each part of a minibatch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dppo.tools.pictures.style import COLOURS, DPI, GREY, INK, PALE

PARTS = {"learning": COLOURS[1], "summing": COLOURS[0], "rest": "#b7bec6"}
WORDS = {
    "learning": "forward and backward",
    "summing": "sum of gradients (all-reduce)",
    "rest": "the rest",
}


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw speed-ups (left) and the parts of a minibatch, as a percentage of one learner's time (right)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    models = dict(
        sorted(
            report["models"].items(), key=lambda item: (item[1]["parameters"], item[1]["minibatch"])
        )
    )
    figure = Figure(figsize=(9, 4), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    figure.subplots_adjust(left=0.065, right=0.985, top=0.8, bottom=0.2, wspace=0.2)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(PALE)
        axis.grid(color=PALE, linewidth=0.6, axis="y")
        axis.set_axisbelow(True)
        axis.tick_params(colors=GREY, length=0, labelsize=9)
    _speed_ups(left, models, report)
    _times(right, models, report["settings"]["learners"])
    settings, machine = report["settings"], report["machine"]
    caption = (
        f"Minibatches of 2,048 rows unless noted, {settings['obs']} inputs, one CPU thread per learner, float32. "
        f"{machine['cores']} cores ({machine['cpu']}), load before {machine['load_before']:.1f}."
    )
    figure.text(0.065, 0.03, caption, color=GREY, fontsize=8)
    figure.savefig(path)


def _speed_ups(axis: Any, models: dict[str, Any], report: dict[str, Any]) -> None:
    learners = report["settings"]["learners"]
    axis.axhline(1.0, color=INK, linewidth=1)
    words = {"transform": axis.transAxes, "color": INK, "fontsize": 8, "ha": "center", "va": "top"}
    axis.text(0.5, 0.98 / (1.1 * learners), "one learner", **words)
    axis.axhline(learners, color=GREY, linewidth=1, linestyle=(0, (2, 2)))
    for bar in report["bars"]:
        if "3x2048" in bar["what"]:
            x = models["3x2048"]["parameters"]
            axis.plot([x / 1.8, x * 1.8], [bar["bar"]] * 2, color=COLOURS[3], linewidth=2.5)
            axis.text(
                x,
                bar["bar"] + 0.09,
                f"bar {bar['bar']:g}",
                color=COLOURS[3],
                fontsize=8,
                ha="center",
            )
    usual = {name: row for name, row in models.items() if row["minibatch"] == 2048}
    sizes, gains = ([row[key] for row in usual.values()] for key in ("parameters", "speed_up"))
    axis.plot(sizes, gains, "o-", color=COLOURS[1], linewidth=2, markersize=6)
    for name, row in models.items():
        below = -34 if name == "3x2048" else -8  # because it lies between two neighbours
        gain, crosses = row["speed_up"], 1.0 < row["speed_up"] < 1.25
        if name not in usual:
            axis.plot(
                [row["parameters"]],
                [gain],
                "o",
                color=COLOURS[1],
                markersize=6,
                markerfacecolor="white",
            )
        axis.annotate(
            f"{name.replace(', ', chr(10))}\n{gain:.2f}",
            (row["parameters"], gain),
            xytext=(0, 8 if crosses else below),
            textcoords="offset points",
            ha="center",
            va="bottom" if crosses else "top",
            fontsize=8,
            color=INK,
        )
    axis.set_xscale("log")
    axis.minorticks_off()
    axis.margins(x=0.14)
    axis.set_ylim(0, learners * 1.1)
    axis.set_xlabel("parameters", color=INK, fontsize=9)
    axis.text(
        0, 1.13, f"Times as fast with {learners} learners", transform=axis.transAxes, **_title()
    )


def _times(axis: Any, models: dict[str, Any], learners: int) -> None:
    width = 0.36
    for place, row in enumerate(models.values()):
        whole = row["one_ms"]["minibatch"]
        for x, side in (
            (place - width / 2 - 0.02, "one_ms"),
            (place + width / 2 + 0.02, "shared_ms"),
        ):
            bottom = 0.0
            for part, colour in PARTS.items():
                share = 100 * row[side][part] / whole
                label = WORDS[part] if place == 0 and side == "one_ms" else None
                axis.bar(x, share, width, bottom=bottom, color=colour, label=label)
                bottom += share
            outwards = -0.02 if side == "one_ms" else 0.02  # keeps the two labels apart
            axis.text(
                x + outwards,
                bottom + 1.5,
                _short(row[side]["minibatch"]),
                ha="center",
                fontsize=6.5,
                color=INK,
            )
    axis.set_ylim(
        0,
        1.1
        * max(
            100.0,
            *(
                100 * row["shared_ms"]["minibatch"] / row["one_ms"]["minibatch"]
                for row in models.values()
            ),
        ),
    )
    axis.set_xticks(range(len(models)), [name.replace(", ", "\n") for name in models])
    axis.tick_params(axis="x", labelcolor=INK)
    axis.set_ylabel("% of one learner's time", color=INK, fontsize=9)
    axis.text(
        0,
        1.13,
        f"Time of a minibatch: 1 learner, {learners} learners",
        transform=axis.transAxes,
        **_title(),
    )
    axis.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.99), ncols=3, frameon=False, fontsize=8, labelcolor=INK,
                handlelength=1.0, columnspacing=1.2)  # fmt: skip


def _title() -> dict[str, Any]:
    return {"fontsize": 11, "fontweight": "bold", "color": INK}


def _short(ms: float) -> str:
    return f"{ms / 1000:.1f} s" if ms >= 1000 else f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"
