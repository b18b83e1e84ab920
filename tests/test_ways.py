"""The ways to learn that the doctor recommends have the figures of the bench; flat runs say what to try first."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from builders import make_config
from commandline import parse

import dppo
from dppo.__main__ import main
from dppo.commands.train import arguments_of
from dppo.config.ways import DEFAULTS, REUSE, WAYS, Way, first_to_try
from dppo.envs.names import solved_at
from dppo.records.flat import Score, flat_note
from dppo.spaces.actions import Actions, BoxActions, DiscreteActions
from dppo.tools.doctor.speed import best_way

ROOT = Path(__file__).parents[1]
CONTINUOUS = """
MountainCarContinuous
Pendulum
LunarLanderContinuous
BipedalWalker
Reacher
InvertedDoublePendulum
Hopper
HalfCheetah
Walker2d
Pusher
"""
CENTRED = BoxActions(np.full(2, -1.0, np.float32), np.full(2, 1.0, np.float32))
VALVES = BoxActions(np.full(2, 0.0, np.float32), np.full(2, 1.0, np.float32))
FACTS: dict[str, Any] = {
    "step": {"mean": 0.02},
    "reset": {"mean": 0.0},
    "lengths": [100],
    "busy": 0.05,
    "own_busy": 0.05,
    "cpus": 2,
    "collect_s": 0.02,
    "update_s": 0.06,
    "env_mb": 1,
    "available_mb": 8000,
    "continuous": True,
}


@pytest.mark.parametrize(("column", "way"), [(1, DEFAULTS), (2, REUSE)])
def test_the_figures_of_a_way_are_those_of_the_bench(column: int, way: Way) -> None:
    table = (ROOT / "benchmarks" / "results" / "samples.md").read_text()
    good: dict[bool, list[int]] = {True: [], False: []}
    for cells in re.findall(r"^\| (\w+)[^|]*\| ([^|]*) \| ([^|]*) \|", table, re.MULTILINE):
        steps = re.match(r"\d+k, (\d+)k", cells[column])
        if steps:
            good[cells[0] in CONTINUOUS.split()].append(1000 * int(steps[1]))
    assert [len(good[True]), len(good[False])] == [10, 7]
    assert (min(good[True]), max(good[True])) == way.continuous
    assert (min(good[False]), max(good[False])) == way.discrete
    assert f"It needs {REUSE.share} of the env steps" in (ROOT / "docs" / "RESULTS.md").read_text()


@pytest.mark.parametrize(
    ("facts", "settings", "flags"),
    [
        ({}, {}, REUSE.flags),
        ({"step": {"mean": 1.0}}, {}, REUSE.flags),
        ({"continuous": False}, {}, REUSE.flags),
        # SGD takes nearly all of the time
        ({"step": {"mean": 1e-5}}, {}, ""),
        ({"update_s": 5.0}, {}, ""),
        # refused beside --reuse
        ({}, {"frame_stack": 4}, ""),
        ({}, {"loss": "spo"}, ""),
        # chosen by the user
        ({}, {"num_steps": 128}, None),
        ({}, {"reuse": 2}, None),
        ({}, {"algo": "sac", "env_id": "Pendulum-v1"}, None),
    ],
)
def test_the_doctor_recommends_reuse_where_steps_take_time(
    facts: dict[str, Any], settings: dict[str, Any], flags: str | None
) -> None:
    config = make_config({"env_id": "CartPole-v1"} | settings)
    here = best_way(FACTS | facts, config, settings.keys())
    assert (here and here.way.flags) == flags
    if here is not None and flags:
        assert here.config.reuse == 4
        assert "needed 10,000 to " in here.advice()


def test_every_way_is_accepted_by_the_command_line() -> None:
    for way in WAYS:
        words = dict(way.settings)
        assert arguments_of(words, "CartPole-v1", "dppo train").settings.items() >= words.items()


def test_the_command_that_the_doctor_prints_has_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = FACTS | {"stage": "over", "output": 0}
    monkeypatch.setattr("dppo.tools.doctor.watching.examine", lambda *_: facts)
    assert main(["doctor", "worlds.simple:Counting", "--gamma", "0.9", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    settings = parse(shlex.split(report["command"])[2:]).settings
    assert settings.items() >= {"gamma": "0.9", "reuse": "4", "num_steps": "32"}.items()
    assert report["advice"][0].startswith(f"{REUSE.flags} trains on each step more often")


class Constant(gym.Env[Any, Any]):
    """Four steps with a reward of 1."""

    observation_space = gym.spaces.Box(0.0, 4.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.full(1, self.steps, np.float32), 1.0, self.steps == 4, False, {}


def test_a_run_that_was_flat_says_so_at_its_end(tmp_path: Path) -> None:
    settings = {
        "env_id": Constant,
        "run_dir": tmp_path / "run",
        "num_samplers": 2,
        "num_steps": 16,
        "total_timesteps": 384,
        "update_epochs": 1,
        "progress": "off",
    }
    config = make_config(settings)
    result = dppo.train(config)
    assert any(
        "not risen in the last 128 env steps: 4 before, 4 now" in note for note in result.notes
    )


def scores(means: Sequence[float], std: float = 10.0, success: float = 0.0) -> list[Score]:
    """Return scores of a run with 50 episodes between two of them."""
    return [
        Score(1000 * number, 50 * number, mean, std, success)
        for number, mean in enumerate(means, 1)
    ]


def note(
    means: Sequence[float], actions: Actions = CENTRED, solved: float | None = None, **settings: Any
) -> str:
    config = make_config({"env_id": "CartPole-v1"} | settings)
    return flat_note(scores(means), config, actions, solved) or ""


RISE = [0.0, 40.0, 80.0, 100.0, 101.0, 99.0]
FLAT = [*RISE, 100.0, 100.5, 100.0]


def test_a_flat_run_says_what_to_try_first() -> None:
    text = note(FLAT, VALVES)
    assert "not risen in the last 3,000 env steps: 99 before, 100 now" in text
    tried = re.findall(r"\(\d\) (--[^:]+):", text)
    assert tried[0] == REUSE.flags
    assert tried[1] == "--action-bounds rescale"
    for flags in tried:
        words = re.findall(r"--(\S+) (\S+)", flags)
        settings = {name.replace("-", "_"): value for name, value in words}
        assert dppo.Config(env_id="Pendulum-v1", **settings)


def test_what_a_run_has_tried_already_is_not_advised() -> None:
    config = make_config({"env_id": "CartPole-v1", "reuse": 4, "num_steps": 32})
    assert list(first_to_try(config, CENTRED)) == []
    assert "docs/YOUR_SIMULATOR.md" in note(FLAT, reuse=4, num_steps=32)
    assert "num-steps 128" not in note(FLAT, DiscreteActions(2))
    of_sac = note(FLAT, env_id="Pendulum-v1", algo="sac")
    assert re.findall(r"\(\d\) (--[^:]+):", of_sac) == ["--entropy-start 0.5"]
    explores = note(FLAT, env_id="Pendulum-v1", algo="sac", entropy_start=0.5)
    assert "--" not in explores


@pytest.mark.parametrize(
    "means",
    [
        [*RISE, 105.0, 107.0, 110.0],  # slow, beyond the error of 1.4
        RISE[:2],  # too short
        [],
    ],
)
def test_a_run_that_rises_or_is_short_is_not_flat(means: list[float]) -> None:
    assert note(means) == ""


def test_noise_is_no_rise() -> None:
    """The means of 100 episodes with a deviation of 10 have a standard error of 1."""
    assert note([*RISE, 100.0, 101.0, 100.2])


def test_a_solved_task_is_not_called_flat() -> None:
    assert note(FLAT, solved=100.0) == ""
    assert note(FLAT, solved=475.0)
    config = make_config({"env_id": "CartPole-v1"})
    assert flat_note(scores(FLAT, success=0.97), config, CENTRED, None) is None
    assert solved_at("CartPole-v1") == 475.0
    assert solved_at("mysim:make") is None
