"""Pictures of images with their masks, boxes and class names, to see what no table shows."""

import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import colors
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from PIL import Image
from pycocotools import mask as coco_mask

from colab_utils.data.coco import CocoDataset
from colab_utils.data.decoding import to_rgb
from colab_utils.data.masks import crop_pixels, encode_segmentation
from colab_utils.data.orientation import open_upright
from colab_utils.errors import ColabUtilsError, escape
from colab_utils.files import read_file
from colab_utils.places import Place, PlaceLike, open_place
from colab_utils.units import format_count

# Okabe and Ito's colours. People with any common colour blindness can tell them apart
# (jfly.uni-koeln.de/color).
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442")
# Only the largest objects of an image get their names written, and no more than this many.
_NAMED = 5
# `draw_annotations` draws only the largest annotations of an image, and no more than this many.
_DRAWN = 100
# `draw_annotations` draws images with at most this many pixels a side.
_LONGEST_SIDE = 640
# A target or a prediction of torchvision's models, or what is drawn of them.
_Objects = Mapping[str, Any]
# A panel has a heading, an image, and the objects on it.
_Panel = tuple[str, Any, _Objects]


class DescribedFigure(Figure):
    """A figure that also describes in words what it draws, for people who use a screen reader.

    Attributes:
        words: One text for each bar, row or curve, with its numbers.
    """

    words: list[str]

    @property
    def alternative_text(self) -> str:
        """Return the title and the words, or the headings of the panels if there are no words."""
        title = self.get_suptitle().replace("\n", " ")
        words = self.words or [axis.get_title("left") for axis in self.axes]
        return ". ".join([title, *words]).rstrip(". ")

    def _repr_mimebundle_(self, **_: Any) -> tuple[Any, Any]:
        """Return the words for a notebook. matplotlib itself gives the notebook the picture."""
        return {}, {"image/png": {"alt": self.alternative_text}}


def draw_samples(
    samples: Mapping[str, tuple[Any, _Objects]], *, title: str, class_names: Mapping[int, str]
) -> DescribedFigure:
    """Draw samples side by side.

    Args:
        samples: Dict from a heading to ``(image, target)``: image uint8 [3, H, W], and a target
            with ``boxes`` [N, 4] (x0, y0, x1, y1 in pixels), ``labels`` [N] and ``masks`` uint8
            [N, H, W].
        title: Title, which states the finding.
        class_names: Dict from a label to the name of its class.
    """
    return _draw_grid(title, [(name, *sample) for name, sample in samples.items()], class_names)


def draw_predictions(
    dataset: Any, predictions: Sequence[_Objects], *, min_score: float = 0.5
) -> DescribedFigure:
    """Draw one sample a row: the ground truth on the left, the model's predictions on the right.

    Each class has a colour. A prediction fits an object of its class if the IoU of their masks is
    over 0.5. The outlines of both are then thick.

    Args:
        dataset: A `ShardDataset`, a `CocoFolder` or your own dataset. It gives ``(image, target)``
            as in `draw_samples`, and has ``class_names``, a dict from a label to the name of its
            class.
        predictions: One dict for each sample: the first is for ``dataset[0]``, the second for
            ``dataset[1]``, and so on. Each dict is as torchvision's models return it in evaluation:
            ``boxes`` [N, 4], ``labels`` [N], ``scores`` [N] from 0 to 1, and ``masks`` float
            [N, 1, H, W] from 0 to 1.
        min_score: Predictions with a lower score are left out. Default: 0.5.

    Raises:
        ColabUtilsError: There are no predictions.
    """
    if not predictions:
        raise ColabUtilsError(
            "There are no predictions to draw. Run the model on at least one sample."
        )
    panels: list[_Panel] = []
    # The objects that were found, the predictions that are drawn, and all objects.
    counts = np.zeros(3, int)
    for i, prediction in enumerate(predictions):
        image, target = dataset[i]
        sure = prediction["scores"] >= min_score
        shown = {key: prediction[key][sure] for key in ("boxes", "labels", "scores", "masks")}
        shown["masks"] = shown["masks"][:, 0] > 0.5
        fits = _match(shown, target)
        panels.append((f"sample {i}, truth", image, {**target, "fits": fits.any(0)}))
        panels.append((f"sample {i}, prediction", image, {**shown, "fits": fits.any(1)}))
        counts += (fits.any(0).sum(), *fits.shape)
    hits, drawn, objects = counts.tolist()
    title = (
        f"{hits} of {format_count(objects, 'object')} found (thick outlines), by "
        f"{format_count(drawn, 'prediction')} with a score of {min_score:g} or more"
    )
    return _draw_grid(title, panels, dataset.class_names)


