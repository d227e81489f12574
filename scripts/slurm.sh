#!/usr/bin/env bash
# Train on several nodes under SLURM, from the repository's folder; arguments go to train.py, options of sbatch come first:
#   sbatch --nodes=4 --gpus-per-node=8 scripts/slurm.sh --job.config_file=imagenet_pixels --training.batch_size=32 \
#     --dataset.root_dir=/shared/imagenet --job.dump_folder=/shared/outputs --checkpoint.enable_checkpoint
# Two minutes before its time is up, or when SLURM wants the nodes back, the job saves, goes back into the queue and
# continues there. REPOSITORY: where TorchDiTan is, if not where sbatch was called. The rest is in scripts/launch.sh.
#SBATCH --job-name=torchditan
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
# Also after a node failed, where nobody is left to ask for it.
#SBATCH --requeue
#SBATCH --open-mode=append
# To the processes of the step on all nodes. B:USR1@120 would signal this script alone, which passes nothing on.
#SBATCH --signal=USR1@120
set -euo pipefail

# SLURM runs a copy of this file, so its own path says nothing.
repository=${REPOSITORY:-${SLURM_SUBMIT_DIR:-$PWD}}
launch=$repository/scripts/launch.sh
if [[ ! -x $launch ]]; then
  echo "error: REPOSITORY = \"$repository\": has no scripts/launch.sh; must be the folder of TorchDiTan" >&2
  exit 2
fi

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
# Jobs that share a node must not meet.
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
export NGPU=${NGPU:-${SLURM_GPUS_ON_NODE:-1}}

# launch.sh of each node ends by itself: none is to be killed while another still saves. It finds the number of nodes
# and its own in what srun sets.
# Some versions of srun do not take --cpus-per-task over from sbatch.
exec srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --kill-on-bad-exit=0 "$launch" "$@"
