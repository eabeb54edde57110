"""The device of a loader's batches, the way of tensors to it, and the processes that train
together, each with its own device.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, distributed

from colab_utils.errors import ColabUtilsError


def find_device(device: torch.device | str) -> torch.device:
    """Return the device with this name.

    Raises:
        ColabUtilsError: No device has this name, this machine does not have that GPU, or the
            device is neither the CPU nor a GPU that CUDA or ROCm drives.

    Example:
        >>> find_device("cpu")
        device(type='cpu')
    """
    try:
        torch_device = torch.device(device)
        counts = {"cpu": 1, "cuda": torch.cuda.device_count()}
        is_known = (torch_device.index or 0) < counts.get(torch_device.type, 0)
    except (RuntimeError, TypeError):
        is_known = False
    if not is_known:
        raise ColabUtilsError(
            f"A loader cannot deliver to the device {str(device)!r}. Name 'cpu', or 'cuda:0' to "
            f"'cuda:N': this machine has {torch.cuda.device_count()} GPUs. On Colab, choose "
            "Runtime > Change runtime type. With torchrun, start at most one process for each GPU."
        )
    return torch_device


def send(values: Tensor | NDArray[Any], device: torch.device | str) -> Tensor:
    """Return a tensor or numpy array on a device, without a copy if it is there already.

    A copy to a GPU uses pinned memory, and the call returns at once. A copy from other memory would
    wait until the GPU has finished its work, and the GPU would then have nothing to do. Source:
    ``cudaMemcpyAsync`` in NVIDIA's CUDA runtime API, "API synchronization behavior".

    Example:
        >>> send(torch.tensor([1, 2]), "cpu")
        tensor([1, 2])
    """
    # `as_tensor` would put an array on the user's default device.
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        # Pinned memory with gaps would be copied through memory that is not pinned.
        return tensor.contiguous().pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass(frozen=True)
class Ranks:
    """The rank of this process among ``count`` processes that train together.

    Ranks begin at 0, and only rank 0 writes logs and checkpoints. A process that trains alone has
    rank 0 of 1.

    Example:
        >>> ranks = Ranks()
        >>> ranks.is_first, ranks.gather("mine"), ranks.send("yours")
        (True, ['mine'], 'yours')
    """

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Return whether this process writes the files."""
        return self.rank == 0

    @property
    def is_on_first_host(self) -> bool:
        """Return whether this process is on the machine of rank 0."""
        return self.count == 1 or self._local_rank == self.rank

    @property
    def is_first_here(self) -> bool:
        """Return whether this process is the first one on its machine."""
        return self.count == 1 or self._local_rank == 0

    @property
    def _local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", self.rank))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in the order of their ranks."""
        values = [value] * self.count
        if self.count > 1:
            distributed.all_gather_object(values, value)
        return values

    def send(self, value: Any) -> Any:
        """Send the value of rank 0 to all processes; return it in each of them."""
        values = [value]
        if self.count > 1:
            distributed.broadcast_object_list(values, 0)
        return values[0]


def find_ranks() -> Ranks:
    """Return the rank of this process in torch's default process group; 0 of 1 without a group.

    Example:
        >>> find_ranks()
        Ranks(rank=0, count=1)
    """
    if distributed.is_available() and distributed.is_initialized():
        return Ranks(distributed.get_rank(), distributed.get_world_size())
    return Ranks()
