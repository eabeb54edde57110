"""Each file has 4 MB, and the disk gives 40 MB a second to each reader."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from benchmarks.causes.loop import Loop, Photos, Step, make_plain_loader, read_slowly

EXPECTED = "read"
NEXT = r"(?i)local (SSD|disk)|smaller|shrink|resize"
EPOCHS = 1


def make_loop(folder: Path) -> Loop:
    """Large files that arrive slowly."""
    dataset = Photos(
        folder, count=16, extra_bytes=4_000_000, read=partial(read_slowly, bytes_per_s=40e6)
    )
    return make_plain_loader(dataset, batches=300), Step(), None
