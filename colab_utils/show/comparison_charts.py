"""The charts of a comparison: images a second, the first seconds, and minutes over the epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from colab_utils.errors import ColabUtilsError
from colab_utils.show.charts import draw_lanes, format_figure, label_axes, plot_bars
from colab_utils.show.pictures import PALETTE, make_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from colab_utils.comparison.compare import Comparison

__all__ = ["name_strategy", "plot_comparison", "plot_epochs", "plot_first_seconds"]

_STRATEGY_NAMES = {
    "sequential": "loose files on Drive, no workers",
    "thread_queue": "loose files on Drive, a thread ahead",
    "process_queue": "loose files on Drive, a process ahead",
    "dataloader": "loose files on Drive",
    "saved_tensors": ".pt files on Drive",
    "memory_mapped": "memory-mapped arrays on SSD",
    "in_memory": "all samples in memory",
    "autotuned": "loose files on Drive, tuned pipeline",
    "shards_on_drive": "shards on Drive",
    "shards_on_ssd": "shards on SSD",
    "packed": "packed shards on SSD",
    "train_while_copying": "packed shards, while copied",
}
_BASE = "#777777"
_TIE = 0.95  # closer than this, the order of two bars means nothing


def plot_comparison(comparison: Comparison | Mapping[str, Any]) -> Figure:
    """Images per second of every strategy, how long its step waits, and the speed of the step itself as a line.

    Args:
        comparison: from `compare`, or what a receipt's ``comparison.json`` holds.

    Raises:
        ColabUtilsError: no strategy was timed.
    """
    content, rows = _read_rows(comparison, "images_per_second")
    fair = {name: row for name, row in rows.items() if row["comparable"]} or rows
    best = max(row["images_per_second"] for row in fair.values())
    winners = [row for row in fair.values() if row["images_per_second"] >= _TIE * best]
    limit = max(row["images_per_second"] / max(1 - row["wait_share"], 1e-3) for row in rows.values())
    names = {name: name_strategy(name) for name in rows}
    return plot_bars(
        {names[name]: row["images_per_second"] for name, row in rows.items()},
        title=_find_headline(fair.get("dataloader") or next(iter(fair.values())), winners),
        unit=f"images/s, step {content['step']}, batches of {content['batch_size']}",
        notes={
            names[name]: f"waits {row['wait_share']:.0%}" + ("" if row["comparable"] else ", NOT the same data")
            for name, row in rows.items()
        },
        spread={
            names[name]: (min(row["repeats_images_per_second"]), max(row["repeats_images_per_second"]))
            for name, row in rows.items()
        },
        highlight=[names[row["name"]] for row in winners],
        limit=(limit, "the step alone"),
    )


def name_strategy(name: str) -> str:
    """A strategy's name as people say it; a name of your own stays as it is.

    Example:
        >>> name_strategy("dataloader_on_ssd")
        'loose files on SSD'
    """
    known = _STRATEGY_NAMES.get(name) or _STRATEGY_NAMES.get(name.removesuffix("_on_ssd"), name)
    if name not in _STRATEGY_NAMES and name.startswith("dataloader_") and name[-1].isdigit():
        return f"{_STRATEGY_NAMES['dataloader']}, {name[-1]} workers"
    return known.replace("on Drive", "on SSD") if name.endswith("_on_ssd") else known


def plot_first_seconds(comparison: Comparison | Mapping[str, Any], *, seconds: float | None = None) -> Figure:
    """When each strategy's step ran, from the moment its first batch was asked for, cold; the gaps are waiting.

    Args:
        comparison: from `compare`, or what a receipt's ``comparison.json`` holds.
        seconds: how much of it; None takes as long as all of them ran, 30 at most.

    Raises:
        ColabUtilsError: no strategy was timed.
    """
    _, rows = _read_rows(comparison, "timeline")
    lanes = {name: row["timeline"] for name, row in rows.items()}
    shown_s = seconds or min(30.0, *(spans[-1][2] for spans in lanes.values()))
    done = {name: sum(end <= shown_s for _, _, end in spans) for name, spans in lanes.items()}
    most, least = max(done, key=lambda name: done[name]), min(done, key=lambda name: done[name])
    title = f"In the first {format_figure(shown_s)} s {name_strategy(most)} trained {done[most]} batches"
    title += f", {name_strategy(least)} {done[least]}" if done[least] < done[most] else ""
    spans = {
        name_strategy(name): [(begin, end - begin) for _, begin, end in lane if begin < shown_s]
        for name, lane in lanes.items()
    }
    return draw_lanes(title, spans, seconds=shown_s, lit=len(spans))


def plot_epochs(comparison: Comparison | Mapping[str, Any]) -> Figure:
    """Minutes since the beginning over the epochs of one session, what is made and copied before included.

    Drawn are the baseline, in grey, and the three strategies that end first; a dot is where one has caught up with the
    baseline.

    Args:
        comparison: from `compare`, or what a receipt's ``comparison.json`` holds.

    Raises:
        ColabUtilsError: no strategy was timed.
    """
    import numpy as np

    content, rows = _read_rows(comparison, "epoch_minutes", fair=True)
    base, paid = content["baseline"], {name: row["paid_back_epochs"] or 0.0 for name, row in rows.items()}
    epochs = max(3, min(12, math.ceil(1.5 * min(filter(None, paid.values()), default=2))))
    minutes = {name: _add_up(row, epochs) for name, row in rows.items()}
    order = sorted(minutes, key=lambda name: minutes[name][-1])
    drawn = [name for name in order if name != base][:3]
    best = next(iter(drawn), base)
    title = f"{epochs} epochs take {format_figure(minutes[best][-1])} minutes with {name_strategy(best)}"
    if base in minutes and base != best:
        title += f", {format_figure(minutes[base][-1])} with {name_strategy(base)}"
        title += f": paid back after {paid[best]:.1f} epochs" if paid[best] else ""
    figure = make_figure(title, width=12, height=6)
    axis = figure.add_subplot()
    label_at = -math.inf
    for name in (name for name in order if name in (*drawn, base)):
        colour = _BASE if name == base else PALETTE[drawn.index(name)]
        axis.plot(range(epochs + 1), minutes[name], color=colour, linewidth=3.5)
        label_at = max(minutes[name][-1], label_at + 0.06 * minutes[order[-1]][-1])  # names that would overlap move up
        axis.text(epochs, label_at, f" {name_strategy(name)}", color=colour, fontsize=14, va="center", parse_math=False)
        if name != base and 0 < paid[name] <= epochs:
            axis.plot(paid[name], np.interp(paid[name], range(epochs + 1), minutes[name]), "o", color=colour, ms=10)
    axis.set_xlim(0, epochs)
    axis.set_xticks(range(epochs + 1))
    label_axes(axis, "epochs of one session", "minutes")
    return figure


def _read_rows(
    comparison: Comparison | Mapping[str, Any], key: str, *, fair: bool = False
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The comparison as ``comparison.json`` has it, and its strategies with ``key``, ``fair``: the comparable ones."""
    content = comparison if isinstance(comparison, Mapping) else asdict(comparison)
    timed = [row for row in content["strategies"] if row[key] not in (None, (), [])]
    rows = {row["name"]: row for row in timed if row["comparable"] or not fair}
    if not rows:
        raise ColabUtilsError("expected a strategy that was timed, found none: compare at least one")
    return content, rows


def _add_up(row: Mapping[str, Any], epochs: int) -> list[float]:
    """Minutes at the start, after the first epoch, and after each later one."""
    start = (row["once_minutes"] or 0) + (row["session_minutes"] or 0)
    first = start + (row["first_epoch_minutes"] or row["epoch_minutes"])
    return [start, *(first + n * row["epoch_minutes"] for n in range(epochs))]


def _find_headline(now: Mapping[str, Any], winners: Sequence[Mapping[str, Any]]) -> str:
    """How much faster the best ways are than today's, and how long the step waits today."""
    name, wait = name_strategy(now["name"]), f"the step waits {now['wait_share']:.0%} of the time"
    factor = max(row["images_per_second"] for row in winners) / max(now["images_per_second"], 1e-9)
    if factor < 1.1:
        return f"{name[:1].upper()}{name[1:]}: {wait}, and no other way of loading is 10% faster"
    if len(winners) > 1:
        return f"{len(winners)} other ways train about {factor:.1f} times as fast as {name}, where {wait}"
    best = name_strategy(winners[0]["name"])
    return f"{best[:1].upper()}{best[1:]} train {factor:.1f} times as fast as {name}, where {wait}"
