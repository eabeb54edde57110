"""A COCO dataset that reads loose image files."""

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import compress
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from colab_utils.data.coco import CocoDataset, open_coco
from colab_utils.data.defects import warn_of_faults
from colab_utils.data.image_checks import sample_faults
from colab_utils.data.masks import pack_masks, resize_rles
from colab_utils.data.orientation import Exif, choose_turn, decode_upright, find_turn
from colab_utils.data.sizes import SIDE_RANGE, Size, plan_size, plan_sizes
from colab_utils.errors import ColabUtilsError, UnavailableError, explain_os_error
from colab_utils.file_cache import FileCache
from colab_utils.files import open_store
from colab_utils.loading.masks import unpack_masks
from colab_utils.loading.samples import Bytes, CocoSamples, Sample, Transforms
from colab_utils.loading.transforms import apply_transforms
from colab_utils.places import Place, PlaceLike, open_place
from colab_utils.require import require_choice, require_number
from colab_utils.shards.arrays import convert_boxes
from colab_utils.shards.records import encode_masks, name_image, scale_annotation
from colab_utils.streams import require_streams


class CocoFolder(CocoSamples):
    """A map-style dataset of an image folder and a COCO JSON, with torchvision's detection
    contract.

    For each sample, the image is read and decoded, and its polygons are turned into dense masks, as
    in torchvision's ``references/detection`` (``CocoDetection`` with ``ConvertCocoPolysToMask``).
    Unlike torchvision's code, this dataset keeps the annotations in flat arrays, tries failed reads
    from Drive again after growing waits, and opens no file outside the folder.

    The images are in the order of the JSON. ``ShardDataset`` describes the attributes
    ``num_classes``, ``class_names``, ``category_ids``, ``image_ids`` and ``fingerprint``.

    Args:
        images: Image folder: a path, or a URL that fsspec knows, such as ``s3://bucket/images``.
        annotations: COCO instance JSON: a path or a URL; or the result of ``open_coco``.
        contiguous_labels: Map category ids to labels 1 to K. Default: False.
        streams: Files that each process reads at the same time for a batch. "auto" measures how
            many are fastest. With 1, the files are read one after the other. Default: "auto".
        exif: What becomes of photos that EXIF turns while their size does not tell whether the
            annotations were drawn on the turned photo, as in ``write_shards``: "turn", "keep" or
            "auto". Where the size tells, it decides. Default: "auto".
        transforms: Your own ``torchvision.transforms.v2``, as for ``ShardDataset``. Default: None.
        cache: Folder on this machine's disk. The bytes of each file are kept there as they come,
            and are read there afterwards, in any later session, too. If the files change, delete
            the folder. If the disk gets full, no more is kept, with a warning. Default: None, which
            keeps nothing.
        min_size: Shorter side that training needs, in pixels. A larger image is shrunk as
            ``write_shards`` does, with its boxes and masks. A JPEG of at least twice the size is
            decoded at 1/2, 1/4 or 1/8 of its size, which takes about half the time. Default: None,
            no limit.
        max_size: Longer side that training needs, in pixels. Default: None, no limit.

    Raises:
        ColabUtilsError: The annotations are missing or are not COCO. When a sample is read: its
            image or one of its masks is bad.
        DriveLostError: Drive fails for 81 seconds.

    Example:
        >>> CocoFolder("photos", "no/such/file.json")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: There is no image folder at photos. ...
    """

    is_slow = True
    # Whether large JPEGs are decoded at a part of their size.
    _is_reduced = True

    def __init__(
        self,
        images: PlaceLike,
        annotations: PlaceLike | CocoDataset,
        *,
        contiguous_labels: bool = False,
        streams: int | str = "auto",
        exif: Exif = "auto",
        transforms: Transforms | None = None,
        cache: str | Path | FileCache | None = None,
        min_size: int | None = None,
        max_size: int | None = None,
    ) -> None:
        limits = {"min_size": min_size, "max_size": max_size}
        self._limits = {
            name: require_number(name, limit, minimum=SIDE_RANGE[0], maximum=SIDE_RANGE[1])
            for name, limit in limits.items()
            if limit is not None
        }
        require_choice("exif", exif, get_args(Exif))
        if isinstance(cache, str | Path):
            cache = FileCache(cache)
        self.cache = cache
        self.exif = exif
        self.transforms = transforms
        self.folder = open_place(images)
        self.streams = require_streams(streams)
        self.store = open_store(self.folder)
        if isinstance(annotations, CocoDataset):
            self.coco = annotations
        else:
            self.coco = open_coco(images, annotations)
            warn_of_faults(annotations, sample_faults(self.coco))
        self._set_labels(self.coco.categories, contiguous=contiguous_labels)
        self.counts = self.coco.count_objects()
        self.image_ids = self.coco.image_ids
        self.sizes = plan_sizes(self.coco.sizes, **self._limits)
        self.fingerprint = self.coco.fingerprint

    def __getitem__(self, index: int) -> Sample:
        index = self._check(index)
        image, original = self._load(index)
        annotations, boxes, masks = self._read_objects(index, original, image.shape[1:])
        labels = self._map_labels([a["category_id"] for a in annotations])
        area = np.array([a["area"] for a in annotations], np.float32)
        target = self._make_target(index, boxes=boxes, labels=labels, masks=masks, area=area)
        return apply_transforms(self.transforms, image, target)

    def load_image(self, index: int) -> Tensor:
        """Return the image, uint8 [3, H, W], turned as its annotations were drawn."""
        return self._load(self._check(index))[0]

    def _load(self, index: int) -> tuple[Tensor, Size]:
        """Return the image, and its height and width before it was shrunk.

        A file that does not decode is read again, because Drive gives wrong bytes at times.
        """
        problem = ""
        for read in (self.read, self._read_part):
            data = read(index)
            try:
                return self._decode_shrunk(index, data)
            except UnavailableError:
                raise
            except ColabUtilsError as error:
                problem = str(error)
            if self.cache is not None:
                # The file may be repaired in its folder.
                self.cache.forget(name_image(self.folder, self.coco, index))
        raise ColabUtilsError(f"{self.find_path(index)}: {problem}. Run check on the dataset.")

    def _decode_shrunk(self, index: int, data: bytes) -> tuple[Tensor, Size]:
        height, width = self.coco.sizes[index].tolist()
        size = height, width
        turn = find_turn(data, size)
        if turn == "unclear":
            turn = self._turn_of_unclear
        # A photo that is shrunk has the same pixels whichever decoders are installed.
        if turn != "turn" and all(size) and plan_size(*size, **self._limits) == size:
            image = self.decode(data)
            if tuple(image.shape[1:]) == size:
                return image, size
        pixels, original = decode_upright(
            data, size, turn, is_reduced=self._is_reduced, **self._limits
        )
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()), original

    @cached_property
    def _turn_of_unclear(self) -> str:
        """Return "turn" or "keep" for photos whose size does not tell how they were annotated.

        Other photos are looked at when the first such photo is met. All processes look at the same
        ones.
        """
        if self.exif != "auto":
            return self.exif
        return choose_turn(self.folder, self.coco, is_met=True)

    def read(self, index: int) -> bytes:
        """Return the bytes of the image file."""
        return bytes(self._open_reader().take(self._check(index)))

    def _read_part(self, index: int) -> bytes:
        if self.cache is None:
            return self._read_slowly(index)
        name = name_image(self.folder, self.coco, index)
        return self.cache.read(name, partial(self._read_slowly, index))

    def _read_slowly(self, index: int) -> bytes:
        path = self.find_path(index)
        try:
            return self.store.read_listed(path)
        except OSError as error:
            reason = explain_os_error(error, "Run check on the dataset.")
            raise ColabUtilsError(f"The image file {path} cannot be read: {reason}") from None

    def _list_parts(self, index: int) -> list[int]:
        return [index]

    def read_masks(self, index: int) -> Bytes:
        """Return the dense masks, uint8 [N, H, W], at the size of the image as it is delivered."""
        index = self._check(index)
        original = self.coco.sizes[index].tolist()
        return self._read_objects(index, original, self.sizes[index].tolist())[2]

    def name_image(self, index: int) -> str:
        """Return the image's ``file_name``, for messages."""
        return self.coco.names[index]

    def find_path(self, index: int) -> Place:
        """Return the path of the image file.

        Raises:
            ColabUtilsError: The file lies outside the image folder.
        """
        return self.coco.find_image(self.folder, self._check(index))[0]

    def list_annotations(self, index: int) -> list[dict[str, Any]]:
        """Return the image's annotations in COCO form, including crowds."""
        return self.coco.annotations(self._check(index))

    def _read_objects(
        self, index: int, original: Sequence[int], size: Sequence[int]
    ) -> tuple[list[dict[str, Any]], Any, Bytes]:
        """Return the annotations to train on, with their boxes and dense masks, for an image that
        was shrunk from its ``original`` height and width to ``size``.
        """
        height, width = size
        annotations = [
            scale_annotation(annotation, original, size)
            for annotation in self.list_annotations(index)
            if not annotation["iscrowd"]
        ]
        boxes, keep = convert_boxes([a["bbox"] for a in annotations], height, width)
        annotations = list(compress(annotations, keep))
        try:
            rles = encode_masks(annotations, original)
        except ColabUtilsError as error:
            raise ColabUtilsError(f"{error}. Run check on the dataset.") from None
        if tuple(size) != tuple(original):
            rles = resize_rles(rles, height, width)
        return annotations, boxes[keep], unpack_masks(pack_masks(rles), height, width)
