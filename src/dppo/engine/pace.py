"""Pace: how fast a process makes segments."""

from dataclasses import dataclass


@dataclass(slots=True)
class Pace:
    """Pace of a process: that of the fastest quarter of its last segments.

    A slow actor makes all of them slowly. An outlier, or a part of an episode in which a simulator has more to compute,
    says nothing about the actor, and several samplers say more than one.
    """

    segment_s: float = 0.0  # for a segment of a sampler; 0 while that is not certain
    samplers: int = 1  # of the answer before, from which that was measured
    waited_s: float = 0.0  # by the run since a sampler moved, because a replay elsewhere would take longer
    cost_s: float = 0.0  # by which it has made the run longer as the slowest actor
    iterations: int = 0  # in which that was worth a line
    rested: int = 0  # iterations without a sampler
    patience: int = 8  # how many of them there are before it is tried again; twice as many each time
    evidence: int = 0
    enough: int = 20  # evidence
    recent: tuple[float, ...] = ()  # of the last 16 answers

    def add(self, samplers: int, fastest_s: float) -> None:
        """Add an answer with segments of some samplers, of which the fastest took `fastest_s`."""
        self.recent = (*self.recent[-15:], fastest_s)
        self.samplers = samplers
        self.evidence += samplers**2
        if self.evidence >= self.enough:
            self.segment_s = sorted(self.recent)[len(self.recent) // 4]
