"""PPOTrainer against an update in plain torch; its minibatches, metrics, limits and faults."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from builders import BOX, DISCRETE, PLAIN, random_weights, spec_of
from mlp_twin import MLP
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal

from dppo.config import PPO
from dppo.errors import TrainingDiverged
from dppo.ppo.distributions import categorical as ppo
from dppo.ppo.learning.batch import Batch
from dppo.ppo.learning.minibatches import draw_minibatches
from dppo.ppo.learning.model import PPOModel
from dppo.ppo.learning.parallel import Alone
from dppo.ppo.learning.trainer import PPOTrainer
from dppo.spaces.actions import BoxActions, DiscreteActions

ACTIONS = pytest.mark.parametrize("actions", [DISCRETE, BOX], ids=["discrete", "box"])
SPLIT = ("minibatches", "micro_batch_size")


def make_trainer(actions: DiscreteActions | BoxActions = DISCRETE, **options: Any) -> PPOTrainer:
    split = {"minibatches": 4} | {name: options.pop(name) for name in SPLIT if name in options}
    trainer = PPOTrainer(PPOModel(spec_of(actions), 1), dataclasses.replace(PLAIN, **options), **split)
    trainer.load(random_weights(trainer.model.spec), trainer.state())
    return trainer


def evaluate(trainer: PPOTrainer, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, mean entropy and values under the current weights."""
    scored = trainer.model.forward(obs, actions)
    return scored.policy.logprobs.clone(), scored.policy.entropies.mean(), scored.values.clone()


def random_batch(trainer: PPOTrainer, rows: int = 50, seed: int = 0) -> Batch:
    """Return rows with ratios on both sides of the clip."""
    rng, spec = np.random.default_rng(seed), trainer.model.spec
    if isinstance(spec.distribution, ppo.Categorical):
        actions = torch.from_numpy(rng.integers(0, spec.distribution.head_size, rows))
    else:
        actions = torch.from_numpy(rng.normal(size=(rows, *spec.distribution.action_shape)))
    obs = torch.from_numpy(rng.normal(size=(rows, *spec.obs_shape)))
    logprobs, _, values = evaluate(trainer, obs, actions)
    drift, noise, advantages = (torch.from_numpy(rng.normal(size=rows)) for _ in range(3))
    return Batch(obs, actions, logprobs + 0.3 * drift, values + 0.3 * noise, advantages, values + 2 * advantages)


# ------------------------------------------------------------------------------------ the slow twin

COLUMNS = ("obs", "actions", "logprobs", "values", "advantages", "returns")


