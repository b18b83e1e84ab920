"""The first minibatch of an update sees the policy that acted, state included, on segments of a real sampler."""

from __future__ import annotations

from typing import Any

import pytest
from builders import collect, parts_of, random_weights
from worlds.memory_models import Running

from dppo.cluster.learning.update import train_on
from dppo.cluster.plans import trainer_plan
from dppo.config import make_config
from dppo.ppo.exchange.inputs import no_statistics
from dppo.ppo.exchange.records import PolicySnapshot

NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {"env_id": "worlds.memory:Recalls"},
    "cnn": {"env_id": "worlds.memory:Pictured", "image_features": 16},
    "dict": {"env_id": "worlds.memory:Named"},
    "own module": {"env_id": "worlds.memory:Recalls", "model": Running, "sequence_length": 5},
    "own module for a dict": {
        "env_id": "worlds.memory:Named",
        "model": Running,
        "sequence_length": 5,
    },
}
MEMORIES: dict[str, dict[str, Any]] = {"none": {}, "gru": {"memory": "gru"}, "lstm": {"memory": "lstm"}}
LAGS = {"fresh": False, "lagged": True}
SLOW = {("cnn", "none", "fresh"), ("cnn", "none", "lagged"), ("cnn", "gru", "fresh"), ("cnn", "lstm", "lagged")}
CASES = [
    pytest.param(network, memory, norm_obs, lag, marks=pytest.mark.slow if (network, memory, lag) in SLOW else ())
    for network, base in NETWORKS.items()
    for memory in MEMORIES
    for norm_obs in (False, True)
    for lag in LAGS
    if not (norm_obs and network == "cnn") and not ("model" in base and memory != "none")
]


@pytest.mark.parametrize(("network", "memory", "norm_obs", "lag"), CASES)
def test_first_ratio_is_one(network: str, memory: str, norm_obs: bool, lag: str) -> None:
    """Several sequences in each minibatch, whose size the pieces of `micro_batch_size` do not divide.

    In the second iteration the statistics are not empty, and episodes and states go on.
    """
    config = make_config(
        {
            "num_samplers": 2, "envs_per_sampler": 2, "num_steps": 30, "update_epochs": 1, "minibatch_size": 120,
            "micro_batch_size": 50, "learning_rate": 0.01, "norm_adv": False, "norm_obs": norm_obs,
        } | NETWORKS[network] | MEMORIES[memory]
    )  # fmt: skip
    samplers, trainer = parts_of(config)
    trainer.load(random_weights(trainer.model.spec), trainer.state())  # a policy far from uniform
    statistics = no_statistics(samplers[0].spaces, obs=norm_obs, returns=False)
    episodes = 0
    for iteration in range(2):
        scale = statistics.obs_scale()
        snapshot = PolicySnapshot(iteration, trainer.weights(), scale)
        reports, segments = collect(samplers, snapshot)
        episodes += sum(len(report.episodes) for report in reports)
        losses = train_on(trainer, trainer_plan(config), segments, scale, None, iteration, lagged=LAGS[lag]).figures
        assert losses["minibatches"] == 1
        assert abs(losses["approx_kl"]) < 1e-6
        assert abs(losses["old_approx_kl"]) < 2e-5
        assert losses["clipfrac"] == 0
        statistics = statistics.merged([report.statistics for report in reports])
    assert episodes > 20
