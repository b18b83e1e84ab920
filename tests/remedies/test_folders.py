"""Remedies for run folders, files of settings, and earlier runs to start from."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from commandline import Typed
from worlds.models import Plain

import dppo
from dppo.errors import CheckpointError, ConfigError, DppoError
from dppo.records.files.lock import locked
from dppo.records.metrics.reading import read_metrics
from remedies import executes
from remedies.refused import shaped
from remedies.running import TINY, captured, problem, settings_in
from remedies.worlds import Fine

FINE = "remedies.worlds:Fine"
Capture = pytest.CaptureFixture[str]
STATISTICS: dict[str, Any] = {"norm_obs": True, "norm_reward": False}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("finished")
    assert problem(parent, env_id=FINE, total_timesteps=32, **STATISTICS) == ""
    return parent / "run0"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """Return a run of its own."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def train(
    *, observers: Sequence[Any] = (), resume: Any = None, branch: Any = False, **changes: Any
) -> None:
    """Train to the end."""
    config = dppo.Config(**{**TINY, **STATISTICS, "env_id": FINE, "total_timesteps": 32, **changes})
    result = dppo.train(config, resume=resume, branch=branch, observers=observers)
    assert result.iterations == 2


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("*.safetensors"))


@executes(
    "records/files/lock.py: is in use by {}. Stop it or wait until it has ended, or use another folder",
    "records/files/run_folder.py: contains a {}, which the run would overwrite. Move it",
    "records/files/run_folder.py: which plots and reports would leave out. Use another folder, such as {}",
)
def test_a_folder_in_use_is_free_when_its_run_has_ended(run: Path, tmp_path: Path) -> None:
    ended = "Stop it or wait until it has ended, or use another folder"
    with locked(run), pytest.raises(ConfigError, match=ended):
        train(resume=run)
    train(resume=run)
    new = tmp_path / "new"
    new.mkdir()
    (new / "config.yaml").write_text("seed: 1")
    with pytest.raises(ConfigError, match=r"which the run would overwrite\. Move it"):
        train(run_dir=new)
    assert os.listdir(new) == ["config.yaml"]
    moved = (new / "config.yaml").rename(tmp_path / "config.yaml")
    assert moved.read_text() == "seed: 1"
    seed = run.rename(new / "seed_1")
    with pytest.raises(ConfigError, match=r"contains the run seed_1, which .*Use another folder"):
        train(run_dir=new)
    train(run_dir=new / "NAME")
    seed.rename(tmp_path / "seed_1")


@pytest.mark.slow
@executes(
    "records/files/run_folder.py: needs a run to branch from, not resume={}. Pass its folder as `resume`",
    "records/files/run_folder.py: resume=auto: needs a fixed folder. Set `run_dir`",
    "records/files/run_folder.py: Leave it out, or start a new run there: `branch=True`",
)
def test_a_run_is_continued_or_branched_as_the_messages_say(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with pytest.raises(ConfigError, match="Pass its folder as `resume`"):
        train(run_dir=other, branch=True)
    with pytest.raises(ConfigError, match=r"Set `run_dir`"):
        train(resume="auto")
    with pytest.raises(ConfigError, match="Leave it out, or start a new run there: `branch=True`"):
        train(run_dir=other, resume=run)
    train(resume=run)
    train(run_dir=other, resume=run, branch=True)
    train(run_dir=other, resume="auto")


@executes(
    "records/files/sealed.py: The checkpoint is damaged. Pass the folder of its run to use the newest good one",
    "records/files/checkpoint.py: Restore the folder from a backup, or start the run again",
    "records/files/checkpoint.py: Use a newer dppo",
)
def test_damaged_checkpoints_are_left_out_or_restored(
    run: Path, finished: Path, tmp_path: Path
) -> None:
    *_, newest = checkpoints(run)
    data = newest.read_bytes()
    newest.write_bytes(data[:-5] + b"xxxxx")
    with pytest.raises(
        CheckpointError, match="Pass the folder of its run to use the newest good one"
    ):
        dppo.load_policy(newest)
    with pytest.warns(UserWarning, match="skipped a damaged newer checkpoint"):
        assert dppo.load_policy(run).act(Fine.obs) in (0, 1)
    for path in checkpoints(run):
        path.write_bytes(b"x")
    restore = r"only damaged checkpoints \(2\)\. The newest: .*02[^\n]*\nRestore the folder from a backup, or"
    with pytest.raises(CheckpointError, match=restore):
        dppo.load_policy(run)
    shutil.rmtree(run)
    shutil.copytree(finished, run)
    assert dppo.load_policy(run).act(Fine.obs) in (0, 1)
    newest.write_bytes(re.sub(rb'"format": ?"(\d)"', b'"format":"9"', data, count=1))
    with pytest.raises(CheckpointError, match=r"Use a newer dppo|expected"):
        dppo.load_policy(newest)


@executes("records/files/disk.py: Move it away, or put the real one in its place")
def test_a_link_in_a_folder_is_moved_away(run: Path, tmp_path: Path) -> None:
    (run / "metrics.jsonl").rename(tmp_path / "metrics.jsonl")
    (run / "metrics.jsonl").symlink_to(tmp_path / "metrics.jsonl")
    with pytest.raises(CheckpointError, match="Move it away, or put the real one in its place"):
        train(resume=run)
    (run / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").rename(run / "metrics.jsonl")
    train(resume=run)


@executes("records/metrics/reading.py: not a row of metrics. Delete this line")
def test_a_line_that_is_no_row_is_deleted(run: Path) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], "broken\n", *lines[1:]]))
    with pytest.raises(DppoError, match="Delete this line") as refused:
        read_metrics(run)
    number = int(captured(str(refused.value), r"jsonl:(\d+): "))
    broken = path.read_text().splitlines(keepends=True)
    del broken[number - 1]
    path.write_text("".join(broken))
    assert len(read_metrics(run)) == 2


