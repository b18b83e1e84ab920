"""Environments by name, factory or callable, each with its own copy of the arguments."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium import spaces
from worlds.simple import Counting

from dppo.config import Config
from dppo.envs.make import make_env
from dppo.envs.names import check_env_id
from dppo.envs.spaces import describe_spaces
from dppo.errors import ConfigError, EnvironmentFault
from dppo.hosts.plans import sampler_plan
from dppo.hosts.sampler_builder import build_sampler
from dppo.spaces.actions import DiscreteActions
from dppo.user_code import import_path

MODULE = """
import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

gymnasium.register("worlds/Registered-v0", entry_point=CartPoleEnv, max_episode_steps=7)

def factory(length=1.0):
    env = CartPoleEnv()
    env.length = length
    return env

def raises():
    raise RuntimeError("no licence")

def exits():
    raise SystemExit("no display")

number = 3
"""


@pytest.fixture
def worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A user's modules, one of which works; the others cannot be imported."""
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


@pytest.mark.usefixtures("worlds")
def test_environments_are_created_from_ids_modules_and_callables_with_their_arguments() -> None:
    slow = make_env("dppo/SlowCartPole-v0", {"step_s": 0.0, "reset_s": 0.25}).spec
    assert slow is not None
    assert slow.kwargs == {"step_s": 0.0, "reset_s": 0.25}
    for env_id in ("users_worlds:worlds/Registered-v0", "users_worlds:factory", Counting):
        check_env_id(env_id)

    registered = make_env("users_worlds:worlds/Registered-v0", {}).spec
    assert registered is not None
    assert registered.max_episode_steps == 7
    assert make_env("users_worlds:factory", {"length": 0.25}).get_wrapper_attr("length") == 0.25
    assert isinstance(make_env("worlds.simple:Counting", {"truncate_after": 3}), Counting)
    assert describe_spaces(make_env(Counting, {"num_actions": 5})).actions == DiscreteActions(5)


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("dppo/SlowCart-v0", ("env_id=dppo/SlowCart-v0", "Did you mean dppo/SlowCartPole-v0?")),
        ("CartPole-v77", ("env_id=CartPole-v77", "Did you mean CartPole-v")),
        (
            "Zzyzx/Qqqq-v0",
            (
                "env_id=Zzyzx/Qqqq-v0: is not registered with Gymnasium",
                "write package:Zzyzx/Qqqq-v0",
            ),
        ),
        ("users_worlds:Misspelt-v0", ("the module has no Misspelt-v0", "Check the spelling")),
        (
            "users_worlds",
            ("is not registered with Gymnasium", "It is a module: write users_worlds:make"),
        ),
        (
            "users_worlds.factory",
            ("If factory is in the module users_worlds, write users_worlds:factory.",),
        ),
        ("settings.yaml", ("Pass a file of settings as --config settings.yaml.",)),
        ("PongNoFrameskip-v4", ("Write ALE/Pong-v5.",)),
        ("SpaceInvadersDeterministic-v4", ("Write ALE/SpaceInvaders-v5.",)),
        ("__main__:make_nothing", ("make_nothing was defined in a program",)),
        ("ALE/Zzyzx-v5", ("is not registered with Gymnasium", "write ale_py:ALE/Zzyzx-v5")),
    ],
)
@pytest.mark.usefixtures("worlds")
def test_an_unknown_name_is_refused_in_one_line(env_id: str, words: tuple[str, ...]) -> None:
    text = refusal(env_id)
    assert "\n" not in text
    for word in words:
        assert word in text


BROKEN = {
    "import a_package_that_is_nowhere\n": (
        "line 1",
        "No module named 'a_pack",
        "pip install a_package_that_is_nowhere)",
    ),
    "import numpy\n\nx = numpy.arry(3)\n": (
        "line 3",
        "x = numpy.arry(3)",
        "has no attribute 'arry'",
        "Correct the mod",
    ),
    "def make(:\n    pass\n": ("line 1", "def make(:", "SyntaxError", "Correct the module"),
    "import sys\nsys.exit(3)\n": (
        "line 2",
        "SystemExit: 3",
        "ends Python when it is imported",
        "__main__",
    ),
    "import argparse\nargparse.ArgumentParser().parse_args(['--x'])\n": (
        "line 2",
        "reads the command line",
        "__main__",
    ),
}


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_wrong_with_a_module_is_shown_as_python_does(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "users_module.py").write_text(text, encoding="utf8")
    message = refusal("users_module:make")
    for word in (
        "env_id=users_module:make: importing users_module failed",
        f'"{tmp_path}/users_module.py", ',
        *BROKEN[text],
    ):
        assert word in message
    assert "is installed" not in message
    for hidden in ("dppo/user_code.py", "importlib", "argparse.py"):
        assert hidden not in message


