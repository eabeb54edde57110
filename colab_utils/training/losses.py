"""The forward pass in training: the losses of torchvision's Mask R-CNN on a packed batch.

All images of a batch are resized, matched, sampled and pooled together: tensors [B, ...] on the
device. torchvision goes image by image, and asks the device again and again how many boxes are
left: a fast GPU then waits for its next call. Here each step has a fixed number of places, and a
mask says which of them count. Mask targets are sampled from packed masks: no dense mask is made,
and the device is waited for once.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from math import log2
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler, BoxCoder, Matcher
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import MultiScaleRoIAlign, nms, roi_align

from colab_utils.data.sizes import fit_size
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import PackedBatch
from colab_utils.loading.masks import flip_boxes, sample_masks, send

Augment = Literal["none", "flip"]
"""Augmentation by name: nothing, or random flips left to right."""

Size = tuple[int, int]
"""Height and width in pixels."""

# the mask head takes a multiple of so many on a GPU: each new shape costs cuDNN a new plan
_REGIONS = 32
# of an object and a box that are compared at once, 40 bytes each
_PAIRS = {"cuda": 1 << 25, "cpu": 1 << 21}
# of one call: a GPU compares all pairs, in n² / 8 bytes
_NMS_BOXES = {"cuda": 1 << 15, "cpu": 1 << 12}
_KEPT_SHAPES = 16  # of anchors: 4 MB each


class Objects(NamedTuple):
    """The objects of B images, G places for each."""

    boxes: Tensor
    """float32 [B, G, 4]: x0, y0, x1, y1 in pixels of the resized image."""
    labels: Tensor
    """int64 [B, G]."""
    exists: Tensor
    """bool [B, G]."""


class Samples(NamedTuple):
    """The boxes of B images that a loss looks at, S places for each; positive ones come first."""

    places: Tensor
    """int64 [B, S]: where each box lies among those that it was picked from."""
    positive: Tensor
    """bool [B, S]."""
    exists: Tensor
    """bool [B, S]: whether the place holds a box."""


class Canvas(NamedTuple):
    """The levels of a feature pyramid side by side in one tensor, so that regions of all levels are
    pooled at once.
    """

    features: Tensor
    """float32 [B, C, H, W]."""
    levels: Tensor
    """float32 [L, 5]: of each level its scale, and where it starts: x, y, x, y."""
    finest: float
    """How many times the first level is halved: 2 for a scale of a quarter."""


def compute_losses(
    model: MaskRCNN, batch: PackedBatch, *, flips: Sequence[bool] | None = None
) -> dict[str, Tensor]:
    """The losses that ``model(images, targets)`` gives in training mode, from a packed batch on the
    model's device.

    The model's own layers run, with its own settings. What torchvision does image by image between
    them is done for the whole batch, and ``sample_masks`` takes each mask target, 28 x 28 pixels,
    from the stored bits. torchvision resizes all masks of an image and makes floats of them; here
    memory for masks follows the boxes of the proposals, not the image's area times its objects.
    With the same sampled anchors and regions the losses equal torchvision's, except for rounding;
    each is as likely to be sampled as with torchvision.

    Source: ``GeneralizedRCNN.forward`` and ``RoIHeads.forward`` in torchvision
    ``models/detection``.

    Args:
        model: in training mode, as ``build_mask_rcnn`` or torchvision makes it.
        batch: B images, with or without objects.
        flips: bool [B]: the images to mirror left to right; none by default.

    Returns:
        ``loss_classifier``, ``loss_box_reg``, ``loss_mask``, ``loss_objectness`` and
        ``loss_rpn_box_reg``: float32 scalars on the device.

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
    proposal_losses, proposals = _compute_proposal_losses(
        model.rpn, [*features.values()], objects, limits, shape
    )
    # the objects themselves are proposals, too
    boxes, exists = (
        torch.cat(pair, 1) for pair in zip(proposals, (objects.boxes, objects.exists), strict=True)
    )
    samples, matched = _pick(heads, objects, boxes, exists)
    boxes = gather_rows(boxes, samples.places)
    canvas = _make_canvas(heads.box_roi_pool, features, shape)
    image_of = torch.arange(len(batch), device=images.device)[:, None].expand_as(matched)
    pooled = heads.box_head(
        pool_regions(heads.box_roi_pool, canvas, boxes.flatten(0, 1), image_of.flatten())
    )
    labels = gather_rows(objects.labels, matched) * samples.positive
    scores, said = heads.box_predictor(pooled)
    classified = (
        functional.cross_entropy(scores, labels.flatten(), reduction="none")
        * samples.exists.flatten()
    )
    of_class = said.view(*labels.shape, -1, 4).gather(
        2, labels[..., None, None].expand(-1, -1, 1, 4)
    )[:, :, 0]
    wanted, total = gather_rows(objects.boxes, matched), samples.exists.sum()
    if heads.mask_roi_pool.featmap_names != heads.box_roi_pool.featmap_names:
        canvas = _make_canvas(heads.mask_roi_pool, features, shape)
    return {
        "loss_classifier": classified.sum() / total,
        "loss_box_reg": _compare_boxes(heads.box_coder, of_class, wanted, boxes, samples) / total,
        "loss_mask": _compute_mask_loss(heads, canvas, boxes, matched, labels, batch, sizes, flips),
        **proposal_losses,
    }


