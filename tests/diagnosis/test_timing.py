"""The clocks: what they count, what they leave out, and what they say of a broken loader."""

import collections
import itertools
import multiprocessing
import random
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from colab_utils.diagnosis.timing import CpuClock, find_error, time_batches
from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError
from colab_utils.loading import clock
from colab_utils.loading.emulated_step import EmulatedStep
from colab_utils.machine import count_cores

# Python 3.12 warns that a process with threads forks, which torch's DataLoader does by design.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def _burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class _Samples(Dataset):
    """Zeros; sleeps and burns as told; raises at one index."""

    def __init__(self, n, *, sleep_s=0.0, burn_s=0.0, broken=None, error=None):
        self.n = n
        self.sleep_s = sleep_s
        self.burn_s = burn_s
        self.broken = broken
        self.error = error or ValueError("bad jpeg")

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        if index == self.broken:
            raise self.error
        time.sleep(self.sleep_s)
        _burn(self.burn_s)
        return torch.zeros(3, 4, 4), index


@pytest.mark.clock
def test_a_step_without_a_core_has_waited_for_one():
    """Six busy processes on few cores: the step's thread waits in line."""
    context = multiprocessing.get_context("fork")
    crowd = 3 * count_cores()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        rivals = [context.Process(target=_burn, args=(60,), daemon=True) for _ in range(crowd)]
        for rival in rivals:
            rival.start()
    try:
        clock = CpuClock()
        times = time_batches([("image", "target")], EmulatedStep(20), batches=10, warmup=0)
        use = clock.read()
    finally:
        for rival in rivals:
            rival.kill()
            rival.join()
    # It burns 0.9 of a core: what it took beyond that was spent in line.
    longer_s = sum(times.step_s) - times.step_cpu_s
    assert use.queued_s == pytest.approx(longer_s, rel=0.3)
    # Rivals are children of this process.
    assert use.own_s > 2 * times.step_cpu_s


class TestTimeBatches:
    @pytest.mark.clock
    def test_splits_waiting_from_stepping(self):
        loader = DataLoader(_Samples(12, sleep_s=0.004), batch_size=2)
        times = time_batches(loader, lambda images, targets: time.sleep(0.010), batches=4)
        assert len(times.wait_s) == len(times.step_s) == 4
        assert min(times.wait_s) >= 0.008
        assert min(times.step_s) >= 0.010
        assert times.images == 8
        total = sum(times.wait_s) + sum(times.step_s)
        assert times.images_per_second == pytest.approx(8 / total)
        assert times.wait_share == pytest.approx(sum(times.wait_s) / total)

    @pytest.mark.clock
    def test_the_warm_up_stands_apart(self):
        waits = iter([0.08, 0.05, 0.0, 0.0, 0.0])

        def batches():
            for wait in waits:
                time.sleep(wait)
                yield ["image"]

        times = time_batches(batches(), batches=3, warmup=2)
        assert len(times.wait_s) == 3
        assert max(times.wait_s) < 0.05

    def test_goes_on_with_new_epochs(self):
        epochs = []

        class Loader:
            def __iter__(self):
                epochs.append(1)
                return iter([(["a", "b"], [{}, {}]), (["c"], [{}])])

        times = time_batches(Loader(), batches=5, warmup=0)
        assert len(epochs) == 3
        assert times.images == 2 + 1 + 2 + 1 + 2

    @pytest.mark.clock
    def test_stops_at_the_time_cap_with_one_batch_at_least(self):
        times = time_batches(
            DataLoader(_Samples(50, sleep_s=0.02)), batches=50, warmup=1, max_s=0.005
        )
        assert len(times.wait_s) == 1

    @pytest.mark.clock
    def test_counts_cpu_of_workers_but_not_of_the_step(self):
        loader = DataLoader(
            _Samples(24, burn_s=0.03), batch_size=2, num_workers=2, persistent_workers=True
        )
        times = time_batches(loader, EmulatedStep(20), batches=8)
        assert times.step_cpu_s >= 8 * 0.018
        # The kernel counts CPU time in ticks of 10 ms, and workers run a few batches ahead or
        # behind.
        assert 10 < times.cpu_ms_per_image < 90

    def test_counts_all_threads_of_a_step(self):
        """As the one that launches a GPU's backward pass."""

        def step(_: int) -> None:
            other = threading.Thread(target=_burn, args=(0.03,))
            other.start()
            other.join()

        times = time_batches(range(6), step, batches=6, warmup=0)
        assert times.step_cpu_s >= 6 * 0.03
        # The kernel counts CPU time in ticks of 10 ms.
        assert times.cpu_ms_per_image < 15

    @pytest.mark.clock
    def test_slow_workers_that_deliver_in_bursts_are_timed_in_whole_rounds(self):
        # Two workers take 0.5 s a batch, so two batches come at once every half second, and 4
        # batches a second, whatever the cap.
        loader = DataLoader(_Samples(60, sleep_s=0.5), batch_size=1, num_workers=2)
        times = time_batches(loader, batches=100, max_s=0.1)
        # Three rounds would take longer than three times the cap.
        assert len(times.wait_s) == 2
        assert times.images_per_second == pytest.approx(4, rel=0.3)

    @pytest.mark.clock
    def test_timed_batches_are_noted_while_the_clocks_stand(self):
        noted = []

        def note(number, batch):
            noted.append((number, batch))
            time.sleep(0.03)

        times = time_batches([["a"], ["b"]], batches=3, warmup=1, on_batch=note)
        assert noted == [(0, ["b"]), (1, ["a"]), (2, ["b"])]
        assert max(times.wait_s) < 0.03

    def test_a_loader_is_closed_where_the_step_fails(self):
        closed = []

        class Loader:
            def __iter__(self):
                try:
                    yield from [["a"], ["b"]]
                finally:
                    closed.append(1)

        match = "The step failed at batch 1: ZeroDivisionError"
        with pytest.raises(ColabUtilsError, match=match) as caught:
            time_batches(Loader(), lambda batch: 1 / 0, batches=2)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert closed

    def test_an_iterator_gives_what_it_has(self):
        assert len(time_batches(iter([["a"]] * 5), batches=10, warmup=2).wait_s) == 3

    def test_an_iterator_that_ends_in_the_warm_up(self):
        with pytest.raises(ColabUtilsError, match="iterated again"):
            time_batches(iter([["a"]] * 2), batches=10, warmup=2)

    def test_a_loader_without_batches_is_refused(self):
        with pytest.raises(ColabUtilsError, match="The loader gives no batch"):
            time_batches([], batches=3)

    @pytest.mark.parametrize("workers", [0, 1])
    def test_names_the_error_and_the_batch(self, workers):
        loader = DataLoader(_Samples(8, broken=5), batch_size=2, num_workers=workers)
        with pytest.raises(ColabUtilsError, match=r"no batch 3: ValueError: bad jpeg") as caught:
            time_batches(loader, batches=4)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("workers", [0, 1])
    def test_keeps_the_cure_of_our_own_errors(self, workers):
        lost = DriveLostError("a.jpg cannot be read: Drive is gone. Remount it.")
        loader = DataLoader(_Samples(8, broken=0, error=lost), batch_size=2, num_workers=workers)
        with pytest.raises(ColabUtilsError, match=r"batch 1: .* Remount it\.$") as caught:
            time_batches(loader, batches=4)
        assert "\n" not in str(caught.value)

    def test_cuda_is_synchronised_around_the_step(self, monkeypatch):
        calls = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronise"))
        time_batches(
            [["a"]] * 2,
            lambda batch: calls.append("step"),
            batches=2,
            warmup=0,
        )
        assert calls == ["synchronise", "step", "synchronise"] * 2

    def test_cuda_is_left_alone_where_nobody_uses_it(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("no CUDA here"))
        time_batches([["a"]] * 2, batches=2, warmup=0)


