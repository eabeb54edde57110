"""Several processes that train one model together, as ``torchrun`` starts them: each has its share of every batch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn

from colab_utils.errors import ColabUtilsError

__all__ = ["Ranks", "join_ranks"]

_PATIENCE = timedelta(minutes=30)  # that the others have, say while one of them evaluates


@dataclass(frozen=True)
class Ranks:
    """Which of ``count`` processes this is, from 0; rank 0 alone writes files. On its own it is 0 of 1.

    Gradients are added up after the backward pass, and not by ``DistributedDataParallel`` during it: a rank whose share
    does not fit into its GPU's memory can then try again in parts, while the others wait for it.

    Example:
        >>> ranks = Ranks()
        >>> ranks.is_first, ranks.gather("mine"), ranks.agree(False)
        (True, ['mine'], False)
    """

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes files."""
        return self.rank == 0

    def add_gradients(self, parameters: Iterable[nn.Parameter], *numbers: Tensor) -> list[Tensor]:
        """Replace each gradient by its sum over all ranks; returns the sums of the ``numbers``, scalars, too."""
        if self.count == 1:
            return list(numbers)
        held = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in held:  # the same list on every rank, whatever it had no image for
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [parameter.grad for parameter in held if parameter.grad is not None]
        flat = torch.cat([part.detach().float().reshape(-1) for part in (*grads, *numbers)])
        distributed.all_reduce(flat)
        sums = flat.split([part.numel() for part in (*grads, *numbers)])
        for grad, total in zip(grads, sums, strict=False):
            grad.copy_(total.view_as(grad))
        return [total.reshape(()) for total in sums[len(grads) :]]

    def gather(self, value: Any) -> list[Any]:
        """What every rank gives, in their order."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def send(self, value: Any) -> Any:
        """What the first rank gives, to all."""
        values = [value]
        if self.count > 1:
            distributed.broadcast_object_list(values, 0)
        return values[0]

    def agree(self, asked: bool) -> bool:
        """Whether any rank asks for it."""
        return any(self.gather(asked))

    def copy_weights(self, model: nn.Module) -> None:
        """Give every rank the first one's weights."""
        for parameter in model.parameters() if self.count > 1 else ():
            distributed.broadcast(parameter.data, 0)

    def copy_buffers(self, model: nn.Module) -> None:
        """Give every rank the first one's statistics of normalisation."""
        for buffer in model.buffers() if self.count > 1 else ():
            distributed.broadcast(buffer, 0)

    def share(self, items: Sequence[Any]) -> Sequence[Any]:
        """This rank's part: every ``count``-th item."""
        return items[self.rank :: self.count]

    def __str__(self) -> str:
        return f"{self.count} processes" if self.count > 1 else "one process"


@contextmanager
def join_ranks(device: torch.device) -> Iterator[Ranks]:
    """The ranks that ``torchrun`` started, joined by NCCL on GPUs and by gloo on CPUs; one alone without it.

    Raises:
        ColabUtilsError: the others cannot be reached.

    Example:
        >>> with join_ranks(torch.device("cpu")) as ranks:
        ...     ranks.count
        1
    """
    count = int(os.environ.get("WORLD_SIZE", 1))
    if count == 1:
        yield Ranks()
        return
    joins = not distributed.is_initialized()
    try:
        if joins:
            distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
        yield Ranks(distributed.get_rank(), distributed.get_world_size())
    except (distributed.DistNetworkError, distributed.DistStoreError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ColabUtilsError(
            f"expected {count} processes that reach each other at {where}, found: {error}. Start all of them with "
            "torchrun, with the same --rdzv-endpoint."
        ) from error
    finally:
        if joins and distributed.is_initialized():
            distributed.destroy_process_group()
