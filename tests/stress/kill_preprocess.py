"""Kill preprocess again and again at random moments: nothing is lost, and nothing looks finished
that is not.

    python -m tests.stress.kill_preprocess [--kills 200] [--seed 0] [--folder DIR]

After each kill every finished shard must be byte-identical to that of an undisturbed run, and an
index may be there only with all of them; the same command goes on. When it ends, all must be
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


def make_command(data: Path, shards: Path) -> list[str]:
    """Preprocess 60 images into about 20 shards."""
    files = f"--images {data}/images --annotations {data}/annotations.json --shards {shards}"
    words = f"-m colab_utils preprocess {files} --storage keep --shard-mb {SHARD_MB}"
    return [sys.executable, *words.split()]


def read_named(folder: Path) -> dict[str, bytes]:
    """Return the content of what has a name of its own."""
    return {name: data for name, data in snapshot(folder).items() if not name.startswith(".")}


def find_difference(left: dict[str, bytes], expected: dict[str, bytes]) -> str:
    """What is not as it should be after a kill; empty if all is well."""
    for name, content in left.items():
        if name != "writer.txt" and expected.get(name) != content:
            return f"{name} differs from that of an undisturbed run"
    if "index.json" in left and not expected.keys() <= left.keys():
        return "there is an index, but not every shard"
    return ""


def start_session(command: list[str]) -> subprocess.Popen[str]:
    """Start a command in a group of its own, which `kill_session` ends."""
    return subprocess.Popen(
        command,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
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


def count_rounds(asked: Kills) -> int:
    """Kill so many times; return in how many rounds."""
    folder = asked.folder
    make_dataset(folder / "data", n=60, width=160, height=128, objects=(1, 4), workers=1)
    began_s = time.perf_counter()
    undisturbed = folder / "undisturbed"
    subprocess.run(make_command(folder / "data", undisturbed), check=True, capture_output=True)
    undisturbed_s = time.perf_counter() - began_s
    expected = read_named(undisturbed)
    kills = 0
    rounds = 0
    while kills < asked.count:
        shards = folder / f"round-{rounds}"
        command = make_command(folder / "data", shards)
        after_s = asked.chance.uniform(0.3, 1.05) * undisturbed_s
        while kill_session(start_session(command), after_s, asked.chance):
            kills += 1
            difference = find_difference(read_named(shards), expected)
            assert not difference, f"kill {kills}: {difference}"
            after_s = asked.chance.uniform(0.3, 1.05) * undisturbed_s
            if kills >= asked.count:
                after_s = 300
        assert read_named(shards) == expected, f"round {rounds}: not as an undisturbed run"
        shutil.rmtree(shards)
        rounds += 1
    return rounds


if __name__ == "__main__":
    sys.exit(run_kills(__doc__, 200, count_rounds))
