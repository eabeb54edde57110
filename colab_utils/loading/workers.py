"""Who loads the batches: worker processes, one loader process with threads, threads in this process, or nobody else."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import queue
import random
import re
import selectors
import shutil
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from time import sleep
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, Subset

from colab_utils.data.decoding import load_jpeg_decoder
from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.arriving import Arrival
from colab_utils.loading.batch import (
    BadSampleError,
    BatchShape,
    PackedBatch,
    PackedSample,
    PackedSamples,
    collate_packed,
    open_batch,
    pack_target,
    write_batch,
)
from colab_utils.loading.buffers import SharedBuffer, SharedBufferPool
from colab_utils.loading.sampler import BatchParts
from colab_utils.loading.transforms import Transforms, apply_transforms
from colab_utils.runtime import end_with_parent, find_free_memory, format_bytes, quiet_fork

__all__ = [
    "Backend",
    "Fetcher",
    "Job",
    "Loaded",
    "Prefetcher",
    "Result",
    "WorkerPool",
    "describe_exit",
    "describe_workers",
    "explain_death",
    "start_workers",
]


class Fetcher:
    """A map-style dataset, or a ``Subset`` of one; with ``transforms``, those are applied to each sample; ``dense``
    writes the masks expanded too, and then ``flip`` is the share of images that are mirrored, by chance.

    Attributes:
        writes_itself: whether batches are written without samples in between.
        arrival: of shards that are still copied, where they are.
        fingerprint: the dataset's, where it has one.
        is_decoded: whether the images lie there as pixels.
        whole_shards, shard_of, sizes: as the dataset's own, for the images of the subset; None where it has none.
    """

    def __init__(
        self, dataset: Dataset[Any], transforms: Transforms | None = None, *, dense: bool = False, flip: float = 0
    ) -> None:
        self.dataset, self.transforms, self.dense, self.flip = dataset, transforms, dense, flip
        base: Any = dataset
        rows: NDArray[np.int64] | None = None
        while type(base) is Subset:
            picked = np.asarray(base.indices, np.int64)
            base, rows = base.dataset, picked if rows is None else picked[rows]
        self._base, self._rows = base, rows
        self.writes_itself = transforms is None and _writes_itself(type(base))
        load_jpeg_decoder()  # now, so that workers need not
        self.whole_shards: bool = getattr(base, "whole_shards", False)
        self.arrival: Arrival | None = getattr(base, "arrival", None)
        self.fingerprint: str | None = getattr(base, "fingerprint", None)
        self.is_decoded: bool = getattr(base, "is_decoded", False)
        self.shard_of, self.sizes = (self._pick(getattr(base, name, None)) for name in ("shard_of", "sizes"))

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def write(
        self, indices: Sequence[int], reserve: Callable[[int], NDArray[np.uint8]], seed: Sequence[int]
    ) -> BatchShape:
        """Write a batch into memory that ``reserve`` gives; ``seed``: of all chance in somebody's own dataset.

        Raises:
            BadSampleError: if a sample cannot be loaded.
        """
        flips = np.random.default_rng(seed).random(len(indices)) < self.flip if self.flip else None
        if self.writes_itself:
            return write_batch(self._base, self._find_rows(indices), reserve, dense=self.dense, flips=flips)
        samples = self.read_samples(indices, seed)
        return write_batch(PackedSamples(samples), range(len(samples)), reserve, dense=self.dense, flips=flips)

    def read_samples(self, indices: Sequence[int], seed: Sequence[int]) -> list[PackedSample]:
        """The samples of a batch, or of a part of one; raises as ``write``."""
        samples = []
        with _fix_chance(seed):
            for place, index in enumerate(indices):
                try:
                    samples.append(self._read_sample(index))
                except DriveLostError:
                    raise
                except ColabUtilsError as error:
                    raise BadSampleError(error, place) from None
        return samples

    def _read_sample(self, index: int) -> PackedSample:
        if self.writes_itself:
            sample: PackedSample = self._base.read_packed(self._find_rows([index])[0])
            return sample
        found: Any = self.dataset[index]
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise ColabUtilsError(
                f"expected (image, target) from your dataset, found {type(found).__name__}. See torchvision's "
                "detection datasets for the contract."
            )
        return pack_target(*(apply_transforms(self.transforms, *found) if self.transforms else found))

    def _find_rows(self, indices: Sequence[int]) -> Sequence[int]:
        rows: list[int] | None = None if self._rows is None else self._rows[list(indices)].tolist()
        return indices if rows is None else rows

    def _pick(self, values: Any) -> NDArray[Any] | None:
        if not isinstance(values, np.ndarray):
            return None
        return values if self._rows is None else values[self._rows]


def _writes_itself(kind: type) -> bool:
    """Whether a dataset can write itself, and no subclass gives other samples."""
    owners = [next((c for c in kind.__mro__ if name in vars(c)), None) for name in ("read_into", "__getitem__")]
    return owners[0] is not None and owners[0] is owners[1]


@contextmanager
def _fix_chance(seed: Sequence[int]) -> Iterator[None]:
    """Make chance in the samples come from ``seed``, whichever process loads them, and leave this process's alone."""
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


