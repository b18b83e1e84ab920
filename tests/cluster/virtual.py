"""Actors in virtual time: real samplers behind a transport that delays, loses, repeats and corrupts answers."""

from __future__ import annotations

import heapq
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

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
    Start,
    Started,
)
from dppo.envs.activity import Activity, Phase
from dppo.errors import EnvironmentFault
from dppo.hosts import wire
from dppo.hosts.wire import Answer, Recycled, SamplerPlan
from dppo.ppo.exchange.records import Timings
from dppo.signals import StopSignals
from dppo.transports.ray.actor import PPOActor
from dppo.transports.ray.capacity import Demand
from dppo.transports.ray.room import Room

TICK_S = 2.0
LONGEST_S = 20_000.0  # of virtual time; a run that lasts longer hangs


class Drawn(gym.Env[Any, Any]):
    """Episodes of 2 to 5 steps whose observations depend on the seed and on all actions."""

    observation_space = gym.spaces.Box(-4, 4, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._state, self._steps = (seed or 0) % 2**31, 0
        self._length = 2 + self._state % 4
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        self._state = (self._state * 1_103_515_245 + 12_345 + int(action)) % 2**31
        over = self._steps == self._length
        return self._obs(), float(self._state % 7), over and self._state % 2 == 0, over and self._state % 2 == 1, {}

    def _obs(self) -> np.ndarray:
        return np.array([self._state % 1009 / 504.5 - 1, self._state % 997 / 498.5 - 1], np.float32)


@dataclass
class Faults:
    """Probabilities of faults, and their largest number."""

    at_most: int
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


class Fake:
    """A transport without processes; its clock advances only during waits."""

    def __init__(
        self, plan: SamplerPlan, rng: random.Random, faults: Faults, make_actor: Callable[[], Any] | None = None
    ) -> None:
        packed, self._threads = wire.pack(plan), plan.sampling.env_threads
        self.now, self.tick_s = 0.0, TICK_S
        self.story: list[str] = []
        """The questions, and what became of them."""
        self.slowness: dict[int, float] = {}
        """Factors of the times that actors take, by id."""
        self.most_hosted = sys.maxsize
        """Samplers whose environments may exist at once."""
        self.moved: Counter[str] = Counter()
        """Samplers that went to another actor although theirs was running."""
        self._make_actor = make_actor or (lambda: PPOActor(packed))
        self._rng, self._faults = rng, faults
        self._took: dict[int, float] = {}  # seconds for an answer
        self._makers: dict[int, Process] = {}  # of the last segment of each sampler
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], Event | None]]] = []
        self._actors: dict[Process, PPOActor] = {}
        self._killed: set[Process] = set()
        self._ended: set[Process] = set()
        self._answers: dict[int, Event] = {}
        self._busy: dict[Process, float] = {}  # time at which a process has answered all questions
        self._moves: dict[Process, list[tuple[float, float]]] = {}  # a process progresses between these times

    def clock(self) -> float:
        return self.now

    def stacks(self, process: Process) -> str:
        return ""

    def do(self, command: ForTransport) -> None:
        who = command.process
        if isinstance(command, Kill):
            self._killed.add(who)
            return
        assert who not in self._killed, f"{command} to a process that was killed"
        if isinstance(command, Look):
            found = self._progress(who)
            self._later(self._rng.uniform(0, 1), lambda: Progressed(who, found))
            return
        if isinstance(command, Start):
            assert who not in self._actors
            assert all(one in self._killed for one in self._actors if one.actor_id == who.actor_id), (
                "two processes of one actor"
            )
            self._actors[who] = self._make_actor()
            slow = self._faults.strikes(self._rng, "never_starts_soon")
            self._later(self._rng.uniform(22, 28) if slow else self._rng.uniform(0, 4), lambda: Started(who))
        else:
            self._ask(command, who)

    def _ask(self, command: Ask | Describe, who: Process) -> None:
        rng, faults = self._rng, self._faults
        begins = max(self.now, self._busy.get(who, 0.0))
        replays = isinstance(command, Ask) and any(request.rebuild is not None for request in command.question.requests)
        slow = replays and faults.strikes(rng, "replays_long")
        takes_s = self.slowness.get(who.actor_id, 1.0) * (rng.uniform(30, 90) if slow else rng.uniform(0, 8))
        delay = begins + takes_s - self.now
        self._took[command.ask_id] = takes_s
        fate = f"answers after {takes_s:.1f} s"
        self._busy[who] = self.now + delay
        self._moves.setdefault(who, []).append((begins, self.now + delay))
        if faults.strikes(rng, "dies"):
            fate = "dies"
            self._later(delay, lambda: self._stopped(who, Died(who, "died: of a fault in virtual time")))
        elif faults.strikes(rng, "hangs"):
            fate = "hangs"
            self._later(delay, lambda: self._stopped(who))
        else:
            forged = faults.strikes(rng, "forges")
            fate = "sends the wrong segment" if forged else fate
            self._later(delay, lambda: self._answer(command, who, forged))
            if rng.random() < faults.repeats:
                self._later(delay + rng.uniform(0, 30), lambda: self._answers.get(command.ask_id))
        self._tell(command, fate)
        if faults.strikes(rng, "leaves"):
            self.story.append(f"  actor {who.actor_id} leaves, and comes back")
            self._later(rng.uniform(0, 10), lambda: Left(who.actor_id))
            back = rng.choice([who.actor_id, who.actor_id + 10])
            self._later(rng.uniform(10, 60), lambda: Joined(back))

    def _tell(self, command: Ask | Describe, fate: str) -> None:
        asked = "the spaces"
        if isinstance(command, Ask):
            asked = ", ".join(
                f"segment {one.index} of sampler {one.sampler_id}{'' if one.rebuild is None else ' (rebuilt)'}"
                for one in command.question.requests
            )
            for one in command.question.requests:
                before = self._makers.get(one.sampler_id, command.process)
                self._makers[one.sampler_id] = command.process
                if before != command.process and before not in self._killed and one.rebuild is not None:
                    self.moved[
                        "within episodes" if one.rebuild.carry.episode_lengths.any() else "between episodes"
                    ] += 1
        self.story.append(f"{self.now:7.1f} s: actor {command.process.actor_id} is asked for {asked}, and {fate}")

    def _progress(self, who: Process) -> Activity:
        """Return the progress of a process, which takes ten steps per second while it works."""
        moves = began = done = to_do = 0
        for begins, ends in self._moves.get(who, ()):  # one question after the other
            if begins <= self.now:
                began, done, to_do = moves, int(10 * (min(self.now, ends) - begins)), int(10 * (ends - begins))
                moves += done
        return Activity(moves, began, Phase.REPLAY, 0, 0, done, to_do)

    def _answer(self, command: Ask | Describe, who: Process, forged: bool) -> Event | None:
        if who in self._killed and self._rng.random() < 0.5:
            self._stopped(who)  # the others still answer
        if who in self._ended:
            return None
        actor = self._actors[who]
        if isinstance(command, Describe):
            return self._sent(command.ask_id, Answered(who, command.ask_id, actor.describe(command.sampler_id)))
        answer = actor.make_segments(command.question, command.policy)
        if self.most_hosted < sys.maxsize:
            actors: list[Any] = [one for process, one in self._actors.items() if process not in self._killed]
            hosted = [len(one.hosted) for one in actors]
            assert sum(hosted) <= self.most_hosted, f"environments of {hosted} samplers exist"
        if isinstance(answer, Recycled | EnvironmentFault):
            return self._sent(command.ask_id, Answered(who, command.ask_id, answer))
        assert isinstance(answer, Answer)
        took, replayed = self._took[command.ask_id], 0
        for one in command.question.requests:
            replayed += 0 if one.rebuild is None else int(one.rebuild.carry.episode_lengths.sum())
        timings = Timings(took, 0.0, replayed, took / 2 if replayed else 0.0)
        answer = replace(answer, timings=timings, used=0.2 if self._threads else None)
        if forged:
            (report, segment), *rest = answer.made
            answer = replace(answer, made=((replace(report, index=report.index + 1), segment), *rest))
        event = self._sent(command.ask_id, Answered(who, command.ask_id, answer))
        if self._rng.random() >= self._faults.repeats:
            return event
        self._later(self._rng.uniform(0, 2), lambda: event)  # perhaps after the answer behind it
        return None

    def _stopped(self, who: Process, event: Event | None = None) -> Event | None:
        """Let a process not begin the questions that are left in its queue."""
        self._ended.add(who)
        return event

    def _sent(self, ask_id: int, event: Event) -> Event:
        self._answers[ask_id] = event
        return event

    def _later(self, delay: float, what: Callable[[], Event | None]) -> None:
        heapq.heappush(self._due, (self.now + delay, next(self._order), what))

    def events(self, stop: StopSignals) -> list[Event]:
        assert self.now < LONGEST_S, "the run hangs"
        stop.check()
        when = self._due[0][0] if self._due else self.now + self.tick_s
        self.now = max(self.now, min(when, self.now + self.tick_s))
        found = []
        while self._due and self._due[0][0] <= self.now:
            event = heapq.heappop(self._due)[2]()
            if event is not None:
                found.append(event)
        return found

    def pass_time(self, seconds: float) -> None:
        """Advance the clock while the learner is busy."""
        self.now += seconds

    def steps_of(self, processes: Iterable[Process]) -> int:
        return 0 * len(list(processes))

    def take_seconds(self) -> float:
        return 0.0

    def close(self) -> None:
        for actor in self._actors.values():
            actor.close()