def _check_input(model: Any, batch: Any) -> None:
    name, wrappers = type(model).__name__, (DistributedDataParallel, DataParallel)
    if isinstance(model, wrappers):
        problem = (
            f"a plain model, found {name} around it: wrap a module whose forward calls "
            "compute_losses instead"
        )
    elif not isinstance(model, MaskRCNN):
        problem = (
            f"a Mask R-CNN of torchvision, found {name}: call model(images, targets) with "
            "deliver='dense'"
        )
    elif not model.training:
        problem = "a model in training mode, found one in evaluation mode: call model.train() first"
    elif not isinstance(batch, PackedBatch):
        problem = (
            f"a packed batch, found {type(batch).__name__}: make the loader with deliver='packed'"
        )
    else:
        return
    raise ColabUtilsError(f"expected {problem}")


def choose_sizes(transform: GeneralizedRCNNTransform, sizes: Sequence[Sequence[int]]) -> list[Size]:
    """The size that a model's transform gives each image; in training random where it has several
    ``min_size``.

    Source: ``GeneralizedRCNNTransform.resize`` of torchvision, with its ``_skip_resize`` and
    ``fixed_size``; the random numbers are the same ones, of torch on the CPU.

    Args:
        transform: of the model, in training or evaluation mode.
        sizes: height and width of each image, as stored.

    Example:
        >>> choose_sizes(GeneralizedRCNNTransform(800, 1333, [0], [1]), [(480, 640)])
        [(800, 1066)]
    """
    if transform.training and transform._skip_resize:
        return [(height, width) for height, width in sizes]
    sides = [*transform.min_size] if transform.training else [transform.min_size[-1]]
    chosen = [transform.torch_choice(sides) if sides[1:] else sides[0] for _ in sizes]
    if transform.fixed_size is not None:
        width, height = transform.fixed_size
        return [(height, width)] * len(sizes)
    longest = transform.max_size
    return [
        fit_size(*size, min_size=float(one), max_size=longest)
        for size, one in zip(sizes, chosen, strict=True)
    ]


