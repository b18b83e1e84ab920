"""Environments by name, by factory and by callable; and spaces that cannot be learnt on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from dppo.assemble import build_sampler, sampler_plan
from dppo.config import Config
from dppo.envs.make import check_env_id, describe_spaces, make_env
from dppo.envs.testbeds import Counting
from dppo.errors import ConfigError, EnvironmentFault
from dppo.spaces import BoxActions, DiscreteActions

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
    env = make_env("dppo/Counting-v0", {"truncate_after": 2, "num_actions": 7})
    assert describe_spaces(env).actions == DiscreteActions(7)


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
    assert isinstance(make_env("dppo.envs.testbeds:Counting", {"truncate_after": 3}), Counting)


def test_callables_get_their_arguments() -> None:
    check_env_id(Counting)
    assert describe_spaces(make_env(Counting, {"num_actions": 5})).actions == DiscreteActions(5)


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("CartPol-v1", ("env_id=CartPol-v1", "Did you mean CartPole-v1?")),
        ("dppo/Countin-v0", ("env_id=dppo/Countin-v0", "Did you mean dppo/Counting-v0?")),
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
    with pytest.raises(ConfigError, match="env_id=users_worlds:forgets_to_return: gave None"):
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


# ------------------------------------------------------------------------------------------ spaces


class Shaped(gym.Env[Any, Any]):
    """Has spaces, and nothing else."""

    def __init__(self, obs: Any = None, act: Any = None) -> None:
        self.observation_space = obs or spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = act or spaces.Discrete(2)


def test_spaces_become_plain_data() -> None:
    found = describe_spaces(Shaped(spaces.Box(0, 255, (2, 3), np.uint8), spaces.Discrete(4, start=-1)))
    assert (found.obs_shape, found.obs_dtype, found.deterministic) == ((2, 3), "uint8", True)
    assert found.actions == DiscreteActions(4, -1)
    low, high = np.array([[-1.0], [-np.inf]], np.float64), np.array([[1.0], [np.inf]])
    actions = describe_spaces(Shaped(act=spaces.Box(low, high, dtype=np.float64))).actions
    assert isinstance(actions, BoxActions)
    assert (actions.shape, actions.size, actions.low.dtype) == ((2, 1), 2, np.float64)
    np.testing.assert_array_equal(actions.low, low)
    np.testing.assert_array_equal(actions.high, high)


def test_a_spec_that_says_nondeterministic_is_believed() -> None:
    env = make_env("CartPole-v1", {})
    assert env.spec is not None
    assert describe_spaces(env).deterministic
    gym.register("worlds/Chance-v0", entry_point=Counting, nondeterministic=True)
    try:
        assert not describe_spaces(make_env("worlds/Chance-v0", {})).deterministic
    finally:
        del gym.registry["worlds/Chance-v0"]


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (Shaped(spaces.Discrete(5)), ("observation_space=Discrete(5)", "it is a Discrete", "FlattenObservation")),
        (
            Shaped(spaces.Dict(arm=spaces.Box(-1, 1, (2,)), text=spaces.Text(9))),
            ("observation_space=Dict(", "'arm' is Box(", "'text' is Text(", "FlattenObservation"),
        ),
        (Shaped(spaces.Tuple([spaces.Discrete(2)])), ("it is a Tuple ([0] is Discrete(2))",)),
        (Shaped(spaces.Box(-1, 1, ())), ("has no elements",)),
        (Shaped(spaces.Box(-1, 1, (3, 0))), ("has no elements",)),
        (Shaped(act=spaces.MultiDiscrete([2, 3])), ("action_space=MultiDiscrete([2 3])", "it is a MultiDiscrete")),
        (Shaped(act=spaces.Box(0, 9, (2,), np.int64)), ("it is a Box of int64 with shape (2,)",)),
        (Shaped(act=spaces.Box(0, 9, ())), ("it is a Box of float32 with shape ()",)),
        (
            Shaped(act=spaces.Dict(grip=spaces.Discrete(2))),
            ("action_space=Dict(", "'grip' is Discrete(2)", "only Discrete and floating-point Box actions"),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_spaces_that_cannot_be_learnt_on_name_the_part(env: gym.Env[Any, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        describe_spaces(env)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
