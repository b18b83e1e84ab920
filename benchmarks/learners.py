"""Measure the gain of several learners: one minibatch on one rank and on several, one CPU thread each.

    python benchmarks/learners.py --out DIR                        all models: about 20 minutes on two quiet cores
    python benchmarks/learners.py --out DIR --only 2x64 1M --repeats 1

Real learners on Ray train on random segments; no environment is needed. Writes learners.json and learners.png into
DIR, and prints a table and the result against each bar. results/learners.md explains the figures.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from learners_picture import draw
from measure import REPO, machine, ours_environment
from rich.console import Console
from rich.table import Table

OBS, ACTIONS = 376, 17  # of Humanoid
BAR = 1.8  # times one learner, with two, for 3x2048
BUSY = 0.5  # load average of the last minute
STORE_BYTES = 3 * 2**30  # weights and optimizer of the largest model, new and old, several times


@dataclass(frozen=True)
class Work:
    """A model, and the minibatch size of all learners together."""

    hidden_sizes: tuple[int, ...]
    minibatch: int = 2048


WORKS = {
    "2x64, 256 rows": Work((64, 64), 256),
    "2x64": Work((64, 64)),
    "1M": Work((416,) * 3),
    "10M": Work((1480,) * 3),
    "3x2048": Work((2048,) * 3),
    "50M": Work((3440,) * 3),
}


@dataclass
class Side:
    """The trainers with a given number of learners, and the times of their updates."""

    trainers: Any
    segments: list[Any]
    updates_s: list[float]
    summing_s: list[float]


def main() -> int:
    options = parse()
    os.environ.update(ours_environment())  # for Ray's processes
    sys.path.insert(0, str(REPO / "src"))
    from dppo.config import Actors, Learners
    from dppo.transports.ray.session import RaySession, demand_of

    report: dict[str, Any] = {
        "machine": machine(),
        "settings": settings_of(options),
        "models": {},
        "bars": [],
    }
    busy = report["machine"]["load_before"]
    if busy > BUSY:
        print(
            f"This machine is busy (load {busy:.1f}): figures will be too low and ratios imprecise.",
            file=sys.stderr,
        )
    session = RaySession(
        Actors(),
        demand_of(Actors(), Learners(num_learners=1 + options.learners)),
        store_bytes=STORE_BYTES,
        notify=lambda text: print(text, file=sys.stderr),
    )
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        for name in options.only:
            print(f"{name} ...", file=sys.stderr)
            report["models"][name] = measure(WORKS[name], options)
            report["bars"] = bars(report["models"], options.learners)
            # after each model, so that a crash loses none
            (options.out / "learners.json").write_text(json.dumps(report, indent=1) + "\n")
    finally:
        session.close()
    draw(report, options.out / "learners.png")
    show(report, options)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write")
    parser.add_argument(
        "--only", nargs="+", choices=list(WORKS), default=list(WORKS), metavar="MODEL"
    )
    parser.add_argument("--learners", type=int, default=2, help="compared with one")
    parser.add_argument("--steps", type=int, default=32, help="SGD steps of an update")
    parser.add_argument(
        "--repeats", type=int, default=3, help="updates of each side, in turns; the median counts"
    )
    options = parser.parse_args()
    if (
        not 2 <= options.learners <= 256
        or 256 % options.learners
        or options.repeats < 1
        or options.steps % 4
    ):
        parser.error(
            "--learners must be 2, 4, 8 ..., --repeats at least 1, and --steps a multiple of 4"
        )
    return options


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    names = ("learners", "steps", "repeats")
    return {name: getattr(options, name) for name in names} | {
        "threads_per_learner": 1,
        "obs": OBS,
        "actions": ACTIONS,
    }


# ---------------------------------------------------------------------------------------------- measuring


def measure(work: Work, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one model: updates on one learner and on all, in turns, and the time of each part of a minibatch."""
    from dppo.hosts.plans import trainer_plan
    from dppo.learners.speedup import describe_speedup

    sides = {learners: build(work, learners, options) for learners in (1, options.learners)}
    alone, shared = sides.values()
    speedup = shared.trainers.measure_speedup(work.minibatch)  # as a run measures when it starts
    spec = shared.trainers.spec
    plan = trainer_plan(config_of(work, options.learners, options))
    message = describe_speedup(plan, spec, speedup)
    for turn in range(-1, options.repeats):
        for learners, side in sides.items():
            update(side)
            if turn < 0:  # warm-up
                side.updates_s.clear()
                side.summing_s.clear()
                continue
            print(
                f"  {learners} learner(s): {1e3 * side.updates_s[-1] / options.steps:,.1f} ms a minibatch",
                file=sys.stderr,
            )
    for side in sides.values():
        side.trainers.close()
    one, more = (
        split_of(side, learning, options.steps)
        for side, learning in (
            (alone, speedup.alone_ms),
            (shared, speedup.shared_ms - speedup.summing_ms),
        )
    )
    return {
        "hidden_sizes": work.hidden_sizes,
        "minibatch": work.minibatch,
        "parameters": spec.num_parameters,
        "updates_s": {learners: side.updates_s for learners, side in sides.items()},
        "one_ms": one,
        "shared_ms": more,
        "speed_up": one["minibatch"] / more["minibatch"],
        "predicted": speedup.alone_ms / speedup.shared_ms,
        "summing_share": more["summing"] / more["minibatch"],
        "gflops_one": flops(spec, work.minibatch) / speedup.alone_ms / 1e6,
        "message": message,
    }


