"""The engine alone, with actors of different speed: which samplers move, and when; backup requests."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from driver import PACED, STEPS, Cluster, one_slow

from dppo.engine.messages import Ask, Joined, Start

WITH_BACKUPS = replace(PACED, backup_requests=True)


def moves_of(moved: dict[int, list[int]]) -> list[int]:
    """Return the samplers that moved in any iteration."""
    return [sampler for samplers in moved.values() for sampler in samplers]


def assert_nothing_moves(cluster: Cluster, iterations: int) -> None:
    assert moves_of(cluster.run(iterations)) == []
    assert not cluster.logged()
    assert not cluster.notes()


@pytest.mark.parametrize(
    ("open_steps", "moves"),
    [
        pytest.param(0, {6: [0, 4]}, id="at the end of an episode"),
        pytest.param(300, {6: [4], 7: [0]}, id="for a short replay"),
        pytest.param(
            3000, {6: [], 7: [], 11: [4]}, id="when the run has waited as long as the replay takes"
        ),
    ],
)
def test_samplers_of_a_slow_actor_move_once_it_is_known(
    open_steps: int, moves: dict[int, list[int]]
) -> None:
    moved = Cluster(8, 4, one_slow, open_steps=open_steps).run(13)
    at_these_times = {index: moved[index] for index in moves}
    assert at_these_times == moves
    assert len(moves_of(moved)) == len(moves_of(moves)), "and they stay there"


def test_the_sampler_moves_that_is_at_the_end_of_its_episode() -> None:
    cluster = Cluster(12, 4, one_slow, open_steps=100_000)
    assert moves_of(cluster.run(6)) == []
    cluster.open_steps[4] = 0
    cluster.iterate(6)
    assert cluster.iterate(7) == [4]


@pytest.mark.parametrize("samplers", [8, 16])
def test_among_even_actors_nothing_moves(samplers: int) -> None:
    rng = random.Random(1)
    assert_nothing_moves(Cluster(samplers, 8, lambda actor_id: rng.uniform(0.85, 1.15)), 40)


@pytest.mark.parametrize("samplers", [4, 8])
def test_milliseconds_between_processes_that_share_cores_are_not_due_to_an_actor(
    samplers: int,
) -> None:
    assert_nothing_moves(
        Cluster(samplers, 4, lambda actor_id: 0.0055 if actor_id == 0 else 0.0014), 60
    )


def test_one_outlier_moves_nothing() -> None:
    def seconds(actor_id: int) -> float:
        if actor_id == 0 and cluster.engine.requests.index == 5:
            return 50.0
        return 1.0

    cluster = Cluster(8, 4, seconds)
    assert moves_of(cluster.run(20)) == []


def test_a_sampler_that_has_more_to_compute_does_not_make_its_actor_slow() -> None:
    cluster = Cluster(8, 4, lambda actor_id: 1.0)
    cluster.heavy = {4}
    assert_nothing_moves(cluster, 30)


def test_without_replay_samplers_move_between_episodes_only() -> None:
    cluster = Cluster(8, 4, one_slow, open_steps=1)
    cluster.engine._ledger.replays = False
    assert moves_of(cluster.run(20)) == []
    cluster.open_steps[4] = 0
    cluster.iterate(20)
    assert cluster.iterate(21) == [4]


@pytest.mark.parametrize(
    ("samplers", "cpu", "paces"),
    [
        (8, None, "5 s for a segment, a typical actor 1 s"),
        (16, 0.001, "4.99 s for a segment, a typical actor 0.997 s"),
    ],
)
def test_a_slow_actor_is_named_once_with_its_node_and_its_cost(
    samplers: int, cpu: float | None, paces: str
) -> None:
    cluster = Cluster(samplers, 4, one_slow, open_steps=100_000, cpu=cpu)
    cluster.run(20)
    [line] = cluster.logged()
    before_cost, *_ = line.partition(" 80%")
    assert line.startswith(f"actor 0 on node n0 needs {paces}, which costs 80% of the time.")
    assert cluster.notes()[0].startswith(before_cost)


def test_an_actor_that_was_slow_is_tried_again_and_gets_its_share_back() -> None:
    slow = {0}
    cluster = Cluster(8, 4, lambda actor_id: 5.0 if actor_id in slow else 1.0)
    assert len(moves_of(cluster.run(12))) == 2

    # in the 8th iteration without a sampler
    again = next(index for index in range(12, 40) if cluster.iterate(index))
    assert again == 13
    back = cluster.iterate(again + 1)
    assert len(back) == 1, "it is still slow"

    slow.clear()
    later = range(again + 2, again + 45)
    moves = [samplers for samplers in map(cluster.iterate, later) if samplers]
    assert [len(samplers) for samplers in moves] == [1, 1]
    assert len(cluster.logged()) <= 1


@pytest.mark.parametrize(
    ("begins_at", "again"), [(14, 15), (99, 17)], ids=["an episode begins", "none begins"]
)
def test_an_actor_that_was_slow_replays_little_when_it_is_tried_again(
    begins_at: int, again: int
) -> None:
    """After 8 iterations nothing, after 12 half a segment."""
    cluster = Cluster(8, 4, one_slow, open_steps=50)
    assert len(moves_of(cluster.run(10))) == 2
    moved = {}
    for index in range(10, 20):
        cluster.open_steps[5] = 0 if index >= begins_at else 50
        moved[index] = cluster.iterate(index)

    assert next(index for index in moved if moved[index]) == again
    assert begins_at == 99 or moved[again] == [5]


def test_an_actor_that_was_slow_is_tried_again_with_a_sampler_that_need_not_be_waited_for() -> None:
    """Sampler 5 has less to replay now, but makes a segment, which would have to be replayed as well."""
    cluster = Cluster(8, 4, one_slow, open_steps=50)
    cluster.run(12)
    cluster.open_steps |= {5: 3, 6: 10}
    cluster.iterate(12)
    cluster.request_only(13)
    others_of_5 = [ask for ask in cluster.asks if 5 not in ask.question.samplers]
    for ask in others_of_5:
        cluster.on(cluster.paced_answer(ask))
    cluster.request_only(14)

    asked_of_first = [ask for ask in cluster.asks if ask.process.actor_id == 0]
    assert [ask.question.samplers for ask in asked_of_first] == [(6,)]


# ------------------------------------------------------------------ samplers in threads


@pytest.mark.parametrize(
    "cpu", [0.001, 0.02, 0.1, 0.5], ids=["waiting", "a third", "full", "too many"]
)
def test_threads_among_even_actors_nothing_moves(cpu: float) -> None:
    rng = random.Random(1)
    assert_nothing_moves(Cluster(64, 4, lambda actor_id: rng.uniform(0.9, 1.1), cpu=cpu), 40)


def numbers_of_samplers(cluster: Cluster) -> list[int]:
    return [len(actor.samplers) for actor in cluster.engine._actors.values()]


def test_threads_an_actor_that_is_ahead_takes_no_samplers() -> None:
    """With a lag, actors are at different segments; paces that differ by a few percent say nothing either."""
    cluster = Cluster(16, 2, lambda actor_id: 1.0 + 0.05 * actor_id, cpu=0.001)
    cluster.run(20)
    cluster.request_only(20)
    cluster.request(21)
    for ask in list(cluster.asks):
        if ask.process.actor_id == 0:
            cluster.now += 0.5
            cluster.on(cluster.paced_answer(ask))
    cluster.request(22)

    assert not any(actor.waits for actor in cluster.engine._actors.values())
    assert numbers_of_samplers(cluster) == [8, 8]


def test_threads_a_slow_actor_gives_all_its_samplers_to_others_that_have_cpu_left() -> None:
    cluster = Cluster(16, 4, one_slow, cpu=0.01)
    assert moves_of(cluster.run(8)) == [0, 4, 8, 12]
    began = cluster.now
    cluster.iterate(8)
    assert cluster.now - began == 1.0, "the slow one would take 5 s for a single one, too"


def test_threads_a_slow_actor_keeps_its_part_of_what_fills_all_cpus() -> None:
    cluster = Cluster(32, 4, lambda actor_id: 2.0 if actor_id == 0 else 1.0, cpu=1.0)
    cluster.run(39)
    began = cluster.now
    cluster.iterate(39)
    assert numbers_of_samplers(cluster) == [5, 9, 9, 9]
    assert cluster.now - began == 10.0, "16 s at the start"


@pytest.mark.parametrize(
    ("slowdown", "fewest", "most"),
    [(0.0, 1, 1), (0.5, 4, 16)],
    ids=[
        "simulators that use nothing of a node gain nothing",
        "simulators share the CPU of their node",
    ],
)
def test_threads_an_actor_that_joins_gets_its_part_if_that_is_faster(
    slowdown: float, fewest: int, most: int
) -> None:
    cluster = Cluster(16, 2, lambda actor_id: 1.0, cpu=0.001)
    actors = cluster.engine._actors
    cluster.seconds = lambda actor_id: 1 + slowdown * len(actors[actor_id].samplers)
    for index in range(40):
        cluster.iterate(index)
        if index == 10:
            cluster.on(Joined(2))
            cluster.start(2, cluster.all(Start)[-1].process.number, "n2")

    assert fewest <= len(actors[2].samplers) <= most


# ------------------------------------------------------------------ backup requests


def with_a_late_segment(
    samplers: int, actors: int, cpu: float | None = None
) -> tuple[Cluster, Ask]:
    """Return actors of which the first is late, and its question; an idle actor has been asked for the same."""
    cluster = Cluster(samplers, actors, lambda actor_id: 10.0, WITH_BACKUPS, open_steps=50, cpu=cpu)
    cluster.run(21)
    cluster.request_only(21)
    late, *punctual = sorted(cluster.asks, key=lambda ask: ask.process.actor_id)
    cluster.now += 10.0
    for ask in punctual:
        cluster.on(cluster.paced_answer(ask))
    cluster.asks.clear()
    cluster.wait(14.0)
    assert not cluster.asks, "late, but by less than a backup takes: 10 s, and 5 s for the replay"
    cluster.wait(2.5)
    return cluster, late


def test_threads_a_segment_is_late_after_the_time_of_one_and_not_of_all() -> None:
    cluster, _ = with_a_late_segment(8, 4, cpu=0.001)
    assert sorted(sampler for sampler, _, _ in cluster.asked()) == [0, 4]


@pytest.mark.parametrize("won", [True, False])
def test_a_late_segment_is_asked_for_again_and_the_first_answer_counts(won: bool) -> None:
    cluster, late = with_a_late_segment(3, 3)
    [backup] = cluster.asks
    cluster.asks.clear()
    assert backup.question.requests[0].rebuild is not None
    assert 0 in backup.question.hosted

    winner, loser = (backup, late) if won else (late, backup)
    cluster.on(cluster.paced_answer(winner))
    assert cluster.finished

    cluster.take()
    start = f"Backup requests: 1 segments asked for again, {int(won)} of them sooner, "
    assert cluster.notes()[-1] == f"{start}0 env steps wasted."

    cluster.request(22)
    next_ask = next(ask for ask in cluster.asks if 0 in ask.question.samplers)
    assert next_ask.process == winner.process
    # its process has the sampler
    assert all(request.rebuild is None for request in next_ask.question.requests)

    too_late = cluster.paced_answer(loser)
    cluster.on(too_late)
    assert cluster.notes()[-1] == f"{start}{STEPS} env steps wasted."

    for ask in cluster.asks:
        cluster.on(cluster.paced_answer(ask))
    assert cluster.finished
    assert [report.index for report in cluster.take().reports] == [22, 22, 22]


def test_without_backup_requests_a_late_segment_is_waited_for() -> None:
    cluster = Cluster(3, 3, lambda actor_id: 10.0)
    cluster.run(5)
    cluster.request(5)
    cluster.asks.clear()
    cluster.wait(500.0)
    assert not cluster.asks
