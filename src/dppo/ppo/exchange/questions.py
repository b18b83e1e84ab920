"""Questions to the processes of samplers, and their answers."""

from dataclasses import dataclass, field
from typing import Any

from dppo.numerics.fingerprint import Expected
from dppo.ppo.exchange.records import FatalStep, Rebuild, SegmentReport, SegmentRequest, Timings
from dppo.spaces.spaces import Spaces

NO_SEGMENT = -1


@dataclass(frozen=True, slots=True)
class Question:
    """All segments requested from an actor at once."""

    index: int  # index of the segments; NO_SEGMENT in a question for spaces
    samplers: tuple[int, ...]
    hosted: tuple[int, ...]  # all samplers that the actor hosts now
    version: int = 0  # version of the policy that comes with the question
    # histories of the samplers that are rebuilt first
    rebuilds: dict[int, Rebuild] = field(default_factory=dict)
    # steps of these samplers that are not taken again
    fatal: dict[int, tuple[FatalStep, ...]] = field(default_factory=dict)
    # spaces that every sampler must have; None if none is built for this question
    spaces: Spaces | None = None
    expected: Expected | None = None  # the numerics of the run; None as for `spaces`

    @property
    def requests(self) -> tuple[SegmentRequest, ...]:
        """The request for each segment."""
        return tuple(
            SegmentRequest(
                sampler, self.index, self.rebuilds.get(sampler), self.fatal.get(sampler, ())
            )
            for sampler in self.samplers
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """All segments that an actor collected for one question."""

    results: tuple[tuple[SegmentReport, Any], ...]
    """A report and a `Segment` for each request, in the order of the question; a reference in place of the segment if
    the arrays stay with Ray."""
    timings: Timings
    cpu_share: float | None = None
    """With threads, the share of a CPU that the process used while all samplers worked side by side."""

    def mismatch(self, question: Question) -> str:
        """Describe how the segments differ from the ones that `question` asks for; "" if they do not."""
        expected = [(sampler, question.index, question.version) for sampler in question.samplers]
        got = [
            (report.sampler_id, report.index, report.policy_version) for report, _ in self.results
        ]
        if got == expected:
            return ""
        return f"sent the wrong segments: {got} instead of {expected} (sampler, segment, policy version)"
