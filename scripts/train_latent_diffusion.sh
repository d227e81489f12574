#!/usr/bin/env bash
# Train on the GPUs of one machine, from any folder; further arguments go to train.py:
#   NGPU=8 CONFIG_FILE=imagenet_pixels scripts/train_latent_diffusion.sh --training.steps=100
# NGPU: number of processes. CONFIG_FILE: a path, or a name in train_configs/. LOG_RANK: ranks to print, "0,1".
set -euo pipefail

NGPU=${NGPU:-1}
CONFIG_FILE=${CONFIG_FILE:-llama3_latent_diffusion.toml}
LOG_RANK=${LOG_RANK:-0}
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Activations of changing sizes fragment the allocator's fixed segments.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

exec torchrun --nproc_per_node="$NGPU" --rdzv_backend=c10d --rdzv_endpoint=localhost:0 \
  --local-ranks-filter="$LOG_RANK" --role=rank --tee=3 \
  "$repository/train.py" --job.config_file="$CONFIG_FILE" "$@"
