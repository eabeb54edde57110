"""The comparison: the same images by every strategy, checked for equality first, then timed in
turns.

`prepared` makes the data that strategies read, `loaders` has what loads them, and `strategies` the
table of all strategies. `compare` checks the samples and times the strategies.
"""

COURSE_STRATEGIES = ("sequential", "thread_queue", "dataloader", "shards_on_ssd", "packed")
"""The steps of the course in its order, each on top of the one before."""
