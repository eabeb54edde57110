"""The files of a folder of shards, as the dataset reads them: in pieces, or each shard whole."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from colab_utils.drive import DriveFile, DriveLostError, DriveProfile, Retries, guard_drive, read_file
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.shards.arrays import ShardArrays, load_arrays, rebuild_arrays
from colab_utils.shards.format import ShardInfo

__all__ = ["ShardFiles", "load_shard"]

SHARDS_IN_MEMORY = 2
OPEN_FILES = 512


class ShardFiles:
    """Reads pieces of a folder's files; keeps files open, or the last two shards in memory (``whole_shards``).

    What is not there is read in ``source``, if there is one.
    """

    def __init__(
        self, folder: Path, *, profile: DriveProfile | None, whole_shards: bool, source: Path | None = None
    ) -> None:
        self.folder, self.profile, self.whole_shards, self.source = folder, profile, whole_shards, source
        self.retries = Retries()
        self._open: dict[str, DriveFile] = {}
        self._memory: OrderedDict[int, dict[str, bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        # open files and shards in memory stay in this process
        return {name: getattr(self, name) for name in ("folder", "profile", "whole_shards", "source")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state.pop("folder"), **state)  # type: ignore[misc]

    def read(self, shard: int, name: str, start: int, length: int) -> bytearray:
        """``length`` bytes from ``start`` of a file that belongs to the shard of that number.

        Raises:
            ColabUtilsError: if the file went away or was cut short.
        """
        data = bytearray(length)
        self.read_into(shard, name, start, data)
        return data

    def read_into(self, shard: int, name: str, start: int, buffer: Any) -> None:
        """The same into a writable buffer of bytes."""
        length = memoryview(buffer).nbytes
        try:
            if self.whole_shards:
                data = self._read_whole(shard, name)[start : start + length]
                memoryview(buffer).cast("B")[: len(data)] = data
                got = len(data)
            else:
                got = self._open_file(name).readinto(buffer, start)
                if got < length and self.source is not None:  # it was removed, and may have come back since
                    self._open.pop(name, None)
                    got = self._open_file(name).readinto(buffer, start)
        except OSError as error:
            raise ColabUtilsError(
                f"expected to read {self.folder / name}, found: {error.strerror}. Copy the shards again, or "
                "mount Drive again."
            ) from None
        if got < length:
            raise ColabUtilsError(
                f"expected {start + length:,} bytes or more in {self.folder / name}, found it cut short since it "
                "was opened. Copy it again, or run preprocess again on this folder."
            )

    def _open_file(self, name: str) -> DriveFile:
        file = self._open.get(name)
        if file is None:
            if len(self._open) >= OPEN_FILES:
                self._open.pop(next(iter(self._open)))  # it closes when nothing reads it any more
            try:
                file = self._open[name] = DriveFile(self.folder / name, self.profile, self.retries)
            except FileNotFoundError:
                if self.source is None:
                    raise
                return DriveFile(self.source / name, None, self.retries)
        return file

    def _read_whole(self, shard: int, name: str) -> memoryview:
        with self._lock:  # threads that want the same shard wait for the one that reads it
            files = self._memory.setdefault(shard, {})
            self._memory.move_to_end(shard)
            if len(self._memory) > SHARDS_IN_MEMORY:
                self._memory.popitem(last=False)
            if name not in files:
                files[name] = read_file(self.folder / name, self.profile, self.retries)
            return memoryview(files[name])


def load_shard(
    folder: Path, shard: ShardInfo, *, category_ids: Sequence[int], profile: DriveProfile | None, retries: Retries
) -> ShardArrays:
    """The arrays of one shard; made again from its tar, with a warning, where they are missing or damaged.

    Raises:
        ColabUtilsError: if the tar is missing, cut short or damaged.
        DriveLostError: if Drive fails, and goes on failing while ``retries`` try again.
    """

    def load() -> ShardArrays:
        with guard_drive(folder):
            return _load(folder, shard, category_ids, profile)

    return retries.run(load)


def _load(folder: Path, shard: ShardInfo, category_ids: Sequence[int], profile: DriveProfile | None) -> ShardArrays:
    path, arrays_path = folder / shard.name, folder / shard.arrays_name
    if not path.is_file() or path.stat().st_size != shard.bytes:
        found = f"{path.stat().st_size:,}" if path.is_file() else "none"
        raise ColabUtilsError(
            f"expected {shard.bytes:,} bytes in {path}, found {found}: it was cut short or changed. "
            "Copy it again, or run preprocess again on this folder."
        )
    try:
        if not arrays_path.is_file() or arrays_path.stat().st_size != shard.arrays_bytes:
            raise ColabUtilsError(f"expected {shard.arrays_bytes:,} bytes in {arrays_path}, found another size or none")
        arrays = load_arrays(arrays_path)
        if not (_agree(arrays, shard) and np.isin(arrays.labels, category_ids).all()):
            raise ColabUtilsError(f"expected arrays of {path.name} in {arrays_path}, found numbers that contradict it.")
    except DriveLostError:
        raise
    except ColabUtilsError as error:
        warnings.warn(f"{error} It is made again in memory; copy or preprocess again.", ColabUtilsWarning, stacklevel=5)
        return rebuild_arrays(path)
    if profile is not None:
        with DriveFile(arrays_path, profile) as file:  # what was read so far, at the speed of the slow folder
            file.pread(getattr(arrays.bits, "offset", shard.arrays_bytes), 0)
    return arrays


def _agree(arrays: ShardArrays, shard: ShardInfo) -> bool:
    """Whether every array has its shape and kind, and points inside the shard and the mask bits."""
    images, objects = shard.images, len(arrays.labels)
    expected = {
        "image_ids": (np.int64, (images,)),
        "sizes": (np.int32, (images, 2)),
        "image_spans": (np.int64, (images, 2)),
        "record_spans": (np.int64, (images, 2)),
        "counts": (np.int64, (images,)),
        "boxes": (np.float32, (objects, 4)),
        "labels": (np.int64, (objects,)),
        "areas": (np.float32, (objects,)),
        "crops": (np.int32, (objects, 4)),
        "mask_ends": (np.int64, (objects + 1,)),
        "checks": (np.uint64, (images, 2)),
    }
    if any((getattr(arrays, name).dtype, getattr(arrays, name).shape) != kind for name, kind in expected.items()):
        return False
    spans = np.concatenate([arrays.image_spans, arrays.record_spans])
    inside = (spans >= 0).all() and (spans <= shard.bytes).all() and (spans.sum(1) <= shard.bytes).all()
    if not inside or (arrays.counts < 0).any() or arrays.counts.sum() != objects:
        return False
    corners = arrays.crops.astype(np.int64)
    height, width = np.repeat(arrays.sizes, arrays.counts, axis=0).T
    start, sides = corners[:, :2], corners[:, 2:] - corners[:, :2]
    inside = (start >= 0).all() and (sides >= 0).all() and (corners[:, 2:] <= np.stack([width, height], 1)).all()
    ends = np.concatenate([[0], np.cumsum(-(-sides.prod(1) // 8))])
    return bool(inside and np.array_equal(ends, arrays.mask_ends) and ends[-1] == len(arrays.bits))
