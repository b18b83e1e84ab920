"""Updates of soft actor-critic: the formulas, and what must not change them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from meetings import Meeting
from numpy.testing import assert_array_equal
from plain import PlainSAC, Row, World, experience_of, flat, plain_critics
from remedies import executes
from torch import Tensor, nn
from torch.testing import assert_close

from dppo.config.parts import Network
from dppo.errors import TrainingDiverged
from dppo.ppo.exchange.records import Experience, Segment, Update
from dppo.ppo.exchange.scales import ObsScale
from dppo.ppo.learning.parallel import Parallel
from dppo.ppo.networks.choice import choose_network
from dppo.ppo.networks.network import NetworkSpec
from dppo.sac.settings import SACSettings
from dppo.sac.trainer import SACTrainer
from dppo.spaces.actions import BoxActions
from dppo.spaces.spaces import Spaces

VECTOR = np.dtype((np.float64, (3,)))
SPEED = ("speed", np.float64, ())
PLACE = ("place", np.float64, (2,))
DICT = np.dtype([SPEED, PLACE])
LOW = np.full(2, -1.0)
HIGH = np.full(2, 2.0)
ACTIONS = BoxActions(LOW, HIGH, bounds="squash")
MEAN = np.array([3.0, 2.0, 1.0])
STD = np.array([2.0, 0.5, 4.0])
SCALE = ObsScale(MEAN, STD)
SMALL = SACSettings(
    minibatch_size=16,
    first_rows=0,
    critic_sizes=(12, 8),
    max_grad_norm=1e9,
    gradient_steps=0.25,
    learning_rate=3e-3,
    n_step=1,
    target_entropy=-1.0,
)


class Plain(nn.Module):
    """A user's network of vectors or of a dict."""

    def __init__(self, spaces: Spaces, head_size: int) -> None:
        super().__init__()
        self.policy = nn.Sequential()
        self.policy.append(nn.Linear(3, 8))
        self.policy.append(nn.Tanh())
        self.policy.append(nn.Linear(8, head_size))
        self.value = nn.Linear(3, 1)

    def forward(self, obs: Any) -> tuple[Tensor, Tensor]:
        leaves = [obs]
        if isinstance(obs, dict):
            leaves = list(obs.values())
        columns = [leaf.reshape(len(leaf), -1) for leaf in leaves]
        inputs = torch.cat(columns, dim=1)
        return self.policy(inputs), self.value(inputs).squeeze(-1)


def spec_of(dtype: np.dtype[Any], model: Any = None) -> NetworkSpec:
    network = Network(
        dtype="float64", state_dependent_std=model is None, hidden_sizes=(16, 8), model=model
    )
    return choose_network(network, Spaces(dtype, ACTIONS)).spec


def trainer_of(
    dtype: np.dtype[Any] = VECTOR, settings: SACSettings = SMALL, model: Any = None
) -> SACTrainer:
    return SACTrainer(spec_of(dtype, model), settings, seed=5)


def experience(world: World, iteration: int) -> Experience:
    """Return the next six steps of each environment, with a scale of observations and rewards."""
    return experience_of(world.segments(6), iteration, SCALE, 2.0)


def experiences(dtype: np.dtype[Any] = VECTOR, count: int = 3, **options: Any) -> list[Experience]:
    world = World(dtype, **options)
    return [experience(world, number) for number in range(count)]


def normalized(obs: np.ndarray) -> Any:
    if obs.dtype.names is None:
        standardized = (obs - MEAN) / STD
        clipped = np.clip(standardized, -10, 10)
        return torch.from_numpy(clipped)
    speed = obs["speed"][:, None]
    columns = np.concatenate([speed, obs["place"]], axis=1)
    rows = normalized(columns)
    speeds = rows[:, 0]
    places = rows[:, 1:]
    return {"speed": speeds, "place": places}


@pytest.mark.proves("SACTrainer")
@pytest.mark.parametrize(
    ("dtype", "model"),
    [
        pytest.param(VECTOR, None, id="mlp"),
        pytest.param(DICT, None, id="dict"),
        pytest.param(VECTOR, Plain, id="user's"),
        pytest.param(DICT, Plain, id="user's dict"),
    ],
)
def test_an_update_is_that_of_the_paper(dtype: np.dtype[Any], model: Any) -> None:
    trainer = trainer_of(dtype, model=model)
    twin = twin_of(trainer)
    start = trainer.weights()
    world = World(dtype)

    for iteration in range(3):
        trainer.update(experience(world, iteration))
        twin.update([scaled(world.rows)], iteration, 6)
    assert_learned(trainer, twin, start)


