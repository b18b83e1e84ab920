"""The promise: the number of actors changes the time, never the result. Bit for bit, for each cell of a table."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import matrix
import pytest
from builders import bits_of, make_config
from kinds import Settings
from matrix import Cell
from processes import Disturbance, in_the_middle_of_an_update, send
from recorder import Notes, Recorder, lasting
from worlds.graded import Levels

import dppo
from dppo.engine.collector import Collected
from dppo.errors import SegmentsLost
from dppo.learners.trainers import LocalTrainer
from dppo.ppo.exchange.records import Experience, IncidentKind, Update
from dppo.ppo.learning import cloning
from dppo.records.files import checkpoint as checkpoints
from dppo.records.metrics.reading import read_metrics
from dppo.transports.in_process import InProcessCollector

Patch = pytest.MonkeyPatch
LEARNING = ("iteration", "global_step", "losses/", "charts/", "faults/", "info/")
TWO_LEARNERS = {"num_actors": 1, "num_learners": 2, "cpus_per_actor": 0.5}
TIMED = ("charts/SPS", "charts/SPS_iteration", "eval/s")


def outcome(result: dppo.Result) -> dict[str, Any]:
    """Return what must not depend on processes and interruptions."""
    rows = read_metrics(result.run_dir)
    arrays = checkpoints.load(result.checkpoint).arrays
    episodes = result.run_dir / "episodes.jsonl"
    evaluations = [chosen(row, ("eval/",)) for row in rows if "eval/iteration" in row]
    evaluations.sort(key=lambda row: row["eval/iteration"])
    return {
        "weights": result.weights_sha256,
        "steps": (result.iterations, result.global_step, result.episodes),
        # An evaluation on actors adds rows, which repeat those of training.
        "learning": {row["iteration"]: chosen(row, LEARNING) for row in rows if "iteration" in row},
        "evaluations": evaluations,
        "statistics": bits_of(arrays["normalizer"]),
        "optimizer": bits_of(arrays["optimizer"]),
        "faults": result.env_faults,
        "episodes": episodes.read_bytes() if episodes.exists() else b"",
    }


def chosen(row: dict[str, float], prefixes: tuple[str, ...]) -> dict[str, float]:
    return {
        name: value
        for name, value in row.items()
        if name.startswith(prefixes) and name not in TIMED
    }


class Trial:
    """A run of a kind in a folder, which may be disturbed."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.settings = matrix.RUNS[kind]
        self.losses: dict[str, int] = {}
        """Incidents that the disturbance is expected to add."""

    def train(
        self, *observers: dppo.Observer, resume: Path | None = None, **changes: Any
    ) -> dppo.Result:
        config = make_config(self.settings | {"run_dir": self.folder} | changes)
        if self.kind.startswith("graded"):
            observers = Levels(), *observers
        return dppo.train(config, resume=resume, observers=observers)

    def resume(self, **changes: Any) -> dppo.Result:
        return self.train(resume=self.folder, **changes)

    def stop(self, at: int, **changes: Any) -> None:
        """Train until iteration `at`."""
        stopped = self.train(Recorder(interrupt_at=at), **changes)
        assert stopped.stopped_by == "SIGINT"
        assert stopped.iterations == at

    def wrapped(self, factory: str, **arguments: Any) -> Settings:
        """Return settings that wrap the environment by a function of `worlds`."""
        inner = {
            "world": self.settings["env_id"],
            "world_kwargs": self.settings.get("env_kwargs", {}),
        }
        return {"env_id": f"worlds.{factory}", "env_kwargs": inner | arguments}


@pytest.fixture(autouse=True)
def short_cloning(monkeypatch: Patch) -> None:
    """Clone controllers in 5 epochs instead of 500; ranks of learners are other processes and clone as ever."""
    monkeypatch.setattr(cloning, "EPOCHS", 5)


# ------------------------------------------------------------------ disturbances


def actors(trial: Trial, longest_s: float = 0.0, **changes: Any) -> dppo.Result:
    """With `longest_s`, steps are delayed by chance, so that segments arrive in any order."""
    if longest_s:
        changes |= trial.wrapped("slow:Delayed", longest_s=longest_s)
    return trial.train(**changes)