def slow_update(
    model: MLP, batch: Batch, learning_rate: float, order: np.random.Generator, options: PPO, minibatches: int
) -> None:
    """Do one PPO update as in the paper and CleanRL: autograd, and torch's clipping, distributions and Adam.

    Rows that weigh nothing are left out.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, eps=1e-5)
    for _ in range(options.update_epochs):
        for drawn in np.array_split(order.permutation(len(batch)), minibatches):
            rows = drawn if batch.weights is None else drawn[batch.weights[drawn].numpy() > 0]
            if not len(rows):
                continue
            mb = {name: getattr(batch, name)[rows] for name in COLUMNS}
            head, value = model.policy(mb["obs"]), model.value(mb["obs"])[:, 0]
            policy: Any = Categorical(logits=head)
            if model.log_std is not None:
                policy = Independent(Normal(head, model.log_std.exp()), 1)
            logratio = policy.log_prob(mb["actions"]) - mb["logprobs"]
            ratio, adv, c = logratio.exp(), mb["advantages"], options.clip_coef
            if options.norm_adv:
                adv = (adv - adv.mean()) / ((adv.std() if len(adv) > 1 else 0) + 1e-8)
            pg_loss = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 1 - c, 1 + c)).mean()
            error = (value - mb["returns"]) ** 2
            if options.clip_vloss:
                clipped = mb["values"] + torch.clamp(value - mb["values"], -c, c)
                error = torch.max(error, (clipped - mb["returns"]) ** 2)
            loss = pg_loss - options.ent_coef * policy.entropy().mean() + options.vf_coef * 0.5 * error.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm)
            optimizer.step()
        if options.target_kl is not None and ((ratio - 1) - logratio).mean().item() > options.target_kl:
            break


@ACTIONS
@pytest.mark.parametrize(
    "options",
    [
        *({}, {"clip_vloss": True}, {"norm_adv": False}, {"max_grad_norm": 1e-3}, {"max_grad_norm": 1e6}),
        *({"ent_coef": 0.0, "vf_coef": 2.0}, {"minibatches": 7}, {"minibatches": 1}, {"micro_batch_size": 5}),
        *({"micro_batch_size": 1, "clip_vloss": True}, {"micro_batch_size": 1000}, {"target_kl": 1e-4}),
        {"clip_coef": 0.05, "update_epochs": 1},
    ],
    ids=str,
)
def test_update_equals_its_slow_twin(actions: DiscreteActions | BoxActions, options: dict[str, Any]) -> None:
    trainer = make_trainer(actions, **options)
    moved = assert_equals_twin(trainer, random_batch(trainer))
    assert moved.min() > 0
    assert np.median(moved) > 1e-3  # far more than the tolerance


def assert_equals_twin(trainer: PPOTrainer, batch: Batch) -> np.ndarray:
    """Update both alike; return how far each weight moved."""
    spec = trainer.model.spec
    twin = MLP(spec_of(DISCRETE if isinstance(spec.distribution, ppo.Categorical) else BOX)).double()
    twin.load_state_dict({name: torch.from_numpy(a) for name, a in spec.unflatten(trainer.weights()).items()})
    slow_update(twin, batch, 3e-3, np.random.default_rng(5), trainer.ppo, trainer.minibatches)
    before = trainer.weights()
    trainer.update(batch, 3e-3, np.random.default_rng(5))
    expected = spec.flatten({name: p.detach().numpy() for name, p in twin.named_parameters()})
    np.testing.assert_allclose(trainer.weights(), expected, rtol=1e-9, atol=1e-12)
    moved: np.ndarray = np.abs(trainer.weights() - before)
    return moved


# --------------------------------------------------------------------------- rows that weigh nothing


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


@ACTIONS
@pytest.mark.parametrize("options", WEIGHED, ids=str)
@pytest.mark.parametrize("share", [0.95, 0.5, 0.1])
def test_rows_of_weight_zero_do_not_change_an_update(
    actions: DiscreteActions | BoxActions, options: dict[str, Any], share: float
) -> None:
    """Also if whole minibatches are empty, or have one row."""
    trainer = make_trainer(actions, **options)
    moved = assert_equals_twin(trainer, weighing(random_batch(trainer), some_weights(50, share)))
    assert moved.max() > 1e-3


@pytest.mark.parametrize("options", WEIGHED, ids=str)
def test_figures_are_those_of_the_rows_that_count(options: dict[str, Any]) -> None:
    """Compare with a minibatch without the other rows."""
    options = {**options, "minibatches": 1, "update_epochs": 2}
    full, left = make_trainer(**options), make_trainer(**options)
    weights = some_weights(50, 0.6)
    batch = weighing(random_batch(full), weights)
    rows = torch.from_numpy(np.random.default_rng(5).permutation(50))
    rows = rows[weights[rows] > 0]
    kept = Batch(*(getattr(batch, name)[rows] for name in COLUMNS))
    found = full.update(batch, 3e-3, np.random.default_rng(5)).figures
    expected = left.update(kept, 3e-3, np.random.default_rng(5)).figures
    assert found == pytest.approx(expected, rel=1e-10)


def test_weights_of_one_equal_no_weights() -> None:
    one, other = make_trainer(), make_trainer()
    batch = random_batch(one)
    figures = one.update(batch, 3e-3, np.random.default_rng(5)).figures
    ones = dataclasses.replace(batch, weights=torch.ones(50, dtype=torch.float64))
    assert other.update(ones, 3e-3, np.random.default_rng(5)).figures == pytest.approx(figures, rel=1e-10)
    np.testing.assert_allclose(other.weights(), one.weights(), rtol=1e-9, atol=1e-12)


def test_a_batch_without_a_row_that_counts_changes_nothing() -> None:
    trainer = make_trainer(target_kl=0.1)
    trainer.update(random_batch(trainer), 1e-2, np.random.default_rng(0))  # so that Adam has momentum
    before, state = trainer.weights(), trainer.state()
    batch = weighing(random_batch(trainer), torch.zeros(50, dtype=torch.float64))
    figures = trainer.update(batch, 1e-2, np.random.default_rng(1)).figures
    np.testing.assert_array_equal(trainer.weights(), before)
    for name, array in trainer.state().items():
        np.testing.assert_array_equal(array, state[name])
    assert figures.pop("minibatches") == 0
    assert all(math.isnan(value) for value in figures.values())


def minibatches_of(trainer: PPOTrainer, batch: Batch, order: np.random.Generator) -> list[Batch]:
    """Return the minibatches of one epoch of `trainer`; all rows are transitions."""
    drawn = draw_minibatches(batch, order, trainer.minibatches, standardize=trainer.ppo.norm_adv, parallel=Alone())
    pairs = list(drawn)
    if batch.weights is None:
        assert [count for _, count in pairs] == [len(one) for one, _ in pairs]
    return [one for one, _ in pairs]


# --------------------------------------------------------------------------------------- sequences


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 10, "norm_adv": False}, {"minibatches": 7}], ids=str)
@pytest.mark.parametrize("length", [2, 5])
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_sequences_stay_whole_and_equal_their_rows(options: dict[str, Any], length: int, share: float) -> None:
    """Without memory, an update on sequences equals one on their rows in the same order."""

    class Rows:
        """Order of rows that follows from an order of sequences."""

        def __init__(self) -> None:
            self._order = np.random.default_rng(5)

        def permutation(self, rows: int) -> np.ndarray:
            sequences = self._order.permutation(rows // length)
            whole: np.ndarray = (sequences[:, None] * length + np.arange(length)).reshape(-1)
            return whole

    by_rows, by_sequences = make_trainer(**options), make_trainer(**options)
    batch = random_batch(by_rows, rows=length * 16 * by_rows.minibatches)
    if share < 1:
        batch = weighing(batch, some_weights(len(batch), share))
    order: Any = Rows()
    expected = by_rows.update(batch, 3e-3, order).figures
    sequences = dataclasses.replace(batch, sequence_length=length)
    minibatches = minibatches_of(by_sequences, sequences, np.random.default_rng(0))
    assert {one.sequence_length for one in minibatches} == {length}
    assert {one.sequences for one in minibatches} == {16}
    assert by_sequences.update(sequences, 3e-3, np.random.default_rng(5)).figures == pytest.approx(expected, rel=1e-10)
    np.testing.assert_allclose(by_sequences.weights(), by_rows.weights(), rtol=1e-9, atol=1e-12)


# -------------------------------------------------------------------------------------- minibatches


@pytest.mark.parametrize(("rows", "minibatches"), [(40, 4), (41, 4), (43, 5), (7, 7), (10, 1), (3, 5)])
def test_every_row_is_in_one_minibatch_of_an_epoch(rows: int, minibatches: int) -> None:
    trainer = make_trainer(minibatches=minibatches, norm_adv=False)
    column = torch.arange(rows, dtype=torch.float64)
    batch = Batch(torch.stack([column] * 4, dim=1), column.long(), column + 100, column + 200, column, column + 300)
    order = np.random.default_rng(0)
    epochs = [minibatches_of(trainer, batch, order) for _ in range(2)]
    for epoch in epochs:
        sizes = [len(minibatch) for minibatch in epoch]
        assert len(sizes) == min(rows, minibatches)
        assert max(sizes) - min(sizes) <= 1
        drawn = torch.cat([minibatch.advantages for minibatch in epoch])
        assert sorted(drawn.tolist()) == column.tolist()
        for one in epoch:  # columns are shuffled alike
            expected = torch.stack([one.advantages, one.advantages + 100, one.advantages + 200, one.advantages + 300])
            found = torch.stack([one.actions.double(), one.logprobs, one.values, one.returns])
            assert torch.equal(found, expected)
            assert isinstance(one.obs, Tensor)
            assert torch.equal(one.obs, one.advantages[:, None].expand(-1, 4))
    if rows > 7:
        first, second = (torch.cat([one.advantages for one in epoch]) for epoch in epochs)
        assert not torch.equal(first, second)


def test_minibatches_are_those_of_array_split() -> None:
    trainer = make_trainer(minibatches=4)
    batch = random_batch(trainer, rows=43)
    expected = np.array_split(np.random.default_rng(3).permutation(43), 4)
    for one, rows in zip(minibatches_of(trainer, batch, np.random.default_rng(3)), expected, strict=True):
        assert isinstance(one.obs, Tensor)
        assert isinstance(batch.obs, Tensor)
        assert torch.equal(one.obs, batch.obs[torch.from_numpy(rows)])


def test_advantages_are_standardized_within_each_minibatch() -> None:
    trainer = make_trainer(minibatches=3)
    batch = random_batch(trainer, rows=20)
    shifted = dataclasses.replace(batch, advantages=batch.advantages * 100 + 1000)
    for one in minibatches_of(trainer, shifted, np.random.default_rng(0)):
        assert one.advantages.mean().item() == pytest.approx(0, abs=1e-9)
        assert np.std(one.advantages.numpy(), ddof=1) == pytest.approx(1, abs=1e-6)  # unbiased, like CleanRL's
    flat = dataclasses.replace(batch, advantages=torch.full((20,), 3.0, dtype=torch.float64))
    for one in minibatches_of(trainer, flat, np.random.default_rng(0)):
        assert not one.advantages.any()


@pytest.mark.parametrize(("target_kl", "expected"), [(1e-9, 2), (1e9, 10), (None, 10)])
def test_target_kl_ends_the_epochs_and_not_an_epoch(target_kl: float | None, expected: int) -> None:
    trainer = make_trainer(update_epochs=5, minibatches=2, target_kl=target_kl)
    assert trainer.update(random_batch(trainer), 1e-3, np.random.default_rng(0)).figures["minibatches"] == expected


# -------------------------------------------------------------------------------- metrics and limits


def test_figures_are_means_over_the_minibatches() -> None:
    trainer = make_trainer(update_epochs=1, minibatches=1, norm_adv=False)
    batch = random_batch(trainer)
    assert isinstance(batch.obs, Tensor)
    logprobs, entropy, values = evaluate(trainer, batch.obs, batch.actions)
    log_ratio = (logprobs - batch.logprobs).numpy()
    found = trainer.update(batch, 1e-3, np.random.default_rng(0)).figures
    expected = {"entropy": float(entropy), "value_loss": float(0.5 * (values - batch.returns).square().mean())}
    expected |= {"old_approx_kl": -log_ratio.mean(), "approx_kl": (np.exp(log_ratio) - 1 - log_ratio).mean()}
    expected |= {"clipfrac": (np.abs(np.exp(log_ratio) - 1) > 0.2).mean()}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert 0 < found["clipfrac"] < 1
    two = make_trainer(update_epochs=1, minibatches=2, norm_adv=False, max_grad_norm=1e-9)
    means = two.update(batch, 1e-12, np.random.default_rng(0)).figures  # no weight moves: halves of 25 rows each
    for name in ("entropy", "value_loss", "approx_kl", "clipfrac", "policy_loss"):
        assert means[name] == pytest.approx(found[name], rel=1e-6), name


EXPLAINED = {"equal": 1, "shifted": 1, "constant": 0, "opposite": -3, "of constant returns": math.nan}


@pytest.mark.parametrize(("values", "explained"), EXPLAINED.items())
def test_explained_variance(values: str, explained: float) -> None:
    trainer = make_trainer()
    batch = random_batch(trainer)
    returns = torch.ones_like(batch.returns) if values == "of constant returns" else batch.returns
    old = {"equal": returns, "shifted": returns + 7, "constant": torch.zeros_like(returns), "opposite": -returns}
    batch = dataclasses.replace(batch, values=old.get(values, batch.values), returns=returns)
    found = trainer.update(batch, 1e-3, np.random.default_rng(0)).figures["explained_variance"]
    assert found == pytest.approx(explained, abs=1e-9, nan_ok=True)


def test_the_gradient_norm_is_reported_before_clipping() -> None:
    norms = {}
    for limit in (1e-3, 1e6):
        trainer = make_trainer(update_epochs=1, minibatches=1, max_grad_norm=limit)
        norms[limit] = trainer.update(random_batch(trainer), 1e-3, np.random.default_rng(0)).figures["grad_norm"]
        applied = float(torch.linalg.vector_norm(trainer.model.parameters.gradient))
        assert applied == pytest.approx(min(limit, norms[limit]), rel=1e-3)
    assert norms[1e-3] == norms[1e6]


def test_learning_rate_is_that_of_the_call() -> None:
    """Adam's first step moves each weight by nearly the learning rate, whatever the gradient."""
    for learning_rate in (1e-3, 1e-5):
        trainer = make_trainer(update_epochs=1, minibatches=1, max_grad_norm=1e6)
        before = trainer.weights()
        trainer.update(random_batch(trainer), learning_rate, np.random.default_rng(0))
        moved = np.abs(trainer.weights() - before)
        assert moved.max() == pytest.approx(learning_rate, rel=0.01)


