"""What each change brings to a training step: `python -m benchmarks.step --images DIR ...`.

It begins with the step of torchvision's references (``train_one_epoch`` in ``references/detection/engine.py``, with
``--amp`` on a GPU): float images and dense masks on the CPU, each loss asked for. Then one change after the other is
added, those that bring nothing too. Same weights, same batches; before anything is timed the losses of both are
compared. Without a GPU it runs small, on the CPU, with the changes that mean something there; the JSON says on what.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice, pairwise
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.command import Run, format_spread, make_parser, measure_in_turns, run_to_end
from benchmarks.data import make_data
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import PackedBatch, collate_packed, pack_target
from colab_utils.loading.dataset import CocoFolder
from colab_utils.show.table import make_table
from colab_utils.training.augment import choose_shapes, resize_all
from colab_utils.training.losses import compute_losses
from colab_utils.training.model import LIGHT_MODEL, assemble_mask_rcnn, choose_precision, fold_norms, keep_boxes_exact
from colab_utils.training.step import begin_momentum

__all__ = [
    "CHANGES",
    "Batch",
    "ChangedStep",
    "add_model_options",
    "compare_losses",
    "main",
    "prepare_batches",
    "tabulate_runs",
    "time_steps",
]

DATA = ("kept", "objects_300")
REFERENCES = "torchvision's references"
CHANGES = (
    "packed batches", "bfloat16, no scaler", "no .item()", "fused optimiser", "channels_last", "folded norms",
    "few padded shapes", "cuDNN's own choice", "transfer before the optimiser", "gradient clipping",
    "compiled backbone",
)  # fmt: skip
_ON_GPU_ONLY = {"bfloat16, no scaler", "cuDNN's own choice", "transfer before the optimiser", "compiled backbone"}
BATCHES, TIMED, WARMUP = 4, 12, 4
DIFFERENCE = 0.01  # of each loss


class Batch(NamedTuple):
    """A batch on the CPU: packed, and as the references' loader gives it."""

    packed: PackedBatch
    images: list[Tensor]
    targets: list[Any]


def prepare_batches(data: Any, *, batch_size: int) -> list[Batch]:
    """Batches of images with objects."""
    dataset = CocoFolder(data.images, data.annotations, contiguous_labels=True)
    useful = (sample for sample in map(dataset.__getitem__, range(len(dataset))) if len(sample[1]["labels"]))
    samples = list(islice(useful, BATCHES * batch_size))
    batches = []
    for first in range(0, len(samples), batch_size):
        packed = collate_packed([pack_target(*sample) for sample in samples[first : first + batch_size]])
        batches.append(Batch(packed, packed.to_images("cpu"), packed.to_targets("cpu")))
    return batches


def make_model(name: str, *, num_classes: int, min_size: int) -> nn.Module:
    """With frozen stages and norms, as from pretrained weights; the weights are random, and scaled."""
    torch.manual_seed(0)
    model = assemble_mask_rcnn(
        name, num_classes=num_classes, starts_from="imagenet" if name == LIGHT_MODEL else "coco", min_size=min_size,
        max_size=round(min_size * 5 / 3),
    )  # fmt: skip
    for key, norm in model.backbone.body.named_modules():
        if key.endswith("bn3"):  # the last one of a residual block: 16 of them would double what they are given
            norm.weight.fill_(0.2)
    return model


