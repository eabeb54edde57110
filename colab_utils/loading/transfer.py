"""From this machine's memory to the device, without waiting for what the device still has to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["send"]


def send(values: Tensor | NDArray[Any], device: torch.device | str) -> Tensor:
    """A tensor, or a numpy array, on a device; not copied where it is there already.

    To a GPU it goes through pinned memory, and the call returns at once: a copy from other memory would wait for all
    that the GPU still has to do, and leave it without work until the next call arrives. Source: ``cudaMemcpyAsync`` in
    NVIDIA's CUDA runtime API, "API synchronization behavior".

    Example:
        >>> send(np.array([1, 2]), "cpu")
        tensor([1, 2])
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values)) if isinstance(values, np.ndarray) else values
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
