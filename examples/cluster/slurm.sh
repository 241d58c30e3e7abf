#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
# One task of each node runs torchrun: sbatch examples/cluster/slurm.sh run.toml --set mesh.tp=8
# A run that is requeued goes on from its last checkpoint.
set -euo pipefail
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv-backend c10d --rdzv-endpoint "$head:${PORT:-29500}" --rdzv-id "$SLURM_JOB_ID" \
    -m shardfn pretrain "$@"
