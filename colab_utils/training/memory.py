"""The batch size and the memory reductions of a GPU, found before the first step: one trial of the heaviest batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import dropwhile
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision.models.detection import MaskRCNN

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import collate_packed
from colab_utils.loading.dataset import ShardDataset
from colab_utils.runtime import format_bytes
from colab_utils.training.augment import resize_all
from colab_utils.training.model import LIGHT_MODEL
from colab_utils.training.step import MOST_PARTS, TrainingStep, keep_buffers

__all__ = ["MemoryPlan", "checkpoint_activations", "plan_memory"]

_MARGIN = 0.9  # of the memory: proposals differ from step to step, and gaps between allocations are lost
_BATCH_SIZES = (16, 8, 4, 2, 1)


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


def plan_memory(step: TrainingStep, dataset: ShardDataset, rows: list[int], *, batch_size: int | None) -> MemoryPlan:
    """Find what makes every batch of a dataset fit: the heaviest batch is trained, and forgotten.

    Without a ``batch_size``, smaller and smaller ones are tried; a given one is halved into parts. If that is not
    enough, activations of the backbone are computed again in the backward pass (activation checkpointing). Weights and
    statistics are left as they were. No object is ever left out.

    Args:
        step: With its model on a GPU.
        dataset: The images, with labels as the model has them.
        rows: Those of the images that are trained on.
        batch_size: Images of this process in each batch; None chooses the largest of 16, 8, 4, 2 and 1 that fits.

    Raises:
        ColabUtilsError: The heaviest batch does not fit; the message names what would free memory.
    """
    model, counts = cast("Any", step.model), dataset.describe(rows)["counts"]
    heaviest = _find_heaviest(resize_all(dataset.sizes[rows], model.transform), counts)
    if batch_size is None:
        tries = [(size, 1, False) for size in _BATCH_SIZES if size <= max(1, len(heaviest))]
    else:
        tries = [(batch_size, parts, False) for parts in (1, 2, 4, MOST_PARTS) if parts <= max(1, batch_size)]
    # the optimiser's averages and those of the weights come later
    reserve = 2 * sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    limit = torch.cuda.mem_get_info(step.device)[0] + torch.cuda.memory_reserved(step.device) - reserve
    shorter_sides, model.transform.min_size = model.transform.min_size, (max(model.transform.min_size),)
    try:
        with keep_buffers(model):
            for images, parts, checkpointing in [*tries, (*tries[-1][:2], True)]:
                step.parts = parts
                if checkpointing:
                    checkpoint_activations(model)
                batch = collate_packed([dataset.read_packed(rows[i]) for i in heaviest[:images]]).to(step.device)
                torch.cuda.reset_peak_memory_stats(step.device)
                fits = step.add_gradients(batch, synchronize=False) is not None
                peak = torch.cuda.max_memory_allocated(step.device)
                step.free_memory()
                if fits and peak < (1 if checkpointing else _MARGIN) * limit:
                    return MemoryPlan(images, parts, checkpointing, peak, limit)
    finally:
        model.transform.min_size = shorter_sides
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


def checkpoint_activations(model: MaskRCNN) -> None:
    """Run the trained stages of the backbone again in the backward pass, in place of keeping their activations."""
    stages = [stage for stage in model.backbone.body.children() if any(True for _ in stage.parameters())]
    # up to the first stage that trains nothing needs gradients
    for stage in dropwhile(lambda stage: not any(p.requires_grad for p in stage.parameters()), stages):
        vars(stage)["forward"] = partial(checkpoint, stage.forward, use_reentrant=False, preserve_rng_state=False)
        for norm in stage.modules():
            if isinstance(norm, nn.BatchNorm2d) and norm.momentum:
                norm.momentum = 1 - math.sqrt(1 - norm.momentum)  # it sees each batch twice now
