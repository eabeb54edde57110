"""Whether a dataset has changed, told by a digest."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset
from torchvision.transforms import v2

from colab_utils.loading import digest
from colab_utils.loading.dataset import CocoFolder, ShardDataset
from colab_utils.loading.digest import digest_dataset


class Photos:
    """Somebody's own dataset."""

    def __init__(self):
        self.epoch = 0
        self.paths = ["a.jpg"]
        self.boxes = np.zeros((2, 4))
        self.turned = np.zeros((2, 4), order="F")
        self.scores = torch.zeros(3, requires_grad=True)
        self.transforms = v2.Compose([v2.RandomHorizontalFlip(0.5)])

    def set_box(self):
        self.boxes[1, 2] = 1

    def set_turned(self):
        self.turned[1, 2] = 1

    def set_score(self):
        self.scores.data[1] = 1


@pytest.mark.parametrize(
    "change",
    [
        lambda photos: setattr(photos, "epoch", 1),
        lambda photos: setattr(photos, "transforms", None),
        lambda photos: setattr(photos.transforms.transforms[0], "p", 0.25),
        lambda photos: photos.paths.append("b.jpg"),
        Photos.set_box,
        Photos.set_turned,
        Photos.set_score,
    ],
)
@pytest.mark.parametrize(
    "hold",
    [
        lambda photos: photos,
        lambda photos: Subset(photos, [0]),
        lambda photos: ConcatDataset([Subset(photos, [0]), Subset(photos, [0])]),
    ],
)
def test_a_change_shows_wherever_it_is_held(change, hold, monkeypatch):
    monkeypatch.setattr(Photos, "__len__", lambda photos: 1, raising=False)
    photos = Photos()
    dataset = hold(photos)
    before = digest_dataset(dataset)
    assert before
    assert digest_dataset(dataset) == before
    change(photos)
    assert digest_dataset(dataset) not in (before, "")


def test_the_packages_own_datasets_can_be_compared(tiny_shards, tiny_dataset):
    folder = CocoFolder(tiny_dataset.images, tiny_dataset.annotations)
    for dataset in (ShardDataset(tiny_shards), folder):
        before = digest_dataset(dataset)
        assert before
        assert len(dataset[0]) == 2
        assert digest_dataset(dataset) == before
    shards = ShardDataset(tiny_shards)
    before = digest_dataset(shards)
    shards.transforms = v2.Identity()
    assert digest_dataset(shards) != before


class Strange:
    """An object that cannot be pickled, for a reason of its own."""

    def __reduce__(self):
        raise KeyboardError


class KeyboardError(Exception):
    """Somebody's own."""


@pytest.mark.parametrize(
    "part",
    [
        lambda image: image,
        threading.Lock(),
        Strange(),
        b"x" * 9_000_000,
        [float(number) for number in range(1_000_000)],
    ],
    ids=["lambda", "lock", "strange", "bytes", "floats"],
)
def test_what_cannot_be_pickled_or_is_large_cannot_be_compared(part):
    photos = Photos()
    photos.part = part
    assert digest_dataset(photos) == ""


def test_large_arrays_and_mapped_files_cannot_be_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(digest, "_MOST_ARRAY_BYTES", 100)
    assert digest_dataset(np.zeros(12)) != ""
    assert digest_dataset([np.zeros(12), np.ones(12)]) == ""
    assert digest_dataset(torch.zeros(100)) == ""
    mapped = np.memmap(tmp_path / "pixels", mode="w+", shape=(3,))
    assert digest_dataset(mapped) == ""


@pytest.mark.parametrize("mode", ["c", "r+"])
def test_a_part_of_a_mapped_file_that_is_written_cannot_be_compared(tmp_path, mode):
    path = tmp_path / "pixels"
    path.write_bytes(bytes(range(100)))
    photos = Photos()
    photos.boxes = np.memmap(path, mode=mode)[10:16]
    assert digest_dataset(photos) == ""


def test_a_part_of_a_mapped_file_that_is_only_read_is_known_by_its_place(tmp_path):
    path = tmp_path / "pixels"
    path.write_bytes(bytes(range(100)))
    mapped = np.memmap(path, mode="r")
    photos = Photos()
    photos.boxes = np.ndarray((3, 2), np.uint8, mapped, 10)
    before = digest_dataset(photos)
    assert before
    assert digest_dataset(photos) == before
    photos.boxes = np.ndarray((3, 2), np.uint8, mapped, 20)
    assert digest_dataset(photos) not in (before, "")
    photos.boxes = np.ndarray((2, 3), np.uint8, mapped, 10)
    assert digest_dataset(photos) not in (before, "")
    photos.boxes = mapped
    whole = digest_dataset(photos)
    assert whole not in (before, "")
    photos.boxes = mapped[10:]
    assert digest_dataset(photos) not in (whole, before, "")


def test_a_dataset_with_an_attribute_base_is_compared_as_any_other():
    photos = Photos()
    photos.base = photos
    before = digest_dataset(photos)
    assert before
    photos.base = None
    assert digest_dataset(photos) not in (before, "")
