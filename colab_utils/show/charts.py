"""Charts that make their point in five seconds: the title is the finding, built from the
numbers.
"""

import json
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from colab_utils.comparison import COURSE_STRATEGIES
from colab_utils.data.statistics import DatasetStatistics
from colab_utils.errors import ColabUtilsError, describe_error
from colab_utils.require import require_local_path
from colab_utils.show.pictures import PALETTE, make_figure

if TYPE_CHECKING:
    from colab_utils.comparison.compare import Comparison

COCO_IMAGES = 118_287  # to which hours are scaled
_CLASSES = 20  # that a chart has room for
_BLUE = PALETTE[0]
_ORANGE = PALETTE[1]
_RED = PALETTE[3]
_GREY = "#949494"
_INK = "#1a1a1a"
# epochs before Colab takes the machine, and its disk, away
_SESSION_EPOCHS = 3
_SESSIONS = 3
_TIE = 0.95  # closer than this, the order of two bars means nothing
_TIMES = "times as fast"
_Content = Mapping[str, Any]  # what a receipt's ``comparison.json`` holds, or one of its rows


def plot_first_seconds(
    rows: Mapping[str, Sequence[tuple[float, float]]],
    *,
    seconds: float | None = None,
    title: str = "",
    blue: Collection[str] = ("copy",),
    white: str = "waits",
) -> Figure:
    """When the step ran since its first batch was asked for: orange steps, and the white gaps in
    which it waited.

    Args:
        rows: when each step began and ended, in seconds since the first batch was asked for, by
            name; the first row stands on top.
        seconds: how much of it to draw; ``None`` draws as long as the shortest row of steps.
        title: the finding; by default how long the step waits, in the first row and in the last.
        blue: names of rows that are no steps, but copies or workers.
        white: what the gaps are.

    Raises:
        ColabUtilsError: there is no step to draw.

    Example:
        >>> figure = plot_first_seconds({"plain loop": [(2.4, 2.5), (4.9, 5.0)]})
        >>> figure.get_suptitle(), figure.axes[0].texts[0].get_text()
        ('The step waits 96% of the time', 'waits 96%, 2 batches')
    """
    steps = {name: spans for name, spans in rows.items() if name not in blue and len(spans)}
    if not steps:
        raise ColabUtilsError("expected steps to draw, found none: train for longer")
    shown_s = seconds or min(spans[-1][1] for spans in steps.values())
    ends_s = {name: min(shown_s, spans[-1][1]) for name, spans in steps.items()}
    worked_s = {name: np.diff(np.minimum(spans, shown_s)).sum() for name, spans in steps.items()}
    waits = {name: f"{max(0.0, 1 - worked_s[name] / ends_s[name]):.0%}" for name in steps}
    first = next(iter(waits))
    last = next(reversed(waits))
    against = f"({first}) → {waits[last]} ({last})" if len(waits) > 1 else "of the time"
    title = title or f"The step waits {waits[first]} {against}"
    figure, axis = _make_rows(title, rows, unit="seconds", height=1.35 + 0.62 * len(rows))
    for row, (name, spans) in enumerate(rows.items()):
        if name in steps:  # white in this frame is waiting
            axis.barh(row, ends_s[name], height=0.7, color="white", edgecolor=_GREY)
            done = sum(1 for _, end_s in spans if end_s <= shown_s)
            _write(axis, f"{white} {waits[name]}, {done:,} batch{'es' * (done != 1)}", shown_s, row)
        lengths = [(begin_s, end_s - begin_s) for begin_s, end_s in spans]
        bars = axis.broken_barh(
            lengths, (row - 0.35, 0.7), facecolors=_ORANGE if name in steps else _BLUE
        )
        bars.set(edgecolor="white", linewidth=min(0.5, 25 / max(1, len(spans))))
    axis.set_xlim(0, shown_s)
    return figure


