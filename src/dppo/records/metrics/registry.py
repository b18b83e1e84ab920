"""Every key of metrics.jsonl, with its unit and meaning, from metrics.yaml."""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

SHARE = "0 to 1"
SCALED = "scaled reward"
"""Unit of what critics learn from: normalized rewards, unless a run has `norm_reward=False`."""


class Metric(NamedTuple):
    """One key of a row."""

    key: str
    meaning: str
    unit: str = ""
    condition: str = ""
    """Condition under which a row has the key; empty if every row has it."""


@cache
def _tables() -> dict[str, Any]:
    import yaml

    tables: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("metrics.yaml").read_bytes())
    return tables


def metrics() -> dict[str, list[Metric]]:
    """List the metrics under the headings of their page."""
    return {
        heading: [Metric(key, **facts) for key, facts in group.items()]
        for heading, group in _tables()["metrics"].items()
    }


def incident_kinds() -> dict[str, str]:
    """Give the meaning of each `IncidentKind`."""
    kinds: dict[str, str] = _tables()["incidents"]
    return kinds
