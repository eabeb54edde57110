"""The tables of all shards of a folder in one file, which all processes of a machine share.

The file ``index.columns`` has the tables one after another, as `open_columns` makes them. A dataset
maps the file into memory, so that all ranks and workers of a machine share one copy of it. The
index holds a checksum of the file, which is compared when a dataset opens.

The file is written for large folders on this machine's own disk. A file on Drive cannot be mapped
safely, because the process ends if Drive fails. The file is never changed in place, because that
could end a process that has mapped it: a new file takes its place.
"""

import mmap
import os
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.errors import ColabUtilsWarning
from colab_utils.files import hash_file, name_temporary
from colab_utils.places import Place
from colab_utils.shards.arrays import IMAGE_TABLES, OBJECT_TABLES, ShardArrays, load_arrays
from colab_utils.shards.index import COLUMNS_NAME, ShardIndex
from colab_utils.shards.verify import find_fault
from colab_utils.streams import is_remote

Columns = dict[str, NDArray[Any]]
"""Tables by name."""

# With fewer images, no file is written. Their tables are read in about a second, and are a little
# faster to use in memory than in a mapped file.
_LEAST_IMAGES = 250_000

# Bytes of the rows of an image, and of an object.
_IMAGE_BYTES = 104
_OBJECT_BYTES = 52


def open_columns(images: int, objects: int, content: NDArray[np.uint8] | None = None) -> Columns:
    """Return tables with one row for each image, or for each object.

    They are those of ``IMAGE_TABLES`` and ``OBJECT_TABLES``, and four more. ``shard_of`` is the
    number of each image's shard. ``first`` is the number of the image's first object.
    ``bit_starts`` is where the bits of the image's masks begin: their offset in the arrays file of
    the shard, or in the shard's ``bits`` if these are in memory. ``mask_bytes`` is the number of
    bytes of each object's mask.

    Args:
        images: the number of images.
        objects: the number of rows for objects. It may be larger than the number of objects, such
            as the number of all annotations.
        content: the content of the file, mapped into memory. None makes tables of zeros.

    Example:
        >>> open_columns(2, 5)["boxes"].shape
        (5, 4)
    """
    number = IMAGE_TABLES["counts"]
    image_tables = {**IMAGE_TABLES, "shard_of": number, "first": number, "bit_starts": number}
    object_tables = {"mask_bytes": number, **OBJECT_TABLES}
    tables = {}
    offset = 0
    for rows, kinds in ((images, image_tables), (objects, object_tables)):
        for name, (kind, row) in kinds.items():
            shape = (rows, *row)
            if content is None:
                table = np.zeros(shape, kind)
            else:
                table = np.ndarray(shape, kind, content, offset)
            tables[name] = table
            offset += table.nbytes
    return tables


def join_shards(tables: Columns, shards: Iterable[ShardArrays]) -> list[Any]:
    """Fill tables from the arrays of all shards. Return the ``bits`` of each shard."""
    row = 0
    first = 0
    bits: list[Any] = []
    for shard in shards:
        end = row + len(shard.counts)
        fill_tables(tables, slice(row, end), shard, len(bits), first)
        bits.append(shard.bits)
        row = end
        first += len(shard.labels)
    return bits


def fill_tables(tables: Columns, rows: Any, shard: ShardArrays, number: int, first: int) -> None:
    """Fill some rows of tables from the arrays of a shard.

    Args:
        tables: the tables.
        rows: the rows of the shard's images.
        shard: the arrays of the shard.
        number: the number of the shard.
        first: the row of the shard's first object.
    """
    starts = np.cumsum(shard.counts) - shard.counts
    for name in IMAGE_TABLES:
        tables[name][rows] = getattr(shard, name)
    tables["shard_of"][rows] = number
    tables["first"][rows] = first + starts
    tables["bit_starts"][rows] = shard.mask_ends[starts]
    if isinstance(shard.bits, int):
        tables["bit_starts"][rows] += shard.bits
    objects = slice(first, first + len(shard.labels))
    for name in OBJECT_TABLES:
        tables[name][objects] = getattr(shard, name)
    tables["mask_bytes"][objects] = np.diff(shard.mask_ends)


def keep_columns(folder: Place, index: ShardIndex) -> ShardIndex:
    """Write the columns of a folder whose shards are all there. Do this only if the folder is large
    and on this machine's own disk.

    Returns:
        The index with the entry of the columns, or with none.

    Raises:
        ColabUtilsError: the arrays of a shard are damaged.
        OSError: the file cannot be written.
    """
    if index.images < _LEAST_IMAGES or is_remote(folder):
        return replace(index, columns=())
    path: Any = folder / COLUMNS_NAME
    temporary = name_temporary(path)
    try:
        size = index.images * _IMAGE_BYTES + index.annotations * _OBJECT_BYTES
        # A write to a mapped page ends the process if the disk is full. So the space is taken now.
        with open(temporary, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        content = np.memmap(temporary, np.uint8, "r+")
        shards = (load_arrays(folder / shard.arrays_name, shard) for shard in index.shards)
        join_shards(open_columns(index.images, index.annotations, content), shards)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return replace(index, columns=hash_file(path))


def map_columns(folder: Place, index: ShardIndex) -> Columns | None:
    """Map the columns of a folder into memory, to be read.

    Returns:
        The tables; None if there are none. If the file is missing or damaged, a warning says so.
    """
    if not index.columns or is_remote(folder):
        return None
    fault = find_fault(folder, [(COLUMNS_NAME, *index.columns)])
    if fault:
        warnings.warn(
            f"In {folder}, {fault}. The tables of all shards are read instead, which takes more "
            "time and memory. Delete this file, and run preprocess or copy again.",
            ColabUtilsWarning,
            stacklevel=3,
        )
        return None
    content = np.memmap(str(folder / COLUMNS_NAME), np.uint8, "r")
    return open_columns(index.images, index.annotations, content)


def release_pages(table: Any) -> None:
    """Give back the pages that this process has read from a mapped table's file.

    The system keeps the pages in memory for all processes while it has room. If a worker did not
    give them back, its memory would seem to grow during an epoch.
    """
    while isinstance(table, np.ndarray) and not isinstance(table, np.memmap):
        table = table.base
    if isinstance(table, np.memmap) and isinstance(table.base, mmap.mmap):
        table.base.madvise(mmap.MADV_DONTNEED)
