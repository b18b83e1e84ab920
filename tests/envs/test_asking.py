"""What a factory may ask for; wrappers; and environments that change state of their process."""

from __future__ import annotations

import pickle
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from builders import make_config
from commandline import fresh_environment
from worlds import asking, joint
from worlds.asking import Doubled, Numbered, PlusOne
from worlds.simple import Counting

import dppo
from dppo.config import Config, read_settings
from dppo.config.parts import Env
from dppo.envs.checks.faults import WrapperRaised
from dppo.envs.closing import close_all
from dppo.envs.instance import Instance
from dppo.envs.make import make_env
from dppo.envs.preparation import make_prepared
from dppo.envs.wrappers import old_api
from dppo.errors import ConfigError
from dppo.files import SCRATCH, remove_abandoned
from dppo.hosts.plans import sampler_plan
from dppo.hosts.sampler_builder import build_sampler
from dppo.process_state.forks import FORKS

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: Patch) -> Iterator[Path]:
    """Return a folder for temporary files of this process; keep the state of the process that tests change."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    numbers = np.random.get_state()
    before = random.getstate()
    threads = torch.get_num_threads()
    torch_state = torch.get_rng_state()
    yield tmp_path
    np.random.set_state(numbers)
    random.setstate(before)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(threads)
    torch.set_rng_state(torch_state)


def scratch(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if SCRATCH in path.name]


def asked(**env_kwargs: Any) -> dict[str, Any]:
    """Return the arguments that a factory gets."""
    got: dict[str, Any] = {}

    def factory(
        sampler_id: int,
        env_index: int = 9,
        *,
        scratch_dir: str = "",
        render_mode: Any,
        **keywords: Any,
    ) -> gym.Env[Any, Any]:
        got.update(
            sampler_id=sampler_id,
            env_index=env_index,
            scratch_dir=scratch_dir,
            render_mode=render_mode,
            **keywords,
        )
        return Counting()

    env = make_env(factory, env_kwargs, Instance(3, 1))
    got["there"] = bool(got["scratch_dir"]) and Path(got["scratch_dir"]).is_dir()
    env.close()
    got["left"] = bool(got["scratch_dir"]) and Path(got["scratch_dir"]).is_dir()
    return got


class Unclosed:
    """An environment that derives from nothing, and has no `close`."""

    observation_space = gym.spaces.Box(0, np.inf, (1,), np.float32)
    action_space = gym.spaces.Discrete(4)

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any: ...


class Bare(Unclosed):
    def close(self) -> None: ...


@pytest.mark.parametrize(
    "maker", [Unclosed, lambda scratch_dir: Unclosed(), lambda: old_api(Unclosed())]
)
def test_an_environment_needs_no_close(maker: Any, temporary: Path, capsys: Any) -> None:
    close_all([make_env(maker, {})])
    assert (scratch(temporary), capsys.readouterr().err) == ([], "")


@pytest.mark.parametrize("base", [Counting, Bare, joint.Agents])
def test_an_environment_may_close_itself_in_its_reset(base: Any, temporary: Path) -> None:
    """Its folder stays; and the simulator of the last episode is closed, too."""
    running: list[Any] = []

    class Restarting(base):  # type: ignore[misc]
        def reset(self, **keywords: Any) -> Any:
            self.close()
            running.append(self)
            return super().reset(**keywords)

        def close(self) -> None:
            running.clear()
            super().close()

    env = make_env(lambda scratch_dir: Restarting(), {}, Instance(num_sub_envs=3))
    for seed in (1, 2):
        env.reset(seed=seed)
        assert (len(running), len(scratch(temporary))) == (1, 1)
    env.close()
    assert (running, scratch(temporary)) == ([], [])


@pytest.mark.parametrize("base", [Counting, Bare, joint.Agents])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "fork"])
def test_the_folder_goes_with_the_environment_that_got_it_not_with_a_copy(
    base: Any, way: str, temporary: Path, monkeypatch: Patch
) -> None:
    closed: list[Any] = []
    monkeypatch.setattr(base, "close", lambda self: closed.append(self.number))
    env = make_env(lambda scratch_dir, slots: base(), {}, Instance(num_sub_envs=3))
    env.env.number = 1
    if way == "fork":
        with monkeypatch.context() as child:
            child.setattr(FORKS, "number", FORKS.number + 1)
            env.close()
    else:
        copied = deepcopy(env) if way == "deepcopy" else pickle.loads(pickle.dumps(env))
        copied.env.number = 2
        copied.close()
    copies = [] if way == "fork" else [2]
    assert (closed, len(scratch(temporary))) == (copies, 1)
    env.close()
    env.close()  # only the first call closes it
    assert (closed, scratch(temporary)) == ([*copies, 1], [])


def test_a_factory_gets_what_it_asks_for_unless_the_user_gives_it(temporary: Path) -> None:
    got = asked(speed=2)
    folder = got.pop("scratch_dir")
    assert Path(folder).parent == temporary
    assert got == {
        "sampler_id": 3,
        "env_index": 1,
        "render_mode": None,
        "speed": 2,
        "there": True,
        "left": False,
    }

    answers = {"sampler_id": 7, "env_index": 5, "scratch_dir": "", "render_mode": "rgb_array"}
    assert asked(**answers) == answers | {"there": False, "left": False}
    assert scratch(temporary) == []


def test_a_factory_that_does_not_ask_gets_nothing(temporary: Path) -> None:
    def shown(render_mode: str = "rgb_array", **keywords: Any) -> gym.Env[Any, Any]:
        assert (render_mode, keywords) == ("rgb_array", {})
        return Counting()

    def numbered(sampler_id: int) -> gym.Env[Any, Any]:
        assert sampler_id == 5
        return Counting()

    make_env(shown, {})
    make_env(partial(numbered, sampler_id=5), {})
    make_env(Counting, {})
    assert make_env("CartPole-v1", {}).unwrapped.render_mode is None
    assert scratch(temporary) == []


def test_each_environment_of_a_sampler_has_its_number_and_a_folder_until_it_is_closed(
    temporary: Path,
) -> None:
    config = make_config({"env_id": Numbered, "envs_per_sampler": 2})
    built = build_sampler(sampler_plan(config), 4)
    envs: list[Any] = [checked.env for checked in built.envs.sub_envs.envs]
    assert [env.get_wrapper_attr("place") for env in envs] == [4.0, 4.1]

    first = envs[0].get_wrapper_attr("log").parent
    assert first.is_dir()

    rebuilt: Any = built.envs.sub_envs.make(0)  # while the one that failed is still open
    assert (rebuilt.get_wrapper_attr("place"), len(scratch(temporary))) == (4.0, 3)

    envs[0].close()
    assert (first.exists(), rebuilt.get_wrapper_attr("log").exists()) == (False, True)

    rebuilt.close()
    built.envs.close()
    assert scratch(temporary) == []


def test_a_constructor_that_raises_leaves_no_folder(temporary: Path) -> None:
    def raises(scratch_dir: str) -> gym.Env[Any, Any]:
        raise OSError("no licence")

    def returns_nothing(scratch_dir: str) -> Any:
        return None

    with pytest.raises(OSError, match="no licence"):
        make_env(raises, {})
    with pytest.raises(ConfigError, match="made None"):
        make_env(returns_nothing, {})
    assert scratch(temporary) == []


def test_folders_of_a_killed_process_are_removed_and_those_of_a_living_one_stay(
    temporary: Path,
) -> None:
    script = (
        "import tempfile, time; from contextlib import ExitStack; from dppo.files import make_scratch_dir\n"
        f"tempfile.tempdir = {str(temporary)!r}; stack = ExitStack()\n"
        "print(make_scratch_dir(stack), flush=True); time.sleep(60)"
    )
    run = [sys.executable, "-c", script]
    with subprocess.Popen(
        run, stdout=subprocess.PIPE, text=True, env=fresh_environment()
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        (folder / "log").touch()
        remove_abandoned(SCRATCH)
        assert (folder / "log").exists()
        process.send_signal(signal.SIGKILL)

    make_env(lambda scratch_dir: Counting(), {}).close()  # as its replacement does
    assert scratch(temporary) == []


# ------------------------------------------------------------------ wrappers


@pytest.mark.parametrize(
    ("wrappers", "reward"), [((), 1), ((Doubled, PlusOne), 3), ((PlusOne, Doubled), 4)]
)
def test_wrappers_are_applied_in_order_before_frames_are_prepared(
    wrappers: Any, reward: float
) -> None:
    paths = [f"worlds.asking:{wrapper.__name__}" for wrapper in wrappers]
    for named in (wrappers, tuple(paths)):
        env = make_prepared(Env(env_id=Counting, wrappers=named, action_repeat=10))
        env.reset(seed=0)
        assert env.step(1)[1] == 10 * reward


def test_a_wrapper_that_cannot_be_imported_is_refused_before_anything_starts(
    temporary: Path,
) -> None:
    run = {"run_dir": temporary / "run", "progress": "off"}
    config = make_config({"env_id": "CartPole-v1", "wrappers": ("nowhere:Wrapper",), **run})
    with pytest.raises(ConfigError, match=r"^wrappers=nowhere:Wrapper: importing nowhere failed"):
        dppo.train(config)
    assert not (temporary / "run").exists()


def test_a_wrapper_that_returns_nothing_or_raises_closes_the_environment() -> None:
    closed: list[Any] = []

    class Closing(Counting):
        def close(self) -> None:
            closed.append(self)

    with pytest.raises(ConfigError, match=r"wrappers=worlds\.asking:nothing: made None"):
        make_prepared(Env(env_id=Closing, wrappers=("worlds.asking:PlusOne", asking.nothing)))
    with pytest.raises(WrapperRaised):
        make_prepared(Env(env_id=Closing, wrappers=(lambda env: env.missing,)))
    assert len(closed) == 2


# ------------------------------------------------------------------ the promise


def small(run_dir: Path, **changes: Any) -> Config:
    sizes = {
        "num_samplers": 2,
        "envs_per_sampler": 2,
        "num_steps": 20,
        "total_timesteps": 240,
        "update_epochs": 2,
    }
    world = {"env_id": "worlds.asking:Numbered", "wrappers": (Doubled,)}
    return make_config(sizes | world | {"run_dir": run_dir, "progress": "off"} | changes)


MEDDLES = {"env_kwargs": {"meddles": True}}


def test_state_of_the_process_that_an_environment_changes_does_not_change_the_result(
    temporary: Path,
) -> None:
    """It seeds and draws from the global generators, leaves the folder, and sets up torch."""
    alone = dppo.train(small(temporary / "alone"))
    meddled = dppo.train(small(temporary / "meddled", **MEDDLES))
    assert (torch.get_default_dtype(), Path.cwd()) == (torch.float64, temporary), "it did so"
    assert alone.weights_sha256 == meddled.weights_sha256
    assert scratch(temporary) == []
    assert read_settings(temporary / "alone" / "config.yaml")["wrappers"] == [
        "worlds.asking:Doubled"
    ]
    assert dppo.evaluate(alone, episodes=2).returns == (36.0, 36.0), (
        "it has a number behind all samplers"
    )


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["none", "gru"])
def test_numbers_and_meddling_give_the_same_result_wherever_and_a_killed_actor_leaves_no_folder(
    memory: str, temporary: Path, ray_session: None, monkeypatch: Patch
) -> None:
    alone = dppo.train(small(temporary / "alone", memory=memory))
    monkeypatch.setattr(tempfile, "tempdir", None)
    actors_folder = Path(tempfile.gettempdir())
    before = set(scratch(Path(tempfile.gettempdir())))
    killing = {"env_kwargs": {"meddles": True, "killing": str(temporary / "killed")}}
    hosted = dppo.train(small(temporary / "hosted", memory=memory, num_actors=2, **killing))
    assert hosted.incidents["actor_lost"] == 1
    assert alone.weights_sha256 == hosted.weights_sha256
    assert set(scratch(actors_folder)) <= before
