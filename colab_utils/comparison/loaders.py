"""The datasets and loaders of the strategies. `deliver` moves their batches to the device."""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset

from colab_utils.comparison.prepared import PreparedData
from colab_utils.data.decoding import guard_pillow
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import PackedBatch
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.sampler import BatchSampler
from colab_utils.processes import ThreadPool, map_ahead, quiet_fork

# Number of samples in the shuffle buffer of ``tf.data``.
_SHUFFLED = 1000
# The seed of the order of images. With it, the first batches of the built-in dataset wait about as
# long as all of its batches do in the mean, so that a few batches of a slow strategy are typical.
SEED = 5
# A sample: an image, uint8 [3, H, W], and torchvision's target.
Sample = tuple[Tensor, dict[str, Any]]


@dataclass(frozen=True)
class Setting:
    """The data and the settings that all strategies of a comparison run with."""

    prepared: PreparedData
    """The images, in the forms that strategies read."""
    batch_size: int
    """Images in a batch."""
    workers: int
    """Worker processes, for the strategies that have workers."""
    device: str
    """The device to which batches are moved."""


class PillowFolder(CocoFolder):
    """A dataset of loose files that loads as torchvision's reference scripts do.

    Pillow decodes the images. The masks are drawn from polygons for each sample.
    """

    @staticmethod
    @guard_pillow()
    def decode(data: bytes | bytearray) -> Tensor:
        """Decode the bytes of an image to uint8 [3, H, W]."""
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


class Items(Dataset[Sample]):
    """A dataset whose sample at ``index`` is ``load(items[index])``."""

    def __init__(self, items: Sequence[Any], load: Callable[[Any], Sample]) -> None:
        self._items = items
        self._load = load

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Sample:
        return self._load(self._items[index])


def collate(samples: Iterable[Sample]) -> tuple[Any, ...]:
    """Return ``(images, targets)``, as torchvision's reference scripts do."""
    return tuple(zip(*samples, strict=True))


class EpochLoader:
    """A loader of shuffled epochs. As in `make_loader`, a batch holds images of similar shape.

    Args:
        setting: the data and the batch size.
        dataset: a dataset of samples.
        ahead: number of batches that a thread loads before you ask for them. 0 starts no thread.
        **options: other arguments of torch's ``DataLoader``, which loads the batches.
    """

    def __init__(self, setting: Setting, dataset: Any, *, ahead: int = 0, **options: Any) -> None:
        sizes = setting.prepared.reference.sizes
        self._order = BatchSampler(len(dataset), setting.batch_size, SEED, sizes=sizes)
        self._ahead = ahead
        self._pool = ThreadPool(1)
        with quiet_fork():
            self._batches = DataLoader[Any](
                dataset, batch_sampler=self._order, collate_fn=collate, **options
            )
        self.workers = self._batches.num_workers

    def __iter__(self) -> Iterator[Any]:
        with quiet_fork():
            batches = iter(self._batches)
        if self._ahead:
            count = range(len(self._batches))
            yield from map_ahead(self._pool, lambda _: next(batches), count, ahead=self._ahead)
        else:
            yield from batches
        self._order.epoch += 1

    def close(self) -> None:
        """End the workers that the ``DataLoader`` keeps. The thread is told to end, but it is not
        waited for: it may hang in a read.
        """
        self._pool.shutdown(wait=False, cancel_futures=True)
        iterator: Any = self._batches._iterator
        if iterator is not None:
            iterator._shutdown_workers()


def deliver(batch: Any, device: str) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Return the images and targets of a batch, on the device, as torchvision models take them.

    The batch may be packed. Images become float32 in 0 to 1.
    """
    if isinstance(batch, PackedBatch):
        return batch.to_images(device), batch.to_targets(device)
    images, targets = batch
    images, targets = tree_map_only(Tensor, partial(Tensor.to, device=device), (images, targets))
    floats = [image if image.is_floating_point() else image / 255 for image in images]
    return floats, list(targets)


class TensorFlowLoader:
    """A loader by ``tf.data``: map, cache, shuffle, batch and prefetch, with AUTOTUNE.

    A sample goes through ``tf.data`` as bytes, because the images of a batch differ in shape.

    Raises:
        ColabUtilsError: if TensorFlow is not installed.
    """

    def __init__(self, dataset: Any, batch_size: int) -> None:
        try:
            import tensorflow as tf  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError:
            raise ColabUtilsError(
                "TensorFlow is not installed on this machine, so tf.data is left out. Colab has it."
            ) from None
        with suppress(RuntimeError):
            # TensorFlow does not need the GPU here, and would take all of its memory.
            tf.config.set_visible_devices([], "GPU")

        def load(index: Any) -> bytes:
            content = io.BytesIO()
            torch.save(dataset[int(index)], content)
            return content.getvalue()

        samples = tf.data.Dataset.range(len(dataset)).map(
            lambda index: tf.numpy_function(load, [index], tf.string),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        batches = samples.cache().shuffle(_SHUFFLED).batch(batch_size)
        self._batches = batches.prefetch(tf.data.AUTOTUNE)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches.as_numpy_iterator():
            yield collate(map(load_sample, batch))

    def close(self) -> None:
        """Release the pipeline. TensorFlow then ends its threads."""
        del self._batches


def load_sample(content: bytes) -> Sample:
    """Load a sample from the bytes that ``torch.save`` wrote."""
    sample: Sample = torch.load(io.BytesIO(content), weights_only=True)
    return sample
