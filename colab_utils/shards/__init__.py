"""Shards: few large files in place of many small ones. They are written, verified and copied.

On one machine, `write_shards` writes all shards and their index. On several machines, each writes a
part of the shards, and `finish_shards` writes the index.
"""
