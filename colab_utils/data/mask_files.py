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

# Objects in one mask: more colours are a photo, or a mask that was saved as JPEG.
_MOST_OBJECTS = 5000


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
    rows: list[dict[str, Any]] = []
    texts: list[bytes] = []
    pairs = _pair_files(require_local_path(images), require_local_path(masks))
    for image, mask in show_progress("masks", pairs, total=len(pairs), unit="image"):
        values = _read_mask(image, mask)
        number = len(rows) + 1
        height, width = values.shape
        rows.append({"id": number, "file_name": image.name, "width": width, "height": height})
        for annotation in _encode_objects(values, mask):
            ids = {"id": len(texts) + 1, "image_id": number, "category_id": 1, "iscrowd": 0}
            texts.append(json.dumps(ids | annotation).encode())
    with explain_write(output.parent):
        return write_coco(output, rows, texts, [{"id": 1, "name": category}])


def _list_images(folder: Path) -> dict[str, Path]:
    """Return image files by their name without its ending."""
    known = Image.registered_extensions()
    images: dict[str, Path] = {}
    for path in sorted(folder.glob("*")):
        if path.suffix.lower() not in known:
            continue
        if path.stem in images:
            raise ColabUtilsError(
                f"expected one file called {path.stem} in {folder}, found two. Remove one of them."
            )
        images[path.stem] = path
    if not images:
        raise ColabUtilsError(
            f"expected a folder of image files at {folder}, found none. Check the name."
        )
    return images


def _pair_files(images: Path, masks: Path) -> list[tuple[Path, Path]]:
    """Return each image with its mask; what their names differ in is the same for all."""
    pictures = _list_images(images)
    drawn = _list_images(masks)
    first = min(pictures)
    ends = [name.removeprefix(first) for name in drawn if name.startswith(first)]
    ends.sort(key=len)
    for end in ends:
        if {stem + end for stem in pictures} == set(drawn):
            return [(path, drawn[stem + end]) for stem, path in pictures.items()]
    end = ends[0] if ends else ""
    alone = {stem + end for stem in pictures} ^ set(drawn)
    raise ColabUtilsError(
        "expected a mask called like each image, with one ending for all, found "
        f"{len(alone)} files without the other, such as {min(alone)}. Rename them."
    )


@guard_pillow()
def _read_mask(image: Path, mask: Path) -> NDArray[np.int64]:
    """Return the mask's values, int64 [H, W]; 0 is the background."""
    try:
        with open_file(image) as file, open_lazily(file) as opened:
            width, height = opened.size
            is_turned = read_orientation(opened) > 4
        with open_file(mask) as file, open_lazily(file) as opened:
            kind = opened.format
            if opened.mode == "F":
                raise ValueError("floating point numbers: save whole ones")
            is_flat = opened.mode in ("1", "L", "P", "I") or opened.mode.startswith("I;16")
            values = np.asarray(opened if is_flat else opened.convert("RGB")).astype(np.int64)
    # Pillow's many readers raise whatever they like on damaged data.
    except Exception as error:
        raise ColabUtilsError(
            f"expected an image at {image} and a mask at {mask}, found: {error}"
        ) from None
    if values.shape[:2] != ((width, height) if is_turned else (height, width)):
        raise ColabUtilsError(
            f"expected a mask of {width} x {height} pixels at {mask}, as {image} has, "
            f"found {values.shape[1]} x {values.shape[0]}. Export the masks again."
        )
    if kind == "JPEG":
        raise ColabUtilsError(
            f"expected a mask that keeps its values at {mask}, found a JPEG. Export masks as PNG."
        )
    return values @ (65536, 256, 1) if values.ndim == 3 else values


def _encode_objects(values: NDArray[np.int64], mask: Path) -> Iterator[dict[str, Any]]:
    """Yield box (x, y, width, height), area, and RLE with text counts of each object."""
    from pycocotools import mask as coco_mask

    objects = [value for value in np.unique(values).tolist() if value]
    if len(objects) > _MOST_OBJECTS:
        raise ColabUtilsError(
            f"expected a mask with one colour an object at {mask}, "
            f"found {len(objects):,} colours. Is it a photo?"
        )
    for value in objects:
        rle = coco_mask.encode(np.asarray(values == value, np.uint8, order="F"))
        box, pixels = measure_mask(rle)
        text = {**rle, "counts": rle["counts"].decode()}
        yield {"bbox": box, "area": float(pixels), "segmentation": text}
