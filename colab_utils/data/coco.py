"""Any COCO instance JSON, read entry by entry: its numbers in flat arrays, its annotations as their
JSON text.

No Python object is kept for an annotation, so COCO train2017 (118,000 images, 860,000 objects, 0.45
GB of JSON) needs little more memory than its text (``make stress``), and worker processes share it.
"""

import json
import warnings
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from colab_utils.data.coco_json import UNREADABLE, Columns, read_columns
from colab_utils.data.fields import FAULTS, read_annotation
from colab_utils.data.image_paths import find_file, list_meanings, require_folder
from colab_utils.data.masks import number_within
from colab_utils.drive import Retries, ShortReadError
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.files import write_file
from colab_utils.machine import find_free_memory
from colab_utils.places import Place, open_place

# What `Columns` holds of each image, and of each annotation.
_IMAGE = np.dtype([(name, np.int64) for name in ("id", "height", "width", "name_end")])
ROW = np.dtype(
    [(name, np.int64) for name in ("id", "image_id", "category_id", "is_crowd", "text_end")]
)
"""The numbers of an annotation."""
# Memory that reading takes, in times of the file's bytes.
_MEMORY_OF_JSON = 1.5


@dataclass(frozen=True, eq=False)
class CocoDataset:
    """Hold a COCO dataset's annotations, grouped by image; make one with :func:`read_coco`.

    I images, A annotations. Annotations whose image is unknown are not among the A; their ids are
    in ``unknown_images``. Of images with the same id, the first has the annotations.
    """

    fingerprint: str
    """XXH3-128 of the JSON file, in hexadecimal."""
    categories: tuple[dict[str, Any], ...]
    """Each category's ``id`` and ``name``, in order of id."""
    image_ids: NDArray[np.int64]
    """int64 [I], in the file's order."""
    sizes: NDArray[np.int32]
    """int32 [I, 2]: height and width in pixels; 0 where the file gives none."""
    names: bytes
    """All ``file_name`` one after another, UTF-8."""
    name_ends: NDArray[np.int64]
    """int64 [I + 1]: where each starts in ``names``, and where the last one ends."""
    first: NDArray[np.int64]
    """int64 [I + 1]: image i has the annotations ``first[i]`` to ``first[i + 1]``."""
    ids: NDArray[np.int64]
    """int64 [A]: annotation ids; an id that is missing or text is the annotation's row in the file,
    from 1.
    """
    is_crowd: NDArray[np.bool_]
    """bool [A]: whether an annotation is a crowd, which is left out of training."""
    texts: bytes | bytearray
    """The JSON of annotations, UTF-8, in any order."""
    text_spans: NDArray[np.int64]
    """int64 [A, 2]: where each annotation's starts in ``texts``, and where it ends."""
    shared_names: frozenset[str]
    """Base names that several images have, in folders of their own: no image is found by one of
    them alone.
    """
    repeated_ids: NDArray[np.int64]
    """Ids that several images have, once for each image but the first."""
    unknown_images: NDArray[np.int64]
    unknown_categories: NDArray[np.int64]
    """Ids of those among the A whose category is unknown."""
    text_ids: tuple[str, ...] = ()
    """Ids of images that are names, for which `image_ids` has integers."""

    def __len__(self) -> int:
        return len(self.image_ids)

    def __str__(self) -> str:
        return (
            f"{len(self):,} images, {len(self.ids):,} annotations, {len(self.categories)} "
            "categories"
        )

    def file_name(self, index: int) -> str:
        """Return the image's path below the image folder, as the JSON gives it; :meth:`find_image`
        opens no file outside.
        """
        return self.names[self.name_ends[index] : self.name_ends[index + 1]].decode()

    def image(self, index: int) -> dict[str, Any]:
        """Return the image's ``id``, ``file_name``, ``width`` and ``height``."""
        height, width = self.sizes[index].tolist()
        number = int(self.image_ids[index])
        return {"id": number, "file_name": self.file_name(index), "width": width, "height": height}

    def find_image(self, folder: str | Place, index: int) -> tuple[Place, bool]:
        """Return the image's file, always below ``folder``, and whether its base name alone found
        it.

        The file is that of the ``file_name``, where composed and decomposed accents count as equal.
        A name with backslashes, of another machine, or of a folder that is not there, as tools
        write them, means the one file below ``folder`` with this base name; links are not followed
        to it. A missing file is given as it is named.

        Raises:
            ColabUtilsError: the name leads out of the folder and no file there has its base name,
                or several have it; or a link in its place leads out.
            DriveLostError: Drive went away.
        """
        return find_file(folder, self.file_name(index), self.shared_names)

    @property
    def crowds(self) -> int:
        """Return how many annotations are crowds."""
        return int(self.is_crowd.sum())

    def count_objects(self) -> NDArray[np.int64]:
        """Return the annotations of each image that are no crowds, int64 [I]."""
        ends = np.append(0, np.cumsum(~self.is_crowd))
        return np.diff(ends[self.first])

    def annotations(self, index: int) -> list[dict[str, Any]]:
        """Return the image's annotations in COCO form, made when you ask; the segmentation is as in
        the file.

        Raises:
            ColabUtilsError: one of them is faulty, such as one whose box is no numbers.
        """
        sound, faults = self.read_annotations(index)
        if faults:
            number, reason = faults[0]
            raise ColabUtilsError(f"annotation {number}: {reason}")
        return sound

    def read_annotations(self, index: int) -> tuple[list[dict[str, Any]], list[tuple[int, str]]]:
        """Return the image's sound annotations as :meth:`annotations` gives them, and id and fault
        of each of the others.
        """
        sound: list[dict[str, Any]] = []
        faults: list[tuple[int, str]] = []
        size = self.sizes[index].tolist()
        known = {category["id"] for category in self.categories}
        numbers = self.ids[self.first[index] : self.first[index + 1]].tolist()
        try:
            entries = self.read_entries(index)
        except RecursionError:
            return [], [(numbers[0], "lists that are nested too deeply")]
        for number, entry in zip(numbers, entries, strict=True):
            try:
                annotation = {"id": number, **read_annotation(entry, *size)}
                if annotation["category_id"] not in known:
                    raise ValueError(f"category_id {annotation['category_id']} of no category")
                sound.append(annotation)
            except (*FAULTS, ColabUtilsError) as error:
                faults.append((number, str(error)))
        return sound, faults

    def read_entries(self, index: int) -> list[Any]:
        """Return the image's annotations as they are in the file."""
        return list(json.loads(b"[%b]" % self.take_text(index)))

    def take_text(self, index: int) -> bytes:
        """Return the JSON of the image's annotations, parted by commas."""
        spans = self.text_spans[self.first[index] : self.first[index + 1]].tolist()
        return b", ".join([self.texts[start:end] for start, end in spans])

    def subset(self, start: int, stop: int) -> "CocoDataset":
        """Return images ``start`` to ``stop`` alone; see :meth:`select`."""
        return self.select(np.arange(start, stop))

    def select(self, indices: NDArray[np.int64]) -> "CocoDataset":
        """Return these images alone, in this order, in arrays of their own (small to send to
        another process).
        """
        # Of these images alone: a check takes thousands of small parts.
        counts = self.first[indices + 1] - self.first[indices]
        objects = np.repeat(self.first[indices], counts) + number_within(counts)
        name_spans = np.stack([self.name_ends[indices], self.name_ends[indices + 1]], axis=1)
        names, name_ends = _take_parts(self.names, name_spans)
        texts, text_ends = _take_parts(self.texts, self.text_spans[objects])
        return replace(
            self,
            image_ids=self.image_ids[indices],
            sizes=self.sizes[indices],
            names=names,
            name_ends=name_ends,
            first=np.append(0, np.cumsum(counts)),
            ids=self.ids[objects],
            is_crowd=self.is_crowd[objects],
            texts=texts,
            text_spans=np.stack([text_ends[:-1], text_ends[1:]], axis=1),
            shared_names=self.shared_names.intersection(
                base for i in indices.tolist() for base in list_meanings(self.file_name(i))
            ),
            text_ids=(),
        )


