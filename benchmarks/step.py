"""What each change brings to a training step: `python -m benchmarks.step --images DIR ...`.

It begins with the step of torchvision's references (``train_one_epoch`` in
``references/detection/engine.py``, with ``--amp`` on a GPU): float images and dense masks on the
CPU, each loss asked for. Then the product's own `TrainingStep` trains the same model, and what
`train` adds to it comes one after the other, changes that bring nothing too. Same weights, same
batches; before anything is timed the losses of both are compared. Without a GPU it runs small, on
the CPU; the JSON says on what.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.command import Run, format_spread, make_parser, measure_in_turns, run_to_end
from benchmarks.data import make_data
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import PackedBatch, collate_packed
from colab_utils.loading.dataset import CocoFolder
from colab_utils.loading.targets import pack_target
from colab_utils.show.table import make_table
from colab_utils.training import losses
from colab_utils.training.model import LIGHT_MODEL, assemble_mask_rcnn
from colab_utils.training.norms import fold_norms
from colab_utils.training.step import TrainingStep

__all__ = [
    "CHANGES",
    "Batch",
    "add_model_options",
    "compare_losses",
    "main",
    "make_step",
    "prepare_batches",
    "tabulate_runs",
    "time_steps",
]

DATA = ("kept", "objects_300")
REFERENCES = "torchvision's references"
CHANGES = ("TrainingStep, dense batches", "packed batches", "channels_last", "folded norms")
# This way takes a minute, and is tried on a GPU alone.
COMPILED = "compiled network"
BATCHES = 4
TIMED = 12
WARMUP = 4
# Each loss may differ by this share.
DIFFERENCE = 0.01


class Batch(NamedTuple):
    """A batch on the CPU: packed, and as the references' loader gives it."""

    packed: PackedBatch
    images: list[Tensor]
    targets: list[Any]


def prepare_batches(data: Any, *, batch_size: int) -> list[Batch]:
    """Batches of images with objects."""
    dataset = CocoFolder(data.images, data.annotations, contiguous_labels=True)
    useful = (
        sample
        for sample in map(dataset.__getitem__, range(len(dataset)))
        if len(sample[1]["labels"])
    )
    samples = list(islice(useful, BATCHES * batch_size))
    batches = []
    for first in range(0, len(samples), batch_size):
        packed = collate_packed(
            [pack_target(*sample) for sample in samples[first : first + batch_size]]
        )
        batches.append(Batch(packed, packed.to_images("cpu"), packed.to_targets("cpu")))
    return batches


def make_model(name: str, *, num_classes: int, min_size: int) -> nn.Module:
    """With frozen stages and norms, as from pretrained weights; the weights are random, and
    scaled.
    """
    torch.manual_seed(0)
    model = assemble_mask_rcnn(
        name,
        num_classes=num_classes,
        starts_from="imagenet" if name == LIGHT_MODEL else "coco",
        min_size=min_size,
        max_size=round(min_size * 5 / 3),
    )
    for key, norm in model.backbone.body.named_modules():
        # These are the last ones of residual blocks: 16 of them would double what they are given.
        if key.endswith("bn3"):
            norm.weight.fill_(0.2)
    return model


class ReferenceStep:
    """The step of torchvision's references: every loss is asked for, for the log."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self.model = model.to(device).train()
        self.device = device
        self.amp = device == "cuda"
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, weight_decay=1e-4)
        self.scaler = torch.amp.GradScaler(device, enabled=self.amp)

    def __call__(self, batch: Batch) -> Tensor:
        """Train on one batch; returns its loss."""
        with torch.autocast(self.device, torch.float16, enabled=self.amp):
            losses = self.model(*move_dense(batch, self.device))
            loss: Tensor = torch.stack([part.float() for part in losses.values()]).sum()
        if not np.isfinite(loss.item()):
            raise ColabUtilsError(
                f"expected a finite loss, found {loss.item()}: nothing can be timed"
            )
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        for part in losses.values():
            part.item()
        return loss.detach()


def move_dense(batch: Batch, device: str) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """A batch as torchvision's models take it, on the device."""
    targets = [
        {name: value.to(device) for name, value in target.items() if torch.is_tensor(value)}
        for target in batch.targets
    ]
    return [image.to(device) for image in batch.images], targets


def make_step(model: Any, device: str, changes: Sequence[str]) -> Callable[[Batch], Tensor]:
    """The references' step without `CHANGES`; with some of them, `TrainingStep`."""
    if not changes:
        return ReferenceStep(model, device)
    if "folded norms" in changes:
        fold_norms(model)
    if "channels_last" in changes:
        model.to(memory_format=torch.channels_last)
    parameters = [
        parameter for parameter in model.to(device).parameters() if parameter.requires_grad
    ]
    optimizer = torch.optim.SGD(
        parameters, lr=1e-4, momentum=0.9, weight_decay=1e-4, fused=device == "cuda" or None
    )
    step = TrainingStep(model, device, optimizer=optimizer)
    if COMPILED in changes:
        for part in (model.backbone, model.rpn.head):
            # This way uses CUDA graphs.
            part.compile(mode="reduce-overhead", dynamic=False)
    if "packed batches" in changes:
        return lambda batch: step(batch.packed.to(device))
    return lambda batch: step(*move_dense(batch, device))


