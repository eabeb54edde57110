"""Each file lets 60 ms pass before its first byte, as thousands of small files on Drive do."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from benchmarks.causes.loop import Loop, Photos, Step, make_plain_loader, read_slowly

EXPECTED = "read"
NEXT = r"(?i)shards|local (SSD|disk)|more workers"
EPOCHS = 1


def make_loop(folder: Path) -> Loop:
    """Small files that are slow to open."""
    return make_plain_loader(Photos(folder, read=partial(read_slowly, open_s=0.06))), Step(), None
