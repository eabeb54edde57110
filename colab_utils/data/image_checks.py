"""Check one image file, and compare its annotations with it."""

import io
from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.coco import CocoDataset
from colab_utils.data.decoding import (
    guard_pillow,
    has_16_bits,
    open_lazily,
    open_reduced,
    to_rgb,
)
from colab_utils.data.defects import EFFECTS, Defect
from colab_utils.data.image_paths import explain_missing
from colab_utils.data.object_checks import check_object
from colab_utils.data.orientation import compare_turn, read_orientation
from colab_utils.data.segmentations import Entry
from colab_utils.data.sizes import Size
from colab_utils.errors import MACHINE_FAULTS, ColabUtilsError, UnavailableError, escape
from colab_utils.files import Store
from colab_utils.places import name_below

# The mark at the end of a complete file. Some cameras write zeros or a preview after it.
_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND"}
# Number of bytes at a file's end in which its mark is looked for.
_TAIL = 4096
# If more than this share of the annotations are crowds, the crowds are probably single objects. In
# COCO, 1 % are crowds.
_MANY_CROWDS = 0.1
# Number of objects to check, so as to estimate how many are bad.
_SAMPLED_OBJECTS = 1000


class Header(NamedTuple):
    """Describe an image file, without its pixels."""

    defects: list[Defect]
    """Kind and text of each defect. If the file is unusable, the first defect says why."""
    size: Size = (0, 0)
    """Height and width as stored, in pixels; 0 if the file is unusable."""
    orientation: int = 1
    """EXIF orientation, 1 to 8."""

    def compare(self, size: Size) -> str:
        """Return what `compare_turn` says of the size in the annotations."""
        return compare_turn(size, self.size, self.orientation)


class Findings(NamedTuple):
    """Hold what was found in one image and its annotations."""

    defects: list[Defect]
    """Kind and text of each defect."""
    header: Header
    objects: NDArray[np.float64]
    """float64 [N, 3]: a row for each object with a mask. It holds the category id, and the right
    and lower end of the box as shares of the image's width and height.
    """
    turn: str
    """What `compare_turn` says of the image."""


def read_header(store: Store, dataset: CocoDataset, i: int, *, deep: bool = False) -> Header:
    """Read the header and the end of an image file; decode all of it if ``deep`` is set.

    Raises:
        DriveLostError: if Drive went away.
    """
    try:
        path, by_base_name = dataset.find_image(store.place, i)
    except UnavailableError:
        raise
    except ColabUtilsError as error:
        return Header([("unsafe file_name", str(error))])
    try:
        header = _describe(store.read(path), deep=deep)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return Header([("missing image", explain_missing(store.place, dataset.names[i]))])
    except (UnavailableError, *MACHINE_FAULTS):
        raise
    # Pillow's readers raise all kinds of errors on damaged data.
    except Exception as error:
        kind = "truncated image" if "truncated" in str(error) else "bad image"
        return Header([(kind, str(error))])
    if by_base_name:
        header.defects.append(("found by base name", escape(name_below(path, store.place))))
    return header


@guard_pillow()
def _describe(data: bytes, *, deep: bool) -> Header:
    """Return the header of an image file with this content."""
    from PIL import Image

    if not data:
        return Header([("empty file", "0 bytes")])
    opened = open_lazily(io.BytesIO(data))
    kind = opened.format or ""
    notes: list[Defect] = []
    is_deep = has_16_bits(opened)
    if is_deep:
        notes.append(("16-bit image", opened.mode))
    width, height = opened.size
    # Only decoding shows whether a 16-bit image is too dark. If the mark is not near the end of a
    # file, decoding also shows whether the file is cut short, or only has other data behind the
    # mark.
    if deep or is_deep or _ENDS.get(kind, b"") not in data[-_TAIL:]:
        to_rgb(open_reduced(data)[0])
    # This raises an error for pixels that do not fit into 8 bits.
    to_rgb(Image.new(opened.mode, (1, 1)))
    if opened.has_transparency_data:
        notes.append(("image with alpha", ""))
    return Header(notes, (height, width), read_orientation(opened))


def check_image(dataset: CocoDataset, i: int, header: Header) -> Findings:
    """Compare an image's annotations with its file, and their boxes with their masks."""
    size: Size = tuple(dataset.sizes[i].tolist())
    turn = header.compare(size)
    defects = [*header.defects]
    if not all(size):
        size = header.size
    elif all(header.size) and turn == "misfit":
        height, width = header.size
        text = f"annotations say {size[1]} x {size[0]}, the file has {width} x {height}"
        defects.append(("size mismatch", text))
        # It is not known for which of the two sizes the masks were drawn.
        size = 0, 0
    annotations, faults = dataset.read_annotations(i)
    for number, reason in faults:
        kind = "unknown category" if reason.endswith("of no category") else "bad annotation"
        defects.append((kind, f"annotation {number}: {reason}"))
    if not annotations and not faults:
        defects.append(("image without objects", ""))
    wrong, objects = _check_objects(annotations, size)
    name = escape(dataset.names[i])
    named = [(kind, f"{name}: {text}".removesuffix(": ")) for kind, text in defects + wrong]
    return Findings(named, header, np.array(objects, np.float64).reshape(-1, 3), turn)


def _check_objects(
    annotations: list[Entry], size: Size
) -> tuple[list[Defect], list[tuple[float, ...]]]:
    """Return the defects of an image's annotations, and the rows of `Findings.objects`."""
    defects: list[Defect] = []
    objects: list[tuple[float, ...]] = []
    seen: set[tuple[int, str]] = set()
    if not all(size):
        return [], []
    for annotation in annotations:
        wrong, pixels = check_object(annotation, size)
        key = annotation["category_id"], repr(annotation["segmentation"])
        if pixels and key in seen:
            wrong.append(("repeated annotation", ""))
        elif pixels and not annotation["iscrowd"]:
            left, top, width, height = annotation["bbox"]
            ends = (left + width) / size[1], (top + height) / size[0]
            objects.append((annotation["category_id"], *ends))
        seen.add(key)
        for kind, text in wrong:
            defects.append((kind, f"annotation {annotation['id']}: {text}".removesuffix(": ")))
    return defects, objects


def sample_faults(dataset: CocoDataset) -> Counter[str]:
    """Count the objects that would be trained wrongly or not at all, by kind of defect.

    In a large dataset, only a random sample of the images is checked.
    """
    order = np.random.default_rng(0).permutation(len(dataset))
    counts = np.diff(dataset.first)[order].cumsum()
    rows = order[: 1 + np.searchsorted(counts, _SAMPLED_OBJECTS)].tolist()
    faults = Counter[str]()
    for i in rows:
        kinds = [kind for kind, _ in check_image(dataset, i, Header([])).defects]
        faults.update(kind for kind in kinds if EFFECTS[kind].startswith("object"))
    if has_many_crowds(dataset):
        faults["many crowds"] = dataset.crowds
    return faults


def has_many_crowds(dataset: CocoDataset) -> bool:
    """Return whether so many annotations are crowds that the crowds are probably single objects."""
    return dataset.crowds > _MANY_CROWDS * len(dataset.ids)
