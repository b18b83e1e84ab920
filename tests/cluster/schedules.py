"""Runs of the real learner in virtual time, drawn from a list of numbers, so that a failing one can be made shorter."""

from __future__ import annotations

import functools
import hashlib
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from builders import make_config, plan_of
from virtual import KINDS, TOY_SPACES, Faults, Loop, ToyActor, VirtualTransport, real_actors
from worlds.episodic import Hashed

import dppo
from dppo.engine.actor_collector import ActorCollector
from dppo.engine.engine import CollectionEngine
from dppo.engine.hosting import shares
from dppo.engine.ledger import ReplayLedger
from dppo.engine.messages import Limits
from dppo.errors import SegmentsLost
from dppo.hosts.plans import sampler_plan
from dppo.learners.trainers import LocalTrainer, Trainers
from dppo.ppo.exchange.records import Experience, Update
from dppo.ppo.exchange.scales import Moments, Statistics
from dppo.ppo.networks.choice import choose_network
from dppo.ppo.networks.network import NetworkSpec
from dppo.run.learner import PPOLearner
from dppo.run.state import RunState
from dppo.signals import StopSignals
from dppo.spaces.spaces import Spaces

LIMITS = Limits(
    segment_timeout_s=10, max_actor_restarts=6, start_timeout_s=100, move_after_s=20, quiet_s=25
)
LAGS = (0, 1, 3)


def config(**changes: Any) -> dppo.Config:
    settings = {
        "env_id": Hashed,
        "num_samplers": 3,
        "num_steps": 2,
        "update_epochs": 1,
        "hidden_sizes": (2,),
        "norm_obs": True,
        "norm_reward": True,
        "norm_adv": False,
        "minibatch_size": 6,
        "learning_rate": 0.01,
        "total_timesteps": 18,
        "progress": "off",
    }
    return make_config(settings | changes)


