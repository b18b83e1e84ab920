"""Losses behind the seam: SPO's against its definition, and what holds for each of them."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from builders import PLAIN, at_rate
from updates import experience_of, make_trainer, random_batch

from dppo.config.parts.ppo import LOSSES, PPO
from dppo.ppo.learning.batch import Batch
from dppo.ppo.learning.objective import Outputs, objective_class
from dppo.ppo.learning.spo import SPOLoss


def batch_of(advantages: list[float]) -> Batch:
    column = torch.zeros(len(advantages), dtype=torch.float64)
    return Batch(column[:, None], column, column, column, torch.tensor(advantages).double(), column)


def gradient_of_ratio(loss: SPOLoss, ratio: float, advantage: float) -> float:
    log_ratio = torch.tensor([ratio], dtype=torch.float64).log()
    gradients, _ = loss.loss(
        Outputs(log_ratio, torch.zeros_like(log_ratio), torch.zeros_like(log_ratio)),
        batch_of([advantage]),
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


def test_an_update_by_spo_differs_only_once_ratios_do() -> None:
    """At ratio one, the gradients of both losses are the policy gradient."""
    batch = random_batch(drift=0.0)
    weights = {}
    for name in LOSSES:
        for epochs in (1, 2):
            trainer = make_trainer(loss=name, minibatches=1, update_epochs=epochs)
            trainer.train_on(batch, at_rate(trainer, 1e-2), np.random.default_rng(0))
            weights[name, epochs] = trainer.weights()
    np.testing.assert_allclose(weights["spo", 1], weights["ppo", 1], rtol=1e-9, atol=1e-12)
    assert np.abs(weights["spo", 2] - weights["ppo", 2]).max() > 1e-6
