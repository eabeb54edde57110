"""Planted causes of slow reading, and reads that never end."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from time import sleep

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.causes.loop import Loop, Photos, Step, burn, make_plain_loader
from colab_utils.files import read_file
from colab_utils.processes import end_with_parent
from colab_utils.slow_drive import DriveProfile, slow_down

_FILES = 8


def make_read(folder: Path) -> Loop:
    """Each file lets 60 ms pass before its first byte, as thousands of small files on Drive do."""
    slow_down(folder, DriveProfile("distant", open_s=0.06, bytes_per_s=1e9, source="planted"))
    return make_plain_loader(Photos(folder, read=read_file)), Step(), None


def make_bandwidth(folder: Path) -> Loop:
    """Each file has 4 MB, and the disk gives 80 MB a second to all readers together."""
    slow_down(folder, DriveProfile("narrow", open_s=0.0, bytes_per_s=80e6, source="planted"))
    dataset = Photos(folder, count=16, extra_bytes=4_000_000, read=read_file)
    return make_plain_loader(dataset, batches=300), Step(), None


class Files(Photos):
    """Every eighth photo lies in the same file."""

    open_s = 0.5
    opened: set[int] = set()  # noqa: RUF012  # of this process

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index % _FILES not in self.opened:
            sleep(self.open_s)
            self.opened.add(index % _FILES)
        return super().__getitem__(index)


def make_first_samples(folder: Path) -> Loop:
    """Each worker opens each of eight files when it first needs it, for half a second: it waits for
    that, and no sample is at fault.
    """
    return make_plain_loader(Files(folder)), Step(), None


def read_one_slowly(path: Path) -> bytes:
    """Read a file; one of them is slow."""
    if path.stem == "photo-37":
        sleep(1)
    return path.read_bytes()


def make_slow_sample(folder: Path) -> Loop:
    """One sample in fifty, that of number 37, takes a second; the others take a millisecond."""
    return make_plain_loader(Photos(folder, count=50, read=read_one_slowly)), Step(), None


class Stored(Photos):
    """Locks the whole database for each sample."""

    held_ms = 20.0
    database: sqlite3.Connection | None = None

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.database is None:
            path = self.folder / "names.db"
            self.database = sqlite3.connect(path, timeout=60, isolation_level=None)
        self.database.execute("begin exclusive")
        burn(self.held_ms)
        self.database.execute("commit")
        return super().__getitem__(index)


def make_database(folder: Path) -> Loop:
    """Workers wait for one another at a database: SQLite sleeps until it is free."""
    return make_plain_loader(Stored(folder), workers=4), Step(), None


def start_worker(worker: int) -> None:
    """Let a worker that hangs end with its parent, however that is ended."""
    end_with_parent()


def make_hang(folder: Path) -> Loop:
    """The read of sample 37 never ends: its file is a FIFO, and nobody writes into it. End the run
    from outside.
    """
    dataset = Photos(folder, count=50)
    dataset.paths[37] = folder / "pipe-37.jpg"
    if not dataset.paths[37].exists():
        os.mkfifo(dataset.paths[37])
    return make_plain_loader(dataset, worker_init_fn=start_worker), Step(), None


class Waiting(Photos):
    """One sample never comes."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 37:
            sleep(3600)
        return super().__getitem__(index)


def make_spawned_hang(folder: Path) -> Loop:
    """A worker that was not forked waits for ever, at sample 37."""
    loader = make_plain_loader(Waiting(folder), workers=1, multiprocessing_context="spawn")
    return loader, Step(), None


class Mapped(Dataset[tuple[Tensor, int]]):
    """Images of a numpy file, which is cut before one of them is read."""

    def __init__(self, folder: Path, cut_at: int | None) -> None:
        self.path = folder / "images.npy"
        self.cut_at = cut_at
        np.save(self.path, np.zeros((400, 3, 64, 64), np.uint8))
        self.images = np.load(self.path, mmap_mode="r")

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.cut_at:
            os.truncate(self.path, 5000)
        return torch.from_numpy(np.array(self.images[index])), index


def make_cut_file(folder: Path, *, cut_at: int | None = 40) -> Loop:
    """A mapped file becomes shorter while a worker reads it: a bus error, with memory free."""
    images = Mapped(folder, cut_at)
    return DataLoader(images, 4, sampler=range(400), num_workers=1), lambda *batch: None, None
