"""The losses of torchvision's Mask R-CNN on a packed batch: resized on the device, mask targets without dense masks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from colab_utils.loading.batch import PackedBatch
from colab_utils.loading.masks import flip_boxes, sample_masks
from colab_utils.shards.images import fit_size

__all__ = ["compute_losses", "make_input"]


def compute_losses(model: MaskRCNN, batch: PackedBatch, *, flips: Sequence[bool] | None = None) -> dict[str, Tensor]:
    """What ``model(images, targets)`` gives in training mode, from a packed batch on the model's device.

    The model's own backbone, proposals and heads run, with its own settings. Its transform is replaced by
    `make_input`, and each mask target, 28 x 28 pixels, is sampled from the stored bits by ``sample_masks``, where
    torchvision resizes all masks of an image and makes floats of them: memory for masks follows the proposals' boxes,
    not image area times objects. With the same random state the losses are torchvision's own, but for rounding.

    Source: ``GeneralizedRCNN.forward`` and ``RoIHeads.forward`` in torchvision ``models/detection``.

    Args:
        model: in training mode, as ``build_mask_rcnn`` or torchvision makes it.
        batch: B images, with their objects or without any.
        flips: bool [B]: the images to mirror left to right; none by default.

    Returns:
        ``loss_classifier``, ``loss_box_reg``, ``loss_mask``, ``loss_objectness`` and ``loss_rpn_box_reg``: float32
        scalars on the device.

    Example:
        >>> from colab_utils.loading.batch import collate_packed
        >>> from colab_utils.loading.sample import pack_target
        >>> from colab_utils.training.model import LIGHT_MODEL, build_mask_rcnn
        >>> mask = torch.zeros(1, 64, 64, dtype=torch.uint8)
        >>> mask[:, 8:40, 8:40] = 1
        >>> target = {"boxes": torch.tensor([[8.0, 8, 40, 40]]), "labels": torch.tensor([1]), "masks": mask,
        ...           "image_id": 1, "area": torch.tensor([1024.0]), "iscrowd": torch.tensor([0])}
        >>> batch = collate_packed([pack_target(torch.zeros(3, 64, 64, dtype=torch.uint8), target)])
        >>> model = build_mask_rcnn(LIGHT_MODEL, num_classes=2, weights=None, min_size=64)
        >>> sorted(compute_losses(model, batch))
        ['loss_box_reg', 'loss_classifier', 'loss_mask', 'loss_objectness', 'loss_rpn_box_reg']
    """
    images, targets = make_input(model.transform, batch, flips=flips)
    features = model.backbone(images.tensors)
    if isinstance(features, Tensor):
        features = OrderedDict([("0", features)])
    proposals, proposal_losses = model.rpn(images, features, targets)
    heads = model.roi_heads
    checked = [{**target, "masks": target["labels"]} for target in targets]  # it asks for the key, and reads it not
    proposals, matched, labels, regression = heads.select_training_samples(proposals, checked)
    found = heads.box_head(heads.box_roi_pool(features, proposals, images.image_sizes))
    loss_classifier, loss_box_reg = fastrcnn_loss(*heads.box_predictor(found), labels, regression)
    losses = {"loss_classifier": loss_classifier, "loss_box_reg": loss_box_reg}
    positives = [torch.where(label > 0)[0] for label in labels]
    boxes = [proposal[positive] for proposal, positive in zip(proposals, positives, strict=True)]
    objects = [match[positive] for match, positive in zip(matched, positives, strict=True)]
    losses["loss_mask"] = _compute_mask_loss(heads, features, images, boxes, objects, batch, flips)
    return {**losses, **proposal_losses}


def _compute_mask_loss(
    heads: RoIHeads, features: dict[str, Tensor], images: ImageList, boxes: list[Tensor], objects: list[Tensor],
    batch: PackedBatch, flips: Sequence[bool] | None,
) -> Tensor:  # fmt: skip
    """``boxes``: each image's proposals with an object; ``objects``: which of the image's."""
    logits = heads.mask_predictor(heads.mask_head(heads.mask_roi_pool(features, boxes, images.image_sizes)))
    if not len(logits):
        return logits.sum() * 0
    firsts = (torch.cumsum(batch.counts, 0) - batch.counts).tolist()
    of = torch.cat([part + first for part, first in zip(objects, firsts, strict=True)])
    targets = sample_masks(
        batch.masks, of, torch.cat(boxes), sizes=batch.sizes, counts=batch.counts, flips=flips,
        to_sizes=images.image_sizes, size=logits.shape[-1],
    )  # fmt: skip
    chosen = logits[torch.arange(len(of), device=logits.device), batch.labels[of]]
    return functional.binary_cross_entropy_with_logits(chosen.float(), targets)


def make_input(
    transform: GeneralizedRCNNTransform, batch: PackedBatch, *, flips: Sequence[bool] | None = None
) -> tuple[ImageList, list[dict[str, Tensor]]]:
    """A packed batch as the model's backbone takes it, on the batch's device, with the settings of its transform.

    Mirrored, normalised, resized (bilinear) and padded as torchvision does it; where ``transform.min_size`` holds
    several sizes, one is chosen for each image by torch's random state on the CPU, as there.

    Returns:
        The images, float32 [B, 3, H, W], and a target for each: ``boxes``, float32 [N, 4] in pixels of the resized
        image, and ``labels``, int64 [N].
    """
    stored, device = batch.sizes.tolist(), batch.pixels.device
    mirrored = [False] * len(batch) if flips is None else list(flips)
    shortest = [float(transform.torch_choice([*map(int, transform.min_size)])) for _ in stored]
    sizes = [
        fit_size(*size, min_size=side, max_size=transform.max_size) for size, side in zip(stored, shortest, strict=True)
    ]
    scales = np.array(sizes, np.float32)[:, ::-1] / np.array(stored, np.float32)[:, ::-1]
    step = transform.size_divisible
    height, width = (-(-max(sides) // step) * step for sides in zip(*sizes, strict=True))
    mean, std = (
        torch.tensor(values, device=device)[:, None, None] for values in (transform.image_mean, transform.image_std)
    )
    padded = torch.zeros((len(batch), 3, height, width), device=device)
    for row, image, size, flip in zip(padded, batch.split_images(), sizes, mirrored, strict=True):
        normal = (image.flip(2) if flip else image).float().div_(255).sub_(mean).div_(std)[None]
        row[:, : size[0], : size[1]] = functional.interpolate(normal, size, mode="bilinear", align_corners=False)[0]
    of = np.repeat(np.arange(len(batch)), batch.counts.numpy())
    ratios = torch.from_numpy(np.tile(scales, 2)[of]).to(device)
    boxes = batch.boxes
    if any(mirrored):
        widths = torch.from_numpy(batch.sizes[:, 1].numpy()[of]).to(device)
        mask = torch.tensor(mirrored, device=device)[torch.from_numpy(of).to(device)]
        boxes = torch.where(mask[:, None], flip_boxes(boxes, widths), boxes)
    counts = batch.counts.tolist()
    parts = zip((boxes * ratios).split(counts), batch.labels.split(counts), strict=True)
    targets = [{"boxes": part, "labels": labels} for part, labels in parts]
    return ImageList(padded, sizes), targets
