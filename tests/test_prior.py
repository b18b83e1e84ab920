"""Runs that start from a controller: its actions as those of a policy, the clone, and the distance from it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders import BOX, PLAIN, collect, make_config, parts_of, plan_of, spec_of, tiny_run
from gymnasium.envs.classic_control.pendulum import PendulumEnv
from recorder import Notes
from torch import Tensor
from worlds import priors

import dppo
from dppo.errors import ConfigError, ControllerFault
from dppo.hosts.plans import sampler_plan
from dppo.hosts.sampler_builder import build_sampler
from dppo.hosts.trainer_builder import build_trainer
from dppo.ppo.acting.guided import GuidedExploration
from dppo.ppo.acting.wide import WideExploration
from dppo.ppo.distributions.simple import distribution_of
from dppo.ppo.exchange.phase import ControllerPhase
from dppo.ppo.exchange.records import Episode, PolicySnapshot, Segment
from dppo.ppo.learning import cloning
from dppo.ppo.learning.batch import Batch
from dppo.ppo.learning.cloning import LEARNING_RATE, Cloning, Demonstrations, start_from_deviations
from dppo.ppo.learning.losses import ClippedLoss
from dppo.ppo.learning.model import PPOModel
from dppo.ppo.learning.objective import Outputs
from dppo.ppo.learning.parallel import Parallel
from dppo.ppo.learning.prior import NearClone
from dppo.ppo.learning.stages import CurrentNetwork
from dppo.ppo.learning.states import StatesAlongSegments
from dppo.records.files import checkpoint as checkpoints
from dppo.sac.trainer import SACTrainer
from dppo.spaces.actions import (
    Actions,
    BoxActions,
    DiscreteActions,
    MultiDiscreteActions,
    NestedActions,
)
from dppo.spaces.spaces import Spaces

LOW = np.array([0.0, -2.0], np.float32)
HIGH = np.array([1.0, 2.0], np.float32)


def pendulum(run_dir: Path | None = None, **changes: Any) -> dppo.Config:
    """Return a run of which two of four iterations belong to the controller."""
    settings: dict[str, Any] = {"env_id": "Pendulum-v1", "prior_steps": 2 * 64} | changes
    return tiny_run(run_dir, samplers=2, steps=32, iterations=4, **settings)


@pytest.mark.parametrize(("prior", "first"), [("worlds.priors:Integrator", 4), (None, 0)])
def test_soft_actor_critic_explores_widely_only_after_the_controller(
    prior: str | None, first: int
) -> None:
    """Two iterations belong to the controller, and with the lag two more; sampler 3 is the first to explore."""
    sac: dict[str, Any] = {"algo": "sac", "update_epochs": None, "policy_lag": 2}
    sizes = {"num_samplers": 4, "total_timesteps": 12 * 128}
    steps = 2 * 128 if prior else None
    config = pendulum(prior=prior, prior_steps=steps, **sac | sizes)
    built = build_sampler(sampler_plan(config), 3)
    wide = built.sampler.explorations[0]
    assert isinstance(wide, WideExploration)
    covered = [index for index in range(12) if wide.covers(3, index)]
    built.envs.close()
    assert covered == [*range(first, 12)]


def test_soft_actor_critic_clones_the_controller_in_its_first_iteration(tmp_path: Path) -> None:
    """These are fewer env steps than `learning_starts` asks for where a new policy collects."""
    config = pendulum(
        tmp_path / "run", prior=priors.zeros, prior_steps=64, algo="sac", update_epochs=None
    )
    first, second, *_ = dppo.train(config).metrics
    assert first["losses/gradient_steps"] == 64
    assert math.isnan(first["losses/q_mean"])
    assert math.isfinite(second["losses/q_mean"])


@pytest.mark.parametrize(("prior", "iterations"), [("worlds.priors:Integrator", 2 + 1), (None, 0)])
def test_soft_actor_critic_stays_near_the_clone_for_as_long_as_the_controller_acted(
    prior: str | None, iterations: int
) -> None:
    """With a policy lag of 1, the controller collects for one iteration more."""
    steps = 2 * 64 if prior else None
    sac: dict[str, Any] = {"algo": "sac", "update_epochs": None, "policy_lag": 1}
    config = pendulum(prior=prior, prior_steps=steps, **sac)
    vector = np.dtype((np.float32, (3,)))
    spaces = Spaces(vector, BOX)
    plan = plan_of(config, BOX)
    trainer = build_trainer(plan, spaces)
    assert isinstance(trainer, SACTrainer)
    assert trainer.settings.controller_iterations == iterations


@pytest.mark.parametrize("bounds", ["clip", "rescale", "squash"])
def test_an_action_of_the_environment_is_converted_to_one_of_the_policy_and_back(
    bounds: Any,
) -> None:
    actions = BoxActions(LOW, HIGH, bounds)

    def there_and_back(action: list[float]) -> np.ndarray:
        policy_action = actions.from_env(np.array(action))
        assert np.isfinite(policy_action).all()
        rows = policy_action[None]
        return np.asarray(actions.to_env(rows)[0])

    for inside in ([0.3, -1.0], [0.9, 1.9]):
        np.testing.assert_allclose(there_and_back(inside), inside, rtol=1e-5)
    at_bounds = [1.0, -2.0]
    np.testing.assert_allclose(there_and_back(at_bounds), at_bounds, atol=0.05)


def test_choices_and_nested_actions_are_converted_back() -> None:
    choice = DiscreteActions(3, start=5)
    assert choice.from_env(6) == 1

    two_choices = MultiDiscreteActions((2, 3), (0, 1), (2,), "int64")
    chosen = np.array([1, 3])
    assert two_choices.from_env(chosen).tolist() == [1, 2]

    arm = BoxActions(LOW, HIGH)
    nested = NestedActions((arm, choice), ("arm", "gear"))
    action = {"arm": LOW, "gear": 7}
    assert nested.from_env(action).tolist() == [0, -2, 2]
    assert nested.half_widths().tolist() == [0.5, 2, 1]


@pytest.mark.parametrize(
    "actions",
    [
        BOX,
        DiscreteActions(3),
        MultiDiscreteActions((2, 3), (0, 0), (2,), "int64"),
        NestedActions((BOX, DiscreteActions(3)), None),
    ],
    ids=["box", "choice", "choices", "nested"],
)
def test_the_head_around_an_action_has_it_as_mode_and_makes_its_targets_likeliest(
    actions: Actions,
) -> None:
    distribution = distribution_of(actions)
    generator = np.random.default_rng(0)
    log_std = np.full(actions.width, -1.0)
    random = generator.normal(size=(50, distribution.head_size))
    intended = distribution.mode(random)
    head = distribution.head_at(intended, log_std)
    np.testing.assert_array_equal(distribution.mode(head), intended)

    sampled = distribution.sample(head, distribution.noise(generator, 1, 50, "float64")[0])
    assert (sampled == intended).mean() < 1
    first, second = distribution.targets(head, sampled)
    if actions.choices is not None:
        return  # both actions of a choice are likely, but not by the probabilities of the head

    def likelihood(head: np.ndarray) -> float:
        logprob = distribution.log_prob(head, first) + distribution.log_prob(head, second)
        return float(logprob.mean())

    for _ in range(20):
        other = head + 0.3 * generator.normal(size=head.shape)
        assert likelihood(other) < likelihood(head)


def batch_of(*, returns: Tensor, **columns: Any) -> Batch:
    """Return a batch whose other columns are zero."""
    zeros = torch.zeros_like(returns)
    empty = dict.fromkeys(("actions", "logprobs", "values", "advantages"), zeros)
    index = torch.arange(len(returns))
    return Batch(**{"table": zeros[:, None], "index": index, "returns": returns} | empty | columns)


DEVIATIONS = np.full(2, -1.0)
"""Logarithms of the standard deviations around the actions of a controller."""


class FixedReturns(Cloning):
    """Learns given returns, so that no segments are needed."""

    def _with_returns(self, rows: Demonstrations, *_: Any) -> Demonstrations:
        return rows


def demonstrations(model: PPOModel, obs: np.ndarray, intended: np.ndarray) -> Demonstrations:
    """Return the rows of a controller that intends these actions, with a return that is linear in `obs`."""
    batch = batch_of(
        table=torch.from_numpy(obs),
        actions=torch.from_numpy(intended),
        returns=torch.from_numpy(0.5 * obs[:, 0] + 0.3),
    )
    actions_of_one_env = intended[:, None]
    segment = SimpleNamespace(intended=actions_of_one_env, actions=actions_of_one_env)
    experience: Any = SimpleNamespace(segments=[segment])
    return Demonstrations.of(experience, batch, model, DEVIATIONS)


def test_cloning_is_the_regression_of_the_controllers_actions() -> None:
    """A policy that is linear in one number: its clone is the line through the controller's actions."""
    model = PPOModel(spec_of(BOX, obs_size=1, hidden_sizes=()), 1)
    start_from_deviations(model, DEVIATIONS)
    obs = np.random.default_rng(0).normal(size=(500, 1))
    intended = np.concatenate([0.5 * obs - 0.2, 0.1 - 0.3 * obs], axis=1)
    rows = demonstrations(model, obs, intended)

    fitting = FixedReturns(model, PLAIN, Parallel())
    experience: Any = None
    network = CurrentNetwork(model, 500, None)
    figures = fitting.fit(rows, experience, network, np.random.default_rng(1))
    assert figures.kl == pytest.approx(0, abs=1e-3)
    assert figures.explained_variance == pytest.approx(1, abs=1e-3)

    fitted, values, _ = model.network.forward(torch.from_numpy(obs))
    means, deviations = fitted.detach().tensor_split(2, dim=1)
    design = np.c_[obs, np.ones(500)]
    coefficients = np.linalg.lstsq(design, intended, rcond=None)[0]
    np.testing.assert_allclose(means, design @ coefficients, atol=0.02)
    np.testing.assert_allclose(deviations, -1, atol=0.05)
    np.testing.assert_allclose(values.detach(), rows.batch.returns, atol=0.05)


