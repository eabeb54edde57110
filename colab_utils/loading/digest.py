"""A digest of a dataset's state: whether it has changed since its workers were started."""

import mmap
import pickle
from typing import Any

import numpy as np
from torch import Tensor

from colab_utils.data.coco import CocoDataset
from colab_utils.files import hash_bytes

# What is larger takes longer to compare than workers take to start.
_MOST_OBJECT_BYTES = 8_000_000
_MOST_ARRAY_BYTES = 256_000_000


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays, which are not copied, and reads no file."""

    def reducer_override(self, value: Any) -> Any:
        """Return how a value is pickled; it is never made again."""
        if isinstance(value, np.memmap):
            raise pickle.PicklingError("a file mapped into memory")
        if isinstance(value, CocoDataset):
            # It never changes, and its texts are large.
            return list, ([value.fingerprint, value.image_ids],)
        if isinstance(value, Tensor):
            return list, (np.asarray(value.detach()),)
        return NotImplemented


def digest_dataset(dataset: Any) -> str:
    """Return a digest of all that a dataset holds, or "" where it cannot be compared.

    It sees what the dataset's pickle has: its attributes and those of what it holds, such as
    another dataset, transforms, lists and arrays; no globals, and no attributes of classes. What
    cannot be pickled, such as an open or mapped file or a lambda, and what is large, over 256 MB of
    arrays or 8 MB of other objects, cannot be compared.

    Example:
        >>> photos = ["a.jpg"]
        >>> before = digest_dataset(photos)
        >>> before == digest_dataset(photos)
        True
        >>> photos.append("b.jpg")
        >>> before == digest_dataset(photos)
        False
    """
    arrays: list[pickle.PickleBuffer] = []
    # A file in memory that takes no more than its size.
    with mmap.mmap(-1, _MOST_OBJECT_BYTES) as file:
        try:
            _Pickler(file, 5, buffer_callback=arrays.append).dump(dataset)
            parts = [array.raw() for array in arrays]
        except Exception:  # Somebody's own objects may raise anything.
            return ""
        if sum(map(len, parts)) > _MOST_ARRAY_BYTES:
            return ""
        return hash_bytes(file[: file.tell()], *parts)
