#!/bin/bash
# Train on whole nodes of a Slurm cluster:  sbatch --nodes=4 --cpus-per-task=32 examples/slurm.sh mysim:make
#SBATCH --job-name=dppo --nodes=1 --ntasks-per-node=1 --cpus-per-task=2 --exclusive --requeue --open-mode=append
# Ray starts on every node, dppo on the first; Ray is stopped at the end. RUN_DIR has to be on a disk that all nodes see.
# Submitted or requeued again with the same RUN_DIR, it continues. More arguments are passed on to `dppo train`.
set -euo pipefail
[ $# -gt 0 ] || { echo "usage: sbatch [--nodes=N --cpus-per-task=C] slurm.sh ENV_ID [--flag value ...]" >&2; exit 2; }
run_dir=${RUN_DIR:-$HOME/runs/slurm}
export CPUS=${SLURM_CPUS_PER_TASK:-1}
others=$((SLURM_JOB_NUM_NODES - 1))
# A private token, so that nobody else on these nodes may talk to this Ray.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$HOME/.dppo-ray-token
[ -s "$RAY_AUTH_TOKEN_PATH" ] || (umask 077 && python -c 'import secrets; print(secrets.token_hex(32))' >"$RAY_AUTH_TOKEN_PATH")
export HOST=$(hostname --ip-address | cut -d' ' -f1) PORT=${RAY_PORT:-6379}
stop_ray() { timeout 60 srun --overlap ray stop --force >/dev/null 2>&1 || true; } # also what an earlier job may have left: these nodes are ours
trap : TERM # Slurm sends it to dppo, too, which saves and ends
stop_ray
# A node of Ray has 30 s to start, which may be too little on a busy machine.
export RAY_START='
    for attempt in 1 2 3 failed; do
        [ "$attempt" != failed ] || { echo "Ray has not started on $(hostname) in 3 attempts."; exit 1; }
        ray start --num-cpus "$CPUS" "$@" >/dev/null && break
        ray stop --force >/dev/null
    done'
if [ "$others" -gt 0 ]; then
    srun --overlap --relative=1 --nodes="$others" --ntasks="$others" --cpus-per-task="$CPUS" bash -c '
        exec 2>&1 # what goes wrong here belongs into the log; the end of this step, which srun reports, does not
        for second in $(seq 300); do (: >"/dev/tcp/$HOST/$PORT") 2>/dev/null && break; sleep 1; done
        set -- --address "$HOST:$PORT"
        eval "$RAY_START"
        sleep infinity' 2>/dev/null &
fi
code=0
srun --overlap --relative=0 --nodes=1 --ntasks=1 --cpus-per-task="$CPUS" bash -c '
    train=("$@")
    set -- --head --node-ip-address "$HOST" --port "$PORT"
    eval "$RAY_START"
    exec python -m dppo train "${train[@]}"' \
    bash "$@" --num-actors auto --address "$HOST:$PORT" --run-dir "$run_dir" --resume auto || code=$?
stop_ray
exit "$code"
