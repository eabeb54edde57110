"""Torch's global defaults during training, whatever a notebook has set."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from colab_utils.errors import ColabUtilsError


@contextmanager
def use_cpu() -> Iterator[None]:
    """Use the CPU as torch's default device, whatever ``torch.set_default_device`` has set."""
    cpu = torch.device("cpu")
    # Setting a default device makes each of torch's functions a little slower. So none is set if
    # the CPU is the default already.
    with nullcontext() if torch.get_default_device() == cpu else cpu:
        yield


@contextmanager
def use_training_defaults() -> Iterator[None]:
    """Enable gradients, and use the CPU as torch's default device.

    Raises:
        ColabUtilsError: Torch's default dtype, which all threads share, is not float32.
    """
    dtype = torch.get_default_dtype()
    if dtype != torch.float32:
        raise ColabUtilsError(
            f"torch's default dtype is {dtype}, and models are trained in torch.float32. Call "
            "torch.set_default_dtype(torch.float32) first."
        )
    with use_cpu(), torch.inference_mode(False), torch.enable_grad():
        yield
