"""How many workers, of which kind: found by short trials of the real loader, beside a step that takes its core."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from threading import Event, Thread
from time import perf_counter, sleep, thread_time
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import BadSampleError
from colab_utils.loading.sampler import BatchSampler
from colab_utils.loading.workers import Backend, Fetcher, Prefetcher, describe_workers
from colab_utils.runtime import count_cores, describe_machine, find_free_memory, format_bytes, show_progress, write_file

__all__ = ["EmulatedStep", "Trial", "Tuning", "tune_workers"]

_BUSY = 0.9  # of a core: what a training process takes to launch kernels


_BLOCK = bytes(32_768)  # a few microseconds of work that releases Python's lock, as launching kernels does


class EmulatedStep:
    """A stand-in for a training step on a machine without a GPU; label its figures *emulated*.

    It uses ``busy`` of a core for ``step_ms`` milliseconds (both more than 0), and longer where others take the core
    away: a step that only sleeps flatters every loader. Raises ColabUtilsError for a step that takes no time.

    Example:
        >>> step = EmulatedStep(5)
        >>> step([], [])
        >>> print(step)
        emulated 5 ms
    """

    emulated = True

    def __init__(self, step_ms: float, busy: float = _BUSY) -> None:
        if not 0 < step_ms < float("inf"):
            raise ColabUtilsError(f"expected step_ms over 0, found {step_ms!r}: give milliseconds, like 100")
        self.step_ms, self.busy = float(step_ms), busy

    def __call__(self, images: Any, targets: Any = None) -> None:
        """Spend the time of one step; takes ``(images, targets)`` or one packed batch, and looks at neither."""
        length_s = self.step_ms / 1000
        began_s, cpu_began_s = perf_counter(), thread_time()
        while True:
            cpu_s = thread_time() - cpu_began_s
            rest_s = min(cpu_s / self.busy, length_s) - (perf_counter() - began_s)
            if rest_s > 0:
                sleep(rest_s)
            elif cpu_s >= self.busy * length_s:
                return
            # work and rest alternate in 2 ms slices
            slice_end_s = cpu_began_s + min(cpu_s + 0.002, self.busy * length_s)
            while thread_time() < slice_end_s:
                zlib.crc32(_BLOCK)

    def __str__(self) -> str:
        return f"emulated {self.step_ms:g} ms"


_HELD = 2  # batches that a training loop holds: the one at hand and, while it is replaced, the next


_ALL_TRIALS_S = 14.0  # together, so that with the workers' start it stays under 20 s


_TRIAL_S = 0.8


_RAM_SHARE = 0.5  # of the free memory: what a loader may take for its batches


_SPARE = 1.25  # other batches may be larger than those looked at; and slots grow by steps


_SLOW_S = 0.25  # a batch that waits longer for its files is not held up by the cores


_CLOSE = 0.95  # rates that differ by less are the same, and the one with fewer workers wins


@dataclass(frozen=True)
class Trial:
    """One way of loading and what it reached beside a step that keeps 0.9 of a core busy."""

    backend: Backend
    workers: int
    prefetch: int
    """Batches ahead for each worker."""
    images_per_second: float

    def __str__(self) -> str:
        return describe_workers(self.backend, self.workers, self.prefetch)


@dataclass(frozen=True)
class Tuning:
    """The way of loading that was picked, and all that were tried: none where workers would wait for slow files."""

    best: Trial
    trials: tuple[Trial, ...]
    memory_bytes: int
    """Shared memory for all batches under way, at most."""
    free_bytes: int
    """Memory that was free."""
    seconds: float
    remembered: bool = False
    """Found on an earlier run, on the same machine and dataset."""

    def __str__(self) -> str:
        lines = [f"{trial.images_per_second:8.0f} images/s  {trial}" for trial in self.trials]
        how = "remembered from an earlier run" if self.remembered else f"tried in {self.seconds:.0f} s"
        how += ", beside a step that keeps 0.9 of a core busy" if self.trials else ": the files are slow, not the cores"
        return "\n".join([
            *lines,
            f"picked: {self.best} ({how})",
            f"memory: at most {format_bytes(self.memory_bytes)} for batches, of {format_bytes(self.free_bytes)} free",
        ])  # fmt: skip


def tune_workers(
    dataset: Dataset[Any] | Fetcher, *, batch_size: int, backend: Backend | None = None, remember: bool = True
) -> Tuning:
    """Find the fastest way of loading batches on this machine.

    Args:
        dataset: as ``make_loader`` takes it.
        batch_size: images in a batch.
        backend: try only this kind.
        remember: take what an earlier run found on the same machine and dataset, and keep what is found.

    Raises:
        ColabUtilsError: if no sample can be loaded, or three batches do not fit into half of the free memory.

    Example:
        >>> from colab_utils.loading.dataset import ShardDataset
        >>> tune_workers(ShardDataset("no/such/folder"), batch_size=4)
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected a folder of shards, found nothing at no/such/folder. ...
    """
    source = dataset if isinstance(dataset, Fetcher) else Fetcher(dataset)
    path, key = _find_memory(), _describe_case(source, batch_size, backend)
    known = _recall(path).get(key) if remember else None
    if known is not None:
        return known
    started = perf_counter()
    order = BatchSampler(len(source), batch_size, 0, sizes=source.sizes)
    free = find_free_memory()
    budget = int(free * _RAM_SHARE)
    batch_bytes, waits = _measure_batch(source, order, batch_size, budget // (1 + _HELD))

    def count_bytes(workers: int, prefetch: int) -> int:
        return (max(1, workers * prefetch) + _HELD) * batch_bytes

    ways = [way for way in _list_ways(source, backend) if count_bytes(way[1], 2) <= budget] or [("threads", 0)]
    if waits:
        best = Trial(*max(ways, key=lambda way: way[1]), prefetch=2, images_per_second=0.0)
        return Tuning(best, (), count_bytes(best.workers, 2), free, perf_counter() - started)
    rounds = 2 * len(ways) + 2
    most_s = min(_TRIAL_S, _ALL_TRIALS_S / rounds)
    with show_progress("tuning workers", total=rounds, unit="trial") as bar, _busy_core():

        def try_all(ways: list[tuple[Backend, int]], prefetch: int) -> list[Trial]:
            """The better of two rounds: what else runs on the machine disturbs one of them, seldom both."""
            rates = dict.fromkeys(ways, 0.0)
            for kind, workers in [*ways, *ways]:
                rate = _measure_rate(source, order, kind, workers, prefetch, most_s)
                rates[kind, workers] = max(rates[kind, workers], rate)
                bar.update()
            return [Trial(kind, workers, prefetch, rate) for (kind, workers), rate in rates.items()]

        trials = try_all(ways, 2)
        best = _pick(trials)
        if best.workers and count_bytes(best.workers, 4) <= budget:
            trials += try_all([(best.backend, best.workers)], 4)
            best = _pick([best, trials[-1]])
    tuning = Tuning(
        best=best, trials=tuple(trials), memory_bytes=count_bytes(best.workers, best.prefetch), free_bytes=free,
        seconds=perf_counter() - started,
    )  # fmt: skip
    if remember:
        _keep(path, key, tuning)
    return tuning


def _list_ways(source: Fetcher, backend: Backend | None) -> list[tuple[Backend, int]]:
    """What is worth a trial: never more workers than cores; threads only where Python's lock does not stop them."""
    cores = count_cores()
    counts = sorted({n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if n < cores} | {cores})
    kinds: list[Backend] = ["processes"]
    if backend is not None:
        kinds = [backend]
    elif source.is_decoded:
        kinds = ["processes", "loader_process", "threads"]
    elif source.writes_itself:
        kinds = ["processes", "loader_process"]
    return [(kind, n) for kind in kinds for n in counts if not (kind == "loader_process" and n == 1 < cores)]