def plot_bars(
    values: Mapping[str, float],
    *,
    title: str,
    unit: str,
    notes: Mapping[str, str] | None = None,
    spread: Mapping[str, tuple[float, float]] | None = None,
    highlight: Collection[str] = (),
    limit: tuple[float, str] | None = None,
    log: bool = False,
) -> Figure:
    """Horizontal bars, the first on top, each with its number in its end, or beside it where the
    bar is short.

    Args:
        values: length of each bar, by name.
        title: the finding.
        unit: of the values; stands under the axis.
        notes: a few words after a bar's number, by name.
        spread: lowest and highest repeat, by name, drawn as a thin line.
        highlight: the bars in colour, the others are grey; by default the longest.
        limit: a value nothing can pass and what it is, drawn as a dashed line.
        log: points on a logarithmic axis, for values above 0 that lie too far apart for bars.

    Raises:
        ColabUtilsError: there is nothing to draw.

    Example:
        >>> figure = plot_bars({"Drive": 16.0, "SSD": 480.0}, title="SSD reads faster", unit="images/s")
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['16', '480']
    """
    if not values:
        raise ColabUtilsError("expected values to draw, found none: measure at least one")
    notes = notes or {}
    spread = spread or {}
    lit = highlight or [max(values, key=lambda name: values[name])]
    figure, axis = _make_rows(
        title, values, unit=unit, height=1.7 + 0.72 * len(values) + (0.4 if limit else 0)
    )
    longest = max(
        *values.values(), *(high for _, high in spread.values()), limit[0] if limit else 0
    )
    letters = 80 - max(map(len, values))  # that a bar as long as the axis has room for
    for row, (name, value) in enumerate(values.items()):
        colour = _BLUE if name in lit else _GREY
        (low, high) = spread.get(name, (value, value))
        if log:
            axis.plot(value, row, "o", color=colour, markersize=14)
        else:
            axis.barh(row, value, height=0.62, color=colour)
        if high > low:
            axis.plot([low, high], [row, row], color=_INK, linewidth=1.5, marker="|", markersize=9)
        text = f"{_format_figure(value)}  {notes.get(name, '')}".rstrip()
        inside = low * letters > longest * (len(text) + 5) and not log
        ink = "white" if inside and name in lit else _INK
        _write(axis, text, low if inside else high, row, inside=inside, color=ink)
    if limit is not None:
        value, name = limit
        axis.axvline(value, color=_RED, linestyle="--", linewidth=2, zorder=0)
        axis.text(
            value,
            1.02,
            f"{name}: {_format_figure(value)}",
            fontsize=14,
            color=_RED,
            parse_math=False,
            ha="center",
            va="bottom",
            transform=axis.get_xaxis_transform(),
        )
    if log:
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(lambda value, _: _format_figure(value))
    else:
        axis.set_xlim(0, 1.02 * (longest or 1))
    return figure


def plot_statistics(statistics: DatasetStatistics) -> Figure:
    """A dataset's objects by class, size and shape, and its images by their objects.

    Args:
        statistics: of the report of `check_dataset`.
    """
    shown = dict([*statistics.classes.items()][:_CLASSES])
    left = (
        f", the first {_CLASSES} of {len(statistics.classes)}"
        if len(statistics.classes) > _CLASSES
        else ""
    )
    panels = {
        f"Objects of each class{left}": shown,
        "Objects by size of the mask": statistics.sizes,
        "Objects by width : height": statistics.aspect_ratios,
        "Images by number of objects": statistics.objects_per_image,
    }
    share = max(statistics.sizes.values()) / max(1, statistics.objects)
    size = max(statistics.sizes, key=lambda name: statistics.sizes[name]).partition(",")[0]
    title = (
        f"{statistics.objects:,} objects of {len(statistics.classes)} classes, {share:.0%} of "
        f"them {size}"
    )
    figure = make_figure(title, width=12, height=7.2)
    axes = figure.subplot_mosaic("AB;AC;AD").values()
    for axis, (name, values) in zip(axes, panels.items(), strict=True):
        _lay_rows(axis, [textwrap.shorten(one, 28) for one in values], fontsize=12)
        bars = axis.barh(range(len(values)), [*values.values()], color=_BLUE)
        axis.bar_label(bars, fmt="{:,.0f}", padding=4, fontsize=12)
        axis.set_title(name, loc="left", fontsize=14)
        axis.set(xticks=[], xlim=(0, 1.2 * max([1, *values.values()])))
        axis.spines["bottom"].set_visible(False)
    return figure


