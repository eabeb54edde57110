"""One training step: flip, forward, backward and optimiser, with the precision that the device is good at."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from colab_utils.errors import ColabUtilsError
from colab_utils.training.model import GPU_MODEL, LIGHT_MODEL

__all__ = ["TrainingStep", "choose_precision", "choose_rate", "compute_rate", "flip_batch", "make_optimizer"]

_MAX_GRADIENT_NORM = 10.0
_WARMUP_STEPS = 500


def choose_precision(device: str | torch.device) -> torch.dtype:
    """The dtype for autocast: bfloat16 where the GPU has it (a T4 emulates it, slowly), float16, float32 on a CPU.

    Example:
        >>> choose_precision("cpu")
        torch.float32
    """
    if torch.device(device).type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


class TrainingStep:
    """A callable that trains a torchvision detection model on one batch; ``train`` uses it too.

    Args:
        model: In training mode it returns a dict of losses.
        device: Where the model is moved to and trained.
        optimizer: Default: SGD with a learning rate of 0.001, safe for any model and batch size.

    Raises:
        ColabUtilsError: When a batch does not fit into the memory of the GPU.

    Example:
        >>> from colab_utils.training.model import build_mask_rcnn
        >>> step = TrainingStep(build_mask_rcnn(LIGHT_MODEL, num_classes=2, weights=None, min_size=64), "cpu")
        >>> mask = torch.zeros(1, 64, 64, dtype=torch.uint8)
        >>> mask[:, 8:40, 8:40] = 1
        >>> target = {"boxes": torch.tensor([[8.0, 8, 40, 40]]), "labels": torch.tensor([1]), "masks": mask}
        >>> bool(step([torch.rand(3, 64, 64)], [target]) > 0)
        True
    """

    def __init__(
        self, model: nn.Module, device: str | torch.device, *, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self.device = torch.device(device)
        self.model = model.to(self.device).train()
        self.optimizer = optimizer or make_optimizer(model, learning_rate=0.001)
        self.precision = choose_precision(self.device)
        # Only float16 underflows; a disabled scaler passes everything through.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == torch.float16)

    def __call__(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
        """Train on one batch; returns the total loss, a detached float32 scalar still on the device."""
        try:
            with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
                loss = torch.stack([part.float() for part in self.model(images, targets).values()]).sum()
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            # Far above the usual norm: it only tames the first steps from random weights.
            nn.utils.clip_grad_norm_(parameters, _MAX_GRADIENT_NORM)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        except torch.cuda.OutOfMemoryError as error:
            objects = sum(len(target["labels"]) for target in targets)
            raise ColabUtilsError(
                f"expected a batch that fits into the GPU's memory, found that {len(images)} images with "
                f"{objects} objects do not. Train with a smaller batch size or a smaller min_size."
            ) from error
        return loss.detach()


def flip_batch(
    images: list[Tensor], targets: list[dict[str, Tensor]], *, generator: torch.Generator
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Mirror about half of the images left to right, with their boxes and masks; nothing given is changed.

    Images ``[3, H, W]`` and torchvision's targets, on any device; the generator, on the CPU, decides which.

    Example:
        >>> image, masks = torch.arange(3.0).expand(3, 2, 3), torch.tensor([[[1, 0, 0], [1, 0, 0]]])
        >>> target = {"boxes": torch.tensor([[0.0, 0, 1, 2]]), "masks": masks}
        >>> images, targets = flip_batch([image], [target], generator=torch.Generator().manual_seed(0))
        >>> targets[0]["boxes"].tolist(), images[0][0, 0].tolist()
        ([[2.0, 0.0, 3.0, 2.0]], [2.0, 1.0, 0.0])
    """
    coins = torch.rand(len(images), generator=generator).tolist()
    pairs = list(zip(images, targets, strict=True))
    for i, (image, target) in enumerate(pairs):
        if coins[i] < 0.5:
            boxes = target["boxes"].clone()
            boxes[:, [0, 2]] = image.shape[-1] - boxes[:, [2, 0]]
            pairs[i] = image.flip(-1), {**target, "boxes": boxes, "masks": target["masks"].flip(-1)}
    return [image for image, _ in pairs], [target for _, target in pairs]


def make_optimizer(model: nn.Module, *, name: str = GPU_MODEL, learning_rate: float) -> torch.optim.Optimizer:
    """SGD as in torchvision's references; AdamW for the light model: it learns faster from random weights.

    Example:
        >>> make_optimizer(nn.Linear(2, 2), learning_rate=0.02).param_groups[0]["momentum"]
        0.9
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == LIGHT_MODEL:
        return torch.optim.AdamW(trainable, lr=learning_rate, weight_decay=0.01)
    return torch.optim.SGD(trainable, lr=learning_rate, momentum=0.9, weight_decay=1e-4)


def choose_rate(name: str, batch_size: int) -> float:
    """The highest learning rate: 0.02 for 16 images as in torchvision's references, less for fewer.

    Example:
        >>> choose_rate(GPU_MODEL, 4), choose_rate(LIGHT_MODEL, 2)
        (0.005, 0.001)
    """
    return 0.001 * math.sqrt(batch_size / 2) if name == LIGHT_MODEL else min(0.02, 0.02 * batch_size / 16)


def compute_rate(step: int, *, steps: int, highest: float) -> float:
    """The rate after ``step`` of ``steps`` steps: a tenth of them (500 at most) up to ``highest``, then half a cosine.

    Example:
        >>> [round(compute_rate(step, steps=100, highest=1.0), 2) for step in (0, 9, 99)]
        [0.1, 1.0, 0.01]
    """
    warmup = max(1, min(_WARMUP_STEPS, steps // 10))
    if step < warmup:
        return highest * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return highest * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))
