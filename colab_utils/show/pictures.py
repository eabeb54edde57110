"""Images with their masks, boxes and class names drawn on them: the check that no table replaces."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colab_utils.data.masks import MaskEncoder, resize_rles
from colab_utils.drive import read_file
from colab_utils.errors import ColabUtilsError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from colab_utils.data.coco import CocoDataset

__all__ = ["PALETTE", "draw_annotations", "draw_pairs", "draw_predictions", "draw_samples", "make_figure"]

# Okabe and Ito's colours, told apart with every common colour blindness (jfly.uni-koeln.de/color).
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442")
_DARK = (PALETTE[0], PALETTE[2], PALETTE[3])  # white text on these
_NAMED = 5  # of an image's objects, the largest
_Panel = tuple[str, Any, Mapping[str, Any]]  # heading, image, and the objects on it


def draw_samples(dataset: Any, *, indices: Sequence[int] | None = None, columns: int = 4) -> Figure:
    """Draw samples as the model gets them: image, masks, boxes and class names.

    Args:
        dataset: gives ``(image, target)``: image uint8 [3,H,W], target with ``boxes`` [N,4] xyxy in pixels,
            ``labels`` [N] and ``masks`` uint8 [N,H,W]; and has ``class_names``, the name of each label:
            `ShardDataset`, `CocoFolder`, or your own.
        indices: samples to draw; ``None`` takes ``columns`` of them, evenly spread.
        columns: images in a row.

    Raises:
        ColabUtilsError: the dataset is empty, or there is nothing to draw.

    Example:
        >>> import numpy as np
        >>> class One(list):
        ...     class_names = {1: "disc"}
        >>> target = {"boxes": np.array([[2, 2, 6, 6]]), "labels": np.array([1]),
        ...           "masks": np.ones((1, 8, 8), np.uint8)}
        >>> figure = draw_samples(One([(np.zeros((3, 8, 8), np.uint8), target)]))
        >>> figure.get_suptitle()
        '1 sample with 1 object: disc'
    """
    count = min(len(dataset), columns)
    chosen = [n * len(dataset) // count for n in range(count)] if indices is None else list(indices)
    if not chosen:
        raise ColabUtilsError("expected samples to draw, found none: give `indices`, or a dataset with images")
    panels: list[_Panel] = [(f"sample {i}", *dataset[i]) for i in chosen]
    names = [dataset.class_names[int(label)] for *_, target in panels for label in target["labels"]]
    title = f"{_count(len(chosen), 'sample')} with {_count(len(names), 'object')}: {', '.join(sorted({*names}))}"
    return _draw_grid(title.rstrip(": "), panels, dataset.class_names, columns=min(columns, len(chosen)), inches=3.6)


def draw_pairs(
    left: Sequence[tuple[Any, dict[str, Any]]], right: Sequence[tuple[Any, dict[str, Any]]], *,
    class_names: Mapping[int, str], titles: tuple[str, str] = ("before", "after"),
) -> Figure:  # fmt: skip
    """Draw samples side by side with what became of them; the title says what differs.

    Args:
        left: samples ``(image, target)``, as in `draw_samples`.
        right: the same samples after whatever was done to them, in the same order.
        class_names: the name of each label.
        titles: of the left and the right image.

    Raises:
        ColabUtilsError: there are no samples, or not as many on the right as on the left.
    """
    import numpy as np

    if not left or len(left) != len(right):
        raise ColabUtilsError(f"expected the same samples twice, found {len(left)} and {len(right)}: draw one or more")
    pairs = list(zip(left, right, strict=True))
    same = all(np.array_equal(a, b) for (a, _), (b, _) in pairs)
    same_masks = all(np.array_equal(a["masks"], b["masks"]) for (_, a), (_, b) in pairs)
    title = f"{'Pixel for pixel the same' if same else 'Another'} image, {'the same' if same_masks else 'other'} masks"
    before, after = (sum(image.shape[1] * image.shape[2] for image, _ in side) for side in (left, right))
    if before != after:
        same = all(np.array_equal(a["labels"], b["labels"]) for (_, a), (_, b) in pairs)
        title = f"{before / after:.2g} times fewer pixels, {'the same' if same else 'other'} objects"
    panels = [(heading, *sample) for pair in pairs for heading, sample in zip(titles, pair, strict=True)]
    return _draw_grid(title, panels, class_names)


def draw_predictions(
    dataset: Any, predictions: Sequence[Mapping[str, Any]], *, indices: Sequence[int] | None = None,
    min_score: float = 0.5,
) -> Figure:  # fmt: skip
    """Draw ground truth on the left, the model's prediction on the right, one sample a row, a colour for each class.

    A prediction fits where its mask and that of an object of its class have an IoU over 0.5: both outlines are thick.

    Args:
        dataset: the samples the model saw, as in `draw_samples`.
        predictions: one dict a sample, as torchvision's models return it in evaluation: ``boxes`` [N,4],
            ``labels`` [N], ``scores`` [N] in 0..1, ``masks`` float [N,1,H,W] in 0..1.
        indices: which sample each prediction belongs to; ``None`` means the first ones.
        min_score: weaker predictions are left out.

    Raises:
        ColabUtilsError: there are no predictions, or not one for each index.
    """
    chosen = list(range(len(predictions))) if indices is None else list(indices)
    if not chosen or len(chosen) != len(predictions):
        raise ColabUtilsError(f"expected {len(chosen)} predictions, one a sample, found {len(predictions)}: pass all")
    panels: list[_Panel] = []
    for i, prediction in zip(chosen, predictions, strict=True):
        image, target = dataset[i]
        sure = prediction["scores"] >= min_score
        shown = {key: prediction[key][sure] for key in ("boxes", "labels", "scores", "masks")}
        shown["masks"] = shown["masks"][:, 0] > 0.5
        fits = _match(shown, target)
        panels.append((f"sample {i}, truth", image, {**target, "fits": fits.any(0)}))
        panels.append((f"sample {i}, prediction", image, {**shown, "fits": fits.any(1)}))
    truths, found = ([fit for *_, objects in panels[side::2] for fit in objects["fits"]] for side in (0, 1))
    title = f"{sum(truths)} of {_count(len(truths), 'object')} found (thick outlines)"
    title += f", by {_count(len(found), 'prediction')} with a score of {min_score:g} or more"
    return _draw_grid(title, panels, dataset.class_names)


def draw_annotations(
    images: str | Path, panels: Sequence[tuple[str, CocoDataset, int]], *, title: str, columns: int = 3
) -> Figure:
    """Draw images with their annotations as they are in the JSON, however bad they are.

    Args:
        images: the image folder.
        panels: of each image a heading, its dataset, and its index there; a file that is none is drawn grey.
        title: the finding.
        columns: images in a row.
    """
    drawn = [(heading, *_read_annotated(Path(images), dataset, i)) for heading, dataset, i in panels]
    names = {one["id"]: one["name"] for _, dataset, _ in panels for one in dataset.categories}
    return _draw_grid(title, drawn, names, columns=min(columns, len(panels)), inches=4.4)


def _read_annotated(images: Path, dataset: CocoDataset, i: int) -> tuple[Any, dict[str, Any]]:
    """A small copy of an image, and its annotations at the same scale."""
    import numpy as np
    from PIL import Image, ImageOps
    from pycocotools import mask as coco_mask

    height, width = (int(side) if side > 0 else 480 for side in dataset.sizes[i])
    try:
        picture: Image.Image = Image.open(io.BytesIO(read_file(dataset.find_image(images, i)[0])))
        upright = ImageOps.exif_transpose(picture) if picture.size != (width, height) else picture
        picture = (upright if upright.size == (width, height) else picture).convert("RGB")
    except Exception:  # whatever is wrong with the file, the page says it in words
        picture = Image.new("RGB", (width, height), "#dddddd")
    width, height = picture.size
    scale = min(1, 640 / max(picture.size))
    small = picture.resize([max(1, round(side * scale)) for side in picture.size])
    annotations, encoder, masks = dataset.read_annotations(i)[0], MaskEncoder(height, width), list[Any]()
    for one in annotations:
        try:
            rles = resize_rles([encoder.encode(one["segmentation"])], *small.size[::-1])
            masks.append(coco_mask.decode(rles)[..., 0])
        except ColabUtilsError:
            masks.append(np.zeros(small.size[::-1], np.uint8))
    boxes = np.array([one["bbox"] for one in annotations]).reshape(-1, 4) * scale
    boxes[:, 2:] += boxes[:, :2]
    objects = {"boxes": boxes.clip(-99, 999), "labels": [one["category_id"] for one in annotations], "masks": masks}
    return np.asarray(small).transpose(2, 0, 1), {**objects, "size": (width, height)}


def make_figure(title: str, *, width: float, height: float) -> Figure:
    """An empty figure, ``width`` x ``height`` inches, with a finding for a title; a notebook shows it once.

    Names of users stand in titles and labels: ``parse_math=False`` keeps ``$`` from starting a formula.
    """
    import textwrap

    import matplotlib.pyplot as plt

    title = textwrap.fill(title, int(width * 5.8))
    size = (width, height + 0.35 * title.count("\n"))
    figure = plt.figure(figsize=size, layout="constrained", facecolor="white")
    plt.close(figure)  # pyplot would show it a second time at the end of the cell
    figure.suptitle(title, x=0.01, ha="left", fontsize=19, fontweight="bold", color="#1a1a1a", parse_math=False)
    return figure


def _draw_grid(
    title: str, panels: Sequence[_Panel], names: Mapping[int, str], *, columns: int = 2, inches: float = 5.2
) -> Figure:
    """A grid of images, each ``inches`` wide: names stay readable from the back of a room."""
    rows = -(-len(panels) // columns)
    tallest = max(image.shape[1] / image.shape[2] for _, image, _ in panels)
    height = rows * (inches * min(tallest, 1.4) + 0.3) + 0.4
    figure = make_figure(title, width=max(columns * inches, 7.2), height=height)
    for n, (heading, image, objects) in enumerate(panels, start=1):
        axis = figure.add_subplot(rows, columns, n)
        axis.set_axis_off()
        axis.set_anchor("N")
        width, rows_px = objects.get("size", image.shape[:0:-1])
        heading += f", {width:,} x {rows_px:,}"
        axis.set_title(heading, fontsize=13, loc="left", color="#444444", parse_math=False)
        _draw_objects(axis, image, objects, names, inches)
    return figure


def _draw_objects(axis: Axes, image: Any, objects: Mapping[str, Any], names: Mapping[int, str], inches: float) -> None:
    import numpy as np
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    each = max(1, max(image.shape) // 1000)  # of a large photo one pixel in so many is drawn
    pixels = np.asarray(image)[:, ::each, ::each].transpose(1, 2, 0)
    canvas = pixels.astype(np.float32) / (255 if pixels.dtype.kind in "ui" else 1)
    boxes, labels, masks, scores = (_to_array(objects.get(key, ())) for key in ("boxes", "labels", "masks", "scores"))
    height, width = canvas.shape[:2]
    inch = max(width, height / 1.4) / inches  # in pixels
    boxes, fits = boxes / each, objects.get("fits", ())
    order = np.argsort((boxes[:, 0] - boxes[:, 2]) * (boxes[:, 3] - boxes[:, 1]), kind="stable")
    for place, n in enumerate(order.tolist()):  # small objects last, on top
        # of predictions one for each class; else one for each object, so that neighbours of one class stay apart
        colour = PALETTE[([*names].index(labels[n]) if len(fits) else n) % len(PALETTE)]
        thick = 4 if len(fits) and fits[n] else 1.5 if len(fits) else 2
        inside = masks[n, ::each, ::each].astype(bool)
        canvas[inside] = 0.6 * canvas[inside] + 0.4 * np.asarray(to_rgb(colour), np.float32)
        if inside.any():
            edge = np.pad(inside, 1).astype(float)  # what reaches the image's edge has an outline there, too
            lines = axis.contour(edge, [0.5], extent=(-1, width, -1, height), colors=[colour])
            lines.set(linewidth=thick, path_effects=[withStroke(linewidth=thick + 1.5, foreground="white")])
        x0, y0, x1, y1 = (float(value) for value in boxes[n])
        axis.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, edgecolor=colour, linewidth=1))
        if place >= _NAMED:
            continue
        text = names.get(int(labels[n]), f"label {int(labels[n])}") + (f" {scores[n]:.2f}" if len(scores) else "")
        axis.text(
            max(0.0, min(x0, width - 0.1 * inch * len(text))), y0, text, fontsize=10, parse_math=False,
            va="bottom" if y0 > 0.2 * inch else "top",  # above the box, unless it touches the top
            color="white" if colour in _DARK else "black",
            bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.5},
        )  # fmt: skip
    axis.imshow(canvas.clip(0, 1))


def _match(found: Mapping[str, Any], truth: Mapping[str, Any]) -> Any:
    """Which of the N predictions fits which of the M objects: bool [N,M]."""
    import numpy as np

    masks, truths = (_to_array(side["masks"]).astype(np.float32) for side in (found, truth))
    both = np.tensordot(masks, truths, ((1, 2), (1, 2)))
    union = masks.sum((1, 2))[:, None] + truths.sum((1, 2)) - both
    return (both > 0.5 * union) & (_to_array(found["labels"])[:, None] == _to_array(truth["labels"]))


def _to_array(values: Any) -> Any:
    import numpy as np

    return np.asarray(values.cpu() if hasattr(values, "cpu") else values)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
