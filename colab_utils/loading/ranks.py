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
    local_count: int = 1
    """Processes on this machine, whose ranks follow each other; 1 if ``torchrun`` does not tell."""

    @property
    def is_first(self) -> bool:
        """Return whether this process writes the files."""
        return self.rank == 0

    @property
    def is_on_first_host(self) -> bool:
        """Return whether this process is on the machine of rank 0."""
        number = int(os.environ.get("LOCAL_RANK", self.rank))
        return self.count == 1 or number == self.rank

    @property
    def hosts(self) -> int:
        """Return the number of machines."""
        return self.count // self.local_count

    @property
    def host(self) -> int:
        """Return which of the machines this is, from 0."""
        return self.rank // self.local_count

    @property
    def place(self) -> int:
        """Return which of the processes this is if one of each machine is counted after another."""
        return self.host + self.hosts * (self.rank % self.local_count)

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
        Ranks(rank=0, count=1, local_count=1)
    """
    if distributed.is_available() and distributed.is_initialized():
        count = distributed.get_world_size()
        local_count = min(count, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        return Ranks(distributed.get_rank(), count, local_count)
    return Ranks()
