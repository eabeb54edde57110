"""The summary of a watched loop: where its time went, why, and that watching changes nothing."""

from __future__ import annotations

import gc
import json
import re
import sys
import time
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from colab_utils.diagnosis import summary as module
from colab_utils.diagnosis.memory_growth import Growth
from colab_utils.diagnosis.processes import SampleTimes
from colab_utils.diagnosis.summary import LoopRecord, find_causes, refine_causes
from colab_utils.diagnosis.watchdog import watch
from colab_utils.errors import ColabUtilsError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    pytest.mark.skipif(
        sys.platform != "linux", reason="processes are looked at through Linux's /proc"
    ),
]


def make_record(**settings):
    """Two workers that take turns with nobody, in a loop of ten seconds."""
    record = LoopRecord([])
    usual = {"workers": 2, "cpu_s": 5.0}
    for name, value in {**usual, **settings}.items():
        assert hasattr(record, name)
        setattr(record, name, value)
    return record


def find(waits=None, between=None, firsts=(0,), **settings):
    """The causes in a loop of 100 batches that takes ten seconds."""
    waits = np.full(100, 0.0) if waits is None else np.array(waits, float)
    between = np.zeros(100) if between is None else np.array(between, float)
    return find_causes(
        waits, between, np.isin(np.arange(100), firsts), 10.0, make_record(**settings)
    )


def spread(value, *, every=1):
    return [value if number % every == every - 1 else 0.0 for number in range(100)]


def sum_up(samples):
    """What workers note of samples, each with its seconds and its index; half of the time is
    work.
    """
    spread, wall_s = [(0, 0.0)] * 48, sum(seconds for seconds, _ in samples)
    for seconds, _ in samples:
        bits = int(seconds * 1e9).bit_length()
        spread[bits] = spread[bits][0] + 1, spread[bits][1] + seconds
    return SampleTimes(
        len(samples), wall_s, wall_s / 2, 0.0, 0, max(samples), wall_s / 2, tuple(spread)
    )


def test_a_loop_that_never_waits_has_no_cause():
    assert find(waits=spread(0.005), between=spread(0.005)) == []
    assert find(waits=[3.0, *[0.0] * 99]) == []  # every run starts once


@pytest.mark.parametrize(
    ("loop", "id", "words"),
    [
        ({"between": spread(0.06)}, "between", r"busy for 60 ms .*optimizer.step"),
        ({"between": spread(0.8, every=10)}, "periodic", r"About every 10 batches .* busy 0.8 s"),
        (
            {"waits": spread(1.0, every=25), "firsts": (24, 49, 74, 99)},
            "restarts",
            r"4 passes waits 1 s .* start anew.*persistent_workers=True.*make passes longer",
        ),
        (
            {"waits": spread(0.05), "times": SampleTimes(200, 14.0, 0.4, 0.2)},
            "read",
            r"takes 70 ms, and waits 67 ms",
        ),
        (
            {"waits": spread(0.05), "times": SampleTimes(200, 14.0, 0.4, 0.2, 200 * 300_000)},
            "read",
            r"data: only 300.0 kB, so mostly for the first byte",
        ),
        (
            {"waits": spread(0.05), "times": SampleTimes(200, 14.0, 0.4, 0.2, 200 * 4_000_000)},
            "read",
            r"data: 4.0 MB, at 60 MB/s. It is the bandwidth. .*Shrink",
        ),
        (
            {"waits": spread(0.05), "times": SampleTimes(200, 14.0, 13.0, 0.2), "cpu_s": 14.0},
            "work",
            r"65 ms of work.*1.4 of 2 cores are busy.*more workers",
        ),
        (
            {"waits": spread(0.05), "times": SampleTimes(200, 14.0, 4.0, 9.5)},
            "work",
            r"more workers would not help",
        ),
        (
            {"waits": spread(0.05), "times": SampleTimes(200, 1.0, 1.0, worker_cpu_s=6.0)},
            "collate",
            r"83% of their CPU",
        ),
        # other children of this process are busy, too: the evaluation
        (
            {
                "waits": spread(0.05),
                "times": SampleTimes(200, 14.0, 0.4, 0.2, worker_cpu_s=0.5),
                "cpu_s": 30.0,
            },
            "read",
            r"waits 67 ms",
        ),
        (
            {
                "waits": spread(0.05),
                "times": SampleTimes(200, 9.0, 8.0),
                "cpu_s": 19.0,
                "workers": 16,
            },
            "too_many_workers",
            r"16 workers share 2 cores.*num_workers=2",
        ),
        (
            {
                "waits": spread(1.0, every=25),
                "times": sum_up([*[(0.01, 4)] * 196, *[(1.0, 37)] * 4]),
            },
            "slow_sample",
            r"Sample 37 takes 1 s: loads as slow \(4 of 200\) hold 67% of the time",
        ),
        (
            {
                "waits": spread(1.0, every=25),
                "times": sum_up([*[(0.01, 4)] * 196, (0.9, 5), *[(1.0, 37)] * 3]),
            },
            "slow_sample",
            r"Sample 37 takes 1 s: loads as slow \(4 of 200\) hold 6\d%",
        ),
        # hours later: a thousand times as many samples, the eight slowest of which are kept
        (
            {
                "waits": spread(1.0, every=25),
                "times": sum_up([*[(0.01, 4)] * 196_000, *[(1.0, 37)] * 4_000]),
            },
            "slow_sample",
            r"Sample 37 takes 1 s: loads as slow \(4,000 of 200,000\) hold 67% of the time",
        ),
        # one sample that had no core for a moment, in a loop that waits for something else
        (
            {
                "waits": spread(0.05),
                "times": sum_up([*[(0.0005, 4)] * 200, (0.3, 37)])._replace(worker_cpu_s=6.0),
            },
            "collate",
            r"of their CPU time outside of samples",
        ),
        (
            {"waits": spread(1.0, every=25), "seen": {24: (37,), 49: (3,)}, "workers": 0},
            "slow_sample",
            r"Sample 37 takes 1 s: 2 of 100 batches are so slow",
        ),
        (
            {"waits": spread(0.05), "workers": 0},
            "work",
            r"loads the samples itself.*Use worker processes",
        ),
    ],
)
def test_each_cause_is_named_with_its_cure(loop, id, words, monkeypatch):
    monkeypatch.setattr(module, "count_cores", lambda: 2)
    (cause,) = find(**loop)
    assert cause.id == id
    assert cause.share == pytest.approx(
        sum(loop.get("waits") or loop["between"]) / 10, rel=0.02
    )  # a first batch is no wait
    assert re.search(words, f"{cause.why} {cause.next}"), cause


