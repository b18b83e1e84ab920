"""Train, load the policy, and evaluate it, all in Python: python python_api.py [STEPS]."""

import logging
import sys

import numpy as np

import dppo

if __name__ == "__main__":
    # what dppo has to report besides its figures
    logging.basicConfig(format="%(levelname)s %(message)s")

    # The settings tuned for CartPole. Config(env_id="CartPole-v1", ...) starts from the general defaults instead.
    config = dppo.Config.preset(
        "CartPole-v1",
        total_timesteps=int(sys.argv[1]) if len(sys.argv) > 1 else 30_000,
        progress="off",
    )
    result = dppo.train(config)
    print(result)
    rows = result.metrics  # one dict for each iteration; docs/METRICS.md lists the keys
    print(
        f"{len(rows)} iterations, entropy {rows[0]['losses/entropy']:.2f} -> {rows[-1]['losses/entropy']:.2f}"
    )

    # Episodes with the likeliest action, each from a seed of its own. The run's folder will do in place of the result.
    print(dppo.evaluate(result, episodes=5))

    # The policy needs neither torch nor Ray. It normalizes observations and clips actions as in training.
    policy = dppo.load_policy(result.run_dir)
    batch = np.zeros((3, 4), np.float32)
    print(
        f"likeliest actions: {policy.act(batch)}, drawn: {policy.act(batch, generator=np.random.default_rng(0))}"
    )
