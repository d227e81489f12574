#!/usr/bin/env bash
# A small grid on this machine's CPU or GPUs, into outputs/debug; run the same command again to continue.
#   NGPU=2 scripts/run_ablations_debug.sh
# NGPU: number of processes; the grid compares FSDP and DDP. Further arguments go to python -m torchditan.ablation run.
set -euo pipefail

NGPU=${NGPU:-2}
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

parallel=("1,$NGPU")
if ((NGPU > 1)); then parallel+=("$NGPU,1"); fi

# Ranks that share a few cores are fastest with a thread each.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}" \
  exec python -m torchditan.ablation run "$repository/train_configs/ablations/debug.toml" \
  --axes.parallel "${parallel[@]}" "$@"
