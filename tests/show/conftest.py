"""A comparison with round numbers, as `compare` would return it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from colab_utils.comparison.compare import Comparison, StrategyTiming
from colab_utils.runtime import describe_machine


@pytest.fixture
def timing():
    return StrategyTiming(
        name="dataloader",
        idea="Workers read loose files.",
        place="slowed Drive folder, profile typical",
        comparable=True,
        difference="",
        images_per_second=12.0,
        batch_ms_median=330.0,
        batch_ms_p95=400.0,
        wait_share=0.7,
        first_batch_s=1.5,
        cpu_ms_per_image=20.0,
        repeats_images_per_second=(11.0, 12.0, 12.5),
        note="",
        cold_images_per_second=10.0,
        ratio=1.0,
        ratio_low=1.0,
        ratio_high=1.0,
        ram_bytes=300_000_000,
        drive_bytes=8_000_000,
        ssd_bytes=0,
        once_minutes=0.0,
        session_minutes=0.0,
        first_epoch_minutes=12.0,
        epoch_minutes=10.0,
        paid_back_epochs=0.0,
        timeline=tuple((n * 0.5, n * 0.5 + 0.4, n * 0.5 + 0.5) for n in range(8)),
    )


@pytest.fixture
def fast(timing):
    rates = (35.0, 36.0, 38.0)
    return replace(
        timing, name="packed", images_per_second=36.0, wait_share=0.1, repeats_images_per_second=rates, ratio=3.0,
        ratio_low=2.9, ratio_high=3.2, once_minutes=6.0, session_minutes=1.0, first_epoch_minutes=4.0,
        epoch_minutes=4.0,
        paid_back_epochs=0.875, timeline=tuple((n * 0.12, n * 0.12 + 0.02, n * 0.12 + 0.12) for n in range(40)),
    )  # fmt: skip


@pytest.fixture
def make_comparison():
    def make(*timings):
        return Comparison(
            machine=describe_machine(),
            dataset={"name": "images", "fingerprint": "abc", "images": 40},
            strategies=timings,
            step="emulated 100 ms",
            drive="typical: 59 ms per file, 65 MB/s. Measured by somebody.",
            batch_size=4,
            batches=8,
            repeats=3,
            workers=2,
            note="",
            baseline=timings[0].name,
            no_help=tuple(one.name for one in timings[1:] if (one.ratio or 9) < 1.1),
        )

    return make