def compare_losses(model: nn.Module, batches: Sequence[Batch], device: str) -> float:
    """The largest relative difference of any loss of any batch, with the same random numbers, in
    float32.

    Raises:
        ColabUtilsError: It is over 1 %.
    """
    worst = 0.0
    moved = copy.deepcopy(model).to(device).train()
    for batch in batches:
        # Two graphs in float32 are more than most GPUs hold.
        with torch.no_grad():
            torch.manual_seed(0)
            actual = losses.compute_losses(moved, batch.packed.to(device))
            torch.manual_seed(0)
            expected = moved(*move_dense(batch, device))
        differences = [
            abs(actual[name].item() / loss.item() - 1) for name, loss in expected.items() if loss
        ]
        # The maximum of numpy keeps a NaN, too.
        worst = float(np.max([worst, *differences]))
    if not worst <= DIFFERENCE:
        raise ColabUtilsError(
            f"expected losses within {DIFFERENCE:.0%} of torchvision's, found {worst:.1%}"
        )
    return worst


def time_steps(
    model: nn.Module, batches: Sequence[Batch], device: str, changes: Sequence[str]
) -> dict[str, float]:
    """Median milliseconds of a step; on a GPU also the most memory that steps took beyond what was
    there, MB.

    Both are infinite where memory runs out.
    """
    try:
        return _time_steps(model, batches, device, changes)
    except torch.cuda.OutOfMemoryError:
        return {"step_ms": math.inf, "memory_mb": math.inf}


def _time_steps(
    model: nn.Module, batches: Sequence[Batch], device: str, changes: Sequence[str]
) -> dict[str, float]:
    step = make_step(copy.deepcopy(model), device, changes)
    on_gpu = device == "cuda"
    finish: Callable[[], Any] = torch.cuda.synchronize if on_gpu else lambda: None
    order = cycle(batches)
    torch.manual_seed(0)
    for batch in islice(order, WARMUP):
        step(batch)
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    finish()
    times_ms = []
    for batch in islice(order, TIMED):
        began_s = perf_counter()
        step(batch)
        finish()
        times_ms.append((perf_counter() - began_s) * 1000)
    memory = {"memory_mb": (torch.cuda.max_memory_allocated() - before) / 1e6} if on_gpu else {}
    return {"step_ms": median(times_ms), **memory}


def tabulate_runs(rows: Sequence[dict[str, Any]]) -> str:
    """Medians [lowest-highest] of each row, over the row before and over the references in the same
    repeat.
    """
    table = []
    for name in dict.fromkeys(row["data"] for row in rows):
        ways = [*dict.fromkeys(row["step"] for row in rows if row["data"] == name)]
        runs_by_way = {
            way: [row for row in rows if (row["data"], row["step"]) == (name, way)] for way in ways
        }
        for before, way in zip([ways[0], *ways], ways, strict=False):
            runs = runs_by_way[way]
            result = {
                "data": name,
                "step": way,
                "ms a step": format_spread([run["step_ms"] for run in runs], ".0f"),
            }
            for label, rival in (("over the row before", before), ("over the references", ways[0])):
                pairs = zip(runs_by_way[rival], runs, strict=False)
                result[label] = format_spread(
                    [theirs["step_ms"] / ours["step_ms"] for theirs, ours in pairs]
                )
            if "memory_mb" in runs[0]:
                result["MB"] = f"{median(run['memory_mb'] for run in runs):.0f}"
            table.append(result)
    return str(make_table(table)) if table else "nothing was measured"


def add_model_options(parser: argparse.ArgumentParser, device: str) -> None:
    """Model, size and batch: the usual ones on a GPU, small ones on a CPU."""
    parser.add_argument(
        "--model", default="maskrcnn_resnet50_fpn" if device == "cuda" else LIGHT_MODEL
    )
    parser.add_argument("--min-size", type=int, default=800 if device == "cuda" else 320)
    parser.add_argument("--batch-size", type=int, default=8 if device == "cuda" else 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = make_parser("step", __doc__)
    add_model_options(parser, device)
    parser.add_argument("--repeats", type=int, default=3, help="of each, in turns (%(default)s)")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []

    def measure() -> None:
        runs: list[Run] = []
        differences = {}
        for name in DATA:
            data = make_data(name, options.work, options.images, options.annotations, samples=300)
            batches = prepare_batches(data, batch_size=options.batch_size)
            classes = 1 + max(
                int(target["labels"].max()) for batch in batches for target in batch.targets
            )
            model = make_model(options.model, num_classes=classes, min_size=options.min_size)
            differences[name] = compare_losses(model, batches, device)
            for number in range(len(CHANGES) + 1):
                run = partial(time_steps, model, batches, device, CHANGES[:number])
                runs.append(
                    (
                        {
                            "data": name,
                            "step": f"+ {CHANGES[number - 1]}" if number else REFERENCES,
                        },
                        run,
                    )
                )
        about = {
            "device": device,
            "model": options.model,
            "min_size": options.min_size,
            "batch_size": options.batch_size,
            "differences": differences,
        }
        measure_in_turns(runs, rows, repeats=options.repeats, about=about, path=options.json)

    return run_to_end(measure, lambda: tabulate_runs(rows))


if __name__ == "__main__":
    sys.exit(main())
