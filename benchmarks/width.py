"""How many reads at once "auto" finds, on a mounted Drive that serves so many: `python -m
benchmarks.width`.

A file system is mounted whose files take 0.2 s each. It serves 8, 32 or 128 of them at once and
refuses more than twice as many. Files a second of fixed numbers of streams, and of "auto", are
counted after ten seconds, in which "auto" may look for its number.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from colab_utils.drive import Retries
from colab_utils.errors import ColabUtilsError
from colab_utils.files import read_file
from colab_utils.reader import Reader
from colab_utils.show.table import make_table
from colab_utils.slow_drive import DriveProfile
from tests.drive_mount import can_mount, mount_drive

__all__ = ["main", "measure_rate"]

LIMITS = (8, 32, 128)
OPEN_S = 0.2
FILES = 80_000
WARM_UP_S = 10.0


def measure_rate(
    folder: Path, names: Iterator[int], streams: int | str, seconds: float
) -> tuple[float, int, int, int]:
    """Return files a second after the warm-up, streams at the end, refusals, and errors."""
    retries = Retries()
    read = partial(read_file, retries=retries)
    reader = Reader(read, place=folder, streams=streams, retries=retries)
    files = 0
    errors = 0
    started_s = perf_counter()
    for reading in reader.read_all(folder / f"{number}.jpg" for number in names):
        try:
            reading.take()
        except ColabUtilsError:
            errors += 1
        spent_s = perf_counter() - started_s
        files += spent_s > WARM_UP_S
        if spent_s > WARM_UP_S + seconds:
            break
    width = reader.streams
    reader.close()
    return files / seconds, width, retries.count, errors


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.width", description=__doc__)
    parser.add_argument("--seconds", type=float, default=15)
    options = parser.parse_args(arguments)
    reason = can_mount()
    if reason:
        print(f"Nothing can be mounted here: {reason}", file=sys.stderr)
        return 2
    rows = []
    with TemporaryDirectory() as work:
        backing = Path(work) / "backing"
        backing.mkdir()
        for number in range(FILES):
            (backing / f"{number}.jpg").write_bytes(b"%d" % number)
        for limit in LIMITS:
            profile = DriveProfile(
                "limited",
                open_s=OPEN_S,
                bytes_per_s=1e9,
                source="the benchmark",
                streams=limit,
                most_reads=2 * limit,
            )
            with mount_drive(backing, Path(work) / f"mnt-{limit}", profile=profile) as mount:
                # Each file is read once: a second time its cache would answer.
                names = count()
                for streams in (limit // 2, limit, "auto"):
                    rate, width, refusals, errors = measure_rate(
                        mount.folder, names, streams, options.seconds
                    )
                    rows.append(
                        {
                            "served at once": limit,
                            "streams": f"{streams}" if streams != "auto" else f"auto: {width}",
                            "files/s": round(rate, 1),
                            "of the limit": f"{rate * OPEN_S / limit:.0%}",
                            "refused": refusals,
                            "errors": errors,
                        }
                    )
                    print(rows[-1], file=sys.stderr)
    print(make_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
