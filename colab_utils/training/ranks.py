"""The process group of torch, if ``torchrun`` starts several processes to train together."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed

from colab_utils.loading.ranks import Ranks, find_ranks

# How long the other processes wait for the first one, for example while it evaluates.
_PATIENCE = timedelta(minutes=30)


@contextmanager
def join_ranks(device: torch.device) -> Iterator[Ranks]:
    """Join the processes that ``torchrun`` started: by NCCL on GPUs, by gloo on CPUs.

    Without ``torchrun``, this process is alone.

    Example:
        >>> with join_ranks(torch.device("cpu")) as ranks:
        ...     ranks.count
        1
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield Ranks()
        return
    # If the user has made a process group, it is used, and not destroyed afterwards.
    joins = not distributed.is_initialized()
    if joins:
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE
        )
    try:
        yield find_ranks()
    finally:
        if joins:
            distributed.destroy_process_group()
