"""Options of PPO that are off by default, each against a slow twin: KL-adapted learning rate, annealing, advantages
that are estimated again, and rewards that are limited and scaled.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from operator import mul
from types import SimpleNamespace
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from builders import BOX, PLAIN, assert_same_bytes, random_weights, sampler_of, spec_of
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.wrappers import TimeLimit, TransformReward
from meetings import Meeting, OwnOrders
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from torch import Tensor, from_numpy
from updates import ACTIONS, assert_equals_twin, experience_of, make_trainer, random_batch, train

from dppo.config import PPO
from dppo.config.parts import annealed
from dppo.ppo.exchange.records import PolicySnapshot, Segment, SegmentReport, SegmentRequest, Update
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
    rate = 1e-3
    desired = 0.01
    most = 1e-2
    lowered = rate / 1.5
    raised = rate * 1.5
    assert adapted_rate(rate, 0.021, desired, most) == lowered
    assert adapted_rate(rate, math.inf, desired, most) == lowered
    assert adapted_rate(rate, 0.0049, desired, most) == raised
    for kl in (0.005, 0.01, 0.02, math.nan):
        assert adapted_rate(rate, kl, desired, most) == rate
    assert adapted_rate(1.2e-5, 1.0, desired, most) == 1e-5
    assert adapted_rate(9e-3, 0.0, desired, most) == 1e-2
    assert adapted_rate(rate, 0.0, desired, rate) == rate


@pytest.mark.proves("adapted_rate")
@ACTIONS
def test_an_update_with_an_adapted_learning_rate_equals_its_slow_twin(actions: Actions) -> None:
    spec = spec_of(actions)
    trainer = make_trainer(spec, learning_rate=1e-4, desired_kl=0.002, update_epochs=6)
    batch = random_batch(spec, drift=0.0)
    _, rates = assert_equals_twin(trainer, batch)
    changes = [late - early for early, late in pairwise(rates)]
    assert max(changes) > 0
    assert min(changes) < 0


def test_a_state_without_an_adapted_learning_rate_begins_with_that_of_the_settings() -> None:
    plain = make_trainer()
    adaptive = make_trainer(learning_rate=7e-4, desired_kl=0.01)
    assert ADAPTED not in plain.state()
    adaptive.load(plain.weights(), plain.state())
    assert adaptive.state()[ADAPTED] == 7e-4
    plain.load(adaptive.weights(), adaptive.state())


@pytest.mark.parametrize(
    ("anneal", "share"),
    [
        pytest.param(True, 0.0, id="at the start"),
        pytest.param(True, 0.25, id="after a quarter"),
        pytest.param(True, 0.9, id="near the end"),
        pytest.param(False, 0.7, id="not annealed"),
    ],
)
def test_an_annealed_update_is_one_with_the_smaller_coefficients(
    anneal: bool, share: float
) -> None:
    spec = spec_of(BOX)
    batch = random_batch(spec)
    remaining = 1 - share if anneal else 1

    def updated(**options: Any) -> tuple[PPOTrainer, Update]:
        trainer = make_trainer(spec, clip_vloss=True, **options)
        settings = annealed(trainer.ppo, share)
        update = trainer.train_on(batch, settings, default_rng(3))
        return trainer, update

    annealing = {"anneal_clip": anneal, "anneal_ent": anneal}
    falling, update = updated(clip_coef=0.3, ent_coef=0.1, **annealing)
    still, expected = updated(clip_coef=0.3 * remaining, ent_coef=0.1 * remaining)
    assert update == expected
    assert_array_equal(falling.weights(), still.weights())


class Telling(gym.Wrapper[Any, Any, Any, Any]):
    """Record the observation that each step led to, before any reset."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.led_to: list[np.ndarray] = []

    def step(self, action: Any) -> Any:
        answer = self.env.step(action)
        obs = np.array(answer[0], np.float32)
        self.led_to.append(obs)
        return answer


