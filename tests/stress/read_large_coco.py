"""Make a JSON of COCO train2017's size and read it: seconds, peak memory, memory kept. Takes
minutes and 3 GB.

    python tests/stress/read_large_coco.py [--digits 2]

``--digits 17`` writes coordinates in full precision. Exits 1 beyond 60 s, beyond 3.5 GB at the
peak, and where what is kept is 100 MB more than the JSON.
"""

from __future__ import annotations

import argparse
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


def make_large_coco(path: Path, *, digits: int) -> None:
    """Write images with the fields of COCO's, and polygons of 8 to 40 points (4 to 20 in full
    precision).
    """
    rng = random.Random(0)
    points = (8, 40) if digits < 8 else (4, 20)
    polygons = []
    for _ in range(2000):
        x = rng.uniform(0, 500)
        polygons.append(
            json.dumps(
                [[round(rng.uniform(x, x + 100), digits) for _ in range(2 * rng.randint(*points))]]
            )
        )
    with open(path, "w") as file:
        file.write('{"info": {}, "images": [')
        for i in range(IMAGES):
            url = f"http://images.cocodataset.org/train2017/{i:012d}.jpg"
            image = {
                "license": 3,
                "file_name": f"{i:012d}.jpg",
                "coco_url": url,
                "height": 480,
                "width": 640,
            }
            image |= {"date_captured": "2013-11-14 11:18:45", "flickr_url": url, "id": i * 4 + 9}
            file.write((", " if i else "") + json.dumps(image))
        file.write('], "annotations": [')
        for n in range(OBJECTS):
            box = [round(rng.uniform(1, 300), 2) for _ in range(4)]
            file.write(
                f'{", " if n else ""}{{"segmentation": {rng.choice(polygons)}, "area": '
                f"{rng.uniform(10, 9999):.4f}, "
                f'"iscrowd": 0, "image_id": {rng.randrange(IMAGES) * 4 + 9}, "bbox": {box}, '
                f'"category_id": {rng.randint(1, CATEGORIES)}, "id": {n + 1}}}'
            )
        categories = [{"id": i, "name": f"category {i}"} for i in range(1, CATEGORIES + 1)]
        file.write(f'], "categories": {json.dumps(categories)}}}')


def main() -> int:
    """Run it in this process, whose memory is measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--digits", type=int, default=2, help="decimals of a coordinate (2; 17 is full precision)"
    )
    options = parser.parse_args()

    import psutil

    from colab_utils.data.coco import read_coco

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "instances.json"
        # Another process makes the file, because the memory that this takes must not count.
        if os.fork() == 0:
            make_large_coco(path, digits=options.digits)
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
