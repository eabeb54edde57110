"""Groups of shards: each host copies only its own groups, and all hosts share each batch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.ranks import Ranks
from colab_utils.require import require_count

# In the first epoch, a group's images are shuffled within windows of its shards. The windows hold
# 1, 1, 2, and then 4 shards each.
_WINDOW_SHARDS = 4


def deal_shards(sizes: Sequence[int], *, groups: int, seed: int) -> list[list[int]]:
    """Deal shards to groups of about the same size.

    The groups depend on the arguments alone, so that all hosts find the same ones.

    Args:
        sizes: Number of images of each shard.
        groups: Number of groups.
        seed: Decides the order of shards of the same size.

    Returns:
        The numbers of each group's shards, in the order in which they are copied: the smallest
        first.

    Raises:
        ColabUtilsError: There are more groups than shards.

    Example:
        >>> deal_shards([10, 20, 40, 30], groups=2, seed=0)
        [[0, 2], [1, 3]]
    """
    groups = require_count("groups", groups)
    if groups > len(sizes):
        raise ColabUtilsError(
            f"The {len(sizes)} shards cannot be dealt to {groups} groups. Pass at most as many "
            "groups as there are shards, or write smaller shards (shard_mb)."
        )
    order = np.random.default_rng(seed).permutation(len(sizes)).tolist()
    order.sort(key=lambda number: sizes[number], reverse=True)
    dealt: list[list[int]] = [[] for _ in range(groups)]
    totals = [0] * groups
    for number in order:
        smallest = min(range(groups), key=lambda group: (totals[group], len(dealt[group])))
        dealt[smallest].insert(0, number)
        totals[smallest] += sizes[number]
    return dealt


def alternate(parts: list[list[int]]) -> list[int]:
    """Return the first number of each part, then the second of each, and so on.

    Example:
        >>> alternate([[1, 2, 3], [7]])
        [1, 7, 2, 3]
    """
    rounds = zip_longest(*parts)
    return [number for numbers in rounds for number in numbers if number is not None]


@dataclass(frozen=True)
class CopiedGroups:
    """The groups whose shards one host copies."""

    groups: range
    """Numbers of the host's groups."""
    deal: list[list[int]]
    """Shards of every group, see `deal_shards`."""

    def list_shards(self) -> list[int]:
        """Return the shards to copy, in an order in which every group begins early."""
        return alternate([self.deal[group] for group in self.groups])


def choose_groups(groups: range, sizes: Sequence[int], *, seed: int) -> CopiedGroups:
    """Return the groups that a host copies, and the shards of every group.

    Args:
        groups: Numbers of the host's groups, such as ``range(host, 8, hosts)``. The stop of the
            range is the number of all groups. The step is the number of hosts.
        sizes: Number of images of each shard.
        seed: See `deal_shards`.

    Raises:
        ColabUtilsError: The range has no group, or the number of hosts does not divide the groups.
    """
    if not (isinstance(groups, range) and groups and 0 <= groups.start < groups.step):
        raise ColabUtilsError(
            f"The groups of a host are a range such as range(host, 8, hosts), and groups is "
            f"{groups!r}. Count the hosts from 0."
        )
    if groups.stop % groups.step:
        raise ColabUtilsError(
            f"{groups.stop} groups cannot be divided among {groups.step} hosts. Use a number of "
            "hosts that divides the groups."
        )
    return CopiedGroups(groups, deal_shards(sizes, groups=groups.stop, seed=seed))


class DealtImages:
    """The images of a dataset, in groups of shards.

    Args:
        deal: The shards of each group, see `deal_shards`.
        shard_of: int64 [I]: number of each image's shard.

    Attributes:
        groups: Number of groups.
        group_of: int64 [I]: number of each image's group.
        window_of: int64 [I]: number of the window in which each image comes in the first epoch.
    """

    def __init__(self, deal: Sequence[Sequence[int]], shard_of: NDArray[np.int64]) -> None:
        self.groups = len(deal)
        count = sum(len(shards) for shards in deal)
        group_of = np.zeros(count, np.int64)
        window_of = np.zeros(count, np.int64)
        for group, shards in enumerate(deal):
            for place, shard in enumerate(shards):
                group_of[shard] = group
                window = 2 + place // _WINDOW_SHARDS
                if place < _WINDOW_SHARDS:
                    window = place.bit_length()
                window_of[shard] = window
        self.group_of = group_of[shard_of]
        self.window_of = window_of[shard_of]

    def take_places(self, indices: Sequence[int], first: int, step: int) -> list[int]:
        """Return the images of a batch that lie at place ``first``, and at every ``step``-th place
        after it.

        A place is not a position in ``indices``. The groups take turns at the places: place p has
        the next image of group ``p % groups``. If that group has no more image in the batch, the
        place is empty.
        """
        taken = []
        counts: Counter[int] = Counter()
        for index, group in zip(indices, self.group_of[indices].tolist(), strict=True):
            place = counts[group] * self.groups + group
            counts[group] += 1
            if place % step == first:
                taken.append(index)
        return taken


def require_copied(ranks: Ranks, deal: list[list[int]], copied: CopiedGroups | None) -> None:
    """Refuse groups that the hosts cannot share evenly, or that are not the groups of this host.

    Args:
        ranks: The processes that train together.
        deal: The shards of each group; empty without groups.
        copied: The groups that the dataset copies; None if it copies all.

    Raises:
        ColabUtilsError: The groups cannot be shared, or the dataset copies other groups.
    """
    hosts = ranks.hosts
    if deal and (ranks.count % ranks.local_count or len(deal) % hosts):
        raise ColabUtilsError(
            f"{len(deal)} groups cannot be divided among {hosts} hosts. Use a number of "
            "hosts that divides the groups, with the same number of processes on each."
        )
    if copied is None:
        return
    if copied.deal != deal:
        raise ColabUtilsError(
            "The dataset and the loader deal the shards differently: to "
            f"{len(copied.deal)} and to {len(deal)} groups. If these numbers are equal, the seeds "
            "differ. Pass the same number of groups and the same seed to both."
        )
    wanted = range(ranks.host, len(deal), hosts)
    if not {*wanted} <= {*copied.groups}:
        raise ColabUtilsError(
            f"This process is on host {ranks.host} of {hosts}, and its dataset copies the groups "
            f"{copied.groups}. Open it with groups={wanted}."
        )
