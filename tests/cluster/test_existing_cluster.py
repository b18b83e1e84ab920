"""A running Ray cluster: runs use it, are rejected if it is too small, survive lost nodes, and leave it as it was."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from builders import make_config
from commandline import MARKER, QUICK_CHECKS, Command, fresh_environment, marked, run
from processes import wait_until

import dppo
from dppo.records.metrics.reading import read_metrics

SIZES = {
    "num_samplers": 4,
    "num_steps": 50,
    "total_timesteps": 4 * 50 * 4,
    "update_epochs": 1,
    "norm_obs": True,
}


class UsersCluster:
    """serve_cluster.py in its own process."""

    def __init__(self, folder: Path) -> None:
        token = folder / "token"
        token.write_text("0123456789abcdef" * 4)
        self.access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        self._marker = os.urandom(8).hex()
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("serve_cluster.py"))],
            cwd=folder,
            env=fresh_environment(**QUICK_CHECKS, **self.access) | {MARKER: self._marker},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        self.address: str = self._answer(120)["address"]

    def ask(self, command: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n".encode())
        self._process.stdin.flush()
        return self._answer(60)

    def run(self, words: list[str], folder: Path) -> str:
        """Run a command on the cluster, and return what it prints."""
        command = [*words, "--address", self.address]
        code, out, err = run(command, folder, timeout_s=120, **self.access)
        assert code == 0, err
        return out

    def _answer(self, timeout_s: float) -> Any:
        """Return the next answer; Ray prints other lines in between."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.startswith(b"answer "):
                assert selector.select(max(0.0, deadline - time.monotonic())), (
                    "the cluster does not answer"
                )
                line = self._process.stdout.readline()
                assert line, f"the cluster has ended: {Path(self._log.name).read_text()[-2000:]}"
        return json.loads(line.removeprefix(b"answer "))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        for pid in marked(self._marker):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._log.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UsersCluster]:
    cluster = UsersCluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the weights of the same run in this process."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    dppo.train(
        make_config({"env_id": "CartPole-v1", "run_dir": run_dir, "progress": "off", **SIZES})
    )
    return dppo.load_policy(run_dir).weights.tobytes()


def words(env_id: str = "CartPole-v1", flags: str = "", num_actors: int = 4) -> list[str]:
    sizes = " ".join(f"--{name} {value}" for name, value in SIZES.items() if value is not True)
    shared = f"--norm-obs --preset none --num-actors {num_actors} --run-dir run"
    return f"train {env_id} {sizes} {shared} {flags}".split()


def weights(folder: Path) -> bytes:
    return dppo.load_policy(folder / "run").weights.tobytes()


@pytest.mark.slow
def test_two_nodes_give_the_weights_of_one_process(
    cluster: UsersCluster, undisturbed: bytes, tmp_path: Path
) -> None:
    counted = cluster.ask("ask")
    out = cluster.run(words(), tmp_path)
    assert "4 Ray actors host 1 sampler each" in out
    assert weights(tmp_path) == undisturbed
    # It is still running, with its other actors, and all CPUs are free again.
    assert cluster.ask("ask") == counted + 1
    wait_until(lambda: cluster.ask("free") == 4.0)


@pytest.mark.slow
def test_a_node_with_another_type_of_cpu_is_named_and_with_portable_numerics_equal(
    cluster: UsersCluster, undisturbed: bytes, tmp_path: Path
) -> None:
    cluster.ask("add prescott")
    try:
        wait_until(lambda: cluster.ask("free") == 6.0)
        command = words(flags="--cpus-per-actor 1.5", num_actors=3)
        out = cluster.run(command, tmp_path)
        assert weights(tmp_path) == undisturbed, out
        assert "other_cpu" not in out
        out = cluster.run([*command, *["--run-dir", "native", "--numerics", "native"]], tmp_path)
        assert "computes different last bits in NumPy's matrix products" in out
        assert out.count("computes different last bits") == 1
        assert "depends on which process ran on which type of CPU" in out
    finally:
        cluster.ask("remove")
        wait_until(lambda: cluster.ask("free") == 4.0)  # Ray notices it after seconds


TWO_LICENCES = """--actor-resources [{"licence_a":1},{"licence_b":1}]"""


@pytest.mark.slow
def test_too_many_actors_are_refused(cluster: UsersCluster, tmp_path: Path) -> None:
    """With $RAY_ADDRESS, as in a job on the cluster; `test_capacity.py` has further reasons."""
    access = {"RAY_ADDRESS": cluster.address, **cluster.access}
    code, _, err = run(words(flags=TWO_LICENCES), tmp_path, timeout_s=60, **access)
    assert code == 2
    assert "1 CPU + 1 licence_a or 1 CPU + 1 licence_b each" in err
    assert "4 CPU + 1 licence_a + 2 licence_b and hold 3" in err
    assert len(err.splitlines()) <= 2
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "alive", "note"),
    [
        (
            "--num-actors auto --actors-per-node 1",
            2,
            "room for 2 actors of 1 CPU (at most 1 on a node) on 2",
        ),
        (f"--num-actors 3 {TWO_LICENCES}", 3, ""),
    ],
)
def test_actors_are_placed_where_they_may_be(
    flags: str, alive: int, note: str, cluster: UsersCluster, undisturbed: bytes, tmp_path: Path
) -> None:
    """The nodes have four CPUs, so Ray would start four actors, and none with a second licence_a."""
    wait_until(lambda: cluster.ask("free") == 4.0)
    slow = """--env-kwargs {"longest_s":0.04}"""  # training lasts until all have started
    assert note in cluster.run(words("worlds.slow:Delayed", f"{slow} {flags}"), tmp_path)
    rows = [row["actors/alive"] for row in read_metrics(tmp_path / "run")]
    assert max(rows) == rows[-1] == alive
    assert weights(tmp_path) == undisturbed


