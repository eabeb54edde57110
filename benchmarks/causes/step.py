"""The step takes 100 ms, and loading takes next to nothing: here nothing is to be won."""

from __future__ import annotations

from pathlib import Path

from benchmarks.causes.loop import Loop, Photos, Step, make_plain_loader

EXPECTED = "step"
NEXT = r"(?i)loader is fine|nothing to win|faster (step|model|GPU)"
EPOCHS = 1


def make_loop(folder: Path) -> Loop:
    """Cheap samples, and an expensive step."""
    return make_plain_loader(Photos(folder)), Step(100), None
