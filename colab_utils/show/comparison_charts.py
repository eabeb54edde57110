"""What a comparison shows: charts of images a second and of the first seconds, and sentences."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from colab_utils.diagnosis.timing import LEAST_NOISE, measure_spread
from colab_utils.errors import ColabUtilsError
from colab_utils.show.charts import (
    count_batches,
    format_figure,
    plot_bars,
    plot_first_seconds,
)
from colab_utils.show.pictures import DescribedFigure

if TYPE_CHECKING:
    from colab_utils.comparison.compare import Comparison

# Hours are scaled to a dataset of this many images, the training images of COCO.
COCO_IMAGES = 118_287
# Colab is assumed to take the machine and its disk away after every third epoch.
_EPOCHS = 9
_SESSIONS = 3
# The content of a receipt's ``comparison.json``, or one of its strategies.
Content = Mapping[str, Any]


def plot_comparison(comparison: "Comparison | Content") -> DescribedFigure:
    """Draw the images per second of each strategy, and how long its step waits.

    A line marks the speed of the step alone. A strategy that is not timed yet has no bar.

    Args:
        comparison: Result of `compare`, or the content of a receipt's ``comparison.json``.

    Raises:
        ColabUtilsError: No strategy was timed.
    """
    content = read_comparison(comparison)
    # The images a second that a strategy's step would train without waits.
    limit = max(
        row["images_per_second"] / max(1 - row["wait_share"], 1e-3)
        for row in content["timed"].values()
    )
    values = dict[str, float | None]()
    notes = dict[str, str]()
    spread = dict[str, tuple[float, float]]()
    for row in content["strategies"]:
        title = row["title"]
        values[title] = row["images_per_second"]
        # What is not timed yet has a row without a bar.
        if not values[title]:
            notes[title] = "not timed"
            continue
        notes[title] = f"waits {row['wait_share']:.0%}"
        if not row["comparable"]:
            notes[title] += ", NOT the same data"
        repeats = row["repeats_images_per_second"]
        if measure_spread(repeats) > LEAST_NOISE:
            notes[title] += f", spread {measure_spread(repeats):.0%}"
        spread[title] = (min(repeats), max(repeats))
    return plot_bars(
        values,
        title=describe_gain(content),
        unit=f"images/s, step {content['step']}, batches of {content['batch_size']}",
        notes=notes,
        spread=spread,
        highlight=[find_gain(content)[1]["title"]],
        limit=(limit, "the step alone"),
    )


def plot_cold_start(comparison: "Comparison | Content") -> DescribedFigure:
    """Draw the first seconds of each strategy with empty caches; see `plot_first_seconds`.

    It draws the time of the shortest run.

    Args:
        comparison: Result of `compare`, or the content of a receipt's ``comparison.json``.

    Raises:
        ColabUtilsError: No strategy was timed.
    """
    content = read_comparison(comparison)
    rows = {row["title"]: row["timeline"] for row in content["timed"].values()}
    all_s = min(timeline[-1][1] for timeline in rows.values())
    shown_s = math.floor(all_s) or all_s
    counts = [f"{count_batches(rows[title], shown_s):,} with {title}" for title in rows]
    ends = ", ".join(dict.fromkeys((counts[0], counts[-1])))
    title = f"Batches in the first {format_figure(shown_s)} s: {ends}"
    return plot_first_seconds(
        rows,
        seconds=shown_s,
        title=_warn_of_busy(content, title),
        unit=f"seconds, step {content['step']}",
    )


def describe_hours(comparison: "Comparison | Content") -> str:
    """Return a sentence: how many hours the epochs of a dataset as large as COCO take, with the
    first and with the best strategy.

    The measured times are scaled to COCO's number of images. A session on Colab has three epochs.
    The time to convert counts once, and the time to copy counts in each session.

    Args:
        comparison: Result of `compare`, or the content of a receipt's ``comparison.json``.

    Raises:
        ColabUtilsError: No strategy was timed.
    """
    content = read_comparison(comparison)
    hours = dict[str, str]()
    for row in find_gain(content):
        session_ms = row["session_ms_per_image"] + row["cold_ms_per_image"]
        later_ms = (_EPOCHS - _SESSIONS) * 1000 / row["images_per_second"]
        ms = row["once_ms_per_image"] + _SESSIONS * session_ms + later_ms
        hours[row["title"]] = format_figure(ms * COCO_IMAGES / 3.6e6)
    spent = ", ".join(f"{number} hours with {title}" for title, number in hours.items())
    return _warn_of_busy(content, f"{_EPOCHS} epochs of {COCO_IMAGES:,} images: {spent}")


def describe_gain(comparison: "Comparison | Content") -> str:
    """Return a sentence: how the first and the best strategy differ in waits and in images/s.

    A warning comes first if the machine was busy with other work.

    Raises:
        ColabUtilsError: No strategy was timed.
    """
    content = read_comparison(comparison)
    now, best = find_gain(content)
    finding = f"The step waits {now['wait_share']:.0%}"
    if _is_faster(best, now):
        gain = format_figure(best["images_per_second"] / now["images_per_second"])
        finding += (
            f" → {best['wait_share']:.0%} of the time, and trains {gain} times as many images/s as "
            f"the {now['title']}"
        )
    else:
        finding += f" of the time with the {now['title']}"
        if now is not best:
            finding += f": no other way is {_find_noise(best, now):.0%} faster"
    return _warn_of_busy(content, finding)


def _warn_of_busy(content: Content, title: str) -> str:
    """Put a warning before the title if the machine was busy with other work."""
    return f"{content.get('busy', '')} {title}".strip()


def _is_faster(row: Content, other: Content) -> bool:
    gain = row["images_per_second"] / other["images_per_second"]
    return bool(gain > 1 + _find_noise(row, other))


def _find_noise(*rows: Content) -> float:
    """Return the least difference of these rates that counts, as a share: 5 %, or the largest of
    their spreads.
    """
    return max(LEAST_NOISE, *[measure_spread(row["repeats_images_per_second"]) for row in rows])


def find_gain(content: Content) -> tuple[Content, Content]:
    """Return the first strategy that delivers the same samples, and the best one.

    The best one has the most images per second, or it is `make_loader`, if that is faster than the
    first one and about as fast as the fastest.
    """
    rows = content["fair"]
    now = next(iter(rows.values()))
    best = max(rows.values(), key=lambda row: row["images_per_second"])
    ours = rows.get("packed", best)
    if _is_faster(ours, now) and not _is_faster(best, ours):
        best = ours
    return now, best


def read_comparison(comparison: "Comparison | Content") -> Content:
    """Return the content of ``comparison.json``, with two more dicts of strategies by name.

    ``timed`` has those that were timed. ``fair`` has the timed ones that deliver the same samples,
    or all timed ones if none does.
    """
    content = dict(comparison) if isinstance(comparison, Mapping) else asdict(comparison)
    timed = {row["name"]: row for row in content["strategies"] if row["images_per_second"]}
    if not timed:
        raise ColabUtilsError("No strategy was timed. Compare at least one.")
    fair = {name: row for name, row in timed.items() if row["comparable"]}
    return content | {"timed": timed, "fair": fair or timed}
