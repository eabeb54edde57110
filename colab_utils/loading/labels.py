"""Labels of the model and category ids of the dataset, both ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Labels"]


class Labels:
    """Labels for COCO categories: the category ids themselves, or 1 to K in the order of the ids.

    Args:
        categories: each with ``id`` and ``name``.
        contiguous: map to 1 to K. It is done anyway where an id is below 1: label 0 is torchvision's background.

    Example:
        >>> labels = Labels([{"id": 3, "name": "car"}, {"id": 9, "name": "boat"}], contiguous=True)
        >>> labels.class_names, labels.category_ids, labels.num_classes
        ({1: 'car', 2: 'boat'}, {1: 3, 2: 9}, 3)
    """

    def __init__(self, categories: Sequence[dict[str, Any]], *, contiguous: bool) -> None:
        names = {category["id"]: category["name"] for category in categories}
        ids = sorted(names)
        mapped = contiguous or (bool(ids) and ids[0] < 1)
        self.category_ids: dict[int, int] = dict(enumerate(ids, 1)) if mapped else {number: number for number in ids}
        """Label to COCO category id."""
        self.class_names: dict[int, str] = {label: names[number] for label, number in self.category_ids.items()}
        """Label to name."""
        self.num_classes = max(self.class_names, default=0) + 1
        """The background included, as torchvision counts."""
        self._ids = np.array(ids, np.int64)
        self._labels = np.array(list(self.category_ids), np.int64)

    def map(self, category_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Category ids as labels, int64 [N] each."""
        return self._labels[np.searchsorted(self._ids, category_ids)]
