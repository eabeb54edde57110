"""One training step: forward, backward and optimiser, in the precision and the memory that the device has, alone or
as one of several processes, as ``torchrun`` starts them.
"""

from __future__ import annotations

import gc
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning, describe_error
from colab_utils.loading.batch import PackedBatch
from colab_utils.runtime import show_progress
from colab_utils.training.augment import Size, list_shapes
from colab_utils.training.checkpoint import load_weights
from colab_utils.training.losses import compute_losses
from colab_utils.training.model import GPU_MODEL, LIGHT_MODEL, TINY_MODEL, choose_precision, keep_boxes_exact

__all__ = [
    "MOST_PARTS", "Ranks", "TrainingStep", "choose_rate", "compute_rate", "join_ranks", "keep_buffers",
    "make_optimizer",
]  # fmt: skip

Images = PackedBatch | list[Tensor] | None
"""A packed batch, or images as torchvision takes them; None where a process has none of a batch's images."""

Targets = list[dict[str, Tensor]] | None
"""As torchvision takes them; None with a packed batch, which brings its own."""

MOST_PARTS = 8  # of a batch: it is halved at most three times
_GRAPH_RUNS = 3  # of each shape: torch warms up, records the graph, and replays it
_MAX_GRADIENT_NORM = 10.0  # far above the usual norm: it only limits the first steps from random weights
_WARMUP_STEPS = 500
_PATIENCE = timedelta(minutes=30)  # of the other processes for the first one, while it evaluates
_OUT_OF_MEMORY = (  # of torch, cuBLAS and cuDNN
    "out of memory", "_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_NOT_SUPPORTED",
    "valid cuDNN algorithm", "unable to find an engine",
)  # fmt: skip


