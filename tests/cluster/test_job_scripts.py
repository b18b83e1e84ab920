"""The job scripts of docs/RECIPES.md: Slurm with real daemons on this machine, and manifests for KubeRay."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PLUGINS = Path(os.environ.get("SLURM_PLUGINS", "/usr/lib/x86_64-linux-gnu/slurm-wlm"))
DAEMONS = ("munged", "slurmctld", "slurmd", "slurmstepd", "sbatch", "unshare")
WITHOUT_SLURM = not PLUGINS.is_dir() or not all(map(shutil.which, DAEMONS)) or os.geteuid() != 0
JOB = """
job() { sbatch --parsable --output="$HOME/job.log" --export=ALL --chdir="$HOME" SCRIPT CartPole-v1 --num-samplers 2 \
    --num-steps 64 --total-timesteps $1 --progress plain; }
ended() { for _ in $(seq 200); do [ -z "$(squeue -h -j $1)" ] && break; sleep 0.5; done
    scontrol show job $1 | grep -o 'JobState=[A-Z]*'; }
first=$(job 100000000)
for _ in $(seq 200); do grep -qs '"iteration": 5' "$RUN_DIR/metrics.jsonl" && break; sleep 0.5; done
scancel --signal=TERM $first; ended $first
ended $(job 50000)
"""


@pytest.mark.slow
@pytest.mark.skipif(WITHOUT_SLURM, reason="needs root, and slurmd, slurmctld, munge of Debian in PATH")
def test_slurm_runs_the_job_saves_at_sigterm_and_continues(tmp_path: Path) -> None:
    run_dir, slurm = tmp_path / "run", Path(__file__).with_name("slurm_on_one_machine.sh")
    env = {**os.environ, "HOME": str(tmp_path), "RUN_DIR": str(run_dir), "SLURM_PLUGINS": str(PLUGINS)}
    env |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "RAY_PORT": "6999"}
    words = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", str(slurm), str(tmp_path / "slurm")]
    script = JOB.replace("SCRIPT", str(EXAMPLES / "slurm.sh"))
    words += ["bash", "-c", script]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=280, check=False)
    log = (tmp_path / "job.log").read_text()
    assert "Stopped by SIGTERM" in log, done.stdout + done.stderr + log
    assert "2 Ray actors host 1 sampler each" in log
    assert "Resuming from iter_" in log
    assert "JobState=COMPLETED" in done.stdout.splitlines()[-1]