def update(side: Side) -> None:
    """Time one update, and the sums of the rank that waited least in them."""
    import ray

    from dppo.ppo.exchange.records import Experience, PolicySnapshot

    def summed() -> list[float]:
        return ray.get([rank.__ray_call__.remote(summing_s) for rank in side.trainers.ranks])

    before, began = summed(), time.perf_counter()
    side.trainers.update(
        Experience(side.segments, PolicySnapshot(0, side.trainers.weights()), 1.0, 0)
    )
    side.updates_s.append(time.perf_counter() - began)
    side.summing_s.append(
        min(after - earlier for after, earlier in zip(summed(), before, strict=True))
    )


def summing_s(rank: Any) -> float:
    """Return the seconds that this rank has spent in sums since the first call, waiting included."""
    group = rank._group
    if not hasattr(group, "seconds"):
        group.seconds = 0.0
        group.sum_, group.gather = (
            partial(timed, group, group.sum_),
            partial(timed, group, group.gather),
        )
    seconds: float = group.seconds
    return seconds


def timed(group: Any, method: Callable[[Any], Any], tensor: Any) -> Any:
    began = time.perf_counter()
    result = method(tensor)
    group.seconds += time.perf_counter() - began
    return result


def split_of(side: Side, learning_ms: float, steps: int) -> dict[str, float]:
    """Split the time of a mean minibatch. The rest is Adam, shuffling, waiting, and fetching weights."""
    minibatch = 1e3 * median(side.updates_s) / steps
    summing = 1e3 * median(side.summing_s) / steps
    learning = min(learning_ms, minibatch - summing)
    return {
        "minibatch": minibatch,
        "learning": learning,
        "summing": summing,
        "rest": minibatch - summing - learning,
    }


def config_of(work: Work, learners: int, options: argparse.Namespace) -> Any:
    import dppo
    from dppo.config.resolve import resolve

    rows = 4 * work.minibatch
    config = dppo.Config(
        env_id="made-up",
        num_actors=1,
        num_samplers=options.learners,
        num_steps=rows // options.learners,
        minibatch_size=work.minibatch,
        update_epochs=options.steps // 4,
        total_timesteps=rows,
        anneal_lr=False,
        hidden_sizes=work.hidden_sizes,
        num_learners=learners,
        progress="off",
    )
    resolved, _ = resolve(config, action_dims=ACTIONS)
    return resolved


