"""`dppo eval`: its output, and its flags."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from builders import tiny_run
from remedies import executes

import dppo
from dppo.__main__ import main
from dppo.commands.eval import info_table
from dppo.policies import evaluation
from dppo.ppo.exchange.records import EpisodeInfo
from dppo.records.observer import Evaluation


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    return dppo.train(tiny_run(run_dir, steps=32, iterations=1)).run_dir


def test_the_command_prints_the_summary_of_dppo_evaluate(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(trained), "--episodes", "3", "--stochastic", "--seed", "2"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first == "CartPole-v1, policy after 32 steps, sampling actions, 3 episodes"
    evaluation = dppo.evaluate(trained, episodes=3, deterministic=False, seed=2)
    low = min(evaluation.returns)
    high = max(evaluation.returns)
    assert last == (
        f"return {evaluation.mean_return:.1f} +- {evaluation.std_return:.1f} (from {low:.1f} to {high:.1f}), "
        f"length {evaluation.mean_length:.1f}"
    )


def test_progress_is_printed_during_long_episodes(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulator may take minutes for an episode, or have episodes that never end."""
    monkeypatch.setattr(evaluation, "REPORT_EVERY_S", 0.0)
    assert main(["eval", str(trained), "--episodes", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "0 of 2 episodes; the current one: 1 step, return 1.0 so far"
    so_far = r"1 of 2 episodes, mean return \d+\.0, about \d+:\d\d left"
    assert re.fullmatch(rf"{so_far}; the current one: \d+ steps, return \d+\.0 so far", lines[-2])


def test_arguments_of_the_environment_are_json(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "eval",
                str(trained),
                "--episodes",
                "1",
                "--env-kwargs",
                '{"sutton_barto_reward": true}',
            ]
        )
        == 0
    )
    assert "return -1.0 +- 0.0" in capsys.readouterr().out
    assert main(["eval", str(trained), "--env-kwargs", "{a"]) == 2
    assert "env_kwargs={a: is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--render"], "render=True: this machine has no display"),
        (["--episodes", "0"], "episodes=0: must be at least 1."),
        (["--seed", "-1"], "seed=-1: must be at least 0."),
        (["--env", "X"], "--env is not a known flag. Did you mean --env-id?"),
        (
            ["--n-eval-episodes", "3"],
            "--n-eval-episodes is not a known flag. Did you mean --episodes?",
        ),
    ],
)
def test_mistakes_are_refused_in_one_line(
    flags: list[str],
    words: str,
    trained: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert main(["eval", str(trained), *flags]) == 2
    refused = capsys.readouterr()
    assert refused.out == ""
    assert words in refused.err
    assert refused.err.count("\n") == 1


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
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--policy", CONTROLLER, "--episodes", "2", "--env-kwargs", '{"steps": 7}']
    assert main(["eval", PLANT, *words, "--info-keys", "violations"]) == 0
    first, returns, head, table = capsys.readouterr().out.splitlines()
    assert first == f"{PLANT}, {CONTROLLER}, 2 episodes"
    assert returns.endswith("length 7.0")
    assert head.split() == ["in", "an", "episode", "sum", "mean", "last"]
    assert table.split()[0] == "violations"
    left = tmp_path / "left.py"
    left.write_text("def push(obs):\n    return 0\n", encoding="utf8")
    assert main(["eval", str(trained), "--policy", f"{left}:push", "--episodes", "3"]) == 0
    assert capsys.readouterr().out.startswith(f"CartPole-v1, {left}:push, 3 episodes\n")


def test_the_policy_of_a_run_plays_in_an_environment(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = [[str(trained)], ["CartPole-v1", "--policy", str(trained)]]
    outputs = []
    for words in ways:
        assert main(["eval", *words, "--episodes", "2"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


def test_episodes_are_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", PLANT, "--policy", CONTROLLER, "--episodes", "2", "--info-keys", "energy"]
    assert main([*words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
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
        (["CartPole-v1"], "add --policy MODULE:NAME"),
        (["CartPole-v1", "--policy", "{run}", "--env-id", "Acrobot-v1"], "Leave it out"),
        (["{run}", "--policy", "{run}"], "Write an environment in place of the first one"),
    ],
)
def test_words_that_do_not_fit_together_are_refused(
    trained: Path, words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *(word.format(run=trained) for word in words)]) == 2
    assert problem in capsys.readouterr().err
    assert main(["eval", "CartPole-v1", "--policy", str(trained), "--episodes", "1"]) == 0
