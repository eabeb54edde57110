"""Readers of the files of shards, and of the arrays beside them."""

import warnings
from functools import lru_cache
from typing import Any

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning, UnavailableError
from colab_utils.files import Store, open_store
from colab_utils.os_errors import explain_os_error
from colab_utils.places import Place
from colab_utils.shards.arrays import ShardArrays, load_arrays, rebuild_arrays
from colab_utils.shards.index import ShardInfo

OPEN_FILES = 4096
"""The largest number of files that a dataset keeps open."""


class ShardFiles:
    """A reader of pieces of the files in a folder. The files that it read last stay open.

    Threads may share it.
    """

    def __init__(self, folder: Place) -> None:
        import resource

        # Other datasets and the workers open files, too. A file that is dropped is closed when no
        # thread reads it any more.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.folder = folder
        self.store = open_store(folder)
        self._open = lru_cache(min(OPEN_FILES, limit // 8 + 1))(self.store.open)

    # A copy in another process opens the files anew.
    def __reduce__(self) -> Any:
        return ShardFiles, (self.folder,)

    def read_into(self, shard: int, name: str, start: int, buffer: Any) -> None:
        """Fill a writable buffer with bytes of a file of the shard, from byte ``start`` on.

        Raises:
            ColabUtilsError: The file is gone or was cut short.
        """
        length = memoryview(buffer).nbytes
        cure = "Copy the shards again, or mount Drive again."
        try:
            count = self._open(name).readinto(buffer, start)
            problem = f"the file was cut short. {cure}"
        except OSError as error:
            count = -1
            problem = explain_os_error(error, cure)
        if count < length:
            raise ColabUtilsError(
                f"The first {start + length:,} bytes of {self.folder / name} cannot be read: "
                f"{problem}"
            )


def load_shard(store: Store, shard: ShardInfo) -> ShardArrays:
    """Return the arrays of a shard.

    If the arrays are missing or damaged, they are made again from the tar, with a warning.

    Raises:
        ColabUtilsError: The tar is missing, cut short or damaged.
        DriveLostError: Drive fails until the store gives up.
    """
    count = store.stamp(shard.name).bytes
    if count < 0 and store.find_again([shard.name]):
        count = store.stamp(shard.name).bytes
    path = store.locate(shard.name)
    if count != shard.bytes:
        size = f"{count:,}" if count >= 0 else "none"
        raise ColabUtilsError(
            f"{path} should have {shard.bytes:,} bytes, and has {size}: it was cut short or "
            "changed. Copy it again, or run preprocess again on this folder."
        )
    try:
        return load_arrays(store.locate(shard.arrays_name), shard, store)
    except UnavailableError:
        raise
    except (ColabUtilsError, OSError) as error:
        warnings.warn(
            f"{error} The arrays are made again in memory. Copy or preprocess the shards again.",
            ColabUtilsWarning,
            stacklevel=5,
        )
        return rebuild_arrays(path, shard, store)
