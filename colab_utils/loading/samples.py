"""What a sample is: its target, its packed form, whose fault an error is, and the base class of the
datasets of COCO samples.
"""

import io
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from colab_utils.data.decoding import decode_pixels
from colab_utils.errors import MACHINE_FAULTS, ColabUtilsError, UnavailableError
from colab_utils.files import Store
from colab_utils.reader import Reader

Target = dict[str, Any]
"""torchvision's target: boxes float32 [N, 4] (x0, y0, x1, y1 in pixels), labels int64 [N], masks
uint8 [N, H, W], image_id int, area float32 [N], iscrowd int64 [N]."""

Sample = tuple[Tensor, Target]
"""An image, uint8 [3, H, W], and its target."""

Bytes = NDArray[np.uint8]

Tables = dict[str, NDArray[Any]]
"""Arrays that belong together, by their names."""

Transforms = Callable[..., Any]
"""A callable from (image, target) to (image, target), such as one of
``torchvision.transforms.v2``."""


class PackedSample(NamedTuple):
    """An image and its objects as they are sent to the training process."""

    pixels: Bytes
    """uint8 [H, W, 3]: the image."""
    bits: Bytes
    """uint8 [bytes]: the bits of all masks, one mask after the other."""
    tables: Tables
    """The tables of this image alone: those of ``PackedBatch``, but ``mask_bytes``, int64 [T], the
    size of each mask, takes the place of the offsets.
    """


class BadSampleError(Exception):
    """The error of a sample, and the sample's place in its batch. Only the loader handles it."""


@contextmanager
def blame_sample(place: int) -> Iterator[None]:
    """Raise the errors of a sample as BadSampleError, except those of Drive and the machine."""
    try:
        yield
    except (UnavailableError, *MACHINE_FAULTS):
        raise
    except (Exception, GeneratorExit, SystemExit) as error:
        if isinstance(error, StopIteration | GeneratorExit | SystemExit):
            # These would end the loader's own pass, or the program.
            name = type(error).__name__
            error = ColabUtilsError(f"your dataset raised {name}. Mend its __getitem__.")
        elif isinstance(error, RuntimeError) and "CUDA in forked subprocess" in str(error):
            # torch's message advises to spawn the workers, but the loader always forks them.
            error = ColabUtilsError(
                "Your dataset used the GPU in a worker, where it cannot work. Leave out .cuda() "
                "and .to(device) there, and give make_loader a device: it sends whole batches."
            )
        raise BadSampleError(error, place) from None


def is_own(value: Any) -> bool:
    """Return whether the class of an object is one of this package.

    Example:
        >>> is_own([1])
        False
    """
    return type(value).__module__.partition(".")[0] == __name__.partition(".")[0]


