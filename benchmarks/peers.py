# mypy: disable-error-code="import-not-found,import-untyped,misc"
"""Other libraries as strategies of `compare`, on the same images: each where it is installed.

`python -m colab_utils compare --strategies packed,webdataset,litdata,mosaicml-streaming,tf_data ...` takes them from
here. WebDataset reads our shards as they are; the others write a format of their own beside them.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.systems.pipelines import import_tensorflow, make_record_parser
from colab_utils.comparison.strategies import EpochLoader, Setting, Strategy, end_workers
from colab_utils.data.decoding import decode_pixels
from colab_utils.data.masks import PackedMasks, encode_segmentation, pack_masks, unpack_masks
from colab_utils.loading.dataset import ShardDataset
from colab_utils.shards.arrays import convert_boxes

__all__ = ["PEERS"]

_SHARD_BYTES = 16_000_000


class Peer(EpochLoader):
    """Epochs of a library's own loader of records; what it gives is put on the device as every strategy's."""

    def __init__(self, setting: Setting, make: Callable[[], Any]) -> None:
        dataset = ShardDataset(setting.prepared.get("shards_on_ssd").path)
        self._batch_size = setting.batch_size
        self._records = make()
        super().__init__(setting, dataset, self._group)

    def _group(self, dataset: Any, order: Any) -> Iterator[list[Any]]:
        samples = []
        gc.collect()  # in a library's forked workers torch would complain of loaders that are garbage by now
        for sample in self._records:
            samples.append(sample)
            if len(samples) == self._batch_size:
                yield samples
                samples = []
        if samples:
            yield samples

    def close(self) -> None:
        """End the library's workers, as far as it lets itself be told."""
        end_workers(self._records)


def pack_record(dataset: ShardDataset, index: int) -> bytes:
    """A sample as bytes: a head in JSON, boxes, labels, the bits of its masks, and the image's own bytes."""
    sample = dataset.read_packed(index)
    tables = (sample.boxes, sample.labels, sample.areas, sample.masks.crops, sample.masks.offsets, sample.masks.bits)
    parts = [np.ascontiguousarray(table).tobytes() for table in tables]
    head = {"image_id": sample.image_id, "size": sample.pixels.shape[:2], "lengths": [len(part) for part in parts]}
    text = json.dumps(head).encode()
    return b"".join((len(text).to_bytes(4, "little"), text, *parts, bytes(dataset.read(index))))


def unpack_record(record: bytes) -> tuple[torch.Tensor, dict[str, Any]]:
    """The sample again: image uint8 [3, H, W] and torchvision's target."""
    start = 4 + int.from_bytes(record[:4], "little")
    head = json.loads(record[4:start])
    ends = np.cumsum([start, *head["lengths"]]).tolist()
    kinds = (np.float32, np.int64, np.float32, np.int32, np.int64, np.uint8)
    boxes, labels, areas, crops, offsets, bits = (
        np.frombuffer(record[a:b], kind).copy() for a, b, kind in zip(ends, ends[1:], kinds, strict=False)
    )
    masks = unpack_masks(PackedMasks(bits, crops.reshape(-1, 4), offsets), *head["size"])
    return _as_sample(record[ends[-1] :], head["image_id"], boxes.reshape(-1, 4), labels, areas, masks)


def _as_sample(data: bytes, image_id: int, boxes: Any, labels: Any, areas: Any, masks: Any) -> Any:
    image = torch.from_numpy(np.ascontiguousarray(decode_pixels(data).transpose(2, 0, 1)))
    target = {"boxes": boxes, "labels": labels, "area": areas, "masks": masks}
    tensors = {name: torch.from_numpy(np.asarray(value)) for name, value in target.items()}
    return image, {**tensors, "iscrowd": torch.zeros(len(labels), dtype=torch.int64), "image_id": image_id}


def _write_once(setting: Setting, name: str, write: Callable[[ShardDataset, Path], None]) -> Path:
    """A folder in the library's own format, written where it is not whole."""
    folder = setting.prepared.ssd / f"{name}-{setting.prepared.name}"
    done = folder.with_suffix(".done")
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write(ShardDataset(setting.prepared.get("shards_on_ssd").path), folder)
        done.touch()
    return folder


def _open_webdataset(setting: Setting) -> Peer:
    import webdataset

    shards = sorted(map(str, setting.prepared.get("shards_on_ssd").path.glob("*.tar")))
    workers = min(setting.workers, len(shards))

    def read(fields: dict[str, Any]) -> Any:
        record = json.loads(fields["json"])
        data = next(fields[ending] for ending in ("jpg", "png", "npy") if ending in fields)
        kept = [one for one in record["annotations"] if not one["iscrowd"]]
        boxes, keep = convert_boxes([one["bbox"] for one in kept], record["height"], record["width"])
        kept = [one for one, good in zip(kept, keep.tolist(), strict=True) if good]
        size = record["height"], record["width"]
        packed = pack_masks([encode_segmentation(one["segmentation"], *size) for one in kept])
        masks = unpack_masks(packed, *size)
        labels, areas = (np.array([one[key] for one in kept], kind)
                         for key, kind in (("category_id", np.int64), ("area", np.float32)))  # fmt: skip
        return _as_sample(data, record["image_id"], boxes[keep], labels, areas, masks)

    def make() -> Any:
        samples = webdataset.WebDataset(shards, shardshuffle=100).shuffle(100).map(read)
        return webdataset.WebLoader(samples, batch_size=None, num_workers=workers, persistent_workers=workers > 0)

    return Peer(setting, make)