class ChangedStep:
    """The references' step, with some of `CHANGES`; called with a batch and with the one after it."""

    def __init__(self, model: nn.Module, device: str, changes: Sequence[str], shapes: Sequence[Any] = ()) -> None:
        self.device, self.changes, self.ahead = torch.device(device), set(changes), None
        if "folded norms" in changes:
            fold_norms(model)
        if "channels_last" in changes:
            model.backbone.to(memory_format=torch.channels_last)
        if "compiled backbone" in changes:
            model.backbone.compile()
        torch.backends.cudnn.benchmark = "cuDNN's own choice" in changes  # anew for each number of mask proposals
        self.shapes = shapes if "few padded shapes" in changes else ()
        self.model = model.to(self.device).train()
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(
            self.parameters, lr=1e-4, momentum=0.9, weight_decay=1e-4, fused="fused optimiser" in changes or None
        )
        self.precision = torch.float16 if self.device.type == "cuda" else torch.float32
        if "bfloat16, no scaler" in changes:
            self.precision = choose_precision(self.device)
            keep_boxes_exact(model)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == torch.float16)

    def __call__(self, batch: Batch, following: Batch) -> Tensor:
        """Train on ``batch``; returns its loss."""
        given = self.ahead or self._move(batch)
        with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
            if "packed batches" in self.changes:
                losses = compute_losses(self.model, given, shapes=self.shapes)  # type: ignore[arg-type]
            else:
                losses = self.model(*given)
            loss = torch.stack([part.float() for part in losses.values()]).sum()
        asks = "no .item()" not in self.changes
        if asks and not np.isfinite(loss.item()):
            raise ColabUtilsError(f"expected a finite loss, found {loss.item()}: nothing can be timed")
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.ahead = self._move(following) if "transfer before the optimiser" in self.changes else None
        if "gradient clipping" in self.changes:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, 10.0)
        if self.scaler.is_enabled():
            begin_momentum(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if asks:  # the references' log takes every loss
            [part.item() for part in losses.values()]
        return loss.detach()

    def _move(self, batch: Batch) -> Any:
        if "packed batches" in self.changes:
            return batch.packed.to(self.device)
        names = ("boxes", "labels", "masks", "area", "iscrowd")
        targets = [{name: target[name].to(self.device) for name in names} for target in batch.targets]
        return [image.to(self.device) for image in batch.images], targets


def compare_losses(model: nn.Module, batches: Sequence[Batch], device: str) -> float:
    """The largest relative difference of any loss of any batch, with the same proposals sampled, in float32.

    Raises:
        ColabUtilsError: It is over 1 %.
    """
    worst, moved = 0.0, copy.deepcopy(model).to(device).train()
    theirs, ours = (ChangedStep(moved, device, changes) for changes in ((), CHANGES[:1]))
    for batch in batches:
        with torch.no_grad():  # two graphs in float32 are more than most GPUs hold
            torch.manual_seed(0)
            expected = moved(*theirs._move(batch))
            torch.manual_seed(0)
            found = compute_losses(moved, ours._move(batch))
        differences = [abs(found[name].item() / loss.item() - 1) for name, loss in expected.items() if loss]
        worst = float(np.max([worst, *differences]))  # of a NaN too
    if not worst <= DIFFERENCE:
        raise ColabUtilsError(f"expected losses within {DIFFERENCE:.0%} of torchvision's, found {worst:.1%}")
    return worst


def time_steps(
    model: nn.Module, batches: Sequence[Batch], device: str, changes: Sequence[str], shapes: Sequence[Any]
) -> dict[str, float]:
    """Median milliseconds of a step; on a GPU also the most memory that steps took beyond what was there, MB.

    Both are infinite where memory runs out.
    """
    try:
        return _time_steps(model, batches, device, changes, shapes)
    except torch.cuda.OutOfMemoryError:
        return {"step_ms": math.inf, "memory_mb": math.inf}


def _time_steps(
    model: nn.Module, batches: Sequence[Batch], device: str, changes: Sequence[str], shapes: Sequence[Any]
) -> dict[str, float]:
    step, on_gpu = ChangedStep(copy.deepcopy(model), device, changes, shapes), device == "cuda"
    clock: Callable[[], Any] = torch.cuda.synchronize if on_gpu else int
    pairs = pairwise(cycle(batches))
    torch.manual_seed(0)
    for pair in islice(pairs, WARMUP):
        step(*pair)
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    clock()
    times_ms = []
    for pair in islice(pairs, TIMED):
        began_s = perf_counter()
        step(*pair)
        clock()
        times_ms.append((perf_counter() - began_s) * 1000)
    memory = {"memory_mb": (torch.cuda.max_memory_allocated() - before) / 1e6} if on_gpu else {}
    return {"step_ms": median(times_ms), **memory}


def tabulate_runs(rows: Sequence[dict[str, Any]]) -> str:
    """Medians [lowest-highest] of each row, over the row before and over the references in the same repeat."""
    table = []
    for name in dict.fromkeys(row["data"] for row in rows):
        ways = [*dict.fromkeys(row["step"] for row in rows if row["data"] == name)]
        of = {way: [row for row in rows if (row["data"], row["step"]) == (name, way)] for way in ways}
        for before, way in zip([ways[0], *ways], ways, strict=False):
            runs = of[way]
            found = {"data": name, "step": way, "ms a step": format_spread([run["step_ms"] for run in runs], ".0f")}
            for label, rival in (("over the row before", before), ("over the references", ways[0])):
                pairs = zip(of[rival], runs, strict=False)
                found[label] = format_spread([theirs["step_ms"] / ours["step_ms"] for theirs, ours in pairs])
            if "memory_mb" in runs[0]:
                found["MB"] = f"{median(run['memory_mb'] for run in runs):.0f}"
            table.append(found)
    return str(make_table(table)) if table else "nothing was measured"


def add_model_options(parser: argparse.ArgumentParser, device: str) -> None:
    """Model, size and batch: the usual ones on a GPU, small ones on a CPU."""
    parser.add_argument("--model", default="maskrcnn_resnet50_fpn" if device == "cuda" else LIGHT_MODEL)
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
    changes = [change for change in CHANGES if device == "cuda" or change not in _ON_GPU_ONLY]

    def measure() -> None:
        runs: list[Run] = []
        differences = {}
        for name in DATA:
            data = make_data(name, options.work, options.images, options.annotations, samples=300)
            batches = prepare_batches(data, batch_size=options.batch_size)
            classes = 1 + max(int(target["labels"].max()) for batch in batches for target in batch.targets)
            model = make_model(options.model, num_classes=classes, min_size=options.min_size)
            differences[name] = compare_losses(model, batches, device)
            sizes = resize_all(torch.cat([batch.packed.sizes for batch in batches]).numpy(), model.transform)
            every = range(0, len(sizes), options.batch_size)
            shapes = choose_shapes(sizes, [range(first, first + options.batch_size) for first in every])
            for number in range(len(changes) + 1):
                run = partial(time_steps, model, batches, device, changes[:number], shapes)
                runs.append(({"data": name, "step": f"+ {changes[number - 1]}" if number else REFERENCES}, run))
        about = {
            "device": device, "model": options.model, "min_size": options.min_size, "batch_size": options.batch_size,
            "differences": differences,
        }  # fmt: skip
        measure_in_turns(runs, rows, repeats=options.repeats, about=about, path=options.json)

    return run_to_end(measure, lambda: tabulate_runs(rows))


if __name__ == "__main__":
    sys.exit(main())
