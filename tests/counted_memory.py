"""Bytes of the tensors that live, counted without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["CountedMemory"]

# To look for what has gone takes long.
_LOOK_BYTES = 300_000


class CountedMemory(TorchDispatchMode):
    """Counts the bytes of all storages that live, as a GPU's allocator does, and runs out above
    ``limit``.
    """

    def __init__(self, limit: float = float("inf")) -> None:
        super().__init__()
        self.limit = limit
        self.held = 0
        self.peak = 0
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def count(self, tensors: Any) -> None:
        """Take in what was made before: weights."""
        for tensor in tensors:
            self._add(tensor)

    def count_held(self) -> int:
        """Bytes of all that lives now."""
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
        self.held = sum(size for _, size in self._known.values())
        return self.held

    def reset_peak(self) -> None:
        """Begin to look for the highest sum anew."""
        self.peak = self.count_held()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return made

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known and not self._known[key][0].expired():
            return
        self.held += storage.nbytes() - (self._known[key][1] if key in self._known else 0)
        self._known[key] = StorageWeakRef(storage), storage.nbytes()
        if self.held > min(self.peak + _LOOK_BYTES, self.limit):
            self.peak = max(self.peak, self.count_held())
        if self.held > self.limit:
            raise torch.cuda.OutOfMemoryError(
                f"CUDA out of memory: {self.held:,} of {self.limit:,} bytes"
            )
