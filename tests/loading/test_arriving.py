"""Training on shards while they are still copied: every image once an epoch, in an order that can
be repeated.
"""

import json
import multiprocessing
import os
import threading
import time
from itertools import count
from unittest.mock import Mock

import pytest
from torch.utils.data import DataLoader

from colab_utils import make_loader
from colab_utils.data.decoding import load_jpeg_decoder
from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError
from colab_utils.loading import arriving
from colab_utils.loading import dataset as dataset_module
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.opening import open_dataset
from colab_utils.shards.copy import Copying, copy_shards
from colab_utils.shards.verify import verify_shards
from colab_utils.shards.write import write_shards
from colab_utils.slow_drive import DriveProfile, slow_down
from tests.drive_mount import mount_or_skip

from .test_dataset import assert_equal_samples

SLOW = DriveProfile("test", open_s=0.03, bytes_per_s=1e6, source="made up for the test")


@pytest.fixture(scope="module")
def drive(tmp_path_factory, tiny_dataset):
    """Shards of a few images each."""
    # The first loader imports torchvision for seconds, in which all shards would arrive.
    load_jpeg_decoder()
    folder = tmp_path_factory.mktemp("drive") / "shards"
    write_shards(
        tiny_dataset.images, tiny_dataset.annotations, shards=folder, shard_mb=0.02, workers=1
    )
    assert len(ShardDataset(folder).index.shards) > 3
    return folder


@pytest.fixture
def close_gate(monkeypatch):
    """Let only the first files of shards arrive until the gate is set."""

    def close(after=0):
        gate = threading.Event()
        numbers = count()
        copy_file = Copying.copy_file

        def wait_and_copy(self, *file):
            is_first = next(numbers) < after
            while not (is_first or self.stop.is_set() or gate.wait(0.01)):
                pass
            return copy_file(self, *file)

        monkeypatch.setattr(Copying, "copy_file", wait_and_copy)
        return gate

    return close


def flatten(batches):
    return [index for batch in batches for index in batch]


def list_ids(batches):
    return [[int(target["image_id"]) for target in targets] for _, targets in batches]


def assert_every_image(dataset, epoch):
    assert sorted(flatten(epoch)) == sorted(dataset.image_ids.tolist())


def load(dataset, **options):
    return make_loader(dataset, **{"batch_size": 2, "workers": 0, **options})


@pytest.mark.parametrize("workers", [0, 2])
def test_every_image_once_an_epoch_from_the_first_on(drive, ssd, close_gate, workers):
    # The first shard has two files.
    gate = close_gate(after=2)
    dataset = ArrivingShards(drive, ssd)
    loader = load(dataset, workers=workers)
    batches = iter(loader)
    first = next(batches)
    # The loader began with the shards that were there.
    assert not dataset.arrival.is_complete
    gate.set()
    epochs = [list_ids([first, *batches]), list_ids(loader)]
    loader.close()
    for epoch in epochs:
        assert len(epoch) == len(loader)
        assert_every_image(dataset, epoch)
    assert epochs[0] != epochs[1]
    assert dataset.arrival.is_complete
    dataset.arrival.stop()
    assert ShardDataset(ssd).index == dataset.index


def test_the_order_comes_again_from_a_state(drive, ssd, tmp_path):
    slow_down(drive, SLOW)
    dataset = ArrivingShards(drive, ssd)
    loader = load(dataset, workers=1, seed=3)
    batches = iter(loader)
    before = [next(batches) for _ in range(3)]
    assert len(list_ids(before)) == 3
    state = json.loads(json.dumps(loader.state_dict()))
    after = list_ids(batches)
    loader.close()
    assert sorted(flatten(state["joined"])) == list(range(len(dataset.index.shards)))
    for again in (
        # A new machine has none of the shards.
        ArrivingShards(drive, tmp_path / "other", seed=5),
        # A finished copy is opened as a plain dataset.
        ShardDataset(ssd),
    ):
        loader = load(again, seed=3)
        loader.load_state_dict(state)
        assert list_ids(loader) == after
    # With another batch size, the images that are left come once.
    loader = load(again, batch_size=3, seed=3)
    loader.load_state_dict(state)
    assert sorted(flatten(list_ids(loader))) == sorted(flatten(after))


