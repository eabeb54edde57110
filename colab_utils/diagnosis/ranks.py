"""Which rank the others wait for, where several train together."""

from collections.abc import Sequence
from contextlib import suppress
from statistics import median

from torch.distributed import distributed_c10d

from colab_utils.loading.ranks import find_ranks

# A rank that waits for so much more of its time than the others, 0 to 1.
_MORE = 0.1


def find_rank() -> int | None:
    """Return the rank of this process; None where it trains alone."""
    ranks = find_ranks()
    return ranks.rank if ranks.count > 1 else None


def compare_ranks(loader: int, wait_share: float) -> str:
    """Tell the other ranks for how much of its time this one waits for batches, and compare.

    The process group's own store is used, and nobody is waited for: the last rank of a pass knows
    them all.

    Args:
        loader: its number, in the order in which each rank began to watch loaders.
        wait_share: of this rank, 0 to 1.

    Returns:
        A sentence; "" where not all are known, or none is slower.
    """
    # A run that ends may have taken its store away already.
    with suppress(RuntimeError):
        ranks = find_ranks()
        store = distributed_c10d._get_default_store()
        keys = [f"colab_utils/{loader}/{rank}" for rank in range(ranks.count)]
        store.set(keys[ranks.rank], str(wait_share))
        if store.check(keys):
            return describe_ranks([float(store.get(key)) for key in keys])
    return ""


def describe_ranks(wait_shares: Sequence[float]) -> str:
    """Name the rank that waits for batches more than all others; its place in the list.

    Example:
        >>> describe_ranks([0.02, 0.45, 0.04])
        'The other ranks wait for rank 1: it waits 45% of its time for batches, and they 3%.'
        >>> describe_ranks([0.4, 0.45])
        ''
    """
    *others, largest = sorted(wait_shares)
    if not others or largest < max(others) + _MORE:
        return ""
    return (
        f"The other ranks wait for rank {list(wait_shares).index(largest)}: it waits "
        f"{largest:.0%} of its time for batches, and they {median(others):.0%}."
    )