# ------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("column", ["obs", "advantages", "returns", "logprobs"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_number_that_is_not_finite_stops_the_run_and_keeps_the_weights(column: str, poison: float) -> None:
    trainer = make_trainer(update_epochs=1, minibatches=1)
    batch = random_batch(trainer)
    poisoned: Any = getattr(batch, column).clone()
    poisoned[3] = -poison if column == "logprobs" else poison
    before = trainer.weights()
    with pytest.raises(
        TrainingDiverged, match=r"SGD step 0 .*loss .*minibatch of 50 rows has obs from .*learning_rate"
    ):
        trainer.update(dataclasses.replace(batch, **{column: poisoned}), 1e-3, np.random.default_rng(0))
    np.testing.assert_array_equal(trainer.weights(), before)
    assert trainer.state()["step"] == 0
    assert not trainer.state()["exp_avg"].any()
    trainer.update(batch, 1e-3, np.random.default_rng(0))  # it can continue
    assert np.isfinite(trainer.weights()).all()


def test_a_later_minibatch_that_is_not_finite_keeps_the_earlier_steps() -> None:
    order, rows = np.random.default_rng(0).permutation(50), 13  # 50 in 4 parts: 13, 13, 12, 12
    trainer, clean = make_trainer(update_epochs=1), make_trainer(update_epochs=1, minibatches=1)
    batch = random_batch(trainer)
    returns = batch.returns.clone()
    returns[order[rows]] = math.nan  # the first row of the second minibatch
    with pytest.raises(TrainingDiverged, match="SGD step 1 "):
        trainer.update(dataclasses.replace(batch, returns=returns), 1e-3, np.random.default_rng(0))
    first = batch.take(torch.from_numpy(order[:rows]))
    clean.update(first, 1e-3, np.random.default_rng(1))
    np.testing.assert_allclose(trainer.weights(), clean.weights(), rtol=1e-12)


