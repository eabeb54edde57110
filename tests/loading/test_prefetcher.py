"""Who loads, where the batches lie, and what is left when memory, a worker or a sample fails."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
import warnings
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Subset
from torchvision.transforms import v2

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading import shared_memory
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.fetcher import Fetcher
from colab_utils.loading.loader import make_loader
from colab_utils.loading.shared_memory import SharedBuffer, SharedBufferPool
from colab_utils.loading.transforms import apply_transforms
from colab_utils.loading.workers import WorkerDiedError

from .test_loader import (
    TENSORS,
    Numbers,
    assert_equal_batches,
    flatten,
    join_group,
    list_ids,
    spoil_image,
)

WORKERS = [0, 2]


@pytest.fixture
def make(request):
    def build(dataset, **options):
        loader = make_loader(dataset, **options)
        request.addfinalizer(loader.close)
        return loader

    return build


def test_batches_that_are_kept_stay_as_they_were(tiny_shards, make):
    dataset = ShardDataset(tiny_shards)
    place = {image_id: i for i, image_id in enumerate(dataset.image_ids.tolist())}
    loader = make(dataset, batch_size=1, workers=2, deliver="packed")
    for _ in range(2):
        # These are more batches than there are buffers.
        kept = list(loader)
        for batch in kept:
            assert_equal_batches(dataset, place, batch.to_images("cpu"), batch.to_targets("cpu"))


def test_memory_is_used_again():
    pool = SharedBufferPool(1, 2)
    numbers = [pool.take() for _ in range(3)]
    for number in numbers:
        pool.buffers[number].reserve(100)[:] = number
    first = pool.hold(numbers[0], 100)
    second = pool.hold(numbers[1], 100)
    third = pool.hold(numbers[2], 100)
    assert first.unique().tolist() == [numbers[0]]
    assert second.unique().tolist() == [numbers[1]]
    assert third.unique().tolist() == [numbers[2]]
    # The third was copied out, because two are lent.
    assert pool.take() == numbers[2]
    part = first[10:20]
    del first
    gc.collect()
    with pytest.raises(IndexError):
        # A piece of the first buffer is still in use.
        pool.take()
    del part
    assert pool.take() == numbers[0]
    assert second.unique().tolist() == [numbers[1]]


def test_a_buffer_grows_and_what_was_lent_keeps_its_content():
    buffer = SharedBuffer()
    small = buffer.reserve(10)
    small[:] = 7
    large = buffer.reserve(5 << 20)
    assert small.tolist() == [7] * 10
    assert large[:10].tolist() == [7] * 10
    assert large.size == 5 << 20


def test_a_batch_larger_than_memory_is_refused(make, monkeypatch):
    monkeypatch.setattr(shared_memory, "find_free_memory", lambda: 1000)
    for count in (0, 2):
        with pytest.raises(ColabUtilsError, match=r"of shared memory.*1.0 kB free.*smaller batch"):
            list(make(Numbers(20), batch_size=4, workers=count))


def test_workers_that_cannot_start_are_said_and_none_is_left(make, monkeypatch):
    fork = os.fork
    count = [0]

    def refuse():
        count[0] += 1
        if count[0] == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", refuse)
    loader = make(Numbers(6), batch_size=2, workers=3, shuffle=False, deliver="packed")
    with pytest.raises(
        ColabUtilsError,
        match=r"limit of the system is reached: .*temporarily unavailable.*ulimit -u",
    ):
        list(loader)
    assert multiprocessing.active_children() == []
    # The workers can start now.
    assert flatten(list_ids(loader)) == list(range(6))


# The tests below have bad samples.


def act_with_three_bad(index):
    # All samples of a batch are bad, and so is one of another batch.
    if index in (4, 5):
        raise ColabUtilsError(f"expected a whole image, found half of {index}.jpg")
    if index == 9:
        # Pillow says it in these words.
        raise OSError("image file is truncated (31 bytes not processed)")


@pytest.mark.parametrize("count", WORKERS)
def test_bad_samples_are_left_out_named_and_counted(make, count):
    options = {"batch_size": 2, "workers": count, "deliver": "packed", "shuffle": False}
    loader = make(Numbers(12, act_with_three_bad), max_bad=3, **options)
    with pytest.warns(ColabUtilsWarning) as caught:
        batches = list_ids(loader)
    assert [str(warning.message)[-5:] for warning in caught[:2]] == ["4.jpg", "5.jpg"]
    assert "(number 3 so far): OSError: image file is truncated" in str(caught[2].message)
    assert batches == [[0, 1], [2, 3], [6, 7], [8], [10, 11]]
    assert [index for index, _ in loader.bad] == [4, 5, 9]
    assert loader.epoch == 1
    # The same images fail again: they are counted and told once.
    assert list_ids(loader) == batches
    assert [index for index, _ in loader.bad] == [4, 5, 9]
    loader = make(Numbers(12, act_with_three_bad), max_bad=2, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ColabUtilsWarning)
        with pytest.raises(
            ColabUtilsError, match=r"at most 2 bad images \(max_bad\), found 3.*truncated"
        ):
            list(loader)


def test_a_broken_image_in_a_shard_is_left_out_and_named(tiny_shards, tmp_path, make):
    folder = Path(shutil.copytree(tiny_shards, tmp_path / "shards"))
    name = spoil_image(folder, 3)
    dataset = ShardDataset(folder)
    loader = make(dataset, batch_size=5, workers=2, deliver="packed", max_bad=1)
    with pytest.warns(ColabUtilsWarning, match=name):
        got = flatten(list_ids(loader))
    assert sorted([*got, int(dataset.image_ids[3])]) == sorted(dataset.image_ids.tolist())


# The tests below ask what the workers do.


def sleep_at_five(index):
    time.sleep(60 if index == 5 else 0)


def test_jobs_are_listed_and_a_worker_that_ended_is_named(make):
    loader = make(
        Numbers(12, sleep_at_five), batch_size=2, workers=2, deliver="packed", shuffle=False
    )
    assert loader.list_jobs() == []
    killer = threading.Timer(
        0.5,
        lambda: os.kill(loader.list_jobs()[0].pid, signal.SIGKILL),
    )
    killer.start()
    got = []
    with pytest.raises(WorkerDiedError, match="killed by signal: Killed") as died:
        got.extend(batch.image_ids.tolist() for batch in loader)
    assert got == [[0, 1], [2, 3]]
    job = died.value.job
    assert (job.number, job.indices, died.value.ending) == (2, (4, 5), "killed by signal: Killed")
    assert job.worker in range(2)
    assert job.pid != os.getpid()
    assert loader.list_jobs() == []


# The tests below read subsets and subclasses.


def test_a_subset_is_read_as_its_dataset(tiny_shards, make):
    dataset = ShardDataset(tiny_shards)
    inner = Subset(dataset, [7, 3, 3, 9, 1, 0])
    # This is a subset of a subset.
    subset = Subset(inner, [5, 1, 2, 0])
    source = Fetcher(subset)
    assert source.writes_itself
    assert source.sizes.shape == (4, 2)
    loader = make(subset, batch_size=4, workers=1, deliver="packed", shuffle=False)
    assert list_ids(loader) == [dataset.image_ids[[0, 3, 3, 7]].tolist()]
    backwards = Subset(Subset(dataset, [-1, 2, -3]), [-1, 0])
    loader = make(backwards, batch_size=2, workers=0, deliver="packed", shuffle=False)
    assert list_ids(loader) == [dataset.image_ids[[-3, -1]].tolist()]


class Darker(ShardDataset):
    """Somebody's own subclass that changes the samples."""

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return image // 2, target