def test_the_remedy_for_a_module_that_reads_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.argv", ["dppo", "train", "--unknown"])
    lines = (
        "import argparse\nimport gymnasium\ndef make():\n    return gymnasium.make('CartPole-v1')\n"
    )
    parse = "argparse.ArgumentParser().parse_args()\n"
    (tmp_path / "users_before.py").write_text(lines + parse, encoding="utf8")
    assert "reads the command line" in refusal("users_before:make")

    guarded = f"if __name__ == '__main__':\n    {parse}"
    (tmp_path / "users_after.py").write_text(lines + guarded, encoding="utf8")
    check_env_id("users_after:make")


def test_a_package_that_an_environment_lacks_is_named_without_a_traceback() -> None:
    def lacking() -> Any:
        raise gym.error.DependencyNotInstalled("Box3D is not installed, run `pip install box3d`")

    gym.register("worlds/Lacking-v0", entry_point=lacking)  # type: ignore[arg-type]
    try:
        with pytest.raises(
            ConfigError, match=r"env_id=worlds/Lacking-v0: Box3D is not .* Use the pip of .*python"
        ):
            make_env("worlds/Lacking-v0", {})
    finally:
        gym.registry.pop("worlds/Lacking-v0")


@pytest.mark.proves("raises in its constructor at the start")
@pytest.mark.usefixtures("worlds")
@pytest.mark.parametrize(
    ("factory", "kwargs", "words"),
    [
        ("raises", {}, "RuntimeError: no licence"),
        ("exits", {}, "SystemExit: no display"),
        (
            "factory",
            {"lenght": 1},
            "TypeError: factory() got an unexpected keyword argument 'lenght'",
        ),
    ],
)
def test_a_constructor_that_raises_names_its_place_with_a_traceback(
    factory: str, kwargs: Any, words: str
) -> None:
    plan = sampler_plan(Config(env_id=f"users_worlds:{factory}", env_kwargs=kwargs))
    with pytest.raises(EnvironmentFault) as caught:
        build_sampler(plan, 3)

    owner = f"sampler 3 (users_worlds:{factory}), env 0"
    assert caught.value.message.startswith(f"{owner}: the environment's constructor raised {words}")
    assert caught.value.remote_traceback.startswith("Traceback")
    if not kwargs:
        assert "users_worlds.py" in caught.value.remote_traceback


def test_if_a_constructor_fails_the_environments_created_before_are_closed() -> None:
    envs: list[Any] = []

    class Closing(Counting):
        closed = False

        def close(self) -> None:
            self.closed = True

    def third_fails() -> gym.Env[Any, Any]:
        if len(envs) == 2:
            raise RuntimeError("the licence is for two")
        envs.append(Closing())
        env: gym.Env[Any, Any] = envs[-1]
        return env

    with pytest.raises(
        EnvironmentFault, match="env 2: the environment's constructor raised RuntimeError"
    ):
        build_sampler(sampler_plan(Config(env_id=third_fails, envs_per_sampler=3)), 0)
    assert [env.closed for env in envs] == [True, True]


class Changing(Counting):
    """Changes its arguments, as environments do that pop the ones they have read."""

    def __init__(self, settings: dict[str, Any], again: Any = None) -> None:
        super().__init__(truncate_after=settings["limits"].pop("steps"))
        settings["levels"].append(len(settings["levels"]))
        self.levels = settings["levels"]
        self.same = again is settings["levels"]


