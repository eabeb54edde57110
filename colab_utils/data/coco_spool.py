"""Read a COCO dataset, keeping its images in memory and its annotations on this machine's disk.

The JSON is read once. The texts of its annotations are written to a temporary file in the order of
the JSON, and their numbers to other files in the order of the images. The files have no names, so
the system deletes them when the process ends.
"""

import os
import tempfile
import weakref
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.coco import (
    ROW,
    CocoDataset,
    attach_annotations,
    find_repeated_names,
    make_images,
    refuse_strangers,
    warn_of_divided,
    warn_of_place,
)
from colab_utils.data.coco_json import Columns, read_columns
from colab_utils.data.image_paths import require_folder
from colab_utils.drive import Retries, ShortReadError, explain_write
from colab_utils.files import FileStamp, stamp_file
from colab_utils.machine import require_space
from colab_utils.places import Place, PlaceLike, open_place

# The numbers of an annotation in the temporary file: those of `ROW` in fewer bytes.
_ROW = np.dtype([(name, bool if name == "is_crowd" else np.int64) for name in ROW.names or ()])
# For a JSON of at most so many bytes, the room on the disk is not looked at.
_SMALL_BYTES = 1 << 24


class _TextFile:
    """Hold texts in a temporary file. A slice of it is read as that of ``bytes`` is.

    Forked processes and threads may read at the same time.
    """

    def __init__(self) -> None:
        self._file = _open_temporary()
        # The file is closed when nothing refers to it any more.
        weakref.finalize(self, self._file.close)

    def add(self, texts: bytes | bytearray) -> int:
        """Append texts. Return where they start."""
        start = self._file.tell()
        _write(self._file, texts)
        return start

    def __getitem__(self, span: slice) -> bytes:
        return os.pread(self._file.fileno(), span.stop - span.start, span.start)


@dataclass(frozen=True, eq=False)
class SpooledCoco:
    """Hold the images of a COCO dataset; its annotations lie in temporary files.

    Make one with `spool_coco`. It cannot be sent to another process, but the datasets from `select`
    and `cut` can be sent.
    """

    images: CocoDataset
    """The images and categories, without an annotation."""
    annotations: int
    crowds: int
    stamp: FileStamp
    """The size and time of the JSON when it was read."""
    _dataset: CocoDataset

    def __len__(self) -> int:
        return len(self.images)

    def select(self, indices: NDArray[np.int64]) -> CocoDataset:
        """Return these images alone, with their annotations, in this order."""
        return self._dataset.select(indices)

    def cut(self, parts: Sequence[NDArray[np.int64]]) -> Iterator[CocoDataset]:
        """Yield a dataset for each part: its images with their annotations."""
        return map(self.select, parts)


def spool_coco(images: PlaceLike, annotations: PlaceLike) -> SpooledCoco:
    """Read annotations as `open_coco` does, and hold only the images in memory.

    Raises:
        ColabUtilsError: as `open_coco` does, or if this machine's disk is too small.
        DriveLostError: if Drive went away.
    """
    require_folder(images)
    path = open_place(annotations)
    stamp = stamp_file(path)
    if stamp.bytes > _SMALL_BYTES:
        # The numbers of the annotations take less room than their texts.
        cure = "or name a folder of another disk in the variable TMPDIR"
        require_space(Path(tempfile.gettempdir()), 2 * stamp.bytes, cure)
    try:
        dataset = _spool(path, stamp)
    except ShortReadError:
        dataset = Retries().run(partial(_spool, path, stamp))
    repeated = find_repeated_names(dataset.images)
    if repeated.size:
        warn_of_divided(annotations, dataset.select(repeated))
    warn_of_place(images, dataset.images)
    return dataset


def _spool(path: Place, stamp: FileStamp) -> SpooledCoco:
    texts = _TextFile()
    with _open_temporary() as file:

        def keep(rows: "array[int]", block: bytearray) -> None:
            table = np.frombuffer(rows, ROW).astype(_ROW)
            table["text_end"] += texts.add(block)
            _write(file, table.tobytes())

        columns = Columns(keep)
        fingerprint = read_columns(path, columns)
        keep(columns.rows, columns.texts)
        rows = _map_file(file, _ROW)
    images = make_images(columns, fingerprint)
    dataset = attach_annotations(images, rows, texts)
    refuse_strangers(path, dataset)
    on_disk = replace(
        dataset,
        ids=_move_to_disk(dataset.ids),
        is_crowd=_move_to_disk(dataset.is_crowd),
        text_spans=_move_to_disk(dataset.text_spans),
    )
    return SpooledCoco(images, columns.annotations, dataset.crowds, stamp, on_disk)


def _move_to_disk(values: NDArray[Any]) -> NDArray[Any]:
    """Return the same values, which lie in a temporary file. The system reads them when needed."""
    with _open_temporary() as file:
        _write(file, values.tobytes())
        return _map_file(file, values.dtype).reshape(values.shape)


def _map_file(file: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the values in an open file, as an array that is not read into memory."""
    if not file.tell():
        return np.zeros(0, dtype)
    return np.memmap(file, dtype, "r")


def _open_temporary() -> Any:
    # A forked process, or the end of this one, would write a buffer's content once more.
    return tempfile.TemporaryFile(buffering=0)


def _write(file: Any, content: bytes | bytearray) -> None:
    rest = memoryview(content)
    with explain_write(Path(tempfile.gettempdir())):
        # Just before a disk is full, only a part is written.
        while rest:
            rest = rest[file.write(rest) :]