Backend = Literal["processes", "loader_process", "threads"]


"""Worker processes; one loader process with threads; threads in the training process."""


class Job(NamedTuple):
    """A batch, or a part of one, to load."""

    ticket: int
    indices: list[int]
    slot: int | None
    """Where to write it; None for samples."""
    seed: tuple[int, ...]
    tolerant: bool
    """Leave bad samples out, and say so."""


class Result(NamedTuple):
    """What became of a job."""

    ticket: int
    shape: BatchShape | None = None
    samples: list[PackedSample] | None = None
    bad: Sequence[tuple[int, ColabUtilsError]] = ()
    """Indices that were left out, and why."""
    error: Exception | None = None


class WorkerPool(Protocol):
    """Takes jobs and gives results, in the order in which they get done."""

    members: int
    """How many queues of jobs there are."""
    capacity: int
    """How many jobs run at a time."""

    def send(self, member: int, job: Job) -> None:
        """Queue a job for one member."""

    def receive(self) -> Result:
        """Wait for the next result.

        Raises:
            ColabUtilsError: if a worker process died.
        """

    def close(self) -> None:
        """End the workers; what they were doing is lost."""


def describe_workers(backend: Backend, workers: int, prefetch: int) -> str:
    """A way of loading in words.

    Example:
        >>> describe_workers("processes", 2, 4)
        '2 worker processes, 4 batches ahead each'
    """
    if not workers:
        return "this process, when a batch is asked for"
    one, many = {
        "processes": ("worker process", "worker processes"),
        "loader_process": ("thread of one loader process", "threads of one loader process"),
        "threads": ("thread here", "threads here"),
    }[backend]
    return f"{workers} {one if workers == 1 else many}, {prefetch} batches ahead each"


def start_workers(backend: Backend, workers: int, source: Fetcher, slots: list[SharedBuffer]) -> WorkerPool:
    """Start ``workers`` processes, or threads.

    Raises:
        OSError: if the system starts no more processes.
    """
    if backend == "threads" or workers == 0:
        return _Inline(workers, source, slots)
    processes, threads = (workers, 1) if backend == "processes" else (1, workers)
    return _Processes(processes, threads, source, slots)


def _do_job(source: Fetcher, slots: list[SharedBuffer], job: Job) -> Result:
    indices = list(job.indices)
    bad: list[tuple[int, ColabUtilsError]] = []
    try:
        while indices:
            try:
                if job.slot is None:
                    samples = source.read_samples(indices, job.seed)
                    return Result(job.ticket, samples=samples, bad=bad)
                shape = source.write(indices, slots[job.slot].reserve, job.seed)
                return Result(job.ticket, shape=shape, bad=bad)
            except BadSampleError as failure:
                if not job.tolerant:
                    raise failure.error from None
                bad.append((indices.pop(failure.place), failure.error))
    except Exception as error:
        return Result(job.ticket, bad=bad, error=error)
    return Result(job.ticket, bad=bad)


