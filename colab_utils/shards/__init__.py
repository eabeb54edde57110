"""Shards: few big files instead of many small ones; written, verified, copied.

On one machine, `write_shards` does all. On several, `plan_jobs` plans, any machine calls
`write_shard` for each job, and `finish` writes the index.
"""

from colab_utils.shards.jobs import write_shard
from colab_utils.shards.parts import finish, plan_jobs

__all__ = ["finish", "plan_jobs", "write_shard"]
