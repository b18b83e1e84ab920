"""PPOTrainer against an update in plain torch; its losses, minibatches, metrics, limits and faults; policy lag."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from builders import PLAIN, spec_of
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from torch import Tensor, from_numpy
from updates import (
    ACTIONS,
    COLUMNS,
    assert_equals_twin,
    experience_of,
    make_trainer,
    random_batch,
    rows_of,
    train,
    weighted,
)

from dppo.config.parts.ppo import LOSSES, PPO
from dppo.errors import TrainingDiverged
from dppo.ppo.learning.batch import Batch
from dppo.ppo.learning.minibatches import draw_minibatches
from dppo.ppo.learning.objective import Outputs, objective_class
from dppo.ppo.learning.parallel import Parallel
from dppo.ppo.learning.spo import SPOLoss
from dppo.ppo.learning.trainer import _diverged, _Losses
from dppo.spaces.actions import Actions

LAGGED = experience_of(lag=1)
assert_close = partial(assert_allclose, rtol=1e-9, atol=1e-12)


@ACTIONS
@pytest.mark.parametrize(
    ("reward", "norm_reward"),
    [
        pytest.param(0.0, True, id="normalized zero"),
        pytest.param(1.0, True, id="normalized one"),
        pytest.param(0.0, False, id="raw zero"),
    ],
)
def test_small_advantages_bring_an_entropy_bonus_only_with_normalized_rewards_of_zero(
    actions: Actions, reward: float, norm_reward: bool
) -> None:
    spec = spec_of(actions)
    trainer = make_trainer(spec, adv_floor=3.0, norm_reward=norm_reward)
    batch = replace(random_batch(spec), reward_range=(reward, reward))
    assert_equals_twin(trainer, batch)


def deviation_of(batch: Batch) -> float:
    """Return the deviation of the advantages of rows that count."""
    assert batch.weights is not None
    counted = batch.advantages[batch.weights > 0]
    return counted.std().item()


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_noise_of_advantages_stays_noise(share: float) -> None:
    """Advantages far below the floor are divided by the floor, those far above it by their deviation."""
    floor = 0.1
    batch = share_of(random_batch(), share)
    far_below = 1e-4 * deviation_of(batch) / floor

    for factor, expected in ((1e-4, far_below), (1e4, 1.0)):
        scaled = replace(batch, advantages=factor * batch.advantages)
        order = default_rng(1)
        drawn = draw_minibatches(scaled, order, 1, floor=floor, parallel=Parallel())
        ((minibatch, _),) = drawn
        assert deviation_of(minibatch) == pytest.approx(expected, rel=1e-3)


@ACTIONS
def test_a_ratio_beyond_all_numbers_changes_the_weights_by_numbers(actions: Actions) -> None:
    """A narrow policy gives old rows ratios of exp(1000), and rows that count for nothing such ratios as well."""
    spec = spec_of(actions)
    trainer = make_trainer(spec)
    batch = random_batch(spec)
    far = torch.arange(len(batch)) % 3 == 0
    logprobs = batch.logprobs - 1000.0 * far
    importance = torch.where(far, 0.0, 1.0).to(logprobs.dtype)
    batch = replace(batch, logprobs=logprobs, importance=importance)
    figures = train(trainer, batch, rate=3e-4)
    assert np.isfinite(trainer.weights()).all()
    assert math.isfinite(figures["policy_loss"])


def share_of(batch: Batch, share: float) -> Batch:
    """Return the batch with weights of zero in all rows but this share."""
    counted = default_rng(8).random(len(batch)) < share
    return weighted(batch, counted)


WEIGHTED: list[dict[str, Any]] = [
    {},
    {"clip_vloss": True, "norm_adv": False},
    {"micro_batch_size": 3, "minibatches": 3},
    {"target_kl": 1e-4},
    {"ent_coef": 0.3, "vf_coef": 2.0, "minibatches": 1},
    {"minibatches": 60, "update_epochs": 1},  # more than rows
]


@ACTIONS
@pytest.mark.parametrize("options", WEIGHTED, ids=str)
@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
def test_rows_of_weight_zero_do_not_change_an_update(
    actions: Actions, options: dict[str, Any], share: float
) -> None:
    """Also if whole minibatches are empty, or have one row."""
    spec = spec_of(actions)
    trainer = make_trainer(spec, **options)
    batch = share_of(random_batch(spec), share)
    moved, _ = assert_equals_twin(trainer, batch)
    assert moved.max() > 1e-3


@pytest.mark.parametrize("options", WEIGHTED, ids=str)
def test_figures_are_those_of_the_rows_that_count(options: dict[str, Any]) -> None:
    options = options | {"minibatches": 1, "update_epochs": 2}
    batch = share_of(random_batch(), 0.6)
    assert batch.weights is not None

    order = from_numpy(default_rng(5).permutation(50))
    counted = order[batch.weights[order] > 0]
    columns = [getattr(batch, name)[counted] for name in COLUMNS]
    counted_rows = rows_of(*columns)
    expected = train(make_trainer(**options), counted_rows, 3e-3, seed=5)
    figures = train(make_trainer(**options), batch, 3e-3, seed=5)
    assert figures == pytest.approx(expected, rel=1e-10)


def test_a_batch_without_a_row_that_counts_changes_nothing() -> None:
    trainer = make_trainer(target_kl=0.1)
    train(trainer, random_batch(), 1e-2)  # so that Adam has momentum
    weights = trainer.weights()
    state = trainer.state()
    empty = share_of(random_batch(), 0.0)
    figures = train(trainer, empty, 1e-2, seed=1)
    assert_array_equal(trainer.weights(), weights)
    for name, array in trainer.state().items():
        assert_array_equal(array, state[name])
    assert figures.pop("minibatches") == 0
    assert all(math.isnan(value) for value in figures.values())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"micro_batch_size": 10, "norm_adv": False}, id="in pieces"),
        pytest.param({"minibatches": 7}, id="seven minibatches"),
    ],
)
@pytest.mark.parametrize("length", [2, 5])
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_sequences_stay_whole_and_equal_their_rows(
    options: dict[str, Any], length: int, share: float
) -> None:
    """Without memory, an update on sequences equals one on their rows in the same order."""
    generator = default_rng(5)

    def by_sequence(rows: int) -> np.ndarray:
        sequences = generator.permutation(rows // length)
        first_rows = sequences[:, None] * length
        return (first_rows + np.arange(length)).flatten()

    by_rows = make_trainer(**options)
    by_sequences = make_trainer(**options)
    batch = random_batch(rows=length * 4 * by_rows.minibatches)
    if share < 1:
        batch = share_of(batch, share)
    order = SimpleNamespace(permutation=by_sequence)
    expected = train(by_rows, batch, 3e-3, order=order)
    sequenced = replace(batch, sequence_length=length)
    figures = train(by_sequences, sequenced, 3e-3, seed=5)
    assert figures == pytest.approx(expected, rel=1e-10)
    assert_close(by_sequences.weights(), by_rows.weights())


def test_figures_are_means_over_the_minibatches() -> None:
    trainer = make_trainer(update_epochs=1, minibatches=1, norm_adv=False)
    batch = random_batch()
    scored = trainer.model.forward(batch.obs, batch.actions)
    log_ratio = (scored.policy.logprobs - batch.logprobs).numpy()
    ratio = np.exp(log_ratio)
    is_clipped = np.abs(ratio - 1) > 0.2
    squared_errors = (scored.values - batch.returns).square()
    expected = {
        "entropy": float(scored.policy.entropies.mean()),
        "value_loss": float(0.5 * squared_errors.mean()),
        "old_approx_kl": -log_ratio.mean(),
        "approx_kl": (ratio - 1 - log_ratio).mean(),
        "clipfrac": is_clipped.mean(),
    }
    figures = train(trainer, batch)
    batch_figures = {name: figures[name] for name in expected}
    assert batch_figures == pytest.approx(expected)
    assert 0 < figures["clipfrac"] < 1

    halves = make_trainer(update_epochs=1, minibatches=2, norm_adv=False, max_grad_norm=1e-9)
    means = train(halves, batch, rate=1e-12)  # no weight moves
    for name in ("policy_loss", *expected):
        assert means[name] == pytest.approx(figures[name], rel=1e-6), name


EXPLAINED = {
    "equal": 1,
    "shifted": 1,
    "constant": 0,
    "opposite": -3,
    "of constant returns": math.nan,
}


@pytest.mark.parametrize(("values", "explained"), EXPLAINED.items())
def test_explained_variance(values: str, explained: float) -> None:
    batch = random_batch()
    returns = batch.returns
    if values == "of constant returns":
        returns = torch.ones_like(returns)
    old = {
        "equal": returns,
        "shifted": returns + 7,
        "constant": torch.zeros_like(returns),
        "opposite": -returns,
        "of constant returns": batch.values,
    }
    batch = replace(batch, values=old[values], returns=returns)
    figures = train(make_trainer(), batch)
    assert figures["explained_variance"] == pytest.approx(explained, abs=1e-9, nan_ok=True)


def test_the_gradient_norm_is_reported_before_clipping() -> None:
    norms = []
    for limit in (1e-3, 1e6):
        trainer = make_trainer(update_epochs=1, minibatches=1, max_grad_norm=limit)
        figures = train(trainer, random_batch())
        norm = figures["grad_norm"]
        norms.append(norm)
        gradient = trainer.model.parameters.gradient
        applied = float(torch.linalg.vector_norm(gradient))
        assert applied == pytest.approx(min(limit, norm), rel=1e-3)

    assert norms[0] == norms[1]


@pytest.mark.parametrize("column", ["table", "advantages", "returns", "logprobs"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_number_that_is_not_finite_raises_and_keeps_the_weights(
    column: str, poison: float
) -> None:
    trainer = make_trainer(update_epochs=1, minibatches=1)
    before = trainer.weights()
    batch = random_batch()
    poisoned: Any = getattr(batch, column).clone()
    poisoned[3] = -poison if column == "logprobs" else poison
    bad = replace(batch, **{column: poisoned})
    words = r"SGD step 0 .*loss .*minibatch of 50 rows has obs .*learning_rate"
    with pytest.raises(TrainingDiverged, match=words):
        train(trainer, bad)
    assert_array_equal(trainer.weights(), before)

    state = trainer.state()
    assert state["step"] == 0
    assert not state["exp_avg"].any()

    train(trainer, batch)  # it can continue
    assert np.isfinite(trainer.weights()).all()


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_divergence_shows_leaves_of_every_dtype(dtype: torch.dtype) -> None:
    batch = random_batch()
    rows = len(batch)
    leaves: dict[str, Tensor] = {
        "speed": torch.ones(rows, 4),
        "flags": torch.ones(rows, 2).to(dtype),
    }
    policy_loss = torch.tensor(math.nan)
    losses = _Losses({"policy_loss": policy_loss}, torch.zeros(rows))
    leaf_batch = replace(batch, table=leaves)
    error = _diverged(leaf_batch, 3, losses, math.inf)
    assert "obs flags from 1 to 1, advantages from " in str(error)


def test_a_later_minibatch_that_is_not_finite_keeps_the_earlier_steps() -> None:
    order = from_numpy(default_rng(0).permutation(50))
    rows = 13  # 50 in 4 parts: 13, 13, 12, 12
    first_minibatch = order[:rows]
    second_begins = order[rows]
    batch = random_batch()
    returns = batch.returns.clone()
    returns[second_begins] = math.nan
    trainer = make_trainer(update_epochs=1)
    with pytest.raises(TrainingDiverged, match="SGD step 1 "):
        train(trainer, replace(batch, returns=returns))

    clean = make_trainer(update_epochs=1, minibatches=1)
    train(clean, batch.take(first_minibatch), seed=1)
    assert_allclose(trainer.weights(), clean.weights(), rtol=1e-12)


def test_weights_are_a_copy() -> None:
    trainer = make_trainer()
    weights = trainer.weights()
    before = weights.copy()
    train(trainer, random_batch(), 1e-2)
    assert_array_equal(weights, before)
    weights[:] = 0
    assert np.abs(trainer.weights()).min() > 0


def batch_with(advantage: float) -> Batch:
    """Return a single row."""
    zeros = torch.zeros(1, dtype=torch.float64)
    advantages = zeros + advantage
    return Batch(
        table=zeros[:, None],
        index=torch.zeros(1, dtype=torch.int64),
        actions=zeros,
        logprobs=zeros,
        values=zeros,
        advantages=advantages,
        returns=zeros,
    )


def gradient_of_ratio(loss: SPOLoss, ratio: float, advantage: float) -> float:
    log_ratio = torch.tensor([ratio], dtype=torch.float64).log()
    zeros = torch.zeros_like(log_ratio)
    outputs = Outputs(log_ratio, zeros, zeros)
    gradients, _ = loss.loss(outputs, batch_with(advantage))
    return gradients.log_ratio.item() / ratio


@pytest.mark.proves("SPOLoss")
@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        (1.0, 2.0, -2.0),
        (1.2, 2.0, 0.0),
        (1.3, 2.0, 1.0),
        (1.0, -2.0, 2.0),
        (0.8, -2.0, 0.0),
        (0.7, -2.0, -1.0),
    ],
)
def test_the_best_ratio_of_spo_is_at_the_bound(
    ratio: float, advantage: float, gradient: float
) -> None:
    """By hand: dL/dr = -A + |A| / 0.2 (r - 1), which leads back from beyond the bound."""
    loss = SPOLoss(replace(PLAIN, loss="spo"))
    computed = gradient_of_ratio(loss, ratio, advantage)
    assert computed == pytest.approx(gradient, abs=1e-12)


def test_each_value_of_the_setting_has_a_class() -> None:
    names = get_args(get_type_hints(PPO)["loss"])
    assert set(names) == set(LOSSES)
    for name in LOSSES:
        assert objective_class(name)(PLAIN)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("lagged", [False, True])
def test_pieces_of_a_minibatch_have_its_gradient(name: str, lagged: bool) -> None:
    """With rows that are no transitions, and older policies."""
    batch = random_batch()
    counted = torch.arange(len(batch)) % 5 > 0
    batch = replace(batch, weights=counted.double())
    options: dict[str, Any] = {
        "loss": name,
        "ent_coef": 0.03,
        "vf_coef": 0.7,
        "lagged": lagged,
    }  # fmt: skip
    whole = make_trainer(**options)
    pieces = make_trainer(micro_batch_size=3, **options)
    expected = train(whole, batch, 1e-2, LAGGED)
    figures = train(pieces, batch, 1e-2, LAGGED)
    assert figures == pytest.approx(expected, rel=1e-9)
    assert_close(pieces.weights(), whole.weights())


def test_an_update_by_spo_differs_from_that_of_ppo_only_once_ratios_do() -> None:
    """At ratio one, the gradients of both losses are the policy gradient."""
    batch = random_batch(drift=0.0)

    def weights(name: str, epochs: int) -> np.ndarray:
        trainer = make_trainer(loss=name, minibatches=1, update_epochs=epochs)
        train(trainer, batch, 1e-2)
        return trainer.weights()

    assert_close(weights("spo", epochs=1), weights("ppo", epochs=1))

    difference = weights("spo", epochs=2) - weights("ppo", epochs=2)
    assert np.abs(difference).max() > 1e-6


@pytest.mark.proves("from_current_policy")
@ACTIONS
@pytest.mark.parametrize("norm_adv", [True, False], ids=["standardized", "raw"])
def test_ratios_are_measured_from_the_policy_before_the_update(
    actions: Actions, norm_adv: bool
) -> None:
    """As if that policy had collected, with advantages weighted once by min(pi_now / pi_old, 2)."""
    spec = spec_of(actions)
    minibatches = 1 if norm_adv else 4
    lagged = make_trainer(spec, norm_adv=norm_adv, minibatches=minibatches, lagged=True)
    plain = make_trainer(spec, norm_adv=False, minibatches=minibatches)
    batch = random_batch(spec, drift=1.0)

    now = plain.model.log_probs([batch])
    ratio = (now - batch.logprobs).exp()
    importance = ratio.clamp(max=2)
    assert importance.max() == 2

    advantages = batch.advantages
    if norm_adv:
        centered = advantages - advantages.mean()
        advantages = centered / (advantages.std() + 1e-8)
    by_hand = replace(batch, logprobs=now, advantages=advantages * importance)

    figures = train(lagged, batch, 1e-2, LAGGED)
    expected = train(plain, by_hand, 1e-2)
    assert_close(lagged.weights(), plain.weights())
    assert figures["clipfrac"] == expected["clipfrac"]


def test_rows_that_are_not_transitions_have_no_effect() -> None:
    batch = random_batch(drift=1.0)
    weights = torch.ones(len(batch), dtype=torch.float64)
    weights[::5] = 0.0
    batch = replace(batch, weights=weights)
    logprobs = torch.where(weights > 0, batch.logprobs, -1e4)  # exp(now - old) would overflow
    extreme = replace(batch, logprobs=logprobs)
    first = make_trainer(lagged=True)
    second = make_trainer(lagged=True)
    train(first, extreme, 1e-2, LAGGED)
    train(second, batch, 1e-2, LAGGED)
    assert np.isfinite(first.weights()).all()
    assert_array_equal(first.weights(), second.weights())
