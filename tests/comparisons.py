"""A comparison with round numbers, as `compare` would return it on a bad day, and what its figures
show.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from colab_utils.comparison.compare import Comparison, StrategyTiming
from colab_utils.comparison.strategies import STRATEGIES
from colab_utils.machine import describe_machine

# Each strategy has its images/s, its waits, and the ms of an image to convert it and to copy it.
COURSE = {
    "sequential": (1.6, 0.96, 0.0, 0.0),
    "dataloader": (3.2, 0.92, 0.0, 0.0),
    "streams": (20.0, 0.5, 0.0, 0.0),
    "shards_on_ssd": (32.0, 0.2, 150.0, 2.0),
    "packed": (38.4, 0.04, 150.0, 2.0),
}


def make_timing(name, *, images_per_second=None, **settings):
    """The row of a strategy by its name; ``settings`` replace its fields."""
    rate, waits, once_ms, session_ms = COURSE.get(name, COURSE["sequential"])
    rate = images_per_second or rate
    strategy = STRATEGIES.get(name)
    timing = StrategyTiming(
        name=name,
        title=strategy.title.replace("{}", "2 workers") if strategy else name,
        idea="How it loads.",
        comparable=True,
        difference="",
        images_per_second=rate,
        batch_ms_median=4000 / rate,
        batch_ms_p95=4400 / rate,
        step_ms_median=4000 / rate * (1 - waits),
        wait_share=waits,
        first_batch_s=1.5,
        cpu_ms_per_image=20.0,
        repeats_images_per_second=(0.95 * rate, rate, 1.02 * rate),
        once_ms_per_image=once_ms,
        session_ms_per_image=session_ms,
        cold_ms_per_image=1000 / rate,
        timeline=tuple(((n + waits) * 4 / rate, (n + 1) * 4 / rate) for n in range(int(2 * rate))),
    )
    return replace(timing, **settings)


def make_comparison(*rows, **settings):
    """A comparison of rows, some by their names; without rows, that of the course."""
    comparison = Comparison(
        machine=describe_machine(),
        dataset={"name": "images", "fingerprint": "abc", "images": 40},
        strategies=tuple(
            make_timing(row) if isinstance(row, str) else row for row in rows or COURSE
        ),
        step="emulated 100 ms",
        drive="bad: 606 ms per file, 65 MB/s. 1.65 images/s, as somebody measured.",
        batch_size=4,
        repeats=3,
        workers=2,
        note="",
    )
    return replace(comparison, **settings)


def lose(name, note="", difference=""):
    """A row that was never timed."""
    row = make_timing(name)
    return StrategyTiming(name, row.title, row.idea, not difference, difference, note=note)


def to_content(comparison):
    return json.loads(json.dumps(asdict(comparison)))


def read_bars(figure):
    """The lengths of bars by their labels."""
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    lengths = [patch.get_width() for patch in figure.axes[0].patches]
    return dict(zip(labels, lengths, strict=True))


def read_texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def read_title(figure):
    return figure.get_suptitle().replace("\n", " ")
