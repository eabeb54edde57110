"""A COCO dataset whose annotations wait on this machine's disk, while memory holds its images.

The JSON is read once: block by block, its annotations go into a temporary file, in their order.
They are dealt to the images of each shard when those are known, through a second temporary file.
Neither file has a name, so that nothing is left behind.
"""

import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.coco import (
    CocoDataset,
    ImageFinder,
    find_strange_categories,
    make_images,
    refuse_strangers,
    warn_of_place,
)
from colab_utils.data.coco_json import AnnotationBlock, Columns, read_columns
from colab_utils.data.image_paths import require_folder
from colab_utils.drive import Retries, ShortReadError, explain_write
from colab_utils.files import FileStamp, stamp_file
from colab_utils.machine import require_space
from colab_utils.require import require_local_path

# What is kept of each annotation beside its text.
_ROW = np.dtype(
    [
        ("image", np.int64),
        ("id", np.int64),
        ("category", np.int64),
        ("end", np.int64),
        ("is_crowd", np.bool_),
    ]
)
# Annotations of so many bytes stay in memory.
_MEMORY_BYTES = 1 << 25


class _Block(NamedTuple):
    """Where a block lies: its rows, and behind them its texts."""

    start: int
    rows: int
    text_bytes: int


class _Spool:
    """Keep blocks of rows and texts in a temporary file."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(_MEMORY_BYTES)  # noqa: SIM115
        # The last one that needs it ends it.
        weakref.finalize(self, self._file.close)
        self.blocks: list[_Block] = []

    def add(self, block: AnnotationBlock) -> None:
        rows = np.empty(len(block.ids), _ROW)
        rows["image"] = np.frombuffer(block.image_ids, np.int64)
        rows["id"] = np.frombuffer(block.ids, np.int64)
        rows["category"] = np.frombuffer(block.category_ids, np.int64)
        rows["end"] = np.frombuffer(block.ends, np.int64)
        rows["is_crowd"] = np.frombuffer(block.crowds, np.bool_)
        with explain_write(Path(tempfile.gettempdir())):
            start = self._file.seek(0, os.SEEK_END)
            self._file.write(rows.tobytes())
            self._file.write(block.texts)
        self.blocks.append(_Block(start, len(rows), len(block.texts)))

    def write(self, start: int, content: bytes) -> None:
        with explain_write(Path(tempfile.gettempdir())):
            self._file.seek(start)
            self._file.write(content)

    def flush(self) -> None:
        """Leave nothing to be written by a process that is forked."""
        with explain_write(Path(tempfile.gettempdir())):
            self._file.flush()

    def read_rows(self, block: _Block) -> NDArray[Any]:
        self._file.seek(block.start)
        return np.frombuffer(self._file.read(block.rows * _ROW.itemsize), _ROW)

    def read_texts(self, block: _Block) -> bytes:
        self._file.seek(block.start + block.rows * _ROW.itemsize)
        return self._file.read(block.text_bytes)


@dataclass(frozen=True, eq=False)
class SpooledCoco:
    """Hold the images of a COCO dataset; its annotations lie in a temporary file.

    Make one with `spool_coco`. It stays in its process: send the datasets that it gives.
    """

    images: CocoDataset
    """The images and categories, without an annotation."""
    annotations: int
    crowds: int
    stamp: FileStamp
    """Of the JSON, as it was when it was read."""
    _spool: _Spool

    def __len__(self) -> int:
        return len(self.images)

    def select(self, indices: NDArray[np.int64]) -> CocoDataset:
        """Return these images alone, with their annotations, in this order."""
        return next(self.cut([indices]))

    def cut(self, parts: Sequence[NDArray[np.int64]]) -> Iterator[CocoDataset]:
        """Yield the images of each part, with their annotations; no image is in two parts."""
        places = _Places(len(self), parts)
        dealt = _Spool()
        blocks = self._measure_parts(places)
        ends = _Ends(blocks)
        for block in self._spool.blocks:
            _deal(self._spool, block, places, ends, dealt)
        dealt.flush()
        for indices, block in zip(parts, blocks, strict=True):
            rows = dealt.read_rows(block)
            yield _join(self.images.select(indices), rows, dealt.read_texts(block), places)

    def _measure_parts(self, places: "_Places") -> list[_Block]:
        """Return where each part is to lie, one behind the other."""
        rows = np.zeros(places.count, np.int64)
        text_bytes = np.zeros(places.count, np.int64)
        for block in self._spool.blocks:
            table = self._spool.read_rows(block)
            part_of = places.part_of[table["image"]]
            is_chosen = part_of >= 0
            lengths = np.diff(table["end"], prepend=0)[is_chosen]
            rows += np.bincount(part_of[is_chosen], minlength=places.count)
            # No part has as many bytes as a float cannot count.
            text_bytes += np.bincount(part_of[is_chosen], lengths, places.count).astype(np.int64)
        sizes = rows * _ROW.itemsize + text_bytes
        starts = np.cumsum(sizes) - sizes
        return [_Block(*place) for place in np.stack([starts, rows, text_bytes], axis=1).tolist()]


class _Places:
    """Tell the part of each image, and its place there: -1 where it is in no part."""

    def __init__(self, images: int, parts: Sequence[NDArray[np.int64]]) -> None:
        self.count = len(parts)
        self.part_of = np.full(images, -1, np.int32)
        self.place_of = np.full(images, -1, np.int32)
        for number, indices in enumerate(parts):
            self.part_of[indices] = number
            self.place_of[indices] = np.arange(len(indices))


class _Ends:
    """Tell where the next rows and texts of each part go."""

    def __init__(self, blocks: list[_Block]) -> None:
        self.rows = [block.start for block in blocks]
        self.texts = [block.start + block.rows * _ROW.itemsize for block in blocks]


def _deal(spool: _Spool, block: _Block, places: _Places, ends: _Ends, dealt: _Spool) -> None:
    """Write a block's rows and texts, each to those of its part.

    In what is written, ``end`` is the length of a text.
    """
    rows = spool.read_rows(block)
    part_of = places.part_of[rows["image"]]
    # Those of no part come first.
    order = np.argsort(part_of, kind="stable")[np.count_nonzero(part_of < 0) :]
    if not len(order):
        return
    texts = spool.read_texts(block)
    chosen = rows[order]
    chosen["end"] = np.diff(rows["end"], prepend=0)[order]
    text_ends = rows["end"][order]
    text_starts = text_ends - chosen["end"]
    spans = zip(text_starts.tolist(), text_ends.tolist(), strict=True)
    pieces = [texts[start:end] for start, end in spans]
    numbers, firsts = np.unique(part_of[order], return_index=True)
    lasts = [*firsts[1:].tolist(), len(order)]
    for number, first, last in zip(numbers.tolist(), firsts.tolist(), lasts, strict=True):
        row_part = chosen[first:last].tobytes()
        text_part = b"".join(pieces[first:last])
        dealt.write(ends.rows[number], row_part)
        dealt.write(ends.texts[number], text_part)
        ends.rows[number] += len(row_part)
        ends.texts[number] += len(text_part)


def _join(images: CocoDataset, rows: NDArray[Any], texts: bytes, places: _Places) -> CocoDataset:
    """Return the dataset of a part's images with the rows and texts that were dealt to it."""
    image_of = places.place_of[rows["image"]]
    order = np.argsort(image_of, kind="stable")
    ends = np.cumsum(rows["end"])
    spans = np.stack([ends - rows["end"], ends], axis=1)
    counts = np.bincount(image_of, minlength=len(images))
    return replace(
        images,
        first=np.append(0, np.cumsum(counts)),
        ids=rows["id"][order],
        is_crowd=rows["is_crowd"][order],
        texts=texts,
        text_spans=spans[order],
    )


