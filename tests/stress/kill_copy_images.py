"""Kill a copy of loose images again and again at random moments: the folder is the same in the end.

    python -m tests.stress.kill_copy_images [--kills 20] [--seed 0] [--folder DIR]

After each kill every file that has its name must be whole; the same command goes on. When it ends,
the copy must be equal to the source, with nothing beside it. Exits 1 at the first difference.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from colab_utils.slow_drive import DriveProfile, slow_down
from tests.snapshots import snapshot
from tests.stress.kill_preprocess import Kills, kill_rounds, run_kills

FILES = 200
# About a hundred files a second come with these streams, so that a kill meets a copy at work.
STREAMS = 4
PROFILE = DriveProfile("slow", 0.04, 1e9, "the kills")


def make_source(folder: Path, chance: random.Random) -> Path:
    """Make files of random bytes in two folders."""
    for name in ("first", "second/inner"):
        (folder / name).mkdir(parents=True)
    for number in range(FILES):
        place = folder / ("first", "second/inner")[number % 2] / f"{number:04d}.jpg"
        place.write_bytes(chance.randbytes(chance.randint(1, 40_000)))
    return folder


def count_rounds(asked: Kills) -> int:
    """Kill the copy so many times; return in how many rounds."""
    source = make_source(asked.folder / "drive", asked.chance)
    slow_down(source, PROFILE)
    rounds = kill_rounds(asked, f"copy --images {source} --streams {STREAMS} --to")
    assert snapshot(asked.folder / "undisturbed") == snapshot(source)
    return rounds


if __name__ == "__main__":
    sys.exit(run_kills(__doc__, 20, count_rounds))
