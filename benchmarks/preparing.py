"""Preprocess and copy against bare calls, and the planned seconds: `python -m benchmarks.preparing
--images DIR ...`.

Preprocess is compared with decoding, resizing and encoding alone, on as many processes: of the
images (Pillow), and of images and masks (pycocotools, and torch's nearest neighbour, as
torchvision's references resize them). From a mounted Drive (FUSE) the bare calls read a file at a
time in each process. The copy from such a mount is compared with four streams that read the same
files from start to end and keep nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from pycocotools import mask as coco_mask

from benchmarks.command import Run, format_spread, make_parser, measure_in_turns, run_to_end
from benchmarks.data import make_data
from colab_utils.data.coco import CocoDataset, read_coco
from colab_utils.errors import ColabUtilsError
from colab_utils.machine import count_cores
from colab_utils.shards.copy import COPY_STREAMS, PIECE_BYTES, copy_shards
from colab_utils.shards.index import read_index
from colab_utils.shards.plan import plan_shards
from colab_utils.shards.records import read_image
from colab_utils.shards.stored_images import Storage, StoredImage, store_image
from colab_utils.shards.write import write_shards
from colab_utils.show.table import make_table
from colab_utils.slow_drive import DRIVE_PROFILES

__all__ = ["main"]

# So many images are copied, about.
COPIED = 6000
SIZES: dict[Storage, dict[str, Any]] = {
    "keep": {},
    "shrink": {"min_size": 400, "max_size": 667},
    "pixels": {},
}


def make_bare(
    images: Path, dataset: CocoDataset, recipe: dict[str, Any], processes: int, *, masks: bool
) -> float:
    """Seconds of reading, decoding, resizing and encoding every image, or also its masks, each
    process with its share.
    """
    shares = [range(first, len(dataset), processes) for first in range(processes)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        # After this line all processes have started.
        list(pool.map(int, range(processes)))
        began_s = perf_counter()
        list(pool.map(partial(_store_all, images, dataset, recipe, masks), shares))
        return perf_counter() - began_s


def _store_all(
    images: Path, dataset: CocoDataset, recipe: dict[str, Any], masks: bool, share: Sequence[int]
) -> None:
    torch.set_num_threads(1)
    settings = {name: recipe[name] for name in ("min_size", "max_size", "storage")}
    for i in share:
        stored = store_image(
            read_image(images, dataset, i), tuple(dataset.sizes[i].tolist()), **settings
        )
        for annotation in dataset.annotations(i) if masks else ():
            _store_mask(annotation["segmentation"], stored)


def _store_mask(segmentation: Any, stored: StoredImage) -> None:
    drawn = coco_mask.frPyObjects(segmentation, *stored.original)
    dense = coco_mask.decode(coco_mask.merge(drawn) if isinstance(drawn, list) else drawn)
    if dense.shape != stored.size:
        resized = torch.nn.functional.interpolate(
            torch.from_numpy(dense)[None, None].float(), stored.size
        )
        dense = np.asfortranarray(resized[0, 0].byte().numpy())
    coco_mask.encode(dense)


def read_bare(shards: Path) -> float:
    """Seconds in which four streams read every file from start to end."""
    began_s = perf_counter()
    with ThreadPoolExecutor(COPY_STREAMS) as pool:
        list(pool.map(_read_through, [shards / name for name, _, _ in read_index(shards).files()]))
    return perf_counter() - began_s


def _read_through(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    while os.read(descriptor, PIECE_BYTES):
        pass
    os.close(descriptor)


def time_preprocess(data: Any, storage: Storage, workers: int, folder: Path) -> dict[str, float]:
    """The plan's seconds, those of `write_shards`, and those of the bare calls."""
    # Each process gets several shards, as in a dataset that is worth preprocessing.
    settings = {"storage": storage, "workers": workers, **SIZES[storage]}
    plan = plan_shards(data.images, data.annotations, **settings)
    made = write_shards(
        data.images, data.annotations, shards=folder / "shards", shard_mb=8, **settings
    )
    recipe = read_index(folder / "shards").recipe
    dataset = read_coco(data.annotations)
    return {
        "planned": plan.write_s,
        "made": made.seconds,
        "bare": make_bare(Path(data.images), dataset, recipe, workers, masks=False),
        "bare with masks": make_bare(Path(data.images), dataset, recipe, workers, masks=True),
        "planned bytes": plan.bytes,
        "bytes": made.bytes,
    }


