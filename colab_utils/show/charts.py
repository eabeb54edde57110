"""Charts that are understood in five seconds: the title states the finding, with its numbers."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from colab_utils.errors import ColabUtilsError
from colab_utils.show.pictures import PALETTE, DescribedFigure, make_figure
from colab_utils.units import format_count

# The start and the end of each step, in seconds.
Spans = Sequence[tuple[float, float]]
BLUE = PALETTE[0]
ORANGE = PALETTE[1]
GREY = "#949494"
INK = "#1a1a1a"
_RED = PALETTE[3]


def plot_first_seconds(
    rows: Mapping[str, Spans],
    *,
    seconds: float | None = None,
    title: str = "",
    unit: str = "seconds",
) -> DescribedFigure:
    """Draw when the training step ran and when it waited, since the first batch was requested.

    Steps are orange. In the white gaps, the step waited. The text under the axis says so.

    Args:
        rows: Dict from the name of a row to the start and end of each of its steps, in seconds
            since the first batch was requested. The first row is on top.
        seconds: Seconds to draw. None draws until the last step ends. The percentage beside a row
            is the part of the row's drawn time in which the step waited. Default: None.
        title: Title of the chart. "" makes a title that says how long the step waits in the first
            row and in the last one. Default: "".
        unit: Text under the axis. It may also say that the step is emulated. Default: "seconds".

    Raises:
        ColabUtilsError: There is no step to draw.

    Example:
        >>> figure = plot_first_seconds({"plain loop": [(2.4, 2.5), (4.9, 5.0)]})
        >>> figure.get_suptitle(), figure.axes[0].texts[0].get_text()
        ('The step waits about 96% (plain loop)', 'waits 96%, 2 batches')
    """
    if not any(map(len, rows.values())):
        raise ColabUtilsError("There are no steps to draw. Train for longer.")
    shown_s = seconds or max(end_s for spans in rows.values() for _, end_s in spans)
    ends_s = dict[str, float]()
    waits = dict[str, str]()
    for name, spans in rows.items():
        # A row without steps waits to the end.
        ends_s[name] = min(shown_s, spans[-1][1]) if len(spans) else shown_s
        worked_s = np.diff(np.minimum(spans, shown_s)).sum()
        waits[name] = f"{max(0.0, 1 - worked_s / ends_s[name]):.0%}"
    # The title says how long the step waits in the first row, and in the last one.
    shares = [f"{share} ({name})" for name, share in waits.items()]
    figure, axis = _make_rows(
        title or f"The step waits about {' → '.join(shares[:: max(1, len(shares) - 1)])}",
        rows,
        unit=f"{unit} (orange: the step runs, white: it waits)",
        height=1.35 + 0.62 * len(rows),
    )
    for row, (name, spans) in enumerate(rows.items()):
        lengths = [(begin_s, end_s - begin_s) for begin_s, end_s in spans]
        # Without a line, the shortest steps could not be seen.
        axis.broken_barh(lengths, (row - 0.35, 0.7), color=ORANGE, linewidth=0.5)
        # The white area inside this frame shows when the step waited.
        axis.barh(row, ends_s[name], height=0.7, fill=False, edgecolor=GREY)
        batches = format_count(count_batches(spans, shown_s), "batch", "batches")
        text = f"waits {waits[name]}, {batches}"
        _write(axis, text, shown_s, row)
        figure.words.append(f"{name}: {text}")
    axis.set_xlim(0, shown_s)
    return figure


def count_batches(spans: Spans, seconds: float) -> int:
    """Return the number of steps that ended in the first ``seconds`` seconds."""
    return sum(end_s <= seconds for _, end_s in spans)


def plot_bars(
    values: Mapping[str, float | None],
    *,
    title: str,
    unit: str,
    notes: Mapping[str, str] | None = None,
    spread: Mapping[str, tuple[float, float]] | None = None,
    highlight: Collection[str] = (),
    limit: tuple[float, str] | None = None,
    log: bool = False,
) -> DescribedFigure:
    """Draw horizontal bars, each with its number. The first bar is on top.

    Args:
        values: Dict from the name of a bar to its length. None draws no bar, and only its note.
        title: Title, which states the finding.
        unit: Unit of the values, written under the axis.
        notes: Dict from the name of a bar to a few words after its number. Default: None.
        spread: Dict from the name of a bar to the lowest and the highest value that its repeats
            gave, drawn as a thin line. Default: None.
        highlight: Names of the bars that have a colour. The others are grey. Default: the longest
            bar.
        limit: A value that no bar can pass, and its name, drawn as a dashed line. Default: None.
        log: Draw points on a logarithmic axis, for values above 0 that differ too much for bars.
            Default: False.

    Raises:
        ColabUtilsError: There is nothing to draw.

    Example:
        >>> rates = {"Drive": 16.0, "SSD": 480.0}
        >>> figure = plot_bars(rates, title="SSD reads faster", unit="images/s")
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['16', '480']
    """
    if not values:
        raise ColabUtilsError("There are no values to draw. Measure at least one.")
    lengths = {name: value or 0.0 for name, value in values.items()}
    lit = highlight or [max(lengths, key=lengths.__getitem__)]
    figure, axis = _make_rows(title, values, unit=unit, height=2 + 0.72 * len(values))
    for row, (name, length) in enumerate(lengths.items()):
        colour = BLUE if name in lit else GREY
        low, high = (spread or {}).get(name, (length, length))
        if log:
            axis.plot(length, row, "o", color=colour, markersize=14)
        else:
            axis.barh(row, length, height=0.62, color=colour)
        if high > low:
            axis.plot([low, high], [row, row], "|-", color=INK)
        number = "" if values[name] is None else format_figure(length)
        text = f"{number}  {(notes or {}).get(name, '')}".strip()
        figure.words.append(f"{name}: {text}")
        _write(axis, text, high, row)
    if limit is not None:
        text = f"{limit[1]}: {format_figure(limit[0])}"
        axis.axvline(limit[0], color=_RED, linestyle="--", linewidth=2, zorder=0)
        axis.set_title(text, loc="right", fontsize=14, color=_RED, parse_math=False)
        figure.words.append(text)
    if log:
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(lambda value, _: format_figure(value))
    else:
        axis.set_xlim(0, 1.02 * axis.dataLim.x1 or 1)
    return figure


def _write(axis: Axes, text: str, x: float, y: float) -> None:
    """Write text on the right of the point (x, y). No line crosses it."""
    axis.annotate(
        text,
        (x, y),
        xytext=(10, 0),
        textcoords="offset points",
        va="center",
        fontsize=15,
        color=INK,
        parse_math=False,
        annotation_clip=False,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )


def _make_rows(
    title: str, names: Collection[str], *, unit: str, height: float
) -> tuple[DescribedFigure, Axes]:
    """Make a figure with a row for each name, the first on top, and without a frame."""
    figure = make_figure(title, width=12, height=height)
    axis = figure.add_subplot()
    axis.set_yticks(range(len(names)), [*names], fontsize=15, parse_math=False)
    axis.set_ylim(len(names) - 0.45, -0.55)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.set_xlabel(unit, fontsize=14, parse_math=False)
    axis.tick_params(axis="x", labelsize=12)
    return figure, axis


def format_figure(value: float) -> str:
    """Format a number as it is written beside a bar.

    Example:
        >>> format_figure(1234.5), format_figure(0.1234)
        ('1,234', '0.12')
    """
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.2g}"
