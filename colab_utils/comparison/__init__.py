"""The comparison: the same images by every strategy, checked for equality first, then timed in turns.

`compare` lists the steps and checks the samples; `strategies` has the strategies, and makes the data that they read.
"""
