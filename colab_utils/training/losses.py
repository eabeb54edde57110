"""The forward pass in training: the size of each image in the model's input, and the losses of torchvision's Mask
R-CNN on a packed batch.

All images of a batch are matched, sampled and pooled together, and mask targets are sampled from packed masks: no dense
mask is made, and the device is waited for once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection._utils import BoxCoder, Matcher
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import MultiScaleRoIAlign

from colab_utils.data.masks import number_within
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import PackedBatch
from colab_utils.loading.masks import flip_boxes, sample_masks, send
from colab_utils.shards.images import fit_size
from colab_utils.training import regions
from colab_utils.training.regions import Canvas, Objects, Samples

__all__ = [
    "Augment", "Size", "choose_sizes", "compute_losses", "fit_shape", "list_scales", "make_input", "resize_all",
]  # fmt: skip

Augment = Literal["none", "flip", "multiscale"]
"""Augmentation by name: nothing; random flips left to right; flips, and each image resized to one of several sizes."""

Size = tuple[int, int]
"""Height and width in pixels."""

_SMALLEST, _SCALES = 0.6, 11  # 480 to 800 pixels in steps of 32, as in torchvision's references
_REGIONS = 32  # the mask head takes a multiple of so many on a GPU: each new shape costs cuDNN a new plan


def compute_losses(model: MaskRCNN, batch: PackedBatch, *, flips: Sequence[bool] | None = None) -> dict[str, Tensor]:
    """The losses that ``model(images, targets)`` gives in training mode, from a packed batch on the model's device.

    The model's own layers run, with its own settings. What torchvision does image by image between them is done for
    the whole batch (`colab_utils.training.regions`), and ``sample_masks`` takes each mask target, 28 x 28 pixels, from
    the stored bits. torchvision resizes all masks of an image and makes floats of them; here memory for masks follows
    the boxes of the proposals, not the image's area times its objects. With the same sampled anchors and regions the
    losses equal torchvision's, except for rounding; each is as likely to be sampled as with torchvision.

    Source: ``GeneralizedRCNN.forward`` and ``RoIHeads.forward`` in torchvision ``models/detection``.

    Args:
        model: in training mode, as ``build_mask_rcnn`` or torchvision makes it.
        batch: B images, with or without objects.
        flips: bool [B]: the images to mirror left to right; none by default.

    Returns:
        ``loss_classifier``, ``loss_box_reg``, ``loss_mask``, ``loss_objectness`` and ``loss_rpn_box_reg``: float32
        scalars on the device.

    Raises:
        ColabUtilsError: The model is no Mask R-CNN in training mode, or the batch is not packed.

    Example:
        >>> from colab_utils.loading.batch import collate_packed
        >>> from colab_utils.loading.batch import pack_target
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
    _check_input(model, batch)
    flips = [False] * len(batch) if flips is None else flips
    sizes = choose_sizes(model.transform, batch.sizes.tolist())
    images, objects = make_input(model.transform, batch, sizes, flips=flips)
    features = model.backbone(images)
    if isinstance(features, Tensor):
        features = {"0": features}
    shape, heads = (images.shape[2], images.shape[3]), model.roi_heads
    limits = send(np.array(sizes, np.float32)[:, [1, 0, 1, 0]], images.device)
    proposal_losses, proposals = _compute_proposal_losses(model.rpn, [*features.values()], objects, limits, shape)
    boxes, matched, samples = _pick_regions(heads, proposals, objects)
    canvas = _make_canvas(heads.box_roi_pool, features, shape)
    image_of = torch.arange(len(batch), device=images.device)[:, None].expand_as(matched)
    pooled = heads.box_head(regions.pool_regions(heads.box_roi_pool, canvas, boxes.flatten(0, 1), image_of.flatten()))
    labels = regions.gather_rows(objects.labels, matched) * samples.positive
    scores, said = heads.box_predictor(pooled)
    classified = functional.cross_entropy(scores, labels.flatten(), reduction="none") * samples.exists.flatten()
    of_class = said.view(*labels.shape, -1, 4).gather(2, labels[..., None, None].expand(-1, -1, 1, 4))[:, :, 0]
    wanted, total = regions.gather_rows(objects.boxes, matched), samples.exists.sum()
    if heads.mask_roi_pool.featmap_names != heads.box_roi_pool.featmap_names:
        canvas = _make_canvas(heads.mask_roi_pool, features, shape)
    return {
        "loss_classifier": classified.sum() / total,
        "loss_box_reg": _compare_boxes(heads.box_coder, of_class, wanted, boxes, samples) / total,
        "loss_mask": _compute_mask_loss(heads, canvas, boxes, matched, labels, batch, sizes, flips),
        **proposal_losses,
    }


