#!/usr/bin/env bash
# Find the largest batch of a job for the course project's autotuned grid, which reads the last number of these lines:
#   NGPU=8 scripts/autotune_bs_train_latent_diffusion.sh --model.flavor=DiT-7B --training.compile
# NGPU: number of processes (8). CONFIG_FILE: a path, or a name in train_configs/. Further arguments are those of train.py.
# To search and then train in one command, give train.py --training.batch_size=auto.
set -euo pipefail

export NGPU=${NGPU:-8}
export CONFIG_FILE=${CONFIG_FILE:-llama3_latent_diffusion_ablate.toml}
output=$(mktemp)
trap 'rm -f "$output"' EXIT

"$(dirname "${BASH_SOURCE[0]}")/launch.sh" "$@" --training.batch_size=auto --job.print_config |
  grep --line-buffered "autotune: " | tee "$output" || exit "${PIPESTATUS[0]}"
batch_size=$(sed -n 's/.*autotune: training.batch_size = //p' "$output")
echo "Attempting training with batch size: $batch_size"
echo "Binary search complete. Optimal batch size found: $batch_size"
