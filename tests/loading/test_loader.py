"""The loader: what it delivers, in which order, where it continues, and what happens when a worker
fails.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import (
    ConcatDataset,
    IterableDataset,
    Subset,
    WeightedRandomSampler,
)
from torchvision.datasets import CocoDetection, wrap_dataset_for_transforms_v2
from torchvision.transforms import v2

from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import make_loader
from colab_utils.loading.sampler import BatchSampler
from colab_utils.loading.workers import WorkerDiedError

ROOT = Path(__file__).resolve().parents[2]


# Python that takes warnings for errors.
STRICT = [
    sys.executable,
    "-Werror",
    "-Wignore:.*fork:DeprecationWarning",
    # torch 2.6 leaves a folder to Python.
    "-Wignore:Implicitly cleaning up:ResourceWarning",
]
TENSORS = ("boxes", "labels", "masks", "area", "iscrowd")


@contextmanager
def join_group(rank, ranks):
    """This process as one of several that train together."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


class Numbers(torch.utils.data.Dataset):
    """Somebody's own dataset: images of mixed sizes, some without objects."""

    def __init__(self, size, act=None):
        self.size = size
        self.act = act

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if self.act:
            self.act(index)
        height = 8 + index % 5
        width = 6 + index % 3
        objects = index % 3
        numbers = torch.arange(objects * height * width).reshape(objects, height, width)
        masks = (numbers % (index + 2) == 0).byte()
        image = (torch.arange(3 * height * width).reshape(3, height, width) + index).byte()
        boxes = torch.tensor([[0.5, 1.25, 4.0, 6.0]] * objects).reshape(-1, 4)
        # Each mask has a pixel in its box.
        masks[:, 2, 1] = 1
        return image, {
            "boxes": boxes,
            "labels": torch.arange(1, objects + 1),
            "masks": masks,
            "image_id": index,
            "area": boxes[:, 2] * 3,
            "iscrowd": torch.arange(objects) % 2,
        }


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Numbers(3))

    def __len__(self):
        return 3


def flatten(batches):
    return [index for batch in batches for index in batch]


def list_ids(loader):
    return [batch.image_ids.tolist() for batch in loader]


def assert_equal_batches(dataset, ids, images, targets):
    for image, target in zip(images, targets, strict=True):
        pixels, expected = dataset[ids.index(target["image_id"])]
        assert torch.equal(image, pixels.float() / 255)
        assert target.keys() == expected.keys()
        for key in TENSORS:
            assert target[key].dtype == expected[key].dtype
            assert torch.equal(target[key], expected[key]), key


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["shards", "folder", "own"])
def test_both_deliveries_equal_the_samples(tiny_shards, loose, make, kind, workers):
    dataset = Numbers(12)
    ids = [*range(12)]
    if kind != "own":
        dataset = ShardDataset(tiny_shards) if kind == "shards" else loose
        ids = dataset.image_ids.tolist()
    options = {"batch_size": 5, "workers": workers, "seed": 3}
    dense = make(dataset, deliver="dense", **options)
    packed = make(dataset, **options)
    assert str(packed).startswith("3 batches of 5, packed (workers=")
    assert len(dense) == 3
    seen = []
    for batch, (images, targets) in zip(packed, dense, strict=True):
        assert batch.image_ids.tolist() == [target["image_id"] for target in targets]
        seen.append(batch.image_ids.tolist())
        assert_equal_batches(dataset, ids, images, targets)
        assert_equal_batches(dataset, ids, batch.to_images("cpu"), batch.to_targets("cpu"))
    assert sorted(flatten(seen)) == sorted(ids)
    assert [len(batch) for batch in seen] == [5, 5, 2]


def test_the_order_is_the_seeds_whatever_the_workers(make):
    orders = []
    for workers in (0, 1, 3):
        loader = make(Numbers(23), batch_size=4, workers=workers, seed=7)
        orders.append([list_ids(loader), list_ids(loader)])
    assert orders[0] == orders[1] == orders[2]
    # Each epoch has an order of its own.
    assert orders[0][0] != orders[0][1]
    assert list_ids(make(Numbers(23), batch_size=4, seed=8)) != orders[0][0]


