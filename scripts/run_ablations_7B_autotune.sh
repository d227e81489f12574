#!/usr/bin/env bash
# The course project's grid: DiT-7B at the largest batch that fits, 72 runs on 8 GPUs, into outputs/7B_autotune; the same command again goes on.
#   scripts/run_ablations_7B_autotune.sh --dry-run
# NGPU: number of GPUs, of a grid with FSDP, DDP and HSDP over them. Further arguments go to python -m torchditan.ablation run.
set -euo pipefail

NGPU=${NGPU:-8}
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

parallel=("1,$NGPU")
if ((NGPU > 1)); then parallel+=("$NGPU,1"); fi
if ((NGPU > 2 && NGPU % 2 == 0)); then parallel+=("2,$((NGPU / 2))"); fi

PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}" \
  exec python -m torchditan.ablation run "$repository/train_configs/ablations/7B_autotune.toml" \
  --axes.parallel "${parallel[@]}" "$@"
