"""What is possible: hand-made code that does one thing, as fast as two threads can."""

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
from benchmarks.systems.ours import Packed
from colab_utils.data.decoding import decode_pixels
from colab_utils.data.masks import PackedMasks, unpack_masks
from colab_utils.shards.arrays import load_arrays
from colab_utils.shards.index import read_index

__all__ = ["BareDecode", "Ceiling"]


class _Threads(System):
    """Threads that fill reused buffers, one batch each; a batch is good until the next one is asked
    for.
    """

    crews: ClassVar[tuple[Crew, ...]] = (Crew(2, "threads"), Crew(3, "threads"))

    def __init__(self, data: Data, folder: Path, crew: Crew) -> None:
        super().__init__(data, folder, crew)
        bytes_per_image = int(3 * data.open().coco.sizes.prod(1, dtype=np.int64).max())
        self._slots = np.zeros((crew.size + 2, BATCH_SIZE, bytes_per_image), np.uint8)

    def fill(self, buffer: NDArray[np.uint8], row: int) -> Sample:
        """Make one sample, its pixels in a part of ``buffer`` [bytes]."""
        raise NotImplementedError

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
        samples = [self.fill(buffer, row) for buffer, row in zip(buffers, rows, strict=False)]
        return tuple(zip(*samples, strict=True))


class BareDecode(_Threads):
    """JPEG bytes in memory to pixels in a reused buffer, and nothing else: no boxes, no masks."""

    crews: ClassVar[tuple[Crew, ...]] = (Crew(2, "threads"),)

    def __init__(self, data: Data, folder: Path, crew: Crew) -> None:
        super().__init__(data, folder, crew)
        self._ids = data.open().image_ids.tolist()
        self._files = [bytearray(files.read(row)) for files, row in data.iterate_distinct()]

    def fill(self, buffer: NDArray[np.uint8], row: int) -> Sample:
        """Decode one image."""
        decoded = decode_pixels(self._files[row // self.data.copies])
        pixels = buffer[: decoded.size].reshape(decoded.shape)
        np.copyto(pixels, decoded)
        return torch.from_numpy(pixels).permute(2, 0, 1), {"image_id": self._ids[row]}


class Ceiling(_Threads):
    """The raw pixels and mask bits of our shards, copied into reused buffers: the least that
    packing takes.
    """

    store: ClassVar[str] = Packed.store
    prepare = Packed.prepare

    def __init__(self, data: Data, folder: Path, crew: Crew) -> None:
        super().__init__(data, folder, crew)
        self._samples: list[tuple[Any, ...]] = []
        index = read_index(folder)
        for shard in index.shards:
            arrays = load_arrays(folder / shard.arrays_name, shard)
            tar = np.memmap(folder / shard.name, np.uint8, "r")
            masks = np.memmap(folder / shard.arrays_name, np.uint8, "r")
            first = 0
            spans = zip(
                arrays.image_ids.tolist(),
                arrays.sizes.tolist(),
                arrays.image_spans.tolist(),
                strict=True,
            )
            for (image_id, size, (start, length)), count in zip(
                spans, arrays.counts.tolist(), strict=True
            ):
                end = start + length
                # A header of numpy's is before the pixels.
                pixels = tar[end - 3 * size[0] * size[1] : end]
                objects = slice(first, first + count)
                ends = arrays.mask_ends[first : first + count + 1]
                bits = masks[arrays.bits + ends[0] : arrays.bits + ends[-1]]
                tables = (
                    arrays.boxes[objects],
                    arrays.labels[objects],
                    arrays.crops[objects],
                    ends - ends[0],
                )
                self._samples.append((image_id, size, pixels, bits, tables))
                first += count

    def fill(self, buffer: NDArray[np.uint8], row: int) -> Sample:
        """Copy one sample."""
        image_id, size, stored, bits, (boxes, labels, crops, ends) = self._samples[row]
        pixels = buffer[: stored.size]
        np.copyto(pixels, stored)
        image = torch.from_numpy(pixels.reshape(*size, 3)).permute(2, 0, 1)
        masks = PackedMasks(bits.copy(), crops, ends)
        boxes = torch.from_numpy(boxes.copy())
        labels = torch.from_numpy(labels.copy())
        return image, {"boxes": boxes, "labels": labels, "packed": masks, "image_id": image_id}

    def unpack(self, batch: Any) -> list[Sample]:
        """Return the samples with dense masks."""
        samples = []
        for image, target in zip(*batch, strict=True):
            masks = unpack_masks(target["packed"], *image.shape[1:])
            samples.append((image, {**target, "masks": torch.from_numpy(masks)}))
        return samples
