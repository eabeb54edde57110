"""Convert a folder of masks, which are image files, into COCO instance JSON."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from PIL import Image

from colab_utils.data.coco import write_coco
from colab_utils.data.decoding import guard_pillow, open_lazily
from colab_utils.data.masks import measure_mask
from colab_utils.data.orientation import read_orientation
from colab_utils.data.segmentations import Entry
from colab_utils.drive import explain_write
from colab_utils.errors import ColabUtilsError
from colab_utils.files import open_file, require_new
from colab_utils.places import require_local_path
from colab_utils.progress import show_progress
from colab_utils.units import format_count

# Largest number of objects in one mask. An image with more colours is a photo, or a mask that was
# saved as JPEG.
_MOST_OBJECTS = 5000
# Values that mark pixels without a label: 255 in Pascal VOC and DAVIS, 65535 in masks of 16 bits,
# and 0xE0E0C0 in Pascal VOC saved as colours. The dict gives, for each such value, the largest id
# that the objects beside it may have. If an object has a larger id, the value is an object, too.
_VOIDS = {255: 127, 65535: 32767, 0xE0E0C0: 0xFFFFFF}
# Cityscapes multiplies the number of an object's class by this. Its classes have numbers up to
# `_MOST_CLASSES`.
_CITYSCAPES = 1000
_MOST_CLASSES = 33
# Pixels with at least this alpha count as drawn.
_OPAQUE = 128
# A mask with fewer pixels of soft edges is accepted: they may be a small object between two others.
_EDGE_PIXELS = 16


def convert_masks(
    images: str | Path,
    masks: str | Path,
    *,
    output: str | Path,
    category: str = "object",
    background: int | Sequence[int] | None = None,
    threshold: int | None = None,
) -> Path:
    """Write a COCO instance JSON from a folder of images and a folder of masks.

    Penn-Fudan has such masks. The function also prints how many objects there are.

    A mask has the size of its image. The value 0, black and transparent pixels are background.
    Every other value or colour is one object. In a mask with a palette, a pixel's value is its
    number in the palette; in a mask with colours, its value is 0xRRGGBB. The mask of ``a.jpg`` is
    called ``a.png``, or for example ``a_mask.png`` if all masks have this ending. The objects
    become RLE with the same pixels. Their boxes and areas are computed by pycocotools.

    Masks whose meaning is unclear are refused until you pass ``background`` or ``threshold``.

    Args:
        images: the image folder.
        masks: the folder of masks, without subfolders.
        output: the JSON file to write, which must not exist.
        category: the name of the category of all objects.
        background: the value or values that are background. (0, 255) leaves out the pixels without
            a label in Pascal VOC and DAVIS. 255 is for black objects on white. The default None
            takes 0. It refuses a mask if objects seem to have soft edges, if a value seems to be
            for pixels without a label or for regions, or if one object is in most corners.
        threshold: all values above this one, 0 to 255, are one object. Use it for masks with soft
            edges and for JPEGs. By default, each value is one object.

    Returns:
        ``output``.

    Raises:
        ColabUtilsError: if an image has no mask, or a mask has no image; if a mask is unreadable,
            unclear, or of another size than its image; if no mask has an object; or if ``output``
            exists.

    Example:
        >>> convert_masks("PNGImages", "no/such/PedMasks", output="people.json", category="person")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: PNGImages has no image files. ...
    """
    output = require_new(require_local_path(output))
    rows: list[Entry] = []
    texts: list[bytes] = []
    largest = 0.0
    parted = 0
    pairs = _pair_files(require_local_path(images), require_local_path(masks))
    for image, mask in show_progress("masks", pairs, total=len(pairs), unit="image"):
        values, is_clear = _read_mask(image, mask, background, threshold)
        objects = _list_objects(values, mask)
        if background is None:
            _require_colour(values, is_clear, mask)
            neighbours = _list_neighbours(values)
            _require_background(values, mask)
            _require_instances(objects, mask)
            _require_labels(neighbours, objects, mask)
            _require_edges(neighbours, values, mask)
        number = len(rows) + 1
        height, width = values.shape
        rows.append({"id": number, "file_name": image.name, "width": width, "height": height})
        parted += sum(_is_parted(values == value) for value in objects)
        for annotation in _encode_objects(values, objects):
            largest = max(largest, annotation["area"] / values.size)
            ids = {"id": len(texts) + 1, "image_id": number, "category_id": 1, "iscrowd": 0}
            texts.append(json.dumps(ids | annotation).encode())
    if not texts:
        raise ColabUtilsError(
            f"The masks of {masks} hold only background. By default, black and transparent pixels "
            "are background. If another value is the background, give background=VALUE."
        )
    with explain_write(output.parent):
        write_coco(output, rows, texts, [{"id": 1, "name": category}])
    text = f"{format_count(len(rows), 'image')}, {format_count(len(texts), 'object')}"
    text += f"; the largest covers {largest:.0%} of its image"
    if parted:
        text += f"; {parted:,} lie in pieces, which may be several objects of one value"
    print(text)
    return output


def _list_images(folder: Path) -> dict[str, Path]:
    """Return the image files of a folder by their names without the ending."""
    known = Image.registered_extensions()
    images: dict[str, Path] = {}
    for path in sorted(folder.glob("*")):
        # macOS leaves files such as ._a.png, which hold no pixels.
        is_hidden = path.name.startswith(".")
        if is_hidden or path.suffix.lower() not in known or path.is_dir():
            continue
        if path.stem in images:
            raise ColabUtilsError(f"{folder} has two files called {path.stem}. Remove one of them.")
        images[path.stem] = path
    if not images:
        raise ColabUtilsError(
            f"{folder} has no image files. Check the name; for masks "
            "in folders of their own, docs/FORMATS.md has a recipe."
        )
    return images


def _pair_files(images: Path, masks: Path) -> list[tuple[Path, Path]]:
    """Return each image with its mask.

    The mask is called like its image, followed by an ending that all masks share.
    """
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
    count = format_count(len(alone), "file has", "files have")
    raise ColabUtilsError(
        "Each image needs a mask of the same name. If all masks have the same ending after the "
        f"name, such as _mask, that is fine. {count} no partner, such as "
        f"{min(alone)}. Rename them. If each mask file is one object, see the recipe in "
        "docs/FORMATS.md."
    )


@guard_pillow()
def _read_mask(
    image: Path, mask: Path, background: int | Sequence[int] | None, threshold: int | None
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the mask's values, int64 [H, W], and which pixels are transparent.

    Background pixels have the value -1. If no pixel is transparent, the second array has no axes.
    """
    alpha: Any = _OPAQUE
    try:
        with open_file(image) as file, open_lazily(file) as opened:
            width, height = opened.size
            is_turned = read_orientation(opened) > 4
        with open_file(mask) as file, open_lazily(file) as opened:
            kind = opened.format
            if getattr(opened, "n_frames", 1) > 1:
                raise ValueError("several pages: save each as a file, see docs/FORMATS.md")
            if opened.mode == "F":
                raise ValueError("floating point numbers: save whole numbers")
            if opened.has_transparency_data:
                alpha = np.asarray(opened.convert("RGBA"))[..., 3]
            if threshold is not None and opened.mode[0] != "I":
                opened = opened.convert("L")
            is_flat = opened.mode in ("1", "L", "P", "I") or opened.mode.startswith("I;16")
            values = np.asarray(opened if is_flat else opened.convert("RGB")).astype(np.int64)
    # Pillow's readers raise all kinds of errors on damaged data.
    except Exception as error:
        raise ColabUtilsError(
            f"The image {image} or its mask {mask} cannot be read: {error}"
        ) from None
    if values.shape[:2] != ((width, height) if is_turned else (height, width)):
        raise ColabUtilsError(
            f"expected a mask of {width} x {height} pixels at {mask}, as {image} has, "
            f"found {values.shape[1]} x {values.shape[0]}. Export the masks again."
        )
    if kind == "JPEG" and threshold is None:
        raise ColabUtilsError(
            f"The mask {mask} is a JPEG, which does not keep its values. Export masks as PNG, "
            "or give threshold=127 if each mask is one object."
        )
    if values.ndim == 3:
        values = values @ (65536, 256, 1)
    if threshold is not None:
        values = np.where(values > threshold, 255, 0)
    is_clear = np.asarray(alpha < _OPAQUE)
    values[np.isin(values, background or 0) | is_clear] = -1
    return values, is_clear


