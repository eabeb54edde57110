"""Look at a dataset of somebody else before its samples are loaded."""

import io
import warnings
from collections.abc import Iterator
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.samples import is_own

# A file may be an attribute of an attribute, as in a zipfile.ZipFile.
_DEPTH = 3


def require_same_classes(dataset: Any) -> None:
    """Refuse joined datasets in which a label means different classes.

    Only the datasets of a ``ConcatDataset`` that have ``class_names`` are compared, a dict from
    each label to its class.

    Raises:
        ColabUtilsError: a label has two classes.

    Example:
        >>> require_same_classes(ConcatDataset([[1, 2], [3]]))
    """
    known: dict[int, str] = {}
    for part in dataset.datasets if isinstance(dataset, ConcatDataset) else ():
        while isinstance(part, Subset):
            part = part.dataset
        for label, name in getattr(part, "class_names", {}).items():
            if known.setdefault(label, name) != name:
                raise ColabUtilsError(
                    f"Label {label} is {known[label]!r} in one of the joined datasets, and "
                    f"{name!r} in another. Give the JSON of both the same categories."
                )


def warn_of_open_file(dataset: Any) -> None:
    """Warn of a file that a dataset keeps open while several workers read it.

    Forked workers share the position in such a file, so that samples may get each other's bytes. It
    is the same with torch's ``DataLoader``.
    """
    name = next(_list_open_files(dataset, type(dataset).__name__, _DEPTH), "")
    if name:
        text = (
            f"{name} is an open file. Workers share its position, so that samples may get each "
            "other's bytes. Open it in __getitem__ when the worker first reads it."
        )
        warnings.warn(text, ColabUtilsWarning, stacklevel=2)


def _list_open_files(value: Any, name: str, depth: int) -> Iterator[str]:
    """Yield the name of each attribute that is an open file."""
    if isinstance(value, io.IOBase):
        # A file in memory is copied with the process, and a logger's stream is never read.
        is_on_disk = not isinstance(value, io.BytesIO | io.StringIO)
        if is_on_disk and not value.closed and value.readable():
            yield name
    elif isinstance(value, list | tuple) and value:
        yield from _list_open_files(value[0], f"{name}[0]", depth)
    # The datasets of this package share no positions.
    elif depth and hasattr(value, "__dict__") and not is_own(value):
        for key, part in vars(value).items():
            yield from _list_open_files(part, f"{name}.{key}", depth - 1)
