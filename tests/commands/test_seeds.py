"""`dppo train --seeds`: its flags, how many run at once, how it ends and goes on, and what it reports."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from builders import tiny_run
from commandline import Command, Typed
from rich.console import Console

import dppo
from dppo.config import Config, plain_settings
from dppo.errors import ConfigError
from dppo.records.files.checkpoint import find
from dppo.tools import seeds
from dppo.tools.seeds import Seed, seeds_of

TINY = "--num-samplers 2 --num-steps 64 --total-timesteps 512 --update-epochs 1"


def sizes(run_dir: Path, iterations: int = 4, **changes: Any) -> Config:
    return tiny_run(run_dir, samplers=2, steps=64, iterations=iterations, **changes)


def trained(run_dir: Path, iterations: int = 4, **changes: Any) -> dppo.Result:
    return dppo.train(sizes(run_dir, iterations, **changes))


def slow_study(folder: Path, seeds: str) -> str:
    """Return the command line of a study whose steps are slow after 200, while the file "slow" exists."""
    (folder / "slow").touch()
    kwargs = json.dumps({"folder": str(folder), "slow_after": 200})
    words = f"{TINY} --seeds {seeds} --run-dir study --env-kwargs '{kwargs}'"
    return f"train worlds.slow:hesitant_cartpole {words}"


@pytest.mark.parametrize(
    ("words", "seeds"), [("1..5", [1, 2, 3, 4, 5]), ("7, 3", [7, 3]), ("0..1,9", [0, 1, 9])]
)
def test_seeds_are_named_as_a_range_or_one_by_one(words: str, seeds: list[int]) -> None:
    assert seeds_of(words) == seeds


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("5", "names 1 seed"),
        ("1..99999999", "Name 2 to 1,000"),
        ("a", "'a' is not a seed"),
        ("", "'' is not a seed"),
    ],
)
def test_what_names_no_seeds_is_refused(words: str, refusal: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(refusal)):
        seeds_of(words)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("--seeds 1..3 --resume auto --run-dir x", "--resume has no effect with --seeds"),
        ("--seeds 1..3 --seeds-at-once 0", "seeds_at_once=0: must be at least 1"),
        ("--seeds 1..3 --gamma 2", "gamma"),
        ("--seeds 1..3 --run-dir study", "cannot be resumed with another value"),
        ("--seeds 1..3 --run-dir single/config.yaml", "config.yaml: cannot be written"),
    ],
)
def test_invalid_words_are_refused_before_a_process_starts(
    words: str, refusal: str, desk: Path, refused: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("single").mkdir()
    Path("single/config.yaml").write_text("env: {env_id: CartPole-v1}\n")
    if "study" in words:
        trained(Path("study/seed_2"), iterations=1, gamma=0.5, seed=2)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process"))
    assert refusal in refused(f"train CartPole-v1 --preset none {TINY} {words}")


@pytest.mark.parametrize(
    ("settings", "at_once", "expected"),
    [
        ({}, None, 4),
        ({}, 7, 7),
        ({"num_actors": 2}, None, 1),
        ({"learner_threads": 2}, None, 2),
        ({"num_actors": 2}, 2, 2),
    ],
)
def test_as_many_run_at_once_as_there_are_cores_and_one_with_actors(
    settings: dict[str, Any], at_once: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeds, "usable_cores", lambda: 4)
    monkeypatch.setattr(seeds, "RUN_MB", 1)
    assert seeds._number_at_once(Config(env_id="CartPole-v1", **settings), at_once)[0] == expected
    monkeypatch.setattr(seeds, "RUN_MB", 10**9)
    assert seeds._number_at_once(Config(env_id="CartPole-v1"), None)[0] == 1, "little memory"


class Pretended(Seed):
    """A seed whose process ends by itself, with an exit code for each."""

    running = 0
    most = 0

    def start(self) -> None:
        code = f"import time; time.sleep(0.05); raise SystemExit({int(self.config.seed == 3)})"
        self.process = subprocess.Popen([sys.executable, "-S", "-c", code])
        self.state = "running"
        Pretended.running += 1
        Pretended.most = max(Pretended.most, Pretended.running)

    def look(self, stopped: signal.Signals | None) -> None:
        before = self.state
        super().look(stopped)
        Pretended.running -= self.state != before


def test_no_more_run_than_fit_and_each_end_is_noted(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeds, "LOOK_EVERY_S", 0.01)
    runs = [
        Pretended(Config(env_id="CartPole-v1", seed=seed), tmp_path / str(seed))
        for seed in range(1, 6)
    ]
    runs[0].state = "done"
    assert seeds._run(runs, 2, Console(markup=False, soft_wrap=True)) is None
    assert Pretended.most == 2
    assert [run.state for run in runs] == ["done", "done", "failed (exit code 1)", "done", "done"]

    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "seed 1 " in line] == ["seed 1    done"], (
        "one line for each change"
    )
    assert len([line for line in lines if "seed 4 " in line]) == 3, "waiting, running, done"


@pytest.mark.slow
def test_seeds_are_stopped_by_ctrl_c_and_continued_with_equal_results(tmp_path: Path) -> None:
    words = slow_study(tmp_path, "1..3")
    with Command(words, tmp_path) as command:
        command.wait_until(lambda: any(tmp_path.glob("study/seed_*/metrics.jsonl")))
        time.sleep(1.0)
        command.press_ctrl_c()
        assert command.wait(30.0) == 130, command.err
        command.leaves_nothing_within(10.0)
        assert "continues the seeds that have not finished" in command.err

    (tmp_path / "slow").unlink()
    with Command(words, tmp_path) as command:
        assert command.wait(120.0) == 0, command.err
        assert "(3 seeds)" in command.out
        assert "95 % interval" in command.out
    assert (tmp_path / "study" / "seeds.png").stat().st_size > 10_000

    for seed in range(1, 4):
        alone = trained(tmp_path / f"alone_{seed}", seed=seed)
        here = find(alone.run_dir).checkpoint.arrays["model"]
        there = find(tmp_path / f"study/seed_{seed}").checkpoint.arrays["model"]
        for name, array in here.items():
            np.testing.assert_array_equal(there[name], array)
    with Command(words, tmp_path) as command:
        assert command.wait(30.0) == 0
        assert not re.search("running", command.out), "finished seeds are skipped"


@pytest.mark.slow
def test_a_seed_that_fails_is_named_and_the_others_are_reported(tmp_path: Path) -> None:
    study = tmp_path / "a study"
    (study / "seed_2").mkdir(parents=True)
    (study / "seed_2" / "metrics.jsonl").write_text("{}\n")  # not a run of ours
    words = f"train CartPole-v1 --preset none --seeds 1,2 --run-dir 'a study' {TINY}"
    with Command(words, tmp_path, PATH=os.defpath) as command:
        assert command.wait(90.0) == 1
        assert re.search(r"seed 2 failed \(exit code 2\): .*contains a run already", command.err)
        assert f"with --run-dir '{study}' continues the seeds that have not finished" in command.err
        assert "(1 seed)" in command.out
    shown = re.search("Next: (.+), or ", (study / "seed_1.log").read_text())
    assert shown is not None
    subprocess.run(f"{shown[1]} --episodes 1", shell=True, check=True, cwd=tmp_path)


def test_the_line_of_a_seed_has_no_time_left_before_its_policy_learns(tmp_path: Path) -> None:
    run = Seed(Config(env_id="CartPole-v1", algo="sac"), tmp_path, state="running")
    for gradient_steps, is_shown in ((0.0, False), (64.0, True)):
        row = {"iteration": 1, "global_step": 64, "losses/gradient_steps": gradient_steps}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        assert (" left" in run.line()) == is_shown


def test_seeds_that_fail_alike_are_reported_once(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(runs: list[Seed], *_: Any) -> None:
        for run in runs:
            run.state = "failed (exit code 2)"
            run.log.write_text("No module named 'mysim'\n")

    monkeypatch.setattr(seeds, "_run", fail)
    settings = {"env_id": "CartPole-v1", "run_dir": tmp_path / "study"}
    assert seeds.train_seeds(settings, (), "1..3") == 1
    printed = capsys.readouterr().err.splitlines()
    assert printed[0] == "seed 1, 2, 3 failed (exit code 2): No module named 'mysim'"
    assert len(printed) == 3, "the log, and how to continue"


@pytest.mark.slow
def test_a_parent_that_is_killed_takes_its_seeds_along_after_they_have_saved(
    tmp_path: Path,
) -> None:
    with Command(slow_study(tmp_path, "1..2"), tmp_path) as command:
        command.wait_until(lambda: list(tmp_path.glob("study/seed_*/metrics.jsonl")))
        command.send(signal.SIGKILL)
        command.leaves_nothing_within(30.0)


def test_a_seed_that_has_begun_is_continued_with_its_settings_or_refused(tmp_path: Path) -> None:
    trained(tmp_path / "seed_1", iterations=1, seed=1)
    longer = plain_settings(sizes(tmp_path, iterations=2)) | {"run_dir": tmp_path}

    def planned(**changes: Any) -> list[str]:
        runs = seeds._planned(longer | changes, [1, 2])
        return [f"{run.state}{run.kept_text}" for run in runs]

    assert planned(total_timesteps=128) == ["done", "waiting"]
    evaluated = {"total_timesteps": 128, "eval_every": 64, "progress": "plain"}
    assert planned(**evaluated) == ["done, keeps eval_every=none, not 64", "waiting"]
    assert planned() == ["waiting", "waiting"]
    words = r"^learning_rate=0\.0005: \S+seed_1 was made with 0\.0003"
    with pytest.raises(ConfigError, match=words):
        planned(learning_rate=5e-4)
    # not --branch, as for a single run
    with pytest.raises(ConfigError, match=r"Leave it out, or use another `run_dir`\.$"):
        planned(gamma=0.5)


FILES = {
    "date.yaml": "{start: 2020-01-01}",
    "run.yaml": '{start: {"!python": "datetime.date(2020, 1, 1)"}}',
    "keys.yaml": "{start: {1: 5}}",
}


@pytest.mark.parametrize(
    "words",
    [
        "train --config date.yaml --seeds 1..2",
        "doctor --config date.yaml",
        "train --config run.yaml",
        "train --config keys.yaml --seeds 1..2",
        "doctor --config keys.yaml",
    ],
)
def test_objects_and_keys_that_are_not_text_do_not_become_text(
    words: str, desk: Path, refused: Typed
) -> None:
    """The processes of seeds read JSON, which would make the key 1 a text."""
    for name, env_kwargs in FILES.items():
        Path(name).write_text(f"env_id: CartPole-v1\nenv_kwargs: {env_kwargs}\n")
    assert re.search("env_kwargs: start is .*Use text, numbers, lists", refused(words))
    assert sorted(path.name for path in desk.iterdir()) == sorted(FILES)


def test_a_signal_that_arrives_while_seeds_start_reaches_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[int]()
    got = list[int]()

    class Stopped(Seed):
        def start(self) -> None:
            self.state = "running"
            seed = self.config.seed
            self.process = SimpleNamespace(send_signal=lambda _: got.append(seed))  # type: ignore[assignment]
            started.append(seed)
            if len(started) == 2:
                signal.raise_signal(signal.SIGTERM)

        def look(self, stopped: signal.Signals | None) -> None:
            self.state = "stopped" if self.config.seed in got else self.state

    monkeypatch.setattr(seeds, "LOOK_EVERY_S", 0.01)
    runs = [
        Stopped(Config(env_id="CartPole-v1", seed=seed), tmp_path / str(seed)) for seed in (1, 2, 3)
    ]
    assert seeds._run(runs, 3, Console(file=io.StringIO())) == signal.SIGTERM
    assert (started, got) == ([1, 2, 3], [1, 2, 3])
