"""The processes that train together: which one this is, and what they tell each other."""

import os
from dataclasses import dataclass
from typing import Any

from torch import distributed


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

    @property
    def is_on_first_host(self) -> bool:
        """Return whether this process is on the machine of rank 0.

        ``torchrun`` counts the ranks machine by machine, and gives each its number on its machine.
        """
        number = int(os.environ.get("LOCAL_RANK", self.rank))
        return self.count == 1 or number == self.rank

    @property
    def local_count(self) -> int:
        """Return the number of processes on this machine; 1 if no ``torchrun`` tells it."""
        return min(self.count, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))

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


def find_ranks() -> Ranks:
    """Return which process of torch's default group this is; 0 of 1 without a group.

    Example:
        >>> find_ranks()
        Ranks(rank=0, count=1)
    """
    if distributed.is_available() and distributed.is_initialized():
        return Ranks(distributed.get_rank(), distributed.get_world_size())
    return Ranks()
