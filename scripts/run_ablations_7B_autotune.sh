#!/usr/bin/env bash
# The TorchDiTan course project's grid: DiT-7B at the largest batch that fits, 72 runs on 8 GPUs, into outputs/7B_autotune.
# Run the same command again to continue.
#   scripts/run_ablations_7B_autotune.sh --dry-run
exec "$(dirname "${BASH_SOURCE[0]}")/run_ablations.sh" 7B_autotune "$@"
