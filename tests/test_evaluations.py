"""Evaluations during training: they change no weights, equal `dppo eval`, and survive faults, kills and resumes."""

from __future__ import annotations

import dataclasses
import json
import time
from itertools import accumulate
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any, ClassVar

import gymnasium as gym
import pytest
from builders import FullDisk, make_config
from matrix import RUNS
from processes import wait_until
from recorder import Notes, Recorder, stop_in_episode
from remedies import executes
from threadpoolctl import threadpool_info, threadpool_limits
from worlds.simple import Counting
from worlds.single import OnPort

import dppo
from dppo.config import Actors, Env, Learners
from dppo.config.parts.processes import EVAL_EPISODES
from dppo.envs import closing
from dppo.envs.spaces import describe_spaces
from dppo.errors import ClusterError, ConfigError, EnvironmentFault
from dppo.policies.acting import PlaySettings, PolicyActingFor
from dppo.policies.playing import EpisodePlayer
from dppo.ppo.exchange.records import Episode, Incident, PolicySnapshot
from dppo.records.files import checkpoint as checkpoints
from dppo.records.files import disk
from dppo.records.files.run_folder import is_over
from dppo.records.metrics.reading import read_metrics
from dppo.records.metrics.tensorboard import by_step
from dppo.run.best_evaluation import BestEvaluation, EvaluationScore
from dppo.run.evaluation_pace import EvaluationPace
from dppo.run.evaluations import Evaluations
from dppo.run.factory import play_limits
from dppo.run.open_evaluation import OpenEvaluation
from dppo.tools.replay.episode import replay
from dppo.transports import in_process
from dppo.transports.ray.capacity import room_for
from dppo.transports.ray.evaluating import EvaluationActor
from dppo.transports.ray.pickling import packed_model
from dppo.transports.ray.session import demand_of

ROWS = 64
ITERATIONS = 6
DUE = [2, 4, 6]
Rows = dict[int, dict[str, float]]
CRASHING: dict[str, Any] = {
    "env_id": "worlds.faulty:crashing",
    "env_kwargs": {"how": "hang", "at_step": 10**9},  # never
}


def settings(run_dir: Path, **changes: Any) -> dppo.Config:
    return make_config(RUNS["evaluations"] | {"run_dir": run_dir} | changes)


WITHOUT = {"eval_every": None, "eval_episodes": EVAL_EPISODES}


def evaluations(result: dppo.Result) -> Rows:
    """Return the metrics of all evaluations without measured times, by the iteration of the policy."""
    rows = [row for row in read_metrics(result.run_dir) if "eval/iteration" in row]
    by_iteration = {int(row["eval/iteration"]): row for row in rows}
    assert len(by_iteration) == len(rows)
    return {
        number: {
            key: value for key, value in row.items() if key.startswith("eval/") and key != "eval/s"
        }
        for number, row in sorted(by_iteration.items())
    }


@pytest.fixture(scope="module")
def uninterrupted(module_path: Path) -> dppo.Result:
    return dppo.train(settings(module_path / "uninterrupted", keep_checkpoints=99))


def test_an_evaluation_changes_no_weights_and_equals_that_of_its_checkpoint(
    uninterrupted: dppo.Result, tmp_path: Path
) -> None:
    without = dppo.train(settings(tmp_path / "run", **WITHOUT))
    assert without.weights_sha256 == uninterrupted.weights_sha256
    rows = evaluations(uninterrupted)
    assert list(rows) == DUE

    for number, row in rows.items():
        path = uninterrupted.run_dir / "checkpoints" / f"iter_{number:06d}.safetensors"
        played = dppo.evaluate(path, episodes=4, seed=1)
        assert row["eval/episodic_return"] == played.mean_return
        assert row["eval/episodic_length"] == played.mean_length
        assert row["eval/return_min"] == min(played.returns)
        assert row["eval/return_max"] == max(played.returns)
        assert row["eval/global_step"] == number * ROWS
    assert [row["iteration"] for row in uninterrupted.metrics] == list(range(1, ITERATIONS + 1))


