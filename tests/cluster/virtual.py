"""Actors in virtual time, behind a transport that delays, loses, repeats and corrupts answers; the real learner on top.

`Laboratory` runs the learner with them. Its samplers are real ones, or toys that take microseconds.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import random
import sys
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from dppo.engine.collector import Collected, Collector
from dppo.engine.ledger import ReplayLedger
from dppo.engine.messages import (
    Answered,
    Ask,
    Describe,
    Died,
    Event,
    ForTransport,
    Joined,
    Kill,
    Left,
    Look,
    Process,
    Progressed,
    Recycled,
    Start,
    Started,
)
from dppo.envs.activity import Activity, Phase
from dppo.errors import EnvFault, EnvironmentFault
from dppo.hosts.plans import SamplerPlan
from dppo.ppo.exchange.questions import Answer, Question
from dppo.ppo.exchange.records import (
    PolicySnapshot,
    Rebuild,
    SamplerCarry,
    Segment,
    SegmentReport,
    SegmentRequest,
    Timings,
)
from dppo.signals import StopSignals
from dppo.spaces.actions import DiscreteActions
from dppo.spaces.spaces import Spaces
from dppo.transports.ray.actor import PPOActor
from dppo.transports.ray.capacity import Demand
from dppo.transports.ray.elastic_pool import ElasticPool
from dppo.transports.ray.pickling import pack

LONGEST_S = 20_000.0  # of virtual time; a run that lasts longer hangs
KINDS = ("dies", "hangs", "forges", "never_starts_soon", "leaves", "replays_long")  # of faults


@dataclass
class Faults:
    """Probabilities of faults, and their largest number."""

    at_most: int = 0
    dies: float = 0.0
    hangs: float = 0.0
    forges: float = 0.0
    never_starts_soon: float = 0.0
    replays_long: float = 0.0
    """A replay takes several deadlines, and progresses."""
    repeats: float = 0.0
    """An answer arrives twice, or late; not counted in `at_most`."""
    leaves: float = 0.0
    """The actor of a question leaves and joins again later, perhaps under a new number."""
    happened: list[str] = field(default_factory=list)

    def strikes(self, rng: random.Random, kind: str) -> bool:
        if len(self.happened) >= self.at_most or rng.random() >= getattr(self, kind):
            return False
        self.happened.append(kind)
        return True


class VirtualTransport:
    """A transport without processes; its clock advances only during waits."""

    def __init__(
        self,
        make_actor: Callable[[], Any],
        rng: random.Random,
        faults: Faults,
        *,
        threads: bool = False,
    ) -> None:
        self.now = 0.0
        self.tick_s = 2.0
        self.spent_s = 0.0
        self.story: list[str] = []
        """The questions, and what became of them."""
        self.slowness: dict[int, float] = {}
        """Factors of the times that actors take, by id."""
        self.most_hosted = sys.maxsize
        """Samplers whose environments may exist at once."""
        self.moved: Counter[str] = Counter()
        """Samplers that went to another actor although theirs was running."""
        self._make_actor = make_actor
        self._rng = rng
        self._faults = faults
        self._threads = threads
        self._durations: dict[int, float] = {}  # seconds for an answer
        self._makers: dict[int, Process] = {}  # of the last segment of each sampler
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], Event | None]]] = []
        self._actors: dict[Process, Any] = {}
        self._killed: set[Process] = set()
        self._ended: set[Process] = set()
        self._answers: dict[int, Event] = {}
        self._busy: dict[Process, float] = {}  # time at which a process has answered all questions
        # a process progresses between these times
        self._work: dict[Process, list[tuple[float, float]]] = {}

    def clock(self) -> float:
        return self.now

    def stacks(self, process: Process) -> str:
        return ""

    def log_of(self, process: Process) -> str:
        return ""

    def do(self, command: ForTransport) -> None:
        process = command.process
        if isinstance(command, Kill):
            self._killed.add(process)
            return
        assert process not in self._killed, f"{command} to a process that was killed"
        if isinstance(command, Look):
            progress = self._progress(process)
            self._later(self._rng.uniform(0, 1), lambda: Progressed(process, progress))
        elif isinstance(command, Start):
            self._start(process)
        elif isinstance(command, Ask | Describe):
            self._ask(command)

    def _start(self, process: Process) -> None:
        assert process not in self._actors
        alive = [
            other
            for other in self._actors
            if other.actor_id == process.actor_id and other not in self._killed
        ]
        assert not alive, "two processes of one actor"
        self._actors[process] = self._make_actor()
        slow = self._faults.strikes(self._rng, "never_starts_soon")
        self._later(
            self._rng.uniform(22, 28) if slow else self._rng.uniform(0, 4), lambda: Started(process)
        )

    def _ask(self, command: Ask | Describe) -> None:
        process = command.process
        begins = max(self.now, self._busy.get(process, 0.0))
        duration = self._duration(command)
        ends = begins + duration
        self._durations[command.ask_id] = duration
        self._busy[process] = ends
        self._work.setdefault(process, []).append((begins, ends))
        fate = self._fate(command, ends - self.now)
        self._tell(command, fate or f"answers after {duration:.1f} s")
        if self._faults.strikes(self._rng, "leaves"):
            self._leave(process.actor_id)

    def _fate(self, command: Ask | Describe, delay: float) -> str:
        """Draw what becomes of a question after `delay`; return its name, or nothing for an answer."""
        process = command.process
        faults = self._faults
        if faults.strikes(self._rng, "dies"):
            death = Died(process, "died: of a fault in virtual time")
            self._later(delay, lambda: self._stopped(process, death))
            return "dies"
        if faults.strikes(self._rng, "hangs"):
            self._later(delay, lambda: self._stopped(process))
            return "hangs"
        forged = faults.strikes(self._rng, "forges")
        self._later(delay, lambda: self._answer(command, forged))
        if self._rng.random() < faults.repeats:
            repeated = delay + self._rng.uniform(0, 30)
            self._later(repeated, lambda: self._answers.get(command.ask_id))
        return "sends the wrong segment" if forged else ""

    def _leave(self, actor_id: int) -> None:
        """Let an actor leave, and come back, perhaps with another number."""
        self.story.append(f"  actor {actor_id} leaves, and comes back")
        self._later(self._rng.uniform(0, 10), lambda: Left(actor_id))
        back = self._rng.choice([actor_id, actor_id + 10])
        self._later(self._rng.uniform(10, 60), lambda: Joined(back))

    def _duration(self, command: Ask | Describe) -> float:
        requests = command.question.requests if isinstance(command, Ask) else ()
        replays = any(request.rebuild is not None for request in requests)
        slow = replays and self._faults.strikes(self._rng, "replays_long")
        seconds = self._rng.uniform(30, 90) if slow else self._rng.uniform(0, 8)
        slowness = self.slowness.get(command.process.actor_id, 1.0)
        return slowness * seconds

    def _tell(self, command: Ask | Describe, fate: str) -> None:
        process = command.process
        topic = "the spaces"
        if isinstance(command, Ask):
            requests = command.question.requests
            topic = ", ".join(map(_described, requests))
            for request in requests:
                before = self._makers.get(request.sampler_id, process)
                self._makers[request.sampler_id] = process
                if before != process and before not in self._killed and request.rebuild is not None:
                    within = request.rebuild.carry.episode_lengths.any()
                    self.moved["within episodes" if within else "between episodes"] += 1
        self.story.append(
            f"{self.now:7.1f} s: actor {process.actor_id} is asked for {topic}, and {fate}"
        )

    def _progress(self, process: Process) -> Activity:
        """Return the progress of a process, which takes ten steps per second while it works."""
        moves = began = done = total = 0
        for begins, ends in self._work.get(process, ()):  # one question after the other
            if begins <= self.now:
                began = moves
                done = int(10 * (min(self.now, ends) - begins))
                total = int(10 * (ends - begins))
                moves += done
        return Activity(moves, began, Phase.REPLAY, 0, 0, done, total)

    def _answer(self, command: Ask | Describe, forged: bool) -> Event | None:
        process = command.process
        if process in self._killed and self._rng.random() < 0.5:
            self._stopped(process)  # the other half still answers
        if process in self._ended:
            return None
        actor = self._actors[process]
        if isinstance(command, Describe):
            return self._sent(command, actor.describe(command.sampler_id))
        answer = actor.make_segments(command.question, command.policy)
        self._check_number_hosted()
        if isinstance(answer, Recycled | EnvironmentFault):
            return self._sent(command, answer)
        assert isinstance(answer, Answer)
        event = self._sent(command, self._timed(answer, command, forged))
        if self._rng.random() >= self._faults.repeats:
            return event
        self._later(self._rng.uniform(0, 2), lambda: event)  # perhaps after the answer behind it
        return None

    def _timed(self, answer: Answer, command: Ask, forged: bool) -> Answer:
        replayed = 0
        for request in command.question.requests:
            if request.rebuild is not None:
                replayed += int(request.rebuild.carry.episode_lengths.sum())
        duration = self._durations[command.ask_id]
        replay_s = duration / 2 if replayed else 0.0
        timings = Timings(duration, 0.0, replayed, replay_s)
        used = 0.2 if self._threads else None
        answer = replace(answer, timings=timings, cpu_share=used)
        if not forged:
            return answer
        (report, segment), *later = answer.results
        next_report = replace(report, index=report.index + 1)
        return replace(answer, results=((next_report, segment), *later))

    def _check_number_hosted(self) -> None:
        if self.most_hosted < sys.maxsize:
            hosted = [
                len(actor.hosted)
                for process, actor in self._actors.items()
                if process not in self._killed
            ]
            assert sum(hosted) <= self.most_hosted, f"environments of {hosted} samplers exist"

    def _stopped(self, process: Process, event: Event | None = None) -> Event | None:
        """Let a process not begin the questions that are left in its queue."""
        self._ended.add(process)
        return event

    def _sent(self, command: Ask | Describe, answer: Any) -> Event:
        event = Answered(command.process, command.ask_id, answer)
        self._answers[command.ask_id] = event
        return event

    def _later(self, delay: float, call: Callable[[], Event | None]) -> None:
        due = (self.now + delay, next(self._order), call)
        heapq.heappush(self._due, due)

    def events(self, stop: StopSignals) -> list[Event]:
        assert self.now < LONGEST_S, "the run hangs"
        stop.check()
        tick = self.now + self.tick_s
        next_due = self._due[0][0] if self._due else tick
        self.now = max(self.now, min(next_due, tick))
        events = []
        while self._due and self._due[0][0] <= self.now:
            _, _, call = heapq.heappop(self._due)
            event = call()
            if event is not None:
                events.append(event)
        return events

    def pass_time(self, seconds: float) -> None:
        """Advance the clock while the learner is busy."""
        self.now += seconds

    def close(self) -> None:
        for actor in self._actors.values():
            actor.close()


def _described(request: SegmentRequest) -> str:
    rebuilt = "" if request.rebuild is None else " (rebuilt)"
    return f"segment {request.index} of sampler {request.sampler_id}{rebuilt}"


class Cloud(VirtualTransport):
    """Processes run on nodes that are added, announced to leave, and lost; actors join and leave with them."""

    def __init__(
        self,
        make_actor: Callable[[], Any],
        rng: random.Random,
        faults: Faults,
        *,
        fewest: int,
        most: int,
        threads: bool = False,
    ) -> None:
        super().__init__(make_actor, rng, faults, threads=threads)
        self.happened: list[str] = []
        self._slots = {"node 0": rng.randint(1, 3)}
        self._leaving: set[str] = set()
        self._homes: dict[Process, str] = {}
        self._pending: list[Start] = []
        self._running: set[Process] = set()
        self._look_at = 0.0
        demand = Demand(fewest, {"CPU": 1.0}, 0, {}, most)
        free = rng.randint(0, self._slots["node 0"])
        self.room = ElasticPool(
            demand, self._usable, self.happened.append, num_free=free, grows=rng.random() < 0.3
        )
        for _ in range(rng.randint(1, 8)):
            self._later(rng.uniform(0, 80), rng.choice([self._add, self._announce, self._lose]))
        self._later(200, lambda: self._add(3))

    def _usable(self) -> dict[str, dict[str, float]]:
        return {
            node: {"CPU": float(size)}
            for node, size in self._slots.items()
            if node not in self._leaving
        }

    def _add(self, size: int = 0) -> None:
        self.happened.append("added")
        self._slots[f"node {next(self._order)}"] = size or self._rng.randint(1, 2)
        self._place()

    def _announce(self) -> None:
        nodes = sorted(self._slots.keys() - self._leaving)
        if nodes:
            self.happened.append("announced")
            node = self._rng.choice(nodes)
            self._leaving.add(node)
            self._later(self._rng.uniform(0, 60), lambda: self._lose(node))

    def _lose(self, node: str = "") -> None:
        node = node or self._rng.choice([*sorted(self._slots), "none"])
        if node not in self._slots:
            return
        self.happened.append("lost")
        del self._slots[node]
        for process, home in self._homes.items():
            if home == node:  # which is known until the process is killed
                self._ended.add(process)
                self._later(
                    self._rng.uniform(0, 3), partial(Died, process, "died: its node is lost")
                )

    def _place(self) -> None:
        """Start pending processes where there is room."""
        homes = list(self._homes.values())
        free = [
            node for node in self._usable() for _ in range(self._slots[node] - homes.count(node))
        ]
        for node in free[: len(self._pending)]:
            start = self._pending.pop(0)
            self._homes[start.process] = node
            super().do(start)

    def do(self, command: ForTransport) -> None:
        if isinstance(command, Start):
            self._pending.append(command)
        else:
            super().do(command)
        if isinstance(command, Kill):
            self._pending = [start for start in self._pending if start.process != command.process]
            self._homes.pop(command.process, None)
            self._running.discard(command.process)
        self._place()

    def events(self, stop: StopSignals) -> list[Event]:
        events = super().events(stop)
        self._running.update(event.process for event in events if isinstance(event, Started))
        if self.now >= self._look_at:
            self._look_at = self.now + 2
            self.room.look()
        joined, left = self.room.changes(self._homes_of_running)
        self.happened += ["joins"] * len(joined)
        self.happened += ["leaves"] * len(left)
        return [*events, *map(Joined, joined), *map(Left, left)]

    def _homes_of_running(self) -> dict[int, str]:
        homes = {}
        for process, home in self._homes.items():
            if process in self._running:
                homes[process.actor_id] = home
        return homes


# ------------------------------------------------------------------ real samplers


def real_actors(plan: SamplerPlan) -> Callable[[], PPOActor]:
    packed = pack(plan)
    return lambda: PPOActor(packed)


# ------------------------------------------------------------------ toy samplers

TOY_STEPS = 2
TOY_ENVS = 2
TOY_SPACES = Spaces(np.dtype(("float32", (1,))), DiscreteActions(2))
MODULUS = 2**31 - 1
Env = tuple[int, int, int]
"""The number of the episode, its length so far, and the state, which sets how long it will be."""


class ToyActor:
    """Makes segments as a `PPOActor` does: what they hold depends on all actions and policies of the sampler so far."""

    def __init__(self, limit: int = sys.maxsize, *, known: bool = False) -> None:
        """Create a process that can have `limit` samplers; if that is `known`, it must not be asked for more."""
        self._limit = limit
        self._known = known
        self._failed = False
        self._samplers: dict[int, _ToySampler] = {}
        self.hosted = self._samplers.keys()

    def describe(self, sampler_id: int) -> Spaces:
        return TOY_SPACES

    def make_segments(
        self, question: Question, policy: PolicySnapshot
    ) -> Answer | EnvironmentFault:
        for sampler_id in self._samplers.keys() - set(question.hosted):
            del self._samplers[sampler_id]
        results = []
        for request in question.requests:
            sampler_id = request.sampler_id
            hosted = {*self._samplers, sampler_id}
            if len(hosted) > self._limit:
                assert not self._known, f"{question} is for more than {self._limit} samplers"
                self._failed = True
            if self._failed:  # also for all later questions, as in an actor
                return one_too_many(sampler_id, len(self._samplers))
            sampler = self._samplers.setdefault(sampler_id, _ToySampler(sampler_id))
            if request.rebuild is not None:
                sampler.restore(request.rebuild, request.index)
            results.append(sampler.make(request, policy))
        return Answer(tuple(results), Timings())

    def close(self) -> None: ...


def one_too_many(sampler_id: int, instances: int) -> EnvironmentFault:
    """Return the fault of a constructor in a process that has other samplers."""
    message = f"sampler {sampler_id}: the environment's constructor raised PermissionError: only one in a process"
    place = EnvFault("constructor", "PermissionError", "", 0, sampler_id=sampler_id)
    return EnvironmentFault(message, "", place).with_instances(instances, instances)


class _ToySampler:
    def __init__(self, sampler_id: int) -> None:
        self._id = sampler_id
        self._index = 0
        self._sums = (0,) * TOY_ENVS
        self._envs = tuple(_reset(sampler_id, env, 0) for env in range(TOY_ENVS))

    def restore(self, rebuild: Rebuild, index: int) -> None:
        self._index = index
        sums = rebuild.carry.discounted_returns.astype(int)
        self._sums = tuple(sums.tolist())
        self._envs = tuple(self._replayed(rebuild, env) for env in range(TOY_ENVS))

    def _replayed(self, rebuild: Rebuild, number: int) -> Env:
        carry = rebuild.carry
        env = _reset(self._id, number, int(carry.episodes[number]))
        for action in rebuild.actions[number].tolist():
            env, over = _step(env, action)
            assert not over, "the replay ends too soon"
        assert env[1:] == (carry.episode_lengths[number], carry.checksums[number]), (
            "the replay ends elsewhere"
        )
        return env

    def make(
        self, request: SegmentRequest, policy: PolicySnapshot
    ) -> tuple[SegmentReport, Segment]:
        assert request.index == self._index, (
            f"{request}, but the sampler is at segment {self._index}"
        )
        policy_hash = zlib.crc32(policy.weights.tobytes()) + policy.version
        result, self._sums, self._envs = _made(
            (self._id, self._index, policy.version), policy_hash, self._sums, self._envs
        )
        self._index += 1
        return result


def _reset(sampler: int, number: int, episode: int) -> Env:
    return (
        episode,
        0,
        ((sampler * 7919 + number * 104_729 + episode * 31_337 + 1) * 48_271) % MODULUS,
    )


def _step(env: Env, action: int) -> tuple[Env, bool]:
    """Return the environment after a step, and whether the episode is over."""
    episode, length, state = env
    state = (state * 48_271 + action + 1) % MODULUS
    return (episode, length + 1, state), state % 3 == 0 or length + 1 == 6


class _Row:
    """One environment of a toy sampler within a segment: its state, its sum, and what it has done."""

    def __init__(self, sampler: int, number: int, env: Env, total: int) -> None:
        self._sampler = sampler
        self._number = number
        self.env = env
        self.total = total
        self.states: list[int] = []
        self.rewards: list[int] = []
        self.done: list[bool] = []
        self.actions: list[int] = []
        self.open_actions: list[int] = []

    def step(self, t: int, policy_hash: int) -> None:
        episode, _, state = self.env
        action = (state + policy_hash) // (t + 2) % 2
        self.env, over = _step(self.env, action)
        self.total = (3 * self.total + self.env[2]) % 1009
        self.states.append(state % 4096)
        self.rewards.append(self.total)
        self.done.append(over)
        self.actions.append(action)
        self.open_actions.append(action)
        if over:
            self.open_actions.clear()
            self.env = _reset(self._sampler, self._number, episode + 1)


@functools.cache  # equal schedules make equal segments, whose arrays are read-only
def _made(
    place: tuple[int, int, int],
    policy_hash: int,
    sums_before: tuple[int, ...],
    envs_before: tuple[Env, ...],
) -> tuple[tuple[SegmentReport, Segment], tuple[int, ...], tuple[Env, ...]]:
    """Return a segment that follows from all arguments, and the sampler's sums and environments after it."""
    sampler, index, version = place
    rows = []
    for number in range(TOY_ENVS):
        rows.append(_Row(sampler, number, envs_before[number], sums_before[number]))
    for t in range(TOY_STEPS):
        for row in rows:
            row.step(t, policy_hash)

    sums = tuple(row.total for row in rows)
    envs = tuple(row.env for row in rows)
    episodes, lengths, checksums = (np.array(column) for column in zip(*envs, strict=True))
    totals = np.array(sums, float)
    carry = SamplerCarry(episodes, totals, lengths, totals, checksums.astype(np.uint32))
    opened = tuple(np.array(row.open_actions, np.int64) for row in rows)
    report = SegmentReport(sampler, index, version, TOY_STEPS * TOY_ENVS, carry, opened)
    return (report, _segment(rows)), sums, envs


