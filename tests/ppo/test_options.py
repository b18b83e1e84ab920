"""Options of PPO that are off by default, each against a slow twin: KL-adapted learning rate, annealing, advantages
that are estimated anew, and rewards that are limited and scaled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from builders import BOX, DISCRETE, random_weights, sampler_of, spec_of
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.wrappers import TimeLimit
from meetings import Meeting, OwnOrders
from mlp_twin import MLP
from torch import nn
from torch.distributions import Categorical, Independent, Normal

from dppo.config import PPO
from dppo.ppo.exchange.normalizer import ObsScale
from dppo.ppo.exchange.records import PolicySnapshot, Segment, SegmentRequest
from dppo.ppo.learning.advantages import reward_shaping, shaped_rewards
from dppo.ppo.learning.batch import Batch, make_batch
from dppo.ppo.learning.model import PPOModel
from dppo.ppo.learning.optimizer import ADAPTED, adapted_rate
from dppo.ppo.learning.parallel import Parallel
from dppo.ppo.learning.recompute import estimated_again
from dppo.ppo.learning.trainer import PPOTrainer
from dppo.ppo.networks.default.mlp import MLPSpec
from dppo.spaces.actions import BoxActions, DiscreteActions

ACTIONS = pytest.mark.parametrize("actions", [DISCRETE, BOX], ids=["discrete", "box"])
MINIBATCHES = 4


def make_trainer(spec: MLPSpec, parallel: Parallel | None = None, **options: Any) -> PPOTrainer:
    zeros_like = None if parallel is None else parallel.zeros_like
    model = PPOModel(spec, 1, zeros_like=zeros_like)
    trainer = PPOTrainer(model, PPO(**options), minibatches=MINIBATCHES, parallel=parallel)
    trainer.load(random_weights(spec), trainer.state())
    return trainer


def random_batch(spec: MLPSpec, rows: int = 48, seed: int = 0) -> Batch:
    """Rows that the policy of `make_trainer` might have collected."""
    rng, trainer = np.random.default_rng(seed), make_trainer(spec)
    discrete = spec.distribution.action_shape == ()
    chosen = rng.integers(0, 3, rows) if discrete else rng.normal(size=(rows, *spec.distribution.action_shape))
    actions, obs = torch.from_numpy(chosen), torch.from_numpy(rng.normal(size=(rows, *spec.obs_shape)))
    scored = trainer.model.forward(obs, actions)
    values, advantages = scored.values.clone(), torch.from_numpy(rng.normal(size=rows))
    return Batch(obs, actions, scored.policy.logprobs.clone(), values, advantages, values + 2 * advantages)


# ------------------------------------------------------------------------------ learning rate by the KL


def test_a_large_kl_lowers_the_learning_rate_and_a_small_one_raises_it() -> None:
    assert adapted_rate(1e-3, 0.021, 0.01) == 1e-3 / 1.5
    assert adapted_rate(1e-3, 0.0049, 0.01) == 1e-3 * 1.5
    for kl in (0.005, 0.01, 0.02, math.nan):
        assert adapted_rate(1e-3, kl, 0.01) == 1e-3
    assert adapted_rate(1.2e-5, 1.0, 0.01) == 1e-5
    assert adapted_rate(9e-3, 0.0, 0.01) == 1e-2
    assert adapted_rate(1e-3, math.inf, 0.01) == 1e-3 / 1.5


def slow_adaptive_update(
    model: MLP, batch: Batch, rate: float, desired_kl: float, epochs: int, order: np.random.Generator
) -> list[float]:
    """Update as rsl_rl does, with the KL of samples; return the learning rate of each SGD step."""
    optimizer, rates = torch.optim.Adam(model.parameters(), lr=rate, eps=1e-5), []
    for epoch in range(epochs):
        for number, rows in enumerate(np.array_split(order.permutation(len(batch)), MINIBATCHES)):
            assert isinstance(batch.obs, torch.Tensor)
            head, value = model.policy(batch.obs[rows]), model.value(batch.obs[rows])[:, 0]
            policy: Any = Categorical(logits=head)
            if model.log_std is not None:
                policy = Independent(Normal(head, model.log_std.exp()), 1)
            log_ratio = policy.log_prob(batch.actions[rows]) - batch.logprobs[rows]
            ratio, adv = log_ratio.exp(), batch.advantages[rows]
            kl = ((ratio - 1) - log_ratio).mean().item()
            if epoch or number:
                if kl > desired_kl * 2:
                    rate = max(1e-5, rate / 1.5)
                elif kl < desired_kl / 2:
                    rate = min(1e-2, rate * 1.5)
            for group in optimizer.param_groups:
                group["lr"] = rate
            rates.append(rate)
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            loss = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)).mean() - 0.01 * policy.entropy().mean()
            loss = loss + 0.25 * ((value - batch.returns[rows]) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return rates


@ACTIONS
def test_an_update_with_an_adapted_learning_rate_equals_its_slow_twin(actions: DiscreteActions | BoxActions) -> None:
    spec = spec_of(actions)
    trainer = make_trainer(spec, learning_rate=9e-4, desired_kl=0.002, update_epochs=6)
    twin = MLP(spec).double()
    twin.load_state_dict({name: torch.from_numpy(a) for name, a in spec.unflatten(trainer.weights()).items()})
    batch = random_batch(spec)
    rates = slow_adaptive_update(twin, batch, 9e-4, 0.002, 6, np.random.default_rng(5))
    update = trainer.update(batch, math.nan, np.random.default_rng(5))  # the annealed learning rate is not used
    assert any(late > early for early, late in pairwise(rates))
    assert any(late < early for early, late in pairwise(rates))
    assert rates[0] == 9e-4
    expected = spec.flatten({name: p.detach().numpy() for name, p in twin.named_parameters()})
    np.testing.assert_allclose(trainer.weights(), expected, rtol=1e-9, atol=1e-12)
    assert update.learning_rate == pytest.approx(rates[-1])


def test_the_adapted_learning_rate_is_part_of_the_state() -> None:
    spec = spec_of()
    options: dict[str, Any] = {"learning_rate": 9e-4, "desired_kl": 0.002}
    straight, before, after = (make_trainer(spec, **options) for _ in range(3))
    batches = [random_batch(spec, seed=seed) for seed in (0, 1)]
    for number, batch in enumerate(batches):
        straight.update(batch, 0.0, np.random.default_rng(number))
    before.update(batches[0], 0.0, np.random.default_rng(0))
    assert before.state()[ADAPTED] != 9e-4
    after.load(before.weights(), before.state())
    after.update(batches[1], 0.0, np.random.default_rng(1))
    np.testing.assert_array_equal(after.weights(), straight.weights())
    assert after.state()[ADAPTED] == straight.state()[ADAPTED]


def test_a_state_without_an_adapted_learning_rate_begins_with_that_of_the_settings() -> None:
    spec = spec_of()
    plain, adaptive = make_trainer(spec), make_trainer(spec, learning_rate=7e-4, desired_kl=0.01)
    assert ADAPTED not in plain.state()
    adaptive.load(plain.weights(), plain.state())
    assert adaptive.state()[ADAPTED] == 7e-4
    plain.load(adaptive.weights(), adaptive.state())


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_adapt_the_learning_rate_as_one_trainer_does(size: int) -> None:
    options: dict[str, Any] = {"learning_rate": 9e-4, "desired_kl": 0.002}
    spec = spec_of()
    batch, alone = random_batch(spec), make_trainer(spec, **options)
    order: Any = OwnOrders([np.random.default_rng(rank) for rank in range(size)], MINIBATCHES)
    alone.update(batch, 0.0, order)

    def train(parallel: Parallel) -> tuple[np.ndarray, float]:
        trainer = make_trainer(spec, parallel, **options)
        share = batch.split([len(batch) // size] * size)[parallel.rank]
        trainer.update(share, 0.0, np.random.default_rng(parallel.rank))
        return trainer.weights(), float(trainer.state()[ADAPTED])

    for weights, rate in Meeting(size).all_do(train):
        np.testing.assert_allclose(weights, alone.weights(), rtol=1e-9, atol=1e-12)
        assert rate == alone.state()[ADAPTED] != 9e-4


# ------------------------------------------------------------------------------------------ annealing


@pytest.mark.parametrize("share", [0.0, 0.25, 0.9])
def test_an_annealed_update_is_one_with_the_smaller_coefficients(share: float) -> None:
    spec = spec_of(BOX)
    options: dict[str, Any] = {"clip_vloss": True, "update_epochs": 3}
    falling = make_trainer(spec, clip_coef=0.3, ent_coef=0.1, anneal_clip=True, anneal_ent=True, **options)
    still = make_trainer(spec, clip_coef=0.3 * (1 - share), ent_coef=0.1 * (1 - share), **options)
    batch = random_batch(spec)
    figures = [one.update(batch, 1e-2, np.random.default_rng(3), share) for one in (falling, still)]
    assert figures[0] == figures[1]
    np.testing.assert_array_equal(falling.weights(), still.weights())


def test_without_annealing_the_share_of_the_run_does_not_show() -> None:
    spec = spec_of()
    one, other = make_trainer(spec), make_trainer(spec)
    batch = random_batch(spec)
    one.update(batch, 1e-2, np.random.default_rng(3))
    other.update(batch, 1e-2, np.random.default_rng(3), 0.7)
    np.testing.assert_array_equal(one.weights(), other.weights())


# ------------------------------------------------------------------------------- advantages, estimated anew


class Telling(gym.Wrapper[Any, Any, Any, Any]):
    """Record the observation that each step led to, before any reset."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.led_to: list[np.ndarray] = []

    def step(self, action: Any) -> Any:
        answer = self.env.step(action)
        self.led_to.append(np.array(answer[0], np.float32))
        return answer