@pytest.mark.proves("changes its arguments")
def test_an_environment_that_changes_its_arguments_does_not_change_those_of_others() -> None:
    envs: list[Changing] = []

    class Recorded(Changing):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            envs.append(self)

    settings: dict[str, Any] = {"limits": {"steps": 3}, "levels": [0]}
    config = Config(env_id=Recorded, env_kwargs={"settings": settings}, envs_per_sampler=2)
    for sampler_id in range(2):
        build_sampler(sampler_plan(config), sampler_id)
    assert [env.levels for env in envs] == [[0, 1]] * 4
    assert config.env_kwargs == {"settings": {"limits": {"steps": 3}, "levels": [0]}}


def test_an_object_in_two_arguments_stays_one_object() -> None:
    levels = [0]
    env = make_env(
        Changing, {"settings": {"limits": {"steps": 3}, "levels": levels}, "again": levels}
    )
    assert env.same
    assert levels == [0]


def test_an_argument_that_cannot_be_copied_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        make_env(Counting, {"num_actions": 3, "guard": threading.Lock()})
    assert str(caught.value).startswith("env_kwargs: guard=<unlocked _thread.lock object at ")
    assert "cannot be copied, but each environment needs its own copy (TypeError: " in str(
        caught.value
    )


class Parallel:
    """Like PettingZoo's parallel environments: its spaces are methods."""

    possible_agents = ("one", "two")

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return spaces.Discrete(2)

    def action_space(self, agent: str) -> gym.Space[Any]:
        return spaces.Discrete(2)

    def step(self, actions: Any) -> Any: ...


class Turns:
    """Like PettingZoo's after a reset: it has agents, but no spaces of its own."""

    agents = ("one",)


class Crowd(gym.Env[Any, Any]):
    """A single environment with an unrelated attribute `agents`."""

    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(2)
    agents = ("pedestrian",)


def sb3_like() -> Any:
    class Stacked:
        num_envs = 4
        observation_space = spaces.Box(-1, 1, (2,))
        action_space = spaces.Discrete(2)

    return Stacked()


class DeepMind:
    """Like dm_env.Environment."""

    def observation_spec(self) -> Any: ...

    def action_spec(self) -> Any: ...


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (
            Parallel,
            ("made a PettingZoo environment (test_make.Parallel), which", "is not taken here"),
        ),
        (
            Turns,
            (
                "made a PettingZoo environment (",
                ") that is not a parallel one",
                "aec_to_parallel(env), if",
                "Or: Train one agent",
            ),
        ),
        (
            lambda: gym.make_vec("CartPole-v1", 2),
            ("made a vector environment (gymnasium.", ") of 2. ", "envs_per_sampler=2"),
        ),
        (sb3_like, ("made a vector environment (", ") of 4. ")),
        (
            DeepMind,
            ("made a dm_env environment (test_make.DeepMind). Wrap it with shimmy.DmControlComp",),
        ),
        (
            lambda: Crowd,
            (
                "made <class 'test_make.Crowd'>, which is not an environment. Return the result of calling",
            ),
        ),
        (lambda: 5, ("made 5, which is not a Gymnasium environment. Return a gymnasium.Env.",)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_anything_but_a_single_environment_is_recognized(
    factory: Any, words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_env(factory, {})
    for word in words:
        assert word in str(caught.value)


def test_a_gymnasium_environment_may_have_an_attribute_agents() -> None:
    assert make_env(Crowd, {}).observation_space == Crowd.observation_space


class Maker:
    """Makes environments when it is called."""

    def __call__(self, length: float = 1.0) -> Any:
        return Counting()


def test_an_object_that_makes_environments_has_the_same_name_in_another_process() -> None:
    """The name has no address, which would differ, so that a run can be resumed with the object."""
    makers = [Maker(), Maker()]
    assert len({import_path(maker) for maker in makers}) == 1
    assert import_path(partial(Maker(), length=2)) == import_path(partial(Maker(), length=2))
    assert import_path(partial(Maker(), length=2)) != import_path(partial(Maker(), length=3))


def test_a_refused_environment_is_closed() -> None:
    closed = []

    class Vector(Crowd):
        num_envs = 2
        single_observation_space = Crowd.observation_space

        def close(self) -> None:
            closed.append(self)

    with pytest.raises(ConfigError, match="made a vector environment"):
        make_env(Vector, {})
    assert len(closed) == 1
