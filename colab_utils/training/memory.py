"""The batch size and the memory reductions of a GPU, found before the first step by training the heaviest batch once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import dropwhile
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision.models.detection import MaskRCNN

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import PackedBatch, PackedSample, collate_packed
from colab_utils.runtime import format_bytes
from colab_utils.training.model import LIGHT_MODEL
from colab_utils.training.step import MOST_PARTS, TrainingStep, free_memory

__all__ = ["MemoryPlan", "MemoryProbe", "checkpoint_activations", "find_memory_probe", "plan_memory"]

_MARGIN = 0.9  # of the memory: proposals differ from step to step, and gaps between allocations are lost
_BATCH_SIZES = (16, 8, 4, 2, 1)


class MemoryProbe(Protocol):
    """Measures a device's memory."""

    def measure_limit(self) -> int:
        """Bytes that this process may have in all, what it holds now included."""

    def measure_peak(self, call: Callable[[], object]) -> int:
        """The most bytes that this process held at once while ``call`` ran."""


class _CudaProbe:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def measure_limit(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0] + torch.cuda.memory_reserved(self._device)

    def measure_peak(self, call: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        call()
        return torch.cuda.max_memory_allocated(self._device)


def find_memory_probe(device: torch.device) -> MemoryProbe | None:
    """The memory probe of a GPU; None on a CPU, whose memory no batch of a detection model fills.

    Example:
        >>> find_memory_probe(torch.device("cpu")) is None
        True
    """
    return _CudaProbe(device) if device.type == "cuda" else None


@dataclass(frozen=True)
class MemoryPlan:
    """How the batches of a run fit into a GPU's memory."""

    batch_size: int
    """Images of this process in a batch."""
    parts: int
    """Parts in which each batch is trained."""
    checkpointing: bool
    """Whether the backbone is run again in the backward pass."""
    peak_bytes: int
    """What the heaviest batch took."""
    limit_bytes: int
    """What this process may have."""

    def __str__(self) -> str:
        reductions = f", trained in {self.parts} parts" if self.parts > 1 else ""
        reductions += ", the backbone run again in the backward pass" if self.checkpointing else ""
        return (
            f"the heaviest batch ({self.batch_size} images{reductions}) takes {format_bytes(self.peak_bytes)} of "
            f"{format_bytes(self.limit_bytes)}"
        )


def plan_memory(
    step: TrainingStep,
    probe: MemoryProbe,
    *,
    read: Callable[[int], PackedSample],
    sizes: NDArray[np.integer],
    counts: NDArray[np.integer],
    batch_size: int | None,
    reserve: int = 0,
) -> MemoryPlan:
    """Find what makes every batch of a dataset fit: the heaviest batch is trained, and forgotten.

    Without a ``batch_size``, smaller and smaller ones are tried; a given one is halved into parts. If that is not
    enough, activations of the backbone are computed again in the backward pass (activation checkpointing). Weights,
    statistics and random states are left as they were. No object is ever left out.

    Args:
        step: With its model on the device.
        probe: Of the device.
        read: Gives the packed sample of each of I images.
        sizes: int [I, 2]: height and width of each image as the model sees it, pixels.
        counts: int [I]: objects of each image.
        batch_size: Images of this process in each batch; None chooses the largest of 16, 8, 4, 2 and 1 that fits.
        reserve: Bytes that will be needed besides the steps.

    Raises:
        ColabUtilsError: The heaviest batch does not fit; the message names what would free memory.
    """
    heaviest = _find_heaviest(sizes, counts)
    if batch_size is None:
        tries = [(size, 1) for size in _BATCH_SIZES if size <= max(1, len(heaviest))]
    else:
        tries = [(batch_size, parts) for parts in (1, 2, 4, MOST_PARTS) if parts <= max(1, batch_size)]
    limit = probe.measure_limit() - reserve - _count_optimizer_bytes(step)
    with _leave_no_trace(step):
        peak = None
        for number, (images, parts) in enumerate([*tries, tries[-1]]):
            step.parts, checkpointing = parts, number == len(tries)
            if checkpointing:
                checkpoint_activations(step.model)
            batch = collate_packed([read(int(i)) for i in heaviest[:images]]).to(step.device)
            peak = _try_batch(step, probe, batch)
            fits_barely = checkpointing and peak is not None and peak < limit
            if peak is not None and (peak < _MARGIN * limit or fits_barely):
                return MemoryPlan(images, parts, checkpointing, peak, limit)
    raise ColabUtilsError(
        f"expected images that fit into the GPU's memory one by one, found that an image with {int(counts.max()):,} "
        f"objects does not ({format_bytes(limit)} are free), with activation checkpointing, too. Free memory: min_size "
        f"at 0.8 of its size takes about two thirds of the activations; model={LIGHT_MODEL!r} a tenth; frozen stages "
        "of the backbone (requires_grad_(False)) 7 to 20 % less; half of the proposals up to 20 % less, where images "
        "hold hundreds of objects; or end the other process that nvidia-smi lists."
    )


def _find_heaviest(sizes: NDArray[np.integer], counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """Images in an order whose first B are the heaviest batch of B: the largest one, to which the others are padded,
    then those with the most objects, wide ones to a wide one.
    """
    areas = (-(-sizes.astype(np.int64) // 32) * 32).prod(1)
    largest = int(np.lexsort((counts, areas))[-1])
    is_wide = sizes[:, 1] >= sizes[:, 0]
    order = np.lexsort((areas, counts, is_wide == is_wide[largest]))[::-1]
    return np.array([largest, *order[order != largest]], np.int64)


def checkpoint_activations(model: nn.Module) -> None:
    """Run the trained stages of the backbone again in the backward pass, in place of keeping their activations."""
    body: Any = model.backbone.body if isinstance(model, MaskRCNN) else model
    stages = [stage for stage in body.children() if any(True for _ in stage.parameters())]
    # up to the first stage that trains nothing needs gradients
    for stage in dropwhile(lambda stage: not any(p.requires_grad for p in stage.parameters()), stages):
        vars(stage)["forward"] = partial(checkpoint, stage.forward, use_reentrant=False, preserve_rng_state=False)
        for norm in stage.modules():
            if isinstance(norm, nn.BatchNorm2d) and norm.momentum:
                norm.momentum = 1 - math.sqrt(1 - norm.momentum)  # it sees each batch twice now


def _try_batch(step: TrainingStep, probe: MemoryProbe, batch: PackedBatch) -> int | None:
    """Peak bytes of the gradients of a batch, at the largest size of its images; None where memory runs out."""
    transform: Any = step.model.transform
    shorter_sides, transform.min_size = transform.min_size, (max(transform.min_size),)
    fits: list[bool] = []
    try:
        peak = probe.measure_peak(lambda: fits.append(step.add_gradients(batch, synchronize=False) is not None))
    finally:
        transform.min_size = shorter_sides
        free_memory(step)
    return peak if fits[0] else None


def _count_optimizer_bytes(step: TrainingStep) -> int:
    """Bytes that the optimiser's state will take, where it has none yet."""
    copies = 2 if isinstance(step.optimizer, torch.optim.AdamW) else 1
    parameters = [p for group in step.optimizer.param_groups for p in group["params"]]
    return copies * sum(p.nbytes for p in parameters if p not in step.optimizer.state)


@contextmanager
def _leave_no_trace(step: TrainingStep) -> Iterator[None]:
    """Statistics of batch norm and random states as they were."""
    kept = {name: buffer.clone() for name, buffer in step.model.named_buffers()}
    with torch.random.fork_rng(devices=[step.device] if step.device.type == "cuda" else []):
        try:
            yield
        finally:
            for name, buffer in step.model.named_buffers():
                buffer.copy_(kept[name])