def test_the_best_evaluation_is_one_whose_checkpoint_could_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = EpisodePlayer.play
    returns = {2: 5.0, 4: 9.0, 6: 1.0}

    def scored(player: EpisodePlayer, policy: PolicySnapshot, *args: Any) -> Episode:
        episode = play(player, policy, *args)
        return dataclasses.replace(episode, episode_return=returns[policy.version])

    monkeypatch.setattr(EpisodePlayer, "play", scored)
    monkeypatch.setattr(disk, "DISK", FullDisk(lambda name: "iter_000004" in name))
    recorder = Recorder()
    result = dppo.train(settings(tmp_path / "run", keep_checkpoints=1), observers=[recorder])
    assert result.incidents == {"checkpoint_failed": 1}

    folder = tmp_path / "run" / "checkpoints"
    stored = json.loads((folder / "best.json").read_text())
    assert stored["iteration"] == 2
    assert stored["score"] == 5.0

    stems = {path.stem for path in folder.glob("*.safetensors")}
    assert stems == {"iter_000002", "iter_000006"}
    assert any("(iter_000002)" in line for line in recorder.ending)


def test_a_run_that_is_resumed_without_evaluations_keeps_the_best_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    stopped = dppo.train(settings(run, keep_checkpoints=1), observers=[Recorder(interrupt_at=3)])
    best = (run / "checkpoints/best.json").read_text()
    dppo.train(settings(run, keep_checkpoints=1, **WITHOUT), resume=run)
    assert (run / "checkpoints/best.json").read_text() == best
    assert (run / "checkpoints/iter_000002.safetensors").exists()
    assert list(evaluations(stopped)) == [2]


def test_the_time_of_evaluations_is_not_that_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1e-6
        return now[0]

    monkeypatch.setattr("time.monotonic", clock)
    play = EpisodePlayer.play

    def slow(*args: Any) -> Any:
        now[0] += 1000.0
        return play(*args)

    monkeypatch.setattr(EpisodePlayer, "play", slow)
    result = dppo.train(settings(tmp_path / "run", eval_timeout_s=1e9))
    assert result.wall_s > 1000.0 * len(DUE) * 4

    shown = [row[key] for row in result.metrics for key in ("time/training_s", "perf/iteration_s")]
    assert max(result.training_s, *shown) < 1.0

    rows = [row for row in result.metrics if "eval/iteration" in row]
    for number, row in enumerate(rows, 1):
        assert row["time/wall_s"] == pytest.approx(4000.0 * number, abs=1)
        assert row["time/eval_wait_s"] == pytest.approx(4000.0 * number, abs=1)
    [line] = [note for note in result.notes if note.startswith("Waiting for evaluations took")]
    assert " took 3:20:00, training 0:00. Use num_actors=1 " in line


class InTurn:
    """Plays episodes one after the other, each in 12 s of a clock that waiting sets forward."""

    def __init__(self) -> None:
        self.now = 0.0
        self._free_at = 0.0
        self._playing: list[tuple[float, tuple[int, int, Episode]]] = []

    def begin(self, number: int, _: object) -> None:
        for index in range(4):
            self._free_at = max(self.now, self._free_at) + 12.0
            outcome = (number, index, Episode(0, index, 1.0, 9, None))
            self._playing.append((self._free_at, outcome))

    def outcomes(self, wait_s: float) -> list[tuple[int, int, Episode]]:
        if wait_s:
            self.now = max(self.now, self._playing[0][0])
        ended = [outcome for end, outcome in self._playing if end <= self.now]
        del self._playing[: len(ended)]
        return ended


