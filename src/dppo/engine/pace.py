"""Pace: how fast a process makes segments."""

from dataclasses import dataclass, field

RECENT = 16  # answers from which the pace is measured
QUARTILE = 4


@dataclass(slots=True)
class Pace:
    """Pace of a process: the fastest quartile of its recent answers, each with the time of its fastest sampler.

    A slow actor makes all segments slowly. An outlier, or a part of an episode in which a simulator has more to
    compute, says nothing about the actor. Several samplers are more evidence than one.
    """

    segment_s: float = 0.0
    """Seconds for a segment of one sampler; 0 while that is not certain."""
    samplers: int = 1
    """Number of samplers in the last answer."""
    waited_s: float = 0.0
    """Seconds that the run has lost since a sampler moved, because a replay elsewhere would take longer."""
    cost_s: float = 0.0
    """Seconds by which the actor has made the run longer as the slowest one."""
    costly_iterations: int = 0
    """Iterations in which that was worth a line in the log."""
    rested: int = 0
    """Iterations without a sampler."""
    rest_before_retry: int = 8
    """Iterations without a sampler before the actor is tried again; doubled with each try."""
    evidence: int = 0
    enough_evidence: int = 20
    recent: list[float] = field(default_factory=list)
    """Seconds for a segment in the recent answers."""

    def add(self, samplers: int, fastest_s: float) -> None:
        """Add an answer with segments of some samplers, of which the fastest took `fastest_s`."""
        self.recent.append(fastest_s)
        del self.recent[:-RECENT]
        self.samplers = samplers
        self.evidence += samplers**2
        if self.evidence >= self.enough_evidence:
            self.segment_s = sorted(self.recent)[len(self.recent) // QUARTILE]
