"""Schedules of runs in virtual time, drawn from a list of numbers, so that a failing one can be made shorter."""

from __future__ import annotations

import functools
import math
import random
import sys
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from test_engine import KINDS, LIMITS, Losing, Mixing, config, contents
from virtual import Fake, Faults

from dppo.engine.actor_collector import ActorCollector
from dppo.engine.collector import Collected
from dppo.engine.engine import Collecting
from dppo.engine.hosting import shares
from dppo.engine.ledger import ReplayLedger
from dppo.errors import EnvFault, EnvironmentFault
from dppo.hosts.wire import Answer, Question, sampler_plan
from dppo.ppo.exchange.normalizer import Statistics
from dppo.ppo.exchange.records import (
    PolicySnapshot,
    Rebuild,
    SamplerCarry,
    Segment,
    SegmentReport,
    SegmentRequest,
    Timings,
)
from dppo.ppo.networks.choice import choose_network
from dppo.run.learner import PPOLearner
from dppo.signals import StopSignals
from dppo.spaces.actions import DiscreteActions
from dppo.spaces.spaces import Spaces

SAMPLERS, STEPS, ENVS = 5, 2, 2
SHORT, LONG = 8, 40  # iterations
TICK_S = 5.0
SPACES = Spaces(np.dtype(("float32", (1,))), DiscreteActions(2))
MODULUS = 2**31 - 1


class Draws(random.Random):
    """Random numbers that are recorded, or given; 0 is drawn after the last one, where nothing special happens."""

    def __init__(self, seed: int, given: Sequence[float] | None = None) -> None:
        super().__init__(seed)
        self.drawn: list[float] = []
        self._given = given

    def _next(self) -> float:
        at = len(self.drawn)
        drawn = super().random() if self._given is None else self._given[at] if at < len(self._given) else 0.0
        self.drawn.append(drawn)
        return drawn

    def random(self) -> float:
        return 1 - self._next()  # faults strike below a limit

    def uniform(self, a: float, b: float) -> float:
        return a + (b - a) * self._next()

    def choice(self, seq: Any) -> Any:
        return seq[int(self._next() * len(seq))]


# ------------------------------------------------------------------ a process that takes microseconds


class Toy:
    """Makes segments as a `PPOActor` does: what they hold depends on all actions and policies of the sampler so far."""

    def __init__(self, limit: int = sys.maxsize, *, known: bool = False) -> None:
        """Create a process that can have `limit` samplers; if that is `known`, it must not be asked for more."""
        self._known = known
        self._samplers: dict[int, _Sampler] = {}
        self.hosted = self._samplers.keys()
        self._limit, self._fault = limit, False

    def describe(self, sampler_id: int) -> Spaces:
        return SPACES

    def make_segments(self, question: Question, policy: PolicySnapshot) -> Answer | EnvironmentFault:
        for gone in self._samplers.keys() - set(question.hosted):
            del self._samplers[gone]
        made = []
        for request in question.requests:
            self._fault |= len({*self._samplers, request.sampler_id}) > self._limit
            assert not (self._fault and self._known), f"{question} is for more than {self._limit} samplers"
            if self._fault:  # also for all later questions, as in an actor
                return one_too_many(request.sampler_id, len(self._samplers))
            own = self._samplers.setdefault(request.sampler_id, _Sampler(request.sampler_id))
            if request.rebuild is not None:
                own.restore(request.rebuild, request.index)
            made.append(own.make(request, policy))
        return Answer(tuple(made), Timings())

    def close(self) -> None: ...


def one_too_many(sampler_id: int, beside: int) -> EnvironmentFault:
    """Return the fault of a constructor in a process that has other samplers."""
    message = f"sampler {sampler_id}: the environment's constructor raised PermissionError: only one in a process"
    place = EnvFault("constructor", "PermissionError", "", 0, sampler_id=sampler_id)
    return EnvironmentFault(message, "", place).beside(beside, beside)


Env = tuple[int, int, int]
"""The number of the episode, its length so far, and the state, which sets how long it will be."""


class _Sampler:
    def __init__(self, sampler_id: int) -> None:
        self._id, self._index, self._sums = sampler_id, 0, (0,) * ENVS
        self._envs = tuple(_reset(sampler_id, env, 0) for env in range(ENVS))

    def restore(self, rebuild: Rebuild, index: int) -> None:
        carry, self._index = rebuild.carry, index
        self._sums = tuple(carry.discounted_returns.astype(int).tolist())
        self._envs = tuple(self._replayed(rebuild, env) for env in range(ENVS))

    def _replayed(self, rebuild: Rebuild, number: int) -> Env:
        carry, ended = rebuild.carry, False
        env = _reset(self._id, number, int(carry.episodes[number]))
        for action in rebuild.actions[number].tolist():
            env, over = _step(env, action)
            ended |= over
        assert (ended, *env[1:]) == (False, carry.episode_lengths[number], carry.checksums[number]), (
            "the replay ends elsewhere"
        )
        return env

    def make(self, request: SegmentRequest, policy: PolicySnapshot) -> tuple[SegmentReport, Segment]:
        assert request.index == self._index, f"{request}, but the sampler is at segment {self._index}"
        chosen = zlib.crc32(policy.weights.tobytes()) + policy.version
        made, self._sums, self._envs = _made(self._id, self._index, policy.version, chosen, self._sums, self._envs)
        self._index += 1
        return made


