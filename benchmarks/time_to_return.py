r"""Measure the time from the command to a good policy: 8 environments with slow steps, dppo and Stable-Baselines3.

    python benchmarks/time_to_return.py
    python benchmarks/time_to_return.py --seeds 3 --sides dppo "dppo --overlap" sb3
    python benchmarks/time_to_return.py --tasks Pendulum HalfCheetah Tanks --step-ms 50 --seeds 1 \
        --sides "dppo --algo sac" sb3-sac sb3
    python benchmarks/time_to_return.py --tasks Pendulum --step-ms 10 --seeds 1 --actors 1 \
        --sides "dppo --algo sac" "dppo --reuse 4 --num-steps 32"

Until the mean return of the last 20 training episodes is good, as samples_tasks.py says for each task. dppo has 8
actors, unless --actors says otherwise, and Stable-Baselines3 a SubprocVecEnv with 8 environments. Otherwise each has
its defaults, and sb3-sac makes as many gradient steps as env steps. A time is that of the whole command: imports, the
start of Ray or of the subprocesses, training, and the end. Sides take turns, seed by seed. Run it alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from measure import HERE, MeasurementError, ours_environment, run_json, sb3_python
from samples_tasks import TASKS, learned

SIDES: dict[str, dict[str, Any]] = {
    "dppo": {},
    "dppo --overlap": {"overlap": True},
    "dppo --reuse 4 --num-steps 32": {"reuse": 4, "num_steps": 32},
    "dppo --algo sac": {"algo": "sac"},
    "dppo --algo sac --overlap": {"algo": "sac", "overlap": True},
    "dppo --algo sac --overlap --num-steps 16": {"algo": "sac", "overlap": True, "num_steps": 16},
    "dppo --algo sac --gradient-steps 0.5": {"algo": "sac", "gradient_steps": 0.5},
    "dppo --algo sac --gradient-steps 0.5 --overlap": {
        "algo": "sac",
        "gradient_steps": 0.5,
        "overlap": True,
    },
    "sb3": {},
    "sb3-sac": {"train_freq": 1, "gradient_steps": -1},
}
DEFAULT_SIDES = ["dppo", "dppo --overlap", "dppo --reuse 4 --num-steps 32", "sb3"]
ENVS, MOST_STEPS = 8, 400_000


def main() -> None:
    """Print the seconds and the env steps of each run, and the medians as a table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=["CartPole"])
    parser.add_argument("--step-ms", type=float, default=10.0, help="of each env step")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--actors", type=int, default=ENVS, help="of dppo; it has 8 samplers")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=DEFAULT_SIDES)
    parser.add_argument(
        "--longest-s", type=float, default=1200.0, help="after which a run counts as not good"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        work = Work(**json.loads(options.one))
        train = sb3 if work.side.startswith("sb3") else ours
        print(json.dumps({"steps": train(work)}))
        return
    runs: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for seed in range(1, options.seeds + 1):
        for task in options.tasks:
            for side in options.sides:
                work = Work(side, task, options.step_ms / 1000, seed, options.actors)
                measured = measure(work, options.longest_s)
                runs.setdefault((task, side), []).append(measured)
    print("\n| | | seconds | env steps |\n|---|---|---|---|")
    for (task, side), of_seeds in runs.items():
        seconds, steps = (median(figures) for figures in zip(*of_seeds, strict=True))
        print(f"| {task} | `{side}` | {seconds:.0f} | {steps:,.0f} |")


@dataclass(frozen=True)
class Work:
    """A run of one side."""

    side: str
    task: str
    step_s: float
    seed: int
    actors: int


def measure(work: Work, longest_s: float) -> tuple[float, int]:
    """Run the command of one side; return its seconds and env steps, both infinite if it was not good in time."""
    python = sb3_python() if work.side.startswith("sb3") else sys.executable
    command = [python, str(HERE / "time_to_return.py"), "--one", json.dumps(asdict(work))]
    run = f"{work.task}, {work.side}, seed {work.seed}"
    try:
        result = run_json(command, ours_environment() | {"OMP_NUM_THREADS": "1"}, longest_s)
    except MeasurementError as error:
        print(f"{run}: {error}", flush=True)
        return float("inf"), float("inf")  # type: ignore[return-value]
    seconds, steps = result["wall_s"], result["steps"]
    print(f"{run}: {seconds:.0f} s, {steps:,} env steps", flush=True)
    return seconds, steps


def environment(task: str, step_s: float) -> tuple[str, dict[str, Any]]:
    """Return the id of a task's environment with slow steps, and its arguments."""
    env_id = TASKS[task].env_id
    if env_id.startswith("bench_envs:"):
        return env_id, {"step_s": step_s}
    return "bench_envs:make", {"env_id": env_id, "step_s": step_s}


def ours(work: Work) -> int:
    """Train with dppo; return the env steps that it took."""
    import dppo

    task = TASKS[work.task]

    class Stop(dppo.Observer):
        """Ends the run where it has learned."""

        returns: list[float] = []  # noqa: RUF012
        steps = 0

        def on_episode(self, episode: Any) -> None:
            if not episode.explored:  # else its return is not the policy's
                self.returns.append(episode.episode_return)

        def on_iteration(self, row: dict[str, float]) -> bool:
            self.steps = int(row["global_step"])
            return learned(self.returns, task.good)

    stop = Stop()
    env_id, arguments = environment(work.task, work.step_s)
    with tempfile.TemporaryDirectory() as folder:
        run: dict[str, Any] = {
            "run_dir": Path(folder) / "run",
            "progress": "off",
            "total_timesteps": MOST_STEPS,
            "num_actors": work.actors,
            "cpus_per_actor": 0.1,
        }
        given = task.settings | SIDES[work.side] | run
        config = dppo.Config(env_id=env_id, env_kwargs=arguments, seed=work.seed, **given)
        dppo.train(config, observers=[stop])
    return stop.steps


def sb3(work: Work) -> int:
    """Train with Stable-Baselines3; return the env steps that it took."""
    import bench_envs
    import torch
    from stable_baselines3 import PPO, SAC
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import SubprocVecEnv

    returns: list[float] = []
    good = TASKS[work.task].good

    def goes_on(names: dict[str, Any], _: Any) -> bool:
        new = [float(info["episode"]["r"]) for info in names["infos"] if "episode" in info]
        returns.extend(new)
        return not (new and learned(returns, good))

    torch.set_num_threads(1)
    env_id, arguments = environment(work.task, work.step_s)
    make = partial(getattr(bench_envs, env_id.partition(":")[2]), **arguments)
    envs = make_vec_env(make, n_envs=ENVS, seed=work.seed, vec_env_cls=SubprocVecEnv)
    algorithm = SAC if work.side == "sb3-sac" else PPO
    model = algorithm("MlpPolicy", envs, seed=work.seed, device="cpu", **SIDES[work.side])
    model.learn(MOST_STEPS, callback=goes_on)
    envs.close()
    return int(model.num_timesteps)


if __name__ == "__main__":
    main()
