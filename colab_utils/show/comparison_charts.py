"""Charts of a comparison: images a second, the first seconds, and hours over the epochs."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes

from colab_utils.comparison import COURSE_STRATEGIES, LEAST_NOISE, measure_spread
from colab_utils.errors import ColabUtilsError
from colab_utils.show.charts import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    format_figure,
    plot_bars,
    plot_first_seconds,
)
from colab_utils.show.pictures import DescribedFigure, make_figure

if TYPE_CHECKING:
    from colab_utils.comparison.compare import Comparison

# Hours are scaled to so many images.
COCO_IMAGES = 118_287
# Epochs before Colab takes the machine, and its disk, away.
_SESSION_EPOCHS = 3
_SESSIONS = 3
_EPOCHS = _SESSIONS * _SESSION_EPOCHS
# What a receipt's ``comparison.json`` holds, or one of its rows.
Content = Mapping[str, Any]


def plot_comparison(comparison: "Comparison | Content") -> DescribedFigure:
    """Images per second of every strategy, how long its step waits, and the speed of the step
    itself as a line.

    The five strategies of the course are named as its steps. What is not timed yet has no bar.

    Args:
        comparison: from `compare`, or what a receipt's ``comparison.json`` holds.

    Raises:
        ColabUtilsError: no strategy was timed.
    """
    content = read_comparison(comparison)
    timed = content["timed"].values()
    limit = max(row["images_per_second"] / max(1 - row["wait_share"], 1e-3) for row in timed)
    notes = dict[str, str]()
    spread = dict[str, tuple[float, float]]()
    for row in timed:
        note = f"waits {row['wait_share']:.0%}"
        if not row["comparable"]:
            note += ", NOT the same data"
        repeats = row["repeats_images_per_second"]
        if measure_spread(repeats) > LEAST_NOISE:
            note += f", repeats differ by {measure_spread(repeats):.0%}"
        notes[row["label"]] = note
        spread[row["label"]] = (min(repeats), max(repeats))
    figure = plot_bars(
        {row["label"]: row["images_per_second"] or 0.0 for row in content["rows"].values()},
        title=describe_gain(content),
        unit=f"images/s, step {content['step']}, batches of {content['batch_size']}",
        notes=notes,
        spread=spread,
        highlight=[find_gain(content)[1]["label"]],
        limit=(limit, "the step alone"),
    )
    for row, text in zip(content["strategies"], figure.axes[0].texts, strict=False):
        if row["name"] not in content["timed"]:
            text.set_text("not timed" if row["note"] else "…")
    return figure


def plot_cold_start(
    comparison: "Comparison | Content", *, seconds: float | None = None
) -> DescribedFigure:
    """`plot_first_seconds` of the cold runs, with nothing in a cache; by default as long as all of
    them ran.

    Of more than five strategies, those of the course are drawn.

    Raises:
        ColabUtilsError: no strategy was timed.
    """
    timed = read_comparison(comparison)["timed"]
    names = list(timed)
    course = [name for name in names if name in COURSE_STRATEGIES]
    if course and len(names) > len(COURSE_STRATEGIES):
        names = course
    drawn = [timed[name] for name in names]
    all_s = min(row["timeline"][-1][1] for row in drawn)
    shown_s = seconds or math.floor(all_s) or all_s
    batches = dict[str, None]()
    for row in (drawn[0], drawn[-1]):
        count = sum(end_s <= shown_s for _, end_s in row["timeline"])
        batches[f"{count} with {row['title']}"] = None
    title = f"Batches in the first {format_figure(shown_s)} seconds: {', '.join(batches)}"
    rows = {row["label"]: row["timeline"] for row in drawn}
    return plot_first_seconds(rows, seconds=shown_s, title=title)


def plot_epochs(comparison: "Comparison | Content") -> DescribedFigure:
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
    rows = read_comparison(comparison)["fair"]
    lines = {name: _add_up(row, _SESSIONS) for name, row in rows.items()}
    first = next(iter(rows))
    total = {name: float(hours[-1]) for name, (_, hours) in lines.items()}
    best = "packed" if "packed" in total else min(total, key=lambda name: total[name])
    drawn = [name for name in dict.fromkeys((first, "dataloader", best)) if name in total]
    rivals = [name for name in drawn if name != best]
    rival = min(rivals, key=lambda name: total[name], default=best)
    spent = {name: f"{format_figure(hours)} hours" for name, hours in total.items()}
    title = (
        f"{_EPOCHS} epochs of {COCO_IMAGES:,} images: {spent[best]}, {spent[rival]} with "
        f"{rows[rival]['title']}"
    )
    figure, axis = _make_epochs(_describe_pay_back(rows[best], rows[rival]) + title)
    label_at = 0.0
    for name in sorted(drawn, key=lambda name: total[name]):
        colour = ORANGE
        if name == best:
            colour = BLUE
        elif name == first:
            colour = GREY
        axis.plot(*lines[name], color=colour, linewidth=4)
        # Names do not overlap.
        label_at = max(total[name], label_at + 0.08 * max(total[name] for name in drawn))
        text = f" {rows[name]['label']}: {spent[name]}"
        axis.text(
            _EPOCHS,
            label_at,
            text,
            fontsize=15,
            va="center",
            color=INK,
            parse_math=False,
        )
    axis.set_ylim(0, None)
    return figure


def _make_epochs(title: str) -> tuple[DescribedFigure, Axes]:
    """Return a figure of hours over epochs, without lines."""
    figure = make_figure(title, width=12, height=5.5)
    axis = figure.add_subplot()
    for session in range(1, _SESSIONS):
        axis.axvline(
            session * _SESSION_EPOCHS,
            color=GREY,
            linewidth=1,
            linestyle=":",
        )
    axis.set(xlim=(0, _EPOCHS), xticks=range(_EPOCHS + 1))
    axis.set_xlabel("epochs; at a dotted line a new session copies again", fontsize=14)
    axis.set_ylabel("hours", fontsize=14)
    axis.tick_params(labelsize=12)
    axis.spines[["top", "right"]].set_visible(False)
    return figure, axis


def describe_gain(comparison: "Comparison | Content") -> str:
    """The finding in one sentence: how long the step waits before and after, and how many times as
    fast it trains; after a warning where this machine was busy with other work.

    Raises:
        ColabUtilsError: no strategy was timed.
    """
    content = read_comparison(comparison)
    return f"{content.get('busy', '')} {_describe_gain(*find_gain(content))}".strip()


def _describe_gain(now: Content, best: Content) -> str:
    waits = f"The step waits {now['wait_share']:.0%}"
    gain = best["images_per_second"] / now["images_per_second"]
    if gain < 1.1:
        finding = f"{waits} of the time with the {now['title']}"
        return finding if now is best else f"{finding}: no way is 10% faster"
    times = f"{format_figure(gain)} times as many images/s as the {now['title']}"
    return f"{waits} → {best['wait_share']:.0%} of the time, and trains {times}"


def find_gain(content: Content) -> tuple[Content, Content]:
    """The first way that delivers the same samples, and the best; of those that tie, `make_loader`
    or the last.
    """
    fair = content["fair"]
    fastest = max(fair.values(), key=lambda row: row["images_per_second"])
    noise = max(LEAST_NOISE, measure_spread(fastest["repeats_images_per_second"]))
    least = (1 - noise) * fastest["images_per_second"]
    best = [name for name, row in fair.items() if row["images_per_second"] >= least]
    return next(iter(fair.values())), fair["packed" if "packed" in best else best[-1]]


def read_comparison(comparison: "Comparison | Content") -> Content:
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
    fair = {name: row for name, row in timed.items() if row["comparable"]}
    content["fair"] = fair or timed
    return content


def _add_up(row: Content, sessions: int) -> tuple[np.ndarray, np.ndarray]:
    """Epochs done, and the hours since the beginning, at each corner of a strategy's line."""
    later = _SESSION_EPOCHS - 1
    ms = 1000 / row["images_per_second"]
    session = [(0, row["session_ms_per_image"]), (1, row["cold_ms_per_image"]), (later, later * ms)]
    epochs, spent_ms = np.cumsum([(0, row["once_ms_per_image"]), *session * sessions], axis=0).T
    return epochs, spent_ms * COCO_IMAGES / 3.6e6


def _describe_pay_back(own: Content, other: Content) -> str:
    """Say after how many epochs one strategy stays ahead of the other; nothing where it does not,
    or is from the start.
    """
    epochs = np.arange(0, 100 * _SESSION_EPOCHS + 0.005, 0.01)
    own_hours = np.interp(epochs, *_add_up(own, 100))
    other_hours = np.interp(epochs, *_add_up(other, 100))
    behind = np.flatnonzero(own_hours >= other_hours)
    if len(behind) == 0 or behind[-1] + 1 == len(epochs):
        return ""
    paid_epochs = epochs[behind[-1] + 1]
    if paid_epochs <= 1:
        return "Paid back in the first epoch. "
    return f"Paid back after {paid_epochs:.1f} epochs. "
