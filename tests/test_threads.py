"""--env-threads and --standby-envs change the time, never the result; nor what happens when something fails."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from builders import assert_same_bytes, make_config
from kinds import ITERATIONS, RunOf, settings, small
from recorder import Recorder, lasting
from worlds import threaded
from worlds.threaded import Threaded

import dppo
from dppo.engine.ledger import ReplayLedger
from dppo.envs import threads
from dppo.envs.activity import ActivityRecord
from dppo.errors import EnvironmentFault
from dppo.hosts import host as host_module
from dppo.hosts.host import SamplerHost, SamplerThread, ThreadedHost
from dppo.hosts.plans import sampler_plan
from dppo.ppo.exchange.records import Incident, IncidentKind, PolicySnapshot, SegmentRequest
from dppo.ppo.networks.choice import choose_network

slow = pytest.mark.slow
THREADS = {"env_threads": True}
STANDBY = {"standby_envs": 1}
BOTH = {"env_threads": True, "standby_envs": 2}
KIND = "mask and lstm"
THREADED = {"env_id": "worlds.threaded:Threaded"}
CRASHING = {"env_id": "worlds.faulty:crashing"}


def crashing(**failure: Any) -> dict[str, Any]:
    return CRASHING | {
        "env_kwargs": {"world": "worlds.threaded:Threaded", "world_kwargs": {}} | failure
    }


@pytest.mark.parametrize("changes", [THREADS, STANDBY, BOTH], ids=["threads", "standby", "both"])
def test_threads_and_standby_do_not_change_the_result(
    changes: dict[str, Any], run_of: RunOf, tmp_path: Path
) -> None:
    """In this process; cells of the promise have them for each kind, on an actor."""
    result = dppo.train(settings(KIND, tmp_path / "run", **changes))
    expected = run_of(KIND)
    assert result.weights_sha256 == expected.weights_sha256
    assert result.episodes == expected.episodes
    assert result.incidents == {}
    assert result.episodes >= 10


def test_a_resume_without_them_goes_on_with_the_same_result(run_of: RunOf, tmp_path: Path) -> None:
    run = tmp_path / "run"
    dppo.train(settings(KIND, run, **BOTH), observers=[Recorder(interrupt_at=1)])
    resumed = dppo.train(settings(KIND, run), resume=run)
    assert resumed.iterations == ITERATIONS
    assert resumed.weights_sha256 == run_of(KIND).weights_sha256


@pytest.mark.proves("hangs in a thread")
@slow
@pytest.mark.parametrize("ending", ["kill", "hang"])
@pytest.mark.parametrize("where", ["step", "reset"])
def test_a_kill_or_a_hang_in_a_thread_changes_nothing(
    where: str, ending: str, tmp_path: Path, ray_session: None
) -> None:
    """In one of the resets in the background, or in a step in the middle of the second segment."""
    marker = tmp_path / "marker"
    place = {"at_episode": 2} if where == "reset" else {"at_episode": None, "at_step": 15}
    config = small(tmp_path / "plain", **THREADED)
    expected = dppo.train(config)
    kill = crashing(marker=str(marker), how=ending, where=where, **place)
    result = dppo.train(
        small(tmp_path / "killed", **kill, num_actors=1, segment_timeout_s=4, **BOTH)
    )
    assert marker.exists()

    lost = {"actor_lost": 1} if ending == "kill" else {"actor_hung": 1}
    assert result.weights_sha256 == expected.weights_sha256
    assert lasting(result) == lost


# ------------------------------------------------------------------ threads


class Bare:
    """Like `Threaded`, and no gymnasium.Env, which has a method get_wrapper_attr."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def action_masks(self) -> int:
        return threading.get_ident()

    def close(self) -> None: ...


def test_the_thread_of_an_environment_asks_it_for_its_mask_also_if_it_derives_from_nothing() -> (
    None
):
    env = threads.EnvThread(Bare, "env 0")
    assert env.get_wrapper_attr("action_masks")() == env.thread != threading.get_ident()
    env.close()
    threads.wait_for_ends()


@pytest.mark.parametrize("changes", [THREADS, STANDBY, BOTH], ids=["threads", "standby", "both"])
@pytest.mark.parametrize("envs", [1, 2])
def test_one_thread_makes_all_calls_of_an_environment(
    changes: dict[str, Any], envs: int, tmp_path: Path
) -> None:
    """The environment raises in any other thread, also in `action_masks`, and in `close`, which would be printed."""
    config = small(tmp_path / "run", **THREADED, **changes, envs_per_sampler=envs)
    assert dppo.train(config).incidents == {}