@pytest.mark.parametrize("speed", [{"charts/SPS": 0.0}, {}])
def test_a_call_that_has_made_no_env_step_warns_of_no_backlog(
    speed: dict[str, float], tmp_path: Path
) -> None:
    """All steps of its first iteration may be lost, and a resumed run may end before its first row."""
    pace = EvaluationPace(settings(tmp_path, num_actors=1, eval_every=ROWS), time.monotonic() - 900)
    pace.look(is_playing=True)
    pace.count_episode()
    row = {"iteration": 0.0, "global_step": 0.0} | speed
    with Notes() as notes:
        pace.add_time_left(row, [OpenEvaluation("evaluation") for _ in range(3)])
    assert (row["time/eval_left_s"] > 900, notes.texts) == (True, [])


def evaluating_in_turn(
    folder: Path, players: Any, observer: Any, monkeypatch: pytest.MonkeyPatch
) -> Evaluations:
    """Return evaluations after each iteration, which these players play."""
    monkeypatch.setattr("time.monotonic", lambda: players.now)
    config = settings(folder, num_actors=1, eval_every=ROWS)
    learner = SimpleNamespace(iteration=0, global_step=0, incident_metrics=dict, snapshot=dict)
    run: Any = SimpleNamespace(
        config=config,
        observers=observer,
        disk=None,
        stop=SimpleNamespace(check=lambda: None),
        parts=SimpleNamespace(learner=learner),
        folder=SimpleNamespace(path=folder, resumed_from={}),
        actions=describe_spaces(gym.make("CartPole-v1")).actions,
    )
    return Evaluations(run, players, [], EvaluationPace(config, 0.0))


def test_evaluations_that_end_long_after_the_training_are_announced_and_reported_as_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An iteration takes 20 s, and the evaluation after it 48 s."""
    players = InTurn()
    observer = Stops()
    evaluating = evaluating_in_turn(tmp_path, players, observer, monkeypatch)
    rows: list[dict[str, float]] = []
    with Notes() as notes:
        for number in range(1, ITERATIONS + 1):
            players.now += 20.0
            rows.append({"iteration": number, "global_step": number * ROWS})
            rows[-1] |= {"charts/SPS": ROWS / 20, "time/training_s": players.now}
            evaluating.on_iteration(rows[-1])
    assert not any("time/eval_wait_s" in row for row in rows[:-1]), "it has not waited yet"
    left = {row["iteration"]: row["time/eval_left_s"] for row in rows if "time/eval_left_s" in row}
    end = 20.0 + 48.0 * ITERATIONS
    assert left[3] == pytest.approx(end - 60.0, rel=0.2)
    [backlog] = [text for text in notes.texts if text.startswith("evaluations fall behind")]
    assert "3 are not over, and at this speed the last one ends 3:" in backlog
    assert "Use eval_actors=4 (--eval-actors 4) if " in backlog

    in_the_wait = observer.rows[1:]
    assert [row["time/wall_s"] for row in (*in_the_wait, rows[-1])] == [164, 212, 260, end]
    estimates = [row["time/eval_left_s"] for row in in_the_wait]
    assert estimates == pytest.approx([144.0, 96.0, 48.0], rel=0.05)
    assert "time/eval_left_s" not in rows[-1]
    assert rows[-1]["eval/iteration"] == ITERATIONS
    assert rows[-1]["time/eval_wait_s"] == end - 120
    waiting = [text for text in notes.texts if text.startswith("waiting for the evaluation after")]
    assert waiting[0].startswith("waiting for the evaluation after 192 steps (")
    assert evaluating.notes()[0].startswith("Waiting for evaluations took 3:08, training 2:00. Use")


def test_results_after_the_last_checkpoint_are_rows_once_all_evaluations_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill in the wait, the resumed run repeats all evaluations that were not over in the checkpoint."""
    observer = Stops()
    rows_in_the_wait: list[int] = []

    class Watched(InTurn):
        def outcomes(self, wait_s: float) -> list[tuple[int, int, Episode]]:
            rows_in_the_wait.append(len(observer.rows))
            return super().outcomes(wait_s)

    evaluating = evaluating_in_turn(tmp_path, Watched(), observer, monkeypatch)
    for number in (1, 2):
        evaluating.on_iteration({"iteration": number, "global_step": number * ROWS})
    assert evaluating.finish()
    assert set(rows_in_the_wait) == {0}
    assert [row["eval/iteration"] for row in observer.rows] == [1, 2]


