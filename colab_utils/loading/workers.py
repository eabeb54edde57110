"""Who loads the batches: worker processes, as many as short trials of the real loader find best, or
nobody else.

Batches are written into shared buffers, which are used again and again. Fresh shared memory is what
limits torch's own hand-off: making it, copying into it and faulting it in, for each tensor anew. A
buffer is made once, before the workers fork, and grows where a batch asks for more. It is anonymous
memory: /dev/shm may be small or full.
"""

import gc
import mmap
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import ENOMEM
from itertools import chain, islice, repeat
from multiprocessing.connection import Connection, wait
from threading import Thread
from time import perf_counter, sleep, thread_time
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Subset

from colab_utils.data.decoding import load_jpeg_decoder
from colab_utils.errors import ColabUtilsError, describe_error
from colab_utils.loading.arriving import Arrival
from colab_utils.loading.batch import (
    BadSampleError,
    BatchShape,
    PackedBatch,
    open_batch,
    pack_samples,
    write_batch,
)
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.emulated_step import EmulatedStep
from colab_utils.machine import count_cores, find_free_memory
from colab_utils.processes import end_with_parent, quiet_fork
from colab_utils.progress import show_progress
from colab_utils.units import format_bytes

PREFETCH = 2
"""Batches ahead for each worker."""
# that a training loop may hold: its batch, the next one, and two more that somebody keeps to look
# at
_LENT_BUFFERS = 4
_STEP_BYTES = 1 << 20  # by which a buffer grows
_POLL_S = 0.02  # between two looks for shards that arrive
_END = object()
Reserve = Callable[[int], NDArray[np.uint8]]
"""Gives memory of so many bytes."""

_TRIAL_S = 0.8
_HELD = 2  # batches that a training loop holds: the one at hand and, while it is replaced, the next
_RAM_SHARE = 0.5  # of the free memory: what a loader may take for its batches
_SPARE = 1.25  # other batches may be larger than the one looked at; and buffers grow by steps
_SLOW_S = 0.25  # a batch that waits longer for its files is not held up by the cores
_CLOSE = 0.95  # rates that differ by less are the same, and the fewest workers win


class Result(NamedTuple):
    """What became of a batch that was asked for."""

    shape: BatchShape | None = None
    """None where no sample of it could be loaded."""
    bad: Sequence[tuple[int, str]] = ()
    """Indices that were left out, and why."""
    error: Exception | None = None


class Fetcher:
    """Reads the samples of a map-style dataset, or of a ``Subset`` of one, and writes them as
    batches.

    Attributes:
        dense: whether the masks are written expanded, too; then ``flip`` is the share of images
            that are mirrored.
        writes_itself: whether the dataset writes batches without samples in between.
        arrival: of shards that are still copied, where they are.
        shard_of, sizes: as the dataset's own, for the images of the subset; None where it has none.
        shards: how many there are.
    """

    def __init__(self, dataset: Dataset[Any], *, dense: bool = False, flip: float = 0) -> None:
        self.dataset = dataset
        self.dense = dense
        self.flip = flip
        if (
            isinstance(dataset, str)
            or not hasattr(dataset, "__len__")
            or not hasattr(dataset, "__getitem__")
        ):
            found = type(dataset).__name__
            raise ColabUtilsError(
                f"expected a dataset with a length and indices, found {found}: use a ShardDataset"
            )
        if not len(self):
            raise ColabUtilsError(
                "expected a dataset with images, found an empty one: open another"
            )
        base: Any = dataset
        rows = np.arange(len(self))
        while type(base) is Subset:
            rows = np.asarray(base.indices, np.int64)[rows]
            base = base.dataset
        self._base = base
        self._rows = rows
        is_plain = (
            isinstance(base, ShardDataset) and type(base).__getitem__ is ShardDataset.__getitem__
        )
        self.writes_itself = is_plain and base.transforms is None
        load_jpeg_decoder()  # now, so that workers need not
        self.arrival: Arrival | None = getattr(base, "arrival", None)
        tables = [getattr(base, name, None) for name in ("shard_of", "sizes")]
        self.shard_of, self.sizes = (
            table[rows] if isinstance(table, np.ndarray) else None for table in tables
        )
        self.shards = len(base.index.shards) if isinstance(base, ShardDataset) else 0

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def load(
        self, indices: list[int], reserve: Reserve, seed: Sequence[int], *, skips_bad: bool
    ) -> Result:
        """Write a batch into memory that ``reserve`` gives; ``skips_bad``: leave bad samples out,
        and name them.
        """
        indices = list(indices)
        bad = list[tuple[int, str]]()
        while indices:
            try:
                return Result(self._write(indices, reserve, seed), bad)
            except BadSampleError as failure:
                error, place = failure.args
                if not skips_bad:
                    return Result(error=error)
                bad.append((indices.pop(place), describe_error(error)))
            except Exception as error:
                return Result(error=error)
        return Result(bad=bad)

    def _write(self, indices: list[int], reserve: Reserve, seed: Sequence[int]) -> BatchShape:
        """Write a batch; all random numbers of its samples come from ``seed``."""
        flips = np.random.default_rng(seed).random(len(indices)) < self.flip if self.flip else None
        source = self._base
        rows = self._rows[indices].tolist()
        if not self.writes_itself:
            with seed_random(seed):
                source = pack_samples(self.dataset, indices)
                rows = range(len(indices))
        return write_batch(source, rows, reserve, dense=self.dense, flips=flips)[0]


