#!/usr/bin/env bash
# The TorchDiTan course project's grid: DiT-7B, 396 runs on 8 GPUs, into outputs/7B; run the same command again to continue.
#   scripts/run_ablations_7B.sh --dry-run
exec "$(dirname "${BASH_SOURCE[0]}")/run_ablations.sh" 7B "$@"
