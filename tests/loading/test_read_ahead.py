"""Loose files, and pieces of shards on a slow folder, are read many at a time: by batches of a
stock DataLoader, and ahead of a batch.
"""

import gc
import shutil
import threading
import weakref
from unittest.mock import Mock

import pytest
from torch.utils.data import DataLoader, Subset

from colab_utils import files
from colab_utils.data.coco import write_subset
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.dataset import ShardDataset
from colab_utils.shards.write import write_shards
from colab_utils.slow_drive import DriveProfile, slow_down

from .test_dataset import assert_equal_samples
from .test_loader import flatten, list_ids
from .test_open_dataset import wait_until
from .test_prefetcher import list_samples


@pytest.fixture
def dataset(tiny_dataset):
    return CocoFolder(tiny_dataset.images, tiny_dataset.annotations, streams=4)


@pytest.fixture
def few(dataset, tmp_path):
    """A folder with copies of four images, which a test may spoil, and their JSON."""
    folder = tmp_path / "few"
    folder.mkdir()
    for index in range(4):
        shutil.copy(dataset.find_path(index), folder)
    return folder, write_subset(dataset.coco, range(4), tmp_path / "few.json")


@pytest.fixture
def near_and_far(tiny_dataset, tmp_path):
    """The same shards in a local folder and in a slowed one."""
    near = tmp_path / "near"
    far = tmp_path / "far"
    write_shards(tiny_dataset.images, tiny_dataset.annotations, shards=near, shard_mb=0.1)
    shutil.copytree(near, far)
    slow_down(far, DriveProfile("far", open_s=0.001, bytes_per_s=1e9, source="a test"))
    return ShardDataset(near), ShardDataset(far)


@pytest.fixture
def in_flight(monkeypatch):
    """Make each read wait until four are in flight, or until a second is over; list how many."""
    counts = []
    lock = threading.Lock()
    barrier = threading.Barrier(4)

    def wait(*_):
        with lock:
            counts.append(1)
        try:
            barrier.wait(1)
        except threading.BrokenBarrierError:
            counts.append(0)

    monkeypatch.setattr(files, "wait_as_drive", wait)
    return counts


def assert_equal_lists(samples, expected):
    for sample, other in zip(samples, expected, strict=True):
        assert_equal_samples(sample, other)


