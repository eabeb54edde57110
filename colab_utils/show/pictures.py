"""Images with their masks, boxes and class names drawn on them: the check that no table replaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from colab_utils.errors import ColabUtilsError

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PALETTE", "draw_pairs", "draw_predictions", "draw_samples", "make_figure"]

# Okabe and Ito's colours, told apart with every common colour blindness (jfly.uni-koeln.de/color).
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442")
_PANEL_INCHES = 3.6  # of width for one image: names stay readable from the back of a room


class Samples(Protocol):
    """What is drawn: `ShardDataset`, `CocoFolder`, or your own dataset of ``(image, target)``."""

    @property
    def class_names(self) -> Mapping[int, str]:
        """The name of each label."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, dict[str, Any]]: ...


def draw_samples(dataset: Samples, *, indices: Sequence[int] | None = None, columns: int = 4) -> Figure:
    """Draw samples as the model gets them: image, masks, boxes and class names.

    Args:
        dataset: gives ``(image, target)``: image uint8 [3,H,W], target with ``boxes`` [N,4] xyxy in pixels,
            ``labels`` [N] and ``masks`` uint8 [N,H,W].
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
    chosen = _spread(len(dataset), columns) if indices is None else list(indices)
    if not chosen:
        raise ColabUtilsError("expected samples to draw, found none: give `indices`, or a dataset with images")
    samples = [dataset[i] for i in chosen]
    names = [dataset.class_names[int(label)] for _, target in samples for label in target["labels"]]
    kinds = ", ".join(sorted(set(names), key=lambda name: (-names.count(name), name))[:5])
    title = f"{_count(len(chosen), 'sample')} with {_count(len(names), 'object')}" + (f": {kinds}" if kinds else "")
    figure, axes = _make_grid(title, len(chosen), min(columns, len(chosen)), samples)
    for axis, index, (image, target) in zip(axes, chosen, samples, strict=False):
        _draw_objects(axis, image, target, dataset.class_names)
        axis.set_title(f"sample {index}", fontsize=12, loc="left", color="#444444")
    return figure


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
    samples = [sample for pair in pairs for sample in pair]
    figure, axes = _make_grid(title, len(samples), 2, samples, inches=5.2)
    for n, (axis, (image, target)) in enumerate(zip(axes, samples, strict=True)):
        _draw_objects(axis, image, target, class_names)
        axis.set_title(titles[n % 2], fontsize=14, loc="left", color="#444444")
    return figure


def draw_predictions(
    dataset: Samples,
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
    samples = [dataset[i] for i in chosen]
    kept = [_keep_sure(prediction, min_score) for prediction in predictions]
    truths = sum(len(target["labels"]) for _, target in samples)
    shown = sum(len(prediction["labels"]) for prediction in kept)
    title = f"{_count(truths, 'object')} to find, {_count(shown, 'prediction')} with a score of {min_score:g} or more"
    pictures = [sample for sample in samples for _ in range(2)]
    figure, axes = _make_grid(title, len(pictures), 2, pictures, inches=5.2)
    for row, ((image, target), prediction) in enumerate(zip(samples, kept, strict=True)):
        for axis, objects, label in zip(
            axes[2 * row : 2 * row + 2], (target, prediction), ("ground truth", "prediction"), strict=True
        ):
            _draw_objects(axis, image, objects, dataset.class_names)
            axis.set_title(f"{label}, sample {chosen[row]}", fontsize=14, loc="left", color="#444444")
    return figure


def make_figure(title: str, *, width: float, height: float) -> Figure:
    """An empty figure, ``width`` x ``height`` inches, with a finding for a title; a notebook shows it once."""
    import textwrap

    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(width, height), layout="constrained", facecolor="white")
    plt.close(figure)  # pyplot would show it a second time at the end of the cell
    figure.suptitle(
        textwrap.fill(title, int(width * 6.7)), x=0.01, ha="left", fontsize=19, fontweight="bold", color="#1a1a1a"
    )
    return figure


def _make_grid(
    title: str, count: int, columns: int, samples: Sequence[tuple[Any, Any]], inches: float = _PANEL_INCHES
) -> tuple[Figure, list[Axes]]:
    rows = -(-count // columns)
    tallest = max(image.shape[1] / image.shape[2] for image, _ in samples)
    figure = make_figure(
        title, width=max(columns * inches, 7.2), height=rows * (inches * min(tallest, 1.4) + 0.4) + 0.8
    )
    axes = [figure.add_subplot(rows, columns, n + 1) for n in range(count)]
    for axis in axes:
        axis.set_axis_off()
        axis.set_anchor("N")
    return figure, axes


def _draw_objects(axis: Axes, image: Any, objects: Mapping[str, Any], names: Mapping[int, str]) -> None:
    import numpy as np
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Rectangle

    pixels = np.asarray(image).transpose(1, 2, 0)
    canvas = pixels.astype(np.float32) / (255 if pixels.dtype.kind in "ui" else 1)
    boxes, masks = np.asarray(objects["boxes"]), np.asarray(objects["masks"])
    labels, scores = np.asarray(objects["labels"]), objects.get("scores")
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) if len(boxes) else np.zeros(0)
    for n in np.argsort(-areas, kind="stable"):  # small objects last, on top
        colour = PALETTE[int(n) % len(PALETTE)]  # an object each, so that neighbours of one class stay apart
        inside = masks[n].astype(bool)
        canvas[inside] = 0.5 * canvas[inside] + 0.5 * np.asarray(to_rgb(colour), np.float32)
        x0, y0, x1, y1 = (float(value) for value in boxes[n])
        axis.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, edgecolor=colour, linewidth=2))
        name = names.get(int(labels[n]), f"label {int(labels[n])}")
        inside_box = y0 < 0.06 * len(canvas)  # above the box, unless it touches the top
        axis.text(
            x0, y0, name if scores is None else f"{name} {float(scores[n]):.2f}", fontsize=10,
            va="top" if inside_box else "bottom",
            color="white" if _is_dark(colour) else "black", clip_on=True,
            bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.5},
        )  # fmt: skip
    axis.imshow(canvas.clip(0, 1))


def _keep_sure(prediction: Mapping[str, Any], min_score: float) -> dict[str, np.ndarray]:
    import numpy as np

    arrays = {
        key: np.asarray(prediction[key].cpu() if hasattr(prediction[key], "cpu") else prediction[key])
        for key in ("boxes", "labels", "scores", "masks")
    }
    sure = arrays["scores"] >= min_score
    kept = {key: values[sure] for key, values in arrays.items()}
    kept["masks"] = kept["masks"].reshape(len(kept["labels"]), *arrays["masks"].shape[-2:]) > 0.5
    return kept


def _count_differing(left: Any, right: Any) -> int:
    import numpy as np

    a, b = np.asarray(left), np.asarray(right)
    return max(a.size, b.size) if a.shape != b.shape else int((a != b).sum())


def _is_dark(colour: str) -> bool:
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue < 0.55


def _spread(count: int, wanted: int) -> list[int]:
    shown = min(count, wanted)
    return [n * count // shown for n in range(shown)]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
