"""Options of PPO that are off by default, each against a slow twin: KL-adapted learning rate, annealing, advantages
that are estimated anew, and rewards that are limited and scaled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from operator import mul
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from builders import BOX, PLAIN, assert_same_bytes, at_rate, random_weights, sampler_of, spec_of
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.wrappers import TimeLimit, TransformReward
from meetings import Meeting, OwnOrders
from torch import Tensor
from updates import ACTIONS, assert_equals_twin, experience_of, make_trainer, random_batch

from dppo.config import PPO
from dppo.config.parts import annealed
from dppo.ppo.exchange.records import PolicySnapshot, Segment, SegmentRequest
from dppo.ppo.exchange.scales import ObsScale
from dppo.ppo.learning.adam import ADAPTED, adapted_rate
from dppo.ppo.learning.advantages import shaped_rewards
from dppo.ppo.learning.batch import Batch, make_batch
from dppo.ppo.learning.model import PPOModel, free_deviations
from dppo.ppo.learning.parallel import Parallel
from dppo.ppo.learning.reuse import CHANGE, FACTOR, OlderPolicies, adapted_factor
from dppo.ppo.learning.stages import CurrentNetwork
from dppo.ppo.learning.trainer import PPOTrainer
from dppo.ppo.networks.network import NetworkSpec
from dppo.spaces.actions import Actions, BoxActions


def test_a_large_kl_lowers_the_learning_rate_and_a_small_one_raises_it() -> None:
    assert adapted_rate(1e-3, 0.021, 0.01) == 1e-3 / 1.5
    assert adapted_rate(1e-3, 0.0049, 0.01) == 1e-3 * 1.5
    for kl in (0.005, 0.01, 0.02, math.nan):
        assert adapted_rate(1e-3, kl, 0.01) == 1e-3
    assert adapted_rate(1.2e-5, 1.0, 0.01) == 1e-5
    assert adapted_rate(9e-3, 0.0, 0.01) == 1e-2
    assert adapted_rate(1e-3, math.inf, 0.01) == 1e-3 / 1.5


@pytest.mark.proves("adapted_rate")
@ACTIONS
def test_an_update_with_an_adapted_learning_rate_equals_its_slow_twin(actions: Actions) -> None:
    spec = spec_of(actions)
    trainer = make_trainer(spec, learning_rate=1e-4, desired_kl=0.002, update_epochs=6)
    _, rates = assert_equals_twin(trainer, random_batch(spec, drift=0.0))
    assert any(late > early for early, late in pairwise(rates))
    assert any(late < early for early, late in pairwise(rates))


def test_a_state_without_an_adapted_learning_rate_begins_with_that_of_the_settings() -> None:
    plain = make_trainer()
    adaptive = make_trainer(learning_rate=7e-4, desired_kl=0.01)
    assert ADAPTED not in plain.state()
    adaptive.load(plain.weights(), plain.state())
    assert adaptive.state()[ADAPTED] == 7e-4
    plain.load(adaptive.weights(), adaptive.state())


@pytest.mark.parametrize(
    ("anneal", "share"), [(True, 0.0), (True, 0.25), (True, 0.9), (False, 0.7)]
)
def test_an_annealed_update_is_one_with_the_smaller_coefficients(
    anneal: bool, share: float
) -> None:
    spec = spec_of(BOX)
    left = 1 - share if anneal else 1
    falling = make_trainer(
        spec, clip_coef=0.3, ent_coef=0.1, anneal_clip=anneal, anneal_ent=anneal, clip_vloss=True
    )
    still = make_trainer(spec, clip_coef=0.3 * left, ent_coef=0.1 * left, clip_vloss=True)
    batch = random_batch(spec)
    figures = [
        trainer.train_on(batch, annealed(trainer.ppo, share), np.random.default_rng(3))
        for trainer in (falling, still)
    ]
    assert figures[0] == figures[1]
    np.testing.assert_array_equal(falling.weights(), still.weights())


class Telling(gym.Wrapper[Any, Any, Any, Any]):
    """Record the observation that each step led to, before any reset."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.led_to: list[np.ndarray] = []

    def step(self, action: Any) -> Any:
        answer = self.env.step(action)
        self.led_to.append(np.array(answer[0], np.float32))
        return answer


