"""What one rank may take of the machine it shares with others: a device, cores, a scheduling class."""

from __future__ import annotations

import os

import torch


def pick_device(device: str | torch.device | None, local_rank: int) -> torch.device:
    """``device`` as given, else the local rank's GPU, else the CPU. A GPU becomes the current device, before any group is made."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
    if chosen.type == "cuda":
        chosen = torch.device("cuda", chosen.index if chosen.index is not None else local_rank % torch.cuda.device_count())
        torch.cuda.set_device(chosen)
    return chosen


def share_cores(num_ranks: int) -> None:
    """Split the cores among ``num_ranks`` ranks of this machine: threads for each, and no preempting one another where all are taken.

    Batch scheduling makes small communications several times faster when there are at least as many ranks as cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores // num_ranks))
    if 1 < num_ranks >= cores and hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
