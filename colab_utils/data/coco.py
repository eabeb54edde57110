"""Read a COCO instance JSON into flat arrays of numbers; annotations stay JSON text.

No Python object is kept for an annotation. COCO train2017 (118,000 images, 860,000 objects, 0.45 GB
of JSON) therefore needs little more memory than its text, and worker processes share this memory.
``make stress`` measures it.
"""

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from colab_utils.data.coco_json import (
    UNREADABLE,
    Columns,
    decode_json,
    read_columns,
    read_content,
)
from colab_utils.data.fields import read_annotation
from colab_utils.data.image_paths import find_file, list_meanings, require_folder
from colab_utils.data.masks import number_within
from colab_utils.data.segmentations import Entry
from colab_utils.errors import DAMAGE, ColabUtilsError, ColabUtilsWarning
from colab_utils.files import write_file
from colab_utils.places import Place, PlaceLike, open_place
from colab_utils.require import require_packages
from colab_utils.units import format_count


@dataclass(frozen=True, eq=False)
class CocoDataset:
    """Hold a COCO dataset's annotations, grouped by image; make one with :func:`read_coco`.

    There are I images and A annotations. An annotation whose image is not in the file is not
    counted in A; its id is in ``strangers``. If several images have the same id, the first one
    gets the annotations.
    """

    fingerprint: str
    """XXH3-128 of the JSON file, in hexadecimal."""
    categories: tuple[Entry, ...]
    """Each category's ``id`` and ``name``, in order of id."""
    image_ids: NDArray[np.int64]
    """int64 [I]: image ids, in the order of the file."""
    sizes: NDArray[np.int32]
    """int32 [I, 2]: height and width in pixels; 0 if the file gives none."""
    names: tuple[str, ...]
    """``file_name`` of each image as in the JSON: a path relative to the image folder. It may lead
    out of the folder. Use :meth:`find_image` to get a file that is safe to open.
    """
    first: NDArray[np.int64]
    """int64 [I + 1]: image i has the annotations ``first[i]`` to ``first[i + 1] - 1``."""
    ids: NDArray[np.int64]
    """int64 [A]: annotation ids. If an id is missing, or is not a number, the annotation's row in
    the file takes its place. Rows are counted from 1.
    """
    is_crowd: NDArray[np.bool_]
    """bool [A]: whether each annotation is a crowd. Crowds are left out of training."""
    ignored: int
    """Number of annotations that have ``ignore``."""
    is_federated: bool
    """Whether an image names classes that were not looked for in it, as LVIS does."""
    text: str
    """The text of the JSON."""
    spans: NDArray[np.int64]
    """int64 [A, 2]: where the JSON text of each annotation starts and ends in ``text``."""
    shared_names: frozenset[str]
    """Base names that images in several folders have. Such a name alone does not say which image
    is meant.
    """
    strangers: dict[str, NDArray[np.int64]]
    """Ids by kinds of `EFFECTS`. "repeated image id": the id of each image whose id an earlier
    image has, too; if three images share an id, it is listed twice. "unknown image": the
    annotations whose image is unknown. "unknown category": the annotations whose image is known,
    but whose category is unknown.
    """

    def __len__(self) -> int:
        return len(self.image_ids)

    def __str__(self) -> str:
        return (
            f"{format_count(len(self), 'image')}, {format_count(len(self.ids), 'annotation')}, "
            f"{format_count(len(self.categories), 'category', 'categories')}"
        )

    def image(self, index: int) -> Entry:
        """Return the image's ``id``, ``file_name``, ``width`` and ``height``."""
        height, width = self.sizes[index].tolist()
        number = int(self.image_ids[index])
        return {"id": number, "file_name": self.names[index], "width": width, "height": height}

    def find_image(self, folder: PlaceLike, index: int) -> tuple[Place, bool]:
        """Return the image's file, and whether it was found under another name than ``file_name``.

        The file is always below ``folder``. These names are tried, in this order:

        - ``file_name`` itself. Composed and decomposed accents count as equal.
        - ``file_name`` decoded as a URL: for example, ``%20`` becomes a space.
        - Its base name, if only one file below ``folder`` has it, and ``file_name`` names no folder
          that exists. Some tools write no folder, paths of another machine, or folders that do not
          exist. This search follows no links but Drive's shortcuts.

        If no file is found, the returned path is the one that ``file_name`` names.

        Raises:
            ColabUtilsError: if the name leads out of the folder, unless exactly one file in the
                folder has its base name; or if a link at this name leads out of the folder.
            DriveLostError: if Drive went away.
        """
        return find_file(folder, self.names[index], self.shared_names)

    @property
    def crowds(self) -> int:
        """Return how many annotations are crowds."""
        return int(self.is_crowd.sum())

    def count_objects(self) -> NDArray[np.int64]:
        """Count the annotations of each image, without crowds: int64 [I]."""
        ends = np.append(0, np.cumsum(~self.is_crowd))
        return np.diff(ends[self.first])

    def annotations(self, index: int) -> list[Entry]:
        """Return the image's annotations as COCO has them. Their text is parsed on each call.

        The segmentations stay as they are in the file.

        Raises:
            ColabUtilsError: if an annotation is faulty, for example if its box is not numbers.
        """
        sound, faults = self.read_annotations(index)
        if faults:
            number, reason = faults[0]
            raise ColabUtilsError(f"annotation {number}: {reason}")
        return sound

    def read_annotations(self, index: int) -> tuple[list[Entry], list[tuple[int, str]]]:
        """Return the image's sound annotations, and the id and the fault of each faulty one.

        The sound ones are as :meth:`annotations` gives them.
        """
        sound: list[Entry] = []
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
                    raise ValueError(
                        f"category_id {annotation['category_id']} is the id of no category"
                    )
                sound.append(annotation)
            except (*DAMAGE, ColabUtilsError) as error:
                faults.append((number, str(error)))
        return sound, faults

    def read_entries(self, index: int) -> list[Any]:
        """Parse the image's annotations; return them unchecked, as they are in the file."""
        return list(json.loads(b"[%b]" % self.take_text(index)))

    def take_text(self, index: int) -> bytes:
        """Return the JSON text of the image's annotations, separated by commas."""
        spans = self.spans[self.first[index] : self.first[index + 1]].tolist()
        return ", ".join([self.text[start:end] for start, end in spans]).encode()

    def select(self, indices: NDArray[np.int64]) -> "CocoDataset":
        """Return a dataset of these images alone, in this order.

        It has arrays of its own, and the same text of the JSON.
        """
        # A check selects thousands of small parts, so no line of this code may go through the whole
        # dataset.
        counts = self.first[indices + 1] - self.first[indices]
        objects = np.repeat(self.first[indices], counts) + number_within(counts)
        return replace(
            self,
            image_ids=self.image_ids[indices],
            sizes=self.sizes[indices],
            names=tuple(self.names[index] for index in indices.tolist()),
            first=np.append(0, np.cumsum(counts)),
            ids=self.ids[objects],
            is_crowd=self.is_crowd[objects],
            spans=self.spans[objects],
        )