@executes(
    "records/files/run_folder.py: Continue it with `{}`, or use another folder",
    "records/closing_lines.py: To go on, raise {}",
)
def test_a_run_that_is_done_goes_on_with_more_steps(
    run: Path, typed: Typed, refused: Typed
) -> None:
    message = refused(f"train {FINE} --num-samplers 1 --total-timesteps 64 --run-dir {run}")
    command = captured(message, "Continue it with `dppo (.*?)`") + " --progress plain"
    flag = captured(typed(command), r"To go on, raise .*\((--total-timesteps \d+)\)")
    assert "Done after 64 steps" in typed(f"{command} {flag}")


@executes("records/closing_lines.py: Resume with: {}")
def test_a_stopped_run_is_resumed_with_the_command_that_it_prints(
    tmp_path: Path, capsys: Capture, typed: Typed
) -> None:
    class Stops(dppo.Observer):
        def on_iteration(self, row: dict[str, float]) -> bool:
            return True

    sizes = {"run_dir": tmp_path / "run", "total_timesteps": 32, "progress": "plain"}
    config = dppo.Config(**{**TINY, "env_id": FINE, **sizes})
    assert dppo.train(config, observers=[Stops()]).stopped_by == "Stops"
    command = captured(capsys.readouterr().out, "Resume with: dppo (.*)")
    assert "Done after 32 steps" in typed(command)


def test_an_incident_is_played_with_the_command_that_is_printed(
    tmp_path: Path, capsys: Capture, typed: Typed
) -> None:
    assert problem(tmp_path, env_id="remedies.worlds:SeveralRewards", progress="plain")
    command = captured("".join(capsys.readouterr()), r"see .*: dppo (replay .*)")
    assert "The fault happens again" in typed(command)


@pytest.mark.slow
@executes(
    "run/warm_start.py: Use the network settings of that run, or leave `init_from` out",
    "run/warm_start.py: has no statistics of these observations. Leave it out",
    "run/warm_start.py: Use a larger number, or `norm_reward=False`",
    "run/building.py: freeze_norm_after={} has no effect: {}. Leave it out",
)
def test_weights_of_another_run_are_taken_as_the_messages_say(
    finished: Path, tmp_path: Path
) -> None:
    def start(**changes: Any) -> str:
        return problem(tmp_path, starts=True, **{"env_id": FINE, **STATISTICS, **changes})

    message = start(init_from=finished, model=Plain)
    assert "Use the network settings of that run, or leave `init_from` out" in message
    assert start(init_from=finished) == ""
    assert start(model=Plain) == ""
    frozen = {"init_from": finished, "freeze_norm_after": 0}
    message = start(**frozen, norm_reward=True)
    assert "Use a larger number, or `norm_reward=False`" in message
    assert start(**{**frozen, **settings_in(message)}) == ""
    assert start(init_from=finished, norm_reward=True, freeze_norm_after=9) == ""
    message = start(**frozen, env_id=Wider)
    assert "has no statistics of these observations. Leave it out" in message
    assert start(init_from=finished, env_id=Wider) == ""
    message = start(env_id=Counted, freeze_norm_after=9)
    assert re.search("freeze_norm_after=9 has no effect: .*Leave it out", message)
    assert start(env_id=Counted) == ""


