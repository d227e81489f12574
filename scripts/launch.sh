#!/usr/bin/env bash
# Run train.py under torchrun, forward stop requests to the ranks, and exit with a code that tells how they ended:
#   NGPU=8 scripts/launch.sh --job.config_file=imagenet_pixels --checkpoint.enable_checkpoint
# 0 done, 2 a mistake of the user, 3 out of memory, 75 interrupted and resumable, 1 anything else. torchrun itself
# returns only 0 and 1.
#
# On SIGTERM, SIGUSR1 or Ctrl-C, the ranks finish their step, save and exit together. A second SIGTERM or Ctrl-C, more
# than a second or two later, kills everything immediately. Under SLURM, an interrupted job is requeued.
#
# NGPU: processes on this machine (default: its GPUs, or 1). CONFIG_FILE: a path, or a name in train_configs/.
# LOG_RANK: local ranks to print, "0,1". MAX_RESTARTS: how often torchrun restarts the ranks after a failure (0).
# Several machines: NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT on each; under srun, SLURM provides the first two.
# NNODES=1:2 continues on one of two machines; RDZV_CONF: further settings of the rendezvous. See docs/clusters.md.
# REQUEUE=0: do not requeue an interrupted SLURM job. OUT_OF_MEMORY_CODE: exit code instead of 3.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

refuse() {
  echo "error: $1" >&2
  exit 2
}

command -v torchrun >/dev/null || refuse "torchrun: was not found; activate the environment that torch is installed in"
NGPU=${NGPU:-$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')}
NNODES=${NNODES:-${SLURM_STEP_NUM_NODES:-1}}
NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-0}}

[[ $NGPU =~ ^[1-9][0-9]*$ ]] || refuse "NGPU = \"$NGPU\": must be an integer of at least 1"
[[ $NNODES =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] && ((${NNODES%:*} <= ${NNODES#*:})) ||
  refuse "NNODES = \"$NNODES\": must be an integer of at least 1, or a range such as 1:2"
max_nodes=${NNODES#*:}
if ((max_nodes > 1)); then
  [[ -n ${MASTER_ADDR:-} ]] || refuse "MASTER_ADDR = none: must name the first of the $NNODES machines (NNODES)"
  [[ $NODE_RANK =~ ^[0-9]+$ ]] && ((NODE_RANK < max_nodes)) ||
    refuse "NODE_RANK = \"$NODE_RANK\": must be 0 on the first machine, up to $((max_nodes - 1))"
  meeting=(--nnodes="$NNODES" --rdzv_id="${SLURM_JOB_ID:-torchditan}"
    --rdzv_endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}"
    --rdzv_conf="is_host=$((NODE_RANK == 0))${RDZV_CONF:+,$RDZV_CONF}")
  # torchrun announces the address of its shared store only once, so a machine that joins later would never learn it.
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
else
  meeting=(--rdzv_endpoint=localhost:0)
fi

# Activations of changing sizes fragment the allocator's fixed segments.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
# Every rank writes its status to this folder.
TORCHDITAN_RANKS_FOLDER=$(mktemp -d)
export TORCHDITAN_RANKS_FOLDER
trap 'rm -rf "$TORCHDITAN_RANKS_FOLDER"' EXIT

children() {
  if [[ -r /proc/$1/stat ]]; then
    cat "/proc/$1/task/"*/children 2>/dev/null || true
  else
    pgrep -P "$1" || true
  fi
}

# A rank that does not catch SIGUSR1 (bit 9 of the mask) has not started: the signal would kill it or be lost.
catches_usr1() {
  [[ -r /proc/self/status ]] || return 0
  local mask
  mask=$(sed -n 's/^SigCgt:\t//p' "/proc/$1/status" 2>/dev/null) || return 1
  ((0x${mask:-0} & 0x200))
}

stop() {
  local rank ranks=()
  if [[ -n $stopped_at ]]; then
    if [[ $1 != USR1 ]] && ((SECONDS > stopped_at + 1)); then end_at_once; fi
    return 0
  fi
  stopped_at=$SECONDS
  for rank in $(children "$torchrun"); do
    if catches_usr1 "$rank"; then ranks+=("$rank"); fi
  done
  if ((${#ranks[@]})); then
    # Signal the ranks directly: torchrun would kill them 30 s after its own signal, even while they save.
    echo "launch.sh: SIG$1, asking the ranks to save and exit" >&2
    kill -USR1 "${ranks[@]}" 2>/dev/null || true
  else
    echo "launch.sh: SIG$1 before any rank started training" >&2
    kill -TERM "$torchrun" 2>/dev/null || true
  fi
}

end_at_once() {
  local rank
  # Each rank leads a process group that contains its data workers.
  for rank in $(children "$torchrun"); do kill -KILL -- "-$rank" "$rank" 2>/dev/null || true; done
  kill -KILL "$torchrun" 2>/dev/null || true
}

stopped_at=""
torchrun=""
early=""
for signal in TERM USR1 INT; do trap "early=$signal" "$signal"; done

# Job control runs torchrun in a separate process group, so that it does not receive Ctrl-C itself.
set -m
# SLURM sends SIGUSR1 to every process of a step, which would end torchrun. Ignored signals stay ignored after exec.
(
  trap '' USR1
  # torchrun prints what the ranks print; into a file, it would keep the last lines.
  PYTHONUNBUFFERED=1 exec torchrun --nproc_per_node="$NGPU" --rdzv_backend=c10d "${meeting[@]}" --max-restarts="${MAX_RESTARTS:-0}" \
    --local-ranks-filter="${LOG_RANK:-0}" --role=rank --tee=3 \
    "$repository/train.py" ${CONFIG_FILE:+"--job.config_file=$CONFIG_FILE"} "$@"
) </dev/null &
torchrun=$!
for signal in TERM USR1 INT; do trap "stop $signal" "$signal"; done
if [[ -n $early ]]; then stop "$early"; fi

# A trapped signal also interrupts `wait`.
while kill -0 "$torchrun" 2>/dev/null; do wait "$torchrun" 2>/dev/null || true; done
trap '' TERM USR1 INT

code=0
PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}" python -m torchditan.supervision.exit_status "$TORCHDITAN_RANKS_FOLDER" \
  --num_ranks="$NGPU" ${stopped_at:+--signalled} || code=$?

if ((code == 75)) && [[ -n ${SLURM_JOB_ID:-} && $NODE_RANK == 0 && ${REQUEUE:-1} != 0 ]]; then
  if scontrol requeue "$SLURM_JOB_ID"; then
    echo "launch.sh: job $SLURM_JOB_ID was requeued" >&2
  else
    echo "launch.sh: job $SLURM_JOB_ID could not be requeued; submit it again to continue" >&2
  fi
fi
if ((code == 3)); then code=${OUT_OF_MEMORY_CODE:-3}; fi
exit "$code"
