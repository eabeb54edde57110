"""All that only a GPU can tell, by one command: `python -m benchmarks.gpu --json FILE`, or `make
gpu`.

It runs the tests that are skipped without a GPU, then measures on data made by code: the step of
torchvision's references (with AMP) and each change of ours, for two models and several batches; the
same in float16 with a batch of 4, as a T4 trains; the memory of 300 objects an image; training from
shards against training on one batch that lies ready; and evaluation. What no longer fits into its
minutes is left out, and named in the JSON. The table goes into ``benchmarks/README.md``.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import step as steps
from benchmarks.command import make_parser, run_to_end
from benchmarks.step import (
    CHANGES,
    COMPILED,
    REFERENCES,
    Batch,
    compare_losses,
    make_model,
    make_step,
    time_steps,
)
from colab_utils.errors import ColabUtilsError
from colab_utils.files import write_file
from colab_utils.loading.batch import collate_packed
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import make_loader
from colab_utils.loading.targets import pack_target
from colab_utils.machine import describe_machine
from colab_utils.sample_data import make_dataset
from colab_utils.shards.write import write_shards
from colab_utils.show.table import make_table
from colab_utils.training.evaluate import evaluate
from colab_utils.training.model import GPU_MODEL

__all__ = [
    "main",
    "make_batch",
    "make_shards",
    "measure_real_data",
    "tabulate_results",
    "write_table",
]

MODELS = ("maskrcnn_resnet50_fpn", GPU_MODEL)
BATCH_SIZES = (2, 8, 16)
MARKS = "<!-- gpu: written by benchmarks.gpu -->", "<!-- end of gpu -->"
README = Path(__file__).with_name("README.md")
TESTS = (
    "tests/training/test_on_gpu.py",
    "tests/training/test_losses.py",
    "tests/loading",
)


def run_tests() -> str:
    """The last line of pytest over the tests that want a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(command, cwd=README.parent.parent, capture_output=True, text=True)
    lines = (done.stdout.strip() or done.stderr.strip() or "no output").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return "; ".join([*failed, lines[-1]])


def make_batch(size: int, *, objects: int) -> Batch:
    """Return images of 640 x 480 pixels with so many square objects each, at places that differ."""
    samples = []
    chance = torch.Generator().manual_seed(0)
    for number in range(size):
        corners = torch.randint(0, 380, (objects, 2), generator=chance)
        sides = torch.randint(16, 100, (objects, 1), generator=chance)
        boxes = torch.cat([corners, corners + sides], 1)
        drawn = torch.zeros(objects, 480, 640, dtype=torch.uint8)
        for mask, (x0, y0, x1, y1) in zip(drawn, boxes.tolist(), strict=True):
            mask[y0:y1, x0:x1] = 1
        target = {
            "boxes": boxes.float(),
            "labels": torch.ones(objects, dtype=torch.int64),
            "masks": drawn,
            "image_id": number,
            "area": drawn.sum((1, 2)).float(),
            "iscrowd": torch.zeros(objects, dtype=torch.int64),
        }
        image = torch.randint(0, 255, (3, 480, 640), dtype=torch.uint8, generator=chance)
        samples.append(pack_target(image, target))
    packed = collate_packed(samples)
    return Batch(packed, packed.to_images("cpu"), packed.to_targets("cpu"))


def make_shards(folder: Path, *, images: int) -> ShardDataset:
    """Shards of the built-in dataset, made where they are missing."""
    made = make_dataset(folder / "data", n=images)
    write_shards(made.images, made.annotations, shards=folder / "shards")
    return ShardDataset(folder / "shards", contiguous_labels=True)


def measure_real_data(
    dataset: ShardDataset, name: str, *, batch_size: int, min_size: int, device: str
) -> dict[str, float]:
    """Images per second of training from shards, and on one batch of them that lies ready."""
    model = make_model(name, num_classes=dataset.num_classes, min_size=min_size)
    images = 0
    step = make_step(model, device, CHANGES)
    with closing(
        make_loader(dataset, batch_size=batch_size, deliver="packed", drop_last=True)
    ) as loader:
        batches = (batch for _ in range(1000) for batch in loader)
        ready = next(batches)
        rates = []
        for source in (batches, iter([ready] * 40)):
            for batch in islice(source, 4):
                step(steps.Batch(batch, [], []))
            _finish(device)
            began_s = perf_counter()
            images = 0
            for batch in islice(source, 30):
                step(steps.Batch(batch, [], []))
                images += len(batch)
            _finish(device)
            rates.append(images / (perf_counter() - began_s))
    return {"images_per_second": rates[0], "cached_images_per_second": rates[1]}


