"""One training step: forward, backward and optimiser, in the precision and the memory that the
device has, alone or as one of several processes, as ``torchrun`` starts them.
"""

import gc
import math
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.batch import PackedBatch, collate_packed
from colab_utils.loading.dataset import ShardDataset
from colab_utils.training.checkpoint import choose_weights, load_weights
from colab_utils.training.losses import compute_losses
from colab_utils.training.model import (
    GPU_MODEL,
    LIGHT_MODEL,
    TINY_MODEL,
    choose_precision,
    keep_boxes_exact,
)
from colab_utils.training.sizes import choose_sizes
from colab_utils.units import format_bytes

Images = PackedBatch | list[Tensor] | None
"""A packed batch, or images as torchvision takes them; None where a process has none of a batch's
images.
"""

Targets = list[dict[str, Tensor]] | None
"""As torchvision takes them; None with a packed batch, which brings its own."""

_MOST_PARTS = 8  # of a batch: it is halved at most three times
# of the memory: proposals differ from step to step, and gaps between allocations are lost
_MARGIN = 0.9
_BATCH_SIZES = (16, 8, 4, 2, 1)
# far above the usual norm: it only limits the first steps from random weights
_MAX_GRADIENT_NORM = 10.0
_WARMUP_STEPS = 500
_PATIENCE = timedelta(minutes=30)  # of the other processes for the first one, while it evaluates
_OUT_OF_MEMORY = re.compile(  # of torch, cuBLAS and cuDNN
    "out of memory|_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED|CUDNN_STATUS_NOT_SUPPORTED|valid cuDNN algorithm|"
    "unable to find an engine"
)