UPLOADED = """
import pathlib
from gymnasium.envs.classic_control import CartPoleEnv

class Env(CartPoleEnv):
    def __init__(self, found):
        super().__init__()
        here = pathlib.Path(__file__).parent
        assert pathlib.Path("mesh.txt").resolve().parent == here.resolve()
        pathlib.Path(found, here.name).touch()

class Same(__import__("gymnasium").Wrapper):
    pass
"""


@pytest.mark.slow
def test_files_are_sent_to_the_nodes_also_when_a_run_is_resumed(
    cluster: UsersCluster, tmp_path: Path
) -> None:
    (tmp_path / "mysim.py").write_text(UPLOADED)
    (tmp_path / "mesh.txt").touch()
    (tmp_path / "found").mkdir()
    flags = f"""--env-kwargs {{"found":"{tmp_path}/found"}} --wrappers mysim:Same --upload ."""
    out = cluster.run(words("mysim:Env", flags, num_actors=2), tmp_path)
    # with those of its output
    assert re.search(r"note: upload: 4 files, .*; the largest: .*mysim\.py", out)

    [sent] = (tmp_path / "found").iterdir()
    assert sent.name.startswith("_ray_pkg_")
    (tmp_path / "mesh.txt").write_text("another")
    resume = "train --resume run --trust --total-timesteps 1000"
    code, out, err = run(resume.split(), tmp_path, **cluster.access)
    assert code == 0, err
    assert len(list((tmp_path / "found").iterdir())) == 2


@pytest.mark.slow
def test_a_rejected_run_disconnects_from_the_cluster(cluster: UsersCluster, tmp_path: Path) -> None:
    """A Python program may continue after the error."""
    script = (
        "import dppo, ray\n"
        "try:\n"
        "    dppo.train(dppo.Config(env_id='CartPole-v1', num_actors=99, num_samplers=99, progress='off'))\n"
        "except ValueError as error:\n"
        "    print('num_actors=99' in str(error), ray.is_initialized())\n"
    )
    env = {"RAY_ADDRESS": cluster.address, **cluster.access}
    with Command([], tmp_path, program=("-c", script), **env) as command:
        assert command.wait(60) == 0
        assert command.out.split() == ["True", "False"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("there", "facts"),
    [
        (True, ["RAY_AUTH_MODE=token", "RAY_AUTH_TOKEN_PATH"]),
        (False, ["dppo train: address=127.0.0.1:9: ", "answers there", "omit address"]),
    ],
)
def test_a_missing_cluster_and_one_whose_token_is_missing_are_reported(
    there: bool, facts: list[str], cluster: UsersCluster, tmp_path: Path
) -> None:
    address = cluster.address if there else "127.0.0.1:9"
    env = {"RAY_AUTH_MODE": "disabled", "HOME": str(tmp_path)}
    code, _, err = run(words(flags=f"--address {address}"), tmp_path, timeout_s=120, **env)
    assert code == 1
    for fact in (f"address={address}", *facts):
        assert fact in err, err
    assert "Traceback" not in err


@pytest.mark.slow  # the fast set loses actors and segments: tests/test_promise.py
@pytest.mark.parametrize("how", ["remove", "shut down"])
def test_a_lost_node_changes_no_weights(
    how: str, cluster: UsersCluster, undisturbed: bytes, tmp_path: Path
) -> None:
    """Two actors are in the middle of a segment, on two nodes; the remaining node takes over."""
    (tmp_path / "slow").touch()
    kwargs = f"""{{"folder":"{tmp_path}","slow_after":70}}"""  # in the second iteration
    more = f"--address {cluster.address} --progress plain --checkpoint-interval-s 0"
    command_words = words(
        "worlds.slow:hesitant_cartpole", f"--env-kwargs {kwargs} {more}", num_actors=2
    )
    with Command(command_words, tmp_path, **cluster.access) as command:
        command.wait_until(lambda: len(list(tmp_path.glob("waiting-*"))) == 2, 120)
        assert cluster.ask(how) == 1
        (tmp_path / "slow").unlink()
        assert command.wait(120) == 0
        assert "x actor_lost" in command.out  # twice where Ray misses the heartbeats of a busy node
    assert weights(tmp_path) == undisturbed
    assert cluster.ask("add") == 2
