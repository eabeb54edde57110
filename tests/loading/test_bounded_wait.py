"""No late file stops a run: what is not there in time moves to the end, or is left out by name."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import time

import pytest

from colab_utils.errors import ColabUtilsWarning
from colab_utils.loading.loader import make_loader

from .test_loader import Numbers, flatten, list_ids

WAIT_S = 0.5
SIZE = 24
EVERY = list(range(SIZE))
# What a batch of these samples waits for: the first time that it is read, or each time.
COMES_BY_ITSELF = {"seconds": 2 * WAIT_S}
ONCE = {"times": 1}
FOR_EVER: dict[str, float] = {}


class Hang:
    """Hangs in the system where one of some samples is read: the first ``times``, or for some
    ``seconds``.
    """

    def __init__(self, folder, samples, *, times=math.inf, seconds=None):
        self.folder = folder
        self.samples = samples
        self.times = times
        self.seconds = seconds
        self.pipe = folder / "nobody-writes"
        os.mkfifo(self.pipe)

    def __call__(self, index):
        if index not in self.samples:
            return
        count = len(list(self.folder.glob(f"{index}.*")))
        (self.folder / f"{index}.{count}").touch()
        if count >= self.times:
            return
        if self.seconds is None:
            os.open(self.pipe, os.O_RDONLY)
        time.sleep(self.seconds)


@pytest.fixture
def make(request):
    """``make_loader`` with a longest wait, that ends its workers with the test; none is left."""
    before = list_open()

    def build(dataset, **options):
        settings = {"batch_size": 2, "workers": 2, "deliver": "packed", "shuffle": False}
        loader = make_loader(dataset, **{**settings, "max_wait_s": WAIT_S, **options})
        loaders.append(loader)
        return loader

    loaders = []
    yield build
    for loader in loaders:
        loader.close()
    loaders.clear()
    gc.collect()
    assert multiprocessing.active_children() == []
    assert list_open() == before


def list_open():
    """The shared buffers that this process holds, and the files of ``/dev/shm``."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    buffers = [
        link for link in links if os.path.islink(link) and "colab_utils" in os.readlink(link)
    ]
    return len(buffers), sorted(os.listdir("/dev/shm"))


def list_late(loader):
    return [sample.image for sample in loader.late]


@pytest.mark.parametrize("prefetch", [1, 4])
@pytest.mark.parametrize("how", [COMES_BY_ITSELF, ONCE], ids=str)
def test_a_late_batch_comes_at_the_end(tmp_path, make, how, prefetch):
    loader = make(Numbers(SIZE, Hang(tmp_path, {5}, **how)), prefetch=prefetch)
    batches = list_ids(loader)
    assert [4, 5] in batches
    assert sorted(flatten(batches)) == EVERY
    assert batches.index([4, 5]) > batches.index([6, 7])
    assert 5 in list_late(loader)
    assert all(sample.waited_s >= WAIT_S for sample in loader.late)
    assert loader.bad == []
    assert loader.epoch == 1


@pytest.mark.parametrize("deliver", ["dense", "packed"])
@pytest.mark.parametrize("prefetch", [1, 4])
def test_what_never_comes_is_left_out_and_named(tmp_path, make, deliver, prefetch):
    dataset = Numbers(SIZE, Hang(tmp_path, {5}))
    loader = make(dataset, max_bad=1, deliver=deliver, prefetch=prefetch)
    ids = []
    with pytest.warns(ColabUtilsWarning, match=r"Sample 5 did not come within [\d.]+ seconds"):
        for batch in loader:
            ids += [t["image_id"] for t in batch[1]] if deliver == "dense" else batch.image_ids
    assert sorted(map(int, ids)) == [index for index in EVERY if index != 5]
    assert 5 in list_late(loader)
    assert [index for index, _ in loader.bad] == [5]
