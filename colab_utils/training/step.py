"""One training step: forward, backward and optimiser, in one process or in several.

The step chooses a precision that suits the device. A batch that does not fit into the GPU's memory
is cut into parts.

If one of several processes loads other images, or stops at an error, the others would wait for it
in the middle of a step. So all of them compare their data and settings before the first step. If
these differ, all end with the same message.
"""

import gc
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from time import sleep
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning, describe_error
from colab_utils.loading.batch import PackedBatch
from colab_utils.loading.devices import Ranks, find_ranks
from colab_utils.training.checkpoint import State
from colab_utils.training.layers import choose_precision, keep_boxes_exact
from colab_utils.training.losses import compute_losses
from colab_utils.training.settings import make_optimizer

Images = PackedBatch | list[Tensor] | None
"""A packed batch, or images as torchvision takes them. None if this process has none of them."""
Targets = list[dict[str, Tensor]] | None
"""Targets as torchvision takes them. None with a packed batch, which has its own targets."""
MOST_PARTS = 8
"""The most parts that a batch is cut into. A batch is halved at most three times."""
# How long the other processes wait for the first one, for example while it evaluates.
_PATIENCE = timedelta(minutes=30)
# Gradients are clipped to this norm. Their own norm is usually far smaller, except in the first
# steps from random weights.
_MAX_GRADIENT_NORM = 10.0
# What torch, cuBLAS and cuDNN say when memory runs out.
_OUT_OF_MEMORY = re.compile(
    "out of memory|_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED|"
    "CUDNN_STATUS_NOT_SUPPORTED|valid cuDNN algorithm|unable to find an engine"
)