def _require_colour(values: NDArray[np.int64], is_clear: NDArray[np.bool_], mask: Path) -> None:
    """Raise ColabUtilsError if all opaque pixels are black: the alpha may be the mask."""
    if values.max() < 0 and 0 < is_clear.mean() < 1:
        raise ColabUtilsError(
            f"The mask {mask} is black where it is opaque, and transparent elsewhere. If its "
            "opaque pixels are an object, save its alpha channel as the mask. If it is empty, give "
            "background=0."
        )


def _list_objects(values: NDArray[np.int64], mask: Path) -> list[int]:
    """Return the values of a mask that are not background."""
    objects: list[int] = np.unique(values[values >= 0]).tolist()
    if len(objects) > _MOST_OBJECTS:
        raise ColabUtilsError(
            f"The mask {mask} has {len(objects):,} colours, and each would be one object. Check "
            "that it is not a photo."
        )
    return objects


def _require_background(values: NDArray[np.int64], mask: Path) -> None:
    """Raise ColabUtilsError if an object lies in three corners or more: it may be background."""
    corners = values[[0, 0, -1, -1], [0, -1, 0, -1]].tolist()
    value = max(corners, key=corners.count)
    if value >= 0 and corners.count(value) >= 3:
        raise ColabUtilsError(
            f"The mask {mask} seems to have another background than 0: the value {value} is in its "
            f"corners and in {np.mean(values == value):.0%} of its pixels. Give background={value} "
            f"if {value} is the background of all masks, or background=0 if it is an object."
        )


