"""Observations stored as float64: what float32 cannot tell apart is seen after normalization."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from builders import collect, parts_of, random_weights, tiny_run
from worlds.faulty import Faulty

from dppo.config import PPO, Config
from dppo.envs.spaces import dtype_of
from dppo.errors import ConfigError
from dppo.hosts.plans import sampler_plan
from dppo.hosts.sampler_builder import build_sampler
from dppo.ppo.exchange.inputs import no_statistics
from dppo.ppo.exchange.records import PolicySnapshot, SegmentRequest
from dppo.ppo.exchange.scales import ObsScale
from dppo.ppo.learning.batch import make_batch
from dppo.spaces.spaces import leaves

OFFSET = 1e9


def far_away(nest: bool = False, dtype: str = "float64") -> Faulty:
    """Return an environment whose second number is close to 1e9; `nest` puts both into a Dict."""
    is_integer = "int" in dtype
    low, high = (0, 2**30) if is_integer else (-np.inf, np.inf)
    space: gym.Space[Any] = gym.spaces.Box(low, high, (2,), np.dtype(dtype).type)

    def numbers(steps: int) -> np.ndarray:
        wave = np.sin(steps)
        if is_integer:
            return np.array([0, int(OFFSET + round(4 * wave))], dtype)
        return np.array([0.5, OFFSET + wave])

    def nested(steps: int) -> dict[str, Any]:
        return {"far": numbers(steps), "dial": steps % 3}

    if nest:
        space = gym.spaces.Dict({"far": space, "dial": gym.spaces.Discrete(3)})
    observe = nested if nest else numbers
    return Faulty(space=space, observe=observe, episodes=(), length=20)


def config_of(**changes: Any) -> Config:
    stored: dict[str, Any] = {"env_id": far_away, "norm_obs": True, "obs_dtype": "float64"}
    return tiny_run(None, samplers=2, steps=64, **stored | changes)


def far_of(obs: Any, nest: bool) -> Any:
    """Return the two numbers of each observation."""
    return obs["far"] if nest else obs


@pytest.mark.parametrize("nest", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_acting_and_learning_normalize_in_float64_before_rounding(nest: bool, dtype: str) -> None:
    config = config_of(env_kwargs={"nest": nest}, dtype=dtype)
    samplers, trainer = parts_of(config, 1)
    weights = trainer.weights()
    statistics = no_statistics(samplers[0].spaces, obs=True, returns=False)
    first = PolicySnapshot(0, weights, statistics.obs_scale())
    [report], _ = collect(samplers, first)
    scale = statistics.merged([report.statistics]).obs_scale()
    assert scale is not None

    _, [segment] = collect(samplers, PolicySnapshot(1, weights, scale))
    batch = make_batch([segment], scale, None, PPO())

    raw = far_of(segment.obs, nest)
    assert raw.dtype == np.float64
    # the slow twin
    beside = raw.reshape(-1, 2)[:, 1]
    expected = [(number - scale.mean[1]) / scale.std[1] for number in beside]
    normalized = far_of(batch.obs, nest)[:, 1]
    np.testing.assert_allclose(normalized, np.clip(expected, -10, 10), rtol=1e-6, atol=1e-6)

    scored = trainer.model.forward(batch.obs, batch.actions)
    np.testing.assert_allclose(scored.policy.logprobs, batch.logprobs, atol=2e-5)


@pytest.mark.parametrize("nest", [False, True])
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint32"])
def test_integers_beside_1e9_reach_the_network_apart(nest: bool, dtype: str) -> None:
    config = config_of(env_kwargs={"nest": nest, "dtype": dtype})
    built = build_sampler(sampler_plan(config), 0)
    agent = built.sampler.agent
    mean = np.array([0.0, OFFSET])
    std = np.array([1.0, 4.0])
    weights = random_weights(agent.spec)
    agent.load(PolicySnapshot(0, weights, ObsScale(mean, std)))

    obs = np.zeros(7, built.spaces.obs)
    integers = leaves(obs)["far" if nest else ""]
    integers[:, 1] = int(OFFSET) + np.arange(7)
    _, decisions = agent.decide(obs)
    different = {head.tobytes() for head in decisions.head}
    assert len(different) == 7


@pytest.mark.parametrize(("dtype", "lost"), [("float32", True), ("float64", False)])
@pytest.mark.parametrize("nest", [False, True])
def test_integers_that_the_network_cannot_tell_apart_are_reported(
    nest: bool, dtype: str, lost: bool
) -> None:
    """A network of float64 can."""
    config = config_of(
        env_kwargs={"nest": nest, "dtype": "int64"},
        dtype=dtype,
        obs_dtype="float32",
        norm_obs=False,
    )
    built = build_sampler(sampler_plan(config), 0)
    weights = random_weights(built.sampler.agent.spec)
    report, segment = built.sampler.collect(SegmentRequest(0, 0), PolicySnapshot(0, weights))
    assert leaves(segment.obs)["far" if nest else ""].dtype == np.int64

    messages = [incident.message for incident in report.incidents]
    assert len(messages) == lost
    for message in messages:
        assert (
            "at index 1, and is read by the network as float32, whose steps are 64 there. Use obs_dtype"
            in message
        )


def test_small_integers_are_stored_as_they_are() -> None:
    space = gym.spaces.Dict(
        small=gym.spaces.Box(0, 2**24, (2,), np.int64),
        low=gym.spaces.Box(-(2**24) - 1, 0, (2,), np.int64),
        category=gym.spaces.Discrete(2, start=2**40),
    )
    stored = dtype_of(space, floats="float64")
    assert {name: str(stored[name].base) for name in space} == {
        "small": "int64",
        "low": "float64",
        "category": "int64",
    }


def test_categories_that_the_network_cannot_tell_apart_are_refused() -> None:
    def build(start: int, **changes: Any) -> None:
        counts = {
            "env_id": lambda: Faulty(space=gym.spaces.Discrete(4, start=start)),
            "norm_obs": False,
        }
        build_sampler(sampler_plan(config_of(**counts, obs_dtype="float32", **changes)), 0)

    build(2**24 - 3)
    build(2**24 - 2, dtype="float64")
    with pytest.raises(
        ConfigError,
        match="categories from 16777214 to 16777217, and the network reads them as float",
    ):
        build(2**24 - 2)
