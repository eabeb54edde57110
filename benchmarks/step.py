"""The step of torchvision's references, and ours with one change after the other.

The references' step (``train_one_epoch`` in ``references/detection/engine.py``, with ``--amp`` on a
GPU) takes float images and dense masks, and asks for each loss. Then the product's own
`TrainingStep` trains the same model, and what `train` adds to it comes one after the other. The
weights and the batches are the same, and the losses of both are compared before anything is timed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import PackedBatch
from colab_utils.training import losses
from colab_utils.training.layers import fold_norms
from colab_utils.training.model import LIGHT_MODEL, assemble_mask_rcnn
from colab_utils.training.step import TrainingStep

__all__ = [
    "CHANGES",
    "COMPILED",
    "REFERENCES",
    "Batch",
    "compare_losses",
    "make_model",
    "make_step",
    "time_steps",
]

REFERENCES = "torchvision's references"
CHANGES = ("TrainingStep, dense batches", "packed batches", "channels_last", "folded norms")
# This way takes a minute, and is tried on a GPU alone.
COMPILED = "compiled network"
TIMED = 12
WARMUP = 4
# Each loss may differ by this share.
DIFFERENCE = 0.01


class Batch(NamedTuple):
    """A batch on the CPU: packed, and as the references' loader gives it."""

    packed: PackedBatch
    images: list[Tensor]
    targets: list[Any]


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
