"""Epochs are short, workers take a second to start, and they start anew in each epoch."""

from __future__ import annotations

from pathlib import Path
from time import sleep

from benchmarks.causes.loop import Loop, Photos, Step, make_plain_loader

EXPECTED = "restarts"
NEXT = r"persistent_workers"
EPOCHS = 40


def open_index(worker: int) -> None:
    """Read a large index, for example."""
    sleep(1)


def make_loop(folder: Path) -> Loop:
    """Fifteen batches an epoch, and workers that do not persist."""
    return make_plain_loader(Photos(folder), batches=15, worker_init_fn=open_index), Step(), None
