"""`dppo compare`: its flags, its plan, and its output."""

import json
import os
import re
import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commandline import Typed

from dppo.__main__ import main
from dppo.config import Config
from dppo.errors import ConfigError
from dppo.records.observer import Result
from dppo.run import runner
from dppo.signals import StopSignals
from dppo.tools import compare, whole_time
from dppo.tools.compare import caption, make_plan, parse
from dppo.tools.pictures.comparison import compare_figure

TINY = "--num-samplers 2 --num-steps 16 --total-timesteps 64 --out out"
PLANE = f"compare worlds.simple:point_mass {TINY}"


def figures() -> dict[str, Any]:
    contents: dict[str, Any] = json.loads(Path("out/compare.json").read_text())
    return contents


def planned(*words: str) -> list[Config]:
    options, settings = parse(["E-v0", *words])
    return make_plan(options, settings, Path("out"))


def test_flags_belong_to_the_comparison_or_to_the_training() -> None:
    options, settings = parse(["E-v0", "--actors", "1", "8", "--gamma", "0.9", "--target", "475"])
    assert options.actors == [1, 8]
    assert options.target == 475.0
    assert options.seeds == 3
    assert options.equal == "batch"
    assert settings == {"env_id": "E-v0", "gamma": "0.9"}


def test_help_lists_all_flags_but_those_that_a_comparison_sets_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80

    flags = set(re.findall(r"^  (--[a-z-]+)", printed, re.M))
    assert {"--actors", "--equal", "--gamma", "--num-samplers"} <= flags
    assert not {"--num-actors", "--run-dir", "--resume"} & flags


@pytest.mark.parametrize(
    ("words", "path"),
    [("--out out", "out"), ("", "runs/compare__E-v0__now-2")],  # another began in the same second
)
def test_all_runs_are_in_the_same_folder_wherever_an_environment_goes(
    words: str, path: str, desk: Path, refused: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned_in(options: object, settings: object, folder: Path) -> list[Config]:
        raise ConfigError(f"it is in {folder}")

    Path("runs/compare__E-v0__now").mkdir(parents=True)
    monkeypatch.setattr(time, "strftime", lambda _: "now")
    monkeypatch.setattr(compare, "make_plan", planned_in)
    assert f"it is in {desk / path}\n" in refused(f"compare E-v0 {words}")


def test_settings_of_actors_apply_to_the_runs_with_actors() -> None:
    words = "--actors 0 8 --seeds 1 --segment-timeout-s 60 --cpus-per-actor 0.5"
    in_process, on_actors = planned(*words.split())

    assert in_process.segment_timeout_s == 600
    assert in_process.cpus_per_actor == 1
    assert on_actors.segment_timeout_s == 60
    assert on_actors.cpus_per_actor == 0.5


@pytest.mark.parametrize(
    ("actors", "name"), [(["0"], "segment_timeout_s"), (["0", "8"], "num_learners")]
)
def test_settings_without_effect_or_that_make_the_runs_unequal_are_refused(
    actors: list[str], name: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{name}=.* has no effect: num_actors=0"):
        planned("--actors", *actors, f"--{name.replace('_', '-')}", "2")


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        # of each run: actors, samplers and seed
        ("--actors 0 --seeds 5", "0 8 1, 0 8 2, 0 8 3, 0 8 4, 0 8 5"),
        ("--seeds 2", "1 8 1, 8 8 1, 8 8 2, 1 8 2"),
        ("--actors 0 2 --seeds 3", "0 8 1, 2 8 1, 2 8 2, 0 8 2, 0 8 3, 2 8 3"),
        ("--actors 0 4 --seeds 1 --num-samplers 16 --seed 7", "0 16 7, 4 16 7"),
        ("--actors 0 1 8 --seeds 1 --equal segment", "0 1 1, 1 1 1, 8 8 1"),
    ],
)
def test_numbers_of_actors_take_turns_forwards_and_backwards(words: str, runs: str) -> None:
    configs = planned(*words.split())
    numbers = [f"{config.num_actors} {config.num_samplers} {config.seed}" for config in configs]
    assert ", ".join(numbers) == runs
    assert len({config.run_dir for config in configs}) == len(configs)


def test_a_preset_fits_the_smallest_batch_and_is_the_same_for_all() -> None:
    options, settings = parse(["CartPole-v1", "--equal", "segment"])
    assert {config.minibatch_size for config in make_plan(options, settings, Path("out"))} == {32}


@pytest.mark.parametrize(
    ("equal", "settings", "words"),
    [
        (
            "batch",
            {},
            "E-v0, 3 seeds. Equal batch: the same 8 samplers of 64 steps, hosted by 1 or 8 actors.",
        ),
        (
            "segment",
            {},
            "E-v0, 3 seeds. Equal segments: 64 steps for each of 1 or 8 actors, so the batch is 64 or 512 steps.",
        ),
        (
            "batch",
            {"algo": "sac"},
            "E-v0, 3 seeds. Equal batch: the same 8 samplers of 64 steps, hosted by 1 or 8 actors. Returns are without "
            "episodes of wide exploration.",
        ),
    ],
)
def test_the_caption_names_what_the_runs_have_in_common(
    equal: str, settings: dict[str, Any], words: str
) -> None:
    options, _ = parse(["E-v0", "--equal", equal])
    plan = make_plan(options, {"env_id": "E-v0"} | settings, Path("out"))
    assert caption(options, plan) == words


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("--actors one", "invalid int value: 'one'"),
        ("--equal seeds", "invalid choice: 'seeds'"),
        ("--resume x", "--resume has no effect here"),
        ("--actor 1 8", "--actor is not a known flag"),
        ("--minibatch-size 9999", "=9999 is larger than the batch of 512 steps"),
    ],
)
def test_invalid_options_are_refused_at_once(words: str, refusal: str, refused: Typed) -> None:
    assert refusal in refused(f"compare CartPole-v1 {words} --preset none")


