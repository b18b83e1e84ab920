"""`dppo verify` computes iterations again: an untouched run is equal, and one changed byte or number is found."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import tiny_run
from recorder import Notes, Recorder
from remedies import executes
from worlds.graded import Graded, Levels

import dppo
from dppo.config.parts import settings_by_name
from dppo.errors import CheckpointError, ConfigError, DppoError
from dppo.files import sha256_of
from dppo.records.files import checkpoint as checkpoints
from dppo.records.files.checkpoint import Checkpoint, Keep
from dppo.records.files.row_sums import RowSums
from dppo.run.sources import SOURCES, changed_sources, stored_sources, warn_of_changed_sources
from dppo.tools.replay.command import main as replay_main
from dppo.tools.verify import certificate
from dppo.tools.verify.command import _drawn, _estimated_s, main
from dppo.tools.verify.stored import Stretch

ITERATIONS = 6
Capture = pytest.CaptureFixture[str]
Change = Callable[[Path], None]


def tiny(run: Path, **changes: Any) -> dppo.Config:
    sizes = {"hidden_sizes": (4,), "keep_checkpoints": "every=2"}
    return tiny_run(run, samplers=2, iterations=ITERATIONS, **sizes | changes)


def train(run: Path, resume: Path | None = None, **changes: Any) -> Path:
    return dppo.train(tiny(run, **changes), resume=resume).run_dir


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    return train(folder, trace_hashes=True, eval_every=64, eval_episodes=1, norm_value=True)


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the run; certificates are without a process that steps the environment."""
    monkeypatch.setattr(certificate, "simulator", lambda settings, seconds: {"first_steps": "fff"})
    return Path(shutil.copytree(trained, tmp_path / "run"))


def verify(run: Path, *flags: str) -> int:
    return main([str(run), *flags])


def newest(run: Path) -> Path:
    return checkpoints.paths_in(run)[-1]


def test_each_nth_iteration_is_written_and_kept_if_asked_for(tmp_path: Path) -> None:
    """The run is shorter than the interval of checkpoints."""
    stored = {path.stem for path in checkpoints.paths_in(train(tmp_path / "run"))}
    assert {f"iter_{number:06d}" for number in range(0, ITERATIONS + 1, 2)} <= stored


@executes("tools/verify/certificate.py: Run dppo verify yourself")
def test_an_untouched_run_is_equal_and_gets_a_certificate(run: Path, capsys: Capture) -> None:
    assert verify(run, "--seed", "1") == 0
    printed = capsys.readouterr().out
    assert re.findall(r"equal +iterations (\d) to (\d)", printed) == [
        ("1", "2"),
        ("3", "4"),
        ("5", "6"),
    ]
    assert "about 0:" in printed

    written = json.loads((run / "certificate.json").read_text())
    assert written["verified"] == ["iterations 1 to 2", "iterations 3 to 4", "iterations 5 to 6"]
    assert written["files"]["config.yaml"] == sha256_of(run / "config.yaml")
    assert written["settings"]["seed"] == 1
    assert "not signed" in written["proves_not"]


def test_a_certificate_that_cannot_be_written_is_refused_before_anything_is_computed(
    run: Path, capsys: Capture
) -> None:
    """The computation may take hours."""
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        verify(run, "--out", str(run / "config.yaml" / "certificate.json"))
    assert capsys.readouterr().out == ""


def test_a_run_that_lacks_its_checkpoints_is_refused_and_not_called_different(
    run: Path, capsys: Capture
) -> None:
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        verify(run)
    assert capsys.readouterr().out == ""


def test_iterations_before_the_oldest_checkpoint_are_left_out_with_a_line(
    run: Path, capsys: Capture
) -> None:
    oldest = checkpoints.paths_in(run)[0]
    oldest.unlink()
    assert verify(run) == 0
    printed = capsys.readouterr().out
    assert "left out iterations 1 to 2: no checkpoint from before them was kept." in printed
    assert "equal    iterations 3 to 4" in printed


@pytest.mark.slow
def test_actors_and_the_process_that_steps_the_environment_agree(
    trained: Path, tmp_path: Path
) -> None:
    out = tmp_path / "certificate.json"
    assert verify(trained, "--num-actors", "2", "--out", str(out)) == 0
    written = json.loads(out.read_text())
    assert written["actors"] == 2
    assert len(written["simulator"]["first_steps"]) == 16
    assert "gymnasium" in written["simulator"]["packages"]


