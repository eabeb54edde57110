"""The summary of a watched loop: where its time went, and why."""

from __future__ import annotations

import gc
import re
import time
import weakref
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from colab_utils.diagnosis.watch import watch
from colab_utils.errors import ColabUtilsError
from tests.diagnosis.loops import Samples


def make_step():
    """A step that trains, and sleeps in the middle."""
    layer = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)

    def step(values, seconds=0.0):
        loss = layer(values).sum()
        loss.backward()
        time.sleep(seconds)
        optimizer.step()

    return step


def test_attributes_of_the_loader_are_reachable():
    items = Samples(8)
    sampler = DistributedSampler(items, num_replicas=2, rank=0)
    loader = DataLoader(items, batch_size=2, sampler=sampler)
    watched = watch(loader)
    assert (len(watched), watched.dataset) == (2, loader.dataset)
    watched.sampler.set_epoch(3)
    assert sampler.epoch == 3
    # A framework sets a function of its own like this.
    watched.worker_init_fn = print
    assert loader.worker_init_fn is print
    assert isinstance(watched, DataLoader)
    with pytest.raises(AttributeError, match="no attribute"):
        watched.streams  # noqa: B018
    with pytest.raises(ColabUtilsError, match="No batch was seen yet"):
        watched.summary()


def test_a_summary_is_printed_once_for_a_pass(capsys):
    step = make_step()
    watched = watch(DataLoader(Samples(7), batch_size=2))
    for values, _ in watched:
        step(values)
    printed = capsys.readouterr().err
    assert printed.count("images/s") == 1
    summary = watched.summary()
    assert str(summary) in printed
    assert (summary.batches, summary.passes, summary.images) == (4, 1, 7)
    shares = [part.share for part in summary.parts]
    assert sum(shares) + summary.start_s / summary.seconds == pytest.approx(1)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_a_loop_that_is_left_has_its_summary(error, capsys):
    watched = watch(DataLoader(Samples(8), batch_size=2))
    with suppress(ValueError, KeyboardInterrupt):
        for number, _ in enumerate(watched):
            if number == 1:
                raise error
    assert watched.summary().batches == 2
    assert "images/s" in capsys.readouterr().err


def test_passes_of_one_batch_have_a_cure_of_their_own():
    # No cause is named before a loop has lasted half a second.
    watched = watch(DataLoader(Samples(8, 0.05), num_workers=1))
    for _ in range(12):
        next(iter(watched))
    summary = watched.summary()
    assert "batches = iter(loader)" in summary.causes[0].next
    assert not any("No optimizer" in text for text in summary.unseen)


def test_a_few_quick_batches_are_no_verdict():
    slow = watch(DataLoader(Samples(4, 0.02), batch_size=4))
    next(iter(slow))
    assert slow.summary().verdict.startswith("Too few batches for a verdict: wait")


def test_a_watched_loader_goes_as_soon_as_nothing_holds_it():
    # The collector would end the workers in the middle of another loop.
    gc.disable()
    try:
        loader = DataLoader(range(8), num_workers=1, persistent_workers=True)
        watched = watch(loader)
        list(watched)
        kept = weakref.ref(loader)
        del loader, watched
        assert kept() is None
    finally:
        gc.enable()


def test_loaders_that_one_line_makes_anew_are_one_loader():
    def train(items):
        watched = watch(DataLoader(items, num_workers=1, persistent_workers=True))
        list(watched)
        return watched.summary().passes, watched._record.restarts

    items = Samples(4)
    assert [train(items) for _ in range(3)] == [(1, False), (2, True), (3, True)]
    # Another dataset has a loader of its own.
    assert train(Samples(4)) == (1, False)


class _Wrapped:
    """A loader in a class that does not say how many workers it has."""

    def __init__(self, **options):
        self.loader = DataLoader(Samples(8, 0.02), num_workers=2, **options)

    def __iter__(self):
        yield from self.loader


@pytest.mark.parametrize("stays", [False, True])
def test_workers_of_a_loader_in_a_wrapper_are_counted(stays):
    watched = watch(_Wrapped(persistent_workers=stays))
    for _ in range(2):
        list(watched)
    text = str(watched.summary())
    record = watched._record
    assert (record.workers, record.restarts) == (2, not stays)
    assert "This process loads the samples itself" not in text


@pytest.mark.clock
def test_where_the_step_is_the_limit_its_line_is_named():
    watched = watch(DataLoader(Samples(16), batch_size=2))
    step = make_step()
    for values, _ in watched:
        step(values, seconds=0.2)
    assert re.search(
        r"This process was seen at .*test_summary.py:\d+ step .time.sleep.* \(in \d of \d looks\)",
        watched.summary().verdict,
    )


def test_work_before_the_model_is_a_part_of_its_own():
    layer = nn.Linear(8, 1)
    layer.register_forward_hook(lambda *_: time.sleep(0.1))
    watched = watch(DataLoader(Samples(15)))
    for values, _ in watched:
        time.sleep(0.1)
        layer(values)
    summary = watched.summary()
    names = [part.name for part in summary.parts]
    assert names == ["wait", "before the model", "step", "between steps"]
    assert summary.parts[1].share > 0.2
    assert sum(part.share for part in summary.parts) == pytest.approx(1, abs=0.1)
