"""Measure learning: mean returns over seeds, compared with published figures.

    python benchmarks/learning.py                       what is missing, two runs at a time: many hours
    python benchmarks/learning.py --only cartpole-preset hopper-defaults --seeds 3
    python benchmarks/learning.py --only hopper-defaults --show    what is stored, as a table

A run is stored in learning.jsonl as it ends, so that the command can be interrupted and repeated; a row whose settings
have changed since is run again. minigrid-doorkey needs `pip install minigrid`, highway-pixels `pip install
highway-env`, the rows of MuJoCo's tasks `pip install mujoco`. Without them they are skipped.
results/learning.md shows the results. They depend only on the seeds: on the same type of CPU they are equal to the bit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import trivial
from bench_envs import POSITIONS
from measure import HERE, MeasurementError, machine, ours_environment, run_all, run_json

from dppo.config import Config
from dppo.config.presets import presets
from dppo.errors import counted
from dppo.policies.evaluation import evaluate
from dppo.records.observer import Observer
from dppo.run.runner import train

LONGEST_S = 4 * 3600.0
POINTS = 50  # of a curve in the JSON, at most
EPISODES = 100


@dataclass(frozen=True)
class Row:
    """One learning problem, and the bar for having learned it."""

    settings: dict[str, Any]
    seeds: int
    bar: float
    figure: str
    """Mean return of the last 100 training episodes (`train`), or of 100 with the likeliest action (`eval`)."""
    enough: float
    """Share of the seeds that must reach the bar; 0: their mean must reach it."""
    published: str
    needs: str | None = None
    """A package that dppo does not install."""
    trivial: bool = False
    """Whether to play random actions, and each action alone, in the episodes of `eval`, too."""
    preset: str | None = "fast"
    """Of what the settings leave open; None: the defaults."""
    ends_after: int | None = None
    """Env steps after which a longer run is stopped, so that its learning rate has not fallen to zero."""


CLEANRL = {  # cleanrl/ppo.py: 4 environments x 128 steps, 4 minibatches; clip_vloss as there
    "env_id": "CartPole-v1",
    "total_timesteps": 500_000,
    "num_samplers": 4,
    "num_steps": 128,
    "minibatch_size": 128,
    "clip_vloss": True,
}
SQUARES = {  # bench_envs.py: the best policy has a return of 0.93
    "env_id": "bench_envs:Squares",
    "total_timesteps": 100_000,
    "num_samplers": 1,
    "envs_per_sampler": 8,
    "num_steps": 128,
    "minibatch_size": 256,
    "learning_rate": 0.001,
}
POSITIONS_ONLY = {  # bench_envs.py: CartPole without velocities
    "env_id": POSITIONS,
    "memory": "lstm",
    "total_timesteps": 300_000,
    "num_steps": 128,
    "minibatch_size": 256,
    "learning_rate": 0.002,
    "gae_lambda": 0.9,
    "gamma": 0.98,
    "ent_coef": 0.0,
    "norm_obs": True,
    "norm_reward": True,
    "norm_adv": False,  # as in the preset of CartPole-v1; with it, more seeds fall late in the run
}
DOORS = {  # bench_envs.py: the best policy has a return of 5; a random one with the mask 0.97; without it 0.05 at most
    "env_id": "bench_envs:Doors",
    "total_timesteps": 40_000,
    "num_samplers": 4,
    "envs_per_sampler": 2,
    "num_steps": 64,
    "minibatch_size": 128,
    "learning_rate": 3e-3,
    "gamma": 0.9,
}
REACH = {  # bench_envs.py: standing still has a return of -41
    "env_id": "bench_envs:Reach",
    "total_timesteps": 200_000,
    "num_samplers": 8,
    "num_steps": 256,
    "minibatch_size": 256,
    "update_epochs": 10,
    "learning_rate": 1e-3,
    "ent_coef": 0.0,
    "gamma": 0.95,
    "norm_reward": True,
    "norm_adv": True,
}
DOORKEY = {  # take the key, open the door, go to the goal: 1 - 0.9 * steps / 250
    "env_id": "minigrid:MiniGrid-DoorKey-5x5-v0",
    "drop_obs": ("mission",),
    "total_timesteps": 100_000,
    "num_samplers": 8,
    "num_steps": 128,
    "minibatch_size": 256,
    "learning_rate": 1e-3,
}
HIGHWAY = {  # bench_envs.py; gamma, learning rate, K and M as in highway-env's scripts/sb3_highway_ppo.py
    "env_id": "bench_envs:make_highway",
    "total_timesteps": 20_000,
    "num_samplers": 8,
    "num_steps": 96,
    "minibatch_size": 64,
    "update_epochs": 10,
    "learning_rate": 5e-4,
    "gamma": 0.8,
    "ent_coef": 0.0,
}
MUJOCO = {  # cleanrl/ppo_continuous_action.py, whose published scores are of version 4 of the tasks
    "total_timesteps": 1_000_000,
    "num_samplers": 1,
    "num_steps": 2048,
    "minibatch_size": 64,
    "update_epochs": 10,
    "learning_rate": 3e-4,
    "ent_coef": 0.0,
    "log_std_init": 0.0,
    "clip_vloss": True,
    "norm_obs": True,
    "norm_reward": True,
    "norm_adv": True,
    "target_kl": 0.0,
}
PUBLISHED = {  # after 1,000,000 steps: CleanRL (3 seeds), or openai/baselines, whose settings these are (6 seeds), and
    # the tuned settings of version 3 (Reacher and the pendulum 2): rl-baselines3-zoo (one run), Tianshou (10 seeds)
    "HalfCheetah-v5": (1442.64, 5819.0, 5784.0),
    "Hopper-v5": (2382.86, 2410.0, 2609.0),
    "Walker2d-v5": (2287.95, 3479.0, 3589.0),
    "Humanoid-v5": (716.11, None, 787.1),
    "Swimmer-v5": (111.2, 281.6, 66.7),
    "Reacher-v5": (-6.71, None, -4.1),
    "InvertedDoublePendulum-v5": (7102.9, None, 9231.0),
    "Ant-v5": (None, 1327.0, 3258.4),
}
# Contact forces, in observation and reward of version 5, were zero in version 3 (openai/gym #1541).
NO_CONTACTS = {"env_kwargs": {"include_cfrc_ext_in_observation": False, "contact_cost_weight": 0.0}}
# returns up to 500,000
LARGE = presets()["CartPole-v1"] | {"env_id": "bench_envs:make_large", "norm_adv": True}
ROWS = {
    "cartpole-cleanrl": Row(
        CLEANRL, 5, 475.0, "train", 0.0, "CleanRL: 490.04 +- 6.12 over 3 seeds"
    ),
    "cartpole-preset": Row(
        {"env_id": "CartPole-v1"}, 10, 500.0, "eval", 0.51, "rl-baselines3-zoo: 500.0, one run"
    ),
    "pendulum-preset": Row(
        {"env_id": "Pendulum-v1"},
        5,
        -200.0,
        "eval",
        0.0,
        "rl-baselines3-zoo: -172.2, one run, gSDE",
    ),
    "positions-lstm": Row(POSITIONS_ONLY, 5, 475.0, "eval", 0.51, "none"),
    "positions-gru": Row(POSITIONS_ONLY | {"memory": "gru"}, 5, 475.0, "eval", 0.51, "none"),
    "doors-masked": Row(DOORS, 5, 4.5, "eval", 0.0, "none"),
    "reach-goal": Row(REACH, 5, -10.0, "eval", 0.0, "none"),
    "minigrid-doorkey": Row(DOORKEY, 3, 0.9, "eval", 0.0, "none", needs="minigrid"),
    "highway-pixels": Row(HIGHWAY, 2, 9.0, "eval", 0.0, "none", needs="highway_env", trivial=True),
    "large-rewards": Row(LARGE | {"norm_value": True}, 5, 475_000.0, "eval", 0.0, "none"),
    "large-rewards-plain": Row(LARGE, 5, 0.0, "eval", 0.0, "none, for comparison"),
    "large-rewards-raw-adv": Row(
        LARGE | {"norm_value": True, "norm_adv": False}, 5, 0.0, "eval", 0.0, "none, for comparison"
    ),
    "large-rewards-plain-raw-adv": Row(
        LARGE | {"norm_adv": False}, 5, 0.0, "eval", 0.0, "none, for comparison"
    ),
    "squares-float32": Row(SQUARES, 5, 0.85, "train", 0.0, "none"),
    "squares-bfloat16": Row(SQUARES | {"precision": "bfloat16"}, 5, 0.85, "train", 0.0, "none"),
}
for task, (same, zoo, tianshou) in PUBLISHED.items():
    name, own = task.partition("-")[0].lower(), {"env_id": task, "total_timesteps": 1_000_000}
    tuned = {"rl-baselines3-zoo": zoo, "Tianshou": tianshou}
    bar = max(score for score in tuned.values() if score is not None)
    others = "; ".join(f"{who}: {score:g}" for who, score in tuned.items() if score is not None)
    if same is not None:
        ROWS[f"{name}-cleanrl"] = Row(
            own | MUJOCO, 5, same, "train", 0.0, f"the same settings: {same:g}", needs="mujoco"
        )
    more: dict[str, Any] = {"needs": "mujoco", "preset": None}
    whole = presets()[task] | {"env_id": task}
    ROWS |= {
        f"{name}-defaults": Row(own, 5, bar, "eval", 0.0, others, **more),
        f"{name}-annealed": Row(own | {"anneal_lr": True}, 5, bar, "eval", 0.0, others, **more),
        f"{name}-preset": Row(whole, 5, bar, "eval", 0.0, others, **more, ends_after=1_000_000),
    }
    spread = replace(
        ROWS[f"{name}-preset"], settings=whole | {"envs_per_sampler": 8, "num_steps": 32}
    )
    ROWS[f"{name}-64-envs"] = spread
    if task in ("Ant-v5", "Humanoid-v5"):
        ROWS[f"{name}-no-contacts"] = replace(spread, settings=spread.settings | NO_CONTACTS)
    if task == "Humanoid-v5":
        same_row = ROWS[f"{name}-cleanrl"]
        ROWS[f"{name}-cleanrl-no-contacts"] = replace(
            same_row, settings=same_row.settings | NO_CONTACTS
        )


def main() -> int:
    """Train each row on its seeds where no run is stored, print a table. Return 0 if all bars are met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=list(ROWS), nargs="*", default=list(ROWS))
    parser.add_argument("--seeds", type=int, help="instead of each row's own number")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--show", action="store_true", help="train nothing")
    parser.add_argument("--store", type=Path, default=HERE / "learning.jsonl")
    parser.add_argument("--one", nargs=2, metavar=("ROW", "SEED"), help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.one:
        print(json.dumps(one(ROWS[flags.one[0]], int(flags.one[1]))))
        return 0
    seeds = {
        name: flags.seeds or ROWS[name].seeds
        for name in flags.only
        if flags.show or is_possible(name)
    }
    failed = 0 if flags.show else run(seeds, flags.jobs, flags.store)
    runs = stored(flags.store)
    return int(failed + sum(not shown(name, runs.get(name, {})) for name in seeds) > 0)


def is_possible(name: str) -> bool:
    """Return whether the packages of a row are installed; print which are not."""
    needs = ROWS[name].needs
    if needs is None or importlib.util.find_spec(needs):
        return True
    print(
        f"{name}: skipped, because {needs} is not installed: pip install {needs.replace('_', '-')}",
        flush=True,
    )
    return False


def stored(store: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the stored runs by row and seed, without those that had other settings; the last of a seed counts."""
    runs: dict[str, dict[int, dict[str, Any]]] = {}
    for text in store.read_text().splitlines() if store.exists() else ():
        line = json.loads(text)
        if line["settings"] == settings_of(line["row"]):
            runs.setdefault(line["row"], {})[line["seed"]] = line
    return runs


def settings_of(name: str) -> dict[str, Any] | None:
    """Return what a row sets, as JSON has it; None for a row that ROWS no longer has."""
    if name not in ROWS:
        return None
    known: dict[str, Any] = json.loads(
        json.dumps(ROWS[name].settings | {"ends_after": ROWS[name].ends_after})
    )
    return known


def run(seeds: dict[str, int], jobs: int, store: Path) -> int:
    """Run what is not stored yet, seed 1 of all rows first, `jobs` runs at a time; return how many failed."""
    known, most = stored(store), max(seeds.values(), default=0)
    wanted = [
        (name, seed) for seed in range(1, most + 1) for name, rows in seeds.items() if seed <= rows
    ]
    missing = [partial(apart, *each) for each in wanted if each[1] not in known.get(each[0], {})]
    failed = 0
    for line in run_all(missing, jobs, store):
        failed += "error" in line
        print(
            f"{line['row']}, seed {line['seed']}: {line.get('error') or figures_in_words(line)}",
            flush=True,
        )
    return failed


def figures_in_words(line: dict[str, Any]) -> str:
    return (
        f"train {in_words(line['train'])} (after each quarter of the run: "
        f"{', '.join(map(in_words, line['quarters']))}), eval {in_words(line['eval'])}, "
        f"{line['steps']:,} steps, {line['seconds']:.0f} s, weights {line['weights_sha256'][:12]}"
    )


def apart(name: str, seed: int) -> dict[str, Any]:
    """Train one seed in a process of its own, and return what is stored of it."""
    line = {
        "row": name,
        "seed": seed,
        "settings": settings_of(name),
        "commit": commit(),
        "cpu": machine()["cpu"],
    }
    command = [sys.executable, str(HERE / "learning.py"), "--one", name, str(seed)]
    try:
        return line | run_json(command, ours_environment() | {"OMP_NUM_THREADS": "1"}, LONGEST_S)
    except MeasurementError as error:
        return line | {"error": str(error)}


def shown(name: str, runs: dict[int, dict[str, Any]]) -> bool:
    """Print what a row has reached; return whether it has met its bar."""
    row = ROWS[name]
    if not runs:
        print(f"{name}: no run")
        return False
    figures = [runs[seed][row.figure] for seed in sorted(runs)]
    others = [runs[seed]["eval" if row.figure == "train" else "train"] for seed in sorted(runs)]
    reached = fmean(figure >= row.bar for figure in figures)
    passed = reached >= row.enough if row.enough else fmean(figures) >= row.bar
    print(
        f"{name}: {row.figure} {in_words(fmean(figures))} ({', '.join(map(in_words, figures))}), "
        f"{'eval' if row.figure == 'train' else 'train'} {in_words(fmean(others))} "
        f"({', '.join(map(in_words, others))}); {reached:.0%} of {counted(len(runs), 'seed')} at {row.bar:g}: "
        f"{'pass' if passed else 'FAIL'}. Published: {row.published}."
    )
    trivial_means: dict[str, float] = next(
        (run["trivial"] for run in runs.values() if "trivial" in run), {}
    )
    if trivial_means:
        print(
            "  without learning: "
            + ", ".join(f"{what} {in_words(mean)}" for what, mean in trivial_means.items())
        )
    return passed


def one(row: Row, seed: int) -> dict[str, Any]:
    """Train and evaluate one seed in this process; with seed 1, also play without learning, where the row says so."""
    tuned = presets().get(row.settings["env_id"], {}) if len(row.settings) == 1 else {}
    done = learned(tuned | row.settings | {"num_actors": 0}, seed, row.preset, row.ends_after)
    if row.trivial and seed == 1:
        done["trivial"] = trivial.mean_returns(row.settings["env_id"], EPISODES)
    return done


class Stop(Observer):
    """Stops a run after some env steps."""

    def __init__(self, steps: float) -> None:
        self.steps = steps

    def on_iteration(self, row: dict[str, float]) -> bool:
        return row["global_step"] >= self.steps


def learned(
    settings: dict[str, Any], seed: int, preset: str | None = "fast", ends_after: int | None = None
) -> dict[str, Any]:
    """Train with these settings, and otherwise those of a preset, on one seed, and evaluate the policy."""
    began, basis = time.monotonic(), {} if preset is None else presets()[preset]
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            **basis | settings | {"seed": seed, "progress": "off", "run_dir": Path(folder) / "run"}
        )
        result = train(config, observers=[Stop(ends_after or math.inf)])
        if result.stopped_by is not None and result.global_step < (ends_after or math.inf):
            sys.exit(
                f"The run was stopped by {result.stopped_by} after {result.global_step:,} steps: not a result."
            )
        played = evaluate(result, episodes=EPISODES)
        rows = result.metrics  # read before the folder is removed
    returns = [(row["global_step"], row.get("charts/episodic_return")) for row in rows]
    known = [point for point in returns if point[1] is not None]
    drawn = np.linspace(0, len(known) - 1, min(len(known), POINTS)).astype(int)
    return {
        "seed": seed,
        "train": result.episodic_return,
        "quarters": [
            rows[len(rows) * quarter // 4 - 1]["charts/episodic_return"] for quarter in (1, 2, 3, 4)
        ],
        "eval": played.mean_return,
        "curve": [known[index] for index in drawn],
        "steps": result.global_step,
        "seconds": time.monotonic() - began,
        "weights_sha256": result.weights_sha256,
    }


def in_words(mean_return: float) -> str:
    """Return 496.7 or 0.93."""
    return f"{mean_return:.1f}" if abs(mean_return) >= 10 else f"{mean_return:.2f}"


def commit() -> str:
    """Return the commit that is measured, with a + if the working tree differs from it."""
    answer = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
