"""Cycles, bounds and speed-ups equal those worked out by hand."""

from typing import Any

import pytest
from builders import finished

from dppo.config import Config
from dppo.tools.compare import make_table
from dppo.tools.compare.measured import (
    MeasuredRun,
    differing_seeds,
    group_of,
    groups_of,
    measure_cycle,
)


def row(number: int, /, **figures: Any) -> dict[str, Any]:
    """0.7 s: 0.64 s of the slowest actor and 0.01 s around it, 0.03 s of update, 0.02 s of other; 0.6 s per actor."""
    times = {
        "iteration": 0.7,
        "collect": 0.65,
        "slowest_actor": 0.64,
        "transfer": 0.004,
        "update": 0.03,
        "env": 0.5,
        "act": 0.1,
    }
    return {
        **{f"perf/{name}_s": seconds for name, seconds in times.items()},
        "perf/env_step_ms": 10.0,
        "iteration": number,
        "global_step": 512 * number,
        "time/training_s": 0.7 * number,
        **{f"perf/{name}_s": seconds for name, seconds in figures.items()},
    }


def run(
    actors: int,
    seed: int = 1,
    sha: str = "a",
    training_s: float = 2.1,
    samplers: int = 8,
    threads: bool = False,
    **figures: Any,
) -> MeasuredRun:
    config = Config(
        env_id="E-v0", seed=seed, num_actors=actors, num_samplers=samplers, env_threads=threads
    )
    rows = [row(number, **figures) for number in (1, 2, 3)]
    result = finished(
        wall_s=training_s + 9, training_s=training_s, global_step=1536, weights_sha256=sha
    )
    return MeasuredRun(config, result, rows)


def test_the_bound_is_the_sum_of_exchange_collection_and_update() -> None:
    cycle = measure_cycle([row(1), row(2), row(3)], steps=512)
    bound_s = 0.004 + 0.64 + 0.03
    assert cycle["bound_s"] == pytest.approx(bound_s)
    assert cycle["bound_steps_per_s"] == pytest.approx(512 / bound_s)
    assert cycle["efficiency"] == pytest.approx(bound_s / 0.7)
    assert cycle["overhead"] == pytest.approx(0.03 / 0.7)

    # the rest of the transfer overlaps with the slowest actor
    wild = measure_cycle([row(2, transfer=0.5, iteration=0.68)], 512)
    assert wild["exchange_s"] == pytest.approx(0.01)
    assert wild["efficiency"] == pytest.approx(1.0), "never above one"

    no_exchange = measure_cycle([row(2, collect=0.64)], 512)
    assert no_exchange["exchange_s"] == 0.0


def test_the_first_iteration_counts_only_if_it_is_the_only_one() -> None:
    first = row(1, iteration=9.0, slowest_actor=8.0, collect=8.0)
    assert measure_cycle([first, row(2)], 512) == measure_cycle([row(2)], 512)
    assert measure_cycle([first], 512)["iteration_s"] == 9.0


def test_time_to_target_is_the_first_row_that_reaches_it() -> None:
    single = run(1)
    single.rows[1]["charts/episodic_return"] = 480.0
    single.rows[2]["charts/episodic_return"] = 490.0
    assert single.as_json(None)["curve"] == {
        "wall_s": [1.4, pytest.approx(2.1)],
        "global_step": [1024, 1536],
        "episodic_return": [480.0, 490.0],
    }

    curve = single.curve()
    assert curve.time_to(475) == 1.4
    assert curve.time_to(481) == pytest.approx(2.1)
    assert curve.time_to(500) is None
    assert curve.time_to(None) is None


def test_groups_keep_the_order_of_the_numbers_of_actors() -> None:
    groups = groups_of([run(8), run(0), run(8, seed=2), run(0, seed=2), run(1)])
    assert [group["label"] for group in groups] == ["8 actors", "in process", "1 actor"]
    assert [len(group["seeds"]) for group in groups] == [2, 2, 1]