def measure_evaluation(
    dataset: ShardDataset, name: str, *, min_size: int, device: str
) -> dict[str, float]:
    """Milliseconds an image of an evaluation, drawing of masks and scores included."""
    model = make_model(name, num_classes=dataset.num_classes, min_size=min_size)
    evaluate(model, dataset, device=device)
    began_s = perf_counter()
    evaluate(model, dataset, device=device)
    return {"evaluation_ms": 1000 * (perf_counter() - began_s) / len(dataset)}


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def list_runs(
    models: Sequence[str],
    sizes: Sequence[int],
    *,
    min_size: int,
    device: str,
    dataset: ShardDataset,
) -> list[tuple[dict[str, Any], Callable[[], dict[str, float]]]]:
    """What names each measurement, and the measurement, the most telling first."""
    runs: list[tuple[dict[str, Any], Callable[[], dict[str, float]]]] = []
    full = {"min_size": min_size, "device": device}

    def add(
        what: str, name: str, size: int, call: Callable[[], dict[str, float]], step: str = ""
    ) -> None:
        runs.append(({"what": what, "model": name, "batch_size": size, "step": step}, call))

    def time(
        name: str, size: int, changes: Sequence[str], objects: int, half: bool
    ) -> dict[str, float]:
        model = make_model(name, num_classes=2, min_size=min_size)
        batch = make_batch(size, objects=objects)
        compare_losses(copy.deepcopy(model), [batch], device)
        with (
            patch("colab_utils.training.step.choose_precision", lambda device: torch.float16)
            if half
            else patch.dict({})
        ):
            return time_steps(model, [batch], device, changes)

    # the last and the first change are told in any case
    for number in (len(CHANGES), 0, *range(1, len(CHANGES))):
        for name in models:
            for size in sizes:
                label = f"+ {CHANGES[number - 1]}" if number else REFERENCES
                add(
                    "step", name, size, partial(time, name, size, CHANGES[:number], 8, False), label
                )
    for name in models:
        add(
            "step", name, 8, partial(time, name, 8, (*CHANGES, COMPILED), 8, False), f"+ {COMPILED}"
        )
    for changes, label in (((), REFERENCES), (CHANGES, "ours")):
        add(
            "300 objects an image",
            models[0],
            2,
            partial(time, models[0], 2, changes, 300, False),
            label,
        )
        add(
            "float16, as a T4", models[-1], 4, partial(time, models[-1], 4, changes, 8, True), label
        )
    for name in models:
        add("real data", name, 8, partial(measure_real_data, dataset, name, batch_size=8, **full))
        add("evaluation", name, 8, partial(measure_evaluation, dataset, name, **full))
    return runs


def tabulate_results(rows: Sequence[dict[str, Any]]) -> str:
    """One table: what was measured, and how it stands beside the references or beside a cached
    batch.
    """
    table = []
    references = {
        (row["what"], row["model"], row["batch_size"]): row
        for row in rows
        if row["step"] == REFERENCES
    }
    for row in rows:
        line = {
            "what": row["what"],
            "model": row["model"],
            "batch": row["batch_size"],
            "step": row["step"] or "ours",
        }
        line |= {"figure": "", "over the references": "", "MB": ""}
        usual = references.get((row["what"], row["model"], row["batch_size"]))
        if "step_ms" in row:
            line |= {"figure": f"{row['step_ms']:.1f} ms", "MB": f"{row.get('memory_mb', 0):,.0f}"}
            line["over the references"] = (
                f"{usual['step_ms'] / row['step_ms']:.2f}" if usual else ""
            )
        elif "evaluation_ms" in row:
            line["figure"] = f"{row['evaluation_ms']:.1f} ms an image"
        else:
            ratio = row["images_per_second"] / row["cached_images_per_second"]
            line["figure"] = (
                f"{row['images_per_second']:.1f} images/s, {ratio:.2f} of a cached batch"
            )
        table.append(line)
    return str(make_table(table)) if table else "nothing was measured"


def write_table(text: str, path: Path = README) -> None:
    """Put the table between its marks."""
    content = path.read_text(encoding="utf-8")
    between = re.compile(f"({re.escape(MARKS[0])}).*?({re.escape(MARKS[1])})", re.DOTALL)
    if not between.search(content):
        raise ColabUtilsError(
            f"expected the marks {MARKS[0]} and {MARKS[1]} in {path}, found none: put them back"
        )
    write_file(path, between.sub(lambda found: f"{found[1]}\n{text}\n{found[2]}", content).encode())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = make_parser("gpu", __doc__, builtin="gpu")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=BATCH_SIZES)
    parser.add_argument("--min-size", type=int, default=800, help="pixels (%(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=25, help="after which nothing new is begun (%(default)s)"
    )
    parser.add_argument(
        "--device", default="cuda", help="cpu only tries the command out (%(default)s)"
    )
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {
        "machine": asdict(describe_machine()),
        "tests": "",
        "left_out": [],
        "rows": [],
    }

    def measure() -> None:
        if options.device == "cuda" and not torch.cuda.is_available():
            raise ColabUtilsError("expected a GPU, found none: run this on a machine that has one")
        began_s = perf_counter()
        if options.device == "cuda":
            results["tests"] = run_tests()
            print(results["tests"], file=sys.stderr)
        dataset = make_shards(options.work, images=64)
        settings = {"min_size": options.min_size, "device": options.device, "dataset": dataset}
        for names, run in list_runs(options.models, options.batch_sizes, **settings):
            if perf_counter() - began_s > 60 * options.minutes:
                results["left_out"].append(names)
            else:
                print(*names.values(), file=sys.stderr, flush=True)
                results["rows"].append(names | run())
            write_file(options.json, json.dumps(results, indent=1, default=str).encode())
        if options.device == "cuda":
            machine = results["machine"]
            about = (
                f"{machine['gpu']}, {machine['software']}, {machine['cpu']}. Tests: "
                f"{results['tests']}"
            )
            write_table(f"{about}\n\n{tabulate_results(results['rows'])}")

    return run_to_end(measure, lambda: tabulate_results(results["rows"]))


if __name__ == "__main__":
    sys.exit(main())
