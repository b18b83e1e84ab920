"""Take gradient steps of Stable-Baselines3's SAC with its defaults, on random rows in the sizes of HalfCheetah.

For each line of stdin, take 64 steps and print their milliseconds of CPU per step. `sac_step.py` starts it.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import SAC
from stable_baselines3.common.logger import Logger

OBS = 17
ACTIONS = 6
ROWS = 10_000
STEPS = 64


class Sizes(gym.Env[Any, Any]):
    """An environment of which only the spaces are used."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (OBS,))
    action_space = gym.spaces.Box(-1.0, 1.0, (ACTIONS,))


def main() -> None:
    torch.set_num_threads(1)
    model = SAC("MlpPolicy", Sizes(), buffer_size=ROWS, device="cpu", seed=1)
    model.set_logger(Logger(None, []))
    random = np.random.default_rng(1)
    for _ in range(ROWS):
        obs, successor = random.normal(size=(2, 1, OBS)).astype(np.float32)
        action = random.uniform(-1, 1, (1, ACTIONS)).astype(np.float32)
        model.replay_buffer.add(obs, successor, action, random.normal(size=1), np.zeros(1), [{}])
    for _ in sys.stdin:
        began = time.process_time()
        model.train(gradient_steps=STEPS, batch_size=model.batch_size)
        print(1e3 * (time.process_time() - began) / STEPS, flush=True)


if __name__ == "__main__":
    main()
