"""PPOTrainer against an update in plain torch; its minibatches, metrics, limits and faults."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders import BOX, PLAIN, at_rate, spec_of
from torch import Tensor
from updates import ACTIONS, COLUMNS, assert_equals_twin, make_trainer, random_batch

from dppo.errors import TrainingDiverged
from dppo.ppo.learning.adam import ADAPTED
from dppo.ppo.learning.batch import Batch
from dppo.ppo.learning.minibatches import aligned_with_ranks, draw_minibatches
from dppo.ppo.learning.model import PPOModel
from dppo.ppo.learning.parallel import Parallel
from dppo.ppo.learning.trainer import PPOTrainer, _diverged, _Losses
from dppo.spaces.actions import Actions


@ACTIONS
@pytest.mark.parametrize(
    "options",
    [
        *({}, {"clip_vloss": True}, {"norm_adv": False}, {"max_grad_norm": 1e-3}, {"max_grad_norm": 1e6}),
        *({"ent_coef": 0.0, "vf_coef": 2.0}, {"minibatches": 7}, {"minibatches": 1}, {"micro_batch_size": 5}),
        *({"micro_batch_size": 1, "clip_vloss": True}, {"micro_batch_size": 1000}, {"target_kl": 1e-4}),
        *({"clip_coef": 0.05, "update_epochs": 1}, {"adv_floor": 3.0}, {"adv_floor": 3.0, "norm_reward": False}),
    ],
    ids=str,
)
def test_update_equals_its_slow_twin(actions: Actions, options: dict[str, Any]) -> None:
    spec = spec_of(actions)
    moved, _ = assert_equals_twin(make_trainer(spec, **options), random_batch(spec))
    assert moved.min() > 0
    assert np.median(moved) > 1e-3  # far more than the tolerance


@ACTIONS
@pytest.mark.parametrize("rewarded", [False, True])
def test_small_advantages_bring_a_bonus_of_entropy_only_where_no_reward_came(actions: Actions, rewarded: bool) -> None:
    spec = spec_of(actions)
    batch = dataclasses.replace(random_batch(spec), rewards=(float(rewarded),) * 2)
    assert_equals_twin(make_trainer(spec, adv_floor=3.0), batch)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_noise_of_advantages_stays_noise(share: float) -> None:
    """Advantages far below the floor are divided by the floor, those far above it by their deviation."""
    batch = random_batch()
    weights = some_weights(len(batch), share)
    batch = weighing(batch, weights)
    for factor in (1e-4, 1e4):
        scaled = dataclasses.replace(batch, advantages=factor * batch.advantages)
        order = np.random.default_rng(1)
        (minibatch, _), *_ = draw_minibatches(scaled, order, 1, floor=0.1, parallel=Parallel())
        assert minibatch.weights is not None
        counted = minibatch.advantages[minibatch.weights > 0]
        expected = float(scaled.advantages[weights > 0].std()) / 0.1 if factor < 1 else 1.0
        assert float(counted.std()) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("other", [False, True])
def test_a_batch_is_informed_if_an_episode_of_any_rank_terminates(other: bool) -> None:
    class Two(Parallel):
        """This rank, and one without weights."""

        size = 2

        def gather(self, tensor: Tensor) -> Tensor:
            return torch.stack([tensor, torch.tensor([False, other, 0.0, 0.0]).to(tensor.dtype)])

    batch = aligned_with_ranks(random_batch(), Two())
    assert (batch.informed, batch.rewards) == (other, (0.0, 0.0))
    assert batch.weights is None


@ACTIONS
def test_a_ratio_beyond_all_numbers_is_clipped_and_changes_the_weights_by_numbers(actions: Actions) -> None:
    """A narrow policy gives old rows ratios of exp(1000), and rows that count for nothing such ratios as well."""
    spec = spec_of(actions)
    trainer, batch = make_trainer(spec), random_batch(spec)
    far = torch.arange(len(batch)) % 3 == 0
    importance = torch.where(far, 0.0, 1.0).to(batch.logprobs.dtype)
    batch = dataclasses.replace(batch, logprobs=batch.logprobs - 1000.0 * far, importance=importance)
    update = trainer.update(batch, trainer.ppo, np.random.default_rng(1))
    assert np.isfinite(trainer.weights()).all()
    assert math.isfinite(update.figures["policy_loss"])


def weighing(batch: Batch, weights: Tensor) -> Batch:
    """Return the batch as `make_batch` would: with zeros in rows of weight zero."""
    zeroed = {name: getattr(batch, name).clone() for name in COLUMNS}
    for column in zeroed.values():
        column[weights == 0] = 0
    return dataclasses.replace(batch, weights=weights, **zeroed)


def some_weights(rows: int, share: float) -> Tensor:
    return torch.from_numpy((np.random.default_rng(8).random(rows) < share).astype(np.float64))


WEIGHED: list[dict[str, Any]] = [{}, {"clip_vloss": True, "norm_adv": False}, {"micro_batch_size": 3, "minibatches": 3}]
WEIGHED += [{"target_kl": 1e-4}, {"ent_coef": 0.3, "vf_coef": 2.0, "minibatches": 1}]
WEIGHED += [{"minibatches": 60, "update_epochs": 1}]  # more than rows


@ACTIONS
@pytest.mark.parametrize("options", WEIGHED, ids=str)
@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
def test_rows_of_weight_zero_do_not_change_an_update(actions: Actions, options: dict[str, Any], share: float) -> None:
    """Also if whole minibatches are empty, or have one row."""
    spec = spec_of(actions)
    moved, _ = assert_equals_twin(make_trainer(spec, **options), weighing(random_batch(spec), some_weights(50, share)))
    assert moved.max() > 1e-3


@pytest.mark.parametrize("options", WEIGHED, ids=str)
def test_figures_are_those_of_the_rows_that_count(options: dict[str, Any]) -> None:
    """Compare with a minibatch without the other rows."""
    options = {**options, "minibatches": 1, "update_epochs": 2}
    full, left = make_trainer(**options), make_trainer(**options)
    weights = some_weights(50, 0.6)
    batch = weighing(random_batch(), weights)
    rows = torch.from_numpy(np.random.default_rng(5).permutation(50))
    rows = rows[weights[rows] > 0]
    kept = Batch(*(getattr(batch, name)[rows] for name in COLUMNS))
    found = full.update(batch, at_rate(full, 3e-3), np.random.default_rng(5)).figures
    expected = left.update(kept, at_rate(left, 3e-3), np.random.default_rng(5)).figures
    assert found == pytest.approx(expected, rel=1e-10)


def test_a_batch_without_a_row_that_counts_changes_nothing() -> None:
    trainer = make_trainer(target_kl=0.1)
    trainer.update(random_batch(), at_rate(trainer, 1e-2), np.random.default_rng(0))  # so that Adam has momentum
    before, state = trainer.weights(), trainer.state()
    batch = weighing(random_batch(), torch.zeros(50, dtype=torch.float64))
    figures = trainer.update(batch, at_rate(trainer, 1e-2), np.random.default_rng(1)).figures
    np.testing.assert_array_equal(trainer.weights(), before)
    for name, array in trainer.state().items():
        np.testing.assert_array_equal(array, state[name])
    assert figures.pop("minibatches") == 0
    assert all(math.isnan(value) for value in figures.values())


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 10, "norm_adv": False}, {"minibatches": 7}], ids=str)
@pytest.mark.parametrize("length", [2, 5])
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_sequences_stay_whole_and_equal_their_rows(options: dict[str, Any], length: int, share: float) -> None:
    """Without memory, an update on sequences equals one on their rows in the same order."""
    generator = np.random.default_rng(5)

    def by_sequence(rows: int) -> np.ndarray:
        sequences = generator.permutation(rows // length)
        return (sequences[:, None] * length + np.arange(length)).reshape(-1)

    by_rows, by_sequences = make_trainer(**options), make_trainer(**options)
    batch = random_batch(rows=length * 4 * by_rows.minibatches)
    if share < 1:
        batch = weighing(batch, some_weights(len(batch), share))
    order: Any = SimpleNamespace(permutation=by_sequence)
    expected = by_rows.update(batch, at_rate(by_rows, 3e-3), order).figures
    sequences = dataclasses.replace(batch, sequence_length=length)
    assert by_sequences.update(
        sequences, at_rate(by_sequences, 3e-3), np.random.default_rng(5)
    ).figures == pytest.approx(expected, rel=1e-10)
    np.testing.assert_allclose(by_sequences.weights(), by_rows.weights(), rtol=1e-9, atol=1e-12)


def test_figures_are_means_over_the_minibatches() -> None:
    trainer = make_trainer(update_epochs=1, minibatches=1, norm_adv=False)
    batch = random_batch()
    scored = trainer.model.forward(batch.obs, batch.actions)
    values, entropy = scored.values.clone(), float(scored.policy.entropies.mean())
    log_ratio = (scored.policy.logprobs - batch.logprobs).numpy()
    found = trainer.update(batch, at_rate(trainer, 1e-3), np.random.default_rng(0)).figures
    expected = {"entropy": entropy, "value_loss": float(0.5 * (values - batch.returns).square().mean())}
    expected |= {"old_approx_kl": -log_ratio.mean(), "approx_kl": (np.exp(log_ratio) - 1 - log_ratio).mean()}
    expected |= {"clipfrac": (np.abs(np.exp(log_ratio) - 1) > 0.2).mean()}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert 0 < found["clipfrac"] < 1
    two = make_trainer(update_epochs=1, minibatches=2, norm_adv=False, max_grad_norm=1e-9)
    means = two.update(
        batch, at_rate(two, 1e-12), np.random.default_rng(0)
    ).figures  # no weight moves: halves of 25 rows each
    for name in ("entropy", "value_loss", "approx_kl", "clipfrac", "policy_loss"):
        assert means[name] == pytest.approx(found[name], rel=1e-6), name


EXPLAINED = {"equal": 1, "shifted": 1, "constant": 0, "opposite": -3, "of constant returns": math.nan}


@pytest.mark.parametrize(("values", "explained"), EXPLAINED.items())
def test_explained_variance(values: str, explained: float) -> None:
    batch = random_batch()
    returns = torch.ones_like(batch.returns) if values == "of constant returns" else batch.returns
    old = {"equal": returns, "shifted": returns + 7, "constant": torch.zeros_like(returns), "opposite": -returns}
    batch = dataclasses.replace(batch, values=old.get(values, batch.values), returns=returns)
    found = make_trainer().update(batch, PLAIN, np.random.default_rng(0)).figures["explained_variance"]
    assert found == pytest.approx(explained, abs=1e-9, nan_ok=True)


def test_the_gradient_norm_is_reported_before_clipping() -> None:
    norms = {}
    for limit in (1e-3, 1e6):
        trainer = make_trainer(update_epochs=1, minibatches=1, max_grad_norm=limit)
        norms[limit] = trainer.update(random_batch(), at_rate(trainer, 1e-3), np.random.default_rng(0)).figures[
            "grad_norm"
        ]
        applied = float(torch.linalg.vector_norm(trainer.model.parameters.gradient))
        assert applied == pytest.approx(min(limit, norms[limit]), rel=1e-3)
    assert norms[1e-3] == norms[1e6]


@pytest.mark.parametrize("column", ["obs", "advantages", "returns", "logprobs"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_number_that_is_not_finite_stops_the_run_and_keeps_the_weights(column: str, poison: float) -> None:
    trainer, batch = make_trainer(update_epochs=1, minibatches=1), random_batch()
    poisoned: Any = getattr(batch, column).clone()
    poisoned[3] = -poison if column == "logprobs" else poison
    before = trainer.weights()
    with pytest.raises(TrainingDiverged, match=r"SGD step 0 .*loss .*minibatch of 50 rows has obs .*learning_rate"):
        trainer.update(
            dataclasses.replace(batch, **{column: poisoned}), at_rate(trainer, 1e-3), np.random.default_rng(0)
        )
    np.testing.assert_array_equal(trainer.weights(), before)
    assert trainer.state()["step"] == 0
    assert not trainer.state()["exp_avg"].any()
    trainer.update(batch, at_rate(trainer, 1e-3), np.random.default_rng(0))  # it can continue
    assert np.isfinite(trainer.weights()).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.float16])
def test_a_divergence_shows_leaves_of_every_dtype(dtype: torch.dtype) -> None:
    batch = random_batch()
    leaves: dict[str, Tensor] = {"speed": torch.ones(len(batch), 4), "flags": torch.ones(len(batch), 2).to(dtype)}
    losses = _Losses({"policy_loss": torch.tensor(math.nan)}, torch.zeros(len(batch)))
    error = _diverged(dataclasses.replace(batch, obs=leaves), 3, losses, math.inf)
    assert "obs flags from 1 to 1, advantages from " in str(error)


def test_a_later_minibatch_that_is_not_finite_keeps_the_earlier_steps() -> None:
    order, rows = np.random.default_rng(0).permutation(50), 13  # 50 in 4 parts: 13, 13, 12, 12
    trainer, clean = make_trainer(update_epochs=1), make_trainer(update_epochs=1, minibatches=1)
    batch = random_batch()
    returns = batch.returns.clone()
    returns[order[rows]] = math.nan  # the first row of the second minibatch
    with pytest.raises(TrainingDiverged, match="SGD step 1 "):
        trainer.update(dataclasses.replace(batch, returns=returns), at_rate(trainer, 1e-3), np.random.default_rng(0))
    first = batch.take(torch.from_numpy(order[:rows]))
    clean.update(first, at_rate(clean, 1e-3), np.random.default_rng(1))
    np.testing.assert_allclose(trainer.weights(), clean.weights(), rtol=1e-12)


@pytest.mark.parametrize("options", [{}, {"norm_value": True}, {"learning_rate": 9e-4, "desired_kl": 0.002}], ids=str)
def test_a_resumed_trainer_continues_bit_for_bit(options: dict[str, Any]) -> None:
    spec = spec_of(BOX)
    straight, before = make_trainer(spec, **options), make_trainer(spec, **options)
    batches = [random_batch(spec, seed=seed) for seed in range(2)]
    before.update(batches[0], at_rate(before, 1e-3), np.random.default_rng(0))
    after = PPOTrainer(PPOModel(spec, 77), dataclasses.replace(PLAIN, **options), minibatches=4)
    state = before.state()
    assert state.get(ADAPTED) != 9e-4
    after.load(before.weights(), state)
    before.update(batches[1], at_rate(before, 1e-3), np.random.default_rng(9))  # must not change the saved state
    for number, batch in enumerate(batches):
        straight.update(batch, at_rate(straight, 1e-3), np.random.default_rng(number))
    after.update(batches[1], at_rate(after, 1e-3), np.random.default_rng(1))
    np.testing.assert_array_equal(after.weights(), straight.weights())
    for name, array in straight.state().items():
        np.testing.assert_array_equal(after.state()[name], array)


def test_weights_are_a_copy() -> None:
    trainer = make_trainer()
    weights = trainer.weights()
    kept = weights.copy()
    trainer.update(random_batch(), at_rate(trainer, 1e-2), np.random.default_rng(0))
    np.testing.assert_array_equal(weights, kept)
    weights[:] = 0
    assert np.abs(trainer.weights()).min() > 0