assert_close = partial(assert_allclose, rtol=1e-9, atol=1e-12)
approx = partial(pytest.approx, rel=1e-9)
STEPS = 48
GAMMA = 0.9
LAMBDA = 0.8
RATES: dict[str, Any] = {"gamma": GAMMA, "gae_lambda": LAMBDA}
DISCOUNTS = PPO(**RATES)
MEAN = np.array([0.1, -0.2, 0.05, 0.3])
STD = np.array([0.5, 2.0, 0.1, 1.5])
SCALE = ObsScale(MEAN, STD)


class Collected(NamedTuple):
    """Segments with deaths and time limits, and the observations [T, E, O] that their steps led to."""

    segments: list[Segment]
    led_to: list[np.ndarray]
    spec: NetworkSpec

    def spoil(self) -> None:
        """Let the last segment have a row in the middle and a last row that are not transitions."""
        last = self.segments[-1]
        valid = last.valid.copy()
        valid[9, 1] = False
        valid[-1, 0] = False
        spoilt = replace(last, valid=valid)
        successors = self.led_to[-1][spoilt.followed]
        self.segments[-1] = replace(spoilt, successors=successors)


def collect(*drifts: float, obs_scale: ObsScale | None = None) -> Collected:
    """Return a segment of each sampler, whose policy is that of `make_trainer`, but for its drift."""
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
        policy = PolicySnapshot(0, weights, obs_scale)
        _, segment = sampler.collect(SegmentRequest(sampler_id, 0), policy)
        segments.append(segment)
        led_to.append(np.stack([env.led_to for env in envs], axis=1))

    return Collected(segments, led_to, spec)


def batch_of(segments: list[Segment], obs_scale: ObsScale | None = None, length: int = 1) -> Batch:
    return make_batch(segments, obs_scale, None, DISCOUNTS, length)


