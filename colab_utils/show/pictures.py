"""Images with their masks, boxes and class names drawn on them: the check that no table
replaces.
"""

import base64
import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from markupsafe import Markup
from matplotlib import colors
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from PIL import Image
from pycocotools import mask as coco_mask

from colab_utils.data.coco import CocoDataset
from colab_utils.data.decoding import open_image, to_rgb, turn_upright
from colab_utils.data.masks import encode_segmentation, resize_rles
from colab_utils.errors import ColabUtilsError
from colab_utils.files import read_file

# Okabe and Ito's colours, told apart with every common colour blindness (jfly.uni-koeln.de/color).
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442")
_DARK = (PALETTE[0], PALETTE[2], PALETTE[3])  # white text on these
# of an image's objects, the largest
_NAMED = 5
_DRAWN = 100
_Panel = tuple[str, Any, Mapping[str, Any]]  # heading, image, and the objects on it


def draw_pair(
    before: tuple[Any, Mapping[str, Any]],
    after: tuple[Any, Mapping[str, Any]],
    *,
    class_names: Mapping[int, str],
) -> Figure:
    """Draw a sample beside what became of it; the title says what differs.

    Args:
        before: ``(image, target)``: image uint8 [3,H,W], target with ``boxes`` [N,4] xyxy in
            pixels, ``labels`` [N] and ``masks`` uint8 [N,H,W].
        after: the same sample after whatever was done to it.
        class_names: the name of each label.
    """

    def tell(key: str) -> str:
        return "the same" if np.array_equal(before[1][key], after[1][key]) else "other"

    times = math.prod(before[0].shape) / math.prod(after[0].shape)
    if times != 1:
        title = f"{times:.2g} times fewer pixels, {tell('labels')} objects"
    else:
        image = "Pixel for pixel the same" if np.array_equal(before[0], after[0]) else "Another"
        title = f"{image} image, {tell('masks')} masks"
    return _draw_grid(title, [("before", *before), ("after", *after)], class_names)


def draw_predictions(
    dataset: Any, predictions: Sequence[Mapping[str, Any]], *, min_score: float = 0.5
) -> Figure:
    """Draw ground truth on the left, the model's prediction on the right, one sample a row, a
    colour for each class.

    A prediction fits where its mask and that of an object of its class have an IoU over 0.5: both
    outlines are thick.

    Args:
        dataset: gives ``(image, target)`` as in `draw_pair`, and has ``class_names``, the name of
            each label: `ShardDataset`, `CocoFolder`, or your own.
        predictions: of the first samples, one dict each, as torchvision's models return it in
            evaluation: ``boxes`` [N,4], ``labels`` [N], ``scores`` [N] in 0..1, ``masks`` float
            [N,1,H,W] in 0..1.
        min_score: weaker predictions are left out.

    Raises:
        ColabUtilsError: there are no predictions.
    """
    if not predictions:
        raise ColabUtilsError(
            "expected predictions to draw, found none: run the model on at least one sample"
        )
    panels: list[_Panel] = []
    for i, prediction in enumerate(predictions):
        image, target = dataset[i]
        sure = prediction["scores"] >= min_score
        shown = {key: prediction[key][sure] for key in ("boxes", "labels", "scores", "masks")}
        shown["masks"] = shown["masks"][:, 0] > 0.5
        fits = _match(shown, target)
        panels.append((f"sample {i}, truth", image, {**target, "fits": fits.any(0)}))
        panels.append((f"sample {i}, prediction", image, {**shown, "fits": fits.any(1)}))
    truths, found = (
        [fit for *_, objects in panels[side::2] for fit in objects["fits"]] for side in (0, 1)
    )
    title = f"{sum(truths)} of {_count(len(truths), 'object')} found (thick outlines)"
    title += f", by {_count(len(found), 'prediction')} with a score of {min_score:g} or more"
    return _draw_grid(title, panels, dataset.class_names)


def draw_annotations(
    images: str | Path,
    panels: Sequence[tuple[str, CocoDataset, int]],
    *,
    title: str,
    columns: int = 3,
) -> Figure:
    """Draw images with their annotations as they are in the JSON, however bad they are.

    Args:
        images: the image folder.
        panels: of each image a heading, its dataset, and its index there; a file that is none is
            drawn grey.
        title: the finding.
        columns: images in a row.
    """
    drawn = [
        (heading, *_read_annotated(Path(images), dataset, i)) for heading, dataset, i in panels
    ]
    names = {one["id"]: one["name"] for _, dataset, _ in panels for one in dataset.categories}
    return _draw_grid(title, drawn, names, columns=min(columns, len(panels)), inches=4.4)


def _read_annotated(images: Path, dataset: CocoDataset, i: int) -> tuple[Any, dict[str, Any]]:
    """A small copy of an image, and its annotations at the same scale."""
    height, width = (int(side) if side > 0 else 480 for side in dataset.sizes[i])
    picture: Image.Image | None = None
    with suppress(Exception):  # whatever is wrong with the file, the page says it in words
        picture = to_rgb(
            turn_upright(open_image(read_file(dataset.find_image(images, i)[0])), height, width)
        )
        width, height = picture.size
    scale = min(1, 640 / max(width, height))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    small = picture.resize(size) if picture else Image.new("RGB", size, "#dddddd")
    masks = list[Any]()
    annotations = sorted(
        dataset.read_annotations(i)[0], key=lambda one: -abs(math.prod(one["bbox"][2:]))
    )[:_DRAWN]
    for one in annotations:
        try:
            rles = resize_rles(
                [encode_segmentation(one["segmentation"], height, width)], *small.size[::-1]
            )
            masks.append(coco_mask.decode(rles)[..., 0])
        except ColabUtilsError:
            masks.append(np.zeros(small.size[::-1], np.uint8))
    boxes = np.array([one["bbox"] for one in annotations]).reshape(-1, 4) * scale
    boxes[:, 2:] += boxes[:, :2]
    objects = {
        "boxes": boxes.clip(-99, 999),
        "labels": [one["category_id"] for one in annotations],
        "masks": masks,
    }
    return np.asarray(small).transpose(2, 0, 1), {**objects, "size": (width, height)}