@pytest.mark.parametrize(("workers", "resumed_workers"), [(0, 2), (2, 0)])
def test_a_state_continues_after_the_same_batch(dataset, make, workers, resumed_workers):
    options = {"batch_size": 5, "seed": 5}
    loader = make(dataset, workers=workers, **options)
    batches = []
    states = [loader.state_dict()]
    for batch in chain(loader, loader):
        batches.append(batch.image_ids.tolist())
        states.append(loader.state_dict())
    assert len(batches) == 6
    for done in (0, 2, 3, 5):
        resumed = make(dataset, workers=resumed_workers, **options)
        resumed.load_state_dict(json.loads(json.dumps(states[done])))
        assert resumed.state_dict() == states[done]
        assert list_ids(resumed) == batches[done : done // 3 * 3 + 3]
        # The resumed loader goes on with the epoch after it, too.
        if done < 3:
            assert list_ids(resumed) == batches[3:]
        assert resumed.state_dict() == {**states[-1], "epoch": resumed.epoch}


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (8, {"seed": 1}),
        (8, {"shuffle": False}),
        # The dataset has changed since.
        (9, {}),
    ],
)
def test_a_state_of_another_order_is_refused(make, size, options):
    state = make(Numbers(8)).state_dict()
    with pytest.raises(ColabUtilsError, match="the same order"):
        make(Numbers(size), **options).load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1},
        {"batch": 1.5},
        {"earlier": [[0, 1]]},
        {"earlier": [[2, -1]]},
        # These are other shards.
        {"joined": [[1, 0, 1]]},
        # This is no state at all.
        None,
    ],
)
def test_a_state_that_was_changed_is_refused(dataset, make, change):
    loader = make(dataset)
    state = loader.state_dict() | change if isinstance(change, dict) else change
    with pytest.raises(ColabUtilsError, match=r"not one that Loader\.state_dict returned"):
        loader.load_state_dict(state)


@pytest.mark.parametrize("change", [{"batch": 4}, {"batch_size": 4, "batch": 10**12}], ids=str)
def test_a_state_without_batches_left_goes_on_with_the_next_epoch(make, change):
    loader = make(Numbers(8))
    loader.load_state_dict({**loader.state_dict(), **change})
    assert (loader.epoch, loader.left, len(list(loader))) == (1, 4, 4)


# After six batches of two, all 11 images of the first epoch were seen.
@pytest.mark.parametrize("done", [0, 3, 6])
@pytest.mark.parametrize("sizes", [(1, 4), (4, 4, 2)])
def test_another_batch_size_goes_on_with_what_the_epoch_has_left(make, done, sizes):
    loader = make(Numbers(11))
    batches = chain(loader, loader)
    seen = [next(batches).image_ids.tolist() for _ in range(done)]
    for size in sizes:
        state = json.dumps(loader.state_dict())
        # The state lists no images.
        assert len(state) < 300
        loader = make(Numbers(11), batch_size=size)
        loader.load_state_dict(json.loads(state))
        batches = iter(loader)
        seen.append(next(batches).image_ids.tolist())
    seen = flatten([*seen, *list_ids(batches)])
    assert len(seen) % 11 == 0
    assert all(
        sorted(seen[start : start + 11]) == [*range(11)] for start in range(0, len(seen), 11)
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_broken_off_is_followed_by_the_next_epoch(make, workers):
    options = {"batch_size": 3, "workers": workers}
    whole = make(Numbers(20), **options)
    epochs = [list_ids(whole) for _ in range(4)]
    loader = make(Numbers(20), **options)
    next(iter(loader))
    # The epoch is that of the pass under way.
    assert loader.epoch == 0
    assert list_ids(loader) == epochs[1]
    assert len(list_ids(islice(loader, 5))) == 5
    assert list_ids(loader) == epochs[3]
    assert loader.epoch == 4


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"workers": -1},
        {"prefetch": 0},
        {"seed": -1},
        {"max_wait_s": 0},
        {"deliver": "sparse"},
        {"image_dtype": torch.float16},
        {"device": "cuda:99" if torch.cuda.is_available() else "cuda"},
        # Torch knows this device, and a loader does not.
        {"device": "meta"},
    ],
)
def test_arguments_out_of_range_are_refused(options):
    [name] = options
    with pytest.raises(ColabUtilsError, match=f"(?i){name}"):
        make_loader(Numbers(3), **{"batch_size": 1, **options})


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Numbers(0), "empty"),
        (iter([1]), "list_iterator"),
        ("shards", "type str"),
        # A stream is refused even if it has a length.
        (Stream(), "cannot read a dataset of type Stream"),
        ([torch.ones(3)], "found Tensor"),
    ],
)
def test_what_is_no_dataset_is_refused(make, dataset, message):
    with pytest.raises(ColabUtilsError, match=message):
        list(make(dataset))


