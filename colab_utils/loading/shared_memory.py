"""Shared buffers, in which batches cross between processes, used again and again.

Fresh shared memory is what limits torch's own hand-off: making it, copying into it and faulting it
in, for each tensor anew. A buffer is made once, before the workers fork, and grows where a batch
asks for more. It is anonymous memory: /dev/shm may be small or full.
"""

import mmap
import os
import weakref
from collections import deque
from errno import ENOMEM

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colab_utils.errors import ColabUtilsError
from colab_utils.machine import find_free_memory
from colab_utils.units import format_bytes

_STEP_BYTES = 1 << 20  # by which a buffer grows


class SharedBuffer:
    """Memory that this process and those forked from it see alike."""

    def __init__(self) -> None:
        self._file = os.memfd_create("colab_utils")
        weakref.finalize(self, os.close, self._file)
        self._map: mmap.mmap | None = None

    def reserve(self, size: int) -> NDArray[np.uint8]:
        """At least ``size`` bytes to write into, uint8.

        Raises:
            ColabUtilsError: if the machine has less memory free than that; nothing is written then.
        """
        have = os.fstat(self._file).st_size
        if size > have:
            # some more, so that it seldom grows
            wanted = -(-size * 5 // 4 // _STEP_BYTES) * _STEP_BYTES
            try:
                free = find_free_memory()
                if size - have > free:
                    raise OSError(ENOMEM, f"{format_bytes(free)} free")
                # now, and not by a bus error on the first touch
                os.posix_fallocate(self._file, 0, wanted)
            except OSError as error:
                raise ColabUtilsError(
                    f"expected {format_bytes(size)} of shared memory, found too little "
                    f"({error.strerror}): use fewer workers, a smaller prefetch or a smaller batch"
                ) from None
        return self.view(size)

    def view(self, size: int) -> NDArray[np.uint8]:
        """Its first ``size`` bytes, which were reserved."""
        if self._map is None or len(self._map) < size:
            self._map = mmap.mmap(self._file, os.fstat(self._file).st_size)
        return np.frombuffer(self._map, np.uint8, size)


class SharedBufferPool:
    """The buffers of one loader: some free, some with the workers, some held with a batch."""

    def __init__(self, count: int, held: int) -> None:
        """``count`` buffers for the workers and ``held`` more, which a training loop may hold at a
        time.
        """
        self.buffers = [SharedBuffer() for _ in range(count + held)]
        self._free = deque(range(count + held))
        self._most_held = held
        self._held: set[int] = set()

    def take(self) -> int:
        """The number of a free buffer."""
        return self._free.pop()  # the last one used: its memory may still be in the cache

    def give_back(self, number: int) -> None:
        """A buffer is free again."""
        self._held.discard(number)
        self._free.append(number)

    def hold(self, number: int, size: int) -> Tensor:
        """A buffer's content, uint8 [size]; the buffer is free again when no tensor uses it any
        more.

        Who keeps many batches gets copies of the later ones, so that the workers never run out of
        buffers.
        """
        content = self.buffers[number].view(size)
        if len(self._held) >= self._most_held:
            copied = torch.from_numpy(content.copy())
            self.give_back(number)
            return copied
        self._held.add(number)
        weakref.finalize(content, self.give_back, number).atexit = False
        return torch.from_numpy(content)