class TrainingStep:
    """A callable that trains a torchvision detection model on one batch; ``train`` uses it too.

    A batch that does not fit into the GPU's memory is cut in two, at most three times: from then on
    each batch is trained in ``parts`` whose gradients are added up, and you are warned. The
    effective batch size stays the same; a trainable batch norm sees each part alone.

    Args:
        model: In training mode it returns a dict of losses.
        device: Where the model is moved to and trained.
        optimizer: Default: SGD with a learning rate of 0.001, safe for any model and batch size.
        ranks: The processes that train together, by ``DistributedDataParallel``. Default: this one
            alone.

    Raises:
        ColabUtilsError: When not even one image at a time, or an eighth of a batch, fits into the
            GPU's memory.

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
        ranks: "Ranks | None" = None,
    ) -> None:
        self.device = torch.device(device)
        self.ranks = ranks or Ranks()
        try:
            self.model: Any = model.to(self.device).train()
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            cure = (
                "Restart the session (Runtime > Restart session), or end the other process "
                "that nvidia-smi lists."
            )
            raise ColabUtilsError(
                f"expected room for the model on the GPU, found its memory taken. {cure}"
            ) from error
        self.optimizer = optimizer or make_optimizer(model, learning_rate=0.001)
        self.precision = choose_precision(self.device)
        if self.precision != torch.float32:
            keep_boxes_exact(model)
        # Only float16 underflows; a disabled scaler passes everything through.
        self.scaler = torch.amp.GradScaler(
            self.device.type, enabled=self.precision == torch.float16
        )
        # is_applying: some weights have moved, and others have not
        self.parts = 1
        self.is_applying = False
        self._memory_error = ""
        network: nn.Module = _SummedLosses(model)
        if self.ranks.count > 1:
            # buffers: the first process saves its own statistics of batch norm, the others' are of
            # other images
            network = DistributedDataParallel(
                network, broadcast_buffers=False, gradient_as_bucket_view=True
            )
        self._network = network

    def __call__(
        self,
        images: Images,
        targets: Targets = None,
        *,
        flips: Sequence[bool] | None = None,
        total: int | None = None,
    ) -> Tensor:
        """Train on one batch: ``images`` and ``targets`` as torchvision takes them, or a packed
        batch on the device.

        ``flips``, bool [B], mirrors images of a packed batch. ``total`` is the number of images
        over all processes (this one may have None of them). Returns the total loss, a detached
        float32 scalar still on the device.
        """
        while (loss := self.add_gradients(images, targets, flips=flips, total=total)) is None:
            self.free_memory()
            count = 0 if images is None else len(images)
            if self.ranks.count > 1 or self.parts >= min(_MOST_PARTS, count):
                size = -(-count // self.parts)
                raise ColabUtilsError(
                    f"expected {size} of the {count} images of a batch to fit into the GPU's "
                    "memory, found that they "
                    f"do not ({self._memory_error}). Train smaller batches, a smaller min_size or "
                    "a lighter model."
                )
            self.parts *= 2
            how = (
                f"each is trained in {self.parts} parts from now on. The effective batch size "
                "stays the same."
            )
            text = f"a batch of {count} images does not fit into the GPU's memory: {how}"
            warnings.warn(text, ColabUtilsWarning, stacklevel=2)
        if self.ranks.count > 1:
            distributed.all_reduce(loss)
        self.is_applying = True
        self.apply_gradients()
        self.is_applying = False
        return loss

    def add_gradients(
        self,
        images: Images,
        targets: Targets = None,
        *,
        flips: Sequence[bool] | None = None,
        total: int | None = None,
        synchronize: bool = True,
    ) -> Tensor | None:
        """The gradients of a batch, and its loss; None where memory ran out.

        ``synchronize=False`` leaves the gradients of several processes apart.
        """
        count = 0 if images is None else len(images)
        size = max(1, -(-count // self.parts))
        loss_sum = torch.zeros((), device=self.device)
        self.optimizer.zero_grad()
        try:
            for first in range(0, max(count, 1), size):
                part = slice(first, first + size)
                is_last = first + size >= count
                given = [None if each is None else each[part] for each in (images, targets, flips)]
                apart = self.ranks.count > 1 and not (synchronize and is_last)
                with self._network.no_sync() if apart else nullcontext():  # type: ignore[operator]
                    with torch.autocast(
                        self.device.type, self.precision, enabled=self.precision != torch.float32
                    ):
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

    def apply_gradients(self) -> None:
        """Move the weights: what follows `add_gradients`."""
        self.scaler.unscale_(self.optimizer)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, _MAX_GRADIENT_NORM)
        for p in (
            parameters if self.scaler.is_enabled() and "momentum" in self.optimizer.defaults else ()
        ):
            # where float16 overflows and the first step is skipped, fused SGD keeps averages that
            # were never written
            if self.optimizer.state[p].get("momentum_buffer") is None:
                self.optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def free_memory(self) -> None:
        """Free what a try took that ran out of memory: gradients, the graph, torch's own
        reserve.
        """
        self.optimizer.zero_grad()
        # autograd keeps the graph of a backward pass that failed until the next one (seen with
        # torch 2.15 on a CPU)
        torch.zeros((), device=self.device, requires_grad=True).backward()
        gc.collect()
        torch.cuda.empty_cache()

    def load_state(self, state: dict[str, Any]) -> None:
        """Take the weights, ``optimizer`` and ``scaler`` from a checkpoint, of whatever device.

        Raises:
            ColabUtilsError: A weight is not a number.
            LookupError, RuntimeError, TypeError, ValueError: It is the state of something else.
        """
        load_weights(self.model, choose_weights(state), state["path"])
        # with the settings of this version and device
        groups = self.optimizer.state_dict()["param_groups"]
        if [own["params"] for own in groups] != [
            saved["params"] for saved in state["optimizer"]["param_groups"]
        ]:
            raise ValueError("an optimizer of other weights")
        self.optimizer.load_state_dict(
            {"state": state["optimizer"]["state"], "param_groups": groups}
        )
        # a fused optimiser wants its averages in the same order of memory as the weights
        names = (
            {"momentum_buffer"}
            if "momentum" in self.optimizer.defaults
            else {"step", "exp_avg", "exp_avg_sq"}
        )
        for parameter, averages in self.optimizer.state.items():
            if averages.keys() != names:
                raise ValueError("averages of another optimizer")
            for name, value in averages.items():
                averages[name] = (
                    value.reshape(())
                    if name == "step"
                    else torch.empty_like(parameter).copy_(value)
                )
        if state["scaler"]:  # empty where it was not needed
            # numbers
            self.scaler.load_state_dict(
                {name: value + 0 for name, value in state["scaler"].items()}
            )


class _SummedLosses(nn.Module):
    """The forward pass as one module that returns one number: what ``DistributedDataParallel``
    wraps.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Any, targets: Targets, flips: Sequence[bool] | None) -> Tensor:
        # this process has no image of the batch, and the others wait for its gradients
        if images is None:
            return (
                torch.stack([p.sum() for p in self.model.parameters() if p.requires_grad]).sum() * 0
            )
        is_packed = isinstance(images, PackedBatch)
        losses = (
            compute_losses(self.model, images, flips=flips)
            if is_packed
            else self.model(images, targets)
        )
        return torch.stack([loss.float() for loss in losses.values()]).sum()


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a GPU's memory ran out, for which each of its libraries has its own message."""
    return bool(_OUT_OF_MEMORY.search(str(error)))


@dataclass(frozen=True)
class MemoryPlan:
    """How the batches of a run fit into a GPU's memory."""

    batch_size: int
    """Images of this process in a batch."""
    parts: int
    """Parts in which each batch is trained."""
    peak_bytes: int
    """What the heaviest batch took."""
    limit_bytes: int
    """What this process may have."""

    def __str__(self) -> str:
        parts = f", trained in {self.parts} parts" if self.parts > 1 else ""
        taken = f"takes {format_bytes(self.peak_bytes)} of {format_bytes(self.limit_bytes)}"
        return f"the heaviest batch ({self.batch_size} images{parts}) {taken}"


