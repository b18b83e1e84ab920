"""The rows of the benchmark: the work of each side, and the bars that dppo must meet."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench_envs import POSITIONS
from measure import HERE, REPO, MeasurementError, ours_environment, run_json, sb3_python
from startup import measure_startup

WARM_UP = 2  # iterations excluded from steady state
Figures = dict[str, float]


@dataclass(frozen=True)
class Work:
    """One training, the same for both sides: 2x64 tanh trunks (Atari: the Nature CNN), Adam 2.5e-4, advantages
    standardized.
    """

    env: dict[str, Any]
    num_steps: int
    update_epochs: int
    minibatch_size: int
    total_timesteps: int
    num_envs: int = 8
    workers: int = 0
    """Processes for the environments; 0: in process."""
    samplers: int | None = None
    """Of dppo: samplers that share the environments. None: one in process, one per environment with workers."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of dppo: further settings of the run, such as `overlap`."""
    lstm: int = 0
    """Of the peer: units of its LSTMs; 0: none. Those of dppo are in `settings`."""
    threads: int | None = None
    """Torch threads of the peer; None: torch's default."""
    budget_s: float = 60.0
    """Time after which the peer stops, because its rate is known by then."""
    seed: int = 1


def ours(work: Work, checkout: Path = REPO) -> dict[str, Any]:
    """Train with the dppo of `checkout`: this working tree, or an earlier commit to compare with."""
    command = [
        sys.executable,
        str(checkout / "benchmarks" / "ours_ppo.py"),
        json.dumps(asdict(work)),
    ]
    return _rates(run_json(command, ours_environment(checkout)))


def sb3(work: Work) -> dict[str, Any]:
    command = [sb3_python(), str(HERE / "sb3_ppo.py"), json.dumps(asdict(work))]
    return _rates(run_json(command, ours_environment()))


def _rates(result: dict[str, Any]) -> dict[str, Any]:
    """Add env steps per second, in steady state and from process start to exit."""
    times = result["iteration_s"]
    settled = times[WARM_UP:] or times
    per_iteration = result["steps"] / len(times)
    return result | {
        "steady_steps_per_s": per_iteration * len(settled) / sum(settled),
        "whole_steps_per_s": result["steps"] / result["wall_s"],
        "update_ms": 1000 * statistics.fmean(result["update_s"][WARM_UP:] or result["update_s"]),
    }


def take_turns(
    sides: dict[str, Callable[[], dict[str, Any]]], repeats: int, keys: list[str]
) -> dict[str, Any]:
    """Measure the sides in turns, so that drift of the machine affects all. A side that fails stops no other."""
    measured: dict[str, Any] = {name: {"runs": [], "errors": []} for name in sides}
    for turn in range(repeats):
        for name, measure in sides.items():
            if len(measured[name]["errors"]) > len(measured[name]["runs"]):
                continue  # it has only failed so far
            try:
                run = measure()
            except MeasurementError as error:
                measured[name]["errors"].append(str(error))
                print(f"  {name}: failed: {error}", file=sys.stderr)
                continue
            measured[name]["runs"].append(run)
            figures = ", ".join(f"{key} {run[key]:,.1f}" for key in keys if key in run)
            print(f"  {turn + 1} of {repeats}, {name}: {figures}", file=sys.stderr)
    for side in measured.values():
        known = [key for key in keys if side["runs"] and key in side["runs"][0]]
        side["median"] = {key: statistics.median(run[key] for run in side["runs"]) for key in known}
    return measured


def bar(
    what: str, measured: float | None, limit: float, unit: str = "", *, at_most: bool = False
) -> dict[str, Any]:
    passed = None if measured is None else bool(measured <= limit if at_most else measured >= limit)
    return {
        "what": what,
        "measured": measured,
        "bar": limit,
        "unit": unit,
        "at_most": at_most,
        "passed": passed,
    }


def _best(sides: dict[str, Any], names: list[str], key: str) -> float | None:
    return max(
        (sides[name]["median"][key] for name in names if key in sides[name]["median"]), default=None
    )


def _ratio(
    sides: dict[str, Any], above: list[str], below: list[str], key: str = "steady_steps_per_s"
) -> float | None:
    """Return the best figure of the sides `above` over the best of those `below`."""
    numerator, denominator = _best(sides, above, key), _best(sides, below, key)
    return numerator / denominator if numerator is not None and denominator else None


RATES = ["steady_steps_per_s", "whole_steps_per_s", "update_ms"]
OWN, OWN_1 = "dppo", "dppo, 1 actor"
BEFORE = "dppo, before"
SB3, SB3_1 = "SB3, torch's threads", "SB3, 1 thread"