def _check_input(model: Any, batch: Any) -> None:
    name = type(model).__name__
    problem = ""
    if isinstance(model, DistributedDataParallel | DataParallel):
        problem = f"a plain model, found {name} around it: wrap a module whose forward calls compute_losses instead"
    elif not isinstance(model, GeneralizedRCNN) or not getattr(model.roi_heads, "has_mask", bool)():
        problem = f"a Mask R-CNN of torchvision, found {name}: call model(images, targets) with deliver='dense'"
    elif not model.training:
        problem = "a model in training mode, found one in evaluation mode: call model.train() first"
    elif not isinstance(batch, PackedBatch):
        problem = f"a packed batch, found {type(batch).__name__}: make the loader with deliver='packed'"
    if problem:
        raise ColabUtilsError(f"expected {problem}")


def make_input(
    transform: GeneralizedRCNNTransform, batch: PackedBatch, sizes: Sequence[Size], *, flips: Sequence[bool]
) -> tuple[Tensor, Objects]:
    """A packed batch as the model's backbone takes it, on the batch's device, with the settings of its transform.

    Args:
        transform: of the model.
        batch: B images.
        sizes: height and width that each image is resized to, see `choose_sizes`.
        flips: bool [B]: the images to mirror left to right.

    Returns:
        The images, float32 [B, 3, H, W], mirrored, normalised, resized (bilinear) and padded with zeros as torchvision
        does it; and their objects, boxes in pixels of the resized images.
    """
    device = batch.pixels.device
    mean, std = send(np.array([transform.image_mean, transform.image_std], np.float32), device)[..., None, None]
    shape = fit_shape(sizes, step=transform.size_divisible)
    images = mean.expand(len(batch), 3, *shape).contiguous()  # the mean becomes zero
    pixels, first = batch.pixels.float().div_(255), 0
    for number, ((height, width), size, flip) in enumerate(zip(batch.sizes.tolist(), sizes, flips, strict=True)):
        image = pixels.as_strided((1, 3, height, width), (0, 1, 3 * width, 3), first)
        image = functional.interpolate(image.flip(3) if flip else image, size, mode="bilinear")
        images.as_strided(image.shape, images.stride(), number * images.stride(0)).copy_(image)
        first += 3 * height * width
    return images.sub_(mean).div_(std), _pad_objects(batch, _resize_boxes(batch, sizes, flips))


def _pad_objects(batch: PackedBatch, boxes: Tensor) -> Objects:
    """The objects of each image in as many places as the image with most of them has, one at least."""
    counts, most = batch.counts.numpy(), max(1, *batch.counts.tolist())
    place = send(np.repeat(np.arange(len(batch)) * most, counts) + number_within(counts), boxes.device)
    padded, labels = boxes.new_zeros(len(batch) * most, 4), batch.labels.new_zeros(len(batch) * most)
    exists = send(np.arange(most) < counts[:, None], boxes.device)
    padded.index_copy_(0, place, boxes)
    return Objects(padded.view(-1, most, 4), labels.index_copy_(0, place, batch.labels).view(-1, most), exists)


def _resize_boxes(batch: PackedBatch, sizes: Sequence[Size], flips: Sequence[bool]) -> Tensor:
    """All boxes of a batch, float32 [T, 4], in pixels of the mirrored and resized images."""
    boxes, device = batch.boxes, batch.boxes.device
    image_of = np.repeat(np.arange(len(batch)), batch.counts.numpy())  # the image of each object
    if any(flips):
        widths, mirrored = batch.sizes[:, 1].numpy()[image_of], np.array(flips)[image_of]
        boxes = torch.where(send(mirrored, device)[:, None], flip_boxes(boxes, send(widths, device)), boxes)
    ratios = np.array(sizes, np.float32) / batch.sizes.numpy().astype(np.float32)  # of heights and widths
    return boxes * send(ratios[:, [1, 0, 1, 0]][image_of], device)


