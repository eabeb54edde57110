"""Convert a folder of masks, which are image files, into COCO instance JSON.

Save this file beside your notebook or script. It needs numpy, Pillow and pycocotools. Masks that
may mean two things are refused: then say what they mean. docs/FORMATS.md has examples.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from PIL import Image
from pycocotools import mask as coco_mask

# Values that mark pixels without a label: in Pascal VOC and DAVIS, in masks of 16 bits, and in
# Pascal VOC saved as colours. Each has the largest id that the objects beside it may have.
VOIDS = {255: 127, 65535: 32767, 0xE0E0C0: 0xFFFFFF}
# Datasets multiply the number of a class by one of these, and add the number of the object.
FACTORS = (65_536, 10_000, 1000, 256, 100)
Values = np.ndarray[Any, np.dtype[np.int64]]


def convert_masks(
    images: str | Path,
    masks: str | Path,
    *,
    output: str | Path,
    category: str = "object",
    background: int | Sequence[int] | None = None,
    threshold: int | None = None,
    classes: Callable[[int], str | None] | None = None,
) -> Path:
    """Write a COCO instance JSON, print what it holds, and return its path.

    The mask of ``a.jpg`` is ``a.png``, or for example ``a_mask.png`` if all masks end like this.
    The value 0, black and transparent pixels are background, and every other value is an object.
    The value of a colour is 0xRRGGBB. With a palette, it is the number in the palette.

    Args:
        images: The image folder.
        masks: The folder of masks, without subfolders.
        output: The JSON file to write, which must not exist.
        category: The name of the category of all objects.
        background: The value or values that are background. Without it, masks are refused that
            seem to have another background, pixels without a label, or soft edges.
        threshold: All values above this one, 0 to 255, are one object.
        classes: Gives the class of an object by its value, or None if the value is no object.
    """
    output = Path(output)
    if output.exists():
        raise ValueError(f"{output} exists. Name a new file.")
    rows: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    ids: dict[str, int] = {}
    all_values: set[int] = set()
    pieces = 0
    for image, mask in pair_files(list_images(Path(images)), list_images(Path(masks))):
        values = read_mask(image, mask, background, threshold)
        objects = np.unique(values[values >= 0]).tolist()
        all_values.update(objects)
        if background is None and classes is None:
            require_background(values, mask)
            require_labels(values, objects, mask)
        height, width = values.shape
        row = {"id": len(rows) + 1, "file_name": image.name, "width": width, "height": height}
        rows.append(row)
        for value in objects:
            name = classes(value) if classes else category
            if name is not None:
                drawn = values == value
                pieces += lies_in_pieces(drawn)
                annotation = {"id": len(annotations) + 1, "image_id": row["id"], "iscrowd": 0}
                annotation["category_id"] = ids.setdefault(name, len(ids) + 1)
                annotations.append(annotation | describe_object(drawn))
    if classes is None:
        require_no_code([*all_values], masks)
    if not annotations:
        raise ValueError(f"The masks of {masks} have no object. Give background= or classes=.")
    categories = [{"id": number, "name": name} for name, number in ids.items()]
    output.write_text(
        json.dumps({"images": rows, "annotations": annotations, "categories": categories})
    )
    print(f"{len(rows)} images, {len(annotations)} objects: {', '.join(ids)}")
    if pieces:
        print(f"{pieces} objects lie in pieces. If these are several objects, each needs a value.")
    return output


def list_images(folder: Path) -> dict[str, Path]:
    """Return the image files of a folder by their names without the ending."""
    known = Image.registered_extensions()
    paths: dict[str, Path] = {}
    for path in sorted(folder.glob("*")):
        # macOS leaves files such as ._a.png, which hold no pixels.
        if path.suffix.lower() in known and path.is_file() and not path.name.startswith("."):
            if path.stem in paths:
                raise ValueError(f"{folder} has two files called {path.stem}. Remove one of them.")
            paths[path.stem] = path
    if not paths:
        raise ValueError(f"{folder} has no image files. See docs/FORMATS.md for other folders.")
    return paths


def pair_files(images: dict[str, Path], masks: dict[str, Path]) -> list[tuple[Path, Path]]:
    """Return each image with its mask, whose name may end with a text that all masks share."""
    first = min(images)
    for end in sorted(name.removeprefix(first) for name in masks if name.startswith(first)):
        if {name + end for name in images} == masks.keys():
            return [(path, masks[name + end]) for name, path in images.items()]
    raise ValueError(
        f"Each image needs one mask of its name, such as a.png or a_mask.png for a.jpg. "
        f"{len(images)} images, among them {first}, do not fit {len(masks)} masks, among them "
        f"{min(masks)}. If each mask file is one object, see docs/FORMATS.md."
    )


def read_mask(
    image: Path, mask: Path, background: int | Sequence[int] | None, threshold: int | None
) -> Values:
    """Return the values of a mask, int64 [H, W]. Background has the value -1."""
    try:
        with Image.open(image) as photo:
            # EXIF turns this photo by 90 degrees.
            is_turned = photo.getexif().get(0x0112, 1) > 4
            shape = photo.size if is_turned else photo.size[::-1]
        with Image.open(mask) as drawn:
            kind = (drawn.format, drawn.mode, getattr(drawn, "n_frames", 1) > 1)
            is_clear = np.zeros(drawn.size[::-1], np.bool_)
            if drawn.has_transparency_data:
                is_clear = np.asarray(drawn.convert("RGBA"))[..., 3] < 128
            if threshold is not None and not drawn.mode.startswith("I"):
                values = np.asarray(drawn.convert("L"), np.int64)
            elif drawn.mode in ("1", "L", "P", "I") or drawn.mode.startswith("I;16"):
                values = np.asarray(drawn).astype(np.int64)
            else:
                colours = np.asarray(drawn.convert("RGB"), np.int64)
                values = colours @ (65_536, 256, 1)
    except (OSError, SyntaxError) as error:
        raise ValueError(f"{image} or its mask {mask} cannot be read: {error}.") from error
    if kind[2] or kind[1] == "F":
        raise ValueError(f"{mask} has several pages, or no whole numbers. Save it as a PNG.")
    if values.shape != shape:
        raise ValueError(f"{mask} has another size than {image}. Export the masks again.")
    if threshold is not None:
        values = np.where(values > threshold, 255, 0)
    elif kind[0] == "JPEG" or len(np.unique(values)) > 5000:
        raise ValueError(
            f"{mask} is a JPEG or a photo, whose values mean nothing. Export PNGs. Or give "
            "threshold=127 if each mask is one object."
        )
    is_background = np.isin(values, 0 if background is None else background) | is_clear
    if background is None and is_background.all() and 0 < is_clear.mean() < 1:
        raise ValueError(f"{mask} is black. Save its alpha as the mask, or give background=0.")
    return np.where(is_background, -1, values)


def require_background(values: Values, mask: Path) -> None:
    """Refuse a mask whose background may be an object, or that has no background."""
    corners = values[[0, 0, -1, -1], [0, -1, 0, -1]].tolist()
    value = max(corners, key=corners.count)
    if value >= 0 and corners.count(value) > 2:
        raise ValueError(
            f"{mask} has the value {value} in its corners. Give background={value} if that is the "
            "background of all masks, or background=0 if it is an object."
        )
    if values.min() >= 0:
        raise ValueError(
            f"{mask} has no background: regions such as sky and road may have values, too. Give "
            "classes=, which names the objects, or background=0 if each value is an object."
        )


def require_labels(values: Values, objects: list[int], mask: Path) -> None:
    """Refuse a mask with a value for pixels without a label, or with soft edges."""
    windows = sliding_window_view(np.pad(values, 1, mode="edge"), (3, 3)).reshape(-1, 9)
    windows = windows[(windows != windows[:, 4:5]).any(1)]
    for void, largest in VOIDS.items():
        others = [value for value in objects if value != void]
        if max(others, default=0) <= largest:
            if np.isin(others, windows[windows[:, 4] == void]).any():
                raise ValueError(
                    f"{mask} has the value {void} beside objects. Give background=(0, {void}) if "
                    "it marks pixels without a label, or background=0 if it is an object."
                )
    # The pixels of a smoothed edge lie between two other values.
    is_mixed = (np.diff(np.sort(windows)) > 0).sum(1) > 1
    mixed, pixels = np.unique(windows[is_mixed, 4], return_counts=True)
    areas = [(values == value).sum() for value in mixed]
    is_edge = (3 * pixels >= 2 * np.array(areas)) & (mixed >= 0)
    if pixels[is_edge].sum() >= 16 and 2 * is_edge.sum() >= len(objects):
        raise ValueError(
            f"{mask} has soft edges: {is_edge.sum()} of its {len(objects)} values lie only between "
            "others. Export masks without smoothing. Or give threshold=127 if each mask is one "
            "object, or background=0 if each value is one object."
        )


def require_no_code(values: list[int], masks: str | Path) -> None:
    """Refuse masks whose values seem to hold a class beside the number of an object.

    All classes would become one, and regions such as sky and road would become objects.
    """
    # Greys that were saved as colours hold no code.
    if not any(value % 0x010101 for value in values):
        return
    readings = {"value": values}
    # Panoptic masks have red as their last byte. Others have the class in red, and no blue.
    swapped = "int.from_bytes(value.to_bytes(3, 'big'), 'little')"
    if max(values, default=0) < 256**3:
        readings[swapped] = [int.from_bytes(v.to_bytes(3, "big"), "little") for v in values]
    if not any(value % 256 for value in values):
        readings["value // 256"] = [value // 256 for value in values]
    for text, numbers in readings.items():
        for factor in FACTORS:
            if is_code(numbers, factor):
                raise ValueError(
                    f"The values of {masks} seem to be class * {factor} + number. Name the classes "
                    f"of objects: classes=lambda value: {{26: 'car'}}.get({text} // {factor}). Or "
                    "give classes=lambda value: 'object' if each value is one object."
                )


def is_code(numbers: list[int], factor: int) -> bool:
    """Return whether numbers seem to be class * factor + 0, 1, 2, ... of several classes."""
    classes: dict[int, set[int]] = {}
    for number in numbers:
        classes.setdefault(number // factor, set()).add(number % factor)
    is_several = len(classes) > 1
    # In Cityscapes, numbers below the factor are regions. Plain numbers go up to the factor.
    are_plain = max(classes.pop(0, {0})) >= factor // 2
    counted = [max(own) for own in classes.values() if max(own) <= 2 * len(own)]
    return is_several and not are_plain and len(counted) == len(classes) and any(counted)


def lies_in_pieces(drawn: np.ndarray[Any, np.dtype[np.bool_]]) -> bool:
    """Return whether an empty row or column divides an object."""
    spans = [np.flatnonzero(drawn.any(axis)) for axis in (0, 1)]
    return any(np.diff(span).max(initial=1) > 1 for span in spans)


def describe_object(drawn: np.ndarray[Any, np.dtype[np.bool_]]) -> dict[str, Any]:
    """Return the box, the area and the RLE of an object."""
    rle = coco_mask.encode(np.asarray(drawn, np.uint8, order="F"))
    box = coco_mask.toBbox(rle).tolist()
    rle["counts"] = rle["counts"].decode()
    return {"bbox": box, "area": int(drawn.sum()), "segmentation": rle}
