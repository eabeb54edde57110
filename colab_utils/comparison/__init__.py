"""The comparison: the same images by every strategy, checked for equality first, then timed in turns.

`compare` lists the steps and checks the samples, `strategies` has the datasets, the prefetchers and the strategies that
join them, and `prepared` makes the data that they read.
"""
