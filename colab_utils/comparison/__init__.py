"""The comparison: the same images by every strategy, checked for equality first, then timed in
turns.

`prepared` makes the data that strategies read, `loaders` has what loads them, and `strategies` the
table of all strategies. `compare` checks the samples and times the strategies.
"""

from collections.abc import Sequence
from statistics import median

COURSE_STRATEGIES = ("sequential", "dataloader", "streams", "shards_on_ssd", "packed")
"""The steps of the course in its order."""

LEAST_NOISE = 0.05
"""Closer than this, or than the spread of their repeats, the order of two bars means nothing."""


def measure_spread(repeats: Sequence[float]) -> float:
    """Return by how much repeats differ, as a share of their median; 0 of fewer than two.

    Example:
        >>> measure_spread([9.0, 10.0, 10.5])
        0.15
    """
    if len(repeats) < 2:
        return 0.0
    return (max(repeats) - min(repeats)) / median(repeats)
