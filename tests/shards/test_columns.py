"""The tables of all shards in one file, which every process maps: right, or told and not used."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading import dataset as dataset_module
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import make_loader
from colab_utils.loading.opening import open_dataset
from colab_utils.shards import columns
from colab_utils.shards.copy import copy_shards
from colab_utils.shards.index import COLUMNS_NAME, read_index
from colab_utils.shards.jobs import write_shard
from colab_utils.shards.parts import finish, plan_jobs
from colab_utils.shards.verify import verify_shards
from colab_utils.shards.write import write_shards
from colab_utils.slow_drive import DriveProfile, slow_down


@pytest.fixture(autouse=True)
def every_folder_is_large(monkeypatch):
    monkeypatch.setattr(columns, "_LEAST_IMAGES", 1)


@pytest.fixture
def shards(tiny_shards, tmp_path):
    """A copy of the tiny shards, with columns."""
    copy_shards(tiny_shards, tmp_path / "ssd")
    return tmp_path / "ssd"


def write_tiny(tiny_dataset, folder):
    shard_mb = tiny_dataset.bytes / 1e6 / 4
    return write_shards(
        tiny_dataset.images, tiny_dataset.annotations, shards=folder, shard_mb=shard_mb, workers=1
    )


def open_quietly(folder):
    """Open shards; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return ShardDataset(folder)


def refuse_tables(monkeypatch):
    """Let a dataset that reads the tables of a shard fail."""

    def load(*arguments, **settings):
        raise AssertionError("the tables of a shard were read")

    monkeypatch.setattr(dataset_module, "load_shard", load)


def assert_equal(dataset, expected):
    """Compare all that two datasets tell of their images."""
    for name in ("image_ids", "sizes", "counts", "has_objects", "shard_of"):
        values = getattr(dataset, name)
        assert np.array_equal(values, getattr(expected, name))
        assert values.dtype == getattr(expected, name).dtype
    for name in ("objects", "left_out", "fingerprint"):
        assert getattr(dataset, name) == getattr(expected, name)
    tables = dataset.describe(range(len(expected)))
    for name, table in expected.describe(range(len(expected))).items():
        assert np.array_equal(tables[name], table)
        assert tables[name].dtype == table.dtype
    for row in range(len(expected)):
        image, target = dataset[row]
        expected_image, expected_target = expected[row]
        assert image.equal(expected_image)
        assert target["image_id"] == expected_target["image_id"]
        assert target["masks"].equal(expected_target["masks"])
        assert target["labels"].equal(expected_target["labels"])
        assert dataset.record(row) == expected.record(row)


def test_a_dataset_opens_by_the_columns_alone(shards, tiny_shards, monkeypatch):
    expected = ShardDataset(tiny_shards)
    refuse_tables(monkeypatch)
    dataset = open_quietly(shards)
    assert_equal(dataset, expected)
    assert not dataset.image_ids.flags.writeable


@pytest.mark.parametrize("contiguous", [False, True])
def test_labels_are_mapped_as_without_columns(shards, tiny_shards, contiguous):
    expected = ShardDataset(tiny_shards, contiguous_labels=contiguous)
    assert_equal(ShardDataset(shards, contiguous_labels=contiguous), expected)


def test_each_way_of_writing_gives_the_same_bytes(tiny_dataset, tiny_shards, shards, tmp_path):
    write_tiny(tiny_dataset, tmp_path / "written")
    plan = plan_jobs(
        tiny_dataset.images,
        tiny_dataset.annotations,
        shards=tmp_path / "parts",
        shard_mb=tiny_dataset.bytes / 1e6 / 4,
    )
    for job in plan.jobs:
        write_shard(job)
    finish(tmp_path / "parts")
    arriving = ArrivingShards(tiny_shards, tmp_path / "arrived")
    arriving.wait()
    for name in ("written", "parts", "arrived"):
        assert verify_shards(tmp_path / name).bad == ()
        for file in (COLUMNS_NAME, "index.json"):
            assert (tmp_path / name / file).read_bytes() == (shards / file).read_bytes()