STATES = ("states", "successor_states")


def without_states(segment: Segment) -> Segment:
    zeros = {name: np.zeros_like(getattr(segment, name)) for name in STATES}
    return replace(segment, **zeros)


def test_states_of_a_memory_are_computed_again_as_they_were_collected() -> None:
    short: dict[str, Any] = {"env_kwargs": {"max_episode_steps": 20}}
    memory: dict[str, Any] = {"memory": "lstm", "memory_size": 8}
    samplers, trainer = parts_of(pendulum(prior="worlds.priors:Integrator", **short | memory))
    weights = trainer.weights()
    _, segments = collect(samplers, PolicySnapshot(0, weights))

    forgetful = [without_states(segment) for segment in segments]
    along = StatesAlongSegments(trainer.spec, forgetful, None)
    again = along.by(weights, trainer.sequence_length)
    for segment, computed in zip(segments, again, strict=True):
        assert segment.states is not None
        assert np.abs(segment.states[1:]).min() > 0
        for name in STATES:
            states = getattr(computed, name)
            np.testing.assert_allclose(states, getattr(segment, name), rtol=1e-5, atol=1e-7)
    for built in samplers:
        built.envs.close()


@pytest.mark.slow
def test_a_clone_with_memory_follows_a_controller_that_counts_steps(tmp_path: Path) -> None:
    """Without memory, a policy sees nothing of the steps since the reset, on which these actions depend."""
    iterations = 12  # a third of these env steps do not suffice for a network with memory
    sizes: dict[str, Any] = {
        "num_steps": 128,
        "prior_steps": iterations * 256,
        "total_timesteps": (iterations + 1) * 256,
    }
    distances = []
    for memory in ("none", "lstm"):
        config = pendulum(tmp_path / memory, prior=priors.Integrator, memory=memory, **sizes)
        rows = dppo.train(config).metrics
        distances.append(rows[iterations - 1]["losses/clone_kl"])
    assert distances[1] < 0.8 * distances[0]