class Lost(InTurn):
    """Has lost Ray after the first episode, which has failed."""

    def outcomes(self, wait_s: float) -> list[Any]:
        if not self._playing:
            raise ClusterError("Ray is lost")
        self._playing.clear()
        return [(1, 0, EnvironmentFault("no licence"))]


def test_faults_of_an_evaluation_that_the_end_of_ray_has_ended_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluating = evaluating_in_turn(tmp_path, Lost(), [], monkeypatch)
    counted = list[Incident]()
    monkeypatch.setattr(evaluating._learner, "count", counted.append, raising=False)
    with Notes() as notes:
        evaluating.on_iteration({"iteration": 1, "global_step": ROWS})
    assert "(1 of 4 episodes) is left out: Ray is lost" in notes.texts[-1]
    assert [incident.kind for incident in counted] == ["evaluation_fault"]
    assert not evaluating.state()["open"]


def test_the_start_of_the_process_of_a_baseline_is_no_time_of_playing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    players = InTurn()
    evaluating = evaluating_in_turn(tmp_path, players, Stops(), monkeypatch)
    baseline: Any = SimpleNamespace(is_ready=False, is_over=False, play=OpenEvaluation("baseline"))
    evaluating._baseline = baseline
    players.now = 90.0
    evaluating._look()
    baseline.is_ready = True
    players.now = 100.0
    evaluating._look()
    evaluating._pace.count_episode()
    row: dict[str, float] = {"iteration": ITERATIONS, "global_step": ITERATIONS * ROWS}
    evaluating._pace.add_time_left(row, [baseline.play])
    assert row["time/eval_left_s"] == 4 * 10.0


