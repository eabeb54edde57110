"""Workers wait for one another at a database: SQLite sleeps until it is free, and tries again."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from torch import Tensor

from benchmarks.causes.loop import Loop, Photos, Step, burn, make_plain_loader

EXPECTED = "sleep"
NEXT = r"(?i)database"
EPOCHS = 1


class Stored(Photos):
    """Locks the whole database for each sample."""

    held_ms = 20.0
    database: sqlite3.Connection | None = None

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.database is None:
            path = self.folder / "names.db"
            self.database = sqlite3.connect(path, timeout=60, isolation_level=None)
        self.database.execute("begin exclusive")
        burn(self.held_ms)
        self.database.execute("commit")
        return super().__getitem__(index)


def make_loop(folder: Path) -> Loop:
    """Four workers, of which three wait."""
    return make_plain_loader(Stored(folder), workers=4), Step(), None
