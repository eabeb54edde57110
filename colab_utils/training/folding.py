"""Frozen batch norm multiplied into the convolution before it: two operations a layer less, and half precision kept."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

__all__ = ["fold_norms"]


def fold_norms(model: nn.Module) -> int:
    """Fold every ``FrozenBatchNorm2d`` that follows a convolution into it; the model's results stay, but for rounding.

    torchvision's layer works out its factors anew at each call, and multiplies and adds in float32, also where
    autocast computes in half precision. Names, parameters and ``state_dict`` do not change: weights stay compatible
    both ways, and trainable ones go on training.

    Returns:
        How many layers were folded.

    Example:
        >>> block = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), FrozenBatchNorm2d(4))
        >>> fold_norms(block), list(block.state_dict())
        (1, ['0.weight', '1.weight', '1.bias', '1.running_mean', '1.running_var'])
    """
    pairs = list(_find_pairs(model))
    for conv, norm in pairs:
        conv.__class__, norm.__class__ = _FoldedConv2d, _FoldedNorm
        for name in ("scale", "shift", "folded"):
            conv.register_buffer(name, None, persistent=False)
    _refresh(pairs)
    if pairs:  # weights that are loaded later bring factors of their own
        model.register_load_state_dict_post_hook(_refresh_model)
    return len(pairs)


def _find_pairs(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    for conv, norm in _list_neighbours(model):
        follows = type(conv) is nn.Conv2d and conv.bias is None and type(norm) is FrozenBatchNorm2d
        if follows:
            yield conv, norm


def _list_neighbours(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Layers that follow each other in a module, in the order in which torchvision's blocks call them."""
    for module in model.modules():
        yield from pairwise(module.children())


def _refresh_model(model: nn.Module, _: Any) -> None:
    _refresh([pair for pair in _list_neighbours(model) if isinstance(pair[0], _FoldedConv2d)])


@torch.no_grad()
def _refresh(pairs: list[tuple[Any, Any]]) -> None:
    for conv, norm in pairs:
        scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
        conv.scale = scale[:, None, None, None]
        conv.shift = norm.bias - norm.running_mean * scale
        conv.folded = None if conv.weight.requires_grad else conv.weight * conv.scale


class _FoldedConv2d(nn.Conv2d):
    scale: Tensor
    shift: Tensor
    folded: Tensor | None

    def forward(self, given: Tensor) -> Tensor:
        weight = self.weight * self.scale if self.folded is None or self.weight.requires_grad else self.folded
        return self._conv_forward(given, weight, self.shift)


class _FoldedNorm(FrozenBatchNorm2d):
    def forward(self, given: Tensor) -> Tensor:
        return given