@pytest.mark.proves("Minibatches._relative_likelihoods")
def test_targets_add_up_more_rewards_where_the_policy_would_act_alike() -> None:
    settings = replace(SMALL, n_step=3)
    trainer = trainer_of(settings=settings)
    without_a_choice = trainer_of(settings=replace(settings, least_extension=1))
    twin = twin_of(trainer)
    start = trainer.weights()
    world = World(VECTOR)

    for iteration in range(3):
        steps = experience(world, iteration)
        mean = trainer.update(steps).figures["target_steps"]
        most = without_a_choice.update(steps).figures["target_steps"]
        assert 1 < mean < most
        twin.update([scaled(world.rows)], iteration, 6)

    assert_learned(trainer, twin, start)


@pytest.mark.proves("clone_gradient")
def test_the_policy_becomes_a_clone_of_the_controller_that_collects() -> None:
    """Only then. Afterwards, the distance from the controller counts less and less, and then no longer."""
    settings = replace(SMALL, controller_iterations=3, clone_weight=9.0)
    trainer = trainer_of(settings=settings)
    twin = twin_of(trainer)
    start = trainer.weights()
    world = World(VECTOR, has_controller=True)

    for iteration in range(3):
        steps = experience(world, iteration)
        first_policy = replace(steps.policy, obs_scale=None)
        steps = replace(steps, policy=first_policy, next_obs_scale=SCALE)
        figures = trainer.update(steps).figures
        assert np.isnan(figures["q_mean"])
        twin.update([scaled(world.rows)], iteration, 6, clones=True)

    assert_learned(trainer, twin, start)

    world.has_controller = False
    for iteration, clone_weight in [(3, 9.0), (4, 6.0), (5, 3.0), (6, 0.0)]:
        own_steps = experience(world, iteration)
        figures = trainer.update(own_steps).figures
        assert np.isfinite(figures["q_mean"])
        has_actions_of_controller = "rows.intended" in trainer.state()
        assert has_actions_of_controller == (clone_weight > 0)
        twin.update([scaled(world.rows)], iteration, 6, clone_weight=clone_weight)
        assert_learned(trainer, twin, start)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_with_their_own_rows_take_the_steps_of_all_rows(size: int) -> None:
    twin = twin_of(trainer_of())
    start = trainer_of().weights()
    worlds = []
    for rank in range(size):
        world = World(VECTOR, num_samplers=1, num_envs=1, seed=rank)
        worlds.append(world)

    def learn_as(parallel: Parallel) -> SACTrainer:
        trainer = SACTrainer(spec_of(VECTOR), SMALL, seed=5, parallel=parallel)
        world = worlds[parallel.rank]
        for iteration in range(3):
            trainer.update(experience(world, iteration))
        return trainer

    trainers = Meeting(size).all_do(learn_as)
    env_steps = 6 * size
    for iteration in range(3):
        before = env_steps * iteration
        count = SMALL.gradient_steps_between(before, before + env_steps)
        num_rows = 6 * (iteration + 1)
        rows = [scaled(world.rows[:num_rows]) for world in worlds]
        twin.update(rows, iteration, count)

    for trainer in trainers:
        assert_learned(trainer, twin, start)

    expected = bytes_of(trainers[0].learned_state())
    for trainer in trainers[1:]:
        assert bytes_of(trainer.learned_state()) == expected


def twin_of(trainer: SACTrainer) -> PlainSAC:
    """Return a twin with the weights of a trainer."""
    state = trainer.state()
    policy = trainer.spec.module(0)
    named = trainer.spec.unflatten(trainer.weights())
    for name, parameter in policy.named_parameters():
        parameter.data = torch.tensor(named[name])
    weights = torch.tensor(state["critics.weights"])
    return PlainSAC(
        trainer.spec,
        trainer.settings,
        seed=5,
        policy=policy,
        critics=plain_critics(2, 5, SMALL.critic_sizes, weights),
        log_temperature=torch.tensor(state["temperature.log"]),
        normalize=normalized,
    )


def scaled(rows: Sequence[Row]) -> list[Row]:
    return [row._replace(reward=row.reward / 2.0) for row in rows]


def assert_learned(trainer: SACTrainer, twin: PlainSAC, start: np.ndarray) -> None:
    parameters = trainer.spec.ordered_parameters(twin.policy)
    weights = [parameter.detach().flatten() for parameter in parameters]
    policy = torch.cat(weights)
    assert not np.allclose(policy.numpy(), start, atol=1e-3)

    state = trainer.state() | {"weights": trainer.weights()}
    expected = {
        "weights": policy,
        "critics.weights": flat(twin.critics),
        "critics.targets": flat(twin.targets),
        "temperature.log": twin.log_temperature.detach(),
    }
    for name, tensor in expected.items():
        learned = torch.tensor(state[name])
        assert_close(learned, tensor, atol=1e-7, rtol=1e-6)


