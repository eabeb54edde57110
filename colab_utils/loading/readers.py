"""Readers of shards: pieces of their files, and the arrays beside them."""

import os
import warnings
from pathlib import Path
from typing import Any

from colab_utils.drive import Retries, guard_drive
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning, UnavailableError
from colab_utils.files import DriveFile, OpenFiles, has_size
from colab_utils.os_errors import explain_os_error
from colab_utils.shards.arrays import ShardArrays, load_arrays, rebuild_arrays
from colab_utils.shards.index import ShardInfo
from colab_utils.slow_drive import find_profile


class ShardFiles:
    """Reads pieces of a folder's files, and keeps those that were read last open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open = OpenFiles(Retries())

    def __reduce__(self) -> Any:  # open files stay in this process
        return ShardFiles, (self.folder,)

    def read_into(self, shard: int, name: str, start: int, buffer: Any) -> None:
        """Fill a writable buffer of bytes from ``start`` of a file that belongs to the shard of
        that number.

        Raises:
            ColabUtilsError: if the file went away or was cut short.
        """
        # not as a Path, which takes longer than the read
        path = os.path.join(self.folder, name)
        length = memoryview(buffer).nbytes
        cure = "Copy the shards again, or mount Drive again."
        try:
            count = self._open.get(path).readinto(buffer, start)
            problem = f"it cut short. {cure}"
        except OSError as error:
            count = -1
            problem = explain_os_error(error, cure)
        if count < length:
            raise ColabUtilsError(
                f"expected {start + length:,} bytes or more in {path}, found {problem}"
            )


def load_shard(folder: Path, shard: ShardInfo, *, retries: Retries) -> ShardArrays:
    """The arrays of one shard; made again from its tar, with a warning, where they are missing or
    damaged.

    Raises:
        ColabUtilsError: if the tar is missing, cut short or damaged.
        DriveLostError: if Drive fails, and goes on failing while ``retries`` try again.
    """

    def load() -> ShardArrays:
        path = folder / shard.name
        with guard_drive(folder):
            if not path.exists():
                retries.find_again([path])
            return _load(folder, shard)

    return retries.run(load)


def _load(folder: Path, shard: ShardInfo) -> ShardArrays:
    path = folder / shard.name
    arrays_path = folder / shard.arrays_name
    if not has_size(path, shard.bytes):
        size = f"{path.stat().st_size:,}" if path.is_file() else "none"
        raise ColabUtilsError(
            f"expected {shard.bytes:,} bytes in {path}, found {size}: it was cut short or changed. "
            "Copy it again, or run preprocess again on this folder."
        )
    try:
        with guard_drive(folder):
            arrays = load_arrays(arrays_path, shard)
    except UnavailableError:
        raise
    except (ColabUtilsError, OSError) as error:
        warnings.warn(
            f"{error} It is made again in memory; copy or preprocess again.",
            ColabUtilsWarning,
            stacklevel=5,
        )
        return rebuild_arrays(path, shard)
    if find_profile(arrays_path) is not None:
        # What was read so far came at full speed. It is read again at the speed of the slowed
        # folder.
        with DriveFile(arrays_path) as file:
            file.pread(int(arrays.bits), 0)
    return arrays
