"""The function that makes a batch of samples takes 300 ms of CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import default_collate

from benchmarks.causes.loop import Loop, Photos, Step, burn, make_plain_loader

EXPECTED = "collate"
NEXT = r"(?is)collate(_fn)?.*(cheaper|faster)|(cheaper|faster).*collate"
EPOCHS = 1


def collate_slowly(samples: list[Any]) -> Any:
    """Put samples together, slowly."""
    burn(300)
    return default_collate(samples)


def make_loop(folder: Path) -> Loop:
    """Cheap samples, and an expensive ``collate_fn``."""
    return make_plain_loader(Photos(folder), batches=300, collate_fn=collate_slowly), Step(), None
