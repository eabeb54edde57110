"""Kill preprocess again and again at random moments: nothing is lost, and nothing looks finished
that is not.

    python -m tests.stress.kill_preprocess [--kills 200] [--seed 0] [--folder DIR]

After each kill every finished shard must be byte-identical to that of an undisturbed run, and an
index may be there only with all of them; the same command goes on. When it ends, all must be
identical, and it begins anew. Exits 1 at the first difference.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from colab_utils.course.sample_data import make_dataset

SHARD_MB = 0.05


def make_command(data: Path, shards: Path) -> list[str]:
    """Preprocess 60 images into about 20 shards."""
    files = [
        "--images",
        str(data / "images"),
        "--annotations",
        str(data / "annotations.json"),
        "--shards",
        str(shards),
    ]
    return [
        sys.executable,
        "-m",
        "colab_utils",
        "preprocess",
        *files,
        "--storage",
        "keep",
        "--shard-mb",
        str(SHARD_MB),
    ]


def snapshot(folder: Path) -> dict[str, str]:
    """Checksums of what has a name of its own."""
    names = [path for path in folder.glob("*") if not path.name.startswith(".")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in names}


def find_difference(left: dict[str, str], expected: dict[str, str]) -> str:
    """What is not as it should be after a kill; empty if all is well."""
    for name, checksum in left.items():
        if name != "writer.txt" and expected.get(name) != checksum:
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


def kill_once(command: list[str], after_s: float, chance: random.Random) -> bool:
    """Run the command and kill it as `kill_session` does; says whether it was alive."""
    return kill_session(start_session(command), after_s, chance)


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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (%(default)s)")
    parser.add_argument("--folder", type=Path, help="folder to work in (a temporary one)")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kills-"))
    make_dataset(folder / "data", n=60, width=160, height=128, objects=(1, 4), workers=1)
    began_s = time.perf_counter()
    subprocess.run(
        make_command(folder / "data", folder / "undisturbed"), check=True, capture_output=True
    )
    undisturbed_s = time.perf_counter() - began_s
    expected = snapshot(folder / "undisturbed")
    chance = random.Random(options.seed)
    kills = 0
    rounds = kills
    while kills < options.kills:
        shards = folder / f"round-{rounds}"
        command = make_command(folder / "data", shards)
        while kill_once(command, chance.uniform(0.3, 1.05) * undisturbed_s, chance):
            kills += 1
            if difference := find_difference(snapshot(shards), expected):
                print(f"kill {kills}: {difference}")
                return 1
            if kills >= options.kills:
                subprocess.run(command, check=True, capture_output=True)
                break
        if snapshot(shards) != expected:
            names = [
                name for name in snapshot(shards) if snapshot(shards)[name] != expected.get(name)
            ]
            print(f"round {rounds}: not identical to an undisturbed run: {names}")
            return 1
        shutil.rmtree(shards)
        rounds += 1
    print(f"{kills} kills in {rounds} rounds: every one ended byte-identical to an undisturbed run")
    if options.folder is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
