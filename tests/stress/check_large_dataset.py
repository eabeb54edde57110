"""Check 5,000 images of COCO's size: seconds, and the peak memory of all processes together.

    python tests/stress/check_large_dataset.py

The images of the built-in dataset are linked under new names, so that each is a file of its own.
Exits 1 beyond 60 s and beyond 500 MB.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from itertools import cycle
from pathlib import Path
from time import perf_counter

IMAGES = 5_000
MAX_SECONDS = 60
MAX_BYTES = 500e6


def multiply_dataset(images: Path, annotations: Path) -> None:
    """Link the images under new names until there are 5,000, each with its annotations."""
    coco = json.loads(annotations.read_text())
    rows: list[dict] = []
    objects: list[dict] = []
    for number, image in zip(range(1, IMAGES + 1), cycle(coco["images"])):
        name = f"{number:012d}-{image['file_name']}"
        os.link(images / image["file_name"], images / name)
        rows.append({**image, "id": number, "file_name": name})
        for annotation in coco["annotations"]:
            if annotation["image_id"] == image["id"]:
                objects.append({**annotation, "image_id": number, "id": len(objects) + 1})
    annotations.write_text(json.dumps({**coco, "images": rows, "annotations": objects}))


def main() -> int:
    """Run it in this process and those that it forks."""
    import psutil

    from colab_utils import check_dataset
    from colab_utils.course.sample_data import make_dataset
    from colab_utils.processes import list_pids

    with tempfile.TemporaryDirectory() as folder:
        made = make_dataset(folder, n=160)
        multiply_dataset(made.images, made.annotations)
        over = threading.Event()
        used = [0]

        def watch_memory() -> None:
            while not over.wait(0.2):
                total = 0
                for pid in list_pids():
                    try:
                        total += psutil.Process(pid).memory_full_info().pss
                    except psutil.Error:
                        continue
                used.append(total)

        thread = threading.Thread(target=watch_memory)
        thread.start()
        began_s = perf_counter()
        report = check_dataset(made.images, made.annotations)
        seconds = perf_counter() - began_s
        over.set()
        thread.join()
    print(
        f"{report.images:,} images, {report.annotations:,} annotations: {seconds:.1f} s, "
        f"{max(used) / 1e6:.0f} MB"
    )
    if report.images != IMAGES or seconds > MAX_SECONDS or max(used) > MAX_BYTES:
        print(
            f"error: expected at most {MAX_SECONDS} s and {MAX_BYTES / 1e6:.0f} MB", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