def _take_parts(
    content: bytes | bytearray, spans: NDArray[np.int64]
) -> tuple[bytes, NDArray[np.int64]]:
    """Return some parts of a text one after another, and where each starts and the last ends."""
    parts = [content[start:end] for start, end in spans.tolist()]
    lengths = spans[:, 1] - spans[:, 0]
    return b"".join(parts), np.append(0, np.cumsum(lengths))


def read_coco(annotations: str | Place | CocoDataset) -> CocoDataset:
    """Read a COCO instance JSON: polygons, uncompressed and compressed RLE, crowds, sparse category
    ids.

    What tools write beside the format is understood: numbers as text, ids of annotations and images
    that are no numbers, LVIS's ``coco_url`` for a ``file_name``, and boxes and areas that are
    missing, which come from the mask as in pycocotools. A faulty annotation refuses its image
    alone, and only when you ask for it: see `CocoDataset.read_annotations`.

    Args:
        annotations: the JSON file; its path, or a URL that fsspec knows. A dataset that was read is
            returned as it is.

    Raises:
        ColabUtilsError: if there is no such file, or it is not COCO instance JSON.

    Example:
        >>> import json, tempfile
        >>> coco = {"images": [{"id": 7, "file_name": "a/b.jpg", "width": 8, "height": 6}],
        ...         "categories": [{"id": 3, "name": "car"}],
        ...         "annotations": [{"id": 1, "image_id": 7, "category_id": 3,
        ...                          "segmentation": [[0, 0, 4, 0, 4, 4]]}]}
        >>> with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        ...     _ = file.write(json.dumps(coco)); file.flush()
        ...     dataset = read_coco(file.name)
        >>> print(dataset)
        1 images, 1 annotations, 1 categories
        >>> dataset.annotations(0)[0]["segmentation"]
        [[0, 0, 4, 0, 4, 4]]
    """
    if isinstance(annotations, CocoDataset):
        return annotations
    path = open_place(annotations)
    try:
        return _read(path)
    except ShortReadError:
        return Retries().run(partial(_read, path))


