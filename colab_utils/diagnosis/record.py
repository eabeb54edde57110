"""What is noted of a loop while it runs: its times, its workers, and what it does now."""

import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import IterableDataset

from colab_utils.diagnosis.cures import Stall
from colab_utils.diagnosis.looks import Looks, find_own_line
from colab_utils.diagnosis.memory_growth import MemoryLog
from colab_utils.diagnosis.processes import WorkerMonitor
from colab_utils.diagnosis.timing import CpuClock, CpuUse, count_images, count_workers
from colab_utils.loading.clock import LoopClock

# Samples are noted for at most this many batches.
_KEPT = 1000


class LoopRecord:
    """Everything that is recorded while a watched loop runs.

    Args:
        loader: The loader that is watched.

    Attributes:
        clock: Times of batches.
        workers: Number of worker processes of the loader.
        restarts: Whether the workers start again in each pass.
        is_stream: Whether the dataset has no indices.
        is_slowed: Whether the dataset's folder is slowed by `slow_down`, which sleeps in each read.
        monitor: What workers note of their samples.
        looks: Looks at the loop and its workers.
        memory: Readings of the memory of this process and its children.
        use: Use of the cores in all passes.
        seen: The samples that workers were loading while the loop waited for a batch, by the number
            of the batch.
        stalls: Every stall so far.
        loader: The dataset and the settings of the loader, and the line that watches it, or
            iterates over it.
        left_at_once: Number of passes that the loop left after one batch.
        phase: What the loop does now: "first start", "start" (of a later pass), "wait", "first
            step", "step", "between", or "away" if it may be another loop; "" outside of passes.
        printed: The batches and the ids of the causes of the last summary that was printed.
    """

    def __init__(self, loader: Any) -> None:
        self.clock = LoopClock()
        dataset = getattr(loader, "dataset", None)
        # An iterable dataset may work between the samples of a dataset within it, so these samples
        # say too little.
        self.is_stream = isinstance(dataset, IterableDataset)
        self.monitor = WorkerMonitor(None if self.is_stream else dataset)
        self.looks = Looks(self.monitor)
        self.memory = MemoryLog()
        self.use = CpuUse()
        self.seen = defaultdict[int, set[int]](set)
        self.stalls: list[Stall] = []
        self.left_at_once = 0
        self.phase = ""
        self.loader = _describe(loader)
        self.workers = count_workers(loader)
        self.restarts = self.workers > 0 and not getattr(loader, "persistent_workers", True)
        folder = getattr(self.monitor.dataset, "folder", None)
        self.is_slowed = isinstance(folder, Path) and _is_slowed(folder)
        # The dataset may be large.
        self.monitor.follow(None)
        # A list cannot be referred to like this.
        self._dataset: Callable[[], Any] = lambda: None
        with suppress(TypeError):
            self._dataset = weakref.ref(dataset)
        self._thread = 0
        # Whether another loader was begun since the last request.
        self._is_left = False
        self._worker_pids = set[int]()
        self.printed: tuple[int, list[str]] = (0, [])

    def goes_on(self, loader: Any, *, is_like: bool) -> bool:
        """Return whether a loader is the recorded one, made anew: the same line asks for it, and it
        has the same dataset and settings. Its passes are then recorded here, too. With ``is_like``,
        a dataset that is gone may have been made anew, as well.

        A loop that takes batches from two loaders at once has two records.
        """
        known = self._dataset()
        dataset = getattr(loader, "dataset", None)
        is_same = dataset is not None and (known is dataset or (is_like and known is None))
        is_free = self.clock.count > 0 and not self.phase
        return is_same and is_free and _describe(loader) == self.loader

    @contextmanager
    def measure_pass(self, loader: Any) -> Iterator[None]:
        """Note samples, the ends of steps, and the use of the cores, while a pass runs."""
        self.monitor.follow(None if self.is_stream else getattr(loader, "dataset", None))
        clock = CpuClock()
        handle = register_optimizer_step_post_hook(self._end_step)
        try:
            yield
        finally:
            # A pass that is open when Python ends has no modules left.
            if not sys.is_finalizing():
                self.phase = ""
                self.clock.stop(is_left=self._is_left)
                self._note_workers()
                handle.remove()
                self.use = CpuUse(*np.add(self.use, clock.read()).tolist())
                # The dataset may be large.
                self.monitor.follow(None)

    def _note_workers(self) -> None:
        """Note how many workers there are, which a generator around a ``DataLoader`` does not say,
        and whether they are other workers than in the last pass.
        """
        pids = {*self.monitor.list_samples()}
        self.workers = self.workers or len(pids)
        self.restarts |= self._worker_pids.isdisjoint(pids) and bool(self._worker_pids and pids)
        self._worker_pids = pids

    def ask(self) -> float:
        """Note that the loop asks for its next batch. Return the time, by `time.perf_counter`."""
        self._thread = threading.get_ident()
        self._is_left = False
        if self.phase:
            self.phase = "wait"
        else:
            self.phase = "start" if self.clock.count else "first start"
        return self.clock.ask()

    def receive(self, batch: Any) -> None:
        """Note that a batch came."""
        # The first step may compile the model, for example.
        self.phase = "step" if self.clock.count else "first step"
        self.clock.receive(count_images(batch))

    def _end_step(self, *_: Any) -> None:
        """Note that the optimizer stepped. A thread that only takes batches makes no steps."""
        if threading.get_ident() == self._thread and self.phase != "away":
            self.phase = "between"
            self.clock.end_step()

    def note_other(self) -> None:
        """Note that another loader is begun. If no request follows, the loop has left this one."""
        self._is_left = True
        # A loop that trains may evaluate in between. What follows another loop is not its own.
        if self.phase in ("first step", "step"):
            self.phase = "away"

    def note_samples(self, samples: Sequence[int]) -> None:
        """Note the samples that workers are loading while the loop waits for a batch."""
        if len(self.seen) < _KEPT:
            self.seen[self.clock.count].update(samples)


def find_record(records: list[LoopRecord], loader: Any, *, is_like: bool) -> LoopRecord:
    """Return the record of the same loop over the same loader, as in `LoopRecord.goes_on`; a new
    one, which is added to the records, if there is none.
    """
    for record in records:
        if record.goes_on(loader, is_like=is_like):
            return record
    records.append(LoopRecord(loader))
    return records[-1]


def _describe(loader: Any) -> str:
    """Return the dataset and the settings of a loader, and the line that iterates over it. The
    length of a stream is not asked for.
    """
    dataset: Any = getattr(loader, "dataset", None)
    size = ""
    # A dataset need not have a length.
    with suppress(Exception):
        if not isinstance(dataset, IterableDataset):
            size = f" ({len(dataset):,} samples)"
    batch_size = getattr(loader, "batch_size", None)
    batches = f", batches of {batch_size}" if batch_size else ""
    workers = f"{count_workers(loader)} workers"
    return f"{type(dataset).__name__}{size}{batches}, {workers}, at {find_own_line()}"


def _is_slowed(folder: Path) -> bool:
    """Return whether the folder of a dataset is slowed by `slow_down`."""
    # Only the datasets of this package are read in slowed folders, and they have loaded this.
    from colab_utils.slow_drive import find_profile

    return find_profile(folder) is not None
