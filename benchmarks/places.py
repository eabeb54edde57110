"""`copy_shards` from a bucket against bare fsspec: `python -m benchmarks.places`.

The Python of the environment "engines" runs it, which `make test-engines` builds.

Both copy the same files, in turns, from a server in a process of its own that answers as S3 does
and sends 100 MB/s in all. fsspec checks nothing of what comes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

from benchmarks.copying import make_shards
from colab_utils.shards.copy import copy_shards
from colab_utils.shards.index import read_index
from colab_utils.show.table import make_table

__all__ = ["main"]

URL = "s3://bucket/shards"


@contextmanager
def serve(folder: Path, bytes_per_s: float) -> Iterator[None]:
    """Serve a folder as S3 would, at this rate, while the block runs."""
    command = [sys.executable, "-m", "tests.file_server", folder, folder / "faults.json"]
    command += ["--bytes-per-s", bytes_per_s]
    server = subprocess.Popen(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert server.stdout is not None
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{int(server.stdout.readline())}"
        os.environ["AWS_ACCESS_KEY_ID"] = "key"
        os.environ["AWS_SECRET_ACCESS_KEY"] = "secret"
        os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
        yield
    finally:
        server.kill()
        server.wait()


def get_files(target: Path) -> None:
    """Copy the files by fsspec, which reads as many at once as it likes."""
    from fsspec import filesystem

    target.mkdir()
    names = [name for name, _, _ in read_index(URL).files()]
    filesystem("s3").get(
        [f"{URL}/{name}" for name in names], [f"{target}/{name}" for name in names]
    )


def cat_files(target: Path) -> None:
    """Read the files by fsspec into memory, one after the other, and write none."""
    from fsspec import filesystem

    system = filesystem("s3")
    for name, _, _ in read_index(URL).files():
        system.cat_file(f"{URL}/{name}")


WAYS: dict[str, Callable[[Path], object]] = {
    "fsspec get": get_files,
    "fsspec cat_file": cat_files,
    "copy_shards": lambda target: copy_shards(URL, target),
}


def tabulate(seconds: dict[str, list[float]], cpu_s: dict[str, list[float]], count: int) -> str:
    """Return a table of medians; the ratio is to the faster one of fsspec's ways."""
    best_s = min(median(values) for way, values in seconds.items() if way != "copy_shards")
    rows = []
    for way, values in seconds.items():
        row = {
            "way": way,
            "MB/s": f"{count / 1e6 / median(values):.1f}",
            "spread": f"{count / 1e6 / max(values):.1f}-{count / 1e6 / min(values):.1f}",
            "times the best of fsspec": f"{best_s / median(values):.2f}",
            "CPU s": f"{median(cpu_s[way]):.2f}",
        }
        rows.append(row)
    return str(make_table(rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.places", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--file-mb", type=float, default=128)
    parser.add_argument("--rate-mb-s", type=float, default=100)
    options = parser.parse_args(arguments)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu_s: dict[str, list[float]] = {way: [] for way in WAYS}
    with TemporaryDirectory() as folder:
        shards = Path(folder, "bucket", "shards")
        make_shards(shards, count=options.files, tar_bytes=int(options.file_mb * 1e6))
        count = read_index(shards).bytes
        with serve(Path(folder), options.rate_mb_s * 1e6):
            for _ in range(options.repeats):
                for way, copy in WAYS.items():
                    with TemporaryDirectory() as target:
                        started_s = perf_counter()
                        started_cpu_s = process_time()
                        copy(Path(target, "ssd"))
                        seconds[way].append(perf_counter() - started_s)
                        cpu_s[way].append(process_time() - started_cpu_s)
                    rate = count / seconds[way][-1] / 1e6
                    print(f"{way}: {rate:.1f} MB/s", file=sys.stderr, flush=True)
    print(tabulate(seconds, cpu_s, count))
    return 0


if __name__ == "__main__":
    sys.exit(main())
