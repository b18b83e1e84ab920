"""L trainers with minibatches of M / L rows each equal one trainer with minibatches of M rows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from builders import BOX, DISCRETE, spec_of
from hypothesis import given, settings
from hypothesis import strategies as st
from meetings import Meeting, OwnOrders, Processes
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from torch import from_numpy
from updates import make_trainer, random_batch, train, weighted

from dppo.errors import TrainingDiverged
from dppo.learners import sums
from dppo.learners.sums import FEW, RankGroup
from dppo.ppo.learning.batch import Batch
from dppo.ppo.learning.parallel import Parallel, merged_moments, moments_of_all, row_moments
from dppo.ppo.learning.trainer import PPOTrainer
from dppo.ppo.networks.built_in import BuiltInSpec

ROWS = 48  # of all ranks: 4 ranks with 12 minibatches have one row in each
LEARNING_RATE = 1e-2
LAYERS = ("activation", "hidden_sizes")


def scattered(rows: int) -> np.ndarray:
    """Give weight zero to two rows of three, anywhere."""
    return default_rng(3).random(rows) < 0.35


def last_quarter(rows: int) -> np.ndarray:
    """Give weight zero to all rows of the last of four ranks; the first of two ranks has none."""
    return np.arange(rows) < rows * 3 // 4


def only_two(rows: int) -> np.ndarray:
    """Give weight zero to all but two rows, so that most minibatches are empty on all ranks."""
    numbers = np.arange(rows)
    return np.isin(numbers, (5, rows - 3))


# Changes to PLAIN; `activation`, `hidden_sizes` and `box` concern the model, `weighed` the batch. Further values of
# the same options are drawn from OPTIONS.
STOPS = {"target_kl": 0.1, "update_epochs": 6, "minibatches": 2}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no hidden layer": {"hidden_sizes": (), "box": True},
    "advantages as they are": {"norm_adv": False},
    "advantages divided by the floor": {"adv_floor": 3.0, "norm_reward": True},
    "clipped value loss": {"clip_vloss": True},
    "much entropy, continuous": {"ent_coef": 0.5, "box": True},
    "gradient never clipped": {"max_grad_norm": 1e6},
    "a row a rank": {"minibatches": 12},
    "stops in the middle": STOPS,
    "small pieces": {"micro_batch_size": 2},
    "learning rate by the KL": {"desired_kl": 0.01},
    "values in their own unit": {"norm_value": True, "clip_vloss": True},
    "rows that weigh nothing, in pieces": {
        "weighed": scattered,
        "micro_batch_size": 3,
        "box": True,
    },
    "rows that weigh nothing, as they are": {"weighed": scattered, "norm_adv": False},
    "a rank without a row that counts": {"weighed": last_quarter, "box": True, "ent_coef": 0.1},
    "stops in the middle, weighed": {"weighed": scattered, **STOPS, "target_kl": 0.2},
    "hardly a row": {"weighed": only_two, "minibatches": 12},
    "all at once": {
        "box": True,
        "activation": "relu",
        "update_epochs": 5,
        "minibatches": 3,
        "micro_batch_size": 3,
        "clip_vloss": True,
        "clip_coef": 0.1,
        "ent_coef": 0.05,
        "vf_coef": 1.3,
        "max_grad_norm": 0.1,
        "target_kl": 0.5,
    },
}
OVER_GLOO = (
    "plain",
    "advantages as they are",
    "stops in the middle",
    "hardly a row",
    "all at once",
    "a rank without a row that counts",
)


def spec_for(case: dict[str, Any], dtype: str) -> BuiltInSpec:
    layers = {name: case[name] for name in LAYERS if name in case}
    actions = BOX if case.get("box") else DISCRETE
    return spec_of(actions, dtype=dtype, **layers)


def trainer_of(
    case: dict[str, Any], parallel: Parallel | None = None, dtype: str = "float64"
) -> PPOTrainer:
    options = dict(case)
    for name in (*LAYERS, "box", "weighed"):
        options.pop(name, None)
    return make_trainer(spec_for(case, dtype), parallel, **options)


def batch_for(case: dict[str, Any], dtype: str = "float64") -> Batch:
    """Return rows that differ more and more from the first ones."""
    batch = random_batch(spec_for(case, dtype), ROWS)
    advantages = batch.advantages
    slope = torch.linspace(0.5, 1.5, ROWS, dtype=advantages.dtype)
    advantages = slope * (advantages + 3)
    batch = replace(batch, advantages=advantages)
    counted = case.get("weighed")
    if counted is None:
        return batch
    return weighted(batch, counted(ROWS))


def share_of(batch: Batch, parallel: Parallel) -> Batch:
    """Return the rows of a rank."""
    rows = ROWS // parallel.size
    shares = batch.split([rows] * parallel.size)
    return shares[parallel.rank]


def learned(trainer: PPOTrainer, figures: dict[str, float]) -> dict[str, Any]:
    """Return weights, optimizer state and metrics."""
    return {"weights": trainer.weights(), "figures": figures, **trainer.state()}


def train_a_share(
    case: dict[str, Any], parallel: Parallel, dtype: str = "float64"
) -> dict[str, Any]:
    """Train one rank."""
    share = share_of(batch_for(case, dtype), parallel)
    if share.weights is not None and share.weights.all():
        share = replace(share, weights=None)  # as for segments without invalid rows
    trainer = trainer_of(case, parallel, dtype)
    figures = train(trainer, share, LEARNING_RATE, seed=parallel.rank)
    return learned(trainer, figures)


def train_alone(case: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Train on all rows, with minibatches composed of those of the ranks."""
    trainer = trainer_of(case)
    generators = [default_rng(rank) for rank in range(ranks)]
    order = OwnOrders(generators, trainer.minibatches)
    figures = train(trainer, batch_for(case), LEARNING_RATE, order=order)
    return learned(trainer, figures)