def _against_sb3(work: Work, least: float, repeats: int, before: Path | None) -> dict[str, Any]:
    sides = {
        OWN: lambda: ours(work),
        SB3: lambda: sb3(work),
        SB3_1: lambda: sb3(replace(work, threads=1)),
    }
    if before is not None:
        sides[BEFORE] = lambda: ours(work, before)
    measured = take_turns(sides, repeats, RATES)
    bars = []
    for key, name in (
        ("steady_steps_per_s", "steady state"),
        ("whole_steps_per_s", "process start to exit"),
    ):
        ratio = _ratio(measured, [OWN], [SB3, SB3_1], key)
        bars.append(bar(f"times the better SB3, {name}", ratio, least, "x"))
    if before is not None:
        bars.append(
            bar(
                "times the commit before, steady state", _ratio(measured, [OWN], [BEFORE]), 1.0, "x"
            )
        )
    return {"work": asdict(work), "sides": measured, "bars": bars}


CARTPOLE = Work(
    {"env_id": "CartPole-v1"}, 128, update_epochs=4, minibatch_size=256, total_timesteps=499_712
)
HALFCHEETAH = Work(
    {"env_id": "HalfCheetah-v5"}, 256, update_epochs=10, minibatch_size=256, total_timesteps=102_400,
    settings={"target_kl": 0.0, "log_std_init": 0.0},  # else an update may end early, with less work than the peer's
)  # fmt: skip


def cartpole(repeats: int, before: Path | None = None) -> dict[str, Any]:
    """CartPole-v1, 8 envs in process, T=128, K=4, M=256."""
    return _against_sb3(CARTPOLE, 2.5, repeats, before)


def halfcheetah(repeats: int, before: Path | None = None) -> dict[str, Any]:
    """HalfCheetah-v5, 8 envs in process, T=256, K=10, M=256."""
    return _against_sb3(HALFCHEETAH, 1.8, repeats, before)


def overlap(repeats: int, before: Path | None = None) -> dict[str, Any]:
    """Overlapped collecting and learning on one and two actors; the work of `cartpole` and `halfcheetah`."""
    result: dict[str, Any] = {"work": asdict(CARTPOLE), "sides": {}, "bars": []}
    for name, work, least in (("CartPole", CARTPOLE, 4.5), ("HalfCheetah", HALFCHEETAH, 3.2)):
        layouts = {
            f"{name}: dppo, {actors} actor{'s' if actors > 1 else ''}": replace(
                work, workers=actors, samplers=actors, settings=work.settings | {"overlap": True}
            )
            for actors in (1, 2)
        }
        sides = {label: _training(layout) for label, layout in layouts.items()}
        peer = f"{name}: {SB3_1}"
        sides[peer] = _peer(replace(work, threads=1))
        measured = take_turns(sides, repeats, RATES)
        ratio = _ratio(measured, list(layouts), [peer])
        result["sides"] |= measured
        result["bars"].append(
            bar(f"{name}: times SB3 with one thread, steady state", ratio, least, "x")
        )
    return result


def layouts(repeats: int, before: Path | None = None) -> dict[str, Any]:
    """The work of `cartpole` as 1 sampler of 8 environments and as 8 samplers of 1, the usual layout."""
    one, eight = "1 sampler x 8", "8 samplers x 1"
    sides = {one: _training(CARTPOLE), eight: _training(replace(CARTPOLE, samplers=8))}
    if before is not None:
        sides |= {f"{eight}, before": _training(replace(CARTPOLE, samplers=8), before)}
    measured = take_turns(sides, repeats, RATES)
    ratio = _ratio(measured, [eight], [one])
    return {
        "work": asdict(CARTPOLE),
        "sides": measured,
        "bars": [bar("8 x 1 of 1 x 8, steady state", ratio, 0.9, "x")],
    }


def own_module(repeats: int, before: Path | None = None) -> dict[str, Any]:
    """A user's torch module equal to the default MLP, on the work of `cartpole`."""
    sides = {
        OWN: _training(CARTPOLE),
        "torch module": _training(replace(CARTPOLE, settings={"model": "bench_models:TwoTrunks"})),
    }
    measured = take_turns(sides, repeats, RATES)
    ratio = _ratio(measured, ["torch module"], [OWN])
    return {
        "work": asdict(CARTPOLE),
        "sides": measured,
        "bars": [bar("of the default MLP's rate", ratio, 0.6, "x")],
    }


def _training(work: Work, checkout: Path = REPO) -> Callable[[], dict[str, Any]]:
    return lambda: ours(work, checkout)


def _peer(work: Work) -> Callable[[], dict[str, Any]]:
    return lambda: sb3(work)


def slow(repeats: int, before: Path | None = None) -> dict[str, Any]:
    """CartPole with 10 ms a step, 8 samplers on 8 actors and on 1, T=64, K=4, M=64."""
    env = {"env_id": "CartPole-v1", "step_s": 0.01}
    eight = Work(env, 64, update_epochs=4, minibatch_size=64, total_timesteps=20 * 512, workers=8)
    one = replace(eight, workers=1, total_timesteps=6 * 512)
    sides = take_turns(
        {
            OWN: lambda: _with_cycle(ours(eight)),
            OWN_1: lambda: _with_cycle(ours(one)),
            SB3: lambda: sb3(eight),
            SB3_1: lambda: sb3(replace(eight, threads=1)),
        },
        repeats,
        [*RATES, "percent_of_bound"],
    )
    bars = [
        bar("of the bound w + M + x + u", _best(sides, [OWN], "percent_of_bound"), 97, "%"),
        bar("times 1 actor, steady state", _ratio(sides, [OWN], [OWN_1]), 7.6, "x"),
    ]
    return {"work": asdict(eight), "sides": sides, "bars": bars}


