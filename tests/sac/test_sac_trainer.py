"""Updates of soft actor-critic: the formulas, and what must not change them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
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
from dppo.ppo.exchange.records import Experience, Update
from dppo.ppo.exchange.scales import ObsScale
from dppo.ppo.learning.parallel import Parallel
from dppo.ppo.networks.choice import choose_network
from dppo.ppo.networks.network import NetworkSpec
from dppo.sac.settings import SACSettings
from dppo.sac.trainer import SACTrainer
from dppo.spaces.actions import BoxActions
from dppo.spaces.spaces import Spaces

VECTOR = np.dtype((np.float64, (3,)))
DICT = np.dtype([("speed", np.float64, ()), ("place", np.float64, (2,))])
ACTIONS = BoxActions(np.full(2, -1.0), np.full(2, 2.0), bounds="squash")
SCALE = ObsScale(np.array([3.0, 2.0, 1.0]), np.array([2.0, 0.5, 4.0]))
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
        self.policy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, head_size))
        self.value = nn.Linear(3, 1)

    def forward(self, obs: Any) -> tuple[Tensor, Tensor]:
        leaves = list(obs.values()) if isinstance(obs, dict) else [obs]
        inputs = torch.cat([leaf.reshape(len(leaf), -1) for leaf in leaves], dim=1)
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


def experiences(dtype: np.dtype[Any] = VECTOR, count: int = 3, **options: Any) -> list[Experience]:
    world = World(dtype, **options)
    return [experience_of(world.segments(6), number, SCALE, 2.0) for number in range(count)]


def normalized(obs: np.ndarray) -> Any:
    if obs.dtype.names is None:
        standardized = (obs - SCALE.mean) / SCALE.std
        return torch.from_numpy(np.clip(standardized, -10, 10))
    columns = np.concatenate([obs["speed"][:, None], obs["place"]], axis=1)
    rows = normalized(columns)
    return {"speed": rows[:, 0], "place": rows[:, 1:]}


@pytest.mark.proves("SACTrainer")
@pytest.mark.parametrize(
    ("dtype", "model"),
    [(VECTOR, None), (DICT, None), (VECTOR, Plain), (DICT, Plain)],
    ids=["mlp", "dict", "user's", "user's dict"],
)
def test_an_update_is_that_of_the_paper(dtype: np.dtype[Any], model: Any) -> None:
    trainer = trainer_of(dtype, model=model)
    twin = twin_of(trainer)
    start = trainer.weights()
    world = World(dtype)
    for iteration in range(3):
        trainer.update(experience_of(world.segments(6), iteration, SCALE, 2.0))
        twin.update([scaled(world.rows)], iteration, 6, normalized)
    assert_learned(trainer, twin, start)


@pytest.mark.proves("Minibatches._relative_likelihoods")
def test_targets_add_up_more_rewards_where_the_policy_would_act_alike() -> None:
    trainer = trainer_of(settings=replace(SMALL, n_step=3))
    without_a_choice = trainer_of(settings=replace(SMALL, n_step=3, least_extension=1))
    twin = twin_of(trainer)
    start = trainer.weights()
    world = World(VECTOR)
    for iteration in range(3):
        experience = experience_of(world.segments(6), iteration, SCALE, 2.0)
        mean = trainer.update(experience).figures["target_steps"]
        most = without_a_choice.update(experience).figures["target_steps"]
        assert 1 < mean < most
        twin.update([scaled(world.rows)], iteration, 6, normalized)
    assert_learned(trainer, twin, start)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_with_their_own_rows_take_the_steps_of_all_rows(size: int) -> None:
    twin = twin_of(trainer_of())
    start = trainer_of().weights()
    worlds = [World(VECTOR, num_samplers=1, num_envs=1, seed=rank) for rank in range(size)]

    def learn_as(parallel: Parallel) -> SACTrainer:
        trainer = SACTrainer(spec_of(VECTOR), SMALL, seed=5, parallel=parallel)
        for iteration in range(3):
            segments = worlds[parallel.rank].segments(6)
            trainer.update(experience_of(segments, iteration, SCALE, 2.0))
        return trainer

    trainers = Meeting(size).all_do(learn_as)
    counts = [SMALL.gradient_steps_between(6 * size * i, 6 * size * (i + 1)) for i in range(3)]
    for iteration, count in enumerate(counts):
        known = 6 * (iteration + 1)
        rows = [scaled(world.rows[:known]) for world in worlds]
        twin.update(rows, iteration, count, normalized)
    for trainer in trainers:
        assert_learned(trainer, twin, start)
    learned = [
        {name: array.tobytes() for name, array in trainer.learned_state().items()}
        for trainer in trainers
    ]
    assert all(state == learned[0] for state in learned)


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
    )


def scaled(rows: Sequence[Row]) -> list[Row]:
    return [row._replace(reward=row.reward / 2.0) for row in rows]


def assert_learned(trainer: SACTrainer, twin: PlainSAC, start: np.ndarray) -> None:
    parameters = trainer.spec.ordered_parameters(twin.policy)
    policy = torch.cat([parameter.detach().flatten() for parameter in parameters])
    assert not np.allclose(policy.numpy(), start, atol=1e-3)
    state = trainer.state() | {"weights": trainer.weights()}
    for name, expected in {
        "weights": policy,
        "critics.weights": flat(twin.critics),
        "critics.targets": flat(twin.targets),
        "temperature.log": twin.log_temperature.detach(),
    }.items():
        assert_close(torch.tensor(state[name]), expected, atol=1e-7, rtol=1e-6)


def test_values_of_the_network_stay_as_they_began() -> None:
    trainer = trainer_of()
    before = trainer.spec.unflatten(trainer.weights())
    for experience in experiences():
        trainer.update(experience)
    for name, array in trainer.spec.unflatten(trainer.weights()).items():
        assert np.array_equal(array, before[name]) == name.startswith("value"), name


def test_gradient_steps_follow_env_steps_without_a_remainder() -> None:
    for ratio in (0.25, 0.3, 1.0, 2.5):
        settings = SACSettings(gradient_steps=ratio)
        steps = [settings.gradient_steps_between(24 * i, 24 * i + 24) for i in range(50)]
        assert sum(steps) == int(24 * 50 * ratio)
        assert max(steps) - min(steps) <= 1


def test_nothing_is_learned_from_too_few_rows() -> None:
    trainer = trainer_of(settings=replace(SMALL, first_rows=48))
    before = trainer.weights()
    first, second = (trainer.update(experience) for experience in experiences(count=2))
    assert first.figures["gradient_steps"] == 0
    assert np.isnan(first.figures["critic_loss"])
    assert (second.figures["gradient_steps"], second.figures["kept_rows"]) == (6, 48)
    assert not np.array_equal(trainer.weights(), before)


def bits(trainer: SACTrainer) -> dict[str, bytes]:
    state = trainer.state() | {"weights": trainer.weights()}
    return {name: array.tobytes() for name, array in state.items()}


def repeated(trainer: SACTrainer, fail: Callable[[], Any]) -> None:
    """Let an update fail; after `restore` and a repeated update, all bits must be those without the failure."""
    undisturbed = trainer_of(settings=trainer.settings)
    steps = experiences(count=4)
    for experience in steps[:3]:
        trainer.update(experience)
        undisturbed.update(experience)
    before = bits(trainer)
    snapshot = trainer.snapshot()
    fail()
    trainer.restore(snapshot)
    assert bits(trainer) == before
    trainer.update(steps[3])
    undisturbed.update(steps[3])
    assert bits(trainer) == bits(undisturbed)


@pytest.mark.parametrize("limit", [10**6, 4 * 8])
def test_an_update_that_diverges_is_undone(limit: int) -> None:
    trainer = trainer_of(settings=replace(SMALL, replay_rows=limit))

    def fail() -> None:
        bad = experiences(count=1, seed=9)[0]
        rewards = [np.full_like(segment.rewards, np.nan) for segment in bad.segments]
        segments = [
            replace(segment, rewards=column)
            for segment, column in zip(bad.segments, rewards, strict=True)
        ]
        with pytest.raises(TrainingDiverged, match=r"gradient of the critics has norm nan"):
            trainer.update(replace(bad, segments=segments, iteration=3))

    repeated(trainer, fail)


def test_an_update_that_is_stopped_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of()

    def fail() -> None:
        moves = iter(range(4))

        def stop(*_: Any) -> Any:
            if next(moves, None) is None:
                raise KeyboardInterrupt
            return follow(SMALL.tau)

        follow = trainer._critics.follow
        monkeypatch.setattr(trainer._critics, "follow", stop)
        with pytest.raises(KeyboardInterrupt):
            trainer.update(experiences(count=1, seed=9)[0])
        monkeypatch.undo()

    repeated(trainer, fail)


def test_a_state_of_another_run_begins_without_rows() -> None:
    trainer = trainer_of()
    for experience in experiences():
        trainer.update(experience)
    fresh = trainer_of()
    fresh.load(trainer.weights(), {})
    assert_array_equal(fresh.weights(), trainer.weights())
    assert "rows.obs" not in fresh.state()
    update: Update = fresh.update(experiences(count=1)[0])
    assert update.figures["kept_rows"] == 24


def test_a_rehearsal_changes_nothing() -> None:
    for dtype in (VECTOR, DICT):
        trainer = trainer_of(dtype)
        for experience in experiences(dtype, count=1):
            trainer.update(experience)
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
    for experience in experiences():
        trainer.update(experience)