class _Invented:
    """A loader whose batches take invented seconds, by a clock that only it moves.

    After the first seconds in ``early_s``, each batch takes ``then_s``, times a random number from
    1 - ``spread`` to 1 + ``spread``. Each batch has an image.
    """

    def __init__(self, monkeypatch, early_s, then_s, *, spread=0.0, workers=0, prefetch=2):
        self.num_workers = workers
        self.prefetch_factor = prefetch
        self.early_s = early_s
        self.then_s = then_s
        self.spread = spread
        self.now_s = 0.0
        monkeypatch.setattr(clock, "perf_counter", lambda: self.now_s)

    def __iter__(self):
        chance = random.Random(0)
        for seconds in itertools.chain(self.early_s, itertools.repeat(self.then_s)):
            self.now_s += seconds * chance.uniform(1 - self.spread, 1 + self.spread)
            yield ["image"]


class _InventedPool(_Invented):
    """Workers that load batches in turns, two ahead each, as those of a DataLoader do. A batch is
    delivered after the batch before it, so a slow batch holds up those that lie ready.
    """

    def __init__(self, monkeypatch, workers, seed):
        super().__init__(monkeypatch, [], 0.0, workers=workers)
        self.seed = seed

    def __iter__(self):
        chance = random.Random(self.seed)
        free_s = [self.now_s] * self.num_workers
        ready_s = collections.deque()
        for worker in itertools.cycle(range(self.num_workers)):
            free_s[worker] = max(free_s[worker], self.now_s) + chance.lognormvariate(-0.5, 0.6)
            ready_s.append(free_s[worker])
            if len(ready_s) == 2 * self.num_workers:
                self.now_s = max(self.now_s, ready_s.popleft())
                yield ["image"]