@pytest.mark.parametrize(
    ("progress", "num_playing", "num_actors", "unplayed"),
    [
        ((2, 2 * ROWS, 40.0), 1, 1, 12),
        ((2, 2 * ROWS, 40.0), 3, 1, 20),  # 80 s longer than the training
        ((2, 2 * ROWS, 50.0), 3, 1, 20),  # 40 s
        ((6, 4 * ROWS, 40.0), 1, 1, 4),  # faults have cost steps, and no iteration is left
        ((6, 6 * ROWS, 40.0), 0, 1, 0),
        ((2, 2 * ROWS, 40.0), 3, 0, 0),  # in process, evaluations take turns with training
    ],
)
def test_the_time_left_is_that_of_the_evaluations_in_play_and_of_later_ones(
    progress: tuple[int, int, float],
    num_playing: int,
    num_actors: int,
    unplayed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An episode takes 12 s. A backlog is a warning if it ends a minute after the training."""
    monkeypatch.setattr("time.monotonic", lambda: 12.0)
    pace = EvaluationPace(settings(tmp_path, num_actors=num_actors), 0.0)
    pace.look(is_playing=True)
    pace.count_episode()
    iteration, steps, iteration_s = progress
    row = {"iteration": iteration, "global_step": steps, "charts/SPS": ROWS / iteration_s}
    row["time/eval_left_s"] = 7.0
    with Notes() as notes:
        pace.add_time_left(row, [OpenEvaluation("evaluation") for _ in range(num_playing)])
    assert row.get("time/eval_left_s", 0.0) == 12.0 * unplayed
    warns = any("fall behind" in text for text in notes.texts)
    assert warns == (unplayed == 20 and iteration_s == 40.0)


@pytest.mark.parametrize(
    ("episode", "has_metrics", "env_threads"),
    [(6, True, False), (10, True, False), (1, False, False), (6, True, True)],
    ids=["second evaluation", "last evaluation", "in a copy without metrics", "in threads"],
)
def test_an_evaluation_that_a_signal_ends_is_repeated_when_the_run_is_resumed(
    episode: int,
    has_metrics: bool,
    env_threads: bool,
    uninterrupted: dppo.Result,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    stop_in_episode(episode, monkeypatch)
    with Notes() as notes:
        stopped = dppo.train(settings(run, env_threads=env_threads))
    before = episode // 4  # evaluations of four episodes
    again = f"SIGTERM: a resumed run plays the evaluation after {DUE[before] * ROWS} steps ("
    # the last evaluation is played after the last iteration, of which nothing is dropped
    assert any(text.startswith(again) for text in notes.texts) == (DUE[before] < ITERATIONS)
    assert (stopped.stopped_by, stopped.iterations) == ("SIGTERM", DUE[before])
    assert list(evaluations(stopped)) == DUE[:before]
    if not has_metrics:
        (run / "metrics.jsonl").unlink()
    assert not is_over(settings(run), run)
    result = dppo.train(settings(run), resume=run)
    assert is_over(settings(run), run)
    assert result.weights_sha256 == uninterrupted.weights_sha256
    assert evaluations(result) == evaluations(uninterrupted)


class Together(Counting):
    """Each step of an evaluation waits for that of another episode."""

    barrier: ClassVar[Barrier] = Barrier(2)

    def __init__(self, *, waits: bool = False) -> None:
        super().__init__(truncate_after=5)
        self.waits = waits

    def step(self, action: Any) -> Any:
        if self.waits:
            self.barrier.wait(timeout=60)
        return super().step(action)


def test_threads_play_episodes_of_evaluations_and_of_a_baseline_side_by_side(
    tmp_path: Path,
) -> None:
    counted: dict[str, Any] = {"env_id": Together, "baseline": lambda obs: 0, "norm_obs": False}
    in_turn = dppo.train(settings(tmp_path / "in turn", **counted))
    threads: dict[str, Any] = {"env_threads": True, "eval_env_kwargs": {"waits": True}}
    together = dppo.train(settings(tmp_path / "together", **counted, **threads))
    assert together.incidents == {}
    assert evaluations(together) == evaluations(in_turn)
    assert together.weights_sha256 == in_turn.weights_sha256
    assert {row["eval/episodes"] for row in evaluations(together).values()} == {4}


class StopAt(dppo.Observer):
    """Stops a run at an evaluation."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_iteration(self, row: dict[str, float]) -> bool:
        return row.get("eval/iteration") == self.iteration


class Stops:
    """Notes rows, and asks to stop after each of them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def iteration(self, row: dict[str, float], *, is_repeated: bool = False) -> str:
        assert is_repeated
        self.rows.append(row)
        return "Stops"


def test_each_evaluation_has_a_row_of_its_own_also_after_an_observer_has_asked_to_stop() -> None:
    observer = Stops()
    before = {"global_step": 9.0, "eval/iteration": 1, "eval/episodic_return": 7.0}
    counts = {"incidents/evaluation_fault": 1}
    learner = SimpleNamespace(incident_metrics=lambda: counts)
    evaluating_run: Any = SimpleNamespace(
        _row=before,
        stopped_by=None,
        _observers=observer,
        _learner=learner,
        _pace=SimpleNamespace(add_time_left=lambda *_: None),
        _playing=list,
    )
    second = {"eval/iteration": 2.0, "eval/episodes": 0.0}
    third = {"eval/iteration": 3.0}
    Evaluations._report(evaluating_run, [second, third])
    usual = {"global_step": 9.0, **counts}
    assert observer.rows == [usual | second, usual | third]
    assert evaluating_run.stopped_by == "Stops"


@pytest.mark.parametrize("order", [(10, 20, 30), (20, 10, 30)])
def test_of_equal_evaluations_the_earliest_is_the_best_whichever_ends_first(
    order: tuple[int, ...],
) -> None:
    best = BestEvaluation()
    for number in order:
        best.add(EvaluationScore(500.0, number, 100 * number))
    assert best.result == EvaluationScore(500.0, 10, 1000)


def test_an_observer_stops_a_run_at_an_evaluation_that_ends_beside_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a resume, an evaluation that is repeated has a row of its own."""
    stop_in_episode(6, monkeypatch)
    config = settings(tmp_path / "run", eval_every=ROWS)
    stopped = dppo.train(config, observers=[StopAt(2)])
    assert (stopped.stopped_by, stopped.iterations) == ("SIGTERM", 2)
    resumed = dppo.train(config, resume=tmp_path / "run", observers=[StopAt(2)])
    assert (resumed.stopped_by, resumed.iterations) == ("StopAt", 3)


def actor_on_port(number: int) -> EvaluationActor:
    play_settings = PlaySettings(1)
    spaces = describe_spaces(gym.make("CartPole-v1"))
    acting_for = PolicyActingFor(spaces, None, play_settings)  # type: ignore[arg-type]
    player = EpisodePlayer(Env(env_id=OnPort), acting_for, play_settings, 8)
    return EvaluationActor(packed_model(player), number)


def test_an_evaluation_has_a_place_of_its_own(tmp_path: Path) -> None:
    result = dppo.train(settings(tmp_path / "run", env_id=OnPort))
    assert result.incidents == {}
    played = [row["eval/episodes"] for row in evaluations(result).values()]
    assert played == [4] * len(DUE)
    assert actor_on_port(0)._loaded().number == 0
    assert actor_on_port(1)._loaded().number == 1


def test_an_actor_of_evaluations_closes_the_environment_with_its_process() -> None:
    """Its process is what SIGTERM closes."""
    actor = actor_on_port(0)
    actor._loaded()._env = OnPort(8, 0)
    assert OnPort.ports == {80}
    actor._process.close()
    assert not OnPort.ports
    actor.close()  # not twice


@pytest.mark.parametrize(
    ("timeouts", "hung_s"),
    [
        ({"step_timeout_s": 5}, 600),
        ({"segment_timeout_s": 5, "start_timeout_s": 7, "reset_timeout_s": 6}, 7),
        ({"segment_timeout_s": 5, "step_timeout_s": 8}, 8),
        ({"reset_timeout_s": 900}, 900),
    ],
)
def test_an_actor_of_evaluations_hangs_after_the_longest_of_the_timeouts(
    timeouts: dict[str, Any], hung_s: float, tmp_path: Path
) -> None:
    """Nothing measures how long its constructor, its resets and its steps take."""
    assert play_limits(settings(tmp_path, num_actors=2, **timeouts)).hung_s == hung_s


class Cores(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole that notes on how many threads matrix products run."""

    threads: ClassVar[set[int]] = set()
    steps = 0

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.note()

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps % 8 == 0:  # a look takes milliseconds
            self.note()
        return self.env.step(action)

    def note(self) -> None:
        self.threads.update(
            pool["num_threads"] for pool in threadpool_info() if pool["internal_api"] == "openblas"
        )


class NeverCloses(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole that hangs when it is closed."""

    closed = 0

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))

    def close(self) -> None:
        type(self).closed += 1
        time.sleep(1000)


