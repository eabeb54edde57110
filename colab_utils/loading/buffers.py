"""Shared buffers: memory that workers write batches into, and that is used again and again.

Fresh shared memory is what limits torch's own hand-off: making it, copying into it and faulting it in, for each
tensor anew. A buffer is made once, before the workers fork, and grows where a batch asks for more. It is anonymous
memory: /dev/shm may be small or full.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import find_free_memory, format_bytes, require_linux

__all__ = ["SharedBuffer", "SharedBufferPool"]

_STEP_BYTES = 1 << 20


class SharedBuffer:
    """Memory that this process and those forked from it see alike."""

    def __init__(self) -> None:
        self._file = os.memfd_create("colab_utils")
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
                os.posix_fallocate(self._file, 0, wanted)  # now, and not by a bus error on the first touch
            except OSError as error:
                with suppress(OSError):
                    os.ftruncate(self._file, have)
                raise _explain_shortage(size, str(error.strerror)) from None
        return self.view(size)

    def view(self, size: int) -> NDArray[np.uint8]:
        """Its first ``size`` bytes, which were reserved."""
        if self._map is None or len(self._map) < size:
            self._map = mmap.mmap(self._file, os.fstat(self._file).st_size)
        return np.frombuffer(self._map, np.uint8, size)

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):
            os.close(self._file)


class SharedBufferPool:
    """The buffers of one loader: some free, some with the workers, some lent to whoever holds a batch."""

    def __init__(self, count: int, lent: int) -> None:
        """``count`` buffers for the workers and ``lent`` more, which a training loop may hold at a time."""
        require_linux("share memory between processes")
        self.buffers = [SharedBuffer() for _ in range(count + lent)]
        self._free = deque(range(count + lent))
        self._lendable = lent
        self._lent: set[int] = set()

    def take(self) -> int:
        """The number of a free buffer."""
        return self._free.pop()  # the last one used: its memory may still be in the cache

    def give_back(self, number: int) -> None:
        """A buffer is free again."""
        self._lent.discard(number)
        self._free.append(number)

    def lend(self, number: int, size: int) -> Tensor:
        """A buffer's content, uint8 [size]; the buffer is free again when no tensor uses it any more.

        Who keeps many batches gets copies of the later ones, so that the workers never run out of buffers.
        """
        content = self.buffers[number].view(size)
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
