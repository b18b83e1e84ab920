"""Environments with images and nested observations, from end to end: train, promise, play."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import observed_worlds
import pytest
from recorder import Notes, Recorder

import dppo
from dppo.__main__ import main
from dppo.building import most_parameters
from dppo.config import make_config
from dppo.envs.make import make_env
from dppo.envs.spaces import describe_spaces
from dppo.errors import CheckpointError, ConfigError
from dppo.ppo.networks.choice import choose_network

ITERATIONS = 3
TEXTS = ("mission", "robot.note")
CASES: dict[str, dict[str, Any]] = {
    "image": {"env_id": "observed_worlds:Picture", "image_features": 32},
    "dict": {"env_id": "observed_worlds:Everything", "drop_obs": TEXTS, "norm_obs": True, "image_features": 32},
}
both = pytest.mark.parametrize("case", list(CASES))


def settings(case: str, run_dir: Path, **changes: Any) -> dppo.Config:
    base = CASES[case] | {"num_samplers": 2, "envs_per_sampler": 2, "num_steps": 20, "update_epochs": 2}
    base |= {"progress": "off", "run_dir": run_dir} | changes
    return make_config(base | {"total_timesteps": 2 * 2 * 20 * ITERATIONS})


@pytest.fixture(scope="module")
def logged() -> dict[str, list[str]]:
    """Return what the runs of `trained` log, by case."""
    return {}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, logged: dict[str, list[str]]) -> dict[str, dppo.Result]:
    """Return the result of an undisturbed run in this process, by case."""
    folder, results = tmp_path_factory.mktemp("trained"), {}
    for case in CASES:
        with Notes() as notes:
            results[case] = dppo.train(settings(case, folder / case))
        logged[case] = notes.texts
    return results


# ------------------------------------------------------------------ the promise


@pytest.mark.parametrize("case", ["image", pytest.param("dict", marks=pytest.mark.slow)])
def test_two_actors_give_the_same_weights(
    case: str, trained: dict[str, dppo.Result], tmp_path: Path, ray_session: None
) -> None:
    result = dppo.train(settings(case, tmp_path / "run", num_actors=2))
    assert (result.weights_sha256, result.incidents) == (trained[case].weights_sha256, {})
    assert result.episodes >= 4  # else no reset was compared


@pytest.mark.parametrize("case", [pytest.param("image", marks=pytest.mark.slow), "dict"])
def test_a_killed_actor_does_not_change_the_weights(
    case: str, trained: dict[str, dppo.Result], tmp_path: Path, ray_session: None
) -> None:
    """The simulator kills its process in an episode that is replayed by the replacement."""
    name = CASES[case]["env_id"].partition(":")[2]
    crash = {"world": name, "at_step": 7, "at_episode": 1, "marker": str(tmp_path / "marker")}
    changes = {"env_id": "observed_worlds:Crashing", "env_kwargs": crash}
    result = dppo.train(settings(case, tmp_path / "run", num_actors=2, **changes))
    assert (tmp_path / "marker").exists()
    assert result.incidents.get("actor_lost") == 1
    assert result.incidents.keys() <= {"actor_lost", "samplers_moved"}  # on a busy machine a replacement is late
    assert result.weights_sha256 == trained[case].weights_sha256


@both
def test_a_resumed_run_has_the_same_weights(case: str, trained: dict[str, dppo.Result], tmp_path: Path) -> None:
    run = tmp_path / "run"
    stopped = dppo.train(settings(case, run), observers=[Recorder(interrupt_at=1)])
    assert stopped.iterations == 1
    resumed = dppo.train(settings(case, run), resume=run)
    assert resumed.weights_sha256 == trained[case].weights_sha256
    assert resumed.incidents == {}


@pytest.mark.slow
@both
def test_two_learners_give_the_same_weights_for_any_number_of_actors(
    case: str, tmp_path: Path, ray_session: None
) -> None:
    two = {"num_learners": 2, "cpus_per_actor": 0.5}
    one, other = (dppo.train(settings(case, tmp_path / str(n), num_actors=n, **two)) for n in (1, 2))
    assert one.weights_sha256 == other.weights_sha256


# ------------------------------------------------------------------ every kind of space


@pytest.mark.parametrize(
    "kind", ["discrete", "many", "multidiscrete", "multibinary", "number", "grid", "one of", "tuple"]
)
def test_every_kind_of_space_trains_and_plays(kind: str, tmp_path: Path) -> None:
    result = dppo.train(
        dppo.Config(
            env_id="observed_worlds:Plain", env_kwargs={"kind": kind}, num_samplers=2, num_steps=10,
            total_timesteps=40, run_dir=tmp_path / "run", progress="off",
        )
    )  # fmt: skip
    policy = dppo.load_policy(result.run_dir)
    env = make_env("observed_worlds:Plain", {"kind": kind})
    obs, _ = env.reset(seed=0)
    assert policy.act(obs) in (0, 1, 2)
    assert policy.weights.size == sum(np.isfinite(policy.weights))


@pytest.mark.parametrize(
    "changes",
    [
        {"env_id": "observed_worlds:Film"},
        {"env_id": "observed_worlds:Film", "trunk": "separate", "image_features": 16},
        {"env_id": "observed_worlds:Film", "image_encoder": "impala"},
        {"env_id": "observed_worlds:Codes", "memory": "gru"},
        {"env_id": "observed_worlds:Picture", "env_kwargs": {"size": 36, "channels": 4}},
        {"env_id": "observed_worlds:Picture", "image_encoder": "flatten", "hidden_sizes": (8,), "layer_norm": True},
        {"env_id": "observed_worlds:Numbers", "norm_obs": True, "trunk": "shared", "layer_norm": True},
        {"env_id": "CartPole-v1", "trunk": "shared"},
        {"env_id": "CartPole-v1", "layer_norm": True, "activation": "relu"},
    ],
    ids=str,
)
def test_every_network_trains_and_is_loaded(changes: dict[str, Any], tmp_path: Path) -> None:
    base = {"num_samplers": 2, "num_steps": 10, "total_timesteps": 40, "progress": "off", "run_dir": tmp_path / "run"}
    result = dppo.train(make_config(base | changes))
    assert dppo.load_policy(result.run_dir).weights.size > 100


# ------------------------------------------------------------------ playing


@both
def test_a_loaded_policy_acts_on_one_observation_and_on_many(case: str, trained: dict[str, dppo.Result]) -> None:
    policy = dppo.load_policy(trained[case].run_dir)
    env = make_env(CASES[case]["env_id"], {})
    obs, _ = env.reset(seed=3)
    generator = np.random.default_rng(1)
    assert policy.act(obs) in (0, 1, 2)
    assert policy.act(obs, generator=generator) in (0, 1, 2)
    if case == "image":
        assert policy.act(np.stack([obs, obs, obs])).shape == (3,)
        with pytest.raises(ValueError, match=r"obs has shape \(8, 9, 3\)"):
            policy.act(np.zeros((8, 9, 3), np.uint8))
    else:
        del obs["mission"]  # is not read, and need not be there
        assert policy.act(obs) in (0, 1, 2)
        del obs["gear"]
        with pytest.raises(ValueError, match="obs is an observation without part 'gear'"):
            policy.act(obs)


def test_a_policy_acts_on_many_nested_observations_as_on_each(tmp_path: Path) -> None:
    config = dppo.Config(
        env_id="observed_worlds:Numbers", num_samplers=2, num_steps=10, total_timesteps=40, progress="off",
        run_dir=tmp_path / "run", norm_obs=True,
    )  # fmt: skip
    policy = dppo.load_policy(dppo.train(config).run_dir)
    space = observed_worlds.Numbers.observation_space
    space.seed(0)
    several = [space.sample() for _ in range(5)]
    together = {name: np.stack([one[name] for one in several]) for name in several[0]}
    assert policy.act(together).tolist() == [policy.act(one) for one in several]


@both
def test_eval_plays_it(case: str, trained: dict[str, dppo.Result], capsys: pytest.CaptureFixture[str]) -> None:
    run = str(trained[case].run_dir)
    assert main(["eval", run, "--episodes", "2", "--env-id", CASES[case]["env_id"]]) == 0
    assert "2 episodes" in capsys.readouterr().out


def test_eval_refuses_other_observations(trained: dict[str, dppo.Result], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(trained["image"].run_dir), "--env-id", "observed_worlds:Film"]) == 2
    assert "Use the environment of the run" in capsys.readouterr().err


# ------------------------------------------------------------------ words


@both
def test_a_run_says_which_network_it_trains_and_why(
    case: str, trained: dict[str, dppo.Result], logged: dict[str, list[str]]
) -> None:
    size = dppo.load_policy(trained[case].run_dir).weights.size
    image = f"a grid CNN, shared by policy and value, {size:,} parameters, because the observation is an image of"
    nest = (
        f"a grid CNN, one-hot codes, the numbers as they are, joined into an MLP with 64 x 64 tanh units, shared by "
        f"policy and value, {size:,} parameters, because the observation has 9 leaves: camera (an image of"
    )
    found = [note for note in logged[case] if note.startswith("Network: ")]
    assert len(found) == 1
    assert found[0].startswith(f"Network: {image if case == 'image' else nest}")


def refusal(tmp_path: Path, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        dppo.train(make_config({"progress": "off", "run_dir": tmp_path / "run"} | changes))
    assert not (tmp_path / "run").exists() or not os.listdir(tmp_path / "run")
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"env_id": "observed_worlds:Everything"}, ("leaf 'mission': is Text(", "drop_obs=mission")),
        (
            {"env_id": "observed_worlds:Everything", "drop_obs": ("mission",)},
            ("leaf 'robot.note': is Text(", "Use drop_obs=mission robot.note to leave it out."),
        ),
        (
            {"env_id": "observed_worlds:Everything", "drop_obs": ("mision",)},
            ("drop_obs=mision: is not a leaf", "camera, dials, gear, lamps, mission, robot.arm.0, robot.arm.1"),
        ),
        ({"env_id": "CartPole-v1", "drop_obs": ("velocity",)}, ("single array, which has no names",)),
        (
            {"env_id": "observed_worlds:Numbers", "drop_obs": ("goal", "step", "lamps")},
            ("leaves nothing of the observation",),
        ),
        ({"env_id": "observed_worlds:Picture", "norm_obs": True}, ("norm_obs=True has no effect",)),
        (
            {"env_id": "observed_worlds:Picture", "image_encoder": "nature"},
            ("image_encoder=nature: its convolutions need images of 36 x 36", "image_encoder=grid or impala"),
        ),
        (
            {"env_id": "observed_worlds:Picture", "hidden_sizes": (32,)},
            ("hidden_sizes=(32,) has no effect", "image_features"),
        ),
        ({"env_id": "CartPole-v1", "image_encoder": "impala"}, ("image_encoder=impala has no effect", "no image")),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_does_not_fit_the_observations_is_refused(
    changes: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    text = refusal(tmp_path, **changes)
    for word in words:
        assert word in text
    assert len(text.splitlines()) == 1


def test_a_leaf_inside_another_may_be_named_with_a_slash(tmp_path: Path) -> None:
    changes = {"drop_obs": ("mission", "robot/note", "camera", "tool")}
    result = dppo.train(settings("dict", tmp_path / "run", image_features=None, **changes))
    assert "camera" not in dppo.load_policy(result.run_dir).spaces.leaves()
    with pytest.raises(ConfigError, match="drop_obs="):
        dppo.train(settings("dict", tmp_path / "run", image_features=None), resume=tmp_path / "run")


def test_a_policy_of_a_checkpoint_with_other_categories_is_not_loaded_for_resuming(
    trained: dict[str, dppo.Result], tmp_path: Path
) -> None:
    config = dppo.Config(
        env_id="observed_worlds:Plain", env_kwargs={"kind": "discrete"}, num_samplers=2, num_steps=10,
        total_timesteps=40, run_dir=tmp_path / "run", progress="off",
    )  # fmt: skip
    run = dppo.train(config).run_dir
    with pytest.raises((CheckpointError, ConfigError)):
        dppo.train(make_config({"env_id": "observed_worlds:Plain", "env_kwargs": {"kind": "many"}, "run_dir": run,
                                "num_samplers": 2, "num_steps": 10, "total_timesteps": 40}), resume=run)  # fmt: skip


@pytest.mark.parametrize(
    ("space", "settings"),
    [
        (gym.spaces.Box(0, 255, (84, 84, 4), np.uint8), {"image_encoder": "nature"}),
        (gym.spaces.Box(0, 255, (96, 96, 3), np.uint8), {"image_encoder": "impala", "trunk": "separate"}),
        (gym.spaces.Box(0, 255, (35, 35, 3), np.uint8), {"image_encoder": "grid", "trunk": "separate"}),
        (gym.spaces.Box(-1, 1, (376,), np.float64), {"hidden_sizes": (2048, 2048)}),
    ],
    ids=["nature", "impala", "grid", "wide"],
)
def test_the_object_store_has_room_for_networks_of_all_kinds(space: gym.Space[Any], settings: dict[str, Any]) -> None:
    """Ray starts before the spaces are known, and so before the network is."""
    world = gym.Env[Any, Any]()
    world.observation_space, world.action_space = space, gym.spaces.Discrete(3)
    config = make_config({"env_id": "CartPole-v1", **settings})
    assert most_parameters(config) >= choose_network(config.network, describe_spaces(world)).spec.num_parameters
