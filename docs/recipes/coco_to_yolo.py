"""Convert COCO instance JSON into YOLO's labels for instance segmentation.

Save this file beside your notebook or script. It needs numpy, contourpy and pycocotools. A label of
YOLO is one outline, so some objects change: the printed counts name them.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from contourpy import contour_generator
from pycocotools import mask as coco_mask

Points = np.ndarray[Any, np.dtype[np.float64]]


def convert_coco(annotations: str | Path, folder: str | Path) -> Counter[str]:
    """Write ``labels/NAME.txt`` for each image, and ``data.yaml``; print and return the counts.

    Args:
        annotations: COCO instance JSON.
        folder: Folder of the YOLO dataset. Its images belong into ``images``.
    """
    coco = json.loads(Path(annotations).read_text())
    names = {row["id"]: row["name"] for row in sorted(coco["categories"], key=lambda c: c["id"])}
    classes = {number: label for label, number in enumerate(names)}
    images = {row["id"]: row for row in coco["images"]}
    labels: dict[Path, list[str]] = {find_label(row, folder): [] for row in images.values()}
    if len(labels) < len(images):
        raise ValueError("Two images have the same name. Rename one of them.")
    counts = Counter({"images": len(images)})
    for row in coco["annotations"]:
        if row["image_id"] not in images or row["category_id"] not in classes:
            counts["left out, of an unknown image or category"] += 1
        elif row.get("iscrowd"):
            counts["left out, a crowd"] += 1
        else:
            image = images[row["image_id"]]
            parts = list_parts(row.get("segmentation"), image, counts)
            if not parts:
                counts["left out, without an outline"] += 1
                continue
            counts["objects"] += 1
            counts["objects whose parts are joined by lines"] += len(parts) > 1
            outline = (join_parts(parts) / (image["width"], image["height"])).clip(0, 1)
            numbers = " ".join(f"{number:.6f}" for number in outline.ravel())
            labels[find_label(image, folder)].append(f"{classes[row['category_id']]} {numbers}\n")
    for path, lines in labels.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines))
    # JSON is YAML, too.
    data = {"path": str(Path(folder).absolute()), "train": "images", "val": "images"}
    data |= {"names": dict(enumerate(names.values()))}
    Path(folder, "data.yaml").write_text(json.dumps(data, indent=1))
    print(", ".join(f"{count} {what}" for what, count in counts.items() if count))
    return counts


def find_label(image: dict[str, Any], folder: str | Path) -> Path:
    """Return the path of an image's label file."""
    return Path(folder, "labels", image["file_name"]).with_suffix(".txt")


def list_parts(segmentation: Any, image: dict[str, Any], counts: Counter[str]) -> list[Points]:
    """Return the outlines of an object's parts, [N, 2] in pixels. Holes are filled, and counted."""
    if isinstance(segmentation, list):
        return [np.reshape(part, (-1, 2)) for part in segmentation if len(part) >= 6]
    if not segmentation:
        return []
    if isinstance(segmentation["counts"], list):
        size = (image["height"], image["width"])
        segmentation = coco_mask.frPyObjects(segmentation, *size)
    drawn = np.pad(coco_mask.decode(segmentation), 1)
    generator = contour_generator(z=drawn, fill_type="OuterOffset")
    points, offsets = generator.filled(0.5, 2)
    counts["holes filled"] += sum(len(ends) - 2 for ends in offsets)
    # The first ring of a part is its outline. Pixels have their centres at half numbers.
    return [part[: ends[1]] - 0.5 for part, ends in zip(points, offsets, strict=True)]


def join_parts(parts: list[Points]) -> Points:
    """Join parts where they are nearest, by lines of no width, as Ultralytics does."""
    outline = parts[0]
    for part in parts[1:]:
        distances = np.linalg.norm(outline[:, None] - part, axis=2)
        here, there = np.unravel_index(distances.argmin(), distances.shape)
        bridged = [outline[: here + 1], np.roll(part, -there, 0), part[[there]], outline[here:]]
        outline = np.concatenate(bridged)
    return outline
