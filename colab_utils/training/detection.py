"""The objects that a model finds in an image. A Mask R-CNN's masks cover only their boxes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.models.detection.transform import resize_boxes

from colab_utils.data.sizes import Size
from colab_utils.loading.devices import send
from colab_utils.training.precision import choose_precision


# In inference_mode the model would cache anchors that it cannot train with later.
@torch.no_grad()
def detect(
    model: Any,
    image: Tensor,
    *,
    image_id: int,
    category_ids: Mapping[int, int],
    device: str | torch.device = "cpu",
) -> list[dict[str, Any]]:
    """Find the objects in an image, and return them in COCO's format of results.

    torchvision pastes every mask into a float image on the device: 4.8 GB for 100 objects in a
    photo of 12 megapixels. Its loop also waits for the device at every mask. This function leaves
    the masks as they are, 28 x 28 values that cover their boxes, and pastes one at a time on the
    CPU. The pixels are exactly those of torchvision.

    Args:
        model: A model in evaluation mode, on the device.
        image: uint8 [3, H, W].
        image_id: COCO id of the image.
        category_ids: COCO category id of each label. Objects with other labels are left out.
        device: Where the model runs.
    """
    from pycocotools import mask as coco_mask

    precision = choose_precision(device)
    is_mask_rcnn = isinstance(model, MaskRCNN)
    if is_mask_rcnn:
        model.transform.postprocess = _resize_boxes
    try:
        with torch.autocast(
            torch.device(device).type, precision, enabled=precision != torch.float32
        ):
            (output,) = model([send(image, device).float().div_(255)])
    finally:
        if is_mask_rcnn:
            del model.transform.postprocess
    columns = [output[name].cpu() for name in ("boxes", "labels", "scores", "masks")]
    results = []
    for box, label, score, mask in zip(*columns, strict=True):
        if int(label) not in category_ids:
            continue
        if is_mask_rcnn:
            (mask,) = paste_masks_in_image(mask[None].float(), box[None], tuple(image.shape[1:]))
        x0, y0, x1, y1 = box.tolist()
        results.append(
            {
                "image_id": image_id,
                "category_id": category_ids[int(label)],
                "score": float(score),
                "bbox": [x0, y0, x1 - x0, y1 - y0],
                "segmentation": coco_mask.encode(np.asfortranarray(mask[0] > 0.5, np.uint8)),
            }
        )
    return results


def _resize_boxes(
    results: list[dict[str, Tensor]], resized: Sequence[Size], sizes: Sequence[Size]
) -> list[dict[str, Tensor]]:
    """Give boxes in pixels of the image, as torchvision does, and leave the masks in them."""
    for result, before, after in zip(results, resized, sizes, strict=True):
        result["boxes"] = resize_boxes(result["boxes"], before, after)
    return results
