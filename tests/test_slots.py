"""Slots: cores that no two environments share, ranks that end together, and the messages when they cannot start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import psutil
import pytest
from builders import make_config
from processes import alive, wait_until
from remedies import executes

import dppo
from dppo.config.parts import Actors, Learners, Sampling
from dppo.envs.instance import Instance
from dppo.envs.make import make_env
from dppo.errors import ConfigError
from dppo.hosts.keeper import MARKER
from dppo.machine import usable_cores
from dppo.run.factory import check_cores
from dppo.slots import cores, guard, launchers
from dppo.slots.cores import Lease, NoCores, cores_here
from dppo.slots.guard import MAX_LOG_BYTES
from dppo.slots.layout import Layout, Node
from dppo.slots.program import LOG, SolverError
from dppo.slots.slots import Slots
from dppo.tools.doctor.findings import findings
from dppo.tools.doctor.process import ProcessWatch
from dppo.transports.ray.capacity import check_here
from dppo.transports.ray.session import demand_of

CORES = usable_cores()
# a launcher that starts its ranks as Open MPI's does
MPIRUN = """#!/bin/sh
if [ "$1" = --version ]; then echo "mpirun (Open MPI) 4.1.4"; exit; fi
while [ "$1" != "--bind-to" ]; do shift; done
shift 2
rank=0
while [ $rank -lt {ranks} ]; do OMPI_COMM_WORLD_RANK=$rank "$@" & rank=$((rank + 1)); done
wait
"""


@pytest.fixture(autouse=True)
def locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use locks of cores that no other test uses."""
    monkeypatch.setattr(cores, "LOCK", f"dppo-{tmp_path}-{os.getpid()}")


@pytest.fixture
def mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put an mpirun for three ranks into PATH; return its file."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "mpirun"
    program.write_text(MPIRUN.format(ranks=3))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return program


@executes("slots/cores.py: Use fewer actors or samplers here, lower `ranks_per_env`")
def test_no_two_leases_share_a_core_and_a_closed_one_gives_its_cores_back() -> None:
    first = Lease(1)
    second = Lease(CORES - 1)
    assert sorted(first.cores + second.cores) == cores_here()
    with pytest.raises(NoCores, match="1 core are needed, and 0 are free"):
        Lease(1, wait_s=0)
    first.close()
    first.close()
    third = Lease(1, wait_s=0)
    assert len(third.cores) == 1
    second.close()
    third.close()


