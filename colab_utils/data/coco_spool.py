"""Read a COCO dataset, keeping its images in memory and its annotations on this machine's disk.

The JSON is read once. Its annotations are written to a temporary file in blocks, in the order of
the JSON. When the images of each shard are known, the annotations of each block are sorted by shard
and written to a second temporary file. Each shard reads its part of each block there. The files
have no names, so the system deletes them when the process ends.
"""

import os
import tempfile
import weakref
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.coco import (
    ROW,
    CocoDataset,
    Strangers,
    find_repeated_names,
    group_annotations,
    join_parts,
    make_images,
    refuse_strangers,
    warn_of_divided,
    warn_of_place,
)
from colab_utils.data.coco_json import Columns, read_columns
from colab_utils.data.image_paths import require_folder
from colab_utils.drive import explain_write
from colab_utils.files import FileStamp, stamp_file
from colab_utils.machine import require_space
from colab_utils.places import Place, PlaceLike, open_place

# The numbers of an annotation, and where its text starts among the texts of its block.
_ROW = np.dtype([*ROW.descr, ("text_start", np.int64)])
# Largest number of bytes of annotations that stay in memory. If there are more, all go to the disk.
_MEMORY_BYTES = 1 << 24


class _Block(NamedTuple):
    """Where the rows of a block lie in the file. Their texts follow them."""

    start: int
    rows: int