def resumed(trial: Trial, at: int, before: int = 0, after: int = 0) -> dppo.Result:
    """Segments in flight are collected again, with the policy of the first time."""
    trial.stop(at, num_actors=before)
    result = trial.resume(num_actors=after)
    assert result.resumed_at == at
    return result


def interrupted(trial: Trial, segment: int) -> dppo.Result:
    """Ctrl-C arrives in a step, in the middle of a segment."""
    step = trial.settings["num_steps"] * (segment - 1) + 7
    marker = trial.folder.parent / "marker"
    changes = trial.wrapped(
        "faulty:crashing", how="sigint", at_episode=None, at_step=step, marker=str(marker)
    )
    stopped = trial.train(**changes)
    assert stopped.stopped_by == "SIGINT"
    assert stopped.iterations < segment
    return trial.resume(**changes)


def older_checkpoint(trial: Trial, at: int, checkpoint: int) -> dppo.Result:
    """Files are ahead of the checkpoint and end in the middle of a line, as after a kill."""
    files = {"checkpoint_interval_s": 0, "keep_checkpoints": 20}
    trial.stop(at, **files)
    for name in ("episodes.jsonl", "metrics.jsonl"):
        with (trial.folder / name).open("ab") as file:
            file.write(b'{"iteration": 8, "glo')
    path = trial.folder / "checkpoints" / f"iter_{checkpoint:06d}.safetensors"
    return trial.train(resume=path, **files)


def segments_lost(trial: Trial, num_actors: int) -> dppo.Result:
    """Some updates cannot fetch their segments the first time; losing_nodes.py loses real nodes."""
    update = LocalTrainer.update
    due = [0, 1, 2]

    def update_or_lose(trainer: LocalTrainer, experience: Experience) -> Update:
        if experience.iteration in due:
            due.remove(experience.iteration)
            raise SegmentsLost("lost on their way")
        return update(trainer, experience)

    trial.losses = {"segments_lost": 3}
    recorder = Recorder()
    with Patch.context() as patch, Notes() as notes:
        patch.setattr(LocalTrainer, "update", update_or_lose)
        result = trial.train(recorder, num_actors=num_actors)
    kinds = [incident.kind for incident in recorder.incidents]
    assert kinds.count(IncidentKind.SEGMENTS_LOST) == 3
    assert "lost on their way; they are collected again" in notes.texts
    return result


def killed(trial: Trial, moments: list[str], num_actors: int = 2, **changes: Any) -> dppo.Result:
    """The simulator kills its process. Open episodes, which may have begun iterations ago, are replayed."""
    recorder = Recorder()
    with Notes() as notes:
        result = kill(trial, moments, recorder, num_actors=num_actors, **changes)
    assert any("replaced" in note for note in notes.texts)
    kinds = [incident.kind for incident in recorder.incidents]
    assert "actor_lost" in kinds
    assert any("actor_lost" in line for line in recorder.ending)
    return result


def kill(trial: Trial, moments: list[str], recorder: Recorder, **changes: Any) -> dppo.Result:
    if not moments:
        trial.losses = {"actor_lost": 1}
        slow = trial.wrapped("slow:Delayed", longest_s=0.006)
        with Disturbance("PPOActor.make_segment", send(signal.SIGKILL)):
            return trial.train(recorder, **slow, **changes)
    result = trial.train(recorder, **deadly(trial, moments), **changes)
    markers = [trial.folder.parent / moment for moment in moments]
    assert all(marker.exists() for marker in markers)
    replayed = sum(row.get("replay/steps", 0) for row in read_metrics(trial.folder))
    assert replayed > 0 or "episodes" in trial.kind  # which are so short that none may be open
    trial.losses = {"actor_lost": len(moments)}
    return result


def deadly(trial: Trial, moments: list[str]) -> Settings:
    """Return settings whose simulator kills its process at these moments.

    The step is in segment K + 1: its policy is that of version 1, so all segments 0 have arrived, and whichever
    process dies, open episodes of its samplers are replayed. In an earlier segment, an answer with segment 0 could be
    lost with the process; its samplers would then start from the beginning.
    """
    lag = make_config(trial.settings).lag
    step = trial.settings["num_steps"] * (lag + 1) + 7
    folder = str(trial.folder.parent)
    if trial.settings["env_id"].startswith("worlds.joint:"):
        assert moments == ["step"]
        return trial.wrapped("joint:deadly", marker=f"{folder}/step", at_step=step)
    return trial.wrapped("faulty:deadly", folder=folder, moments=moments, at_step=step)