def spool_coco(images: str | Path, annotations: str | Path) -> SpooledCoco:
    """Read annotations as `open_coco`, with memory for the images alone.

    Raises:
        ColabUtilsError: as `open_coco`; or this machine's disk is too small.
        DriveLostError: Drive went away.
    """
    require_folder(images)
    path = require_local_path(annotations)
    with suppress(OSError):
        _require_room(path.stat().st_size)
    try:
        dataset = _spool(path)
    except ShortReadError:
        dataset = Retries().run(partial(_spool, path))
    warn_of_place(images, dataset.images)
    return dataset


def _require_room(json_bytes: int) -> None:
    if json_bytes > _MEMORY_BYTES:
        # The annotations, once in the order of the file and once in that of the shards.
        cure = "or name a folder of another disk in the variable TMPDIR"
        require_space(Path(tempfile.gettempdir()), 2 * json_bytes, cure)


def _spool(path: Path) -> SpooledCoco:
    spool = _Spool()
    columns = Columns(spool.add)
    # If it is changed meanwhile, the stamp is that of another file.
    stamp = stamp_file(path)
    fingerprint = read_columns(path, columns)
    spool.add(columns.block)
    images = make_images(columns, fingerprint)
    crowds = _resolve(path, spool, images, columns)
    return SpooledCoco(images, columns.annotations, crowds, stamp, spool)


def _resolve(path: Path, spool: _Spool, images: CocoDataset, columns: Columns) -> int:
    """Put the place of its image into each row, in place of the image's id; return the crowds.

    Raises:
        ColabUtilsError: images have the same id, or annotations are of unknown images or
            categories.
    """
    crowds = 0
    unknown_images: list[int] = []
    unknown_categories: list[int] = []
    finder = ImageFinder(images.image_ids)
    for block in spool.blocks:
        rows = spool.read_rows(block).copy()
        rows["image"] = finder.find(rows["image"])
        is_known = rows["image"] >= 0
        is_strange = find_strange_categories(columns, rows["category"])
        unknown_images += rows["id"][~is_known].tolist()
        unknown_categories += rows["id"][is_known & is_strange].tolist()
        crowds += int(rows["is_crowd"].sum())
        spool.write(block.start, rows.tobytes())
    spool.flush()
    refuse_strangers(path, images.repeated_ids, unknown_images, unknown_categories)
    return crowds