def _reset(sampler: int, number: int, episode: int) -> Env:
    return episode, 0, ((sampler * 7919 + number * 104_729 + episode * 31_337 + 1) * 48_271) % MODULUS


def _step(env: Env, action: int) -> tuple[Env, bool]:
    """Return the environment after a step, and whether the episode is over."""
    episode, length, state = env
    state = (state * 48_271 + action + 1) % MODULUS
    return (episode, length + 1, state), state % 3 == 0 or length + 1 == 6


@functools.cache  # schedules that come to the same make the same segments; their arrays are read-only
def _made(
    sampler: int, index: int, version: int, chosen: int, sums_before: tuple[int, ...], envs_before: tuple[Env, ...]
) -> tuple[tuple[SegmentReport, Segment], tuple[int, ...], tuple[Env, ...]]:
    """Return a segment that follows from all arguments, and the sampler's sums and environments after it."""
    sums, envs = list(sums_before), list(envs_before)
    states, rewards, done = [], [], []
    actions: list[list[int]] = [[] for _ in range(ENVS)]
    since: list[list[int]] = [[] for _ in range(ENVS)]
    for t in range(STEPS):
        for number in range(ENVS):
            action = (envs[number][2] + chosen) // (t + 2) % 2
            states.append(envs[number][2] % 4096)
            envs[number], over = _step(envs[number], action)
            actions[number].append(action)
            since[number].append(action)
            sums[number] = (3 * sums[number] + envs[number][2]) % 1009
            rewards.append(sums[number])
            done.append(over)
            if over:
                since[number].clear()
                envs[number] = _reset(sampler, number, envs[number][0] + 1)
    episodes, lengths, checksums = (np.array(one) for one in zip(*envs, strict=True))
    carry = SamplerCarry(episodes, np.array(sums, float), lengths, np.array(sums, float), checksums.astype(np.uint32))
    opened = tuple(np.array(one, np.int64) for one in since)
    report = SegmentReport(sampler, index, version, STEPS * ENVS, carry, opened)
    return (report, _segment(states, actions, rewards, done)), tuple(sums), tuple(envs)


def _segment(states: list[int], actions: list[list[int]], rewards: list[int], done: list[bool]) -> Segment:
    shape = (STEPS, ENVS)
    zeros, over = np.zeros(shape, np.float32), np.array(done).reshape(shape)
    return Segment(
        obs=np.array(states, np.float32).reshape(*shape, 1),
        actions=np.array(actions).T,
        logprobs=zeros,
        values=zeros,
        next_values=zeros,
        rewards=np.array(rewards, float).reshape(shape),
        terminated=over,
        truncated=over,
        valid=np.ones(shape, bool),
    )


class Loop:
    """Collects in a loop, without the engine: what a schedule must come to."""

    def __init__(self, ledger: ReplayLedger) -> None:
        self.expected = None
        self._ledger, self._toy, self._requests = ledger, Toy(), deque[tuple[PolicySnapshot, int]]()

    def describe(self, stop: StopSignals) -> Spaces:
        return SPACES

    def request(self, policy: PolicySnapshot, index: int) -> None:
        self._requests.append((policy, index))

    def receive(self, stop: StopSignals) -> Collected:
        policy, index = self._requests.popleft()
        question = Question(index, tuple(range(SAMPLERS)), tuple(range(SAMPLERS)))
        answer = self._toy.make_segments(question, policy)
        assert isinstance(answer, Answer)
        reports, segments = (list(one) for one in zip(*answer.made, strict=True))
        for report in reports:
            self._ledger.record(report)
        return Collected(index, policy, reports, segments, [answer.timings], 0.0)

    def renew(self) -> None: ...

    def alive(self) -> int:
        return 0

    def notes(self) -> list[str]:
        return []

    def close(self) -> None: ...


# ------------------------------------------------------------------ schedules