class CocoSamples(Dataset[Sample]):
    """The base class of `ShardDataset` and `CocoFolder`.

    It holds the labels, the ids and sizes of the images, and the annotations in COCO form. It reads
    the parts of samples ahead, several at the same time. A part is a file, or a piece of a file.
    """

    store: Store
    image_ids: NDArray[np.int64]
    sizes: NDArray[np.int32]
    counts: NDArray[np.int64]
    transforms: Transforms | None = None
    """What is applied to each sample."""
    max_bad = 0
    """Number of bad images that a loader may leave out, each with a warning."""
    streams: int | str = 1
    """Number of parts that each process reads at the same time. "auto" measures how many are
    fastest. With 1, the parts are read one after the other.
    """
    arrival: Any = None
    """The `Arrival` that copies shards of the dataset, or the `Writing` that writes them; None if
    there is no such work, and in workers.
    """
    is_arriving = False
    """Whether `arrival` copies shards, so that samples may have to wait for it."""
    windows: Sequence[list[int]] = ()
    """Numbers of the shards in the order in which the first epoch uses them (see `plan_windows`).
    Without windows, it mixes all images.
    """
    shard_of: Any = None
    """int64 [I]: number of the shard of each image, also before it is written; None without shards.
    """
    is_slow = False
    """Whether files come slowly, so that reading them ahead wins time."""
    _open_file: Any = None
    _reader: Reader | None = None
    _reader_process = 0

    def _set_labels(self, categories: Sequence[dict[str, Any]], *, contiguous: bool) -> None:
        names = {category["id"]: category["name"] for category in categories}
        ids = sorted(names)
        # Label 0 is torchvision's background. If an id is below 1, all categories are renumbered.
        mapped = contiguous or min(ids, default=1) < 1
        labels = range(1, len(ids) + 1) if mapped else ids
        self.category_ids: dict[int, int] = dict(zip(labels, ids, strict=True))
        self.class_names: dict[int, str] = {
            label: names[number] for label, number in self.category_ids.items()
        }
        self.num_classes = max(self.class_names, default=0) + 1

    def __getstate__(self) -> dict[str, Any]:
        # Threads, locks and open files cannot be pickled. The copy makes its own. The work that
        # brings shards belongs to the process that started it.
        return {**vars(self), "arrival": None, "_open_file": None, "_reader": None}

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Return the samples of a batch. Their parts are read at the same time.

        PyTorch's ``DataLoader`` calls this for each batch.
        """
        if self.streams == 1:
            return [self[index] for index in indices]
        reader = self._open_reader()
        numbers = [self._check(index) for index in indices]
        parts = [part for number in numbers for part in self._list_parts(number)]
        reader.prefetch(part for part in parts if not reader.is_ahead(part))
        try:
            return [self[number] for number in numbers]
        except BaseException:
            reader.forget(parts)
            raise

    def read_ahead(self, indices: Iterable[int], streams: int | str = "auto") -> None:
        """Begin to read the parts of these samples, several at the same time.

        The samples take them from memory later. To read a sample twice, name it twice.

        Args:
            indices: Samples in the order in which they are needed.
            streams: Parts to read at the same time. "auto" uses the dataset's ``streams``. The
                value has no effect after this process has begun to read. Default: "auto".
        """
        reader = self._open_reader(streams)
        numbers = [self._check(index) for index in indices]
        reader.prefetch(part for number in numbers for part in self._list_parts(number))

    def read_images(self) -> AbstractContextManager[None]:
        """Read all images ahead in a block that loads them in order, if files come slowly."""
        return self._read_parts(self._list_parts(index)[-1] for index in range(len(self)))

    @contextmanager
    def _read_parts(self, parts: Iterable[Any]) -> Iterator[None]:
        reader = self._open_reader()
        names = [*parts] if self.is_slow else []
        reader.prefetch(names)
        try:
            yield
        finally:
            reader.forget(names)

    def drop_ahead(self) -> None:
        """Drop the parts that ``read_ahead`` began to read and that no sample has taken."""
        self._open_reader().forget()

    def _open_reader(self, streams: int | str = "auto") -> Reader:
        """Return the reader of this process.

        After a fork, the new process makes a reader of its own, because threads and locks do not
        survive a fork.
        """
        if self._reader is None or self._reader_process != os.getpid():
            streams = self.streams if streams == "auto" else streams
            # The threads of the reader must not keep the dataset in memory.
            read: Any = weakref.WeakMethod(self._read_part)
            self._reader = Reader(lambda name: read()(name), self.store, streams=streams)
            self._reader_process = os.getpid()
            weakref.finalize(self, self._reader.end).atexit = False
        return self._reader

    def _list_parts(self, index: int) -> list[Any]:
        """Return the names of the parts of a sample, in the order in which they are used. The last
        one is the image.
        """
        raise NotImplementedError

    def _read_part(self, name: Any) -> Any:
        """Return the bytes of a part of a sample. Several threads call this."""
        raise NotImplementedError

    def stop(self) -> None:
        """Stop the copying or writing of shards, if there is any.

        Finished shards stay, and the same call goes on after them. If another process copies them,
        it goes on.
        """
        if self.arrival is not None:
            self.arrival.stop()

    def wait(self) -> None:
        """Wait until all shards are copied, or are written and sent to Drive.

        Raises:
            ColabUtilsError: a shard cannot be copied or written, or the work was stopped.
        """
        if self.arrival is not None:
            self.arrival.wait()

    def find_nearest(self) -> "CocoSamples":
        """Return the nearest form of this dataset that exists now, with the same samples."""
        return self

    @property
    def writes_itself(self) -> bool:
        """Return whether the dataset writes its images into a batch without making samples.

        Such a dataset has the methods ``describe`` and ``read_into`` of `ShardDataset`, and nothing
        changes its samples.
        """
        return False

    @property
    def objects(self) -> int:
        """Return the number of objects in all images, without crowds."""
        return int(self.counts.sum())

    def get_height_and_width(self, index: int) -> tuple[int, int]:
        """Return height and width in pixels, without reading the image.

        torchvision's grouping by aspect ratio calls this.
        """
        height, width = self.sizes[self._check(index)].tolist()
        return height, width

    def _map_labels(self, category_ids: Any) -> NDArray[np.int64]:
        labels, ids = np.array(list(self.category_ids.items()), np.int64).reshape(-1, 2).T
        return labels[np.searchsorted(ids, category_ids)]

    def __len__(self) -> int:
        return len(self.image_ids)

    def _check(self, index: int) -> int:
        # A range accepts negative indices, and raises the IndexError that ends a loop.
        return range(len(self))[index]

    @staticmethod
    def decode(data: bytes | bytearray) -> Tensor:
        """Decode an image file to uint8 [3, H, W]; see ``decode_pixels``.

        Raises:
            ColabUtilsError: The bytes are not a complete image.
        """
        # numpy copies the pixels. torch would do so in OpenMP threads, which a fork does not copy.
        return torch.from_numpy(np.ascontiguousarray(decode_pixels(data).transpose(2, 0, 1)))

    def _make_target(self, index: int, **parts: NDArray[Any]) -> Target:
        parts["iscrowd"] = np.zeros_like(parts["labels"])
        tensors = {key: torch.from_numpy(part) for key, part in parts.items()}
        return {"image_id": int(self.image_ids[index]), **tensors}

    def name_image(self, index: int) -> str:
        """Return a name of an image for messages, without reading a file."""
        return f"image {self.image_ids[index]}"

    def list_annotations(self, index: int) -> list[dict[str, Any]]:
        """Return the image's annotations in COCO form, including crowds."""
        raise NotImplementedError

    def to_coco(self) -> Any:
        """Return the dataset as a ``COCO`` of pycocotools, including crowds, for evaluators.

        Example:
            >>> from pycocotools.cocoeval import COCOeval
            >>> COCOeval(ShardDataset("shards").to_coco(), iouType="segm")  # doctest: +SKIP
        """
        from pycocotools.coco import COCO

        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for index, (height, width) in enumerate(self.sizes.tolist()):
            image_id = int(self.image_ids[index])
            images.append({"id": image_id, "height": height, "width": width})
            # Ids start at 1, because COCOeval takes an annotation with id 0 as "no match".
            for annotation in self.list_annotations(index):
                number = len(annotations) + 1
                annotations.append({**annotation, "image_id": image_id, "id": number})
        categories = [
            {"id": number, "name": self.class_names[label]}
            for label, number in self.category_ids.items()
        ]
        coco = COCO()
        coco.dataset = {
            "info": {},
            "images": images,
            "annotations": annotations,
            "categories": categories,
        }
        with redirect_stdout(io.StringIO()):
            coco.createIndex()
        return coco
