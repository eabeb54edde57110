"""Half precision where it helps, and float32 where boxes are made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.rpn import RegionProposalNetwork

__all__ = ["choose_precision", "keep_boxes_exact"]


def choose_precision(device: str | torch.device) -> torch.dtype:
    """The dtype for autocast: bfloat16 where the GPU has it (a T4 emulates it, slowly), float16, float32 on a CPU.

    Example:
        >>> choose_precision("cpu")
        torch.float32
    """
    if torch.device(device).type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def keep_boxes_exact(model: nn.Module) -> bool:
    """Make a model's anchors and proposals in float32, also where autocast computes in half precision.

    torchvision makes them in the dtype of the features. From 512 pixels on, bfloat16 knows only every fourth pixel, and
    float16 every half: boxes are then learned from, and cut out at, places that are off by as much.

    Returns:
        Whether the model has a region proposal network.

    Example:
        >>> keep_boxes_exact(nn.Linear(1, 1))
        False
    """
    rpn = getattr(model, "rpn", None)
    if not isinstance(rpn, RegionProposalNetwork):
        return False
    rpn.head.register_forward_hook(_convert_codes)
    rpn.anchor_generator.register_forward_pre_hook(_stand_in)
    return True


def _convert_codes(head: nn.Module, given: Any, found: tuple[list[Tensor], list[Tensor]]) -> Any:
    return tuple([part.float() for part in parts] for parts in found)


def _stand_in(generator: nn.Module, given: tuple[Any, list[Tensor]]) -> Any:
    """Anchors take shapes, device and dtype of the features, nothing else."""
    images, features = given
    return images, [part.new_empty((), dtype=torch.float32).expand(part.shape) for part in features]