class OnDevice(Numbers):
    """Somebody moves a part of each sample to a device; "meta" is one that every machine has."""

    def __init__(self, key, device="meta"):
        super().__init__(4)
        self.key = key
        self.device = device

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        if self.key == "image":
            return image.to(self.device), target
        return image, {**target, self.key: target[self.key].to(self.device)}


@pytest.mark.parametrize("key", ["image", "labels", "masks"])
def test_samples_on_another_device_are_refused_in_words(make, key):
    message = rf"mage \d (as|has {key}) .*on the CPU|\(torch.strided, meta\)"
    with pytest.raises(ColabUtilsError, match=message):
        list(make(OnDevice(key)))


def test_a_dataset_that_uses_the_gpu_in_a_worker_is_refused_in_words(make, monkeypatch):
    """Torch is made to believe that CUDA was used before the fork, and raises its own error."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(ColabUtilsError, match=r"GPU in a worker, where it cannot work.*Leave out"):
        list(make(OnDevice("image", "cuda"), workers=1))


# Of a fault in a sample the user sees one line, from a worker as from this process.


def act_with_damage(index):
    if index == 5:
        raise ColabUtilsError("expected a whole image, found half of 5.jpg")


def act_with_lost_drive(index):
    raise DriveLostError(f"lost at {index}")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_sample_ends_the_pass_in_one_line(make, workers):
    loader = make(Numbers(8, act_with_damage), workers=workers, shuffle=False)
    got = []
    with pytest.raises(ColabUtilsError) as error:
        got.extend(loader)
    assert str(error.value) == "Sample 5: expected a whole image, found half of 5.jpg"
    assert len(got) == loader.state_dict()["batch"] == 2
    loader.dataset.act = None
    assert len(flatten(list_ids(loader))) == 8
    with pytest.raises(DriveLostError, match="lost at"):
        list(make(Numbers(8, act_with_lost_drive), workers=workers))


def act_with_death(index):
    if index == 5:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_ends_the_pass_in_one_line(make):
    loader = make(Numbers(40, act_with_death), workers=2, shuffle=False)
    assert loader.list_jobs() == []
    # The second pass has new workers.
    for _ in range(2):
        got = []
        with pytest.raises(
            WorkerDiedError, match=r"killed by signal: Killed.*not known.*memory.*fewer workers"
        ) as died:
            got.extend(batch.image_ids.tolist() for batch in loader)
        assert "\n" not in str(died.value)
        assert got == [[0, 1], [2, 3]][: len(got)]
        job = died.value.job
        assert (job.number, job.indices) == (2, (4, 5))
        assert died.value.ending == "killed by signal: Killed"
        assert job.worker in range(2)
        assert job.pid != os.getpid()
        assert loader.list_jobs() == []
    loader.dataset.act = None
    assert len(flatten(list_ids(loader))) == 40


def act_with_little_shared_memory(index):
    # Nothing larger can be written, not even in /dev/shm.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_too_little_shared_memory_is_said(make):
    loader = make(Numbers(8, act_with_little_shared_memory), batch_size=4, workers=1)
    with pytest.raises(ColabUtilsError, match=r"of shared memory.*File too large.*fewer workers"):
        list(loader)


def test_the_last_batch_is_dropped_where_it_is_not_full(make):
    loader = make(Numbers(8), batch_size=3, drop_last=True)
    complete = make(Numbers(8), batch_size=3)
    assert len(loader) == 2
    for _ in range(2):
        assert list_ids(loader) == list_ids(complete)[:2]


def test_a_sampler_gives_the_order(make):
    # Such a sampler draws from the generator of torch.
    weighted = WeightedRandomSampler([0.0] * 20 + [1.0] * 3, 10)
    options = {"batch_size": 4, "seed": 3, "sampler": weighted}
    drawn = []
    for workers in (0, 2):
        loader = make(Numbers(23), workers=workers, **options)
        assert len(loader) == 3
        drawn.append([list_ids(loader), list_ids(loader)])
    assert drawn[0] == drawn[1]
    # Each epoch has an order of its own.
    assert drawn[0][0] != drawn[0][1]
    assert {*flatten(drawn[0][0])} <= {20, 21, 22}
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    again = make(Numbers(23), **options)
    again.load_state_dict(state)
    assert list_ids(again) == list_ids(batches)
    other = make(Numbers(23), **options | {"batch_size": 5})
    with pytest.raises(ColabUtilsError, match="the same order"):
        other.load_state_dict(state)


def test_a_sampler_gives_the_order_of_wide_and_tall_images(loose, make):
    loose.sizes = np.array([[1, 2], [2, 1]] * 6)
    assert flatten(list_ids(make(loose, sampler=range(12)))) == loose.image_ids.tolist()


def test_batches_are_wide_or_tall():
    rng = np.random.default_rng(0)
    sizes = np.array([[4, 6], [6, 4], [5, 5]], np.int32)[rng.integers(0, 3, 103)]
    batches = list(BatchSampler(103, 4, 5, sizes=sizes))
    assert sorted(flatten(batches)) == list(range(103))
    wide = [{bool(sizes[i, 1] >= sizes[i, 0]) for i in batch} for batch in batches]
    # What the two kinds leave over is under two batches, and comes last.
    assert all(len(kinds) == 1 for kinds in wide[:24])
    # Without shuffling, the dataset's own order is kept.
    assert next(iter(BatchSampler(103, 4, None, sizes=sizes))) == [0, 1, 2, 3]


# The tests below count processes.


def test_workers_persist_and_end_with_close(dataset, make):
    loader = make(dataset, workers=2)
    workers = list_worker_pids(loader)
    assert len(workers) == 2
    batches = iter(loader)
    assert len(list_ids(islice(batches, len(loader)))) == 6
    # This pass was left after its last batch.
    batches.close()
    assert list_worker_pids(loader) == workers
    # A pass that is broken off ends them.
    next(iter(loader))
    assert not any(map(psutil.pid_exists, workers))
    workers = list_worker_pids(loader)
    loader.close()
    loader.close()
    assert not any(map(psutil.pid_exists, workers))
    # A new pass starts new workers.
    assert len(list_ids(loader)) == 6


# A pass finds the dataset as it is when the pass begins, as with torch's DataLoader.


class Shades(Numbers):
    """Images whose pixels all tell the state of the dataset. Each read changes what it keeps."""

    def __init__(self, size):
        super().__init__(size)
        self.shades = torch.zeros(size, dtype=torch.uint8)

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        shade = int(self.shades[index])
        self.shades[index] += 10
        return torch.full_like(image, shade), target


def list_shades(loader):
    return {int(batch.pixels.max()) for batch in loader}


@pytest.mark.parametrize(
    "hold",
    [
        lambda dataset: dataset,
        lambda dataset: Subset(dataset, range(6)),
        lambda dataset: ConcatDataset([dataset]),
    ],
)
def test_each_pass_finds_the_dataset_as_it_is(make, hold):
    """What its owner has changed in place counts, and what a worker has changed does not."""
    dataset = Shades(8)
    loader = make(hold(dataset), batch_size=3, workers=2)
    for epoch in range(3):
        assert loader.epoch == epoch
        assert list_shades(loader) == {epoch}
        dataset.shades += 1


def list_worker_pids(loader):
    list(loader)
    return {worker.process.pid for worker in loader._prefetcher._workers}


def test_workers_of_the_packages_own_datasets_stay(loose, make):
    subset = Subset(loose, [3, 1, 2])
    loader = make(subset, workers=2)
    before = list_worker_pids(loader)
    assert list_worker_pids(loader) == before
    subset.indices = [0, 5]
    assert not before & list_worker_pids(loader)
    assert loader.state_dict()["images"] == 2


def test_transforms_of_shards_switched_on_and_off_are_those_of_the_pass(dataset, make):
    loader = make(dataset, workers=2, shuffle=False)
    plain = [batch.pixels.clone() for batch in loader]
    for transforms, factor in ((lambda image, target: (image // 2, target), 2), (None, 1)):
        dataset.transforms = transforms
        for batch, before in zip(loader, plain, strict=True):
            assert torch.equal(batch.pixels, before // factor)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_grows_or_shrinks_is_read_whole(make, workers):
    dataset = Numbers(5)
    loader = make(dataset, workers=workers)
    for size in (5, 9):
        dataset.size = size
        assert len(loader) == math.ceil(size / 2)
        assert loader.state_dict()["images"] == size
        assert sorted(flatten(list_ids(loader))) == [*range(size)]
    # After a pass that is broken off.
    next(iter(loader))
    dataset.size = 3
    assert sorted(flatten(list_ids(loader))) == [*range(3)]
    dataset.size = 0
    with pytest.raises(ColabUtilsError, match="empty"):
        list(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_are_those_of_the_moment_when_a_pass_begins(make, workers):
    options = {"batch_size": 4, "workers": workers, "shuffle": False}
    loader = make(Numbers(6), **options)
    with join_group(rank=1, ranks=2):
        assert list_ids(loader) == [[1, 3], [5]]
        # The indices of a sampler are not divided.
        alone = make(Numbers(6), sampler=range(6), **options)
        assert list_ids(alone) == [[0, 1, 2, 3], [4, 5]]
    assert list_ids(loader) == [[0, 1, 2, 3], [4, 5]]


# The datasets below read the samples of a batch at once.


class Table(torch.utils.data.Dataset):
    """A table far away, which gives many rows for one question."""

    def __init__(self, size, broken=()):
        self.numbers = Numbers(size)
        self.broken = broken

    def __len__(self):
        return len(self.numbers)

    def __getitems__(self, indices):
        if {*self.broken} & {*indices}:
            raise OSError(f"rows {indices}")
        return [self.numbers[index] for index in indices]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("hold", [lambda table: table, lambda table: Subset(table, range(11))])
def test_samples_are_read_at_once_where_the_dataset_can(make, workers, hold):
    loader = make(hold(Table(11)), batch_size=4, workers=workers, deliver="dense")
    for images, targets in loader:
        assert_equal_batches(Numbers(11), range(11), images, targets)


# A share of 0.1 is one of eleven.
@pytest.mark.parametrize(("workers", "max_bad"), [(2, 1), (0, 0.1)])
def test_a_bad_row_of_a_table_is_left_out_alone(make, workers, max_bad):
    options = {"batch_size": 4, "workers": workers}
    with pytest.raises(OSError, match=r"rows \[5\]"):
        list(make(Table(11, [5]), **options))
    loader = make(Table(11, [5]), max_bad=max_bad, **options)
    with pytest.warns(ColabUtilsWarning, match="left out"):
        ids = flatten(list_ids(loader))
    assert sorted(ids) == [number for number in range(11) if number != 5]
    assert loader.bad == [(5, "OSError: rows [5]")]


class Brighter(Subset):
    """A subset that changes its samples."""

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return torch.full_like(image, 200), target

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def test_a_subset_of_somebodys_own_gives_its_own_samples(make):
    assert list_shades(make(Brighter(Numbers(6), range(6)))) == {200}


@pytest.mark.parametrize("keys", [("boxes", "labels", "masks"), "all"])
def test_torchvisions_wrapped_datasets_go_in(tiny_dataset, make, keys):
    data = CocoDetection(tiny_dataset.images, tiny_dataset.annotations, transforms=v2.ToImage())
    wrapped = wrap_dataset_for_transforms_v2(data, target_keys=keys)
    loader = make(wrapped, workers=2, shuffle=False)
    targets = [target for batch in loader for target in batch.to_targets("cpu")]
    for target, (_, expected) in zip(targets, wrapped, strict=True):
        # An image without objects has no boxes.
        assert len(target["boxes"]) == len(expected.get("boxes", ()))
        for key in expected.keys() & {"boxes", "masks"}:
            assert torch.equal(target[key], expected[key].as_subclass(torch.Tensor))


def flatten_boxes(image, target):
    target["boxes"][:, 3] = target["boxes"][:, 1]
    return image, target


def test_values_after_transforms_are_refused(tiny_shards, make):
    loader = make(ShardDataset(tiny_shards, transforms=flatten_boxes), workers=1)
    with pytest.raises(ColabUtilsError, match=r"has no area.*SanitizeBoundingBoxes"):
        list(loader)


def test_boxes_of_another_format_come_back_as_corners(dataset, make):
    converted = v2.ConvertBoundingBoxFormat("XYWH")
    for _, [target] in make(dataset, batch_size=1, deliver="dense", transforms=converted):
        expected = dataset[dataset.image_ids.tolist().index(target["image_id"])][1]
        assert torch.allclose(target["boxes"], expected["boxes"], atol=1e-4)


INTERRUPT_SCRIPT = """
import sys, time
from colab_utils import ShardDataset, make_loader
loader = make_loader(ShardDataset(sys.argv[1]), batch_size=1, workers=2, deliver="packed")
try:
    for batch in loader:
        print("batch", flush=True)
        time.sleep(20)
