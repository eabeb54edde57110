"""Memory of a loader over an index of 118,000 images: flat over ten epochs, and small in all.

    python -m tests.stress.load_large_index

Annotations of train2017's size (118,000 images, 7.3 objects each) behind small pictures, two worker
processes. It fails if a worker's own memory grows by more than 5 MB after its first epoch (Python
objects in the index would be copied by every touch), or if all processes together take more than
1.2 GB of PSS, which counts what they share once. A worker's PSS may rise once, by the share of
pages that the training process stops sharing when its garbage is first collected.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import psutil
from PIL import Image

from colab_utils import ShardDataset, make_loader
from colab_utils.files import open_store
from colab_utils.shards.arrays import describe_shard, dump_arrays, load_arrays
from colab_utils.shards.index import read_index, write_index
from tests.coco_files import CocoFiles

EPOCHS = 10
IMAGES = 500
COPIES = 236
OBJECTS = 7.3
MOST_GROWTH_MB = 5
MOST_MB = 1200


def make_shards(folder: Path) -> Path:
    """One shard of 500 small images, and 236 more whose tars are hard links to its own."""
    data = CocoFiles(folder)
    rng = np.random.default_rng(0)
    for number in range(1, IMAGES + 1):
        picture = Image.fromarray(rng.integers(0, 256, (32, 48, 3), np.uint8))
        data.add_image(picture, f"{number}.jpg")
        for _ in range(int(OBJECTS + rng.random())):
            data.add_object(number, [4 + int(rng.integers(20)), 4 + int(rng.integers(10)), 12, 9])
    data.write()
    index = read_index(data.shards)
    shards = []
    [first] = index.shards
    path = data.shards / first.arrays_name
    head = asdict(index) | asdict(first)
    arrays = load_arrays(open_store(data.shards), first)
    arrays["bits"] = np.fromfile(path, np.uint8, offset=arrays["bits"])
    for n in range(COPIES):
        name = f"shard-{n + 1:06d}.tar"
        os.link(data.shards / first.name, data.shards / name)
        content = dump_arrays(head | {"name": name}, arrays)
        shards += describe_shard(content).shards
        (data.shards / shards[-1].arrays_name).write_bytes(content)
    write_index(data.shards, replace(index, shards=tuple(shards)))
    return data.shards


def measure_mb(process: psutil.Process, *kinds: str) -> float:
    """Return the memory of a process by the kernel's names."""
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split(":")[0]: int(line.split()[1]) / 1000 for line in lines}
    return sum(sizes[kind] for kind in kinds)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        dataset = ShardDataset(make_shards(Path(folder)))
        loader = make_loader(dataset, batch_size=8, workers=2, deliver="packed")
        workers: list[float] = []
        for epoch in range(EPOCHS):
            images = sum(len(batch) for batch in loader)
            children = psutil.Process().children()
            workers.append(
                max(measure_mb(child, "Private_Clean", "Private_Dirty") for child in children)
            )
            # What processes share counts once.
            total = sum(measure_mb(process, "Pss") for process in (psutil.Process(), *children))
            print(
                f"epoch {epoch}: {images:,} images; the larger worker: {workers[-1]:.1f} MB its "
                f"own; PSS of all {len(children) + 1} processes {total:.0f} MB",
                flush=True,
            )
        loader.close()
    growth = max(workers[1:]) - workers[0]
    print(
        f"growth of the larger worker after its first epoch: {growth:.1f} MB (at most "
        f"{MOST_GROWTH_MB})"
    )
    print(f"PSS in all: {total:.0f} MB (at most {MOST_MB})")
    return int(growth > MOST_GROWTH_MB or total > MOST_MB)


if __name__ == "__main__":
    sys.exit(main())
