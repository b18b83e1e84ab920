"""The baseline of a run: played once, compared in each evaluation, deployed where no policy is shown to be better."""

from __future__ import annotations

import io
import json
import logging
import math
import re
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import make_config
from matrix import sized
from recorder import Notes, Recorder
from remedies import executes
from rich.console import Console
from worlds.plants import proportional

import dppo
from dppo.errors import CheckpointError, ConfigError, ControllerFault, EnvironmentFault, NotBetter
from dppo.log import logger
from dppo.policies.playing import EpisodePlayer
from dppo.ppo.exchange.records import ControllerTurn, Episode, PolicySnapshot
from dppo.records.terminal.panel import draw
from dppo.records.terminal.plain import plain_line
from dppo.records.terminal.view import View
from dppo.run.baseline import Baseline
from dppo.run.notices import Notices

ROWS = 40
ITERATIONS = 4
EPISODES = 5
CONTROLLER = """
import numpy as np

def act(obs):
    return np.clip({gain} * (0.5 - obs) + 0.25, 0.0, 1.0)
"""


COMPARED = {
    "env_id": "worlds.plants:Plant",
    "envs_per_sampler": 1,
    "eval_every": 2 * ROWS,
    "eval_episodes": EPISODES,
    "baseline": "worlds.plants:proportional",
}


def settings(run_dir: Path, **changes: Any) -> dppo.Config:
    return make_config(sized(COMPARED, ITERATIONS) | {"run_dir": run_dir} | changes)


def stopped(run_dir: Path, **changes: Any) -> dppo.Result:
    """Train a run until its third iteration."""
    config = settings(run_dir, **changes)
    return dppo.train(config, observers=[Recorder(interrupt_at=3)])


def resumed(run_dir: Path, **changes: Any) -> dppo.Result:
    return dppo.train(settings(run_dir, **changes), resume=run_dir)


def compared(result: dppo.Result) -> list[dict[str, float]]:
    """Return the metrics of each evaluation that are about the baseline."""
    return [
        {key: value for key, value in row.items() if key.startswith("eval/baseline")}
        for row in result.metrics
        if "eval/iteration" in row
    ]


