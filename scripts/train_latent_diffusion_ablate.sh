#!/usr/bin/env bash
# One run of the course project's grids, which call this script; further arguments go to train.py:
#   NGPU=8 scripts/train_latent_diffusion_ablate.sh --model.patch_size=4 --training.batch_size=16 --training.compile
# NGPU: number of processes (8). CONFIG_FILE: a path, or a name in train_configs/. For the rest see scripts/launch.sh.
# It exits with 1 if the run was out of memory: the grids then skip larger batches.
set -euo pipefail

export NGPU=${NGPU:-8}
export CONFIG_FILE=${CONFIG_FILE:-llama3_latent_diffusion_ablate.toml}
export OUT_OF_MEMORY_CODE=1

exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" "$@"
