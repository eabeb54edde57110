"""Shared buffers, which pass batches between processes and are used again and again.

The hand-off of torch's ``DataLoader`` is slow, because it makes new shared memory for each tensor.
A buffer of this module is made once, before the workers fork, and grows if a batch needs more. The
memory does not lie in /dev/shm, which may be small or full.
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


class SharedBuffer:
    """Memory that this process shares with the processes forked from it."""

    def __init__(self) -> None:
        self._file = os.memfd_create("colab_utils")
        weakref.finalize(self, os.close, self._file)
        self._map: mmap.mmap | None = None

    def reserve(self, size: int) -> NDArray[np.uint8]:
        """Return ``size`` bytes to write to, uint8. The buffer grows if it is too small.

        Raises:
            ColabUtilsError: The machine has too little free memory. The buffer does not grow then.
        """
        have = os.fstat(self._file).st_size
        if size > have:
            # The buffer gets a quarter more than is needed, so that it seldom grows.
            wanted = size * 5 // 4
            try:
                free = find_free_memory()
                if wanted - have > free:
                    raise OSError(ENOMEM, f"{format_bytes(free)} free")
                # Without this call, too little memory would end the process with a bus error later.
                os.posix_fallocate(self._file, 0, wanted)
            except OSError as error:
                raise ColabUtilsError(
                    f"A batch needs {format_bytes(size)} of shared memory, and there is too little "
                    f"({error.strerror}). Use fewer workers, a smaller prefetch or a smaller batch."
                ) from None
        return self.view(size)

    def view(self, size: int) -> NDArray[np.uint8]:
        """Return the first ``size`` bytes, uint8. They must be reserved already."""
        if self._map is None or len(self._map) < size:
            self._map = mmap.mmap(self._file, os.fstat(self._file).st_size)
        return np.frombuffer(self._map, np.uint8, size)


class SharedBufferPool:
    """The buffers of one loader. Each is free, lent to a worker, or held by the training loop."""

    def __init__(self, count: int, held: int) -> None:
        """Make ``count`` buffers for the workers, and ``held`` more for the training loop."""
        self.buffers = [SharedBuffer() for _ in range(count + held)]
        self._free = deque(range(count + held))
        self._most_held = held
        self._held: set[int] = set()

    def take(self) -> int:
        """Take a free buffer, and return its number."""
        # The buffer that was used last is taken, because its memory may still be in the cache.
        return self._free.pop()

    def give_back(self, number: int) -> None:
        """Mark a buffer as free."""
        self._held.discard(number)
        self._free.append(number)

    def hold(self, number: int, size: int) -> Tensor:
        """Return a buffer's content, uint8 [size]. Once no tensor uses it, the buffer is free.

        If the training loop already holds its ``held`` buffers, it gets a copy, and the buffer is
        free at once. The workers therefore never run out of buffers.
        """
        content = self.buffers[number].view(size)
        if len(self._held) >= self._most_held:
            copied = torch.from_numpy(content.copy())
            self.give_back(number)
            return copied
        self._held.add(number)
        weakref.finalize(content, self.give_back, number).atexit = False
        return torch.from_numpy(content)
