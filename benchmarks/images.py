"""Time collecting and learning on images of random bytes, with the Nature CNN, in one process.

    python benchmarks/images.py                         84 x 84 x 4, 8 environments, T=128, K=4, M=256
    python benchmarks/images.py --threads 2 --encoder impala
    python benchmarks/images.py --precision bfloat16

Prints env steps per second of each half and of both, without a simulator's time.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np
from measure import REPO

sys.path.insert(0, str(REPO / "src"))
SIZE, CHANNELS = 84, 4


class Noise(gym.Env[Any, Any]):
    """Returns one of a few random images at each step; an episode lasts 500 steps."""

    observation_space = gym.spaces.Box(0, 255, (SIZE, SIZE, CHANNELS), np.uint8)
    action_space = gym.spaces.Discrete(6)

    def __init__(self) -> None:
        self._images = (
            np.random.default_rng(0).integers(0, 256, (16, SIZE, SIZE, CHANNELS)).astype(np.uint8)
        )
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin an episode."""
        self._steps = 0
        return self._images[0], {}

    def step(self, action: Any) -> Any:
        """Return the next image."""
        self._steps += 1
        return self._images[self._steps % 16], float(action), self._steps == 500, False, {}


def main() -> int:
    """Print the figures; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--encoder", choices=["nature", "impala"], default="nature")
    parser.add_argument("--threads", type=int, default=1, help="of SGD; acting has one")
    parser.add_argument(
        "--precision", choices=["float32", "bfloat16"], default="float32", help="of SGD"
    )
    parser.add_argument("--steps", type=int, default=128, help="T")
    parser.add_argument("--rounds", type=int, default=3, help="the fastest counts")
    options = parser.parse_args()
    import torch

    from dppo.config import Config
    from dppo.config.resolve import resolve
    from dppo.hosts.plans import sampler_plan, trainer_plan
    from dppo.hosts.sampler_builder import build_sampler
    from dppo.hosts.trainer_builder import build_trainer
    from dppo.ppo.exchange.records import PolicySnapshot, SegmentRequest
    from dppo.ppo.learning.batch import make_batch
    from dppo.spaces.actions import continuous_width

    config = Config(
        env_id=Noise, num_samplers=1, envs_per_sampler=8, num_steps=options.steps, minibatch_size=256, update_epochs=4,
        image_encoder=options.encoder, learner_threads=options.threads, precision=options.precision,
    )  # fmt: skip
    torch.set_num_threads(options.threads)
    built = build_sampler(sampler_plan(config), 0)
    resolved, _ = resolve(config, continuous_width(built.spaces.actions))
    plan = trainer_plan(resolved)
    trainer: Any = build_trainer(plan, built.spaces)
    spent: dict[str, list[float]] = {"collect": [], "update": []}
    for index in range(options.rounds):
        began = time.perf_counter()
        _, segment = built.sampler.collect(
            SegmentRequest(0, index), PolicySnapshot(index, trainer.weights())
        )
        collected = time.perf_counter()
        batch = make_batch([segment], None, None, config.ppo)
        trainer.train_on(batch, plan.ppo, np.random.default_rng(index))
        spent["collect"].append(collected - began)
        spent["update"].append(time.perf_counter() - collected)
    fastest = {name: min(seconds) for name, seconds in spent.items()}
    for name, seconds in (fastest | {"both": sum(fastest.values())}).items():
        print(
            f"{name}: {config.batch_size / seconds:,.0f} env steps/s ({seconds:.2f} s for {config.batch_size:,})"
        )
    print(f"{trainer.spec.num_parameters:,} parameters, {options.threads} threads of SGD")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
