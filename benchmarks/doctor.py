"""Compare the env steps per second that `dppo doctor` predicts with those of short runs.

    python benchmarks/doctor.py                      # all cases, some minutes; alone on the machine
    python benchmarks/doctor.py waits computes       # some of them

Each case is examined once, then trained in process and with 2 and 4 actors. Prints the median of the iterations after
the first ones, which make the environments.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from measure import HERE

WARM_UP = 2  # iterations
SLOW = "dppo/SlowCartPole-v0"
CASES: dict[str, tuple[dict[str, Any], int]] = {  # settings, and the iterations to measure
    "waits": ({"env_id": SLOW, "env_kwargs": {"step_s": 0.005}, "num_steps": 32}, 5),
    "computes": (
        {"env_id": SLOW, "env_kwargs": {"step_s": 0.003, "burn": True}, "num_steps": 32},
        5,
    ),
    "resets": (
        {
            "env_id": "bench_envs:slow_to_start",
            "env_kwargs": {"step_s": 0.002, "reset_s": 0.05, "steps": 20},
        },
        4,
    ),
    "fast": ({"env_id": "CartPole-v1", "num_steps": 128}, 20),
    "threads": (
        {"env_id": SLOW, "env_kwargs": {"step_s": 0.01}, "num_samplers": 32, "env_threads": True},
        5,
    ),
}
ACTORS = (0, 2, 4)


def main() -> None:
    import dppo
    from dppo.tools.doctor.speed import iteration_s
    from dppo.tools.doctor.watching import examine

    sys.path.insert(0, str(HERE))
    worst = 0.0
    print("case, actors, predicted, measured, difference")
    for name in sys.argv[1:] or CASES:
        settings, iterations = CASES[name]
        settings = {"update_epochs": 10} | settings
        sizes = {"num_samplers": 8, "num_steps": 64} | settings
        facts = examine(settings, 15.0)
        for actors in ACTORS:
            with tempfile.TemporaryDirectory() as folder:
                batch = sizes["num_samplers"] * sizes["num_steps"]
                config = dppo.Config(
                    **settings
                    | {"num_actors": actors, "run_dir": Path(folder) / "run", "progress": "off"},
                    total_timesteps=batch * (WARM_UP + iterations),
                )
                rows = dppo.train(config).metrics[WARM_UP:]
            measured = median(row["charts/SPS_iteration"] for row in rows)
            predicted = config.batch_size / iteration_s(
                facts, config, actors, threads=config.env_threads
            )
            worst = max(worst, abs(predicted / measured - 1))
            print(
                f"{name}, {actors}, {predicted:.1f}, {measured:.1f}, {predicted / measured - 1:+.1%}",
                flush=True,
            )
    print(f"worst difference: {worst:.1%}")


if __name__ == "__main__":
    main()
