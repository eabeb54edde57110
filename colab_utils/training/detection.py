"""The objects that a model finds in images. A Mask R-CNN's masks cover only their boxes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import expand_boxes, expand_masks
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
    with torch.autocast(torch.device(device).type, precision, enabled=precision != torch.float32):
        # A generator makes one float image at a time, because photos may be large.
        floats = (send(image, device).float().div_(255) for image in images)
        if isinstance(model, MaskRCNN):
            sizes = [(image.shape[1], image.shape[2]) for image in images]
            results = _find_in_boxes(model, floats, sizes)
        else:
            answers = model([*floats])
            results = [{**answer, "masks": answer["masks"][:, 0] > 0.5} for answer in answers]
    return [{name: result[name].cpu().numpy() for name in _RESULT} for result in results]


def _find_in_boxes(
    model: MaskRCNN, images: Iterable[Tensor], sizes: Sequence[Size]
) -> list[dict[str, Tensor]]:
    """Return the result of ``model(images)``, but with masks that are not pasted into the image.

    Source: ``GeneralizedRCNN.forward`` in torchvision's ``models/detection``.
    """
    transform = model.transform
    resized = [transform.resize(transform.normalize(image))[0] for image in images]
    padded = transform.batch_images(resized, transform.size_divisible)
    batch = ImageList(padded, [(image.shape[1], image.shape[2]) for image in resized])
    features = model.backbone(batch.tensors)
    if isinstance(features, Tensor):
        features = {"0": features}
    proposals, _ = model.rpn(batch, features)
    results, _ = model.roi_heads(features, proposals, batch.image_sizes)
    for result, resized_size, size in zip(results, batch.image_sizes, sizes, strict=True):
        result["boxes"] = resize_boxes(result["boxes"], resized_size, size)
        result["masks"] = result["masks"][:, 0].float()
    return list(results)


def describe_detections(
    detections: Mapping[str, NDArray[Any]],
    *,
    image_id: int,
    size: Sequence[int],
    category_ids: Mapping[int, int],
) -> list[dict[str, Any]]:
    """Return the objects that `detect` found in an image, in COCO's format of results.

    Args:
        detections: The objects of the image.
        image_id: COCO id of the image.
        size: Height and width of the image.
        category_ids: COCO category id of each label. Objects with other labels are left out.
    """
    from pycocotools import mask as coco_mask

    known = np.isin(detections["labels"], list(category_ids))
    boxes = detections["boxes"][known]
    masks = detections["masks"][known]
    if masks.dtype == np.bool_:
        rles = [coco_mask.encode(np.asfortranarray(mask, np.uint8)) for mask in masks]
    else:
        rles = encode_masks(torch.from_numpy(masks), torch.from_numpy(boxes), size)
    sides = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1).tolist()
    labels = detections["labels"][known].tolist()
    scores = detections["scores"][known].tolist()
    rows = zip(labels, scores, sides, rles, strict=True)
    return [
        {
            "image_id": image_id,
            "category_id": category_ids[label],
            "score": score,
            "bbox": box,
            "segmentation": rle,
        }
        for label, score, box, rle in rows
    ]


def encode_masks(masks: Tensor, boxes: Tensor, size: Sequence[int]) -> list[dict[str, Any]]:
    """Paste masks into an image, and encode the pixels above 0.5 as compressed RLE.

    The encoded pixels are exactly those of ``paste_masks_in_image`` in torchvision's
    ``models/detection/roi_heads.py``.

    Args:
        masks: float32 [D, 28, 28], 0 to 1.
        boxes: float32 [D, 4] in pixels.
        size: Height and width of the image.

    Example:
        >>> boxes = torch.tensor([[2.0, 1, 3, 3]])
        >>> [rle["counts"] for rle in encode_masks(torch.ones(1, 28, 28), boxes, (4, 6))]
        [b'4<8']
    """
    from pycocotools import mask as coco_mask

    height, width = size
    padded, scale = expand_masks(masks[:, None], 1)
    corners = expand_boxes(boxes, scale).long().tolist()
    rles = []
    for mask, (x0, y0, x1, y1) in zip(padded, corners, strict=True):
        drawn_size = (max(y1 - y0 + 1, 1), max(x1 - x0 + 1, 1))
        drawn = functional.interpolate(mask[None], drawn_size, mode="bilinear")[0, 0] > 0.5
        left = max(x0, 0)
        top = max(y0, 0)
        right = max(min(x1 + 1, width), x0)
        bottom = max(min(y1 + 1, height), y0)
        shown = drawn[top - y0 : bottom - y0, left - x0 : right - x0]
        canvas = np.zeros((height, width), np.uint8, order="F")
        canvas[top : top + shown.shape[0], left : left + shown.shape[1]] = shown.numpy()
        rles.append(coco_mask.encode(canvas))
    return rles
