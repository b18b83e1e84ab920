"""`dppo compare`: its flags, its plan, and its output."""

import json
import re
from pathlib import Path

import pytest
from builders import finished

from dppo.__main__ import main
from dppo.commands.compare import make_table
from dppo.commands.compare.measured import Run, group_by_actors
from dppo.commands.compare.plan import caption, make_plan, parse
from dppo.config import Config
from dppo.errors import ConfigError

TINY = ["--num-samplers", "2", "--num-steps", "16", "--total-timesteps", "64", "--seeds", "2"]


def plan_of(*words: str, **settings: object) -> list[tuple[int, int, int]]:
    return [(config.num_actors, config.num_samplers, config.seed) for config in planned(*words, **settings)]


def planned(*words: str, **settings: object) -> list[Config]:
    options, given = parse(["E-v0", *words])
    return make_plan(options, given | settings, Path("out"))


def test_flags_belong_to_the_comparison_or_to_the_training() -> None:
    options, settings = parse(["E-v0", "--actors", "1", "8", "--gamma", "0.9", "--target", "475"])
    assert (options.actors, options.target, options.seeds, options.equal) == ([1, 8], 475.0, 3, "batch")
    assert settings == {"env_id": "E-v0", "gamma": "0.9"}


def test_help_lists_all_flags_but_those_that_a_comparison_sets_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert {"--actors", "--equal", "--gamma", "--num-samplers"} <= set(re.findall(r"^  (--[a-z-]+)", shown, re.M))
    assert not {"--num-actors", "--run-dir", "--resume"} & set(re.findall(r"^  (--[a-z-]+)", shown, re.M))


def test_one_number_of_actors_trains_several_seeds() -> None:
    assert plan_of("--actors", "0", "--seeds", "5") == [(0, 8, seed) for seed in range(1, 6)]


def test_settings_of_actors_apply_to_the_runs_with_actors() -> None:
    words = ["--actors", "0", "8", "--seeds", "1", "--segment-timeout-s", "60", "--cpus-per-actor", "0.5"]
    in_process, on_actors = planned(*words)
    assert (in_process.segment_timeout_s, in_process.cpus_per_actor) == (600, 1)
    assert (on_actors.segment_timeout_s, on_actors.cpus_per_actor) == (60, 0.5)


@pytest.mark.parametrize(("actors", "name"), [(["0"], "segment_timeout_s"), (["0", "8"], "num_learners")])
def test_settings_without_effect_or_that_make_the_runs_unequal_are_refused(actors: list[str], name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}=.* has no effect: num_actors=0"):
        planned("--actors", *actors, f"--{name.replace('_', '-')}", "2")


def test_numbers_of_actors_take_turns_forwards_and_backwards() -> None:
    assert plan_of("--seeds", "2") == [(1, 8, 1), (8, 8, 1), (8, 8, 2), (1, 8, 2)]
    actors = [number for number, _, _ in plan_of("--actors", "0", "2", "8", "--seeds", "3")]
    assert actors == [0, 2, 8, 8, 2, 0, 0, 2, 8]


def test_equal_batch_keeps_the_given_number_of_samplers() -> None:
    assert plan_of("--actors", "0", "4", "--seeds", "1", num_samplers="16", seed="7") == [(0, 16, 7), (4, 16, 7)]


def test_equal_segment_has_one_sampler_per_actor() -> None:
    words = ["--actors", "0", "1", "8", "--seeds", "1", "--equal", "segment"]
    assert plan_of(*words, num_samplers=4) == [(0, 1, 1), (1, 1, 1), (8, 8, 1)]


def test_each_run_has_a_folder_of_its_own() -> None:
    assert len({config.run_dir for config in planned("--seeds", "2")}) == 4


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
def test_the_caption_names_what_the_runs_have_in_common(equal: str, words: str) -> None:
    options, _ = parse(["E-v0", "--equal", equal])
    assert caption(options, make_plan(options, {"env_id": "E-v0"}, Path("out"))) == words


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--actors", "8", "--seeds", "1"], "actors=8: a single run leaves nothing to compare"),
        (["--actors", "1", "1"], "actors=1 1: contains a number twice"),
        (["--actors", "1", "-8"], "actors=1 -8: must not be negative"),
        (["--actors", "one"], "invalid int value: 'one'"),
        (["--seeds", "0"], "seeds=0: must be at least 1"),
        (["--equal", "seeds"], "invalid choice: 'seeds'"),
        (["--num-actors", "8"], "--num-actors has no effect here: use --actors"),
        (["--run_dir=x"], "--run-dir has no effect here: use --out"),
        (["--resume", "x"], "--resume has no effect here"),
        (["--equal", "segment", "--num-samplers", "8"], "--num-samplers has no effect with --equal segment"),
        (["--actor", "1", "8"], "--actor is not a known flag"),
        (["--num-samplers", "4"], "num_actors=8 is more than num_samplers=4"),
        (["--minibatch-size", "9999"], "minibatch_size=9999 is larger than the batch of 1024 steps"),
        (["--out", "."], "out=.: is not an empty folder"),
    ],
)
def test_invalid_options_are_refused_before_anything_starts(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "CartPole-v1", *argv, "--preset", "none"]) == 2
    assert words in capsys.readouterr().err