def test_two_causes_stand_in_the_order_of_their_shares():
    found = find(between=spread(0.06), waits=spread(0.02), times=SampleTimes(200, 14.0, 0.4, 0.2))
    assert [cause.id for cause in found] == ["between", "read"]


def test_contention_has_its_share_of_the_loop_not_of_the_step():
    (cause,) = refine_causes([], [], slower=2, step_share=0.5, waits=True)
    assert (cause.id, cause.share) == ("contention", 0.25)


def test_memory_that_grows_is_named_beside_a_fine_loop():
    (cause,) = find(growth=Growth(2.5, 4000, {"this process": 2.5}))
    assert cause.id == "memory"
    assert "at step 4,000" in cause.why


class _Items(Dataset):
    def __init__(self, count, wait_s=0.0):
        self.count, self.wait_s = count, wait_s

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(self.wait_s)
        return torch.full((2,), float(index)), index


class _Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def make_step():
    """A step that trains, and sleeps in the middle."""
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)

    def step(values, seconds=0.0):
        loss = layer(values).sum()
        loss.backward()
        time.sleep(seconds)
        optimizer.step()

    return step


@pytest.mark.parametrize("workers", [0, 2])
def test_watching_changes_neither_order_nor_random_numbers(workers, capsys):
    def loop(around):
        torch.manual_seed(3)
        loader = DataLoader(_Items(9), batch_size=2, shuffle=True, num_workers=workers)
        seen = [indices.tolist() for _ in range(2) for _, indices in around(loader)]
        return seen, torch.rand(1).item()

    assert loop(watch) == loop(lambda loader: loader)


def test_attributes_of_the_loader_are_reachable():
    loader = DataLoader(_Items(4), batch_size=2)
    watched = watch(loader)
    assert (len(watched), watched.batch_size, watched.dataset) == (2, 2, loader.dataset)
    assert watched.sampler is loader.sampler
    watched.worker_init_fn = print  # as a framework sets it
    assert loader.worker_init_fn is print
    assert isinstance(watched, DataLoader)
    with pytest.raises(ColabUtilsError, match="expected a batch to look at, found none"):
        watched.summary()


