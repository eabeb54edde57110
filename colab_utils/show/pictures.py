"""Images with their masks, boxes and class names drawn on them: the check that no table replaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from colab_utils.errors import ColabUtilsError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PALETTE", "draw_pairs", "draw_predictions", "draw_samples", "make_figure"]

# Okabe and Ito's colours, told apart with every common colour blindness (jfly.uni-koeln.de/color).
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442")
_DARK = (PALETTE[0], PALETTE[2], PALETTE[3])  # white text on these
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
    kinds = ", ".join(sorted(set(names), key=lambda name: (-names.count(name), name))[:5])
    title = f"{_count(len(chosen), 'sample')} with {_count(len(names), 'object')}" + (f": {kinds}" if kinds else "")
    return _draw_grid(title, panels, dataset.class_names, columns=min(columns, len(chosen)), inches=3.6)


def draw_pairs(
    left: Sequence[tuple[Any, dict[str, Any]]],
    right: Sequence[tuple[Any, dict[str, Any]]],
    *,
    class_names: Mapping[int, str],
    titles: tuple[str, str] = ("before", "after"),
) -> Figure:
    """Draw samples side by side with what became of them; the title says whether anything differs.

    Args:
        left: samples ``(image, target)``, as in `draw_samples`.
        right: the same samples after whatever was done to them, in the same order.
        class_names: the name of each label.
        titles: of the left and the right image.

    Raises:
        ColabUtilsError: there are no samples, or not as many on the right as on the left.
    """
    if not left or len(left) != len(right):
        raise ColabUtilsError(
            f"expected as many samples on the right as on the left, found {len(left)} and {len(right)}: "
            "give the same samples of both, one at least"
        )
    pairs = list(zip(left, right, strict=True))
    differing = sum(_count_differing(a, b) for (a, _), (b, _) in pairs)
    same_masks = all(_count_differing(a["masks"], b["masks"]) == 0 for (_, a), (_, b) in pairs)
    title = f"{differing:,} image values differ" if differing else "Pixel for pixel the same image"
    title += f", {'and' if differing else 'with'} the same masks" if same_masks else ", and the masks differ"
    panels = [(heading, *sample) for pair in pairs for heading, sample in zip(titles, pair, strict=True)]
    return _draw_grid(title, panels, class_names)


def draw_predictions(
    dataset: Any,
    predictions: Sequence[Mapping[str, Any]],
    *,
    indices: Sequence[int] | None = None,
    min_score: float = 0.5,
) -> Figure:
    """Draw ground truth on the left, the model's prediction on the right, one sample a row.

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
        raise ColabUtilsError(
            f"expected one prediction for each of {len(chosen)} samples, found {len(predictions)}: "
            "give `indices` as long as `predictions`"
        )
    panels: list[_Panel] = []
    for i, prediction in zip(chosen, predictions, strict=True):
        image, target = dataset[i]
        sure = prediction["scores"] >= min_score
        shown = {key: prediction[key][sure] for key in ("boxes", "labels", "scores", "masks")}
        shown["masks"] = shown["masks"][:, 0] > 0.5
        panels += [(f"ground truth, sample {i}", image, target), (f"prediction, sample {i}", image, shown)]
    truths, found = (sum(len(objects["labels"]) for *_, objects in panels[side::2]) for side in (0, 1))
    title = f"{_count(truths, 'object')} to find, {_count(found, 'prediction')} with a score of {min_score:g} or more"
    return _draw_grid(title, panels, dataset.class_names)


def make_figure(title: str, *, width: float, height: float) -> Figure:
    """An empty figure, ``width`` x ``height`` inches, with a finding for a title; a notebook shows it once.

    Names of users stand in titles and labels: ``parse_math=False`` keeps ``$`` from starting a formula.
    """
    import textwrap

    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(width, height), layout="constrained", facecolor="white")
    plt.close(figure)  # pyplot would show it a second time at the end of the cell
    figure.suptitle(
        textwrap.fill(title, int(width * 6)), x=0.01, ha="left", fontsize=19, fontweight="bold", color="#1a1a1a",
        parse_math=False,
    )  # fmt: skip
    return figure


def _draw_grid(
    title: str, panels: Sequence[_Panel], names: Mapping[int, str], *, columns: int = 2, inches: float = 5.2
) -> Figure:
    """A grid of images, each ``inches`` wide: names stay readable from the back of a room."""
    rows = -(-len(panels) // columns)
    tallest = max(image.shape[1] / image.shape[2] for _, image, _ in panels)
    height = rows * (inches * min(tallest, 1.4) + 0.4) + 0.8
    figure = make_figure(title, width=max(columns * inches, 7.2), height=height)
    for n, (heading, image, objects) in enumerate(panels, start=1):
        axis = figure.add_subplot(rows, columns, n)
        axis.set_axis_off()
        axis.set_anchor("N")
        axis.set_title(heading, fontsize=13, loc="left", color="#444444", parse_math=False)
        _draw_objects(axis, image, objects, names)
    return figure


def _draw_objects(axis: Axes, image: Any, objects: Mapping[str, Any], names: Mapping[int, str]) -> None:
    import numpy as np
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Rectangle

    pixels = np.asarray(image).transpose(1, 2, 0)
    canvas = pixels.astype(np.float32) / (255 if pixels.dtype.kind in "ui" else 1)
    boxes, labels, masks, scores = (
        np.asarray(values.cpu() if hasattr(values, "cpu") else values)
        for values in (objects["boxes"], objects["labels"], objects["masks"], objects.get("scores", ()))
    )
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    for n in np.argsort(-areas, kind="stable"):  # small objects last, on top
        colour = PALETTE[int(n) % len(PALETTE)]  # an object each, so that neighbours of one class stay apart
        inside = masks[n].astype(bool)
        canvas[inside] = 0.5 * canvas[inside] + 0.5 * np.asarray(to_rgb(colour), np.float32)
        x0, y0, x1, y1 = (float(value) for value in boxes[n])
        axis.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, edgecolor=colour, linewidth=2))
        name = names.get(int(labels[n]), f"label {int(labels[n])}")
        right = x0 > 0.8 * canvas.shape[1]
        axis.text(
            x1 if right else x0, y0, f"{name} {scores[n]:.2f}" if len(scores) else name, fontsize=10, parse_math=False,
            va="top" if y0 < 0.06 * len(canvas) else "bottom",  # above the box, unless it touches the top
            ha="right" if right else "left",
            color="white" if colour in _DARK else "black",
            bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.5},
        )  # fmt: skip
    axis.imshow(canvas.clip(0, 1))


def _count_differing(left: Any, right: Any) -> int:
    import numpy as np

    a, b = np.asarray(left), np.asarray(right)
    return max(a.size, b.size) if a.shape != b.shape else int((a != b).sum())


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