def _pick(trials: Sequence[Trial]) -> Trial:
    """The fastest; of those that are about as fast, the one with the fewest workers and batches ahead."""
    fastest = max(trial.images_per_second for trial in trials)
    close = [trial for trial in trials if trial.images_per_second >= _CLOSE * fastest]
    return min(close, key=lambda trial: (trial.workers, trial.prefetch, -trial.images_per_second))


def _measure_rate(
    source: Fetcher, order: BatchSampler, kind: Backend, workers: int, prefetch: int, most_s: float
) -> float:
    """Images per second that a pool delivers, as fast as they are taken."""
    prefetcher = Prefetcher(source, kind, workers, prefetch)
    try:
        loaded = prefetcher.run(_repeat(order), seed=(0,), skips_bad=True)
        for _ in islice(loaded, workers * prefetch + 1):  # the start of the workers, and the first touch of their slots
            pass
        images, started = 0, perf_counter()
        for item in loaded:
            images += len(item.batch or ())
            if perf_counter() - started > most_s:
                break
        return images / (perf_counter() - started)
    finally:
        prefetcher.close()


def _repeat(order: BatchSampler) -> Iterator[tuple[int, Any]]:
    yield from enumerate(cycle(order))


@contextmanager
def _busy_core() -> Iterator[None]:
    """Keep 0.9 of a core busy from a thread of this process, as the launching of kernels does."""
    step, end = EmulatedStep(20), Event()

    def burn() -> None:
        while not end.is_set():
            step(None)

    thread = Thread(target=burn, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _measure_batch(source: Fetcher, order: BatchSampler, batch_size: int, most: int) -> tuple[int, bool]:
    """Bytes of a large batch: of a few at random, and of the largest images where their sizes are known; and whether
    the first of them waited for its files.
    """
    batches: list[int] = []
    few = [indices for _, indices in islice(_repeat(order), 4)]
    if source.sizes is not None:
        few.append(np.argsort(source.sizes.prod(1, dtype=np.int64))[-batch_size:].tolist())

    def reserve(size: int) -> Any:
        if size * _SPARE > most:
            raise ColabUtilsError(
                f"expected batches of at most {format_bytes(most)}, of which {1 + _HELD} take half of the free "
                f"memory, found {batch_size} images of {format_bytes(size * _SPARE)}. Use a smaller batch, or smaller "
                "images."
            )
        batches.append(size)
        return np.empty(size, np.uint8)

    for number, indices in enumerate(few):
        began = perf_counter() - thread_time()
        try:
            source.write(indices, reserve, (0, number))
        except BadSampleError as failure:
            if number == len(few) - 1 and not batches:
                raise failure.error from None
        if perf_counter() - thread_time() - began > _SLOW_S:
            return int(max(batches) * _SPARE), True
    return int(max(batches) * _SPARE), False


def _describe_case(source: Fetcher, batch_size: int, backend: Backend | None) -> str:
    machine = describe_machine()
    dataset = f"{len(source)} of {type(source.dataset).__qualname__}"
    parts = (
        machine.cpu, machine.cores, machine.ram_bytes, machine.gpu, machine.torch, dataset,
        source.writes_itself, source.is_decoded, source.dense, batch_size, backend,
    )  # fmt: skip
    return " | ".join(map(str, parts))


def _find_memory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "colab_utils" / "workers.json"


def _recall(path: Path) -> dict[str, Tuning]:
    try:
        content = json.loads(path.read_text())
        return {
            key: Tuning(**{
                **value, "remembered": True, "best": Trial(**value["best"]),
                "trials": tuple(Trial(**trial) for trial in value["trials"]),
            })
            for key, value in content.items()
        }  # fmt: skip
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}  # none yet, or damaged: it is found again


def _keep(path: Path, key: str, tuning: Tuning) -> None:
    with suppress(OSError):  # a home that cannot be written to: found again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {known: asdict(value) for known, value in _recall(path).items()}
        write_file(path, json.dumps({**content, key: asdict(tuning)}, indent=1).encode())