STEPS, GAMMA, LAMBDA = 48, 0.9, 0.8
SCALE = ObsScale(np.array([0.1, -0.2, 0.05, 0.3]), np.array([0.5, 2.0, 0.1, 1.5]))


def collect(sampler_id: int, obs_scale: ObsScale | None = None) -> tuple[Segment, np.ndarray, MLPSpec]:
    """A segment with deaths and time limits, and the observations [T, E, O] that its steps led to."""
    envs = [Telling(TimeLimit(CartPoleEnv(), limit)) for limit in (7, 60)]
    sampler, spec = sampler_of(
        envs, num_steps=STEPS, seed=3, sampler_id=sampler_id, hidden_sizes=(16, 8), keep_successors=True
    )
    snapshot = PolicySnapshot(0, random_weights(spec), obs_scale)
    _, segment = sampler.collect(SegmentRequest(sampler_id, 0), snapshot)
    return segment, np.stack([env.led_to for env in envs], axis=1), spec


def slow_advantages(
    segment: Segment, led_to: np.ndarray, value: Callable[[np.ndarray], float]
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns [T, E] by the definition, from the value of each observation on its own."""
    advantages, values = np.zeros(segment.rewards.shape), np.zeros(segment.rewards.shape)
    for env in range(segment.rewards.shape[1]):
        following = 0.0
        for t in reversed(range(len(segment.rewards))):
            if not segment.valid[t, env]:
                following = 0.0
                continue
            values[t, env] = value(segment.obs[t, env])
            after = 0.0 if segment.terminated[t, env] else value(led_to[t, env])
            done = segment.terminated[t, env] or segment.truncated[t, env]
            delta = segment.rewards[t, env] + GAMMA * after - values[t, env]
            following = delta + (0.0 if done else GAMMA * LAMBDA * following)
            advantages[t, env] = following
    return advantages, advantages + values


def spoil(segment: Segment, led_to: np.ndarray) -> Segment:
    """Return the segment with a row in the middle and a last row that are not transitions."""
    valid = segment.valid.copy()
    valid[9, 1] = valid[-1, 0] = False
    spoilt = dataclasses.replace(segment, valid=valid)
    return dataclasses.replace(spoilt, successors=led_to[spoilt.followed])


@pytest.mark.parametrize("obs_scale", [None, SCALE], ids=["raw", "normalized"])
@pytest.mark.parametrize("spoilt", [False, True], ids=["", "with invalid rows"])
@pytest.mark.parametrize("length", [1, 4])
def test_a_second_epoch_has_the_advantages_of_the_weights_that_it_begins_with(
    obs_scale: ObsScale | None, spoilt: bool, length: int
) -> None:
    segments, led_to, specs = zip(*(collect(sampler, obs_scale) for sampler in range(2)), strict=True)
    spec = specs[0]
    if spoilt:
        segments = (segments[0], spoil(segments[1], led_to[1]))
    assert any((one.truncated & ~one.terminated)[:-1].any() for one in segments)
    assert any(one.terminated.any() for one in segments)
    batch = make_batch(segments, obs_scale, None, gamma=GAMMA, gae_lambda=LAMBDA, sequence_length=length)
    both = make_trainer(spec, update_epochs=2, clip_vloss=True)
    order = np.random.default_rng(0)
    both.update(batch, 1e-2, order)

    first, second = (make_trainer(spec, update_epochs=1, clip_vloss=True) for _ in range(2))
    order = np.random.default_rng(0)
    plain = dataclasses.replace(batch, gae_inputs=None)
    first.update(plain, 1e-2, order)
    second.load(first.weights(), first.state())

    def value(obs: np.ndarray) -> float:
        x = obs.astype(np.float64)
        x = x if obs_scale is None else obs_scale.normalize(x)
        return float(first.model.values(torch.from_numpy(x)[None])[0])

    anew = [slow_advantages(one, after, value) for one, after in zip(segments, led_to, strict=True)]
    both_anew = [dataclasses.replace(one, logprobs=a, values=r) for one, (a, r) in zip(segments, anew, strict=True)]
    discounts: dict[str, Any] = {"gamma": GAMMA, "gae_lambda": LAMBDA}  # rows in the order of the batch
    swapped = make_batch(both_anew, obs_scale, None, sequence_length=length, **discounts)
    assert float((swapped.logprobs - batch.advantages).abs().max()) > 1e-2
    second.update(dataclasses.replace(plain, advantages=swapped.logprobs, returns=swapped.values), 1e-2, order)
    np.testing.assert_allclose(both.weights(), second.weights(), rtol=1e-9, atol=1e-11)


def test_estimated_with_the_weights_that_collected_advantages_are_the_same() -> None:
    segment, _, spec = collect(0)
    batch = make_batch([segment], None, None, gamma=GAMMA, gae_lambda=LAMBDA)
    assert batch.gae_inputs is not None
    trainer = make_trainer(spec, update_epochs=3)
    before = trainer.weights()
    trainer.update(batch, 1e-300, np.random.default_rng(0))  # nothing moves
    np.testing.assert_array_equal(trainer.weights(), before)
    assert isinstance(batch.obs, torch.Tensor)
    assert isinstance(batch.gae_inputs.successors, torch.Tensor)
    values, after = (trainer.model.values(obs).numpy() for obs in (batch.obs, batch.gae_inputs.successors))
    advantages, returns = estimated_again(batch.gae_inputs, values, after, 1)
    np.testing.assert_allclose(advantages, batch.advantages, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(returns, batch.returns, rtol=1e-10, atol=1e-12)


def test_ranks_estimate_advantages_anew_as_one_trainer_does() -> None:
    segments, _, specs = zip(*(collect(sampler) for sampler in range(2)), strict=True)
    alone = make_trainer(specs[0], update_epochs=3)
    shares = [make_batch([one], None, None, gamma=GAMMA, gae_lambda=LAMBDA) for one in segments]
    together = make_batch(segments, None, None, gamma=GAMMA, gae_lambda=LAMBDA)
    # The rows of rank 0 first, as OwnOrders counts them; a batch lays segments side by side.
    rows = np.arange(len(together)).reshape(STEPS, 2, -1).swapaxes(0, 1).reshape(-1)
    own: Any = OwnOrders([np.random.default_rng(rank) for rank in range(2)], MINIBATCHES)

    class Order:
        def permutation(self, count: int) -> np.ndarray:
            permuted: np.ndarray = rows[own.permutation(count)]
            return permuted

    order: Any = Order()
    alone.update(together, 1e-2, order)

    def train(parallel: Parallel) -> np.ndarray:
        trainer = make_trainer(specs[0], parallel, update_epochs=3)
        trainer.update(shares[parallel.rank], 1e-2, np.random.default_rng(parallel.rank))
        return trainer.weights()

    for weights in Meeting(2).all_do(train):
        np.testing.assert_allclose(weights, alone.weights(), rtol=1e-9, atol=1e-12)


def test_segments_hold_no_successors_unless_asked() -> None:
    sampler, spec = sampler_of([CartPoleEnv()], num_steps=5)
    _, segment = sampler.collect(SegmentRequest(0, 0), PolicySnapshot(0, random_weights(spec)))
    assert segment.successors is None
    assert make_batch([segment], None, None, gamma=GAMMA, gae_lambda=LAMBDA).gae_inputs is None


# -------------------------------------------------------------------------------------------- rewards


def test_rewards_are_limited_or_signed_and_then_scaled() -> None:
    raw = np.array([[-3.0, -0.5], [0.0, 2.5]])
    assert shaped_rewards(raw, sign=False, limit=1.0, scale=2.0).tolist() == [[-2, -1], [0, 2]]
    assert shaped_rewards(raw, sign=True, limit=None, scale=0.5).tolist() == [[-0.5, -0.5], [0, 0.5]]
    assert shaped_rewards(raw, sign=False, limit=None, scale=3.0).tolist() == [[-9, -1.5], [0, 7.5]]
    assert raw.tolist() == [[-3, -0.5], [0, 2.5]]
    assert reward_shaping(PPO()) is None


@pytest.mark.parametrize("reward_scale", [None, 4.0])
def test_a_batch_of_shaped_rewards_is_one_of_an_environment_that_gives_them(reward_scale: float | None) -> None:
    segment, _, _ = collect(0)
    rng = np.random.default_rng(0)
    raw = dataclasses.replace(segment, rewards=rng.normal(size=segment.rewards.shape) * 3)
    given = dataclasses.replace(segment, rewards=np.clip(raw.rewards, -2, 2) * 0.5)
    shape = reward_shaping(PPO(clip_reward=2.0, scale_reward=0.5))
    batches = [
        make_batch([one], None, reward_scale, gamma=GAMMA, gae_lambda=LAMBDA, shape_rewards=shaping)
        for one, shaping in ((raw, shape), (given, None))
    ]
    for name in ("advantages", "returns"):
        np.testing.assert_array_equal(getattr(batches[0], name), getattr(batches[1], name))


def test_discounted_returns_are_tracked_of_shaped_rewards_and_episodes_of_raw_ones() -> None:
    class Paying(gym.Wrapper[Any, Any, Any, Any]):
        def __init__(self, factor: float) -> None:
            super().__init__(TimeLimit(CartPoleEnv(), 9))
            self.factor = factor

        def step(self, action: Any) -> Any:
            obs, reward, *rest = self.env.step(action)
            return obs, float(reward) * self.factor, *rest

    reports = []
    for factor, shape in ((5.0, reward_shaping(PPO(clip_reward=2.0))), (2.0, None)):
        sampler, spec = sampler_of([Paying(factor)], num_steps=30, shape_rewards=shape)
        reports.append(sampler.collect(SegmentRequest(0, 0), PolicySnapshot(0, random_weights(spec)))[0])
    shaped, given = reports
    assert shaped.statistics.returns is not None
    assert given.statistics.returns is not None
    np.testing.assert_array_equal(shaped.statistics.returns.m2, given.statistics.returns.m2)
    np.testing.assert_array_equal(shaped.carry.discounted_returns, given.carry.discounted_returns)
    assert shaped.episodes[0].episode_return == 5 * shaped.episodes[0].length
