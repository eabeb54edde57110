"""Training on shards while they are still copied: every image once an epoch, in an order that can be repeated."""

import json
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from colab_utils.drive import DriveLostError, DriveProfile
from colab_utils.errors import ColabUtilsError
from colab_utils.loading import make_loader
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.dataset import ShardDataset
from colab_utils.shards import arrival
from colab_utils.shards.copy import Copying, copy_shards
from colab_utils.shards.verify import verify_shards
from colab_utils.shards.write import write_shards
from tests.drive_mount import can_mount, mount_drive

SLOW = DriveProfile("test", open_s=0.2, bytes_per_s=1e6, source="made up for the test")


@pytest.fixture(scope="module")
def drive(tmp_path_factory, tiny_dataset):
    """Shards of a few images each."""
    folder = tmp_path_factory.mktemp("drive") / "shards"
    write_shards(tiny_dataset.images, tiny_dataset.annotations, shards=folder, shard_mb=0.02, workers=1)
    assert len(ShardDataset(folder).index.shards) > 3
    return folder


def flatten(batches):
    return [index for batch in batches for index in batch]


def list_ids(batches):
    return [[int(target["image_id"]) for target in targets] for _, targets in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_every_image_once_an_epoch_from_the_first_on(drive, tmp_path, workers):
    dataset = ArrivingShards(drive, tmp_path / "ssd", profile=SLOW, workers=1)
    loader = make_loader(dataset, batch_size=2, workers=workers)
    batches = iter(loader)
    first = next(batches)
    assert not dataset.arrival.is_complete  # it began with what there was
    epochs = [list_ids([first, *batches]), list_ids(loader)]
    loader.close()
    for epoch in epochs:
        assert len(epoch) == len(loader)
        assert sorted(flatten(epoch)) == sorted(dataset.image_ids.tolist())
    assert epochs[0] != epochs[1]
    assert dataset.arrival.is_complete
    assert sorted(dataset.arrival.spans_s) == list(range(len(dataset.index.shards)))
    dataset.arrival.stop()
    assert ShardDataset(tmp_path / "ssd").index == dataset.index


def test_samples_are_those_of_the_shards(drive, tmp_path):
    dataset, whole = ArrivingShards(drive, tmp_path / "ssd", profile=SLOW), ShardDataset(drive)
    for index in (len(whole) - 1, 0):  # waits for its shard
        image, target = dataset[index]
        expected, objects = whole[index]
        assert torch.equal(image, expected)
        assert all(np.array_equal(target[name], objects[name]) for name in objects)
    dataset.arrival.stop()


def test_the_order_comes_again_from_a_state_and_its_log(drive, tmp_path):
    dataset = ArrivingShards(drive, tmp_path / "ssd", profile=SLOW, workers=1)
    loader = make_loader(dataset, batch_size=2, workers=1, seed=3)
    batches, before, state = iter(loader), [], {}
    for batch in batches:
        before += list_ids([batch])
        if len(before) == 3:
            state = json.loads(json.dumps(loader.state_dict()))
            break
        time.sleep(0.05)
    after = list_ids(batches)
    log, planned = state["joined"], state["planned"]
    assert log[0][1] == 0
    assert planned >= 3
    loader.close()
    again = make_loader(ArrivingShards(drive, tmp_path / "ssd"), batch_size=2, workers=1, seed=3)
    again.load_state_dict(state)
    rest = list_ids(again)
    assert rest[: planned - 3] == after[: planned - 3]
    assert sorted(flatten(before + rest)) == sorted(dataset.image_ids.tolist())
    again.close()
    anew = make_loader(ShardDataset(tmp_path / "ssd"), batch_size=2, workers=0, seed=3)  # when all is there
    anew.load_state_dict(state)
    assert list_ids(anew)[: planned - 3] == after[: planned - 3]


def test_a_drive_that_fails_for_a_while_is_tried_again(drive, tmp_path, monkeypatch):
    monkeypatch.setattr(arrival, "_PATIENCE_S", (0.01, 0.01, 0.01))
    real, fails = Copying.copy_file, iter([True, False, True, True])

    def copy_file(self, *file):
        if next(fails, False):
            raise DriveLostError("expected to read, found that Drive got disconnected")
        return real(self, *file)

    monkeypatch.setattr(Copying, "copy_file", copy_file)
    dataset = ArrivingShards(drive, tmp_path / "ssd", workers=1)
    assert sorted(flatten(list_ids(make_loader(dataset, batch_size=2, workers=0)))) == sorted(
        dataset.image_ids.tolist()
    )
    assert dataset.arrival.retries == 3


def test_a_drive_that_is_gone_ends_in_a_line_that_says_what_is_safe(drive, tmp_path, monkeypatch):
    monkeypatch.setattr(arrival, "_PATIENCE_S", (0.01,))
    real = Copying.copy_file

    def copy_file(self, name, *rest):
        if name.startswith("shard-000001"):
            raise DriveLostError("expected to read, found that Drive got disconnected")
        return real(self, name, *rest)

    monkeypatch.setattr(Copying, "copy_file", copy_file)
    dataset = ArrivingShards(drive, tmp_path / "ssd", workers=1)
    batches, delivered = iter(make_loader(dataset, batch_size=1, workers=0)), []

    def train():
        for _, targets in batches:
            delivered.extend(int(target["image_id"]) for target in targets)

    with pytest.raises(DriveLostError, match=r"\d+ of \d+ shards are safe in .*ssd, and the same call continues"):
        train()
    assert delivered
    assert len(set(delivered)) == len(delivered)
    monkeypatch.setattr(Copying, "copy_file", real)
    again = ArrivingShards(drive, tmp_path / "ssd", workers=1)
    assert len(list_ids(make_loader(again, batch_size=2, workers=0))) == -(-len(again) // 2)


def test_a_copy_that_is_stopped_leaves_no_index(drive, tmp_path, monkeypatch):
    real = Copying.copy_file

    def copy_file(self, name, *rest):
        done = real(self, name, *rest)
        if name.endswith(".arrays"):
            self.stop.set()  # between two shards
        return done

    monkeypatch.setattr(Copying, "copy_file", copy_file)
    dataset = ArrivingShards(drive, tmp_path / "ssd", workers=1)
    dataset.arrival.stop()
    assert not dataset.arrival.is_complete
    assert not (tmp_path / "ssd" / "index.json").exists()


def test_other_shards_in_the_target_are_refused(drive, tmp_path, tiny_shards):
    copy_shards(tiny_shards, tmp_path / "ssd")
    with pytest.raises(ColabUtilsError, match="found other shards"):
        ArrivingShards(drive, tmp_path / "ssd")


@pytest.fixture
def mount(request, drive, tmp_path):
    if reason := can_mount():
        pytest.skip(f"no mounted Drive to test on: {reason}")
    profile = DriveProfile("mount", open_s=0.1, bytes_per_s=1e6, total_bytes_per_s=2e6, source="made up for the test")
    direct = getattr(request, "param", False)
    with ExitStack() as mounts:
        try:
            mounted = mounts.enter_context(mount_drive(drive, tmp_path / "mount", profile=profile, direct=direct))
        except RuntimeError as error:  # a machine that has all it takes may forbid it
            pytest.skip(str(error))
        yield mounted


def train_two_epochs(dataset):
    loader = make_loader(dataset, batch_size=2, workers=1)
    epochs = [sorted(flatten(list_ids(loader))) for _ in range(2)]
    loader.close()
    return epochs


@pytest.mark.parametrize(
    ("mount", "fault"), [(False, {}), (False, {"errors": 3}), (True, {"short_read": 1000})], indirect=["mount"],
    ids=["none", "EIO", "short reads"],
)  # fmt: skip
def test_on_a_mount(mount, tmp_path, monkeypatch, fault):
    monkeypatch.setattr(arrival, "_PATIENCE_S", (0.1, 0.2, 0.4))
    dataset = ArrivingShards(mount.folder, tmp_path / "ssd", workers=2)
    mount.fail(**fault)
    assert train_two_epochs(dataset) == [sorted(dataset.image_ids.tolist())] * 2
    assert bool(dataset.arrival.retries) == ("errors" in fault)
    assert verify_shards(tmp_path / "ssd").bad == ()


def test_a_mount_that_comes_back(mount, tmp_path, monkeypatch):
    monkeypatch.setattr(arrival, "_PATIENCE_S", (0.5,) * 20)
    dataset = ArrivingShards(mount.folder, tmp_path / "ssd", workers=2)
    mount.fail(lost=True)
    timer = threading.Timer(1.5, mount.fail)
    timer.start()
    assert train_two_epochs(dataset) == [sorted(dataset.image_ids.tolist())] * 2
    assert dataset.arrival.retries
    timer.join()


def test_a_mount_that_is_lost_after_the_copy_is_not_missed(mount, tmp_path):
    dataset = ArrivingShards(mount.folder, tmp_path / "ssd", workers=2)
    loader = make_loader(dataset, batch_size=2, workers=1)
    first = sorted(flatten(list_ids(loader)))
    mount.fail(lost=True)
    assert sorted(flatten(list_ids(loader))) == first
    loader.close()
