"""Compare strategies, which are ways of loading the same images.

`prepared` makes the data that the strategies read. `loaders` has their datasets, and what loads
them; `strategies` has the table of all strategies. `compare` checks that all samples are equal,
then times the strategies in turns.
"""

COURSE_STRATEGIES = ("sequential", "dataloader", "streams", "shards_on_ssd", "packed")
"""The strategies of the notebooks, in the order of the course."""
