# mypy: disable-error-code="import-not-found,import-untyped,misc"
"""Peers with a format of their own behind a DataLoader: WebDataset, LitData, MosaicML Streaming."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from torch.utils.data import DataLoader

from benchmarks.data import Data
from benchmarks.systems.base import BATCH_SIZE, Crew, Sample, System, collate, finish, list_records

__all__ = ["LitData", "MosaicML", "WebDataset"]

_SHARD_BYTES = 64_000_000


class WebDataset(System):
    """Tars of 64 MB, read in order; shards and samples are shuffled through a buffer of 100."""

    environment: ClassVar[str] = "webdataset"
    store: ClassVar[str] = "webdataset"

    @classmethod
    def prepare(cls, data: Data, folder: Path) -> None:
        import webdataset

        with webdataset.ShardWriter(
            f"{folder}/%05d.tar", maxsize=_SHARD_BYTES, verbose=0
        ) as writer:
            for number, record in enumerate(list_records(data)):
                writer.write({"__key__": f"{number:07d}", "bin": record})

    def __init__(self, data: Data, folder: Path, crew: Crew) -> None:
        import webdataset

        super().__init__(data, folder, crew)
        samples = webdataset.WebDataset(
            sorted(map(str, folder.glob("*.tar"))), shardshuffle=100
        ).shuffle(100)
        records = samples.map(lambda fields: finish(fields["bin"]))
        batches = records.batched(BATCH_SIZE, collation_fn=collate)
        self._loader = webdataset.WebLoader(
            batches, batch_size=None, num_workers=crew.size, persistent_workers=crew.size > 0
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


class LitData(System):
    """Chunks of 64 MB."""

    environment: ClassVar[str] = "litdata"
    store: ClassVar[str] = "litdata"

    @classmethod
    def prepare(cls, data: Data, folder: Path) -> None:
        from litdata.streaming.writer import BinaryWriter

        writer = BinaryWriter(str(folder), chunk_bytes=_SHARD_BYTES)
        for number, record in enumerate(list_records(data)):
            writer[number] = record
        writer.done()
        writer.merge()

    def __init__(self, data: Data, folder: Path, crew: Crew) -> None:
        from litdata import StreamingDataLoader, StreamingDataset

        class Samples(StreamingDataset):
            def __getitem__(self, index: Any) -> Sample:
                return finish(super().__getitem__(index))

        super().__init__(data, folder, crew)
        self._loader = StreamingDataLoader(
            Samples(str(folder), shuffle=True),
            batch_size=BATCH_SIZE,
            shuffle=True,
            num_workers=crew.size,
            collate_fn=collate,
            persistent_workers=crew.size > 0,
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


class MosaicML(System):
    """MDS shards of 64 MB."""

    environment: ClassVar[str] = "mosaicml"
    store: ClassVar[str] = "mosaicml"

    @classmethod
    def prepare(cls, data: Data, folder: Path) -> None:
        from streaming import MDSWriter

        with MDSWriter(
            out=str(folder), columns={"sample": "bytes"}, size_limit=_SHARD_BYTES
        ) as writer:
            for record in list_records(data):
                writer.write({"sample": record})

    def __init__(self, data: Data, folder: Path, crew: Crew) -> None:
        from streaming import StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        class Samples(StreamingDataset):
            def __getitem__(self, index: Any) -> Sample:
                return finish(super().__getitem__(index)["sample"])

        super().__init__(data, folder, crew)
        clean_stale_shared_memory()
        samples = Samples(local=str(folder), shuffle=True, batch_size=BATCH_SIZE)
        self._loader: DataLoader[Any] = DataLoader(
            samples,
            BATCH_SIZE,
            num_workers=crew.size,
            collate_fn=collate,
            persistent_workers=crew.size > 0,
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)
