"""Measure collecting while learning with uneven step times, and compare with the bound of a model.

    python benchmarks/pipeline.py                                         in turns, --overlap, --policy-lag 3
    python benchmarks/pipeline.py --before ../dppo-before --repeats 3     and --overlap of another checkout
    python benchmarks/pipeline.py --slow                                  one of the actors is five times slower
    python benchmarks/pipeline.py --samplers 64 --lags 1                  eight samplers in the threads of each actor

Eight actors with a sampler each; steps of CartPole that sleep for a log-normal time with a mean of 10 ms; T=64, K=4 and
M=64. The rates are env steps per second after a warm-up of eight iterations, medians over the repeats.

The bound is what the measured times of steps and updates would allow if nothing else took time. A sampler begins
segment k when it has made segment k - 1 and policy max(0, k - lag) exists; update k begins when update k - 1 is done
and all segments k are there. With a barrier, segment k also waits for the slowest segment k - 1.

With --slow there are 16 samplers and a lag of one, and the bound is what the seven other actors make if they never
wait. The barrier is what they make if two of them keep three samplers each, and all wait for these.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure import HERE, REPO, ours_environment, run_json

ACTORS, STEPS = 8, 64
SLOW = 5.0  # times the step time of the others
WARM_UP = 8  # iterations that do not count: an actor that starts late lets the others get ahead


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument(
        "--samplers", type=int, default=ACTORS, help="more than 8 work in threads; not with --slow"
    )
    parser.add_argument(
        "--sigma", type=float, default=1.0, help="of the log-normal times; 0: constant"
    )
    parser.add_argument(
        "--spikes", action="store_true", help="1 %% of steps take 200 ms, the others 8"
    )
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 3])
    parser.add_argument(
        "--slow", action="store_true", help="one slow actor; with --before, for both checkouts"
    )
    parser.add_argument("--once", type=json.loads, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.once:
        print(json.dumps(once(**wanted.once)))
        return
    lags = [1] if wanted.slow else wanted.lags
    sides: list[tuple[str, Path, int]] = [(f"lag {lag}", REPO, lag) for lag in lags]
    if wanted.before:
        sides.append(("before, overlap", wanted.before, 1))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name, _, _ in sides}
    for _ in range(wanted.repeats):
        for name, checkout, lag in sides:
            work = {
                "lag": lag,
                "iterations": wanted.iterations,
                "sigma": wanted.sigma,
                "slow": wanted.slow,
            }
            work["spikes"] = wanted.spikes
            work["samplers"] = 2 * ACTORS if wanted.slow else wanted.samplers
            command = [sys.executable, __file__, "--once", json.dumps(work)]
            env = ours_environment(checkout)
            # the environment of this file
            env["PYTHONPATH"] = os.pathsep.join([str(HERE), env["PYTHONPATH"]])
            found[name].append(run_json(command, env))
            print(f"{name}: {found[name][-1]}", flush=True)
    print("side, env steps/s, bound, with a barrier, share of the bound, step in ms")
    for name, runs in found.items():
        rate, limit, barrier, step = (
            statistics.median(run[key] for run in runs)
            for key in ("rate", "bound", "barrier", "step_ms")
        )
        print(f"{name}, {rate:.0f}, {limit:.0f}, {barrier:.0f}, {rate / limit:.1%}, {step:.1f}")


def once(
    lag: int, iterations: int, sigma: float, slow: bool, spikes: bool, samplers: int
) -> dict[str, Any]:
    """Train once in this process; return its rate, and the bounds for the step times that were measured."""
    import dppo
    from dppo.run.learner import PPOLearner

    segments: list[list[float]] = []
    run = PPOLearner.run

    def watched(self: PPOLearner, *arguments: Any) -> Iterator[Any]:
        for iteration in run(self, *arguments):
            segments.append([report.env_s for report in iteration.collected.reports])
            yield iteration

    PPOLearner.run = watched  # type: ignore[assignment, method-assign]
    threads = samplers > ACTORS and not slow
    batch = samplers * STEPS
    with tempfile.TemporaryDirectory() as folder:
        lagging = {0: {}, 1: {"overlap": True}}.get(lag, {"policy_lag": lag})
        config = dppo.Config(
            env_id="bench_envs:uneven_cartpole",
            env_kwargs={"sigma": sigma, "spikes": spikes}
            | ({"slow": SLOW, "mark": str(Path(folder) / "slow")} if slow else {}),
            num_actors=ACTORS,
            num_samplers=samplers,
            num_steps=STEPS,
            update_epochs=10,
            env_threads=threads,
            minibatch_size=8 * samplers if threads else 64,
            total_timesteps=batch * iterations,
            cpus_per_actor=0.1,
            progress="off",
            run_dir=Path(folder) / "run",
            **lagging,
        )
        result = dppo.train(config)
        rows = result.metrics
    updates = [row["perf/update_s"] for row in rows]
    window_s = rows[-1]["time/wall_s"] - rows[WARM_UP - 1]["time/wall_s"]
    made = batch * (iterations - WARM_UP)
    if slow:
        step_s = fast_s(segments, rows) / STEPS
        bound, barrier = (ACTORS - 1) / step_s, 2 * ACTORS / 3 / step_s
    else:
        step_s = statistics.fmean(one for row in segments for one in row) / STEPS
        bound, barrier = (
            made / modelled(segments, updates, lag, barrier=both) for both in (False, True)
        )
    return {
        "rate": made / window_s,
        "bound": bound,
        "barrier": barrier,
        "step_ms": 1e3 * step_s,
        "replayed": sum(row["replay/steps"] for row in rows),
        "notes": list(getattr(result, "notes", ())),
        "update_ms": 1e3 * statistics.median(updates),
        "weights": result.weights_sha256[:16],
    }


def fast_s(segments: list[list[float]], rows: list[dict[str, float]]) -> float:
    """Return the mean time of a segment on the actors that are not slow, without replays."""
    times = [one for row in segments for one in row]
    fast = [one for one in times if one < SLOW / 2 * statistics.median(times)]
    return (sum(fast) - sum(row["replay/s"] for row in rows)) / len(fast)


def modelled(
    segments: list[list[float]], updates: list[float], lag: int, *, barrier: bool = False
) -> float:
    """Return the seconds from the end of the warm-up to that of the last iteration, with these times and no others."""
    policies = [0.0]  # times at which they exist
    free = [0.0] * len(segments[0])
    for index, times in enumerate(segments):
        begins = max(free) if barrier else 0.0
        ready = policies[max(0, index - lag)]
        free = [
            max(one, ready, begins) + segment_s for one, segment_s in zip(free, times, strict=True)
        ]
        policies.append(max(policies[-1], *free) + updates[index])
    return policies[-1] - policies[WARM_UP]


if __name__ == "__main__":
    main()
