"""`dppo train --resume`: a run that is interrupted and resumed equals one that is not. By command line."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from builders import bits_of, make_config, tiny_run
from commandline import Command
from recorder import Recorder
from worlds.faulty import Faulty
from worlds.models import Plain

import dppo
from dppo.__main__ import main
from dppo.errors import CheckpointError, ConfigError
from dppo.records.files import checkpoint as checkpoints
from dppo.records.files.run_folder import open_run, settings_to_resume

STEPS = 50
ITERATIONS = 6
SAMPLERS = 2
BATCH = STEPS * SAMPLERS
TOTAL = BATCH * ITERATIONS


def words(folder: Path, *flags: str, run: str = "run", slow_after: int = 0) -> list[str]:
    """Return a training in which episodes span iterations, and everything is normalized."""
    kwargs = json.dumps({"folder": str(folder), "slow_after": slow_after})
    sizes = f"--num-samplers {SAMPLERS} --num-steps {STEPS} --total-timesteps {TOTAL}"
    return [
        *("train", "worlds.slow:hesitant_cartpole", "--run-dir", str(folder / run)),
        *("--progress", "plain", "--env-kwargs", kwargs, *sizes.split()),
        *("--anneal-lr", "--update-epochs", "2", *flags),
    ]


Capture = pytest.CaptureFixture[str]


def train(*words: str | Path) -> int:
    return main(["train", "--trust", *map(str, words)])


def weights(run: Path) -> bytes:
    return dppo.load_policy(run).weights.tobytes()


def interrupt(words: list[str], folder: Path, number: int = signal.SIGTERM) -> list[str]:
    """Send a signal to a training when its simulators wait; return the words of the command that it prints."""
    (folder / "slow").touch()
    with Command(words, folder) as command:
        command.wait_until(lambda: list(folder.glob("waiting-*")))
        command.send(number)
        assert command.wait(60) == 128 + number
        resume = next(
            line for line in command.out.splitlines() if line.startswith("Resume with: dppo ")
        )
    for path in (folder / "slow", *folder.glob("waiting-*")):
        path.unlink()
    return resume.removeprefix("Resume with: dppo ").split()


def rows(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines]


def learning_rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run without what depends on the machine and on interruptions."""
    timely = ("time/", "perf/", "charts/SPS", "replay/")
    return [
        {key: value for key, value in row.items() if not key.startswith(timely)}
        for row in rows(run)
    ]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted run with all its checkpoints."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert main(words(folder, "--checkpoint-interval-s", "0", "--keep-checkpoints", "99")) == 0
    return folder / "run"


def test_an_interrupted_run_is_resumed_exactly_by_the_command_that_it_prints(
    uninterrupted: Path, tmp_path: Path, capsys: Capture
) -> None:
    run = tmp_path / "run"
    finished = 2
    printed = interrupt(words(tmp_path, slow_after=2 * STEPS + 7), tmp_path)
    assert len(rows(run)) == finished
    assert weights(run) != weights(uninterrupted)
    assert main(printed) == 0
    assert (
        f"Resuming from iter_{finished:06d} at step {finished * BATCH}" in capsys.readouterr().out
    )
    assert weights(run) == weights(uninterrupted)
    iterations = [row["iteration"] for row in rows(run)]
    assert iterations == list(range(1, ITERATIONS + 1))
    assert [row["global_step"] for row in rows(run)] == [BATCH * (i + 1) for i in range(ITERATIONS)]
    assert learning_rows(run) == learning_rows(uninterrupted)


@pytest.mark.parametrize("number", ["0", "-1", "every=0", "every", "best"])
def test_checkpoints_to_keep_are_a_number_or_each_nth(number: str) -> None:
    with pytest.raises(ConfigError, match=f"keep_checkpoints={number}: must be a number of at"):
        dppo.Config(env_id="CartPole-v1", keep_checkpoints=number)