class TrainingStep:
    """A callable that trains a torchvision detection model on one batch; ``train`` uses it too.

    A batch that does not fit into the GPU's memory is cut in two, at most three times: from then on each batch is
    trained in ``parts`` whose gradients are added up, and you are warned. The effective batch size stays the same; a
    trainable batch norm sees each part alone.

    Args:
        model: In training mode it returns a dict of losses.
        device: Where the model is moved to and trained.
        optimizer: Default: SGD with a learning rate of 0.001, safe for any model and batch size.
        ranks: The processes that train together, by ``DistributedDataParallel``. Default: this one alone.

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
        self, model: nn.Module, device: str | torch.device, *, optimizer: torch.optim.Optimizer | None = None,
        ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        self.device, self.ranks = torch.device(device), ranks or Ranks()
        try:
            self.model = model.to(self.device).train()
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            raise ColabUtilsError(
                "expected room for the model on the GPU, found that something else holds its memory. Restart the "
                "session (Runtime > Restart session), or end the other process that nvidia-smi lists."
            ) from error
        self.optimizer = optimizer or make_optimizer(model, learning_rate=0.001)
        self.precision = choose_precision(self.device)
        if self.precision != torch.float32:
            keep_boxes_exact(model)
        # Only float16 underflows; a disabled scaler passes everything through.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == torch.float16)
        self.parts, self.is_applying = 1, False  # is_applying: some weights have moved, and others have not
        self._memory_error = ""
        self._losses = _SummedLosses(model)
        self._network: nn.Module = self._losses
        if self.ranks.count > 1:
            # buffers: the first process saves its own statistics of batch norm, the others' are of other images
            self._network = DistributedDataParallel(
                self._network, broadcast_buffers=False, gradient_as_bucket_view=True
            )

    def compile(self, sizes: NDArray[np.integer], *, batch_size: int) -> None:
        """Compile backbone, feature pyramid and proposal head by ``torch.compile``, which makes CUDA graphs of them.

        Packed batches are then padded to two shapes, that of the wide images and that of the tall ones; each takes a
        minute or more to compile, which is done here. A batch of other shapes or of fewer images runs as before.

        Args:
            sizes: Height and width of all images in the model's input, int [I, 2], see ``resize_all``.
            batch_size: Images in each batch, over all processes.

        Raises:
            ColabUtilsError: ``torch.compile`` does not take the network, or finds no compiler.
        """
        model = cast("Any", self.model)
        shapes = list_shapes(sizes, step=model.transform.size_divisible)
        images = -(-batch_size // (self.ranks.count * self.parts))
        for part in (model.backbone, model.rpn.head):
            part.compile(mode="reduce-overhead", dynamic=False)
        try:
            with keep_buffers(model), show_progress("compiling", total=len(shapes), unit="shape") as bar:
                for shape in shapes:
                    for _ in range(_GRAPH_RUNS):
                        with self._cast():
                            features = model.backbone(torch.zeros(images, 3, *shape, device=self.device))
                            told = model.rpn.head([*features.values()])
                            total = torch.stack([part.float().sum() for parts in told for part in parts]).sum()
                        total.backward()
                    bar.update()
        except Exception as error:
            found = f"found {describe_error(error)}"
            raise ColabUtilsError(f"expected a network that torch.compile takes, {found}. Train without it.") from error
        finally:
            self.optimizer.zero_grad()
        self._losses.shapes = shapes

    def __call__(
        self, images: Images, targets: Targets = None, *, flips: Sequence[bool] | None = None, total: int | None = None
    ) -> Tensor:
        """Train on one batch: ``images`` and ``targets`` as torchvision takes them, or a packed batch on the device.

        ``flips``, bool [B], mirrors images of a packed batch. ``total`` is the number of images over all processes
        (this one may have None of them). Returns the total loss, a detached float32 scalar still on the device.
        """
        while (loss := self.add_gradients(images, targets, flips=flips, total=total)) is None:
            self.free_memory()
            count = 0 if images is None else len(images)
            if self.ranks.count > 1 or self.parts >= min(MOST_PARTS, count):
                size = -(-count // self.parts)
                raise ColabUtilsError(
                    f"expected {size} of the {count} images of a batch to fit into the GPU's memory, found that they "
                    f"do not ({self._memory_error}). Train with a smaller min_size or a lighter model; several "
                    "processes: smaller batches."
                )
            self.parts *= 2
            warnings.warn(
                f"a batch of {count} images does not fit into the GPU's memory: from now on each is trained in "
                f"{self.parts} parts whose gradients are added up. The effective batch size stays the same.",
                ColabUtilsWarning,
                stacklevel=2,
            )
        if self.ranks.count > 1:
            distributed.all_reduce(loss)
        self.is_applying = True
        self.apply_gradients()
        self.is_applying = False
        return loss

    def add_gradients(
        self, images: Images, targets: Targets = None, *, flips: Sequence[bool] | None = None,
        total: int | None = None, synchronize: bool = True,
    ) -> Tensor | None:  # fmt: skip
        """The gradients of a batch, and its loss; None where memory ran out.

        ``synchronize=False`` leaves the gradients of several processes apart.
        """
        count = 0 if images is None else len(images)
        size, loss_sum = max(1, -(-count // self.parts)), torch.zeros((), device=self.device)
        self.optimizer.zero_grad()
        try:
            for first in range(0, max(count, 1), size):
                part, is_last = slice(first, first + size), first + size >= count
                given = [None if each is None else each[part] for each in (images, targets, flips)]
                apart = self.ranks.count > 1 and not (synchronize and is_last)
                with self._network.no_sync() if apart else nullcontext():  # type: ignore[operator]
                    with self._cast():
                        loss = self._network(*given)
                    share = min(size, count - first) / (total or count) if count else 0.0
                    # of several processes torch takes the mean of the gradients: the sum is meant
                    self.scaler.scale(loss * share * self.ranks.count).backward()
                loss_sum += loss.detach() * share
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            self._memory_error = str(error).partition(". ")[0]
            return None
        return loss_sum

    @contextmanager
    def _cast(self) -> Iterator[None]:
        # once training runs, nothing more is compiled: that would take minutes
        stance = torch.compiler.set_stance("eager_on_recompile") if self._losses.shapes else nullcontext()
        with stance, torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
            yield

    def apply_gradients(self) -> None:
        """Move the weights: what follows `add_gradients`."""
        self.scaler.unscale_(self.optimizer)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, _MAX_GRADIENT_NORM)
        for p in parameters if self.scaler.is_enabled() and "momentum" in self.optimizer.defaults else ():
            # where float16 overflows and the first step is skipped, fused SGD keeps averages that were never written
            if self.optimizer.state[p].get("momentum_buffer") is None:
                self.optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def free_memory(self) -> None:
        """Free what a try took that ran out of memory: gradients, the graph, torch's own reserve."""
        self.optimizer.zero_grad()
        # autograd keeps the graph of a backward pass that failed until the next one (seen with torch 2.15 on a CPU)
        torch.zeros((), device=self.device, requires_grad=True).backward()
        gc.collect()
        torch.cuda.empty_cache()

    def load_state(self, state: dict[str, Any]) -> None:
        """Take ``model``, ``optimizer`` and ``scaler`` from a checkpoint, of whatever device."""
        load_weights(self.model, state["model"])
        for own, saved in zip(self.optimizer.param_groups, state["optimizer"]["param_groups"], strict=True):
            saved["fused"] = own["fused"]
            if any(saved[name] != own[name] for name in own.keys() & saved.keys() - {"lr", "params"}):
                raise ValueError("settings of another optimiser")
        self.optimizer.load_state_dict(state["optimizer"])
        # a fused optimiser wants its averages in the same order of memory as the weights
        for parameter, averages in self.optimizer.state.items():
            for name, value in averages.items():
                if value is not None and value.ndim and value.shape != parameter.shape:
                    raise ValueError(f"an optimiser's {name} of another shape")
                if value is not None and value.ndim:
                    averages[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        if state["scaler"]:  # empty where it was not needed
            self.scaler.load_state_dict(state["scaler"])


class _SummedLosses(nn.Module):
    """The forward pass as one module that returns one number: what ``DistributedDataParallel`` wraps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.shapes = model, list[Size]()

    def forward(self, images: Any, targets: Targets, flips: Sequence[bool] | None) -> Tensor:
        if images is None:  # this process has no image of the batch, and the others wait for its gradients
            return torch.stack([p.sum() for p in self.model.parameters() if p.requires_grad]).sum() * 0
        if isinstance(images, PackedBatch):
            losses = compute_losses(self.model, images, flips=flips, shapes=self.shapes)
        else:
            losses = self.model(images, targets)
        return torch.stack([loss.float() for loss in losses.values()]).sum()


@contextmanager
def keep_buffers(model: nn.Module) -> Iterator[None]:
    """Put the statistics of a model's norms back afterwards."""
    kept = [buffer.clone() for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in zip(model.buffers(), kept, strict=True):
                buffer.copy_(before)


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a GPU's memory ran out, for which each of its libraries has its own message."""
    return any(text in str(error) for text in _OUT_OF_MEMORY)


def make_optimizer(model: nn.Module, *, name: str = GPU_MODEL, learning_rate: float) -> torch.optim.Optimizer:
    """SGD as in torchvision's references; AdamW for the light and the tiny model: it learns faster from random weights.

    Example:
        >>> make_optimizer(nn.Linear(2, 2), learning_rate=0.02).param_groups[0]["momentum"]
        0.9
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fused = bool(trainable) and trainable[0].is_cuda  # all of them in a few kernels
    if name in (LIGHT_MODEL, TINY_MODEL):
        return torch.optim.AdamW(trainable, lr=learning_rate, weight_decay=0.01, fused=fused)
    return torch.optim.SGD(trainable, lr=learning_rate, momentum=0.9, weight_decay=1e-4, fused=fused)


def choose_rate(name: str, batch_size: int) -> float:
    """The highest learning rate: 0.02 for 16 images as in torchvision's references, less for fewer.

    Example:
        >>> choose_rate(GPU_MODEL, 4), choose_rate(LIGHT_MODEL, 2)
        (0.005, 0.001)
    """
    is_light = name in (LIGHT_MODEL, TINY_MODEL)
    return 0.001 * math.sqrt(batch_size / 2) if is_light else min(0.02, 0.02 * batch_size / 16)


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


@dataclass(frozen=True)
class Ranks:
    """Which of ``count`` processes this is, from 0; rank 0 alone writes files. One process alone is 0 of 1.

    Example:
        >>> ranks = Ranks()
        >>> ranks.is_first, ranks.gather("mine"), ranks.send("yours")
        (True, ['mine'], 'yours')
    """

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The value of each process, in the order of their ranks."""
        values = [value] * self.count
        if self.count > 1:
            distributed.all_gather_object(values, value)
        return values

    def send(self, value: Any) -> Any:
        """The value of the first process, in all of them."""
        values = [value]
        if self.count > 1:
            distributed.broadcast_object_list(values, 0)
        return values[0]


@contextmanager
def join_ranks(device: torch.device) -> Iterator[Ranks]:
    """The processes that ``torchrun`` started, joined by NCCL on GPUs and by gloo on CPUs; without it, one alone.

    Example:
        >>> with join_ranks(torch.device("cpu")) as ranks:
        ...     ranks.count
        1
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield Ranks()
        return
    joins = not distributed.is_initialized()  # a group of yours is used, and stays
    if joins:
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
    try:
        yield Ranks(distributed.get_rank(), distributed.get_world_size())
    finally:
        if joins:
            distributed.destroy_process_group()