class TestInventedTimes:
    def test_a_rate_is_timed_no_longer_than_asked(self, monkeypatch):
        loader = _Invented(monkeypatch, [], 0.1, spread=0.3)
        times = time_batches(loader, batches=500, warmup=10, max_s=6, least=20)
        assert times.images_per_second == pytest.approx(10, rel=0.1)
        assert loader.now_s < 6.3
        assert times.error < 0.05

    def test_batches_that_were_loaded_ahead_are_used_up_before_the_clock_begins(self, monkeypatch):
        # Twelve batches lie ready after the first one, which takes long.
        loader = _Invented(monkeypatch, [3.5] + [0.0] * 11, 0.4, workers=3, prefetch=4)
        times = time_batches(loader, batches=500, max_s=6)
        assert times.images_per_second == pytest.approx(2.5)
        assert times.round_batches == 3

    def test_slow_batches_end_in_time(self, monkeypatch):
        loader = _Invented(monkeypatch, [], 5.0)
        times = time_batches(loader, batches=500, warmup=10, max_s=6, least=20)
        assert len(times.wait_s) < 20
        assert loader.now_s <= 4 * 6 + 5

    @pytest.mark.parametrize("workers", [2, 8])
    def test_a_rate_of_workers_is_as_sure_as_its_error_says(self, monkeypatch, workers):
        shares = []
        errors = []
        for seed in range(40):
            pool = _InventedPool(monkeypatch, workers, seed)
            times = time_batches(pool, batches=60, max_s=1e9)
            pool = _InventedPool(monkeypatch, workers, seed)
            long_run = time_batches(pool, batches=3000, max_s=1e9)
            shares.append(times.images_per_second / long_run.images_per_second - 1)
            errors.append(times.error)
        # Two standard errors hold for about 95 % of all rates.
        held = np.abs(shares) <= 2 * np.array(errors)
        assert held.mean() >= 0.9
        assert max(np.abs(shares)) < 0.5
        assert abs(np.mean(shares)) < 0.05

    def test_the_first_batches_count_where_they_are_asked_for(self, monkeypatch):
        loader = _Invented(monkeypatch, [2.0] * 10, 0.1)
        times = time_batches(loader, batches=20, warmup=0)
        assert times.images_per_second == pytest.approx(20 / 21)


def test_batches_that_come_at_once_make_no_error():
    waits = np.array([0.8, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0] * 5)
    assert find_error(waits, 8) == 0
    # Blocks of four batches would not.
    assert find_error(waits) > 0.3
    assert find_error(waits[:1]) == 1


@pytest.mark.parametrize(("batches", "factor"), [(100, 11 / 9), (4, 5 / 3)])
def test_the_error_is_that_of_the_mean_and_larger_if_few_batches_tell_it(batches, factor):
    rows = np.random.default_rng(0).uniform(0.5, 1.5, (1000, batches))
    errors = [find_error(row) for row in rows]
    assert np.mean(errors) == pytest.approx(factor * float(rows.mean(axis=1).std()), rel=0.1)


@pytest.mark.parametrize(
    ("batch", "images"),
    [
        # The default_collate of torch makes tensors like these.
        ((torch.zeros(4, 3, 2, 2), torch.zeros(4)), 4),
        # The references of torchvision make lists like these.
        (
            [[torch.zeros(3, 2, 2)] * 3, [{}] * 3],
            3,
        ),
        # The transformers library makes dicts like this.
        ({"pixel_values": torch.zeros(5, 3), "labels": torch.zeros(5)}, 5),
        # A batch may be a bare tensor.
        (torch.zeros(6, 3), 6),
        # A loader with batch_size=None passes samples on.
        ((torch.tensor(1.0), 2), 1),
        # This batch has more than two columns.
        (
            (torch.zeros(8, 3, 2, 2), torch.zeros(8), torch.zeros(8)),
            8,
        ),
        # The default_collate of torch makes such a list of a batch.
        ([torch.zeros(8, 3, 2, 2), torch.zeros(8), torch.zeros(8)], 8),
        (
            collections.namedtuple("Batch", "images targets")(
                torch.zeros(8, 3, 2, 2), torch.zeros(8)
            ),
            8,
        ),
        # The first value of this batch is a scalar.
        ({"epoch": 3, "images": torch.zeros(8, 3, 2, 2)}, 8),
        # Detectron2 makes lists of samples like this.
        ([{"image": torch.zeros(3, 2, 2)}] * 2, 2),
        # The samples come as they are.
        ([(torch.zeros(3, 2, 2), 1)] * 3, 3),
        ([torch.zeros(3, 2, 2)] * 3, 3),
    ],
)
def test_the_images_of_any_batch_are_counted(batch, images):
    assert time_batches([batch], batches=2, warmup=0).images == 2 * images


@pytest.mark.parametrize(
    ("batch", "arguments"),
    [
        # A pair holds images and targets.
        ((["a"], [{}]), 2),
        # A packed batch is one argument, though it has two images and looks like a pair.
        (torch.zeros(2), 1),
        # A list of two samples is one argument.
        ([{"image": 1}, {"image": 2}], 1),
    ],
)
def test_a_pair_is_spread_and_a_packed_batch_is_not(batch, arguments):
    got = []
    time_batches(
        [batch],
        lambda *given: got.append(len(given)),
        batches=1,
        warmup=0,
    )
    assert got == [arguments]


@pytest.mark.clock
def test_ended_children_stay_counted():
    # Each epoch starts and ends its worker.
    loader = DataLoader(_Samples(4, burn_s=0.05), num_workers=1)
    times = time_batches(loader, batches=8, warmup=0)
    # The time is 0.40 s, and the kernel counts it in ticks of 10 ms.
    assert times.cpu_s >= 0.36
