"""Who loads, where the batches lie, and what is left when memory, a worker or a sample fails."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import time
from collections import deque
from itertools import chain
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset
from torchvision.transforms import v2

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading import shared_memory
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.fetcher import Fetcher

from .test_loader import (
    Numbers,
    assert_equal_batches,
    flatten,
    join_group,
    list_ids,
)

WORKERS = [0, 2]


@pytest.mark.parametrize("kept", [2, 12])
def test_a_part_of_a_batch_that_is_kept_stays_as_it_was(make, kept):
    # The batches grow, and their buffers with them.
    dataset = [(torch.full((3, 8, 10**size), size).byte(), {}) for size in range(1, 6)] * 4
    parts = deque(maxlen=kept)
    for batch in make(dataset, batch_size=1, workers=2, shuffle=False):
        part = batch.pixels[5:20]
        parts.append((part, part.clone()))
        assert all(itertools.starmap(torch.equal, parts))


def test_a_batch_larger_than_memory_is_refused(make, monkeypatch):
    monkeypatch.setattr(shared_memory, "find_free_memory", lambda: 1000)
    for count in WORKERS:
        with pytest.raises(ColabUtilsError, match=r"of shared memory.*1.0 kB free.*smaller batch"):
            list(make(Numbers(20), workers=count))


def test_workers_that_cannot_start_are_said_and_none_is_left(make, monkeypatch):
    refused = BlockingIOError(11, "Resource temporarily unavailable")
    calls = [DEFAULT, refused, DEFAULT, DEFAULT, DEFAULT]
    monkeypatch.setattr(os, "fork", Mock(wraps=os.fork, side_effect=calls))
    loader = make(Numbers(6), workers=3, shuffle=False)
    # Another test may have left some.
    before = {*multiprocessing.active_children()}
    message = r"limit of the system is reached: .*temporarily unavailable.*ulimit -u"
    with pytest.raises(ColabUtilsError, match=message):
        list(loader)
    assert before.issuperset(multiprocessing.active_children())
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
    options = {"workers": count, "shuffle": False}
    loader = make(Numbers(12, act_with_three_bad), max_bad=3, **options)
    with pytest.warns(ColabUtilsWarning) as caught:
        batches = list_ids(loader)
    assert [str(warning.message)[-5:] for warning in caught[:2]] == ["4.jpg", "5.jpg"]
    assert "(number 3 so far): OSError: image file is truncated" in str(caught[2].message)
    assert batches == [[0, 1], [2, 3], [6, 7], [8], [10, 11]]
    assert loader.epoch == 1
    # The same images fail again: they are counted and told once.
    assert list_ids(loader) == batches
    assert [index for index, _ in loader.bad] == [4, 5, 9]
    loader = make(Numbers(12, act_with_three_bad), max_bad=2, **options)
    with (
        pytest.warns(ColabUtilsWarning),
        pytest.raises(
            ColabUtilsError, match=r"at most 2 bad images \(max_bad\), found 3.*truncated"
        ),
    ):
        list(loader)


def test_among_ranks_a_batch_of_a_sampler_that_is_all_bad_is_none(make):
    loader = make(Numbers(12, act_with_three_bad), sampler=range(12), max_bad=3)
    with join_group(rank=0, ranks=2), pytest.warns(ColabUtilsWarning):
        assert None in list(loader)


# The tests below read subsets and subclasses.


def test_a_subset_is_read_as_its_dataset(dataset, make):
    inner = Subset(dataset, [7, 3, -1, 9, 1, 0])
    # This is a subset of a subset.
    subset = Subset(inner, [-1, 1, 1, 2])
    assert Fetcher(subset).writes_itself
    loader = make(subset, batch_size=4, workers=1, shuffle=False)
    assert list_ids(loader) == [dataset.image_ids[[0, 3, 3, -1]].tolist()]


class Darker(ShardDataset):
    """Somebody's own subclass that changes the samples."""

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return image // 2, target


def list_samples(loader):
    return [sample for batch in loader for sample in zip(*batch, strict=True)]


def test_a_subclass_gives_its_own_samples(tiny_shards, make):
    darker = Darker(tiny_shards)
    assert not Fetcher(darker).writes_itself
    for images, targets in make(darker, workers=1, deliver="dense"):
        assert_equal_batches(darker, darker.image_ids.tolist(), images, targets)


# The tests below apply transforms of users.


class Chance:
    """A transform that draws from all three generators, slowly enough for the training thread to
    draw in between.
    """

    def __call__(self, image, target):
        shift = random.randrange(50)
        time.sleep(0.002)
        return image + shift + np.random.randint(50) + int(torch.randint(50, ())), target


@pytest.mark.parametrize("own", [False, True])
def test_random_samples_are_the_seeds_with_any_number_of_workers(tiny_shards, make, own):
    dataset = ShardDataset(tiny_shards, transforms=Chance())
    if own:
        # Somebody's own dataset.
        dataset = ConcatDataset([dataset])
    runs = []
    for count, draws in ((0, False), (0, True), (3, True)):
        before = random.getstate(), torch.get_rng_state().tolist()
        loader = make(dataset, batch_size=3, workers=count)
        pixels = []
        for batch in chain(loader, loader):
            pixels.append(batch.pixels.numpy().tobytes())
            # A training step draws random numbers, too.
            if draws:
                torch.rand(1), np.random.random(), random.random()
                time.sleep(0.005)
        runs.append(pixels)
        assert draws or before == (random.getstate(), torch.get_rng_state().tolist())
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][:4] != runs[0][4:]


def test_processes_that_train_together_draw_their_own_random_numbers(tiny_shards, make):
    drawn = []

    def draw(image, target):
        drawn.append((random.random(), np.random.random(), torch.rand(1).item()))
        return image, target

    for rank in range(2):
        with join_group(rank, ranks=2):
            list(make(ShardDataset(tiny_shards, transforms=draw)))
    assert len(drawn) == len({number for numbers in drawn for number in numbers}) / 3 == 12


def test_transforms_that_do_not_fit_are_refused(dataset, make):
    with pytest.raises(ColabUtilsError, match="transforms need dense masks"):
        make(dataset, transforms=v2.Identity())
    with pytest.raises(ColabUtilsError, match=r"target from your transforms, found Image"):
        list(make(dataset, deliver="dense", transforms=lambda image, target: image))
