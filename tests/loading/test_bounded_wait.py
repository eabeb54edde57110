"""No late file stops a run: what is not there in time is tried again, or is left out by name."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from colab_utils import files
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading import prefetcher
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.loader import make_loader

from ..drive_mount import SERVER, mount_or_skip
from .test_loader import Numbers, flatten, list_ids

WAIT_S = 0.5
SIZE = 24
EVERY = list(range(SIZE))
# These samples hang the first time that they are read.
ONCE = {"times": 1}


class Hang:
    """Hangs in the system where one of some samples is read, the first ``times``."""

    def __init__(self, folder, samples, *, times=math.inf):
        self.folder = folder
        self.samples = samples
        self.times = times
        self.pipe = folder / "nobody-writes"
        os.mkfifo(self.pipe)

    def __call__(self, index):
        if index not in self.samples:
            return
        count = self.count_tries(index)
        (self.folder / f"{index}.{count}").touch()
        if count < self.times:
            os.open(self.pipe, os.O_RDONLY)

    def count_tries(self, index):
        return len(list(self.folder.glob(f"{index}.*")))


@pytest.fixture
def make(make):
    """``make_loader`` with a longest wait; no process and no memory is left of it."""
    gc.collect()
    before = list_open()
    loaders = []

    def build(dataset, **options):
        settings = {"workers": 2, "shuffle": False, "max_wait_s": WAIT_S}
        loaders.append(make(dataset, **{**settings, **options}))
        return loaders[-1]

    yield build
    for loader in loaders:
        loader.close()
    assert multiprocessing.active_children() == []
    loaders.clear()
    gc.collect()
    assert list_open() == before


def list_open():
    """The shared buffers that this process holds, and its files of ``/dev/shm``."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    names = [os.readlink(link) for link in links]
    buffers = [name for name in names if "memfd:colab_utils" in name]
    shared = [name for name in os.listdir("/dev/shm") if str(os.getpid()) in name]
    return buffers, shared


def leave_out(*samples):
    """All samples but some."""
    return [index for index in EVERY if index not in samples]


def list_late(loader):
    return [sample.image for sample in loader.late]


@pytest.mark.parametrize("prefetch", [1, 4])
def test_a_late_batch_comes_in_its_place(tmp_path, make, prefetch):
    loader = make(Numbers(SIZE, Hang(tmp_path, {5}, **ONCE)), prefetch=prefetch)
    assert flatten(list_ids(loader)) == EVERY
    assert list_late(loader) == [5]
    assert loader.late[0].waited_s >= WAIT_S
    assert loader.bad == []
    assert loader.epoch == 1


def test_what_never_comes_is_tried_twice_and_left_out_by_name(tmp_path, make):
    hang = Hang(tmp_path, {5})
    loader = make(Numbers(SIZE, hang), max_bad=1)
    with pytest.warns(ColabUtilsWarning, match=r"number 1 so far.*Sample 5 did not come within"):
        assert flatten(list_ids(loader)) == leave_out(5)
    assert hang.count_tries(5) == 2
    # It counts once and is told once, and later passes try it anew.
    assert flatten(list_ids(loader)) == leave_out(5)
    assert hang.count_tries(5) == 4
    assert list_late(loader) == [5, 5]
    assert [index for index, _ in loader.bad] == [5]
    assert loader.epoch == 2


