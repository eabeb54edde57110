"""How many reads at once "auto" finds, on a mounted Drive that serves so many: `python -m
benchmarks.width`.

A file system is mounted whose files take 0.2 s each. It serves 8, 32 or 128 of them at once and
refuses more than twice as many. Files a second of fixed numbers of streams, and of "auto", are
counted after ten seconds, in which "auto" may look for its number.

With ``--changing``, the mounted Drive serves 8 at once, then 64, then 16, while one run of "auto"
goes on. Each time it has twenty seconds to find the new number.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from colab_utils.drive import Retries
from colab_utils.errors import ColabUtilsError
from colab_utils.files import read_file
from colab_utils.reader import Reader
from colab_utils.show.table import make_table
from colab_utils.slow_drive import DriveProfile
from tests.drive_mount import DriveMount, can_mount, mount_drive

__all__ = ["main", "measure_changes", "measure_rate"]

LIMITS = (8, 32, 128)
OPEN_S = 0.2
FILES = 80_000
WARM_UP_S = 10.0
CHANGING_LIMITS = (8, 64, 16)
SETTLING_S = 20.0


class CountingReader:
    """A reader that counts files when they are read, which may be long before they are taken."""

    def __init__(self, folder: Path, names: Iterator[int], streams: int | str) -> None:
        self.retries = Retries()
        self.reader = Reader(self._read, place=folder, streams=streams, retries=self.retries)
        self.errors = 0
        self._ends_s: deque[float] = deque()
        paths = (folder / f"{number}.jpg" for number in names)
        self._readings = self.reader.read_all(paths)

    def _read(self, path: Path) -> bytes:
        content = read_file(path, self.retries)
        self._ends_s.append(perf_counter())
        return content

    def measure(self, warm_up_s: float, seconds: float) -> tuple[float, float]:
        """Take files for so long; return files a second, and the longest wait for one, in seconds.

        Both are of the time after the warm-up.
        """
        begin_s = perf_counter() + warm_up_s
        end_s = begin_s + seconds
        last_s = begin_s
        longest_s = 0.0
        for reading in self._readings:
            try:
                reading.take()
            except ColabUtilsError:
                self.errors += 1
            now_s = perf_counter()
            if now_s > begin_s:
                longest_s = max(longest_s, now_s - last_s)
                last_s = now_s
            if now_s > end_s:
                break
        files = sum(begin_s < read_s <= end_s for read_s in list(self._ends_s))
        self._ends_s.clear()
        return files / seconds, longest_s

    def close(self) -> None:
        """Give up all files."""
        self._readings.close()
        self.reader.close()


def measure_rate(
    folder: Path, names: Iterator[int], streams: int | str, seconds: float
) -> tuple[float, int, int, int]:
    """Return files a second after the warm-up, streams at the end, refusals, and errors."""
    counting = CountingReader(folder, names, streams)
    rate, _ = counting.measure(WARM_UP_S, seconds)
    counting.close()
    return rate, counting.reader.streams, counting.retries.count, counting.errors


def measure_changes(
    mount: DriveMount, names: Iterator[int], seconds: float
) -> list[dict[str, Any]]:
    """Return a row for each number of files served at once, which changes while "auto" reads."""
    rows = []
    mount.fail(served=CHANGING_LIMITS[0])
    counting = CountingReader(mount.folder, names, "auto")
    for limit in CHANGING_LIMITS:
        mount.fail(served=limit)
        refusals_before = counting.retries.count
        errors_before = counting.errors
        rate, longest_s = counting.measure(SETTLING_S, seconds)
        rows.append(
            {
                "served at once": limit,
                "auto, streams": counting.reader.streams,
                "auto, files/s": round(rate, 1),
                "longest wait, s": round(longest_s, 1),
                "refused": counting.retries.count - refusals_before,
                "errors": counting.errors - errors_before,
            }
        )
        print(rows[-1], file=sys.stderr)
    counting.close()
    return rows


def compare_changes(work: Path, backing: Path, seconds: float) -> list[dict[str, Any]]:
    """Return the rows of `measure_changes`, with the speed of the best fixed number beside each."""
    with mount_limited(work, backing, CHANGING_LIMITS[0]) as mount:
        names = count()
        rows = measure_changes(mount, names, seconds)
        for row in rows:
            limit = row["served at once"]
            mount.fail(served=limit)
            rate, _, _, _ = measure_rate(mount.folder, names, limit, seconds)
            row["fixed, files/s"] = round(rate, 1)
            row["auto / fixed"] = round(row["auto, files/s"] / rate, 2)
            print(row, file=sys.stderr)
    return rows


def compare_limits(work: Path, backing: Path, seconds: float) -> list[dict[str, Any]]:
    """Return a row for each number of files served at once and each number of streams."""
    rows = []
    for limit in LIMITS:
        with mount_limited(work, backing, limit) as mount:
            # Each file is read once: a second time its cache would answer.
            names = count()
            for streams in (limit // 2, limit, "auto"):
                rate, width, refusals, errors = measure_rate(mount.folder, names, streams, seconds)
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
    return rows


def mount_limited(work: Path, backing: Path, limit: int) -> AbstractContextManager[DriveMount]:
    """Mount a Drive that serves so many files at once, and refuses more than twice as many."""
    profile = DriveProfile(
        "limited",
        open_s=OPEN_S,
        bytes_per_s=1e9,
        source="the benchmark",
        streams=limit,
        most_reads=2 * limit,
    )
    return mount_drive(backing, work / f"mnt-{limit}", profile=profile)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.width", description=__doc__)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--changing", action="store_true", help="change the limit during a run")
    options = parser.parse_args(arguments)
    reason = can_mount()
    if reason:
        print(f"Nothing can be mounted here: {reason}", file=sys.stderr)
        return 2
    with TemporaryDirectory() as folder:
        work = Path(folder)
        backing = work / "backing"
        backing.mkdir()
        for number in range(FILES):
            (backing / f"{number}.jpg").write_bytes(b"%d" % number)
        compare = compare_changes if options.changing else compare_limits
        rows = compare(work, backing, options.seconds)
    print(make_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
