"""The processes that train together, as ``torchrun`` starts them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

# How long the other processes wait for the first one, while it evaluates.
_PATIENCE = timedelta(minutes=30)


@dataclass(frozen=True)
class Ranks:
    """Which of ``count`` processes this is, from 0; rank 0 alone writes files. One process alone is
    0 of 1.

    Example:
        >>> ranks = Ranks()
        >>> ranks.is_first, ranks.gather("mine"), ranks.send("yours")
        (True, ['mine'], 'yours')
    """

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Return whether this process writes the files."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in the order of their ranks."""
        values = [value] * self.count
        if self.count > 1:
            distributed.all_gather_object(values, value)
        return values

    def send(self, value: Any) -> Any:
        """Return the value of the first process, in every process."""
        values = [value]
        if self.count > 1:
            distributed.broadcast_object_list(values, 0)
        return values[0]


@contextmanager
def join_ranks(device: torch.device) -> Iterator[Ranks]:
    """Join the processes that ``torchrun`` started, by NCCL on GPUs and by gloo on CPUs. Without
    ``torchrun``, this process is alone.

    Example:
        >>> with join_ranks(torch.device("cpu")) as ranks:
        ...     ranks.count
        1
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield Ranks()
        return
    # A group of the user's own is used, and stays.
    joins = not distributed.is_initialized()
    if joins:
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE
        )
    try:
        yield Ranks(distributed.get_rank(), distributed.get_world_size())
    finally:
        if joins:
            distributed.destroy_process_group()