def read_coco(annotations: PlaceLike | CocoDataset) -> CocoDataset:
    """Read a COCO instance JSON.

    Segmentations may be polygons, uncompressed RLE or compressed RLE. Category ids may have gaps.
    Files of tools that deviate from the format are read, too: numbers may be in quotes, the ids of
    annotations and images may be text, LVIS's ``coco_url`` may take the place of ``file_name``, and
    each list may be an object with the ids as keys. A missing box or area is computed from
    the mask, as pycocotools does. A faulty annotation raises no error here: see
    `CocoDataset.annotations`.

    Args:
        annotations: the path of the JSON file, or a URL that fsspec knows. If it is a dataset that
            was read already, it is returned as it is.

    Raises:
        ColabUtilsError: if there is no such file, or if it is not COCO instance JSON; or if
            Pillow or pycocotools cannot be imported.

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
        1 image, 1 annotation, 1 category
        >>> dataset.annotations(0)[0]["segmentation"]
        [[0, 0, 4, 0, 4, 4]]
    """
    require_packages("PIL.Image", "pycocotools.mask")
    if isinstance(annotations, CocoDataset):
        return annotations
    path = open_place(annotations)
    content = read_content(path)
    fingerprint = xxhash.xxh3_128_hexdigest(content)
    try:
        text = decode_json(content)
        # The text takes the place of the bytes in memory.
        del content
        columns = read_columns(text)
    except ColabUtilsError as error:
        raise ColabUtilsError(f"{path} does not hold COCO instances: {error}") from None
    return _group_annotations(columns, text, fingerprint)


