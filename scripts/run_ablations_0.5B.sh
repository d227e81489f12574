#!/usr/bin/env bash
# The TorchDiTan course project's grid: DiT-L, 252 runs on 8 GPUs, into outputs/0.5B; run the same command again to continue.
#   scripts/run_ablations_0.5B.sh --dry-run
exec "$(dirname "${BASH_SOURCE[0]}")/run_ablations.sh" 0.5B "$@"
