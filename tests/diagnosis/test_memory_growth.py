"""Memory of a loader's processes that grows, and when it will be full."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch.utils.data import DataLoader

from colab_utils.diagnosis.memory_growth import MemoryLog, Reading, find_growth
from colab_utils.diagnosis.system_calls import measure_memory
from colab_utils.machine import find_free_memory
from tests.diagnosis.loops import Samples

MB = 1_000_000


# The first worker gets this pid.
FIRST = os.getpid() + 1


def make_readings(growth, *, count=20, workers=2, noise=0):
    """Each five batches later: this process grows, the workers do not."""
    return [
        Reading(
            batches=5 * number,
            own_bytes={
                os.getpid(): 500 * MB + 5 * number * growth + (noise if number % 2 else -noise),
                **dict.fromkeys(range(FIRST, FIRST + workers), 100 * MB),
            },
        )
        for number in range(count)
    ]


def test_growth_is_a_slope_over_batches():
    growth = find_growth(make_readings(2 * MB))
    assert growth.mb_per_batch == pytest.approx(2, rel=0.01)
    assert growth.full_at_batch == pytest.approx(95 + find_free_memory() / MB / 2, rel=0.02)
    assert str(growth).startswith(
        "Memory grows by 2.00 MB a batch (this process: 2.00): if this goes on, memory is full at "
    )
    assert "without their graphs" in growth.cure


def test_workers_that_grow_are_named():
    readings = [
        reading._replace(
            own_bytes={
                os.getpid(): 500 * MB,
                FIRST: (100 + 3 * n) * MB,
                FIRST + 1: (100 + 9 * n) * MB,
            }
        )
        for n, reading in enumerate(make_readings(0))
    ]
    growth = find_growth(readings)
    assert growth.by_process == pytest.approx({"workers": 2.4})
    assert growth.mb_per_batch == pytest.approx(2.4)
    assert "Keep no samples" in growth.cure


def test_growth_is_seen_over_short_passes():
    passes = make_readings(2 * MB, count=40)
    # These are too few passes to tell.
    assert find_growth(passes[::5]) is None
    assert find_growth(passes[::2]).mb_per_batch == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize(
    "samples",
    [
        make_readings(0),
        make_readings(0, noise=30 * MB),
        # The process shrinks.
        make_readings(-MB),
        # These are too few readings to tell.
        make_readings(2 * MB, count=5),
        # Allocators alone move more memory than this.
        make_readings(10_000),
        [
            *make_readings(9 * MB, count=16)[:15],
            *[make_readings(9 * MB, count=16)[15]._replace(batches=b) for b in range(75, 120, 5)],
        ],
    ],
    ids=["flat", "noisy", "shrinking", "few", "little", "filling up"],
)
def test_what_is_not_sure_is_not_said(samples):
    assert find_growth(samples) is None


def test_workers_that_end_after_the_last_batch_hide_no_growth():
    samples = make_readings(2 * MB, count=20)
    main = {os.getpid(): samples[-1].own_bytes[os.getpid()]}
    last = samples[-1]._replace(
        batches=samples[-1].batches + 5,
        own_bytes=main,
    )
    assert find_growth([*samples, last, last]).mb_per_batch == pytest.approx(2, rel=0.01)


def test_workers_that_start_anew_are_no_growth():
    passes = make_readings(0, count=40)
    for number, reading in enumerate(passes):
        for place in (0, 1):
            first = FIRST + 2 * (number // 10) + place
            reading.own_bytes[first] = reading.own_bytes.pop(FIRST + place) + number % 10 * MB
    assert find_growth(passes) is None


def test_a_process_that_hardly_grows_is_not_named():
    readings = make_readings(2 * MB)
    for number, reading in enumerate(readings):
        reading.own_bytes[FIRST] += 4096 * number
    assert list(find_growth(readings).by_process) == ["this process"]


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

    def hoard(_):
        kept.append(bytearray(os.urandom(1000) * 20_000))

    loader = DataLoader(Samples(800, 0.1, act=hoard), batch_size=2, num_workers=2)
    batches = iter(loader)
    count = 0
    began_s = time.perf_counter()
    log = MemoryLog()
    result = None
    # Readings of a busy machine scatter: it may take some more of them.
    while time.perf_counter() - began_s < 4 or (result is None and count < 350):
        next(batches)
        count += 1
        log.look(count)
        result = find_growth(log.readings)
    assert result.mb_per_batch == pytest.approx(40, rel=0.4)
    assert list(result.by_process) == ["workers"]
    batches._shutdown_workers()