def list_two_epochs(dataset, **options):
    loader = load(dataset, seed=3, **options)
    # The epoch after one that is broken off begins with the first shards, too.
    next(iter(loader))
    epochs = [list_ids(loader), list_ids(loader)]
    for epoch in epochs:
        assert_every_image(dataset, epoch)
    return epochs


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_does_not_depend_on_how_fast_shards_arrive(
    drive, tiny_dataset, ssd, tmp_path, close_gate, shuffle
):
    fast = ArrivingShards(drive, ssd)
    fast.wait()
    epochs = list_two_epochs(fast, shuffle=shuffle)
    slow_down(drive, SLOW)
    gate = close_gate()
    slow = ArrivingShards(drive, tmp_path / "slow")
    assert not slow.arrival.is_complete
    gate.set()
    # The shards are complete on the SSD.
    again = ArrivingShards(drive, ssd)
    nearest = open_dataset(tiny_dataset.images, tiny_dataset.annotations, drive=drive, ssd=ssd)
    assert type(nearest) is ShardDataset
    for dataset in (slow, again, nearest):
        assert list_two_epochs(dataset, shuffle=shuffle) == epochs
    # Later epochs mix all shards, and so does each epoch of shards that do not arrive.
    assert list_two_epochs(ShardDataset(drive), shuffle=shuffle)[1] == epochs[1]


def test_a_drive_that_is_gone_ends_in_a_line_that_says_what_is_safe(drive, ssd, monkeypatch):
    real = Copying.copy_file

    def copy_file(self, name, *rest):
        if name.startswith("shard-000001"):
            raise DriveLostError("It cannot be read: Drive got disconnected.")
        return real(self, name, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Copying, "copy_file", copy_file)
        dataset = ArrivingShards(drive, ssd)
        delivered = []
        with pytest.raises(
            DriveLostError,
            match=r"\d+ of \d+ shards in .*ssd are safe, and the same call continues",
        ):
            delivered.extend(target["image_id"] for _, [target] in load(dataset, batch_size=1))
    assert len(set(delivered)) == len(delivered) > 0
    again = ArrivingShards(drive, ssd)
    assert_every_image(again, list_ids(load(again)))


def test_a_copy_that_is_stopped_leaves_no_index(drive, ssd, monkeypatch):
    real = Copying.copy_file

    def copy_file(self, name, *rest):
        done = real(self, name, *rest)
        self.stop.set()
        return done

    monkeypatch.setattr(Copying, "copy_file", copy_file)
    dataset = ArrivingShards(drive, ssd)
    assert dataset.arrival.copying.stop.wait(60)
    dataset.stop()
    assert not dataset.arrival.is_complete
    # After the stop, no other file is copied.
    assert [path.suffix for path in ssd.iterdir()] == [".arrays"]