class TrainingStep:
    """A callable that trains a torchvision detection model on one batch. ``train`` uses it, too.

    If a batch does not fit into the GPU's memory, you are warned, and from then on each batch is
    trained in two, four or eight ``parts``, whose gradients are added up. The effective batch size
    stays the same, but a trainable batch norm sees each part alone.

    If the loss or a gradient of a batch is not finite, the step is skipped: the weights, the
    optimiser's averages and the statistics of norms stay as they were. ``is_skipped``, a bool
    scalar on the device, says whether the last step was skipped.

    Args:
        model: A model that returns a dict of losses in training mode.
        device: Where the model is moved to and trained.
        optimizer: Default: SGD with a learning rate of 0.001, safe for any model and batch size.
        ranks: The processes that train together, by ``DistributedDataParallel``. Default: this
            process alone.

    Raises:
        ColabUtilsError: The model does not fit into the GPU's memory. A call raises it, too, if a
            batch does not fit in parts of one image, or in eight parts. With several processes,
            ``parts`` stays the same, so a call raises it as soon as a batch does not fit.

    Example:
        >>> from colab_utils.training.model import LIGHT_MODEL, build_mask_rcnn
        >>> model = build_mask_rcnn(LIGHT_MODEL, num_classes=2, weights=None, min_size=64)
        >>> step = TrainingStep(model, "cpu")
        >>> mask = torch.zeros(1, 64, 64, dtype=torch.uint8)
        >>> mask[:, 8:40, 8:40] = 1
        >>> boxes = torch.tensor([[8.0, 8, 40, 40]])
        >>> target = {"boxes": boxes, "labels": torch.tensor([1]), "masks": mask}
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
            if not _OUT_OF_MEMORY.search(str(error)):
                raise
            raise ColabUtilsError(
                "The model does not fit into the GPU's memory, because something else fills that "
                "memory. Restart the session (Runtime > Restart session), or end the other process "
                "that nvidia-smi lists."
            ) from error
        self.optimizer = optimizer or make_optimizer(model, learning_rate=0.001)
        self.precision = choose_precision(self.device)
        if self.precision != torch.float32:
            keep_boxes_exact(model)
        # Only gradients in float16 underflow. A disabled scaler changes nothing.
        self.scaler = torch.amp.GradScaler(
            self.device.type, enabled=self.precision == torch.float16
        )
        self.parts = 1
        self.is_skipped = torch.zeros((), dtype=torch.bool, device=self.device)
        norms = [module for module in model.modules() if isinstance(module, _NormBase)]
        self._statistics = [buffer for norm in norms for buffer in norm.buffers()]
        # True while a step changes the weights: some are new then, and others old.
        self.is_applying = False
        network: nn.Module = _SummedLosses(model)
        if self.ranks.count > 1:
            # The statistics of a batch norm are buffers. Each process keeps its own. Only those of
            # the first process are saved.
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
        """Train on one batch.

        Args:
            images: A packed batch on the device, or images as torchvision takes them. None if this
                process has no image of the batch.
            targets: Targets as torchvision takes them. None with a packed batch.
            flips: bool [B], True for each image that is mirrored. Only for a packed batch. Default:
                none is mirrored.
            total: Number of images of the batch in all processes together. Default: those of this
                process.

        Returns:
            The total loss, a detached float32 scalar on the device.
        """
        statistics = [buffer.clone() for buffer in self._statistics]
        while (loss := self.add_gradients(images, targets, flips=flips, total=total)) is None:
            self._double_parts(0 if images is None else len(images))
        if self.ranks.count > 1:
            distributed.all_reduce(loss)
        self.is_applying = True
        self.apply_gradients(loss)
        for buffer, before in zip(self._statistics, statistics, strict=True):
            buffer.copy_(torch.where(self.is_skipped, before, buffer))
        self.is_applying = False
        return loss

    def _double_parts(self, count: int) -> None:
        """Train batches in twice as many parts, because a batch of ``count`` images did not fit."""
        self.free_memory()
        if self.ranks.count > 1 or self.parts >= min(MOST_PARTS, count):
            raise ColabUtilsError(
                f"The {count} images of a batch do not fit into the GPU's memory, in {self.parts} "
                "parts neither. Train smaller batches, a smaller min_size or a lighter model."
            )
        self.parts *= 2
        text = (
            f"a batch of {count} images does not fit into the GPU's memory: each batch is trained "
            f"in {self.parts} parts from now on. The effective batch size stays the same."
        )
        warnings.warn(text, ColabUtilsWarning, stacklevel=3)

    def add_gradients(
        self,
        images: Images,
        targets: Targets = None,
        *,
        flips: Sequence[bool] | None = None,
        total: int | None = None,
        synchronize: bool = True,
    ) -> Tensor | None:
        """Compute the gradients of a batch. Return its loss, or None if memory ran out.

        With ``synchronize=False`` each of several processes keeps its own gradients. For the other
        arguments see ``__call__``.
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
                    share = min(size, count - first) / (total or count or 1)
                    # torch averages the gradients over the processes. The sum is needed, so each
                    # process multiplies its loss by the number of processes.
                    self.scaler.scale(loss * share * self.ranks.count).backward()
                loss_sum += loss.detach() * share
        except RuntimeError as error:
            if not _OUT_OF_MEMORY.search(str(error)):
                raise
            return None
        return loss_sum

    def apply_gradients(self, loss: Tensor) -> None:
        """Move the weights by the gradients of `add_gradients`. If ``loss`` or a gradient is not
        finite, the weights stay as they are.
        """
        self.scaler.unscale_(self.optimizer)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(parameters, _MAX_GRADIENT_NORM)
        # The loss and the gradients are the same in all processes, so all skip the same steps.
        self.is_skipped = ~torch.isfinite(norm + loss)
        if getattr(self.optimizer, "_step_supports_amp_scaling", False):
            self._apply_on_device(parameters)
        # Without a fused optimiser, this line waits for the GPU.
        elif not self.is_skipped:
            self.optimizer.step()
        self.scaler.update()

    def _apply_on_device(self, parameters: Sequence[Tensor]) -> None:
        """Step with a fused optimiser. It reads on the device whether to skip the step.

        Source: ``GradScaler.step`` in torch's ``amp/grad_scaler.py``.
        """
        optimizer: Any = self.optimizer
        # Fused SGD makes its averages in memory that is not zeroed. If it skipped the first step,
        # they would never be written.
        if "momentum" in optimizer.defaults:
            for p in parameters:
                if "momentum_buffer" not in optimizer.state[p]:
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        optimizer.grad_scale = None
        optimizer.found_inf = self.is_skipped.to(torch.float32)
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale
            del optimizer.found_inf

    def free_memory(self) -> None:
        """Free what a failed step still holds: its gradients, its graph, and torch's cache."""
        self.optimizer.zero_grad()
        # After a failed backward pass, autograd keeps its graph until the next backward pass (seen
        # with torch 2.15 on a CPU).
        torch.zeros((), device=self.device, requires_grad=True).backward()
        gc.collect()
        torch.cuda.empty_cache()

    def load_state(self, state: State) -> None:
        """Load the optimiser and the scaler of a checkpoint, from any device."""
        # Only the optimiser's averages come from the checkpoint. Its settings, such as the learning
        # rate, stay as this version has made them for this device.
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({**state["optimizer"], "param_groups": groups})
        for parameter, averages in self.optimizer.state.items():
            for name, value in averages.items():
                if name != "step":
                    # A fused optimiser needs averages in the same memory format as the weights.
                    averages[name] = torch.empty_like(parameter).copy_(value)
        # The state of a disabled scaler is empty.
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])


