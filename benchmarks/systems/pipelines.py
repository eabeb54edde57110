# mypy: disable-error-code="import-not-found,import-untyped,misc"
"""Peers that load with threads: SPDL and tf.data."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from benchmarks.data import Data
from benchmarks.systems.base import BATCH_SIZE, Crew, Records, System, collate, group
from benchmarks.systems.plain import Memmap, MemmapDataset
from benchmarks.systems.references import ReferenceDataset

__all__ = ["SPDL", "SPDLFiles", "TFData", "import_tensorflow", "make_record_parser"]

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


def _to_tensors(target: dict[str, Any]) -> dict[str, Any]:
    return {key: torch.from_numpy(value) for key, value in target.items()}


class TFData(System):
    """TFRecord files; parsing, masks and flip in TensorFlow's graph."""

    environment: ClassVar[str] = "tf_data"
    store: ClassVar[str] = "tf_data"
    crews: ClassVar[tuple[Crew, ...]] = _THREADS

    @classmethod
    def prepare(cls, data: Data, folder: Path) -> None:
        tf = import_tensorflow()
        writers = [tf.io.TFRecordWriter(f"{folder}/{number:02d}.tfrecord") for number in range(20)]
        for number, record in enumerate(Records(data)):
            writers[number % 20].write(record)
        for writer in writers:
            writer.close()

    def __init__(self, data: Data, folder: Path, crew: Crew) -> None:
        tf = import_tensorflow()
        super().__init__(data, folder, crew)
        files = tf.data.Dataset.from_tensor_slices(
            sorted(map(str, folder.glob("*.tfrecord")))
        ).shuffle(20)
        records = files.interleave(
            tf.data.TFRecordDataset, cycle_length=4, num_parallel_calls=1, deterministic=False
        )
        parse = make_record_parser(tf, jpeg=data.is_jpeg, flips=self.flips)
        samples = (
            records.shuffle(64)
            .map(parse, num_parallel_calls=crew.size, deterministic=False)
            .prefetch(8)
        )
        options = tf.data.Options()
        options.threading.private_threadpool_size = crew.size + 1
        self._samples = samples.with_options(options)

    def __iter__(self) -> Iterator[Any]:
        arrays = self._samples.as_numpy_iterator()
        return group((torch.from_numpy(image), _to_tensors(target)) for image, target in arrays)


def import_tensorflow() -> Any:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    with contextlib.suppress(ImportError):
        # Torch imports it sooner or later, and its LLVM must come before TensorFlow's.
        import triton._C  # noqa: F401
    import tensorflow

    return tensorflow


def _unpack_masks(tf: Any, bits: Any, count: Any, height: Any, width: Any) -> Any:
    """Return uint8 [count, height, width] of one bit a pixel.

    TensorFlow has no unpackbits: each byte picks the eight bytes of its bits from a table.
    """
    table = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).view(np.int64).ravel()
    stored = tf.cast(tf.io.decode_raw(bits, tf.uint8), tf.int32)
    eights = tf.gather(tf.constant(table), stored)
    flat = tf.reshape(tf.bitcast(eights, tf.uint8), [-1])
    return tf.reshape(flat[: count * height * width], [count, height, width])


def make_record_parser(tf: Any, *, jpeg: bool, flips: bool) -> Any:
    """Return a function of TensorFlow's graph that makes a sample of a record of `Records`."""

    def parse(record: Any) -> Any:
        numbers = tf.io.decode_raw(tf.strings.substr(record, 0, 56), tf.int64)
        image_id = numbers[0]
        height = numbers[1]
        width = numbers[2]
        starts = 56 + tf.cumsum(numbers[3:], exclusive=True)
        parts = [tf.strings.substr(record, starts[n], numbers[3 + n]) for n in range(4)]
        labels, boxes, bits, image = parts
        if jpeg:
            decoded = tf.io.decode_jpeg(image, channels=3, dct_method="INTEGER_ACCURATE")
            pixels = tf.transpose(decoded, [2, 0, 1])
        else:
            pixels = tf.reshape(tf.io.decode_raw(image, tf.uint8), [3, height, width])
        labels = tf.io.decode_raw(labels, tf.int64)
        corners = tf.reshape(tf.io.decode_raw(boxes, tf.float32), [-1, 4])
        masks = _unpack_masks(tf, bits, tf.size(labels, tf.int64), height, width)

        def mirror() -> Any:
            right = tf.cast(width, tf.float32)
            x0, y0, x1, y1 = tf.unstack(corners, axis=1)
            mirrored = tf.stack([right - x1, y0, right - x0, y1], 1)
            return tf.reverse(pixels, [2]), mirrored, tf.reverse(masks, [2])

        chosen = (pixels, corners, masks)
        if flips:
            chosen = tf.cond(tf.random.uniform([]) < 0.5, mirror, lambda: (pixels, corners, masks))
        return chosen[0], {
            "boxes": chosen[1],
            "labels": labels,
            "masks": chosen[2],
            "image_id": image_id[None],
        }

    return parse
