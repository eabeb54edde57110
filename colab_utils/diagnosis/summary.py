"""Where the time of a run went: to waits, to steps and between steps; and what caused the waits."""

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import IterableDataset

from colab_utils.diagnosis.causes import find_causes, find_lost_share
from colab_utils.diagnosis.cures import Cause
from colab_utils.diagnosis.looks import BACKWARD, Looks
from colab_utils.diagnosis.memory_growth import Growth, MemoryLog, find_growth
from colab_utils.diagnosis.processes import WorkerMonitor
from colab_utils.diagnosis.timing import CpuClock, CpuUse, count_images, count_workers
from colab_utils.diagnosis.waits import LoopFacts
from colab_utils.loading.clock import LoopClock
from colab_utils.loading.ranks import find_ranks
from colab_utils.progress import is_notebook
from colab_utils.units import format_seconds

_Array = NDArray[Any]
# Samples are noted for at most this many batches.
_KEPT = 1000
# If a loop has at least this many batches for each step of the optimizer, it accumulates gradients.
_ACCUMULATES = 1.5
# In a step, the backward pass takes more than this share of the time.
_BACKWARD_SHARE = 0.2


@dataclass(frozen=True)
class Part:
    """One part of the time of all batches: their waits, their steps, or the time between a step and
    the request for the next batch.
    """

    name: str
    share: float
    """Share of the time of the whole loop, 0 to 1."""
    median_ms: float
    p95_ms: float


@dataclass(frozen=True)
class Summary:
    """Where the time of a loop went. Times are wall time, or times of the GPU's stream if the loop
    uses a GPU.
    """

    verdict: str
    """What limits the loop, in one line."""
    causes: tuple[Cause, ...]
    """Why the loop takes longer than its steps, the largest share first. Empty if it does not."""
    parts: tuple[Part, ...]
    """*wait*, *step* and *between steps*. The waits do not include the first batch of a pass. If
    much of the step comes before the model is called, this is a part of its own, *before the model*
    (estimated from looks at the loop).
    """
    seconds: float
    """Time of all passes, and of what lay between them."""
    start_s: float
    """Time until the first batch of a pass came, in total over all passes."""
    ends_s: float
    """Time between passes, in total: evaluation, for example."""
    batches: int
    passes: int
    images: int
    growth: Growth | None
    """How memory grows; None if it does not."""
    unseen: tuple[str, ...]
    """Sentences that say what could not be seen of the loop."""
    lost_share: float
    """Share of the loop's time in which the loop had no core, because its own processes used all
    cores, 0 to 1.
    """
    rank: int | None
    """Rank of this process if several train together, else None."""
    loader: str
    """The dataset and the settings of the loader, and the line of code that iterates over it."""

    @property
    def wait_share(self) -> float:
        """Share of the loop's time spent waiting, including the first batches of passes, 0 to 1."""
        return self.parts[0].share + self.start_s / self.seconds

    @property
    def loop_s(self) -> float:
        """Return the seconds of all passes, without the time between them."""
        return self.seconds - self.ends_s

    @property
    def images_per_second(self) -> float:
        """Return the rate over the whole loop, without the time between passes."""
        return self.images / max(self.loop_s, 1e-9)

    def __str__(self) -> str:
        largest = max(self.parts, key=lambda part: part.share)
        who = "" if self.rank is None else f"Rank {self.rank}: "
        lines = [f"{who}{self.verdict}", "                 share    median       p95"]
        for part in self.parts:
            arrow = "  <--" if part is largest else ""
            lines.append(
                f"{part.name:16}{part.share:6.0%}{part.median_ms:7.1f} ms{part.p95_ms:7.1f} "
                f"ms{arrow}"
            )
        ends = f"; between passes {format_seconds(self.ends_s)}" if self.passes > 1 else ""
        lines.append(
            f"first batches {format_seconds(self.start_s)} of {format_seconds(self.seconds)}{ends}"
            f"; {self.batches:,} batches, {self.images_per_second:,.1f} images/s"
        )
        lines += [*map(str, self.causes), *self.unseen]
        return "\n".join(lines)


