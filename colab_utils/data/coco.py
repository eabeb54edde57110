"""Any COCO instance JSON, read entry by entry: its numbers in flat arrays, its annotations as their
JSON text.

No Python object is kept for an annotation, so COCO train2017 (118,000 images, 860,000 objects, 0.45
GB of JSON) needs little more memory than its text (``make stress``), and worker processes share it.
"""

import json
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.coco_json import UNREADABLE, Columns, read_columns
from colab_utils.data.fields import FAULTS, read_annotation
from colab_utils.data.image_paths import find_file, list_meanings, require_folder
from colab_utils.data.masks import number_within
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.files import write_file
from colab_utils.places import Place, open_place

# What `Columns` holds of each image, and of each annotation.
_IMAGE = np.dtype([(name, np.int64) for name in ("id", "height", "width", "name_end")])
_ROW = np.dtype(
    [(name, np.int64) for name in ("id", "image_id", "category_id", "is_crowd", "text_end")]
)


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
    texts: bytes
    """The JSON of each image's annotations, parted by commas, UTF-8; one image after another."""
    text_ends: NDArray[np.int64]
    """int64 [I + 1]: where each image's starts in ``texts``, and where the last one ends."""
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
        return self.texts[self.text_ends[index] : self.text_ends[index + 1]]

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
        names, name_ends = _take_parts(self.names, self.name_ends, indices)
        texts, text_ends = _take_parts(self.texts, self.text_ends, indices)
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
            text_ends=text_ends,
            shared_names=self.shared_names.intersection(
                base for i in indices.tolist() for base in list_meanings(self.file_name(i))
            ),
            text_ids=(),
        )


def _take_parts(
    content: bytes, ends: NDArray[np.int64], indices: NDArray[np.int64]
) -> tuple[bytes, NDArray[np.int64]]:
    """Return some parts of a text one after another, and where each starts and the last ends."""
    parts = [content[ends[i] : ends[i + 1]] for i in indices.tolist()]
    lengths = np.array([len(part) for part in parts], np.int64)
    return b"".join(parts), np.append(0, np.cumsum(lengths))


def read_coco(annotations: str | Place) -> CocoDataset:
    """Read a COCO instance JSON: polygons, uncompressed and compressed RLE, crowds, sparse category
    ids.

    What tools write beside the format is understood: numbers as text, ids of annotations and images
    that are no numbers, LVIS's ``coco_url`` for a ``file_name``, and boxes and areas that are
    missing, which come from the mask as in pycocotools. A faulty annotation refuses its image
    alone, and only when you ask for it: see `CocoDataset.read_annotations`.

    Args:
        annotations: the JSON file; its path, or a URL that fsspec knows.

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
    path = open_place(annotations)
    fingerprint, columns = read_columns(path)
    return _group(columns, fingerprint)


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
    strangers = {
        "with the id of another": dataset.repeated_ids,
        "of an unknown image": dataset.unknown_images,
        "of an unknown category": dataset.unknown_categories,
    }
    for kind, ids in strangers.items():
        if ids.size:
            raise ColabUtilsError(
                f"expected annotations of images with ids of their own in {annotations}, "
                f"found {ids.size} {kind}, such as id {ids[0]}. See `check`, which repairs "
                "them (--repair OUT.json)."
            )
    # The first image stands for all. Where it cannot be found, its reader says so.
    with suppress(ColabUtilsError, IndexError):
        path, by_base_name = dataset.find_image(images, 0)
        if by_base_name:
            warnings.warn(
                "images do not lie where the annotations say: "
                f"found {dataset.file_name(0)!r} at {path}",
                ColabUtilsWarning,
                stacklevel=3,
            )
    return dataset


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


def _group(columns: Columns, fingerprint: str) -> CocoDataset:
    """Sort the annotations by image, set aside those of unknown images, and note those of unknown
    categories.
    """
    images = np.array(columns.images, np.int64).view(_IMAGE)
    rows = np.array(columns.rows, np.int64).view(_ROW)
    unique, places = np.unique(images["id"], return_index=True)
    known_image = np.isin(rows["image_id"], unique)
    # A category that cannot be read is a fault of its annotation alone.
    known_category = np.isin(rows["category_id"], [*columns.category_names, UNREADABLE])
    kept = np.flatnonzero(known_image)
    image_of = places[np.searchsorted(unique, rows["image_id"][kept])]
    kept = kept[np.argsort(image_of, kind="stable")]
    first = np.append(0, np.cumsum(np.bincount(image_of, minlength=len(images))))
    ends = np.append(0, rows["text_end"])
    texts = _join_texts(columns.texts, ends, kept, first)
    names = sorted(columns.category_names.items())
    return CocoDataset(
        fingerprint=fingerprint,
        categories=tuple({"id": number, "name": name} for number, name in names),
        shared_names=frozenset(columns.shared_names),
        image_ids=images["id"].copy(),
        sizes=np.stack([images["height"], images["width"]], axis=1).astype(np.int32),
        names=bytes(columns.names),
        name_ends=np.append(0, images["name_end"]),
        first=first,
        ids=rows["id"][kept],
        is_crowd=rows["is_crowd"][kept].astype(np.bool_),
        texts=b"".join(texts),
        text_ends=np.cumsum([0, *map(len, texts)]),
        repeated_ids=np.delete(images["id"], places),
        unknown_images=rows["id"][~known_image],
        unknown_categories=rows["id"][known_image & ~known_category],
        text_ids=tuple(columns.text_ids),
    )


def _join_texts(
    text: bytearray, ends: NDArray[np.int64], rows: NDArray[np.int64], first: NDArray[np.int64]
) -> list[bytes]:
    """Return the texts of each image's rows, parted by commas."""
    view = memoryview(text)
    texts = []
    for start, end in pairwise(first.tolist()):
        texts.append(b", ".join(view[ends[row] : ends[row + 1]] for row in rows[start:end]))
    return texts