class Mixing:
    """Trainers that take no time; each bit of their input changes all weights."""

    def __init__(self, spec: NetworkSpec) -> None:
        self.spec = spec
        self._weights = self._hashed(b"new")

    def update(self, experience: Experience) -> Update:
        parts = []
        for segment in experience.segments:
            columns = [getattr(segment, field.name) for field in fields(segment)]
            parts += [column.tobytes() for column in columns if column is not None]
        policy = experience.policy
        scale = policy.obs_scale
        scale_as_numbers = scale and (scale.mean.tolist(), scale.std.tolist())
        numbers = (policy.version, scale_as_numbers, experience.reward_scale, experience.iteration)
        parts += [self._weights.tobytes(), repr(numbers).encode()]
        self._weights = self._hashed(b"".join(parts))
        return Update({}, 0.0, None)

    def _hashed(self, content: bytes) -> np.ndarray:
        digest = hashlib.shake_128(content).digest(self.spec.num_parameters)
        return np.frombuffer(digest, np.int8).astype("f4") / 128

    def weights(self) -> np.ndarray:
        return self._weights.copy()

    def state(self) -> dict[str, np.ndarray]:
        return {}

    def learned_state(self) -> dict[str, np.ndarray]:
        return {}

    def load(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        self._weights = weights.copy()

    def close(self) -> None: ...


class Losing:
    """Trainers that take virtual time, and lose the segments of some iterations before the update."""

    def __init__(
        self, trainers: Trainers, lost: Sequence[int], transport: VirtualTransport | None
    ) -> None:
        self.spec = trainers.spec
        self._trainers = trainers
        self._lost = list(lost)
        self._transport = transport
        self.weights = trainers.weights
        self.state = trainers.state
        self.learned_state = trainers.learned_state
        self.load = trainers.load
        self.close = trainers.close

    def update(self, experience: Experience) -> Update:
        iteration = experience.iteration
        if self._transport is not None:
            self._transport.pass_time(random.Random(iteration).uniform(0, 40))
        if iteration in self._lost:
            self._lost.remove(iteration)
            raise SegmentsLost("lost on their way")
        return self._trainers.update(experience)


@dataclass(frozen=True)
class Piece:
    """A part of a run: from `state`, or the start, to the end or to iteration `stop_after`."""

    lag: int
    iterations: int
    stop_after: int = 0
    state: Any = None
    lost: Sequence[int] = ()
    """Iterations before whose update the segments are lost once."""
    num_actors: int = 1
    limits: Limits = LIMITS


def contents(state: Any) -> dict[str, Any]:
    """Return the state of a learner without its incidents, ready to compare."""
    flat = {
        f"{part}/{name}": array.tobytes()
        for part, named in state.arrays.items()
        for name, array in named.items()
    }
    return flat | {name: value for name, value in state.values.items() if name != "incidents"}


class Laboratory:
    """Trains with actors in virtual time, and knows the results of undisturbed runs.

    One trainer is shared by all runs, because creating it takes longer than a run.
    """

    def __init__(
        self,
        num_samplers: int,
        make_actor: Callable[..., Any],
        trainers: Trainers,
        statistics: Callable[[], Statistics],
        iterations: Sequence[int],
    ) -> None:
        self.num_samplers = num_samplers
        self.make_actor = make_actor
        self.iterations = iterations
        self.seen: Counter[str] = Counter()
        """What has happened in all runs."""
        self.trainers = trainers
        self._statistics = statistics
        self._fresh = (trainers.weights(), trainers.state())

    @functools.cache  # noqa: B019  lives as long as the tests of a module
    def expected(self, lag: int, iterations: int) -> dict[str, Any]:
        return contents(self.train(None, Piece(lag, iterations)))

    def train(self, transport: VirtualTransport | None, piece: Piece) -> Any:
        """Return the state of the learner; without a transport, of a run in a loop, without the engine."""
        num_samplers = self.num_samplers
        ledger = ReplayLedger(num_samplers, replay=True, policy_lag=piece.lag)
        engine = CollectionEngine(shares(num_samplers, piece.num_actors), ledger, piece.limits)
        collector: Any
        if transport is None:
            collector = Loop(self.make_actor(), num_samplers, ledger)
        else:
            collector = ActorCollector(engine, transport, clock=transport.clock)
        trainers = Losing(self.trainers, piece.lost, transport)
        trainers.load(*self._fresh)
        learner = PPOLearner(collector, trainers, ledger, self._statistics(), policy_lag=piece.lag)
        if piece.state is not None:
            piece.state.restore(learner)
        try:
            collector.describe(StopSignals())
            for iteration in learner.run(piece.iterations, StopSignals()):
                if iteration.number == piece.stop_after:
                    break
        finally:
            collector.close()
        self._note(engine, piece)
        return RunState.capture(learner)

    def _note(self, engine: CollectionEngine, piece: Piece) -> None:
        """Count what has happened in a run."""
        backups = engine.backups
        if backups is not None:
            self.seen += Counter(
                asked=backups.num_requests, won=backups.num_sooner, wasted=backups.wasted_steps
            )
        if piece.limits.samplers_per_actor is None:
            self.seen["limits found"] += engine.hosting.limit < sys.maxsize

    # ------------------------------------------------------------------ schedules

    def run(self, draws: Draws, story: list[str]) -> None:
        """Run a schedule, and add what happens to `story`; raise if the result is not that of a plain loop."""
        schedule = Schedule(draws, self.num_samplers, self.iterations)
        story.append(schedule.summary)
        state: Any = None
        for begin, end in zip([0, *schedule.stops], schedule.stops, strict=False):
            transport = VirtualTransport(
                schedule.actors_of(self.make_actor), draws, schedule.faults
            )
            transport.slowness = schedule.slowness
            if self.make_actor is ToyActor:  # which shows its samplers
                transport.most_hosted = schedule.limits.most_hosted
            transport.story = story
            transport.tick_s = 5.0
            story.append(f"iterations {begin} to {end}:")
            lost = [index for index in schedule.lost if begin <= index < end]
            piece = Piece(
                schedule.lag,
                schedule.iterations,
                end,
                state,
                lost,
                schedule.num_actors,
                schedule.limits,
            )
            state = self.train(transport, piece)
            self.seen += transport.moved + Counter(state.values["incidents"])
        self.seen += Counter(schedule.faults.happened)
        same = contents(state) == self.expected(schedule.lag, schedule.iterations)
        assert same, "the state of the learner differs"

    def problem(self, draws: Draws, story: list[str] | None = None) -> str:
        """Return the problem of a schedule, "" if there is none."""
        try:
            self.run(draws, [] if story is None else story)
        except Exception as error:  # whatever breaks, a shorter schedule is wanted
            return f"{type(error).__name__}: {error}"
        return ""

    def shortest(self, drawn: list[float], tries: int = 2000) -> str:
        """Return the story of the shortest failing schedule that is found from one that fails."""
        drawn = shrunk(drawn, lambda numbers: bool(self.problem(Draws(0, numbers))), tries)
        story: list[str] = []
        problem = self.problem(Draws(0, drawn), story)
        return "\n".join([*story, problem])


def with_toys() -> Laboratory:
    """Return a laboratory whose five samplers take microseconds."""
    spec = choose_network(config().network, TOY_SPACES).spec
    return Laboratory(5, ToyActor, Mixing(spec), Statistics, (8, 40))


def with_real_samplers(*, trained: bool = False) -> Laboratory:
    """Return a laboratory with three real samplers; with `trained`, PPO learns in place of `Mixing`."""
    settings = config()
    plan = sampler_plan(settings)
    make_actor = real_actors(plan)
    actor = make_actor()
    spaces = actor.describe(0)
    actor.close()
    assert isinstance(spaces, Spaces)
    local = LocalTrainer(plan_of(settings, spaces.actions), spaces)
    trainers: Trainers = local if trained else Mixing(local.spec)
    return Laboratory(
        3, make_actor, trainers, lambda: Statistics(Moments.empty((2,)), Moments.empty(())), (5,)
    )


class Draws(random.Random):
    """Random numbers that are recorded, or given; 0 is drawn after the last one, where nothing special happens."""

    def __init__(self, seed: int, numbers: Sequence[float] | None = None) -> None:
        super().__init__(seed)
        self.drawn: list[float] = []
        self._given = numbers

    def _next(self) -> float:
        number = super().random()
        if self._given is not None:
            position = len(self.drawn)
            number = self._given[position] if position < len(self._given) else 0.0
        self.drawn.append(number)
        return number

    def random(self) -> float:
        return 1 - self._next()  # faults strike below a limit

    def uniform(self, a: float, b: float) -> float:
        return a + (b - a) * self._next()

    def choice(self, seq: Any) -> Any:
        return seq[int(self._next() * len(seq))]


class Schedule:
    """A run that is drawn: its settings, the speed of its actors, and the probabilities of faults."""

    def __init__(self, draws: Draws, num_samplers: int, iterations: Sequence[int]) -> None:
        self.lag = draws.choice(LAGS)
        self.num_actors = draws.choice((2, 1, 3, 4))
        backups = draws.choice((False, True))
        self.iterations = iterations[-1] if draws.random() < 0.03 else iterations[0]
        self.faults = self._drawn_faults(draws)
        self.slowness = {
            actor: draws.choice((1.0, 1.0, 1.0, 4.0, 10.0)) for actor in range(self.num_actors)
        }
        stops = [*draws.choice([[], [], [3], [6]]), self.iterations]
        self.stops = sorted({min(stop, self.iterations) for stop in stops})
        self.lost = [index for index in range(self.iterations) if draws.random() < 0.02]

        # these follow from the first numbers, and have no draw of their own
        first, second, *_ = draws.drawn
        slots = 0 if backups else int(6000 * first) % 6
        most_hosted = [sys.maxsize, num_samplers, num_samplers + 1][slots // 2]
        # of a process, for as many samplers as it must have: no limit, a known one, or one that is found
        room = int(36_000 * second) % 3
        self.is_known = room == 1
        self.most_each = sys.maxsize if room == 0 else math.ceil(num_samplers / self.num_actors)
        self.limits = replace(
            LIMITS,
            segment_timeout_s=20.0,
            backup_requests=backups,
            most_hosted=most_hosted,
            start_s=3.0 * (slots % 2),
            samplers_per_actor=self.most_each if self.is_known else None,
        )

    @staticmethod
    def _drawn_faults(draws: Draws) -> Faults:
        at_most = draws.choice([0, 1, 2, 5])
        repeats = draws.choice([0.0, 0.3])
        faults = Faults(at_most=at_most, repeats=repeats)
        for kind in KINDS:
            probability = draws.choice([0.0, 0.0, 0.1, 0.4])
            setattr(faults, kind, probability)
        return faults

    def actors_of(self, make_actor: Callable[..., Any]) -> Callable[[], Any]:
        """Return a function that makes an actor; toys have the limit of samplers in a process."""
        if make_actor is ToyActor:
            return functools.partial(ToyActor, self.most_each, known=self.is_known)
        return make_actor

    @property
    def summary(self) -> str:
        limits = self.limits
        suffix = ", as is known" if self.is_known else ""
        return (
            f"lag {self.lag}, {self.num_actors} actors, slowness {self.slowness}, backup requests "
            f"{limits.backup_requests}, lost {self.lost}, environments of at most {limits.most_hosted} samplers, "
            f"{limits.start_s:g} s apart, of {self.most_each} in a process{suffix}"
        )


def shrunk(drawn: list[float], fails: Callable[[list[float]], bool], tries: int) -> list[float]:
    """Return as few numbers other than 0 as possible for which `fails` is true, by leaving out and zeroing blocks."""
    size = len(drawn)
    while size:
        at = 0
        while at < len(drawn):
            block = drawn[at : at + size]
            for replacement in ([], [0.0] * len(block)):
                shorter = [*drawn[:at], *replacement, *drawn[at + size :]]
                if any(block) and tries > 0:
                    tries -= 1
                    if fails(shorter):
                        drawn = shorter
                        at += len(replacement)
                        break
            else:
                at += size
        size //= 2
    return drawn