def _group_annotations(columns: Columns, text: str, fingerprint: str) -> CocoDataset:
    """Return the dataset that was read into ``columns`` from ``text``, sorted by image."""
    images = np.array(columns.images, np.int64).reshape(-1, 3)
    rows = np.array(columns.rows, np.int64).reshape(-1, 6)
    # The first image with an id gets the annotations.
    index_of = {number: i for i, number in reversed([*enumerate(images[:, 0].tolist())])}
    image_of = np.array([index_of.get(number, -1) for number in rows[:, 1].tolist()], np.int64)
    strangers = rows[image_of < 0, 0]
    # Annotations of unknown images are sorted to the front, and left out.
    order = np.argsort(image_of, kind="stable")[len(strangers) :]
    first = np.append(0, np.cumsum(np.bincount(image_of[order], minlength=len(images))))
    rows = rows[order]
    # A category id that cannot be read is reported later, as a fault of its annotation.
    has_category = np.isin(rows[:, 2], [UNREADABLE, *columns.categories])
    return CocoDataset(
        fingerprint=fingerprint,
        categories=tuple(
            {"id": number, "name": name} for number, name in sorted(columns.categories.items())
        ),
        image_ids=images[:, 0].copy(),
        sizes=images[:, 1:].astype(np.int32),
        names=tuple(columns.names),
        first=first,
        ids=rows[:, 0].copy(),
        is_crowd=rows[:, 3].astype(np.bool_),
        ignored=columns.ignored,
        is_federated=columns.is_federated,
        text=text,
        spans=rows[:, 4:].copy(),
        shared_names=_find_shared_names(columns.names),
        strangers={
            "repeated image id": np.delete(images[:, 0], [*index_of.values()]),
            "unknown image": strangers,
            "unknown category": rows[~has_category, 0],
        },
    )


def _find_shared_names(names: Iterable[str]) -> frozenset[str]:
    """Return the base names that several file names have."""
    bases = Counter(base for name in set(names) for base in list_meanings(name))
    return frozenset(base for base, count in bases.items() if count > 1)


def open_coco(images: PlaceLike, annotations: PlaceLike) -> CocoDataset:
    """Read annotations as `read_coco` does; raise an error if any has an unclear image or category.

    Call this function, not `read_coco`, if the image files are read as well.

    Raises:
        ColabUtilsError: as `read_coco` does; or if there is no image folder, if several images have
            the same id, or if an annotation's image or category is unknown.
        DriveLostError: if Drive went away.
    """
    require_folder(images)
    dataset = read_coco(annotations)
    for kind, ids in dataset.strangers.items():
        if ids.size:
            raise ColabUtilsError(
                f"{annotations} has {ids.size:,} x {kind}, such as {ids[0]}. See `check`, which "
                "repairs them (--repair OUT.json)."
            )
    for text in _list_warnings(images, annotations, dataset):
        warnings.warn(text, ColabUtilsWarning, stacklevel=3)
    return dataset


def _list_warnings(
    images: PlaceLike, annotations: PlaceLike, dataset: CocoDataset
) -> Iterator[str]:
    """Say if an image has several entries with different objects, and if the first image does not
    lie where the annotations say.
    """
    divided = [name for name, is_same in list_repeated_names(dataset) if not is_same]
    if divided:
        yield (
            f"{annotations} has several entries of {divided[0]!r:.80} with different objects. "
            "In training, the objects of one entry count as background in the other. "
            "`check --repair OUT.json` joins the entries."
        )
    # The first image stands for all of them. If it is missing, the code that reads it says so.
    with suppress(ColabUtilsError, IndexError):
        path, by_base_name = dataset.find_image(images, 0)
        if by_base_name:
            yield (
                f"images do not lie where the annotations say: found {dataset.names[0]!r} at {path}"
            )


def list_repeated_names(dataset: CocoDataset) -> Iterator[tuple[str, bool]]:
    """Yield each file name that an earlier image has, too, and whether both images have equal
    objects.
    """
    first: dict[str, int] = {}
    for i in range(len(dataset)):
        name = dataset.names[i]
        other = first.setdefault(name, i)
        if other != i:
            yield name, _list_outlines(dataset, i) == _list_outlines(dataset, other)


def _list_outlines(dataset: CocoDataset, index: int) -> list[Any]:
    entries = [entry for entry in dataset.read_entries(index) if isinstance(entry, dict)]
    return [(entry.get("category_id"), entry.get("segmentation")) for entry in entries]


def write_subset(dataset: CocoDataset, indices: Iterable[int], path: Path) -> Path:
    """Write a COCO JSON of some images, in this order; return ``path``."""
    chosen = list(indices)
    # The annotations are copied as text. Their faults stay in them.
    texts = map(dataset.take_text, chosen)
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_coco(path, [dataset.image(index) for index in chosen], texts, dataset.categories)


def write_coco(
    path: Path,
    images: Sequence[Any],
    annotations: Iterable[bytes],
    categories: Sequence[Any],
) -> Path:
    """Write a COCO JSON; return ``path``.

    Each element of ``annotations`` is JSON text of one or more annotations, separated by commas.
    """
    parts = (
        json.dumps(images).encode(),
        b", ".join(filter(None, annotations)),
        json.dumps(categories).encode(),
    )
    write_file(path, b'{"images": %b, "annotations": [%b], "categories": %b}' % parts)
    return path
