"""Measure the time from the command to a good policy: 8 environments with 10 ms a step, dppo and Stable-Baselines3.

    python benchmarks/time_to_return.py
    python benchmarks/time_to_return.py --seeds 3 --sides dppo "dppo --overlap" sb3

CartPole, until the mean return of the last 20 training episodes is 475. dppo has 8 actors, and Stable-Baselines3 a
SubprocVecEnv with 8 environments; otherwise each has its defaults. A time is that of the whole command: imports, the
start of Ray or of the subprocesses, training, and the end. Sides take turns, seed by seed. Run it alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from measure import HERE, ours_environment, run_json, sb3_python
from samples_tasks import TASKS, learned

SIDES: dict[str, dict[str, Any]] = {
    "dppo": {},
    "dppo --overlap": {"overlap": True},
    "dppo --reuse 4 --num-steps 32": {"reuse": 4, "num_steps": 32},
    "sb3": {},
}
ENVS, STEP_S, MOST_STEPS, LONGEST_S = 8, 0.01, 400_000, 1200.0
GOOD = TASKS["CartPole"].good


def main() -> None:
    """Print the seconds and the env steps of each run, and the medians as a table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        side, seed = json.loads(options.one)
        print(json.dumps({"steps": sb3(seed) if side == "sb3" else ours(seed, SIDES[side])}))
        return
    found: dict[str, list[tuple[float, int]]] = {side: [] for side in options.sides}
    for seed in range(1, options.seeds + 1):
        for side in options.sides:
            python = sb3_python() if side == "sb3" else sys.executable
            command = [python, str(HERE / "time_to_return.py"), "--one", json.dumps([side, seed])]
            result = run_json(command, ours_environment() | {"OMP_NUM_THREADS": "1"}, LONGEST_S)
            found[side].append((result["wall_s"], result["steps"]))
            print(
                f"{side}, seed {seed}: {result['wall_s']:.0f} s, {result['steps']:,} env steps",
                flush=True,
            )
    print("\n| | seconds | env steps |\n|---|---|---|")
    for side, runs in found.items():
        seconds, steps = (median(one) for one in zip(*runs, strict=True))
        print(f"| `{side}` | {seconds:.0f} | {steps:,.0f} |")


def ours(seed: int, settings: dict[str, Any]) -> int:
    """Train with dppo; return the env steps that it took."""
    import dppo

    class Stop(dppo.Observer):
        """Ends the run where it has learned."""

        returns: list[float] = []  # noqa: RUF012
        steps = 0

        def on_episode(self, episode: Any) -> None:
            self.returns.append(episode.episode_return)

        def on_iteration(self, row: dict[str, float]) -> bool:
            self.steps = int(row["global_step"])
            return learned(self.returns, GOOD)

    stop = Stop()
    with tempfile.TemporaryDirectory() as folder:
        env: dict[str, Any] = {
            "env_id": "bench_envs:make",
            "env_kwargs": {"env_id": "CartPole-v1", "step_s": STEP_S},
        }
        run: dict[str, Any] = {
            "run_dir": Path(folder) / "run",
            "progress": "off",
            "total_timesteps": MOST_STEPS,
        }
        dppo.train(
            dppo.Config(num_actors=ENVS, cpus_per_actor=0.1, seed=seed, **env, **run, **settings),
            observers=[stop],
        )
    return stop.steps


def sb3(seed: int) -> int:
    """Train with Stable-Baselines3; return the env steps that it took."""
    import bench_envs
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import SubprocVecEnv

    returns: list[float] = []

    def goes_on(found: dict[str, Any], _: Any) -> bool:
        new = [float(info["episode"]["r"]) for info in found["infos"] if "episode" in info]
        returns.extend(new)
        return not (new and learned(returns, GOOD))

    torch.set_num_threads(1)
    one = partial(bench_envs.make, env_id="CartPole-v1", step_s=STEP_S)
    envs = make_vec_env(one, n_envs=ENVS, seed=seed, vec_env_cls=SubprocVecEnv)
    model = PPO("MlpPolicy", envs, seed=seed, device="cpu")
    model.learn(MOST_STEPS, callback=goes_on)
    envs.close()
    return int(model.num_timesteps)


if __name__ == "__main__":
    main()