def time_copy(shards: Path, profile: str, folder: Path) -> dict[str, float]:
    """Time `copy_shards` from a mount, and bare reads on another mount of the same folder."""
    # A mount needs libfuse.
    from tests.drive_mount import mount_drive

    times = {}
    for way, run in (("bare", read_bare), ("copy", partial(copy_shards, target=folder / "ssd"))):
        with mount_drive(shards, folder / way, profile=profile) as mount:
            began_s = perf_counter()
            run(mount.folder)
            times[way] = perf_counter() - began_s
    return times


def time_preprocess_from_drive(
    data: Any, profile: str, workers: int, folder: Path
) -> dict[str, float]:
    """Seconds of `write_shards` from images on a mount, and of the bare calls on another mount of
    the same folder.
    """
    # A mount needs libfuse.
    from tests.drive_mount import mount_drive

    settings: dict[str, Any] = {
        "shards": folder / "shards",
        "storage": "keep",
        "workers": workers,
        "shard_mb": 8,
    }
    with mount_drive(data.images, folder / "made", profile=profile) as mount:
        made = write_shards(mount.folder, data.annotations, **settings)
    recipe = read_index(folder / "shards").recipe
    dataset = read_coco(data.annotations)
    with mount_drive(data.images, folder / "bare", profile=profile) as mount:
        bare_s = make_bare(mount.folder, dataset, recipe, workers, masks=False)
    return {"made": made.seconds, "bare": bare_s}


def _run_in_folder(work: Path, run: Callable[[Path], dict[str, float]]) -> dict[str, float]:
    with TemporaryDirectory(dir=work) as folder:
        return run(Path(folder))


def tabulate_runs(rows: Sequence[dict[str, Any]]) -> str:
    """Medians [lowest-highest]: for preprocess and copy, each as a ratio to the bare calls of the
    same repeat.
    """
    table: dict[str, list[dict[str, Any]]] = {"making": [], "reading": [], "copying": []}
    for name in dict.fromkeys(row["name"] for row in rows):
        runs = [row for row in rows if row["name"] == name]
        if "planned" in runs[0]:
            table["making"].append(
                {
                    "preprocess": name,
                    "made in, s": format_spread([run["made"] for run in runs]),
                    "planned / made": format_spread([run["planned"] / run["made"] for run in runs]),
                    "planned / made, bytes": format_spread(
                        [run["planned bytes"] / run["bytes"] for run in runs]
                    ),
                    "made / bare calls": format_spread([run["made"] / run["bare"] for run in runs]),
                    "made / bare calls with masks": format_spread(
                        [run["made"] / run["bare with masks"] for run in runs]
                    ),
                }
            )
        elif "made" in runs[0]:
            table["reading"].append(
                {
                    "preprocess from": name,
                    "made in, s": format_spread([run["made"] for run in runs]),
                    "bare calls / made": format_spread([run["bare"] / run["made"] for run in runs]),
                }
            )
        else:
            table["copying"].append(
                {
                    "copy from": name,
                    "copied in, s": format_spread([run["copy"] for run in runs]),
                    "bare reads / copy": format_spread([run["bare"] / run["copy"] for run in runs]),
                }
            )
    return (
        "\n\n".join(str(make_table(part)) for part in table.values() if part)
        or "nothing was measured"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = make_parser("preparing", __doc__)
    parser.add_argument("--samples", type=int, default=1200, help="images, about (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of each, in turns (%(default)s)")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []

    def measure() -> None:
        from tests.drive_mount import can_mount

        if reason := can_mount():
            raise ColabUtilsError(
                f"expected that a Drive can be mounted here, found {reason}: run make fuse as root"
            )
        data = make_data(
            "kept", options.work, options.images, options.annotations, samples=options.samples
        )
        copied = make_data(
            "kept", options.work / "copied", options.images, options.annotations, samples=COPIED
        )
        shards = options.work / "preparing"
        shutil.rmtree(shards, ignore_errors=True)
        write_shards(copied.images, copied.annotations, shards=shards, shard_mb=32, storage="keep")
        cores = sorted({1, count_cores()}, reverse=True)
        things = {
            f"{storage}, {workers} processes": partial(time_preprocess, data, storage, workers)
            for storage, workers in product(SIZES, cores)
        }
        things |= {
            f"Drive, typical, {workers} processes": partial(
                time_preprocess_from_drive, data, "typical", workers
            )
            for workers in cores
        }
        things |= {f"Drive, {name}": partial(time_copy, shards, name) for name in DRIVE_PROFILES}
        runs: list[Run] = [
            ({"name": name}, partial(_run_in_folder, options.work, run))
            for name, run in things.items()
        ]
        measure_in_turns(
            runs,
            rows,
            repeats=options.repeats,
            about={"samples": options.samples},
            path=options.json,
        )

    return run_to_end(measure, lambda: tabulate_runs(rows))


if __name__ == "__main__":
    sys.exit(main())
