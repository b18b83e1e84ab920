"""The network between hosts is cut or stalls: runs wait, go on with the same result, or save and end in time.

Hosts are network namespaces of this machine (`hosts.py`), so these tests need root. All are slow.
"""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from commandline import Command
from hosts import PROGRAM, Host, Run, cluster, possible
from test_lost_ray import Listener

import dppo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
on_hosts = pytest.mark.skipif(not possible(), reason="needs root, iproute2 and util-linux")

SIZES = "dppo/SlowCartPole-v0 --preset none --num-samplers 2 --num-steps 64 --update-epochs 2"
ITERATIONS = 40
STEPS = 2 * 64 * ITERATIONS
LONG = 10**6  # steps of a run that does not end by itself
WHOLE_S = 120.0  # within which a run that is cut off must have ended
SAID = "has not answered for 1"  # 10 s and a moment


class Driver(Run):
    """A run of two actors on a host of a cluster."""

    def __init__(
        self,
        host: Host,
        head: Host,
        flags: str = "",
        steps: int = STEPS,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        words = f"{SIZES} --total-timesteps {steps} --num-actors 2 {flags}"
        super().__init__(host, head, words, program=program)

    @property
    def last_checkpoint(self) -> str:
        return max(path.name for path in self.folder.glob("checkpoints/iter_*.safetensors"))

    def goes_on_with_the_same_result(self, undisturbed: bytes) -> None:
        assert self.wait(180) == 0, self.out
        assert self.iterations == ITERATIONS
        assert self.weights == undisturbed

    def saves_and_ends(self, since: float, reason: str) -> None:
        """Assert that the run has ended in time, with a checkpoint of its last iteration, and says how to go on."""
        assert self.wait(WHOLE_S - (time.monotonic() - since)) == 1, self.out
        assert re.search(reason, self.out), self.out
        assert "Resume with: dppo train --resume" in self.out
        assert "Traceback" not in self.out
        assert self.last_checkpoint == f"iter_{self.iterations:06d}.safetensors"


def weights_in_process(folder: Path, flags: str = "") -> bytes:
    """Return the weights of the same run in one process."""
    folder.mkdir()
    words = f"train {SIZES} --total-timesteps {STEPS} --run-dir run {flags}".split()
    with Command(words, folder) as command:
        assert command.wait(400) == 0, command.err
    return dppo.load_policy(folder / "run").weights.tobytes()


def collecting(host: Host, head: Host, flags: str = "", steps: int = STEPS) -> Driver:
    """Return a run that has made three iterations."""
    driver = Driver(host, head, flags, steps)
    driver.goes_on(3)
    return driver


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return weights_in_process(tmp_path_factory.mktemp("undisturbed") / "of")


@pytest.mark.proves(
    "the driver, on another node than the head: collecting, 5 s",
    "the driver, on another node than the head: collecting, 25 s",
)
@on_hosts
@pytest.mark.parametrize("cut_s", [5, 25])
def test_a_driver_that_is_cut_off_for_a_while_goes_on(
    cut_s: int, undisturbed: bytes, tmp_path: Path
) -> None:
    with cluster(tmp_path, 2, 2) as (head, host):
        driver = collecting(host, head)
        host.cut()
        time.sleep(cut_s)
        host.heal()
        driver.goes_on_with_the_same_result(undisturbed)
        assert driver.out.count(SAID) == (cut_s > 10)
        assert driver.out.count("Ray answers again, after 2") == (cut_s > 10)


@pytest.mark.proves(
    "the driver, on another node than the head: collecting, updates and evaluations on other nodes, for good"
)
@on_hosts
def test_a_driver_that_is_cut_off_for_good_saves_and_ends(tmp_path: Path) -> None:
    with cluster(tmp_path, 2, 2) as (head, host):
        driver = collecting(host, head)
        host.cut()
        driver.saves_and_ends(
            time.monotonic(), rf"Ray's GCS at {head.address}:6379 is lost \(it has not answered for"
        )
        assert driver.out.count(SAID) == 1


@on_hosts
def test_ctrl_c_ends_a_run_that_is_cut_off(tmp_path: Path) -> None:
    with cluster(tmp_path, 2, 2) as (head, host):
        driver = collecting(host, head)
        host.cut()
        driver.wait_until(lambda: SAID in driver.out, 30)
        driver.send(signal.SIGINT)
        assert driver.wait(40) == 130, driver.out
        assert driver.last_checkpoint == f"iter_{driver.iterations:06d}.safetensors"


MOMENTS = {
    "its actors start": "",
    "updates take most of the time": "--reuse 20",
    "evaluations take most of the time": "--eval-every 128 --eval-episodes 4",
    "a checkpoint in each iteration": "--checkpoint-interval-s 0",
}


@pytest.mark.proves(
    "the driver, on another node than the head: its actors start, 5 s",
    "the driver, on another node than the head: its actors start, 25 s",
    "the driver, on another node than the head: a checkpoint in each iteration, 5 s",
    "the driver, on another node than the head: an evaluation, 25 s",
    "the driver, on another node than the head: updates and evaluations on actors, 60 s",
)
@on_hosts
@pytest.mark.parametrize("cut_s", [5, 25, 60])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_driver_that_is_cut_off_at_a_moment_goes_on_or_ends(
    moment: str, cut_s: int, tmp_path: Path
) -> None:
    """After a minute, Ray's own raylet may have given up, and the run ends; otherwise the result is the same."""
    with cluster(tmp_path, 2, 2) as (head, host):
        driver = Driver(host, head, MOMENTS[moment])
        if moment == "its actors start":
            driver.wait_until(lambda: "Run folder: " in driver.out)
        else:
            driver.goes_on(3)
        began = time.monotonic()
        host.cut()
        time.sleep(cut_s)
        host.heal()
        code = driver.wait(300)
        took_s = time.monotonic() - began
        print(f"{moment}, {cut_s} s: exit code {code} after {took_s:.0f} s\n{driver.out}")
        assert code == 0 or cut_s > 25
        if code == 0:
            assert driver.weights == weights_in_process(tmp_path / "whole", MOMENTS[moment])
        elif moment == "its actors start":
            assert re.search(
                r"is lost|has not answered for|no Ray cluster answers|could not connect", driver.out
            )
            assert "Traceback" not in driver.out
        else:
            driver.saves_and_ends(began, "is lost")
        assert code == 0 or took_s < WHOLE_S


@pytest.mark.proves("the driver, on the head: collecting, for good")
@on_hosts
def test_a_driver_on_the_head_that_is_cut_off_for_good_goes_on_alone(
    undisturbed: bytes, tmp_path: Path
) -> None:
    """The head has room for the actor that was lost."""
    with cluster(tmp_path, 1, 1) as (head, host):
        driver = collecting(head, head, "--cpus-per-actor 0.5")
        began = time.monotonic()
        head.cut()
        code = driver.wait(300)
        print(f"exit code {code} after {time.monotonic() - began:.0f} s\n{driver.out}")
        driver.goes_on_with_the_same_result(undisturbed)
        assert host.processes("raylet")


@pytest.mark.proves(
    "the driver, on another node than the head: its last iteration is done, for good"
)
@on_hosts
def test_a_driver_that_is_cut_off_at_its_end_has_ended_well(
    undisturbed: bytes, tmp_path: Path
) -> None:
    with cluster(tmp_path, 2, 2) as (head, host):
        driver = Driver(host, head)
        driver.wait_until(lambda: driver.iterations == ITERATIONS)
        host.cut()
        assert driver.wait(60) == 0, driver.out
        assert driver.weights == undisturbed


@pytest.mark.proves("all hosts but the driver's, which is the head: collecting, 25 s")
@on_hosts
def test_a_run_whose_actors_are_all_cut_off_for_a_while_goes_on(
    undisturbed: bytes, tmp_path: Path
) -> None:
    """The head has no room for actors."""
    with cluster(tmp_path, 0, 1, 1) as (head, *others):
        driver = collecting(head, head)
        for host in others:
            host.cut()
        time.sleep(25)
        for host in others:
            host.heal()
        driver.goes_on_with_the_same_result(undisturbed)


WITH_LEARNERS = "--num-learners 2 --reuse 20"  # updates take most of the time


@pytest.mark.proves(
    "the driver, on another node than the head: two learners on other nodes update, 25 s",
    "the host of one of two learners: updating, 25 s",
)
@on_hosts
def test_learners_and_their_driver_are_cut_off_for_a_while_and_go_on(tmp_path: Path) -> None:
    """Head and driver have no room for learners, so each of the other two hosts has one."""
    with cluster(tmp_path, 0, 0, 2, 2) as (head, host, *others):
        whole = Driver(host, head, WITH_LEARNERS)
        assert whole.wait(400) == 0, whole.out
        weights = whole.weights
        shutil.rmtree(host.folder / "run")
        driver = Driver(host, head, WITH_LEARNERS)
        for cut_off in (host, others[0]):
            driver.goes_on(3)
            cut_off.cut()
            time.sleep(25)
            cut_off.heal()
        assert driver.wait(300) == 0, driver.out
        print(driver.out)
        assert driver.weights == weights
        assert driver.out.count(SAID) == 1


@pytest.mark.proves("the host of an actor: collecting, 45 s")
@on_hosts
def test_an_actor_whose_host_is_cut_off_for_a_while_is_replaced(
    undisturbed: bytes, tmp_path: Path
) -> None:
    """The head hosts one actor and the driver, the other host the other actor."""
    with cluster(tmp_path, 1, 1) as (head, host):
        driver = collecting(head, head)
        host.cut()
        time.sleep(45)
        host.heal()
        driver.goes_on_with_the_same_result(undisturbed)
        assert "(--backup-requests) would let an idle actor" in driver.out


@pytest.mark.proves(
    "the driver, on another node than the head: it connects, 25 s, for good",
    "the driver, on another node than the head: its actors start, for good",
)
@on_hosts
@pytest.mark.parametrize("number", [3, 7])
def test_a_driver_that_is_cut_off_while_it_starts_is_refused(number: int, tmp_path: Path) -> None:
    """So many seconds after it was started: while it connects, while its actors start."""
    with cluster(tmp_path, 2, 2) as (head, host):
        driver = Driver(host, head)
        time.sleep(number)
        host.cut()
        # a guard kills it if Ray has frozen it, see `test_a_driver_that_ray_freezes_while_it_connects_is_ended`
        assert driver.wait(WHOLE_S) in (1, -signal.SIGKILL), driver.out
        assert re.search(
            r"has not answered for|no Ray cluster answers|could not connect", driver.out
        ), driver.out
        assert "Traceback" not in driver.out


FREEZES = """
import pathlib, sys, time, ray._raylet
connect = ray._raylet.CoreWorker
def cut_off_and_connect(*args):
    pathlib.Path("connects").touch()
    while not pathlib.Path("is_cut_off").exists():
        time.sleep(0.1)
    return connect(*args)
ray._raylet.CoreWorker = cut_off_and_connect
from dppo.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@on_hosts
def test_a_driver_that_ray_freezes_while_it_connects_is_ended(tmp_path: Path) -> None:
    """Ray's C++ code holds Python's lock there, and would do so for four minutes."""
    with cluster(tmp_path, 2, 2) as (head, host):
        driver = Driver(host, head, program=("-c", FREEZES))
        driver.wait_until((host.folder / "connects").exists)
        host.cut()
        (host.folder / "is_cut_off").touch()
        assert driver.wait(WHOLE_S) == -signal.SIGKILL, driver.out
        assert "note: Ray (connecting to the cluster) has not answered for 10 s" in driver.out
        assert "which Ray had frozen meanwhile, is killed" in driver.out


@pytest.mark.proves(
    "both hosts send 1 Mbit a second, and lose the rest: actors start, for good",
    "both hosts send 8 kbit a second, and lose the rest: actors start, for good",
)
@on_hosts
@pytest.mark.parametrize("rate", ["1mbit", "8kbit"])
def test_a_run_whose_actors_start_through_a_slow_cable_ends_or_says_why_not(
    rate: str, tmp_path: Path
) -> None:
    with cluster(tmp_path, 2, 2) as (head, host):
        driver = Driver(host, head, steps=2 * 64 * 4)
        driver.wait_until(lambda: "Starting 2 Ray actors" in driver.out)
        began = time.monotonic()
        head.slow(rate)
        host.slow(rate)
        code = driver.wait(WHOLE_S)
        took_s = time.monotonic() - began
        print(f"{rate}: exit code {code} after {took_s:.0f} s\n{driver.out}")
        assert "Traceback" not in driver.out
        assert code == 0 or re.search(r"is lost \(|has not answered for", driver.out)
        assert code == 0 or rate == "8kbit"
        if code == 1:
            assert driver.out.count(SAID) == 1


@pytest.mark.proves(
    "Ray's GCS (SIGSTOP): collecting, 25 s", "Ray's GCS (SIGSTOP): collecting, for good"
)
@on_hosts
@pytest.mark.parametrize("stop_s", [25, None])
def test_a_gcs_that_is_stopped_is_waited_for_as_a_network_is(
    stop_s: int | None, undisturbed: bytes, tmp_path: Path
) -> None:
    with cluster(tmp_path, 2, 2) as (head, host):
        driver = collecting(host, head, steps=LONG if stop_s is None else STEPS)
        began = time.monotonic()
        head.send(signal.SIGSTOP, "gcs_server")
        if stop_s is None:
            driver.saves_and_ends(
                began, rf"Ray's GCS at {head.address}:6379 is lost \(it has not answered for"
            )
            return
        time.sleep(stop_s)
        head.send(signal.SIGCONT, "gcs_server")
        driver.goes_on_with_the_same_result(undisturbed)


@pytest.mark.proves(
    "the raylet of the driver's host (SIGSTOP): collecting, 25 s",
    "the raylet of the driver's host (SIGSTOP): collecting, for good",
)
@on_hosts
@pytest.mark.parametrize("stop_s", [25, None])
def test_a_raylet_that_is_stopped_is_waited_for_or_ends_the_run_in_time(
    stop_s: int | None, undisturbed: bytes, tmp_path: Path
) -> None:
    with cluster(tmp_path, 2, 2) as (head, host):
        driver = collecting(host, head, steps=LONG if stop_s is None else STEPS)
        began = time.monotonic()
        host.send(signal.SIGSTOP, "raylet/raylet")
        if stop_s is None:
            driver.saves_and_ends(began, "the raylet at .* is lost")
            return
        time.sleep(stop_s)
        host.send(signal.SIGCONT, "raylet/raylet")
        driver.goes_on_with_the_same_result(undisturbed)


@pytest.mark.proves("the driver (SIGSTOP), without and with two learners: any time, 2 minutes")
@on_hosts
def test_a_driver_that_was_stopped_for_two_minutes_goes_on_at_once(
    undisturbed: bytes, tmp_path: Path
) -> None:
    """A laptop whose lid was closed, a virtual machine that was paused."""
    with cluster(tmp_path, 4) as (head,):
        driver = collecting(head, head, "--num-learners 2")
        driver.send(signal.SIGSTOP)
        time.sleep(120)
        reached = driver.iterations + 2
        driver.send(signal.SIGCONT)
        driver.wait_until(lambda: driver.iterations >= reached, 20)
        assert driver.wait(180) == 0, driver.out
        assert "is lost" not in driver.out
        assert "restarted" not in driver.out


@pytest.mark.proves("a GCS that accepts connections, and never answers: at the start, for good")
def test_a_gcs_that_accepts_connections_and_never_answers_is_refused(tmp_path: Path) -> None:
    """It greets as a server of gRPC does, and then is silent: Ray itself would wait without an end."""
    with Listener() as server:
        words = f"train {SIZES} --num-actors 2 --address {server.address} --run-dir run".split()
        with Command(words, tmp_path) as command:
            began = time.monotonic()
            assert command.wait(WHOLE_S) == 1, command.err
            assert time.monotonic() - began < WHOLE_S
            assert re.search(r"has not answered for|could not connect", command.err), command.err
            assert "Traceback" not in command.err