STEPS = 48
GAMMA = 0.9
LAMBDA = 0.8
RATES: dict[str, Any] = {"gamma": GAMMA, "gae_lambda": LAMBDA}
DISCOUNTS = PPO(**RATES)
SCALE = ObsScale(np.array([0.1, -0.2, 0.05, 0.3]), np.array([0.5, 2.0, 0.1, 1.5]))


def collect(
    *drifts: float, obs_scale: ObsScale | None = None
) -> tuple[list[Segment], list[np.ndarray], NetworkSpec]:
    """Return segments with deaths and time limits, and the observations [T, E, O] that their steps led to.

    The policy of a sampler is that of `make_trainer`, but for its drift.
    """
    segments = []
    led_to = []
    for sampler_id, drift in enumerate(drifts):
        envs = [Telling(TimeLimit(CartPoleEnv(), limit)) for limit in (7, 60)]
        sampler, spec = sampler_of(
            envs,
            num_steps=STEPS,
            seed=3,
            sampler_id=sampler_id,
            hidden_sizes=(16, 8),
            recompute_advantages=True,
        )
        weights = random_weights(spec) + drift * random_weights(spec, 1)
        snapshot = PolicySnapshot(0, weights, obs_scale)
        segments.append(sampler.collect(SegmentRequest(sampler_id, 0), snapshot)[1])
        led_to.append(np.stack([env.led_to for env in envs], axis=1))
    return segments, led_to, spec


def spoil(segments: list[Segment], led_to: list[np.ndarray]) -> None:
    """Let the last segment have a row in the middle and a last row that are not transitions."""
    valid = segments[-1].valid.copy()
    valid[9, 1] = valid[-1, 0] = False
    spoilt = dataclasses.replace(segments[-1], valid=valid)
    segments[-1] = dataclasses.replace(spoilt, successors=led_to[-1][spoilt.followed])


