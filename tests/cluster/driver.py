"""The engine with a clock, driven event by event: by hand, or by actors that answer as fast as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dppo.engine.engine import CollectionEngine
from dppo.engine.hosting import shares
from dppo.engine.ledger import ReplayLedger
from dppo.engine.messages import (
    Answered,
    Ask,
    Command,
    Describe,
    Died,
    Kill,
    Limits,
    Log,
    Look,
    Process,
    Progressed,
    Started,
)
from dppo.engine.patience import MEASURED
from dppo.envs.activity import Activity, Phase
from dppo.ppo.exchange.questions import Answer
from dppo.ppo.exchange.records import (
    PolicySnapshot,
    SamplerCarry,
    SegmentReport,
    SegmentRequest,
    Timings,
)

LIMITS = Limits(
    segment_timeout_s=10, max_actor_restarts=3, start_timeout_s=100, move_after_s=50, quiet_s=30
)
TICK_S = 0.5
Progress = Callable[[float], Activity]
"""The progress that an actor shows, as a function of time."""


def report(sampler: int, index: int, version: int) -> SegmentReport:
    zeros = np.zeros(1)
    ints = np.zeros(1, np.int64)
    carry = SamplerCarry(ints, zeros, ints, zeros, zeros.astype(np.uint32))
    return SegmentReport(sampler, index, version, 1, carry, (ints,))


def answer_to(ask: Ask) -> Answered:
    requests = ask.question.requests
    results = tuple(
        (report(request.sampler_id, request.index, ask.policy.version), "segment")
        for request in requests
    )
    return Answered(ask.process, ask.ask_id, Answer(results, Timings()))


def moving(phase: Phase, per_s: float, total: int = 0, until: float = float("inf")) -> Progress:
    """Return the progress of an actor that makes or replays `per_s` steps per second until it stops."""

    def look(now: float) -> Activity:
        done = int(per_s * min(now, until))
        return Activity(1000 + done, 1000, phase, 0, 0, done, total)

    return look


class Clocked:
    """An engine with a clock that a test moves, and the commands that it has given."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.now = 0.0
        self.commands: list[tuple[float, Command]] = []

    def take_commands(self, commands: list[Command]) -> None:
        self.commands += [(self.now, command) for command in commands]

    def tick(self) -> None:
        self.take_commands(self.engine.tick(self.now))

    def on(self, event: Any) -> None:
        self.take_commands(self.engine.on(event, self.now))
        self.tick()

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += TICK_S
            self.tick()

    def all(self, kind: type[Any]) -> list[Any]:
        return [command for _, command in self.commands if isinstance(command, kind)]

    def forget(self) -> None:
        self.commands.clear()


class Driver(Clocked):
    """Passes events to the engine that collects, and records its commands."""

    def __init__(
        self, hosting: list[list[int]], limits: Limits = LIMITS, *, described: bool = True
    ) -> None:
        """Start the actors; with `described`, also answer the question for the spaces."""
        ledger = ReplayLedger(sum(map(len, hosting)), replay=True, policy_lag=3)
        super().__init__(CollectionEngine(hosting, ledger, limits))
        self.asks: list[Ask] = []
        """Questions that have not been answered."""
        self.progress: dict[int, Progress] = {}
        """By actor; actors that are missing here show none."""
        self.take_commands(self.engine.describe(0.0))
        if described:
            for actor_id in range(len(hosting)):
                self.start(actor_id)
            self.describe()

    def start(self, actor_id: int, number: int = 1, node: str = "") -> None:
        self.on(Started(Process(actor_id, number), node))

    def die(self, actor_id: int, number: int = 1) -> None:
        self.on(Died(Process(actor_id, number), "died"))

    def refuse(self, answer: Any) -> None:
        """Answer the last question with an error, or with the wish to be replaced."""
        ask = self.asks[-1]
        self.on(Answered(ask.process, ask.ask_id, answer))

    def hosts(self) -> dict[int, int]:
        """Return the actor of each sampler."""
        positions = self.engine.hosting.positions
        return {sampler: place.host.actor_id for sampler, place in positions.items()}

    def describe(self) -> None:
        """Answer the question for the spaces."""
        describe = self.all(Describe)[0]
        self.on(Answered(describe.process, describe.ask_id, "spaces"))  # type: ignore[arg-type]

    def take_commands(self, commands: list[Command]) -> None:
        super().take_commands(commands)
        for command in commands:
            if isinstance(command, Ask):
                self.asks.append(command)
            if isinstance(command, Look) and command.process.actor_id in self.progress:
                activity = self.progress[command.process.actor_id](self.now)
                event = Progressed(command.process, activity)
                self.take_commands(self.engine.on(event, self.now))

    def request(self, index: int, lag: int = 0) -> None:
        policy = PolicySnapshot(max(0, index - lag), np.zeros(1, np.float32))
        self.take_commands(self.engine.request(policy, index, self.now))

    def request_all(self, count: int, lag: int) -> None:
        for index in range(count):
            self.request(index, lag)

    def answer(self) -> None:
        """Let each asked actor answer, and take the segments."""
        asks = self.asks
        self.asks = []
        for ask in asks:
            self.on(answer_to(ask))
        if self.finished:
            self.take()

    def make(self, segments: int) -> None:
        """Request, answer and take so many segments of all samplers."""
        for index in range(segments):
            self.request(index)
            self.answer()

    def measure(self) -> int:
        """Let all make so many segments that the times of steps are known; return the index of the next one."""
        self.make(MEASURED)
        return MEASURED

    @property
    def finished(self) -> bool:
        return bool(self.engine.requests.finished)

    def take(self) -> Any:
        """Take the segments that were requested first."""
        return self.engine.requests.take(self.now, 0.0, [])

    def killed_at(self) -> float:
        return next(when for when, command in self.commands if isinstance(command, Kill))

    def logged(self) -> list[str]:
        return [command.text for command in self.all(Log) if command.incident is None]

    def incidents(self) -> list[Log]:
        """Return the lines that report an incident."""
        return [command for command in self.all(Log) if command.incident is not None]

    def asked(self) -> list[tuple[int, int, bool]]:
        """Return sampler, segment and whether it is rebuilt, of all questions since the last call."""
        asks = self.asks
        self.asks = []
        requests = [request for ask in asks for request in ask.question.requests]
        return [
            (request.sampler_id, request.index, request.rebuild is not None) for request in requests
        ]


