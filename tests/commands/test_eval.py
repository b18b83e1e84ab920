"""`dppo eval`: its output, and its flags."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from builders import tiny_run
from commandline import Typed
from remedies import executes

import dppo
from dppo.__main__ import main
from dppo.commands.eval import info_table
from dppo.policies import evaluation
from dppo.ppo.exchange.records import EpisodeInfo
from dppo.records.files.lock import locked
from dppo.records.observer import Evaluation
from dppo.records.terminal.figures import number
from dppo.tools.export import policies


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    return dppo.train(tiny_run(run_dir, steps=32, iterations=1)).run_dir


def test_the_command_prints_the_summary_of_dppo_evaluate(trained: Path, typed: Typed) -> None:
    first, last = typed(f"eval {trained} --episodes 3 --stochastic --seed 2").splitlines()
    assert first == "CartPole-v1, policy after 32 steps, sampling actions, 3 episodes, seed 2"
    evaluation = dppo.evaluate(trained, episodes=3, deterministic=False, seed=2)
    low = number(min(evaluation.returns))
    high = number(max(evaluation.returns))
    spread = f"{number(evaluation.mean_return)} +- {number(evaluation.std_return)}"
    assert last == f"return {spread} (from {low} to {high}), length {evaluation.mean_length:.1f}"


def test_progress_is_printed_during_long_episodes(
    trained: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulator may take minutes for an episode, or have episodes that never end."""
    monkeypatch.setattr(evaluation, "REPORT_EVERY_S", 0.0)
    lines = typed(f"eval {trained} --episodes 2").splitlines()
    assert lines[1] == "0 of 2 episodes; the current one: 1 step, return 1.00 so far"
    so_far = r"1 of 2 episodes, mean return \d+\.0, about \d+:\d\d left"
    assert re.fullmatch(rf"{so_far}; the current one: \d+ steps, return \d+\.0 so far", lines[-2])


