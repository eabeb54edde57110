"""The optimiser of a model, and the schedule of its learning rate."""

import math

import torch
from torch import nn

from colab_utils.training.model import GPU_MODEL, LIGHT_MODEL, TINY_MODEL

_WARMUP_STEPS = 500


def make_optimizer(
    model: nn.Module, *, name: str = GPU_MODEL, learning_rate: float
) -> torch.optim.Optimizer:
    """Make SGD as in torchvision's references, or AdamW for the light and the tiny model.

    AdamW learns faster from random weights.

    Example:
        >>> make_optimizer(nn.Linear(2, 2), learning_rate=0.02).param_groups[0]["momentum"]
        0.9
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # A fused optimiser updates all weights with a few GPU kernels.
    fused = bool(trainable) and trainable[0].is_cuda
    if name in (LIGHT_MODEL, TINY_MODEL):
        return torch.optim.AdamW(trainable, lr=learning_rate, weight_decay=0.01, fused=fused)
    return torch.optim.SGD(
        trainable, lr=learning_rate, momentum=0.9, weight_decay=1e-4, fused=fused
    )


def choose_rate(name: str, batch_size: int) -> float:
    """Return the highest learning rate for a batch size.

    For the ResNet-50 models it is 0.02 from 16 images on, as in torchvision's references. With half
    as many images it is half as high, and so on. For the light and the tiny model it is 0.001 at 2
    images, and grows with the square root of the batch size.

    Example:
        >>> choose_rate(GPU_MODEL, 4), choose_rate(LIGHT_MODEL, 2)
        (0.005, 0.001)
    """
    if name in (LIGHT_MODEL, TINY_MODEL):
        return 0.001 * math.sqrt(batch_size / 2)
    return min(0.02, 0.02 * batch_size / 16)


def compute_rate(step: int, *, steps: int, highest: float) -> float:
    """Return the learning rate of step number ``step``, counted from 0, of ``steps`` in all.

    It rises to ``highest`` in the first tenth of the steps, or in 500 steps if that is less. Then
    it falls to a hundredth of ``highest``, along half a wave of the cosine.

    Example:
        >>> [round(compute_rate(step, steps=100, highest=1.0), 2) for step in (0, 9, 99)]
        [0.1, 1.0, 0.01]
    """
    warmup = max(1, min(_WARMUP_STEPS, steps // 10))
    if step < warmup:
        return highest * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return highest * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))