def test_the_distance_from_the_clone_adds_its_own_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, values, entropy, old_logprobs = torch.rand(
        4, 8, generator=generator, dtype=torch.float64
    )
    clone_logprobs_now = entropy
    outputs = Outputs(logprobs, values, entropy)
    batch = batch_of(
        logprobs=old_logprobs,
        advantages=values - 0.5,
        returns=logprobs,
        clone_logprobs=clone_logprobs_now,
        clone_coef=0.7,
    )
    alone, _ = ClippedLoss(PLAIN).loss(outputs, batch)
    near, figures = NearClone(ClippedLoss(PLAIN)).loss(outputs, batch)

    log_ratio = logprobs.clone().requires_grad_()
    from_clone = log_ratio + old_logprobs - clone_logprobs_now
    distance = 0.5 * from_clone.square().mean()
    (0.7 * distance).backward()
    torch.testing.assert_close(near.log_ratio - alone.log_ratio, log_ratio.grad)
    torch.testing.assert_close(figures["clone_distance"], distance.detach())


def test_the_noise_is_a_share_of_the_range() -> None:
    phase = ControllerPhase.of(BoxActions(LOW, HIGH), 3, 0.2)
    np.testing.assert_allclose(np.exp(phase.log_std), [0.1, 0.4])


def test_episodes_that_the_controller_began_are_not_the_policys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are neither in the mean return, nor in the score by which the best checkpoint is chosen."""
    monkeypatch.setattr(cloning, "EPOCHS", 2)
    monkeypatch.setattr(PendulumEnv, "step", ended_by_the_clock)
    for lag in (0, 1):
        run = tmp_path / f"run{lag}"
        config = pendulum(run, prior=priors.Integrator, policy_lag=lag, record_episodes="all")
        collected = config.collected_by_prior
        rows = dppo.train(config).metrics
        controller_rows = rows[:collected]
        assert all(row["charts/episodes"] > 0 for row in controller_rows)
        assert not any("charts/episodic_return" in row for row in controller_rows)
        later = rows[collected]
        ended = later["charts/episodes"] - controller_rows[-1]["charts/episodes"]
        # one of each sampler was begun by the controller
        assert later["charts/recent_episodes"] == ended - 2
        recorded = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
        ours = [
            line["episode_return"]
            for line in recorded
            if line["iteration"] <= later["iteration"] and not line.get("explored")
        ]
        assert len(ours) == later["charts/recent_episodes"]
        assert fmean(ours) == pytest.approx(later["charts/episodic_return"])


def ended_by_the_clock(env: Any, action: Any) -> Any:
    """End each episode after its fifth step."""
    env.steps = getattr(env, "steps", 0) + 1
    return np.zeros(3, np.float32), -1.0, env.steps % 5 == 0, False, {}


@pytest.mark.parametrize(
    ("length", "end", "index", "is_controllers"),
    [
        (3, 8, 2, False),
        (8, 8, 2, False),
        (9, 8, 2, True),  # its first step was the last one of segment 1
        (3, 8, 1, True),
        (1, 1, 2, False),
        (30, 8, 4, True),
        (24, 8, 4, False),
    ],
)
def test_an_episode_is_the_controllers_if_it_began_in_its_segments(
    length: int, end: int, index: int, is_controllers: bool
) -> None:
    phase = ControllerPhase.of(BoxActions(LOW, HIGH), 1, 0.2)
    exploration = GuidedExploration(phase, segments=2)
    episode = Episode(0, 0, 1.0, length, None, end=end)
    assert exploration.covers_episode(0, episode, episode.segments(index, 8)) == is_controllers


def test_the_controller_collects_at_first_and_its_rows_are_dropped_after_the_clone(
    tmp_path: Path,
) -> None:
    files: dict[str, Any] = {"checkpoint_interval_s": 0, "keep_checkpoints": 20}
    result = dppo.train(pendulum(tmp_path / "run", prior=priors.Integrator, **files))
    collecting, cloning_row, after = result.metrics[:3]
    assert collecting["charts/learning_rate"] == 0
    assert cloning_row["charts/learning_rate"] == LEARNING_RATE
    assert "losses/clone_kl" in cloning_row
    assert "losses/policy_loss" not in cloning_row
    assert after["losses/clone_distance"] >= 0

    def names_at(iteration: int) -> set[str]:
        path = result.run_dir / "checkpoints" / f"iter_{iteration:06d}.safetensors"
        return set(checkpoints.load(path).arrays["optimizer"])

    assert "kept.0.1.intended" in names_at(1)
    assert "clone.weights" in names_at(2)
    later = names_at(2) | names_at(4)
    assert not any(name.startswith("kept.") for name in later)


@pytest.mark.parametrize(("prior", "rate"), [(priors.Integrator, 1e-3), (None, 1e-2)])
def test_a_rate_that_adapts_is_not_raised_after_a_clone(prior: Any, rate: float) -> None:
    """Raised rates cost clones of good controllers their return."""
    steps = 2 * 64 if prior else None
    adaptive: dict[str, Any] = {"learning_rate": 1e-3, "desired_kl": 1e6, "minibatch_size": 8}
    result = dppo.train(pendulum(prior=prior, prior_steps=steps, **adaptive))
    assert result.metrics[-1]["charts/learning_rate"] == rate


@pytest.mark.parametrize(
    ("controller", "words"),
    [
        ("worlds.priors:outside", "outside its bounds from -2.0 to 2.0"),
        ("worlds.priors:missing", "has no missing"),
    ],
)
def test_an_invalid_controller_is_named(controller: str, words: str, tmp_path: Path) -> None:
    config = pendulum(tmp_path / "run", prior=controller)
    with pytest.raises((ConfigError, ControllerFault), match=f"^prior={controller}") as refused:
        dppo.train(config)
    assert words in str(refused.value)


def test_a_branch_leaves_the_controller_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloning, "EPOCHS", 20)
    prior = {"prior": "worlds.priors:zeros"}
    first = dppo.train(pendulum(tmp_path / "first", **prior))
    with pytest.raises(ConfigError, match="Leave `prior` out, or start a new run"):
        dppo.train(pendulum(tmp_path / "second", **prior), resume=first.run_dir, branch=True)
    without = pendulum(tmp_path / "third", prior_steps=None)
    again = dppo.train(without, resume=first.run_dir, branch=True)
    assert "losses/clone_kl" not in again.metrics[1]
    assert "losses/clone_distance" not in again.metrics[0]


def frozen_counts(result: dppo.Result) -> list[float]:
    """Return how many observations and returns the statistics of a run are made of."""
    normalizer = checkpoints.load(result.checkpoint).arrays["normalizer"]
    return [float(normalizer["obs.count"]), float(normalizer["returns.count"])]


def test_a_branch_keeps_the_statistics_that_its_origin_has_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloning, "EPOCHS", 20)
    first = dppo.train(
        pendulum(tmp_path / "first", prior="worlds.priors:zeros", keep_checkpoints=9)
    )
    controller_rows = [128.0, 128.0]
    assert frozen_counts(first) == controller_rows

    def branch_of(origin: Path, name: str, **changes: Any) -> dppo.Result:
        config = pendulum(tmp_path / name, prior_steps=None, **changes)
        return dppo.train(config, resume=origin, branch=True)

    with Notes() as notes:
        second = branch_of(first.run_dir, "second")
    assert frozen_counts(second) == controller_rows
    assert any("stay as they are from the start, as in the run" in note for note in notes.texts)
    third = branch_of(second.run_dir, "third", gamma=0.9)
    assert frozen_counts(third) == controller_rows
    longer = pendulum(third.run_dir, prior_steps=None, gamma=0.9, total_timesteps=6 * 64)
    assert frozen_counts(dppo.train(longer, resume=third.run_dir)) == controller_rows

    moving = branch_of(first.run_dir, "moving", freeze_norm_after=64)
    assert frozen_counts(moving) == [192.0, 192.0]
    within = branch_of(first.run_dir / "checkpoints" / "iter_000000.safetensors", "within")
    assert frozen_counts(within) == controller_rows


@pytest.mark.slow
def test_the_first_evaluation_is_that_of_the_clone_and_as_good_as_the_controller(
    tmp_path: Path,
) -> None:
    """The bar: at least 0.95 of what the controller gains over no torque."""
    config = {
        "env_id": "Pendulum-v1",
        "prior": priors.swing_up,
        "total_timesteps": 41_000,
        "eval_every": 2048,
        "run_dir": tmp_path / "run",
        "progress": "off",
    }
    result = dppo.train(make_config(config))
    first = next(row for row in result.metrics if "eval/episodic_return" in row)
    assert first["eval/global_step"] == 4608

    def return_of(controller: Any) -> float:
        return dppo.evaluate(controller, env="Pendulum-v1", episodes=20, seed=1).mean_return

    still = return_of(priors.zeros)
    gain = return_of(priors.swing_up) - still
    assert first["eval/episodic_return"] >= still + 0.95 * gain
