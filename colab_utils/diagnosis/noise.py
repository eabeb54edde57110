"""What is beyond the noise: how far repeated measurements differ, and which gains count."""

from collections.abc import Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

LEAST_NOISE = 0.05
"""Two rates count as equal if they differ by less than this share."""

# A standard error comes from the means of this many blocks of successive batches.
_BLOCKS = 10


def measure_spread(repeats: Sequence[float]) -> float:
    """Return by how much repeats differ, as a share of their median; 0 if there are fewer than two.

    Example:
        >>> measure_spread([9.0, 10.0, 10.5])
        0.15
    """
    if len(repeats) < 2:
        return 0.0
    return (max(repeats) - min(repeats)) / median(repeats)


def find_noise(*spreads: float) -> float:
    """Return the least difference of two rates that counts, as a share: 5 %, or the largest of the
    spreads of the two measurements.

    Example:
        >>> find_noise(0.01, 0.08), find_noise()
        (0.08, 0.05)
    """
    return max((LEAST_NOISE, *spreads))


def is_faster(rate: float, other: float, *spreads: float) -> bool:
    """Return whether a rate is above another one by more than the noise; see `find_noise`.

    Example:
        >>> is_faster(1.1, 1.0), is_faster(1.1, 1.0, 0.2)
        (True, False)
    """
    return rate > (1 + find_noise(*spreads)) * other


def find_error(seconds: NDArray[np.float64], round_batches: int = 1) -> float:
    """Return the standard error of the mean time of a batch, as a share of the mean.

    It comes from the means of up to ten blocks of successive batches (the method of batch means).
    Single batches would not do, because a worker that is late holds up the batches of all others,
    which then come at once. A few blocks may be alike by chance, so the fewer they are, the more
    the error is enlarged: 1.2 times for ten blocks, three times for two. Student's t distribution
    has similar factors.

    Args:
        seconds: Time of each batch in seconds, float64 [batches].
        round_batches: Number of workers that deliver in turns. A block has at least so many
            batches.

    Returns:
        The share. It is 1 if there are too few batches for two blocks: nothing is known then.

    Example:
        >>> round(find_error(np.array([1.0, 3.0] * 50)), 3), find_error(np.ones(1))
        (0.0, 1.0)
    """
    blocks = min(_BLOCKS, len(seconds) // round_batches)
    if blocks < 2:
        return 1.0
    means = [block.mean() for block in np.array_split(seconds, blocks)]
    error_s = np.std(means, ddof=1) / np.sqrt(blocks) * (blocks + 1) / (blocks - 1)
    return float(error_s / max(seconds.mean(), 1e-9))
