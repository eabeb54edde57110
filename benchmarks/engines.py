"""`write_shards` on Dask against processes of this machine: `python -m benchmarks.engines --images
DIR --annotations FILE --json FILE`.

The Python of the environment "engines" runs it, which `make test-engines` builds.

All write the same shards, in turns: two worker processes of this machine, and two of
`dask.distributed` with one thread each beside a scheduler, all in processes of their own; once as
Dask is installed, and once with its profiler off and its ticks a second apart. The images are
repeated, under names of their own, until they fill a few shards. The CPU time is that of all
processes, user and system. It begins when the workers wait for their first job: what a cluster
takes to start is a column of its own. So is what its heartbeats and its profiler would have taken
in the same seconds without a job, which grows where others work on the machine. The bytes of the
shards are compared before anything is reported.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import count, product
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any

import psutil

from benchmarks.command import Run, format_spread, make_parser, measure_in_turns, run_to_end
from colab_utils.errors import ColabUtilsError
from colab_utils.files import hash_file
from colab_utils.shards.index import read_index
from colab_utils.shards.source import SOURCE_NAME
from colab_utils.shards.write import write_shards
from colab_utils.show.table import make_table

__all__ = ["DASK", "LOCAL", "DaskCluster", "main", "repeat_images", "tabulate_runs"]

ROOT = Path(__file__).resolve().parents[1]
WORKERS = 2
# Seconds in which a cluster is watched that has nothing to do.
IDLE_S = 15
LOCAL = "processes of this machine"
DASK = "dask.distributed"
DASK_SLOW_CLOCKS = "dask.distributed, slow clocks"
# Settings of Dask, as environment variables, for what it does by the clock.
SLOW_CLOCKS = {
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "1s",
}


def repeat_images(images: Path, annotations: Path, target: Path, image_bytes: float) -> None:
    """Write a dataset of so many bytes: each image again and again, under another name each time.

    ``target`` gets the folder ``images`` and ``annotations.json``. The names of an image are hard
    links to one copy of its file.
    """
    coco = json.loads(annotations.read_text())
    objects: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in coco["images"]}
    for annotation in coco["annotations"]:
        objects[annotation["image_id"]].append(annotation)
    (target / "images").mkdir(parents=True)
    repeated: dict[str, Any] = {**coco, "images": [], "annotations": []}
    written_bytes = 0
    for turn in count():
        for image in coco["images"]:
            if written_bytes >= image_bytes:
                (target / "annotations.json").write_text(json.dumps(repeated))
                return
            first = target / "images" / f"0-{image['file_name']}"
            name = f"{turn}-{image['file_name']}"
            if turn == 0:
                shutil.copy(images / image["file_name"], first)
            else:
                os.link(first, target / "images" / name)
            written_bytes += first.stat().st_size
            image_id = len(repeated["images"]) + 1
            repeated["images"].append({**image, "id": image_id, "file_name": name})
            for annotation in objects[image["id"]]:
                annotation_id = len(repeated["annotations"]) + 1
                ids = {"id": annotation_id, "image_id": image_id}
                repeated["annotations"].append(
                    {
                        **annotation,
                        **ids,
                    }
                )


class DaskCluster:
    """A scheduler of Dask and its workers, each a process with one thread.

    Example:
        >>> cluster = DaskCluster(Path("runs"))  # doctest: +SKIP
    """

    def __init__(self, folder: Path, **environment: str) -> None:
        """Start the processes with these environment variables beside the usual ones; they leave
        their files in ``folder``.
        """
        self.environment = environment
        # The processes run in this folder, so that a relative path would lead elsewhere.
        self.folder = folder.resolve()
        self.scheduler_file = self.folder / "scheduler.json"
        self.processes: list[subprocess.Popen[bytes]] = []
        self._start("dask_scheduler", "--port", "0")
        while not self.scheduler_file.exists():
            if self.processes[0].poll() is not None:
                raise ColabUtilsError("The scheduler of Dask did not start.")
            sleep(0.1)
        for _ in range(WORKERS):
            self._start("dask_worker", "--nthreads", "1", "--no-nanny")

    def _start(self, module: str, *words: str) -> None:
        command = [
            sys.executable,
            "-m",
            f"distributed.cli.{module}",
            "--scheduler-file",
            str(self.scheduler_file),
            "--no-dashboard",
            *words,
        ]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **self.environment},
            stderr=subprocess.DEVNULL,
        )
        self.processes.append(process)

    def connect(self) -> Any:
        """Return a client, once all workers are there."""
        from distributed import Client

        open_client: Any = Client
        client = open_client(scheduler_file=str(self.scheduler_file), timeout=120)
        client.wait_for_workers(WORKERS, timeout=120)
        return client

    def close(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.kill()
            process.wait()


def read_cpu_s(processes: Sequence[int]) -> float:
    """Return the CPU time of processes and of their children that have ended, in seconds."""
    return sum(sum(psutil.Process(process).cpu_times()[:4]) for process in processes)


def write_here(data: Path, shards: Path, settings: dict[str, Any]) -> dict[str, float]:
    """Write shards by processes of this machine; return what they took."""
    return _write(data, shards, settings, [os.getpid()])


def write_on_dask(
    data: Path, shards: Path, settings: dict[str, Any], **environment: str
) -> dict[str, float]:
    """Write shards by a cluster of Dask; return what all its processes took."""
    cluster = DaskCluster(shards.parent, **environment)
    try:
        with cluster.connect() as client:
            engine = [process.pid for process in cluster.processes]
            start_cpu_s = read_cpu_s(engine)
            row = _write(
                data,
                shards,
                {**settings, "executor": client.get_executor()},
                [os.getpid(), *engine],
            )
            before_s = read_cpu_s(engine)
            sleep(IDLE_S)
            idle_share = (read_cpu_s(engine) - before_s) / IDLE_S
    finally:
        cluster.close()
    idle_cpu_s = idle_share * row["seconds"]
    return {**row, "start_cpu_s": start_cpu_s, "idle_cpu_s": idle_cpu_s}


def _write(
    data: Path, shards: Path, settings: dict[str, Any], processes: Sequence[int]
) -> dict[str, float]:
    before_s = [read_cpu_s([process]) for process in processes]
    began_s = perf_counter()
    write_shards(
        data / "images",
        data / "annotations.json",
        shards=shards,
        storage="keep",
        workers=WORKERS,
        **settings,
    )
    seconds = perf_counter() - began_s
    taken_s = [
        read_cpu_s([process]) - before for process, before in zip(processes, before_s, strict=True)
    ]
    names = ["caller_cpu_s", "scheduler_cpu_s", "first_worker_cpu_s", "second_worker_cpu_s"]
    parts = dict(zip(names, taken_s, strict=False))
    cluster = {"start_cpu_s": 0.0, "idle_cpu_s": 0.0}
    return {"cpu_s": sum(taken_s), "seconds": seconds, **cluster, **parts}


WAYS: dict[str, Callable[[Path, Path, dict[str, Any]], dict[str, float]]] = {
    LOCAL: write_here,
    DASK: write_on_dask,
    DASK_SLOW_CLOCKS: partial(write_on_dask, **SLOW_CLOCKS),
}

COLUMNS = {
    "cpu_s": "CPU s",
    "start_cpu_s": "CPU s of the cluster's start",
    "idle_cpu_s": "CPU s of the same time idle",
}


def hash_shards(folder: Path) -> dict[str, tuple[int, str]]:
    """Return size and checksum of each file; not of the note of when the data were changed."""
    return {
        str(path.relative_to(folder)): hash_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != SOURCE_NAME
    }


def _measure_here(way: str, data: Path, work: Path, settings: dict[str, Any]) -> dict[str, Any]:
    with TemporaryDirectory(dir=work) as folder:
        shards = Path(folder, "shards")
        row: dict[str, Any] = WAYS[way](data, shards, settings)
        full_bytes = settings["shard_mb"] * 0.9e6
        full = [shard for shard in read_index(shards).shards if shard.bytes >= full_bytes]
        return {**row, "full_shards": len(full), "files": hash_shards(shards)}


def measure_way(way: str, data: Path, work: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Write the shards once, in a new process, which has imported nothing of Dask before."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(_measure_here, way, data, work, settings).result()


def tabulate_runs(rows: Sequence[dict[str, Any]]) -> str:
    """Return medians [lowest-highest] of each way, and the ratio in each repeat.

    Raises:
        ColabUtilsError: the ways wrote different bytes.
    """
    if not rows:
        return "nothing was measured"
    for row in rows:
        if row["files"] != rows[0]["files"]:
            raise ColabUtilsError(f"{row['way']} wrote other bytes than {rows[0]['way']}.")
    lines = []
    for way in WAYS:
        runs = [row for row in rows if row["way"] == way]
        line = {"way": way}
        for name, title in COLUMNS.items():
            line[title] = format_spread([run[name] for run in runs]) if runs else ""
        lines.append(line)
    text = str(make_table(lines))
    text += f"\n\n{len(rows[0]['files'])} files with the same bytes, "
    text += f"{rows[0]['full_shards']} full shards."
    for way in (DASK, DASK_SLOW_CLOCKS):
        pairs = [
            (local, dask)
            for local, dask in product(rows, rows)
            if local["way"] == LOCAL and dask["way"] == way and local["repeat"] == dask["repeat"]
        ]
        if not pairs:
            continue
        ratios = [local["cpu_s"] / dask["cpu_s"] for local, dask in pairs]
        without = [local["cpu_s"] / (dask["cpu_s"] - dask["idle_cpu_s"]) for local, dask in pairs]
        text += f"\nCPU time of this machine's processes / of {way}: "
        text += f"{format_spread(ratios, '.3f')}; without what an idle cluster takes: "
        text += f"{format_spread(without, '.3f')}"
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all ways, and print one table."""
    parser = make_parser("engines", __doc__)
    parser.add_argument(
        "--mb",
        type=float,
        default=700,
        help="of images (%(default)s)",
    )
    parser.add_argument(
        "--shard-mb",
        type=float,
        default=128,
        help="of a shard (%(default)s)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="of each, in turns (%(default)s)",
    )
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    settings = {"shard_mb": options.shard_mb}

    def measure() -> None:
        options.work.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=options.work) as folder:
            data = Path(folder, "data")
            repeat_images(options.images[0], options.annotations[0], data, options.mb * 1e6)
            runs: list[Run] = [
                ({"way": way}, partial(measure_way, way, data, Path(folder), settings))
                for way in WAYS
            ]
            about = {"mb": options.mb, "shard_mb": options.shard_mb}
            measure_in_turns(
                runs,
                rows,
                repeats=options.repeats,
                about=about,
                path=options.json,
            )

    return run_to_end(measure, lambda: tabulate_runs(rows))


if __name__ == "__main__":
    sys.exit(main())