class _SummedLosses(nn.Module):
    """A module that returns the sum of a model's losses, for ``DistributedDataParallel``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Any, targets: Targets, flips: Sequence[bool] | None) -> Tensor:
        # The others wait for the gradients of this process. If it has no image of the batch, it
        # sends zeros.
        if images is None:
            sums = [p.sum() for p in self.model.parameters() if p.requires_grad]
            return torch.stack(sums).sum() * 0
        if isinstance(images, PackedBatch):
            losses = compute_losses(self.model, images, flips=flips)
        else:
            losses = self.model(images, targets)
        return torch.stack([loss.float() for loss in losses.values()]).sum()


@contextmanager
def join_ranks(device: torch.device) -> Iterator[Ranks]:
    """Join the processes that ``torchrun`` started: by NCCL on GPUs, by gloo on CPUs.

    Without ``torchrun``, this process is alone.

    Example:
        >>> with join_ranks(torch.device("cpu")) as ranks:
        ...     ranks.count
        1
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield Ranks()
        return
    # If the user has made a process group, it is used, and not destroyed afterwards.
    joins = not distributed.is_initialized()
    if joins:
        backend = "nccl" if device.type == "cuda" else "gloo"
        distributed.init_process_group(backend, timeout=_PATIENCE)
    try:
        yield find_ranks()
    finally:
        if joins:
            # A thread of gloo may still free the last tensor. In torch 2.6 it waits for Python's
            # lock meanwhile, and the end of the group holds that lock and waits for the thread.
            sleep(0.1)
            distributed.destroy_process_group()


@contextmanager
def share_errors(ranks: Ranks) -> Iterator[dict[str, Any]]:
    """Raise an error in every process if one process has an error in the block. The block may fill
    the dict that it gets: texts, numbers or None, by name. They must be the same in all processes.

    So no process waits for one that has stopped. The block must not wait for another process.

    Raises:
        ColabUtilsError: Another process had an error. The message has that error and its rank. Or
            a fact differs. The message lists its values, from rank 0 on.

    Example:
        >>> with share_errors(Ranks()):
        ...     raise ColabUtilsError("There are no shards. Copy them first.")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: There are no shards. Copy them first.
    """
    facts: dict[str, Any] = {}
    try:
        yield facts
    except Exception as error:
        ranks.gather(describe_error(error))
        raise
    others = ranks.gather(facts)
    for rank, text in enumerate(others):
        if isinstance(text, str):
            raise ColabUtilsError(
                f"Rank {rank} stopped before the first step, and so did all others. It says: {text}"
            )
    if any(other != facts for other in others):
        raise ColabUtilsError(
            f"The processes that train together have other data or settings: {others}. Start all "
            "of them with the same version, the same settings and complete copies of the same "
            "shards."
        )
