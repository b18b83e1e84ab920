"""ActorCollector: collects from actors, which may be lost at any time."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from dppo.engine.collector import Collected, OnProgress
from dppo.engine.engine import CollectionEngine
from dppo.engine.messages import Command, Event, ForTransport, Kill, Log, Process
from dppo.engine.progress import ProgressReports
from dppo.log import logger
from dppo.numerics.fingerprint import Expected
from dppo.ppo.exchange.records import Incident, PolicySnapshot
from dppo.signals import StopSignals
from dppo.spaces.spaces import Spaces


class Transport(Protocol):
    """Starts and stops the processes of actors, and exchanges messages with them."""

    def do(self, command: ForTransport) -> None:
        """Execute a command; does not wait."""

    def stacks(self, process: Process) -> str:
        """Return the stacks of all threads of a process, "" if they cannot be read; waits for a moment."""

    def events(self, stop: StopSignals) -> list[Event]:
        """Return new events, if any.

        Waits for: the first event, half a second at most. Fails when: `stop` was requested.
        """

    def steps_of(self, processes: Iterable[Process]) -> int:
        """Return the env steps that these processes have made for the questions that they work on; does not wait."""

    def take_seconds(self) -> float:
        """Return the seconds spent on sending questions and receiving answers since the last call."""

    def close(self) -> None:
        """Stop all processes; close all environments."""


class ActorCollector:
    """Runs the loop between engine and transport: the engine decides, the transport acts, this class waits."""

    def __init__(
        self,
        engine: CollectionEngine,
        transport: Transport,
        on_progress: OnProgress = lambda progress: None,
        *,
        batch_size: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.expected: Expected | None = None
        self._engine = engine
        self._transport = transport
        self._clock = clock
        self._reports = ProgressReports(on_progress, batch_size, clock)
        self._steps_seen = 0
        self._incidents: list[Incident] = []

    def describe(self, stop: StopSignals) -> Spaces:
        """Start the actors; return the spaces of the environments of one sampler."""
        self._do(self._engine.describe(self._clock()))
        self._wait(stop, lambda: self._engine.spaces is not None)
        assert self._engine.spaces is not None
        self._transport.take_seconds()  # not those of collecting
        return self._engine.spaces

    def request(self, policy: PolicySnapshot, index: int) -> None:
        """Ask every actor for the segments of its samplers; does not wait."""
        self._engine.expected = self.expected
        self._do(self._engine.request(policy, index, self._clock()))

    def receive(self, stop: StopSignals) -> Collected:
        """Receive the segments that were requested first, in sampler order."""
        self._reports.begin(self._engine.requests.index, self._engine.requests.began)
        self._wait(stop, lambda: self._engine.requests.finished)
        for line in self._engine.patience.news():
            logger.info("%s", line)
        incidents, self._incidents = self._incidents, []
        collected = self._engine.requests.take(self._clock(), self._transport.take_seconds(), incidents)
        return replace(collected, actors=len(self._engine.hosting.running))

    def renew(self) -> None:
        """Replace all actors, because received segments were lost and must be collected again."""
        self._do(self._engine.renew(self._clock()))

    def notes(self) -> list[str]:
        """Return lines for the end of the run."""
        backups = self._engine.backups
        return self._engine.balancing.notes() + (backups.notes() if backups is not None else [])

    def close(self) -> None:
        """Stop all actors; close all environments."""
        self._transport.close()

    def _wait(self, stop: StopSignals, over: Callable[[], bool]) -> None:
        while not over():
            for event in self._transport.events(stop):
                self._do(self._engine.on(event, self._clock()))
            self._do(self._engine.tick(self._clock()))
            if self._reports.due:
                self._report()

    def _report(self) -> None:
        began, requests = self._clock(), self._engine.requests
        busy = [actor for actor in self._engine.hosting.running.values() if actor.asked]
        on_these = (actor.process for actor in busy if actor.first.index == requests.index)  # not on later segments
        received = requests.pending[requests.index].made.values()
        steps = sum(report.steps for report, _ in received) + self._transport.steps_of(on_these)
        if steps > self._steps_seen:
            self._engine.news_at = began
        self._steps_seen = steps
        self._reports.send(steps, len(busy), self._clock() - began)

    def _do(self, commands: Iterable[Command]) -> None:
        stacks, commands = "", list(commands)
        hung = any(isinstance(one, Log) and one.incident and one.incident.kind == "actor_hung" for one in commands)
        for command in commands:
            if not isinstance(command, Log):
                if hung and isinstance(command, Kill):
                    stacks = self._transport.stacks(command.process)
                self._transport.do(command)
                continue
            if command.text:
                logger.warning("%s%s", command.text, _innermost(stacks))
            if command.incident:
                self._incidents.append(replace(command.incident, details=stacks))
            stacks = ""  # of another actor than the next line


def _innermost(stacks: str) -> str:
    """Return the innermost frame of the main thread, which comes last: `; it was in File "sim.py", line 12 in step`."""
    main = stacks.rpartition("most recent call first")[2].splitlines()
    return next((f"; it was in {line.strip()}" for line in main if line.strip().startswith("File")), "")
