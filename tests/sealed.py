"""Shards and checkpoints edited by a hand that makes every checksum right again: the hardest case of a loader."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from colab_utils.shards.format import ShardIndex, ShardInfo, hash_bytes, read_index, write_index
from colab_utils.shards.records import ShardArrays, describe_shard, dump_arrays
from colab_utils.training.checkpoint import _make_seal


def seal_index(folder: Path, **changes: Any) -> None:
    """Change the index's JSON as it stands, and make its checksum right."""
    raw = {**json.loads((folder / "index.json").read_text()), **changes}
    raw.pop("xxh3_64", None)
    checksum = hash_bytes(json.dumps(raw, sort_keys=True, separators=(",", ":")).encode())
    (folder / "index.json").write_text(json.dumps(raw | {"xxh3_64": checksum}))


def load_bits(path: Path, arrays: ShardArrays) -> ShardArrays:
    """Arrays that were loaded, with the masks' bits in memory."""
    if isinstance(arrays.bits, int):
        arrays = replace(arrays, bits=np.fromfile(path, np.uint8, offset=arrays.bits))
    return arrays


def seal_arrays(path: Path, arrays: ShardArrays, **changes: Any) -> ShardInfo:
    """Write an arrays file with other tables; ``changes`` of its head. Returns the shard as an index lists it."""
    head, arrays = describe_shard(path.read_bytes())[0], load_bits(path, arrays)
    path.unlink()
    path.write_bytes(dump_arrays(head | changes, arrays))
    return describe_shard(path.read_bytes())[1]


def seal_shard(folder: Path, number: int, info: ShardInfo) -> ShardIndex:
    """Put another shard's checksums into the index."""
    index = read_index(folder)
    shards = list(index.shards)
    shards[number] = info
    write_index(folder, index := replace(index, shards=tuple(shards)))
    return index


def describe_tar(path: Path, info: ShardInfo) -> ShardInfo:
    """A shard with the size and the checksum that its tar has now."""
    data = path.read_bytes()
    return ShardInfo(**{**asdict(info), "bytes": len(data), "xxh3_64": hash_bytes(data)})


def seal_checkpoint(content: bytes) -> bytes:
    """A zip as `torch.save` writes it, with the comment of a checkpoint."""
    changed = bytearray(content)
    changed[-2:] = len(_make_seal(b"")).to_bytes(2, "little")
    return bytes(changed) + _make_seal(changed)
