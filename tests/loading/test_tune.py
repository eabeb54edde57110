"""Finding the workers: what is tried, what is picked, and what is remembered."""

from __future__ import annotations

import json
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
def quick(monkeypatch, tmp_path):
    """Short trials, and a memory of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tune, "_TRIAL_S", 0.05)


@pytest.fixture
def many(tiny_shards):
    """The tiny shards as 320 images."""
    return Subset(ShardDataset(tiny_shards), [i % 12 for i in range(320)])


def test_auto_tries_the_real_loader_and_remembers(many, tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "count_cores", lambda: 2)
    loader = make_loader(many, batch_size=4, deliver="packed")
    tuning = loader.tuning
    ways = {(trial.backend, trial.workers) for trial in tuning.trials}
    assert ways == {("processes", 1), ("processes", 2), ("loader_process", 2)}
    assert all(trial.images_per_second > 0 for trial in tuning.trials)
    assert (loader.backend, loader.workers, loader.prefetch) == (
        tuning.best.backend, tuning.best.workers, tuning.best.prefetch)  # fmt: skip
    assert tuning.best in tuning.trials
    assert 0 < tuning.memory_bytes < tuning.free_bytes
    assert not tuning.remembered
    assert sum(len(batch) for batch in loader) == 320
    loader.close()
    monkeypatch.setattr(tune, "_measure_rate", None)  # nothing is tried again
    again = make_loader(many, batch_size=4, deliver="packed").tuning
    assert again == replace(tuning, remembered=True)
    assert "remembered" in str(again)
    with pytest.raises(TypeError):
        make_loader(many, batch_size=5)  # another batch size is another case


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', '{"a": {"best": {}}}'])
def test_a_damaged_memory_is_made_again(many, tmp_path, content):
    path = tmp_path / "cache" / "colab_utils" / "workers.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    tuning = tune_workers(many, batch_size=4, backend="threads")
    assert not tuning.remembered
    assert len(json.loads(path.read_text())) == 1
    assert tune_workers(many, batch_size=4, backend="threads").remembered


def test_a_home_that_cannot_be_written_to_does_not_matter(many, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder would be")
    assert tune_workers(many, batch_size=4, backend="threads").trials


def test_kinds_that_cannot_gain_are_not_tried(many, monkeypatch):
    monkeypatch.setattr(tune, "count_cores", lambda: 8)
    ways = tune._list_ways(Fetcher(many), None)
    assert {n for _, n in ways} == {1, 2, 3, 4, 6, 8}  # never more than the cores
    assert {kind for kind, _ in ways} == {"processes", "loader_process"}
    assert {kind for kind, _ in tune._list_ways(Fetcher(Small()), None)} == {"processes"}  # Python code: one lock
    many.dataset.is_decoded = True
    assert {kind for kind, _ in tune._list_ways(Fetcher(many), None)} == {"processes", "loader_process", "threads"}
    assert {kind for kind, _ in tune._list_ways(Fetcher(many), "loader_process")} == {"loader_process"}


def test_the_smallest_of_the_fastest_is_picked():
    trials = [Trial("processes", 1, 2, 97.0), Trial("processes", 2, 2, 100.0), Trial("processes", 3, 2, 101.0)]
    assert tune._pick(trials) == trials[0]
    assert tune._pick([replace(trials[0], images_per_second=90.0), *trials[1:]]) == trials[1]


def test_what_does_not_fit_into_memory_is_not_tried(many, monkeypatch):
    monkeypatch.setattr(tune, "count_cores", lambda: 4)
    one = 320_000  # a little more than a batch of four, and a quarter for larger ones
    monkeypatch.setattr(tune, "find_free_memory", lambda: int(2 * 5 * one))  # half of it is for five batches
    tuning = tune_workers(many, batch_size=4)
    assert {trial.workers for trial in tuning.trials} == {1}
    monkeypatch.setattr(tune, "find_free_memory", lambda: int(2 * 2 * one))
    with pytest.raises(ColabUtilsError, match=r"at most 213\.3 kB.*4 images of 3\d\d\.\d kB.*smaller batch"):
        tune_workers(many, batch_size=4, remember=False)


def test_few_batches_are_not_tuned(tiny_shards, monkeypatch):
    monkeypatch.setattr(loader_module, "tune_workers", None)
    few = make_loader(ShardDataset(tiny_shards), batch_size=4)
    assert (few.tuning, few.backend, few.prefetch) == (None, "processes", 2)
    assert make_loader(Small(), batch_size=1, workers=2, prefetch=3).prefetch == 3


def test_somebodys_own_dataset_is_tuned_too(monkeypatch):
    monkeypatch.setattr(tune, "count_cores", lambda: 2)
    tuning = tune_workers(Small(), batch_size=4)
    assert isinstance(tuning, Tuning)
    assert {(trial.backend, trial.workers) for trial in tuning.trials} == {("processes", 1), ("processes", 2)}
    text = str(tuning)
    assert "images/s" in text
    assert "picked: " in text
    assert "free" in text


def test_slow_files_are_not_tried(tiny_dataset, monkeypatch):
    folder = CocoFolder(tiny_dataset.images, tiny_dataset.annotations, profile=DriveProfile("mine", 0.1, 1e9, "a test"))
    monkeypatch.setattr(tune, "_measure_rate", None)
    tuning = tune_workers(folder, batch_size=4)
    assert (tuning.trials, tuning.best.backend, tuning.best.workers) == ((), "processes", count_cores())
    assert "the files are slow" in str(tuning)
    assert not tune_workers(folder, batch_size=4).remembered


def test_a_dataset_with_bad_images_is_tuned_and_one_of_bad_images_is_refused(monkeypatch):
    class Bad(Small):
        def __getitem__(self, index):
            if index >= self.first:
                raise ColabUtilsError(f"image {index} is broken")
            return super().__getitem__(index)

    dataset = Bad()
    dataset.first = 390
    assert tune_workers(dataset, batch_size=1, backend="threads", remember=False).trials
    dataset.first = 0
    with pytest.raises(ColabUtilsError, match=r"image \d+ is broken"):
        tune_workers(dataset, batch_size=1)
