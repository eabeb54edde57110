"""The objects that a model finds in images. A Mask R-CNN's masks cover only their boxes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.models.detection.transform import resize_boxes

from colab_utils.data.sizes import Size
from colab_utils.loading.devices import send
from colab_utils.training.precision import choose_precision

_RESULT = ("boxes", "labels", "scores", "masks")


# In inference_mode the model would cache anchors that it cannot train with later.
@torch.no_grad()
def detect(
    model: nn.Module, images: Sequence[Tensor], *, device: str | torch.device = "cpu"
) -> list[dict[str, NDArray[Any]]]:
    """Find the objects in a batch of images.

    torchvision pastes every mask into a float image on the device: 4.8 GB for 100 objects in a
    photo of 12 megapixels. Its loop also waits for the device at every mask. This function pastes
    no mask: each one stays a grid of 28 x 28 values that covers its box.

    Args:
        model: A model in evaluation mode, on the device.
        images: uint8 [3, H, W] each.
        device: Where the model runs.

    Returns:
        A dict for each image, with its D objects: ``boxes`` float32 [D, 4] in pixels, ``labels``
        int64 [D], ``scores`` float32 [D], and ``masks`` float32 [D, 28, 28], 0 to 1. If the model
        is no Mask R-CNN, ``masks`` are bool [D, H, W].
    """
    precision = choose_precision(device)
    floats = [send(image, device).float().div_(255) for image in images]
    is_mask_rcnn = isinstance(model, MaskRCNN)
    transform: Any = model.transform if is_mask_rcnn else None
    try:
        if transform:
            transform.postprocess = _resize_boxes
        with torch.autocast(
            torch.device(device).type, precision, enabled=precision != torch.float32
        ):
            results = model(floats)
    finally:
        if transform:
            del transform.postprocess
    answers = []
    for result in results:
        masks = result["masks"][:, 0]
        masks = masks.float() if is_mask_rcnn else masks > 0.5
        answer = {**result, "masks": masks}
        answers.append({name: answer[name].cpu().numpy() for name in _RESULT})
    return answers


def _resize_boxes(
    results: list[dict[str, Tensor]], resized: Sequence[Size], sizes: Sequence[Size]
) -> list[dict[str, Tensor]]:
    """Give boxes in pixels of the image, as torchvision does, and leave the masks in them."""
    for result, before, after in zip(results, resized, sizes, strict=True):
        result["boxes"] = resize_boxes(result["boxes"], before, after)
    return results


def describe_detections(
    detections: Mapping[str, NDArray[Any]],
    *,
    image_id: int,
    size: Sequence[int],
    category_ids: Mapping[int, int],
) -> list[dict[str, Any]]:
    """Return the objects that `detect` found in an image, in COCO's format of results.

    The pixels of a mask are exactly those that torchvision pastes into the image.

    Args:
        detections: The objects of the image.
        image_id: COCO id of the image.
        size: Height and width of the image.
        category_ids: COCO category id of each label. Objects with other labels are left out.
    """
    from pycocotools import mask as coco_mask

    results = []
    for box, label, score, mask in zip(*(detections[name] for name in _RESULT), strict=True):
        if int(label) not in category_ids:
            continue
        if mask.dtype != np.bool_:
            grid = torch.from_numpy(mask)[None, None]
            pasted = paste_masks_in_image(grid, torch.from_numpy(box)[None], tuple(size))
            mask = pasted[0, 0].numpy() > 0.5
        results.append(
            {
                "image_id": image_id,
                "category_id": category_ids[int(label)],
                "score": float(score),
                "bbox": [*box[:2].tolist(), *(box[2:] - box[:2]).tolist()],
                "segmentation": coco_mask.encode(np.asfortranarray(mask, np.uint8)),
            }
        )
    return results