def killed_and_resumed(trial: Trial, at: int) -> dppo.Result:
    kill(trial, ["step"], Recorder(interrupt_at=at), num_actors=2)
    return trial.resume(**deadly(trial, ["step"]))


def two_learners(trial: Trial, **changes: Any) -> dppo.Result:
    disturb = killed if "moments" in changes else actors
    return disturb(trial, **TWO_LEARNERS | changes)


def long_updates(trial: Trial) -> Settings:
    """Return settings with which a learner can be lost in the middle of an update."""
    return (
        {"gradient_steps": 2.0} if trial.settings.get("algo") == "sac" else {"update_epochs": 100}
    )


def lost_learner_and_resumed(trial: Trial, at: int, **changes: Any) -> dppo.Result:
    """The batch of the update holds segments of earlier iterations."""
    learners = TWO_LEARNERS | long_updates(trial) | changes
    trial.stop(at, **learners)
    recorder = Recorder()
    with in_the_middle_of_an_update(send(signal.SIGKILL)):
        result = trial.train(recorder, resume=trial.folder, **learners)
    trial.losses = {"learners_rebuilt": 1}
    assert "learners_rebuilt" in [incident.kind for incident in recorder.incidents]
    assert result.metrics[-1]["incidents/learners_rebuilt"] == 1
    return result


DISTURB: dict[str, Callable[..., dppo.Result]] = {
    "actors": actors,
    "resumed": resumed,
    "interrupted": interrupted,
    "older checkpoint": older_checkpoint,
    "segments lost": segments_lost,
    "killed": killed,
    "killed and resumed": killed_and_resumed,
    "two learners": two_learners,
    "lost learner and resumed": lost_learner_and_resumed,
}
# the run with which a disturbed one is compared; others are in process
WHOLE: dict[str, Callable[[Trial], Settings]] = {
    "two learners": lambda trial: TWO_LEARNERS,
    "lost learner and resumed": lambda trial: TWO_LEARNERS | long_updates(trial),
}


def needs_ray(cell: Cell) -> bool:
    arguments = matrix.DISTURBANCES[cell.disturbance][cell.moment]
    names = ("num_actors", "before", "after")
    counts = [arguments.get(name, 0) for name in names]
    return any(counts) or cell.disturbance.startswith(("killed", "two learners", "lost learner"))


# ------------------------------------------------------------------ the table