# ------------------------------------------------------------------ actors of different speed

PACED = Limits(segment_timeout_s=1000, max_actor_restarts=3, move_after_s=1000)
STEPS = 100  # of a segment
Seconds = Callable[[int], float]
"""Seconds that an actor needs for a segment."""


def one_slow(actor_id: int) -> float:
    return 5.0 if actor_id == 0 else 1.0


class Cluster(Driver):
    """Actors that answer as fast as they are.

    Args:
        open_steps: of the episode that is open at the end of each segment.
        cpu: None lets the samplers of an actor take turns; otherwise they work side by side, each using this share of a
            core.
    """

    def __init__(
        self,
        samplers: int,
        actors: int,
        seconds: Seconds,
        limits: Limits = PACED,
        *,
        open_steps: int = 0,
        cpu: float | None = None,
    ) -> None:
        super().__init__(shares(samplers, actors), limits, described=False)
        self.seconds = seconds
        self.cpu = cpu
        self.heavy: set[int] = set()
        """Samplers whose simulator has four times as much to compute."""
        self.open_steps = dict.fromkeys(range(samplers), open_steps)
        for actor_id in range(actors):
            self.start(actor_id, node=f"n{actor_id}")
        self.describe()

    def notes(self) -> list[str]:
        notes: list[str] = self.engine.balancing.notes()
        if self.engine.backups is not None:
            notes += self.engine.backups.notes()
        return notes

    def paced_answer(self, ask: Ask) -> Answered:
        """Return the answer to a question, with the times that the actor takes."""
        requests = ask.question.requests
        load = 1.0 if self.cpu is None else self.cpu * len(requests)
        pace = self.seconds(ask.process.actor_id) * max(1.0, load)
        results = []
        timings = []
        for request in requests:
            sampler_id = request.sampler_id
            seconds = 4 * pace if sampler_id in self.heavy else pace
            results.append((self._report_of(request, ask.policy.version, seconds), "segment"))
            replayed = 0
            if request.rebuild is not None:
                replayed = int(request.rebuild.carry.episode_lengths.sum())
            replay_s = pace * replayed / STEPS
            timings.append(Timings(seconds + replay_s, seconds, replayed, replay_s))

        if self.cpu is None:
            answer = Answer(tuple(results), sum(timings, Timings()))
        else:
            longest = max(timings, key=lambda timing: timing.total_s)
            replayed = sum(timing.replayed_steps for timing in timings)
            total = replace(longest, replayed_steps=replayed)
            answer = Answer(tuple(results), total, min(1.0, load))
        return Answered(ask.process, ask.ask_id, answer)

    def _report_of(self, request: SegmentRequest, version: int, seconds: float) -> SegmentReport:
        plain = report(request.sampler_id, request.index, version)
        open_steps = np.array([self.open_steps[request.sampler_id]])
        carry = replace(plain.carry, episode_lengths=open_steps)
        return replace(plain, steps=STEPS, carry=carry, env_s=seconds)

    def request_only(self, index: int) -> None:
        """Request segments, so that `asks` holds their questions alone."""
        self.asks.clear()
        self.request(index)

    def iterate(self, index: int) -> list[int]:
        """Collect segments `index` without a lag; return the samplers that were rebuilt for it."""
        self.request_only(index)
        return self.collect()

    def run(self, iterations: int) -> dict[int, list[int]]:
        """Iterate from the start; return the samplers that were rebuilt, by iteration."""
        return {index: self.iterate(index) for index in range(iterations)}

    def collect(self) -> list[int]:
        """Answer all questions; return the samplers that were rebuilt for them."""
        began = self.now
        rebuilt = []
        for ask in self.asks:
            for request in ask.question.requests:
                if request.rebuild is not None:
                    rebuilt.append(request.sampler_id)

        def duration(answer: Any) -> float:
            return float(answer.answer.timings.total_s)

        answers = [self.paced_answer(ask) for ask in self.asks]
        for answer in sorted(answers, key=duration):
            self.now = began + duration(answer)
            self.on(answer)
        self.take()
        return sorted(rebuilt)
