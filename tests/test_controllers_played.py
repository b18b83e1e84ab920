"""Controllers of users play episodes: as a loop by hand, on any number of actors, in the environment of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import tiny_run
from remedies import executes
from worlds import joint
from worlds.controllers import Drift, Integral, Resetting, far, still

import dppo
from dppo import streams
from dppo.errors import ConfigError, ControllerFault, EnvironmentFault
from dppo.streams import Stream

PLANT = "worlds.controllers:Drift"
INTEGRAL = "worlds.controllers:Integral"


def played_by_hand(episodes: int, seed: int) -> list[float]:
    """Return the returns of a new `Integral` in each episode."""
    env = Drift()
    returns = []
    for episode in range(episodes):
        controller = Integral()
        obs, _ = env.reset(seed=streams.integer(seed, Stream.EVALUATION, episode))
        total = 0.0
        truncated = False
        while not truncated:
            action = controller.act(obs).astype(np.float32)
            obs, reward, _, truncated, _ = env.step(action)
            total += reward
        returns.append(total)
    return returns


@pytest.mark.parametrize("controller", [Integral, Integral(), Resetting, Resetting(), INTEGRAL])
def test_returns_are_those_of_a_loop_by_hand(controller: Any) -> None:
    evaluation = dppo.evaluate(controller, env=Drift(), episodes=4, seed=3)
    assert list(evaluation.returns) == played_by_hand(4, 3)
    assert evaluation.lengths == (5,) * 4


def test_numbers_in_the_info_are_summed_up_and_arguments_are_passed() -> None:
    evaluation = dppo.evaluate(
        still, PLANT, 2, env_kwargs={"steps": 9}, info_keys=["violations", "energy"]
    )
    assert evaluation.lengths == (9, 9)
    for infos in evaluation.info["violations"]:
        assert infos.total >= 5
        assert infos.last == 1
    assert {infos.total for infos in evaluation.info["energy"]} == {0}


def test_any_number_of_actors_gives_the_same_evaluation(ray_session: None) -> None:
    """tests/test_controller.py shows that every kind of controller survives pickling."""
    keys = ["energy"]
    expected = dppo.evaluate(Integral, Drift, episodes=5, info_keys=keys)
    there = dppo.evaluate(Integral(), PLANT, 5, num_actors=2, info_keys=keys)
    assert there == expected


@pytest.mark.slow
def test_a_fault_of_a_controller_on_an_actor_is_its_own(ray_session: None) -> None:
    with pytest.raises(ControllerFault, match=r"far: in step 3 of episode \d \(seed \d+\)"):
        dppo.evaluate(far, Drift, num_actors=1)


def test_the_environment_of_a_run_is_prepared_as_in_training(tmp_path: Path) -> None:
    prepared: dict[str, Any] = {
        "env_kwargs": {"steps": 12},
        "drop_obs": ("note",),
        "action_repeat": 3,
    }
    result = dppo.train(tiny_run(tmp_path / "run", iterations=1, env_id=Drift, **prepared))

    def lengths_in(source: Any, **changes: Any) -> tuple[int, ...]:
        return dppo.evaluate(still, source, 2, **changes).lengths

    assert lengths_in(result) == (4, 4)
    assert lengths_in(result.run_dir, trust=True) == (4, 4)
    assert lengths_in(result, env_kwargs={"steps": 6}) == (2, 2)
    with pytest.raises(ConfigError, match="comes from the settings of"):
        dppo.evaluate(still, result.run_dir)


class Counting:
    """Acts by the number of its own steps, which is what it sees."""

    def __init__(self) -> None:
        self._steps = 0

    def act(self, obs: np.ndarray) -> int:
        assert obs[0] == self._steps
        self._steps += 1
        return self._steps % 3


def test_each_agent_has_an_instance_of_its_own_and_a_vector_plays_its_first_row() -> None:
    together = dppo.evaluate(Counting, joint.Agents, episodes=2)
    assert together.lengths == (8, 8)
    vector = dppo.evaluate(Counting, lambda: joint.Native(4, "NextStep"), episodes=2)
    assert vector.lengths == (2, 2)
    assert vector.returns == (1.5 + 2.5, 1.5 + 2.5)


def test_an_action_out_of_bounds_names_episode_step_and_numbers() -> None:
    seed = streams.integer(0, Stream.EVALUATION, 0)
    with pytest.raises(ControllerFault) as fault:
        dppo.evaluate("worlds.controllers:far", Drift(), episodes=1)
    assert str(fault.value).startswith(
        f"policy=worlds.controllers:far: in step 3 of episode 0 (seed {seed}) it returned an action that is 1.5 at "
        f"index 0, outside its bounds from -1.0 to 1.0."
    )


@executes(
    "policies/player.py: env: is missing, and a controller",
    "policies/player.py: model: has no effect on a controller",
    "policies/player.py: a controller samples actions",
)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "env: is missing, and a controller has none"),
        ({"env": PLANT, "model": "worlds.models:Plain"}, "model: has no effect on a controller"),
        ({"env": PLANT, "deterministic": False}, "worlds.controllers:still has none. Leave it out"),
        (
            {"env": Drift(), "env_kwargs": {}},
            "have no effect on an environment that is already made",
        ),
        ({"env": PLANT, "env_kwargs": 3}, "env_kwargs=3: must be arguments by name"),
        ({"env": Drift(), "num_actors": 2}, "an environment that is already made stays"),
    ],
)
def test_arguments_that_do_not_fit_a_controller_are_refused(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        dppo.evaluate(still, **arguments)
    assert words in str(refused.value)
    remedied = {"env": PLANT} | arguments
    for name in ("model", "deterministic", "env_kwargs"):
        remedied.pop(name, None)
    if "num_actors" not in arguments:
        assert dppo.evaluate(still, episodes=1, **remedied).lengths == (5,)


def test_a_fault_of_the_environment_is_not_one_of_the_controller() -> None:
    class Broken(Drift):
        def step(self, action: Any) -> Any:
            raise OSError("the plant is gone")

    with pytest.raises(EnvironmentFault, match="the plant is gone"):
        dppo.evaluate(still, Broken, episodes=1)
