"""The processes that train together: the rank of this process, and values that they exchange."""

import os
from dataclasses import dataclass
from typing import Any

from torch import distributed


@dataclass(frozen=True)
class Ranks:
    """The rank of this process among ``count`` processes that train together.

    Ranks begin at 0, and only rank 0 writes files. A process that trains alone has rank 0 of 1.

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
        """Return whether this process is on the machine of rank 0."""
        return self.count == 1 or self._local_rank == self.rank

    @property
    def is_first_here(self) -> bool:
        """Return whether this process is the first one on its machine."""
        return self.count == 1 or self._local_rank == 0

    @property
    def _local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", self.rank))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in the order of their ranks."""
        values = [value] * self.count
        if self.count > 1:
            distributed.all_gather_object(values, value)
        return values

    def send(self, value: Any) -> Any:
        """Send the value of rank 0 to all processes; return it in each of them."""
        values = [value]
        if self.count > 1:
            distributed.broadcast_object_list(values, 0)
        return values[0]


def find_ranks() -> Ranks:
    """Return the rank of this process in torch's default process group; 0 of 1 without a group.

    Example:
        >>> find_ranks()
        Ranks(rank=0, count=1)
    """
    if distributed.is_available() and distributed.is_initialized():
        return Ranks(distributed.get_rank(), distributed.get_world_size())
    return Ranks()