def build(work: Work, learners: int, options: argparse.Namespace) -> Side:
    import ray

    from dppo.hosts.plans import trainer_plan
    from dppo.learners.ranks import RayTrainers
    from dppo.spaces.actions import BoxActions
    from dppo.spaces.spaces import Spaces

    limit = np.ones(ACTIONS, np.float32)
    spaces = Spaces(np.dtype((np.float32, (OBS,))), BoxActions(-limit, limit))
    config = config_of(work, learners, options)
    trainers = RayTrainers(
        trainer_plan(config), spaces, lambda text: print(f"  {text}", file=sys.stderr)
    )
    return Side(
        trainers,
        [ray.put(segment_of(config, sampler)) for sampler in range(config.num_samplers)],
        [],
        [],
    )


def segment_of(config: Any, sampler: int) -> Any:
    """Return a segment of normal random numbers, with log-probabilities that suit the initial policy."""
    from dppo.ppo.exchange.records import Segment

    rng, shape = np.random.default_rng(sampler), (config.num_steps, 1)
    actions = rng.normal(size=(*shape, ACTIONS)).astype(np.float32)
    values, next_values = rng.normal(size=(2, *shape)).astype(np.float32)
    return Segment(
        obs=rng.normal(size=(*shape, OBS)).astype(np.float32),
        actions=actions,
        logprobs=(-0.5 * np.square(actions) - 0.5 * math.log(2 * math.pi)).sum(axis=-1),
        values=values,
        next_values=next_values,
        rewards=rng.normal(size=shape),
        terminated=np.zeros(shape, bool),
        truncated=np.zeros(shape, bool),
        valid=np.ones(shape, bool),
    )


def flops(spec: Any, rows: int) -> float:
    """Return the FLOPs of a forward and backward pass: 6 per weight and row, or 4 in the first layers."""
    sizes = [dict(spec.shapes)[f"{trunk}.0.weight"] for trunk in ("policy", "value")]
    first = sum(units * inputs for units, inputs in sizes)
    return float(rows * (6 * spec.num_parameters - 2 * first))


# ---------------------------------------------------------------------------------------------- printing


def bars(models: dict[str, Any], learners: int) -> list[dict[str, Any]]:
    """Compare the figures measured so far with their bars."""
    held = []
    if "3x2048" in models and learners == 2:
        measured = models["3x2048"]["speed_up"]
        what = "times one learner, 3x2048"
        held.append({"what": what, "measured": measured, "bar": BAR, "passed": measured >= BAR})
    if "2x64, 256 rows" in models:
        small = models["2x64, 256 rows"]
        warned = "do not pay off" in small["message"]
        held.append(
            {
                "what": "2x64, 256 rows: slower than one learner",
                "measured": small["speed_up"],
                "bar": 1.0,
                "passed": small["speed_up"] < 1,
            }
        )
        held.append(
            {
                "what": "2x64, 256 rows: dppo warns",
                "measured": float(warned),
                "bar": 1.0,
                "passed": warned,
            }
        )
    return held


def show(report: dict[str, Any], options: argparse.Namespace) -> None:
    console = Console(width=max(120, Console().width))
    table = Table(
        "model", "parameters", "1 learner, ms", f"{options.learners} learners, ms", "of which the sum, ms", "speed-up",
        "predicted", "GFLOP/s of one",
    )  # fmt: skip
    for name, row in report["models"].items():
        table.add_row(
            name,
            f"{row['parameters']:,}",
            f"{row['one_ms']['minibatch']:,.1f}",
            f"{row['shared_ms']['minibatch']:,.1f}",
            f"{row['shared_ms']['summing']:,.1f} ({100 * row['summing_share']:.1f} %)",
            f"{row['speed_up']:.2f}",
            f"{row['predicted']:.2f}",
            f"{row['gflops_one']:,.0f}",
        )
    console.print(table)
    for name, row in report["models"].items():
        console.print(f"{name}: dppo reports: {row['message']}", highlight=False)
    for bar in report["bars"]:
        verdict = "pass" if bar["passed"] else "FAIL"
        console.print(
            f"{verdict}: {bar['what']}: {bar['measured']:.2f}, bar {bar['bar']:g}", highlight=False
        )
    console.print(f"Written: {options.out / 'learners.json'} and {options.out / 'learners.png'}")


if __name__ == "__main__":
    sys.exit(main())