class LoopRecord(LoopFacts):
    """Everything that is recorded while a watched loop runs.

    Args:
        loader: The loader that is watched.
        line: File and line of the code that watches it, or iterates over it.

    Attributes:
        clock: Times of batches.
        is_stream: Whether the dataset has no indices.
        monitor: What workers note of their samples.
        memory: Readings of the memory of this process and its children.
        phase: What the loop does now: "first start", "start" (of a later pass), "wait", "first
            step", "step" or "between"; "away" if it may be another loop; "" outside of passes.
    """

    def __init__(self, loader: Any, line: tuple[str, int] = ("", 0)) -> None:
        self.line = line
        self.clock = LoopClock()
        dataset = getattr(loader, "dataset", None)
        # An iterable dataset may work between the samples of a dataset within it, so these samples
        # say too little.
        self.is_stream = isinstance(dataset, IterableDataset)
        self.monitor = WorkerMonitor(
            None if self.is_stream else dataset, hides_dataset=dataset is None
        )
        self._settings = _read_settings(loader)
        # A list cannot be referred to like this.
        self._dataset: Callable[[], Any] = lambda: None
        with suppress(TypeError):
            self._dataset = weakref.ref(dataset)
        self.memory = MemoryLog()
        self.phase = ""
        self._thread = 0
        # Whether another loader was begun since the last request.
        self._is_left = False
        # Whether an optimizer has stepped in this pass.
        self._steps = False
        # The batches and the ids of the causes of the last summary that was printed.
        self._printed: tuple[int, list[str] | None] = (0, None)
        self._worker_pids = set[int]()
        workers = self._settings[0]
        restarts = workers > 0 and not getattr(loader, "persistent_workers", True)
        is_slowed = _is_slowed(getattr(self.monitor.dataset, "folder", None))
        super().__init__(workers, restarts, is_slowed, Looks(self.monitor))

    def goes_on(self, loader: Any, *, is_like: bool = False) -> bool:
        """Return whether a loader is the recorded one, made anew: it has the same dataset, workers
        and batch size. Its passes are then recorded here, too. With ``is_like``, a dataset that is
        gone may have been made anew, as well.

        A loop that takes batches from two loaders at once has two records.
        """
        known = self._dataset()
        dataset = getattr(loader, "dataset", None)
        is_same = dataset is not None and (known is dataset or (is_like and known is None))
        is_free = self.clock.count > 0 and not self.phase
        return is_same and is_free and _read_settings(loader) == self._settings

    @contextmanager
    def measure_pass(self, loader: Any) -> Iterator[None]:
        """Note samples, the ends of steps, and the use of the cores, while a pass runs."""
        self.monitor.follow(None if self.is_stream else getattr(loader, "dataset", None))
        self._steps = False
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

    @property
    def starts(self) -> bool:
        """Return whether workers may still be starting: this pass has had fewer batches than
        workers.
        """
        return (
            self.phase.endswith("start") or self.clock.count - self.clock.firsts[-1] < self.workers
        )

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
            self._steps = True
            self.phase = "between"
            self.clock.end_step()

    def note_other(self) -> None:
        """Note that another loader is begun. If no request follows, the loop has left this one."""
        self._is_left = True
        # A loop that trains may evaluate in between. What follows another loop is not its own.
        if not self._steps:
            self.phase = "away"

    def note_samples(self, samples: Sequence[int]) -> None:
        """Note the samples that workers are loading while the loop waits for a batch."""
        seen = self.seen
        number = self.clock.count
        if samples and len(seen) < _KEPT:
            seen[number] = tuple(dict.fromkeys((*seen.get(number, ()), *samples)))[-16:]

    def summarise(self) -> Summary | None:
        """Return the summary so far, or None before the first batch is over."""
        clock = self.clock
        clock.read()
        parts_s = clock.parts_s
        if not len(parts_s):
            return None
        self.times = self.monitor.read_times()
        self.growth = find_growth(self.memory.readings)
        if self.looks.measure_place("between", BACKWARD)[0] > _BACKWARD_SHARE:
            # The optimizer steps first, and the passes of this batch follow: they are its step.
            parts_s[:, 1] += parts_s[:, 2]
            parts_s[:, 2] = 0
        unseen = self._list_unseen(parts_s)
        parts_s = split_micro_batches(parts_s)
        waits, steps, between = parts_s.T
        is_first = np.isin(np.arange(len(waits)), clock.firsts)
        loop_s = float(parts_s.sum())
        whole_s = max(loop_s + clock.ends_s, 1e-9)
        causes = find_causes(waits, between, is_first, loop_s, self)
        shares = {"step": 1.0}
        if "prepare" in [cause.id for cause in causes]:
            share = self.looks.measure_preparation()[0]
            shares = {"before the model": share, "step": 1 - share}
        parts = (
            _make_part("wait", waits[~is_first], whole_s),
            *(_make_part(name, share * steps, whole_s) for name, share in shares.items()),
            _make_part("between steps", between, whole_s),
        )
        start_s = float(waits[is_first].sum())
        ranks = find_ranks()
        return Summary(
            verdict=_describe(causes, parts, start_s / whole_s, self.looks),
            causes=tuple(causes),
            parts=parts,
            seconds=whole_s,
            start_s=start_s,
            ends_s=clock.ends_s,
            batches=len(waits),
            passes=int(is_first.sum()),
            images=clock.images,
            growth=self.growth,
            unseen=unseen,
            lost_share=find_lost_share(loop_s, self),
            rank=ranks.rank if ranks.count > 1 else None,
            loader=self._describe_loader(),
        )

    def _describe_loader(self) -> str:
        workers, _, kind, length = self._settings
        size = "" if length is None else f" ({length:,} samples)"
        file, line = self.line
        place = f"{os.path.basename(file)}:{line}"
        return f"{kind.__name__}{size}, {workers} workers, at {place}"

    def _list_unseen(self, parts_s: _Array) -> tuple[str, ...]:
        """Return sentences that say what could not be seen of the loop. ``parts_s`` is as in
        `split_micro_batches`.
        """
        unseen = []
        steps = np.count_nonzero(parts_s[:, 2])
        if self.left_at_once > 1:
            unseen.append("Steps that follow a pass were not seen.")
        elif steps == 0:
            unseen.append(
                "No optimizer of torch stepped at the end of a batch: all that the loop does with "
                "a batch counts as its step."
            )
        elif len(parts_s) >= _ACCUMULATES * steps:
            unseen.append(
                f"The optimizer steps every {len(parts_s) / steps:.0f} batches. The end of the "
                "backward pass is estimated for the other batches."
            )
        if self.workers and not self.times.samples:
            unseen.append(
                "Samples in the workers were not seen: this needs forked workers, and a dataset "
                "with indices."
            )
        return tuple(unseen)

    def print_summary(self, *, only_news: bool) -> None:
        """Print a summary, unless no batch has come since the last summary. With ``only_news``,
        print a later summary only if its causes differ from those of the last one.
        """
        summary = self.summarise()
        batches, known = self._printed
        if summary is None or summary.batches == batches:
            return
        ids = [cause.id for cause in summary.causes]
        if not only_news or ids != known:
            self._printed = summary.batches, ids
            # Other processes may print, too: a single write keeps these lines together.
            (sys.stdout if is_notebook() else sys.stderr).write(f"{summary}\n")


