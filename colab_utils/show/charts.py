"""Charts that make their point in five seconds: the title is the finding, built from the numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from colab_utils.errors import ColabUtilsError
from colab_utils.show.pictures import PALETTE, make_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from colab_utils.diagnosis.diagnose import Diagnosis
    from colab_utils.diagnosis.simulator import Simulation
    from colab_utils.loading.arriving import Arrival

__all__ = [
    "draw_lanes",
    "format_figure",
    "label_axes",
    "plot_arrival",
    "plot_bars",
    "plot_stages",
    "plot_timeline",
    "plot_training",
]

_BLUE, _ORANGE, _RED, _GREY, _INK = PALETTE[0], PALETTE[1], PALETTE[3], "#B8B8B8", "#1a1a1a"


def plot_bars(
    values: Mapping[str, float],
    *,
    title: str,
    unit: str,
    notes: Mapping[str, str] | None = None,
    spread: Mapping[str, tuple[float, float]] | None = None,
    highlight: str | Collection[str] = (),
    limit: tuple[float, str] | None = None,
) -> Figure:
    """Horizontal bars, the first on top, each with its number written at its end.

    Args:
        values: length of each bar, by name.
        title: the finding.
        unit: of the values; stands under the axis.
        notes: a few words after a bar's number, by name.
        spread: lowest and highest repeat, by name, drawn as a thin line.
        highlight: the bar, or bars, in colour, the others are grey; by default the longest.
        limit: a value nothing can pass and what it is, drawn as a dashed line.

    Raises:
        ColabUtilsError: there is nothing to draw.

    Example:
        >>> figure = plot_bars({"Drive": 16.0, "SSD": 480.0}, title="SSD reads faster", unit="images/s")
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['16', '480']
    """
    if not values:
        raise ColabUtilsError("expected values to draw, found none: measure at least one")
    notes, spread = notes or {}, spread or {}
    lit = {highlight} if isinstance(highlight, str) else set(highlight) or {max(values, key=lambda name: values[name])}
    figure, axis = _make_rows(title, values, unit=unit, height=1.7 + 0.72 * len(values) + (0.4 if limit else 0))
    longest = max([*values.values(), *(high for _, high in spread.values()), limit[0] if limit else 0])
    for row, (name, value) in enumerate(values.items()):
        axis.barh(row, value, height=0.62, color=_BLUE if name in lit else _GREY)
        low, high = spread.get(name, (value, value))
        if high > low:
            axis.plot([low, high], [row, row], color=_INK, linewidth=1.5, marker="|", markersize=9)
        text = f"{format_figure(value)}  {notes.get(name, '')}".rstrip()
        axis.text(
            max(value, high) + longest * 0.012, row, text, va="center", fontsize=15, color=_INK, parse_math=False,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip
    if limit is not None:
        axis.axvline(limit[0], color=_RED, linestyle="--", linewidth=2, zorder=0)
        axis.annotate(
            f"{limit[1]}: {format_figure(limit[0])}", (limit[0], 1), xycoords=("data", "axes fraction"), fontsize=14,
            xytext=(-4, 4), textcoords="offset points", ha="right", va="bottom", color=_RED, parse_math=False,
        )  # fmt: skip
    axis.set_xlim(0, (longest or 1) * (1.32 if notes else 1.12))
    return figure


def plot_stages(diagnosis: Diagnosis) -> Figure:
    """What each stage of loading one image takes, in milliseconds, and the step beside it.

    The stages are one worker's time; workers share it among them. The step is one process's.

    Args:
        diagnosis: from `diagnose`.
    """
    mean_ms = {stage.name: stage.mean_ms or stage.median_ms for stage in diagnosis.stages}
    step_ms, wait_ms = mean_ms.pop("step", None), mean_ms.pop("wait", 0.0)
    loading = mean_ms or {"wait": wait_ms}
    largest = max(loading, key=lambda name: loading[name])
    title = f"The step waits {diagnosis.stall_share:.0%} of the time"
    if step_ms is None:
        title = f"The loader alone gives {format_figure(diagnosis.images_per_second)} images/s"
    if mean_ms:
        title += f"; {largest} is {loading[largest] / max(sum(loading.values()), 1e-9):.0%} of loading an image"
    bars = loading if step_ms is None else {**loading, "step": step_ms}
    figure = plot_bars(
        bars,
        title=title,
        unit="mean milliseconds per image (thin line: to the 95th percentile)",
        notes={"step": f"({diagnosis.step})" if diagnosis.step.startswith("emulated") else ""},
        spread={stage.name: (bars[stage.name], stage.p95_ms) for stage in diagnosis.stages if stage.name in bars},
        highlight=largest,
    )
    if step_ms is not None:
        figure.axes[0].patches[len(bars) - 1].set_color(_ORANGE)
    return figure


def plot_timeline(simulation: Simulation, *, seconds: float | None = None) -> Figure:
    """What every worker and the step did, second by second; white gaps are time spent waiting.

    Args:
        simulation: from `simulate`.
        seconds: how much of it to draw; ``None`` draws all.

    Example:
        >>> from colab_utils.diagnosis.simulator import simulate
        >>> figure = plot_timeline(simulate(workers=2, load_s=0.4, step_s=0.1, seconds=3))
        >>> figure.get_suptitle()
        'With 2 workers the step waits 53% of the time'
    """
    workers = f"{simulation.workers} worker" + ("" if simulation.workers == 1 else "s")
    title = f"With {workers} the step waits {simulation.stall_share:.0%} of the time"
    names = [f"worker {n}" if simulation.workers else "loading" for n in range(len(simulation.loads))]
    shown_s = seconds or simulation.seconds
    lanes = {
        name: [(start, end - start) for start, end in zip(trace.start_s, trace.end_s, strict=True) if start < shown_s]
        for name, trace in zip([*names, "step"], [*simulation.loads, simulation.steps], strict=True)
    }
    return draw_lanes(title, lanes, seconds=shown_s)


def plot_arrival(arrival: Arrival, steps: Sequence[tuple[float, float]]) -> Figure:
    """The copy of each shard above the training steps: what was trained before the last shard had arrived.

    Args:
        arrival: of an `ArrivingShards`.
        steps: when each step began and ended, by ``time.perf_counter``.

    Example:
        >>> from types import SimpleNamespace
        >>> arrival = SimpleNamespace(began_s=10.0, spans_s={0: (0.0, 1.0), 1: (1.0, 4.0)})
        >>> plot_arrival(arrival, [(11.5, 12.0), (12.0, 12.5)]).get_suptitle()
        'Training began after 1.5 s, 2.5 s before the last shard was here'
    """
    trained = [(begin_s - arrival.began_s, end_s - begin_s) for begin_s, end_s in steps]
    copied = sorted((begin_s, end_s - begin_s) for begin_s, end_s in arrival.spans_s.values() if end_s > 0)
    last_s, first_s = max((begin_s + took_s for begin_s, took_s in copied), default=0.0), trained[0][0]
    title = f"Training began after {first_s:.1f} s, {last_s - first_s:.1f} s before the last shard was here"
    if last_s < first_s:
        title = "The shards were here before the training began"
    return draw_lanes(title, {"copy": copied, "training": trained})


def draw_lanes(
    title: str,
    lanes: Mapping[str, Sequence[tuple[float, float]]],
    *,
    seconds: float | None = None,
    lit: int = 1,
) -> Figure:
    """A row of bars (begin and length, seconds) for each name, the last ``lit`` of them in orange."""
    figure, axis = _make_rows(title, lanes, unit="seconds", height=1.6 + 0.5 * len(lanes))
    for row, spans in enumerate(lanes.values()):
        colour = _BLUE if row < len(lanes) - lit else _ORANGE
        axis.broken_barh(spans, (row - 0.35, 0.7), facecolors=colour, edgecolors="white", linewidth=0.8)
    axis.set_xlim(0, seconds)
    return figure


def plot_training(points: Sequence[Any], *, window: int = 10, note: str = "") -> Figure:
    """The loss at every step, and its running mean over ``window`` steps, which is what you look at.

    Args:
        points: with ``step`` and ``loss``: `TrainReport.losses`.
        window: steps in the running mean; less where there are few points.
        note: a few words for the end of the title.

    Raises:
        ColabUtilsError: there are no points.

    Example:
        >>> from types import SimpleNamespace
        >>> figure = plot_training([SimpleNamespace(step=n, loss=4 / n) for n in range(1, 41)])
        >>> figure.get_suptitle()
        'The loss fell from 1.17 to 0.11 in 40 steps'
    """
    import numpy as np

    if not points:
        raise ColabUtilsError("expected the losses of a training, found none: train at least one step")
    steps, losses = [point.step for point in points], np.array([point.loss for point in points], float)
    width = max(1, min(window, len(losses) // 2))
    mean = np.convolve(losses, np.full(width, 1 / width), mode="valid")
    title = f"The loss is {mean[-1]:.2f} after one step"
    if len(losses) > 1:
        verb = "fell" if mean[-1] < mean[0] else "did not fall: it went"
        title = f"The loss {verb} from {mean[0]:.2f} to {mean[-1]:.2f} in {steps[-1] - steps[0] + 1:,} steps"
    figure = make_figure(title + (f", {note}" if note else ""), width=12, height=5.2)
    axis = figure.add_subplot()
    axis.plot(steps, losses, color=_GREY, linewidth=1.5, marker="o" if len(losses) < 40 else "", markersize=4)
    axis.plot(steps[width - 1 :], mean, color=_BLUE, linewidth=3.5, label=f"mean of {width} steps")
    axis.legend(fontsize=14, frameon=False)
    label_axes(axis, "step", "loss")
    return figure


def label_axes(axis: Axes, across: str, up: str) -> None:
    """Name both axes, begin the upright one at 0, and leave out what frames the drawing."""
    axis.set_ylim(bottom=0)
    axis.set_xlabel(across, fontsize=14, parse_math=False)
    axis.set_ylabel(up, fontsize=14)
    axis.tick_params(labelsize=12)
    axis.spines[["top", "right"]].set_visible(False)


def _make_rows(title: str, names: Collection[str], *, unit: str, height: float) -> tuple[Figure, Axes]:
    """A figure with a row for each name, the first on top."""
    figure = make_figure(title, width=12, height=height)
    axis = figure.add_subplot()
    label_axes(axis, unit, "")
    axis.spines["left"].set_visible(False)
    axis.set_yticks(range(len(names)), [*names], fontsize=15, parse_math=False)
    axis.set_ylim(len(names) - 0.45, -0.55)
    axis.tick_params(axis="y", length=0)
    return figure, axis


def format_figure(value: float) -> str:
    """A figure as it is written at a bar's end.

    Example:
        >>> format_figure(1234.5), format_figure(0.1234)
        ('1,234', '0.12')
    """
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.2g}"
