"""One sample in fifty, that of number 37, takes a second; the others take a millisecond."""

from __future__ import annotations

from pathlib import Path
from time import sleep

from benchmarks.causes.loop import Loop, Photos, Step, make_plain_loader

EXPECTED = "slow_sample"
NEXT = r"\b37\b"
EPOCHS = 1


def read(path: Path) -> bytes:
    """Read a file; one of them is slow."""
    if path.stem == "photo-37":
        sleep(1)
    return path.read_bytes()


def make_loop(folder: Path) -> Loop:
    """Fifty files, of which one is slow."""
    return make_plain_loader(Photos(folder, count=50, read=read)), Step(), None