def _compute_proposal_losses(
    rpn: RegionProposalNetwork, features: list[Tensor], objects: Objects, limits: Tensor, shape: Size
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """The losses of the proposal network, and its proposals; ``limits`` as `find_proposals` takes them."""
    grids = tuple((part.shape[2], part.shape[3]) for part in features)
    anchors = regions.make_anchors(rpn.anchor_generator, shape, grids, limits.device)
    told = rpn.head(features)
    scores, said = (
        torch.cat([part.permute(0, 2, 3, 1).reshape(len(part), -1, width) for part in parts], 1)
        for parts, width in zip(told, (1, 4), strict=True)
    )
    scores, levels = scores[..., 0], [part[0].numel() for part in told[0]]
    proposals = regions.find_proposals(rpn, scores, said, anchors, levels=levels, limits=limits, side=max(shape))
    matches = regions.match_objects(rpn.proposal_matcher, objects, anchors[None])
    samples = regions.sample_regions(matches, rpn.fg_bg_sampler)
    total = samples.exists.sum()
    wanted = regions.gather_rows(objects.boxes, regions.gather_rows(matches, samples.places).clamp(min=0))
    difference = _compare_boxes(
        rpn.box_coder, regions.gather_rows(said, samples.places), wanted, anchors[samples.places], samples
    )
    found = functional.binary_cross_entropy_with_logits(
        scores.gather(1, samples.places), samples.positive.float(), samples.exists.float(), reduction="sum"
    )
    return {"loss_objectness": found / total, "loss_rpn_box_reg": difference / total}, proposals


def _compare_boxes(coder: BoxCoder, said: Tensor, objects: Tensor, boxes: Tensor, samples: Samples) -> Tensor:
    """How far what a model said of positive boxes is from what it should say; the others do not count."""
    others = ~samples.positive[..., None]
    wanted = regions.encode_boxes(coder, objects, boxes).masked_fill(others, 0.0)
    return functional.smooth_l1_loss(said.masked_fill(others, 0.0), wanted, beta=1 / 9, reduction="sum")


def _pick_regions(
    heads: RoIHeads, proposals: tuple[Tensor, Tensor], objects: Objects
) -> tuple[Tensor, Tensor, Samples]:
    """The regions that the heads are trained on: [B, S, 4], the object that each is compared with, and which count.

    The objects themselves are proposals, too.
    """
    boxes = torch.cat([proposals[0], objects.boxes], 1)
    exists = torch.cat([proposals[1], objects.exists], 1)
    matches = regions.match_objects(heads.proposal_matcher, objects, boxes)
    matches = matches.masked_fill(~exists, Matcher.BETWEEN_THRESHOLDS)  # neither positive nor negative
    samples = regions.sample_regions(matches, heads.fg_bg_sampler)
    return (
        regions.gather_rows(boxes, samples.places),
        regions.gather_rows(matches, samples.places).clamp(min=0),
        samples,
    )


def _make_canvas(pooler: MultiScaleRoIAlign, features: Mapping[str, Tensor], shape: Size) -> Canvas:
    return regions.join_levels([part for name, part in features.items() if name in pooler.featmap_names], shape)


def _compute_mask_loss(
    heads: RoIHeads, canvas: Canvas, boxes: Tensor, matched: Tensor, labels: Tensor, batch: PackedBatch,
    sizes: Sequence[Size], flips: Sequence[bool],
) -> Tensor:  # fmt: skip
    """The loss of the masks of all positive regions.

    ``matched`` has the object of its image that each region is compared with; ``labels`` are 0 for the background.
    """
    # the device is read once for all images: each reading waits for it
    table = torch.cat([boxes.float(), labels[..., None], matched[..., None]], 2).flatten(0, 1).cpu().numpy()
    positive = np.flatnonzero(table[:, 4] > 0)
    image_of = positive // labels.shape[1]
    filled = np.zeros(
        len(positive) if boxes.device.type == "cpu" else -(-len(positive) // _REGIONS) * _REGIONS, np.int64
    )
    filled[: len(positive)] = positive  # cuDNN meets few shapes
    rows = send(filled, boxes.device)
    pooled = regions.pool_regions(heads.mask_roi_pool, canvas, boxes.flatten(0, 1)[rows], rows // labels.shape[1])
    logits = heads.mask_predictor(heads.mask_head(pooled))[: len(positive)]
    if not len(logits):
        return logits.sum() * 0
    first_object = np.cumsum(batch.counts.numpy()) - batch.counts.numpy()  # of each image
    objects = table[positive, 5].astype(np.int64) + first_object[image_of]
    targets = sample_masks(
        batch.masks, torch.from_numpy(objects), torch.from_numpy(table[positive, :4]), sizes=batch.sizes,
        counts=batch.counts, flips=flips, to_sizes=sizes, size=logits.shape[-1],
    )  # fmt: skip
    label = labels.flatten()[rows[: len(positive)]]
    chosen = logits.gather(1, label[:, None, None, None].expand(-1, 1, *logits.shape[2:]))[:, 0]
    return functional.binary_cross_entropy_with_logits(chosen.float(), targets)


def list_scales(min_size: int) -> tuple[int, ...]:
    """The shorter sides of multi-scale training, pixels: 0.6 to 1 of ``min_size``, the usual one last.

    Source: ``DetectionPresetTrain`` of torchvision's references, which takes 480 to 800 in steps of 32.

    Example:
        >>> list_scales(800)
        (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)
    """
    return tuple(int(side) for side in np.linspace(_SMALLEST * min_size, min_size, _SCALES).round())


def choose_sizes(transform: GeneralizedRCNNTransform, sizes: Sequence[Sequence[int]]) -> list[Size]:
    """The size that a model's transform gives each image in training; random where it has several ``min_size``.

    Source: ``GeneralizedRCNNTransform.resize`` of torchvision, with its ``_skip_resize`` and ``fixed_size``; the random
    numbers are the same ones, of torch on the CPU.

    Args:
        transform: of the model.
        sizes: height and width of each image, as stored.

    Example:
        >>> choose_sizes(GeneralizedRCNNTransform(800, 1333, [0], [1]), [(480, 640)])
        [(800, 1066)]
    """
    if transform._skip_resize:
        return [(height, width) for height, width in sizes]
    sides = [*transform.min_size]
    return [_resize(transform, size, transform.torch_choice(sides) if sides[1:] else sides[0]) for size in sizes]


def resize_all(
    sizes: NDArray[np.integer], transform: GeneralizedRCNNTransform, *, training: bool = True
) -> NDArray[np.int64]:
    """The largest size that a model's transform gives each image, int [I, 2] in pixels, as ``sizes``.

    Example:
        >>> resize_all(np.array([[480, 640]]), GeneralizedRCNNTransform((480, 800), 1333, [0], [1])).tolist()
        [[800, 1066]]
    """
    if training and transform._skip_resize:
        return sizes.astype(np.int64)
    side = max(transform.min_size) if training else transform.min_size[-1]
    return np.array([_resize(transform, size, side) for size in sizes.tolist()], np.int64).reshape(-1, 2)


def _resize(transform: GeneralizedRCNNTransform, size: Sequence[int], side: float) -> Size:
    if transform.fixed_size is not None:  # width and height
        return int(transform.fixed_size[1]), int(transform.fixed_size[0])
    return fit_size(*size, min_size=float(side), max_size=transform.max_size)


def fit_shape(sizes: Iterable[Sequence[int]], *, step: int) -> Size:
    """The shape that a batch of images of these sizes is padded to, as torchvision does it: the largest sides, each
    rounded up to a multiple of ``step``.

    Example:
        >>> fit_shape([(800, 1066), (750, 1000)], step=32)
        (800, 1088)
    """
    height, width = (-(-max(sides) // step) * step for sides in zip(*sizes, strict=True))
    return height, width