Whole = Callable[[str, str], dppo.Result]


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return a function of kind and disturbance: an undisturbed run, trained once."""
    folder = tmp_path_factory.mktemp("uninterrupted")

    @cache
    def train(kind: str, baseline: str) -> dppo.Result:
        trial = Trial(kind, folder / f"{kind} {baseline}")
        changes = WHOLE[baseline](trial) if baseline else {}
        result = trial.train(**changes)
        assert result.episodes >= 8 or result.env_faults  # otherwise no reset would be compared
        return result

    return lambda kind, disturbance: train(kind, disturbance if disturbance in WHOLE else "")


def check(cell: Cell, uninterrupted: Whole, folder: Path) -> None:
    expected = uninterrupted(cell.kind, cell.disturbance)
    trial = Trial(cell.kind, folder / "run")
    arguments = matrix.DISTURBANCES[cell.disturbance][cell.moment]
    result = DISTURB[cell.disturbance](trial, **arguments)
    assert outcome(result) == outcome(expected)
    assert lasting(result) == expected.incidents | trial.losses


IN_PROCESS = [cell for cell in matrix.ALWAYS if not needs_ray(cell)]
ON_RAY = [
    *(pytest.param(cell, id=str(cell)) for cell in matrix.ALWAYS if needs_ray(cell)),
    *(pytest.param(cell, id=str(cell), marks=pytest.mark.slow) for cell in matrix.SLOW),
]


@pytest.mark.parametrize("cell", IN_PROCESS, ids=str)
def test_a_disturbed_run_equals_the_whole_one(
    cell: Cell, uninterrupted: Whole, tmp_path: Path
) -> None:
    check(cell, uninterrupted, tmp_path)


@pytest.mark.proves("kills its process in constructor, reset or step")
@pytest.mark.proves("raises with a probability of 0.001 or 0.5 in each step")
@pytest.mark.proves("raises while actors are killed and the run is resumed")
@pytest.mark.parametrize("cell", ON_RAY)
def test_a_disturbed_run_on_ray_equals_the_whole_one(
    cell: Cell, uninterrupted: Whole, tmp_path: Path, ray_session: None
) -> None:
    check(cell, uninterrupted, tmp_path)


# ------------------------------------------------------------------ what else the promise says


def test_the_seed_and_overlap_decide_the_weights(uninterrupted: Whole, tmp_path: Path) -> None:
    weights = uninterrupted("continuous", "").weights_sha256
    assert Trial("continuous", tmp_path / "again").train().weights_sha256 == weights
    other = Trial("continuous", tmp_path / "other").train(seed=2)
    assert other.weights_sha256 != weights
    assert uninterrupted("continuous, overlap", "").weights_sha256 != weights


def test_overlap_is_a_lag_of_one(uninterrupted: Whole, tmp_path: Path) -> None:
    lag = Trial("lag", tmp_path / "lag").train(policy_lag=1).weights_sha256
    overlap = Trial("lag", tmp_path / "overlap").train(policy_lag=0, overlap=True).weights_sha256
    assert overlap == lag != uninterrupted("lag", "").weights_sha256


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("discrete", [0, 0, 0]), ("discrete, overlap", [0, 1, 1]), ("lag", [0, 1, 2, 3, 3, 3])],
)
def test_the_policy_lag_is_constant_after_the_first_iterations(
    kind: str, expected: list[int], tmp_path: Path, monkeypatch: Patch
) -> None:
    lags = []
    receive = InProcessCollector.receive
    update = LocalTrainer.update

    def received(collector: InProcessCollector, stop: Any) -> Collected:
        collected = receive(collector, stop)
        versions = {report.policy_version for report in collected.reports}
        assert versions == {collected.policy.version}
        return collected

    def updated(trainer: LocalTrainer, experience: Experience) -> Update:
        lags.append(experience.iteration - experience.policy.version)
        return update(trainer, experience)

    monkeypatch.setattr(InProcessCollector, "receive", received)
    monkeypatch.setattr(LocalTrainer, "update", updated)
    Trial(kind, tmp_path / "run").train()
    assert lags == expected


@pytest.mark.proves("has episodes that do not follow from the seed")
def test_an_episode_that_cannot_be_replayed_is_abandoned_and_reported(tmp_path: Path) -> None:
    trial = Trial("discrete", tmp_path / "run")
    drifting = {"env_id": "worlds.faulty:drifting_cartpole"}
    trial.stop(2, **drifting)
    recorder = Recorder()
    with Notes() as notes:
        resumed = trial.train(recorder, resume=trial.folder, **drifting)
    assert 1 <= resumed.incidents["replay_mismatch"] <= 8
    assert resumed.metrics[-1]["incidents/replay_mismatch"] == resumed.incidents["replay_mismatch"]
    assert any(
        "not deterministic given its seed" in note or "replay ended" in note for note in notes.texts
    )
    assert any("replay_mismatch" in line for line in recorder.ending)
    assert sum("abandoned episode" in note for note in notes.texts) == 1


def test_without_replay_open_episodes_are_abandoned_and_reported(tmp_path: Path) -> None:
    trial = Trial("discrete", tmp_path / "run")
    trial.stop(2, replay=False)
    with Notes() as notes:
        assert trial.resume(replay=False).incidents == {"episode_abandoned": 8}
    [abandoned] = [note for note in notes.texts if "abandoned episode" in note]
    assert abandoned.endswith(" (and 7 more like it)")


def test_nothing_global_is_seeded_or_drawn_from(tmp_path: Path) -> None:
    import random

    import numpy as np
    import torch

    def state() -> tuple[Any, ...]:
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()

    before = state()
    Trial("continuous", tmp_path / "run").train()
    assert state() == before
