#!/usr/bin/env bash
# Measures one to eight GPUs of this machine in 20 minutes; the same command continues. See benchmarks/README.md.
exec python "$(dirname "${BASH_SOURCE[0]}")/eight_gpus.py" "$@"
