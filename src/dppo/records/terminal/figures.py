"""The notation of figures on displays: numbers, durations, shares, and a series as bars."""

import math
from collections.abc import Sequence
from itertools import pairwise

BARS = "▁▂▃▄▅▆▇█"
# values of which a bar is the mean, at most: the panel is drawn four times a second
MAX_VALUES_A_BAR = 50
ROUNDING = 1e-9  # share of a mean; deviations below it come from the rounding of sums


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a series as at most `width` bars, scaled from the lowest to the highest."""
    if len(values) < 2:
        return ""
    width = min(width, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    heights = []
    for begin, end in pairwise(edges):
        part = values[begin : end : max(1, (end - begin) // MAX_VALUES_A_BAR)]
        heights.append(sum(part) / len(part))
    low = min(heights)
    high = max(heights)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((height - low) * scale)] for height in heights)


def share(part: float, total: float) -> float:
    """Divide; the result is limited to 1, and 1 if `total` is 0."""
    return min(1.0, part / total) if total > 0 else 1.0


def number(value: float | None, digits: int | None = None) -> str:
    """Return a figure with a sensible number of digits: 12,345  475.3  0.012  3.1e-05, or - for None and NaN."""
    if value is None or math.isnan(value):
        return "-"
    if digits is not None:
        return f"{value:,.{digits}f}"
    size = abs(value)
    if 0 < size < 5e-4:
        return f"{value:.1e}"
    if size >= 1000 or size == 0:
        digits = 0
    elif size >= 10:
        digits = 1
    elif size >= 1:
        digits = 2
    else:
        digits = 3
    return f"{value:,.{digits}f}"


def deviation(value: float, mean: float) -> str:
    """Format the standard deviation of values with this mean as `number` does; 0 if it comes from rounding."""
    if value < ROUNDING * abs(mean):
        value = 0.0
    return number(value)


def signed(value: float) -> str:
    """Format a difference as `number` does, with its sign: +6.60, -0.012."""
    text = number(value)
    return f"+{text}" if value > 0 else text


def speed(steps_per_s: float | None) -> str:
    """Return steps per second as `number` does, without digits after the point from 10 on."""
    if steps_per_s is not None and 0 < steps_per_s < 10:
        return number(steps_per_s)
    return number(steps_per_s, digits=0)


def duration(seconds: float) -> str:
    """Format seconds as 1:02, 3:04:05 or 2d 03:04:05."""
    if not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    if hour:
        return f"{hour}:{minute:02}:{second:02}"
    return f"{minute}:{second:02}"
