"""`check_dataset` and `write_shards` of many files on a bad day, over those of older code.

    git archive COMMIT | tar x -C OLD
    python -m benchmarks.many_files --images DIR --annotations FILE --old OLD

Both codes do the same work, in processes of their own, in turns. The images are repeated under new
names until there are enough.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from colab_utils.show.table import make_table

__all__ = ["main", "repeat_images", "tabulate_times"]

NEW = Path(__file__).parents[1]
TASKS = ("check_dataset", "write_shards")
# What the other process runs: it prints seconds.
SCRIPT = """
import sys
from time import perf_counter
import colab_utils
from colab_utils.slow_drive import slow_down

task, profile, images, annotations, shards = sys.argv[1:]
slow_down(images, profile)
began_s = perf_counter()
if task == "check_dataset":
    report = colab_utils.check_dataset(images, annotations)
else:
    report = colab_utils.write_shards(images, annotations, shards=shards)
seconds = perf_counter() - began_s
print(report.images, seconds)
"""


def repeat_images(images: Path, annotations: Path, folder: Path, count: int) -> Path:
    """Make a dataset of so many images out of a smaller one; return its JSON."""
    (folder / "images").mkdir(parents=True)
    data = json.loads(annotations.read_text())
    repeated: list[dict[str, Any]] = []
    objects: list[dict[str, Any]] = []
    for number in range(count):
        image = data["images"][number % len(data["images"])]
        name = f"{number:06d}{Path(image['file_name']).suffix}"
        (folder / "images" / name).write_bytes((images / image["file_name"]).read_bytes())
        repeated.append({**image, "id": number, "file_name": name})
        for annotation in data["annotations"]:
            if annotation["image_id"] == image["id"]:
                objects.append({**annotation, "id": len(objects) + 1, "image_id": number})
    path = folder / "annotations.json"
    path.write_text(json.dumps({**data, "images": repeated, "annotations": objects}))
    return path


def time_task(code: Path, task: str, profile: str, folder: Path) -> float:
    """Return the seconds that a task takes in the code of a folder."""
    with TemporaryDirectory() as shards:
        places = [folder / "images", folder / "annotations.json", Path(shards) / "shards"]
        command = [sys.executable, "-c", SCRIPT, task, profile, *map(str, places)]
        environment = {**os.environ, "PYTHONPATH": str(code)}
        run = subprocess.run(
            command,
            cwd=code,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if run.returncode:
        raise RuntimeError(run.stderr)
    return float(run.stdout.split()[-1])


def tabulate_times(times: dict[tuple[str, str], list[float]]) -> str:
    """Return a table of medians with their spreads, and how many times the new code is faster."""
    rows = []
    for task in TASKS:
        row: dict[str, Any] = {"task": task}
        for code in ("old", "new"):
            values = times[task, code]
            spread = f"[{min(values):.1f}-{max(values):.1f}]"
            row[f"{code}, s"] = f"{median(values):.1f} {spread}"
        row["old / new"] = f"{median(times[task, 'old']) / median(times[task, 'new']):.1f}"
        rows.append(row)
    return str(make_table(rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.many_files",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--annotations", type=Path, required=True)
    parser.add_argument("--old", type=Path, required=True, help="a folder of older code")
    parser.add_argument("--profile", default="bad")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    times: dict[tuple[str, str], list[float]] = {}
    with TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        repeat_images(options.images, options.annotations, data, options.samples)
        codes = {"old": options.old, "new": NEW}
        for _, task, code in product(range(options.repeats), TASKS, codes):
            seconds = time_task(codes[code], task, options.profile, data)
            times.setdefault((task, code), []).append(seconds)
            print(f"{task}, {code} code: {seconds:.1f} s", file=sys.stderr, flush=True)
    print(tabulate_times(times))
    return 0


if __name__ == "__main__":
    sys.exit(main())
