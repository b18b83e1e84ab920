"""Training episodes are recorded, and played again to the last bit: `--record-episodes`, `dppo replay RUN`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import tiny_run
from matrix import REBUILD
from recorder import Notes, Recorder
from remedies import executes

import dppo
from dppo.__main__ import main
from dppo.engine import ledger
from dppo.errors import ConfigError
from dppo.records.files import episode_writer
from dppo.records.files import episodes as recorded
from dppo.records.files.episodes import RecordedEpisode, read_episodes

Capture = pytest.CaptureFixture[str]
slow = pytest.mark.slow


def settings(run_dir: Path, **changes: Any) -> dppo.Config:
    world = {"env_id": "worlds.drawn:Drawn", "hidden_sizes": (4,)}
    return tiny_run(run_dir, samplers=2, iterations=10, **world | changes)


def lines(run: Path) -> bytes:
    return (run / "episodes.jsonl").read_bytes()


def replayed(run: Path, *words: str) -> int:
    return main(["replay", str(run), *words, "--trust"])


@pytest.fixture(scope="module")
def run(module_path: Path) -> Path:
    """Return the folder of a run with E = 2."""
    run = module_path / "recorded"
    dppo.train(settings(run, envs_per_sampler=2))
    return run


KINDS: dict[str, dict[str, Any]] = {
    "real numbers and memory": {
        "env_id": "worlds.simple:point_mass",
        "memory": "gru",
        "norm_obs": True,
    },
    "a limit of steps": {"env_id": "CartPole-v1", "replay_limit": 5},
    "a constructor that needs a seed": {"env_id": "worlds.drawn:seeded", "envs_per_sampler": 2},
}
SLOW_KINDS: dict[str, dict[str, Any]] = {
    "threads and standby copies": {"env_threads": True, "standby_envs": 1, "policy_lag": 2},
    "wrappers and stacks": {
        "wrappers": ("worlds.asking:Doubled",),
        "frame_stack": 2,
        "action_repeat": 2,
    },
    "masks": {"env_id": "worlds.acting:Masked", "env_kwargs": {"source": "method"}},
}


@pytest.mark.parametrize(
    "changes",
    [
        *(pytest.param(changes, id=kind) for kind, changes in KINDS.items()),
        *(pytest.param(changes, id=kind, marks=slow) for kind, changes in SLOW_KINDS.items()),
    ],
)
def test_episodes_of_every_kind_are_played_again(
    changes: dict[str, Any], tmp_path: Path, capsys: Capture
) -> None:
    run = tmp_path / "run"
    recorder = Recorder()
    dppo.train(settings(run, **changes), observers=[recorder])
    stored = read_episodes(run)
    assert stored
    assert len(stored) == len(recorder.episodes)

    numbers = [episode.number for episode in stored]
    assert numbers == list(range(1, len(stored) + 1))
    for episode, reported in zip(stored, recorder.episodes, strict=True):
        assert episode.env == reported.env
        assert episode.episode == reported.index
        assert episode.episode_return == reported.episode_return
        assert episode.length == reported.length

    # those that begin in earlier segments among them
    distance = max(1, len(stored) // 4)
    for episode in stored[::distance]:
        assert replayed(run, "--episode", str(episode.number)) == 0
        first_words = f"Episode {episode.number}: {episode.length} steps, return "
        assert capsys.readouterr().out.startswith(first_words)


def numbers_of_records(returns: Iterable[float]) -> list[int]:
    """Return the numbers of the episodes that are better than all before them."""
    numbers = []
    best = -np.inf
    for number, episode_return in enumerate(returns, 1):
        if episode_return > best:
            numbers.append(number)
            best = episode_return
    return numbers


def test_recording_does_not_change_the_weights_and_chooses_episodes(
    run: Path, tmp_path: Path
) -> None:
    numbers = dict[str, list[int | None]]()
    weights = set()
    for which in ("every=3", "best", "none"):
        result = dppo.train(settings(tmp_path / which, envs_per_sampler=2, record_episodes=which))
        numbers[which] = [episode.number for episode in read_episodes(tmp_path / which)]
        weights.add(result.weights_sha256)
    assert len(weights) == 1

    returns = [episode.episode_return for episode in read_episodes(run)]
    thirds = range(3, len(returns) + 1, 3)
    assert numbers["every=3"] == list(thirds)
    assert numbers["best"] == numbers_of_records(returns)
    assert numbers["none"] == []
    assert not (tmp_path / "none" / "episodes.jsonl").exists()
    with pytest.raises(ConfigError, match=r"record_episodes=every=0: must be all, best, none"):
        settings(tmp_path, record_episodes="every=0")


def test_a_run_resumed_without_recording_keeps_its_file(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    dppo.train(settings(copy, envs_per_sampler=2, record_episodes="none"), resume=copy)
    assert lines(copy) == lines(run)


def test_the_oldest_episodes_go_at_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_writer, "MAX_FILE_BYTES", 8_000)
    config = settings(tmp_path / "run")
    with Notes() as notes:
        result = dppo.train(config, observers=[Recorder(interrupt_at=6)])
        result = dppo.train(config, resume=tmp_path / "run")
    numbers = [episode.number for episode in read_episodes(tmp_path / "run")]
    first = result.episodes - len(numbers) + 1
    assert numbers == list(range(first, result.episodes + 1))
    assert 2_000 < len(lines(tmp_path / "run")) < 8_000
    assert any("its older half is dropped" in text for text in notes.texts)


# ------------------------------------------------------------------ `dppo replay`


def test_an_episode_with_too_many_actions_is_left_out_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "MAX_ACTION_BYTES", 0)  # those of one segment at most
    with Notes() as notes:
        result = dppo.train(settings(tmp_path / "run", num_steps=4))
    numbers = {episode.number for episode in read_episodes(tmp_path / "run")}
    assert numbers
    all_numbers = set(range(1, result.episodes + 1))
    left_out = all_numbers - numbers
    missing = min(left_out)
    [line] = [text for text in notes.texts if "is not recorded" in text]
    assert line.startswith(f"episode {missing} is not recorded: the actions of its")


def test_episodes_are_listed_and_found_by_number_and_by_name(run: Path, capsys: Capture) -> None:
    assert main(["replay", str(run), "--episodes"]) == 0
    head, *rows, last = capsys.readouterr().out.splitlines()
    episodes = read_episodes(run)
    columns = head.split()
    assert columns == ["number", "sampler/env/episode", "return", "length", "env", "step"]
    numbers = [int(row.split()[0]) for row in rows]
    assert numbers == [episode.number for episode in episodes]
    assert last.startswith(f"{len(episodes)} recorded.")
    newest = episodes[-1]
    assert replayed(run, "--episode", newest.name) == 0
    assert f"Episode {newest.name}: {newest.length} steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (
            "--trust --episode 9999",
            r"episode=9999: the nearest are \d+ and \d+. It is not among the \d+ that are recorded",
        ),
        ("--trust --episode 7/7/7", "episode=7/7/7 is not among the"),
        (
            "",
            r"is a run\. Add --episode NUMBER, for one of its \d+ recorded episodes, which --episodes",
        ),
        (f"--trust --episode {'9' * 5000}", "is not among the"),
        ("--episodes --render", "--render has no effect with --episodes"),
        ("--trust --episode 1 --render", "this machine has no display"),
        ("--trust --episode 1 --render --video out.mp4", "in a window or in a video"),
        ("--episode 1", "Add --trust"),
    ],
    ids=lambda words: words[:40],
)
def test_mistakes_are_refused(
    words: str, refusal: str, run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert main(["replay", str(run), *words.split()]) == 2
    printed = capsys.readouterr().err
    assert re.search(refusal, printed), printed
    assert printed.count("\n") == 1


def test_a_path_without_a_run_and_episodes_of_several_rows_are_refused(
    tmp_path: Path, capsys: Capture
) -> None:
    assert main(["replay", "/tmp"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    agents = {"env_id": "worlds.joint:agents", "envs_per_sampler": 3, "record_episodes": "all"}
    dppo.train(settings(tmp_path / "run", **agents))
    assert replayed(tmp_path / "run", "--episode", "1") == 2
    assert "steps several sub-environments at once, whose episodes dep" in capsys.readouterr().err


@executes(
    "records/files/episodes.py: although {} have finished: {} is missing or damaged. Copy it from where the run was "
    "trained."
)
def test_a_run_without_episodes_is_refused(run: Path, tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "episodes.jsonl").unlink()
    assert replayed(tmp_path / "run", "--episode", "1") == 2
    words = r"although \d+ have finished: episodes.jsonl is missing or damaged. Copy it from"
    assert re.search(words, capsys.readouterr().err)
    shutil.copy(run / "episodes.jsonl", tmp_path / "run")
    assert replayed(tmp_path / "run", "--episode", "1") == 0


def test_a_run_in_which_nothing_has_finished_is_refused(
    run: Path, tmp_path: Path, capsys: Capture
) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "episodes.jsonl").unlink()
    metrics = tmp_path / "run" / "metrics.jsonl"
    [*earlier, last] = metrics.read_text().splitlines(keepends=True)
    for changes, words in (
        ({"charts/episodes": 0}, "none has finished yet. Train longer: dppo train --resume "),
        (None, "No iteration has finished either: correct what ended the run, and start it again"),
    ):
        rows = []
        if changes is not None:
            rows = [*earlier, f"{json.dumps(json.loads(last) | changes)}\n"]
        metrics.write_text("".join(rows))
        assert replayed(tmp_path / "run", "--episode", "1") == 2
        assert re.search(words, capsys.readouterr().err)
    assert main(["replay", str(tmp_path / "run"), "--episodes"]) == 0
    assert capsys.readouterr().out.count("\n") == 1, "no head of a table"


PAGE = Path(__file__).parents[1] / "docs" / "RUNS.md"


def test_every_command_of_the_guide_works(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a short run of another environment. Those that make videos are run where PyAV is installed."""
    monkeypatch.setattr("pdb.set_trace", lambda: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("mysim.py").write_text("from worlds.drawn import Drawn as make\n")
    sys.modules.pop("mysim", None)  # that of another page
    small = "--num-samplers 2 --num-steps 64 --total-timesteps 128 --progress off"
    section = (
        PAGE.read_text(encoding="utf8")
        .partition("## Play an episode again")[2]
        .partition("\n## ")[0]
    )
    blocks = "".join(re.findall(r"(?ms)^```sh\n(.*?)^```$", section))
    commands = re.findall(r"^dppo (.*)$", blocks, re.MULTILINE)
    assert len(commands) == 6

    for command in commands:
        if "--video" in command and importlib.util.find_spec("av") is None:
            continue
        assert main(f"{command} {small if command.startswith('train') else ''}".split()) == 0, (
            command
        )
    assert "equal to the last bit." in capsys.readouterr().out


def test_debug_stops_before_the_first_step(
    run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops: list[str] = []
    monkeypatch.setattr("pdb.set_trace", lambda: stops.append(capsys.readouterr().out))
    assert replayed(run, "--episode", "1", "--debug") == 0
    assert stops == [""]


@pytest.mark.parametrize(
    ("differs", "reason"),
    [
        (
            "reward",
            r"Two replays differ first in step 2, in the reward: -?[\d.]+ and -?[\d.]+: the env",
        ),
        ("kept", "Two replays are equal: look for state that earlier episodes leave behind, and"),
    ],
)
def test_an_episode_that_is_not_the_same_is_refused_with_its_place(
    differs: str, reason: str, tmp_path: Path, capsys: Capture
) -> None:
    dppo.train(settings(tmp_path / "run", env_kwargs={"differs": differs}, total_timesteps=64))
    assert replayed(tmp_path / "run", "--episode", "4") == 1
    printed = capsys.readouterr().out
    assert "is not the same again. It had return " in printed
    assert re.search(reason, printed), printed


def test_an_episode_that_failed_is_played_up_to_its_fault(tmp_path: Path, capsys: Capture) -> None:
    run = tmp_path / "run"
    bad = {"obs": [float("nan")] * 2, "episodes": [0, 2]}
    faulty = {"env_id": "worlds.faulty:Faulty", "env_kwargs": bad}
    result = dppo.train(settings(run, **faulty, **REBUILD))
    failed = [episode for episode in read_episodes(run) if episode.number is None]
    assert failed
    assert len(failed) == result.incidents["bad_step"]
    assert main(["replay", str(run), "--episodes"]) == 0
    assert capsys.readouterr().out.count("fault  ") == len(failed)
    assert replayed(run, "--episode", failed[0].name) == 0

    fault = f"worlds.faulty:Faulty, env 0: step of episode {failed[0].episode} "
    assert f"The fault happens again: {fault}" in capsys.readouterr().out


# ------------------------------------------------------------------ a stranger's file


def forged(run: Path, **changes: Any) -> None:
    first, *_ = lines(run).splitlines()
    line = json.loads(first)
    line["packed"] |= changes.pop("packed", {})
    text = json.dumps(line | changes)
    (run / "episodes.jsonl").write_text(f"{text}\n")


FORGED: dict[str, dict[str, Any]] = {
    "words": {"seed": "\x1b[2J", "error": "\x1b[2J"},
    "a large number": {"length": 10**30},
    "a long episode": {"length": 10**15},
    "no actions": {"packed": {"actions": None}},
    "other bytes": {"packed": {"actions": "AAAA"}},
    "objects": {"packed": {"dtype": "object"}},
    "a shape": {"packed": {"shape": [2**62, 2**62]}},
    "text as a shape": {"packed": {"shape": "\x1b[2J"}},
    "nan": {"episode_return": None, "number": 1},
}


@pytest.mark.parametrize("fault", ["pipe", "terabyte", *FORGED])
def test_forged_episodes_are_refused_or_skipped(
    fault: str, run: Path, tmp_path: Path, capsys: Capture
) -> None:
    """tests/records/test_folder_files.py has links."""
    copy = shutil.copytree(run, tmp_path / "run")
    path = copy / "episodes.jsonl"
    if fault in FORGED:
        forged(copy, **FORGED[fault])
    elif fault == "terabyte":
        os.truncate(path, 2**40)
    else:
        path.unlink()
        os.mkfifo(path)
    listed = main(["replay", str(copy), "--episodes"])
    assert listed == (0 if fault in FORGED else 2)

    code = replayed(copy, "--episode", "1")
    assert code == (1 if fault == "nan" else 2)
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err
    assert len(printed.err.splitlines()) <= 2


@pytest.mark.parametrize(
    "actions", [np.arange(6), np.full((2, 3), 0.1, np.float32), np.empty((0, 2))]
)
def test_actions_are_packed_without_a_loss(actions: np.ndarray) -> None:
    packed = json.loads(json.dumps(recorded.packed(actions)))
    episode = RecordedEpisode(0, 0, 0, 0, len(actions), packed)
    again = episode.actions()
    np.testing.assert_array_equal(again, actions)
    assert again.dtype == actions.dtype
