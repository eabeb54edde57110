"""The comparison: the same images by every strategy, checked for equality first, then timed in
turns.

`compare` lists the steps and checks the samples; `strategies` has the strategies, and makes the
data that they read.
"""

COURSE_STRATEGIES = ("sequential", "thread_queue", "dataloader", "shards_on_ssd", "packed")
"""The steps of the course in its order, each on top of the one before."""
