"""All that only a GPU can tell, by one command: `python -m benchmarks.gpu --json FILE`, or `make
gpu`.

It measures on data made by code: the step of torchvision's references (with AMP) and each change
of ours, for two models and several batches; the
same in float16 with a batch of 4, as a T4 trains; the memory of 300 objects an image; training from
shards, and by torchvision's references from files, each against training on one batch that lies
ready; and evaluation. The rows that take longest come last, and after them the compiled network.
What no longer fits into its minutes is left out, and its row says so. A row that fails is kept
with its error, and the others go on. The table goes into ``benchmarks/README.md``.
"""

from __future__ import annotations

import copy
import gc
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from benchmarks.command import Row, make_parser, run_to_end, write_between
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
from benchmarks.systems.base import collate
from benchmarks.systems.references import ReferenceDataset
from colab_utils.course.sample_data import BuiltinDataset, make_dataset
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import PackedBatch, collate_packed
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import make_loader
from colab_utils.loading.targets import pack_target
from colab_utils.machine import describe_machine
from colab_utils.shards.write import write_shards
from colab_utils.show.report import make_table
from colab_utils.training.evaluate import evaluate
from colab_utils.training.model import GPU_MODEL

__all__ = [
    "list_runs",
    "main",
    "make_batch",
    "make_pictures",
    "measure_real_data",
    "measure_references",
    "measure_rows",
    "tabulate_results",
]

MODELS = ("maskrcnn_resnet50_fpn", GPU_MODEL)
BATCH_SIZES = (2, 8, 16)
# A T4 takes 5 to 8 seconds for a step of more images.
LARGE_BATCH = 8
# Steps before the rate of a loop is measured, and those that are timed.
WARMUP_STEPS = 4
TIMED_STEPS = 30
# Characters of an error in the table.
SHOWN = 60
MARKS = "<!-- gpu: written by benchmarks.gpu -->", "<!-- end of gpu -->"


Run = tuple[Row, Callable[[], dict[str, float]]]
"""What names a measurement, and the measurement."""


def make_batch(size: int, *, objects: int, height: int = 480, width: int = 640) -> Batch:
    """Return images with so many square objects each, at places that differ."""
    samples = []
    chance = torch.Generator().manual_seed(0)
    for number in range(size):
        corners = torch.rand((objects, 2), generator=chance)
        corners = (corners * torch.tensor([width - 100, height - 100])).long()
        sides = torch.randint(16, 100, (objects, 1), generator=chance)
        boxes = torch.cat([corners, corners + sides], 1)
        drawn = torch.zeros(objects, height, width, dtype=torch.uint8)
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
        image = torch.randint(0, 255, (3, height, width), dtype=torch.uint8, generator=chance)
        samples.append(pack_target(image, target))
    packed = collate_packed(samples)
    return Batch(packed, packed.to_images("cpu"), packed.to_targets("cpu"))


@dataclass(frozen=True)
class Pictures:
    """The built-in dataset, as files and as shards."""

    files: BuiltinDataset
    shards: ShardDataset


def make_pictures(folder: Path, *, images: int) -> Pictures:
    """Make the built-in dataset and shards of it, where they are missing."""
    files = make_dataset(folder / "data", n=images)
    write_shards(files.images, files.annotations, shards=folder / "shards")
    return Pictures(files, ShardDataset(folder / "shards", contiguous_labels=True))


def measure_real_data(
    make_data: Callable[[], Pictures], name: str, *, batch_size: int, min_size: int, device: str
) -> dict[str, float]:
    """Return images per second of training from shards, and on one batch that lies ready."""
    dataset = make_data().shards
    model = make_model(name, num_classes=dataset.num_classes, min_size=min_size)
    step = make_step(model, device, CHANGES)
    with closing(
        make_loader(dataset, batch_size=batch_size, deliver="packed", drop_last=True)
    ) as loader:
        return _measure_rates(loader, lambda batch: step(Batch(batch, [], [])), device)


