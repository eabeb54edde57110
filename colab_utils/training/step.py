"""One training step: forward, backward and optimiser, in the precision and the memory that the device has."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.batch import PackedBatch
from colab_utils.runtime import format_bytes
from colab_utils.training.augment import Size
from colab_utils.training.distributed import Ranks
from colab_utils.training.losses import compute_losses
from colab_utils.training.model import GPU_MODEL, LIGHT_MODEL, choose_precision, keep_boxes_exact

__all__ = [
    "MOST_PARTS",
    "TrainingStep",
    "begin_momentum",
    "choose_rate",
    "compute_rate",
    "free_memory",
    "is_out_of_memory",
    "make_optimizer",
]


_MAX_GRADIENT_NORM = 10.0


_WARMUP_STEPS = 500


_STEP_SHARES = (2 / 3, 8 / 9)


_OUT_OF_MEMORY = (
    "CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_NOT_SUPPORTED",
    "valid cuDNN algorithm", "unable to find an engine", "CUBLAS_STATUS_NOT_INITIALIZED", "CUDA out of memory",
    "CUDA error: out of memory",
)  # fmt: skip


MOST_PARTS = 8  # of a batch: it is halved three times


class TrainingStep:
    """A callable that trains a torchvision detection model on one batch; ``train`` uses it too.

    A batch that does not fit into the GPU's memory is cut in two, at most three times: from then on each batch is
    trained in ``parts`` whose gradients are added up, so its size stays the same, and you are warned.

    Args:
        model: In training mode it returns a dict of losses.
        device: Where the model is moved to and trained.
        optimizer: Default: SGD with a learning rate of 0.001, safe for any model and batch size.
        jitter_side: Side of the square of large-scale jitter for packed batches, in pixels; None leaves it out.
        shapes: Heights and widths that packed batches are padded to, see ``compute_losses``.
        ranks: The processes that train together; gradients are added up over them. Default: this one alone.

    Raises:
        ColabUtilsError: When not even one image at a time, or an eighth of a batch, fits into the GPU's memory.

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
        self,
        model: nn.Module,
        device: str | torch.device,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        jitter_side: int | None = None,
        shapes: Sequence[Size] = (),
        ranks: Ranks | None = None,
    ) -> None:
        self.device = torch.device(device)
        try:
            self.model = model.to(self.device).train()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise ColabUtilsError(
                f"expected room for the model on the GPU, found {_tell_room(self.device)}: something else holds the "
                "rest. Restart the session (Runtime > Restart session), or end the other process that nvidia-smi lists."
            ) from error
        self.optimizer = optimizer or make_optimizer(model, learning_rate=0.001)
        self.precision = choose_precision(self.device)
        if self.precision != torch.float32:
            keep_boxes_exact(model)
        # Only float16 underflows; a disabled scaler passes everything through.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == torch.float16)
        self.parts, self.stops = 1, torch.zeros(())
        self.jitter_side, self.shapes, self.ranks = jitter_side, tuple(shapes), ranks or Ranks()

    def __call__(
        self,
        images: PackedBatch | list[Tensor] | None,
        targets: list[dict[str, Tensor]] | None = None,
        *,
        flips: Sequence[bool] | None = None,
        total: int | None = None,
        stop: bool = False,
    ) -> Tensor:
        """Train on one batch: ``images`` and ``targets`` as torchvision takes them, or a packed batch on the device.

        ``flips``, bool [B], mirrors images of a packed batch. ``total`` is the number of images over all ranks (this
        one may have None of them); ``stop`` asks the other ranks to stop too: ``stops`` then counts who does. Returns
        the total loss, a detached float32 scalar still on the device.
        """
        try:
            while (loss := self.add_gradients(images, targets, flips=flips, total=total)) is None:
                free_memory(self)
                self.parts *= 2
                warnings.warn(
                    f"a batch of {_count(images)} images does not fit into the GPU's memory: from now on each is "
                    f"trained in {self.parts} parts whose gradients are added up. The batch stays the same; the steps "
                    "take longer.",
                    ColabUtilsWarning,
                    stacklevel=2,
                )
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            asked = torch.full((), float(stop), device=self.device)
            loss, self.stops = self.ranks.add_gradients(parameters, loss, asked)
            self.apply_gradients()
        except torch.cuda.OutOfMemoryError as error:
            counts = images.counts if isinstance(images, PackedBatch) else [len(t["labels"]) for t in targets or ()]
            raise ColabUtilsError(
                f"expected {self._find_part(images)} of the {_count(images)} images of a batch, with "
                f"{int(sum(counts))} objects in all, to fit into the GPU's memory, found that they do not. Train with "
                "a smaller min_size or a lighter model."
            ) from error
        return loss

    def apply_gradients(self) -> None:
        """Move the weights: what follows `add_gradients`."""
        self.scaler.unscale_(self.optimizer)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        # Far above the usual norm: it only tames the first steps from random weights.
        nn.utils.clip_grad_norm_(parameters, _MAX_GRADIENT_NORM)
        if self.scaler.is_enabled():
            begin_momentum(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def load_state(self, state: dict[str, Any]) -> None:
        """Take ``model``, ``optimizer`` and ``scaler`` from a checkpoint, of whatever device."""
        self.model.load_state_dict(state["model"])
        for own, saved in zip(self.optimizer.param_groups, state["optimizer"]["param_groups"], strict=True):
            saved["fused"] = own["fused"]
        self.optimizer.load_state_dict(state["optimizer"])
        # a fused optimiser wants them in the weights' order of memory
        for parameter, averages in self.optimizer.state.items():
            for name, value in averages.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    averages[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        if state["scaler"]:  # empty where it was not needed
            self.scaler.load_state_dict(state["scaler"])

    def _find_part(self, images: PackedBatch | list[Tensor] | None) -> int:
        """How many images are trained at a time."""
        return -(-_count(images) // self.parts)

    def add_gradients(
        self,
        images: PackedBatch | list[Tensor] | None,
        targets: list[dict[str, Tensor]] | None = None,
        *,
        flips: Sequence[bool] | None = None,
        total: int | None = None,
    ) -> Tensor | None:
        """The gradients of a batch, and its loss; None where memory ran out and smaller parts may help."""
        count, size, whole = _count(images), self._find_part(images), torch.zeros((), device=self.device)
        self.optimizer.zero_grad()
        self.scaler.scale(whole)  # where there is no image, it would not know its factor
        try:
            for part in (slice(first, first + size) for first in range(0, count, max(1, size))):
                with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
                    if isinstance(images, PackedBatch):
                        mirrored = None if flips is None else flips[part]
                        losses = compute_losses(self.model, images[part], flips=mirrored, shapes=self.shapes)
                    else:
                        losses = self.model(images[part], targets and targets[part])  # type: ignore[index]
                    share = min(size, count - part.start) / (total or count)
                    loss = torch.stack([one.float() for one in losses.values()]).sum() * share
                self.scaler.scale(loss).backward()
                whole += loss.detach()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if self.parts < MOST_PARTS and size > 1:
                return None
            raise torch.cuda.OutOfMemoryError(str(error)) from error
        return whole


def begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Begin averages of gradients with zeros, which gives the same first step.

    Where float16 overflows and that step is skipped, torch's fused SGD keeps memory that was never written.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> layer(torch.ones(1)).backward()
        >>> begin_momentum(optimizer := torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9))
        >>> optimizer.state[layer.bias]["momentum_buffer"]
        tensor([0.])
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") else ():
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _tell_room(device: torch.device) -> str:
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # not even for CUDA itself
        return "next to none"
    return f"{format_bytes(free)} of {format_bytes(total)} free"


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a GPU's memory ran out; its libraries say it in words of their own.

    Example:
        >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"))
        True
    """
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)


def free_memory(step: TrainingStep) -> None:
    """Free what a try took that ran out of memory: gradients, the graph, torch's own reserve."""
    step.optimizer.zero_grad()
    # autograd keeps the graph of a backward pass that failed until the next one (seen with torch 2.15 on a CPU)
    torch.zeros((), device=step.device, requires_grad=True).backward()
    gc.collect()
    if step.device.type == "cuda":
        torch.cuda.empty_cache()


def _count(images: PackedBatch | list[Tensor] | None) -> int:
    return 0 if images is None else len(images)


def make_optimizer(model: nn.Module, *, name: str = GPU_MODEL, learning_rate: float) -> torch.optim.Optimizer:
    """SGD as in torchvision's references; AdamW for the light model: it learns faster from random weights.

    Example:
        >>> make_optimizer(nn.Linear(2, 2), learning_rate=0.02).param_groups[0]["momentum"]
        0.9
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fused = bool(trainable) and trainable[0].is_cuda  # all of them in a few kernels
    if name == LIGHT_MODEL:
        return torch.optim.AdamW(trainable, lr=learning_rate, weight_decay=0.01, fused=fused)
    return torch.optim.SGD(trainable, lr=learning_rate, momentum=0.9, weight_decay=1e-4, fused=fused)


def choose_rate(name: str, batch_size: int) -> float:
    """The highest learning rate: 0.02 for 16 images as in torchvision's references, less for fewer.

    Example:
        >>> choose_rate(GPU_MODEL, 4), choose_rate(LIGHT_MODEL, 2)
        (0.005, 0.001)
    """
    return 0.001 * math.sqrt(batch_size / 2) if name == LIGHT_MODEL else min(0.02, 0.02 * batch_size / 16)


def compute_rate(step: int, *, steps: int, highest: float, schedule: str = "cosine") -> float:
    """The rate after ``step`` of ``steps`` steps: a tenth of them (500 at most) up to ``highest``, then half a cosine.

    ``schedule="step"``: a tenth of it after two thirds of the steps, and a hundredth after eight ninths (Detectron2's
    1x schedule).

    Example:
        >>> [round(compute_rate(step, steps=100, highest=1.0), 2) for step in (0, 9, 99)]
        [0.1, 1.0, 0.01]
        >>> [round(compute_rate(step, steps=90, highest=1.0, schedule="step"), 2) for step in (0, 59, 60, 80)]
        [0.11, 1.0, 0.1, 0.01]
    """
    warmup = max(1, min(_WARMUP_STEPS, steps // 10))
    if step < warmup:
        return highest * (step + 1) / warmup
    if schedule == "step":
        return highest * 0.1 ** sum(step >= share * steps for share in _STEP_SHARES)
    progress = (step - warmup) / max(1, steps - warmup)
    return highest * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))
