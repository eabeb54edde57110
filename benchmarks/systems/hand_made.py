"""What is possible: threads that decode JPEGs, and do nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.data import Data
from benchmarks.systems.base import BATCH_SIZE, Crew, Sample, System
from colab_utils.data.decoding import decode_pixels

__all__ = ["BareDecode"]


class BareDecode(System):
    """JPEG bytes in memory to pixels in reused buffers, one a batch: no boxes, no masks.

    A batch is good until the next one is asked for.
    """

    crews: ClassVar[tuple[Crew, ...]] = (Crew(2, "threads"),)

    def __init__(self, data: Data, folder: Path, crew: Crew) -> None:
        super().__init__(data, folder, crew)
        dataset = data.open()
        bytes_per_image = int(3 * dataset.coco.sizes.prod(1, dtype=np.int64).max())
        self._slots = np.zeros((crew.size + 2, BATCH_SIZE, bytes_per_image), np.uint8)
        self._ids = dataset.image_ids.tolist()
        self._files = [bytearray(files.read(row)) for files, row in data.iterate_distinct()]

    def __iter__(self) -> Iterator[Any]:
        rows = np.random.permutation(self.data.records).tolist()
        pending: deque[Any] = deque()
        with ThreadPoolExecutor(self.crew.size) as pool:
            for number, first in enumerate(range(0, len(rows), BATCH_SIZE)):
                buffers = self._slots[number % len(self._slots)]
                pending.append(
                    pool.submit(self._fill_batch, buffers, rows[first : first + BATCH_SIZE])
                )
                if len(pending) > self.crew.size:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    def _fill_batch(self, buffers: NDArray[np.uint8], rows: list[int]) -> Any:
        samples = [self._fill(buffer, row) for buffer, row in zip(buffers, rows, strict=False)]
        return tuple(zip(*samples, strict=True))

    def _fill(self, buffer: NDArray[np.uint8], row: int) -> Sample:
        decoded = decode_pixels(self._files[row // self.data.copies])
        pixels = buffer[: decoded.size].reshape(decoded.shape)
        np.copyto(pixels, decoded)
        return torch.from_numpy(pixels).permute(2, 0, 1), {"image_id": self._ids[row]}
