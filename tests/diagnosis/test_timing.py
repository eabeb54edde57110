"""The clocks: what they count, what they leave out, and what they say of a broken loader."""

import itertools
import threading
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from colab_utils.diagnosis import timing
from colab_utils.diagnosis.timing import find_error, time_batches
from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.emulated_step import EmulatedStep
from tests.diagnosis.loops import Samples, burn


class _Closing:
    """A loader that notes the beginning and the end of each pass."""

    def __init__(self):
        self.notes = []

    def __iter__(self):
        self.notes.append("begun")
        try:
            yield from [(["a", "b"], [{}, {}]), (["c"], [{}])]
        finally:
            self.notes.append("closed")


def test_a_loader_that_ends_is_iterated_over_again():
    loader = _Closing()
    times = time_batches(loader, batches=5, warmup=0)
    assert loader.notes == ["begun", "closed"] * 3
    assert times.images == 2 + 1 + 2 + 1 + 2


def test_a_loader_is_closed_where_the_step_fails():
    loader = _Closing()
    match = "The step failed at batch 1: ZeroDivisionError"
    with pytest.raises(ColabUtilsError, match=match) as caught:
        time_batches(loader, lambda *batch: 1 / 0, batches=2)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert loader.notes == ["begun", "closed"]


# Workers that stay, and workers that start and end in each epoch.
@pytest.mark.clock
@pytest.mark.parametrize("persistent", [True, False])
def test_cpu_of_workers_counts_but_not_that_of_the_step(persistent):
    samples = Samples(8, act=lambda _: burn(0.03))
    loader = DataLoader(samples, 2, num_workers=2, persistent_workers=persistent)
    times = time_batches(loader, EmulatedStep(20), batches=8)
    assert times.step_cpu_s >= 8 * 0.018
    # The kernel counts CPU time in ticks of 10 ms, and workers run a few batches ahead or behind.
    assert 10 < times.cpu_ms_per_image < 90


def test_all_threads_of_a_step_count():
    """As the one that launches a GPU's backward pass."""

    def step(_):
        other = threading.Thread(target=burn, args=(0.03,))
        other.start()
        other.join()

    times = time_batches(range(6), step, batches=6, warmup=0)
    assert times.step_cpu_s >= 6 * 0.03
    # The kernel counts CPU time in ticks of 10 ms.
    assert times.cpu_ms_per_image < 15


@pytest.mark.clock
def test_timed_batches_are_noted_while_the_clocks_stand():
    noted = {}

    def note(number, batch):
        noted[number] = batch
        time.sleep(0.03)

    times = time_batches([["a"], ["b"]], batches=3, warmup=1, on_batch=note)
    assert noted == {0: ["b"], 1: ["a"], 2: ["b"]}
    assert max(times.wait_s) < 0.03


def test_an_iterator_gives_what_it_has():
    assert len(time_batches(iter([["a"]] * 5), batches=10, warmup=2).wait_s) == 3
    with pytest.raises(ColabUtilsError, match="iterated again"):
        time_batches(iter([["a"]] * 2), batches=10, warmup=2)
    with pytest.raises(ColabUtilsError, match="The loader gives no batch"):
        time_batches([], batches=3)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("bad jpeg"), "no batch 3: ValueError: bad jpeg"),
        (DriveLostError("Drive is gone. Remount it."), r"batch 3: .* Remount it\.$"),
    ],
)
def test_the_error_of_a_loader_is_one_line_that_names_its_batch(error, words, workers):
    def fail(index):
        if index == 5:
            raise error

    loader = DataLoader(Samples(8, act=fail), batch_size=2, num_workers=workers)
    with pytest.raises(ColabUtilsError, match=words) as caught:
        time_batches(loader, batches=4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("is_used", "calls"), [(True, ["synchronise", "step", "synchronise"]), (False, ["step"])]
)
def test_cuda_is_synchronised_around_the_step_where_it_is_used(is_used, calls, monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_used)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("synchronise"))
    time_batches([["a"]] * 2, lambda batch: seen.append("step"), batches=2, warmup=0)
    assert seen == calls * 2


