"""A digest of a dataset's state, which shows whether the dataset has changed since its workers
started.
"""

import mmap
import pickle
from typing import Any

import numpy as np
from torch import Tensor

from colab_utils.data.coco import CocoDataset
from colab_utils.files import hash_bytes
from colab_utils.shards.columns import find_mapping

# Larger datasets are not compared, because starting new workers is faster than comparing.
_MOST_OBJECT_BYTES = 8_000_000
_MOST_ARRAY_BYTES = 256_000_000


class _Pickler(pickle.Pickler):
    """A pickler that does not copy tensors and does not read files."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle a value. Nothing is ever unpickled."""
        mapping = find_mapping(value)
        if mapping is not None:
            if mapping.mode != "r":
                raise pickle.PicklingError("a file mapped into memory, to be written")
            # All processes see the same bytes, so that nothing has to be read.
            return dict, (value.__array_interface__,)
        if isinstance(value, CocoDataset):
            # A CocoDataset never changes, and its annotations are large.
            return list, ([value.fingerprint, value.image_ids],)
        if isinstance(value, Tensor):
            return list, (np.asarray(value.detach()),)
        return NotImplemented


def digest_dataset(dataset: Any) -> str:
    """Return a digest of all that a dataset holds, or "" if the dataset cannot be compared.

    The digest covers what the dataset's pickle contains: its attributes, and the attributes of the
    objects that it holds, such as another dataset, transforms, lists and arrays. It does not cover
    globals and attributes of classes. Of an array that shows a part of a file that is mapped to be
    read, it covers the place and not the content, which all processes share. A dataset cannot be
    compared if it holds an object that cannot be pickled (an open file, a file that is mapped to be
    written, a lambda), more than 256 MB of arrays, or more than 8 MB of other objects.

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
    # The pickle is written to a file in memory. The size of the file is fixed, so that a larger
    # pickle raises an error.
    with mmap.mmap(-1, _MOST_OBJECT_BYTES) as file:
        try:
            _Pickler(file, 5, buffer_callback=arrays.append).dump(dataset)
            parts = [array.raw() for array in arrays]
        # Objects of users may raise any error while they are pickled.
        except Exception:
            return ""
        if sum(map(len, parts)) > _MOST_ARRAY_BYTES:
            return ""
        return hash_bytes(file[: file.tell()], *parts)