def slow_advantages(
    segment: Segment, values: np.ndarray, after: np.ndarray, traces: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return advantages and returns [T, E] by the definition, from the values of observations and of what followed.

    `traces` are the weights of V-trace.
    """
    steps, envs = segment.rewards.shape
    advantages = np.zeros((steps, envs))
    values = np.where(segment.valid, values, 0.0)
    after = np.where(segment.terminated, 0.0, after)
    done = segment.terminated | segment.truncated

    for env in range(envs):
        following = 0.0
        for t in reversed(range(steps)):
            if not segment.valid[t, env]:
                following = 0.0
                continue
            if done[t, env]:
                following = 0.0
            target = segment.rewards[t, env] + GAMMA * after[t, env]
            delta = target - values[t, env]
            following = delta + GAMMA * LAMBDA * following
            advantages[t, env] = following
            following *= traces[t, env]  # the weight of the first step of a sum is left out

    return advantages, traces * advantages + values


def inputs(obs: np.ndarray) -> Tensor:
    rows = obs.reshape(-1, 4)
    return from_numpy(SCALE.normalize(rows, "float64"))


def by_step(rows: Tensor) -> np.ndarray:
    return rows.numpy().reshape(STEPS, -1)


class Estimates(NamedTuple):
    """Arrays [T, E]."""

    values: np.ndarray
    importance: np.ndarray
    advantages: np.ndarray
    returns: np.ndarray


def estimates_of(
    model: PPOModel, segment: Segment, after: np.ndarray, *, traced: bool
) -> Estimates:
    """Return values and ratios of `model`, and advantages and returns by the definition."""
    obs = inputs(segment.obs)
    actions = from_numpy(segment.actions.flatten())
    scored = model.forward(obs, actions)
    logprobs = by_step(scored.policy.logprobs)
    ratios = np.exp(logprobs - segment.logprobs)
    ratios = np.where(segment.valid, ratios, 1)
    traces = np.ones_like(ratios)
    if traced:
        traces = np.minimum(1, ratios)
    values = by_step(model.values(obs))
    following = by_step(model.values(inputs(after)))
    advantages, returns = slow_advantages(segment, values, following, traces)
    return Estimates(values, ratios, advantages, returns)


def estimated_again(
    model: PPOModel, batch: Batch, collected: Collected, *, traced: bool = False
) -> Batch:
    """Return a batch of the segments with the estimates of `model`."""
    estimates = []
    for segment, after in zip(collected.segments, collected.led_to, strict=True):
        estimates.append(estimates_of(model, segment, after, traced=traced))

    def in_batch(name: str) -> Tensor:
        """Return a column in the order of the batch, as if it were that of the log-probabilities."""
        replaced = []
        for segment, estimate in zip(collected.segments, estimates, strict=True):
            column = getattr(estimate, name)
            replaced.append(replace(segment, logprobs=column))
        return batch_of(replaced, length=batch.sequence_length).logprobs

    columns: dict[str, Any] = {name: in_batch(name) for name in Estimates._fields}
    return replace(batch, **columns)


@pytest.mark.proves("RecomputedAdvantages")
@pytest.mark.parametrize("spoilt", [False, True], ids=["", "with invalid rows"])
@pytest.mark.parametrize("length", [1, 4])
def test_a_second_epoch_has_advantages_of_its_first_weights(spoilt: bool, length: int) -> None:
    collected = collect(0.0, 0.0, obs_scale=SCALE)
    if spoilt:
        collected.spoil()
    segments = collected.segments
    limits = [segment.truncated & ~segment.terminated for segment in segments]
    assert any(limit[:-1].any() for limit in limits)
    assert any(segment.terminated.any() for segment in segments)

    rate = 5e-3
    batch = batch_of(segments, SCALE, length)
    recomputing: dict[str, Any] = {"recompute_advantages": True, **RATES}
    twice = make_trainer(collected.spec, update_epochs=2, clip_vloss=True, **recomputing)
    experience = experience_of(segments, SCALE)
    train(twice, batch, rate, experience)

    order = default_rng(0)
    by_hand = make_trainer(collected.spec, update_epochs=1, clip_vloss=True)
    train(by_hand, batch, rate, order=order)
    again = estimated_again(by_hand.model, batch, collected)
    change = again.advantages - batch.advantages
    assert float(change.abs().max()) > 1e-2

    # new returns have an effect where values are not beyond the clip around the old ones
    moved = (again.values - batch.values).abs()
    is_free = moved <= by_hand.ppo.clip_coef
    assert 0 < is_free.double().mean() < 1

    renewed = replace(batch, advantages=again.advantages, returns=again.returns)
    train(by_hand, renewed, rate, order=order)
    expected = by_hand.weights()
    assert_allclose(twice.weights(), expected, rtol=1e-9, atol=1e-11)


def rank_order(rows_of_all: int, minibatches: int) -> Any:
    """Return an order that draws for two ranks, each from its own generator, in a batch of both."""
    # The rows of rank 0 first, as OwnOrders counts them; a batch lays segments side by side.
    by_rank = np.arange(rows_of_all).reshape(STEPS, 2, -1).swapaxes(0, 1)
    rows = by_rank.flatten()
    generators = [default_rng(rank) for rank in range(2)]
    orders = OwnOrders(generators, minibatches)
    return SimpleNamespace(permutation=lambda count: rows[orders.permutation(count)])


@pytest.mark.parametrize("reuse", [1, 2])
def test_ranks_estimate_advantages_anew_as_one_trainer_does(reuse: int) -> None:
    """With `reuse`, before the first epoch and by V-trace; then half of the rows are of older policies."""
    drift = 0.1 if reuse > 1 else 0.0
    collected = collect(0.0, drift)
    collected.spoil()
    segments = collected.segments
    options: dict[str, Any] = {
        "update_epochs": 3,
        "reuse": reuse,
        "minibatches": 2,
        "recompute_advantages": True,
        **RATES,
    }

    def batch_to_reuse(chosen: list[Segment]) -> Batch:
        return replace(batch_of(chosen), iterations=reuse)

    alone = make_trainer(collected.spec, **options)
    together = batch_to_reuse(segments)
    order = rank_order(len(together), reuse * alone.minibatches)
    expected = train(alone, together, 1e-2, experience_of(segments), order=order)

    def train_share(parallel: Parallel) -> tuple[np.ndarray, dict[str, float]]:
        rank = parallel.rank
        share = [segments[rank]]
        trainer = make_trainer(collected.spec, parallel, **options)
        figures = train(trainer, batch_to_reuse(share), 1e-2, experience_of(share), seed=rank)
        return trainer.weights(), figures

    for weights, figures in Meeting(2).all_do(train_share):
        assert_close(weights, alone.weights())
        assert figures == pytest.approx(expected, rel=1e-9)
    assert expected["minibatches"] == 3 * 2 * reuse
    assert reuse == 1 or expected["total_variation"] > 0.01


@pytest.mark.proves("OlderPolicies")
@pytest.mark.parametrize("length", [1, 4])
def test_rows_of_older_policies_get_v_trace_advantages_and_clips_of_their_own(length: int) -> None:
    collected = collect(0.5, 0.0, obs_scale=SCALE)
    collected.spoil()
    model = make_trainer(collected.spec).model
    batch = batch_of(collected.segments, SCALE, length)
    stage = OlderPolicies(PPO(reuse=4, **RATES))
    network = CurrentNetwork(model, 8, None)
    prepared = stage.prepare(batch, network, experience_of(collected.segments, SCALE))
    expected = estimated_again(model, batch, collected, traced=True)

    assert batch.weights is not None

    counted = batch.weights > 0
    assert expected.importance is not None

    ratios = expected.importance[counted]
    assert ratios.min() < 0.7
    assert ratios.max() > 1.4
    assert prepared.importance is not None

    limited = ratios.clamp(max=2)
    assert_allclose(prepared.importance[counted], limited, rtol=1e-9)
    assert_close(prepared.advantages, expected.advantages)
    assert_close(prepared.returns, expected.returns)

    values = expected.values[counted]
    assert_allclose(prepared.values[counted], values, rtol=1e-9)


class Reused(NamedTuple):
    """Two trainers that reuse segments, after one and after two epochs of the same update."""

    batch: Batch
    prepared: Batch
    once: PPOTrainer
    figures: dict[str, float]
    means: dict[str, float]
    """Of both epochs."""

    def sum_of_epochs(self, name: str) -> float:
        return 2 * self.means[name]

    def ratio(self, logprobs: Tensor) -> Tensor:
        """Return the ratio to the policies that collected."""
        return (logprobs - self.batch.logprobs).exp()


def reused() -> Reused:
    segments, _, spec = collect(0.2, 0.0)
    batch = batch_of(segments)
    experience = experience_of(segments)
    options: dict[str, Any] = {"minibatches": 1, "norm_adv": False, "reuse": 3, **RATES}
    once = make_trainer(spec, update_epochs=1, **options)
    twice = make_trainer(spec, update_epochs=2, **options)
    network = CurrentNetwork(twice.model, len(batch), None)
    [stage] = twice.stages
    prepared = stage.prepare(batch, network, experience)
    figures = train(once, batch, 1e-2, experience)
    means = train(twice, batch, 1e-2, experience)
    return Reused(batch, prepared, once, figures, means)


@pytest.mark.proves("OlderPolicies")
def test_an_update_on_older_policies_clips_each_row_around_its_ratio_and_measures_how_far_it_went() -> (
    None
):
    update = reused()
    figures = update.figures
    logprobs = update.once.model.log_probs([update.batch])
    ratio = update.ratio(logprobs)
    center = update.ratio(update.prepared.logprobs)
    assert center.max() < 2

    width = 2 / (3 + 1) * PPO().clip_coef
    clipped = ratio.clamp(center - width, center + width)
    advantages = update.prepared.advantages
    losses = torch.max(-advantages * ratio, -advantages * clipped)
    first_loss = figures["policy_loss"]
    second_loss = update.sum_of_epochs("policy_loss") - first_loss
    assert second_loss == approx(losses.mean().item())

    # The KL of the first epoch, with ratio one, is zero; each row counts as often as `pi_k` draws it.
    change = ratio / center
    old_kl = -(center * change.log()).mean()
    kl = old_kl + (center * (change - 1)).mean()
    assert update.sum_of_epochs("approx_kl") == approx(kl.item())
    assert update.sum_of_epochs("old_approx_kl") == approx(old_kl.item())

    moved = (ratio - center).abs()
    distance = moved.mean().item() / 2
    is_outside = (moved > width).double()
    assert figures["total_variation"] == approx(distance)
    assert figures["total_variation"] > width / 2
    assert figures["clipfrac"] == approx(is_outside.mean().item())
    assert 0 < figures["clipfrac"] < 1
    assert update.once.state()[FACTOR] == 1 / CHANGE


def test_a_policy_that_has_moved_beyond_measure_has_moved_and_is_slowed() -> None:
    """A row that the collecting policy had no more chance to draw would count as 0 times infinity."""
    batch = random_batch()
    logprobs = batch.logprobs - 1000
    importance = torch.zeros_like(logprobs)
    batch = replace(batch, logprobs=logprobs, importance=importance)
    network = CurrentNetwork(make_trainer().model, len(batch), None)
    stage = OlderPolicies(PPO(reuse=2))
    assert stage._moved(batch, network, 0.2) == (0.0, 0.0)


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
        ppo = replace(PLAIN, norm_adv=norm_adv, reuse=reuse, update_epochs=1)
        trainer = PPOTrainer(make_trainer(spec).model, ppo, minibatches=1)
        start = trainer.weights()
        train(trainer, random_batch(spec), 1e-2)
        moved.append(trainer.weights() - start)
        squares.append(trainer.state()["exp_avg_sq"])

    plain_moved, reused_moved = moved
    plain_squares, reused_squares = squares

    expected = plain_moved.copy()
    deviations = free_deviations(spec)
    if numbers > 1:
        expected[deviations] /= 3
    assert_allclose(reused_moved, expected, rtol=1e-9)

    moved_deviations = plain_moved[deviations]
    assert np.abs(moved_deviations).min() > 0.009

    times = 1 if norm_adv else 3
    assert_allclose(plain_squares, times * reused_squares, rtol=1e-9)


def test_the_learning_rate_follows_the_total_variation_of_an_update() -> None:
    clip = 0.1
    assert adapted_factor(1.0, 0.051, clip) == 1 / 1.03
    assert adapted_factor(0.5, 0.024, clip) == 0.5 * 1.03
    for distance in (0.026, 0.049, math.nan):
        assert adapted_factor(1.0, distance, clip) == 1.0
    assert adapted_factor(0.01, 1.0, clip) == 0.01
    assert adapted_factor(1.0, 0.0, clip) == 1.0


@pytest.mark.proves("shaped_rewards")
def test_rewards_are_limited_or_signed_and_then_scaled() -> None:
    raw = [-3.0, -0.5, 0.0, 2.5]
    rewards = np.array(raw).reshape(2, 2)

    def shaped(**options: Any) -> list[float]:
        ppo = PPO(**options)
        column = shaped_rewards(rewards, ppo)
        assert column.shape == (2, 2)
        return column.flatten().tolist()

    limited = shaped(clip_reward=1.0, scale_reward=2.0)
    assert limited == [-2, -1, 0, 2]

    signed = shaped(sign_reward=True, scale_reward=0.5)
    assert signed == [-0.5, -0.5, 0, 0.5]

    scaled = shaped(scale_reward=3.0)
    assert scaled == [-9, -1.5, 0, 7.5]

    assert shaped() == raw
    assert rewards.flatten().tolist() == raw


@pytest.mark.parametrize("reward_scale", [None, 4.0])
def test_shaped_rewards_count_as_those_of_an_environment_that_gives_them(
    reward_scale: float | None,
) -> None:
    """But the returns of episodes are those of raw rewards."""

    def collected(reward: int, **options: Any) -> tuple[SegmentReport, Batch]:
        limited = TimeLimit(CartPoleEnv(), 9)
        paying = TransformReward(limited, partial(mul, reward))
        sampler, spec = sampler_of([paying], num_steps=30, **options)
        policy = PolicySnapshot(0, random_weights(spec))
        report, segment = sampler.collect(SegmentRequest(0, 0), policy)
        return report, make_batch([segment], None, reward_scale, PPO(**options))

    shaped, shaped_batch = collected(5, clip_reward=2.0, scale_reward=0.5)
    plain, plain_batch = collected(1)
    assert_same_bytes(shaped.statistics, plain.statistics)
    assert_array_equal(shaped.carry.discounted_returns, plain.carry.discounted_returns)
    assert_array_equal(shaped_batch.advantages, plain_batch.advantages)
    assert_array_equal(shaped_batch.returns, plain_batch.returns)

    episode = shaped.episodes[0]
    assert episode.episode_return == 5 * episode.length