def test_a_part_of_the_shards_has_columns_of_its_own(tiny_shards, tmp_path, monkeypatch):
    size = read_index(tiny_shards).bytes
    copy_shards(tiny_shards, tmp_path / "part", limit_gb=0.6 * size / 1e9)
    whole = ShardDataset(tiny_shards)
    refuse_tables(monkeypatch)
    dataset = open_quietly(tmp_path / "part")
    images = len(dataset)
    assert 0 < images < len(whole)
    assert dataset.image_ids.tolist() == whole.image_ids[:images].tolist()
    copy_shards(tiny_shards, tmp_path / "part")
    assert_equal(open_quietly(tmp_path / "part"), whole)


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def flip_first(path):
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def flip_object(path):
    content = bytearray(path.read_bytes())
    content[-30] ^= 1
    path.write_bytes(content)


def lengthen(path):
    path.write_bytes(path.read_bytes() + bytes(8))


def empty(path):
    path.write_bytes(b"")


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


def renumber(path):
    """Forge another order of the images: each table keeps its size."""
    content = np.frombuffer(path.read_bytes(), np.uint8).copy()
    content[:16] = content[8:24]
    path.write_bytes(content.tobytes())


@pytest.mark.parametrize(
    "damage",
    [cut, flip_first, flip_object, lengthen, empty, Path.unlink, replace_by_folder, renumber],
)
def test_damaged_columns_are_told_and_not_used(shards, tiny_shards, tmp_path, damage):
    path = shards / COLUMNS_NAME
    damage(path)
    with pytest.warns(ColabUtilsWarning, match=rf"{COLUMNS_NAME} .*run preprocess or copy again"):
        dataset = ShardDataset(shards)
    assert_equal(dataset, ShardDataset(tiny_shards))
    assert [fault.shard for fault in verify_shards(shards).bad] == [COLUMNS_NAME]
    if path.is_dir():
        path.rmdir()
    copy_shards(tiny_shards, shards)
    assert verify_shards(shards).bad == ()
    assert_equal(open_quietly(shards), ShardDataset(tiny_shards))


def test_columns_of_other_shards_are_not_used(shards, tiny_dataset, tmp_path):
    write_shards(
        tiny_dataset.images, tiny_dataset.annotations, shards=tmp_path / "new", min_size=64
    )
    expected = ShardDataset(tmp_path / "new")
    shutil.copy(shards / COLUMNS_NAME, tmp_path / "old")
    # A file that is mapped is replaced, not changed.
    (tmp_path / "old").replace(tmp_path / "new" / COLUMNS_NAME)
    with pytest.warns(ColabUtilsWarning, match=COLUMNS_NAME):
        dataset = ShardDataset(tmp_path / "new")
    assert_equal(dataset, expected)


def test_preprocess_writes_lost_columns_anew(tiny_dataset, tiny_shards, tmp_path):
    folder = tmp_path / "shards"
    write_tiny(tiny_dataset, folder)
    content = (folder / COLUMNS_NAME).read_bytes()
    (folder / COLUMNS_NAME).unlink()
    write_tiny(tiny_dataset, folder)
    assert (folder / COLUMNS_NAME).read_bytes() == content
    assert_equal(open_quietly(folder), ShardDataset(tiny_shards))


def test_open_dataset_brings_lost_columns_back(tiny_dataset, tmp_path):
    places = {"drive": None, "ssd": tmp_path / "ssd"}
    dataset = open_dataset(tiny_dataset.images, tiny_dataset.annotations, **places)
    dataset.wait()
    content = (tmp_path / "ssd" / COLUMNS_NAME).read_bytes()
    (tmp_path / "ssd" / COLUMNS_NAME).unlink()
    again = open_dataset(tiny_dataset.images, tiny_dataset.annotations, **places)
    again.wait()
    assert (tmp_path / "ssd" / COLUMNS_NAME).read_bytes() == content
    mapped = open_dataset(tiny_dataset.images, tiny_dataset.annotations, **places)
    assert type(mapped) is ShardDataset
    assert mapped.describe([0])["boxes"].tolist() == again.describe([0])["boxes"].tolist()


