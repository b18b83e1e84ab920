"""ActorCollector: collects from actors, which may be lost at any time."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from dppo.engine.actors import Actor
from dppo.engine.collector import Collected, OnProgress
from dppo.engine.engine import CollectionEngine
from dppo.engine.messages import Command, Event, ForTransport, Kill, Log, Look, Process
from dppo.engine.progress import ProgressReports
from dppo.envs.activity import Phase
from dppo.log import logger
from dppo.numerics.fingerprint import Expected
from dppo.ppo.exchange.records import Incident, IncidentKind, PolicySnapshot
from dppo.signals import StopSignals
from dppo.spaces.spaces import Spaces


class Transport(Protocol):
    """Starts and stops the processes of actors, and exchanges messages with them."""

    @property
    def spent_s(self) -> float:
        """Seconds spent on sending questions and receiving answers so far."""

    def do(self, command: ForTransport) -> None:
        """Execute a command: start, ask, look at or kill a process; does not wait."""

    def events(self, stop: StopSignals) -> list[Event]:
        """Return new events, if any.

        Waits for: the first event, half a second at most. Fails when: `stop` was requested.
        """

    def stacks(self, process: Process) -> str:
        """Return the stacks of all threads of a process, "" if they cannot be read; waits for a moment."""

    def log_of(self, process: Process) -> str:
        """Return where the log of a process is, "" if it has none."""

    def close(self) -> None:
        """Stop all processes; close all environments."""


class ActorCollector:
    """Runs the loop between engine and transport: the engine decides, the transport acts, this class waits."""

    def __init__(
        self,
        engine: CollectionEngine,
        transport: Transport,
        on_progress: OnProgress | None = None,
        *,
        batch_size: int = 0,
        envs_of_sampler: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep the arguments; without `on_progress`, the progress between two iterations is not read."""
        self.expected: Expected | None = None
        self._engine = engine
        self._transport = transport
        self._clock = clock
        self._envs_of_sampler = envs_of_sampler
        self._reports = (
            None if on_progress is None else ProgressReports(on_progress, batch_size, clock)
        )
        self._looked_at: float | None = None  # time of the looks for a report that is due
        self._reported_steps = 0
        self._spent_before_s = 0.0
        self._incidents: list[Incident] = []

    def describe(self, stop: StopSignals) -> Spaces:
        """Start the actors; return the spaces of the environments of one sampler."""
        now = self._clock()
        if self._reports is not None:
            self._reports.begin(self._engine.limits.resumed_at or 0, now)
        self._do(self._engine.describe(now))
        self._wait(stop, lambda: self._engine.spaces is not None)
        assert self._engine.spaces is not None
        self._take_spent_s()  # time that does not count as collecting
        return self._engine.spaces

    def request(self, policy: PolicySnapshot, index: int) -> None:
        """Ask every actor for the segments of its samplers; does not wait."""
        self._engine.expected = self.expected
        self._do(self._engine.request(policy, index, self._clock()))

    def receive(self, stop: StopSignals) -> Collected:
        """Receive the segments that were requested first, in sampler order."""
        requests = self._engine.requests
        self._looked_at = None
        if self._reports is not None:
            self._reports.begin(requests.index, requests.began)
        self._wait(stop, lambda: requests.finished)
        for line in self._engine.patience.news():
            logger.info("%s", line)
        collected = requests.take(self._clock(), self._take_spent_s(), self.take_incidents())
        return replace(collected, actors=len(self._engine.hosting.running))

    def take_incidents(self) -> list[Incident]:
        """Return the actors lost since the last collection, also in a call that has raised, and forget them."""
        commands = self._engine.take_commands()
        self._do(command for command in commands if isinstance(command, Log))
        incidents = self._incidents
        self._incidents = []
        return incidents

    def renew(self) -> None:
        """Replace all actors, because received segments were lost and must be collected again."""
        self._do(self._engine.renew(self._clock()))

    def notes(self) -> list[str]:
        notes = self._engine.balancing.notes()
        if self._engine.backups is not None:
            notes += self._engine.backups.notes()
        return notes

    def close(self) -> None:
        """Stop all actors; close all environments."""
        self._transport.close()

    def _wait(self, stop: StopSignals, is_over: Callable[[], bool]) -> None:
        while not is_over():
            for event in self._transport.events(stop):
                self._do(self._engine.on(event, self._clock()))
            self._do(self._engine.tick(self._clock()))
            if self._reports is not None and self._reports.due:
                self._report(self._reports)

    def _take_spent_s(self) -> float:
        spent_s = self._transport.spent_s - self._spent_before_s
        self._spent_before_s = self._transport.spent_s
        return spent_s

    def _report(self, reports: ProgressReports) -> None:
        """Look at the busy actors; once their progress has arrived with the next events, report it."""
        now = self._clock()
        busy_actors = [actor for actor in self._engine.hosting.running.values() if actor.queue]
        if self._looked_at is None:
            self._looked_at = now
            for actor in busy_actors:
                actor.deadline.look_sent(now)
                self._transport.do(Look(actor.process))
            return
        requests = self._engine.requests
        request = requests.pending.get(requests.index)  # none while spaces are asked for
        arrived = [] if request is None else request.results.values()
        steps = sum(report.steps for report, _ in arrived)
        starting = sum(actor.is_missing for actor in self._engine.hosting.actors.values())
        for actor in busy_actors:
            index = actor.current_question.index
            if index <= requests.index:
                actor_steps = _steps_of(actor) if index == requests.index else 0
                steps += actor_steps
                starting += not actor_steps
        if steps > self._reported_steps:
            self._engine.wait_log.news_at = now
        self._reported_steps = steps
        environments = sum(map(self._environments_of, self._engine.hosting.running.values()))
        reports.send(
            steps, len(busy_actors), self._clock() - self._looked_at, starting, environments
        )
        self._looked_at = None

    def _environments_of(self, actor: Actor) -> int:
        """Return the environments that an actor has made, as its answers or the last look show."""
        progress = actor.deadline.progress
        environments = 0 if progress is None else progress.environments
        return max(len(actor.instantiated) * self._envs_of_sampler, environments)

    def _do(self, commands: Iterable[Command]) -> None:
        self._incidents += execute(commands, self._transport)