# ------------------------------------------------------------------------------------------- resuming


def test_a_resumed_trainer_continues_bit_for_bit() -> None:
    straight, before = make_trainer(BOX), make_trainer(BOX)
    batches = [random_batch(straight, seed=seed) for seed in range(2)]
    before.update(batches[0], 1e-3, np.random.default_rng(0))
    after = PPOTrainer(PPOModel(spec_of(BOX), 77), PLAIN, minibatches=4)
    state = before.state()
    after.load(before.weights(), state)
    before.update(batches[1], 1e-3, np.random.default_rng(9))  # must not change the saved state
    for number, batch in enumerate(batches):
        straight.update(batch, 1e-3, np.random.default_rng(number))
    after.update(batches[1], 1e-3, np.random.default_rng(1))
    np.testing.assert_array_equal(after.weights(), straight.weights())
    for name, array in straight.state().items():
        np.testing.assert_array_equal(after.state()[name], array)


def test_loading_the_state_of_a_new_trainer_resets_the_optimizer() -> None:
    trained, fresh = make_trainer(), make_trainer()
    batch, weights, state = random_batch(fresh), fresh.weights(), fresh.state()
    trained.update(random_batch(trained, seed=1), 1e-3, np.random.default_rng(0))
    trained.load(weights, state)
    for trainer in (trained, fresh):
        trainer.update(batch, 1e-3, np.random.default_rng(1))
    np.testing.assert_array_equal(trained.weights(), fresh.weights())


def test_weights_are_a_copy() -> None:
    trainer = make_trainer()
    weights = trainer.weights()
    kept = weights.copy()
    trainer.update(random_batch(trainer), 1e-2, np.random.default_rng(0))
    np.testing.assert_array_equal(weights, kept)
    weights[:] = 0
    assert np.abs(trainer.weights()).min() > 0
