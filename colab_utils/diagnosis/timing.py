"""Clocks that measure the wall time and the CPU time of batches and steps, and what is beyond the
noise: how far repeated measurements differ, and which gains count.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from glob import glob
from statistics import median
from time import perf_counter, process_time
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from colab_utils.errors import ColabUtilsError, describe_error
from colab_utils.processes import list_pids, quiet_fork

LEAST_NOISE = 0.05
"""Two rates count as equal if they differ by less than this share."""

# A standard error comes from the means of this many blocks of successive batches.
_BLOCKS = 10
# A machine is busy if its cores are idle for less than this share of their time.
_HARDLY = 0.1
# Timing ends at the latest after this many times ``max_s``.
_LONGEST = 4
# Batches at the start of a loader that say little about those that follow. Where files are read
# ahead from a slow folder, the first ones wait for the slowest reads, and the number of streams
# still grows.
_WARMUP = 5
_STREAMS_WARMUP = 12


@dataclass(frozen=True)
class BatchTimes:
    """What `time_batches` measured."""

    wait_s: tuple[float, ...]
    """Seconds that the loop waited for each batch."""
    step_s: tuple[float, ...]
    """Seconds that the step of each batch took."""
    images: int
    """Number of images in all batches."""
    cpu_s: float
    """CPU seconds of this process and its children."""
    step_cpu_s: float
    """CPU seconds of this process during steps. All threads count, because another thread launches
    the backward pass of a GPU.
    """
    round_batches: int = 1
    """Number of workers that deliver batches in turns; 1 without workers."""

    @property
    def batch_s(self) -> NDArray[np.float64]:
        """Return wait + step of each batch in seconds, float64 [batches]."""
        return np.maximum(np.add(self.wait_s, self.step_s), 1e-9)

    @property
    def batch_size(self) -> int:
        """Return the number of images in a usual batch."""
        return round(self.images / len(self.wait_s))

    @property
    def images_per_second(self) -> float:
        """Return the images divided by the time of waiting and stepping."""
        return self.images / float(self.batch_s.sum())

    @property
    def wait_share(self) -> float:
        """Return the stall share: wait / (wait + step), 0 to 1."""
        return sum(self.wait_s) / float(self.batch_s.sum())

    @property
    def cpu_ms_per_image(self) -> float:
        """Return the CPU milliseconds that all processes took to load an image. Steps do not
        count.
        """
        return max(0.0, self.cpu_s - self.step_cpu_s) / self.images * 1000

    @property
    def error(self) -> float:
        """Return the standard error of the mean of wait + step, as a share of the mean."""
        return find_error(self.batch_s, self.round_batches)


def time_batches(
    loader: Iterable[Any],
    step: Callable[..., Any] | None = None,
    *,
    batches: int,
    warmup: int = 2,
    max_s: float = 60,
    least: int = 3,
    on_batch: Callable[[int, Any], None] | None = None,
) -> BatchTimes:
    """Time ``batches`` batches of any loader: how long each was waited for, and how long its step
    took.

    A loader that ends earlier is iterated over again. If this process uses CUDA, the GPU is
    synchronised before and after each step. A round is as many batches as there are workers. Slow
    workers deliver in rounds, so timing that ends because of ``max_s`` ends with a whole round.

    Args:
        loader: Anything that can be iterated over and yields batches.
        step: Called as ``step(images, targets)`` if a batch is such a pair, else as
            ``step(batch)``.
        batches: Number of batches to time at most.
        warmup: Number of batches at the start that are not timed. With 0, all batches are timed.
            Otherwise, the warm-up has at least as many batches as the workers load ahead.
        max_s: Seconds after which the warm-up ends once what the workers loaded ahead is used up,
            and timing, too, if it is enough: ``least`` batches, and half of ``max_s`` after the
            warm-up. After four times ``max_s``, both end in any case.
        least: Number of batches to time even after ``max_s``. Default: 3.
        on_batch: Called after each timed batch with its number (from 0) and the batch. The time of
            this call counts neither as wait nor as step.

    Raises:
        ColabUtilsError: the loader yields nothing, or no more than the warm-up; or the loader or
            the step fails, and the message says at which batch.

    Example:
        >>> from colab_utils.loading.emulated_step import EmulatedStep
        >>> times = time_batches([("images", "targets")], EmulatedStep(2), batches=3)
        >>> len(times.wait_s), times.wait_share < 0.5
        (3, True)
    """
    workers = count_workers(loader)
    # Batches that were loaded while the first one was waited for come without a wait.
    ahead = workers * count_prefetch(loader) if warmup else 0
    untimed = max(warmup, ahead)
    due_s = max_s
    # Of each batch: the seconds of its wait and its step, the CPU seconds of its step, its images.
    rows: list[tuple[float, float, float, int]] = []
    cpu_began_s = measure_tree_cpu()
    began_s = perf_counter()
    asked_s = began_s
    with closing(fetch_batches(loader)) as source:
        for batch in source:
            # What the loader queued on the device belongs to the wait.
            _synchronize()
            number = len(rows) + 1
            rows.append(
                (
                    perf_counter() - asked_s,
                    *_time_step(step, batch, number),
                    count_images(batch),
                )
            )
            elapsed_s = perf_counter() - began_s
            timed = number - untimed
            if timed > 0 and on_batch is not None:
                on_batch(timed - 1, batch)
            if elapsed_s > _LONGEST * max_s:
                least = 1
                ahead = 0
            # Workers deliver in rounds.
            if timed >= batches or (
                timed >= least and elapsed_s > due_s and timed % max(1, workers) == 0
            ):
                break
            if timed <= 0 and elapsed_s > max_s:
                untimed = max(number, ahead)
            if number == untimed:
                # The warm-up ends here.
                due_s = max(max_s, elapsed_s + max_s / 2)
                cpu_began_s = measure_tree_cpu()
            # What was done since the step counts to no batch.
            asked_s = perf_counter()
        # CPU time is read before the workers end.
        cpu_s = measure_tree_cpu() - cpu_began_s
    if len(rows) <= untimed:
        raise ColabUtilsError(
            f"The loader gives no more than the {untimed} batches of the warm-up, and no second "
            "epoch. Pass a loader that can be iterated again, or warmup=0."
        )
    # The waits, the steps, the CPU seconds of the steps, and the images.
    columns = [*zip(*rows[untimed:], strict=True)]
    return BatchTimes(
        columns[0],
        columns[1],
        max(1, sum(columns[3])),
        cpu_s,
        sum(columns[2]),
        max(1, workers),
    )


class CpuUse(NamedTuple):
    """Where the time of the cores went."""

    others_s: float = 0.0
    """CPU seconds of all other programs; 0 if cores were idle for a tenth of their time or more."""
    queued_s: float = 0.0
    """Seconds in which a thread of this process could have run, but had no core. Only the thread
    that waited longest counts.
    """


class CpuClock:
    """Measures where the time of the cores goes, from the moment at which it is made.

    Example:
        >>> CpuClock().read().queued_s < 60
        True
    """

    def __init__(self) -> None:
        self._own_s = measure_tree_cpu()
        self._machine_s = _measure_machine()
        self._queues_s = measure_queues()

    def read(self) -> CpuUse:
        """Return where the time went so far."""
        own_s = measure_tree_cpu() - self._own_s
        machine_s = _measure_machine() - self._machine_s
        # In these two fields, idle and iowait, a core has nothing to do.
        idle_s = float(machine_s[3:5].sum())
        others_s = 0.0
        if idle_s < _HARDLY * float(machine_s.sum()):
            others_s = max(0.0, float(machine_s.sum()) - idle_s - own_s)
        queued_s = 0.0
        for thread, seconds in measure_queues().items():
            queued_s = max(queued_s, seconds - self._queues_s.get(thread, 0.0))
        return CpuUse(others_s, queued_s)


def _measure_machine() -> NDArray[np.float64]:
    """Return how many seconds all cores have spent in each state since the machine was started,
    float64 [8]. The states are the fields of ``psutil.cpu_times``. Its two last fields, for guests,
    are left out, because other fields include them.
    """
    return np.array(psutil.cpu_times()[:8])


def measure_queues() -> dict[int, float]:
    """Return, for each thread of this process, the seconds in which it could have run, but had no
    core. The keys are native ids of the threads.

    Linux counts this in ``/proc/self/task/ID/schedstat``. The result is empty on other systems.
    """
    queued_s = {}
    for path in glob("/proc/self/task/*/schedstat"):
        # A thread may end meanwhile, and not every kernel counts this time.
        with suppress(OSError, ValueError, IndexError), open(path) as file:
            queued_s[int(path.split("/")[4])] = int(file.read().split()[1]) / 1e9
    return queued_s


def _time_step(step: Callable[..., Any] | None, batch: Any, number: int) -> tuple[float, float]:
    """Run a step, and wait until the device has finished it. Return its seconds and the CPU seconds
    of this process.

    Raises:
        ColabUtilsError: the step fails.
    """
    began_s = perf_counter()
    cpu_began_s = process_time()
    if step is not None:
        try:
            step(*(batch if _is_pair(batch) else (batch,)))
            _synchronize()
        except Exception as error:
            raise ColabUtilsError(
                f"The step failed at batch {number}: {describe_error(error)}. "
                "Try it alone: step(*next(iter(loader)))"
            ) from error
    return perf_counter() - began_s, process_time() - cpu_began_s


def _synchronize() -> None:
    # This is asked each time, because the first step may initialise CUDA.
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def count_workers(loader: Any) -> int:
    """Return the number of workers of a `Loader` or a ``DataLoader``; 0 for a loader that has no
    such number.

    Example:
        >>> count_workers([1, 2])
        0
    """
    return int(getattr(loader, "workers", getattr(loader, "num_workers", 0)))


def count_prefetch(loader: Any) -> int:
    """Return how many batches each worker loads ahead; 2, which is torch's default, for a loader
    that has no such number.

    Example:
        >>> count_prefetch([1, 2])
        2
    """
    for name in ("prefetch", "prefetch_factor"):
        count = getattr(loader, name, None)
        # In other packages, this may be the name of a method.
        if isinstance(count, int) and count:
            return count
    return 2


def count_warmup(loader: Any) -> int:
    """Return how many batches to leave out until a loader delivers at its steady rate.

    Example:
        >>> count_warmup([1, 2])
        5
    """
    return _STREAMS_WARMUP if getattr(loader, "reads_ahead", False) else _WARMUP


def fetch_batches(loader: Iterable[Any]) -> Generator[Any, None, None]:
    """Yield the batches of one epoch after another. An error of the loader becomes a
    `ColabUtilsError` that says at which batch it came.
    """
    number = 0
    batches = None
    while True:
        before = number
        try:
            with quiet_fork():
                batches = iter(loader)
            for batch in batches:
                number += 1
                yield batch
        except Exception as error:
            shut_down = getattr(batches, "_shutdown_workers", None)
            if shut_down is not None and not getattr(loader, "persistent_workers", False):
                # The traceback keeps the iterator, and the iterator would keep its workers alive.
                shut_down()
            reason = describe_error(error)
            if not isinstance(error, ColabUtilsError):
                reason += ". Correct the dataset."
            raise ColabUtilsError(f"The loader gives no batch {number + 1}: {reason}") from error
        if number == 0:
            raise ColabUtilsError("The loader gives no batch. Lower the batch size.")
        if number == before:
            # This loader is an iterator, which cannot start again.
            return


def _is_pair(batch: Any) -> bool:
    """Return whether a batch is ``(images, targets)``. A list of two dicts is no such pair, but two
    samples.
    """
    return type(batch) in (tuple, list) and len(batch) == 2 and not isinstance(batch[0], Mapping)


def count_images(batch: Any) -> int:
    """Count the images in a batch. A batch is a list of samples, a tensor, or some columns, such as
    ``(images, targets, ...)`` or a dict.
    """
    columns: Iterable[Any] = [batch]
    if isinstance(batch, tuple | list):
        columns = batch
    elif isinstance(batch, Mapping):
        columns = batch.values()
    if isinstance(batch, list) and batch and not _is_pair(batch):
        is_sample = isinstance(batch[0], Mapping | tuple | str)
        if is_sample or getattr(batch[0], "ndim", 0) == 3:
            return len(batch)
    for column in columns:
        if hasattr(column, "__len__") and getattr(column, "ndim", 1) > 0:
            return len(column)
    return 1


def measure_tree_cpu() -> float:
    """Return the CPU seconds that this process and all its children have used so far, including the
    children that have ended.
    """
    total_s = 0.0
    for pid in list_pids():
        # A process may have ended a moment ago. Its parent counts its time now.
        with suppress(psutil.Error):
            # The first four fields are user and system time, of the process and its ended children.
            total_s += sum(psutil.Process(pid).cpu_times()[:4])
    return total_s


def measure_spread(repeats: Sequence[float]) -> float:
    """Return by how much repeats differ, as a share of their median; 0 if there are fewer than two.

    Example:
        >>> measure_spread([9.0, 10.0, 10.5])
        0.15
    """
    if len(repeats) < 2:
        return 0.0
    return (max(repeats) - min(repeats)) / median(repeats)


def find_error(seconds: NDArray[np.float64], round_batches: int = 1) -> float:
    """Return the standard error of the mean time of a batch, as a share of the mean.

    It comes from the means of up to ten blocks of successive batches (the method of batch means).
    Single batches would not do, because a worker that is late holds up the batches of all others,
    which then come at once. A few blocks may be alike by chance, so the fewer they are, the more
    the error is enlarged: 1.2 times for ten blocks, three times for two. Student's t distribution
    has similar factors.

    Args:
        seconds: Time of each batch in seconds, float64 [batches].
        round_batches: Number of workers that deliver in turns. A block has at least so many
            batches.

    Returns:
        The share. It is 1 if there are too few batches for two blocks: nothing is known then.

    Example:
        >>> round(find_error(np.array([1.0, 3.0] * 50)), 3), find_error(np.ones(1))
        (0.0, 1.0)
    """
    blocks = min(_BLOCKS, len(seconds) // round_batches)
    if blocks < 2:
        return 1.0
    means = [block.mean() for block in np.array_split(seconds, blocks)]
    error_s = np.std(means, ddof=1) / np.sqrt(blocks) * (blocks + 1) / (blocks - 1)
    return float(error_s / max(seconds.mean(), 1e-9))
