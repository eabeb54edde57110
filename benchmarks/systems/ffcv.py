# mypy: disable-error-code="import-not-found,import-untyped,misc"
"""FFCV, whose own image fields take one size: pixels of every size as bytes, JPEGs padded to 1333 x
1333.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from benchmarks.data import Data
from benchmarks.systems.base import BATCH_SIZE, Crew, Records, Sample, System, collate, finish

__all__ = ["FFCV"]

_LONGEST = 1333


class FFCV(System):
    """A ``.beton`` file in the page cache; two threads of this process make masks dense, and
    flip.
    """

    environment: ClassVar[str] = "ffcv"
    store: ClassVar[str] = "ffcv"
    own_codec: ClassVar[bool] = True
    crews: ClassVar[tuple[Crew, ...]] = tuple(Crew(size, "threads") for size in (1, 2, 3))

    @classmethod
    def prepare(cls, data: Data, folder: Path) -> None:
        from ffcv.fields import BytesField, RGBImageField
        from ffcv.writer import DatasetWriter

        fields = {"sample": BytesField()}
        if data.is_jpeg:
            fields["image"] = RGBImageField(
                write_mode="jpg", jpeg_quality=95, max_resolution=_LONGEST
            )
        writer = DatasetWriter(
            str(folder / "samples.beton"), fields, page_size=1 << 24, num_workers=1
        )
        writer.from_indexed_dataset(_Rows(data))

    def __init__(self, data: Data, folder: Path, crew: Crew) -> None:
        from ffcv.fields.decoders import BytesDecoder, SimpleRGBImageDecoder
        from ffcv.loader import Loader, OrderOption

        super().__init__(data, folder, crew)
        pipelines = {
            "sample": [BytesDecoder()],
            **({"image": [SimpleRGBImageDecoder()]} if data.is_jpeg else {}),
        }
        self._loader = Loader(
            str(folder / "samples.beton"),
            BATCH_SIZE,
            num_workers=crew.size,
            order=OrderOption.RANDOM,
            os_cache=True,
            batches_ahead=3,
            seed=random.randrange(10**6),
            drop_last=False,
            pipelines=pipelines,
        )

    def __iter__(self) -> Iterator[Any]:
        with ThreadPoolExecutor(2) as pool:
            for parts in self._loader:
                yield collate([*pool.map(_finish_padded, *parts)])


def _finish_padded(record: Any, image: Any = None) -> Sample:
    if image is None:
        return finish(record)
    height, width = record[8:24].view(np.int64)
    return finish(record, torch.from_numpy(image[:height, :width]).permute(2, 0, 1).contiguous())


class _Rows:
    """The records as FFCV's writer takes them; for JPEG with a padded image, made of what our JPEGs
    were made of.
    """

    def __init__(self, data: Data) -> None:
        self._records = Records(data)
        self._pixels = Records(data.with_pixels()) if data.is_jpeg else None

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        record = np.frombuffer(self._records[index], np.uint8)
        if self._pixels is None:
            return (record,)
        height, width, *_, length = record[8:56].view(np.int64).tolist()
        padded = np.zeros((_LONGEST, _LONGEST, 3), np.uint8)
        pixels = np.frombuffer(self._pixels[index], np.uint8)[-3 * height * width :].reshape(
            3, height, width
        )
        padded[:height, :width] = pixels.transpose(1, 2, 0)
        return record[:-length], padded