def _take_only(samples: list[Any]) -> Any:
    return samples[0]


def _open_litdata(setting: Setting) -> Peer:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    def write(dataset: ShardDataset, folder: Path) -> None:
        writer = BinaryWriter(str(folder), chunk_bytes=_SHARD_BYTES)
        for index in range(len(dataset)):
            writer[index] = pack_record(dataset, index)
        writer.done()
        writer.merge()

    class Samples(StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            return unpack_record(bytes(super().__getitem__(index)))

    folder = _write_once(setting, "litdata", write)
    return Peer(setting, lambda: StreamingDataLoader(
        Samples(str(folder), shuffle=True), batch_size=1, num_workers=setting.workers, collate_fn=_take_only,
    ))  # fmt: skip


def _open_mosaicml(setting: Setting) -> Peer:
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    def write(dataset: ShardDataset, folder: Path) -> None:
        with MDSWriter(out=str(folder), columns={"sample": "bytes"}, size_limit=_SHARD_BYTES) as writer:
            for index in range(len(dataset)):
                writer.write({"sample": pack_record(dataset, index)})

    class Samples(StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            return unpack_record(super().__getitem__(index)["sample"])

    folder = _write_once(setting, "mosaicml", write)
    clean_stale_shared_memory()
    samples = Samples(local=str(folder), shuffle=True, batch_size=setting.batch_size)
    return Peer(setting, lambda: DataLoader(samples, batch_size=None, num_workers=setting.workers))


def _open_tensorflow(setting: Setting) -> Peer:
    """Cache, shuffle, prefetch in TensorFlow's graph, with the sizes that it chooses while it runs."""
    tf = import_tensorflow()

    def write(dataset: ShardDataset, folder: Path) -> None:
        with tf.io.TFRecordWriter(str(folder / "samples.tfrecord")) as writer:
            for index in range(len(dataset)):
                image, target = dataset[index]
                tables = (target["labels"].numpy(), target["boxes"].numpy(), np.packbits(target["masks"].numpy()))
                parts = [table.tobytes() for table in tables]
                parts.append(bytes(dataset.read(index)) if _is_jpeg(dataset) else image.numpy().tobytes())
                head = np.array([target["image_id"], *image.shape[1:], *map(len, parts)], np.int64)
                writer.write(b"".join((head.tobytes(), *parts)))

    folder = _write_once(setting, "tfrecord", write)
    dataset = ShardDataset(setting.prepared.get("shards_on_ssd").path)
    parse = make_record_parser(tf, jpeg=_is_jpeg(dataset), flips=False)
    records = tf.data.TFRecordDataset(str(folder / "samples.tfrecord"))
    samples = records.map(parse, num_parallel_calls=tf.data.AUTOTUNE).cache()
    pipeline = samples.shuffle(min(len(dataset), 64)).prefetch(tf.data.AUTOTUNE)

    def finish(image: Any, target: Any) -> Any:
        tensors = {name: torch.from_numpy(value) for name, value in target.items()}
        areas = tensors["masks"].flatten(1).sum(1, dtype=torch.float32)
        more = {"image_id": int(tensors["image_id"]), "area": areas, "iscrowd": torch.zeros_like(tensors["labels"])}
        return torch.from_numpy(image), {**tensors, **more}

    class Samples:
        def __iter__(self) -> Iterator[Any]:
            return (finish(*pair) for pair in pipeline.as_numpy_iterator())

    return Peer(setting, Samples)


def _is_jpeg(dataset: ShardDataset) -> bool:
    return all(bytes(dataset.read(index)[:3]) == b"\xff\xd8\xff" for index in range(len(dataset)))


PEERS = {
    strategy.name: strategy
    for strategy in (
        Strategy("webdataset", "WebDataset reads the shards as they are.", "shards_on_ssd", _open_webdataset),
        Strategy("litdata", "LitData chunks of the same samples.", "shards_on_ssd", _open_litdata),
        Strategy("mosaicml-streaming", "MDS shards of the same samples.", "shards_on_ssd", _open_mosaicml),
        Strategy("tf_data", "tf.data over TFRecords: cache, shuffle, prefetch by AUTOTUNE.", "shards_on_ssd",
                 _open_tensorflow, keeps=True),
    )
}  # fmt: skip
