"""The charts of a comparison: images a second, the first seconds, and minutes over the epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from colab_utils.errors import ColabUtilsError
from colab_utils.show.charts import draw_lanes, format_figure, plot_bars
from colab_utils.show.pictures import PALETTE, make_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from colab_utils.comparison.compare import Comparison

__all__ = ["name_strategy", "plot_comparison", "plot_epochs", "plot_first_seconds"]

_BLUE, _ORANGE, _GREEN = PALETTE[0], PALETTE[1], PALETTE[2]


_GREY, _BASE = "#B8B8B8", "#777777"


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
    "webdataset": "WebDataset over the shards on SSD",
    "litdata": "LitData on SSD",
    "mosaicml-streaming": "MosaicML Streaming on SSD",
    "tf_data": "tf.data on SSD",
}


_TIE = 0.95  # closer than this, the order of two bars means nothing


def plot_comparison(comparison: Comparison | Mapping[str, Any]) -> Figure:
    """Images per second of every strategy, how long its step waits, and the speed of the step itself as a line.

    Args:
        comparison: from `compare`, or what a receipt's ``comparison.json`` holds.

    Raises:
        ColabUtilsError: no strategy was timed.
    """
    content = comparison if isinstance(comparison, Mapping) else asdict(comparison)
    rows = {row["name"]: row for row in content["strategies"] if row["images_per_second"] is not None}
    if not rows:
        raise ColabUtilsError("expected a strategy that was timed, found none: compare at least one")
    fair = {name: row for name, row in rows.items() if row["comparable"]} or rows
    best = max(row["images_per_second"] for row in fair.values())
    winners = [row for row in fair.values() if row["images_per_second"] >= _TIE * best]
    limit = max(row["images_per_second"] / max(1 - row["wait_share"], 1e-3) for row in rows.values())
    return plot_bars(
        {name_strategy(name): row["images_per_second"] for name, row in rows.items()},
        title=_find_headline(fair.get("dataloader") or next(iter(fair.values())), winners),
        unit=f"images/s, step {content['step']}, batches of {content['batch_size']}",
        notes={
            name_strategy(name): f"waits {row['wait_share']:.0%}" + ("" if row["comparable"] else ", NOT the same data")
            for name, row in rows.items()
        },
        spread={
            name_strategy(name): (min(row["repeats_images_per_second"]), max(row["repeats_images_per_second"]))
            for name, row in rows.items()
        },
        highlight=[name_strategy(row["name"]) for row in winners],
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
    content = comparison if isinstance(comparison, Mapping) else asdict(comparison)
    lanes = {row["name"]: row["timeline"] for row in content["strategies"] if row.get("timeline")}
    if not lanes:
        raise ColabUtilsError("expected a strategy that was timed, found none: compare at least one")
    shown_s = seconds or min(30.0, *(spans[-1][2] for spans in lanes.values()))
    done = {name: sum(end <= shown_s for _, _, end in spans) for name, spans in lanes.items()}
    most, least = max(done, key=lambda name: done[name]), min(done, key=lambda name: done[name])
    title = f"In the first {format_figure(shown_s)} s {name_strategy(most)} trained {done[most]} batches"
    title += f", {name_strategy(least)} {done[least]}" if done[least] < done[most] else ""
    spans = {
        name_strategy(name): [(begin, end - begin) for _, begin, end in lane if begin < shown_s]
        for name, lane in lanes.items()
    }
    figure = draw_lanes(title, spans, lit=range(len(spans)), height=0.46)
    figure.axes[0].set_xlim(0, shown_s)
    return figure


def plot_epochs(comparison: Comparison | Mapping[str, Any]) -> Figure:
    """Minutes since the beginning over the epochs of one session, what is made and copied before included.

    The baseline is drawn in grey, the three that end first in colour, the others thin.

    Args:
        comparison: from `compare`, or what a receipt's ``comparison.json`` holds.

    Raises:
        ColabUtilsError: no strategy was timed.
    """
    content = comparison if isinstance(comparison, Mapping) else asdict(comparison)
    rows = {
        row["name"]: row for row in content["strategies"]
        if row["comparable"] and row["epoch_minutes"] is not None and row["first_epoch_minutes"] is not None
    }  # fmt: skip
    if not rows:
        raise ColabUtilsError("expected a strategy that was timed, found none: compare at least one")
    base = rows.get(content["baseline"])
    paid = {name: row["paid_back_epochs"] for name, row in rows.items() if row["paid_back_epochs"]}
    epochs = max(3, min(12, math.ceil(1.5 * min(paid.values(), default=2))))
    minutes = {name: _add_up(row, epochs) for name, row in rows.items()}
    order = sorted((name for name in rows if name != content["baseline"]), key=lambda name: minutes[name][-1])
    best = order[0] if order else content["baseline"]
    title = f"{epochs} epochs take {format_figure(minutes[best][-1])} minutes with {name_strategy(best)}"
    if base is not None and order:
        title += f", {format_figure(minutes[base['name']][-1])} with {name_strategy(base['name'])}"
    if paid.get(best):
        title += f": paid back after {paid[best]:.1f} epochs"
    figure = make_figure(title, width=12, height=6)
    axis = figure.add_subplot()
    colours = dict(zip(order[:3], (_BLUE, _GREEN, _ORANGE), strict=False))
    for name, line in minutes.items():
        is_base = base is not None and name == base["name"]
        width = 3.5 if name in colours or is_base else 1.0
        colour = colours.get(name, _BASE if is_base else _GREY)
        axis.plot(
            range(epochs + 1), line, color=colour, linewidth=width, label=name_strategy(name) if width > 1 else None
        )
        if name in colours and paid.get(name) and paid[name] <= epochs:
            at = paid[name]
            height = line[int(at)] + (at % 1) * (line[min(int(at) + 1, epochs)] - line[int(at)])
            axis.plot([at], [height], marker="o", markersize=9, color=colour)
    axis.set_xlabel("epochs of one session", fontsize=14)
    axis.set_ylabel("minutes", fontsize=14)
    axis.set_xlim(0, epochs)
    axis.set_xticks(range(epochs + 1))
    axis.set_ylim(bottom=0)
    axis.tick_params(labelsize=12)
    axis.legend(fontsize=13, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def _add_up(row: Mapping[str, Any], epochs: int) -> list[float]:
    """Minutes at the start, after the first epoch, and after each later one."""
    start = (row["once_minutes"] or 0) + (row["session_minutes"] or 0)
    first = start + row["first_epoch_minutes"]
    return [start, *(first + n * row["epoch_minutes"] for n in range(epochs))]


def _find_headline(now: Mapping[str, Any], winners: Sequence[Mapping[str, Any]]) -> str:
    """How much faster the best ways are than today's, and how long the step waits today."""
    name, wait = name_strategy(now["name"]), f"the step waits {now['wait_share']:.0%} of the time"
    factor = max(row["images_per_second"] for row in winners) / max(now["images_per_second"], 1e-9)
    if factor < 1.1:
        return f"{_capitalise(name)}: {wait}, and no other way of loading is 10% faster"
    if len(winners) > 1:
        return f"{len(winners)} other ways train about {factor:.1f} times as fast as {name}, where {wait}"
    best = _capitalise(name_strategy(winners[0]["name"]))
    return f"{best} train {factor:.1f} times as fast as {name}, where {wait}"


def _capitalise(text: str) -> str:
    return text[:1].upper() + text[1:]