def _read(path: Place) -> CocoDataset:
    columns = Columns()
    most_bytes = find_free_memory() / _MEMORY_OF_JSON
    fingerprint = read_columns(path, columns, most_bytes=most_bytes)
    return _group(make_images(columns, fingerprint), columns)


def open_coco(images: str | Place, annotations: str | Place) -> CocoDataset:
    """Read annotations as `read_coco`, for those who read the images: each annotation must be of
    one image and one category.

    Raises:
        ColabUtilsError: as `read_coco`; or there is no image folder, images have the same id, or
            annotations are of unknown images or categories.
        DriveLostError: Drive went away.
    """
    require_folder(images)
    dataset = read_coco(annotations)
    refuse_strangers(annotations, dataset)
    warn_of_divided(annotations, dataset.select(find_repeated_names(dataset)))
    warn_of_place(images, dataset)
    return dataset


def refuse_strangers(annotations: str | Place, dataset: CocoDataset) -> None:
    """Refuse annotations that are not of one image and one category.

    Raises:
        ColabUtilsError: some are not.
    """
    strangers = {
        "with the id of another": dataset.repeated_ids,
        "of an unknown image": dataset.unknown_images,
        "of an unknown category": dataset.unknown_categories,
    }
    for kind, ids in strangers.items():
        if ids.size:
            raise ColabUtilsError(
                f"{annotations} has {ids.size} entries {kind}, such as id {ids[0]}. See `check`, "
                "which repairs them (--repair OUT.json)."
            )


def warn_of_divided(annotations: str | Place, dataset: CocoDataset) -> None:
    """Warn where entries of one image have other objects; see `find_repeated_names`."""
    divided = [name for name, is_same in list_repeated_names(dataset) if not is_same]
    if divided:
        warnings.warn(
            f"{annotations} has several entries of {divided[0]!r:.80} with other objects: those of "
            "one are background in the other. `check --repair OUT.json` joins them.",
            ColabUtilsWarning,
            stacklevel=4,
        )