def measure_references(
    make_data: Callable[[], Pictures], name: str, *, batch_size: int, min_size: int, device: str
) -> dict[str, float]:
    """Return images per second of torchvision's references: their dataset and transforms in a
    ``DataLoader`` with two workers, their step; and on one batch that lies ready.
    """
    dataset = ReferenceDataset(make_data().files, resize=False)
    labels = [dataset[row][1]["labels"] for row in range(len(dataset))]
    # Torchvision's references leave out images without objects, and keep the ids of COCO.
    useful = [row for row, ids in enumerate(labels) if len(ids)]
    model = make_model(name, num_classes=1 + int(torch.cat(labels).max()), min_size=min_size)
    step = make_step(model, device, ())
    loader = DataLoader(
        Subset(dataset, useful),
        batch_size=batch_size,
        shuffle=True,
        num_workers=2,
        collate_fn=collate,
        persistent_workers=True,
        drop_last=True,
    )

    def train_batch(batch: tuple[list[Tensor], list[Any]]) -> None:
        images, targets = batch
        step(Batch(None, [image.float() / 255 for image in images], targets))

    return _measure_rates(loader, train_batch, device)


def _measure_rates(
    loader: Iterable[Any], step: Callable[[Any], object], device: str
) -> dict[str, float]:
    """Return the images per second of a loop, and of one on its first batch."""
    batches = (batch for _ in range(1000) for batch in loader)
    ready = next(batches)
    rates = []
    for source in (batches, iter([ready] * (WARMUP_STEPS + TIMED_STEPS))):
        for batch in islice(source, WARMUP_STEPS):
            step(batch)
        _finish(device)
        began_s = perf_counter()
        images = 0
        for batch in islice(source, TIMED_STEPS):
            step(batch)
            images += _count_images(batch)
        _finish(device)
        rates.append(images / (perf_counter() - began_s))
    return {"images_per_second": rates[0], "cached_images_per_second": rates[1]}


def _count_images(batch: Any) -> int:
    """Return the images of a packed batch, or of a pair of images and targets."""
    return len(batch) if isinstance(batch, PackedBatch) else len(batch[0])


def measure_evaluation(
    make_data: Callable[[], Pictures], name: str, *, min_size: int, device: str
) -> dict[str, float]:
    """Milliseconds an image of an evaluation, drawing of masks and scores included."""
    dataset = make_data().shards
    model = make_model(name, num_classes=dataset.num_classes, min_size=min_size)
    evaluate(model, dataset, device=device)
    began_s = perf_counter()
    evaluate(model, dataset, device=device)
    return {"evaluation_ms": 1000 * (perf_counter() - began_s) / len(dataset)}


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure_step(
    name: str,
    size: int,
    changes: Sequence[str],
    *,
    min_size: int,
    device: str,
    objects: int = 8,
    in_float16: bool = False,
) -> dict[str, float]:
    """Milliseconds of a step with these changes, where its losses are the references'."""
    model = make_model(name, num_classes=2, min_size=min_size)
    batch = make_batch(size, objects=objects)
    # It compares in float32, which takes more than the step itself.
    with suppress(torch.cuda.OutOfMemoryError):
        compare_losses(copy.deepcopy(model), [batch], device)
    half = patch("colab_utils.training.step.choose_precision", lambda device: torch.float16)
    with half if in_float16 else nullcontext():
        return time_steps(model, [batch], device, changes)