def test_a_subclass_gives_its_own_samples(tiny_shards, make):
    darker = Darker(tiny_shards)
    assert not Fetcher(darker).writes_itself
    place = {image_id: i for i, image_id in enumerate(darker.image_ids.tolist())}
    for images, targets in make(darker, batch_size=4, workers=1):
        assert_equal_batches(darker, place, images, targets)


# The tests below apply transforms of users.


def test_a_flip_alone_is_drawn_with_the_masks(tiny_shards, make):
    dataset = ShardDataset(tiny_shards)
    options = {"batch_size": 5, "shuffle": False, "workers": 2, "image_dtype": torch.uint8}
    plain = [pair for batch in make(dataset, **options) for pair in zip(*batch, strict=True)]
    some = [
        make(dataset, transforms=v2.RandomHorizontalFlip(0.5), seed=seed, **options)
        for seed in (1, 1, 2)
    ]
    assert all(loader.transforms is None for loader in some)
    passes = [[pair for batch in loader for pair in zip(*batch, strict=True)] for loader in some]
    chosen = []
    for samples in passes:
        flips = []
        for (image, target), (before, target_before) in zip(samples, plain, strict=True):
            flips.append(not torch.equal(image, before))
            if flips[-1]:
                before, target_before = apply_transforms(
                    v2.RandomHorizontalFlip(1), before, target_before
                )
            assert torch.equal(image, before)
            assert all(torch.equal(target[key], target_before[key]) for key in TENSORS)
        chosen.append(flips)
    assert chosen[0] == chosen[1] != chosen[2]
    assert 0 < sum(chosen[0]) < len(plain)
    later = [pair for batch in some[0] for pair in zip(*batch, strict=True)]
    assert any(
        not torch.equal(first[0], other[0]) for first, other in zip(passes[0], later, strict=True)
    )