def test_a_setting_that_only_one_number_of_actors_refuses_is_reported_before_the_first_run() -> None:
    with pytest.raises(ConfigError, match="num_actors=8 is more than num_samplers=4"):
        planned("--actors", "1", "8", num_samplers="4")


def measured(num_actors: int, training_s: float, iteration_s: float = 2.0) -> Run:
    """Return a run of 1,024 steps in which environments and policy take 0.6 s of CPU, and the update 0.4 s."""
    row = {
        "iteration": 2,
        "perf/iteration_s": iteration_s,
        "perf/collect_s": 0.6,
        "perf/slowest_actor_s": 0.6,
        "perf/transfer_s": 0.0,
        "perf/update_s": 0.4,
        "perf/env_step_ms": 1.0,
        "perf/env_s": 0.5,
        "perf/act_s": 0.1,
    }
    config = Config(env_id="E-v0", num_actors=num_actors)
    return Run(config, finished(wall_s=training_s + 1, training_s=training_s, global_step=1024), [row])


@pytest.mark.parametrize(("iteration_s", "shown"), [(2.0, "50.0 %"), (0.9, "noise")])
def test_an_efficiency_above_one_is_shown_as_noise(iteration_s: float, shown: str) -> None:
    (group,) = group_by_actors([measured(0, 1.0, iteration_s)])
    assert list(make_table([group], None).columns[-1].cells) == [shown]
    assert group.as_json(None)["cycle"]["efficiency_is_noise"] is (shown == "noise")


@pytest.mark.parametrize(("training_s", "shown"), [(0.8, "1.25 x"), (0.1, "noise")])
def test_a_speed_up_above_that_of_perfect_parallelism_is_shown_as_noise(training_s: float, shown: str) -> None:
    groups = group_by_actors([measured(1, 1.0), measured(8, training_s)])
    table = make_table(groups, None)
    column = next(column for column in table.columns if column.header == "speed-up")
    assert list(column.cells) == ["1.00 x", shown]


def test_a_comparison_writes_picture_and_figures_of_equal_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ray_session: None
) -> None:
    out = tmp_path / "out"
    flags = ["--actors", "0", "2", "--target", "-9999", "--out", str(out), *TINY]
    assert main(["compare", "worlds.simple:point_mass", *flags, "--num-steps", "64", "--total-timesteps", "384"]) == 0
    said = capsys.readouterr().out
    assert "The same weights, bit for bit, for every seed." in said
    assert "4 of 4: in process, seed 2" in said
    assert "w + x =" in said
    assert (out / "compare.png").stat().st_size > 10_000
    everything = json.loads((out / "compare.json").read_text())
    assert everything["same_weights"] is True
    assert [group["label"] for group in everything["groups"]] == ["in process", "2 actors"]
    assert everything["groups"][0]["speed_up"] == 1
    assert all(0 < group["cycle"]["efficiency"] <= 1 for group in everything["groups"])
    assert all(group["seeds_that_reached_target"] == 2 for group in everything["groups"])
    runs = everything["runs"]
    assert [(run["num_actors"], run["seed"]) for run in runs] == [(0, 1), (2, 1), (2, 2), (0, 2)]
    assert runs[0]["curve"]["episodic_return"] == runs[1]["curve"]["episodic_return"]
    assert Path(runs[3]["run_dir"], "metrics.jsonl").is_file()


def test_several_seeds_are_compared_without_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["compare", "worlds.simple:point_mass", "--actors", "0", "--out", str(out), *TINY]) == 0
    assert "2 of 2: in process, seed 2" in capsys.readouterr().out
    everything = json.loads((out / "compare.json").read_text())
    assert [(run["num_actors"], run["seed"]) for run in everything["runs"]] == [(0, 1), (0, 2)]
    assert [group["label"] for group in everything["groups"]] == ["in process"]
    assert everything["same_weights"] is None
    assert (out / "compare.png").is_file()


def test_different_weights_fail_loudly(tmp_path: Path, capsys: pytest.CaptureFixture[str], ray_session: None) -> None:
    flags = ["--actors", "0", "1", "--out", str(tmp_path / "out"), *TINY, "--seeds", "1"]
    assert main(["compare", "worlds.faulty:drifting_cartpole", *flags]) == 1
    said = capsys.readouterr().err
    assert "THE WEIGHTS DIFFER" in said
    assert "seed 1: 0 actors" in said
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["same_weights"] is False
