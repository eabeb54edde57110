"""`copy_shards` against a copy by one stream: `python -m benchmarks.copying`.

Both copy the same shards from a slowed folder, in turns. The contents are random bytes: a copy does
not look inside.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

from colab_utils.files import DriveFile, hash_file
from colab_utils.shards.copy import copy_shards
from colab_utils.shards.index import INDEX_NAME, ShardIndex, ShardInfo, read_index, write_index
from colab_utils.show.table import make_table
from colab_utils.slow_drive import slow_down

__all__ = ["copy_plainly", "main", "make_shards"]

PROFILES = ("typical", "bad")
# Megabytes of a file, and how many files there are.
SIZES = {3: 64, 128: 3}
ARRAYS_BYTES = 200_000
PIECE_BYTES = 1 << 20
RECIPE = {
    "storage": "keep",
    "min_size": 800,
    "max_size": 1333,
    "shard_mb": 128,
    "images_per_shard": 100,
}


def make_shards(folder: Path, *, count: int, tar_bytes: int) -> Path:
    """Write a folder of shards whose contents are random bytes."""
    folder.mkdir(parents=True)
    shards = []
    for number in range(count):
        tar = folder / f"shard-{number:06d}.tar"
        arrays = folder / f"shard-{number:06d}.arrays"
        tar.write_bytes(random.randbytes(tar_bytes))
        arrays.write_bytes(random.randbytes(ARRAYS_BYTES))
        shard = ShardInfo(
            name=tar.name,
            images=100,
            annotations=700,
            bytes=tar_bytes,
            xxh3_64=hash_file(tar)[1],
            arrays_name=arrays.name,
            arrays_bytes=ARRAYS_BYTES,
            arrays_xxh3_64=hash_file(arrays)[1],
            tables_xxh3_64="0" * 16,
        )
        shards.append(shard)
    index = ShardIndex("random", RECIPE, ({"id": 1, "name": "leaf"},), tuple(shards))
    write_index(folder, index)
    return folder


def copy_plainly(source: Path, target: Path) -> None:
    """Copy the files of an index one after the other, as `shutil.copy` does."""
    target.mkdir(parents=True)
    piece = memoryview(bytearray(PIECE_BYTES))
    names = [name for name, _, _ in read_index(source).files()]
    for name in [*names, INDEX_NAME]:
        offset = 0
        with DriveFile(source / name) as file, open(target / name, "wb") as copy:
            while count := file.readinto(piece, offset):
                copy.write(piece[:count])
                offset += count


WAYS: dict[str, Callable[[Path, Path], object]] = {
    "one stream": copy_plainly,
    "copy_shards": copy_shards,
}


def time_copy(copy: Callable[[Path, Path], object], source: Path) -> float:
    """Return bytes a second of one copy."""
    with TemporaryDirectory() as folder:
        started_s = perf_counter()
        copy(source, Path(folder) / "ssd")
        return read_index(source).bytes / (perf_counter() - started_s)


def tabulate_rates(rates: dict[tuple[str, int, str], list[float]]) -> str:
    """Return a table of medians, each with its spread and its ratio to one stream's."""
    rows = []
    for (profile, size_mb, way), values in rates.items():
        rival = median(rates[profile, size_mb, "one stream"])
        spread = f"[{min(values) / 1e6:.1f}-{max(values) / 1e6:.1f}]"
        row = {
            "Drive": profile,
            "files of": f"{size_mb} MB",
            "way": way,
            "MB/s": f"{median(values) / 1e6:.1f} {spread}",
            "times one stream": f"{median(values) / rival:.2f}",
        }
        rows.append(row)
    return str(make_table(rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.copying", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the files' sizes")
    options = parser.parse_args(arguments)
    rates: dict[tuple[str, int, str], list[float]] = {}
    with TemporaryDirectory() as folder:
        for size_mb, count in SIZES.items():
            tar_bytes = int(size_mb * 1e6 * options.scale)
            make_shards(Path(folder) / str(size_mb), count=count, tar_bytes=tar_bytes)
        for _, profile, size_mb in product(range(options.repeats), PROFILES, SIZES):
            source = Path(folder) / str(size_mb)
            slow_down(source, profile)
            for way, copy in WAYS.items():
                rate = time_copy(copy, source)
                rates.setdefault((profile, size_mb, way), []).append(rate)
                text = f"{profile}, files of {size_mb} MB, {way}: {rate / 1e6:.1f} MB/s"
                print(text, file=sys.stderr, flush=True)
            slow_down(source, None)
    print(tabulate_rates(rates))
    return 0


if __name__ == "__main__":
    sys.exit(main())
