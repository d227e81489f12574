#!/usr/bin/env bash
# Train on several nodes under SLURM, from the repository's folder. First options of sbatch, then those of train.py:
#   sbatch --nodes=4 --gpus-per-node=8 scripts/slurm.sh --job.config_file=imagenet_pixels --training.batch_size=32 \
#     --dataset.root_dir=/shared/imagenet --job.dump_folder=/shared/outputs --checkpoint.enable_checkpoint
# Two minutes before its time limit, or when SLURM reclaims the nodes, the job saves, is requeued, and continues later.
# REPOSITORY: the folder of TorchDiTan, if sbatch is called elsewhere. For other variables see scripts/launch.sh and docs/clusters.md.
#SBATCH --job-name=torchditan
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
# SLURM itself requeues the job after a node failure, because launch.sh may not run any more.
#SBATCH --requeue
#SBATCH --open-mode=append
# Signals the processes of the step on all nodes. B:USR1@120 would signal only this script, which forwards nothing.
#SBATCH --signal=USR1@120
set -euo pipefail

# SLURM runs a copy of this file, so the path of the script is not that of the repository.
repository=${REPOSITORY:-${SLURM_SUBMIT_DIR:-$PWD}}
launch=$repository/scripts/launch.sh
if [[ ! -x $launch ]]; then
  echo "error: REPOSITORY = \"$repository\": has no scripts/launch.sh; must be the folder of TorchDiTan" >&2
  exit 2
fi

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
# Jobs that share a node need different ports.
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
export NGPU=${NGPU:-${SLURM_GPUS_ON_NODE:-1}}

# launch.sh exits by itself on each node, so srun must not kill it while another node still saves. It reads the number
# of nodes and its own from srun's variables. Some versions of srun do not inherit --cpus-per-task from sbatch.
exec srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --kill-on-bad-exit=0 "$launch" "$@"