def test_the_cores_of_a_killed_process_come_back() -> None:
    lease = Lease(CORES)
    child = os.fork()
    if not child:
        signal.pause()
    lease.close()
    with pytest.raises(NoCores):
        Lease(1, wait_s=0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    Lease(CORES, wait_s=10).close()


def test_a_rank_is_bound_to_its_cores_and_knows_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    slots = Slots(Layout(1, CORES)) if CORES > 1 else Slots()
    code = "import os; print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"
    program = slots.launch([sys.executable, "-c", code], tmp_path.name)
    program.terminate(wait_s=30)
    slots.close()
    assert program.last_lines() == [f"{cores_here()} {CORES}"]
    assert program.poll() == 0
    assert program.exit_codes == {0: 0}


def test_the_output_of_a_program_is_limited_while_it_runs(tmp_path: Path) -> None:
    log = tmp_path / "solver.log"
    marks = "echo early; head -c 40000000 /dev/zero; echo; echo late; touch printed; sleep 100"
    program = Slots().launch(["sh", "-c", marks], tmp_path)
    wait_until((tmp_path / "printed").exists)
    wait_until(lambda: log.stat().st_size <= MAX_LOG_BYTES and "late" in program.last_lines())
    program.terminate()


@pytest.mark.parametrize("program", ["echo diverged; exit 3", "echo diverged; exec sleep 100"])
def test_the_log_of_an_actor_has_the_end_of_a_program_that_fails_or_hangs(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(MARKER, "1")
    printed = []

    def has_printed() -> bool:
        printed.append(capfd.readouterr().err)
        return "the end of its output:\ndiverged" in "".join(printed)

    actor = os.fork()
    if not actor:
        try:
            Slots().launch(["sh", "-c", program], tmp_path)
            signal.pause()
        finally:
            os._exit(1)  # no twin of pytest goes on
    log = tmp_path / LOG
    wait_until(lambda: log.exists() and log.read_text() == "diverged\n")
    log.unlink()  # with the folder of the environment
    if "exit" in program:
        wait_until(has_printed)
    os.kill(actor, signal.SIGKILL)
    os.waitpid(actor, 0)
    wait_until(has_printed)


@pytest.mark.usefixtures("mpirun")
@pytest.mark.parametrize(
    ("death", "words"), [("exit 7", "exit status 7"), ("kill -9 $$", "by SIGKILL")]
)
def test_a_rank_that_fails_is_named_and_ends_the_others(
    tmp_path: Path, death: str, words: str
) -> None:
    # rank 1 waits until all have begun
    waits = "until [ -e begun-0 ] && [ -e begun-2 ]; do sleep 0.1; done"
    fails = f"if [ $OMPI_COMM_WORLD_RANK = 1 ]; then {waits}; {death}; fi"
    script = f"echo diverged >&2; touch begun-$OMPI_COMM_WORLD_RANK; {fails}; exec sleep 100"
    slots = Slots(Layout(3, 0))
    began = time.monotonic()
    program = slots.launch(["sh", "-c", script], tmp_path)
    while program.poll() is None:
        time.sleep(0.05)
    end = program.end(wait_s=10)
    assert time.monotonic() - began < 20
    assert f"(rank 1 on {os.uname().nodename} {words}). Its last lines:\n  diverged" in end
    assert sorted(program.ranks) == [0, 1, 2]
    assert not any(alive(rank.pid) for rank in program.ranks.values())


def test_the_end_of_a_rank_ends_no_other_whose_number_begins_like_it(
    tmp_path: Path, mpirun: Path
) -> None:
    mpirun.write_text(MPIRUN.format(ranks=11))
    gates = [tmp_path / name for name in ("first", "others")]
    for gate in gates:
        os.mkfifo(gate)
    script = "gate=others; [ $OMPI_COMM_WORLD_RANK != 1 ] || gate=first; read line <$gate; exit 0"
    program = Slots(Layout(11, 0)).launch(["sh", "-c", script], tmp_path)
    wait_until(lambda: len(program.exit_codes) == 11)
    guard = psutil.Process(program.ranks[1].pid).parent()
    assert guard is not None

    gates[0].write_text("\n")
    wait_until(lambda: not alive(guard.pid))
    writer = os.open(gates[1], os.O_RDWR)  # which does not wait for readers
    os.write(writer, b"\n" * 10)
    program.terminate(wait_s=30)
    os.close(writer)
    assert set(program.exit_codes.values()) == {0}


@pytest.mark.usefixtures("mpirun")
@executes("tools/doctor/findings.py: Start them by `slots.launch`, without an mpirun of your own")
def test_the_doctor_counts_all_ranks_and_sees_if_they_share_cores(tmp_path: Path) -> None:
    watch = ProcessWatch()
    before = watch.usage()
    program = Slots(Layout(3, 0)).launch(["sleep", "100"], tmp_path)
    wait_until(lambda: len(program.exit_codes) == 3)
    wait_until(lambda: watch.usage().children.count("sleep") == 3)
    assert watch.usage().mb > before.mb

    shared = watch.shared_cores()
    assert shared == cores_here()
    [(_, text), *_] = findings({"shared_cores": shared}, with_ranks(2))
    assert "several may run on core" in text

    program.terminate()

    slots = Slots(Layout(1, CORES))
    bound = slots.launch(["sleep", "100"], tmp_path)
    wait_until(lambda: not slots.layout.cores or len(bound.exit_codes) == 1)
    assert watch.shared_cores() == []

    bound.terminate()
    slots.close()


DRIVER = """
import os, sys, time
from dppo.slots.layout import Layout
from dppo.slots.slots import Slots
program = Slots(Layout(3, 0)).launch(["sh", "-c", "trap '' TERM; sleep 100 & wait; sleep 100"], sys.argv[1])
while len(program.exit_codes) < 3:
    time.sleep(0.05)
pids = [rank.pid for rank in program.ranks.values()]
child = os.fork()
if child:
    print(child, *pids, flush=True)
time.sleep(100)
"""


@pytest.mark.usefixtures("mpirun")
def test_no_rank_outlives_a_killed_process_even_one_that_is_stopped(tmp_path: Path) -> None:
    """A child that the process has forked holds its pipes open."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None

    child, *pids = [int(pid) for pid in driver.stdout.readline().split()]
    os.kill(pids[0], signal.SIGSTOP)
    driver.kill()
    driver.wait()
    try:
        wait_until(lambda: not any(map(alive, pids)), 10)
    finally:
        os.kill(child, signal.SIGKILL)
        driver.stdout.close()


def test_a_keeper_that_was_stopped_ends_the_program_and_itself(tmp_path: Path) -> None:
    program = Slots(Layout()).launch(["sleep", "1000"], tmp_path)
    keeper = psutil.Process(program.pid).parent()
    assert keeper is not None
    keeper.suspend()
    program.terminate()
    assert program.poll() == -signal.SIGTERM
    wait_until(lambda: not keeper.is_running())


@pytest.mark.usefixtures("mpirun")
def test_a_keeper_that_was_stopped_goes_on_when_a_rank_ends(tmp_path: Path) -> None:
    program = Slots(Layout(3, 0)).launch(["sleep", "1000"], tmp_path)
    wait_until(lambda: len(program.exit_codes) == 3)
    keeper = psutil.Process(program.pid).parent()
    assert keeper is not None
    keeper.suspend()
    os.kill(program.ranks[1].pid, signal.SIGKILL)
    wait_until(lambda: not keeper.is_running())
    assert program.poll() == -signal.SIGKILL
    program.terminate()


@pytest.mark.usefixtures("mpirun")
@executes("slots/launchers.py: neither mpirun nor srun is in PATH. Install Open MPI or MPICH")
def test_what_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Slots(Layout(3, 0))
    program = slots.launch(["/no/such/solver"], tmp_path)
    end = program.end(wait_s=20)
    assert "exit status 127" in end
    assert "/no/such/solver: cannot be started (No such file or directory)" in end
    with pytest.raises(SolverError, match="is empty"):
        slots.launch([], tmp_path)
    assert slots.command(["solver"])[0].endswith("bin/mpirun")

    monkeypatch.setenv("PATH", str(tmp_path))
    assert Slots(Layout(1)).command(["solver"]) == ["solver"]
    with pytest.raises(SolverError, match=r"ranks_per_env=3: neither mpirun nor srun is in PATH"):
        slots.launch(["solver"], tmp_path)

    broken = tmp_path / "mpirun"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(SolverError, match="mpirun --version failed"):
        slots.launch(["solver"], tmp_path)


def test_a_rank_that_failed_before_its_launcher_ended_is_not_one_that_was_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A keeper that waits for a core may find the launcher ended, and its ranks' reports unread."""
    reports: list[dict[str, Any]] = []
    monkeypatch.setattr(guard, "_report", reports.append)
    monkeypatch.setattr(guard, "_keep_limited", lambda log: None)
    launch = {"words": ["true"], "folder": str(tmp_path), "variables": {**os.environ}}
    keeper = guard.Keeper(launch | {"address": "127.0.0.1", "log": str(tmp_path / "log")})
    with guard.connected(*keeper._server.getsockname()) as connection:
        report = {"secret": keeper._secret, "rank": 0}
        guard.send(connection, report)
        guard.send(connection, report | {"code": 127})
    os.waitid(os.P_PID, keeper._launcher.pid, os.WEXITED | os.WNOWAIT)
    with keeper._server, os.fdopen(keeper._output):
        keeper.run(os.getpid())
    failed = {"rank": 0, "code": 127, "was_ended": False}
    assert reports[1:] == [{"rank": 0}, failed, {"ended": 0}]


SPREAD = Layout(4, 1, (Node("a", "10.0.0.1", "n1"), Node("b", "10.0.0.2", "n2")))


@pytest.fixture
def mpich(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let launchers find an MPICH."""
    monkeypatch.setattr("shutil.which", lambda program, path: f"/bin/{program}")
    monkeypatch.setattr(launchers, "_family", lambda program: "hydra")


def test_the_words_of_each_launcher(mpich: None, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Layout(4)
    words = launchers.launcher_words(here, {})
    assert words[1:3] == ["-launcher", "fork"]

    hosts = "10.0.0.1:2,10.0.0.2:2"
    assert hosts in launchers.launcher_words(SPREAD, {})

    monkeypatch.setattr(launchers, "_family", lambda program: "open-mpi")
    words = launchers.launcher_words(here, {})
    assert words[:3] == ["/bin/mpirun", "-n", "4"]

    words = launchers.launcher_words(SPREAD, {})
    assert words[3:5] == ["--host", hosts]
    agent = words[words.index("plm_rsh_agent") + 1]
    assert agent.endswith("slots/guard.py agent")

    variables = {"PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_MCA_btl": "self"}
    assert launchers.without(variables, launchers.OF_LAUNCHERS) == {"OMPI_MCA_btl": "self"}


@executes("slots/launchers.py: Install Python and dppo at a path without these, or use")
@pytest.mark.parametrize("folder", ["my python", "python:3"])
def test_an_agent_whose_path_a_launcher_would_divide_is_refused(
    folder: str, mpich: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launchers.launcher_words(SPREAD, {})
    monkeypatch.setattr(sys, "executable", f"/opt/{folder}/bin/python")
    words = rf"nodes_per_env=2: mpirun starts /opt/{folder}/bin/python on"
    with pytest.raises(SolverError, match=words):
        launchers.launcher_words(SPREAD, {})
    launchers.launcher_words(Layout(4), {})
    launchers.launcher_words(SPREAD, {"SLURM_JOB_ID": "7", "SLURM_MPI_TYPE": "pmix"})


def test_srun_gets_the_shape_of_its_step_and_an_interface_of_mpi_where_nobody_chose_one(
    mpich: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "_is_none_by_default", lambda: True)
    variables = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n3"}
    words = launchers.launcher_words(Layout(4), variables)
    assert words[:2] == ["srun", "--overlap"]
    assert words[-2:] == ["--nodelist=n3", "--mpi=pmi2"]

    variables["SLURM_MPI_TYPE"] = "pmix"
    assert launchers.launcher_words(Layout(4), variables)[-1] == "--nodelist=n3"
    sharing = launchers.launcher_words(Layout(4, cores_per_rank=0), variables)
    assert sharing[-2:] == ["--nodelist=n3", "--overcommit"]

    variables["SLURM_NTASKS_PER_NODE"] = "1"
    assert "--nodelist=n1,n1,n2,n2" in launchers.launcher_words(SPREAD, variables)
    expected = {"SLURM_JOB_ID": "7", "SLURM_MPI_TYPE": "pmix"}
    assert launchers.without(variables, launchers.OF_SLURM) == expected


class Asking(gym.Env):
    """An environment that keeps its slots."""

    observation_space = gym.spaces.Box(-1, 1)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, slots: Slots) -> None:
        self.slots = slots


def test_a_factory_gets_slots_until_its_environment_is_closed() -> None:
    """A copy of the environment shares them."""
    layout = Layout(1, max(2, CORES)) if CORES > 1 else Layout()
    env = make_env(Asking, {}, Instance(3, 1, layout=layout))
    slots = env.unwrapped.slots
    assert slots.sampler_id == 3
    assert slots.env_index == 1
    assert slots.cores == [cores_here()]
    assert slots.hosts == [os.uname().nodename]
    assert deepcopy(env.unwrapped).slots is slots
    env.close()
    Lease(CORES, wait_s=0).close()


@executes("envs/make.py: Give its factory a parameter `slots`, and start the program with")
def test_ranks_for_an_environment_that_does_not_ask_for_slots_are_refused() -> None:
    ranks = Instance(layout=Layout(4, 0))
    with pytest.raises(ConfigError, match=r"ranks_per_env=4 .* has no effect"):
        make_env("CartPole-v1", {}, ranks)
    make_env("CartPole-v1", {}, Instance()).close()
    make_env(Asking, {}, ranks).close()


def with_ranks(ranks: int, **changes: Any) -> dppo.Config:
    """Settings of four samplers whose environments ask for slots."""
    return make_config(
        {"env_id": "dppo.remote:make", "num_samplers": 4, "ranks_per_env": ranks} | changes
    )


@executes("slots/layout.py: Lower `ranks_per_env`, `cores_per_rank`, or `num_samplers`")
def test_too_few_cores_in_this_process_are_refused_with_the_number_that_fits() -> None:
    config = with_ranks(10 * CORES)
    check_cores(with_ranks(1))
    check_cores(with_ranks(10 * CORES, cores_per_rank=0))
    with pytest.raises(
        ConfigError, match=rf"need {40 * CORES} cores, and .* enough for 0\. Lower `ranks_per_env`"
    ):
        check_cores(config)


def test_an_actor_reserves_the_cores_of_all_its_environments() -> None:
    sampling = Sampling(num_samplers=5, envs_per_sampler=2)
    placed = Actors(num_actors=2, ranks_per_env=4).placed(sampling)
    assert placed.samplers_per_actor == 3
    assert demand_of(placed, Learners()).actor == {"CPU": 24}
    shared = Actors(num_actors=2, ranks_per_env=4, cores_per_rank=0)
    assert shared.placed(sampling) is shared
    demand = demand_of(replace(placed, cpus_per_actor=CORES + 1), Learners())
    with pytest.raises(
        ConfigError, match=rf"2 actors need {CORES + 1} cores each, .* enough for 0"
    ):
        check_here(demand, 0)


def test_with_auto_there_is_an_actor_for_each_sampler() -> None:
    placed = Actors(num_actors="auto", ranks_per_env=2).placed(Sampling(num_samplers=8))
    assert placed.fewest_for(8) == 8
    assert placed.cpus_per_actor == 2
