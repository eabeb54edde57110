"""Kill a training that writes its shards behind it, at random moments of its first epoch: no
finished shard is written again, and both folders end byte-identical to ``write_shards``.

    python -m tests.stress.kill_open_dataset [--kills 40] [--seed 0] [--folder DIR]

After some kills the SSD is lost, as on a fresh Colab machine. The same call goes on each time.
Exits 1 at the first difference.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from colab_utils.course.sample_data import BuiltinDataset, make_dataset
from colab_utils.shards.lock import WRITER_NAME
from colab_utils.shards.write import write_shards
from tests.stress.kill_preprocess import kill_session

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


def start_session(data: BuiltinDataset, folder: Path) -> subprocess.Popen[str]:
    """Start to train, or go on."""
    places = [folder / name for name in ("drive", "ssd", "run")]
    return subprocess.Popen(
        [sys.executable, "-c", SESSION, data.images, data.annotations, *places],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
    )


def wait_for_writing(session: subprocess.Popen[str], folder: Path) -> bool:
    """Wait until a session writes shards; False where it has ended before."""
    while session.poll() is None:
        if (folder / "ssd" / WRITER_NAME).exists():
            return True
        time.sleep(0.01)
    return False


def list_shards(folder: Path) -> dict[str, int]:
    """Return when each finished shard was written, by the name of its tar."""
    tars = folder.glob("shard-*.tar")
    return {tar.name: tar.stat().st_mtime_ns for tar in tars if tar.with_suffix(".arrays").exists()}


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the content of each file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def find_rewritten(before: dict[str, dict[str, int]], folder: Path) -> list[str]:
    """Return the shards that were finished, and are not what they were any more."""
    return [
        f"{place}/{name}"
        for place, shards in before.items()
        for name, written_ns in shards.items()
        if list_shards(folder / place).get(name) != written_ns
    ]


def run_round(
    data: BuiltinDataset, folder: Path, chance: random.Random, most_kills: int
) -> tuple[int, str]:
    """Kill sessions until one ends; return the kills and what went wrong, if anything did."""
    kills = 0
    while True:
        before = {place: list_shards(folder / place) for place in ("drive", "ssd")}
        session = start_session(data, folder)
        after_s = chance.uniform(0, 4) if kills < most_kills else 300
        if not wait_for_writing(session, folder):
            after_s = 300
        was_killed = kill_session(session, after_s, chance)
        if rewritten := find_rewritten(before, folder):
            return kills, f"written again: {', '.join(rewritten)}"
        if not was_killed:
            return kills, ""
        kills += 1
        if chance.random() < 0.3:
            shutil.rmtree(folder / "ssd", ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=40, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (%(default)s)")
    parser.add_argument("--folder", type=Path, help="folder to work in (a temporary one)")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kills-"))
    data = make_dataset(folder / "data", n=240, workers=1)
    write_shards(data.images, data.annotations, shards=folder / "undisturbed")
    expected = read_files(folder / "undisturbed")
    chance = random.Random(options.seed)
    kills = 0
    rounds = 0
    while kills < options.kills:
        place = folder / f"round-{rounds}"
        more, fault = run_round(data, place, chance, options.kills - kills)
        kills += more
        rounds += 1
        for name in ("drive", "ssd"):
            if not fault and read_files(place / name) != expected:
                fault = f"{name} is not as write_shards writes it"
        if fault:
            print(f"after {kills} kills, in round {rounds}: {fault}")
            return 1
        shutil.rmtree(place)
    print(f"{kills} kills in {rounds} rounds: every one ended byte-identical to write_shards")
    if options.folder is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
