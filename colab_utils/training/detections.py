"""What a model finds in an image, as COCO's results: each mask is drawn in its box, never in the whole image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.roi_heads import expand_boxes, expand_masks
from torchvision.models.detection.transform import resize_boxes

from colab_utils.data.runs import Runs, write_runs
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.dataset import ShardDataset

__all__ = ["Detections", "describe_detections", "detect", "encode_masks"]


class Detections(NamedTuple):
    """What a model found in one image: D objects, on the CPU."""

    image_id: int
    size: tuple[int, int]
    """Height and width of the image, pixels."""
    category_ids: NDArray[np.int64]
    """int64 [D]."""
    scores: NDArray[np.float32]
    """float32 [D], 0 to 1."""
    boxes: NDArray[np.float32]
    """float32 [D, 4]: x0, y0, x1, y1 in pixels of the image."""
    masks: NDArray[Any]
    """float32 [D, 28, 28], 0 to 1, each of its box; of another model than Mask R-CNN uint8 [D, H, W]."""


def detect(model: nn.Module, dataset: ShardDataset, i: int, *, device: str | torch.device) -> Detections:
    """What a model in evaluation mode, on the device, finds in one image; without classes that the dataset has not.

    torchvision's own output would hold a float image of every mask on the device: 4.8 GB for 100 objects in a photo of
    12 megapixels, made in a loop that reads from the device again and again.
    """
    with torch.no_grad():  # not inference_mode: the model caches its anchors and trains with them later
        image = dataset.decode(dataset.read(i)).to(device).float().div_(255)
        if isinstance(model, MaskRCNN):
            found = _find_in_boxes(model, image)
        else:
            found = model([image])[0]
            if "masks" not in found:
                raise ColabUtilsError(
                    f"expected masks from the model, found {', '.join(found)}. Pass a model that finds masks."
                )
            found = {**found, "masks": (found["masks"] > 0.5).byte()}
    labels = found["labels"].tolist()
    known = [place for place, label in enumerate(labels) if label in dataset.category_ids]
    scores, boxes, masks = (found[name].cpu().numpy()[known] for name in ("scores", "boxes", "masks"))
    return Detections(
        image_id=int(dataset.image_ids[i]),
        size=(image.shape[1], image.shape[2]),
        category_ids=np.array([dataset.category_ids[labels[place]] for place in known], np.int64),
        scores=scores,
        boxes=boxes.astype(np.float32),
        masks=masks[:, 0],
    )


def describe_detections(found: Detections) -> list[dict[str, Any]]:
    """Detections as COCO's results, each with its box and its mask."""
    from pycocotools import mask as coco_mask

    if found.masks.dtype == np.uint8:
        rles = [coco_mask.encode(np.asfortranarray(mask)) for mask in found.masks]
    else:
        rles = encode_masks(torch.from_numpy(found.masks), torch.from_numpy(found.boxes), found.size)
    sides = np.concatenate([found.boxes[:, :2], found.boxes[:, 2:] - found.boxes[:, :2]], 1).tolist()
    rows = zip(found.category_ids.tolist(), found.scores.tolist(), sides, rles, strict=True)
    return [
        {"image_id": found.image_id, "category_id": category, "score": score, "bbox": box, "segmentation": rle}
        for category, score, box, rle in rows
    ]


def encode_masks(masks: Tensor, boxes: Tensor, size: Sequence[int]) -> list[dict[str, Any]]:
    """What torchvision pastes into an image of ``size`` (height and width), above 0.5, as compressed RLE.

    Bit for bit the masks of ``paste_masks_in_image`` in torchvision ``models/detection/roi_heads.py``, from ``masks``,
    float32 [D, 28, 28], and ``boxes``, float32 [D, 4] in pixels.

    Example:
        >>> [rle["counts"] for rle in encode_masks(torch.ones(1, 28, 28), torch.tensor([[2.0, 1, 3, 3]]), (4, 6))]
        [b'4<8']
    """
    height, width = size
    parts = [*_draw_runs(masks, boxes, height, width)]
    if not parts:
        return []
    return write_runs(Runs(*map(np.concatenate, zip(*parts, strict=True))), len(masks), height, width)


def _draw_runs(masks: Tensor, boxes: Tensor, height: int, width: int) -> Iterator[Runs]:
    padded, scale = expand_masks(masks[:, None], 1)
    places = expand_boxes(boxes, scale).long().tolist()
    for number, (mask, (x0, y0, x1, y1)) in enumerate(zip(padded, places, strict=True)):
        drawn = functional.interpolate(mask[None], (max(y1 - y0 + 1, 1), max(x1 - x0 + 1, 1)), mode="bilinear")[0, 0]
        left, top = max(x0, 0), max(y0, 0)
        shown = drawn[top - y0 : max(min(y1 + 1, height) - y0, 0), left - x0 : max(min(x1 + 1, width) - x0, 0)] > 0.5
        columns = np.zeros((shown.shape[1], shown.shape[0] + 1), np.int8)  # a 0 ends each
        columns[:, :-1] = shown.numpy().T
        edges = np.flatnonzero(np.diff(columns.ravel(), prepend=0))
        column, row = np.divmod(edges, columns.shape[1])
        yield Runs(np.full(len(edges) // 2, number), column[::2] + left, row[::2] + top, row[1::2] + top)


def _find_in_boxes(model: MaskRCNN, image: Tensor) -> dict[str, Tensor]:
    """``model([image])[0]``, with its masks as the model makes them. Source: torchvision's ``GeneralizedRCNN``."""
    given, _ = model.transform([image])
    features = model.backbone(given.tensors)
    if isinstance(features, Tensor):
        features = {"0": features}
    proposals, _ = model.rpn(given, features)
    (found,), _ = model.roi_heads(features, proposals, given.image_sizes)
    return {**found, "boxes": resize_boxes(found["boxes"], given.image_sizes[0], image.shape[-2:])}
