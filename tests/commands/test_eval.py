"""`dppo eval`: what it prints while it plays, and in the end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dppo
from dppo.__main__ import main
from dppo.commands import eval as evaluation
from dppo.config import make_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    sizes = {"num_samplers": 1, "num_steps": 32, "total_timesteps": 32}
    dppo.train(make_config({"env_id": "CartPole-v1", "run_dir": run, "progress": "off", **sizes}))
    return run


def test_episodes_are_summed_up(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(trained), "--episodes", "3", "--stochastic"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first == "CartPole-v1, policy after 32 steps, drawing actions, 3 episodes"
    assert re.fullmatch(r"return \d+\.\d \+- \d+\.\d \(from \d+\.\d to \d+\.\d\), length \d+\.\d", last)


def test_a_long_episode_tells_how_far_it_is(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulator may take minutes for an episode, or have none that ends."""
    monkeypatch.setattr(evaluation, "TELL_EVERY_S", 0.0)
    assert main(["eval", str(trained), "--episodes", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "  0 of 2 episodes; the next has 1 steps and a return of 1.0 so far"
    assert re.fullmatch(r"  1 of 2 episodes, return \d+\.0; the next has \d+ steps and .* so far", lines[-2])
