"""Memory, /dev/shm and open files of a loader's processes, and when memory will be full."""

from __future__ import annotations

import os
import time

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from colab_utils.diagnosis.diagnose import diagnose
from colab_utils.diagnosis.resources import Sample, Used, summarise_samples, watch_resources

# Python 3.12 warns that a process with threads forks: torch's DataLoader does, by design
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

MB = 1_000_000


def make_samples(growth, *, count=20, workers=(100 * MB, 100 * MB), noise=0):
    return [
        Sample(
            batches=5 * number,
            free_bytes=9000 * MB - 5 * number * growth + (noise if number % 2 else -noise),
            shm_bytes=1000,
            used=Used(500 * MB, workers, 30),
        )
        for number in range(count)
    ]


def test_growth_is_a_slope_over_batches():
    found = summarise_samples(make_samples(2 * MB))
    assert found.growth_mb_per_batch == pytest.approx(2, rel=0.01)
    assert found.full_at_batch == pytest.approx(95 + found.free_mb / 2, rel=0.01)
    assert len(found.dangers) == 1
    assert "Memory grows by 2.00 MB a batch: at step " in found.dangers[0]


@pytest.mark.parametrize(
    "samples",
    [
        make_samples(0),
        make_samples(0, noise=30 * MB),
        make_samples(-MB),  # it shrinks
        make_samples(2 * MB, count=5),  # too few to tell
        make_samples(10_000),  # less than what allocators do
        [
            *make_samples(9 * MB, count=16)[:15],
            *[make_samples(9 * MB, count=16)[15]._replace(batches=b) for b in range(75, 120, 5)],
        ],
        [*make_samples(2 * MB, count=16), *make_samples(2 * MB, count=24, workers=())[16:]],  # an epoch ended
    ],
    ids=["flat", "noisy", "shrinking", "few", "little", "filling up", "workers that ended"],
)
def test_what_is_not_sure_is_not_said(samples):
    found = summarise_samples(samples)
    assert found.growth_mb_per_batch is None
    assert found.full_at_batch is None
    assert found.dangers == ()


def test_workers_that_end_after_the_last_batch_hide_no_growth():
    samples = make_samples(2 * MB, count=20)
    last = samples[-1]._replace(batches=samples[-1].batches + 5, used=Used(500 * MB, (), 30))
    assert summarise_samples([*samples, last, last]).growth_mb_per_batch == pytest.approx(2, rel=0.01)


def test_full_shm_and_open_files_are_dangers():
    found = summarise_samples(make_samples(0))
    shm = Sample(0, MB, int(0.9 * found.shm_total_mb * MB), Used(MB, (), 10))
    files = Sample(0, MB, 0, Used(MB, (), int(0.9 * found.open_files_limit)))
    assert "/dev/shm is nearly full" in summarise_samples([shm]).dangers[0]
    assert "files open" in summarise_samples([files]).dangers[0]


class Hoarder(Dataset):
    """Keeps what it read: every worker grows by 2 MB a sample."""

    def __init__(self):
        self.kept = []

    def __len__(self):
        return 800

    def __getitem__(self, index):
        self.kept.append(os.urandom(2 * MB))
        time.sleep(0.02)
        return torch.zeros(3, 4, 4), index


def test_a_worker_that_hoards_is_found_out():
    loader = DataLoader(Hoarder(), batch_size=2, num_workers=1)
    found = diagnose(loader, lambda *batch: time.sleep(0.001), seconds=24)
    assert found.resources.growth_mb_per_batch == pytest.approx(4, rel=0.4)
    assert "Memory grows by" in found.verdict
    assert len(found.resources.worker_mb) == 1


def test_pss_of_workers_shares_what_is_shared():
    ballast = torch.ones(200 * MB, dtype=torch.uint8)  # every worker maps it, none copies it

    class Shares(Hoarder):
        def __getitem__(self, index):
            time.sleep(0.01)
            return ballast[:10].clone(), index

    loader = DataLoader(Shares(), batch_size=2, num_workers=2)
    batches = iter(loader)
    with watch_resources(lambda: 3) as samples:
        for _ in range(20):
            next(batches)
        time.sleep(1.2)
        rss = [child.memory_info().rss for child in psutil.Process().children()]
    found = summarise_samples(samples)
    assert len(found.worker_mb) == 2
    assert max(found.worker_mb) < 0.75 * max(rss) / MB  # RSS counts the 200 MB in each
    assert found.samples >= 3
    assert found.samples == len(samples)
    batches._shutdown_workers()
