"""The device of a loader's batches, and the way of tensors to it."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
        is_known = torch_device.type in ("cpu", "cuda")
    except (RuntimeError, TypeError):
        is_known = False
    if not is_known:
        raise ColabUtilsError(
            f"A loader cannot deliver to the device {str(device)!r}. Name 'cpu' or 'cuda', and "
            "move the batches to your device yourself."
        )
    if torch_device.type == "cuda" and (torch_device.index or 0) >= torch.cuda.device_count():
        raise ColabUtilsError(
            f"The device {str(torch_device)!r} does not exist: this machine has "
            f"{torch.cuda.device_count()} GPUs, counted from cuda:0. On Colab, choose Runtime > "
            "Change runtime type; or name another device, and start at most as many processes with "
            "torchrun as there are GPUs."
        )
    return torch_device


def send(values: Tensor | NDArray[Any], device: torch.device | str) -> Tensor:
    """Return a tensor or numpy array on a device, without a copy if it is there already.

    A copy to a GPU uses pinned memory, and the call returns at once. A copy from other memory would
    wait until the GPU has finished its work, and the GPU would then have nothing to do. Source:
    ``cudaMemcpyAsync`` in NVIDIA's CUDA runtime API, "API synchronization behavior".

    Example:
        >>> send(np.array([1, 2]), "cpu")
        tensor([1, 2])
    """
    tensor = (
        torch.from_numpy(np.ascontiguousarray(values)) if isinstance(values, np.ndarray) else values
    )
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