def test_arguments_of_the_environment_are_json(trained: Path, typed: Typed, refused: Typed) -> None:
    rewards = "--env-kwargs '{\"sutton_barto_reward\": true}'"
    assert "return -1.00 +- 0 (from" in typed(f"eval {trained} --episodes 1 {rewards}")
    assert "env_kwargs={a: is not JSON" in refused(f"eval {trained} --env-kwargs {{a")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--render", "render=True: this machine has no display"),
        ("--episodes 0", "episodes=0: must be at least 1."),
        ("--seed -1", "seed=-1: must be at least 0."),
        ("--env X", "--env is not a known flag. Did you mean --env-id?"),
    ],
)
def test_mistakes_are_refused_in_one_line(
    flags: str, words: str, trained: Path, refused: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    [line] = refused(f"eval {trained} {flags}").splitlines()
    assert words in line


def test_help_is_in_groups_and_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["eval", "--help"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert re.findall(r"^(\w[\w ]*):$", shown, re.MULTILINE) == [
        "episodes",
        "environment and network",
    ]


CONTROLLER = "worlds.controllers:still"
PLANT = "worlds.controllers:Drift"


def test_a_controller_plays_in_an_environment_or_in_that_of_a_run(
    trained: Path, desk: Path, typed: Typed
) -> None:
    words = f"--policy {CONTROLLER} --episodes 2 --env-kwargs '{{\"steps\": 7}}'"
    printed = typed(f"eval {PLANT} {words} --info-keys violations")
    first, returns, head, table = printed.splitlines()
    assert first == f"{PLANT}, {CONTROLLER}, 2 episodes, seed 0"
    assert returns.endswith("length 7.0")
    assert head.split() == ["in", "an", "episode", "sum", "mean", "last"]
    assert table.split()[0] == "violations"
    Path("left.py").write_text("def push(obs):\n    return 0\n", encoding="utf8")
    printed = typed(f"eval {trained} --policy left.py:push --episodes 3")
    assert printed.startswith("CartPole-v1, left.py:push, 3 episodes, seed 0\n")


def test_episodes_before_a_fault_of_the_controller_are_reported(
    trained: Path, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "calls = []\ndef push(obs):\n    calls.append(1)\n    return 0 if len(calls) < 13 else 'left'\n"
    Path("tired.py").write_text(code, encoding="utf8")
    assert main(["eval", str(trained), "--policy", "tired.py:push"]) == 1
    shown = capsys.readouterr()
    assert "ended early: 1 of 20 episodes, mean return " in shown.out
    assert "of episode 1 " in shown.err


def test_the_policy_of_a_run_plays_in_an_environment(trained: Path, typed: Typed) -> None:
    run_output = typed(f"eval {trained} --episodes 2")
    assert typed(f"eval CartPole-v1 --policy {trained} --episodes 2") == run_output
    with locked(trained):
        while_it_trains = typed(f"eval {trained} --episodes 2")
    note = f"{trained}: is still training; this is its policy of iter_000001\n"
    assert while_it_trains == note + run_output


@executes("policies/deployed.py: Its best evaluation, {}, was of {}: pass {} for that policy.")
def test_a_better_evaluation_of_an_earlier_policy_is_named(tmp_path: Path, typed: Typed) -> None:
    """The newest policy may be far worse than the best one."""
    run = tmp_path / "run"
    dppo.train(tiny_run(run, iterations=2, eval_every=64, eval_episodes=1, keep_checkpoints=9))
    best = run / "checkpoints" / "best.json"

    def first_line(iteration: int) -> str:
        names = {"checkpoint": f"iter_{iteration:06d}.safetensors", "iteration": iteration}
        best.write_text(json.dumps({**names, "score": 77.0}))
        return typed(f"eval {run} --episodes 1").partition("\n")[0]

    assert first_line(0) == (
        f"{run}: this is its newest policy, iter_000002. Its best evaluation, 77.0, was of iter_000000: pass {best} "
        f"for that policy."
    )
    played = typed(f"eval {best} --episodes 1")
    assert played.startswith("CartPole-v1, policy after 0 steps")
    assert first_line(2).startswith("CartPole-v1, policy after")
    assert first_line(99).startswith("CartPole-v1, policy after")
    best.write_text("{")
    assert typed(f"eval {run} --episodes 1").startswith("CartPole-v1, policy after")


@pytest.mark.parametrize(
    "command",
    [
        "plot {} --metric losses/entropy",
        "diff {} {}",
        "doctor {}",
        "verify {} --out certificate.json",
        "replay {} --episodes",
        "report {} --out page.html",
        "export {} policy.onnx",
        "export {} folder/ --episodes 0",
    ],
)
def test_each_look_at_a_run_says_that_it_is_still_training(
    command: str, trained: Path, desk: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for function in ("require_package", "_as_onnx", "_check"):  # without ONNX
        monkeypatch.setattr(policies, function, lambda *_: b"")
    line = command.replace("{}", str(trained))
    note = f"{trained}: is still training; this is "
    assert note not in typed(line)
    with locked(trained):
        assert note in typed(line.replace("folder/", "other/"))


def test_the_folder_of_checkpoints_stands_for_its_run(trained: Path, typed: Typed) -> None:
    inside = trained / "checkpoints"
    assert typed(f"diff {inside} {trained}") == typed(f"diff {trained} {trained}")
    assert typed(f"doctor {inside}") == typed(f"doctor {trained}")


def test_the_success_rate_is_printed_if_episodes_report_it(trained: Path, typed: Typed) -> None:
    line = typed("eval worlds.simple:point_mass --policy worlds.simple:to_goal --episodes 2")
    assert line.endswith(", length 50.0, success 100.0%\n")
    assert dppo.evaluate(trained, episodes=1).success_rate is None


def test_episodes_are_printed_as_json(typed: Typed) -> None:
    line = f"eval {PLANT} --policy {CONTROLLER} --episodes 2 --info-keys energy --json"
    printed = json.loads(typed(line))
    evaluation = dppo.evaluate(CONTROLLER, PLANT, 2, info_keys=["energy"])
    assert printed["returns"] == list(evaluation.returns)
    assert printed["lengths"] == [5, 5]
    assert printed["info"] == {"energy": {"sum": [0, 0], "mean": [0, 0], "last": [0, 0]}}


def test_a_table_says_how_many_episodes_have_a_number() -> None:
    infos = (EpisodeInfo(2.0, 1.0, 1.0), EpisodeInfo(4.0, 1.0, 1.0))
    lines = info_table(Evaluation("E-v0", (0.0,) * 3, (1,) * 3, {"alarms": infos}))
    assert lines[1].split("  ") == ["alarms (in 2 of 3 episodes)", "3 +- 1", "1 +- 0", "1 +- 0"]


@executes(
    "commands/eval.py: add --policy MODULE:NAME",
    "commands/eval.py: the environment is the first word",
    "commands/eval.py: Write an environment in place of the first one",
)
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("CartPole-v1", "add --policy MODULE:NAME"),
        ("CartPole-v1 --policy {run} --env-id Acrobot-v1", "Leave it out"),
        ("{run} --policy {run}", "Write an environment in place of the first one"),
    ],
)
def test_words_that_do_not_fit_together_are_refused(
    trained: Path, words: str, problem: str, typed: Typed, refused: Typed
) -> None:
    assert problem in refused("eval " + words.format(run=trained))
    typed(f"eval CartPole-v1 --policy {trained} --episodes 1")