def draw_annotations(
    images: PlaceLike,
    dataset: CocoDataset,
    panels: Sequence[tuple[str, int, str]],
    *,
    title: str,
    columns: int = 3,
) -> DescribedFigure:
    """Draw images with their annotations as they are in the JSON, with all faults.

    Args:
        images: Image folder.
        dataset: The annotations.
        panels: For each image: a remark, the index in the dataset, and "turn" or "keep" (see
            `open_upright`). A file that is not an image is drawn as a grey area, without
            annotations.
        title: Title, which states the finding.
        columns: Images in a row. Default: 3.
    """
    drawn: list[_Panel] = []
    for remark, i, exif in panels:
        name = textwrap.shorten(escape(dataset.names[i]), 40)
        heading = f"{name}\n{textwrap.shorten(remark, 40)}"
        drawn.append((heading, *_read_annotated(open_place(images), dataset, i, exif)))
    names = {category["id"]: category["name"] for category in dataset.categories}
    return _draw_grid(title, drawn, names, columns=min(columns, len(panels)), inches=4.4)


def _read_annotated(images: Place, dataset: CocoDataset, i: int, exif: str) -> tuple[Any, _Objects]:
    """Read an image, and its annotations. If it cannot be read, return a small grey area."""
    height, width = dataset.sizes[i].tolist()
    size = width, height
    annotations = sorted(
        dataset.read_annotations(i)[0],
        key=lambda annotation: -abs(np.prod(annotation["bbox"][2:])),
    )[:_DRAWN]
    try:
        content = read_file(dataset.find_image(images, i)[0])
        picture = to_rgb(open_upright(content, (height, width), exif).image)
        size = picture.size
    except Exception:
        # The page that shows the picture also names bad files in words.
        picture = Image.new("RGB", (480, 360), "#dddddd")
        annotations = []
    # Only every n-th pixel of a mask is drawn, and the mean of n x n pixels of the image.
    each = -(-max(picture.size) // _LONGEST_SIDE)
    small = np.asarray(picture.reduce(each))
    masks = np.zeros((len(annotations), *small.shape[:2]), np.uint8)
    for mask, annotation in zip(masks, annotations, strict=True):
        with suppress(ColabUtilsError):
            rle = encode_segmentation(annotation["segmentation"], picture.height, picture.width)
            mask[:] = coco_mask.decode(rle)[::each, ::each]
    boxes = np.array([annotation["bbox"] for annotation in annotations]).reshape(-1, 4) / each
    boxes[:, 2:] += boxes[:, :2]
    objects = {
        "boxes": boxes.clip(-99, 999),
        "labels": [annotation["category_id"] for annotation in annotations],
        "masks": masks,
        "size": size,
    }
    return small.transpose(2, 0, 1), objects


def make_figure(title: str, *, width: float, height: float) -> DescribedFigure:
    """Make an empty figure of ``width`` x ``height`` inches. Its title states a finding.

    Titles and labels hold names that users gave, so matplotlib must not read ``$`` as the start of
    a formula: ``parse_math`` is False here and for every other text.
    """
    title = textwrap.fill(title, int(width * 5.8))
    size = (width, height + 0.35 * title.count("\n"))
    figure: Any = plt.figure(
        figsize=size,
        layout="constrained",
        facecolor="white",
        FigureClass=DescribedFigure,
    )
    # Pyplot would show the figure a second time at the end of the cell.
    plt.close(figure)
    figure.suptitle(
        title, x=0.01, ha="left", fontsize=19, fontweight="bold", color="#1a1a1a", parse_math=False
    )
    figure.words = []
    return figure


def _draw_grid(
    title: str,
    panels: Sequence[_Panel],
    names: Mapping[int, str],
    *,
    columns: int = 2,
    inches: float = 5.2,
) -> DescribedFigure:
    """Draw a grid of images, each ``inches`` wide, with text that is large enough for a lecture."""
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
        axis.set_title(heading, fontsize=13, loc="left", parse_math=False)
        _draw_objects(axis, image, objects, names)
    return figure


def _draw_objects(axis: Axes, image: Any, objects: _Objects, names: Mapping[int, str]) -> None:
    # Only every n-th pixel of a large photo is drawn.
    each = max(1, max(image.shape) // 1000)
    pixels = np.asarray(image)[:, ::each, ::each].transpose(1, 2, 0)
    canvas = pixels.astype(np.float32) / (255 if pixels.dtype.kind in "ui" else 1)
    boxes = _to_array(objects["boxes"]).reshape(-1, 4) / each
    masks = _to_array(objects["masks"])
    labels = _to_array(objects["labels"]).tolist()
    scores = _to_array(objects.get("scores", ()))
    fits = objects.get("fits", ())
    # Small objects are drawn last, so that large ones do not hide them.
    sides = boxes[:, 2:] - boxes[:, :2]
    for place, n in enumerate(np.argsort(-sides.prod(1), kind="stable").tolist()):
        # Each object has its own colour, so that neighbours of the same class can be told apart.
        # A picture with predictions is different: there, all objects of a class have one colour.
        number = [*names].index(labels[n]) if len(fits) else n
        colour = PALETTE[number % len(PALETTE)]
        thick = 2.0
        if len(fits):
            thick = 4.0 if fits[n] else 1.5
        # Masks are made bool one at a time, because a page may have thousands of objects.
        inside = masks[n, ::each, ::each].astype(bool)
        if inside.any():
            _draw_mask(axis, canvas, inside, colour, thick)
        axis.add_patch(Rectangle(boxes[n, :2], *sides[n], fill=False, edgecolor=colour))
        if place < _NAMED:
            name = textwrap.shorten(names.get(labels[n], f"label {labels[n]}"), 28)
            if len(scores):
                name += f" {scores[n]:.2f}"
            # The name is written to the middle of the image, so that it is not cut.
            is_right = boxes[n, 0] > canvas.shape[1] / 2
            axis.text(
                boxes[n, 2 * is_right],
                boxes[n, 1],
                name,
                fontsize=10,
                parse_math=False,
                va="top" if boxes[n, 1] < canvas.shape[0] / 2 else "bottom",
                ha="right" if is_right else "left",
                bbox={"facecolor": "white", "edgecolor": colour, "pad": 1.5},
            )
    axis.imshow(canvas.clip(0, 1))


def _draw_mask(
    axis: Axes, canvas: np.ndarray, inside: np.ndarray, colour: str, thick: float
) -> None:
    """Tint the pixels of a mask, and draw its outline in the same colour, with a white edge."""
    canvas[inside] = 0.6 * canvas[inside] + 0.4 * np.array(colors.to_rgb(colour), np.float32)
    # The figure keeps what it draws, so this is not the whole mask.
    left, top, crop = crop_pixels(inside)
    height, width = crop.shape
    # A border of zeros closes the outline of a mask at the edge of its crop.
    extent = (left - 1, left + width, top - 1, top + height)
    lines = axis.contour(np.pad(crop, 1), [0.5], extent=extent, colors=[colour])
    halo = withStroke(linewidth=thick + 1.5, foreground="white")
    lines.set(linewidth=thick, path_effects=[halo])


def _match(predictions: _Objects, truth: _Objects) -> Any:
    """Return which of the N predictions fits which of the M objects, bool [N, M]."""
    masks = _to_array(predictions["masks"]).astype(np.float32)
    truths = _to_array(truth["masks"]).astype(np.float32)
    both = np.tensordot(masks, truths, ((1, 2), (1, 2)))
    union = masks.sum((1, 2))[:, None] + truths.sum((1, 2)) - both
    is_same_class = _to_array(predictions["labels"])[:, None] == _to_array(truth["labels"])
    return (both > 0.5 * union) & is_same_class


def _to_array(values: Any) -> Any:
    if hasattr(values, "cpu"):
        values = values.cpu()
    return np.asarray(values)
