"""Convert a folder of masks as image files into COCO instance JSON."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from colab_utils.data.coco import write_coco
from colab_utils.data.decoding import guard_pillow, open_lazily, read_orientation
from colab_utils.data.masks import measure_mask
from colab_utils.drive import explain_write
from colab_utils.errors import ColabUtilsError
from colab_utils.files import open_file, require_new
from colab_utils.progress import show_progress
from colab_utils.require import require_local_path

_MOST_OBJECTS = 5000  # in one mask: more colours are a photo, or a mask that was saved as JPEG


def convert_masks(
    images: str | Path, masks: str | Path, *, output: str | Path, category: str = "object"
) -> Path:
    """Write the COCO instance JSON of a folder of images and a folder of masks, such as
    Penn-Fudan's.

    A mask has its image's size. 0, or black, is the background; every other value or colour is one
    object. The mask of ``a.jpg`` is called ``a.png``, or ``a_mask.png`` with the same ending for
    all. The objects become RLE with the same pixels; boxes and areas are theirs, as pycocotools
    computes them.

    Args:
        images: the image folder.
        masks: the folder of masks, without subfolders.
        output: the JSON file to write, which must not exist.
        category: what every object is.

    Returns:
        ``output``.

    Raises:
        ColabUtilsError: an image without a mask or a mask without an image, a mask of another size
            or that is no mask, or ``output`` exists.

    Example:
        >>> convert_masks("PNGImages", "no/such/PedMasks", output="people.json", category="person")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected a folder of image files at PNGImages, found ...
    """
    output = require_new(require_local_path(output))
    rows = list[dict[str, Any]]()
    annotations = list[dict[str, Any]]()
    pairs = _pair_files(require_local_path(images), require_local_path(masks))
    for number, (image, mask) in enumerate(
        show_progress("masks", pairs, total=len(pairs), unit="image"), 1
    ):
        values = _read_mask(image, mask)
        height, width = values.shape
        rows.append({"id": number, "file_name": image.name, "width": width, "height": height})
        for rle, box, area in _encode_objects(values, mask):
            ids = {"id": len(annotations) + 1, "image_id": number, "category_id": 1, "iscrowd": 0}
            annotations.append({**ids, "bbox": box, "area": area, "segmentation": rle})
    texts = [json.dumps(one).encode() for one in annotations]
    categories = [{"id": 1, "name": category}]
    with explain_write(output.parent):
        return write_coco(output, rows, texts, categories)


def _list_images(folder: Path) -> dict[str, Path]:
    """Image files by their name without its ending."""
    known = Image.registered_extensions()
    found = dict[str, Path]()
    for path in sorted(folder.glob("*")):
        if path.suffix.lower() in known and found.setdefault(path.stem, path) != path:
            raise ColabUtilsError(
                f"expected one file called {path.stem} in {folder}, found two. Remove one of them."
            )
    if not found:
        raise ColabUtilsError(
            f"expected a folder of image files at {folder}, found none. Check the name."
        )
    return found


def _pair_files(images: Path, masks: Path) -> list[tuple[Path, Path]]:
    """Each image with its mask; what their names differ in is the same for all."""
    pictures = _list_images(images)
    drawn = _list_images(masks)
    first = next(iter(pictures))
    ends = sorted(
        (name.removeprefix(first) for name in drawn if name.startswith(first)), key=len
    ) or [""]
    end = next((end for end in ends if {stem + end for stem in pictures} == {*drawn}), ends[0])
    if alone := {stem + end for stem in pictures} ^ {*drawn}:
        found = f"{len(alone)} files without the other, such as {min(alone)}. Rename them"
        raise ColabUtilsError(
            f"expected a mask called like each image, with one ending for all, found {found}."
        )
    return [(path, drawn[stem + end]) for stem, path in pictures.items()]


@guard_pillow()
def _read_mask(image: Path, mask: Path) -> NDArray[np.int64]:
    """The mask's values, int64 [H, W]; 0 is the background."""
    try:
        with open_file(image) as file, open_lazily(file) as opened:
            size = opened.size
            turned = read_orientation(opened) > 4
        with open_file(mask) as file, open_lazily(file) as opened:
            kind = opened.format
            is_flat = opened.mode in ("1", "L", "P", "I") or opened.mode.startswith("I;16")
            if opened.mode == "F":
                raise ValueError("floating point numbers: save whole ones")
            values = np.asarray(opened if is_flat else opened.convert("RGB")).astype(np.int64)
    except Exception as error:  # Pillow's many readers raise whatever they like on damaged data
        raise ColabUtilsError(
            f"expected an image at {image} and a mask at {mask}, found: {error}"
        ) from None
    if values.shape[1::-1] != (size[::-1] if turned else size):
        found = (
            f"as {image} has, found {values.shape[1]} x {values.shape[0]}. Export the masks again"
        )
        raise ColabUtilsError(
            f"expected a mask of {size[0]} x {size[1]} pixels at {mask}, {found}."
        )
    if kind == "JPEG":
        raise ColabUtilsError(
            f"expected a mask that keeps its values at {mask}, found a JPEG. Export masks as PNG."
        )
    return values @ (65536, 256, 1) if values.ndim == 3 else values


def _encode_objects(
    values: NDArray[np.int64], mask: Path
) -> Iterator[tuple[dict[str, Any], list[float], float]]:
    """RLE with text counts, box (x, y, width, height) and area of each object."""
    from pycocotools import mask as coco_mask

    objects = [value for value in np.unique(values).tolist() if value]
    if len(objects) > _MOST_OBJECTS:
        found = f"{len(objects):,} colours. Is it a photo?"
        raise ColabUtilsError(f"expected a mask with one colour an object at {mask}, found {found}")
    for value in objects:
        rle = coco_mask.encode(np.asarray(values == value, np.uint8, order="F"))
        box, pixels = measure_mask(rle)
        yield {**rle, "counts": rle["counts"].decode()}, box, float(pixels)
