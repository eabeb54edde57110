"""Memory of a loader's processes that grows, and when it will be full."""

from __future__ import annotations

import os
import re

import pytest
import torch
from torch.utils.data import DataLoader

from colab_utils.diagnosis.memory_growth import Reading, find_growth
from colab_utils.diagnosis.system_calls import measure_memory
from colab_utils.diagnosis.watch import watch
from colab_utils.machine import find_free_memory
from tests.diagnosis.loops import Samples

MB = 1_000_000


# The first worker gets this pid.
FIRST = os.getpid() + 1


def make_readings(growth=0, *, count=20, noise=0, workers=lambda number: [100 * MB] * 2):
    """Each five batches later: this process grows. ``workers`` gives the bytes of its workers."""
    return [
        Reading(
            5 * number,
            {
                os.getpid(): 500 * MB + 5 * number * growth + (noise if number % 2 else -noise),
                **{FIRST + place: size for place, size in enumerate(workers(number)) if size},
            },
        )
        for number in range(count)
    ]


def read_rates(cause):
    """The MB a batch that the text of a cause says: all, this process, workers; and the batch at
    which memory is full.
    """
    numbers = r"by (.*) MB a batch .this process: (.*), workers: (.*).: .* batch ([\d,]+)."
    return [float(text.replace(",", "")) for text in re.search(numbers, cause.why).groups()]


OWN = "without their graphs"


@pytest.mark.parametrize(
    ("readings", "rates", "cure"),
    [
        (
            make_readings(
                workers=lambda number: [(100 + 3 * number) * MB, (100 + 9 * number) * MB]
            ),
            [2.4, 0, 2.4],
            "Keep no samples",
        ),
        # Workers that hardly grow are not named.
        (
            make_readings(2 * MB, workers=lambda number: [100 * MB + 4096 * number]),
            [2, 2, 0],
            OWN,
        ),
        # Workers that end after the last batch hide no growth.
        ([*make_readings(2 * MB), *[Reading(100, {os.getpid(): 690 * MB})] * 2], [2, 2, 0], OWN),
    ],
)
def test_growth_is_a_slope_over_batches_of_who_grows(readings, rates, cure):
    growth = find_growth(readings)
    *measured, full_at = read_rates(growth)
    assert measured == pytest.approx(rates, rel=0.01)
    assert full_at == pytest.approx(find_free_memory() / MB / rates[0], rel=0.05)
    assert cure in growth.next


def start_anew(number):
    """Return what workers have that start anew after ten readings, and grow meanwhile."""
    return [0, 0] * (number // 10) + [(100 + number % 10) * MB] * 2


FILLING = make_readings(9 * MB, count=16)


@pytest.mark.parametrize(
    "readings",
    [
        make_readings(),
        make_readings(noise=30 * MB),
        # The process shrinks.
        make_readings(-MB),
        # These are too few readings to tell.
        make_readings(2 * MB, count=5),
        # Allocators alone move more memory than this.
        make_readings(10_000),
        # Memory fills up, and then stays.
        [*FILLING[:15], *(FILLING[15]._replace(batches=batch) for batch in range(75, 120, 5))],
        make_readings(count=40, workers=start_anew),
    ],
)
def test_what_is_not_sure_is_not_said(readings):
    assert find_growth(readings) is None


def test_batches_of_workers_count_while_somebody_keeps_them():
    before_bytes = measure_memory()
    batches = [*DataLoader(torch.zeros(8, 4_000_000), num_workers=1)]
    # Linux counts a page where it is read.
    assert sum(map(torch.count_nonzero, batches)) == 0
    assert measure_memory() - before_bytes == pytest.approx(128 * MB, abs=10 * MB)
    batches.clear()
    assert measure_memory() - before_bytes < 10 * MB


@pytest.mark.clock
def test_a_worker_that_hoards_is_found_out():
    kept = []
    watched = watch(
        DataLoader(
            Samples(1200, 0.1, act=lambda _: kept.append(bytearray(os.urandom(1000) * 5000))),
            batch_size=2,
            num_workers=2,
        )
    )
    growth = []
    for number, _ in enumerate(watched):
        # Readings of a busy machine scatter: it may take some more of them.
        if number in range(40, 600, 10):
            growth = [cause for cause in watched.summary().causes if cause.id == "memory"]
        if growth:
            break
    assert read_rates(growth[0])[:3] == pytest.approx([10, 0, 10], rel=0.4)
