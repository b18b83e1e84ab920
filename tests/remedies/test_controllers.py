"""Remedies for controllers: each is read from the message, and carried out."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from recorder import Notes, Recorder

import dppo
from dppo.errors import ConfigError, ControllerFault
from dppo.policies.controller import Controller, ControllerInstance
from remedies import executes
from remedies.running import TINY

BOX = gym.spaces.Box(0, 1, (2,), np.float32)
PLANT = SimpleNamespace(action_space=BOX, observation_space=BOX)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder in which Python looks for modules, with a module of two controllers."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (tmp_path / "remedied.py").write_text("def half(obs):\n    return [0.5, 0.5]\n")
    yield tmp_path
    for name in ("remedied", "remedied_json"):
        sys.modules.pop(name, None)


def refused(named: Any) -> str:
    with pytest.raises(ConfigError) as error:
        Controller(named)
    return str(error.value)


@executes(
    "user_code.py: Did you mean",
    "policies/controller_names.py: names no controller",
    "policies/controller_names.py: Name a function",
    "user_code.py: Check the spelling",
    "user_code.py: Check the name, and that the module is installed",
    "policies/controller_names.py: there is no file",
)
def test_a_controller_is_found_once_its_name_is_as_the_message_says(folder: Path) -> None:
    meant = re.search(r"Did you mean (\S+)\?", refused("remedied:halv"))
    assert meant is not None
    Controller(meant[1])
    form = re.search(r"Write (\S+)\.", refused("remedied"))
    assert form is not None
    assert form[1] == "remedied:name"
    Controller(form[1].replace("name", "half"))
    assert "Check the spelling" in refused("remedied:xyzzy")
    assert "Check the name, and that the module is installed" in refused("remedy:half")
    assert "Check the path" in refused(f"{folder}/remedy.py:half")
    Controller(f"{folder}/remedied.py:half")
    assert "Name a function action = f(obs), or a class or an object with act(obs)" in refused(3)
    for definition in (lambda obs: obs, Scaled, Scaled()):
        Controller(definition)


@executes(
    "policies/controller_names.py: Rename the file", "policies/controller_names.py: Check the name."
)
def test_a_file_is_imported_once_it_has_a_name_of_its_own(folder: Path) -> None:
    file = folder / "json.py"
    file.write_text("def half(obs):\n    return [0.5, 0.5]\n")
    assert "Rename the file" in refused(f"{file}:half")
    renamed = file.rename(folder / "remedied_json.py")
    Controller(f"{renamed}:half")


@executes("run/sources.py: Restore the file, or start again, in another folder")
def test_a_changed_prior_is_restored_in_the_middle_of_its_iterations(
    folder: Path, tmp_path: Path
) -> None:
    """Once its iterations are over, nothing depends on the file."""
    file = folder / "remedied.py"
    text = file.read_text().replace("[0.5, 0.5]", "[0.5]")
    file.write_text(text)
    sizes: dict[str, Any] = {**TINY, "total_timesteps": 64, "prior_steps": 48}
    plant = {"env_id": "worlds.plants:Plant", "prior": f"{file}:half"}

    def notes_of(run: Path, stop_at: int | None) -> str:
        config = dppo.Config(**sizes | plant, run_dir=run)
        with Notes() as notes:
            dppo.train(config, resume="auto", observers=[Recorder(interrupt_at=stop_at)])
        return "\n".join(notes.texts)

    assert "has changed" not in notes_of(tmp_path / "run", 1)
    changed_run = shutil.copytree(tmp_path / "run", tmp_path / "changed")
    file.write_text(text.replace("0.5", "0.25"))
    changed = f"prior={file}:half: its file {file} has changed after 1 of the 3 iterations"
    assert changed in notes_of(changed_run, 2)
    file.write_text(text)
    assert "has changed" not in notes_of(tmp_path / "run", 3)
    file.write_text(text.replace("0.5", "0.25"))
    assert "has changed" not in notes_of(tmp_path / "run", None)


class Scaled:
    """Returns an action far outside its bounds, or with `clips` its bound."""

    def __init__(self, clips: bool = False) -> None:
        self.clips = clips

    def act(self, obs: Any) -> Any:
        action = np.array([50.0, -3.0])
        return np.clip(action, 0, 1) if self.clips else action


class Needy(Scaled):
    def __init__(self, gain: float) -> None: ...


class NeedyWithDefault(Scaled):
    def __init__(self, gain: float = 1.0) -> None: ...


class Uncopied(Scaled):
    def __deepcopy__(self, memo: Any) -> None:
        raise RuntimeError("holds a socket")


@executes(
    "policies/controller.py: its constructor needs", "policies/controller.py: cannot be copied"
)
def test_an_instance_is_made_once_the_class_needs_nothing_more() -> None:
    assert "Give gain a default value" in refused(Needy)
    Controller(NeedyWithDefault)
    assert "Use its class, or a function" in refused(Uncopied())
    Controller(Uncopied)
    Controller(Uncopied().act)


@executes("envs/checks/actions.py: Return actions in the units of the environment, and clip them")
def test_an_action_is_accepted_once_it_is_clipped_to_the_bounds_of_the_message() -> None:
    def act(clips: bool) -> Any:
        instance = ControllerInstance(Controller(Scaled(clips)), PLANT)
        instance.begin(0, 0)
        return instance.act(np.zeros(2))

    with pytest.raises(ControllerFault, match="outside its bounds"):
        act(clips=False)
    assert act(clips=True).tolist() == [1, 0]
