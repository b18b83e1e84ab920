"""PPOTrainer against an update in plain torch; its losses, minibatches, metrics, limits and faults; policy lag."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from builders import PLAIN, at_rate, spec_of
from torch import Tensor
from updates import (
    ACTIONS,
    COLUMNS,
    assert_equals_twin,
    experience_of,
    make_trainer,
    random_batch,
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


@ACTIONS
@pytest.mark.parametrize(
    ("reward", "norm_reward"), [(0.0, True), (1.0, True), (0.0, False)], ids=str
)
def test_small_advantages_bring_an_entropy_bonus_only_with_normalized_rewards_of_zero(
    actions: Actions, reward: float, norm_reward: bool
) -> None:
    spec = spec_of(actions)
    batch = replace(random_batch(spec), rewards=(reward, reward))
    assert_equals_twin(make_trainer(spec, adv_floor=3.0, norm_reward=norm_reward), batch)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_noise_of_advantages_stays_noise(share: float) -> None:
    """Advantages far below the floor are divided by the floor, those far above it by their deviation."""

    def deviation(batch: Batch) -> float:
        assert batch.weights is not None
        return batch.advantages[batch.weights > 0].std().item()

    batch = share_of(random_batch(), share)
    for factor, expected in ((1e-4, 1e-4 * deviation(batch) / 0.1), (1e4, 1.0)):
        scaled = replace(batch, advantages=factor * batch.advantages)
        ((minibatch, _),) = draw_minibatches(
            scaled, np.random.default_rng(1), 1, floor=0.1, parallel=Parallel()
        )
        assert deviation(minibatch) == pytest.approx(expected, rel=1e-3)


@ACTIONS
def test_a_ratio_beyond_all_numbers_changes_the_weights_by_numbers(actions: Actions) -> None:
    """A narrow policy gives old rows ratios of exp(1000), and rows that count for nothing such ratios as well."""
    spec = spec_of(actions)
    trainer = make_trainer(spec)
    batch = random_batch(spec)
    far = torch.arange(len(batch)) % 3 == 0
    importance = torch.where(far, 0.0, 1.0).to(batch.logprobs.dtype)
    batch = replace(batch, logprobs=batch.logprobs - 1000.0 * far, importance=importance)
    figures = train(trainer, batch, rate=3e-4)
    assert np.isfinite(trainer.weights()).all()
    assert math.isfinite(figures["policy_loss"])


def share_of(batch: Batch, share: float) -> Batch:
    """Return the batch with weights of zero in all rows but this share."""
    return weighted(batch, np.random.default_rng(8).random(len(batch)) < share)


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
    moved, _ = assert_equals_twin(
        make_trainer(spec, **options), share_of(random_batch(spec), share)
    )
    assert moved.max() > 1e-3


@pytest.mark.parametrize("options", WEIGHTED, ids=str)
def test_figures_are_those_of_the_rows_that_count(options: dict[str, Any]) -> None:
    options = options | {"minibatches": 1, "update_epochs": 2}
    batch = share_of(random_batch(), 0.6)
    assert batch.weights is not None
    order = torch.from_numpy(np.random.default_rng(5).permutation(50))
    counted = replace(batch.take(order[batch.weights[order] > 0]), weights=None)
    expected = train(
        make_trainer(**options), Batch(*(getattr(counted, name) for name in COLUMNS)), 3e-3, seed=5
    )
    assert train(make_trainer(**options), batch, 3e-3, seed=5) == pytest.approx(expected, rel=1e-10)


def test_a_batch_without_a_row_that_counts_changes_nothing() -> None:
    trainer = make_trainer(target_kl=0.1)
    train(trainer, random_batch(), 1e-2)  # so that Adam has momentum
    before = trainer.state() | {"weights": trainer.weights()}
    figures = train(trainer, share_of(random_batch(), 0.0), 1e-2, seed=1)
    for name, array in (trainer.state() | {"weights": trainer.weights()}).items():
        np.testing.assert_array_equal(array, before[name])
    assert figures.pop("minibatches") == 0
    assert all(math.isnan(value) for value in figures.values())


@pytest.mark.parametrize(
    "options", [{}, {"micro_batch_size": 10, "norm_adv": False}, {"minibatches": 7}], ids=str
)
@pytest.mark.parametrize("length", [2, 5])
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_sequences_stay_whole_and_equal_their_rows(
    options: dict[str, Any], length: int, share: float
) -> None:
    """Without memory, an update on sequences equals one on their rows in the same order."""
    generator = np.random.default_rng(5)

    def by_sequence(rows: int) -> np.ndarray:
        sequences = generator.permutation(rows // length)
        return (sequences[:, None] * length + np.arange(length)).reshape(-1)

    by_rows = make_trainer(**options)
    by_sequences = make_trainer(**options)
    batch = random_batch(rows=length * 4 * by_rows.minibatches)
    if share < 1:
        batch = share_of(batch, share)
    order: Any = SimpleNamespace(permutation=by_sequence)
    expected = by_rows.train_on(batch, at_rate(by_rows, 3e-3), order).figures
    figures = train(by_sequences, replace(batch, sequence_length=length), 3e-3, seed=5)
    assert figures == pytest.approx(expected, rel=1e-10)
    np.testing.assert_allclose(by_sequences.weights(), by_rows.weights(), rtol=1e-9, atol=1e-12)


def test_figures_are_means_over_the_minibatches() -> None:
    trainer = make_trainer(update_epochs=1, minibatches=1, norm_adv=False)
    batch = random_batch()
    scored = trainer.model.forward(batch.obs, batch.actions)
    log_ratio = (scored.policy.logprobs - batch.logprobs).numpy()
    expected = {
        "entropy": float(scored.policy.entropies.mean()),
        "value_loss": float(0.5 * (scored.values - batch.returns).square().mean()),
        "old_approx_kl": -log_ratio.mean(),
        "approx_kl": (np.exp(log_ratio) - 1 - log_ratio).mean(),
        "clipfrac": (np.abs(np.exp(log_ratio) - 1) > 0.2).mean(),
    }
    figures = train(trainer, batch)
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
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
    returns = torch.ones_like(batch.returns) if values == "of constant returns" else batch.returns
    old = {
        "equal": returns,
        "shifted": returns + 7,
        "constant": torch.zeros_like(returns),
        "opposite": -returns,
    }
    figures = train(
        make_trainer(), replace(batch, values=old.get(values, batch.values), returns=returns)
    )
    assert figures["explained_variance"] == pytest.approx(explained, abs=1e-9, nan_ok=True)


def test_the_gradient_norm_is_reported_before_clipping() -> None:
    norms = []
    for limit in (1e-3, 1e6):
        trainer = make_trainer(update_epochs=1, minibatches=1, max_grad_norm=limit)
        norms.append(train(trainer, random_batch())["grad_norm"])
        applied = float(torch.linalg.vector_norm(trainer.model.parameters.gradient))
        assert applied == pytest.approx(min(limit, norms[-1]), rel=1e-3)
    assert norms[0] == norms[1]


@pytest.mark.parametrize("column", ["obs", "advantages", "returns", "logprobs"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_number_that_is_not_finite_raises_and_keeps_the_weights(
    column: str, poison: float
) -> None:
    trainer = make_trainer(update_epochs=1, minibatches=1)
    batch = random_batch()
    poisoned: Any = getattr(batch, column).clone()
    poisoned[3] = -poison if column == "logprobs" else poison
    before = trainer.weights()
    with pytest.raises(
        TrainingDiverged, match=r"SGD step 0 .*loss .*minibatch of 50 rows has obs .*learning_rate"
    ):
        train(trainer, replace(batch, **{column: poisoned}))
    np.testing.assert_array_equal(trainer.weights(), before)
    assert trainer.state()["step"] == 0
    assert not trainer.state()["exp_avg"].any()
    train(trainer, batch)  # it can continue
    assert np.isfinite(trainer.weights()).all()


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.float16]
)
def test_a_divergence_shows_leaves_of_every_dtype(dtype: torch.dtype) -> None:
    batch = random_batch()
    leaves: dict[str, Tensor] = {
        "speed": torch.ones(len(batch), 4),
        "flags": torch.ones(len(batch), 2).to(dtype),
    }
    losses = _Losses({"policy_loss": torch.tensor(math.nan)}, torch.zeros(len(batch)))
    error = _diverged(replace(batch, obs=leaves), 3, losses, math.inf)
    assert "obs flags from 1 to 1, advantages from " in str(error)


def test_a_later_minibatch_that_is_not_finite_keeps_the_earlier_steps() -> None:
    order = torch.from_numpy(np.random.default_rng(0).permutation(50))
    rows = 13  # 50 in 4 parts: 13, 13, 12, 12
    trainer = make_trainer(update_epochs=1)
    clean = make_trainer(update_epochs=1, minibatches=1)
    batch = random_batch()
    returns = batch.returns.clone()
    returns[order[rows]] = math.nan  # the first row of the second minibatch
    with pytest.raises(TrainingDiverged, match="SGD step 1 "):
        train(trainer, replace(batch, returns=returns))
    train(clean, batch.take(order[:rows]), seed=1)
    np.testing.assert_allclose(trainer.weights(), clean.weights(), rtol=1e-12)


def test_weights_are_a_copy() -> None:
    trainer = make_trainer()
    weights = trainer.weights()
    before = weights.copy()
    train(trainer, random_batch(), 1e-2)
    np.testing.assert_array_equal(weights, before)
    weights[:] = 0
    assert np.abs(trainer.weights()).min() > 0


def batch_with(advantages: list[float]) -> Batch:
    column = torch.zeros(len(advantages), dtype=torch.float64)
    return Batch(column[:, None], column, column, column, torch.tensor(advantages).double(), column)


def gradient_of_ratio(loss: SPOLoss, ratio: float, advantage: float) -> float:
    log_ratio = torch.tensor([ratio], dtype=torch.float64).log()
    gradients, _ = loss.loss(
        Outputs(log_ratio, torch.zeros_like(log_ratio), torch.zeros_like(log_ratio)),
        batch_with([advantage]),
    )
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
    loss = SPOLoss(dataclasses.replace(PLAIN, loss="spo"))
    assert gradient_of_ratio(loss, ratio, advantage) == pytest.approx(gradient, abs=1e-12)


def test_each_value_of_the_setting_has_a_class() -> None:
    assert set(get_args(get_type_hints(PPO)["loss"])) == set(LOSSES)
    for name in LOSSES:
        assert objective_class(name)(PLAIN)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("lagged", [False, True])
def test_pieces_of_a_minibatch_have_its_gradient(name: str, lagged: bool) -> None:
    """With rows that are no transitions, and older policies."""
    batch = random_batch()
    weights = (torch.arange(len(batch)) % 5 > 0).double()
    batch = dataclasses.replace(batch, weights=weights)
    options: dict[str, Any] = {"loss": name, "ent_coef": 0.03, "vf_coef": 0.7, "lagged": lagged}
    whole = make_trainer(**options)
    pieces = make_trainer(micro_batch_size=3, **options)
    figures = [
        trainer.train_on(
            batch, at_rate(trainer, 1e-2), np.random.default_rng(0), experience_of(lag=1)
        ).figures
        for trainer in (whole, pieces)
    ]
    assert figures[0] == pytest.approx(figures[1], rel=1e-9)
    np.testing.assert_allclose(whole.weights(), pieces.weights(), rtol=1e-9, atol=1e-12)


def test_an_update_by_spo_differs_from_that_of_ppo_only_once_ratios_do() -> None:
    """At ratio one, the gradients of both losses are the policy gradient."""
    batch = random_batch(drift=0.0)
    weights = {}
    for name in LOSSES:
        for epochs in (1, 2):
            trainer = make_trainer(loss=name, minibatches=1, update_epochs=epochs)
            train(trainer, batch, 1e-2)
            weights[name, epochs] = trainer.weights()
    np.testing.assert_allclose(weights["spo", 1], weights["ppo", 1], rtol=1e-9, atol=1e-12)
    assert np.abs(weights["spo", 2] - weights["ppo", 2]).max() > 1e-6


LAGGED = experience_of(lag=1)


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
    advantages = batch.advantages
    importance = (now - batch.logprobs).exp().clamp(max=2)
    assert importance.max() == 2
    if norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    weighted = replace(batch, logprobs=now, advantages=advantages * importance)
    losses = lagged.train_on(batch, at_rate(lagged, 1e-2), np.random.default_rng(0), LAGGED).figures
    expected = plain.train_on(weighted, at_rate(plain, 1e-2), np.random.default_rng(0)).figures
    np.testing.assert_allclose(lagged.weights(), plain.weights(), rtol=1e-9, atol=1e-12)
    assert losses["clipfrac"] == expected["clipfrac"]


def test_rows_that_are_not_transitions_have_no_effect() -> None:
    batch = random_batch(drift=1.0)
    weights = torch.ones(len(batch), dtype=torch.float64)
    weights[::5] = 0.0
    logprobs = torch.where(weights > 0, batch.logprobs, -1e4)  # exp(now - old) would overflow
    first = make_trainer(lagged=True)
    second = make_trainer(lagged=True)
    extreme = replace(batch, weights=weights, logprobs=logprobs)
    first.train_on(extreme, at_rate(first, 1e-2), np.random.default_rng(0), LAGGED)
    second.train_on(
        replace(batch, weights=weights), at_rate(second, 1e-2), np.random.default_rng(0), LAGGED
    )
    assert np.isfinite(first.weights()).all()
    np.testing.assert_array_equal(first.weights(), second.weights())
