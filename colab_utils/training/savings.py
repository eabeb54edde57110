"""Ways to need less of a GPU's memory, in the order of least harm: time first, then quality."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import dropwhile
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision.models.detection import MaskRCNN

from colab_utils.training.step import MOST_PARTS, TrainingStep

__all__ = ["SAVINGS", "Saving", "apply_savings", "shrink_transform"]

_LEAST_PROPOSALS = 100
_SMALLER, _LEAST_SIDE = 0.8, 64  # of each side; pixels


@dataclass(frozen=True)
class Saving:
    """One way: what it does, what it costs, and ``apply``, which is False where nothing is left to save this way."""

    name: str
    text: str
    cost: str
    apply: Callable[[TrainingStep, int], bool]

    def __str__(self) -> str:
        return f"{self.text} ({self.cost})"


def apply_savings(step: TrainingStep, names: Sequence[str], *, images: int) -> None:
    """Apply what a run was begun with, in its order; ``images``: of a batch, of this process."""
    known = {saving.name: saving for saving in SAVINGS}
    for name in names:
        known[name].apply(step, images)


def _halve_parts(step: TrainingStep, images: int) -> bool:
    if step.parts * 2 > min(MOST_PARTS, images):
        return False
    step.parts *= 2
    return True


def _checkpoint_activations(step: TrainingStep, images: int) -> bool:
    stages = [stage for stage in _list_trained(step.model) if "forward" not in vars(stage)]
    for stage in stages:
        vars(stage)["forward"] = partial(checkpoint, stage.forward, use_reentrant=False, preserve_rng_state=False)
        _change_momentum(stage, lambda momentum: 1 - math.sqrt(1 - momentum))  # it sees each batch twice now
    return bool(stages)


def _change_momentum(stage: nn.Module, change: Callable[[float], float]) -> None:
    for norm in stage.modules():
        if isinstance(norm, nn.BatchNorm2d) and norm.momentum:
            norm.momentum = change(norm.momentum)


def _halve_proposals(step: TrainingStep, images: int) -> bool:
    model: Any = step.model
    counts = (model.rpn._pre_nms_top_n, model.rpn._post_nms_top_n)
    if min(count["training"] for count in counts) < 2 * _LEAST_PROPOSALS:
        return False
    for count in counts:
        count["training"] //= 2
    model.roi_heads.fg_bg_sampler.batch_size_per_image //= 2
    return True


def _freeze_stages(step: TrainingStep, images: int) -> bool:
    """All but the last of the backbone's stages that train; of random weights none."""
    if getattr(step.model, "starts_from", "random") == "random":
        return False
    trained = _list_trained(step.model)
    for stage in trained[:-1]:
        stage.requires_grad_(False)
        if vars(stage).pop("forward", None):  # nothing of it is run again
            _change_momentum(stage, lambda momentum: 1 - (1 - momentum) ** 2)
    for group in step.optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad:
                step.optimizer.state.pop(parameter, None)
        group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
    return len(trained) > 1


def _list_trained(model: nn.Module) -> list[nn.Module]:
    """From the first of the backbone's stages on that has a weight to train: the others need no gradients."""
    return [*dropwhile(lambda stage: not any(p.requires_grad for p in stage.parameters()), _list_stages(model))]


def shrink_transform(transform: Any) -> bool:
    """Make the input of a model's transform smaller, in the same shape; False where it is small already."""
    if _SMALLER * min(transform.min_size) < _LEAST_SIDE:
        return False
    transform.min_size = tuple(round(_SMALLER * side) for side in transform.min_size)
    transform.max_size = round(_SMALLER * transform.max_size)
    return True


def _shrink_input(step: TrainingStep, images: int) -> bool:
    if not shrink_transform(step.model.transform):
        return False
    if step.jitter_side:
        step.jitter_side = round(_SMALLER * step.jitter_side / 32) * 32
    step.shapes = ()
    return True


def _list_stages(model: nn.Module) -> list[nn.Module]:
    body: Any = model.backbone.body if isinstance(model, MaskRCNN) else model
    return [stage for stage in body.children() if any(True for _ in stage.parameters())]


SAVINGS = (
    Saving("2 parts", "each batch in 2 parts", "a little slower", _halve_parts),
    Saving("4 parts", "in 4 parts", "slower", _halve_parts),
    Saving("8 parts", "in 8 parts", "slower again", _halve_parts),
    Saving("checkpointing", "the backbone run again in the backward pass", "slower", _checkpoint_activations),
    Saving("proposals", "half of the proposals", "may cost some precision", _halve_proposals),
    Saving("frozen", "only the backbone's last stage trained", "may cost precision", _freeze_stages),
    Saving("input 0.8", "images at 0.8 of their size", "costs precision of small objects", _shrink_input),
    Saving("input 0.64", "images at 0.64 of their size", "costs precision of small objects", _shrink_input),
)
"""In the order of least harm; each adds to those before it."""
