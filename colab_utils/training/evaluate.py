"""The objects that a model finds in images, and its COCO average precision on a dataset."""

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.models.detection.transform import resize_boxes

from colab_utils.data.defects import USUAL_DETECTIONS, describe_full_images
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.devices import send
from colab_utils.processes import ThreadPool, map_ahead
from colab_utils.progress import show_progress
from colab_utils.training.layers import choose_precision, keep_boxes_exact
from colab_utils.training.model import allow_detections

# Images that threads decode while the model finds objects.
_AHEAD = 4
# COCOeval does not look at objects of this category.
_UNKNOWN = -1


@dataclass(frozen=True)
class AveragePrecision:
    """COCO average precision, 0 to 1.

    Example:
        >>> print(AveragePrecision(0.25, 0.2, 0.5, 0.4, 60))
        AP of boxes 0.250 (0.500 at IoU 0.5), of masks 0.200 (0.400 at IoU 0.5), 60 images
    """

    bbox: float
    """Average precision of boxes, averaged over IoU 0.50 to 0.95."""
    segm: float
    """Average precision of masks, averaged over IoU 0.50 to 0.95."""
    bbox_50: float
    """Average precision of boxes, at IoU 0.50."""
    segm_50: float
    """Average precision of masks, at IoU 0.50."""
    images: int
    """Images that were evaluated."""
    step: int = 0
    """Steps that ``train`` had done; 0 outside of it."""
    detections: int = USUAL_DETECTIONS
    """The most detections of each class that counted in an image; 100 in COCO's evaluation."""

    def __str__(self) -> str:
        boxes = f"boxes {self.bbox:.3f} ({self.bbox_50:.3f} at IoU 0.5)"
        return (
            f"AP of {boxes}, of masks {self.segm:.3f} ({self.segm_50:.3f} at IoU 0.5), "
            f"{self.images} images"
        )


def evaluate(
    model: nn.Module,
    dataset: ShardDataset | CocoFolder,
    *,
    device: str | torch.device = "cpu",
) -> AveragePrecision:
    """Measure a model's average precision by ``COCOeval``, with at most 100 detections of each
    class in an image.

    If an image has more than 100 objects, as many detections count, and a warning says so. From
    then on, a Mask R-CNN also finds as many objects in an image.

    Crowds count as in ``COCOeval``: detections in them are ignored. On a GPU the model runs in half
    precision. It gets one image at a time.

    Args:
        model: A Mask R-CNN, or another model with the same outputs. Afterwards, it is in the same
            mode (training or evaluation) as before.
        dataset: The dataset of the images. Its ``category_ids`` map the model's labels to COCO
            category ids, so it must have the labels of the training data.
        device: Where the model runs. Default: the CPU.

    Raises:
        ColabUtilsError: The images hold no objects, or one of them is bad.
        UnavailableError: An image on Drive does not come within 300 seconds.

    Example:
        >>> evaluate(nn.Identity(), ShardDataset("no/such/val-shards"))
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: There are no shards in ...
    """
    truth = dataset.to_coco()
    if all(annotation["iscrowd"] for annotation in truth.dataset["annotations"]):
        raise ColabUtilsError(
            f"None of the {len(dataset)} images has objects to measure against. Evaluate on a "
            "dataset with annotations."
        )
    detections = max(USUAL_DETECTIONS, int(dataset.counts.max()))
    full = describe_full_images(dataset.counts)
    if full:
        warnings.warn(full, ColabUtilsWarning, stacklevel=2)
    ids = dataset.category_ids
    results: list[dict[str, Any]] = []
    if isinstance(model, MaskRCNN):
        allow_detections(model, detections)
    with _set_up(model.to(device)), dataset.read_images(), ThreadPool(_AHEAD) as pool:
        loaded = map_ahead(pool, dataset.load_image, range(len(dataset)), ahead=_AHEAD)
        images = show_progress("evaluating", loaded, total=len(dataset), unit="image")
        for image, number in zip(images, dataset.image_ids.tolist(), strict=True):
            results += detect(model, image, image_id=number, category_ids=ids, device=device)
    return _score(truth, results, detections)


@contextmanager
def _set_up(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode with exact boxes and masks that stay in their boxes.
    Afterwards, restore every module's mode.
    """
    modes = [(module, module.training) for module in model.modules()]
    hooks = keep_boxes_exact(model)
    model.eval()
    if isinstance(model, MaskRCNN):
        model.transform.postprocess = _resize_boxes
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes:
            module.training = mode
        if isinstance(model, MaskRCNN):
            del model.transform.postprocess


def _score(truth: Any, results: list[dict[str, Any]], detections: int) -> AveragePrecision:
    """Return the average precision of all results, by pycocotools.

    So many detections of each class count in an image.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    stats = []
    # pycocotools prints to stdout. Its loadRes does not take an empty list.
    with redirect_stdout(io.StringIO()):
        predictions = truth.loadRes(results) if results else COCO()
        for kind in ("bbox", "segm"):
            evaluation = COCOeval(truth, predictions, kind)
            evaluation.params.maxDets = [1, 10, detections]
            evaluation.evaluate()
            evaluation.accumulate()
            # By threshold, recall, class, size of the objects (all come first), and limit of
            # detections. Values of -1 belong to classes without objects. COCOeval's own summary
            # knows no other limit than 100.
            precision = evaluation.eval["precision"][..., 0, -1]
            stats += [values[values > -1].mean() for values in (precision, precision[0])]
    bbox, bbox_50, segm, segm_50 = map(float, stats)
    images = len(truth.dataset["images"])
    return AveragePrecision(bbox, segm, bbox_50, segm_50, images, detections=detections)


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
        model: A model on the device, in the block of `_set_up`.
        image: uint8 [3, H, W].
        image_id: COCO id of the image.
        category_ids: COCO category id of each label. Other labels get an id that no category has.
        device: Where the model runs.
    """
    from pycocotools import mask as coco_mask

    precision = choose_precision(device)
    with torch.autocast(torch.device(device).type, precision, enabled=precision != torch.float32):
        [output] = model([send(image, device).float().div_(255)])
    columns = [output[name].cpu() for name in ("boxes", "labels", "scores", "masks")]
    results = []
    for box, label, score, mask in zip(*columns, strict=True):
        if isinstance(model, MaskRCNN):
            (mask,) = paste_masks_in_image(mask[None].float(), box[None], tuple(image.shape[1:]))
        x0, y0, x1, y1 = box.tolist()
        results.append(
            {
                "image_id": image_id,
                "category_id": category_ids.get(int(label), _UNKNOWN),
                "score": float(score),
                "bbox": [x0, y0, x1 - x0, y1 - y0],
                "segmentation": coco_mask.encode(np.asfortranarray(mask[0] > 0.5, np.uint8)),
            }
        )
    return results


def _resize_boxes(results: Any, resized: Any, sizes: Any) -> Any:
    """Give boxes the sizes of their images, and leave masks as they are.

    It takes the place of ``postprocess`` in torchvision's ``models/detection/transform.py``.
    """
    for result, from_size, to_size in zip(results, resized, sizes, strict=True):
        result["boxes"] = resize_boxes(result["boxes"], from_size, to_size)
    return results
