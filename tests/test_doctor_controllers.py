"""What the doctor finds by playing zero, random and baseline actions."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import pytest
from builders import make_config
from remedies import executes
from test_doctor import facts_of
from worlds.controllers import Drift, Integral

import dppo
from dppo.config import Config
from dppo.envs.checks.actions import action_checker, action_nearest_zero
from dppo.tools.doctor.command import _advice_on_prior, _with_evaluations
from dppo.tools.doctor.controllers import (
    MIN_EPISODES,
    RANDOM,
    ZERO,
    Random,
    Zero,
    reason_to_leave_out,
)
from dppo.tools.doctor.examination import Examination
from dppo.tools.doctor.findings import findings
from dppo.tools.doctor.playing import FIRST_SHARE
from dppo.tools.doctor.speed import Facts

INTEGRAL = "worlds.controllers:Integral"
SIZES: dict[str, Any] = {"num_samplers": 1, "num_steps": 16, "update_epochs": 1}


def config_of(**settings: Any) -> Config:
    plant = {"env_id": "worlds.controllers:Drift", "drop_obs": ("note",)}
    return make_config(plant | SIZES | settings)


def examined(config: Config, monkeypatch: pytest.MonkeyPatch) -> Facts:
    """Examine an environment in this process, up to the stage in which controllers play."""
    for stage in ("_iterate", "_compare"):
        monkeypatch.setattr(Examination, stage, lambda *_: None)
    monkeypatch.setattr("dppo.tools.doctor.examination.MAX_STEPS", 50)
    return facts_of(config)


def texts(facts: Facts, config: Config) -> list[str]:
    return [text for _, text in findings({"available_mb": 1e6, "cpus": 2} | facts, config)]


def test_the_returns_are_those_of_dppo_evaluate(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(baseline=INTEGRAL, eval_every=16, seed=4)
    facts = examined(config, monkeypatch)
    played = facts["controllers"]
    assert list(played) == [ZERO, RANDOM, INTEGRAL]
    for returns, controller in zip(played.values(), (Zero, Random, Integral), strict=True):
        evaluation = dppo.evaluate(controller, Drift(), 10, seed=4)
        assert returns == list(evaluation.returns)


def test_a_baseline_that_fails_is_named_and_the_environment_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(baseline="worlds.controllers:far", eval_every=16)
    facts = examined(config, monkeypatch)
    failed = [text for text in texts(facts, config) if text.startswith("while zero, random and")]
    assert "baseline=worlds.controllers:far: in step 3 of episode 0" in failed[0]


@executes("tools/doctor/controllers.py: are left for them. To measure them, raise --seconds")
def test_controllers_that_take_too_long_are_left_out_with_the_reason() -> None:
    config = config_of()
    now = time.monotonic()
    reason = reason_to_leave_out([100], 150, 1.0, now + 30.5, 0.25, config)
    assert reason == (
        "2 episodes of each take 400 s, and 30 s are left for them. To measure them, raise --seconds to 2420"
    )
    assert texts({"controllers_left_out": reason}, config) == [
        f"the returns of zero and random actions were not measured: {reason}"
    ]
    assert reason_to_leave_out([100], 150, 1.0, now + 500, 0.25, config) == ""
    no_end = "no episode ended in {} steps. {}"
    assert reason_to_leave_out([], 150, 1.0, now, 0.25, config) == no_end.format(
        150, "Raise --seconds"
    )
    assert reason_to_leave_out([], 9000, 1.0, now, 0.25, config) == no_end.format(
        "9,000", "Let them end"
    )


@pytest.mark.parametrize("baseline", [None, INTEGRAL])
def test_the_seconds_that_are_advised_suffice(
    baseline: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(baseline=baseline, eval_every=None if baseline is None else 16)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    examination = Examination(config, 100.0, lambda **_: None, {})
    play = examination._play_share
    share = (1 - play) * examination._controllers_share
    reason = reason_to_leave_out([200], 400, 0.02, now, share, config)
    advised_s = float(reason.rpartition(" ")[2])
    needed_s = MIN_EPISODES * (2 if baseline is None else 3) * 200 * 0.02
    enough = {
        seconds: (FIRST_SHARE * seconds - 8.0) * share > needed_s for seconds in (60.0, advised_s)
    }
    assert enough == {60.0: baseline is not None, advised_s: True}


@pytest.mark.parametrize(
    ("baseline", "words"),
    [
        ("worlds.controllers:Integrals", "the module has no Integrals. Did you mean "),
        ("worlds.controlers:Integral", "No module named 'worlds.controlers'"),
    ],
)
def test_a_baseline_that_is_misspelled_ends_the_examination_as_it_ends_a_run(
    baseline: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor would otherwise recommend a command that fails at once."""
    facts = examined(config_of(baseline=baseline, eval_every=16), monkeypatch)
    assert facts["error"].startswith(f"baseline={baseline}: ")
    assert words in facts["error"]
    assert "steps" not in facts