def plot_comparison(comparison: "Comparison | _Content") -> Figure:
    """Images per second of every strategy, how long its step waits, and the speed of the step
    itself as a line.

    The five strategies of the course are named as its steps. What is not timed yet has no bar.

    Args:
        comparison: from `compare`, or what a receipt's ``comparison.json`` holds.

    Raises:
        ColabUtilsError: no strategy was timed.
    """
    content = _read(comparison)
    timed = content["timed"].values()
    limit = max(row["images_per_second"] / max(1 - row["wait_share"], 1e-3) for row in timed)
    notes = dict[str, str]()
    spread = dict[str, tuple[float, float]]()
    for row in timed:
        notes[row["label"]] = f"waits {row['wait_share']:.0%}" + (
            "" if row["comparable"] else ", NOT the same data"
        )
        spread[row["label"]] = (
            min(row["repeats_images_per_second"]),
            max(row["repeats_images_per_second"]),
        )
    figure = plot_bars(
        {row["label"]: row["images_per_second"] or 0.0 for row in content["rows"].values()},
        title=describe_gain(content),
        unit=f"images/s, step {content['step']}, batches of {content['batch_size']}",
        notes=notes,
        spread=spread,
        highlight=[_find_gain(content)[1]["label"]],
        limit=(limit, "the step alone"),
    )
    for row, text in zip(content["strategies"], figure.axes[0].texts, strict=False):
        if row["name"] not in content["timed"]:
            text.set_text("not timed" if row["note"] else "…")
    return figure


def plot_cold_start(comparison: "Comparison | _Content", *, seconds: float | None = None) -> Figure:
    """`plot_first_seconds` of the cold runs, with nothing in a cache; by default as long as all of
    them ran.

    Of more than five strategies, those of the course are drawn.

    Raises:
        ColabUtilsError: no strategy was timed.
    """
    timed = _read(comparison)["timed"]
    course = (
        [name for name in timed if name in COURSE_STRATEGIES]
        if len(timed) > len(COURSE_STRATEGIES)
        else []
    )
    drawn = [timed[name] for name in course or timed]
    all_s = min(row["timeline"][-1][1] for row in drawn)
    shown_s = seconds or all_s // 1 or all_s
    done = [
        f"{sum(ended <= shown_s for _, ended in row['timeline'])} with {row['title']}"
        for row in drawn
    ]
    title = (
        f"Batches in the first {_format_figure(shown_s)} seconds: "
        f"{', '.join(dict.fromkeys((done[0], done[-1])))}"
    )
    return plot_first_seconds(
        {row["label"]: row["timeline"] for row in drawn}, seconds=shown_s, title=title
    )


