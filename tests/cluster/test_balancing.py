"""The engine alone, with actors of different speed: which samplers move, and when; backup requests."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from test_slow_or_hung import Driver, report

from dppo.engine.hosting import shares
from dppo.engine.messages import Answered, Ask, Joined, Limits, Process, Start, Started
from dppo.hosts.wire import Answer
from dppo.ppo.exchange.records import Timings

LIMITS = Limits(segment_timeout_s=1000, max_actor_restarts=3, move_after_s=1000)
STEPS = 100  # of a segment
Seconds = Callable[[int], float]
"""Seconds that an actor needs for a segment."""


class Cluster(Driver):
    """Actors that answer as fast as they are."""

    def __init__(
        self,
        samplers: int,
        actors: int,
        seconds: Seconds,
        *,
        open_steps: int = 0,
        backups: bool = False,
        cpu: float | None = None,
        samplers_per_actor: int | None = None,
    ) -> None:
        """Let an actor's samplers take turns, or work side by side, each using the share `cpu` of a core."""
        limits = replace(LIMITS, backup_requests=backups, samplers_per_actor=samplers_per_actor)
        super().__init__(shares(samplers, actors), limits, described=False)
        self.seconds, self.cpu = seconds, cpu
        self.heavy: set[int] = set()
        """Samplers whose simulator has four times as much to compute."""
        self.open_steps = dict.fromkeys(range(samplers), open_steps)
        for actor_id in range(actors):
            self.on(Started(Process(actor_id, 1), f"n{actor_id}"))
        self.on(Answered(Process(0, 1), 1, "spaces"))  # type: ignore[arg-type]

    def notes(self) -> list[str]:
        backups = self.engine.backups
        return self.engine.balancing.notes() + (backups.notes() if backups is not None else [])

    def answer_to(self, ask: Ask) -> Answered:
        used = 1.0 if self.cpu is None else self.cpu * len(ask.question.requests)
        made, timings = [], []
        for one in ask.question.requests:
            first = report(one.sampler_id, one.index, ask.policy.version)
            carry = replace(first.carry, episode_lengths=np.array([self.open_steps[one.sampler_id]]))
            pace = self.seconds(ask.process.actor_id) * max(1.0, used)
            seconds = pace * (4 if one.sampler_id in self.heavy else 1)
            made.append((replace(first, steps=STEPS, carry=carry, env_s=seconds), "segment"))
            replayed = 0 if one.rebuild is None else int(one.rebuild.carry.episode_lengths.sum())
            replay_s = pace * replayed / STEPS
            timings.append(Timings(seconds + replay_s, seconds, replayed, replay_s))
        if self.cpu is None:
            return Answered(ask.process, ask.ask_id, Answer(tuple(made), sum(timings, Timings())))
        last = replace(
            max(timings, key=lambda one: one.total_s), replayed_steps=sum(one.replayed_steps for one in timings)
        )
        return Answered(ask.process, ask.ask_id, Answer(tuple(made), last, min(1.0, used)))

    def iterate(self, index: int) -> list[int]:
        """Collect segments `index` without a lag; return the samplers that were rebuilt for it."""
        self.asks.clear()
        self.request(index)
        return self.collect()

    def collect(self) -> list[int]:
        """Answer all questions; return the samplers that were rebuilt for them."""
        began, answers = self.now, [self.answer_to(ask) for ask in self.asks]
        moved = [one.sampler_id for ask in self.asks for one in ask.question.requests if one.rebuild is not None]
        for answer in sorted(answers, key=lambda one: one.answer.timings.total_s):  # type: ignore[union-attr]
            self.now = began + answer.answer.timings.total_s  # type: ignore[union-attr]
            self.on(answer)
        self.engine.requests.take(self.now, 0.0, [])
        return sorted(moved)


def one_slow(actor_id: int) -> float:
    return 5.0 if actor_id == 0 else 1.0