def test_a_close_that_hangs_does_not_keep_results_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for module in (in_process, closing):
        monkeypatch.setattr(module, "CLOSING_S", 0.2)
    result = dppo.train(settings(tmp_path / "run", env_id=NeverCloses, record_episodes="all"))
    assert len(dppo.evaluate(result, episodes=2).returns) == 2
    assert "equal to the last bit" in replay(tmp_path / "run", episode="1", trust=True)
    assert NeverCloses.closed == 5  # of two samplers, of evaluations, and two by hand
    # one traceback for both samplers
    assert capfd.readouterr().err.count("TimeoutError: not done within 0.2 s") == 4


def test_a_policy_is_evaluated_and_episodes_are_replayed_on_one_core_as_in_a_run(
    tmp_path: Path,
) -> None:
    """Sums of matrix products have different last bits on several."""
    with threadpool_limits(2, "blas"):
        result = dppo.train(settings(tmp_path / "run", env_id=Cores, record_episodes="all"))
        dppo.evaluate(result, episodes=1)
        replay(tmp_path / "run", episode="1", trust=True)
        assert Cores.threads == {1}
        Cores().close()
        assert Cores.threads == {1, 2}


def test_episodes_that_fail_are_left_out_counted_once_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreliable: dict[str, Any] = {"env_id": "worlds.faulty:Unreliable", "eval_episodes": 12}
    config = settings(tmp_path / "run", **unreliable, eval_env_kwargs={"steps": 0.02})
    recorder = Recorder()
    with Notes() as notes:
        result = dppo.train(config, observers=[recorder])
    rows = evaluations(result)
    assert list(rows) == DUE

    missing = sum(12 - row["eval/episodes"] for row in rows.values())
    assert result.incidents == {"evaluation_fault": missing}
    assert missing == len(recorder.incidents) > 3
    so_far = [*accumulate(12 - row["eval/episodes"] for row in rows.values())]
    due = [row for row in result.metrics if row["iteration"] in DUE]
    assert [row.get("incidents/evaluation_fault", 0) for row in due] == so_far

    stop_in_episode(12 * len(DUE) - 1, monkeypatch)
    config = settings(tmp_path / "again", **unreliable, eval_env_kwargs={"steps": 0.02})
    stopped = dppo.train(config)
    assert stopped.stopped_by == "SIGTERM"
    again = dppo.train(config, resume=stopped)
    assert (evaluations(again), again.incidents) == (rows, result.incidents)

    notes_of_faults = [text for text in notes.texts if "is left out" in text]
    assert len(notes_of_faults) == 3

    uninterrupted = dppo.train(settings(tmp_path / "uninterrupted", **unreliable))
    assert result.weights_sha256 == uninterrupted.weights_sha256


