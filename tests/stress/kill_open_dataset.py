"""Kill a training that writes its shards behind it, at random moments of its first epoch: no
finished shard is written again, and both folders end byte-identical to ``write_shards``.

    python -m tests.stress.kill_open_dataset [--kills 40] [--seed 0] [--folder DIR]

After some kills the SSD is lost, as on a fresh Colab machine. The same call goes on each time.
Exits 1 at the first difference.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

from colab_utils.course.sample_data import BuiltinDataset, make_dataset
from colab_utils.shards.lock import WRITER_NAME
from colab_utils.shards.write import write_shards
from tests.snapshots import snapshot
from tests.stress.kill_preprocess import Kills, kill_session, run_kills, start_session

SESSION = """
import sys
from colab_utils import open_dataset, train
from colab_utils.slow_drive import slow_down
from tests.tiny_model import TINY_MODEL

images, annotations, drive, ssd, run = sys.argv[1:]
slow_down(images, "typical")
train(
    images=images,
    annotations=annotations,
    drive=drive,
    ssd=ssd,
    run=run,
    model=TINY_MODEL,
    weights=None,
    min_size=64,
    batch_size=2,
    epochs=1,
    checkpoint_steps=5,
)
open_dataset(images, annotations, drive=drive, ssd=ssd).wait()
"""


def wait_for_writing(session: subprocess.Popen[str], folder: Path) -> bool:
    """Wait until a session writes shards; False where it has ended before."""
    while session.poll() is None:
        if (folder / "ssd" / WRITER_NAME).exists():
            return True
        time.sleep(0.01)
    return False


def list_shards(folder: Path) -> dict[Path, int]:
    """Return when each finished shard on Drive and on the SSD was written, by its tar."""
    tars = [*folder.glob("drive/shard-*.tar"), *folder.glob("ssd/shard-*.tar")]
    return {tar: tar.stat().st_mtime_ns for tar in tars if tar.with_suffix(".arrays").exists()}


def run_round(data: BuiltinDataset, folder: Path, chance: random.Random, most_kills: int) -> int:
    """Kill sessions until one ends; return the kills."""
    kills = 0
    while True:
        before = list_shards(folder)
        places = [folder / name for name in ("drive", "ssd", "run")]
        session = start_session("-c", SESSION, data.images, data.annotations, *places)
        after_s = chance.uniform(0, 4) if kills < most_kills else 300
        if not wait_for_writing(session, folder):
            after_s = 300
        was_killed = kill_session(session, after_s, chance)
        assert before.items() <= list_shards(folder).items(), "a finished shard was written again"
        if not was_killed:
            return kills
        kills += 1
        if chance.random() < 0.3:
            shutil.rmtree(folder / "ssd", ignore_errors=True)


def count_rounds(asked: Kills) -> int:
    """Kill so many times; return in how many rounds."""
    folder = asked.folder
    data = make_dataset(folder / "data", n=240, workers=1)
    write_shards(data.images, data.annotations, shards=folder / "undisturbed")
    expected = snapshot(folder / "undisturbed")
    kills = 0
    rounds = 0
    while kills < asked.count:
        place = folder / f"round-{rounds}"
        kills += run_round(data, place, asked.chance, asked.count - kills)
        rounds += 1
        for name in ("drive", "ssd"):
            left = {path: text for path, text in snapshot(place / name).items() if "/" not in path}
            assert left == expected, f"after {kills} kills: {name} is not as write_shards writes it"
        shutil.rmtree(place)
    return rounds


if __name__ == "__main__":
    sys.exit(run_kills(__doc__, 40, count_rounds))