def test_a_lost_shard_is_told_as_without_columns(shards):
    name = read_index(shards).shards[1].name
    (shards / name).unlink()
    with pytest.raises(ColabUtilsError, match=rf"{name} should have .* bytes, and has none"):
        ShardDataset(shards)


def test_a_pickled_dataset_is_the_same(shards, tiny_shards):
    dataset = pickle.loads(pickle.dumps(open_quietly(shards)))
    assert_equal(dataset, ShardDataset(tiny_shards))


def test_workers_read_the_same_batches(shards, tiny_shards):
    batches = []
    for folder in (shards, tiny_shards):
        loader = make_loader(
            ShardDataset(folder), batch_size=4, device="cpu", workers=2, seed=3, deliver="packed"
        )
        batches.append(list(loader))
    for batch, expected in zip(*batches, strict=True):
        assert batch.image_ids.tolist() == expected.image_ids.tolist()
        assert batch.boxes.equal(expected.boxes)
        assert batch.labels.equal(expected.labels)
        assert batch.images.equal(expected.images)


def count_resident(path):
    """Return the bytes of a mapped file that this process holds."""
    resident = 0
    is_of_file = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_of_file = line.endswith(str(path))
        elif is_of_file and line.startswith("Rss:"):
            resident += int(line.split()[1])
    return resident


def test_reading_does_not_grow_the_memory_of_a_process(shards):
    dataset = open_quietly(shards)
    assert dataset.sizes.sum() > 0
    assert count_resident(shards / COLUMNS_NAME) > 0
    for row in range(len(dataset)):
        dataset.describe([row])
    assert count_resident(shards / COLUMNS_NAME) == 0


def test_the_workers_of_a_folder_with_columns_stay_for_the_next_epoch(shards):
    loader = make_loader(open_quietly(shards), batch_size=4, device="cpu", workers=1)
    # Earlier tests may have left children.
    before = {child.pid for child in psutil.Process().children()}
    epochs = []
    for _ in range(2):
        assert list(loader)
        epochs.append({child.pid for child in psutil.Process().children()} - before)
    loader.close()
    assert len(epochs[0]) == 1
    assert epochs[0] == epochs[1]


def test_a_dataset_in_use_keeps_its_columns_when_they_are_replaced(shards, tiny_shards):
    dataset = open_quietly(shards)
    other = shards / "other"
    other.write_bytes(bytes(10))
    other.replace(shards / COLUMNS_NAME)
    assert_equal(dataset, ShardDataset(tiny_shards))


def test_a_full_disk_is_told_and_nothing_is_left(tiny_dataset, tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(ColabUtilsError, match="Free some space"):
            write_tiny(tiny_dataset, tmp_path / "shards")
    names = {path.suffix for path in (tmp_path / "shards").iterdir()}
    assert not names & {".part", ".columns"}
    write_tiny(tiny_dataset, tmp_path / "shards")
    assert verify_shards(tmp_path / "shards").bad == ()
    assert len(open_quietly(tmp_path / "shards")) == tiny_dataset.n


def test_drive_holds_no_columns(shards, tmp_path, request):
    drive = tmp_path / "drive"
    request.addfinalizer(partial(slow_down, drive, None))
    slow_down(drive, DriveProfile("fast", 0.0, 1e9, "this test"))
    copy_shards(shards, drive)
    assert not (drive / COLUMNS_NAME).exists()
    assert read_index(drive).columns == ()
    assert_equal(open_quietly(drive), ShardDataset(shards))


def test_small_folders_have_no_columns(tiny_shards, tmp_path, monkeypatch):
    monkeypatch.undo()
    copy_shards(tiny_shards, tmp_path / "copy")
    assert not (tmp_path / "copy" / COLUMNS_NAME).exists()
    assert (tmp_path / "copy" / "index.json").read_bytes() == (
        tiny_shards / "index.json"
    ).read_bytes()
