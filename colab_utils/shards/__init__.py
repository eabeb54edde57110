"""Shards: few big files instead of many small ones; written, verified, copied."""
