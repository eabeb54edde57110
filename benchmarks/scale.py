"""How time and memory grow with the images: `python -m benchmarks.scale --json FILE`.

The step ``loader`` loads an epoch, and prints the memory of the training process and its workers.

The data are made by code. Images are a few small files under many names, and the records of a shard
are one record that is read again and again: what grows is what is measured.
"""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import resource
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import psutil

from benchmarks.command import make_parser, run_to_end
from colab_utils.data.checks import check_dataset
from colab_utils.data.coco import read_coco
from colab_utils.files import write_file
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import make_loader
from colab_utils.loading.sampler import BatchSampler
from colab_utils.machine import describe_machine
from colab_utils.sample_data import make_dataset
from colab_utils.shards.arrays import ShardArrays, describe_shard, dump_arrays, load_arrays
from colab_utils.shards.index import ShardIndex, read_index, write_index
from colab_utils.shards.parts import plan_jobs
from colab_utils.shards.write import write_shards
from colab_utils.show.table import make_table

__all__ = ["STEPS", "find_exponent", "main", "make_shards", "measure_step", "tabulate_runs"]

OBJECTS = 7
# Images that one file stands for: file systems limit the names of a file.
_LINKS = 30_000
_SHARD_IMAGES = 680
_BATCH_SIZE = 16
_POLYGON_POINTS = 8
_LOADER = "loader"
_LOADER_WORKERS = 2
_LOADER_SIZES = (300_000,)
# Memory is read at these shares of an epoch.
_EPOCH_SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)


def _write_json(path: Path, images: int) -> None:
    """Write a COCO JSON of so many images, each with the same objects."""
    rng = np.random.default_rng(0)
    polygons = [
        json.dumps([np.round(rng.uniform(8, 56, 2 * _POLYGON_POINTS), 2).tolist()])
        for _ in range(100)
    ]
    with path.open("w") as file:
        file.write('{"categories": [{"id": 1, "name": "thing"}], "images": [')
        for number in range(images):
            comma = ", " if number else ""
            file.write(
                f'{comma}{{"id": {number + 1}, "file_name": "{number:012d}.jpg", "height": 64, '
                '"width": 64}'
            )
        file.write('], "annotations": [')
        for number in range(OBJECTS * images):
            comma = ", " if number else ""
            file.write(
                f'{comma}{{"id": {number + 1}, "image_id": {number // OBJECTS + 1}, '
                '"category_id": 1, "iscrowd": 0, "bbox": [8.25, 8.25, 47.5, 47.5], "area": 900.5, '
                f'"segmentation": {polygons[number % 100]}}}'
            )
        file.write("]}")


def _make_images(folder: Path, images: int) -> None:
    """Make an image folder with names for so many images."""
    made = make_dataset(folder / "made", n=1, width=64, height=64, photos=0, workers=1)
    picture = next(made.images.iterdir())
    (folder / "images").mkdir()
    for number in range(images):
        if number % _LINKS == 0:
            source = folder / f"{number}.jpg"
            shutil.copy(picture, source)
        os.link(source, folder / "images" / f"{number:012d}.jpg")