def _require_instances(objects: list[int], mask: Path) -> None:
    """Raise ColabUtilsError if some values may be regions that are no objects.

    Cityscapes has such values: 7 for roads, but 26000, 26001 and so on for cars.
    """
    regions = [value for value in objects if value < _CITYSCAPES]
    numbered = {value // _CITYSCAPES for value in objects} - {0}
    if regions and numbered and max(*regions, *numbered) <= _MOST_CLASSES:
        raise ColabUtilsError(
            f"The mask {mask} has {len(regions):,} values below {_CITYSCAPES:,} beside larger "
            "ones. In Cityscapes, such small values are regions, for example roads. Give "
            f"background=range({_CITYSCAPES}) to leave them out, or background=0 if they are "
            "objects."
        )


def _list_neighbours(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the 3 x 3 values around each pixel that differs from a pixel beside it, int64 [N, 9].

    The fifth value is the pixel's own.
    """
    is_edge = np.zeros(values.shape, np.bool_)
    for axis in (0, 1):
        for step in (1, -1):
            is_edge |= np.roll(values, step, axis) != values
    windows = sliding_window_view(np.pad(values, 1, mode="edge"), (3, 3))
    return windows[is_edge].reshape(-1, 9)


def _require_labels(neighbours: NDArray[np.int64], objects: list[int], mask: Path) -> None:
    """Raise ColabUtilsError if a value may stand for pixels without a label.

    Such a value is much larger than all others, and pixels with it touch other objects.
    """
    for void, largest in _VOIDS.items():
        others = [value for value in objects if value != void]
        touched = np.isin(others, neighbours[neighbours[:, 4] == void]).sum()
        if touched and max(others) <= largest:
            raise ColabUtilsError(
                f"The mask {mask} has the value {void} beside {touched:,} others. Some datasets "
                f"have {void} for pixels without a label. Give background=(0, {void}) to leave it "
                "out, or background=0 if it is an object."
            )


def _require_edges(neighbours: NDArray[np.int64], values: NDArray[np.int64], mask: Path) -> None:
    """Raise ColabUtilsError if at least half of the values are only soft edges of objects.

    Where an edge was smoothed, pixels have values between the two sides, and each such value would
    become an object. A value counts as a soft edge if two thirds of its pixels are beside two
    other values.
    """
    is_mixed = (np.diff(np.sort(neighbours)) > 0).sum(1) > 1
    mixed, mixed_pixels = np.unique(neighbours[is_mixed, 4], return_counts=True)
    all_values, pixels = np.unique(values, return_counts=True)
    is_edge = (3 * mixed_pixels >= 2 * pixels[np.isin(all_values, mixed)]) & (mixed >= 0)
    edges = is_edge.sum()
    objects = (all_values >= 0).sum()
    if mixed_pixels[is_edge].sum() >= _EDGE_PIXELS and 2 * edges >= objects:
        raise ColabUtilsError(
            f"In the mask {mask}, {edges:,} of {objects:,} values "
            "are only soft edges of objects. Export masks without smoothing. Or give threshold=127 "
            "if each mask is one object, or background=0 if each value is one object."
        )


def _is_parted(drawn: NDArray[np.bool_]) -> bool:
    """Return whether an empty row or column divides an object into pieces."""
    places = [np.flatnonzero(drawn.any(axis)) for axis in (0, 1)]
    return any(np.diff(place).max(initial=1) > 1 for place in places)


def _encode_objects(values: NDArray[np.int64], objects: list[int]) -> Iterator[Entry]:
    """Yield the box (x, y, width, height), the area and the RLE (counts as text) of each object."""
    from pycocotools import mask as coco_mask

    for value in objects:
        rle = coco_mask.encode(np.asarray(values == value, np.uint8, order="F"))
        box, pixels = measure_mask(rle)
        text = {**rle, "counts": rle["counts"].decode()}
        yield {"bbox": box, "area": float(pixels), "segmentation": text}