def _read_settings(loader: Any) -> tuple[Any, ...]:
    """Return the number of workers, the batch size, and what a dataset made anew has in common with
    the one before: its class and its length. The length of a stream is not asked for.
    """
    dataset: Any = getattr(loader, "dataset", None)
    length = None
    # A dataset need not have a length.
    with suppress(Exception):
        if not isinstance(dataset, IterableDataset):
            length = len(dataset)
    return count_workers(loader), getattr(loader, "batch_size", None), type(dataset), length


def _is_slowed(folder: Any) -> bool:
    """Return whether the folder of a dataset is slowed by `slow_down`."""
    if not isinstance(folder, Path):
        return False
    # Only the datasets of this package are read in slowed folders, and they have loaded this.
    from colab_utils.slow_drive import find_profile

    return find_profile(folder) is not None


def split_micro_batches(parts_s: _Array) -> _Array:
    """Estimate where the step ends for batches after which the optimizer does not step.

    The forward and backward passes of such a batch take about as long as those of other batches.
    So its step is taken to be as long as the median step of the other batches. The rest of its step
    counts as time between steps, up to the median time between steps of the other batches.

    Args:
        parts_s: Wait, step, and time between steps of each batch, seconds, float64 [batches, 3].

    Example:
        >>> parts_s = np.array([[0, 0.7, 0], [0, 0.1, 0.6], [0, 0.1, 0], [0, 9, 0]])
        >>> split_micro_batches(parts_s).round(1).tolist()
        [[0.0, 0.1, 0.6], [0.0, 0.1, 0.6], [0.0, 0.1, 0.0], [0.0, 8.4, 0.6]]
    """
    is_stepped = parts_s[:, 2] > 0
    if not is_stepped.any():
        return parts_s
    _, step_s, between_s = np.median(parts_s[is_stepped], axis=0)
    later_s = np.where(is_stepped, 0, np.clip(parts_s[:, 1] - step_s, 0, between_s))
    return parts_s + np.outer(later_s, (0, -1, 1))


def _make_part(name: str, seconds: _Array, whole_s: float) -> Part:
    middle_and_late_ms = 1000 * np.percentile(seconds if len(seconds) else [0.0], (50, 95))
    return Part(name, float(seconds.sum()) / whole_s, *middle_and_late_ms.tolist())


def _describe(causes: Sequence[Cause], parts: Sequence[Part], start: float, looks: Looks) -> str:
    wait, *rest = parts
    names = [f"{part.name} {part.share:.0%}" for part in rest]
    shares = ", ".join([f"wait {wait.share + start:.0%}", *names])
    if causes:
        return f"{causes[0].why} ({shares})"
    step, between = rest
    if step.share < max(start, wait.share, between.share):
        return f"Too few batches for a verdict: {shares}."
    return (
        f"The step is the limit: {shares}. Your loader is fine: a faster step is all that helps."
        f"{looks.describe_line('step')}"
    )