@pytest.mark.parametrize(
    ("open_steps", "moves"),
    [(0, {6: [0, 4]}), (300, {6: [4], 7: [0]}), (3000, {6: [], 7: [], 11: [4]})],
    ids=["at the end of an episode", "for a short replay", "when the run has waited as long as the replay takes"],
)
def test_samplers_of_a_slow_actor_move_once_it_is_known(open_steps: int, moves: dict[int, list[int]]) -> None:
    cluster = Cluster(8, 4, one_slow, open_steps=open_steps)
    found = {index: cluster.iterate(index) for index in range(13)}
    assert {index: found[index] for index in moves} == moves
    assert sum(map(len, found.values())) == sum(map(len, moves.values())), "and they stay there"


def test_the_sampler_moves_that_is_at_the_end_of_its_episode() -> None:
    cluster = Cluster(12, 4, one_slow, open_steps=100_000)
    assert not any(cluster.iterate(index) for index in range(6))
    cluster.open_steps[4] = 0
    cluster.iterate(6)
    assert cluster.iterate(7) == [4]


@pytest.mark.parametrize("samplers", [8, 16])
def test_among_even_actors_nothing_moves(samplers: int) -> None:
    rng = random.Random(1)
    cluster = Cluster(samplers, 8, lambda actor_id: rng.uniform(0.85, 1.15))
    assert not any(cluster.iterate(index) for index in range(40))
    assert not cluster.logged()
    assert not cluster.notes()


@pytest.mark.parametrize("samplers", [4, 8])
def test_milliseconds_between_processes_that_share_cores_are_not_due_to_an_actor(samplers: int) -> None:
    cluster = Cluster(samplers, 4, lambda actor_id: 0.0055 if actor_id == 0 else 0.0014)
    assert not any(cluster.iterate(index) for index in range(60))
    assert not cluster.logged()
    assert not cluster.notes()


def test_one_outlier_moves_nothing() -> None:
    cluster = Cluster(8, 4, lambda actor_id: 50.0 if cluster.engine.requests.index == 5 and not actor_id else 1.0)
    assert not any(cluster.iterate(index) for index in range(20))


def test_a_sampler_that_has_more_to_compute_does_not_make_its_actor_slow() -> None:
    cluster = Cluster(8, 4, lambda actor_id: 1.0)
    cluster.heavy = {4}
    assert not any(cluster.iterate(index) for index in range(30))
    assert not cluster.logged()


def test_without_replay_samplers_move_between_episodes_only() -> None:
    cluster = Cluster(8, 4, one_slow, open_steps=1)
    cluster.engine._ledger.replays = False
    assert not any(cluster.iterate(index) for index in range(20))
    cluster.open_steps[4] = 0
    cluster.iterate(20)
    assert cluster.iterate(21) == [4]


def test_a_slow_actor_is_named_once_with_its_node_and_its_cost() -> None:
    cluster = Cluster(8, 4, one_slow, open_steps=100_000)
    for index in range(20):
        cluster.iterate(index)
    (line,) = cluster.logged()
    assert line.startswith(
        "actor 0 on node n0 needs 5 s for a segment, a typical actor 1 s, which costs 80% of the time."
    )
    (note,) = cluster.notes()
    assert note.startswith("actor 0 on node n0 needs 5 s for a segment, a typical actor 1 s, which costs")


def test_an_actor_that_was_slow_is_tried_again_and_gets_its_share_back() -> None:
    slow = {0}
    cluster = Cluster(8, 4, lambda actor_id: 5.0 if actor_id in slow else 1.0)
    moved = {index: cluster.iterate(index) for index in range(12)}
    assert sum(map(len, moved.values())) == 2
    again = next(index for index in range(12, 40) if cluster.iterate(index))
    assert again == 13, "in the 8th iteration without a sampler"
    assert len(cluster.iterate(again + 1)) == 1, "it is still slow"
    slow.clear()
    moves = [cluster.iterate(index) for index in range(again + 2, again + 45)]
    assert [len(one) for one in moves if one] == [1, 1]
    assert not cluster.logged() or len(cluster.logged()) == 1


