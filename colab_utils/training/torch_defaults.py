"""Torch's switches, which a notebook may have set, while a model is trained."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from colab_utils.errors import ColabUtilsError


@contextmanager
def use_cpu() -> Iterator[None]:
    """Make tensors on the CPU where code names no device, whatever ``torch.set_default_device`` was
    given.
    """
    cpu = torch.device("cpu")
    # A default costs each of torch's functions a little time.
    with nullcontext() if torch.get_default_device() == cpu else cpu:
        yield


@contextmanager
def use_training_defaults() -> Iterator[None]:
    """Compute with gradients, and on the CPU where code names no device.

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
