"""Controllers of users: found by their import paths or passed as objects, and instances that play episodes."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from dppo.errors import ConfigError, ControllerFault
from dppo.policies.controller import Controller, ControllerInstance

BOX = gym.spaces.Box(0, 1, (3,), np.float32)
PLANT = SimpleNamespace(action_space=BOX, observation_space=gym.spaces.Box(-1, 1, (2,), np.float64))
SOURCE = """
import numpy as np

class PI:
    def __init__(self):
        self.sum = 0.0
    def act(self, obs):
        self.sum += 1
        return np.full(3, self.sum / 10)

def half(obs):
    return np.full(3, 0.5)

instance = PI()
number = 3
"""


class Integrator:
    """Returns a tenth of the number of its steps."""

    def __init__(self) -> None:
        self.steps = 0

    def act(self, obs: Any) -> np.ndarray:
        self.steps += 1
        return np.full(3, self.steps / 10)


class Resettable(Integrator):
    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def reset(self) -> None:
        self.steps = 0


class OfSpaces:
    def __init__(self, seed: int, action_space: gym.spaces.Box, gain: float = 1.0) -> None:
        self.action = action_space.high * gain
        self.seed = seed

    def act(self, obs: Any) -> np.ndarray:
        return self.action * self.seed / 10


class Recurrent:
    """A policy as in Stable-Baselines3, whose state counts steps."""

    def predict(self, obs: Any, state: Any = None, deterministic: bool = False) -> Any:
        count = 1 if state is None else state + 1
        return np.full(3, count / 10 if deterministic else 1.0), count


def actions(controller: Controller, episodes: int = 2, steps: int = 2) -> list[float]:
    """Return the first elements of the actions of some episodes in one environment."""
    instance = ControllerInstance(controller, PLANT)
    first = []
    for episode in range(episodes):
        instance.begin(episode, seed=episode)
        first += [round(float(instance.act(np.zeros(2))[0]), 3) for _ in range(steps)]
    return first


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "plant_pi.py").write_text(SOURCE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("plant_pi", None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("PI", [0.1, 0.2, 0.1, 0.2]), ("half", [0.5] * 4), ("instance", [0.1, 0.2, 0.1, 0.2])],
)
def test_a_controller_is_found_by_module_or_file_and_survives_pickling(
    module: Path, name: str, expected: list[float]
) -> None:
    by_file = Controller(f"{module}/plant_pi.py:{name}")
    assert actions(pickle.loads(pickle.dumps(by_file))) == expected
    sys.path.insert(0, str(module))
    assert actions(Controller(f"plant_pi:{name}")) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("plant_pi:PID", "policy=plant_pi:PID: the module has no PID. Did you mean plant_pi:PI?"),
        ("plant_pi:pi", "policy=plant_pi:pi: the module has no pi. Did you mean plant_pi:PI?"),
        ("plant_pi:number", "is 3, which is no controller. Name a function action = f(obs)"),
        ("plant_pi", "names no controller. Write plant_pi:name."),
        ("plant_pi.PI", "names no controller. Write plant_pi:PI."),
        ("PI", "names no controller. Write module:PI or file.py:PI. Name a function"),
        (":", "names no controller. Write module:name or file.py:name."),
        ("{folder}/plant_pi.py", "plant_pi.py:name."),
        ("{folder}/other.py:PI", "there is no file"),
        ("no_such_plant:PI", "No module named 'no_such_plant'. Check the name"),
        ("broken_pi:PI", "line 1\n    def PI(:"),
    ],
)
def test_a_name_without_a_controller_is_refused_with_what_to_do(
    module: Path, text: str, words: str
) -> None:
    (module / "broken_pi.py").write_text("def PI(:\n")
    sys.path.insert(0, str(module))
    with pytest.raises(ConfigError) as refused:
        Controller(text.format(folder=module))
    assert words in str(refused.value)


def test_a_file_whose_name_another_module_has_is_refused(module: Path) -> None:
    (module / "json.py").write_text(SOURCE)
    with pytest.raises(ConfigError, match=r"another module json, .*Rename the file"):
        Controller(f"{module}/json.py:PI")


def test_state_of_an_integrator_never_leaks_into_another_episode() -> None:
    for controller in (Integrator, Integrator(), Resettable, Resettable()):
        assert actions(Controller(controller)) == [0.1, 0.2, 0.1, 0.2]


def test_a_class_with_reset_is_made_once_for_each_environment() -> None:
    Resettable.made = 0
    actions(Controller(Resettable), episodes=5)
    assert Resettable.made == 1


def test_a_class_gets_the_spaces_and_the_seed_of_the_episode_that_it_asks_for() -> None:
    assert actions(Controller(OfSpaces), episodes=3, steps=1) == [0.0, 0.1, 0.2]


def test_policies_with_predict_are_deterministic_and_carry_their_state_through_an_episode() -> None:
    assert actions(Controller(Recurrent())) == [0.1, 0.2, 0.1, 0.2]
    sampled = ControllerInstance(Controller(Recurrent()), PLANT, deterministic=False)
    sampled.begin(0, 0)
    assert sampled.act(np.zeros(2)).tolist() == [1, 1, 1]


class Needs:
    def __init__(self, gain: float) -> None: ...

    def act(self, obs: Any) -> None: ...


class Uncopied(Integrator):
    def __deepcopy__(self, memo: Any) -> None:
        raise RuntimeError("holds a socket")


@pytest.mark.parametrize(
    ("controller", "words"),
    [
        (
            Needs,
            "its constructor needs gain, and it can get only action_space, observation_space, seed.",
        ),
        (lambda: None, "takes (), and must take one observation."),
        (lambda obs, state: None, "takes (obs, state), and must take one observation."),
        (object(), "which is no controller. Name a function"),
        (
            Uncopied(),
            "cannot be copied, but each environment has a copy of its own (RuntimeError: holds a socket)",
        ),
    ],
)
def test_an_object_that_is_no_controller_is_refused(controller: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Controller(controller)
    assert words in str(refused.value)


def returning(space: gym.Space[Any], *actions: Any) -> ControllerInstance:
    """Return a controller that returns these actions in its next steps, of episode 7."""
    plant = SimpleNamespace(action_space=space, observation_space=BOX)
    answers = iter(actions)
    instance = ControllerInstance(Controller(lambda obs: next(answers)), plant)
    instance.begin(7, 123)
    return instance


CHOICE = gym.spaces.Discrete(2)


@pytest.mark.parametrize(
    ("space", "action", "expected"),
    [
        (BOX, [0, 0.5, 1], [0, 0.5, 1]),
        (gym.spaces.Box(0.1, 1, (1,), np.float32), np.array([0.1]), [np.float32(0.1)]),
        (gym.spaces.Discrete(3, start=1), np.int32(3), 3),
        (gym.spaces.MultiBinary(2), np.array([True, False]), [1, 0]),
        (gym.spaces.Tuple([CHOICE, BOX]), [1, (0, 0, 0)], (1, [0, 0, 0])),
        (gym.spaces.Dict(a=CHOICE), {"a": 1}, {"a": 1}),
    ],
)
def test_actions_are_converted_to_the_form_of_their_space(
    space: gym.Space[Any], action: Any, expected: Any
) -> None:
    returned = returning(space, action).act(None)
    assert space.contains(returned)

    def as_list(value: Any) -> Any:
        return np.array(value, object).tolist()

    np.testing.assert_equal(as_list(returned), as_list(expected))


@pytest.mark.parametrize(
    ("space", "action", "words"),
    [
        (
            BOX,
            [0, 1.5, 1],
            "an action that is 1.5 at index 1, outside its bounds from 0.0 to 1.0. Return actions in",
        ),
        (BOX, [0, 1], "an action of shape (2,) instead of (3,)"),
        (BOX, [0, np.nan, 1], "an action that is nan at index 1"),
        (BOX, ["a", "b", "c"], "an action of dtype <U1 instead of float32"),
        (gym.spaces.Discrete(3), 1.0, "an action of dtype float64 instead of int64"),
        (gym.spaces.Discrete(3), 3, "an action that is 3, outside its bounds from 0 to 2"),
        (gym.spaces.Dict(a=BOX), {"b": 1}, "an action with the keys 'b' instead of 'a'"),
        (
            gym.spaces.Dict(a=BOX),
            {"a": [2, 0, 0]},
            "an action with a part 'a' that is 2.0 at index 0, outside",
        ),
        (gym.spaces.Dict(a=BOX), 3, "an action of type int instead of a dict"),
        (gym.spaces.Tuple([BOX]), (), "an action of 0 items instead of 1"),
        (gym.spaces.Text(3), "long text", "an action that is long text, which is not in Text"),
    ],
)
def test_an_invalid_action_is_refused_with_episode_step_and_numbers(
    space: gym.Space[Any], action: Any, words: str
) -> None:
    instance = returning(space, space.sample(), action)
    instance.act(None)
    with pytest.raises(ControllerFault) as fault:
        instance.act(None)
    assert f"in step 2 of episode 7 (seed 123) it returned {words}" in str(fault.value)


def test_an_error_of_a_controller_names_the_step_and_has_its_traceback() -> None:
    def divides(obs: Any) -> float:
        return 1 / 0

    instance = ControllerInstance(Controller(divides, "baseline"), PLANT)
    instance.begin(0, 5)
    with pytest.raises(ControllerFault) as fault:
        instance.act(np.zeros(2))
    assert "in step 1 of episode 0 (seed 5) it raised ZeroDivisionError" in fault.value.message
    assert (
        fault.value.message.startswith("baseline=tests.test_controller:")
        or "divides" in fault.value.message
    )
    assert "return 1 / 0" in fault.value.remote_traceback
