"""Shards: few large files in place of many small ones. They are written, verified and copied.

On one machine, `write_shards` writes all shards. On several machines, `plan_jobs` makes a plan,
`write_shard` writes the shard of each job on any machine, and `finish` writes the index.
"""

from colab_utils.shards.jobs import write_shard
from colab_utils.shards.parts import finish, plan_jobs

__all__ = ["finish", "plan_jobs", "write_shard"]
