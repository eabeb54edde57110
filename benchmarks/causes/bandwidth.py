"""Each file has 4 MB, and the disk gives 80 MB a second to all readers together."""

from __future__ import annotations

from pathlib import Path

from benchmarks.causes.loop import Loop, Photos, Step, make_plain_loader
from colab_utils.files import read_file
from colab_utils.slow_drive import DriveProfile, slow_down

EXPECTED = "read"
NEXT = r"(?i)local (SSD|disk)|smaller|shrink|resize"
EPOCHS = 1


def make_loop(folder: Path) -> Loop:
    """Large files that arrive slowly."""
    slow_down(folder, DriveProfile("narrow", open_s=0.0, bytes_per_s=80e6, source="planted"))
    dataset = Photos(folder, count=16, extra_bytes=4_000_000, read=read_file)
    return make_plain_loader(dataset, batches=300), Step(), None