def test_a_group_has_the_means_of_its_runs() -> None:
    runs = [run(1, training_s=16.0), run(8, training_s=2.0), run(8, seed=2, training_s=3.0)]
    _, eight = groups_of(runs)
    steps_per_s = 3072 / 5
    assert eight["steps_per_s"] == pytest.approx(steps_per_s)
    assert eight["speed_up"] == pytest.approx(steps_per_s / (1536 / 16))
    assert eight["startup_s"] == pytest.approx(9)
    assert eight["training_s"] == 2.5
    assert eight["time_to_target_s"] is None


def test_a_speed_up_above_its_limit_is_noise() -> None:
    # 0.6 s of work and 0.03 s of update in 0.7 s, and 1536 steps in 2.1 s
    single = group_of([run(1)])
    for actors in (1, 2, 8):
        limit = group_of([run(actors)], single)["speed_up_limit"]
        assert limit == pytest.approx(0.7 / (0.6 / actors + 0.03))

    real = group_of([run(2, training_s=2.1 / 2.1)], single)
    noise = group_of([run(2, training_s=2.1 / 2.2)], single)
    assert not real["speed_up_is_noise"]
    assert noise["speed_up_is_noise"] is True
    assert not single["speed_up_is_noise"]

    # a first group is compared with itself, however fast it was
    fast = group_of([run(1, training_s=1.0)])
    assert fast["speed_up"] == 1
    assert fast["speed_up_limit"] < 1
    assert not fast["speed_up_is_noise"]


@pytest.mark.parametrize(
    ("training_s", "iteration_s", "shown"),
    [(1.68, 0.7, ["1.25 x", "96.3 %"]), (0.2, 0.6, ["noise", "noise"])],
)
def test_impossible_speed_ups_are_shown_as_noise(
    training_s: float, iteration_s: float, shown: list[str]
) -> None:
    speed_up, efficiency = shown
    groups = groups_of([run(1), run(8, training_s=training_s, iteration=iteration_s)])
    table = make_table(groups, None)
    columns = {str(column.header): list(column.cells) for column in table.columns}
    last_column = list(columns.values())[-1]
    assert columns["speed-up"] == ["1.00 x", speed_up]
    assert last_column == ["96.3 %", efficiency]
    assert groups[1]["cycle"]["efficiency_is_noise"] is (efficiency == "noise")


def test_the_limit_of_a_speed_up_counts_the_work_of_all_actors_and_the_size_of_the_batch() -> None:
    two = group_of([run(2)])  # 1.2 s of work
    assert two["cycle"]["work_s"] == pytest.approx(1.2)

    eight = group_of([run(8)], two)
    limit = 0.7 / (1.2 / 8 + 0.03)
    assert eight["speed_up_limit"] == pytest.approx(limit)

    # twice the work in twice the time
    larger = group_of([run(2, samplers=16)], two)
    limit = 0.7 / (1.2 / 2 + 0.03)
    assert larger["speed_up_limit"] == pytest.approx(limit)


def test_with_threads_more_actors_can_only_save_what_threads_wait_for_each_other() -> None:
    single = group_of([run(1, threads=True)])
    assert single["cycle"]["work_s"] == pytest.approx(8 * 0.6)

    faster = group_of([run(4, threads=True, env=0.4)], single)
    assert faster["speed_up_limit"] == pytest.approx(0.7 / (0.5 + 0.03))

    slower = group_of([run(4, threads=True, env=0.6)], single)
    assert slower["speed_up_limit"] == pytest.approx(0.7 / (0.6 + 0.03))
    assert slower["speed_up_limit"] == single["speed_up_limit"]


def test_weights_that_differ_for_one_seed_are_found() -> None:
    runs = [run(1), run(8), run(1, seed=2, sha="b"), run(8, seed=2, sha="c")]
    assert differing_seeds(runs[:2]) == {}
    assert differing_seeds(runs) == {2: {1: "b", 8: "c"}}