@contextmanager
def seed_random(seed: Sequence[int]) -> Iterator[None]:
    """Draw random numbers from ``seed``, whichever worker loads the samples, and leave this
    process's as they were.
    """
    entropy = np.random.SeedSequence(seed).generate_state(3, np.uint64).tolist()
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(entropy[0])
    np.random.seed(entropy[1] % 2**32)
    torch.default_generator.manual_seed(entropy[2])
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


class SharedBuffer:
    """Memory that this process and those forked from it see alike."""

    def __init__(self) -> None:
        self._file = os.memfd_create("colab_utils")
        weakref.finalize(self, os.close, self._file)
        self._map: mmap.mmap | None = None

    def reserve(self, size: int) -> NDArray[np.uint8]:
        """At least ``size`` bytes to write into, uint8.

        Raises:
            ColabUtilsError: if the machine has less memory free than that; nothing is written then.
        """
        have = os.fstat(self._file).st_size
        if size > have:
            # some more, so that it seldom grows
            wanted = -(-size * 5 // 4 // _STEP_BYTES) * _STEP_BYTES
            try:
                if size - have > (free := find_free_memory()):
                    raise OSError(ENOMEM, f"{format_bytes(free)} free")
                # now, and not by a bus error on the first touch
                os.posix_fallocate(self._file, 0, wanted)
            except OSError as error:
                found = (
                    f"too little ({error.strerror}): use fewer workers, a smaller prefetch or "
                    "a smaller batch"
                )
                raise ColabUtilsError(
                    f"expected {format_bytes(size)} of shared memory, found {found}"
                ) from None
        return self.view(size)

    def view(self, size: int) -> NDArray[np.uint8]:
        """Its first ``size`` bytes, which were reserved."""
        if self._map is None or len(self._map) < size:
            self._map = mmap.mmap(self._file, os.fstat(self._file).st_size)
        return np.frombuffer(self._map, np.uint8, size)


class SharedBufferPool:
    """The buffers of one loader: some free, some with the workers, some held with a batch."""

    def __init__(self, count: int, held: int) -> None:
        """``count`` buffers for the workers and ``held`` more, which a training loop may hold at a
        time.
        """
        self.buffers = [SharedBuffer() for _ in range(count + held)]
        self._free = deque(range(count + held))
        self._most_held = held
        self._held: set[int] = set()

    def take(self) -> int:
        """The number of a free buffer."""
        return self._free.pop()  # the last one used: its memory may still be in the cache

    def give_back(self, number: int) -> None:
        """A buffer is free again."""
        self._held.discard(number)
        self._free.append(number)

    def hold(self, number: int, size: int) -> Tensor:
        """A buffer's content, uint8 [size]; the buffer is free again when no tensor uses it any
        more.

        Who keeps many batches gets copies of the later ones, so that the workers never run out of
        buffers.
        """
        content = self.buffers[number].view(size)
        if len(self._held) >= self._most_held:
            copied = torch.from_numpy(content.copy())
            self.give_back(number)
            return copied
        self._held.add(number)
        weakref.finalize(content, self.give_back, number).atexit = False
        return torch.from_numpy(content)


class WorkerJob(NamedTuple):
    """A worker, and the batch that it was asked for, as far as that is known."""

    worker: int | None
    """Which worker process, from 0; None for this process."""
    pid: int
    number: int | None = None
    """Of the batch in its epoch."""
    indices: tuple[Any, ...] = ()
    """In the loader's dataset."""


class WorkerDiedError(ColabUtilsError):
    """A worker process ended."""

    job: WorkerJob
    """Which one, with the oldest batch that it had."""
    ending: str
    """How it ended, such as "killed by signal: Killed"."""


def describe_exit(code: int) -> str:
    """How a process ended, by its exit code; negative is a signal.

    Example:
        >>> describe_exit(-9), describe_exit(1)
        ('killed by signal: Killed', 'exit code 1')
    """
    return f"killed by signal: {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"


def explain_death(found: str) -> str:
    """A worker's death in words, from what is known about it.

    Example:
        >>> print(explain_death(describe_exit(3)))
        expected every worker process to live, found one that ended (exit code 3). Your own code or a library ended it:
        load with workers=0 to see where.
    """
    how = re.search(r"killed by signal: ([\w ]+)|exit code \d+", found)
    cure = "Your own code or a library ended it: load with workers=0 to see where."
    if re.search("Killed|Bus error", found):
        free = format_bytes(find_free_memory())
        shm = format_bytes(shutil.disk_usage("/dev/shm").free)
        cure = (
            f"Now {free} of memory and {shm} of /dev/shm are free. Mostly memory ran out: use "
            "fewer workers, a smaller "
            "prefetch or a smaller batch, and run it again."
        )
    ended = how[0] if how else "no reason given"
    return f"expected every worker process to live, found one that ended ({ended}). {cure}"


def _serve(connection: Connection, fetcher: Fetcher, buffers: list[SharedBuffer]) -> None:
    """The life of a worker process: it loads what it is asked for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    gc.freeze()  # a collection would touch, and so copy, all that is shared with the parent
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        while True:
            number, indices, buffer, seed, skips_bad = connection.recv()
            result = fetcher.load(indices, buffers[buffer].reserve, seed, skips_bad=skips_bad)
            connection.send((number, result._replace(error=_make_portable(result.error))))


def _make_portable(error: Exception | None) -> Exception | None:
    """The error as another process can take it, with its traceback as a note."""
    if error is None or isinstance(error, ColabUtilsError):
        return error
    trace = "".join(traceback.format_exception(error))
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever somebody's own exception does when it is copied
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"in a worker process:\n{trace}")
    return error


class Prefetcher:
    """Worker processes, their shared buffers, and the batches that were asked for: ``prefetch``
    ahead of each worker.

    Each worker has a pipe of its own: one that dies is noticed at once, and blocks no other.
    Without workers a batch is loaded here, when it is asked for.

    Raises:
        ColabUtilsError: if the system starts no more processes.
    """

    def __init__(self, fetcher: Fetcher, workers: int, prefetch: int) -> None:
        self._fetcher = fetcher
        self._ahead = max(1, workers * prefetch)
        self._buffers = SharedBufferPool(self._ahead, _LENT_BUFFERS)
        # by the batch's number, with that of its buffer
        self._sent: dict[int, tuple[WorkerJob, int]] = {}
        self._done: dict[int, Result] = {}
        self._processes: list[Any] = []
        self._connections: list[Any] = []
        context = multiprocessing.get_context("fork")
        try:
            for _ in range(workers):
                here, there = context.Pipe()
                self._connections.append(here)
                process = context.Process(
                    target=_serve, args=(there, fetcher, self._buffers.buffers), daemon=True
                )
                with there, quiet_fork():
                    process.start()
                self._processes.append(process)
        except OSError as error:  # no more processes
            self.close()
            found = (
                f"that they cannot be started ({error}): close what you do not need, or use "
                "workers=0"
            )
            raise ColabUtilsError(f"expected {workers} worker processes, found {found}") from None

    def run(
        self,
        batches: Iterable[tuple[int, list[int]] | None],
        *,
        seed: tuple[int, ...],
        skips_bad: bool,
    ) -> Iterator[tuple[int, PackedBatch | None, Sequence[tuple[int, str]]]]:
        """Load numbered batches in the order given (None: the next one has to wait): the number of
        each, the batch, and what was left out of it. The batch is None where no image of it was
        asked for, or all are bad.

        Raises:
            WorkerDiedError: if a worker died; and what a sample raises (not with ``skips_bad``).
        """
        self._drop_pass()
        todo = iter(batches)
        over = False
        while True:
            while not over and len(self._sent) < self._ahead:
                item = next(todo, _END)
                over = item is _END
                if not isinstance(item, tuple):
                    break
                number, indices = item
                self._send(number, indices, (*seed, number), skips_bad)
            if self._sent:
                first = next(iter(self._sent))
                while first not in self._done:
                    self._receive()
                yield self._finish(first)
            elif over:
                return
            else:
                sleep(_POLL_S)

    def list_jobs(self) -> list[WorkerJob]:
        """The batches that were asked for and did not come yet, oldest first."""
        return [job for number, (job, _) in list(self._sent.items()) if number not in self._done]

    def close(self) -> None:
        """End the workers; what they were doing is lost."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for connection in self._connections:
            connection.close()
        self._processes = []
        self._connections = []

    def _drop_pass(self) -> None:
        """Free the buffers of a pass that was broken off."""
        # where a worker dies now, no batch of the new pass is lost
        for number, (job, buffer) in self._sent.items():
            self._sent[number] = job._replace(number=None, indices=()), buffer
        while self._sent.keys() - self._done.keys():
            self._receive()
        for _, buffer in self._sent.values():
            self._buffers.give_back(buffer)
        self._sent = {}
        self._done = {}

    def _send(
        self, number: int, indices: list[int], seed: tuple[int, ...], skips_bad: bool
    ) -> None:
        """Ask the worker that has the fewest batches for one more, or load it here."""
        buffer = self._buffers.take()
        asked = tuple(indices)
        if not self._processes:
            self._sent[number] = WorkerJob(None, os.getpid(), number, asked), buffer
            reserve = self._buffers.buffers[buffer].reserve
            self._done[number] = self._fetcher.load(indices, reserve, seed, skips_bad=skips_bad)
            return
        jobs = Counter(job.worker for job in self.list_jobs())
        worker = min(range(len(self._processes)), key=jobs.__getitem__)
        self._sent[number] = WorkerJob(worker, self._processes[worker].pid, number, asked), buffer
        with suppress(OSError):  # it died: what it has done is received first
            self._connections[worker].send((number, indices, buffer, seed, skips_bad))

    def _receive(self) -> None:
        """Wait for the next result."""
        connection: Any = wait(self._connections)[0]
        try:
            number, result = connection.recv()
        except (EOFError, OSError):
            worker = self._connections.index(connection)
            process = self._processes[worker]
            process.join(5)
            ending = describe_exit(process.exitcode or 0)
            died = WorkerDiedError(explain_death(ending))
            jobs = [job for job in self.list_jobs() if job.worker == worker]
            died.job = jobs[0] if jobs else WorkerJob(worker, process.pid)
            died.ending = ending
            raise died from None
        self._done[number] = result

    def _finish(self, number: int) -> tuple[int, PackedBatch | None, Sequence[tuple[int, str]]]:
        (_, buffer), result = self._sent.pop(number), self._done.pop(number)
        if result.shape is None:
            self._buffers.give_back(buffer)
            if result.error is not None:
                raise result.error
            return number, None, result.bad
        content = self._buffers.hold(buffer, result.shape.lay_out()[1])
        return number, open_batch(content, result.shape), result.bad


def tune_workers(fetcher: Fetcher, batches: list[list[int]]) -> tuple[int, dict[int, float]]:
    """How many workers load these batches fastest on this machine, now; and the images/s of each
    number that was tried, while a step keeps 0.9 of a core busy: none where slow files, or memory,
    decide. Nothing is remembered.
    """
    batch_bytes, is_slow = _measure_batch(fetcher, batches[0])
    most = (find_free_memory() * _RAM_SHARE / batch_bytes - _HELD) // PREFETCH
    cores = count_cores()
    counts = [
        count for count in sorted({max(1, cores // 4), max(1, cores // 2), cores}) if count <= most
    ]
    if is_slow or not counts:
        return max(counts, default=0), {}
    trials = (_measure_rate(fetcher, batches, count) for count in counts)
    rates = dict(
        zip(
            counts,
            show_progress("tuning workers", trials, total=len(counts), unit="trial"),
            strict=True,
        )
    )
    return _pick(rates), rates


def _pick(rates: dict[int, float]) -> int:
    """The fastest number of workers; of those that are about as fast, the smallest."""
    return min(workers for workers, rate in rates.items() if rate >= _CLOSE * max(rates.values()))


def _measure_batch(fetcher: Fetcher, indices: list[int]) -> tuple[float, bool]:
    """Bytes of a large batch, of the largest images where sizes are known; and whether it waits for
    its files.
    """
    if fetcher.sizes is not None:
        indices = np.argsort(fetcher.sizes.prod(1, dtype=np.int64))[-len(indices) :].tolist()
    began_s = perf_counter() - thread_time()
    shape = fetcher.load(indices, lambda size: np.empty(size, np.uint8), (0,), skips_bad=True).shape
    waited_s = perf_counter() - thread_time() - began_s
    return (shape.lay_out()[1] * _SPARE, waited_s > _SLOW_S) if shape else (1.0, True)


def _measure_rate(fetcher: Fetcher, batches: list[list[int]], workers: int) -> float:
    """Images/s that so many workers deliver, as fast as their batches are taken, while a step takes
    its core.
    """
    prefetcher = Prefetcher(fetcher, workers, PREFETCH)
    step = Thread(target=EmulatedStep(1000 * _TRIAL_S), args=(None,), daemon=True)
    try:
        loaded = prefetcher.run(
            enumerate(chain.from_iterable(repeat(batches))), seed=(0,), skips_bad=True
        )
        # the workers start, and touch their memory for the first time
        for _ in islice(loaded, workers * PREFETCH + 1):
            pass
        step.start()
        images = 0
        began_s = perf_counter()
        for _, batch, _ in loaded:
            images += len(batch or ())
            if perf_counter() - began_s > _TRIAL_S:
                break
        rate = images / (perf_counter() - began_s)
        step.join()
        return rate
    finally:
        prefetcher.close()