def execute(commands: Iterable[Command], transport: Transport) -> list[Incident]:
    """Let a transport execute commands, and log lines; return the incidents that the lines are about.

    A line about a hung actor gets the stacks and the log of its process, which is killed just before.
    """
    commands = list(commands)
    hung = any(isinstance(command, Log) and _is_about_a_hang(command) for command in commands)
    incidents: list[Incident] = []
    stacks = ""
    place = ""
    for command in commands:
        if not isinstance(command, Log):
            if hung and isinstance(command, Kill):
                stacks = transport.stacks(command.process)
                log = transport.log_of(command.process)
                place = f"; its log: {log}" if log else ""
            transport.do(command)
            continue
        if command.text:
            logger.warning("%s%s%s", command.text, _innermost(stacks), place)
        if command.incident is not None:
            message = f"{command.incident.message}{place}"
            incidents.append(replace(command.incident, message=message, details=stacks))
        # the next line is about another actor
        stacks = ""
        place = ""
    return incidents


def _steps_of(actor: Actor) -> int:
    """Return the env steps that an actor has made for its current question, at the last look."""
    progress = actor.deadline.progress
    if progress is None or progress.phase is Phase.IDLE:
        return 0
    return progress.steps


def _is_about_a_hang(log: Log) -> bool:
    return log.incident is not None and log.incident.kind == IncidentKind.ACTOR_HUNG


def _innermost(stacks: str) -> str:
    """Return the innermost frame of the main thread, which comes last: `; it was in File "sim.py", line 12 in step`."""
    main_thread = stacks.rpartition("most recent call first")[2]
    for line in main_thread.splitlines():
        if line.strip().startswith("File"):
            return f"; it was in {line.strip()}"
    return ""