@executes("run/open_evaluation.py: Resume the run with another value")
def test_arguments_that_no_constructor_of_an_evaluation_takes_end_the_run(tmp_path: Path) -> None:
    """A signature with **kwargs says nothing about them."""
    odd: dict[str, Any] = {"env_id": picky, "eval_env_kwargs": {"mode": "odd"}}
    with pytest.raises(ConfigError, match=r"^eval_env_kwargs={'mode': 'odd'}: .*odd is unknown"):
        dppo.train(settings(tmp_path / "run", **odd))
    config = settings(tmp_path / "run", **odd | {"eval_env_kwargs": {"mode": "even"}})
    result = dppo.train(config, resume=tmp_path / "run")
    assert list(evaluations(result)) == DUE
    numbers = [row["iteration"] for row in read_metrics(result.run_dir)]
    assert sorted(set(numbers)) == [*range(1, ITERATIONS + 1)]


def picky(**kwargs: Any) -> gym.Env[Any, Any]:
    mode = kwargs.get("mode")
    if mode == "odd":
        raise ValueError("odd is unknown")
    return gym.make("CartPole-v1")


@pytest.mark.parametrize("env_threads", [False, True])
def test_an_episode_without_an_end_ends_its_evaluation_only(
    env_threads: bool, tmp_path: Path
) -> None:
    endless: dict[str, Any] = {
        "env_id": "worlds.simple:Counting",
        "env_kwargs": {"truncate_after": 20},
        "eval_env_kwargs": {"truncate_after": None},
        "eval_timeout_s": 0.05,
        "norm_obs": False,
        "env_threads": env_threads,
    }
    with Notes() as notes:
        result = dppo.train(settings(tmp_path / "run", **endless))
    assert {row["eval/episodes"] for row in evaluations(result).values()} == {0}

    lines = [text for text in notes.texts if "eval_timeout_s=0.05" in text]
    assert len(lines) == 3
    assert lines[0].startswith("evaluation after 128 steps: episode ")
    assert " is left out, and so are 3 others: " in lines[0]
    assert result.stopped_by is None