def plan_memory(
    step: TrainingStep, dataset: ShardDataset, rows: list[int], *, batch_size: int | None
) -> MemoryPlan:
    """Find what makes every batch of a dataset fit: the heaviest batch is trained, and forgotten.

    Without a ``batch_size``, smaller and smaller ones are tried; a given one is halved into parts.
    Weights and statistics are left as they were. No object is ever left out.

    Args:
        step: With its model on a GPU.
        dataset: The images, with labels as the model has them.
        rows: Those of the images that are trained on.
        batch_size: Images of this process in each batch; None chooses the largest of 16, 8, 4, 2
            and 1 that fits.

    Raises:
        ColabUtilsError: The heaviest batch does not fit; the message names what would free memory.
    """
    model = step.model
    counts = dataset.describe(rows)["counts"]
    heaviest = _find_heaviest(
        np.array(choose_sizes(model.transform, dataset.sizes[rows].tolist())), counts
    )
    if batch_size is None:
        tries = [(size, 1) for size in _BATCH_SIZES if size <= max(1, len(heaviest))]
    else:
        tries = [
            (batch_size, parts) for parts in (1, 2, 4, _MOST_PARTS) if parts <= max(1, batch_size)
        ]
    # The optimiser's averages come later: AdamW keeps two of each weight.
    reserve = 2 * sum(
        parameter.nbytes for parameter in model.parameters() if parameter.requires_grad
    )
    limit = (
        torch.cuda.mem_get_info(step.device)[0] + torch.cuda.memory_reserved(step.device) - reserve
    )
    buffers = [buffer.clone() for buffer in model.buffers()]
    try:
        for images, step.parts in tries:
            batch = collate_packed([dataset.read_packed(rows[i]) for i in heaviest[:images]]).to(
                step.device
            )
            torch.cuda.reset_peak_memory_stats(step.device)
            fits = step.add_gradients(batch, synchronize=False) is not None
            peak = torch.cuda.max_memory_allocated(step.device)
            step.free_memory()
            if fits and peak < _MARGIN * limit:
                return MemoryPlan(images, step.parts, peak, limit)
    finally:
        torch._foreach_copy_([*model.buffers()], buffers)  # statistics of norms
    raise ColabUtilsError(
        "expected images that fit into the GPU's memory one by one, found that one with "
        f"{int(counts.max()):,} objects "
        f"does not ({format_bytes(limit)} are free). Free memory: min_size at 0.8 of its size "
        "takes two thirds of the "
        f"activations; model={LIGHT_MODEL!r} a tenth; frozen stages of the backbone "
        "(requires_grad_(False)) 7 to 20 % "
        "less; half of the proposals up to 20 % less; or end the other process that nvidia-smi "
        "lists."
    )


def _find_heaviest(sizes: NDArray[np.integer], counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """Images in an order whose first B are the heaviest batch of B: the largest one, to which the
    others are padded, then those with the most objects, wide ones to a wide one.
    """
    areas = (-(-sizes.astype(np.int64) // 32) * 32).prod(1)
    largest = int(np.lexsort((counts, areas))[-1])
    is_wide = sizes[:, 1] >= sizes[:, 0]
    order = np.lexsort((areas, counts, is_wide == is_wide[largest]))[::-1]
    return np.array([largest, *order[order != largest]], np.int64)


def make_optimizer(
    model: nn.Module, *, name: str = GPU_MODEL, learning_rate: float
) -> torch.optim.Optimizer:
    """SGD as in torchvision's references; AdamW for the light and the tiny model: it learns faster
    from random weights.

    Example:
        >>> make_optimizer(nn.Linear(2, 2), learning_rate=0.02).param_groups[0]["momentum"]
        0.9
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fused = bool(trainable) and trainable[0].is_cuda  # all of them in a few kernels
    if name in (LIGHT_MODEL, TINY_MODEL):
        return torch.optim.AdamW(trainable, lr=learning_rate, weight_decay=0.01, fused=fused)
    return torch.optim.SGD(
        trainable, lr=learning_rate, momentum=0.9, weight_decay=1e-4, fused=fused
    )


def choose_rate(name: str, batch_size: int) -> float:
    """The highest learning rate: 0.02 for 16 images as in torchvision's references, less for fewer.

    Example:
        >>> choose_rate(GPU_MODEL, 4), choose_rate(LIGHT_MODEL, 2)
        (0.005, 0.001)
    """
    is_light = name in (LIGHT_MODEL, TINY_MODEL)
    return 0.001 * math.sqrt(batch_size / 2) if is_light else min(0.02, 0.02 * batch_size / 16)


def compute_rate(step: int, *, steps: int, highest: float) -> float:
    """The rate after ``step`` of ``steps`` steps: a tenth of them (500 at most) up to ``highest``,
    then half a cosine.

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
    """Which of ``count`` processes this is, from 0; rank 0 alone writes files. One process alone is
    0 of 1.

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
    """The processes that ``torchrun`` started, joined by NCCL on GPUs and by gloo on CPUs; without
    it, one alone.

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
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE
        )
    try:
        yield Ranks(distributed.get_rank(), distributed.get_world_size())
    finally:
        if joins:
            distributed.destroy_process_group()
