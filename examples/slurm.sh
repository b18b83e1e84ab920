#!/bin/bash
# Train on whole nodes of a Slurm cluster:  sbatch --nodes=4 --cpus-per-task=32 examples/slurm.sh mysim:make
#SBATCH --job-name=dppo --nodes=1 --ntasks-per-node=1 --cpus-per-task=2 --exclusive --requeue --open-mode=append
# Ray starts on every node, dppo on the first; Ray is stopped at the end. RUN_DIR has to be on a disk that all nodes see.
# Submitted or requeued again with the same RUN_DIR, it continues. More arguments are passed on to `dppo train`.
set -euo pipefail
[ $# -gt 0 ] || { echo "usage: sbatch [--nodes=N --cpus-per-task=C] slurm.sh ENV_ID [--flag value ...]" >&2; exit 2; }
run_dir=${RUN_DIR:-$HOME/runs/slurm}
cpus=${SLURM_CPUS_PER_TASK:-1}
nodes=$SLURM_JOB_NUM_NODES
# A private token, so that nobody else on these nodes may talk to this Ray.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$HOME/.dppo-ray-token
[ -s "$RAY_AUTH_TOKEN_PATH" ] || (umask 077 && python -c 'import secrets; print(secrets.token_hex(32))' >"$RAY_AUTH_TOKEN_PATH")
address=$(hostname --ip-address | cut -d' ' -f1):${RAY_PORT:-6379}
srun ray stop --force >/dev/null 2>&1 || true # what an earlier job may have left; these nodes are ours alone
exec srun --cpus-per-task="$cpus" ray symmetric-run --address "$address" --min-nodes "$nodes" --num-cpus "$cpus" -- \
    python -m dppo train "$@" --num-actors "$((nodes * cpus))" --address "$address" --run-dir "$run_dir" --resume auto
