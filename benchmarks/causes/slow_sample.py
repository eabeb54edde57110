"""One sample in fifty, that of number 37, takes a second; the others take a millisecond."""

from __future__ import annotations

from pathlib import Path

from benchmarks.causes.loop import Loop, Photos, Step, make_plain_loader, read_slowly

EXPECTED = "slow_sample"
NEXT = r"\b37\b"
EPOCHS = 1


def read(path: Path) -> bytes:
    """Read a file; one of them is slow."""
    return read_slowly(path, open_s=1.0 if path.stem == "photo-37" else 0.0)


def make_loop(folder: Path) -> Loop:
    """Fifty files, of which one is slow."""
    return make_plain_loader(Photos(folder, count=50, read=read)), Step(), None