def test_resuming_a_finished_run_changes_nothing(
    uninterrupted: Path, tmp_path: Path, capsys: Capture
) -> None:
    run = tmp_path / "run"
    shutil.copytree(uninterrupted, run)
    assert train("--resume", run) == 0
    printed = capsys.readouterr()
    assert "nan" not in printed.out
    assert printed.err == ""
    assert weights(run) == weights(uninterrupted)
    assert rows(run) == rows(uninterrupted)
    names = {path.name for path in (run / "checkpoints").iterdir()}
    names_before = {path.name for path in (uninterrupted / "checkpoints").iterdir()}
    assert names == names_before


def test_without_annealing_a_run_can_be_extended(tmp_path: Path, uninterrupted: Path) -> None:
    """It is resumed again without repeating the extension: the settings of the newest checkpoint count."""
    run = tmp_path / "run"
    constant = ("--no-anneal-lr", "--total-timesteps")
    assert main(words(tmp_path, *constant, str(2 * BATCH))) == 0

    longer = dppo.Config(**settings_to_resume(run, {"total_timesteps": TOTAL}))
    stopped = dppo.train(longer, resume=run, observers=[Recorder(interrupt_at=4)])
    assert stopped.iterations == 4
    assert train("--resume", run) == 0

    at_once = tmp_path / "at once"
    assert main(words(tmp_path, *constant, str(TOTAL), run="at once")) == 0
    assert weights(run) == weights(at_once)
    assert weights(run) != weights(uninterrupted)
    assert learning_rows(run) == learning_rows(at_once)


KIND: gym.Space[Any] = gym.spaces.Discrete(4)


def kinds() -> Faulty:
    """Return an environment with one of four kinds in its observation, declared as `KIND`."""
    space = gym.spaces.Dict(kind=KIND, x=gym.spaces.Box(-1, 1, (2,)))

    def observe(steps: int) -> dict[str, np.ndarray]:
        return {"kind": np.array(steps % 4), "x": np.zeros(2)}

    return Faulty(space=space, observe=observe)


class ReadsOne(Plain):
    """Reads the first element of `x`."""

    def forward(self, obs: Any) -> Any:
        return super().forward(obs["x"][:, :1])


@pytest.mark.parametrize("network", [{}, {"model": ReadsOne}], ids=["default", "own"])
@pytest.mark.parametrize("branch", [False, True])
def test_a_space_that_has_become_another_is_named(
    network: dict[str, Any], branch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "env_id": kinds,
        "num_steps": 8,
        "num_samplers": 1,
        "total_timesteps": 8,
        "progress": "off",
        "run_dir": tmp_path / "run",
    }
    config = make_config(settings | network)
    dppo.train(config)
    monkeypatch.setitem(globals(), "KIND", gym.spaces.Box(0, 3, (), np.int64))
    if branch:
        config = dataclasses.replace(config, run_dir=tmp_path / "new")
    with pytest.raises(CheckpointError, match=r"its categories is .*, but that of \S+ is None"):
        dppo.train(config, resume=tmp_path / "run", branch=branch)


def test_resume_auto_starts_a_run_and_continues_it_with_the_same_words(
    uninterrupted: Path, tmp_path: Path
) -> None:
    same = words(tmp_path, "--resume", "auto", slow_after=2 * STEPS + 7)
    (tmp_path / "interrupt").touch()
    assert main(same) == 130
    assert len(rows(tmp_path / "run")) == 2
    for _ in range(2):  # the second time it is finished already
        assert main(same) == 0
        assert weights(tmp_path / "run") == weights(uninterrupted)


def first_weights(run: Path) -> bytes:
    return weights(run / "checkpoints" / "iter_000000")


