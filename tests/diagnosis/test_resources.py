"""Memory and /dev/shm of a loader's processes, and when memory will be full."""

from __future__ import annotations

import os
import time

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from colab_utils.diagnosis.resources import Reading, summarise_readings, watch_resources

# Python 3.12 warns that a process with threads forks: torch's DataLoader does, by design
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

MB = 1_000_000


def make_readings(growth, *, count=20, workers=(100 * MB, 100 * MB), noise=0, others=0):
    """Each five batches later; ``others``: how much of the growth is another program's."""
    return [
        Reading(
            batches=5 * number,
            free_bytes=9000 * MB - 5 * number * (growth + others) + (noise if number % 2 else -noise),
            shm_bytes=1000,
            main_bytes=500 * MB + 5 * number * growth,
            worker_bytes=workers,
        )
        for number in range(count)
    ]


def test_growth_is_a_slope_over_batches():
    found = summarise_readings(make_readings(2 * MB))
    assert found.growth_mb_per_batch == pytest.approx(2, rel=0.01)
    assert found.full_at_batch == pytest.approx(95 + found.free_mb / 2, rel=0.01)
    assert len(found.dangers) == 1
    assert "Memory grows by 2.00 MB a batch: at step " in found.dangers[0]


@pytest.mark.parametrize(
    "samples",
    [
        make_readings(0),
        make_readings(0, noise=30 * MB),
        make_readings(0, others=10 * MB),
        make_readings(-MB),  # it shrinks
        make_readings(2 * MB, count=5),  # too few to tell
        make_readings(10_000),  # less than what allocators do
        [
            *make_readings(9 * MB, count=16)[:15],
            *[make_readings(9 * MB, count=16)[15]._replace(batches=b) for b in range(75, 120, 5)],
        ],
        [*make_readings(2 * MB, count=16), *make_readings(2 * MB, count=24, workers=())[16:]],  # an epoch ended
    ],
    ids=["flat", "noisy", "another program", "shrinking", "few", "little", "filling up", "workers that ended"],
)
def test_what_is_not_sure_is_not_said(samples):
    found = summarise_readings(samples)
    assert found.growth_mb_per_batch is None
    assert found.full_at_batch is None
    assert found.dangers == ()


def test_workers_that_end_after_the_last_batch_hide_no_growth():
    samples = make_readings(2 * MB, count=20)
    last = samples[-1]._replace(batches=samples[-1].batches + 5, worker_bytes=())
    assert summarise_readings([*samples, last, last]).growth_mb_per_batch == pytest.approx(2, rel=0.01)


def test_a_full_shm_is_a_danger():
    found = summarise_readings(make_readings(0))
    shm = Reading(0, MB, int(0.9 * found.shm_total_mb * MB), MB, ())
    assert "/dev/shm is nearly full" in summarise_readings([shm]).dangers[0]


class Hoarder(Dataset):
    """Keeps what it read: every worker grows by 20 MB a sample."""

    def __init__(self):
        self.kept = []

    def __len__(self):
        return 800

    def __getitem__(self, index):
        self.kept.append(bytearray(os.urandom(1000) * 20_000))
        time.sleep(0.1)
        return index


@pytest.mark.clock
def test_a_worker_that_hoards_is_found_out():
    ballast = torch.ones(200 * MB, dtype=torch.uint8)  # every worker maps it, none copies it
    loader = DataLoader(Hoarder(), batch_size=2, num_workers=2)
    batches, count, began_s = iter(loader), 0, time.perf_counter()
    with watch_resources(lambda: count) as readings:
        while time.perf_counter() - began_s < 7:
            next(batches)
            count += 1
            rss = max(child.memory_info().rss for child in psutil.Process().children())
    found = summarise_readings(readings)
    assert found.growth_mb_per_batch == pytest.approx(40, rel=0.4)
    assert found.dangers[0].startswith("Memory grows by ")
    assert sum(mb > 100 for mb in found.worker_mb) == 2
    assert max(found.worker_mb) < (rss - 0.5 * len(ballast)) / MB  # RSS counts the 200 MB in each
    batches._shutdown_workers()
