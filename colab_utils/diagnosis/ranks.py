"""Find the rank that the others wait for, if several processes train together."""

from collections.abc import Sequence
from contextlib import suppress
from statistics import median

from torch.distributed import distributed_c10d

from colab_utils.loading.ranks import find_ranks

# A rank is named if its wait share is larger than that of every other rank by at least this much.
_MORE = 0.1


def find_rank() -> int | None:
    """Return the rank of this process; None if it trains alone."""
    ranks = find_ranks()
    return ranks.rank if ranks.count > 1 else None


def compare_ranks(loader: int, wait_share: float) -> str:
    """Give the other ranks the wait share of this one, and compare the shares of all ranks.

    The ranks exchange their shares through the store of the process group. None of them waits for
    the others here, so only the rank that ends a pass last knows all shares.

    Args:
        loader: Number of the loader. Each rank numbers its loaders in the order in which it began
            to watch them.
        wait_share: Share of its time for which this rank waits for batches, 0 to 1.

    Returns:
        A sentence; "" if some shares are not known yet, or if no rank is slower.
    """
    # At the end of a run, the store may be gone already.
    with suppress(RuntimeError):
        ranks = find_ranks()
        store = distributed_c10d._get_default_store()
        keys = [f"colab_utils/{loader}/{rank}" for rank in range(ranks.count)]
        store.set(keys[ranks.rank], str(wait_share))
        if store.check(keys):
            return describe_ranks([float(store.get(key)) for key in keys])
    return ""


def describe_ranks(wait_shares: Sequence[float]) -> str:
    """Return a sentence that names the rank that waits much more for batches than every other rank;
    "" if there is none. The position of a share in the list is its rank.

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
