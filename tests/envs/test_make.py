"""Environments by name, by factory and by callable, each with settings of its own."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium import spaces
from testbeds import Counting

from dppo.assemble import build_sampler, sampler_plan
from dppo.config import Config
from dppo.envs.make import check_env_id, make_env
from dppo.envs.spaces import describe_spaces
from dppo.errors import ConfigError, EnvironmentFault
from dppo.spaces import DiscreteActions

MODULE = """
import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

gymnasium.register("worlds/Registered-v0", entry_point=CartPoleEnv, max_episode_steps=7)

def factory(length=1.0):
    env = CartPoleEnv()
    env.length = length
    return env

def forgets_to_return():
    CartPoleEnv()

def raises():
    raise RuntimeError("no licence")

def exits():
    raise SystemExit("no display")

number = 3
"""


@pytest.fixture
def worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules of a user's: one that is good, and some that cannot be imported."""
    (tmp_path / "users_worlds.py").write_text(MODULE, encoding="utf8")
    (tmp_path / "users_broken.py").write_text("import a_package_that_is_nowhere\n", encoding="utf8")
    (tmp_path / "users_script.py").write_text("import sys\nsys.exit(3)\n", encoding="utf8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    gym.registry.pop("worlds/Registered-v0", None)


def refusal(env_id: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_env_id(env_id)
    with pytest.raises(ConfigError) as again:
        make_env(env_id, {})
    assert str(again.value) == str(caught.value)
    return str(caught.value)


# ----------------------------------------------------------------------------------------- by name


def test_ids_of_gymnasium_and_of_ours_are_made() -> None:
    assert make_env("CartPole-v1", {}).spec is not None
    env = make_env("dppo/SlowCartPole-v0", {"step_s": 0.0, "reset_s": 0.25})
    assert env.spec is not None
    assert env.spec.kwargs == {"step_s": 0.0, "reset_s": 0.25}


@pytest.mark.usefixtures("worlds")
def test_ids_that_a_module_registers_are_made() -> None:
    check_env_id("users_worlds:worlds/Registered-v0")
    env = make_env("users_worlds:worlds/Registered-v0", {})
    assert env.spec is not None
    assert env.spec.max_episode_steps == 7


@pytest.mark.usefixtures("worlds")
def test_factories_of_a_module_get_their_arguments() -> None:
    check_env_id("users_worlds:factory")
    assert make_env("users_worlds:factory", {"length": 0.25}).get_wrapper_attr("length") == 0.25
    assert isinstance(make_env("testbeds:Counting", {"truncate_after": 3}), Counting)


def test_callables_get_their_arguments() -> None:
    check_env_id(Counting)
    assert describe_spaces(make_env(Counting, {"num_actions": 5})).actions == DiscreteActions(5)


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("CartPol-v1", ("env_id=CartPol-v1", "Did you mean CartPole-v1?")),
        ("dppo/SlowCart-v0", ("env_id=dppo/SlowCart-v0", "Did you mean dppo/SlowCartPole-v0?")),
        ("CartPole-v77", ("env_id=CartPole-v77", "Did you mean CartPole-v")),
        ("Zzyzx/Qqqq-v0", ("env_id=Zzyzx/Qqqq-v0: Gymnasium does not know it", "write package:Zzyzx/Qqqq-v0")),
        ("no_such_module_at_all:Env-v0", ("importing no_such_module_at_all failed", "ModuleNotFoundError")),
        ("users_broken:factory", ("importing users_broken failed", "a_package_that_is_nowhere", "every node")),
        ("users_script:factory", ("importing users_script failed", "SystemExit: 3")),
        ("users_worlds:Misspelt-v0", ("its module has no Misspelt-v0", "Check the spelling")),
    ],
)
@pytest.mark.usefixtures("worlds")
def test_names_of_nothing_are_refused_in_a_line(env_id: str, words: tuple[str, ...]) -> None:
    text = refusal(env_id)
    assert "\n" not in text
    for word in words:
        assert word in text


@pytest.mark.usefixtures("worlds")
def test_what_gives_no_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match="env_id=users_worlds:forgets_to_return: made None, which is not"):
        make_env("users_worlds:forgets_to_return", {})
    with pytest.raises(ConfigError, match="env_id=5"):
        check_env_id(5)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------- constructors


@pytest.mark.usefixtures("worlds")
@pytest.mark.parametrize(
    ("factory", "kwargs", "words"),
    [
        ("raises", {}, "RuntimeError: no licence"),
        ("exits", {}, "SystemExit: no display"),
        ("factory", {"lenght": 1}, "TypeError: factory() got an unexpected keyword argument 'lenght'"),
    ],
)
def test_a_constructor_that_raises_names_sampler_and_env_and_carries_the_traceback(
    factory: str, kwargs: dict[str, Any], words: str
) -> None:
    plan = sampler_plan(Config(env_id=f"users_worlds:{factory}", env_kwargs=kwargs))
    with pytest.raises(EnvironmentFault) as caught:
        build_sampler(plan, 3)
    owner = f"sampler 3 (users_worlds:{factory}), env 0"
    assert caught.value.message.startswith(f"{owner}: the environment's constructor raised {words}")
    assert caught.value.remote_traceback.startswith("Traceback")
    if not kwargs:
        assert "users_worlds.py" in caught.value.remote_traceback