def test_all_samplers_of_a_process_step_side_by_side(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(threaded, "meeting", threading.Barrier(2))
    config = small(tmp_path / "run", **THREADED, **THREADS, env_kwargs={"wait": "step"})
    assert dppo.train(config).iterations == ITERATIONS


def test_resets_in_the_background_go_on_while_others_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(threads, "CLOSING_S", 0.1)
    monkeypatch.setattr(Threaded, "made", 0)
    alone = {"num_samplers": 1, "envs_per_sampler": 1, "env_kwargs": {"wait": "reset"}}
    assert dppo.train(small(tmp_path / "run", **THREADED, **STANDBY, **alone)).episodes > 10


@pytest.mark.proves("raises in a thread (`--env-threads`, `--standby-envs`)")
@pytest.mark.parametrize("changes", [THREADS, STANDBY, BOTH], ids=["threads", "standby", "both"])
@pytest.mark.parametrize("where", ["constructor", "reset", "step"])
def test_a_fault_in_a_thread_is_the_same_error(
    where: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    def fault_of(**changed: Any) -> EnvironmentFault:
        with pytest.raises(EnvironmentFault) as raised:
            dppo.train(
                small(tmp_path / str(len(changed)), **brittle, **changed, on_env_fault="raise")
            )
        return raised.value

    brittle = {"env_id": "worlds.faulty:Brittle", "env_kwargs": {"where": where}, "num_samplers": 2}
    fault_with = fault_of(**changes)
    expected = fault_of()
    assert fault_with.remote_traceback == expected.remote_traceback

    if "standby_envs" not in changes or where != "reset":  # copies count their own resets
        places = [
            re.sub(r"sampler \d|seed \d+", "", fault.message) for fault in (fault_with, expected)
        ]
        assert places[0] == places[1], (
            "but the first of two samplers that fail at once may be either"
        )


@pytest.mark.proves("hangs in a reset in the background")
def test_a_run_ends_although_a_reset_in_the_background_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(threads, "CLOSING_S", 0.1)
    began = time.monotonic()
    hanging = {
        "env_kwargs": {"hang": True},
        "num_samplers": 1,
        "envs_per_sampler": 1,
        "num_steps": 8,
    }
    config = small(tmp_path / "run", **THREADED, **STANDBY, **hanging, total_timesteps=8)
    assert dppo.train(config).iterations == 1
    assert time.monotonic() - began < 30
    assert any("not closed, a call did not return in time" in line for line in caplog.messages)


def test_ctrl_c_ends_a_run_whose_threads_are_in_the_middle_of_steps(tmp_path: Path) -> None:
    def press(number: int) -> None:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()

    run = tmp_path / "run"
    steps = {"env_id": "dppo/SlowCartPole-v0", "env_kwargs": {"step_s": 0.02}}
    stopped = dppo.train(
        small(run, **steps, **THREADS), observers=[Recorder(after_iteration=press)]
    )
    assert stopped.iterations == 1
    assert stopped.stopped_by == "SIGINT"
    assert not [thread for thread in threading.enumerate() if "SlowCartPole" in thread.name]


# ------------------------------------------------------------------ the host


def answer_to(index: int, host: Any, ledger: ReplayLedger | None = None) -> Any:
    spaces = host.spaces(0)
    samplers = range(2)
    weights = np.zeros(choose_network(PLAN.network, spaces).spec.num_parameters, np.float32)
    requests = [
        SegmentRequest(sampler, index, ledger.rebuild(sampler, index) if ledger else None)
        for sampler in samplers
    ]
    return host.collect(requests, PolicySnapshot(0, weights), spaces)


PLAN = sampler_plan(small(Path("run"), **THREADED, **THREADS))


def open_steps_in(ledger: ReplayLedger) -> int:
    """Return the env steps of open episodes, which a rebuild of both samplers replays."""
    steps = 0
    for sampler in range(2):
        rebuild = ledger.rebuild(sampler, 2)
        if rebuild is not None:
            steps += sum(len(actions) for actions in rebuild.actions)
    return steps


def test_samplers_are_rebuilt_in_threads_and_their_progress_is_summed_up() -> None:
    ledger = ReplayLedger(2, replay=True)
    plain = SamplerHost(PLAN, ActivityRecord())
    for index in range(2):
        for report, _ in answer_to(index, plain).results:
            ledger.record(report)
    expected = answer_to(2, plain)

    shown = list[int]()
    record = ActivityRecord(on_step=shown.append)
    host = ThreadedHost(PLAN, record)
    rebuilt = answer_to(2, host, ledger)
    assert_same_bytes(rebuilt.results, expected.results, but=["env_s"])

    open_steps = open_steps_in(ledger)
    timings = rebuilt.timings
    assert timings.replayed_steps == open_steps
    assert record.look().replayed == open_steps
    assert record.look().steps == 80
    assert shown[-1] == 80
    assert str(record.look()) == "idle"
    assert 0 < timings.env_s < timings.total_s

    slower_s = max(report.env_s for report, _ in rebuilt.results)
    assert timings.total_s >= slower_s
    assert rebuilt.cpu_share is not None
    assert 0 < rebuilt.cpu_share <= 1
    assert record.look().num_calls >= 4 + 4 + open_steps + 2 * 20

    threads = list(host._threads.values())
    for thread in threads:
        with thread.progress.restarting():
            pass
    host._look(threads, [])
    assert record.look().restarts == 2
    # the count of a thread without a question is of an earlier question, and reports have those of finished ones
    report, segment = rebuilt.results[0]
    restart = Incident(IncidentKind.PROGRAM_RESTARTED, "")
    finished = replace(rebuilt, results=((replace(report, incidents=(restart,)), segment),))
    threads[1].progress.finish()
    host._look(threads[1:], [finished])
    assert record.look().restarts == 1
    host._look([], [finished])
    assert record.look().restarts == 0, "the answer reports them"

    host.close()
    plain.close()


def test_a_restart_of_a_program_counts_until_a_report_has_it() -> None:
    record = ActivityRecord()
    host = SamplerHost(PLAN, record)
    with record.restarting():
        pass
    host.spaces(0)
    assert record.look().restarts == 1, "this answer has no report"
    answer_to(0, host)
    assert record.look().restarts == 0
    host.close()


class SlowlyBegun(SamplerThread):
    """Is asked for by two questions before it has begun."""

    samplers: ClassVar[list[int]] = []

    def __init__(self, plan: Any, sampler_id: int, check: Any) -> None:
        self.samplers.append(sampler_id)
        time.sleep(0.05)
        super().__init__(plan, sampler_id, check)


def test_questions_that_arrive_in_the_wrong_order_are_worked_on_in_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray may begin the later of two calls first; a question for spaces may be worked on meanwhile."""
    monkeypatch.setattr("dppo.hosts.host.SamplerThread", SlowlyBegun)
    SlowlyBegun.samplers.clear()
    host = ThreadedHost(PLAN, ActivityRecord())
    plain = SamplerHost(PLAN, ActivityRecord())
    with ThreadPoolExecutor() as pool:
        later = [pool.submit(answer_to, index, host) for index in (2, 1)]
        time.sleep(0.05)
        assert not any(answer.done() for answer in later)
        spaces = pool.submit(host.spaces, 1)
        answers = [answer_to(0, host), *(answer.result(20) for answer in reversed(later))]
    assert spaces.result(20) == plain.spaces(1)
    assert sorted(SlowlyBegun.samplers) == sorted({*SlowlyBegun.samplers})
    for index, answer in enumerate(answers):
        assert_same_bytes(answer.results, answer_to(index, plain).results, but=["env_s"])
    host.close()
    plain.close()


class SlowToMake(Threaded):
    """Takes 45 s on a clock of its own."""

    clock = 0.0

    def __init__(self) -> None:
        super().__init__()
        SlowToMake.clock += 45


def test_the_time_of_a_constructor_is_time_of_the_environment_and_not_of_the_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(perf_counter=lambda: SlowToMake.clock)
    monkeypatch.setattr(host_module, "time", clock)
    host = SamplerHost(sampler_plan(small(Path("run"), env_id=SlowToMake)), ActivityRecord())
    assert answer_to(0, host).timings.env_s >= 45
    assert answer_to(1, host).timings.env_s < 45
    host.close()


class SlowToClose(Threaded):
    """Counts those that exist."""

    exist = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).exist += 1

    def close(self) -> None:
        time.sleep(0.3)
        type(self).exist -= 1


@pytest.mark.parametrize("changes", [{}, THREADS], ids=["one thread", "threads"])
def test_a_sampler_that_has_moved_holds_no_licence_when_the_next_segments_are_sent(
    changes: dict[str, Any],
) -> None:
    """Its place is given to another one then."""
    settings: dict[str, Any] = {
        "env_id": SlowToClose,
        "num_samplers": 3,
        "licences": 3,
        "num_actors": 1,
        "num_steps": 4,
    }
    plan = sampler_plan(make_config(settings | changes))
    host = (ThreadedHost if changes else SamplerHost)(plan, ActivityRecord())
    spaces = host.spaces(0)
    weights = np.zeros(choose_network(plan.network, spaces).spec.num_parameters, np.float32)
    for index, hosted in enumerate([(0, 1), (0,)]):
        host.close_all_but(hosted)
        host.collect(
            [SegmentRequest(sampler, index) for sampler in hosted],
            PolicySnapshot(index, weights),
            spaces,
        )
        assert SlowToClose.exist == len(hosted)
    host.close()


class Halting(torch.nn.Module):
    """Lets the other threads of its process run in the middle of its forward pass, in which it makes a tensor."""

    def __init__(self, spaces: dppo.Spaces, head_size: int) -> None:
        super().__init__()
        self.outputs = torch.nn.Linear(2, head_size + 1)

    def forward(self, obs: torch.Tensor) -> Any:
        time.sleep(1e-3)
        third = torch.tensor(1 / 3)
        assert third.dtype == obs.dtype
        outputs = self.outputs(obs * third)
        return outputs[:, :-1], outputs[:, -1]


def test_samplers_that_act_side_by_side_do_not_change_the_default_dtype_of_each_other(
    tmp_path: Path,
) -> None:
    """The network is of float64, which is not torch's default."""
    changes = {"model": Halting, "dtype": "float64", "num_samplers": 3} | THREADED
    expected = dppo.train(small(tmp_path / "run", **changes))
    result = dppo.train(small(tmp_path / "threads", **changes | THREADS))
    assert result.weights_sha256 == expected.weights_sha256
