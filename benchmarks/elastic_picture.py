"""Draw a run whose cluster changes all the time: nodes join and leave, and an actor is killed every few seconds.

    python benchmarks/elastic_picture.py docs/elastic.png

Eight samplers of CartPole with a step time of 50 ms (they sleep) and episodes of at most 50 steps, `--num-actors auto`
and `--policy-lag 3`, on a cluster of Ray's `Cluster` utility: all of its nodes are on this machine, with two logical
CPUs each. The quiet run is the same in one process, without the sleep, which changes no result. Takes two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import dppo
from dppo.tools.pictures.style import COLOURS, DPI, GREY, INK, PALE

SAMPLERS, STEPS, STEP_S = 8, 16, 0.05
LONGEST = 50  # steps of an episode, and so the most that a lost sampler has to replay
WINDOW_S = 5.0  # over which the rate is averaged
NODE: dict[str, Any] = {
    "num_cpus": 2,
    "object_store_memory": 80 * 2**20,
    "include_dashboard": False,
}
KILL_EVERY_S = 10.0
# Ray starts actors on a lost node, in vain, until it notices the loss: by default after 15 s and more.
QUICK_CHECKS = {"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "3000"}
NOTICE_S = 12.0  # between the announcement that a node leaves and its end
# Seconds between the changes, so that actors have the time to start on a busy machine.
PLAN = ("join", "join", "join", "announce", "lose", "join", "join", "end")
PAUSE_S = 12.0


class Weather:
    """Changes the nodes of a cluster by the plan; kills actors and counts those that live, in threads."""

    def __init__(self) -> None:
        from ray._raylet import GcsClient  # type: ignore[attr-defined]
        from ray.cluster_utils import Cluster

        os.environ |= QUICK_CHECKS | {
            "RAY_health_check_initial_delay_ms": "0",
            "RAY_worker_niceness": "0",
        }
        self.cluster = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 0})
        self._client: Any = GcsClient(self.cluster.address)
        self._nodes = [self.cluster.add_node(**NODE)]
        self._over = threading.Event()
        self.events: list[tuple[float, str]] = []
        self.alive: list[tuple[float, int]] = []

    def _note(self, what: str) -> None:
        self.events.append((time.time(), what))

    def change(self) -> None:
        """Carry out the plan, in the main thread, as Ray demands."""
        for work in (self._kill, self._count):
            threading.Thread(target=work, daemon=True).start()
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]

        for step in PLAN:
            time.sleep(PAUSE_S)
            if step == "join":
                self._nodes.append(self.cluster.add_node(**NODE))
            elif step == "announce":
                self._note("announce")
                reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
                deadline = int(1000 * (time.time() + NOTICE_S))
                self._client.drain_node(
                    self._nodes[0].node_id, reason, "will be preempted", deadline
                )
                time.sleep(NOTICE_S)
            if step in ("announce", "lose"):
                with suppress(Exception):  # a drained node has ended already
                    self.cluster.remove_node(self._nodes.pop(0), allow_graceful=False)
            self._note({"announce": "left"}.get(step, step))
        self._over.set()

    def _kill(self) -> None:
        rng = random.Random(1)
        while not self._over.wait(KILL_EVERY_S):
            if actors := self._actors():
                with suppress(ProcessLookupError):
                    os.kill(rng.choice(actors), signal.SIGKILL)
                self._note("kill")

    def _count(self) -> None:
        while not self._over.wait(0.25):
            self.alive.append((time.time(), len(self._actors())))

    def _actors(self) -> list[int]:
        """Return the processes of actors, which are children of the raylets of this cluster."""
        raylets = {
            process.process.pid
            for node in [*self._nodes]
            for process in node.all_processes.get("raylet", ())
        }
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                if parent in raylets and (path / "cmdline").read_bytes().startswith(
                    b"ray::PPOActor"
                ):
                    found.append(int(path.name))
        return sorted(found)


class Watch(dppo.Observer):
    """Records the times of iterations, and prints a line after the first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_iteration(self, row: dict[str, float]) -> None:
        if not self.times:
            print("started", flush=True)
        self.times.append(time.time())


def config(folder: Path, iterations: int, step_s: float, **more: Any) -> dppo.Config:
    return dppo.Config(
        env_id="dppo/SlowCartPole-v0",
        env_kwargs={"step_s": step_s, "max_episode_steps": LONGEST},
        num_samplers=SAMPLERS,
        num_steps=STEPS,
        total_timesteps=SAMPLERS * STEPS * iterations,
        anneal_lr=False,
        policy_lag=3,
        progress="off",
        run_dir=folder,
        **more,
    )


