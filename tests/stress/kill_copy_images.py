"""Kill a copy of loose images again and again at random moments: the folder is the same in the end.

    python -m tests.stress.kill_copy_images [--kills 20] [--seed 0]

After each kill every file that has its name must be whole; the same command goes on. When it ends,
the copy must be equal to the source, with nothing beside it. Exits 1 at the first difference.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from colab_utils.slow_drive import DriveProfile, slow_down
from tests.stress.kill_preprocess import kill_session, start_session

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


def read_tree(folder: Path) -> dict[str, bytes]:
    """All that a folder holds, hidden files as well."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def count_kills(folder: Path, kills: int, chance: random.Random) -> int:
    """Kill the copy so many times; return in how many rounds.

    Raises:
        AssertionError: something is lost, or looks finished that is not.
    """
    source = make_source(folder / "drive", chance)
    slow_down(source, PROFILE)
    expected = read_tree(source)
    rounds = 0
    done = 0
    while done < kills:
        target = folder / f"ssd-{rounds}"
        options = ["--images", source, "--to", target, "--streams", STREAMS]
        command = [sys.executable, "-m", "colab_utils", "copy", *map(str, options)]
        is_killed = True
        while is_killed:
            session = start_session(command)
            before = len([*target.rglob("*.jpg")])
            while session.poll() is None and len([*target.rglob("*.jpg")]) == before:
                time.sleep(0.01)
            is_killed = done < kills and kill_session(session, chance.uniform(0, 1.5), chance)
            session.communicate()
            done += is_killed
            tree = read_tree(target)
            tree.pop(".image.part", None)
            assert tree.items() <= expected.items(), "a file has its name, and is not whole"
        assert read_tree(target) == expected, f"round {rounds} is not equal to the source"
        rounds += 1
    return rounds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        try:
            rounds = count_kills(Path(folder), options.kills, random.Random(options.seed))
        except AssertionError as error:
            print(error)
            return 1
    print(f"{options.kills} kills in {rounds} rounds: each ended equal to the source")
    return 0


if __name__ == "__main__":
    sys.exit(main())
