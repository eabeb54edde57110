"""The charts of a comparison: images a second, the first seconds, hours over the epochs, and many receipts at once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from colab_utils.errors import ColabUtilsError, describe_error
from colab_utils.show import charts
from colab_utils.show.pictures import PALETTE, make_figure

if TYPE_CHECKING:
    from colab_utils.comparison.compare import Comparison

__all__ = [
    "COCO_IMAGES", "describe_gain", "plot_cold_start", "plot_comparison", "plot_epochs", "plot_receipts",
    "read_receipts", "summarise_receipt",
]  # fmt: skip

_COURSE = ("sequential", "thread_queue", "dataloader", "shards_on_ssd", "packed")  # as COURSE_STRATEGIES
_BLUE, _ORANGE, _GREY, _INK = PALETTE[0], PALETTE[1], "#777777", "#1a1a1a"
COCO_IMAGES = 118_287  # to which hours are scaled
_SESSION_EPOCHS, _SESSIONS = 3, 3  # epochs before Colab takes the machine, and its disk, away
_TIE = 0.95  # closer than this, the order of two bars means nothing
_TIMES = "times as fast"
_Content = Mapping[str, Any]  # what a receipt's ``comparison.json`` holds, or one of its rows


def plot_comparison(comparison: Comparison | _Content) -> Figure:
    """Images per second of every strategy, how long its step waits, and the speed of the step itself as a line.

    The five strategies of the course are named as its steps. What is not timed yet has no bar.

    Args:
        comparison: from `compare`, or what a receipt's ``comparison.json`` holds.

    Raises:
        ColabUtilsError: no strategy was timed.
    """
    content, rows = _read_rows(comparison, "images_per_second")
    names, (_, best) = _name_rows(content), _find_gain(content, rows)
    limit = max(row["images_per_second"] / max(1 - row["wait_share"], 1e-3) for row in rows.values())
    notes, spread = dict[str, str](), dict[str, tuple[float, float]]()
    for name, row in rows.items():
        notes[names[name]] = f"waits {row['wait_share']:.0%}" + ("" if row["comparable"] else ", NOT the same data")
        spread[names[name]] = min(row["repeats_images_per_second"]), max(row["repeats_images_per_second"])
    figure = charts.plot_bars(
        {names[row["name"]]: row["images_per_second"] or 0.0 for row in content["strategies"]},
        title=describe_gain(content), unit=f"images/s, step {content['step']}, batches of {content['batch_size']}",
        notes=notes, spread=spread, highlight=[names[best["name"]]], limit=(limit, "the step alone"),
    )  # fmt: skip
    for row, text in zip(content["strategies"], figure.axes[0].texts, strict=False):
        if row["name"] not in rows:
            text.set_text("not timed" if row["note"] else "…")
    return figure


def plot_cold_start(comparison: Comparison | _Content, *, seconds: float | None = None) -> Figure:
    """`charts.plot_first_seconds` of the cold runs, with nothing in a cache; by default as long as all of them ran.

    Of more than five strategies, those of the course are drawn.

    Raises:
        ColabUtilsError: no strategy was timed.
    """
    content, timed = _read_rows(comparison, "timeline")
    course = [name for name in timed if name in _COURSE] if len(timed) > len(_COURSE) else []
    names = _name_rows(content)
    rows = {names[name]: [(began, ended) for _, began, ended in timed[name]["timeline"]] for name in course or timed}
    all_s = min(spans[-1][1] for spans in rows.values())
    shown_s = seconds or all_s // 1 or all_s
    done = [f"{sum(ended <= shown_s for _, ended in rows[name])} with {name.strip('+ ')}" for name in rows]
    title = f"Batches in the first {charts.format_figure(shown_s)} seconds: "
    title += ", ".join(dict.fromkeys((done[0], done[-1])))
    return charts.plot_first_seconds(rows, seconds=shown_s, title=title)


def plot_epochs(comparison: Comparison | _Content) -> Figure:
    """Hours since the beginning over the epochs of a dataset as large as COCO, in sessions of three epochs.

    What was measured is scaled to COCO's images. Converting counts once, copying in each session. Drawn are the
    baseline, the workers, and `make_loader`, or the way that ends first where it was not timed.

    Args:
        comparison: from `compare`, or what a receipt's ``comparison.json`` holds.

    Raises:
        ColabUtilsError: no strategy was timed.
    """
    content, rows = _read_rows(comparison, "cold_ms_per_image")
    lines = {name: _add_up(row, _SESSIONS) for name, row in _keep_fair(rows).items()}
    total = {name: float(hours[-1]) for name, (_, hours) in lines.items()}
    best = "packed" if "packed" in total else min(total, key=lambda name: total[name])
    drawn = [name for name in dict.fromkeys((content["baseline"], "dataloader", best)) if name in total]
    rival = min((name for name in drawn if name != best), key=lambda name: total[name], default=best)
    names, epochs = _name_rows(content), _SESSION_EPOCHS * _SESSIONS
    spent = {name: f"{charts.format_figure(hours)} hours" for name, hours in total.items()}
    title = f"{epochs} epochs of {COCO_IMAGES:,} images: {spent[best]}, {spent[rival]} with {names[rival].strip('+ ')}"
    if (paid := _find_pay_back(rows[best], rows[rival])) is not None:
        title = f"Paid back {'in the first epoch' if paid <= 1 else f'after {paid:.1f} epochs'}. {title}"
    figure = make_figure(title, width=12, height=5.5)
    axis, label_at = figure.add_subplot(), 0.0
    for name in sorted(drawn, key=lambda name: total[name]):
        colour = _BLUE if name == best else _GREY if name == content["baseline"] else _ORANGE
        axis.plot(*lines[name], color=colour, linewidth=4)
        label_at = max(total[name], label_at + 0.08 * max(total[name] for name in drawn))  # names do not overlap
        text = f" {names[name]}: {spent[name]}"
        axis.text(epochs, label_at, text, fontsize=15, va="center", color=_INK, parse_math=False)
    for session in range(1, _SESSIONS):
        axis.axvline(session * _SESSION_EPOCHS, color=_GREY, linewidth=1, linestyle=":")
    axis.set_xlim(0, epochs)
    axis.set_xticks(range(epochs + 1))
    charts.label_axes(axis, "epochs; at a dotted line a new session copies again", "hours")
    return figure


def plot_receipts(receipts: Sequence[str | Path]) -> Figure:
    """How many times as fast each machine trains, and how long its step waits before and after; the fastest first.

    Args:
        receipts: ``comparison.json`` files of many machines.

    Raises:
        ColabUtilsError: no file, or one that is no receipt.
    """
    found = sorted(read_receipts(receipts), key=lambda line: -line[_TIMES])
    lines = {f"{number}. {line['receipt']}: {line['machine']}": line for number, line in enumerate(found, start=1)}
    before, after, times = (median(line[key] for line in found) for key in ("waits before", "waits after", _TIMES))
    title = f"{len(found)} receipts: the step waits {before:.0%} → {after:.0%} of the time"
    return charts.plot_bars(
        {name: line[_TIMES] for name, line in lines.items()},
        title=f"{title}, and trains {charts.format_figure(times)} times as fast (medians)",
        unit="times as many images/s as before",
        notes={name: f"waits {line['waits before']:.0%} → {line['waits after']:.0%}" for name, line in lines.items()},
        highlight=[*lines],
    )


def read_receipts(receipts: Sequence[str | Path]) -> list[dict[str, Any]]:
    """`summarise_receipt` of each ``comparison.json``; a receipt has the name of its file, or of its folder.

    Raises:
        ColabUtilsError: no file, or one that is no receipt.
    """
    found, place = list[dict[str, Any]](), Path()
    try:
        for place in [Path(one).absolute() for one in receipts or ("no file",)]:
            name = place.parent.name if place.stem == "comparison" else place.stem
            found.append({"receipt": name, **summarise_receipt(json.loads(place.read_text(encoding="utf-8")))})
        return found
    except (ColabUtilsError, OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ColabUtilsError(
            f"expected receipts (comparison.json), found {place} ({describe_error(error)}). Name what compare wrote."
        ) from None


def summarise_receipt(comparison: Comparison | _Content) -> dict[str, Any]:
    """A line for the class sheet: the machine, and the baseline beside the best way.

    Raises:
        ColabUtilsError: no strategy was timed.
    """
    content, rows = _read_rows(comparison, "images_per_second")
    machine, (before, after) = content["machine"], _find_gain(content, rows)
    line = {"machine": f"{machine['gpu'] or 'no GPU'}, {machine['cores']} cores", "step": content["step"]}
    line["drive"] = content["drive"].partition(",")[0]
    for when, row in (("before", before), ("after", after)):
        line |= {when: row["title"], f"waits {when}": round(row["wait_share"], 3)}
        line |= {f"images/s {when}": round(row["images_per_second"], 1)}
    return line | {_TIMES: round(after["ratio"], 1)}


def describe_gain(comparison: Comparison | _Content) -> str:
    """The finding in one sentence: how long the step waits before and after, and how many times as fast it trains.

    Raises:
        ColabUtilsError: no strategy was timed.
    """
    now, best = _find_gain(*_read_rows(comparison, "images_per_second"))
    waits = f"The step waits {now['wait_share']:.0%}"
    if best["ratio"] < 1.1:
        return f"{waits} of the time with the {now['title']}" + ("" if now is best else ": no way is 10% faster")
    times = f"{charts.format_figure(best['ratio'])} times as many images/s as the {now['title']}"
    return f"{waits} → {best['wait_share']:.0%} of the time, and trains {times}"


def _find_gain(content: _Content, rows: Mapping[str, _Content]) -> tuple[_Content, _Content]:
    """The baseline, and the best way that delivers the same samples; of those that tie, `make_loader` or the last."""
    fair = _keep_fair(rows)
    least = _TIE * max(row["images_per_second"] for row in fair.values())
    best = [name for name, row in fair.items() if row["images_per_second"] >= least]
    return fair[content["baseline"]], fair["packed" if "packed" in best else best[-1]]


def _read_rows(comparison: Comparison | _Content, key: str) -> tuple[_Content, dict[str, _Content]]:
    """The comparison as ``comparison.json`` has it, and its strategies that have ``key``."""
    content = comparison if isinstance(comparison, Mapping) else asdict(comparison)
    rows = {row["name"]: row for row in content["strategies"] if row[key]}
    if not rows:
        raise ColabUtilsError("expected a strategy that was timed, found none: compare at least one")
    return content, rows


def _keep_fair(rows: Mapping[str, _Content]) -> Mapping[str, _Content]:
    """The strategies that deliver the same samples; all, where none does."""
    return {name: row for name, row in rows.items() if row["comparable"]} or rows


def _name_rows(content: _Content) -> dict[str, str]:
    """What each strategy is called in a chart; those of the course stand on top of each other."""
    titles = {row["name"]: row["title"] for row in content["strategies"]}
    plus = "+ " if tuple(titles) == _COURSE else ""
    return {name: (plus if name != _COURSE[0] else "") + title for name, title in titles.items()}


def _add_up(row: _Content, sessions: int) -> tuple[np.ndarray, np.ndarray]:
    """Epochs done, and the hours since the beginning, at each corner of a strategy's line."""
    later, ms = _SESSION_EPOCHS - 1, 1000 / row["images_per_second"]
    session = [(0, row["session_ms_per_image"]), (1, row["cold_ms_per_image"]), (later, later * ms)]
    epochs, spent_ms = np.cumsum([(0, row["once_ms_per_image"]), *session * sessions], axis=0).T
    return epochs, spent_ms * COCO_IMAGES / 3.6e6


def _find_pay_back(own: _Content, other: _Content) -> float | None:
    """Epochs after which one strategy stays ahead of the other; None where it does not, or is from the start."""
    at = np.arange(0, 100 * _SESSION_EPOCHS + 0.005, 0.01)
    behind = np.flatnonzero(np.interp(at, *_add_up(own, 100)) >= np.interp(at, *_add_up(other, 100)))
    return float(at[behind[-1] + 1]) if len(behind) > 0 and behind[-1] + 1 < len(at) else None