class _Inline:
    """Jobs run in this process: by threads, or, without any, when their results are asked for."""

    def __init__(self, threads: int, source: Fetcher, slots: list[SharedBuffer]) -> None:
        self.members, self.capacity = 1, max(1, threads)
        self._source, self._slots = source, slots
        self._pool = ThreadPoolExecutor(threads, "loader") if threads else None
        self._jobs: deque[Job] = deque()
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()

    def send(self, member: int, job: Job) -> None:
        if self._pool:
            self._pool.submit(lambda: self._results.put(_do_job(self._source, self._slots, job)))
        else:
            self._jobs.append(job)

    def receive(self) -> Result:
        return self._results.get() if self._pool else _do_job(self._source, self._slots, self._jobs.popleft())

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)


class _Processes:
    """Jobs run in other processes; a pipe to each, so that one that dies is noticed at once and locks nobody out."""

    def __init__(self, processes: int, threads: int, source: Fetcher, slots: list[SharedBuffer]) -> None:
        self.members, self.capacity = processes, processes * threads
        self._selector = selectors.DefaultSelector()
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self.dead: tuple[int, str] | None = None  # the member that died, and how
        context = multiprocessing.get_context("fork")
        try:
            for member in range(processes):
                here, there = context.Pipe()
                self._connections.append(here)
                process = context.Process(target=_serve, args=(there, threads, source, slots), daemon=True)
                with there, quiet_fork():
                    process.start()
                self._processes.append(process)
                self._selector.register(here, selectors.EVENT_READ, member)
        except OSError:
            self.close()
            raise

    def send(self, member: int, job: Job) -> None:
        try:
            self._connections[member].send(job)
        except OSError:
            raise self._explain_death(member) from None

    def receive(self) -> Result:
        key, _ = self._selector.select()[0]
        try:
            result: Result = self._connections[key.data].recv()
        except (EOFError, OSError):
            raise self._explain_death(key.data) from None
        return result

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(5)
            if process.exitcode is None:
                process.kill()
                process.join()
            process.close()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        self._selector.close()

    def _explain_death(self, member: int) -> ColabUtilsError:
        process = self._processes[member]
        process.join(5)
        self.dead = member, describe_exit(process.exitcode or 0)
        return explain_death(self.dead[1])


def describe_exit(code: int) -> str:
    """How a process ended, by its exit code; negative is a signal.

    Example:
        >>> describe_exit(-9), describe_exit(1)
        ('killed by signal: Killed', 'exit code 1')
    """
    return f"killed by signal: {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"


def explain_death(found: str) -> ColabUtilsError:
    """A worker's death in words, from what is known about it."""
    how = re.search(r"killed by signal: ([\w ]+)|exit code \d+", found)
    free = f"{format_bytes(find_free_memory())} of memory"
    if Path("/dev/shm").is_dir():
        free += f" and {format_bytes(shutil.disk_usage('/dev/shm').free)} of /dev/shm"
    return ColabUtilsError(
        f"expected every worker process to live, found one ended ({how[0] if how else 'no reason given'}); now {free} "
        "are free. Mostly memory ran out: use fewer workers, a smaller prefetch or a smaller batch, and run it again."
    )


def _serve(connection: Connection, threads: int, source: Fetcher, slots: list[SharedBuffer]) -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    gc.freeze()  # a collection would touch, and so copy, all that is shared with the parent
    torch.set_num_threads(1)
    lock = threading.Lock()

    def work(job: Job) -> None:
        result = _do_job(source, slots, job)
        if result.error is not None and not isinstance(result.error, ColabUtilsError):
            result = result._replace(error=_make_portable(result.error))
        with lock:
            connection.send(result)

    with ThreadPoolExecutor(threads) as pool:
        while True:
            try:
                job = connection.recv()
            except (EOFError, OSError):
                return
            if threads == 1:
                work(job)
            else:
                pool.submit(work, job)


def _make_portable(error: Exception) -> Exception:
    """The error as another process can take it, with its traceback as a note."""
    trace = "".join(traceback.format_exception(error))
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever somebody's own exception does when it is copied
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"in a worker process:\n{trace}")
    return error


# slots whoever iterates may hold: the batch at hand, the next while it replaces that, and two more that somebody keeps
# to look at; a slot that is never used takes no memory
_LENT_SLOTS = 4


_POLL_S = 0.02


_END = object()


class Loaded(NamedTuple):
    """A batch of the order; None where none of its images could be loaded, or it has no part for this process."""

    number: int
    batch: PackedBatch | None
    bad: list[tuple[int, ColabUtilsError]]