READERS = {
    "the dataset": lambda dataset: dataset[0],
    "make_loader": lambda dataset: list(load(dataset)),
    "DataLoader": lambda dataset: list(
        DataLoader(dataset, batch_size=2, num_workers=2, collate_fn=list)
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_of_a_copy_that_is_stopped_does_not_wait_for_ever(
    drive, ssd, close_gate, monkeypatch, reader
):
    monkeypatch.setattr(arriving, "_GRACE_S", 0.5)
    close_gate()
    dataset = ArrivingShards(drive, ssd)
    timer = threading.Timer(0.5, dataset.stop)
    timer.start()
    message = r"The copy of the shards was stopped; 0 of \d+ shards in .*ssd are safe, and"
    if reader == "DataLoader":
        message = "the process that brings shards to its folder has ended"
    with pytest.raises(ColabUtilsError, match=message):
        READERS[reader](dataset)
    timer.join()
    # Stopping a second time does nothing.
    dataset.stop()


def test_workers_of_a_stock_dataloader_wait_for_shards(drive, ssd, close_gate):
    gate = close_gate()
    dataset = ArrivingShards(drive, ssd)
    loader = DataLoader(
        dataset,
        batch_size=2,
        num_workers=1,
        collate_fn=list,
        multiprocessing_context="spawn",
        timeout=60,
    )
    # The workers begin before anything may arrive.
    batches = iter(loader)
    time.sleep(0.2)
    gate.set()
    # A copy that fails says why.
    dataset.arrival.wait()
    for sample, expected in zip(flatten(batches), ShardDataset(drive), strict=True):
        assert_equal_samples(sample, expected)
    dataset.stop()


@pytest.fixture
def mount(drive, tmp_path):
    profile = DriveProfile("mount", open_s=0.1, bytes_per_s=1e6, source="made up for the test")
    with mount_or_skip(drive, tmp_path / "mount", profile=profile) as mounted:
        yield mounted


def test_no_copy_goes_on_where_the_tables_cannot_be_read(drive, ssd, monkeypatch):
    fail = Mock(side_effect=ColabUtilsError("There are no tables."))
    monkeypatch.setattr(dataset_module, "_load_shard", fail)
    slow_down(drive, SLOW)
    with pytest.raises(ColabUtilsError, match="There are no tables"):
        ArrivingShards(drive, ssd)
    for thread in threading.enumerate():
        if thread.name.startswith("arrival"):
            # On a disk that stalls, a copy ends late.
            thread.join(60)
            assert not thread.is_alive()
    copy_shards(drive, ssd)
    assert verify_shards(ssd).bad == ()


def test_every_image_arrives_from_a_mount_that_fails(mount, ssd):
    dataset = ArrivingShards(mount.folder, ssd)
    mount.fail(errors=3)
    loader = load(dataset, workers=1)
    for _ in range(2):
        assert_every_image(dataset, list_ids(loader))
    loader.close()
    assert dataset.arrival.copying.source.failures
    dataset.stop()
    assert verify_shards(ssd).bad == ()


def test_a_damaged_copy_that_was_broken_off_is_never_trained_on(drive, ssd, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(arriving, "write_index", lambda *_: 1 / 0)
        with pytest.raises(ColabUtilsError):
            ArrivingShards(drive, ssd).wait()
    tar = ssd / "shard-000001.tar"
    good = tar.read_bytes()
    tar.write_bytes(good[:8000] + bytes(100) + good[8100:])
    dataset = ArrivingShards(drive, ssd)
    assert_every_image(dataset, list_ids(load(dataset)))
    dataset.stop()
    assert tar.read_bytes() == good
    assert verify_shards(ssd).bad == ()


def test_a_file_of_the_user_is_not_replaced(drive, ssd):
    ssd.mkdir()
    own = ssd / "shard-000001.tar"
    own.write_bytes(b"mine")
    dataset = ArrivingShards(drive, ssd)
    with pytest.raises(ColabUtilsError, match="holds another shard-000001"):
        list(load(dataset))
    assert own.read_bytes() == b"mine"


def test_a_sampler_waits_for_its_shards(drive, ssd, close_gate):
    gate = close_gate()
    batches = load(ArrivingShards(drive, ssd), sampler=[3, 11], batch_size=1)
    threading.Timer(0.2, gate.set).start()
    assert len(list(batches)) == 2


def test_another_process_of_the_machine_waits_for_the_files(drive, ssd, close_gate, monkeypatch):
    gate = close_gate()
    copied = []
    real = Copying.copy_file
    monkeypatch.setattr(
        Copying, "copy_file", lambda self, *file: copied.append(self) or real(self, *file)
    )
    first = ArrivingShards(drive, ssd)
    second = ArrivingShards(drive, ssd)
    gate.set()
    assert list_two_epochs(second) == list_two_epochs(first)
    second.wait()
    assert first.arrival.copying in copied
    assert second.arrival.copying not in copied
    assert second.arrival.is_complete
    assert sorted(os.listdir(ssd)) == sorted(os.listdir(drive))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_fork_waits_for_the_files_too(drive, ssd, close_gate, workers):
    gate = close_gate()
    dataset = ArrivingShards(drive, ssd)

    def train():
        batches = load(dataset, workers=workers, deliver="packed")
        assert_every_image(dataset, [batch.image_ids.tolist() for batch in batches])

    process = multiprocessing.get_context("fork").Process(target=train)
    process.start()
    gate.set()
    process.join(20)
    process.kill()
    assert process.exitcode == 0


def test_where_the_process_that_copies_stops_another_one_goes_on(drive, ssd, close_gate):
    gate = close_gate()
    first = ArrivingShards(drive, ssd)
    second = ArrivingShards(drive, ssd)
    first.arrival.copying.stop.set()
    gate.set()
    assert_every_image(second, list_ids(load(second)))
    second.wait()
    assert verify_shards(ssd).bad == ()


def test_the_copy_does_not_wait_for_the_tables(drive, ssd, monkeypatch):
    copied = threading.Event()
    real_copy = Copying.copy_file
    real_load = dataset_module._load_shard

    def copy(self, *file):
        real_copy(self, *file)
        copied.set()

    def load(*arguments, **options):
        assert copied.wait(60)
        return real_load(*arguments, **options)

    monkeypatch.setattr(Copying, "copy_file", copy)
    monkeypatch.setattr(dataset_module, "_load_shard", load)
    dataset = ArrivingShards(drive, ssd)
    assert dataset.image_ids.tolist() == ShardDataset(drive).image_ids.tolist()
    dataset.stop()
