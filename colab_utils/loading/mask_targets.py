"""Mask targets of proposals for Mask R-CNN's loss, made from a few masks at a time."""

from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torchvision.models.detection.roi_heads import project_masks_on_boxes

from colab_utils.data.sizes import Size
from colab_utils.loading.devices import send
from colab_utils.loading.masks import CHUNK_BYTES, MaskBits, expand_masks


@torch.no_grad()
def sample_masks(
    masks: MaskBits,
    objects: Tensor,
    boxes: Tensor,
    *,
    stored_size: list[int],
    to_size: Size,
    is_flipped: bool,
    size: int,
) -> Tensor:
    """Return the mask targets of R proposals of one image, from its packed masks.

    They are torchvision's own. Only masks that a proposal belongs to are expanded, a few at a time:
    the memory grows neither with the number of objects nor with the number of proposals.

    Args:
        masks: The packed masks of the image's N objects.
        objects: int64 [R]: index of each proposal's object among the N. It is read on the CPU. If
            it is on a GPU, the call waits for the GPU.
        boxes: float [R, 4]: x0, y0, x1, y1 of each proposal, in pixels of the mirrored and resized
            image. All are finite.
        stored_size: Height and width of the stored image in pixels.
        to_size: Height and width in pixels after resizing. Masks are resized by nearest neighbour.
        is_flipped: Whether the image is mirrored left to right.
        size: Rows and columns of a target: 28 in Mask R-CNN.

    Returns:
        float32 [R, size, size] from 0 to 1, on the device of the bits.

    Example:
        >>> crops = torch.tensor([[1, 0, 3, 2]], dtype=torch.int32)
        >>> bits = torch.tensor([0b10110000], dtype=torch.uint8)
        >>> masks = MaskBits(bits, crops, torch.tensor([0, 1]))
        >>> box, image = torch.tensor([[0.0, 0.0, 4.0, 2.0]]), [2, 4]
        >>> objects = torch.tensor([0])
        >>> sizes = {"stored_size": image, "to_size": image, "size": 2}
        >>> sample_masks(masks, objects, box, is_flipped=False, **sizes).tolist()
        [[[0.625, 0.125], [0.75, 0.25]]]
    """
    device = masks.bits.device
    targets = torch.empty(len(objects), size, size, device=device)
    owners, places = np.unique(objects.cpu().numpy(), return_inverse=True)
    # A pixel of a resized mask takes one byte, and four as float32.
    mask_bytes = prod(stored_size) + 5 * prod(to_size)
    count = max(1, CHUNK_BYTES[device.type] // mask_bytes)
    for first in range(0, len(owners), count):
        few = owners[first : first + count]
        part = MaskBits(masks.bits, masks.crops[few], masks.offsets[few])
        [dense] = expand_masks(part, [stored_size], [len(few)])
        if is_flipped:
            dense = dense.flip(2)
        resized = functional.interpolate(dense[:, None], to_size)[:, 0]
        rows = np.flatnonzero(places // count == first // count)
        row, place = send(np.stack([rows, places[rows] - first]), device)
        targets[row] = project_masks_on_boxes(resized, boxes[row], place, size).float()
    return targets