def find_repeated_names(dataset: CocoDataset) -> NDArray[np.int64]:
    """Return which entries have the file name of another one."""
    names = (dataset.file_name(index) for index in range(len(dataset)))
    hashes = (xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass")) for name in names)
    keys = np.fromiter(hashes, np.uint64, len(dataset))
    _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    return np.flatnonzero(counts[inverse] > 1)


def warn_of_place(images: str | Place, dataset: CocoDataset) -> None:
    """Warn where the first image does not lie where the annotations say."""
    # The first image stands for all. Where it cannot be found, its reader says so.
    with suppress(ColabUtilsError, IndexError):
        path, by_base_name = dataset.find_image(images, 0)
        if by_base_name:
            warnings.warn(
                "images do not lie where the annotations say: "
                f"found {dataset.file_name(0)!r} at {path}",
                ColabUtilsWarning,
                stacklevel=4,
            )


def list_repeated_names(dataset: CocoDataset) -> Iterator[tuple[str, bool]]:
    """Yield the name of each image that another entry had before, and whether both have the same
    objects.
    """
    first: dict[str, int] = {}
    for i in range(len(dataset)):
        name = dataset.file_name(i)
        other = first.setdefault(name, i)
        if other != i:
            yield name, _list_outlines(dataset, i) == _list_outlines(dataset, other)


def _list_outlines(dataset: CocoDataset, index: int) -> list[Any]:
    entries = [entry for entry in dataset.read_entries(index) if isinstance(entry, dict)]
    return [(entry.get("category_id"), entry.get("segmentation")) for entry in entries]


def write_subset(dataset: CocoDataset, indices: Iterable[int], path: Path) -> Path:
    """Write the records of some images, in this order, as a COCO JSON of their own; returns
    ``path``.
    """
    chosen = list(indices)
    # The texts stay as they are, faults and all.
    texts = map(dataset.take_text, chosen)
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_coco(path, [dataset.image(index) for index in chosen], texts, dataset.categories)


def write_coco(
    path: Path, images: Sequence[Any], annotations: Iterable[bytes], categories: Sequence[Any]
) -> Path:
    """Write a COCO JSON, whose annotations are JSON already, one or more in each text; returns
    ``path``.
    """
    parts = (
        json.dumps(images).encode(),
        b", ".join(filter(None, annotations)),
        json.dumps(categories).encode(),
    )
    write_file(path, b'{"images": %b, "annotations": [%b], "categories": %b}' % parts)
    return path


def make_images(columns: Columns, fingerprint: str) -> CocoDataset:
    """Return the dataset of these images and categories, without an annotation."""
    images = np.frombuffer(columns.images, np.int64).view(_IMAGE)
    ids = images["id"].copy()
    name_ends = np.append(0, images["name_end"])
    names = bytes(columns.names)
    categories = sorted(columns.category_names.items())
    _, places = np.unique(ids, return_index=True)
    nothing = np.zeros(0, np.int64)
    return CocoDataset(
        fingerprint=fingerprint,
        categories=tuple({"id": number, "name": name} for number, name in categories),
        shared_names=_find_shared_names(names, name_ends, columns.base_hashes),
        image_ids=ids,
        sizes=np.stack([images["height"], images["width"]], axis=1).astype(np.int32),
        names=names,
        name_ends=name_ends,
        first=np.zeros(len(ids) + 1, np.int64),
        ids=nothing,
        is_crowd=np.zeros(0, np.bool_),
        texts=b"",
        text_spans=np.zeros((0, 2), np.int64),
        repeated_ids=np.delete(ids, places),
        unknown_images=nothing,
        unknown_categories=nothing,
        text_ids=tuple(columns.text_ids),
    )


def _find_shared_names(
    names: bytes, name_ends: NDArray[np.int64], base_hashes: "array[int]"
) -> frozenset[str]:
    """Return the base names of several names."""
    # No dict of all names is made unless two of them may be alike.
    hashes = np.sort(np.frombuffer(base_hashes, np.int64))
    if not (hashes[1:] == hashes[:-1]).any():
        return frozenset()
    bases = dict[str, str]()
    shared = set[str]()
    for start, end in pairwise(name_ends.tolist()):
        name = names[start:end].decode()
        for base in list_meanings(name):
            if bases.setdefault(base, name) != name:
                shared.add(base)
    return frozenset(shared)


class Strangers:
    """Find the images of annotations, and those that are of no image or category.

    Attributes:
        unknown_images: Ids of annotations whose image is unknown.
        unknown_categories: Ids of others whose category is unknown.
    """

    def __init__(self, dataset: CocoDataset) -> None:
        self._ids, self._places = np.unique(dataset.image_ids, return_index=True)
        if not len(dataset):
            self._ids = np.array([UNREADABLE])
            self._places = np.array([-1])
        # A category that cannot be read is a fault of its annotation alone.
        self._categories = [UNREADABLE, *(category["id"] for category in dataset.categories)]
        self.unknown_images: list[int] = []
        self.unknown_categories: list[int] = []

    def find_images(self, rows: NDArray[Any]) -> NDArray[np.int64]:
        """Return the place of each row's image; -1 where it is unknown. Of images with the same
        id, the first has the annotations.
        """
        order = np.searchsorted(self._ids, rows["image_id"])
        order = np.minimum(order, len(self._ids) - 1)
        image_of = np.where(self._ids[order] == rows["image_id"], self._places[order], -1)
        is_known = image_of >= 0
        is_strange = is_known & ~np.isin(rows["category_id"], self._categories)
        self.unknown_images += rows["id"][~is_known].tolist()
        self.unknown_categories += rows["id"][is_strange].tolist()
        return image_of

    def add_to(self, dataset: CocoDataset) -> CocoDataset:
        """Return a dataset that tells of these annotations."""
        return replace(
            dataset,
            unknown_images=np.array(self.unknown_images, np.int64),
            unknown_categories=np.array(self.unknown_categories, np.int64),
        )


def _group(dataset: CocoDataset, columns: Columns) -> CocoDataset:
    """Return a dataset of images with all annotations, sorted by image; those of unknown images are
    set aside.
    """
    rows = np.frombuffer(columns.rows, ROW)
    strangers = Strangers(dataset)
    image_of = strangers.find_images(rows)
    # Those of unknown images come first.
    kept = np.argsort(image_of, kind="stable")[len(strangers.unknown_images) :]
    counts = np.bincount(image_of[kept], minlength=len(dataset))
    text_starts = np.append(0, rows["text_end"])[kept]
    return replace(
        strangers.add_to(dataset),
        first=np.append(0, np.cumsum(counts)),
        ids=rows["id"][kept],
        is_crowd=rows["is_crowd"][kept].astype(np.bool_),
        texts=columns.texts,
        text_spans=np.stack([text_starts, rows["text_end"][kept]], axis=1),
    )