def assert_close(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that weights, state and all metrics are equal up to rounding in float64."""
    assert actual["step"] == expected["step"]
    for name in actual.keys() - {"figures"}:
        array = actual[name]
        assert_allclose(array, expected[name], rtol=1e-9, atol=1e-12, err_msg=name)
    figures = pytest.approx(expected["figures"], rel=1e-10, abs=1e-12)
    assert actual["figures"] == figures


def assert_same_bits(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks[1:]:
        assert rank["figures"] == ranks[0]["figures"]
        for name in rank.keys() - {"figures"}:
            assert_array_equal(rank[name], ranks[0][name], err_msg=name)


SIZES = pytest.mark.parametrize(
    "size",
    [
        pytest.param(1, marks=pytest.mark.slow),
        2,
        pytest.param(4, marks=pytest.mark.slow),
    ],
)  # fmt: skip


@SIZES
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_share_the_rows_equal_one_trainer(case: str, size: int) -> None:
    options = CASES[case]
    alone = assert_ranks_equal_one_trainer(options, size)
    if case.startswith("stops"):
        minibatches = options["minibatches"]
        steps = alone["figures"]["minibatches"]
        assert minibatches < steps < options["update_epochs"] * minibatches


OPTIONS: dict[str, list[Any]] = {
    "box": [False, True],
    "activation": ["tanh", "relu"],
    "weighed": [None, scattered, last_quarter, only_two],
    "update_epochs": [1, 2, 3],
    "minibatches": [1, 2, 3, 4, 6, 12],
    "micro_batch_size": [None, 1, 2, 3, 5],
    "norm_adv": [False, True],
    "adv_floor": [0.0, 0.7],
    "norm_reward": [False, True],
    "clip_vloss": [False, True],
    "norm_value": [False, True],
    "clip_coef": [0.05, 0.2],
    "ent_coef": [0.0, 0.03],
    "vf_coef": [0.0, 0.5],
    "max_grad_norm": [0.05, 0.5, 1e3],
    "target_kl": [0.0, 0.08, 0.1, 0.2],
}


@pytest.mark.parametrize("examples", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_ranks_equal_one_trainer_with_any_options(examples: int) -> None:
    drawn = {name: st.sampled_from(values) for name, values in OPTIONS.items()}
    cases = st.fixed_dictionaries(drawn)
    sizes = st.sampled_from([1, 2, 4])

    @settings(max_examples=examples, deadline=None)
    @given(case=cases, size=sizes)
    def check(case: dict[str, Any], size: int) -> None:
        assert_ranks_equal_one_trainer(case, size)

    check()


def has_something_to_learn(case: dict[str, Any]) -> bool:
    """Return False where only the advantages of two rows count.

    The loss may clip both of them; and in a minibatch of one row, the standardized advantage is zero.
    """
    options = {"vf_coef": 0.5, "ent_coef": 0.01} | case
    if options["vf_coef"] > 0 or options["ent_coef"] > 0:
        return True
    return case.get("weighed") is not only_two


def assert_ranks_equal_one_trainer(case: dict[str, Any], size: int) -> dict[str, Any]:
    ranks = Meeting(size).all_do(lambda parallel: train_a_share(case, parallel))
    assert_same_bits(ranks)

    alone = train_alone(case, size)
    assert_close(ranks[-1], alone)

    moved = alone["weights"] - trainer_of(case).weights()
    if has_something_to_learn(case):
        assert np.abs(moved).max() > 1e-6  # far more than the tolerance

    return alone


@pytest.fixture(scope="module")
def processes() -> Any:
    with Processes(4) as processes:
        yield processes


@SIZES
def test_processes_connected_by_gloo_equal_one_trainer(processes: Processes, size: int) -> None:
    cases = [CASES[name] for name in OVER_GLOO]
    answers = processes.all_do(size, train_shares_over_gloo, cases, "float64")
    for number, case in enumerate(cases):
        ranks = [rank[number] for rank in answers]
        assert_same_bits(ranks)
        assert_close(ranks[0], train_alone(case, size))


def test_processes_get_the_same_bits_each_time_in_float32(processes: Processes) -> None:
    cases = [CASES["all at once"]]
    answers = []
    for _ in range(2):
        answers += processes.all_do(4, train_shares_over_gloo, cases, "float32")
    ranks = [rank[0] for rank in answers]
    assert_same_bits(ranks)
    assert ranks[0]["weights"].dtype == np.float32


def train_shares_over_gloo(cases: list[dict[str, Any]], dtype: str) -> list[dict[str, Any]]:
    """Runs in each of the processes."""
    torch.set_num_threads(1)
    return [train_a_share(case, RankGroup(), dtype) for case in cases]


def sum_in_order(ranks: Sequence[int], numbers: int) -> np.ndarray:
    first, *later = ranks
    total = addends(first, numbers)
    for rank in later:
        total += addends(rank, numbers)
    return total


@pytest.mark.parametrize("numbers", [1, 3, 1000, FEW + 7])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sums_are_taken_in_the_order_of_ranks(
    processes: Processes, size: int, numbers: int
) -> None:
    expected = sum_in_order(range(size), numbers)
    if size > 2 and numbers >= 1000:  # the order matters
        reverse = sum_in_order(range(size)[::-1], numbers)
        assert not np.array_equal(reverse, expected)

    is_worth_memory = size > 2 or (size == 2 and numbers > FEW)
    for machines in ("one", "several"):
        has_memory = machines == "one" and is_worth_memory
        for summed, in_memory in processes.all_do(size, sums_of, numbers, machines):
            assert in_memory == has_memory
            assert_array_equal(summed, expected)


def addends(rank: int, numbers: int) -> np.ndarray:
    """Return the addends of `rank` to three sums."""
    rng = default_rng(rank)
    shape = (3, numbers)
    rows = rng.normal(size=shape)
    sizes = 10.0 ** rng.integers(-4, 4, size=shape)
    return (rows * sizes).astype(np.float32)


def sums_of(numbers: int, machines: str) -> tuple[list[np.ndarray], bool]:
    """Runs in each of the processes."""
    group = RankGroup()
    with pytest.MonkeyPatch.context() as patch:
        # one rank that cannot see the others' memory is enough
        if machines == "several" and group.rank == 0:
            patch.setattr(sums, "open_memory", lambda pid, file, token, size: None)
        tensor = group.zeros_like(torch.zeros(numbers))

    assert not tensor.any()

    summed = []
    for row in addends(group.rank, numbers):
        tensor.copy_(from_numpy(row))
        group.sum_(tensor)
        summed.append(tensor.numpy().copy())

    return summed, group.vectors is not None


def test_memory_of_another_process_is_identified_by_its_token() -> None:
    with sums.offered_memory(100) as (pid, file, token):
        assert sums.open_memory(pid, file, token, 100) is not None
        assert sums.open_memory(pid, file, token + 1, 100) is None
        assert sums.open_memory(pid, 10_000, token, 100) is None
    assert sums.open_memory(pid, file, token, 100) is None


def test_without_memfd_create_ranks_act_as_on_several_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing = mock.Mock(side_effect=OSError("none here"))
    monkeypatch.setattr(os, "memfd_create", failing, raising=False)
    with sums.offered_memory(100) as (pid, file, token):
        assert sums.open_memory(pid, file, token, 100) is None


def test_a_gradient_that_is_not_finite_stops_all_ranks_with_their_weights() -> None:
    def poisoned(parallel: Parallel) -> tuple[str, np.ndarray]:
        share = share_of(batch_for({}), parallel)
        if parallel.rank == 1:
            share.returns[0] = float("nan")
        trainer = trainer_of({"minibatches": 1}, parallel)
        with pytest.raises(TrainingDiverged) as raised:
            train(trainer, share, LEARNING_RATE)
        return str(raised.value), trainer.weights()

    before = trainer_of({}).weights()
    for text, weights in Meeting(2).all_do(poisoned):
        assert "SGD step 0 " in text
        assert_array_equal(weights, before)


@pytest.mark.proves("merged_moments")
@pytest.mark.parametrize("sizes", [(12,), (6, 6), (1, 5, 2), (3, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_moments_of_parts_are_those_of_all_samples(sizes: tuple[int, ...], shift: float) -> None:
    rng = default_rng(1)
    parts = []
    for index, size in enumerate(sizes):
        mean = shift + 5 * index
        std = 1 + index
        parts.append(rng.normal(mean, std, (3, size)))

    part_moments = [row_moments(torch.from_numpy(part)) for part in parts]
    merged = merged_moments(torch.stack(part_moments))
    counts, means, sums_of_squares = merged.unbind(1)

    everything = np.concatenate(parts, axis=1)
    count = sum(sizes)
    variance = everything.var(axis=1)
    assert_array_equal(counts, count)
    assert_allclose(means, everything.mean(axis=1), rtol=1e-14)
    assert_allclose(sums_of_squares, variance * count, rtol=1e-8)


def test_moments_of_one_part_are_not_changed() -> None:
    """One learner on Ray must compute the same bits as training in the driver."""
    random = default_rng(0).normal(size=(2, 7))
    samples = torch.from_numpy(random)
    all_moments = moments_of_all(samples, None, Parallel())
    assert torch.equal(all_moments, row_moments(samples))
    single_samples = torch.tensor([[3.0], [-1.0]])
    first_moments, second_moments = row_moments(single_samples)
    assert first_moments.tolist() == [1.0, 3.0, 0.0]
    assert second_moments.tolist() == [1.0, -1.0, 0.0]