def make_figure(title: str, *, width: float, height: float) -> Figure:
    """An empty figure, ``width`` x ``height`` inches, with a finding for a title; a notebook shows
    it once.

    Names of users stand in titles and labels: ``parse_math=False`` keeps ``$`` from starting a
    formula.
    """
    title = textwrap.fill(title, int(width * 5.8))
    size = (width, height + 0.35 * title.count("\n"))
    figure = plt.figure(figsize=size, layout="constrained", facecolor="white")
    plt.close(figure)  # pyplot would show it a second time at the end of the cell
    figure.suptitle(
        title, x=0.01, ha="left", fontsize=19, fontweight="bold", color="#1a1a1a", parse_math=False
    )
    return figure


def embed_figure(figure: Figure) -> Markup:
    """The figure as an ``<img>`` that holds its own drawing (SVG), its title not drawn but for
    screen readers.
    """
    title = figure.get_suptitle().replace("\n", " ")
    drawing = io.BytesIO()
    figure.suptitle("")
    figure.savefig(drawing, format="svg", metadata={"Date": None})
    data = base64.b64encode(drawing.getvalue()).decode("ascii")
    return Markup('<img alt="{}" src="data:image/svg+xml;base64,{}">').format(title, data)


def _draw_grid(
    title: str,
    panels: Sequence[_Panel],
    names: Mapping[int, str],
    *,
    columns: int = 2,
    inches: float = 5.2,
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


def _draw_objects(
    axis: Axes, image: Any, objects: Mapping[str, Any], names: Mapping[int, str], inches: float
) -> None:
    each = max(1, max(image.shape) // 1000)  # of a large photo one pixel in so many is drawn
    pixels = np.asarray(image)[:, ::each, ::each].transpose(1, 2, 0)
    canvas = pixels.astype(np.float32) / (255 if pixels.dtype.kind in "ui" else 1)
    boxes, labels, masks, scores = (
        _to_array(objects.get(key, ())) for key in ("boxes", "labels", "masks", "scores")
    )
    height, width = canvas.shape[:2]
    inch = max(width, height / 1.4) / inches  # in pixels
    boxes = boxes / each
    fits = objects.get("fits", ())
    order = np.argsort((boxes[:, 0] - boxes[:, 2]) * (boxes[:, 3] - boxes[:, 1]), kind="stable")
    for place, n in enumerate(order.tolist()):  # small objects last, on top
        # of predictions one for each class; else one for each object, so that neighbours of one
        # class stay apart
        colour = PALETTE[([*names].index(labels[n]) if len(fits) else n) % len(PALETTE)]
        thick = 4 if len(fits) and fits[n] else 1.5 if len(fits) else 2
        inside = masks[n, ::each, ::each].astype(bool)
        canvas[inside] = 0.6 * canvas[inside] + 0.4 * np.array(colors.to_rgb(colour), np.float32)
        if inside.any():
            (top, bottom), (left, right) = (
                np.flatnonzero(inside.any(side))[[0, -1]] for side in (1, 0)
            )
            edge = np.pad(inside[top : bottom + 1, left : right + 1], 1).astype(float)
            lines = axis.contour(
                edge, [0.5], extent=(left - 1, right + 1, top - 1, bottom + 1), colors=[colour]
            )
            lines.set(
                linewidth=thick,
                path_effects=[withStroke(linewidth=thick + 1.5, foreground="white")],
            )
        x0, y0, x1, y1 = (float(value) for value in boxes[n])
        axis.add_patch(
            Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, edgecolor=colour, linewidth=1)
        )
        if place >= _NAMED:
            continue
        text = textwrap.shorten(names.get(int(labels[n]), f"label {int(labels[n])}"), 28)
        text += f" {scores[n]:.2f}" if len(scores) else ""
        axis.text(
            max(0.0, min(x0, width - 0.1 * inch * len(text))),
            y0,
            text,
            fontsize=10,
            parse_math=False,
            va="bottom" if y0 > 0.2 * inch else "top",  # above the box, unless it touches the top
            color="white" if colour in _DARK else "black",
            bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.5},
        )
    axis.imshow(canvas.clip(0, 1))


def _match(found: Mapping[str, Any], truth: Mapping[str, Any]) -> Any:
    """Which of the N predictions fits which of the M objects: bool [N,M]."""
    masks, truths = (_to_array(side["masks"]).astype(np.float32) for side in (found, truth))
    both = np.tensordot(masks, truths, ((1, 2), (1, 2)))
    union = masks.sum((1, 2))[:, None] + truths.sum((1, 2)) - both
    return (both > 0.5 * union) & (
        _to_array(found["labels"])[:, None] == _to_array(truth["labels"])
    )


def _to_array(values: Any) -> Any:
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
