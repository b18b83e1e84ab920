"""The ways to learn that the doctor recommends have the figures of the bench; flat runs say what to try first."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from builders import SLOW_STEPS, make_config, tiny_run
from commandline import Typed, parse
from worlds.faulty import Faulty

import dppo
from dppo.commands.train import arguments_of
from dppo.config.ways import DEFAULTS, REUSE, SAC, WAYS, KnownTasks, Way, first_to_try, suits_sac
from dppo.envs.names import solved_at
from dppo.envs.spaces import describe_spaces
from dppo.records.flat import Score, flat_note
from dppo.spaces.actions import Actions, BoxActions, DiscreteActions
from dppo.tools.doctor.speed import best_way
from dppo.tools.doctor.updating import facts_of_algorithms

ROOT = Path(__file__).parents[1]
CENTRED = BoxActions(np.full(2, -1.0, np.float32), np.full(2, 1.0, np.float32))
VALVES = BoxActions(np.full(2, 0.0, np.float32), np.full(2, 1.0, np.float32))


class Bench:
    """The env steps that algorithms needed in the runs that the repository holds."""

    def __init__(self) -> None:
        from samples_figures import stored
        from samples_tasks import TASKS

        self._tasks = TASKS
        self._runs = stored(ROOT / "benchmarks" / "samples.jsonl")

    def needed(self, algorithm: str, *, continuous: bool) -> dict[str, float]:
        """Return the median over seeds for each task of this kind; infinite if it was not learned."""
        from samples_figures import reached

        steps = {}
        for name, task in self._tasks.items():
            if task.continuous == continuous and (algorithm, name) in self._runs:
                steps[name] = median(reached(self._runs, algorithm, name, "good"))
        return steps


def known_tasks(needed: dict[str, float]) -> KnownTasks | None:
    """Return the figures of a way that needed so many steps."""
    if not needed:
        return None
    not_learned = tuple(name for name, steps in needed.items() if steps == math.inf)
    learned = [1000 * round(steps / 1000) for steps in needed.values() if steps < math.inf]
    return KnownTasks(len(learned), min(learned), max(learned), not_learned)


@pytest.mark.parametrize(("side", "way"), [("dppo", DEFAULTS), ("reuse", REUSE), ("sac", SAC)])
def test_the_figures_of_a_way_are_those_of_the_bench(
    side: str, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    bench = Bench()
    continuous = bench.needed(side, continuous=True)
    discrete = bench.needed(side, continuous=False)
    assert way.continuous == known_tasks(continuous)
    assert way.discrete == known_tasks(discrete)

    if side == "sac" and continuous:
        defaults = bench.needed("dppo", continuous=True)
        shares = [steps / defaults[name] for name, steps in continuous.items() if name in defaults]
        assert way.share == round(median(shares), 2)
    results = (ROOT / "docs" / "COMPARISON.md").read_text()
    assert f"It needs {REUSE.share} of the env steps" in results


MEASURED = replace(SAC, share=0.2, continuous=KnownTasks(9, 4_000, 60_000, ("Hopper",)))
"""Soft actor-critic as if the bench had run it."""
OF_SAC = {"algorithms": {"sac": {"collect_s": 0.02, "update_s": 0.6}}}


@pytest.fixture
def measured_sac(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("dppo.config.ways", "dppo.tools.doctor.speed", "dppo.tools.doctor.updating"):
        __import__(module)
        monkeypatch.setattr(sys.modules[module], "WAYS", (DEFAULTS, REUSE, MEASURED))
    monkeypatch.setattr("dppo.config.ways.SAC", MEASURED)


@pytest.mark.usefixtures("measured_sac")
@pytest.mark.parametrize(
    ("facts", "settings", "flags"),
    [
        (OF_SAC, {}, "--algo sac"),
        # gradient steps take nearly all of the time
        (OF_SAC | {"step": {"mean": 1e-5}}, {}, ""),
        # it cannot learn this task, so it was not measured
        ({}, {}, REUSE.flags),
        # chosen for PPO, or refused
        (OF_SAC, {"learning_rate": 1e-3}, REUSE.flags),
        (OF_SAC, {"gae_lambda": 0.9}, REUSE.flags),
        (OF_SAC, {"gamma": 0.9}, "--algo sac"),
        (OF_SAC, {"algo": "ppo"}, None),
    ],
)
def test_the_doctor_recommends_soft_actor_critic_where_it_is_faster(
    facts: dict[str, Any], settings: dict[str, Any], flags: str | None
) -> None:
    config = make_config({"env_id": "Pendulum-v1"} | settings)
    here = best_way(SLOW_STEPS | facts, config, settings.keys())
    assert (here and here.way.flags) == flags

    if here is not None and here.way is MEASURED:
        defaults = make_config({"env_id": "E-v0", "algo": "sac"})
        assert here.config.algo == "sac"
        assert here.config.gamma == settings.get("gamma", 0.99)
        assert here.config.learning_rate == defaults.learning_rate
        text = here.advice()
        assert text.startswith("--algo sac learns from all env steps so far. 9 known tasks")
        assert "needed 4,000 to 60,000 env steps" in text
        assert "(Hopper: not learned)" in text


NUMBERS = gym.spaces.Box(-1.0, 1.0, (3,))
NAMED = gym.spaces.Dict(a=NUMBERS, b=gym.spaces.Discrete(3))
PICTURE = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)
BOUNDED = gym.spaces.Box(-2.0, 2.0, (2,))
HALF_BOUNDED = gym.spaces.Box(-np.inf, 1.0, (2,))


@pytest.mark.usefixtures("measured_sac")
@pytest.mark.parametrize(
    ("obs", "actions", "is_possible"),
    [
        (NUMBERS, BOUNDED, True),
        (NAMED, BOUNDED, True),
        (NUMBERS, gym.spaces.Discrete(2), False),
        (NUMBERS, HALF_BOUNDED, False),
        (PICTURE, BOUNDED, False),
    ],
)
def test_the_doctor_times_soft_actor_critic_where_it_is_possible(
    obs: gym.Space[Any], actions: gym.Space[Any], is_possible: bool
) -> None:
    config = make_config({"env_id": "Still-v0", "num_samplers": 2, "num_steps": 8})
    env: gym.Env[Any, Any] = Faulty(space=obs, observe=lambda _: obs.sample())
    env.action_space = actions
    times = facts_of_algorithms(config, env, describe_spaces(env), until=0.0)
    expected = ["sac"] if is_possible else []
    assert list(times) == expected
    for algorithm_times in times.values():
        assert algorithm_times["collect_s"] > 0
        assert algorithm_times["update_s"] > 0
        assert "two critics" in algorithm_times["network"]


def advised(text: str) -> list[str]:
    """Return the flags that a note says to try, in its order."""
    return re.findall(r"\(\d\) (--[^:]+):", text)


@pytest.mark.usefixtures("measured_sac")
def test_a_flat_run_tries_soft_actor_critic_first_where_it_is_possible() -> None:
    assert suits_sac(CENTRED)
    text = note(FLAT, VALVES)
    assert advised(text)[:2] == [MEASURED.flags, REUSE.flags]
    assert "--algo sac: 0.2 of the env steps on 9 known tasks" in text

    infinite = np.full(2, np.inf, np.float32)
    endless = BoxActions(-infinite, infinite)
    assert "--algo sac" not in note(FLAT, endless)
    assert "--algo sac" not in note(FLAT, DiscreteActions(2))
    assert "--algo sac" not in note(FLAT, learning_rate=1e-3)


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
    here = best_way(SLOW_STEPS | facts, config, settings.keys())
    assert (here and here.way.flags) == flags
    if here is not None and flags:
        assert here.config.reuse == 4
        assert "needed 10,000 to " in here.advice()


def test_every_way_is_accepted_by_the_command_line() -> None:
    for way in WAYS:
        words = dict(way.settings)
        assert arguments_of(words, "CartPole-v1", "dppo train").settings.items() >= words.items()


@pytest.mark.parametrize(
    ("env_id", "sac_facts", "expected"),
    [
        ("worlds.simple:Counting", {}, {"reuse": "4", "num_steps": "32"}),
        ("Pendulum-v1", OF_SAC, {"algo": "sac"}),
    ],
)
@pytest.mark.usefixtures("measured_sac")
def test_the_command_that_the_doctor_prints_has_it(
    env_id: str,
    sac_facts: dict[str, Any],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    typed: Typed,
) -> None:
    facts = SLOW_STEPS | sac_facts | {"stage": "over", "output": 0}
    monkeypatch.setattr("dppo.tools.doctor.watching.examine", lambda *_: facts)
    report = json.loads(typed(f"doctor {env_id} --gamma 0.9 --preset none --json"))
    words = shlex.split(report["command"])[2:]
    settings = parse(words).settings
    assert settings.items() >= (expected | {"gamma": "0.9"}).items()
    assert ("reuse" in settings) == ("reuse" in expected)
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in expected.items()]
    assert report["advice"][0].startswith(f"{' '.join(flags)} ")


def test_a_run_that_was_flat_says_so_at_its_end(tmp_path: Path) -> None:
    flat: dict[str, Any] = {"env_id": lambda: Faulty(length=4), "total_timesteps": 960}
    result = dppo.train(tiny_run(tmp_path / "run", samplers=2, **flat))
    expected = "not risen in the last 320 env steps: 4 before, 4 now"
    assert any(expected in note for note in result.notes)


def scores(means: Sequence[float], success: float = 0.0) -> list[Score]:
    """Return scores of a run with 50 episodes between two of them."""
    listed = []
    for number, mean in enumerate(means, 1):
        score = Score(2000 * number, 50 * number, mean, 10.0, success)
        listed.append(score)
    return listed


def note(
    means: Sequence[float], actions: Actions = CENTRED, solved: float | None = None, **settings: Any
) -> str:
    config = make_config({"env_id": "CartPole-v1"} | settings)
    text = flat_note(scores(means), config, actions, solved)
    return text or ""


RISE = [0.0, 40.0, 80.0, 100.0, 101.0, 99.0]
FLAT = [*RISE, 100.0, 100.5, 100.0]


def test_a_flat_run_says_what_to_try_first() -> None:
    text = note(FLAT, VALVES)
    assert "not risen in the last 6,000 env steps: 99 before, 100 now" in text
    tried = advised(text)
    assert tried[:3] == [SAC.flags, REUSE.flags, "--action-bounds rescale"]
    for flags in tried:
        words = re.findall(r"--(\S+) (\S+)", flags)
        settings = {name.replace("-", "_"): value for name, value in words}
        assert dppo.Config(env_id="Pendulum-v1", **settings)


def test_what_a_run_has_tried_already_is_not_advised() -> None:
    reuse: dict[str, Any] = {"reuse": 4, "num_steps": 32}
    config = make_config({"env_id": "CartPole-v1"} | reuse)
    assert list(first_to_try(config, CENTRED)) == []
    assert "docs/YOUR_SIMULATOR.md" in note(FLAT, **reuse)
    assert "num-steps 128" not in note(FLAT, DiscreteActions(2))

    sac: dict[str, Any] = {"env_id": "Pendulum-v1", "algo": "sac"}
    assert advised(note(FLAT, **sac, noise="white")) == ["--noise wide"]
    explores = note(FLAT, **sac)
    assert "--" not in explores
    assert advised(note(FLAT, **sac, policy_lag=1)) == ["--num-steps 16"]
    assert "--" not in note(FLAT, **sac, policy_lag=1, num_steps=16)


@pytest.mark.parametrize(
    ("means", "is_flat"),
    [
        ([*RISE, 105.0, 107.0, 110.0], False),  # slow, beyond the error of 1.4
        (RISE[:2], False),  # too short
        ([], False),
        # means of 100 episodes with a deviation of 10 have a standard error of 1
        ([*RISE, 100.0, 101.0, 100.2], True),
    ],
)
def test_a_run_that_rises_by_more_than_noise_or_is_short_is_not_flat(
    means: list[float], is_flat: bool
) -> None:
    assert bool(note(means)) == is_flat


def test_a_run_of_fewer_than_30_iterations_is_not_judged() -> None:
    assert note(FLAT, num_samplers=1, num_steps=600)
    assert not note(FLAT, num_samplers=1, num_steps=620)


def test_a_run_whose_evaluations_rise_or_solve_the_task_is_not_flat() -> None:
    """Returns of training contain noise, which may hide the rise."""
    config = make_config({"env_id": "CartPole-v1"})

    def is_flat(evaluated: Sequence[float], solved: float | None = None) -> bool:
        evaluations = scores(evaluated)
        return bool(flat_note(scores(FLAT), config, CENTRED, solved, evaluations))

    # the last third begins after the sixth; means of 50 episodes or more with a deviation of 10
    assert is_flat([100.0] * 9)
    assert is_flat([0.0, 20.0, 40.0, 60.0, 80.0, 100.0, 90.0, 95.0, 100.5])
    assert not is_flat([0.0, 20.0, 40.0, 60.0, 80.0, 100.0, 90.0, 95.0, 110.0])
    assert is_flat([100.0] * 9, solved=475.0)
    assert not is_flat([500.0] * 9, solved=475.0)


def test_evaluations_are_read_from_the_rows_that_report_them() -> None:
    row = {"iteration": 2, "global_step": 100, "eval/global_step": 50, "eval/return_std": 3.0}
    assert Score.from_evaluation(row) is None
    row |= {"eval/episodic_return": 7.0, "eval/episodes": 5}
    assert Score.from_evaluation(row) == Score(50, 5, 7.0, 3.0, 0.0)
    assert Score.from_evaluation(row | {"eval/episodes": 0}) is None


def test_a_solved_task_is_not_called_flat() -> None:
    assert note(FLAT, solved=100.0) == ""
    assert note(FLAT, solved=475.0)
    config = make_config({"env_id": "CartPole-v1"})
    assert flat_note(scores(FLAT, success=0.97), config, CENTRED, None) is None
    assert solved_at("CartPole-v1") == 475.0
    assert solved_at("mysim:make") is None
