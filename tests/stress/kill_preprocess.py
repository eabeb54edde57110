"""Kill preprocess again and again at random moments: nothing is lost, and nothing looks finished
that is not.

    python -m tests.stress.kill_preprocess [--kills 200] [--seed 0] [--folder DIR]

After each kill every file that has its name must be as in an undisturbed run, byte by byte, and
an index may be there only with all of them; the same command goes on. When it ends, all must be
identical, and it begins anew. Exits 1 at the first difference.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from colab_utils.course.sample_data import make_dataset
from tests.snapshots import snapshot

SHARD_MB = 0.05


def start_session(*command: str | Path) -> subprocess.Popen[str]:
    """Start Python in a group of its own, which `kill_session` ends."""
    return subprocess.Popen(
        [sys.executable, *command],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
    )


def kill_session(session: subprocess.Popen[str], after_s: float, chance: random.Random) -> bool:
    """Kill the process, or all of its group, after so many seconds; False where it had ended."""
    try:
        output, _ = session.communicate(timeout=after_s)
    except subprocess.TimeoutExpired:
        if chance.random() < 0.5:
            os.killpg(session.pid, signal.SIGKILL)
        else:
            # Its helpers notice.
            session.kill()
        session.communicate()
        return True
    if session.returncode:
        sys.exit(f"the command failed: {output}")
    return False


@dataclass(frozen=True)
class Kills:
    """What a stress test was asked for."""

    count: int
    folder: Path
    chance: random.Random


def run_kills(description: str | None, default: int, count_rounds: Callable[[Kills], int]) -> int:
    """Read the options of a stress test, and run it in a folder; return the exit status.

    ``count_rounds`` returns how many rounds it took, and raises an `AssertionError` at the first
    difference.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=default, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (%(default)s)")
    parser.add_argument("--folder", type=Path, help="folder to work in (a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        place = options.folder or Path(folder)
        try:
            rounds = count_rounds(Kills(options.kills, place, random.Random(options.seed)))
        except AssertionError as error:
            print(error)
            return 1
    print(f"{options.kills} kills in {rounds} rounds: every one ended as without any")
    return 0


def kill_rounds(asked: Kills, command: str) -> int:
    """Run a command undisturbed, then kill it so many times; return in how many rounds.

    Args:
        asked: how many kills, and where. The undisturbed run is left in ``undisturbed``.
        command: of the package; the folder that it fills follows.

    Raises:
        AssertionError: something is lost, or looks finished that is not.
    """
    words = ["-m", "colab_utils", *command.split()]
    began_s = time.perf_counter()
    kill_session(start_session(*words, asked.folder / "undisturbed"), 300, asked.chance)
    undisturbed_s = time.perf_counter() - began_s
    expected = snapshot(asked.folder / "undisturbed")
    kills = 0
    rounds = 0
    while kills < asked.count:
        target = asked.folder / f"round-{rounds}"
        is_killed = True
        while is_killed:
            share = asked.chance.uniform(0.3, 1.05)
            after_s = share * undisturbed_s if kills < asked.count else 300
            is_killed = kill_session(start_session(*words, target), after_s, asked.chance)
            kills += is_killed
            left = {name: data for name, data in snapshot(target).items() if name[0] != "."}
            left.pop("writer.txt", None)
            assert left.items() <= expected.items(), f"kill {kills}: a file differs"
            is_whole = "index.json" not in left or left == expected
            assert is_whole, f"kill {kills}: there is an index, but not every shard"
        assert left == expected, f"round {rounds}: not as an undisturbed run"
        shutil.rmtree(target)
        rounds += 1
    return rounds


def count_rounds(asked: Kills) -> int:
    """Preprocess 60 images into about 20 shards, and kill that; return in how many rounds."""
    data = asked.folder / "data"
    make_dataset(data, n=60, width=160, height=128, objects=(1, 4), workers=1)
    files = f"--images {data}/images --annotations {data}/annotations.json"
    return kill_rounds(asked, f"preprocess {files} --storage keep --shard-mb {SHARD_MB} --shards")


if __name__ == "__main__":
    sys.exit(run_kills(__doc__, 200, count_rounds))