def test_environments_made_before_one_that_fails_are_closed() -> None:
    made: list[Any] = []

    class Closing(Counting):
        closed = False

        def close(self) -> None:
            self.closed = True

    def third_fails() -> gym.Env[Any, Any]:
        if len(made) == 2:
            raise RuntimeError("the licence is for two")
        made.append(Closing())
        env: gym.Env[Any, Any] = made[-1]
        return env

    with pytest.raises(EnvironmentFault, match="env 2: the environment's constructor raised RuntimeError"):
        build_sampler(sampler_plan(Config(env_id=third_fails, envs_per_sampler=3)), 0)
    assert [env.closed for env in made] == [True, True]


# ---------------------------------------------------------------------------------------- settings


class Changing(Counting):
    """Changes the settings that it was made with, as environments do that pop what they have read."""

    def __init__(self, settings: dict[str, Any], again: Any = None) -> None:
        super().__init__(truncate_after=settings["limits"].pop("steps"))
        settings["levels"].append(len(settings["levels"]))
        self.levels, self.same = settings["levels"], again is settings["levels"]


def test_an_environment_that_changes_its_settings_changes_no_others() -> None:
    settings: dict[str, Any] = {"limits": {"steps": 3}, "levels": [0]}
    config = Config(env_id=Changing, env_kwargs={"settings": settings}, envs_per_sampler=2)
    for sampler_id in range(2):
        built = build_sampler(sampler_plan(config), sampler_id)
        assert [env.levels for env in built.envs._envs] == [[0, 1], [0, 1]]  # type: ignore[attr-defined]
    assert config.env_kwargs == {"settings": {"limits": {"steps": 3}, "levels": [0]}}


def test_one_object_in_two_settings_stays_one() -> None:
    levels = [0]
    env = make_env(Changing, {"settings": {"limits": {"steps": 3}, "levels": levels}, "again": levels})
    assert env.same  # type: ignore[attr-defined]
    assert levels == [0]


def test_a_setting_that_cannot_be_copied_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        make_env(Counting, {"num_actions": 3, "guard": threading.Lock()})
    assert str(caught.value).startswith("env_kwargs: guard=<unlocked _thread.lock object at ")
    assert "cannot be copied, and each environment gets its own copy (TypeError: " in str(caught.value)


# ---------------------------------------------------------------- what is not a single environment


class Parallel:
    """As PettingZoo's: spaces are methods."""

    possible_agents = ("one", "two")

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return spaces.Discrete(2)

    def action_space(self, agent: str) -> gym.Space[Any]:
        return spaces.Discrete(2)


class Turns:
    """As PettingZoo's after a reset: agents, and no spaces of its own."""

    agents = ("one",)


class Crowd(gym.Env[Any, Any]):
    """A single environment that calls something else its agents."""

    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(2)
    agents = ("pedestrian",)


def sb3_like() -> Any:
    class Stacked:
        num_envs = 4
        observation_space = spaces.Box(-1, 1, (2,))
        action_space = spaces.Discrete(2)

    return Stacked()


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (
            Parallel,
            ("made a PettingZoo environment (", "test_make.Parallel", "Wrap it as a gymnasium.Env of one agent"),
        ),
        (Turns, ("made a PettingZoo environment (",)),
        (
            lambda: gym.make_vec("CartPole-v1", 3, vectorization_mode="sync"),
            ("made a vector environment (gymnasium.vector.", ") of 3. ", "envs_per_sampler=3"),
        ),
        (lambda: gym.make_vec("CartPole-v1", 2), ("made a vector environment (", ") of 2. ", "envs_per_sampler=2")),
        (sb3_like, ("made a vector environment (", ") of 4. ")),
        (lambda: 5, ("made 5, which is not a Gymnasium environment",)),
    ],
    ids=["parallel", "turns", "sync vector", "own vector", "sb3", "a number"],
)
def test_what_is_not_a_single_environment_is_recognised(factory: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        make_env(factory, {})
    for word in words:
        assert word in str(caught.value)


def test_an_environment_that_has_agents_in_it_is_one() -> None:
    assert make_env(Crowd, {}).observation_space == Crowd.observation_space


def test_a_refused_environment_is_closed() -> None:
    closed = []

    class Vector(Crowd):
        num_envs, single_observation_space = 2, Crowd.observation_space

        def close(self) -> None:
            closed.append(self)

    with pytest.raises(ConfigError, match="made a vector environment"):
        make_env(Vector, {})
    assert len(closed) == 1