def plot_epochs(comparison: "Comparison | _Content") -> Figure:
    """Hours since the beginning over the epochs of a dataset as large as COCO, in sessions of three
    epochs.

    What was measured is scaled to COCO's images. Converting counts once, copying in each session.
    Drawn are the first way, the workers, and `make_loader`, or the way that ends first where it was
    not timed.

    Args:
        comparison: from `compare`, or what a receipt's ``comparison.json`` holds.

    Raises:
        ColabUtilsError: no strategy was timed.
    """
    rows = _read(comparison)["fair"]
    lines = {name: _add_up(row, _SESSIONS) for name, row in rows.items()}
    first = next(iter(rows))
    total = {name: float(hours[-1]) for name, (_, hours) in lines.items()}
    best = "packed" if "packed" in total else min(total, key=lambda name: total[name])
    drawn = [name for name in dict.fromkeys((first, "dataloader", best)) if name in total]
    rival = min(
        (name for name in drawn if name != best), key=lambda name: total[name], default=best
    )
    epochs = _SESSION_EPOCHS * _SESSIONS
    spent = {name: f"{_format_figure(hours)} hours" for name, hours in total.items()}
    title = (
        f"{epochs} epochs of {COCO_IMAGES:,} images: {spent[best]}, {spent[rival]} with "
        f"{rows[rival]['title']}"
    )
    if (paid := _find_pay_back(rows[best], rows[rival])) is not None:
        title = (
            f"Paid back {'in the first epoch' if paid <= 1 else f'after {paid:.1f} epochs'}. "
            f"{title}"
        )
    figure = make_figure(title, width=12, height=5.5)
    axis = figure.add_subplot()
    label_at = 0.0
    for name in sorted(drawn, key=lambda name: total[name]):
        colour = _BLUE if name == best else _GREY if name == first else _ORANGE
        axis.plot(*lines[name], color=colour, linewidth=4)
        # names do not overlap
        label_at = max(total[name], label_at + 0.08 * max(total[name] for name in drawn))
        text = f" {rows[name]['label']}: {spent[name]}"
        axis.text(epochs, label_at, text, fontsize=15, va="center", color=_INK, parse_math=False)
    for session in range(1, _SESSIONS):
        axis.axvline(session * _SESSION_EPOCHS, color=_GREY, linewidth=1, linestyle=":")
    axis.set(xlim=(0, epochs), ylim=(0, None), xticks=range(epochs + 1))
    axis.set_xlabel("epochs; at a dotted line a new session copies again", fontsize=14)
    axis.set_ylabel("hours", fontsize=14)
    axis.tick_params(labelsize=12)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def plot_receipts(receipts: Sequence[str | Path]) -> Figure:
    """How many times as fast each machine trains, and how long its step waits before and after; the
    fastest first.

    Args:
        receipts: ``comparison.json`` files of many machines.

    Raises:
        ColabUtilsError: no file, or one that is no receipt.
    """
    found = sorted(read_receipts(receipts), key=lambda line: -line[_TIMES])
    lines = {
        f"{number}. {line['receipt']}: {line['machine']}": line
        for number, line in enumerate(found, start=1)
    }
    before, after, times = (
        median(line[key] for line in found) for key in ("waits before", "waits after", _TIMES)
    )
    title = f"{len(found)} receipts: the step waits {before:.0%} → {after:.0%} of the time"
    return plot_bars(
        {name: line[_TIMES] for name, line in lines.items()},
        title=f"{title}, and trains {_format_figure(times)} times as fast (medians)",
        unit="times as many images/s as before",
        notes={
            name: f"waits {line['waits before']:.0%} → {line['waits after']:.0%}"
            for name, line in lines.items()
        },
        highlight=[*lines],
    )


