"""The processes of one run: ranks, torchrun and srun, GPUs, locks, OpenMP."""
