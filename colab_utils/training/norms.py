"""The batch norms of pretrained weights.

`freeze_norms` freezes their statistics. `fold_norms` makes them part of the convolutions before
them.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d


def freeze_norms(model: nn.Module) -> None:
    """Replace every batch norm by a ``FrozenBatchNorm2d``. The names in ``state_dict`` stay.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm2d(4))
        >>> freeze_norms(model)
        >>> model
        Sequential(
          (0): FrozenBatchNorm2d(4, eps=1e-05)
        )
    """
    for module in [*model.modules()]:
        for name, norm in module.named_children():
            if type(norm) is nn.BatchNorm2d:
                setattr(module, name, FrozenBatchNorm2d(norm.num_features, eps=norm.eps))


def fold_norms(model: nn.Module) -> int:
    """Fold every ``FrozenBatchNorm2d`` into the convolution before it.

    Results stay the same, except for rounding. Folding saves time: torchvision's layer computes its
    factors again at each call, and multiplies and adds in float32, even under autocast. The names,
    the parameters and the ``state_dict`` of the model do not change. So the weights of a folded
    model load into one that is not folded, and the other way round. Weights that were trainable
    are still trained.

    Returns:
        The number of folded layers.

    Example:
        >>> block = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), FrozenBatchNorm2d(4))
        >>> fold_norms(block), list(block.state_dict())
        (1, ['0.weight', '1.weight', '1.bias', '1.running_mean', '1.running_var'])
    """
    pairs = [*_find_pairs(model, nn.Conv2d)]
    for conv, norm in pairs:
        conv.__class__ = _FoldedConv2d
        norm.__class__ = _FoldedNorm
        for name in ("scale", "shift"):
            conv.register_buffer(name, None, persistent=False)
    if pairs:
        _compute_factors(model)
        # Weights that are loaded later need new factors.
        model.register_load_state_dict_post_hook(_compute_factors)
    return len(pairs)


def _find_pairs(model: nn.Module, kind: type[nn.Conv2d]) -> Iterator[tuple[Any, Any]]:
    """Yield each convolution with the norm that follows it among the children of a module.

    torchvision's blocks call their children in the order in which ``children`` lists them.
    """
    for module in model.modules():
        for conv, norm in pairwise(module.children()):
            if type(conv) is kind and conv.bias is None and isinstance(norm, FrozenBatchNorm2d):
                yield conv, norm


@torch.no_grad()
def _compute_factors(model: nn.Module, _: Any = None) -> None:
    for conv, norm in _find_pairs(model, _FoldedConv2d):
        scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
        conv.scale = scale[:, None, None, None]
        conv.shift = norm.bias - norm.running_mean * scale


class _FoldedConv2d(nn.Conv2d):
    scale: Tensor
    shift: Tensor

    def forward(self, features: Tensor) -> Tensor:
        return self._conv_forward(features, self.weight * self.scale, self.shift)


class _FoldedNorm(FrozenBatchNorm2d):
    def forward(self, features: Tensor) -> Tensor:
        return features
