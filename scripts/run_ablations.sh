#!/usr/bin/env bash
# A grid of train_configs/ablations/, of FSDP, DDP and HSDP over all GPUs; run the same command again to continue.
#   NGPU=4 scripts/run_ablations.sh 0.5B --dry-run
# NGPU: number of GPUs. Further arguments go to python -m torchditan.ablation run.
set -euo pipefail

if (($# == 0)); then
  echo "error: GRID, a grid of train_configs/ablations/, must come first: run_ablations.sh 0.5B" >&2
  exit 2
fi
grid=$1
shift
NGPU=${NGPU:-8}
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

parallel=("1,$NGPU")
if ((NGPU > 1)); then parallel+=("$NGPU,1"); fi
if ((NGPU > 2 && NGPU % 2 == 0)); then parallel+=("2,$((NGPU / 2))"); fi

PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}" \
  exec python -m torchditan.ablation run "$repository/train_configs/ablations/$grid.toml" \
  --axes.parallel "${parallel[@]}" "$@"
