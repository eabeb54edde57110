"""An animation of the simulated loader at three moments, as one picture: for slides and paper."""

from __future__ import annotations

import bisect
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from colab_utils.show.pictures import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_stills"]

_BLUE = PALETTE[0]
_ORANGE = PALETTE[1]
_INK = "#1a1a1a"
_PLACES = 14
_SHARES = (0.1, 0.5, 1.0)
# A lane holds batches, each with its start and its end.
_Lane = Sequence[Sequence[float]]


def draw_stills(spans: Mapping[str, Any], sentence: str) -> bytes:
    """Draw an animation at three moments below its sentence; returns a PNG file.

    Args:
        spans: as the animation's HTML holds them: ``seconds``; ``lanes`` of the workers and
            ``steps``, each as lists of batches, starts and ends.
        sentence: what came out.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6), facecolor="white")
    figure.suptitle(sentence, x=0.02, y=0.97, ha="left", fontsize=19, color=_INK, parse_math=False)
    for row, share in enumerate(_SHARES):
        axes = figure.add_axes((0.02, 0.68 - 0.25 * row, 0.96, 0.2))
        _draw_moment(axes, spans, share * spans["seconds"])
    axes = figure.add_axes((0.02, 0.05, 0.96, 0.07))
    _draw_steps(axes, spans)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()


def _draw_moment(axes: Axes, spans: Mapping[str, Any], now: float) -> None:
    """Draw workers, the batches that are ready, and the model, at one moment."""
    lanes = spans["lanes"]
    steps = spans["steps"]
    axes.set_axis_off()
    axes.set_xlim(0, len(lanes) + _PLACES + 6)
    axes.set_ylim(0, 1.5)
    for place, lane in enumerate(lanes):
        batch, done = _find_batch(lane, now)
        _draw_box(axes, place, 0.9, _BLUE, done, batch)
    ready = {}
    for batches, _, ends in lanes:
        ready.update(zip(batches, ends, strict=True))
    taken = bisect.bisect_right(steps[1], now)
    for place in range(_PLACES):
        batch = taken + _PLACES - 1 - place
        is_ready = ready.get(batch, now + 1) <= now
        text = f"{batch}" if is_ready else ""
        _draw_box(axes, len(lanes) + 1 + place, 0.9, _BLUE, float(is_ready), text)
    batch, done = _find_batch(steps, now)
    _draw_box(axes, len(lanes) + _PLACES + 2, 3.5, _ORANGE, done, batch or "waits")
    finished = bisect.bisect_right(steps[2], now)
    text = f"after {now:.0f} s: {finished} batches"
    axes.text(0, 1.2, text, fontsize=15, color=_INK)
    if now < spans["seconds"] / 4:
        notes = {0: "", len(lanes) + 1: "ready, the next one on the right", -1: "the model"}
        for place, note in notes.items():
            x = place if place >= 0 else len(lanes) + _PLACES + 2
            axes.text(x, 1.2, note, fontsize=12, color="#444444")


def _find_batch(lane: _Lane, now: float) -> tuple[str, float]:
    """Return the batch that is worked on at this moment, and the share that is done."""
    place = bisect.bisect_right(lane[1], now) - 1
    if place < 0 or now >= lane[2][place]:
        return "", 0.0
    start = lane[1][place]
    return f"{lane[0][place]:.0f}", (now - start) / (lane[2][place] - start)


def _draw_box(axes: Axes, x: float, width: float, colour: str, share: float, text: str) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, 0), width, share, facecolor=colour, alpha=0.5))
    axes.add_patch(Rectangle((x, 0), width, 1, fill=False, edgecolor="#666666"))
    axes.text(x + width / 2, 0.5, text, ha="center", va="center", fontsize=12, color=_INK)


def _draw_steps(axes: Axes, spans: Mapping[str, Any]) -> None:
    """Draw all steps as one line; a gap is waiting."""
    _, starts, ends = spans["steps"]
    bars = [(start, end - start) for start, end in zip(starts, ends, strict=True)]
    axes.broken_barh(bars, (0, 1), facecolor=_ORANGE)
    axes.set_xlim(0, spans["seconds"])
    axes.set_yticks([])
    axes.set_xlabel("seconds; orange is a step, white is waiting", fontsize=12)
