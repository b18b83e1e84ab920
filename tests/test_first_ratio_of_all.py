"""Acting equals learning for every combination of actions, masks, memory, normalisation and network; also on Ray."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import collect, parts_of, random_weights
from worlds.memory_models import Running
from worlds.models import Plain

import dppo
from dppo.cluster.learning.update import train_on
from dppo.cluster.plans import trainer_plan
from dppo.config import make_config
from dppo.ppo.exchange.inputs import no_statistics
from dppo.ppo.exchange.records import PolicySnapshot

ACTIONS = ("discrete", "multidiscrete", "discrete, masked", "multidiscrete, masked", "box", "dict")
MEMORIES = ("none", "gru", "lstm")
NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {"obs": "numbers"},
    "cnn": {"obs": "picture", "image_features": 16},
    "encoders": {"obs": "named"},
    "own module": {"obs": "numbers"},
}
FAST = {("discrete, masked", "gru", "mlp"), ("multidiscrete, masked", "lstm", "encoders"), ("dict", "gru", "cnn")}
FAST |= {("box", "lstm", "own module"), ("discrete, masked", "none", "own module"), ("dict", "none", "mlp")}
FAST_ON_RAY = {("multidiscrete, masked", "lstm", "encoders")}
COMBINATIONS = [
    case
    for case in product(ACTIONS, MEMORIES, (False, True), NETWORKS)
    if not (case[1] == "gru" and case[3] == "own module")  # memory is the module's own there, of one kind
]


def combinations(fast: set[tuple[str, str, str]], normalised: tuple[bool, ...] = (False, True)) -> pytest.MarkDecorator:
    """All combinations; those of `fast` with one of the values in `normalised` are part of the fast set."""
    cases = [
        pytest.param(*case, marks=() if case[2] in normalised and (*case[:2], case[3]) in fast else pytest.mark.slow)
        for case in COMBINATIONS
    ]
    return pytest.mark.parametrize(("act", "memory", "normalised", "network"), cases)


def settings(act: str, memory: str, normalised: bool, network: str) -> dict[str, Any]:
    chosen = dict(NETWORKS[network])
    kind, _, masked = act.partition(", ")
    world = {"obs": chosen.pop("obs"), "act": kind, "masked": bool(masked)}
    chosen |= {"env_id": "worlds.acting:Combined", "env_kwargs": world}
    chosen |= {"num_samplers": 2, "envs_per_sampler": 2, "num_steps": 20, "update_epochs": 1, "minibatch_size": 80}
    chosen |= {"norm_adv": False, "norm_reward": normalised, "norm_obs": normalised and network != "cnn"}
    if network == "own module":
        return chosen | ({"model": Plain} if memory == "none" else {"model": Running, "sequence_length": 5})
    return chosen | ({} if memory == "none" else {"memory": memory, "sequence_length": 10})


@combinations(FAST)
def test_first_ratio_is_one(act: str, memory: str, normalised: bool, network: str) -> None:
    """In the second iteration statistics are not empty, and episodes and states go on."""
    config = make_config(settings(act, memory, normalised, network))
    samplers, trainer = parts_of(config)
    trainer.load(random_weights(trainer.model.spec, scale=0.2), trainer.state())
    statistics = no_statistics(samplers[0].spaces, obs=config.norm_obs, returns=normalised)
    for iteration in range(2):
        scale = statistics.obs_scale()
        snapshot = PolicySnapshot(iteration, trainer.weights(), scale)
        reports, segments = collect(samplers, snapshot)
        assert (segments[0].masks is not None) == ("masked" in act)
        losses = train_on(trainer, trainer_plan(config), segments, scale, statistics.reward_scale(), iteration).figures
        assert losses["minibatches"] == 1
        assert abs(losses["approx_kl"]) < 2e-6
        assert abs(losses["old_approx_kl"]) < 5e-5
        assert losses["clipfrac"] == 0
        assert np.isfinite(losses["entropy"])
        statistics = statistics.merged([report.statistics for report in reports])


@combinations(FAST_ON_RAY, normalised=(True,))
def test_first_ratio_is_one_through_ray(
    act: str, memory: str, normalised: bool, network: str, tmp_path: Path, ray_session: None
) -> None:
    """One SGD step in an iteration, and a large one: the divergence before it is that of rounding."""
    more = {"learning_rate": 0.03, "anneal_lr": False, "total_timesteps": 3 * 80, "num_actors": 2}
    files = {"progress": "off", "run_dir": tmp_path / "run"}
    result = dppo.train(make_config(settings(act, memory, normalised, network) | more | files))
    rows = list(result.metrics)
    assert len(rows) == 3
    assert max(abs(row["losses/old_approx_kl"]) for row in rows) < 5e-5
    assert max(row["losses/clipfrac"] for row in rows) == 0