def test_a_run_with_a_baseline_to_fall_back_to_is_verified(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without evaluations the baseline has no effect, and without the baseline `never_worse` has none."""
    baseline: dict[str, Any] = {"baseline": "worlds.priors:balance", "never_worse": True}
    run = train(tmp_path / "run", eval_every=64, eval_episodes=2, **baseline)
    monkeypatch.setattr(certificate, "simulator", lambda settings, seconds: {})
    assert verify(run, "--trust", "--iterations", "1") == 0
    assert "equal" in capsys.readouterr().out


def other_byte(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def change_weights(run: Path) -> None:
    other_byte(newest(run), newest(run).stat().st_size - 100)


def change_old_checkpoint(run: Path) -> None:
    other_byte(checkpoints.paths_in(run)[0], 3000)


def change_metrics(run: Path) -> None:
    data = (run / "metrics.jsonl").read_bytes()
    other_byte(run / "metrics.jsonl", data.index(b'"charts/SPS"') + 15)


def change_trace(run: Path) -> None:
    other_byte(run / "trace.jsonl", 400)


def replace_in_settings(pattern: str, text: str) -> Change:
    def change(run: Path) -> None:
        settings = (run / "config.yaml").read_text()
        changed = re.sub(pattern, text, settings, flags=re.MULTILINE)
        (run / "config.yaml").write_text(changed)

    return change


def add_row(run: Path) -> None:
    rows = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(rows + rows.splitlines(keepends=True)[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_weights, "iter_000006.safetensors: expected SHA-256"),
        (change_old_checkpoint, "iter_000000.safetensors: expected"),
        (change_metrics, "metrics.jsonl was changed"),
        (change_trace, "trace.jsonl was changed"),
        (
            replace_in_settings("gamma: 0.99$", "gamma: 0.98"),
            "config.yaml has gamma: 0.98, and the newest checkpoint 0.99",
        ),
        (replace_in_settings("gamma: ", "gamma; "), "config="),
        (replace_in_settings("gymnasium: ", "gymnasium: 1"), "config.yaml has gymnasium: 1"),
        (add_row, "metrics.jsonl was changed: lines were added"),
    ],
)
def test_one_changed_byte_is_found_before_anything_is_computed(
    change: Change, words: str, run: Path, capsys: Capture
) -> None:
    change(run)
    assert verify(run) == 1
    printed = capsys.readouterr().out
    assert f"differs  {run / 'checkpoints' / words}" in printed or f"differs  {words}" in printed
    assert "compute " not in printed
    assert not (run / "certificate.json").exists()


def forge(run: Path, change: Callable[[Checkpoint], None]) -> None:
    """Change the newest checkpoint, and seal it again."""
    stored = checkpoints.load(newest(run))
    change(stored)
    iteration = stored.state["iteration"]
    checkpoints.save(run / "checkpoints", iteration, stored, keep=Keep(9), score=None)


def forge_weights(run: Path) -> None:
    def change(stored: Checkpoint) -> None:
        name, weights = next(iter(stored.arrays["model"].items()))
        stored.arrays["model"][name] = weights + 1

    forge(run, change)


def forge_metrics(run: Path) -> None:
    metrics = run / "metrics.jsonl"
    *before, last = metrics.read_text().splitlines()
    forged = json.loads(last) | {"charts/episodic_return": 500.0}
    metrics.write_text("\n".join([*before, json.dumps(forged), ""]))
    sums = RowSums(run).now()
    forge(run, lambda stored: stored.state.update(rows=sums))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (forge_weights, r"iteration 6: model/\S+ differs from the checkpoint"),
        (forge_metrics, "iteration 6: charts/episodic_return is 500.0 in metrics.jsonl, and "),
    ],
)
def test_what_was_forged_with_its_checksum_is_found_by_computing(
    change: Change, words: str, run: Path, capsys: Capture
) -> None:
    change(run)
    assert verify(run, "--iterations", "1") == 1
    printed = capsys.readouterr().out
    assert re.search(f"differs  {words}", printed)
    assert "A second computation gives the same" in printed


def test_a_resumed_run_is_equal_also_with_other_settings_that_change_no_result(
    trained: Path, run: Path
) -> None:
    train(run, resume=run / "checkpoints" / "iter_000002", trace_hashes=True, norm_value=True)
    train(run, resume=run, trace_hashes=True, norm_value=True, record_episodes="none")
    assert verify(run) == 0


def test_a_metric_that_an_earlier_version_did_not_write_is_not_compared(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dppo.tools.verify.command.changed_files", lambda run, newest: ())
    metrics = run / "metrics.jsonl"
    rows = metrics.read_text()
    metric = re.compile('"charts/recent_episodes": [0-9.]+, ')
    metrics.write_text(metric.sub("", rows))
    assert "recent_episodes" not in metrics.read_text()
    assert verify(run) == 0

    last = rows.splitlines()[-1]
    metrics.write_text(rows.replace(last, metric.sub("", last)))
    assert verify(run) == 1


@pytest.mark.parametrize("play", [verify, lambda run: replay_main([str(run), "--episode", "1"])])
def test_a_run_of_another_version_is_refused_with_the_file_and_line(
    play: Callable[[Path], int], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_by_name()
    without_num_steps = {name: settings[name] for name in settings if name != "num_steps"}
    monkeypatch.setattr("dppo.config.reading.settings_by_name", lambda: without_num_steps)
    with pytest.raises(ConfigError, match=r"run/config\.yaml, line \d+: num_steps is not a known"):
        play(run)


@pytest.mark.parametrize(
    "settings",
    [
        {"policy_lag": 2, "reuse": 3},
        {"memory": "gru", "envs_per_sampler": 2, "norm_value": True},
        {"env_id": "Pendulum-v1", "anneal_lr": True, "info_keys": ("x",)},
    ],
)
def test_runs_of_other_kinds_are_equal(settings: dict[str, Any], tmp_path: Path, run: Path) -> None:
    assert verify(train(tmp_path / "other", **settings)) == 0


@pytest.mark.parametrize("policy_lag", [0, 1])
def test_a_curriculum_is_verified_between_checkpoints_of_each_iteration(
    policy_lag: int, tmp_path: Path, run: Path, capsys: Capture
) -> None:
    """Options that its observer sets after an iteration are an input of later ones: see `RunInfo.set_env`."""
    for every, code in ((1, 0), (3, 1)):
        folder = tmp_path / f"every_{every}"
        changes = {"policy_lag": policy_lag, "keep_checkpoints": f"every={every}"}
        dppo.train(tiny(folder, env_id=Graded, **changes), observers=[Levels()])
        assert verify(folder, "--iterations", "9", "--trust") == code
    assert "an observer that calls set_env (then use keep_checkpoints" in capsys.readouterr().out


def test_rows_of_a_killed_run_may_be_ahead_of_its_checkpoint(tmp_path: Path, run: Path) -> None:
    killed = tmp_path / "killed"
    dppo.train(tiny(killed), observers=[Recorder(interrupt_at=3)])
    with (killed / "metrics.jsonl").open("ab") as file:
        file.write(b'{"iteration": 4, "global_step": 128}\n{"iteration": 5, "glo')
    assert verify(killed) == 0


def test_rows_that_waited_for_a_full_disk_may_follow_those_of_the_checkpoint(run: Path) -> None:
    metrics = run / "metrics.jsonl"
    rows = metrics.read_bytes()
    metrics.write_bytes(b"".join(rows.splitlines(keepends=True)[:4]))
    sums = RowSums(run).now()
    forge(run, lambda stored: stored.state.update(rows=sums))
    metrics.write_bytes(rows)
    assert verify(run) == 0
    add_row(run)
    assert verify(run) == 1


@executes("tools/verify/command.py: is computed again from the checkpoint before it. Train with")
def test_a_run_with_a_single_checkpoint_says_how_to_keep_more(tmp_path: Path, run: Path) -> None:
    single = train(tmp_path / "single", keep_checkpoints=1)
    with pytest.raises(CheckpointError, match="has a single checkpoint") as refused:
        verify(single)
    match = re.search("`keep_checkpoints=(every=100)`", str(refused.value))
    assert match
    assert verify(train(tmp_path / "several", keep_checkpoints=match[1])) == 0


@executes("tools/verify/command.py: does not follow from its seed. Run `{}`")
def test_an_environment_that_no_seed_reproduces_is_named(
    tmp_path: Path, run: Path, capsys: Capture
) -> None:
    drifting = train(tmp_path / "drifting", env_id="worlds.faulty:drifting_cartpole")
    with pytest.raises(ConfigError, match="Add `trust=True` if you trust that folder"):
        verify(drifting)
    assert verify(drifting, "--trust") == 1
    printed = capsys.readouterr().out
    assert "the environment does not follow from its seed" in printed
    assert "doctor worlds.faulty:drifting_cartpole`" in printed


@pytest.mark.parametrize(
    ("setting", "changes"),
    [
        ("env_id=edited_plant:make", {"env_id": "edited_plant:make"}),
        ("wrappers=edited_plant:wrap", {"wrappers": ["edited_plant:wrap"]}),
        ("model=edited_plant:Net", {"model": "edited_plant:Net"}),
    ],
)
def test_code_whose_file_has_changed_is_named_on_resume_and_by_verify(
    setting: str,
    changes: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    file = tmp_path / "edited_plant.py"
    text = (
        "import gymnasium as gym\n"
        "from worlds.models import Plain\n"
        "FACTOR = 1.0\n"
        "def wrap(env):\n"
        "    return gym.wrappers.TransformReward(env, lambda reward: FACTOR * reward)\n"
        "def make():\n"
        "    return wrap(gym.make('CartPole-v1'))\n"
        "class Net(Plain):\n"
        "    def forward(self, obs):\n"
        "        return super().forward(FACTOR * obs)\n"
    )
    file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("edited_plant", None)
    sizes: dict[str, Any] = {"samplers": 2, "iterations": ITERATIONS, "keep_checkpoints": "every=2"}
    config = tiny_run(tmp_path / "run", **sizes, **changes)
    with Notes() as notes:
        dppo.train(config, observers=[Recorder(interrupt_at=3)])
    assert "has changed" not in "".join(notes.texts)

    file.write_text(text.replace("1.0", "2.25"))
    del sys.modules["edited_plant"]
    with Notes() as notes:
        dppo.train(config, resume=tmp_path / "run")
    changed = f"{setting}: its file {file} has changed"
    assert any(
        text.startswith(f"{changed} after 3 of the 6 iterations, so ") for text in notes.texts
    )
    assert verify(tmp_path / "run", "--trust") == 1
    assert f"Equal results cannot be expected: {changed} since." in capsys.readouterr().out


def test_only_code_that_a_file_defines_under_its_name_has_a_hash() -> None:
    """A lambda is often in the program itself, of which other lines may change."""
    config = tiny_run(Path("run"), env_id=lambda: None)
    assert stored_sources(config) == {SOURCES: {}}
    named = tiny_run(Path("run"), env_id="worlds.faulty:drifting_cartpole")
    assert stored_sources(named)[SOURCES].keys() == {"env_id=worlds.faulty:drifting_cartpole"}
    assert not [*changed_sources({}, named)], "a checkpoint of an earlier version"
    state = {"iteration": 0, SOURCES: dict.fromkeys(stored_sources(named)[SOURCES], "another")}
    with Notes() as notes:
        warn_of_changed_sources(state, named)
    assert not notes.texts, "nothing has been learned yet"


def test_a_run_that_is_not_replayed_cannot_be_verified(
    tmp_path: Path, run: Path, capsys: Capture
) -> None:
    assert verify(train(tmp_path / "unreplayed", replay=False)) == 1
    printed = capsys.readouterr().out
    assert re.search("^unproven .*open episodes cannot be replayed", printed, re.MULTILINE)
    assert "differs" not in printed


def test_no_iterations_are_refused(run: Path) -> None:
    with pytest.raises(DppoError, match="iterations=0: must be at least 1"):
        verify(run, "--iterations", "0")


def stretch(first: int, last: int) -> Stretch:
    return Stretch(Path("a"), Path("b"), first, last, open_steps=0)


def test_the_newest_is_always_drawn_and_what_takes_far_longer_is_not() -> None:
    longest = stretch(1, 400)
    single = [stretch(first, first) for first in range(401, 405)]
    stretches = [longest, *single]
    for seed in range(20):
        drawn = _drawn(stretches, 3, seed)
        assert len(drawn) == 3
        assert drawn[-1] == single[-1]
        assert longest not in drawn
    again = _drawn(stretches, 3, 1)
    assert _drawn(stretches, 3, 1) == again
    assert _drawn([longest], 5, 0) == [longest]


def test_the_estimate_is_for_these_actors_and_counts_the_replay() -> None:
    """A second a step: 32 s with 8 actors for 256 steps, and the open episodes before that."""
    rows = [
        {
            "iteration": 7,
            "actors/alive": 8,
            "perf/collect_s": 32.0,
            "perf/iteration_s": 33.0,
            "perf/env_step_ms": 1000.0,
        }
    ]
    config = dppo.Config(env_id="CartPole-v1", num_actors=8)
    open_episodes = replace(stretch(7, 7), open_steps=800)
    assert _estimated_s(open_episodes, rows, config) == pytest.approx(5 + 33 + 100)

    alone = replace(config, num_actors=1)
    assert _estimated_s(open_episodes, rows, alone) == pytest.approx(5 + 1 + 256 + 800)