@pytest.mark.parametrize(
    ("baseline", "fails"), [(INTEGRAL, False), ("worlds.controllers:nothing", True)]
)
def test_a_baseline_takes_its_first_action_also_without_time_for_episodes(
    baseline: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "dppo.tools.doctor.examination.reason_to_leave_out", lambda *_: "there is no time"
    )
    config = config_of(baseline=baseline, eval_every=16)
    facts = examined(config, monkeypatch)
    assert facts["controllers_left_out"] == "there is no time"
    assert ("controllers_failed" in facts) == fails


def test_faults_leave_a_baseline_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = {"env_id": "worlds.faulty:Unreliable", "env_kwargs": {"steps": 0.2}}
    config = make_config({**faulty, **SIZES, "baseline": INTEGRAL, "eval_every": 16})
    facts = examined(config, monkeypatch)
    assert facts["controllers_left_out"] == "the environment failed while a policy played"


def test_a_baseline_that_is_better_than_chance_is_advised_as_a_beginning() -> None:
    good = {ZERO: [-9.0, -9.0], RANDOM: [-8.0, -8.1], INTEGRAL: [-1.0, -1.1]}
    bad = good | {INTEGRAL: [-9.0, -9.1]}
    config = config_of(**BASELINE)
    [advice] = _advice_on_prior({"controllers": good}, config)
    assert advice.startswith(f"--prior {INTEGRAL} starts training from your controller")
    assert list(_advice_on_prior({}, config))  # not measured
    assert not list(_advice_on_prior({"controllers": bad}, config))
    assert not list(_advice_on_prior({"controllers_failed": "it raised"}, config))
    assert not list(_advice_on_prior({"controllers": good}, config_of()))
    assert not list(_advice_on_prior({}, config_of(**BASELINE, prior=INTEGRAL)))
    # a controller cannot begin a run of frame stacks
    assert not list(_advice_on_prior({}, config_of(**BASELINE, frame_stack=2)))


BASELINE: dict[str, Any] = {"baseline": INTEGRAL, "eval_every": 16}


@executes(
    "tools/doctor/controller_findings.py: Name a controller that works",
    "tools/doctor/controller_findings.py: Let the reward depend on what the actions change",
    "tools/doctor/controller_findings.py: Check the units and the signs",
    "tools/doctor/controller_findings.py: Subtract the part",
)
@pytest.mark.parametrize(
    ("returns", "words"),
    [
        ("-200 -200, -200 -200", "get the same returns, -200 in the first episode"),
        ("-200 -3 -7, -201 -2 -7", ""),
        ("-9 -3 -7, -9 -3 -7, -8 -4 -7", "the reward does not tell zero actions, random actions, "),
        ("-9 -9 -9, -8 -8 -8, -7 -7 -7", ""),
        ("-9 -9 -9, -6 -6 -6, -7 -7 -7", "is not better than random actions. Check the units"),
        ("999 999, 998 998, 1001 1001", "returns are all about 999, and actions change 3 of it"),
        ("-999 -990, -980 -970, -2 -1", "random actions get -975, and the baseline -1.5"),
    ],
)
def test_returns_lead_to_a_finding_and_other_returns_to_none(returns: str, words: str) -> None:
    """The returns of zero, random and perhaps baseline actions lead to a text with these words."""
    numbers = [list(map(float, column.split())) for column in returns.split(",")]
    names = [ZERO, RANDOM, INTEGRAL]
    controllers = dict(zip(names, numbers, strict=False))
    settings = BASELINE if INTEGRAL in controllers else {}
    facts = {"controllers": controllers, "rewards": [-3, 1]}
    reported = texts(facts, config_of(**settings))
    reported = [text for text in reported if "rewards or returns reach" not in text]
    assert len(reported) == bool(words)
    assert all(words in text for text in reported)


LEVERS = gym.spaces.Dict(
    position=gym.spaces.Box(-1, 1, (1,)),
    offset=gym.spaces.Box(2, 3, (1,)),
    gear=gym.spaces.Discrete(2, start=5),
    switches=gym.spaces.MultiBinary(2),
    pair=gym.spaces.Tuple([gym.spaces.MultiDiscrete([2, 3])]),
)


def test_zero_is_the_nearest_action_of_each_space() -> None:
    zero = action_checker(LEVERS)(action_nearest_zero(LEVERS))
    assert zero["position"] == 0
    assert zero["offset"] == 2
    assert zero["gear"] == 5
    assert not zero["switches"].any()
    assert not zero["pair"][0].any()
    # 0 is inside, not at the first choice
    assert action_nearest_zero(gym.spaces.Discrete(5, start=-2)) == 0
    around_zero = gym.spaces.MultiDiscrete([5, 3], start=[-2, 4])
    assert action_nearest_zero(around_zero).tolist() == [0, 4]


def first_position(seed: int) -> float:
    controller = Random(LEVERS, seed)
    return float(controller.act(None)["position"][0])


def test_random_actions_are_drawn_by_the_seed() -> None:
    assert first_position(1) == first_position(1)
    assert first_position(1) != first_position(2)


def test_a_baseline_is_recommended_with_evaluations() -> None:
    flags = {"baseline": INTEGRAL, "total_timesteps": "20_000"}
    assert _with_evaluations(flags) == flags | {"eval_every": "2000"}
    assert _with_evaluations({"baseline": INTEGRAL, "eval_every": "7"})["eval_every"] == "7"
    assert _with_evaluations({}) == {}
