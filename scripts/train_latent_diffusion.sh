#!/usr/bin/env bash
# Train the TorchDiTan course project's job on the GPUs of one machine, from any folder; further arguments go to train.py:
#   NGPU=8 CONFIG_FILE=imagenet_pixels scripts/train_latent_diffusion.sh --training.steps=100
# NGPU: number of processes (1). CONFIG_FILE: a path, or a name in train_configs/. For the rest see scripts/launch.sh.
set -euo pipefail

export NGPU=${NGPU:-1}
export CONFIG_FILE=${CONFIG_FILE:-llama3_latent_diffusion.toml}

exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" "$@"