def make_coco(folder: Path, images: int, *, files: bool) -> None:
    """Make a dataset; without ``files`` only those images have a file that a plan tries."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "annotations.json", images)
    _make_images(folder, images if files else 1)
    if not files:
        source = folder / "images" / f"{0:012d}.jpg"
        for number in np.linspace(0, images - 1, 16).astype(int).tolist():
            path = folder / "images" / f"{number:012d}.jpg"
            if not path.exists():
                shutil.copy(source, path)


def make_shards(folder: Path, images: int) -> Path:
    """Make shards of so many images, whose records are one record."""
    made = make_dataset(folder / "made", n=1, width=64, height=64, photos=0, workers=1)
    write_shards(made.images, made.annotations, shards=folder / "one", workers=1)
    index = read_index(folder / "one")
    (model,) = index.shards
    arrays_path = folder / "one" / model.arrays_name
    arrays = load_arrays(arrays_path, model)
    arrays = replace(arrays, bits=np.fromfile(arrays_path, np.uint8, offset=arrays.bits))
    tar = (folder / "one" / model.name).read_bytes()
    shards = folder / "shards"
    shards.mkdir()
    infos = []
    for number in range(math.ceil(images / _SHARD_IMAGES)):
        first = number * _SHARD_IMAGES
        count = min(_SHARD_IMAGES, images - first)
        name = f"shard-{number:06d}.tar"
        head = {
            "name": name,
            "images": count,
            "annotations": count * len(arrays.labels),
            "bytes": len(tar),
            "xxh3_64": model.xxh3_64,
        }
        content = dump_arrays(head, _repeat_arrays(arrays, first, count))
        (shards / name).write_bytes(tar)
        (shards / name.replace(".tar", ".arrays")).write_bytes(content)
        infos.append(describe_shard(content)[1])
    write_index(shards, replace(index, shards=tuple(infos)))
    return shards


def _repeat_arrays(arrays: ShardArrays, first: int, count: int) -> ShardArrays:
    """Return arrays with the only image so many times, under ids from ``first`` on."""
    tables: dict[str, Any] = {}
    for name, table in vars(arrays).items():
        if name != "bits":
            tables[name] = np.concatenate([table] * count)
    mask_bytes = np.tile(np.diff(arrays.mask_ends), count)
    tables["mask_ends"] = np.append(0, np.cumsum(mask_bytes))
    tables["image_ids"] = np.arange(first, first + count)
    tables["bits"] = np.tile(arrays.bits, count)
    return ShardArrays(**tables)


def _check(folder: Path, images: int) -> Any:
    return check_dataset(folder / "images", folder / "annotations.json")


def _read(folder: Path, images: int) -> Any:
    return read_coco(folder / "annotations.json")


def _plan(folder: Path, images: int) -> Any:
    return plan_jobs(folder / "images", folder / "annotations.json", shards=folder / "plan")


def _plan_again(folder: Path, images: int) -> Any:
    return _plan(folder, images)


def _open(folder: Path, images: int) -> Any:
    """Read the tables of all shards."""
    return ShardDataset(folder / "shards")


def _read_index(folder: Path, images: int) -> ShardIndex:
    return read_index(folder / "shards")


def _make_sampler(images: int, batch_size: int) -> BatchSampler:
    sizes = np.full((images, 2), 64, np.int32)
    sizes[::3, 0] = 32
    return BatchSampler(images, batch_size, 0, sizes=sizes)


def _shuffle(folder: Path, images: int) -> Any:
    sampler = _make_sampler(images, _BATCH_SIZE)
    for _ in sampler:
        pass
    return sampler


def _resume(folder: Path, images: int) -> Any:
    """Half of an epoch was delivered with another batch size."""
    sampler = _make_sampler(images, _BATCH_SIZE)
    sampler.leave_out([_BATCH_SIZE // 2, images // _BATCH_SIZE])
    return sampler


def _read_records(folder: Path, images: int) -> Any:
    """An epoch of records, each compared with its checksum, in a random order."""
    dataset = ShardDataset(folder / "shards")
    for number in np.random.default_rng(0).permutation(images).tolist():
        dataset.record(number)
    return dataset


STEPS: dict[str, tuple[Callable[[Path, int], Any], str, tuple[int, ...]]] = {
    "check": (_check, "files", (1_000, 10_000)),
    "read_coco": (_read, "json", (10_000, 100_000)),
    "plan": (_plan, "json", (10_000, 100_000)),
    "plan again": (_plan_again, "json", (10_000, 100_000)),
    "read the index": (_read_index, "shards", (100_000, 1_000_000)),
    "open": (_open, "shards", (100_000, 1_000_000)),
    "shuffle": (_shuffle, "shards", (100_000, 1_000_000)),
    "resume": (_resume, "shards", (100_000, 1_000_000)),
    "records": (_read_records, "shards", (100_000, 1_000_000)),
}
"""Of each step what it does, the data that it needs, and the sizes that it is measured at."""


def _read_memory(name: str) -> int:
    """Return a line of this process's memory, in bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{name}:")[1].split()[0])


def _measure_here(step: str, folder: Path, images: int) -> dict[str, float]:
    """Run a step in this process, which is new."""
    run, _, _ = STEPS[step]
    gc.collect()
    # What the parent took at its peak is none of this process's.
    Path("/proc/self/clear_refs").write_text("5")
    before = _read_memory("VmRSS")
    began_s = process_time()
    result = run(folder, images)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = process_time() - began_s + children.ru_utime + children.ru_stime
    peak = _read_memory("VmHWM") - before
    gc.collect()
    left = _read_memory("VmRSS") - before
    del result
    return {"cpu_s": cpu_s, "peak_bytes": peak / images, "left_bytes": left / images}