def test_an_environment_with_other_spaces_is_refused(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "env_id": "worlds.simple:Wide",
        "env_kwargs": {"size": 3},
        "eval_env_kwargs": {"size": 4},
    }
    with pytest.raises(
        ConfigError, match=r"eval_env_kwargs: worlds.simple:Wide has obs float32\[4\]"
    ):
        dppo.train(settings(tmp_path / "run", **changes))


def test_events_of_an_evaluation_are_at_the_steps_of_its_policy() -> None:
    row = {
        "global_step": 512,
        "eval/global_step": 256,
        "eval/episodic_return": 3.0,
        "charts/SPS": 9.0,
        "x/nan": None,
    }
    assert by_step(row) == {
        512: {"charts/SPS": 9.0},
        256: {"eval/global_step": 256, "eval/episodic_return": 3.0},
    }


def test_actors_of_evaluations_need_room_beside_the_others() -> None:
    demand = demand_of(Actors(num_actors=3), Learners(), evaluators=2)
    assert demand.total() == {"CPU": 5.0}
    assert [room_for([{"CPU": cpus}], demand) for cpus in (1.0, 2.0, 8.0)] == [0, 0, 6]


# ------------------------------------------------------------------ on Ray


@pytest.mark.slow
def test_on_actors_evaluations_are_equal_also_if_one_is_killed_and_the_run_is_resumed_without_actors(
    ray_session: None, uninterrupted: dppo.Result, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"  # from when it exists, the environment is an ordinary one
    run = tmp_path / "run"
    crashing: dict[str, Any] = CRASHING | {
        "eval_env_kwargs": {"how": "kill", "at_step": 9, "marker": str(marker)}
    }
    recorder = Recorder(
        interrupt_at=3,
        after_iteration=lambda number: wait_until(lambda: number < 3 or marker.exists()),
    )
    with Notes() as notes:
        stopped = dppo.train(settings(run, num_actors=2, **crashing), observers=[recorder])
    assert stopped.iterations == 3

    state = checkpoints.find(run).checkpoint.state["evaluations"]
    done = list(evaluations(stopped))
    assert [number for number, _ in state["open"]] + done == [2]

    result = dppo.train(settings(run, **crashing), resume=run)
    assert result.weights_sha256 == uninterrupted.weights_sha256
    assert evaluations(result) == evaluations(uninterrupted)
    assert not done or "actor 0 of evaluations died" in " ".join(notes.texts)


# What is said of an actor, and how often.
FAILURES = {
    "kill": ("died", 3),
    "hang": ("was in one step, reset or constructor of episode 0 for 5 s, the longest", 2),
    "garble": ("failed: ValueError", 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAILURES)
def test_actors_that_always_fail_neither_stop_training_nor_its_end(
    fault: str,
    ray_session: None,
    uninterrupted: dppo.Result,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever was too late is tried twice, other things three times; a hung step takes the longest timeout."""
    monkeypatch.setattr("dppo.run.notices.FIRST_S", 0.1)
    crashing: dict[str, Any] = CRASHING | {"segment_timeout_s": 5.0, "eval_every": 10**9}
    if fault == "garble":  # an answer that cannot be read, as of another version
        monkeypatch.setattr("dppo.transports.ray.transport.unpack", lambda _: int("answer"))
    else:
        crashing["eval_env_kwargs"] = {"how": fault, "at_step": 9}
    with Notes() as notes:
        result = dppo.train(settings(tmp_path / "run", num_actors=2, **crashing))
    assert result.weights_sha256 == uninterrupted.weights_sha256
    assert result.incidents["evaluation_fault"] == 1
    assert evaluations(result)[ITERATIONS]["eval/episodes"] == 0
    assert result.metrics[-1]["incidents/evaluation_fault"] == 1

    reason, times = FAILURES[fault]
    assert sum(f"actor 0 of evaluations {reason}" in text for text in notes.texts) == times
    begins = "waiting for the evaluation after 384 steps (0 of 4 ep"
    waiting = [text for text in notes.texts if text.startswith(begins)]
    assert "eval_timeout_s=1800. Ctrl-C ends the run" in waiting[0]
