"""A user's own network from end to end: `--model module:Class`, `Config(model=Class)`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from itertools import chain, count, repeat
from pathlib import Path
from threading import Thread
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from builders import DISCRETE, make_config, plan_of, tiny_run
from commandline import parse
from recorder import Recorder, lasting
from remedies import executes
from torch import Tensor, nn
from worlds import models
from worlds.faulty import Faulty

import dppo
from dppo.__main__ import main
from dppo.envs.spaces import choices_of
from dppo.errors import CheckpointError, ConfigError
from dppo.hosts.trainer_builder import build_trainer
from dppo.ppo.networks.choice import learning_network
from dppo.ppo.networks.user_module import ModuleSpec
from dppo.records.files import checkpoint as checkpoints
from dppo.spaces.spaces import Spaces

ITERATIONS = 4
KWARGS = {"units": 12}
Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def settings(run_dir: Path, **changes: Any) -> dppo.Config:
    base: dict[str, Any] = {
        "env_id": "Pendulum-v1",
        "update_epochs": 2,
        "gamma": 0.9,
        "norm_obs": True,
        "norm_reward": True,
        "model": "worlds.models:Plain",
        "model_kwargs": KWARGS,
    }
    return tiny_run(run_dir, samplers=4, steps=50, iterations=ITERATIONS, **base | changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dppo.Result:
    """Train in this process."""
    return dppo.train(settings(tmp_path_factory.mktemp("trained") / "run"))


class Floors(nn.Module):
    """Has a code for each of the categories 5 to 8, and none for any other."""

    def __init__(self, spaces: dppo.Spaces, head_size: int) -> None:
        super().__init__()
        self.codes = nn.Embedding(4, 8)
        self.head = nn.Linear(8, head_size)
        self.value = nn.Linear(8, 1)

    def forward(self, obs: Tensor) -> Any:
        code = self.codes(obs.long().flatten() - 5)
        return self.head(code), self.value(code).squeeze(-1)


def test_a_step_that_failed_is_an_observation_to_a_network_of_your_own(tmp_path: Path) -> None:
    """It has no weight in the loss, and must not break the network."""

    def tower() -> Faulty:
        floors = gym.spaces.Discrete(4, start=5)
        return Faulty(reward=None, space=floors, observe=lambda steps: 5 + steps % 4)

    faults = {"on_env_fault": "rebuild", "env_faults": "unlimited"}
    network = {"model": Floors, "model_kwargs": {}}
    short = {"total_timesteps": 200, "update_epochs": 1}
    result = dppo.train(settings(tmp_path / "run", env_id=tower, **faults, **network, **short))
    assert sum(result.incidents.values()) > 10


def test_made_up_batches_hold_categories_that_exist() -> None:
    """With several learners, an update is timed before the first one."""
    floors = gym.spaces.Discrete(4, start=5)
    spaces = Spaces(np.dtype(np.int64), DISCRETE, categories={"": choices_of(floors)})
    build_trainer(
        plan_of(settings(Path("run"), model=Floors, model_kwargs={}), DISCRETE), spaces
    ).rehearse(8)


@pytest.mark.slow
@pytest.mark.parametrize("num_learners", [0, 1])
def test_ray_gives_the_same_weights(
    num_learners: int, trained: dppo.Result, tmp_path: Path, ray_session: None
) -> None:
    """Passed as a class that only this module has."""

    class Plain(models.Plain):
        pass

    config = settings(
        tmp_path / "run", num_actors=2, num_learners=num_learners, cpus_per_actor=0.5, model=Plain
    )
    result = dppo.train(config)
    assert result.weights_sha256 == trained.weights_sha256
    assert lasting(result) == {}


def test_a_class_and_its_name_give_the_same_weights_also_resumed(
    trained: dppo.Result, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    stopped = dppo.train(settings(run, model=models.Plain), observers=[Recorder(interrupt_at=2)])
    assert stopped.iterations == 2
    assert stopped.model_name == "worlds.models:Plain"
    assert (
        yaml.safe_load((run / "config.yaml").read_text())["network"]["model"]
        == "worlds.models:Plain"
    )
    assert dppo.train(settings(run), resume=run).weights_sha256 == trained.weights_sha256


def test_the_command_line_takes_it_and_resumes_it_with_trust(
    trained: dppo.Result, capsys: Capture
) -> None:
    words = ["Pendulum-v1", "--model", "worlds.models:Plain", "--model-kwargs", json.dumps(KWARGS)]
    config = make_config(parse(words).settings)
    assert config.model == "worlds.models:Plain"
    assert config.model_kwargs == KWARGS
    resume = ["train", "--resume", str(trained.run_dir)]
    assert main(resume) == 2
    expected = "and imports worlds.models and calls Plain(units=12). Add --trust"
    assert expected in capsys.readouterr().err
    assert main([*resume, "--trust"]) == 0


@pytest.mark.parametrize(
    "changes",
    [{"model": models.Residual}, {"model_kwargs": {}}, {"model": None, "model_kwargs": {}}],
)
def test_another_network_cannot_continue_the_run(
    changes: dict[str, Any], trained: dppo.Result
) -> None:
    with pytest.raises(ConfigError, match=r"^model(_kwargs)?=.* was made with "):
        dppo.train(settings(trained.run_dir, **changes), resume=trained.run_dir)


def normalized(obs: np.ndarray, statistics: dict[str, np.ndarray]) -> np.ndarray:
    """Return observations in units of their deviations, clipped, as the paper has it."""
    variance = statistics["obs.m2"] / statistics["obs.count"]
    std = np.sqrt(variance + 1e-8)
    scaled = (obs - statistics["obs.mean"]) / std
    return np.clip(scaled, -10, 10).astype(np.float32)


def test_a_loaded_policy_acts_as_the_network_that_was_trained(trained: dppo.Result) -> None:
    policy = dppo.load_policy(trained.run_dir)
    arrays = checkpoints.load(trained.checkpoint).arrays
    module = models.Plain(policy.spaces, head_size=2, **KWARGS)
    weights = {name: torch.from_numpy(array) for name, array in arrays["model"].items()}
    module.load_state_dict(weights)

    obs = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    inputs = torch.from_numpy(normalized(obs, arrays["normalizer"]))
    with torch.no_grad():
        head, _ = module(inputs)
    means = head[:, :1].clamp(-2, 2)
    np.testing.assert_allclose(policy.act(obs), means, rtol=1e-5, atol=1e-6)

    first_row = policy.act(obs[:1])[0]
    np.testing.assert_array_equal(policy.act(obs[0]), first_row)
    drawn = policy.act(obs, generator=np.random.default_rng(3))
    again = policy.act(obs, generator=np.random.default_rng(3))
    np.testing.assert_array_equal(drawn, again)


def test_a_network_that_cannot_be_imported_is_named(
    trained: dppo.Result, monkeypatch: Patch
) -> None:
    monkeypatch.setitem(sys.modules, "worlds.models", None)
    words = "cannot be built here: model=worlds.models:Plain: importing"
    with pytest.raises(CheckpointError, match=words):
        dppo.load_policy(trained.run_dir, trust=True)


def test_the_network_to_trust_is_that_of_the_checkpoint(
    trained: dppo.Result, tmp_path: Path, capsys: Capture
) -> None:
    """Whatever config.yaml says."""
    checkpoint = checkpoints.load(trained.checkpoint)
    checkpoint.state["model"]["model"] = "evil:Net"
    checkpoints.save(tmp_path / "checkpoints", 1, checkpoint, keep=checkpoints.Keep(1), score=None)
    (tmp_path / "config.yaml").write_text("env_id: Pendulum-v1")
    assert main(["eval", str(tmp_path), "--episodes", "1"]) == 2
    assert "and imports evil" in capsys.readouterr().err


BROKEN = {  # class in worlds.models: part of the message
    "not_a_class": "<function not_a_class",
    "NotAModule": "is not a subclass of torch.nn.Module. Pass one",
    "Raises": "its constructor raised RuntimeError: no such layer (",
    "RaisesForward": "raised RuntimeError: shapes do not fit (",
    "ChangesObs": "changes its arguments in place. Change a copy of them (obs.clone())",
    "WideHead": "returned head of shape (3, 3), not (3, 2): [rows, head_size]",
    "ColumnOfValues": "returned values of shape (3, 1), not (3,): [rows]; values.squeeze(-1)",
    "SqueezesAll": "with obs of shape (1, 4) and torch.float32, returned values of shape (), not (1,)",
    "HeadOnly": "returned a Tensor. Return two tensors, head and values",
    "Doubles": "returned values of torch.float64. Return the dtype of obs",
    "Infinite": "returned non-finite head. Look for a division by zero",
    "Normalized": "its buffer norm.running_mean changes in a forward pass, as those of BatchNorm do",
    "Centred": "its head of one observation depend on the other rows of the batch. Process each row on its own",
    "Drops": "its head differ between two passes over the same observations. Remove dropout and noise",
    "NoCritic": "its values do not depend on any parameter with requires_grad=True",
    "Empty": "it has no parameters, so there is nothing to learn. Assign its layers to self",
    "Mixed": "its parameters differ: value.weight is torch.float64 on cpu, body.1.weight is torch.float32 on cpu",
    "Elsewhere": "its parameters differ: value.weight is torch.float32 on meta",
    "Lazy": "its parameter value.weight has no shape yet. Give lazy layers their sizes",
    "RandomBuffer": "its buffer features is random, so actors and learners would get different values",
    "RandomAttribute": "its head depend on something random besides its parameters, so actors and learners would get",
}


@executes("ppo/networks/network.py: Pass the class {}, and its arguments as `model_kwargs`")
def test_a_network_that_was_made_already_is_refused_and_its_class_trains(tmp_path: Path) -> None:
    layer = torch.nn.Linear(4, 2)
    with pytest.raises(
        ConfigError, match=r"is a module Linear\(\.\.\.\) that was made already"
    ) as refused:
        dppo.train(cartpole(tmp_path / "made", model=layer))  # in place of its class
    assert "\n" not in str(refused.value)
    dppo.train(cartpole(tmp_path / "class", model=models.Plain))


def cartpole(run_dir: Path, **changes: Any) -> dppo.Config:
    return settings(
        run_dir, **{"env_id": "CartPole-v1", "norm_obs": False, "model_kwargs": {}} | changes
    )


@pytest.mark.parametrize(
    ("model", "words"),
    [
        *((f"worlds.models:{name}", words) for name, words in BROKEN.items()),
        ("worlds.models:Missing", "the module worlds.models has no Missing. Check the spelling"),
        (
            "Plain",
            "is not of the form module:Class. Add the name of the module that defines the class",
        ),
        (
            "no_such_module:Net",
            "importing no_such_module failed: ModuleNotFoundError: No module named",
        ),
    ],
)
def test_a_broken_contract_is_reported_before_training_starts(
    model: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        dppo.train(cartpole(tmp_path / "run", model=model))
    assert re.fullmatch(rf"model={model}: .*{re.escape(words)}.*\.", str(caught.value)), "one line"
    assert not (tmp_path / "run").exists()


def test_a_module_is_tried_once_in_a_process(tmp_path: Path) -> None:
    """It is built twice for the trial, once to act for all samplers, and twice to draw its initial weights.

    Evaluations build it once more for all of their episodes.
    """
    built = []
    tried = []

    class Counted(models.Plain):
        def __init__(self, spaces: dppo.Spaces, head_size: int) -> None:
            super().__init__(spaces, head_size)
            built.append(self)

        def forward(self, obs: Tensor) -> Any:
            tried.extend([self] if len(obs) == 3 and self is built[0] else [])
            return super().forward(obs)

    result = dppo.train(cartpole(tmp_path / "run", model=Counted, checkpoint_interval_s=0))
    assert result.iterations == ITERATIONS
    assert len(built) == 5
    assert len(tried) == 3
    evaluated = cartpole(tmp_path / "evaluated", model=Counted, eval_every=1, eval_episodes=2)
    dppo.train(evaluated)
    assert len(built) == 5 + 4
    assert len(tried) == 3


class Energy(models.Plain):
    """Adds the gradient of an energy to its head."""

    def __init__(self, spaces: dppo.Spaces, head_size: int) -> None:
        super().__init__(spaces, head_size)
        self.energy = nn.Linear(4, 1)
        nn.utils.parametrize.register_parametrization(self.energy, "bias", nn.Tanh())

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            arguments = obs.detach().requires_grad_()
            energy = torch.tanh(self.energy(arguments)).sum()
            (gradient,) = torch.autograd.grad(energy, arguments, create_graph=True)
        head, values = super().forward(obs)
        return head + gradient.sum(dim=1, keepdim=True), values


def test_a_network_may_take_a_gradient_and_parametrize_a_bias(tmp_path: Path) -> None:
    result = dppo.train(cartpole(tmp_path / "run", model=Energy))
    assert result.iterations == ITERATIONS


def test_unknown_arguments_of_the_class_are_named(tmp_path: Path) -> None:
    words = r"constructor raised TypeError: .*'width'.*called with \(spaces, head_size"
    with pytest.raises(ConfigError, match=words):
        dppo.train(settings(tmp_path / "run", model_kwargs={"width": 3}))


@pytest.mark.slow
def test_a_broken_contract_is_reported_once_by_an_actor(tmp_path: Path, ray_session: None) -> None:
    where = r"\Amodel=worlds.models:WideHead: forward\(obs\), with obs of shape \(3, 4\).*\Z"
    with pytest.raises(ConfigError, match=where):
        dppo.train(cartpole(tmp_path / "run", model=models.WideHead, num_actors=2))


@pytest.mark.parametrize("passed_as", [pytest.param("name", marks=pytest.mark.slow), "class"])
def test_a_network_no_actor_imports_is_named(
    passed_as: str, tmp_path: Path, ray_session: None, monkeypatch: Patch
) -> None:
    """The module exists in this process only."""
    here = type(sys)("only_here")
    exec(
        compile("from worlds.models import Plain\nclass Net(Plain): pass", "only_here.py", "exec"),
        vars(here),
    )
    monkeypatch.setitem(sys.modules, "only_here", here)
    model = "only_here:Net" if passed_as == "name" else here.Net
    with pytest.raises(ConfigError) as caught:
        dppo.train(cartpole(tmp_path / "run", model=model, num_actors=1))
    assert re.fullmatch("model.*No module named 'only_here'.*importable.*", str(caught.value)), (
        "one line"
    )


def test_a_users_network_may_read_images(tmp_path: Path) -> None:
    result = dppo.train(
        cartpole(tmp_path / "run", env_id="worlds.observed:Picture", model=models.Plain)
    )
    assert dppo.load_policy(result.run_dir).act(np.zeros((8, 8, 3), np.uint8)) in (0, 1, 2)


def disturbed(amounts: Iterator[int]) -> type[nn.Module]:
    """Return a module during whose construction another thread draws so many numbers, a next amount each time."""

    class Disturbed(nn.Module):
        def __init__(self, spaces: dppo.Spaces, head_size: int) -> None:
            super().__init__()
            self.head = nn.Linear(4, head_size)
            other = Thread(target=torch.rand, args=(next(amounts),))
            other.start()
            other.join()
            self.value = nn.Linear(4, 1)

        def forward(self, obs: Tensor) -> Any:
            return self.head(obs), self.value(obs).squeeze(-1)

    return Disturbed


def initial_weights(amounts: Iterator[int]) -> np.ndarray:
    spec = ModuleSpec(
        dppo.Spaces(np.dtype((np.float32, 4)), DISCRETE), disturbed(amounts), {}, "float32"
    )
    weights: np.ndarray = learning_network(spec, 0).parameters.weights.detach().numpy()
    return weights


@pytest.mark.parametrize("amounts", [(1, 0, 0), (0, 1, 2, 0)], ids=str)
def test_a_thread_that_draws_from_torchs_generator_does_not_change_the_initial_weights(
    amounts: Any,
) -> None:
    np.testing.assert_array_equal(
        initial_weights(chain(amounts, repeat(0))), initial_weights(repeat(0))
    )


def test_initial_weights_that_are_never_the_same_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="its initial weights differ each time, in 20 builds from one seed"
    ):
        initial_weights(count())
