"""Code that is named only by a run's folder runs only if the user trusts the folder, or names the code."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml
from builders import tiny_run
from commandline import Typed
from worlds import models

import dppo
from dppo.config import read_settings
from dppo.config.trust import code_named_by, resume_command
from dppo.errors import ConfigError

FACTORY = """
import pathlib
import gymnasium as gym

pathlib.Path("imported").touch()

def make(**kwargs):
    pathlib.Path("called").touch()
    return gym.make("CartPole-v1")
"""


def run_of(run_dir: Path, env_id: str = "CartPole-v1", **changes: Any) -> dppo.Result:
    return dppo.train(tiny_run(run_dir, env_id=env_id, **changes))


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of an environment that an installed package registered."""
    return run_of(tmp_path_factory.mktemp("honest") / "run").run_dir


@pytest.fixture
def modules(desk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Import modules from the current folder."""
    monkeypatch.syspath_prepend(desk)
    return desk


@pytest.fixture(params=["flat", "in groups"])
def evil(request: pytest.FixtureRequest, honest: Path, modules: Path) -> None:
    """Put the same run with changed settings into the folder `run`, as in a shared folder."""
    name = f"mysim_{modules.name}"
    Path(f"{name}.py").write_text(FACTORY, encoding="utf8")
    shutil.copytree(honest, "run")
    file = Path("run/config.yaml")
    changed = {"env_id": f"{name}:make", "env_kwargs": {"command": "rm"}}
    if request.param == "flat":
        settings = read_settings(file) | changed
    else:
        settings = yaml.safe_load(file.read_text(encoding="utf8")) | {"env": changed}
    file.write_text(yaml.safe_dump(settings), encoding="utf8")


def traces() -> set[str]:
    """Return the traces that the code of the folder has left."""
    return {name for name in ("imported", "called") if Path(name).exists()}


@pytest.mark.parametrize(
    ("line", "also"),
    [
        ("eval run", ", or name the environment yourself"),
        ("train --resume run", ", or name the environment yourself"),
        ("replay run --episode 1", ""),
    ],
)
def test_code_named_by_a_folder_is_refused(
    line: str, also: str, evil: None, refused: Typed
) -> None:
    """Not all commands have a flag for the environment."""
    [message] = refused(line).splitlines()
    assert "and imports mysim_" in message
    assert f"calls make(command='rm'). Add --trust if you trust that folder{also}." in message
    assert not traces()


def test_with_trust_the_code_is_printed_and_run(evil: None, typed: Typed) -> None:
    first, *_ = typed("eval run --trust --episodes 1").splitlines()
    assert traces() == {"imported", "called"}
    assert first.startswith("run imports mysim_")
    assert "and calls make(command='rm')." in first


def test_code_that_two_settings_name_is_printed_once(modules: Path, typed: Typed) -> None:
    controller = "worlds.priors:balance"
    run_of(Path("run"), prior=controller, baseline=controller, eval_every=64, eval_episodes=2)
    longer = "train --resume run --trust --total-timesteps 128"
    printed = typed(longer)
    assert printed.count("run imports worlds.priors and calls balance().") == 1
    assert "Done after 128 steps" in printed  # although the run had no display
    assert typed(longer).startswith("Nothing to do: the run has already completed its 128 steps.")


def test_an_environment_of_the_user_replaces_that_of_the_folder(
    evil: None, typed: Typed, refused: Typed
) -> None:
    line = "eval run --episodes 1 --env-id"
    assert "env_id=nosim:other" in refused(f"{line} nosim:other")  # which is not there
    Path("named.py").write_text(FACTORY.replace("imported", "named"), encoding="utf8")
    typed(f"{line} named:make")
    assert not Path("imported").exists()


CODE: list[tuple[dict[str, object], list[str]]] = [
    ({"env_id": "CartPole-v1"}, []),
    ({"env_id": "dppo/SlowCartPole-v0"}, []),
    ({"env_id": "os:system", "env_kwargs": {"a": "ls"}}, ["imports os and calls system(a='ls')"]),
    ({"env_id": "highway_env:highway-v0"}, ["imports highway_env and makes highway-v0"]),
    ({"wrappers": ["w:A", "w.v:B"]}, ["imports w and calls A(), imports w.v and calls B()"]),
    ({"wrappers": "w:A"}, ["imports w and calls A()"]),  # a setting that is refused later
    ({"model": "nets:Net", "model_kwargs": {"n": 1}}, ["imports nets and calls Net(n=1)"]),
]


@pytest.mark.parametrize(("settings", "words"), CODE)
def test_code_is_described_in_words(settings: dict[str, object], words: list[str]) -> None:
    assert list(code_named_by({"env_id": "E-v0"} | settings).values()) == words


def test_wrappers_named_by_a_folder_are_refused(
    modules: Path, typed: Typed, refused: Typed
) -> None:
    """For evaluation, the settings in the checkpoint count, not those in config.yaml."""
    Path("mywrap.py").write_text(FACTORY + "\nWrapper = lambda env: env\n", encoding="utf8")
    run_of(Path("run"), wrappers=["mywrap:Wrapper"])
    forget("mywrap")
    resuming = refused("train --resume run")
    config = Path("run/config.yaml")
    config.write_text(config.read_text(encoding="utf8").replace("- mywrap:Wrapper", ""), "utf8")
    for message in (resuming, refused("eval run")):
        assert "and imports mywrap and calls Wrapper(). Add --trust" in message

    policy = dppo.load_policy("run")
    with pytest.raises(ConfigError, match="and imports mywrap and calls Wrapper"):
        dppo.evaluate(policy, "CartPole-v1", episodes=1)

    dppo.evaluate(policy, gym.make("CartPole-v1"), episodes=1)  # is not wrapped
    assert not traces()
    typed("eval run --trust --episodes 1")
    assert traces() == {"imported"}


def forget(module: str) -> None:
    """Let this program import a module of the user again, and forget that it did."""
    del sys.modules[module]
    Path("imported").unlink()


OWN_NETWORK = """
import pathlib
from worlds.models import Plain

pathlib.Path("imported").touch()
Net = Plain
"""


def test_a_policy_with_a_network_of_its_own_is_loaded_only_if_trusted(modules: Path) -> None:
    Path("mynet.py").write_text(OWN_NETWORK, encoding="utf8")
    result = run_of(Path("run"), "Pendulum-v1", model="mynet:Net")
    obs = np.zeros(3, np.float32)

    def action_of(source: Any, **changes: Any) -> list[float]:
        action: list[float] = dppo.load_policy(source, **changes).act(obs).tolist()
        return action

    expected = action_of("run")  # this program has imported it
    forget("mynet")
    words = r"model=mynet:Net: .* Add `trust=True` if you trust that folder"
    with pytest.raises(ConfigError, match=words):
        dppo.load_policy("run")
    assert action_of("run", model=models.Plain) == expected
    assert not Path("imported").exists()
    assert action_of("run", trust=True) == expected
    assert Path("imported").exists()
    assert action_of(result) == expected


def test_the_command_that_continues_a_run_includes_trust_where_needed() -> None:
    run = Path("r")
    plain = "dppo train --resume r"
    assert resume_command(run, {"env_id": "CartPole-v1", "model": None}) == plain
    for setting, name in (
        ("wrappers", ["w:A"]),
        ("env_id", "mysim:make"),
        ("baseline", "pi:PI"),
        ("prior", "pi:PI"),
    ):
        command = resume_command(run, {"env_id": "CartPole-v1", setting: name})
        assert command == f"{plain} --trust"
