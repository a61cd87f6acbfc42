"""Several processes: torchrun, DDP and FSDP2, gloo on CPUs and NCCL on GPUs.

Without this folder train.py runs in one process, and a start by torchrun is refused in one line.
"""