class Schedules:
    """Runs schedules, and compares each with a plain loop."""

    def __init__(self) -> None:
        settings = config(num_samplers=SAMPLERS)
        self.seen: Counter[str] = Counter()
        """What has happened in all of them."""
        self._plan, self._spec = sampler_plan(settings), choose_network(settings.network, SPACES).spec
        self._fresh = Mixing(self._spec).weights()
        self._expected = {
            (lag, iterations): contents(self._train(None, lag, iterations))
            for lag in (0, 1, 3)
            for iterations in (SHORT, LONG)
        }

    def _train(
        self,
        world: Fake | None,
        lag: int,
        iterations: int,
        *,
        stop_after: int = 0,
        lost: Sequence[int] = (),
        state: Any = None,
        **options: Any,
    ) -> Any:
        ledger = ReplayLedger(SAMPLERS, replay=True, policy_lag=lag)
        collector: Any = Loop(ledger)
        if world is not None:
            limits = replace(LIMITS, segment_timeout_s=20.0, backup_requests=options["backups"])
            limits = replace(limits, most_hosted=world.most_hosted, start_s=options["start_s"])
            limits = replace(limits, samplers_per_actor=options["samplers_per_actor"])
            engine = Collecting(shares(SAMPLERS, options["num_actors"]), ledger, limits)
            collector = ActorCollector(engine, world, clock=world.clock)
        trainers = Mixing(self._spec)
        trainers.load(self._fresh, {})
        learner = PPOLearner(collector, Losing(trainers, lost, world), ledger, Statistics(), policy_lag=lag)
        if state is not None:
            learner.load(*state)
        collector.describe(StopSignals())
        for iteration in learner.run(iterations, StopSignals()):
            if iteration.number == stop_after:
                break
        if world is not None and engine.backups is not None:
            backups = engine.backups
            self.seen += Counter(asked=backups.asked, won=backups.won, wasted=backups.wasted_steps)
        if world is not None and options["samplers_per_actor"] is None:
            self.seen["limits found"] += engine.hosting.limit < sys.maxsize
        return learner.state()

    def run(self, draws: Draws, story: list[str]) -> None:
        """Run a schedule, and add what happens to `story`; raise if the result is not that of a plain loop."""
        lag, num_actors, backups = draws.choice((0, 1, 3)), draws.choice((2, 1, 3, 4)), draws.choice((False, True))
        iterations = LONG if draws.random() < 0.03 else SHORT
        faults = Faults(at_most=draws.choice([0, 1, 2, 5]), repeats=draws.choice([0.0, 0.3]))
        for kind in KINDS:
            setattr(faults, kind, draws.choice([0.0, 0.0, 0.1, 0.4]))
        slowness = {actor: draws.choice((1.0, 1.0, 1.0, 4.0, 10.0)) for actor in range(num_actors)}
        stops = [*draws.choice([[], [], [3], [6]]), iterations]
        lost = [index for index in range(iterations) if draws.random() < 0.02]
        story.append(f"lag {lag}, {num_actors} actors, slowness {slowness}, backup requests {backups}, lost {lost}")
        slots = 0 if backups else int(6000 * draws.drawn[0]) % 6  # no draw of its own
        most_hosted, start_s = [sys.maxsize, SAMPLERS, SAMPLERS + 1][slots // 2], 3.0 * (slots % 2)
        story[-1] += f", environments of at most {most_hosted} samplers, {start_s:g} s apart"
        room = int(36_000 * draws.drawn[1]) % 3  # of a process, for as many samplers as it must have: not, known, found
        most_each = sys.maxsize if not room else math.ceil(SAMPLERS / num_actors)
        known = most_each if room == 1 else None
        story[-1] += f", of {most_each} in a process{', as is known' if known else ''}"
        state: Any = None
        for begun, until in zip([0, *stops], stops, strict=False):
            world = Fake(self._plan, draws, faults, functools.partial(Toy, most_each, known=bool(known)))
            world.slowness, world.story, world.tick_s = slowness, story, TICK_S
            story.append(f"iterations {begun} to {until}:")
            world.most_hosted = most_hosted
            options = {"num_actors": num_actors, "backups": backups, "start_s": start_s, "samplers_per_actor": known}
            due = [index for index in lost if begun <= index < until]
            state = self._train(world, lag, iterations, stop_after=until, lost=due, state=state, **options)
            self.seen += world.moved + Counter(state[1]["incidents"])
        self.seen += Counter(faults.happened)
        assert contents(state) == self._expected[lag, iterations], "the state of the learner differs"

    def problem(self, draws: Draws, story: list[str] | None = None) -> str:
        """Return the problem of a schedule, "" if there is none."""
        try:
            self.run(draws, [] if story is None else story)
        except Exception as error:  # whatever breaks, a shorter schedule is wanted
            return f"{type(error).__name__}: {error}"
        return ""

    def shortest(self, drawn: list[float], tries: int = 2000) -> str:
        """Return the story of the shortest failing schedule that is found from one that fails."""
        drawn = shrunk(drawn, lambda given: bool(self.problem(Draws(0, given))), tries)
        story: list[str] = []
        problem = self.problem(Draws(0, drawn), story)
        return "\n".join([*story, problem])


def shrunk(drawn: list[float], fails: Callable[[list[float]], bool], tries: int) -> list[float]:
    """Return as few numbers other than 0 as possible for which `fails` is true, by leaving out and zeroing blocks."""
    size = len(drawn)
    while size:
        at = 0
        while at < len(drawn):
            block = drawn[at : at + size]
            for instead in ([], [0.0] * len(block)):
                shorter = [*drawn[:at], *instead, *drawn[at + size :]]
                if any(block) and tries > 0:
                    tries -= 1
                    if fails(shorter):
                        drawn = shorter
                        break
            else:
                at += size
                continue
            at += len(instead)
        size //= 2
    return drawn