def read_receipts(receipts: Sequence[str | Path]) -> list[dict[str, Any]]:
    """`summarise_receipt` of each ``comparison.json``; a receipt has the name of its file, or of
    its folder.

    Raises:
        ColabUtilsError: no file, or one that is no receipt.
    """
    found = list[dict[str, Any]]()
    place = Path()
    files = [require_local_path(receipt) for receipt in receipts]
    try:
        for place in [file.absolute() for file in files or [Path("no file")]]:
            name = place.parent.name if place.stem == "comparison" else place.stem
            found.append(
                {
                    "receipt": name,
                    **summarise_receipt(json.loads(place.read_text(encoding="utf-8"))),
                }
            )
        return found
    except (
        ColabUtilsError,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        none = f"found {place} ({describe_error(error)}): name what compare wrote"
        raise ColabUtilsError(f"expected receipts (comparison.json), {none}") from None


def summarise_receipt(comparison: "Comparison | _Content") -> dict[str, Any]:
    """A line for the class sheet: the machine, and the first way beside the best way.

    Raises:
        ColabUtilsError: no strategy was timed.
    """
    content = _read(comparison)
    machine = content["machine"]
    (before, after) = _find_gain(content)
    line = {
        "machine": f"{machine['gpu'] or 'no GPU'}, {machine['cores']} cores",
        "step": content["step"],
    }
    line["drive"] = content["drive"].partition(",")[0]
    for when, row in (("before", before), ("after", after)):
        line |= {when: row["title"], f"waits {when}": round(row["wait_share"], 3)}
        line |= {f"images/s {when}": round(row["images_per_second"], 1)}
    return line | {_TIMES: round(after["images_per_second"] / before["images_per_second"], 1)}


def describe_gain(comparison: "Comparison | _Content") -> str:
    """The finding in one sentence: how long the step waits before and after, and how many times as
    fast it trains.

    Raises:
        ColabUtilsError: no strategy was timed.
    """
    now, best = _find_gain(_read(comparison))
    waits = f"The step waits {now['wait_share']:.0%}"
    gain = best["images_per_second"] / now["images_per_second"]
    if gain < 1.1:
        return f"{waits} of the time with the {now['title']}" + (
            "" if now is best else ": no way is 10% faster"
        )
    times = f"{_format_figure(gain)} times as many images/s as the {now['title']}"
    return f"{waits} → {best['wait_share']:.0%} of the time, and trains {times}"


def _find_gain(content: _Content) -> tuple[_Content, _Content]:
    """The first way that delivers the same samples, and the best; of those that tie, `make_loader`
    or the last.
    """
    fair = content["fair"]
    least = _TIE * max(row["images_per_second"] for row in fair.values())
    best = [name for name, row in fair.items() if row["images_per_second"] >= least]
    return next(iter(fair.values())), fair["packed" if "packed" in best else best[-1]]


def _read(comparison: "Comparison | _Content") -> _Content:
    """The comparison as ``comparison.json`` has it, and its strategies by name, each with a
    ``label`` for charts.

    ``timed`` are those that were timed; ``fair``, of these, those that deliver the same samples, or
    else all. In the course each stands on top of the one before.
    """
    content = dict(comparison) if isinstance(comparison, Mapping) else asdict(comparison)
    rows = {row["name"]: {**row, "label": row["title"]} for row in content["strategies"]}
    content["rows"] = rows
    if tuple(rows) == COURSE_STRATEGIES:
        for name in COURSE_STRATEGIES[1:]:
            rows[name]["label"] = f"+ {rows[name]['title']}"
    timed = {name: row for name, row in rows.items() if row["images_per_second"]}
    content["timed"] = timed
    if not timed:
        raise ColabUtilsError(
            "expected a strategy that was timed, found none: compare at least one"
        )
    content["fair"] = {name: row for name, row in timed.items() if row["comparable"]} or timed
    return content


def _add_up(row: _Content, sessions: int) -> tuple[np.ndarray, np.ndarray]:
    """Epochs done, and the hours since the beginning, at each corner of a strategy's line."""
    later = _SESSION_EPOCHS - 1
    ms = 1000 / row["images_per_second"]
    session = [(0, row["session_ms_per_image"]), (1, row["cold_ms_per_image"]), (later, later * ms)]
    epochs, spent_ms = np.cumsum([(0, row["once_ms_per_image"]), *session * sessions], axis=0).T
    return epochs, spent_ms * COCO_IMAGES / 3.6e6


def _find_pay_back(own: _Content, other: _Content) -> float | None:
    """Epochs after which one strategy stays ahead of the other; None where it does not, or is from
    the start.
    """
    at = np.arange(0, 100 * _SESSION_EPOCHS + 0.005, 0.01)
    behind = np.flatnonzero(
        np.interp(at, *_add_up(own, 100)) >= np.interp(at, *_add_up(other, 100))
    )
    return float(at[behind[-1] + 1]) if len(behind) > 0 and behind[-1] + 1 < len(at) else None


def _write(
    axis: Axes, text: str, x: float, y: float, *, inside: bool = False, color: str = _INK
) -> None:
    """Text that ends left of a place ``inside`` a bar, or begins right of it, where no line strikes
    it through.
    """
    axis.annotate(
        text,
        (x, y),
        xytext=(-10 if inside else 10, 0),
        textcoords="offset points",
        va="center",
        fontsize=15,
        ha="right" if inside else "left",
        color=color,
        parse_math=False,
        annotation_clip=False,
        bbox=None if inside else {"facecolor": "white", "edgecolor": "none", "pad": 1},
    )


def _lay_rows(axis: Axes, names: Collection[str], *, fontsize: float) -> None:
    """A row for each name, the first on top, without what frames the drawing."""
    axis.set_yticks(range(len(names)), [*names], fontsize=fontsize, parse_math=False)
    axis.set_ylim(len(names) - 0.45, -0.55)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _make_rows(
    title: str, names: Collection[str], *, unit: str, height: float
) -> tuple[Figure, Axes]:
    """A figure with a row for each name."""
    figure = make_figure(title, width=12, height=height)
    axis = figure.add_subplot()
    _lay_rows(axis, names, fontsize=15)
    axis.set_xlabel(unit, fontsize=14, parse_math=False)
    axis.tick_params(axis="x", labelsize=12)
    return figure, axis


def _format_figure(value: float) -> str:
    """A figure as it is written at a bar's end.

    Example:
        >>> _format_figure(1234.5), _format_figure(0.1234)
        ('1,234', '0.12')
    """
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.2g}"