class _Pending(NamedTuple):
    number: int
    part: int
    member: int
    slot: int | None


class Prefetcher:
    """Workers, their slots, and who does what; ``prefetch``: batches ahead for each worker or thread.

    Raises:
        OSError: if worker processes cannot be started.
    """

    def __init__(self, source: Fetcher, backend: Backend, workers: int, prefetch: int) -> None:
        self._ahead = max(1, workers * prefetch)
        self._ring = SharedBufferPool(self._ahead, _LENT_SLOTS)
        self._pool = start_workers(backend, workers, source, self._ring.slots)
        self.close = self._pool.close
        self._pending: dict[int, _Pending] = {}
        self._got: dict[int, list[tuple[_Pending, Result]]] = {}
        self._queued = [0] * self._pool.members
        self._ticket = 0

    def run(
        self, batches: Iterable[tuple[int, BatchParts] | None], *, seed: tuple[int, ...], in_order: bool, tolerant: bool
    ) -> Iterator[Loaded]:
        """Load numbered batches; in the order given, or as they get ready. None: the next one has to wait.

        Raises:
            ColabUtilsError: if a worker died, or a sample cannot be loaded (not ``tolerant``).
        """
        self._drop_pass()
        todo, got = iter(batches), self._got
        sent: dict[int, int] = {}  # number of a batch: parts that are missing
        over = False
        while True:
            while not over and len(sent) < self._ahead:
                item = next(todo, _END)
                over = item is _END
                if item is None or not isinstance(item, tuple):
                    break
                number, parts = item
                sent[number], got[number] = len(parts), []
                for part, (stream, indices) in enumerate(parts):
                    slot = self._ring.take() if len(parts) == 1 else None
                    self._send(_Pending(number, part, self._choose(stream), slot), indices, (*seed, number), tolerant)
            if not sent:
                if over:
                    return
                sleep(_POLL_S)
                continue
            first = next(iter(sent))
            ready = first if not sent[first] or in_order else next((n for n in sent if not sent[n]), first)
            if not sent[ready]:
                del sent[ready]
                yield self._finish(ready, got.pop(ready))
                continue
            pending, result = self._receive()
            sent[pending.number] -= 1
            got[pending.number].append((pending, result))

    def _drop_pass(self) -> None:
        """Free the slots of a pass that was broken off."""
        while self._pending:
            pending, result = self._receive()
            self._got.setdefault(pending.number, []).append((pending, result))
        for pending, _ in (pair for results in self._got.values() for pair in results):
            if pending.slot is not None:
                self._ring.give_back(pending.slot)
        self._got = {}

    def _choose(self, stream: int | None) -> int:
        if stream is not None:
            return stream % self._pool.members
        return min(range(self._pool.members), key=self._queued.__getitem__)

    def _send(self, pending: _Pending, indices: list[int], seed: tuple[int, ...], tolerant: bool) -> None:
        self._ticket += 1
        self._pending[self._ticket] = pending
        self._queued[pending.member] += 1
        self._pool.send(pending.member, Job(self._ticket, indices, pending.slot, (*seed, pending.part), tolerant))

    def _receive(self) -> tuple[_Pending, Result]:
        result = self._pool.receive()
        pending = self._pending.pop(result.ticket)
        self._queued[pending.member] -= 1
        return pending, result

    def _finish(self, number: int, results: list[tuple[_Pending, Result]]) -> Loaded:
        if not results:  # nothing of it was asked for
            return Loaded(number, None, [])
        bad = [pair for _, result in results for pair in result.bad]
        errors = [result.error for _, result in results if result.error is not None]
        (pending, result), *others = results
        batch = None
        if pending.slot is not None and (errors or result.shape is None):
            self._ring.give_back(pending.slot)
        elif pending.slot is not None and result.shape is not None:
            size = result.shape.lay_out()[1]
            batch = open_batch(self._ring.lend(pending.slot, size), result.shape)
        if errors:
            raise errors[0]
        if others:
            samples: list[PackedSample] = []
            for _, result in sorted(results, key=lambda pair: pair[0].part):
                samples += result.samples or []
            batch = collate_packed(samples) if samples else None
        return Loaded(number, batch, bad)
