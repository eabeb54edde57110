"""Compare strategies, which are ways of loading the same images.

`prepared` makes the data that the strategies read. `loaders` has their datasets and prefetchers,
and `strategies` the table of all strategies. `compare` checks that all samples are equal, then
times the strategies in turns.
"""

from collections.abc import Sequence
from statistics import median

COURSE_STRATEGIES = ("sequential", "dataloader", "streams", "shards_on_ssd", "packed")
"""The strategies of the notebooks, in the order of the course."""

LEAST_NOISE = 0.05
"""Two strategies count as equally fast if they differ by less than this share."""


def measure_spread(repeats: Sequence[float]) -> float:
    """Return by how much repeats differ, as a share of their median; 0 if there are fewer than two.

    Example:
        >>> measure_spread([9.0, 10.0, 10.5])
        0.15
    """
    if len(repeats) < 2:
        return 0.0
    return (max(repeats) - min(repeats)) / median(repeats)
