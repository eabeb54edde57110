"""The tables of all shards of a folder, one after another in memory."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.shards.arrays import IMAGE_TABLES, OBJECT_TABLES, ShardArrays

Tables = dict[str, NDArray[Any]]
"""Tables by name."""


def make_tables(images: int, objects: int) -> Tables:
    """Return tables of zeros, with one row for each image, or for each object.

    They are those of ``IMAGE_TABLES`` and ``OBJECT_TABLES``, and four more. ``shard_of`` is the
    number of each image's shard. ``first`` is the number of the image's first object.
    ``bit_starts`` is where the bits of the image's masks begin: their offset in the arrays file of
    the shard, or in the shard's ``bits`` if these are in memory. ``mask_bytes`` is the number of
    bytes of each object's mask.

    Args:
        images: the number of images.
        objects: the number of rows for objects. It may be larger than the number of objects, such
            as the number of all annotations.

    Example:
        >>> make_tables(2, 5)["boxes"].shape
        (5, 4)
    """
    number = IMAGE_TABLES["counts"]
    image_tables = {**IMAGE_TABLES, "shard_of": number, "first": number, "bit_starts": number}
    object_tables = {"mask_bytes": number, **OBJECT_TABLES}
    tables = {}
    for rows, kinds in ((images, image_tables), (objects, object_tables)):
        for name, (kind, row) in kinds.items():
            tables[name] = np.zeros((rows, *row), kind)
    return tables


def join_shards(tables: Tables, shards: Iterable[ShardArrays]) -> list[Any]:
    """Fill tables from the arrays of all shards. Return the ``bits`` of each shard."""
    row = 0
    first = 0
    bits: list[Any] = []
    for shard in shards:
        rows = slice(row, row + len(shard.counts))
        objects = slice(first, first + len(shard.labels))
        starts = np.cumsum(shard.counts) - shard.counts
        for name in IMAGE_TABLES:
            tables[name][rows] = getattr(shard, name)
        tables["shard_of"][rows] = len(bits)
        tables["first"][rows] = first + starts
        tables["bit_starts"][rows] = shard.mask_ends[starts]
        if isinstance(shard.bits, int):
            tables["bit_starts"][rows] += shard.bits
        for name in OBJECT_TABLES:
            tables[name][objects] = getattr(shard, name)
        tables["mask_bytes"][objects] = np.diff(shard.mask_ends)
        bits.append(shard.bits)
        row = rows.stop
        first = objects.stop
    return bits