@pytest.mark.parametrize(("begins_at", "again"), [(14, 15), (99, 17)], ids=["an episode begins", "none begins"])
def test_an_actor_that_was_slow_replays_little_when_it_is_tried_again(begins_at: int, again: int) -> None:
    """After 8 iterations nothing, after 12 half a segment."""
    cluster = Cluster(8, 4, one_slow, open_steps=50)
    assert sum(len(cluster.iterate(index)) for index in range(10)) == 2
    moved = {}
    for index in range(10, 20):
        cluster.open_steps[5] = 0 if index >= begins_at else 50
        moved[index] = cluster.iterate(index)
    assert next(index for index in moved if moved[index]) == again
    assert begins_at == 99 or moved[again] == [5]


def test_an_actor_that_was_slow_is_tried_again_with_a_sampler_that_need_not_be_waited_for() -> None:
    """Sampler 5 has less to replay now, but makes a segment, which would have to be replayed as well."""
    cluster = Cluster(8, 4, one_slow, open_steps=50)
    for index in range(12):
        cluster.iterate(index)
    cluster.open_steps |= {5: 3, 6: 10}
    cluster.iterate(12)
    cluster.asks.clear()
    cluster.request(13)
    for ask in [ask for ask in cluster.asks if 5 not in ask.question.samplers]:
        cluster.on(cluster.answer_to(ask))
    cluster.asks.clear()
    cluster.request(14)
    assert [ask.question.samplers for ask in cluster.asks if ask.process.actor_id == 0] == [(6,)]


# ------------------------------------------------------------------ samplers in threads


@pytest.mark.parametrize("cpu", [0.001, 0.02, 0.1, 0.5], ids=["waiting", "a third", "full", "too many"])
def test_threads_among_even_actors_nothing_moves(cpu: float) -> None:
    rng = random.Random(1)
    cluster = Cluster(64, 4, lambda actor_id: rng.uniform(0.9, 1.1), cpu=cpu)
    assert not any(cluster.iterate(index) for index in range(40))
    assert not cluster.logged()
    assert not cluster.notes()


def test_threads_an_actor_that_is_ahead_takes_no_samplers() -> None:
    """With a lag, actors are at different segments; paces that differ by a few percent say nothing either."""
    cluster = Cluster(16, 2, lambda actor_id: 1.0 + 0.05 * actor_id, cpu=0.001)
    for index in range(20):
        cluster.iterate(index)
    cluster.asks.clear()
    cluster.request(20)
    cluster.request(21)
    for ask in list(cluster.asks):
        if ask.process.actor_id == 0:
            cluster.now += 0.5
            cluster.on(cluster.answer_to(ask))
    cluster.request(22)
    assert not any(actor.waits for actor in cluster.engine._actors.values())
    assert [len(actor.samplers) for actor in cluster.engine._actors.values()] == [8, 8]


def test_threads_a_slow_actor_gives_all_its_samplers_to_others_that_have_cpu_left() -> None:
    cluster = Cluster(16, 4, one_slow, cpu=0.01)
    found = {index: cluster.iterate(index) for index in range(8)}
    assert [sampler for moved in found.values() for sampler in moved] == [0, 4, 8, 12]
    began = cluster.now
    cluster.iterate(8)
    assert cluster.now - began == 1.0, "the slow one would take 5 s for a single one, too"


def test_threads_a_slow_actor_keeps_its_part_of_what_fills_all_cpus() -> None:
    cluster = Cluster(32, 4, lambda actor_id: 2.0 if actor_id == 0 else 1.0, cpu=1.0)
    for index in range(40):
        began = cluster.now
        cluster.iterate(index)
    assert [len(actor.samplers) for actor in cluster.engine._actors.values()] == [5, 9, 9, 9]
    assert cluster.now - began == 10.0, "16 s at the start"


def test_threads_a_slow_actor_is_named_with_its_cost() -> None:
    cluster = Cluster(16, 4, one_slow, cpu=0.001, open_steps=100_000)
    for index in range(20):
        cluster.iterate(index)
    (line,) = cluster.logged()
    assert line.startswith("actor 0 on node n0 needs 4.99 s for a segment")
    assert "which costs 80% of the time" in line


