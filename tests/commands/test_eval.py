"""`dppo eval`: its output, and its flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from builders import make_config

import dppo
from dppo.__main__ import main
from dppo.policies import evaluation


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    sizes = {"num_samplers": 1, "num_steps": 32, "total_timesteps": 32}
    dppo.train(make_config({"env_id": "CartPole-v1", "run_dir": run, "progress": "off", **sizes}))
    return run


def test_the_command_prints_the_summary_of_dppo_evaluate(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(trained), "--episodes", "3", "--stochastic", "--seed", "2"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first == "CartPole-v1, policy after 32 steps, sampling actions, 3 episodes"
    found = dppo.evaluate(trained, episodes=3, deterministic=False, seed=2)
    low, high = min(found.returns), max(found.returns)
    assert last == (
        f"return {found.mean_return:.1f} +- {found.std_return:.1f} (from {low:.1f} to {high:.1f}), "
        f"length {found.mean_length:.1f}"
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
