"""`dppo compare`: its words, its plan, and what it leaves behind."""

import json
from pathlib import Path

import pytest

from dppo.__main__ import main
from dppo.commands.compare_plan import caption, make_plan, parse_options
from dppo.errors import ConfigError

TINY = ["--num-steps", "16", "--total-timesteps", "64", "--seeds", "2"]


def plan_of(*words: str, **settings: object) -> list[tuple[int, int, int]]:
    options, _ = parse_options(["E-v0", *words])
    plan = make_plan(options, {"env_id": "E-v0", **settings}, Path("out"))
    return [(config.num_actors, config.samplers, config.seed) for config in plan]


def test_the_first_words_are_ours_and_the_rest_the_trainings() -> None:
    options, rest = parse_options(["E-v0", "--actors", "1", "8", "--gamma", "0.9", "--target", "475"])
    assert (options.actors, options.target, options.seeds, options.equal) == ((1, 8), 475.0, 3, "batch")
    assert rest == ["E-v0", "--gamma", "0.9"]


def test_runs_take_turns_seed_by_seed_with_the_same_samplers() -> None:
    assert plan_of("--seeds", "2") == [(1, 8, 1), (8, 8, 1), (1, 8, 2), (8, 8, 2)]


def test_equal_batch_keeps_the_samplers_that_are_given() -> None:
    assert plan_of("--actors", "0", "4", "--seeds", "1", num_samplers="16", seed="7") == [
        (0, 16, 7),
        (4, 16, 7),
    ]


def test_equal_segment_lets_the_samplers_grow() -> None:
    words = ["--actors", "0", "1", "8", "--seeds", "1", "--equal", "segment"]
    assert plan_of(*words, num_samplers=4) == [(0, 1, 1), (1, 1, 1), (8, 8, 1)]


def test_each_run_has_a_folder_of_its_own() -> None:
    options, _ = parse_options(["E-v0", "--seeds", "2"])
    plan = make_plan(options, {"env_id": "E-v0"}, Path("out"))
    assert len({config.run_dir for config in plan}) == 4


@pytest.mark.parametrize(
    ("equal", "words"),
    [
        ("batch", "E-v0, 3 seeds. Equal batch: the same 8 samplers of 128 steps, hosted by 1 or 8 actors."),
        (
            "segment",
            "E-v0, 3 seeds. Equal segments: 128 steps for each of 1 or 8 actors, so the batch is 128 or 1,024 steps.",
        ),
    ],
)
def test_the_caption_says_what_is_equal(equal: str, words: str) -> None:
    options, _ = parse_options(["E-v0", "--equal", equal])
    assert caption(options, make_plan(options, {"env_id": "E-v0"}, Path("out"))) == words


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--actors", "8"], "actors=8: nothing to compare"),
        (["--actors", "1", "1"], "actors=1 1: nothing to compare"),
        (["--actors", "1", "-8"], "actors=1 -8: one is below zero"),
        (["--actors", "one"], "invalid int value: 'one'"),
        (["--seeds", "0"], "seeds=0: comes to no run"),
        (["--equal", "seeds"], "invalid choice: 'seeds'"),
        (["--num-actors", "8"], "--num-actors has no effect here: --actors says how many"),
        (["--run_dir=x"], "--run-dir has no effect here: --out says where"),
        (["--resume", "x"], "--resume has no effect here"),
        (["--equal", "segment", "--num-samplers", "8"], "--num-samplers has no effect with --equal segment"),
        (["--actor", "1", "8"], "--actor is not a known flag"),
        (["--num-samplers", "4"], "num_actors=8 is more than the 4 samplers"),
        (["--minibatch-size", "9999"], "minibatch_size=9999 is larger than the batch of 1024 steps"),
        (["--out", "."], "out=.: holds something already"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "CartPole-v1", *argv, "--preset", "none"]) == 2
    assert words in capsys.readouterr().err


def test_a_setting_that_only_one_number_of_actors_refuses_is_told_before_the_first_run() -> None:
    options, _ = parse_options(["E-v0", "--actors", "8", "0"])
    with pytest.raises(ConfigError, match="cpus_per_actor"):
        make_plan(options, {"env_id": "E-v0", "cpus_per_actor": "2"}, Path("out"))


def test_a_comparison_leaves_picture_and_figures_and_equal_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flags = ["--actors", "0", "2", "--target", "-9999", "--out", str(out), *TINY]
    assert main(["compare", "dppo/PointMass-v0", *flags, "--num-steps", "64", "--total-timesteps", "384"]) == 0
    said = capsys.readouterr().out
    assert "The same weights, bit for bit, for every seed." in said
    assert "4 of 4: 2 actors, seed 2" in said
    assert "w + x =" in said
    assert (out / "compare.png").stat().st_size > 10_000
    everything = json.loads((out / "compare.json").read_text())
    assert everything["same_weights"] is True
    assert [group["label"] for group in everything["groups"]] == ["in process", "2 actors"]
    assert everything["groups"][0]["speed_up"] == 1
    assert all(0 < group["cycle"]["efficiency"] <= 1 for group in everything["groups"])
    assert all(group["seeds_that_reached_target"] == 2 for group in everything["groups"])
    runs = everything["runs"]
    assert [(run["num_actors"], run["seed"]) for run in runs] == [(0, 1), (2, 1), (0, 2), (2, 2)]
    assert runs[0]["curve"]["episodic_return"] == runs[1]["curve"]["episodic_return"]
    assert Path(runs[3]["run_dir"], "metrics.jsonl").is_file()


def test_different_weights_fail_loudly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--actors", "0", "1", "--out", str(tmp_path / "out"), *TINY, "--seeds", "1"]
    assert main(["compare", "dppo/DriftingCartPole-v0", *flags]) == 1
    said = capsys.readouterr().err
    assert "THE WEIGHTS DIFFER" in said
    assert "seed 1: 0 actors" in said
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["same_weights"] is False
