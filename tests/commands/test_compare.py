"""`dppo compare`: its flags, its plan, and its output."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dppo.__main__ import main
from dppo.config import Config
from dppo.errors import ConfigError
from dppo.tools import compare
from dppo.tools.compare import caption, make_plan, parse

TINY = ["--num-samplers", "2", "--num-steps", "16", "--total-timesteps", "64"]
PLANE = "worlds.simple:point_mass"


def compared(out: Path, words: str) -> int:
    return main(["compare", *words.split(), "--out", str(out), *TINY])


def figures(out: Path) -> dict[str, Any]:
    contents: dict[str, Any] = json.loads((out / "compare.json").read_text())
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


@pytest.mark.parametrize("words", [["--out", "out"], []], ids=str)
def test_all_runs_are_in_the_same_folder_wherever_an_environment_goes(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []

    def planned_in(options: object, settings: object, folder: Path) -> list[Config]:
        folders.append(folder)
        raise ConfigError("this is enough")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "make_plan", planned_in)

    assert main(["compare", "E-v0", *words]) == 2
    assert folders[0].parent == (tmp_path if words else tmp_path / "runs")


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
        ("--actors 0 --seeds 5", [(0, 8, seed) for seed in range(1, 6)]),
        ("--seeds 2", [(1, 8, 1), (8, 8, 1), (8, 8, 2), (1, 8, 2)]),
        (
            "--actors 0 2 --seeds 3",
            [(0, 8, 1), (2, 8, 1), (2, 8, 2), (0, 8, 2), (0, 8, 3), (2, 8, 3)],
        ),
        ("--actors 0 4 --seeds 1 --num-samplers 16 --seed 7", [(0, 16, 7), (4, 16, 7)]),
        ("--actors 0 1 8 --seeds 1 --equal segment", [(0, 1, 1), (1, 1, 1), (8, 8, 1)]),
    ],
)
def test_numbers_of_actors_take_turns_forwards_and_backwards(
    words: str, runs: list[tuple[int, int, int]]
) -> None:
    configs = planned(*words.split())
    assert [(config.num_actors, config.num_samplers, config.seed) for config in configs] == runs
    assert len({config.run_dir for config in configs}) == len(runs)


def test_a_preset_fits_the_smallest_batch_and_is_the_same_for_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options, settings = parse(["CartPole-v1", "--equal", "segment"])
    assert {config.minibatch_size for config in make_plan(options, settings, Path("out"))} == {32}


@pytest.mark.parametrize(
    ("equal", "words"),
    [
        (
            "batch",
            "E-v0, 3 seeds. Equal batch: the same 8 samplers of 64 steps, hosted by 1 or 8 actors.",
        ),
        (
            "segment",
            "E-v0, 3 seeds. Equal segments: 64 steps for each of 1 or 8 actors, so the batch is 64 or 512 steps.",
        ),
    ],
)
def test_the_caption_names_what_the_runs_have_in_common(equal: str, words: str) -> None:
    options, _ = parse(["E-v0", "--equal", equal])
    assert caption(options, make_plan(options, {"env_id": "E-v0"}, Path("out"))) == words


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
def test_invalid_options_are_refused_at_once(
    words: str, refusal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "CartPole-v1", *words.split(), "--preset", "none"]) == 2
    assert refusal in capsys.readouterr().err


def test_a_comparison_writes_picture_and_figures_of_equal_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ray_session: None
) -> None:
    longer = "--seeds 1 --num-steps 64 --total-timesteps 384"
    out = tmp_path / "out"
    words = ["compare", PLANE, "--actors", "0", "2", "--target", "-9999", "--out", str(out)]
    assert main([*words, *TINY, *longer.split()]) == 0

    printed = capsys.readouterr().out
    assert "The same weights, bit for bit, for every seed." in printed
    assert "2 of 2: 2 actors, seed 1" in printed
    assert (out / "compare.png").stat().st_size > 10_000
    compared_runs = figures(out)
    assert compared_runs["same_weights"] is True
    in_process, two_actors = compared_runs["groups"]
    assert (in_process["label"], two_actors["label"]) == ("in process", "2 actors")
    assert in_process["speed_up"] == 1
    for group in (in_process, two_actors):
        assert 0 < group["cycle"]["efficiency"] <= 1
        assert group["seeds_that_reached_target"] == 1
    runs = compared_runs["runs"]

    assert [(run["num_actors"], run["seed"]) for run in runs] == [(0, 1), (2, 1)]
    assert runs[0]["curve"]["episodic_return"] == runs[1]["curve"]["episodic_return"]
    assert Path(runs[1]["run_dir"], "metrics.jsonl").is_file()


def test_several_seeds_are_compared_without_ray(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert compared(out, f"{PLANE} --actors 0 --seeds 2") == 0

    seeds = figures(out)
    assert [(run["num_actors"], run["seed"]) for run in seeds["runs"]] == [(0, 1), (0, 2)]
    assert seeds["same_weights"] is None


@pytest.mark.slow  # tests/commands/test_measured.py finds weights that differ in the fast set
def test_different_weights_fail_loudly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ray_session: None
) -> None:
    drifting = "worlds.faulty:drifting_cartpole --actors 0 1 --seeds 1"
    assert compared(tmp_path / "out", drifting) == 1

    printed = capsys.readouterr().err
    assert "THE WEIGHTS DIFFER" in printed
    assert "seed 1: 0 actors" in printed
    assert figures(tmp_path / "out")["same_weights"] is False
