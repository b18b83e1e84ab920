"""Acting equals learning for every combination of actions, masks, memory, normalization and network.

tests/test_promise.py shows that actors on Ray act to the same bits as this process.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from builders import at_rate, collect, make_config, parts_of, plan_of, random_weights
from torch import Tensor
from worlds.acting import SPACES, Combined
from worlds.memory_models import Running
from worlds.models import Plain

from dppo.config import PPO
from dppo.learners.trainers import LocalTrainer
from dppo.ppo.exchange.inputs import no_statistics
from dppo.ppo.exchange.records import Experience, PolicySnapshot
from dppo.ppo.learning.batch import make_batch

ACTIONS = ("discrete", "multidiscrete", "discrete, masked", "multidiscrete, masked", "box", "dict")
MEMORIES = ("none", "gru", "lstm")
NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {"obs": "numbers"},
    "cnn": {"obs": "picture", "image_features": 16},
    "encoders": {"obs": "named"},
    "own module": {"obs": "numbers"},
}
FORMS_OF_MASKS = ["flat", "nested"]  # for choices beside real numbers
OTHER_SPACES = [kind for kind in SPACES if kind not in Combined.ACTIONS]
FAST = {  # the others are in the slow set
    ("discrete, masked", "gru", "mlp"),
    ("multidiscrete, masked", "lstm", "encoders"),
    ("dict", "gru", "cnn"),
    ("box", "lstm", "own module"),
    ("discrete, masked", "none", "own module"),
    ("dict", "none", "mlp"),
}
# Memory is the module's own in "own module", of one kind.
CASES = [case for case in product(ACTIONS, MEMORIES, NETWORKS) if case[1:] != ("gru", "own module")]
SMALL = {
    "num_samplers": 2,
    "envs_per_sampler": 2,
    "num_steps": 20,
    "update_epochs": 1,
    "minibatch_size": 80,
    "micro_batch_size": 50,  # a piece that does not divide the minibatch
    "norm_adv": False,
}
either = pytest.mark.parametrize("normalized", [False, True])


def settings(act: str, memory: str, network: str, normalized: bool) -> dict[str, Any]:
    chosen = NETWORKS[network] | SMALL | world(act, NETWORKS[network]["obs"])
    del chosen["obs"]
    chosen["norm_reward"] = normalized
    chosen["norm_obs"] = normalized and network != "cnn"
    if network == "own module":
        if memory == "none":
            return chosen | {"model": Plain}
        return chosen | {"model": Running, "sequence_length": 5}
    if memory == "none":
        return chosen
    return chosen | {"memory": memory, "sequence_length": 10}


def world(act: str, obs: str) -> dict[str, Any]:
    """Return an environment with such actions and observations."""
    kind, _, masked = act.partition(", ")
    if kind in Combined.ACTIONS:
        kwargs = {"obs": obs, "act": kind, "masked": bool(masked)}
        return {"env_id": "worlds.acting:Combined", "env_kwargs": kwargs}
    if kind == "leaf":
        return {"env_id": "worlds.acting:Masked", "env_kwargs": {"source": kind}}
    if kind in FORMS_OF_MASKS:
        return {"env_id": "worlds.acting:Hybrid", "env_kwargs": {"form": kind}}
    bounds = "squash" if kind == "wide" else "auto"
    actuated = {"env_id": "worlds.acting:Actuated", "env_kwargs": {"kind": kind}}
    return actuated | {"action_bounds": bounds}


@either
@pytest.mark.parametrize(
    ("act", "memory", "network"),
    [
        *(pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in CASES),
        *((act, "none", "mlp") for act in [*OTHER_SPACES, *FORMS_OF_MASKS, "leaf"]),
    ],
)
def test_first_ratio_is_one(act: str, memory: str, network: str, normalized: bool) -> None:
    """From the second iteration on statistics are not empty, and episodes and states go on; the third is lagged."""
    config = make_config(settings(act, memory, network, normalized))
    samplers, _ = parts_of(config)
    spaces = samplers[0].spaces
    plan = replace(plan_of(config, spaces.actions), policy_lag=1)
    trainer = LocalTrainer(plan, spaces)
    trainer.load(random_weights(trainer.spec, scale=0.2), trainer.state())
    statistics = no_statistics(spaces, obs=config.norm_obs, returns=normalized)
    has_masks = "masked" in act or act in [*FORMS_OF_MASKS, "leaf"]

    for iteration in range(3):
        policy = PolicySnapshot(iteration, trainer.weights(), statistics.obs_scale())
        reports, segments = collect(samplers, policy)
        assert (segments[0].masks is not None) == has_masks

        lagged = replace(policy, version=min(1, iteration))
        experience = Experience(segments, lagged, statistics.reward_scale(), iteration)
        losses = trainer.update(experience).figures
        assert losses["minibatches"] == 1
        assert abs(losses["approx_kl"]) < 2e-6
        assert abs(losses["old_approx_kl"]) < 5e-5
        assert losses["clipfrac"] == 0
        assert np.isfinite(losses["entropy"])
        statistics = statistics.merged([report.statistics for report in reports])


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("float64", 1e-12)])
@pytest.mark.parametrize(("act", "normalized"), [("discrete", True), ("box", False)])
def test_learning_computes_the_numbers_of_acting(
    act: str, normalized: bool, dtype: str, tolerance: float
) -> None:
    chosen = settings(act, "none", "mlp", normalized)
    samplers, trainer = parts_of(make_config(chosen | {"dtype": dtype}))
    trainer.load(random_weights(trainer.model.spec), trainer.state())  # a policy far from uniform
    weights = trainer.weights()

    statistics = no_statistics(samplers[0].spaces, obs=normalized, returns=normalized)
    first = PolicySnapshot(0, weights, statistics.obs_scale())
    reports, _ = collect(samplers, first)
    statistics = statistics.merged([report.statistics for report in reports])
    scale = statistics.obs_scale()
    _, segments = collect(samplers, PolicySnapshot(1, weights, scale))
    batch = make_batch(segments, scale, statistics.reward_scale(), PPO())

    def assert_close(learned: Any, acted: Any) -> None:
        np.testing.assert_allclose(learned, acted, rtol=tolerance, atol=tolerance)

    assert isinstance(batch.obs, Tensor)
    scored = trainer.model.forward(batch.obs, batch.actions)
    assert_close(scored.policy.logprobs, batch.logprobs)
    assert_close(scored.values, batch.values)

    slow = at_rate(trainer, 0.01)
    losses = trainer.train_on(batch, slow, np.random.default_rng(0)).figures
    expected = -float(batch.advantages.mean())
    assert losses["policy_loss"] == pytest.approx(expected, rel=1e-4, abs=tolerance)
