"""All that a report shows of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dppo.config import Config
from dppo.records.metrics.reading import Row, Rows
from dppo.tools.report.charts import Bar


@dataclass(frozen=True)
class Facts:
    """All that a page shows of a run."""

    config: Config
    rows: Rows
    """Rows of metrics.jsonl, perhaps a sample."""
    state: str
    """State in a word or two, such as "finished" or "running"."""
    findings: Sequence[tuple[str, str]]
    """Severity and text, by `dppo doctor RUN`."""
    incidents: Sequence[Mapping[str, Any]]
    actors: Mapping[str, Sequence[Bar]]
    """Processes of each actor, in seconds since the first began."""
    versions: Mapping[str, Any]
    command: str
    certificate: Mapping[str, Any]
    """Certificate of `dppo verify`, empty without one; a stranger may have written it."""

    deployed: int | None = None
    """Iteration of the policy that `dppo eval RUN` plays; None without a checkpoint."""
    deploys_baseline: bool = False
    """True if `dppo eval RUN` plays the user's controller, as no evaluation shows an improvement."""
    best: tuple[float, int] | None = None
    """Score and iteration of the best checkpoint, by best.json; None without one."""

    def step_of(self, iteration: int) -> float:
        """Return the env steps until the end of an iteration, also where `rows` is a sample without it."""
        steps = {row["iteration"]: row["global_step"] for row in self.rows}
        return steps.get(iteration, iteration * self.config.batch_size)

    @property
    def last_row(self) -> Row:
        """The last row; empty if no iteration has finished."""
        if not self.rows:
            return {}
        return self.rows[-1]
