"""Half precision on a GPU: which dtype to use, and how boxes stay in float32.

Torch's global defaults are put right during training, whatever a notebook has set.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle
from torchvision.models.detection import FasterRCNN

from colab_utils.errors import ColabUtilsError


def choose_precision(device: str | torch.device) -> torch.dtype:
    """Choose the dtype for autocast: float32 on a CPU, and on a GPU bfloat16 or float16.

    bfloat16 needs a GPU with compute capability 8.0. Older ones, such as a T4, emulate it slowly.

    Example:
        >>> choose_precision("cpu")
        torch.float32
    """
    if torch.device(device).type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def keep_boxes_exact(model: nn.Module) -> list[RemovableHandle]:
    """Compute a model's anchors, proposals and boxes in float32, even under autocast.

    torchvision computes them in the dtype of the features. From 512 pixels on, bfloat16 rounds
    positions to 4 pixels, and float16 to half a pixel. Boxes would be wrong by as much.

    Returns:
        The handles that remove the hooks; none for a model without a region proposal network.

    Example:
        >>> keep_boxes_exact(nn.Linear(1, 1))
        []
    """
    if not isinstance(model, FasterRCNN):
        return []
    return [
        model.rpn.head.register_forward_hook(_to_float),
        model.rpn.anchor_generator.register_forward_pre_hook(_give_float_features),
        model.roi_heads.box_predictor.register_forward_hook(_to_float),
    ]


def _to_float(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tree_map(Tensor.float, outputs)


def _give_float_features(generator: nn.Module, inputs: tuple[Any, list[Tensor]]) -> Any:
    """Replace the features for the anchor generator by float32 tensors of the same shapes.

    The generator reads only shape, device and dtype, so the values do not matter.
    """
    images, features = inputs
    return images, [part.new_empty((), dtype=torch.float32).expand(part.shape) for part in features]


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