def measure_step(step: str, folder: Path, images: int) -> dict[str, Any]:
    """Measure a step in a process of its own; its data lie in ``folder``."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, context) as pool:
        measured = pool.submit(_measure_here, step, folder, images).result()
    return {"step": step, "images": images, **measured}


def read_pss(process: int) -> dict[str, float]:
    """Return the memory of a process in MB: its own, and its part of what it shares with others.

    ``data_mb`` leaves out libraries, whose part grows when any other program on the machine ends.
    """
    total_kb = 0
    data_kb = 0
    is_library = False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            is_library = ".so" in words[-1] or "/bin/python" in words[-1]
        elif words[0] == "Pss:":
            total_kb += int(words[1])
            data_kb += 0 if is_library else int(words[1])
    return {"pss_mb": 1024 * total_kb / 1e6, "data_mb": 1024 * data_kb / 1e6}


def _load_here(folder: Path, images: int) -> list[dict[str, Any]]:
    """Load an epoch in this process; return the memory at shares of it, of each process."""
    loader = make_loader(
        ShardDataset(folder / "shards"), batch_size=_BATCH_SIZE, workers=_LOADER_WORKERS
    )
    marks = [max(1, math.ceil(share * len(loader))) for share in _EPOCH_SHARES]
    rows: list[dict[str, Any]] = []
    for batches, _ in enumerate(loader, start=1):
        if batches not in marks:
            continue
        share = _EPOCH_SHARES[marks.index(batches)]
        workers = sorted(child.pid for child in psutil.Process().children())
        names = ["training process", *(f"worker {number}" for number in range(len(workers)))]
        for name, process in zip(names, [os.getpid(), *workers], strict=True):
            rows.append({"images": images, "share": share, "process": name, **read_pss(process)})
    loader.close()
    return rows


def measure_loader(folder: Path, images: int) -> list[dict[str, Any]]:
    """Measure the memory of a loader and of its workers over an epoch, in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(_load_here, folder, images).result()


def tabulate_memory(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of a loader's memory: a row for each process, a column for each share."""
    lines: dict[tuple[int, str], dict[str, str]] = {}
    for row in rows:
        start = {"process": row["process"], "images": f"{row['images']:,}"}
        line = lines.setdefault((row["images"], row["process"]), start)
        text = f"{row['pss_mb']:.0f} ({row['data_mb']:.1f})"
        line[f"PSS at {row['share']:.0%}, MB (without libraries)"] = text
    return str(make_table(list(lines.values())))


def _prepare(kind: str, work: Path, images: int) -> Path:
    """Make the data of this kind, where they are not there, in another process."""
    folder = work / f"{kind}-{images}"
    if (folder / "made.txt").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        if kind == "shards":
            pool.submit(make_shards, folder, images).result()
        else:
            pool.submit(make_coco, folder, images, files=kind == "files").result()
    (folder / "made.txt").touch()
    return folder


def find_exponent(rows: Sequence[dict[str, Any]]) -> float:
    """Return the exponent of growth of the CPU time between the two largest sizes.

    Example:
        >>> find_exponent([{"images": 10, "cpu_s": 1}, {"images": 1000, "cpu_s": 100}])
        1.0
    """
    small, large = sorted(rows, key=lambda row: row["images"])[-2:]
    growth = math.log(large["images"] / small["images"])
    return math.log(max(large["cpu_s"], 1e-6) / max(small["cpu_s"], 1e-6)) / growth


def tabulate_runs(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of all steps, with the exponent at the largest size of each."""
    lines = []
    for row in rows:
        same = [other for other in rows if other["step"] == row["step"]]
        is_last = row["images"] == max(other["images"] for other in same)
        exponent = f"{find_exponent(same):.2f}" if is_last and len(same) > 1 else ""
        lines.append(
            {
                "step": row["step"],
                "images": f"{row['images']:,}",
                "CPU s": f"{row['cpu_s']:.2f}",
                "CPU us an image": f"{1e6 * row['cpu_s'] / row['images']:.1f}",
                "peak MB": f"{row['peak_bytes'] * row['images'] / 1e6:,.0f}",
                "peak B an image": f"{row['peak_bytes']:,.0f}",
                "B an image that stay": f"{row['left_bytes']:,.0f}",
                "exponent": exponent,
            }
        )
    return str(make_table(lines))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the steps that were asked for, and print a table."""
    parser = make_parser("scale", __doc__, builtin="scale")
    steps = [*STEPS, _LOADER]
    parser.add_argument("--steps", nargs="+", choices=steps, default=steps, metavar="STEP")
    parser.add_argument("--sizes", nargs="+", type=int, metavar="IMAGES", help="of each step")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    memory: list[dict[str, Any]] = []

    def measure() -> None:
        for step in options.steps:
            if step == _LOADER:
                kind = "shards"
                sizes = _LOADER_SIZES
            else:
                _, kind, sizes = STEPS[step]
            for images in sorted(options.sizes or sizes):
                folder = _prepare(kind, options.work, images)
                if step == "plan":
                    shutil.rmtree(folder / "plan", ignore_errors=True)
                if step == _LOADER:
                    memory.extend(measure_loader(folder, images))
                else:
                    rows.append(measure_step(step, folder, images))
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                content = {
                    "machine": asdict(describe_machine()),
                    "rows": rows,
                    "loader_memory": memory,
                }
                write_file(options.json, json.dumps(content, indent=1, default=str).encode())

    def tabulate() -> str:
        tables = [tabulate_runs(rows)] if rows else []
        if memory:
            tables.append(tabulate_memory(memory))
        return "\n\n".join(tables)

    return run_to_end(measure, tabulate)


if __name__ == "__main__":
    sys.exit(main())
