"""Each part of loading timed alone: on a slowed folder, on shards, on anybody's own dataset and
batches.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from colab_utils import CocoFolder, ShardDataset
from colab_utils.diagnosis import stages as module
from colab_utils.diagnosis.stages import (
    LoadingStages,
    Stage,
    time_calls,
    time_dataset_stages,
    time_reads,
    time_samples,
    time_stages,
)
from colab_utils.slow_drive import DriveProfile, slow_down
from tests.diagnosis.loops import Samples, collate

SLOW = DriveProfile("test", open_s=0.02, bytes_per_s=50e6, source="made up for the test")


@pytest.mark.clock
def test_stages_of_a_folder_and_of_shards(tiny_dataset, tiny_shards):
    slow_down(tiny_dataset.images, SLOW)
    folder = CocoFolder(tiny_dataset.images, tiny_dataset.annotations, min_size=16)
    # With sizes, it decodes and shrinks by another function.
    folder.decode = None
    timed = time_dataset_stages(ShardDataset(tiny_shards), range(6), dense=True, seconds=2)
    slow = time_dataset_stages(folder, range(6), dense=True, seconds=2)
    assert list(timed.stages) == list(slow.stages) == ["read", "decode", "masks"]
    assert slow.stages["read"].median_ms >= 20 > slow.stages["read"].cpu_ms
    assert min(slow.read_s) >= 0.02
    assert slow.file_bytes == np.mean([len(folder._read_part(index)) for index in slow.indices])


@pytest.mark.clock
@pytest.mark.parametrize(
    ("width", "files_per_s"),
    [
        # All are served at once.
        (64, math.inf),
        # Eight are served at once: more reads wait for them.
        (8, 8 / 0.03),
    ],
)
def test_single_reads_are_those_that_do_not_meet_the_limit_of_the_folder(width, files_per_s):
    # Reads are served in the order in which they come.
    server = ThreadPoolExecutor(width)

    def read(index):
        server.submit(time.sleep, 0.03).result()
        return bytes(index)

    timed, contents = time_reads(read, range(1000), seconds=1.0)
    assert len(contents) > 100
    assert all(len(content) == index for index, content in contents.items())
    assert np.median(timed.read_s) == pytest.approx(0.03, rel=0.3)
    assert timed.files_per_s == pytest.approx(files_per_s, rel=0.3)


def test_a_few_files_are_read_once_each():
    asked = []
    timed, _ = time_reads(lambda index: bytes([asked.append(index) or 1]), [3, 1, 2], seconds=0.1)
    assert sorted(asked) == sorted(timed.indices) == [1, 2, 3]
    assert len(timed.read_s) == 3


@pytest.mark.clock
def test_a_users_own_loader_is_taken_apart():
    def collate_slowly(samples):
        time.sleep(0.008)
        return collate(samples)

    loader = DataLoader(Samples(64, 0.02), batch_size=4, collate_fn=collate_slowly, num_workers=1)
    timed = time_stages(loader, images=4, seconds=4)
    assert list(timed.stages) == ["sample", "collate"]
    assert len(timed.indices) == 32
    # An image is waited for as long as its sample sleeps, and has its part of the batch.
    assert 0.02 <= np.median(timed.read_s) < 0.03
    assert 2 <= timed.stages["collate"].median_ms < 6


def _fail(index):
    raise ValueError("a bad header")


@pytest.mark.parametrize(
    ("act", "words"), [(_fail, "a bad header"), (lambda _: time.sleep(30), "timed out")]
)
def test_what_cannot_be_taken_apart_has_no_stages(act, words, monkeypatch):
    monkeypatch.setattr(module, "_TIMEOUT_S", 0.5)
    loader = DataLoader(Samples(act=act), batch_size=4)
    times = time_stages(loader, images=4, seconds=0.1)
    assert times[:2] == ({}, ())
    assert words in times.unseen
    assert time_stages([1, 2], images=1, seconds=0.2) == LoadingStages()


def test_samples_are_loaded_as_the_users_workers_load_them():
    def check_worker(_):
        assert get_worker_info().dataset.file == "opened by worker_init_fn"
        # Forked workers of this process would share this handle.
        get_worker_info().dataset.late = "opened by a sample"

    def open_file(worker):
        get_worker_info().dataset.file = "opened by worker_init_fn"

    dataset = Samples(act=check_worker)
    loader = DataLoader(dataset, batch_size=4, num_workers=1, worker_init_fn=open_file)
    assert [*time_stages(loader, images=4, seconds=0.2).stages] == ["sample", "collate"]
    assert not {"file", "late"} & vars(dataset).keys()


@pytest.mark.clock
def test_calls_end_in_time_and_their_waits_are_no_work():
    calls = time_calls(time.sleep, [0.005] * 100, max_s=0.03)
    assert 1 <= len(calls) <= 7
    slept = Stage.from_calls("sleep", calls)
    assert 5 <= slept.median_ms <= slept.p95_ms
    assert slept.cpu_ms < slept.mean_ms


@pytest.mark.parametrize("count", [1, 3, 10])
def test_a_dataset_that_gives_batches_is_timed_by_them(count):
    asked = []

    class Batched:
        def __getitems__(self, indices):
            asked.append(len(indices))
            return list(indices)

    (whole,) = time_samples(Batched(), range(9), images=count, seconds=5).stages.values()
    assert whole.name == "sample"
    assert set(asked) == {min(count, 9)}


def test_samples_that_never_come_together_are_timed_without_a_batch():
    # The samples have two sizes, which a loader puts into batches of one size.
    samples = [torch.zeros(3, 8, 8 + index % 2) for index in range(16)]
    timed = time_stages(DataLoader(samples, batch_sampler=[[0, 2]]), images=8, seconds=0.4)
    assert timed.unseen == ""
    assert [*timed.stages] == ["sample"]