def _segment(rows: Sequence[_Row]) -> Segment:
    shape = (TOY_STEPS, TOY_ENVS)
    zeros = np.zeros(shape, np.float32)
    states = np.array([row.states for row in rows], np.float32).T
    over = np.array([row.done for row in rows]).T
    return Segment(
        obs=states.reshape(*shape, 1),
        actions=np.array([row.actions for row in rows]).T,
        logprobs=zeros,
        values=zeros,
        next_values=zeros,
        rewards=np.array([row.rewards for row in rows], float).T,
        terminated=over,
        truncated=over,
        valid=np.ones(shape, bool),
    )


class Loop(Collector):
    """Collects in a loop, without the engine: the result that each schedule must have."""

    expected = None

    def __init__(self, actor: Any, num_samplers: int, ledger: ReplayLedger) -> None:
        self._actor = actor
        self._samplers = tuple(range(num_samplers))
        self._ledger = ledger
        self._requests = deque[tuple[PolicySnapshot, int]]()

    def describe(self, stop: StopSignals) -> Spaces:
        spaces: Spaces = self._actor.describe(0)
        return spaces

    def request(self, policy: PolicySnapshot, index: int) -> None:
        self._requests.append((policy, index))

    def receive(self, stop: StopSignals) -> Collected:
        policy, index = self._requests.popleft()
        answer = self._actor.make_segments(Question(index, self._samplers, self._samplers), policy)
        reports, segments = (list(column) for column in zip(*answer.results, strict=True))
        for report in reports:
            self._ledger.record(report)
        return Collected(index, policy, reports, segments, {0: answer.timings}, 0.0)

    def renew(self) -> None: ...

    def close(self) -> None:
        self._actor.close()
