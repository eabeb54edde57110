# mypy: disable-error-code="import-not-found,import-untyped,misc"
"""SPDL, a peer that loads with threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.data import Data
from benchmarks.systems.base import BATCH_SIZE, Crew, System, collate
from benchmarks.systems.plain import Memmap, MemmapDataset
from benchmarks.systems.references import ReferenceDataset

__all__ = ["SPDL", "SPDLFiles"]

_THREADS = tuple(Crew(size, "threads") for size in (1, 2, 3))


class SPDL(System):
    """A pipeline of threads over the memory-mapped file."""

    environment: ClassVar[str] = "spdl"
    store: ClassVar[str] = Memmap.store
    crews: ClassVar[tuple[Crew, ...]] = _THREADS
    prepare = Memmap.prepare

    def __init__(self, data: Data, folder: Path, crew: Crew) -> None:
        super().__init__(data, folder, crew)
        self._samples: Any = (
            MemmapDataset(folder) if self.store else ReferenceDataset(data, resize=True)
        )

    def __iter__(self) -> Iterator[Any]:
        from spdl.pipeline import PipelineBuilder

        order = torch.randperm(len(self._samples)).tolist()
        steps = (
            PipelineBuilder()
            .add_source(order)
            .pipe(self._samples.__getitem__, concurrency=self.crew.size)
        )
        pipeline = steps.aggregate(BATCH_SIZE).add_sink(3).build(num_threads=self.crew.size)
        with pipeline.auto_stop():
            yield from map(collate, pipeline.get_iterator())


class SPDLFiles(SPDL):
    """The same over the image files and polygons, as in torchvision's references, resized to
    800/1333 on the CPU.
    """

    store: ClassVar[str] = ""
    size_800: ClassVar[bool] = True