class _Spool:
    """Keep rows and texts in a temporary file, block by block."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(_MEMORY_BYTES)  # noqa: SIM115
        # The file is closed when nothing refers to the spool any more.
        weakref.finalize(self, self._file.close)
        self.blocks: list[_Block] = []

    def add(self, table: NDArray[Any], texts: bytes | bytearray) -> None:
        rows = np.empty(len(table), _ROW)
        for name in ROW.names or ():
            rows[name] = table[name]
        rows["text_start"] = np.append(0, table["text_end"])[:-1]
        with explain_write(Path(tempfile.gettempdir())):
            start = self._file.seek(0, os.SEEK_END)
            self._file.write(rows.tobytes())
            self._file.write(texts)
            # Without this, a forked process would write the buffer's content once more.
            self._file.flush()
        self.blocks.append(_Block(start, len(rows)))

    def read_rows(self, block: _Block, first: int, stop: int) -> NDArray[Any]:
        self._file.seek(block.start + first * _ROW.itemsize)
        return np.frombuffer(self._file.read((stop - first) * _ROW.itemsize), _ROW)

    def read_texts(self, block: _Block, rows: NDArray[Any]) -> bytes:
        """Return the texts of rows that follow one another."""
        if not len(rows):
            return b""
        start = int(rows["text_start"][0])
        self._file.seek(block.start + block.rows * _ROW.itemsize + start)
        return self._file.read(int(rows["text_end"][-1]) - start)


@dataclass(frozen=True, eq=False)
class SpooledCoco:
    """Hold the images of a COCO dataset; its annotations lie in a temporary file.

    Make one with `spool_coco`. It cannot be sent to another process, but the datasets from `select`
    and `cut` can be sent.
    """

    images: CocoDataset
    """The images and categories, without an annotation."""
    annotations: int
    crowds: int
    stamp: FileStamp
    """The size and time of the JSON when it was read."""
    _spool: _Spool
    _strangers: Strangers

    def __len__(self) -> int:
        return len(self.images)

    def select(self, indices: NDArray[np.int64]) -> CocoDataset:
        """Return these images alone, with their annotations, in this order."""
        return next(self.cut([indices]))

    def cut(self, parts: Sequence[NDArray[np.int64]]) -> Iterator[CocoDataset]:
        """Yield a dataset for each part: its images with their annotations.

        No image may be in two parts.
        """
        part_of = np.full(len(self), -1, np.int32)
        place_of = np.zeros(len(self), np.int32)
        for number, indices in enumerate(parts):
            part_of[indices] = number
            place_of[indices] = np.arange(len(indices))
        by_part = _Spool()
        # For each block: the rows at which the parts start, and where the last part ends.
        bounds = []
        for block in self._spool.blocks:
            rows = self._spool.read_rows(block, 0, block.rows)
            image_of = self._strangers.find_images(rows)
            chosen = part_of[image_of]
            # Annotations whose images are in no part are sorted to the front, and left out.
            order = np.argsort(chosen, kind="stable")[np.count_nonzero(chosen < 0) :]
            bounds.append(np.searchsorted(chosen[order], np.arange(len(parts) + 1)))
            texts = self._spool.read_texts(block, rows) if len(order) else b""
            by_part.add(*_order_texts(rows[order], place_of[image_of[order]], texts))
        for number, indices in enumerate(parts):
            ends = [starts[number : number + 2] for starts in bounds]
            yield _join_blocks(self.images.select(indices), by_part, ends)


def _order_texts(
    rows: NDArray[Any], places: NDArray[np.int32], texts: bytes
) -> tuple[NDArray[Any], bytes]:
    """Return the rows, and their texts in the order of the rows.

    Each row's ``image_id`` becomes the place of its image in the part.
    """
    spans = np.stack([rows["text_start"], rows["text_end"]], axis=1)
    ordered_texts, ends = join_parts(texts, spans)
    rows["text_end"] = ends[1:]
    rows["image_id"] = places
    return rows, ordered_texts


def _join_blocks(
    images: CocoDataset, spool: _Spool, bounds: list[NDArray[np.int64]]
) -> CocoDataset:
    """Return the dataset of one part: its images, and its rows and texts from all blocks.

    ``bounds`` holds, for each block, the rows at which the part starts and ends.
    """
    pieces = []
    texts = bytearray()
    for block, (first, stop) in zip(spool.blocks, bounds, strict=True):
        pieces.append(spool.read_rows(block, int(first), int(stop)))
        texts += spool.read_texts(block, pieces[-1])
    rows = np.concatenate(pieces)
    rows["text_end"] = np.cumsum(rows["text_end"] - rows["text_start"])
    return group_annotations(images, rows, rows["image_id"], texts)


def spool_coco(images: PlaceLike, annotations: PlaceLike) -> SpooledCoco:
    """Read annotations as `open_coco` does, and hold only the images in memory.

    Raises:
        ColabUtilsError: as `open_coco` does, or if this machine's disk is too small.
        DriveLostError: if Drive went away.
    """
    require_folder(images)
    path = open_place(annotations)
    stamp = stamp_file(path)
    if stamp.bytes > _MEMORY_BYTES:
        # The annotations are written twice: in the order of the JSON, then in the order of shards.
        cure = "or name a folder of another disk in the variable TMPDIR"
        require_space(Path(tempfile.gettempdir()), 2 * stamp.bytes, cure)
    dataset = _spool(path, stamp)
    repeated = find_repeated_names(dataset.images)
    if repeated.size:
        warn_of_divided(annotations, dataset.select(repeated))
    warn_of_place(images, dataset.images)
    return dataset


def _spool(path: Place, stamp: FileStamp) -> SpooledCoco:
    spool = _Spool()

    def keep(rows: "array[int]", texts: bytearray) -> None:
        spool.add(np.frombuffer(rows, ROW), texts)

    columns = Columns(keep)
    fingerprint = read_columns(path, columns)
    keep(columns.rows, columns.texts)
    images = make_images(columns, fingerprint)
    strangers = Strangers(images)
    crowds = 0
    for block in spool.blocks:
        rows = spool.read_rows(block, 0, block.rows)
        strangers.find_images(rows)
        crowds += int(rows["is_crowd"].sum())
    refuse_strangers(path, strangers.add_to(images))
    return SpooledCoco(images, columns.annotations, crowds, stamp, spool, strangers)