def test_a_summary_is_printed_once_for_a_pass_and_is_kept_as_json(capsys, tmp_path):
    step, watched = make_step(), watch(DataLoader(_Items(8), batch_size=2))
    for values, _ in watched:
        step(values)
    told = capsys.readouterr().err
    assert "wait" in told
    assert told.count("images/s") == 1
    summary = watched.summary()
    assert str(summary) in told
    assert (summary.batches, summary.passes, summary.images) == (4, 1, 8)
    assert sum(
        part.share for part in summary.parts
    ) + summary.start_s / summary.seconds == pytest.approx(1)
    summary.save(tmp_path / "run.json")
    kept = json.loads((tmp_path / "run.json").read_text())
    assert kept["batches"] == 4
    assert kept["wait_share"] == pytest.approx(summary.wait_share)


@pytest.mark.parametrize("way", ["break", "error", "Ctrl-C"])
def test_a_loop_that_is_left_has_its_summary(way, capsys):
    watched = watch(DataLoader(_Items(8), batch_size=2))
    left = {"break": None, "error": ValueError("mine"), "Ctrl-C": KeyboardInterrupt()}[way]

    def loop():
        for number, _ in enumerate(watched):
            if number == 1 and left is None:
                break
            if number == 1:
                raise left

    if left is None:
        loop()
    else:
        with pytest.raises(type(left)):
            loop()
    assert watched.summary().batches == 2
    assert "images/s" in capsys.readouterr().err


def test_an_endless_stream_and_one_that_cannot_start_again(capsys):
    watched = watch(DataLoader(_Stream(), batch_size=None, num_workers=1))
    assert [int(value) for value in watched] == list(range(8))
    assert any("not seen" in text for text in watched.summary().unseen)
    assert any("No optimizer" in text for text in watched.summary().unseen)
    once = watch(iter([1, 2]))
    assert ([*once], [*once]) == ([1, 2], [])
    assert once.summary().batches == 2


def test_two_watches_on_one_loader_tell_the_same(capsys):
    step, loader = make_step(), DataLoader(_Items(8), batch_size=2)
    inner = watch(loader)
    outer = watch(inner)
    for values, _ in outer:
        step(values)
    assert inner.summary().batches == outer.summary().batches == 4
    assert not inner.summary().unseen


@pytest.mark.clock
def test_a_loop_with_workers_says_what_is_slow_in_it(capsys):
    step = make_step()
    watched = watch(DataLoader(_Items(40, wait_s=0.05), batch_size=2, num_workers=1))
    for values, _ in watched:
        step(values, 0.01)
        time.sleep(0.02)
    summary = watched.summary()
    assert [cause.id for cause in summary.causes] == ["read", "between"]
    assert summary.wait_share + sum(part.share for part in summary.parts[1:]) == pytest.approx(1)
    assert len(summary.worst) == 10
    assert summary.parts[2].median_ms == pytest.approx(20, rel=0.3)


def test_a_few_quick_batches_are_no_verdict(capsys):
    watched = watch([torch.zeros(2)])
    for _ in watched:
        time.sleep(0.001)
    assert not watched.summary().causes
    next(iter(slow := watch(DataLoader(_Items(4, wait_s=0.02), batch_size=4))))
    assert slow.summary().verdict.startswith("Too few batches for a verdict: wait")


@pytest.mark.parametrize(("batch_size", "drop_last"), [(4, False), (4, True), (None, False)])
def test_all_images_are_counted_the_last_batch_too(batch_size, drop_last):
    options = {"drop_last": drop_last} if batch_size else {}
    watched = watch(DataLoader(torch.zeros(10, 3, 2), batch_size=batch_size, **options))
    seen = sum(len(batch) if batch_size else 1 for _ in range(2) for batch in watched)
    # of a bare tensor, the first dimension
    assert watched.summary().images == seen * (1 if batch_size else 3)


def test_a_watched_loader_goes_as_soon_as_nothing_holds_it():
    gc.disable()  # it would end the workers in the middle of another loop
    try:
        loader = DataLoader(range(8), num_workers=1, persistent_workers=True)
        watched = watch(loader)
        list(watched)
        kept = weakref.ref(loader)
        del loader, watched
        assert kept() is None
    finally:
        gc.enable()


def test_of_several_processes_each_says_its_rank(monkeypatch):
    watched = watch([torch.zeros(2, 3)])
    list(watched)
    assert watched.summary().rank is None
    monkeypatch.setattr(module.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(module.distributed, "get_rank", lambda: 3)
    assert str(watched.summary()).startswith("Rank 3: ")


def test_images_are_counted_that_came_where_collate_leaves_some_out():
    dataset = TensorDataset(torch.zeros(8))
    loader = DataLoader(
        dataset, batch_size=4, collate_fn=lambda samples: (torch.zeros(3, 2), torch.zeros(3))
    )
    watched = watch(loader)
    list(watched)
    assert watched.summary().images == 6