class Counted:
    """Counts the episodes of the controller, which it plays as usual, except for those in which a solver fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: tuple[int, ...] = ()) -> None:
        self.episodes: list[int] = []
        play = EpisodePlayer.play

        def counting(player: EpisodePlayer, policy: Any, episode: int, *args: Any) -> Episode:
            if isinstance(policy, ControllerTurn):
                self.episodes.append(episode)
                if episode in failing:
                    raise EnvironmentFault("the solver has diverged")
            return play(player, policy, episode, *args)

        monkeypatch.setattr(EpisodePlayer, "play", counting)


@pytest.fixture(scope="module")
def uninterrupted(module_path: Path) -> dppo.Result:
    return dppo.train(settings(module_path / "uninterrupted", keep_checkpoints=99))


def test_a_baseline_changes_no_weights(uninterrupted: dppo.Result, tmp_path: Path) -> None:
    without = dppo.train(settings(tmp_path / "run", baseline=None))
    assert without.weights_sha256 == uninterrupted.weights_sha256
    assert without.baseline is None
    assert compared(without) == [{}, {}]


def test_differences_are_those_of_the_same_episodes(uninterrupted: dppo.Result) -> None:
    env = "worlds.plants:Plant"
    played = dppo.evaluate("worlds.plants:proportional", env, EPISODES, seed=1)
    for number, row in zip((2, 4), compared(uninterrupted), strict=True):
        path = uninterrupted.run_dir / f"checkpoints/iter_{number:06d}.safetensors"
        policy = dppo.evaluate(path, episodes=EPISODES, seed=1, trust=True)
        differences = np.subtract(policy.returns, played.returns)
        mean = differences.mean()
        margin = 2.7764451 * differences.std(ddof=1) / math.sqrt(EPISODES)
        assert row["eval/baseline_return"] == played.mean_return
        assert row["eval/baseline_difference"] == pytest.approx(mean)
        assert row["eval/baseline_difference_low"] == pytest.approx(mean - margin)
        assert row["eval/baseline_difference_high"] == pytest.approx(mean + margin)
        assert row["eval/baseline_pairs"] == EPISODES

    comparison = uninterrupted.baseline
    assert comparison is not None
    assert comparison.name == "worlds.plants:proportional"
    assert comparison.mean_return == played.mean_return
    assert comparison.deployed == "policy"  # without never_worse
    [line] = [
        line for line in uninterrupted.notes if line.startswith("Baseline worlds.plants:prop")
    ]
    assert "Deployed" not in line


@pytest.mark.parametrize("failing", [(), (1, 3)])
def test_a_resumed_run_does_not_play_the_baseline_again(
    failing: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch, failing)
    [first] = compared(stopped(tmp_path / "run"))
    result = resumed(tmp_path / "run")
    [last] = compared(result)
    assert counted.episodes == [*range(EPISODES)]
    assert result.incidents.get("evaluation_fault", 0) == len(failing)
    assert last["eval/baseline_pairs"] == EPISODES - len(failing)
    assert last["eval/baseline_return"] == first["eval/baseline_return"]


@pytest.mark.parametrize("change", ["controller", "file", "arguments"])
def test_the_baseline_is_played_again_if_it_or_its_environment_changes(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"controller_{change}.py"
    file.write_text(CONTROLLER.format(gain=2.0))
    counted = Counted(monkeypatch)
    first = stopped(tmp_path / "run", baseline=f"{file}:act")
    changes: dict[str, Any] = {"baseline": f"{file}:act"}
    if change == "controller":
        changes["baseline"] = "worlds.plants:Integrating"
    elif change == "file":
        file.write_text(CONTROLLER.format(gain=3.0))
    else:
        changes["eval_env_kwargs"] = {"target": 0.4}
    with Notes() as notes:
        again = resumed(tmp_path / "run", **changes)
    assert counted.episodes == [*range(EPISODES)] * 2
    [why] = [text for text in notes.texts if "is played again" in text]
    assert why.startswith(f"baseline {changes['baseline']} is played again: its file, its environ")

    stored = json.loads((tmp_path / "run" / "baseline.json").read_text())
    assert stored["baseline"] == changes["baseline"]
    assert compared(again) != compared(first)


@pytest.mark.parametrize(
    "content", ["", "[]", "{", {"returns": None}, {"returns": [1.0]}, {"returns": [math.inf] * 5}]
)
def test_a_damaged_file_of_the_baseline_counts_as_none(
    content: str | dict[str, Any], tmp_path: Path, uninterrupted: dppo.Result
) -> None:
    def is_over() -> bool:
        return Baseline(settings(tmp_path / "run"), tmp_path, paired=True).is_over

    path = Path(shutil.copy(uninterrupted.run_dir / "baseline.json", tmp_path))
    assert is_over()
    if isinstance(content, dict):
        content = json.dumps(json.loads(path.read_text()) | content)
    path.write_text(content)
    assert not is_over()


def test_an_object_has_no_version_and_is_played_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    baseline = partial(proportional)
    stopped(tmp_path / "run", baseline=baseline)
    resumed(tmp_path / "run", baseline=baseline)
    assert counted.episodes == [*range(EPISODES)] * 2
    assert not (tmp_path / "run" / "baseline.json").exists()


def test_a_nondeterministic_environment_is_compared_without_pairs(tmp_path: Path) -> None:
    with Notes() as notes:
        result = dppo.train(settings(tmp_path / "run", env_id="worlds.plants:nondeterministic"))
    assert any("Welch" in text for text in notes.texts)
    assert all(row["eval/baseline_pairs"] == 0 for row in compared(result))
    comparison = result.baseline
    assert comparison is not None
    assert comparison.difference is not None
    assert not comparison.difference.paired


def test_few_episodes_are_warned_of(tmp_path: Path) -> None:
    with Notes() as notes:
        dppo.train(settings(tmp_path / "run"))
    assert any(text.startswith("eval_episodes=5: ") for text in notes.texts)


@pytest.mark.parametrize(
    ("baseline", "reason"),
    [
        ("worlds.plants:Raising", "no licence"),
        ("worlds.plants:wide", "step 1 of episode 0"),
        ("worlds.plants:FailingLate", "in the last step"),
    ],
)
def test_a_controller_that_fails_ends_the_run_before_training(
    baseline: str, reason: str, tmp_path: Path
) -> None:
    recorder = Recorder()
    with pytest.raises(ControllerFault, match=reason):
        dppo.train(settings(tmp_path / "run", baseline=baseline), observers=[recorder])
    assert recorder.rows == []
    assert not any("not all of its episodes" in line for line in recorder.ending)


def test_long_episodes_in_this_process_show_their_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for duration in ("FIRST_S", "LATER"):  # a line at each step
        monkeypatch.setattr(f"dppo.run.notices.{duration}", 0.0)
    with Notes() as notes:
        dppo.train(settings(tmp_path / "run"))
    texts = "\n".join(notes.texts)
    name = COMPARED["baseline"]
    assert f"baseline {name}: 0 of {EPISODES} episodes; the current one: 1 step\n" in texts
    evaluation = f"evaluation after {2 * ROWS} steps: 0 of {EPISODES} episodes"
    assert f"{evaluation}; the current one: 1 step\n" in texts
    assert "waiting for the evaluation" not in texts


def test_lines_about_a_wait_become_rare_but_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    notices = Notices()
    shown = []
    for now in range(0, 2500, 10):
        if notices.take_due():
            shown.append(now)
    assert shown == [10, 50, 250, 850, 1450, 2050]


@pytest.mark.parametrize("baseline", ["worlds.plants:none", "nowhere:PI", "PI"])
def test_a_controller_that_cannot_be_found_is_refused_before_anything_starts(
    baseline: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="baseline="):
        dppo.train(settings(tmp_path / "run", baseline=baseline))
    assert not (tmp_path / "run").exists()


EVALUATED = {
    "global_step": 64,
    "charts/episodes": 1,
    "charts/recent_episodes": 1,
    "eval/episodes": 4,
    "eval/global_step": 32,
    "eval/episodic_return": 12.5,
    "eval/episodic_length": 20.0,
    "eval/baseline_return": 10.0,
    "eval/baseline_difference": 2.5,
    "eval/baseline_difference_low": -0.5,
    "eval/baseline_difference_high": 5.5,
    "eval/baseline_pairs": 4,
}


@pytest.mark.parametrize(("std", "shown"), [(2.5, "2.50"), (3e-17, "0")])
def test_displays_show_the_last_evaluation_the_difference_and_its_interval(
    std: float, shown: str
) -> None:
    view = View(total_steps=1000)
    view.add_row(EVALUATED | {"eval/return_std": std})
    view.add_row({"global_step": 128, "charts/episodes": 1, "charts/recent_episodes": 1})
    line = plain_line(view)
    assert (
        "eval 12.5 after 32 steps, baseline 10.0, difference +2.50 (95 % -0.500 to +5.50)" in line
    )

    with Console(width=90, file=io.StringIO(), record=True) as console:
        console.print(draw(view, 90, 0.0))
    lines = [line.split() for line in console.export_text().splitlines() if " " in line.strip()]
    panel = {words[1]: words[2:-1] for words in lines}
    evaluation = f"12.5 +- {shown} after 32 steps length 20.0 4 episodes"
    assert panel["eval"] == evaluation.split()

    baseline = "10.0 difference +2.50 95 % -0.500 to +5.50 4 pairs"
    assert panel["baseline"] == baseline.split()


BASELINE_RETURNS = [10.0, 20.0, 30.0, 40.0, 50.0]
WORSE = [9.0, 18.0, 29.0, 38.0, 49.0]
BETTER = [12.0, 21.0, 32.0, 41.0, 52.0]
# the highest mean, and no improvement at 95 %
UNCLEAR = [40.0, 10.0, 90.0, 10.0, 60.0]


def best_json(run: Path) -> Any:
    return json.loads((run / "checkpoints/best.json").read_text())


def play_as(monkeypatch: pytest.MonkeyPatch, returns: dict[int, list[float]]) -> None:
    """Give the episodes of the policy after an iteration, and of the baseline, these returns."""

    def scored(_: EpisodePlayer, policy: Any, episode: int, *args: Any) -> Episode:
        chosen = BASELINE_RETURNS
        if isinstance(policy, PolicySnapshot):
            chosen = returns[policy.version]
        return Episode(0, episode, chosen[episode], 10, None)

    monkeypatch.setattr(EpisodePlayer, "play", scored)


def test_never_worse_deploys_the_best_policy_that_is_shown_to_be_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_as(monkeypatch, {1: UNCLEAR, 2: BETTER, 3: UNCLEAR, 4: WORSE})
    config = settings(tmp_path / "run", never_worse=True, eval_every=ROWS, keep_checkpoints=1)
    result = dppo.train(config)
    best = best_json(tmp_path / "run")
    assert best["checkpoint"] == "iter_000002.safetensors"
    assert best["deployed"] == "policy"
    assert best["baseline"]["mean_return"] == 30.0
    for source in (result, result.run_dir):
        assert dppo.load_policy(source).state["iteration"] == 2
    # a checkpoint that is named is loaded as it is
    assert dppo.load_policy(result.checkpoint).state["iteration"] == 4
    assert result.baseline is not None

    difference = result.baseline.difference
    assert difference is not None
    # differences 2, 1, 2, 1, 2: mean 1.6, variance 0.3
    margin = 2.7764451 * math.sqrt(0.3 / 5)
    interval = (difference.low, difference.mean, difference.high)
    assert interval == pytest.approx((1.6 - margin, 1.6, 1.6 + margin))

    deployed = "Deployed, as never_worse=True: the policy of iter_000002"
    assert any(deployed in line for line in result.notes)


def test_an_export_prints_the_comparison_in_a_line_of_its_own(
    uninterrupted: dppo.Result, tmp_path: Path
) -> None:
    pytest.importorskip("onnxscript")
    _, statement = dppo.export_onnx(uninterrupted.run_dir, tmp_path / "policy.onnx").splitlines()
    assert statement.startswith("This is the policy of iter_000004. Baseline worlds.plants:")


@executes("policies/deployed.py: To use the policy all the same, pass {}")
def test_never_worse_deploys_the_baseline_if_no_policy_is_shown_to_be_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play_as(monkeypatch, {2: UNCLEAR, 4: WORSE})
    result = dppo.train(settings(tmp_path / "run", never_worse=True))
    best = best_json(tmp_path / "run")
    assert best["checkpoint"] is None
    assert best["deployed"] == "baseline"
    assert best["baseline"]["name"] == "worlds.plants:proportional"
    assert any("Deployed, as never_worse=True: the baseline" in line for line in result.notes)

    # the best one is kept, and is named
    for source in (result, result.run_dir):
        with pytest.raises(NotBetter, match="iter_000002") as refusal:
            dppo.load_policy(source)
        assert refusal.value.comparison.iteration == 2

    named = str(refusal.value).rpartition("pass ")[2].removesuffix(".")
    assert dppo.load_policy(named).state["iteration"] == 2

    monkeypatch.setattr(logging.root, "handlers", [])  # as in a program without logging
    capsys.readouterr()
    dppo.evaluate(result.run_dir, episodes=2, trust=True)
    written = capsys.readouterr().err
    assert re.match(r"the baseline plays\. .* that the policy is better", written)
    logger.warning("after an evaluation")
    assert not capsys.readouterr().err
    with pytest.raises(ConfigError, match="trust=True"):
        dppo.evaluate(result.run_dir, episodes=2, env="worlds.plants:Plant")


@executes("records/files/checkpoint.py: cannot be read ({}). Pass one of the checkpoints beside it")
def test_a_damaged_best_json_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play_as(monkeypatch, {2: BETTER, 4: WORSE})
    result = dppo.train(settings(tmp_path / "run", never_worse=True))
    (result.run_dir / "checkpoints/best.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"best.json: cannot be read"):
        dppo.load_policy(result)
    assert dppo.load_policy(result.checkpoint).state["iteration"] == 4


def test_never_worse_can_be_asked_for_when_a_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_as(monkeypatch, {2: UNCLEAR, 4: BETTER})
    stopped(tmp_path / "run")
    assert best_json(tmp_path / "run")["iteration"] == 2
    resumed(tmp_path / "run", never_worse=True)
    assert dppo.load_policy(tmp_path / "run").state["iteration"] == 4


def test_a_difference_from_another_controller_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_as(monkeypatch, {2: BETTER, 4: WORSE})
    stopped(tmp_path / "run", never_worse=True)
    assert dppo.load_policy(tmp_path / "run").state["iteration"] == 2
    resumed(tmp_path / "run", never_worse=True, baseline="worlds.plants:Integrating")
    assert best_json(tmp_path / "run")["deployed"] == "baseline"


# ------------------------------------------------------------------ on Ray


@pytest.mark.slow
def test_actors_play_the_baseline_with_the_same_results(
    ray_session: None, uninterrupted: dppo.Result, tmp_path: Path
) -> None:
    for evaluators in (1, 2):
        run = tmp_path / f"evaluators_{evaluators}"
        result = dppo.train(settings(run, num_actors=2, eval_actors=evaluators))
        assert result.weights_sha256 == uninterrupted.weights_sha256
        assert compared(result) == compared(uninterrupted)
        assert (run / "baseline.json").read_text() == (
            uninterrupted.run_dir / "baseline.json"
        ).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("baseline", ["worlds.plants:Raising", "worlds.plants:wide"])
def test_a_controller_that_fails_on_actors_ends_the_run_before_training(
    baseline: str, ray_session: None, tmp_path: Path
) -> None:
    recorder = Recorder()
    config = settings(tmp_path / "run", num_actors=2, baseline=baseline)
    with pytest.raises(ControllerFault):
        dppo.train(config, observers=[recorder])
    assert recorder.rows == []


@pytest.mark.slow
def test_episodes_of_a_controller_that_fail_late_on_actors_are_left_out(
    ray_session: None, tmp_path: Path
) -> None:
    config = settings(tmp_path / "run", num_actors=2, baseline="worlds.plants:FailingLate")
    result = dppo.train(config)
    assert result.stopped_by is None
    assert result.incidents["evaluation_fault"] == EPISODES
    assert compared(result) == [{}, {}]
    assert result.baseline is not None
    assert result.baseline.difference is None
    assert not (tmp_path / "run/baseline.json").exists()