def test_a_branch_starts_with_the_weights_and_its_own_rate(
    uninterrupted: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Weights, optimizer and normalizers come from the source; counters and episodes start from zero."""
    source = uninterrupted / "checkpoints" / "iter_000003"
    new = tmp_path / "new"
    flags = ["--learning-rate", "1e-3", "--total-timesteps", str(2 * BATCH), "--seed", "7"]
    assert train("--resume", source, "--branch", new, *flags) == 0

    printed = capsys.readouterr().out
    assert f"Branching off {source}.safetensors at step {3 * BATCH}: " in printed
    assert "open episode" in printed

    assert first_weights(new) == weights(source)
    assert weights(new) != weights(source)
    begun = checkpoints.find(new / "checkpoints/iter_000000").checkpoint
    before = checkpoints.find(source).checkpoint
    for part in ("optimizer", "normalizer"):
        assert bits_of(begun.arrays[part]) == bits_of(before.arrays[part])
    assert begun.arrays["samplers"] == {}
    assert begun.state["global_step"] == 0
    assert begun.state["episodes"] == 0
    assert begun.state["recent"] == []

    first, second = rows(new)
    assert first["charts/learning_rate"] == 1e-3
    assert second["charts/learning_rate"] == 5e-4
    assert first["global_step"] == BATCH
    assert second["global_step"] == 2 * BATCH
    assert len(rows(uninterrupted)) == ITERATIONS  # untouched


def test_a_branch_has_minibatches_for_its_own_batch(tmp_path: Path) -> None:
    """A minibatch size that the user has set stays; one that follows from the batch follows from the new batch."""
    run = tmp_path / "run"
    explicit_run = tmp_path / "own"
    config = make_config(
        {"env_id": "CartPole-v1", "num_steps": 512, "run_dir": run, "num_actors": 1}
    )
    explicit = dataclasses.replace(
        config, run_dir=explicit_run, minibatch_size=64, micro_batch_size=32
    )
    for each in (config, explicit):
        with open_run(each, None) as folder:
            folder.write_settings(each, {})

    changes = {"run_dir": tmp_path / "new", "num_steps": 4096}
    branch = dppo.Config(**settings_to_resume(run, changes))
    longer = dataclasses.replace(config, num_steps=4096)
    other_minibatches = dataclasses.replace(branch, minibatch_size=128)
    assert branch.sizes == longer.sizes
    assert branch.sizes != other_minibatches.sizes

    explicit_branch = dppo.Config(**settings_to_resume(explicit_run, changes))
    assert explicit_branch.minibatch_size == 64

    resumed = settings_to_resume(run, {"num_steps": 4096})
    assert resumed["minibatch_size"] == config.sizes.minibatch_rows
    two = settings_to_resume(explicit_run, {"num_learners": 2})
    assert "micro_batch_size" not in two
    assert dppo.Config(**two).num_learners == 2


def test_a_branch_records_its_origin_also_after_a_resume(
    uninterrupted: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    changes = {"run_dir": new, "total_timesteps": BATCH}
    config = dppo.Config(**settings_to_resume(uninterrupted, changes))
    branched = dppo.train(config, resume=uninterrupted, branch=True)
    assert first_weights(new) == weights(uninterrupted)

    longer = dataclasses.replace(config, total_timesteps=2 * BATCH)
    resumed = dppo.train(longer, resume=new)
    assert resumed.global_step == 2 * BATCH > branched.global_step

    newest = checkpoints.find(uninterrupted).path
    origin = {"checkpoint": str(newest), "global_step": TOTAL}
    for checkpoint in (new / "checkpoints").glob("*.safetensors"):
        assert checkpoints.load(checkpoint).state["branched_from"] == origin

    settings = (new / "config.yaml").read_text()
    assert settings.startswith(f"# branched from {json.dumps(origin)}\n")


def test_a_branch_keeps_the_normalization(
    uninterrupted: Path, tmp_path: Path, capsys: Capture
) -> None:
    """tests/remedies/commands.py has settings of the network."""
    assert train("--resume", uninterrupted, "--branch", tmp_path / "new", "--no-norm-obs") == 2
    assert re.search("norm_obs=False: .* was made with True", capsys.readouterr().err)
    assert not (tmp_path / "new").exists()


def test_a_branch_needs_a_new_folder(uninterrupted: Path, capsys: Capture) -> None:
    assert train("--resume", uninterrupted, "--branch", uninterrupted) == 2
    assert "contains a run already" in capsys.readouterr().err


def test_a_run_is_continued_from_its_result(tmp_path: Path) -> None:
    config = tiny_run(tmp_path / "run", iterations=1)
    result = dppo.train(config)
    longer = dataclasses.replace(config, total_timesteps=2 * config.total_timesteps)
    continued = dppo.train(longer, resume=result)
    assert continued.run_dir == result.run_dir
    assert continued.resumed_at == 1
    assert continued.iterations == 2