Wider = shaped(gym.spaces.Box(-1, 1, (3,), np.float32))
Counted = shaped(gym.spaces.Discrete(3))


FILES: tuple[tuple[str, str, str], ...] = (
    ("env: 3", "Use env_id=3", "env_id: CartPole-v1"),
    ("learners: {num_steps: 64}", "Move it there", "sampling: {num_steps: 64}"),
    ("num_steps: 64\nsampling: {num_steps: 64}", "Leave one out", "num_steps: 64"),
    ("sampling: {num-steps: 64, num_steps: 64}", "Leave one out", "sampling: {num-steps: 64}"),
    ("env_kwargs: {a: {'!python': x}}", "Use text, numbers, lists, dicts", "env_kwargs: {}"),
)


@executes(
    "config/groups.py: is a group of settings. Use {}",
    "config/groups.py: {} belongs to {}. Move it there",
    "config/groups.py: is given twice, alone and in its group. Leave one out",
    "config/groups.py: the same setting. Leave one out",
    "config/plain.py: Use text, numbers, lists, dicts with text as keys",
)
@pytest.mark.parametrize(("text", "words", "instead"), FILES)
def test_a_file_of_settings_is_read_once_it_is_corrected(
    text: str, words: str, instead: str, desk: Path, refused: Typed
) -> None:
    file = Path("settings.yaml")
    line = "train CartPole-v1 --config settings.yaml --seeds-at-once 0"
    file.write_text(text)
    assert words in refused(line)
    file.write_text(instead)
    assert "has no effect without --seeds" in refused(line)


@executes(
    "config/refusals.py: is an environment. Pass its id, or a function that makes one for each sampler",
    "config/refusals.py: {} is missing. Pass {}=...",
    "run/outputs.py: Use dppo.Config(env_id={})",
    "records/observer_checks.py: Make its class a subclass of it",
    "records/observer.py: Use numbers, text, lists, dicts",
    "run/outputs.py: Pass its folder, or resume='auto' for the run in `run_dir`",
    "run/outputs.py: Pass the folder of a run, or its result",
    "run/outputs.py: Pass branch=True, and the new folder as `run_dir`",
)
def test_what_is_passed_in_python_is_of_the_kind_that_the_messages_name(tmp_path: Path) -> None:
    meant = "Pass its id, or a function that makes one for each sampler"
    with pytest.raises(ConfigError, match=meant):
        dppo.Config(env_id=Fine())  # type: ignore[arg-type]
    assert problem(tmp_path, env_id=Fine, starts=True) == ""
    with pytest.raises(ConfigError, match=r"Pass env_id=\.\.\."):
        dppo.Config()  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"Use dppo\.Config\(env_id="):
        dppo.train({"env_id": FINE})  # type: ignore[arg-type]

    class Sets(dppo.Observer):
        def on_start(self, run: Any) -> None:
            with pytest.raises(ConfigError, match="Use numbers, text, lists, dicts"):
                run.set_env(level={1})
            run.set_env(level=[1, "a", {}])

    train(run_dir=tmp_path / "set", observers=[Sets()])
    with pytest.raises(ConfigError, match="Make its class a subclass of it"):
        train(run_dir=tmp_path / "odd", observers=[object()])
    with pytest.raises(ConfigError, match=r"or resume='auto' for the run in `run_dir`"):
        train(run_dir=tmp_path / "set", resume=True)
    train(run_dir=tmp_path / "set", resume="auto")
    with pytest.raises(ConfigError) as refused:
        train(run_dir=tmp_path / "set", resume=7, branch=tmp_path / "branch")
    assert "resume=7: is not a path. Pass the folder of a run, or its result." in str(refused.value)
    assert "Pass branch=True, and the new folder as `run_dir`" in str(refused.value)
    train(run_dir=tmp_path / "branch", resume=tmp_path / "set", branch=True)