def test_the_files_of_a_batch_are_read_at_the_same_time(dataset, in_flight):
    dataset.__getitems__([0, 1, 2, 3])
    # Nobody waited in vain for the others.
    assert in_flight == [1, 1, 1, 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stock_loader_gives_every_sample(dataset, workers):
    order = [5, 1, 5, 2, 0]
    loader = DataLoader(Subset(dataset, order), 2, num_workers=workers, collate_fn=list)
    samples = [sample for batch in loader for sample in batch]
    assert_equal_lists(samples, [dataset[index] for index in order])


def test_a_batch_with_a_missing_file_names_it_and_leaves_nothing_behind(dataset, few):
    copy = CocoFolder(*few, streams=4)
    copy.find_path(2).unlink()
    with pytest.raises(ColabUtilsError, match=copy.coco.names[2]):
        copy.__getitems__([0, 1, 2, 3])
    copy.find_path(2).write_bytes(dataset.read(2))
    assert_equal_lists(copy.__getitems__([2]), [dataset[2]])


def test_a_dataset_that_is_dropped_leaves_neither_memory_nor_threads(few):
    before = {*threading.enumerate()}
    copy = CocoFolder(*few, streams=4)
    copy.__getitems__(range(4))
    assert not before.issuperset(threading.enumerate())
    dropped = weakref.ref(copy)
    del copy
    gc.collect()
    assert dropped() is None
    wait_until(lambda: before.issuperset(threading.enumerate()))


def read_orders(loader, passes=2):
    return [flatten(list_ids(loader)) for _ in range(passes)]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_gives_the_same_batches_with_and_without_reading_ahead(make, dataset, workers):
    settings = {"batch_size": 3, "seed": 5, "deliver": "dense"}
    plain = make(dataset, streams=1, **settings)
    wide = make(dataset, workers=workers, streams=8, **settings)
    for _ in range(2):
        assert_equal_lists(list_samples(wide), list_samples(plain))


@pytest.mark.parametrize("workers", [0, 2])
def test_files_of_later_batches_are_read_while_the_first_is_needed(
    make, dataset, list_reads, workers
):
    loader = make(dataset, batch_size=1, workers=workers, prefetch=1, streams=8)
    batches = iter(loader)
    next(batches)
    wait_until(lambda: len(list_reads()) == len(dataset))


def test_a_worker_that_can_start_no_thread_loads_all(make, dataset, monkeypatch):
    refuse = Mock(side_effect=ColabUtilsError("no more threads"))
    monkeypatch.setattr("colab_utils.reader.start_thread", refuse)
    [ids] = read_orders(make(dataset, workers=1, streams=2), passes=1)
    assert len(ids) == len(dataset)


def test_a_pass_that_was_broken_off_leaves_room_to_other_loaders(make, dataset):
    loader = make(dataset, streams=8)
    batches = iter(loader)
    next(batches)
    reader = dataset._open_reader()
    assert any(map(reader.is_ahead, range(len(dataset))))
    batches.close()
    # They would count towards what another loader of this dataset may read ahead.
    assert not any(map(reader.is_ahead, range(len(dataset))))
    assert read_orders(loader)


def test_only_shards_on_a_slow_folder_are_read_ahead(make, near_and_far):
    near, far = near_and_far
    assert (near.streams, far.streams) == (1, "auto")
    assert not make(near).reads_ahead
    assert make(far).reads_ahead
    assert not make(far, streams=1).reads_ahead


def test_the_pieces_of_a_batch_of_shards_are_read_at_the_same_time(near_and_far, in_flight):
    _, far = near_and_far
    in_flight.clear()
    # Each of the two images has masks, so there are four pieces.
    far.__getitems__([0, 1])
    assert in_flight == [1, 1, 1, 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_slow_shards_gives_the_batches_of_fast_ones(make, near_and_far, workers):
    samples = []
    for dataset in near_and_far:
        loader = make(dataset, batch_size=3, workers=workers, seed=5, deliver="dense")
        samples.append(list_samples(loader))
    assert_equal_lists(*samples)


@pytest.fixture
def list_reads(monkeypatch, tmp_path):
    """List the names of the image files that were read, in all processes."""
    log = tmp_path / "reads"
    log.write_text("")
    read_whole = files.read_whole

    def note(path, **options):
        if path.suffix != ".json":
            with open(log, "a") as file:
                file.write(f"{path.name}\n")
        return read_whole(path, **options)

    monkeypatch.setattr(files, "read_whole", note)
    return lambda: sorted(log.read_text().split())


@pytest.mark.parametrize("workers", [0, 2])
def test_with_a_cache_each_file_is_read_once(make, tiny_dataset, tmp_path, list_reads, workers):
    source = tiny_dataset.images, tiny_dataset.annotations
    dataset = CocoFolder(*source, cache=tmp_path / "cache")
    loader = make(dataset, workers=workers)
    for ids in read_orders(loader):
        assert len(ids) == len(dataset)
    again = CocoFolder(*source, cache=tmp_path / "cache")
    assert_equal_samples(again[3], dataset[3])
    assert list_reads() == sorted(path.name for path in tiny_dataset.images.iterdir())


def test_a_file_that_was_repaired_is_read_anew(dataset, few, tmp_path):
    copy = CocoFolder(*few, cache=tmp_path / "cache")
    content = copy.find_path(2).read_bytes()
    copy.find_path(2).write_bytes(content[:100])
    with pytest.raises(ColabUtilsError, match=copy.coco.names[2]):
        copy[2]
    copy.find_path(2).write_bytes(content)
    assert_equal_samples(copy[2], dataset[2])


@pytest.mark.parametrize("workers", [1, 2])
def test_the_files_of_the_next_pass_are_read_while_one_ends(make, dataset, list_reads, workers):
    loader = make(dataset, workers=workers, streams=4)
    orders = []
    # From the second pass on, all files of the next one are read already.
    for passes in (1, 3, 4):
        orders += read_orders(loader, passes=1)
        wait_until(lambda passes=passes: len(list_reads()) == passes * len(dataset))
    assert read_orders(make(dataset, streams=1), passes=3) == orders


def test_files_that_were_read_for_another_pass_are_given_up(make, dataset, list_reads):
    loader = make(dataset, workers=1, streams=4)
    read_orders(loader, passes=2)
    wait_until(lambda: len(list_reads()) == 3 * len(dataset))
    other = make(dataset)
    next(iter(other))
    # The next pass goes on in the first epoch, after its first batch.
    loader.load_state_dict(other.state_dict())
    [rest] = read_orders(loader, passes=1)
    assert len(rest) == len(dataset) - 2
