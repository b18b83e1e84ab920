"""Hints that a run prints are followed to the letter, and keep what they promise."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from dppo.__main__ import main
from dppo.config import Config, presets
from dppo.records.bottleneck import TimeSplit, bottleneck_line

SMALL = shlex.split(
    "CartPole-v1 --preset none --num-samplers 2 --num-steps 16 --total-timesteps 96 --progress plain"
)


Train = Callable[..., str]


@pytest.fixture
def train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Train:
    """Return a function that runs `dppo train` in a folder of its own, or in `run_dir`, and returns all it prints."""
    folders = map(str, itertools.count())

    def run(*arguments: str, run_dir: str = "", code: int = 0) -> str:
        folder = tmp_path / (run_dir or next(folders))
        assert main(["train", *arguments, "--run-dir", str(folder)]) == code
        return "".join(capsys.readouterr())

    return run


def weights(printed: str) -> str:
    match = re.search(r"Weights: sha256 (\w+)", printed)
    assert match is not None
    return match[1]


def hinted(printed: str, pattern: str) -> list[str]:
    """Return the words of the flag in brackets that matches `pattern`; there must be exactly one."""
    [match] = re.findall(rf"\((--{pattern})\)", printed)
    return shlex.split(match)


def bottleneck(collect_s: float, update_s: float, *, overlap: bool) -> str:
    """Return the line that is printed after iterations with these times, with one actor for two samplers."""
    split = TimeSplit()
    iteration_s = max(collect_s, update_s) if overlap else collect_s + update_s
    row = {
        "iteration": iteration_s,
        "collect": collect_s,
        "slowest_actor": collect_s,
        "update": update_s,
    }
    for _ in range(3):
        split = split.plus({f"perf/{name}_s": seconds for name, seconds in row.items()})
    return bottleneck_line(
        split, Config(env_id="E-v0", num_actors=1, num_samplers=2, overlap=overlap)
    )


@pytest.mark.slow  # tests/test_promise.py compares weights with actors and without in the fast set
def test_actors_by_the_first_lines_and_overlap_and_more_actors_by_the_last(
    train: Train, ray_session: None
) -> None:
    """With the same result, where that is promised."""
    overlap = hinted(bottleneck(1.0, 0.5, overlap=False), "overlap")
    slow = bottleneck(1.0, 0.5, overlap=True)
    alone = train(*SMALL, *overlap)
    spread = train(*SMALL, *overlap, *hinted(slow, r"num-actors \d+"))
    assert hinted(alone, r"num-actors \d+") == hinted(slow, r"num-actors \d+")
    assert "with the same result" in slow
    assert "with the same result" in alone
    assert "2 Ray actors host 1 sampler each." in spread
    assert weights(spread) == weights(alone)


def test_a_used_folder_is_refused_with_a_command_to_continue(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    train(*SMALL, run_dir="run")
    [command] = re.findall(r"`dppo (.*?)`", train(*SMALL, run_dir="run", code=2))
    assert main(shlex.split(command)) == 0
    assert (
        "Nothing to do: the run has already completed its 96 steps. To go on, raise total_timesteps=192 (--tot"
        in capsys.readouterr().out
    )


def test_a_changed_value_of_a_preset_is_printed(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presets, "PRESETS", tmp_path)
    (tmp_path / "one.yaml").write_text(
        "CartPole-v1: {num_steps: 16, minibatch_size: 64}\n", encoding="utf8"
    )
    printed = train(
        "CartPole-v1", "--num-samplers", "2", "--total-timesteps", "32", "--progress", "plain"
    )
    assert "note: preset: minibatch_size=64 is larger than the batch of 32 steps" in printed
    assert "minibatch_size=32" in printed


def test_tuned_settings_are_left_out_as_printed(train: Train) -> None:
    short = ["CartPole-v1", "--total-timesteps", "1024", "--progress", "plain"]
    tuned = train(*short)
    assert "using the preset CartPole-v1" in tuned
    [words] = re.findall(r"(--preset \w+) disables it", tuned)
    assert "settings tuned" not in train(*short, *shlex.split(words))