@executes(
    "user_code.py: is not of the form module:{}. Write {}:{}",
    "user_code.py: Add the name of the module that defines the {}",
    "user_code.py: the module {} has no {}. Check the spelling",
    "user_code.py: Check the spelling",
)
def test_names_of_code_are_corrected_as_the_messages_say(tmp_path: Path) -> None:
    for wrong, words in (
        ("no_limits", "Add the name of the module"),
        ("dppo.envs.wrappers.no_limits", "Write dppo.envs.wrappers:no_limits."),
        ("dppo.envs.wrappers:no", "Check the spelling"),
    ):
        assert words in problem(tmp_path, env_id=FINE, starts=True, wrappers=(wrong,))
    assert (
        problem(tmp_path, env_id=FINE, starts=True, wrappers=("dppo.envs.wrappers:no_limits",))
        == ""
    )
    assert "Check the spelling" in problem(tmp_path, env_id="remedies.worlds:xyzzy", starts=True)


@executes("records/files/disk.py: Give yourself read and write permission for the folder")
@pytest.mark.skipif(os.getuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_without_permission_is_used_with_it(run: Path) -> None:
    (run / "metrics.jsonl").chmod(0)
    with pytest.raises(DppoError, match="Give yourself read and write permission"):
        train(resume=run)
    (run / "metrics.jsonl").chmod(0o600)
    train(resume=run)


@pytest.mark.slow
@executes("run/env_faults.py: Correct the environment, or use `env_faults=")
def test_a_budget_of_faults_is_raised(tmp_path: Path) -> None:
    faulty: dict[str, Any] = {"env_id": "remedies.worlds:Flaky", "on_env_fault": "rebuild"}
    message = problem(tmp_path, **faulty, env_faults="1/h")
    rate = captured(message, r"or use `env_faults=([^`]+)`")
    assert problem(tmp_path, **faulty, env_faults=rate) == ""


@pytest.mark.slow
@executes("ppo/learning/trainer.py: Lower `learning_rate`, or turn on `norm_obs` and `norm_reward`")
def test_a_learning_rate_with_which_losses_are_not_finite_is_lowered(tmp_path: Path) -> None:
    wild: dict[str, Any] = {"env_id": FINE, "total_timesteps": 32, "update_epochs": 2}
    message = problem(tmp_path, **wild, learning_rate=1e30)
    assert "Lower `learning_rate`" in message
    assert problem(tmp_path, **wild, learning_rate=1e-3) == ""


@executes("config/memory.py: Lower `num_steps` or `num_samplers`")
@pytest.mark.parametrize("sizes", [{"num_steps": 32}, {"num_samplers": 1}])
def test_a_batch_that_does_not_fit_into_memory_is_made_smaller(
    sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dppo.config.memory.memory_of_this_machine", lambda: 10**6)
    monkeypatch.setattr("dppo.config.memory.LARGE_BATCH", 10**5)
    large: dict[str, Any] = {
        "env_id": shaped(gym.spaces.Box(-1, 1, (100,), np.float32)),
        "num_steps": 512,
        "num_samplers": 8,
        "total_timesteps": 4096,
    }
    message = problem(tmp_path, starts=True, **large)
    assert "Lower `num_steps` or `num_samplers`" in message
    assert problem(tmp_path, starts=True, **{**large, **sizes}) == ""


@executes("config/memory.py: and this machine has {}. Use a smaller `replay_rows`")
@executes("config/memory.py: Use a smaller `replay_rows`, or another `run_dir`")
@pytest.mark.parametrize("resource", ["memory", "disk"])
def test_env_steps_that_do_not_fit_into_memory_or_on_disk_are_not_kept(
    resource: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if resource == "memory":
        monkeypatch.setattr("dppo.config.memory.memory_of_this_machine", lambda: 10**5)
    else:
        disk = SimpleNamespace(free=10**5)
        monkeypatch.setattr("dppo.config.memory.shutil", SimpleNamespace(disk_usage=lambda _: disk))
    many: dict[str, Any] = {
        **{"env_id": "worlds.pushed:Pushed", "algo": "sac", "num_samplers": 2, "num_steps": 32},
        **{"total_timesteps": 64, "replay_rows": 100_000, "update_epochs": None},
    }
    message = problem(tmp_path, starts=True, **many)
    assert "Use a smaller `replay_rows`" in message
    assert problem(tmp_path, starts=True, **{**many, "replay_rows": 64}) == ""
