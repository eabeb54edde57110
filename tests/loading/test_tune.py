"""Finding the workers: what is tried and what is picked."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from torch.utils.data import Subset

from colab_utils.drive import DriveProfile
from colab_utils.errors import ColabUtilsError
from colab_utils.loading import loader as loader_module
from colab_utils.loading import tune
from colab_utils.loading.dataset import CocoFolder, ShardDataset
from colab_utils.loading.loader import make_loader
from colab_utils.loading.tune import Trial, Tuning, tune_workers
from colab_utils.loading.workers import Fetcher
from colab_utils.runtime import count_cores


class Small(torch.utils.data.Dataset):
    """Somebody's own dataset."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.zeros(3, 8, 8, dtype=torch.uint8), {
            "boxes": torch.zeros(0, 4), "labels": torch.zeros(0), "masks": torch.zeros(0, 8, 8, dtype=torch.uint8),
            "image_id": index, "area": torch.zeros(0), "iscrowd": torch.zeros(0)}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Short trials."""
    monkeypatch.setattr(tune, "_TRIAL_S", 0.05)


@pytest.fixture
def many(tiny_shards):
    """The tiny shards as 320 images."""
    return Subset(ShardDataset(tiny_shards), [i % 12 for i in range(320)])


def test_auto_tries_the_real_loader(many, monkeypatch):
    monkeypatch.setattr(tune, "count_cores", lambda: 2)
    loader = make_loader(many, batch_size=4, deliver="packed")
    tuning = loader.tuning
    ways = {(trial.backend, trial.workers) for trial in tuning.trials}
    assert ways == {("processes", 1), ("processes", 2), ("loader_process", 2)}
    assert all(trial.images_per_second > 0 for trial in tuning.trials)
    assert (loader.backend, loader.workers) == (tuning.best.backend, tuning.best.workers)
    assert tuning.best in tuning.trials
    assert sum(len(batch) for batch in loader) == 320
    loader.close()


def test_nothing_is_remembered(many, tiny_shards, tmp_path, monkeypatch):
    """Workers that were found for one folder are not taken for another one of the same annotations."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = []
    monkeypatch.setattr(tune, "_try_setting", lambda *given: found.append(given) or Trial(*given[2:], 1.0))
    copied = shutil.copytree(tiny_shards, tmp_path / "copied")
    tune_workers(Fetcher(many), batch_size=4, backend="processes")
    first = len(found)
    tune_workers(Fetcher(Subset(ShardDataset(copied), many.indices)), batch_size=4, backend="processes")
    assert len(found) == 2 * first > 0
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("cores", [1, 2, 3, 8, 64])
def test_kinds_that_cannot_gain_are_not_tried(many, monkeypatch, cores):
    monkeypatch.setattr(tune, "count_cores", lambda: cores)

    def list_kinds(fetcher, backend=None):
        ways = tune._list_settings(fetcher, backend)
        assert len(set(ways)) == len(ways) <= 5
        assert {n for _, n in ways} <= {max(1, cores // 4), max(1, cores // 2), cores}
        return {kind for kind, _ in ways}

    compressed = {"processes", "loader_process"} if cores > 1 else {"processes"}
    assert list_kinds(Fetcher(many)) == compressed
    assert list_kinds(Fetcher(Small())) == {"processes"}  # Python code: one lock


def test_the_smallest_of_the_fastest_is_picked():
    trials = [Trial("processes", 1, 97.0), Trial("processes", 2, 100.0), Trial("processes", 3, 101.0)]
    assert tune._pick(trials) == trials[0]
    assert tune._pick([replace(trials[0], images_per_second=90.0), *trials[1:]]) == trials[1]


def test_what_does_not_fit_into_memory_is_not_tried(many, monkeypatch):
    monkeypatch.setattr(tune, "count_cores", lambda: 4)
    one = 320_000  # a little more than a batch of four, and a quarter for larger ones
    monkeypatch.setattr(tune, "find_free_memory", lambda: int(2 * 5 * one))  # half of it is for five batches
    tuning = tune_workers(Fetcher(many), batch_size=4)
    assert {trial.workers for trial in tuning.trials} == {1}
    monkeypatch.setattr(tune, "find_free_memory", lambda: int(2 * 2 * one))
    assert (tune_workers(Fetcher(many), batch_size=4).best.workers) == 0


def test_few_batches_are_not_tuned(tiny_shards, monkeypatch):
    monkeypatch.setattr(loader_module, "tune_workers", None)
    few = make_loader(ShardDataset(tiny_shards), batch_size=4)
    assert (few.tuning, few.backend, few.prefetch) == (None, "processes", 2)
    assert make_loader(Small(), batch_size=1, workers=2, prefetch=3).prefetch == 3


def test_somebodys_own_dataset_is_tuned_too(monkeypatch):
    monkeypatch.setattr(tune, "count_cores", lambda: 2)
    tuning = tune_workers(Fetcher(Small()), batch_size=4)
    assert isinstance(tuning, Tuning)
    assert {(trial.backend, trial.workers) for trial in tuning.trials} == {("processes", 1), ("processes", 2)}
    text = str(tuning)
    assert "images/s" in text
    assert "picked: " in text


def test_slow_files_are_not_tried(tiny_dataset, monkeypatch):
    folder = CocoFolder(tiny_dataset.images, tiny_dataset.annotations, profile=DriveProfile("mine", 0.1, 1e9, "a test"))
    monkeypatch.setattr(tune, "_try_setting", None)
    tuning = tune_workers(Fetcher(folder), batch_size=4)
    assert (tuning.trials, tuning.best.backend, tuning.best.workers) == ((), "processes", count_cores())
    assert "the files are slow" in str(tuning)


def test_a_dataset_with_bad_images_is_tuned_and_one_of_bad_images_says_so_when_it_is_read():
    class Bad(Small):
        def __getitem__(self, index):
            if index >= self.first:
                raise ColabUtilsError(f"image {index} is broken")
            return super().__getitem__(index)

    dataset = Bad()
    dataset.first = 390
    assert any(trial.images_per_second for trial in tune_workers(Fetcher(dataset), batch_size=1).trials)
    dataset.first = 0
    loader = make_loader(dataset, batch_size=1)
    with pytest.raises(ColabUtilsError, match=r"image \d+ is broken"):
        list(loader)
