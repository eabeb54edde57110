"""Make a JSON of COCO train2017's size and read it: seconds, peak memory, memory kept. Takes
minutes and 3 GB.

    python tests/stress/read_large_coco.py

Exits 1 beyond 60 s, beyond 3.5 GB at the
peak, and where what is kept is 100 MB more than the JSON.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from time import perf_counter

IMAGES = 118_000
OBJECTS = 860_000
CATEGORIES = 90
MAX_SECONDS = 60
# A Colab VM has 12.7 GB.
MAX_PEAK = 3.5e9


def make_large_coco(path: Path) -> None:
    """Write images with the fields of COCO's, and polygons of 8 to 40 points."""
    rng = random.Random(0)
    polygons = []
    for _ in range(2000):
        x = rng.uniform(0, 500)
        polygons.append([round(rng.uniform(x, x + 100), 2) for _ in range(2 * rng.randint(8, 40))])
    with open(path, "w") as file:
        file.write('{"info": {}, "images": [')
        for i in range(IMAGES):
            name = f"{i:012d}.jpg"
            file.write(
                f'{", " if i else ""}{{"license": 3, "file_name": "{name}", "height": 480, '
                f'"coco_url": "http://images.cocodataset.org/train2017/{name}", "width": 640, '
                f'"date_captured": "2013-11-14 11:18:45", "id": {i * 4 + 9}, '
                f'"flickr_url": "http://images.cocodataset.org/train2017/{name}"}}'
            )
        file.write('], "annotations": [')
        for n in range(OBJECTS):
            box = [round(rng.uniform(1, 300), 2) for _ in range(4)]
            file.write(
                f'{", " if n else ""}{{"segmentation": [{rng.choice(polygons)}], "area": '
                f"{rng.uniform(10, 9999):.4f}, "
                f'"iscrowd": 0, "image_id": {rng.randrange(IMAGES) * 4 + 9}, "bbox": {box}, '
                f'"category_id": {rng.randint(1, CATEGORIES)}, "id": {n + 1}}}'
            )
        categories = [{"id": i, "name": f"category {i}"} for i in range(1, CATEGORIES + 1)]
        file.write(f'], "categories": {json.dumps(categories)}}}')


def main() -> int:
    """Run it in this process, whose memory is measured."""
    import psutil

    from colab_utils.data.coco import read_coco

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "instances.json"
        # Another process makes the file, because the memory that this takes must not count.
        if os.fork() == 0:
            make_large_coco(path)
            os._exit(0)
        os.wait()
        before = psutil.Process().memory_info().rss
        # What the imports took at their peak is no part of it.
        Path("/proc/self/clear_refs").write_text("5")
        started = perf_counter()
        dataset = read_coco(path)
        seconds = perf_counter() - started
        gc.collect()
        left = psutil.Process().memory_info().rss - before
        status = Path("/proc/self/status").read_text()
        peak = 1024 * int(status.split("VmHWM:")[1].split()[0]) - before
        size = path.stat().st_size
    print(f"{dataset} in {size / 1e6:.0f} MB of JSON")
    print(f"{seconds:.1f} s, {peak / 1e6:.0f} MB at the peak, {left / 1e6:.0f} MB kept")
    return 0 if seconds < MAX_SECONDS and peak < MAX_PEAK and left < size + 1e8 else 1


if __name__ == "__main__":
    sys.exit(main())