def test_threads_an_actor_that_joins_is_tried_and_gets_its_part_if_that_is_faster() -> None:
    def joined(slowdown: float) -> int:
        cluster = Cluster(16, 2, lambda actor_id: 1.0, cpu=0.001)
        actors = cluster.engine._actors
        cluster.seconds = lambda actor_id: 1 + slowdown * len(actors[actor_id].samplers)
        for index in range(40):
            cluster.iterate(index)
            if index == 10:
                cluster.on(Joined(2))
                cluster.on(Started(cluster.all(Start)[-1].process, "n2"))
        return len(actors[2].samplers)

    assert joined(0.0) == 1, "simulators that use nothing of an actor's node gain nothing"
    assert joined(0.5) >= 4, "processes of simulators share the CPU of their node"


def test_threads_a_segment_is_late_after_the_time_of_one_and_not_of_all() -> None:
    cluster = Cluster(8, 4, lambda actor_id: 10.0, open_steps=50, backups=True, cpu=0.001)
    for index in range(21):
        cluster.iterate(index)
    cluster.asks.clear()
    cluster.request(21)
    cluster.now += 10.0
    for ask in cluster.asks[1:]:
        cluster.on(cluster.answer_to(ask))
    cluster.asks.clear()
    cluster.wait(14.0)
    assert not cluster.asks, "late, but by less than a backup takes: 10 s, and 5 s for the replay"
    cluster.wait(2.5)
    assert sorted(one.sampler_id for ask in cluster.asks for one in ask.question.requests) == [0, 4]


# ------------------------------------------------------------------ backup requests


def late(*, won: bool) -> tuple[Cluster, Ask, Ask]:
    """Return actors of which the first is late, its question, and that to another one for the same segment."""
    cluster = Cluster(3, 3, lambda actor_id: 10.0, open_steps=50, backups=True)
    for index in range(21):
        cluster.iterate(index)
    cluster.asks.clear()
    cluster.request(21)
    (first,) = [ask for ask in cluster.asks if ask.process.actor_id == 0]
    cluster.now += 10.0
    for ask in [ask for ask in cluster.asks if ask is not first]:
        cluster.on(cluster.answer_to(ask))
    cluster.asks.clear()
    cluster.wait(14.0)
    assert not cluster.asks, "late, but by less than a backup takes: 10 s, and 5 s for the replay"
    cluster.wait(2.5)
    (second,) = cluster.asks
    cluster.asks.clear()
    assert second.question.requests[0].rebuild is not None
    assert 0 in second.question.hosted
    cluster.on(cluster.answer_to(second if won else first))
    assert cluster.engine.requests.finished
    cluster.engine.requests.take(cluster.now, 0.0, [])
    return cluster, first, second


@pytest.mark.parametrize("won", [True, False])
def test_a_late_segment_is_asked_for_again_and_the_first_answer_counts(won: bool) -> None:
    cluster, first, second = late(won=won)
    assert cluster.notes()[-1] == (
        f"Backup requests: 1 segments asked for again, {int(won)} of them sooner, 0 env steps wasted."
    )
    cluster.request(22)
    goes_on = next(ask for ask in cluster.asks for one in ask.question.requests if one.sampler_id == 0)
    assert goes_on.process == (second if won else first).process
    assert all(one.rebuild is None for one in goes_on.question.requests), "its process has the sampler"
    cluster.on(cluster.answer_to(first if won else second))  # too late
    assert "1 segments asked for again" in cluster.notes()[-1]
    assert f"{STEPS} env steps wasted" in cluster.notes()[-1]
    for ask in cluster.asks:
        cluster.on(cluster.answer_to(ask))
    assert cluster.engine.requests.finished
    assert [one.index for one in cluster.engine.requests.take(cluster.now, 0.0, []).reports] == [22, 22, 22]


def test_without_backup_requests_a_late_segment_is_waited_for() -> None:
    cluster = Cluster(3, 3, lambda actor_id: 10.0)
    for index in range(5):
        cluster.iterate(index)
    cluster.request(5)
    cluster.asks.clear()
    cluster.wait(500.0)
    assert not cluster.asks
