"""`dppo tune`: a study that is continued, trials that stop early, the best as a command, and what is refused."""

from __future__ import annotations

import math
import re
import shlex
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from builders import make_config
from commandline import Typed, parse

from dppo.config import Config
from dppo.config.parts import default_of, settings_by_name
from dppo.config.plain import as_typed
from dppo.errors import ConfigError, DppoError
from dppo.tools import tune

Patch = pytest.MonkeyPatch
SMALL = "tune CartPole-v1 --preset none --total-timesteps 512 --num-steps 16 --hidden-sizes 8"
SPACE = yaml.safe_load(tune.SPACES["ppo"].read_text())
SAC = {"env_id": "Pendulum-v1", "algo": "sac"}


@pytest.mark.parametrize(
    ("algo", "base"), [("ppo", {"env_id": "CartPole-v1", "minibatch_size": 64}), ("sac", SAC)]
)
def test_the_search_space_names_settings_that_can_be_tuned(algo: str, base: dict[str, Any]) -> None:
    space = yaml.safe_load(tune.SPACES[algo].read_text())
    assert set(space) < set(settings_by_name())
    for name, choices in space.items():
        if isinstance(choices, list):
            values = choices
        else:
            values = [choices["low"], choices["high"]]
            if "one_minus" in choices:
                values = [1 - end for end in values]
            default = getattr(make_config(base), name)
            assert name == "ent_coef" or min(values) <= default <= max(values)
        for value in values:
            make_config(base | {name: value})


def test_what_a_trial_draws_for_soft_actor_critic_is_what_it_trains_with() -> None:
    settings, notes = tune._merged_with(SAC, {"tau": 0.03, "noise": "pink"})
    assert settings == SAC | {"tau": 0.03, "noise": "pink"}
    assert notes == ()


def test_a_number_that_is_drawn_has_as_many_digits_as_one_types() -> None:
    trial = SimpleNamespace(suggest_float=lambda *_, low, high: low + (high - low) / 3)
    limits = {"low": 0.0, "high": 1.0}
    assert tune._suggested(trial, "gae_lambda", limits) == 0.333333
    assert tune._suggested(trial, "gamma", limits | {"one_minus": True}) == 0.666667