@pytest.mark.parametrize(
    ("samples", "named"),
    [
        ({4, 5}, "Sample 4 "),
        # A sample of the last batch has no batch after it.
        ({SIZE - 1}, f"Sample {SIZE - 1} "),
        # Both workers hang, whatever else they are given.
        (set(EVERY), "Sample 0 "),
    ],
    ids=str,
)
def test_what_never_comes_is_an_error_that_names_it(tmp_path, make, samples, named):
    loader = make(Numbers(SIZE, Hang(tmp_path, samples)))
    ids = []
    with pytest.raises(ColabUtilsError, match=named) as error:
        ids.extend(batch.image_ids.tolist() for batch in loader)
    assert "max_bad" in str(error.value)
    assert set(list_late(loader)) & samples
    assert flatten(ids) == EVERY[: min(samples) // 2 * 2]


def test_several_that_never_come_are_left_out(tmp_path, make):
    samples = {4, 5, SIZE - 1}
    loader = make(Numbers(SIZE, Hang(tmp_path, samples)), max_bad=3)
    with pytest.warns(ColabUtilsWarning, match="did not come"):
        ids = flatten(list_ids(loader))
    assert sorted(ids) == leave_out(*samples)
    assert sorted(index for index, _ in loader.bad) == sorted(samples)
    assert samples <= set(list_late(loader))


def test_slow_samples_of_a_batch_are_not_given_up_as_if_they_hung(make):
    """Each sample takes less than the longest wait, and their batch takes more."""
    loader = make(Numbers(8, lambda index: time.sleep(0.6 * WAIT_S)), batch_size=4)
    assert flatten(list_ids(loader)) == [*range(8)]
    assert loader.late == []


def test_without_workers_a_longest_wait_is_refused():
    with pytest.raises(ColabUtilsError, match="max_wait_s needs worker processes"):
        make_loader(Numbers(4), batch_size=2, workers=0, max_wait_s=5)


# The tests below read the package's own datasets.


@pytest.mark.parametrize("streams", [1, 8])
def test_a_loose_file_that_hangs_is_named(loose, tmp_path, monkeypatch, make, streams):
    hang = Hang(tmp_path, {3})
    read = files.read_whole
    name = loose.find_path(3).name

    def read_or_hang(path, **options):
        hang(3 if path.name == name else 0)
        return read(path, **options)

    monkeypatch.setattr(files, "read_whole", read_or_hang)
    loader = make(loose, max_bad=1, streams=streams)
    with pytest.warns(ColabUtilsWarning, match=rf"Sample 3 \(.*{name}\) did not come"):
        ids = flatten(list_ids(loader))
    assert sorted(ids) == sorted(np.delete(loose.image_ids, 3).tolist())
    assert list_late(loader) == [3]


@contextmanager
def stop_mounts():
    """Drive answers nothing: who reads hangs in the system, and cannot even be killed."""
    children = psutil.Process().children()
    alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    servers = [child for child in alive if SERVER.name in str(child.cmdline())]
    assert servers
    for server in servers:
        server.suspend()
    while not all(server.status() == psutil.STATUS_STOPPED for server in servers):
        time.sleep(0.01)
    try:
        yield servers[0]
    finally:
        for server in servers:
            server.resume()


@pytest.fixture
def on_drive(tiny_dataset, tmp_path):
    """Loose files on a mounted Drive."""
    with mount_or_skip(tiny_dataset.images, tmp_path / "drive", direct=True) as mount:
        yield CocoFolder(mount.folder, tiny_dataset.annotations)


def test_a_drive_that_answers_nothing_for_a_while_loses_no_sample(on_drive, make):
    # New workers of a busy machine need more than the time of the other tests.
    loader = make(on_drive, streams=1, prefetch=1, max_wait_s=4 * WAIT_S)

    def resume_when_late(server):
        while not loader.late:
            time.sleep(0.01)
        server.resume()

    with stop_mounts() as server:
        resuming = threading.Thread(target=resume_when_late, args=(server,), daemon=True)
        resuming.start()
        ids = flatten(list_ids(loader))
        assert loader.late
        resuming.join()
    assert sorted(ids) == sorted(on_drive.image_ids.tolist())


def test_processes_that_cannot_be_killed_are_not_waited_for(on_drive, monkeypatch, make):
    monkeypatch.setattr(prefetcher, "_DEATH_S", 0.1)
    loader = make(on_drive, streams=1)
    with stop_mounts():
        with pytest.raises(ColabUtilsError, match="did not come within"):
            list(loader)
        assert multiprocessing.active_children() == []
    # Drive answers again.
    assert sorted(flatten(list_ids(loader))) == sorted(on_drive.image_ids.tolist())
