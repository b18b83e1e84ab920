#!/bin/bash
# Start a Slurm of one node in FOLDER, without touching one that is installed, then run a command:
#   unshare --mount --pid --fork --mount-proc slurm_on_one_machine.sh FOLDER COMMAND ...
# Needs root, munged, slurmctld, slurmd and slurmstepd in PATH, and SLURM_PLUGINS, the folder of auth_munge.so.
# It needs its own PID namespace: `ray stop` ends every Ray that it sees, and the daemons end with the namespace.
set -eu
folder=$1 here=$(hostname)
shift
mkdir -p "$folder/munge" "$folder/spool" "$folder/state"
chmod 755 "$folder" "$folder/munge"
(umask 377 && head -c 64 /dev/urandom >"$folder/munge/key")
munged --force --key-file="$folder/munge/key" --socket="$folder/munge/socket" --pid-file="$folder/munge/pid" \
    --log-file="$folder/munge/log" --seed-file="$folder/munge/seed"
cat >"$folder/slurm.conf" <<CONF
ClusterName=one
SlurmctldHost=$here(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
SlurmctldPort=16817
SlurmdPort=16818
PluginDir=$SLURM_PLUGINS
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
ReturnToService=2
MailProg=/bin/true
MinJobAge=300
KillWait=30
NodeName=n1 NodeHostname=$here NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=n1 Default=YES MaxTime=INFINITE State=UP
CONF
export SLURM_CONF=$folder/slurm.conf
slurmctld -f "$SLURM_CONF" -c
slurmd -f "$SLURM_CONF" -N n1 -d "$(command -v slurmstepd)"
for _ in $(seq 40); do
    [ "$(sinfo -h -o %T 2>/dev/null)" = idle ] && break
    sleep 0.5
done
"$@"
