"""A comparison with round numbers, as `compare` would return it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from colab_utils.diagnosis.comparison import Comparison, StrategyTiming
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
    )


@pytest.fixture
def fast(timing):
    rates = (35.0, 36.0, 38.0)
    return replace(timing, name="packed", images_per_second=36.0, wait_share=0.1, repeats_images_per_second=rates)


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
        )

    return make
