"""Arguments of environments that nothing takes, or that are missing: refused before a run has a folder."""

from __future__ import annotations

from functools import partial, wraps
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from builders import tiny_run
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from remedies import executes
from worlds.simple import Counting

import dppo
from dppo.envs.arguments import check_arguments
from dppo.envs.make import make_env, wrapper_of
from dppo.errors import ConfigError

CARTPOLE = "sutton_barto_reward, max_episode_steps, disable_env_checker"


class Licensed(Counting):
    """Cannot do without an argument of the user's."""

    def __init__(
        self, licence: str, sampler_id: int, scratch_dir: Path, gravity: float = 9.8
    ) -> None:
        super().__init__()


def vector(num_envs: int, seed: int, gravity: float = 9.8) -> Any:
    raise AssertionError


def anything(**kwargs: Any) -> Any:
    raise AssertionError


def decorated(function: Any) -> Any:
    @wraps(function)
    def outer(*args: Any, shift: float = 0.0, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return outer


def refusal(env_id: Any, **env_kwargs: Any) -> str:
    try:
        check_arguments(env_id, env_kwargs)
    except ConfigError as error:
        return str(error)
    return ""


def test_an_unknown_argument_is_refused_with_those_that_there_are_and_the_nearest() -> None:
    label = f"{__name__}:vector"
    alike = "Did you mean gravity? It takes gravity."
    assert refusal(vector, gravty=1) == (
        f"env_kwargs: gravty is not a known argument of {label}. {alike}"
    )
    assert refusal(vector, x=1, y=2).splitlines() == [
        f"env_kwargs: {name} is not a known argument of {label}. It takes gravity." for name in "xy"
    ]
    assert refusal(lambda: None, x=1).endswith("It takes none.")
    assert refusal("worlds.simple:Counting", num_action=3).endswith(
        "Did you mean num_actions? It takes num_actions, terminate_after, truncate_after."
    )
    assert refusal("CartPole-v1", length=2).endswith(f"It takes {CARTPOLE}.")
    assert refusal(partial(vector, gravity=1), mass=1).endswith("It takes gravity.")


@executes("envs/arguments.py: Pass it in `env_kwargs`")
def test_a_missing_argument_is_refused_unless_dppo_passes_it() -> None:
    missing = f"licence is missing, and {__name__}:Licensed has no default value for it."
    assert refusal(Licensed) == f"env_kwargs: {missing} Pass it in `env_kwargs`."
    assert refusal(Licensed, licence="a") == ""
    assert refusal(partial(Licensed, licence="a")) == ""
    assert refusal(vector) == ""


def test_what_may_take_any_argument_is_asked_when_it_is_called() -> None:
    for env_id in (anything, decorated(vector), dict, partial(gym.make, "CartPole-v1")):
        assert refusal(env_id, gravty=1) == "", env_id
    assert refusal("CartPole-v1", max_episode_steps=7, render_mode="rgb_array") == ""


def test_arguments_of_a_registered_environment_are_those_of_its_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry_points: dict[str, Any] = {"Ours": Licensed, "Gone": "nowhere:Nothing"}
    for name, entry_point in entry_points.items():
        spec = gym.envs.registration.EnvSpec(f"{name}-v0", entry_point, kwargs={"licence": "a"})
        monkeypatch.setitem(gym.registry, f"{name}-v0", spec)
    assert refusal("Ours-v0") == ""
    assert "Did you mean gravity?" in refusal("Ours-v0", gravty=1)
    assert refusal("Gone-v0", gravty=1) == ""  # making it says why


@pytest.mark.parametrize("changes", [{}, {"num_actors": 1}, {"envs_per_sampler": 2}], ids=str)
def test_a_run_is_refused_without_a_folder(changes: dict[str, Any], tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {
        "env_kwargs": {"gravty": 1},
        "eval_env_kwargs": {"lenght": 1},
        "eval_every": 64,
    }
    env_id = vector if "envs_per_sampler" in changes else CartPoleEnv
    config = tiny_run(tmp_path / "run", env_id=env_id, **kwargs, **changes)
    with pytest.raises(ConfigError) as refused:
        dppo.train(config)
    unknown, eval_line = str(refused.value).splitlines()
    assert unknown.startswith("env_kwargs: gravty is not")
    assert eval_line.startswith("eval_env_kwargs: lenght is not")
    assert not (tmp_path / "run").exists()


class Passing(Counting):
    """Passes on what it does not know."""

    def __init__(self, num_actions: int = 2, **kwargs: Any) -> None:
        super().__init__(num_actions=num_actions, **kwargs)


class Ignorant(gym.Env[Any, Any]):
    """Passes everything to `object`, which takes nothing."""

    observation_space = gym.spaces.Box(0, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)


def registered(**kwargs: Any) -> Any:
    return gym.make("CartPole-v1", **kwargs)


def raising(**kwargs: Any) -> Any:
    raise TypeError(f"'{kwargs}' is no licence")


@executes("envs/arguments.py: Correct their names, or leave them out")
@pytest.mark.parametrize("env_id", [Passing, Ignorant, registered])
def test_what_kwargs_pass_on_in_vain_is_refused_without_a_folder(
    env_id: Any, tmp_path: Path
) -> None:
    config = tiny_run(tmp_path / "run", env_id=env_id, env_kwargs={"lenght": 1})
    with pytest.raises(ConfigError) as refused:
        dppo.train(config)
    start = f"env_kwargs: {__name__}:{env_id.__name__} passes its **kwargs (lenght) to a function"
    assert str(refused.value).startswith(start)
    assert f"{Path(__file__).name}, line" in str(refused.value) or env_id is registered
    assert not (tmp_path / "run").exists()
    make_env(env_id, {})


def test_other_errors_of_types_are_faults_of_the_constructor() -> None:
    with pytest.raises(TypeError, match="is no licence"):
        make_env(raising, {"gravity": 1})
    with pytest.raises(TypeError, match="unexpected keyword argument 'mass'"):
        make_env(lambda **kwargs: gym.make("CartPole-v1", mass=1), {"gravity": 1})


@executes("envs/make.py: Write a function")
def test_a_wrapper_with_further_arguments_is_refused_without_a_folder(tmp_path: Path) -> None:
    limit = gym.wrappers.TimeLimit
    config = tiny_run(tmp_path / "run", env_id=Counting, wrappers=(limit,))
    with pytest.raises(ConfigError) as refused:
        dppo.train(config)
    assert "cannot be called with the environment alone (missing a required" in str(refused.value)
    assert not (tmp_path / "run").exists()
    assert callable(wrapper_of(lambda env: limit(env, 5)))
    assert callable(wrapper_of(partial(limit, max_episode_steps=5)))


@pytest.mark.parametrize("num_actors", [0, 2])
def test_an_evaluation_is_refused(num_actors: int) -> None:
    with pytest.raises(ConfigError, match="gravty is not a known argument of CartPole-v1"):
        dppo.evaluate(
            "worlds.priors:balance", "CartPole-v1", env_kwargs={"gravty": 1}, num_actors=num_actors
        )