def slow_advantages(
    segment: Segment, values: np.ndarray, after: np.ndarray, traces: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return advantages and returns [T, E] by the definition, from the values of observations and of what followed.

    `traces` are the weights of V-trace.
    """
    advantages = np.zeros(segment.rewards.shape)
    values = np.where(segment.valid, values, 0.0)
    for env in range(segment.rewards.shape[1]):
        following = 0.0
        for t in reversed(range(len(segment.rewards))):
            if not segment.valid[t, env]:
                following = 0.0
                continue
            bootstrap = 0.0 if segment.terminated[t, env] else after[t, env]
            done = segment.terminated[t, env] or segment.truncated[t, env]
            delta = segment.rewards[t, env] + GAMMA * bootstrap - values[t, env]
            following = delta + (0.0 if done else GAMMA * LAMBDA * following)
            advantages[t, env] = following
            following *= traces[t, env]  # the weight of the first step of a sum is left out
    return advantages, traces * advantages + values


def estimated_again(
    model: PPOModel,
    batch: Batch,
    segments: list[Segment],
    led_to: list[np.ndarray],
    *,
    traced: bool = False,
) -> Batch:
    """Return a batch of the segments with values and ratios of `model`, and advantages and returns by definition."""

    def by_step(rows: Tensor) -> np.ndarray:
        return rows.numpy().reshape(STEPS, -1)

    def in_batch(columns: Sequence[np.ndarray]) -> Tensor:
        pairs = zip(segments, columns, strict=True)
        replaced = [dataclasses.replace(segment, logprobs=column) for segment, column in pairs]
        return make_batch(replaced, None, None, DISCOUNTS, batch.sequence_length).logprobs

    def inputs(obs: np.ndarray) -> Tensor:
        return torch.from_numpy(SCALE.normalize(obs.reshape(-1, 4), "float64"))

    estimates = []
    for segment, after in zip(segments, led_to, strict=True):
        scored = model.forward(inputs(segment.obs), torch.from_numpy(segment.actions.flatten()))
        ratios = np.exp(by_step(scored.policy.logprobs) - segment.logprobs)
        ratios = np.where(segment.valid, ratios, 1)
        traces = np.minimum(1, ratios) if traced else np.ones_like(ratios)
        values = by_step(model.values(inputs(segment.obs)))
        following = by_step(model.values(inputs(after)))
        advantages, returns = slow_advantages(segment, values, following, traces)
        estimates.append((values, ratios, advantages, returns))
    names = ("values", "importance", "advantages", "returns")
    columns = map(in_batch, zip(*estimates, strict=True))
    changes: dict[str, Any] = dict(zip(names, columns, strict=True))
    return dataclasses.replace(batch, **changes)


@pytest.mark.proves("RecomputedAdvantages")
@pytest.mark.parametrize("spoilt", [False, True], ids=["", "with invalid rows"])
@pytest.mark.parametrize("length", [1, 4])
def test_a_second_epoch_has_advantages_of_its_first_weights(spoilt: bool, length: int) -> None:
    segments, led_to, spec = collect(0.0, 0.0, obs_scale=SCALE)
    if spoilt:
        spoil(segments, led_to)
    assert any((segment.truncated & ~segment.terminated)[:-1].any() for segment in segments)
    assert any(segment.terminated.any() for segment in segments)
    batch = make_batch(segments, SCALE, None, DISCOUNTS, length)
    twice = make_trainer(spec, update_epochs=2, clip_vloss=True, recompute_advantages=True, **RATES)
    order = np.random.default_rng(0)
    twice.train_on(batch, at_rate(twice, 1e-2), order, experience_of(segments, SCALE))

    by_hand = make_trainer(spec, update_epochs=1, clip_vloss=True)
    order = np.random.default_rng(0)
    by_hand.train_on(batch, at_rate(by_hand, 1e-2), order)
    again = estimated_again(by_hand.model, batch, segments, led_to)
    assert float((again.advantages - batch.advantages).abs().max()) > 1e-2
    renewed = dataclasses.replace(batch, advantages=again.advantages, returns=again.returns)
    by_hand.train_on(renewed, at_rate(by_hand, 1e-2), order)
    np.testing.assert_allclose(twice.weights(), by_hand.weights(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("reuse", [1, 2])
def test_ranks_estimate_advantages_anew_as_one_trainer_does(reuse: int) -> None:
    """With `reuse`, before the first epoch and by V-trace; then half of the rows are of older policies."""
    segments, led_to, spec = collect(0.0, 0.1 * (reuse > 1))
    spoil(segments, led_to)
    options: dict[str, Any] = {"update_epochs": 3, "reuse": reuse, "minibatches": 2, **RATES}
    options["recompute_advantages"] = True
    alone = make_trainer(spec, **options)

    def batch_of(chosen: list[Segment]) -> Batch:
        return dataclasses.replace(make_batch(chosen, None, None, DISCOUNTS), iterations=reuse)

    together = batch_of(segments)
    # The rows of rank 0 first, as OwnOrders counts them; a batch lays segments side by side.
    rows = np.arange(len(together)).reshape(STEPS, 2, -1).swapaxes(0, 1).reshape(-1)
    rank_orders: Any = OwnOrders(
        [np.random.default_rng(rank) for rank in range(2)], reuse * alone.minibatches
    )
    order: Any = SimpleNamespace(permutation=lambda count: rows[rank_orders.permutation(count)])
    expected = alone.train_on(
        together, at_rate(alone, 1e-2), order, experience_of(segments)
    ).figures

    def train(parallel: Parallel) -> tuple[np.ndarray, dict[str, float]]:
        trainer = make_trainer(spec, parallel, **options)
        rank = parallel.rank
        share = [segments[rank]]
        order = np.random.default_rng(rank)
        update = trainer.train_on(
            batch_of(share), at_rate(trainer, 1e-2), order, experience_of(share)
        )
        return trainer.weights(), update.figures

    for weights, figures in Meeting(2).all_do(train):
        np.testing.assert_allclose(weights, alone.weights(), rtol=1e-9, atol=1e-12)
        assert figures == pytest.approx(expected, rel=1e-9)
    assert expected["minibatches"] == 3 * 2 * reuse
    assert reuse == 1 or expected["total_variation"] > 0.01


@pytest.mark.proves("OlderPolicies")
@pytest.mark.parametrize("length", [1, 4])
def test_rows_of_older_policies_get_v_trace_advantages_and_clips_of_their_own(length: int) -> None:
    segments, led_to, spec = collect(0.5, 0.0, obs_scale=SCALE)
    spoil(segments, led_to)
    model = make_trainer(spec).model
    batch = make_batch(segments, SCALE, None, DISCOUNTS, length)
    stage = OlderPolicies(PPO(reuse=4, **RATES))
    prepared = stage.prepare(batch, CurrentNetwork(model, 8, None), experience_of(segments, SCALE))
    expected = estimated_again(model, batch, segments, led_to, traced=True)
    assert batch.weights is not None
    counted = batch.weights > 0
    assert expected.importance is not None
    ratios = expected.importance[counted]
    assert ratios.min() < 0.7
    assert ratios.max() > 1.4
    assert prepared.importance is not None
    np.testing.assert_allclose(prepared.importance[counted], ratios.clamp(max=2), rtol=1e-9)
    np.testing.assert_allclose(prepared.advantages, expected.advantages, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(prepared.returns, expected.returns, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(prepared.values[counted], expected.values[counted], rtol=1e-9)


@pytest.mark.proves("OlderPolicies")
def test_an_update_on_older_policies_clips_each_row_around_its_ratio_and_measures_how_far_it_went() -> (
    None
):
    segments, _, spec = collect(0.2, 0.0)
    batch = make_batch(segments, None, None, DISCOUNTS)
    experience = experience_of(segments)
    options: dict[str, Any] = {"minibatches": 1, "norm_adv": False, "reuse": 3, **RATES}
    once, twice = (make_trainer(spec, update_epochs=epochs, **options) for epochs in (1, 2))
    network = CurrentNetwork(twice.model, len(batch), None)
    prepared = twice.stages[0].prepare(batch, network, experience)
    figures, figures_of_two = (
        trainer.train_on(
            batch, at_rate(trainer, 1e-2), np.random.default_rng(0), experience
        ).figures
        for trainer in (once, twice)
    )
    ratio = (once.model.log_probs([batch]) - batch.logprobs).exp()
    center = (prepared.logprobs - batch.logprobs).exp()
    width = 2 / (3 + 1) * PPO().clip_coef
    advantages = prepared.advantages
    clipped = torch.minimum(torch.maximum(ratio, center - width), center + width)
    loss = torch.max(-advantages * ratio, -advantages * clipped).mean().item()
    assert center.max() < 2
    # of the second epoch; the first one has ratio one
    assert 2 * figures_of_two["policy_loss"] - figures["policy_loss"] == pytest.approx(
        loss, rel=1e-9
    )
    # each row as often as `pi_k` draws it
    change = ratio / center
    kl = (center * (change - 1 - change.log())).mean().item()
    old_kl = -(center * change.log()).mean().item()
    assert 2 * figures_of_two["approx_kl"] == pytest.approx(kl, rel=1e-9)
    assert 2 * figures_of_two["old_approx_kl"] == pytest.approx(old_kl, rel=1e-9)
    moved = (ratio - center).abs()
    assert figures["total_variation"] == pytest.approx(moved.mean().item() / 2, rel=1e-9)
    assert figures["clipfrac"] == pytest.approx((moved > width).double().mean().item())
    assert 0 < figures["clipfrac"] < 1
    assert figures["total_variation"] > width / 2
    assert once.state()[FACTOR] == 1 / CHANGE


def test_a_policy_that_has_moved_beyond_measure_has_moved_and_is_slowed() -> None:
    """A row that the collecting policy had no more chance to draw would count as 0 times infinity."""
    batch = random_batch()
    batch = dataclasses.replace(
        batch, logprobs=batch.logprobs - 1000, importance=torch.zeros(len(batch)).double()
    )
    stage = OlderPolicies(PPO(reuse=2))
    assert stage._moved(batch, CurrentNetwork(make_trainer().model, len(batch), None), 0.2) == (
        0.0,
        0.0,
    )


@pytest.mark.parametrize("norm_adv", [False, True], ids=["raw", "standardized"])
@pytest.mark.parametrize("numbers", [1, 2])
def test_with_reuse_memory_and_deviations_follow_env_steps(norm_adv: bool, numbers: int) -> None:
    """In its first step Adam moves each weight by the learning rate, and keeps 1 / memory of the squared gradient.

    The deviation of a single number is as fast as the other weights.
    """
    bounds = np.ones(numbers, np.float32)
    spec = spec_of(BoxActions(-bounds, bounds))
    moved = []
    squares = []
    for reuse in (1, 3):
        ppo = dataclasses.replace(PLAIN, norm_adv=norm_adv, reuse=reuse, update_epochs=1)
        trainer = PPOTrainer(make_trainer(spec).model, ppo, minibatches=1)
        start = trainer.weights()
        trainer.train_on(random_batch(spec), at_rate(trainer, 1e-2), np.random.default_rng(0))
        moved.append(trainer.weights() - start)
        squares.append(trainer.state()["exp_avg_sq"])
    expected = moved[0].copy()
    deviations = free_deviations(spec)
    if numbers > 1:
        expected[deviations] /= 3
    np.testing.assert_allclose(moved[1], expected, rtol=1e-9)
    assert np.abs(moved[0][deviations]).min() > 0.009
    times = 1 if norm_adv else 3
    np.testing.assert_allclose(squares[0], times * squares[1], rtol=1e-9)


def test_the_learning_rate_follows_the_total_variation_of_an_update() -> None:
    assert adapted_factor(1.0, 0.051, 0.1) == 1 / 1.03
    assert adapted_factor(0.5, 0.024, 0.1) == 0.5 * 1.03
    assert [adapted_factor(1.0, distance, 0.1) for distance in (0.026, 0.049, math.nan)] == [
        1.0
    ] * 3
    assert (adapted_factor(0.01, 1.0, 0.1), adapted_factor(1.0, 0.0, 0.1)) == (0.01, 1.0)


@pytest.mark.proves("shaped_rewards")
def test_rewards_are_limited_or_signed_and_then_scaled() -> None:
    raw = np.array([[-3.0, -0.5], [0.0, 2.5]])
    assert shaped_rewards(raw, PPO(clip_reward=1.0, scale_reward=2.0)).tolist() == [
        [-2, -1],
        [0, 2],
    ]
    assert shaped_rewards(raw, PPO(sign_reward=True, scale_reward=0.5)).tolist() == [
        [-0.5, -0.5],
        [0, 0.5],
    ]
    assert shaped_rewards(raw, PPO(scale_reward=3.0)).tolist() == [[-9, -1.5], [0, 7.5]]
    assert raw.tolist() == [[-3, -0.5], [0, 2.5]]
    assert shaped_rewards(raw, PPO()).tolist() == raw.tolist()


@pytest.mark.parametrize("reward_scale", [None, 4.0])
def test_shaped_rewards_count_as_those_of_an_environment_that_gives_them(
    reward_scale: float | None,
) -> None:
    """But the returns of episodes are those of raw rewards."""
    shaping: dict[str, Any] = {"clip_reward": 2.0, "scale_reward": 0.5}
    reports = []
    batches = []
    for factor, options in ((5, shaping), (1, {})):
        paying = TransformReward(TimeLimit(CartPoleEnv(), 9), partial(mul, factor))
        sampler, spec = sampler_of([paying], num_steps=30, **options)
        policy = PolicySnapshot(0, random_weights(spec))
        report, segment = sampler.collect(SegmentRequest(0, 0), policy)
        reports.append(report)
        batches.append(make_batch([segment], None, reward_scale, PPO(**options)))
    shaped, plain = reports
    assert_same_bytes(shaped.statistics, plain.statistics)
    np.testing.assert_array_equal(shaped.carry.discounted_returns, plain.carry.discounted_returns)
    for name in ("advantages", "returns"):
        np.testing.assert_array_equal(getattr(batches[0], name), getattr(batches[1], name))
    assert shaped.episodes[0].episode_return == 5 * shaped.episodes[0].length
