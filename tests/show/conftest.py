"""A comparison with round numbers, as `compare` would return it on a bad day."""

from __future__ import annotations

from dataclasses import replace

import pytest

from colab_utils.comparison.compare import Comparison, StrategyTiming
from colab_utils.comparison.strategies import STRATEGIES
from colab_utils.machine import describe_machine

MS_PER_IMAGE = {"once_ms_per_image": 0.0, "session_ms_per_image": 0.0}
CONVERTED = {"once_ms_per_image": 150.0, "session_ms_per_image": 2.0}
# Each strategy has its images/s, its waits, and its ms.
COURSE = {
    "sequential": (1.6, 0.96, MS_PER_IMAGE),
    "dataloader": (3.2, 0.92, MS_PER_IMAGE),
    "streams": (20.0, 0.5, MS_PER_IMAGE),
    "shards_on_ssd": (32.0, 0.2, CONVERTED),
    "packed": (38.4, 0.04, CONVERTED),
}


@pytest.fixture
def make_timing():
    """The row of a strategy by its name; ``settings`` replace its fields."""

    def make(name, **settings):
        rate, waits, costs = COURSE.get(name, COURSE["sequential"])
        rate = settings.get("images_per_second", rate) or rate
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
            cold_ms_per_image=1000 / rate,
            timeline=tuple(
                (
                    (n + waits) * 4 / rate,
                    (n + 1) * 4 / rate,
                )
                for n in range(int(2 * rate))
            ),
            **costs,
        )
        return replace(timing, **settings)

    return make


@pytest.fixture
def course(make_timing):
    return [make_timing(name) for name in COURSE]


@pytest.fixture
def make_comparison():
    def make(*timings, **settings):
        comparison = Comparison(
            machine=describe_machine(),
            dataset={"name": "images", "fingerprint": "abc", "images": 40},
            strategies=timings,
            step="emulated 100 ms",
            drive="bad: 606 ms per file, 65 MB/s. 1.65 images/s, as somebody measured.",
            batch_size=4,
            batches=8,
            repeats=3,
            workers=2,
            note="",
        )
        return replace(comparison, **settings)

    return make


@pytest.fixture
def lose():
    """A row that was never timed."""

    def make(timing, note="", difference=""):
        names = (
            "images_per_second",
            "batch_ms_median",
            "batch_ms_p95",
            "step_ms_median",
            "wait_share",
            "first_batch_s",
        )
        names += (
            "cpu_ms_per_image",
            "once_ms_per_image",
            "session_ms_per_image",
            "cold_ms_per_image",
        )
        lost = replace(
            timing,
            **dict.fromkeys(names),
            repeats_images_per_second=(),
            timeline=(),
        )
        return replace(
            lost,
            note=note,
            comparable=not difference,
            difference=difference,
        )

    return make