def test_a_comparison_writes_picture_and_figures_of_equal_weights(
    desk: Path, typed: Typed, ray_session: None
) -> None:
    longer = "--seeds 1 --num-steps 64 --total-timesteps 384"
    printed = typed(f"{PLANE} {longer} --actors 0 2 --target -9999")
    assert "The same weights, bit for bit, for every seed." in printed
    assert "2 of 2: 2 actors, seed 1" in printed
    assert Path("out/compare.png").stat().st_size > 10_000

    compared = figures()
    assert compared["same_weights"] is True
    in_process, two_actors = compared["groups"]
    assert in_process["label"] == "in process"
    assert two_actors["label"] == "2 actors"
    assert in_process["speed_up"] == 1
    for group in (in_process, two_actors):
        assert 0 < group["cycle"]["efficiency"] <= 1
        assert group["seeds_that_reached_target"] == 1
        [shown] = re.findall(rf"{group['label']}.* ([\d,]+) +([\d,]+) +([\d.]+) %", printed)
        speed, bound, percent = (float(figure.replace(",", "")) for figure in shown)
        assert speed / bound == pytest.approx(percent / 100, abs=0.01)

    without, on_actors = compared["runs"]
    assert (without["num_actors"], without["seed"]) == (0, 1)
    assert (on_actors["num_actors"], on_actors["seed"]) == (2, 1)
    assert without["curve"]["episodic_return"] == on_actors["curve"]["episodic_return"]
    assert Path(on_actors["run_dir"], "metrics.jsonl").is_file()


def test_several_seeds_are_compared_without_ray(
    desk: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_time, "LEAST_S", 0.0)
    out = typed(f"{PLANE} --actors 0 --seeds 2")
    assert out.count("for 2 runs of 64 env steps, if each is as fast") == 1
    compared = figures()
    assert [(run["num_actors"], run["seed"]) for run in compared["runs"]] == [(0, 1), (0, 2)]
    assert compared["same_weights"] is None


@pytest.mark.parametrize("phase", ["in a run", "at its end", "between runs"])
def test_an_interrupted_comparison_prints_the_result_of_the_runs_that_have_finished(
    phase: str, desk: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    captions: list[str] = []

    def draw(groups: Any, path: Path, caption: str, target: float | None) -> None:
        captions.append(caption)
        compare_figure(groups, path, caption, target)

    monkeypatch.setattr("dppo.tools.compare.compare_figure", draw)
    train = runner.train
    results: list[Result] = []

    def interrupted(config: Config, **changes: Any) -> Result:
        if results:
            with StopSignals() if phase != "between runs" else nullcontext():
                os.kill(os.getpid(), signal.SIGINT)
            return replace(results[0], stopped_by="SIGINT" if phase == "in a run" else None)
        results.append(train(config, **changes))
        return results[0]

    monkeypatch.setattr(runner, "train", interrupted)
    assert main(f"{PLANE} --actors 0 1 --seeds 3".split()) == 130
    printed = capsys.readouterr()
    assert "Bound: an iteration of 32 env steps takes" in printed.out, "below the table"
    assert "Written: " in printed.out
    finished = 2 if phase == "at its end" else 1
    assert ("bit for bit" in printed.out) == (finished == 2), "two runs have the same seed"
    assert figures()["same_weights"] == (True if finished == 2 else None)
    assert f"Stopped by SIGINT after {finished} of 6 runs" in printed.err
    assert Path("out/compare.png").stat().st_size > 10_000
    assert captions[0].endswith(f" Stopped after {finished} of 6 runs.")


@pytest.mark.slow  # tests/commands/test_measured.py finds weights that differ in the fast set
def test_different_weights_fail_loudly(desk: Path, typed: Typed, ray_session: None) -> None:
    drifting = f"compare worlds.faulty:drifting_cartpole {TINY} --actors 0 1 --seeds 1"
    printed = typed(drifting, 1)
    assert "THE WEIGHTS DIFFER" in printed
    assert "seed 1: 0 actors" in printed
    assert figures()["same_weights"] is False


@pytest.mark.parametrize("command", ["train", "tune", "compare"])
def test_folders_of_runs_are_compared_by_another_command(
    command: str, desk: Path, refused: Typed
) -> None:
    for name in ("a", "b"):
        (desk / name).mkdir()
    words = (
        "a, b: not an environment, but the folder of a run. To compare runs, use `dppo plot a b`; "
    )
    assert words in refused(f"{command} a b")
    assert "takes one ENV_ID" in refused(f"{command} a c")
    (desk / "a/config.yaml").touch()
    assert "`; to continue one, `dppo train --resume a`." in refused(f"{command} a")
    assert "a, b: no environment" not in refused(f"{command} E-v0 --init-from a")