@pytest.fixture
def invent(monkeypatch):
    """Make loaders whose batches take invented seconds, by a clock that only they move. The last
    seconds are those of all later batches.
    """

    class Loader:
        now_s = 0.0

        def __init__(self, *batch_s, workers=0, prefetch=2):
            self.batch_s = batch_s
            self.num_workers = workers
            self.prefetch_factor = prefetch
            monkeypatch.setattr(timing, "perf_counter", lambda: self.now_s)

        def __iter__(self):
            for seconds in itertools.chain(self.batch_s, itertools.repeat(self.batch_s[-1])):
                self.now_s += seconds
                yield ["image"]

    return Loader


def test_a_rate_is_timed_no_longer_than_asked(invent):
    loader = invent(*[0.07, 0.13] * 100)
    times = time_batches(loader, batches=500, warmup=10, max_s=6, least=20)
    assert times.images_per_second == pytest.approx(10, rel=0.1)
    assert loader.now_s < 6.3
    assert times.error < 0.05
    # Slow batches end in time, too.
    loader = invent(5.0)
    times = time_batches(loader, batches=500, warmup=10, max_s=6, least=20)
    assert len(times.wait_s) < 20
    assert loader.now_s <= 4 * 6 + 5


@pytest.mark.parametrize("first_s", [3.5, 7.0])
def test_what_the_first_batches_took_counts_only_without_a_warm_up(first_s, invent):
    # Twelve batches lie ready after the first one, which takes long, even longer than asked.
    loader = invent(first_s, *[0.0] * 11, 0.4, workers=3, prefetch=4)
    times = time_batches(loader, batches=500, max_s=6)
    assert times.images_per_second == pytest.approx(2.5)
    assert times.round_batches == 3
    times = time_batches(invent(*[2.0] * 10, 0.1), batches=20, warmup=0)
    assert times.images_per_second == pytest.approx(20 / 21)


def test_slow_workers_that_deliver_in_bursts_are_timed_in_whole_rounds(invent):
    times = time_batches(invent(*[0.5, 0.0] * 20, workers=2), batches=100, max_s=0.1)
    # Three rounds would take longer than three times the cap.
    assert len(times.wait_s) == 2
    assert times.images_per_second == pytest.approx(4)


def test_batches_that_come_at_once_make_no_error():
    waits = np.array([0.8, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0] * 5)
    assert find_error(waits, 8) == 0
    # Blocks of four batches would not.
    assert find_error(waits) > 0.3


@pytest.mark.parametrize(("batches", "factor"), [(100, 11 / 9), (4, 5 / 3)])
def test_the_error_is_that_of_the_mean_and_larger_if_few_batches_tell_it(batches, factor):
    rows = np.random.default_rng(0).uniform(0.5, 1.5, (1000, batches))
    errors = [find_error(row) for row in rows]
    assert np.mean(errors) == pytest.approx(factor * float(rows.mean(axis=1).std()), rel=0.1)


IMAGE = torch.zeros(3, 2, 2)
EIGHT = torch.zeros(8, 3, 2, 2)


# A batch, its images, and with how many arguments the step is called.
@pytest.mark.parametrize(
    ("batch", "images", "arguments"),
    [
        # The default_collate of torch makes tensors like these.
        ((EIGHT, torch.zeros(8)), 8, 2),
        # The references of torchvision make lists like these.
        ([[IMAGE] * 3, [{}] * 3], 3, 2),
        # A batch may be a bare tensor, of two images.
        (torch.zeros(2), 2, 1),
        # A loader with batch_size=None passes samples on.
        ((torch.tensor(1.0), 2), 1, 2),
        # The default_collate of torch makes such a list of a batch.
        ([EIGHT, torch.zeros(8), torch.zeros(8)], 8, 1),
        # The transformers library makes dicts. The first value of this one is a scalar.
        ({"epoch": 3, "images": EIGHT}, 8, 1),
        # Detectron2 makes lists of samples like this. Two of them are no images and targets.
        ([{"image": IMAGE}] * 2, 2, 1),
        # The samples come as they are.
        ([(IMAGE, 1)] * 3, 3, 1),
        ([IMAGE] * 3, 3, 1),
    ],
)
def test_the_images_of_any_batch_are_counted_and_a_pair_is_spread(batch, images, arguments):
    seen = []
    times = time_batches([batch], lambda *given: seen.append(len(given)), batches=2, warmup=0)
    assert (times.images, seen) == (2 * images, [arguments] * 2)
