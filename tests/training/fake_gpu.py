"""A GPU's memory that a CPU can have: every tensor that is made counts, and above the limit it runs out."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_STEP_BYTES = 300_000


class FakeGpu(TorchDispatchMode):
    """Counts the bytes of all storages that live, as CUDA's allocator does, and raises its error above ``limit``.

    It is a gauge of `colab_utils.training.memory` too. ``with`` it, everything that torch makes counts.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.held, self.peak = limit, 0, 0
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def count(self, tensors) -> None:
        """What was made before: weights."""
        for tensor in tensors:
            self._add(tensor)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        return made

    def _add(self, tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known and not self._known[key][0].expired():
            return
        self.held += storage.nbytes() - (self._known[key][1] if key in self._known else 0)
        self._known[key] = StorageWeakRef(storage), storage.nbytes()
        if self.held > min(self.peak + _STEP_BYTES, self.limit):  # to look for what has gone takes long
            self._forget()
            self.peak = max(self.peak, self.held)
        if self.held > self.limit:
            raise torch.cuda.OutOfMemoryError(f"CUDA out of memory: {self.held:,} of {self.limit:,} bytes")

    def _forget(self) -> None:
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
        self.held = sum(size for _, size in self._known.values())

    def count_held(self) -> int:
        """Bytes of all that lives now."""
        self._forget()
        return self.held

    def reset_peak(self) -> None:
        """Begin to look for the highest sum anew."""
        self.peak = self.count_held()

    def measure_limit(self) -> int:
        return self.limit

    def measure_peak(self, call) -> int:
        self.reset_peak()
        with self:
            call()
        return self.peak