def list_runs(
    models: Sequence[str],
    sizes: Sequence[int],
    *,
    min_size: int,
    device: str,
    make_data: Callable[[], Pictures],
) -> list[Run]:
    """Return all measurements: what is quick and telling, then what needs data, then what takes
    long, and the compiled network last.
    """
    full = {"min_size": min_size, "device": device}

    def name_run(what: str, name: str, size: int, step: str, call: Callable[..., Any]) -> Run:
        return {"what": what, "model": name, "batch_size": size, "step": step}, call

    def add_step(name: str, size: int, number: int) -> Run:
        label = f"+ {CHANGES[number - 1]}" if number else REFERENCES
        call = partial(measure_step, name, size, CHANGES[:number], **full)
        return name_run("step", name, size, label, call)

    # The last and the first change are told in any case.
    ends = (len(CHANGES), 0)
    between = range(1, len(CHANGES))
    small = [size for size in sizes if size <= LARGE_BATCH]
    large = [size for size in sizes if size > LARGE_BATCH]
    runs = [add_step(name, size, number) for size in small for name in models for number in ends]
    for changes, label in ((CHANGES, "ours"), ((), REFERENCES)):
        half = partial(measure_step, models[-1], 4, changes, in_float16=True, **full)
        runs.append(name_run("float16, as a T4", models[-1], 4, label, half))
        crowded = partial(measure_step, models[0], 2, changes, objects=300, **full)
        runs.append(name_run("300 objects an image", models[0], 2, label, crowded))
    for name in models:
        train = partial(measure_real_data, make_data, name, batch_size=8, **full)
        runs.append(name_run("real data", name, 8, "ours", train))
        usual = partial(measure_references, make_data, name, batch_size=8, **full)
        runs.append(name_run("real data", name, 8, REFERENCES, usual))
        test = partial(measure_evaluation, make_data, name, **full)
        runs.append(name_run("evaluation", name, 8, "", test))
    runs += [
        add_step(name, size, number) for size in small for name in models for number in between
    ]
    for number in (*ends, *between):
        runs += [add_step(name, size, number) for size in large for name in models]
    for name in models:
        compiled = partial(measure_step, name, 8, (*CHANGES, COMPILED), **full)
        runs.append(name_run("step", name, 8, f"+ {COMPILED}", compiled))
    return runs


def measure_rows(runs: Sequence[Run], *, until_s: float) -> Iterator[Row]:
    """Measure one row after the other; what fails is kept with its error.

    A row is left out where the slowest one so far would not end before ``until_s``, of
    ``perf_counter``.
    """
    slowest_s = 0.0
    for names, run in runs:
        began_s = perf_counter()
        if began_s + slowest_s >= until_s:
            yield names | {"left_out": True}
            continue
        print(*names.values(), file=sys.stderr, flush=True)
        yield names | _measure_row(run)
        slowest_s = max(slowest_s, perf_counter() - began_s)
        # What the row held on the GPU. An error of the GPU itself comes here, too.
        gc.collect()
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


def _measure_row(run: Callable[[], dict[str, float]]) -> Row:
    """Return the figures of a row, or its error in one line."""
    try:
        return run()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        text = f"{type(error).__name__}: {lines[0]}"
        print(f"note: this row failed, the next one goes on: {text}", file=sys.stderr)
        return {"error": text}


def tabulate_results(rows: Sequence[Row]) -> str:
    """One table: what was measured, and how it stands beside the references or beside a cached
    batch.
    """
    table = []
    references = {
        (row["what"], row["model"], row["batch_size"]): row
        for row in rows
        if row["step"] == REFERENCES and "step_ms" in row
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
        if "left_out" in row:
            line["figure"] = "left out"
        elif "error" in row:
            line["figure"] = f"failed: {row['error'][:SHOWN]}"
        elif "step_ms" in row:
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
    return str(make_table(table))


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

    def tabulate(rows: Sequence[Row]) -> str:
        table = tabulate_results(rows)
        if options.device == "cuda":
            machine = describe_machine()
            head = f"{machine.gpu}, {machine.software}, {machine.cpu}."
            write_between(MARKS, f"{head}\n\n```text\n{table}\n```")
        return table

    return run_to_end(measure(options), options.json, tabulate)


def measure(options: Namespace) -> Iterator[Row]:
    """Yield what the minutes suffice for.

    Raises:
        ColabUtilsError: There is no GPU, or rows failed.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ColabUtilsError("expected a GPU, found none: run this on a machine that has one")
    until_s = perf_counter() + 60 * options.minutes
    runs = list_runs(
        options.models,
        options.batch_sizes,
        min_size=options.min_size,
        device=options.device,
        make_data=cache(partial(make_pictures, options.work, images=64)),
    )
    errors = []
    for row in measure_rows(runs, until_s=until_s):
        yield row
        errors += [row["error"]] if "error" in row else []
    if errors:
        raise ColabUtilsError(
            f"{len(errors)} of {len(runs)} rows failed, the first with {errors[0]}. The others are "
            f"in {options.json}."
        )


if __name__ == "__main__":
    sys.exit(main())
