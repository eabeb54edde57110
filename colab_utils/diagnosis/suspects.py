"""Who a batch is waited for: what each kind of loader tells of its workers, and how it is started again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import signal_handling

from colab_utils.diagnosis.stacks import Board
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.folder import CocoFolder
from colab_utils.loading.loader import Loader
from colab_utils.loading.workers import describe_exit

__all__ = ["END", "Source", "Suspect", "find_file", "make_source"]

END = object()
"""What comes after the last batch."""


class Suspect(NamedTuple):
    """Who a batch is waited for, and which batch."""

    worker: int | None
    pid: int
    number: int | None = None
    batch: tuple[Any, ...] = ()


class Source:
    """Any loader: what it forks while it is asked for batches may be at fault, else this process."""

    restarts = False
    keeps_workers = True
    """From one pass to the next."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.board = loader, Board(getattr(loader, "dataset", None))

    def start(self) -> Any:
        self.board.forget_ended()
        return iter(self.loader)

    def get(self, batches: Any) -> Any:
        return next(batches, END)

    def list_jobs(self) -> list[Suspect]:
        """The batches that were asked for and did not come yet, oldest first, as far as that is known."""
        return []

    def find_suspect(self) -> Suspect:
        """Who has had the oldest batch for so long; else a worker that is at a sample; else this process."""
        at_work = (Suspect(place, pid) for place, (pid, at) in enumerate(self.board.list_samples().items()) if at)
        return next(iter(self.list_jobs()), None) or next(at_work, Suspect(None, os.getpid()))

    def find_dead(self) -> tuple[Suspect, str] | None:
        """A worker that ended, at which batch, and how."""
        return None

    def find_job(self, worker: int, pid: int) -> Suspect:
        """The batch that a dead worker was at; results of older ones may have been under way."""
        jobs, at = [job for job in self.list_jobs() if job.pid == pid], self.board.list_samples().get(pid, [])
        jobs.sort(key=lambda job: not any(self.board.resolve(index) in at for index in job.batch))
        return jobs[0] if jobs else Suspect(worker, pid)

    def kill(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def restart(self, skipped: int | None) -> None:
        """Get ready to start again, without one batch."""

    def end(self) -> None:
        """A pass is over, or broken off."""


class _LoaderWorkers(Source):
    """Our own loader: its dispatcher knows who does what."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        self.restarts = loader.workers > 0 and loader.hand_off != "inline"
        self._dispatcher: Any = None
        self._pids: list[int] = []
        self._plan: Any = None

    def start(self) -> Any:
        self._plan, self._dispatcher = None, self.loader._start()
        self._pids = [process.pid for process in getattr(self._dispatcher._crew, "_processes", ())]
        return super().start()

    def list_jobs(self) -> list[Suspect]:
        jobs = sorted(self._dispatcher._pending.values()) if self._dispatcher else []
        self._plan = self._plan or self.loader._order.plan()
        whose = [(job.member, self._pids[job.member]) if self._pids else (None, os.getpid()) for job in jobs]
        batches = [tuple(self._plan[job.number][job.part][1]) for job in jobs]
        return [
            Suspect(worker, pid, job.number, batch)
            for (worker, pid), job, batch in zip(whose, jobs, batches, strict=True)
        ]

    def find_dead(self) -> tuple[Suspect, str] | None:
        dead = getattr(getattr(self._dispatcher, "_crew", None), "dead", None)
        return dead and (self.find_job(dead[0], self._pids[dead[0]]), dead[1])

    def restart(self, skipped: int | None) -> None:
        self.loader.close()
        state = self.loader.state_dict()
        if skipped is not None:
            state["ahead"] = [*state.get("ahead", ()), skipped]
        self.loader.load_state_dict(state)


class _Indices:
    """What torch asks for batches by: what is to do, and what was handed out and whose batch did not come yet."""

    def __init__(self) -> None:
        self.todo: Iterator[Any] | None = None
        self.left: dict[int, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        for number, indices in enumerate(self.todo or ()):
            self.left[number] = indices
            yield indices


class _TorchWorkers(Source):
    """torch's DataLoader with workers: a copy whose indices are noted, so that a batch can be asked for again."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self.restarts = not isinstance(loader.dataset, IterableDataset)
        self.keeps_workers = loader.persistent_workers
        self._indices, self._copy = _Indices(), copy(loader)
        sampler = "batch_sampler" if loader._auto_collation else "sampler"
        vars(self._copy).update({sampler: self._indices, "_iterator": None})
        self._batches: Any = None

    def start(self) -> Any:
        self._indices.todo, self._indices.left = self._indices.todo or iter(self.loader._index_sampler), {}
        if self._copy._iterator is not None:
            self._batches._timeout = 0
        self._batches = iter(self._copy)
        if self._batches._worker_pids_set:  # or torch raises in the main thread, in the midst of your step
            self._batches._worker_pids_set = False
            signal_handling._remove_worker_pids(id(self._batches))
        self._batches._timeout = self.loader.timeout or 1  # it looks at its workers each second instead
        return self._batches

    def get(self, batches: Any) -> Any:
        while True:
            try:
                batch = next(batches, END)
            except RuntimeError as error:
                pinning = getattr(batches, "_pin_memory_thread", threading.main_thread())
                if self.loader.timeout or not pinning.is_alive() or not str(error).startswith("DataLoader timed out"):
                    raise
                continue
            for number in self._indices.left.keys() - batches._task_info.keys():
                del self._indices.left[number]
            return batch

    def list_jobs(self) -> list[Suspect]:
        jobs = []
        for number, (worker, *done) in sorted(dict(getattr(self._batches, "_task_info", {})).items()):
            batch = self._indices.left.get(number)
            batch = tuple(batch) if isinstance(batch, list | tuple) else (batch,)
            if not done:
                asked = tuple(index for index in batch if index is not None)  # a stream has none
                jobs.append(Suspect(worker, self._batches._workers[worker].pid, number, asked))
        return jobs

    def find_dead(self) -> tuple[Suspect, str] | None:
        for worker, process in enumerate(getattr(self._batches, "_workers", ())):
            if (code := process.exitcode) is not None:
                return self.find_job(worker, process.pid), describe_exit(code)
        return None

    def restart(self, skipped: int | None) -> None:
        left = [indices for number, indices in self._indices.left.items() if number != skipped]
        self._indices.todo = chain(left, self._indices.todo or ())
        self._shut_down()

    def end(self) -> None:
        self._indices.todo = None
        if not self.keeps_workers or self.find_dead():
            self._shut_down()

    def _shut_down(self) -> None:
        getattr(self._batches, "_shutdown_workers", int)()
        self._batches = self._copy._iterator = None


def make_source(loader: Any) -> Source:
    """What fits a loader."""
    if isinstance(loader, Loader):
        return _LoaderWorkers(loader)
    if isinstance(loader, DataLoader) and loader.num_workers and type(loader).__iter__ is DataLoader.__iter__:
        return _TorchWorkers(loader)
    return Source(loader)


def find_file(dataset: Any, sample: Any) -> str:
    """The file of a sample: as our datasets know it, else from a list of paths as long as the dataset."""
    with suppress(Exception):  # whatever somebody's own dataset does
        if isinstance(dataset, CocoFolder | ShardDataset):
            return str(dataset.find_path(sample))
        for values in vars(dataset).values():
            if isinstance(values, list) and len(values) == len(dataset):
                item = values[sample][0] if isinstance(values[sample], tuple) else values[sample]
                if isinstance(item, str | Path) and Path(item).suffix:
                    return str(item)
    return ""