@pytest.fixture
def any_value(monkeypatch: Patch) -> None:
    """Accept any value of any setting."""
    monkeypatch.setattr(tune, "Config", lambda **_: make_config({"env_id": "CartPole-v1"}))


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("--trials 0", "trials=0: must be at least 1."),
        ("--run-dir x", "--run-dir has no effect here: trials are new runs in the folder of --out"),
        ("--gamma 2", "gamma='2': "),
        (f"--space {__file__.replace('test_tune.py', 'test_trust.py')}", "space="),
        ("--space missing.yaml", "space=missing.yaml: cannot be read"),
        ("", "tune: the search needs the package optuna. Install it: "),
    ],
)
def test_mistakes_are_refused_before_the_first_trial(
    words: str, refusal: str, desk: Path, refused: Typed, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("dppo.user_code.find_spec", lambda name: words or None)
    assert refusal in refused(f"tune CartPole-v1 {words}")
    assert list(desk.iterdir()) == []


@pytest.mark.parametrize("place", ["flags", "file"])
def test_settings_that_are_given_are_not_tuned(
    place: str, desk: Path, refused: Typed, any_value: None, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("dppo.user_code.find_spec", lambda name: True)
    words = " ".join(f"--{name}=1" for name in SPACE)
    if place == "file":
        Path("own.yaml").write_text(
            "".join(f"{name}: {as_typed(default_of(name))}\n" for name in SPACE)
        )
        words = "--config own.yaml"
    assert "none is left to tune" in refused(f"tune CartPole-v1 {words}")


class Trial:
    """A trial of Optuna that is pruned at a negative value."""

    def __init__(self) -> None:
        self.reported: list[tuple[float, int]] = []

    def report(self, value: float, step: int) -> None:
        self.reported.append((value, step))

    def should_prune(self) -> bool:
        return self.reported[-1][0] < 0


def test_trials_are_compared_after_equal_shares_of_their_steps() -> None:
    trial = Trial()
    pruner = tune._Pruner(trial, 1000)

    def stops(step: int, value: float) -> bool | None:
        return pruner.on_iteration({"global_step": step, "charts/episodic_return": value})

    assert not any(stops(step, float(step)) for step in (10, 60, 70, 130))
    assert trial.reported == [(60.0, 1), (130.0, 2)]
    assert not stops(500, math.nan)
    assert not pruner.on_iteration({"global_step": 550})
    assert stops(600, -1.0)


@pytest.mark.parametrize(
    ("words", "folder"), [("--out out", "out"), ("", "runs/tune__CartPole-v1")]
)
def test_all_trials_are_in_the_same_folder_wherever_an_environment_goes(
    words: str, folder: str, desk: Path, refused: Typed, monkeypatch: Patch
) -> None:
    def study_in(out: Path, *_: object) -> None:
        raise ConfigError(f"the folder is {out}")

    pytest.importorskip("optuna")
    monkeypatch.setattr(tune, "_study", study_in)
    assert f"the folder is {desk / folder}\n" in refused(f"{SMALL} {words}")


def test_a_full_disk_is_named_in_a_line_wherever_optuna_notices_it() -> None:
    """It asserts that the result of a trial has been stored, while it handles the error of the database."""
    words = "^out/study.db: database or disk is full. The trials that have finished are in it"
    while_handled = AssertionError()
    while_handled.__context__ = RuntimeError()
    while_handled.__context__.__cause__ = sqlite3.OperationalError("database or disk is full")
    with pytest.raises(DppoError, match=words), tune._naming_database(Path("out")):
        raise while_handled
    with pytest.raises(ZeroDivisionError), tune._naming_database(Path("out")):
        raise ZeroDivisionError


def test_a_study_of_an_earlier_version_goes_on_if_only_values_without_effect_are_missing(
    tmp_path: Path,
) -> None:
    pytest.importorskip("optuna")
    config = Config(env_id="CartPole-v1", gamma=0.9)
    study = tune._study(tmp_path, ["num_steps"], [], config)

    def refused(trial: object) -> float:
        with pytest.raises(ConfigError, match=r"other settings: gamma=not given\. Use another"):
            tune._study(tmp_path, ["num_steps", "gamma"], [], config)
        return 1.0

    study.optimize(refused, n_trials=1)
    refused("the trial has finished")
    tune._study(tmp_path, ["num_steps", "gamma"], ["gamma"], config)


def test_the_trial_of_a_killed_process_does_not_bind_the_settings_of_a_study(
    tmp_path: Path,
) -> None:
    pytest.importorskip("optuna")
    config = Config(env_id="CartPole-v1", gamma=0.9)
    study = tune._study(tmp_path, [], [], config)
    with pytest.warns(UserWarning, match="Heartbeat"):
        study._storage.record_heartbeat(study.ask()._trial_id)
    words = "gamma=not given. Use another folder, or wait for 120 s if the process of its trial was"
    with pytest.raises(ConfigError, match=words):
        tune._study(tmp_path, ["gamma"], [], config)
    with closing(sqlite3.connect(tmp_path / "study.db")) as database, database:
        database.execute("UPDATE trial_heartbeats SET heartbeat = '2020-01-01 00:00:00'")
    tune._study(tmp_path, ["gamma"], [], config)


@pytest.mark.parametrize(
    ("space", "refusal"),
    [
        ("", "space=space.yaml: contains nothing, not settings."),
        ("gamma: []", "space: gamma=[]: "),
        ("gamma: {low: 0.9}", "space: gamma={'low': 0.9}: "),
        ("learning_rate: {low: 2, high: 1}", "(low=2, high=1). Write a list of choices, or {low: "),
        ("gamma: [0.9, 2]", "gamma=2: must be less than or equal to 1."),
        ("gamma: {low: 0.9, high: 2}", "gamma=2: must be less than or equal to 1."),
        ("gamma: {low: 0.1, high: 2, one_minus: true}", "gamma=-1: must be greater than or equ"),
    ],
)
def test_a_wrong_range_is_refused_before_the_study_exists(
    space: str, refusal: str, desk: Path, refused: Typed
) -> None:
    pytest.importorskip("optuna")
    Path("space.yaml").write_text(space)
    assert refusal in refused(f"{SMALL} --space space.yaml")
    assert [path.name for path in desk.iterdir()] == ["space.yaml"]


@pytest.mark.slow
def test_a_study_of_trials_that_diverge_ends(desk: Path, refused: Typed) -> None:
    pytest.importorskip("optuna")
    words = "--learning-rate 1e30 --minibatch-size 64 --trials 2"
    assert "no trial has finished with an episode" in refused(f"{SMALL} {words}")


@pytest.mark.slow
def test_a_study_takes_another_space_and_prints_what_each_trial_was_trained_with(
    desk: Path, typed: Typed, refused: Typed
) -> None:
    """Optuna refuses other choices for a parameter of the same name, and one of its errors ends with a dot."""
    pytest.importorskip("optuna")
    study = f"{SMALL} --space space.yaml"
    space = Path("space.yaml")
    space.write_text("learning_rate: [0.001]")
    typed(f"{study} --trials 1")
    space.write_text("learning_rate: [0.002, 0.003]\ngamma: [0.95]")
    printed = typed(f"{study} --trials 2").splitlines()
    first, second = sorted((line for line in printed if " train " in line), key=len)
    assert "--learning-rate 0.001" in first
    assert "gamma" not in first
    assert "--learning-rate 0.00" in second
    assert "--gamma 0.95" in second


@pytest.mark.slow
def test_a_study_is_continued_and_ends_with_a_command(
    desk: Path, typed: Typed, refused: Typed
) -> None:
    pytest.importorskip("optuna")
    folder = desk / "runs" / "tune__CartPole-v1"
    for trials, new, same in ((2, 2, ""), (3, 1, "--total-timesteps 5_12"), (3, 0, "")):
        printed = typed(f"{SMALL} {same} --trials {trials}")
        ended = re.findall(r"^trial \d: (?:complete|pruned), mean return ", printed, re.M)
        assert len(ended) == new
        *_, best, command = printed.splitlines()
        assert f"Best of {trials} trials in {folder}, the best last:\n" in printed
        assert re.fullmatch(rf"\d+\.\d, in trial_000[0-{trials}]:", best)
    settings = parse(shlex.split(command)[2:]).settings
    assert "--preset none --total-timesteps 512" in command
    assert settings["hidden_sizes"] == ["8"]

    config = make_config(settings)
    assert (config.num_steps, config.total_timesteps) == (16, 512)
    assert 0.97 <= config.gamma <= 0.9999
    assert len(str(config.gamma)) <= len("0.123456")
    assert (folder / "trial_0002" / "config.yaml").exists()

    message = refused(f"{SMALL} --trials 9 --total-timesteps 1024 --gamma 0.9")
    differing = "gamma=not given, total_timesteps=512"
    assert f"has a study with other settings: {differing}. Use another folder." in message
