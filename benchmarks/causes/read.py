"""Each file lets 60 ms pass before its first byte, as thousands of small files on Drive do."""

from __future__ import annotations

from pathlib import Path

from benchmarks.causes.loop import Loop, Photos, Step, make_plain_loader
from colab_utils.files import read_file
from colab_utils.slow_drive import DriveProfile, slow_down

EXPECTED = "read"
NEXT = r"(?i)shards|local (SSD|disk)|more workers"
EPOCHS = 1


def make_loop(folder: Path) -> Loop:
    """Small files that are slow to open."""
    slow_down(folder, DriveProfile("distant", open_s=0.06, bytes_per_s=1e9, source="planted"))
    return make_plain_loader(Photos(folder, read=read_file)), Step(), None