def test_values_of_the_network_stay_as_they_began() -> None:
    trainer = trainer_of()
    before = trainer.spec.unflatten(trainer.weights())
    for steps in experiences():
        trainer.update(steps)
    named = trainer.spec.unflatten(trainer.weights())

    for name, array in named.items():
        is_unchanged = np.array_equal(array, before[name])
        assert is_unchanged == name.startswith("value"), name


def test_gradient_steps_follow_env_steps_without_a_remainder() -> None:
    for ratio in (0.25, 0.3, 1.0, 2.5):
        settings = SACSettings(gradient_steps=ratio)
        boundaries = range(0, 24 * 50 + 1, 24)
        steps = [settings.gradient_steps_between(*ends) for ends in pairwise(boundaries)]
        assert len(steps) == 50
        assert sum(steps) == int(24 * 50 * ratio)
        assert max(steps) - min(steps) <= 1


def test_nothing_is_learned_from_too_few_rows() -> None:
    settings = replace(SMALL, first_rows=48)
    trainer = trainer_of(settings=settings)
    before = trainer.weights()
    first_steps, second_steps = experiences(count=2)
    first = trainer.update(first_steps).figures
    second = trainer.update(second_steps).figures
    assert first["gradient_steps"] == 0
    assert np.isnan(first["critic_loss"])

    assert second["gradient_steps"] == 6
    assert second["kept_rows"] == 48
    assert not np.array_equal(trainer.weights(), before)


def bytes_of(state: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in state.items()}


def bits(trainer: SACTrainer) -> dict[str, bytes]:
    state = trainer.state() | {"weights": trainer.weights()}
    return bytes_of(state)


def repeated(trainer: SACTrainer, fail: Callable[[], Any]) -> None:
    """Let an update fail; after `restore` and a repeated update, all bits must be those without the failure."""
    undisturbed = trainer_of(settings=trainer.settings)
    *earlier, last = experiences(count=4)
    for steps in earlier:
        trainer.update(steps)
        undisturbed.update(steps)

    before = bits(trainer)
    snapshot = trainer.snapshot()
    fail()
    trainer.restore(snapshot)
    assert bits(trainer) == before

    trainer.update(last)
    undisturbed.update(last)
    assert bits(trainer) == bits(undisturbed)


def without_rewards(segment: Segment) -> Segment:
    missing = np.full_like(segment.rewards, np.nan)
    return replace(segment, rewards=missing)


@pytest.mark.parametrize("limit", [10**6, 4 * 8])
def test_an_update_that_diverges_is_undone(limit: int) -> None:
    settings = replace(SMALL, replay_rows=limit)
    trainer = trainer_of(settings=settings)

    def fail() -> None:
        [steps] = experiences(count=1, seed=9)
        segments = [without_rewards(segment) for segment in steps.segments]
        bad = replace(steps, segments=segments, iteration=3)
        with pytest.raises(TrainingDiverged, match=r"gradient of the critics has norm nan"):
            trainer.update(bad)

    repeated(trainer, fail)


def test_an_update_that_is_stopped_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of()
    follow = trainer._critics.follow

    def fail() -> None:
        moves = iter(range(4))

        def stop(*_: Any) -> Any:
            if next(moves, None) is None:
                raise KeyboardInterrupt
            return follow(SMALL.tau)

        monkeypatch.setattr(trainer._critics, "follow", stop)
        [steps] = experiences(count=1, seed=9)
        with pytest.raises(KeyboardInterrupt):
            trainer.update(steps)

        monkeypatch.undo()

    repeated(trainer, fail)


def test_a_state_of_another_run_begins_without_rows() -> None:
    trainer = trainer_of()
    for steps in experiences():
        trainer.update(steps)
    fresh = trainer_of()
    fresh.load(trainer.weights(), {})
    assert_array_equal(fresh.weights(), trainer.weights())
    assert "rows.obs" not in fresh.state()

    [first] = experiences(count=1)
    update: Update = fresh.update(first)
    assert update.figures["kept_rows"] == 24


def test_a_rehearsal_changes_nothing() -> None:
    for dtype in (VECTOR, DICT):
        trainer = trainer_of(dtype)
        [steps] = experiences(dtype, count=1)
        trainer.update(steps)
        before = bits(trainer)
        trainer.rehearse(32)
        assert bits(trainer) == before


@executes("sac/trainer.py: Lower `learning_rate` (")
@pytest.mark.parametrize("name", ["learning_rate", "critic_learning_rate"])
def test_learning_rates_with_which_gradients_are_not_finite_are_lowered(name: str) -> None:
    wild: dict[str, Any] = {name: 1e200}
    with pytest.raises(TrainingDiverged, match=r"Lower `learning_rate` \(.*critic_learning_rate"):
        learn(replace(SMALL, **wild))
    lowered: dict[str, Any] = {name: 1e-3}
    learn(replace(SMALL, **lowered))


def learn(settings: SACSettings) -> None:
    trainer = trainer_of(settings=settings)
    for steps in experiences():
        trainer.update(steps)