def overhead(repeats: int, before: Path | None = None) -> dict[str, Any]:
    """Ray's share of an iteration: 8 actors, T=20, K=4, M=64, segments of 20, 50 and 200 ms."""

    def work(segment_s: float) -> Work:
        env = {"env_id": "CartPole-v1", "step_s": segment_s / 20}
        return Work(
            env, 20, update_epochs=4, minibatch_size=64, total_timesteps=160 * 60, workers=8
        )

    def measure(segment_s: float) -> Callable[[], dict[str, Any]]:
        return lambda: _with_cycle(ours(work(segment_s)))

    segments = {f"dppo, {1000 * s:.0f} ms": s for s in (0.02, 0.05, 0.2)}
    keys = ["overhead_percent", "iteration_ms", "slowest_actor_ms", "update_ms"]
    sides = take_turns(
        {name: measure(segment_s) for name, segment_s in segments.items()}, repeats, keys
    )
    bars = [
        bar(
            f"Ray's share, {name.partition(', ')[2]}",
            _best(sides, [name], "overhead_percent"),
            5,
            "%",
            at_most=True,
        )
        for name in segments
    ]
    return {"work": asdict(work(0.02)), "sides": sides, "bars": bars}


def _with_cycle(result: dict[str, Any]) -> dict[str, Any]:
    cycle = result["cycle"]
    return result | {
        "percent_of_bound": 100 * cycle["efficiency"],
        "overhead_percent": 100 * cycle["overhead"],
        "iteration_ms": 1000 * cycle["iteration_s"],
        "slowest_actor_ms": 1000 * cycle["collect_s"],
    }


def startup(repeats: int, before: Path | None = None) -> dict[str, Any]:
    """From the command to the first env step with 8 actors, and the memory of an actor."""
    sides = take_turns(
        {OWN: lambda: measure_startup("ours"), "SB3": lambda: measure_startup("sb3")},
        repeats,
        ["first_step_s", "mb_per_worker", "mb_in_all", "workers"],
    )
    first = _best(sides, [OWN], "first_step_s")
    bars = [
        bar("from the command to the first env step", first, 5, "s", at_most=True),
        bar("memory of an actor", _best(sides, [OWN], "mb_per_worker"), 60, "MB", at_most=True),
    ]
    return {"sides": sides, "bars": bars}


def pong(repeats: int, before: Path | None = None) -> dict[str, Any]:
    """ALE/Pong-v5, 8 envs, T=128, K=4, M=256, Nature CNN; dppo on 2 actors and 2 threads of SGD, in bfloat16."""
    env = {"env_id": "ALE/Pong-v5", "atari": True}
    work = Work(env, 128, update_epochs=4, minibatch_size=256, total_timesteps=8 * 1024)
    own = replace(work, workers=2, samplers=2, settings={"learner_threads": 2})
    lower = replace(own, settings=own.settings | {"precision": "bfloat16"})
    workers = "SB3, 8 workers"
    peers = {
        SB3: _peer(work),
        SB3_1: _peer(replace(work, threads=1)),
        workers: _peer(replace(work, workers=8)),
    }
    sides = take_turns(
        {OWN: _training(lower), f"{OWN}, float32": _training(own), **peers}, repeats, RATES
    )
    ratio = _ratio(sides, [OWN], list(peers))
    return {
        "work": asdict(work),
        "sides": sides,
        "bars": [bar("times the better SB3, steady state", ratio, 2.5, "x")],
    }


def lstm(repeats: int, before: Path | None = None) -> dict[str, Any]:
    """CartPole without velocities, 8 envs, T=128, K=4, M=256, LSTM 64 for policy and value each; sb3-contrib."""
    work = Work(
        {"env_id": POSITIONS}, 128, update_epochs=4, minibatch_size=256, total_timesteps=49_152, lstm=64,
        settings={"memory": "lstm", "memory_size": 64},
    )  # fmt: skip
    peers = {"sb3-contrib": _peer(work), "sb3-contrib, 1 thread": _peer(replace(work, threads=1))}
    whole = replace(work, settings=work.settings | {"sequence_length": 128})
    sides = take_turns(
        {OWN: _training(work), f"{OWN}, sequences of 128": _training(whole), **peers},
        repeats,
        RATES,
    )
    ratio = _ratio(sides, [OWN], list(peers))
    what = "times the better sb3-contrib, steady state"
    return {"work": asdict(work), "sides": sides, "bars": [bar(what, ratio, 3.0, "x")]}


ROWS: dict[str, Callable[[int, Path | None], dict[str, Any]]] = {
    "cartpole": cartpole,
    "halfcheetah": halfcheetah,
    "layouts": layouts,
    "overlap": overlap,
    "own_module": own_module,
    "slow": slow,
    "startup": startup,
    "overhead": overhead,
    "pong": pong,
    "lstm": lstm,
}