def draw(path: Path, found: dict[str, Any], title: str) -> None:
    """Draw env steps per second (above) and living actors (below) over time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.6), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.5, 1))
    figure.subplots_adjust(left=0.075, right=0.985, top=0.86, bottom=0.105, hspace=0.12)
    times, ideal = np.array(found["times"]), SAMPLERS / STEP_S
    moments, counts = np.array(found["alive"]).T
    end = times[-1]
    steps = SAMPLERS * STEPS * np.arange(len(times))
    at = np.arange(0, end - WINDOW_S, 0.25)
    rates = (np.interp(at + WINDOW_S, times, steps) - np.interp(at, times, steps)) / WINDOW_S
    above.fill_between(moments, counts / STEP_S, step="post", color=PALE, alpha=0.55, linewidth=0)
    above.plot(at + WINDOW_S / 2, rates, color=COLOURS[1], linewidth=1.8)
    above.set(ylabel="env steps / s, mean of 5 s", ylim=(0, 1.35 * ideal), xlim=(0, end))
    above.text(
        end,
        4,
        "grey: what the living actors could do, without replays ",
        color=GREY,
        fontsize=8,
        ha="right",
    )
    below.step(moments, counts, where="post", color=INK, linewidth=1.4)
    below.set(
        ylabel="living actors",
        xlabel="seconds",
        ylim=(0, SAMPLERS + 1.9),
        yticks=range(0, SAMPLERS + 1, 2),
    )
    words = {
        "join": "+ node",
        "announce": "a node will\n leave",
        "left": "- node",
        "lose": "a node is lost",
    }
    for when, what in found["events"]:
        if what == "kill":
            below.plot([when], [SAMPLERS + 1], "x", color=COLOURS[3], markersize=5)
        elif what in words:
            for axis in (above, below):
                axis.axvline(when, color=PALE, linewidth=1, zorder=0)
            above.text(when, 1.33 * ideal, f" {words[what]}", color=GREY, fontsize=7.5, va="top")
    below.text(end, 0.4, "x  an actor is killed ", color=COLOURS[3], fontsize=8, ha="right")
    for axis in (above, below):
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(PALE)
        axis.tick_params(colors=GREY, length=0, labelsize=9)
        axis.xaxis.label.set_color(GREY)
        axis.yaxis.label.set_color(GREY)
    figure.suptitle(title, fontsize=10.5, x=0.075, ha="left", color=INK)
    figure.savefig(path)


def train(address: str) -> None:
    """Train on the cluster until SIGINT, then the same in this process; print a line of JSON."""
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        more = {"num_actors": "auto", "address": address, "max_actor_restarts": 100}
        stormy = dppo.train(
            config(Path(folder) / "stormy", 100_000, STEP_S, **more), observers=[watch]
        )
        quiet = dppo.train(config(Path(folder) / "quiet", stormy.iterations, 0.0))
    weights = [stormy.weights_sha256, quiet.weights_sha256]
    found = {
        "iterations": stormy.iterations,
        "incidents": stormy.incidents,
        "weights": weights,
        "times": watch.times,
    }
    print(json.dumps(found), flush=True)


def measure() -> dict[str, Any]:
    """Train in another process while the cluster changes; return times since the first iteration, and the results."""
    weather = Weather()
    command = [sys.executable, __file__, "--train", weather.cluster.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while process.stdout.readline() not in ("started\n", ""):
            pass
        weather.change()
        process.send_signal(signal.SIGINT)
        found: dict[str, Any] = json.loads(process.stdout.read().splitlines()[-1])
    weather.cluster.shutdown()
    began = found["times"][0]
    for name, moments in (("events", weather.events), ("alive", weather.alive)):
        found[name] = [(when - began, what) for when, what in moments]
    return found | {"times": [when - began for when in found["times"]]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "out", type=Path, nargs="?", default=Path("elastic.png"), help="the PNG file"
    )
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument(
        "--data", type=Path, help="JSON file of the measurement: read if it exists, else written"
    )
    wanted = parser.parse_args()
    if wanted.train:
        train(wanted.train)
        return
    data: Path | None = wanted.data
    found = json.loads(data.read_text()) if data and data.exists() else measure()
    if data:
        data.write_text(json.dumps(found))
    kills = sum(what == "kill" for _, what in found["events"])
    stormy, quiet = found["weights"]
    print(f"{found['iterations']} iterations, {kills} actors killed, {found['incidents']}")
    print(f"weights {stormy}, of the quiet run {quiet}")
    equal = "equal, bit for bit" if stormy == quiet else "NOT EQUAL"
    title = f"--num-actors auto, while nodes come and go and {kills} actors are killed\n"
    draw(
        wanted.out,
        found,
        f"{title}weights of this run, and of the same run in one process: {equal}",
    )


if __name__ == "__main__":
    main()
