"""Finding the workers: what is tried and what is picked."""

from __future__ import annotations

import shutil
import threading

import pytest
import torch
from torch.utils.data import Subset

from colab_utils.errors import ColabUtilsError
from colab_utils.loading import tune
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.fetcher import Fetcher
from colab_utils.loading.loader import make_loader
from colab_utils.loading.sampler import BatchSampler
from colab_utils.loading.tune import tune_workers
from colab_utils.machine import count_cores
from colab_utils.slow_drive import DriveProfile, slow_down


class Small(torch.utils.data.Dataset):
    """Somebody's own dataset."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.zeros(3, 8, 8, dtype=torch.uint8), {
            "boxes": torch.zeros(0, 4),
            "labels": torch.zeros(0),
            "masks": torch.zeros(0, 8, 8, dtype=torch.uint8),
            "image_id": index,
            "area": torch.zeros(0),
            "iscrowd": torch.zeros(0),
        }


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Short trials."""
    monkeypatch.setattr(tune, "_TRIAL_S", 0.05)


@pytest.fixture
def many(tiny_shards):
    """The tiny shards as 320 images."""
    return Subset(ShardDataset(tiny_shards), [i % 12 for i in range(320)])


def find_workers(dataset, batch_size=4):
    fetcher = Fetcher(dataset)
    return tune_workers(
        fetcher, list(BatchSampler(len(fetcher), batch_size, 0, sizes=fetcher.sizes))
    )


def test_auto_tries_the_real_loader(many, monkeypatch):
    monkeypatch.setattr(tune, "count_cores", lambda: 2)
    loader = make_loader(many, batch_size=4, deliver="packed")
    assert set(loader.rates) == {1, 2}
    assert all(rate > 0 for rate in loader.rates.values())
    assert loader.workers in loader.rates
    assert loader.describe_workers().startswith(f"workers: {loader.workers}, the fewest with about")
    assert sum(len(batch) for batch in loader) == 320
    loader.close()


def test_nothing_is_remembered(many, tiny_shards, tmp_path, monkeypatch):
    """Workers that were found for one folder are not taken for another one of the same
    annotations.
    """
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = []
    monkeypatch.setattr(tune, "_measure_rate", lambda *given: result.append(given) or 1.0)
    copied = shutil.copytree(tiny_shards, tmp_path / "copied")
    find_workers(many)
    first = len(result)
    find_workers(Subset(ShardDataset(copied), many.indices))
    assert len(result) == 2 * first > 0
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("cores", "tried"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 3]),
        (8, [2, 4, 8]),
        (64, [16, 32, 64]),
    ],
)
def test_few_are_tried_and_never_more_than_there_are_cores(many, monkeypatch, cores, tried):
    monkeypatch.setattr(tune, "count_cores", lambda: cores)
    monkeypatch.setattr(tune, "_measure_rate", lambda *_: 1.0)
    assert list(find_workers(many)[1]) == tried


def test_the_smallest_of_the_fastest_is_picked():
    assert tune._pick({1: 97.0, 2: 100.0, 3: 101.0}) == 1
    assert tune._pick({1: 90.0, 2: 100.0, 3: 101.0}) == 2


def test_what_does_not_fit_into_memory_is_not_tried(many, monkeypatch):
    monkeypatch.setattr(tune, "count_cores", lambda: 4)
    # A batch of four takes a little less, with the quarter that is added for larger ones.
    batch_bytes = 320_000
    # Half of the free memory is for five batches.
    monkeypatch.setattr(tune, "find_free_memory", lambda: int(2 * 5 * batch_bytes))
    assert find_workers(many)[1].keys() == {1}
    monkeypatch.setattr(tune, "find_free_memory", lambda: int(2 * 2 * batch_bytes))
    assert find_workers(many) == (0, {})


def test_few_batches_are_not_tuned(tiny_shards, monkeypatch):
    monkeypatch.setattr(tune, "tune_workers", None)
    few = make_loader(ShardDataset(tiny_shards), batch_size=4)
    assert (few.rates, few.prefetch) == ({}, 2)
    assert few.describe_workers() == ""
    assert make_loader(Small(), batch_size=1, workers=2, prefetch=3).prefetch == 3


def test_somebodys_own_dataset_is_tuned_too(monkeypatch):
    monkeypatch.setattr(tune, "count_cores", lambda: 2)
    _, rates = find_workers(Small())
    assert rates.keys() == {1, 2}


def test_slow_files_are_not_tried(tiny_dataset, monkeypatch):
    slow_down(tiny_dataset.images, DriveProfile("mine", 0.1, 1e9, "a test"))
    folder = CocoFolder(tiny_dataset.images, tiny_dataset.annotations)
    monkeypatch.setattr(tune, "_measure_rate", None)
    assert find_workers(folder) == (count_cores(), {})


def test_a_dataset_with_bad_images_is_tuned_and_one_of_bad_images_says_so_when_it_is_read():
    class Bad(Small):
        def __getitem__(self, index):
            if index >= self.first:
                raise ColabUtilsError(f"image {index} is broken")
            return super().__getitem__(index)

    dataset = Bad()
    dataset.first = 390
    assert any(find_workers(dataset, batch_size=1)[1].values())
    dataset.first = 0
    loader = make_loader(dataset, batch_size=1)
    with pytest.raises(ColabUtilsError, match=r"image \d+ is broken"):
        list(loader)


def test_a_trial_that_fails_leaves_no_thread(many, monkeypatch):
    def fail(loaded):
        raise ColabUtilsError("a worker died")

    monkeypatch.setattr(tune, "_time_batches", fail)
    with pytest.raises(ColabUtilsError, match="a worker died"):
        find_workers(many)
    assert "step" not in [thread.name for thread in threading.enumerate()]