def fit_shape(sizes: Iterable[Sequence[int]], *, step: int) -> Size:
    """The shape that a batch of images of these sizes is padded to, as torchvision does it: the
    largest sides, each rounded up to a multiple of ``step``.

    Example:
        >>> fit_shape([(800, 1066), (750, 1000)], step=32)
        (800, 1088)
    """
    height, width = (-(-max(sides) // step) * step for sides in zip(*sizes, strict=True))
    return height, width


def make_input(
    transform: GeneralizedRCNNTransform,
    batch: PackedBatch,
    sizes: Sequence[Size],
    *,
    flips: Sequence[bool],
) -> tuple[Tensor, Objects]:
    """A packed batch as the model's backbone takes it, on the batch's device, with the settings of
    its transform.

    Args:
        transform: of the model.
        batch: B images.
        sizes: height and width that each image is resized to, see `choose_sizes`.
        flips: bool [B]: the images to mirror left to right.

    Returns:
        The images, float32 [B, 3, H, W], mirrored, normalised, resized (bilinear) and padded with
        zeros as torchvision does it; and their objects, boxes in pixels of the resized images.
    """
    device = batch.pixels.device
    mean, std = send(np.array([transform.image_mean, transform.image_std], np.float32), device)[
        ..., None, None
    ]
    shape = fit_shape(sizes, step=transform.size_divisible)
    images = mean.expand(len(batch), 3, *shape).contiguous()  # the mean becomes zero
    pixels, first = batch.pixels.float().div_(255), 0
    for number, ((height, width), size, flip) in enumerate(
        zip(batch.sizes.tolist(), sizes, flips, strict=True)
    ):
        image = pixels.as_strided((1, 3, height, width), (0, 1, 3 * width, 3), first)
        image = functional.interpolate(image.flip(3) if flip else image, size, mode="bilinear")
        images.as_strided(image.shape, images.stride(), number * images.stride(0)).copy_(image)
        first += 3 * height * width
    return images.sub_(mean).div_(std), _pad_objects(batch, sizes, flips)


def _pad_objects(batch: PackedBatch, sizes: Sequence[Size], flips: Sequence[bool]) -> Objects:
    """The mirrored and resized objects of each image, in as many places as the image with most of
    them has, or one.
    """
    counts, device = batch.counts.numpy(), batch.boxes.device
    exists = np.arange(max(1, *counts.tolist())) < counts[:, None]
    place = send(np.flatnonzero(exists), device)
    boxes = (
        batch.boxes.new_zeros(exists.size, 4)
        .index_copy_(0, place, batch.boxes)
        .view(*exists.shape, 4)
    )
    labels = (
        batch.labels.new_zeros(exists.size).index_copy_(0, place, batch.labels).view(exists.shape)
    )
    stored = batch.sizes.numpy().astype(np.float32)
    if any(flips):
        mirrored = send(np.array(flips)[:, None, None], device)
        boxes = torch.where(mirrored, flip_boxes(boxes, send(stored[:, 1:], device)), boxes)
    ratios = np.array(sizes, np.float32) / stored  # of heights and widths
    return Objects(
        boxes * send(ratios[:, None, [1, 0, 1, 0]], device), labels, send(exists, device)
    )


def _compute_proposal_losses(
    rpn: RegionProposalNetwork,
    features: list[Tensor],
    objects: Objects,
    limits: Tensor,
    shape: Size,
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """The losses of the proposal network, and its proposals; ``limits`` as `find_proposals` takes
    them.
    """
    grids = tuple((part.shape[2], part.shape[3]) for part in features)
    anchors = make_anchors(rpn.anchor_generator, shape, grids, limits.device)
    told = rpn.head(features)
    scores, said = (
        torch.cat([part.permute(0, 2, 3, 1).reshape(len(part), -1, width) for part in parts], 1)
        for parts, width in zip(told, (1, 4), strict=True)
    )
    scores, levels = scores[..., 0], [part[0].numel() for part in told[0]]
    proposals = find_proposals(
        rpn, scores, said, anchors, levels=levels, limits=limits, side=max(shape)
    )
    samples, matched = _pick(rpn, objects, anchors[None])
    places, total, wanted = (
        samples.places,
        samples.exists.sum(),
        gather_rows(objects.boxes, matched),
    )
    difference = _compare_boxes(
        rpn.box_coder, gather_rows(said, places), wanted, anchors[places], samples
    )
    found = functional.binary_cross_entropy_with_logits(
        scores.gather(1, places), samples.positive.float(), samples.exists.float(), reduction="sum"
    )
    return {"loss_objectness": found / total, "loss_rpn_box_reg": difference / total}, proposals


@lru_cache(maxsize=_KEPT_SHAPES)
def make_anchors(
    generator: AnchorGenerator,
    shape: tuple[int, int],
    grids: tuple[tuple[int, int], ...],
    device: torch.device,
) -> Tensor:
    """The anchors of an image of a padded ``shape`` with features of these ``grids``: float32 [A,
    4] in pixels.
    """
    images = ImageList(torch.empty((), device=device).expand(1, 1, *shape), [shape])
    anchors: Tensor = generator(
        images, [torch.empty((), device=device).expand(1, 1, *grid) for grid in grids]
    )[0]
    return anchors


@torch.no_grad()
def find_proposals(
    rpn: RegionProposalNetwork,
    scores: Tensor,
    said: Tensor,
    anchors: Tensor,
    *,
    levels: Sequence[int],
    limits: Tensor,
    side: int,
) -> tuple[Tensor, Tensor]:
    """The proposals of each image, as ``RegionProposalNetwork.filter_proposals`` finds them.

    Args:
        rpn: of the model, with its limits.
        scores: float32 [B, A], before the sigmoid.
        said: float32 [B, A, 4]: what the network says of each anchor.
        anchors: float32 [A, 4].
        levels: how many of the anchors belong to each level.
        limits: float32 [B, 4]: width, height, width, height of each image in pixels.
        side: the longer side of the padded images.

    Returns:
        float32 [B, P, 4] in pixels, the best first, and bool [B, P]: whether the place holds a
        proposal.
    """
    counts, starts = [min(rpn.pre_nms_top_n(), count) for count in levels], accumulate([0, *levels])
    parts = zip(scores.split(list(levels), 1), counts, starts, strict=False)
    index = torch.cat([part.topk(count, 1).indices + start for part, count, start in parts], 1)
    boxes = decode_boxes(rpn.box_coder, gather_rows(said, index), anchors[index])
    boxes = boxes.clamp_(min=0).minimum(limits.unsqueeze(1))
    score = scores.gather(1, index).sigmoid()
    start, end = boxes.split(2, -1)
    large = (end - start >= rpn.min_size).all(2) & (score >= rpn.score_thresh)
    # boxes of different levels and images are moved apart, so that none suppresses another
    across = send(np.repeat(np.arange(len(levels)), counts), index.device).expand_as(index)
    down = torch.arange(len(index), device=index.device)[:, None].expand_as(index)
    apart = boxes + (torch.stack([across, down], 2) * (side + 1)).repeat(1, 1, 2)
    alive, count = (
        torch.zeros_like(score, dtype=torch.bool),
        max(1, _NMS_BOXES[boxes.device.type] // index.shape[1]),
    )
    flat = (part.flatten(0, 1).split(count * index.shape[1]) for part in (apart, score, alive))
    for together, ranks, lives in zip(*flat, strict=True):
        lives.index_fill_(0, nms(together, ranks, rpn.nms_thresh), True)
    top = score.masked_fill(~(alive & large), -1.0).topk(
        min(rpn.post_nms_top_n(), index.shape[1]), 1
    )
    return gather_rows(boxes, top.indices), top.values >= 0


def match_objects(matcher: Matcher, objects: Objects, boxes: Tensor) -> Tensor:
    """What ``matcher(box_iou(objects, boxes))`` gives for each image, without the whole matrix of
    pairs.

    Args:
        matcher: torchvision's.
        objects: of B images.
        boxes: float32 [B, N, 4], or [1, N, 4] where all images have the same.

    Returns:
        int64 [B, N]: the object of each box, -1 for none, -2 for one between the thresholds.

    Example:
        >>> found = Objects(torch.tensor([[[0.0, 0, 4, 4]]]), torch.tensor([[1]]), torch.tensor([[True]]))
        >>> boxes = torch.tensor([[[0.0, 0, 4, 4], [0, 0, 4, 2], [6, 6, 9, 9]]])
        >>> match_objects(Matcher(0.7, 0.3, allow_low_quality_matches=True), found, boxes).tolist()
        [[0, -2, -1]]
    """
    chunks = boxes.split(max(1, _PAIRS[boxes.device.type] // objects.exists.numel()), 1)
    only = [_compute_overlaps(objects, boxes)] if len(chunks) == 1 else []

    def compare() -> Iterable[Tensor]:
        return only or (_compute_overlaps(objects, chunk) for chunk in chunks)

    best, index, highest = zip(*((*part.max(1), part.amax(2)) for part in compare()), strict=True)
    value, every = torch.cat(best, 1), torch.cat(index, 1)
    matches = every.masked_fill(value < matcher.high_threshold, matcher.BETWEEN_THRESHOLDS)
    matches = matches.masked_fill(value < matcher.low_threshold, matcher.BELOW_LOW_THRESHOLD)
    if not matcher.allow_low_quality_matches:
        return matches
    # an object keeps the boxes that overlap it most, even if the overlap is small
    most = torch.stack(highest).amax(0).masked_fill_(~objects.exists, 2.0)
    closest = torch.cat([(part == most[..., None]).any(1) for part in compare()], 1)
    return torch.where(closest, every, matches)


def _compute_overlaps(objects: Objects, boxes: Tensor) -> Tensor:
    """The intersection over union of every object with every box, [B, G, N]; -1 where there is no
    object.
    """
    left, top, right, bottom = objects.boxes.unsqueeze(2).unbind(3)
    x0, y0, x1, y1 = boxes.unsqueeze(1).unbind(3)
    shared = torch.minimum(right, x1).sub_(torch.maximum(left, x0)).clamp_(min=0)
    shared *= torch.minimum(bottom, y1).sub_(torch.maximum(top, y0)).clamp_(min=0)
    either = (right - left) * (bottom - top) + (x1 - x0) * (y1 - y0) - shared
    return shared.div_(either).masked_fill_(~objects.exists.unsqueeze(2), -1.0)


def sample_regions(matches: Tensor, sampler: BalancedPositiveNegativeSampler) -> Samples:
    """Pick as many boxes of each image by chance, and at most as many positive ones, as
    torchvision's ``sampler`` does.

    Every positive box is as likely as any other, and so is every negative one: those with the
    highest random keys are taken. torchvision draws with ``nonzero`` and ``randperm``.

    Args:
        matches: int64 [B, N], as `match_objects` gives them.
        sampler: of the model.

    Example:
        >>> found = sample_regions(torch.tensor([[0, 1, -1]]), BalancedPositiveNegativeSampler(2, 0.5))
        >>> found.positive.tolist(), found.places[0, 1].item()
        ([[True, False]], 2)
    """
    positive, negative = matches >= 0, matches == Matcher.BELOW_LOW_THRESHOLD
    keys, number = torch.rand(matches.shape, device=matches.device), matches.shape[1]
    most = min(int(sampler.batch_size_per_image * sampler.positive_fraction), number)
    lowest = (
        keys.masked_fill(~positive, -1.0).topk(most, 1).values[:, -1:]
        if most
        else keys.new_full((1, 1), 2.0)
    )
    chosen = positive & (keys >= lowest)
    ranks = torch.where(chosen, keys + 2, keys.masked_fill(~negative, -1.0))
    top = ranks.topk(min(sampler.batch_size_per_image, number), 1)
    return Samples(top.indices, top.values >= 2, top.values >= 0)


def gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """``values[b, index[b, s]]``: [B, S, ...] of values [B, N, ...] by index [B, S]."""
    return values.gather(
        1, index if values.ndim == 2 else index[..., None].expand(-1, -1, values.shape[2])
    )


def _pick(
    part: Any, objects: Objects, boxes: Tensor, exists: Tensor | None = None
) -> tuple[Samples, Tensor]:
    """Which boxes a ``part`` of the model is trained on, and the object that each is compared with,
    int64 [B, S].
    """
    matches = match_objects(part.proposal_matcher, objects, boxes)
    if exists is not None:
        # neither positive nor negative
        matches = matches.masked_fill(~exists, Matcher.BETWEEN_THRESHOLDS)
    samples = sample_regions(matches, part.fg_bg_sampler)
    return samples, gather_rows(matches, samples.places).clamp(min=0)


def _compare_boxes(
    coder: BoxCoder, said: Tensor, objects: Tensor, boxes: Tensor, samples: Samples
) -> Tensor:
    """How far what a model said of positive boxes is from what it should say; the others do not
    count.
    """
    others = ~samples.positive[..., None]
    wanted = encode_boxes(coder, objects, boxes).masked_fill(others, 0.0)
    return functional.smooth_l1_loss(
        said.masked_fill(others, 0.0), wanted, beta=1 / 9, reduction="sum"
    )


def encode_boxes(coder: BoxCoder, objects: Tensor, boxes: Tensor) -> Tensor:
    """What a model should say of ``boxes`` whose objects are ``objects``: float32 [..., 4], as
    ``BoxCoder.encode``.
    """
    (start, end), (object_start, object_end) = boxes.split(2, -1), objects.split(2, -1)
    sides, object_sides = end - start, object_end - object_start
    moved = (object_start - start).add_(object_sides - sides, alpha=0.5)
    return torch.cat([moved / sides, torch.log(object_sides / sides)], -1) * _weights(
        coder, boxes.device
    )


def decode_boxes(coder: BoxCoder, said: Tensor, boxes: Tensor) -> Tensor:
    """The boxes that a model means by what it ``said`` of ``boxes``: float32 [..., 4], as
    ``BoxCoder.decode``.
    """
    moved, grown = (said / _weights(coder, boxes.device)).split(2, -1)
    start, end = boxes.split(2, -1)
    sides = end - start
    centres = torch.addcmul(torch.add(start, sides, alpha=0.5), moved, sides)
    half = grown.clamp(max=coder.bbox_xform_clip).exp_().mul_(sides).mul_(0.5)
    return torch.cat([centres - half, centres + half], -1)


def _weights(coder: BoxCoder, device: torch.device) -> Tensor:
    return send(np.array(coder.weights, np.float32), device)


def _make_canvas(pooler: MultiScaleRoIAlign, features: Mapping[str, Tensor], shape: Size) -> Canvas:
    return join_levels(
        [part for name, part in features.items() if name in pooler.featmap_names], shape
    )


def join_levels(features: Sequence[Tensor], shape: tuple[int, int]) -> Canvas:
    """Lay the levels side by side, the first on the left, the others below one another on its
    right.

    The last row and column of each level are repeated once: pooling reads up to a pixel beyond
    them.

    Args:
        features: [B, C, h, w] of each level, the largest first.
        shape: height and width of the padded images.
    """
    scales = [2.0 ** round(log2(part.shape[2] / shape[0])) for part in features]
    first, *others = [
        functional.pad(part.float(), (0, 1, 0, 1), mode="replicate") for part in features
    ]
    tops = [0, *accumulate(part.shape[2] for part in others)]
    height, width = (
        max(first.shape[2], tops[-1]),
        max((part.shape[3] for part in others), default=0),
    )
    columns = [functional.pad(first, (0, 0, 0, height - first.shape[2]))]
    if others:
        column = torch.cat([functional.pad(part, (0, width - part.shape[3])) for part in others], 2)
        columns.append(functional.pad(column, (0, 0, 0, height - tops[-1])))
    places = [(0, 0), *((first.shape[3], top) for top in tops[:-1])]
    table = np.array(
        [(scale, *place, *place) for scale, place in zip(scales, places, strict=True)], np.float32
    )
    return Canvas(torch.cat(columns, 3), send(table, first.device), -log2(scales[0]))


def pool_regions(
    pooler: MultiScaleRoIAlign, canvas: Canvas, boxes: Tensor, images: Tensor
) -> Tensor:
    """The features of R boxes, float32 [R, C, size, size], as ``MultiScaleRoIAlign`` pools them.

    Args:
        pooler: of the model.
        canvas: of the batch.
        boxes: float32 [R, 4] in pixels of the resized images.
        images: int64 [R]: the image of each box.
    """
    start, end = boxes.split(2, 1)
    side = (end - start).prod(1).sqrt_()
    level = torch.log2(side / pooler.canonical_scale).add_(pooler.canonical_level + 1e-6).floor_()
    level = level.sub_(canvas.finest).clamp_(0, len(canvas.levels) - 1).long()
    scale, place = canvas.levels[level].split((1, 4), 1)
    rois = torch.cat([images[:, None], torch.addcmul(place, boxes, scale)], 1)
    pooled: Tensor = roi_align(
        canvas.features, rois, pooler.output_size, 1.0, pooler.sampling_ratio
    )
    return pooled


def _compute_mask_loss(
    heads: RoIHeads,
    canvas: Canvas,
    boxes: Tensor,
    matched: Tensor,
    labels: Tensor,
    batch: PackedBatch,
    sizes: Sequence[Size],
    flips: Sequence[bool],
) -> Tensor:
    """The loss of the masks of all positive regions.

    ``matched`` has the object of its image that each region is compared with; ``labels`` are 0 for
    the background.
    """
    # the device is read once for all images: each reading waits for it
    table = (
        torch.cat([boxes.float(), labels[..., None], matched[..., None]], 2)
        .flatten(0, 1)
        .cpu()
        .numpy()
    )
    positive = np.flatnonzero(table[:, 4] > 0)
    count, image_of = len(positive), positive // labels.shape[1]
    spare = 0 if boxes.device.type == "cpu" else -count % _REGIONS  # cuDNN meets few shapes
    rows = send(np.pad(positive, (0, spare)), boxes.device)
    pooled = pool_regions(
        heads.mask_roi_pool, canvas, boxes.flatten(0, 1)[rows], rows // labels.shape[1]
    )
    logits = heads.mask_predictor(heads.mask_head(pooled))[:count]
    if not len(logits):
        return logits.sum() * 0
    first_object = np.cumsum(batch.counts.numpy()) - batch.counts.numpy()  # of each image
    objects = table[positive, 5].astype(np.int64) + first_object[image_of]
    targets = sample_masks(
        batch.masks,
        torch.from_numpy(objects),
        torch.from_numpy(table[positive, :4]),
        sizes=batch.sizes,
        counts=batch.counts,
        flips=flips,
        to_sizes=sizes,
        size=logits.shape[-1],
    )
    label = labels.flatten()[rows[:count]]
    chosen = logits.gather(1, label[:, None, None, None].expand(-1, 1, *logits.shape[2:]))[:, 0]
    return functional.binary_cross_entropy_with_logits(chosen.float(), targets)
