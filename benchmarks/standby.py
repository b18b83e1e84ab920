"""Measure resets in the background: resets of 2 s every 50 steps of 40 ms, with and without `standby_envs`.

    python benchmarks/standby.py

Four samplers in the threads of this process. Prints env steps per second after the first iteration, the bound (an
episode takes 4 s without standby and 2 s with it), and the weights, which are equal.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from measure import HERE

SAMPLERS, STEPS, STEP_S, RESET_S = 4, 50, 0.04, 2.0


def main() -> None:
    import dppo

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=6)
    wanted = parser.parse_args()
    sys.path.insert(0, str(HERE))
    print("standby_envs, env steps/s, bound, share of the bound, weights")
    for standby in (0, 1):
        with tempfile.TemporaryDirectory() as folder:
            result = dppo.train(
                dppo.Config(
                    env_id="bench_envs:slow_to_start",
                    env_kwargs={"step_s": STEP_S, "reset_s": RESET_S, "steps": STEPS},
                    num_samplers=SAMPLERS,
                    num_steps=STEPS,
                    total_timesteps=SAMPLERS * STEPS * wanted.iterations,
                    env_threads=True,
                    standby_envs=standby,
                    progress="off",
                    run_dir=Path(folder) / "run",
                )
            )
            first, *_, last = result.metrics
        rate = (last["global_step"] - first["global_step"]) / (
            last["time/wall_s"] - first["time/wall_s"]
        )
        bound = SAMPLERS * STEPS / (STEPS * STEP_S if standby else STEPS * STEP_S + RESET_S)
        print(
            f"{standby}, {rate:.1f}, {bound:.1f}, {rate / bound:.1%}, {result.weights_sha256[:16]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