except KeyboardInterrupt:
    print("interrupted", flush=True)
print(sum(len(batch) for batch in loader), loader.epoch, flush=True)
"""


def test_ctrl_c_leaves_a_loader_that_works_and_an_exit_without_noise(tiny_shards):
    process = subprocess.Popen(
        [*STRICT, "-c", INTERRUPT_SCRIPT, tiny_shards],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout.readline() == "batch\n"
        time.sleep(0.3)
        # A terminal and Jupyter signal the whole group, so that the workers get it, too.
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, "")
    assert out == "interrupted\n12 2\n"


def forget_masks(image, target):
    """Mirror an image and its boxes, and not its masks."""
    image, mirrored = v2.RandomHorizontalFlip(1)(image, target)
    return image, mirrored | {"masks": target["masks"]}


def test_the_workers_of_later_passes_do_not_tell_it_again(tiny_shards, make, capfd):
    loader = make(ShardDataset(tiny_shards, transforms=forget_masks), workers=1)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: print(message, file=sys.stderr, flush=True)
        for _ in range(3):
            list(loader)
    assert capfd.readouterr().err.count("the mask of this object lies in") == 1


def test_masks_that_a_flip_forgets_are_told(dataset, make):
    message = "Your transforms spoil an object.*the mask of this object lies in"
    with pytest.warns(ColabUtilsWarning, match=message):
        list(make(dataset, deliver="dense", transforms=forget_masks))


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        (
            lambda image, target: (image.numpy(), target),
            "ndarray",
        ),
        (
            lambda image, target: (image, {"boxes": target["boxes"]}),
            "uint8 .*, nothing, float32",
        ),
        (
            lambda image, target: (image, target | {"masks": target["masks"][1:]}),
            "uint8",
        ),
    ],
)
def test_transforms_whose_parts_do_not_belong_together_are_refused(
    transforms, message, tiny_shards, make
):
    message = f"do not belong together after your transforms: {message}"
    for on_worker, on_device in ((transforms, None), (None, transforms)):
        dataset = ShardDataset(tiny_shards, transforms=on_worker)
        with pytest.raises(ColabUtilsError, match=message):
            list(make(dataset, deliver="dense", transforms=on_device))


def divide_by_zero(image, target):
    return (image.float() - image) / 0, target


@pytest.mark.parametrize(
    "transforms", [v2.ToDtype(torch.float32), divide_by_zero], ids=["up to 255", "NaN"]
)
def test_images_that_are_not_scaled_or_have_no_numbers_are_told(transforms, dataset, make):
    with pytest.warns(ColabUtilsWarning, match="hold NaN, or floats up to 255"):
        list(make(dataset, deliver="dense", transforms=transforms))


def test_transforms_that_return_one_buffer_are_told(dataset, make):
    pixels = torch.zeros(3, 128, 160, dtype=torch.uint8)
    options = {
        "deliver": "dense",
        "transforms": lambda image, target: (pixels.copy_(image), target),
        "image_dtype": torch.uint8,
    }
    assert len(list(make(dataset, batch_size=1, **options))) == len(dataset)
    with pytest.raises(ColabUtilsError, match="the same memory for two samples"):
        list(make(dataset, **options))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_of_another_thread_ends_the_first_one(make, workers):
    options = {"batch_size": 3, "workers": workers}
    whole = make(Numbers(20), **options)
    epochs = [list_ids(whole) for _ in range(3)]
    loader = make(Numbers(20, lambda index: time.sleep(0.02)), **options)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(list_ids, loader)
        while not loader.total:
            time.sleep(0.001)
        assert list_ids(loader) == epochs[1]
        with pytest.raises(ColabUtilsError, match="Another pass over this loader"):
            first.result()
        # The first pass is over.
        assert threads.submit(list_ids, loader).result() == epochs[2]
