"""The settings of a run: those you name, else those of its checkpoint, else the defaults.

With them come its optimiser and the schedule of its learning rate.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn

from colab_utils.require import require_choice, require_count, require_number
from colab_utils.training.model import BUILDERS, GPU_MODEL, LIGHT_MODEL, TINY_MODEL

Augment = Literal["none", "flip"]
"""Augmentation by name: nothing, or random flips left to right."""
OWN_TRANSFORMS = "own transforms"
"""The name of the augmentation if the user passes transforms."""
_LARGEST_SEED = (1 << 64) - 1
_WARMUP_STEPS = 500
KEPT = ("model", "min_size", "max_size", "augment", "batch_size", "learning_rate")
"""A resumed run keeps these settings, unless you name others."""


@dataclass(frozen=True)
class TrainSettings:
    """The settings of a run. Of those that are not chosen yet, texts are empty and numbers 0."""

    model: str = ""
    """One of the keys of ``BUILDERS``."""
    min_size: int = 0
    """Shorter side that images are resized to, pixels."""
    max_size: int = 0
    """Limit of the longer side, pixels."""
    augment: str = ""
    """Name of the augmentation: "flip", "none", or "own transforms"."""
    batch_size: int = 0
    """Images of a step, over all processes."""
    learning_rate: float = 0.0
    """The highest learning rate, reached after the warm-up."""
    seed: int = 0
    """Seed of the order of the images, the augmentation and random weights."""
    steps: int = 0
    """Steps of the run, those of earlier sessions included."""
    epochs: int = 0
    """Passes over the dataset, in place of ``steps``."""
    checkpoint_steps: int = 0
    """Steps between checkpoints."""
    parts: int = 1
    """Parts that each batch is cut into, so that it fits into the GPU's memory."""
    peak_bytes: int = 0
    """Bytes that the heaviest batch of a process took; 0 on a CPU, or with transforms of the user.
    """
    limit_bytes: int = 0
    """Bytes that a batch of a process may take."""


# Each function is called with the name and the value of a setting, and refuses bad values.
_require_size = partial(require_count, maximum=10_000)
_CHECKS: dict[str, Callable[[str, Any], object]] = {
    "model": partial(require_choice, choices=BUILDERS),
    "min_size": _require_size,
    "max_size": _require_size,
    "augment": partial(require_choice, choices=(*get_args(Augment), OWN_TRANSFORMS)),
    "batch_size": require_count,
    "learning_rate": partial(require_number, above=0),
    "seed": partial(require_count, minimum=0, maximum=_LARGEST_SEED),
    "steps": require_count,
    "epochs": require_count,
    "checkpoint_steps": require_count,
}


def read_settings(values: Mapping[str, Any]) -> TrainSettings:
    """Check the settings that a user named.

    Args:
        values: The settings by name. None stands for one that is not chosen. Other keys are
            ignored.

    Raises:
        ColabUtilsError: A setting has a value that ``train`` does not know.

    Example:
        >>> read_settings({"batch_size": 4, "model": None})
        TrainSettings(model='', min_size=0, max_size=0, augment='', batch_size=4, ...
    """
    chosen = {name: values[name] for name in _CHECKS if values.get(name) is not None}
    for name, value in chosen.items():
        _CHECKS[name](name, value)
    return TrainSettings(**chosen)


def choose_settings(
    asked: TrainSettings, plan: Mapping[str, Any], *, on_gpu: bool
) -> TrainSettings:
    """Take each setting from the user, else from the run's checkpoint, else from the defaults.

    The batch size and the learning rate may stay open: they depend on the GPU's memory.

    Args:
        asked: The settings that the caller of ``train`` named.
        plan: The settings in the run's checkpoint. It is empty for a new run.
        on_gpu: Whether the model is trained on a GPU.

    Example:
        >>> settings = choose_settings(TrainSettings(batch_size=4), {}, on_gpu=False)
        >>> settings.min_size, settings.max_size, settings.batch_size
        (192, 320, 4)
    """
    kept = {name: getattr(asked, name) or plan.get(name, 0) for name in KEPT}
    # A stored rate belongs to the stored batch size. For another one, choose a new rate.
    if kept["batch_size"] != plan.get("batch_size"):
        kept["learning_rate"] = asked.learning_rate
    model = kept["model"] or (GPU_MODEL if on_gpu else LIGHT_MODEL)
    usual_sizes = {TINY_MODEL: 128, LIGHT_MODEL: 800 if on_gpu else 192}
    min_size = kept["min_size"] or usual_sizes.get(model, 800)
    defaults = {
        "model": model,
        "min_size": min_size,
        "max_size": round(min_size * 5 / 3),
        "augment": "flip",
    }
    return replace(asked, **kept | {name: kept[name] or defaults[name] for name in defaults})


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