class Chance:
    """A transform that draws from all three generators."""

    def __call__(self, image, target):
        shift = random.randrange(50) + np.random.randint(50) + int(torch.randint(50, ()))
        return image + shift, target


class Drawing(Numbers):
    """Somebody's own dataset that draws random numbers, slowly enough for the training thread to
    draw in between.
    """

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        for _ in range(3):
            image, _ = Chance()(image, target)
            time.sleep(0.002)
        return image, target


@pytest.mark.parametrize("own", [False, True])
def test_random_samples_are_the_seeds_with_any_number_of_workers(tiny_shards, make, own):
    dataset = Drawing(12) if own else ShardDataset(tiny_shards, transforms=Chance())
    state = (random.getstate(), torch.get_rng_state())
    runs = []
    for count in (0, 3):
        for draws in (False, True):
            loader = make(dataset, batch_size=3, workers=count, deliver="packed")
            pixels = []
            for batch in chain(loader, loader):
                pixels.append(batch.pixels.clone())
                # A training step draws random numbers, too.
                if draws:
                    torch.rand(1), np.random.random(), random.random()
                    time.sleep(0.005)
            runs.append(pixels)
            assert draws or (random.getstate(), torch.get_rng_state().tolist()) == (
                state[0],
                state[1].tolist(),
            )
            random.setstate(state[0])
            torch.set_rng_state(state[1])
    for other in runs[1:]:
        assert all(torch.equal(first, two) for first, two in zip(runs[0], other, strict=True))
    assert any(
        not torch.equal(first, two)
        for first, two in zip(
            runs[0][:4],
            runs[0][4:],
            strict=True,
        )
    )


def test_processes_that_train_together_draw_their_own_random_numbers(tiny_shards, make):
    drawn = [[], []]
    for rank, numbers in enumerate(drawn):

        def draw(image, target, numbers=numbers):
            numbers.append(
                (
                    random.random(),
                    np.random.random(),
                    torch.rand(1).item(),
                )
            )
            return image, target

        with join_group(rank, ranks=2):
            loader = make(ShardDataset(tiny_shards, transforms=draw), batch_size=4, workers=0)
            list(loader)
    assert {len(numbers) for numbers in drawn} == {6}
    assert not set(drawn[0]) & set(drawn[1])


def test_objects_that_a_transform_drops_are_gone_everywhere(tiny_shards, make):
    class Drop:
        def __call__(self, image, target):
            kept = {key: target[key][:1] for key in ("boxes", "labels", "masks")}
            return image, {**target, **kept}

    for on_worker, on_device in ((Drop(), None), (None, Drop())):
        dataset = ShardDataset(tiny_shards, transforms=on_worker)
        for _, targets in make(dataset, batch_size=5, workers=0, transforms=on_device):
            for target in targets:
                assert len({len(target[key]) for key in TENSORS}) == 1


def test_transforms_that_do_not_fit_are_refused(tiny_shards, make):
    dataset = ShardDataset(tiny_shards)
    with pytest.raises(ColabUtilsError, match="transforms need dense masks"):
        make(dataset, batch_size=2, transforms=v2.Identity(), deliver="packed")
    with pytest.raises(ColabUtilsError, match=r"from your transforms, found Image"):
        list(make(dataset, batch_size=2, workers=0, transforms=lambda image, target: image))


def test_a_loader_says_what_it_does(tiny_shards, make):
    loader = make(ShardDataset(tiny_shards), batch_size=2, workers=2, deliver="packed")
    assert str(loader) == "6 batches of 2, packed (workers=2, prefetch=2)"
    assert "(workers=0)" in repr(make(ShardDataset(tiny_shards), batch_size=2, workers=0))
