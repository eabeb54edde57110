"""Slots: pieces of shared memory that batches are written into, and that are used again and again.

Fresh shared memory is what limits torch's own hand-off: making it, copying into it and faulting it in, for each
tensor anew. A slot is made once, before the workers fork, and grows where a batch asks for more. It is anonymous
memory: /dev/shm may be small or full.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections import deque
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import find_free_memory, format_bytes

__all__ = ["SharedBuffer", "SharedBufferPool"]

_STEP_BYTES = 1 << 20


class SharedBuffer:
    """Memory that this process and those forked from it see alike."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("colab_utils")
        else:  # not Linux: a file that has no name any more
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())
        self._map: mmap.mmap | None = None

    def reserve(self, size: int) -> NDArray[np.uint8]:
        """At least ``size`` bytes to write into, uint8.

        Raises:
            ColabUtilsError: if the machine has less memory free than that; nothing is written then.
        """
        have = os.fstat(self._file).st_size
        if size > have:
            wanted = -(-size * 5 // 4 // _STEP_BYTES) * _STEP_BYTES  # some more, so that it seldom grows
            free = find_free_memory()
            if size - have > free:
                raise _explain_shortage(size, f"{format_bytes(free)} free")
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(self._file, 0, wanted)  # now, and not by a bus error on the first touch
                else:
                    os.ftruncate(self._file, wanted)
            except OSError as error:
                with suppress(OSError):
                    os.ftruncate(self._file, have)
                raise _explain_shortage(size, str(error.strerror)) from None
        return self._view(size)

    def _view(self, size: int) -> NDArray[np.uint8]:
        if self._map is None or len(self._map) < size:
            self._map = mmap.mmap(self._file, os.fstat(self._file).st_size)
        return np.frombuffer(self._map, np.uint8, size)

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self._file)


class SharedBufferPool:
    """The slots of one loader: some free, some with the workers, some lent to whoever holds a batch."""

    def __init__(self, count: int, lent: int) -> None:
        """``count`` slots for the workers and ``lent`` more, which whoever iterates may hold at a time."""
        self.slots = [SharedBuffer() for _ in range(count + lent)]
        self._free = deque(range(count + lent))
        self._lendable = lent
        self._lent: set[int] = set()

    def take(self) -> int:
        """The number of a free slot."""
        return self._free.pop()  # the last one used: its memory may still be in the cache

    def give_back(self, number: int) -> None:
        """A slot is free again."""
        self._lent.discard(number)
        self._free.append(number)

    def lend(self, number: int, size: int) -> Tensor:
        """A slot's content, uint8 [size]; the slot is free again when no tensor uses it any more.

        Who keeps many batches gets copies of the later ones, so that the workers never run out of slots.
        """
        content = self.slots[number]._view(size)
        if len(self._lent) >= self._lendable:
            copied = torch.from_numpy(content.copy())
            self.give_back(number)
            return copied
        self._lent.add(number)
        weakref.finalize(content, self.give_back, number).atexit = False
        return torch.from_numpy(content)


def _explain_shortage(size: int, found: str) -> ColabUtilsError:
    return ColabUtilsError(
        f"expected {format_bytes(size)} of shared memory for a batch, found too little ({found}). Use fewer workers, "
        "a smaller prefetch or a smaller batch."
    )