class Cloud(Fake):
    """Processes run on nodes that are added, announced to leave, and lost; actors join and leave with them."""

    def __init__(self, plan: SamplerPlan, rng: random.Random, faults: Faults, *, fewest: int, most: int) -> None:
        super().__init__(plan, rng, faults)
        self.happened: list[str] = []
        self._slots = {"node 0": rng.randint(1, 3)}
        self._leaving: set[str] = set()
        self._homes: dict[Process, str] = {}
        self._pending: list[Start] = []
        self._running: set[Process] = set()
        self._look_at = 0.0
        demand = Demand(fewest, {"CPU": 1.0}, 0, {}, most)
        free = rng.randint(0, self._slots["node 0"])
        self.room = Room(demand, self._usable, self.happened.append, free=free, grows=rng.random() < 0.3)
        for _ in range(rng.randint(1, 8)):
            self._later(rng.uniform(0, 80), rng.choice([self._add, self._announce, self._lose]))
        self._later(200, self._add_enough)

    def _usable(self) -> dict[str, dict[str, float]]:
        return {node: {"CPU": float(size)} for node, size in self._slots.items() if node not in self._leaving}

    def _add(self, size: int = 0) -> None:
        self.happened.append("added")
        self._slots[f"node {next(self._order)}"] = size or self._rng.randint(1, 2)
        self._place()

    def _add_enough(self) -> None:
        self._add(3)

    def _announce(self) -> None:
        if nodes := sorted(self._slots.keys() - self._leaving):
            self.happened.append("announced")
            self._leaving.add(node := self._rng.choice(nodes))
            self._later(self._rng.uniform(0, 60), lambda: self._lose(node))

    def _lose(self, node: str = "") -> None:
        node = node or self._rng.choice([*sorted(self._slots), "none"])
        if node not in self._slots:
            return
        self.happened.append("lost")
        del self._slots[node]
        for who in [who for who, home in self._homes.items() if home == node]:  # which is known until it is killed
            self._ended.add(who)
            self._later(self._rng.uniform(0, 3), partial(Died, who, "died: its node is lost"))

    def _place(self) -> None:
        """Start pending processes where there is room."""
        homes = [*self._homes.values()]
        free = [node for node in self._usable() for _ in range(self._slots[node] - homes.count(node))]
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
        found = super().events(stop)
        self._running.update(event.process for event in found if isinstance(event, Started))
        if self.now >= self._look_at:
            self._look_at = self.now + 2
            self.room.look()
        joined, left = self.room.changes(
            lambda: {who.actor_id: home for who, home in self._homes.items() if who in self._running}
        )
        self.happened += ["joins"] * len(joined) + ["leaves"] * len(left)
        return [*found, *map(Joined, joined), *map(Left, left)]
