"""The read of sample 37 never ends: its file is a FIFO, and nobody writes into it. End the run from
outside.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.causes.loop import Loop, Photos, Step, make_plain_loader
from colab_utils.processes import end_with_parent

EXPECTED = "hang"
NEXT = r"(?i)leave .*out|local disk|mount"
EPOCHS = 1


def start(worker: int) -> None:
    """Let a worker that hangs end with its parent, however that is ended."""
    end_with_parent()


def make_loop(folder: Path) -> Loop:
    """Fifty files, of which one is a pipe."""
    dataset = Photos(folder, count=50)
    dataset.paths[37] = folder / "pipe-37.jpg"
    if not dataset.paths[37].exists():
        os.mkfifo(dataset.paths[37])
    return make_plain_loader(dataset, worker_init_fn=start), Step(), None
