"""A plan for the GPU's memory before the first step: what each image needs, and the heaviest batch first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import dropwhile
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.models.detection import MaskRCNN

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import PackedBatch, PackedSample, collate_packed
from colab_utils.loading.masks import MaskBits
from colab_utils.runtime import format_bytes
from colab_utils.training.model import shrink_transform
from colab_utils.training.step import MOST_PARTS, TrainingStep, free_memory

__all__ = [
    "MEMORY_REDUCTIONS",
    "DoesNotFitError",
    "MemoryFit",
    "MemoryPlan",
    "MemoryProbe",
    "MemoryReduction",
    "apply_memory_reductions",
    "find_memory_probe",
    "fit_memory",
    "plan_memory",
]

_LEAST_PROPOSALS = 100


_SMALLER, _LEAST_SIDE = 0.8, 64  # of each side; pixels


@dataclass(frozen=True)
class MemoryReduction:
    """One way: what it does, what it costs, and ``apply``, which is False where nothing is left to save this way."""

    name: str
    text: str
    cost: str
    apply: Callable[[TrainingStep, int], bool]

    def __str__(self) -> str:
        return f"{self.text} ({self.cost})"


def apply_memory_reductions(step: TrainingStep, names: Sequence[str], *, images: int) -> None:
    """Apply what a run was begun with, in its order; ``images``: of a batch, of this process."""
    known = {saving.name: saving for saving in MEMORY_REDUCTIONS}
    for name in names:
        known[name].apply(step, images)


def _halve_parts(step: TrainingStep, images: int) -> bool:
    if step.parts * 2 > min(MOST_PARTS, images):
        return False
    step.parts *= 2
    return True


def _checkpoint_activations(step: TrainingStep, images: int) -> bool:
    stages = [stage for stage in _list_trained(step.model) if "forward" not in vars(stage)]
    for stage in stages:
        vars(stage)["forward"] = partial(checkpoint, stage.forward, use_reentrant=False, preserve_rng_state=False)
        _change_momentum(stage, lambda momentum: 1 - math.sqrt(1 - momentum))  # it sees each batch twice now
    return bool(stages)


def _change_momentum(stage: nn.Module, change: Callable[[float], float]) -> None:
    for norm in stage.modules():
        if isinstance(norm, nn.BatchNorm2d) and norm.momentum:
            norm.momentum = change(norm.momentum)


def _halve_proposals(step: TrainingStep, images: int) -> bool:
    model: Any = step.model
    counts = (model.rpn._pre_nms_top_n, model.rpn._post_nms_top_n)
    if min(count["training"] for count in counts) < 2 * _LEAST_PROPOSALS:
        return False
    for count in counts:
        count["training"] //= 2
    model.roi_heads.fg_bg_sampler.batch_size_per_image //= 2
    return True


def _freeze_stages(step: TrainingStep, images: int) -> bool:
    """All but the last of the backbone's stages that train; of random weights none."""
    if getattr(step.model, "starts_from", "random") == "random":
        return False
    trained = _list_trained(step.model)
    for stage in trained[:-1]:
        stage.requires_grad_(False)
        if vars(stage).pop("forward", None):  # nothing of it is run again
            _change_momentum(stage, lambda momentum: 1 - (1 - momentum) ** 2)
    for group in step.optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad:
                step.optimizer.state.pop(parameter, None)
        group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
    return len(trained) > 1


def _list_trained(model: nn.Module) -> list[nn.Module]:
    """From the first of the backbone's stages on that has a weight to train: the others need no gradients."""
    return [*dropwhile(lambda stage: not any(p.requires_grad for p in stage.parameters()), _list_stages(model))]


def _shrink_input(step: TrainingStep, images: int) -> bool:
    if not shrink_transform(step.model.transform):
        return False
    if step.jitter_side:
        step.jitter_side = round(_SMALLER * step.jitter_side / 32) * 32
    step.shapes = ()
    return True


def _list_stages(model: nn.Module) -> list[nn.Module]:
    body: Any = model.backbone.body if isinstance(model, MaskRCNN) else model
    return [stage for stage in body.children() if any(True for _ in stage.parameters())]


MEMORY_REDUCTIONS = (
    MemoryReduction("2 parts", "each batch in 2 parts", "a little slower", _halve_parts),
    MemoryReduction("4 parts", "in 4 parts", "slower", _halve_parts),
    MemoryReduction("8 parts", "in 8 parts", "slower again", _halve_parts),
    MemoryReduction("checkpointing", "the backbone run again in the backward pass", "slower", _checkpoint_activations),
    MemoryReduction("proposals", "half of the proposals", "may cost some precision", _halve_proposals),
    MemoryReduction("frozen", "only the backbone's last stage trained", "may cost precision", _freeze_stages),
    MemoryReduction("input 0.8", "images at 0.8 of their size", "costs precision of small objects", _shrink_input),
    MemoryReduction("input 0.64", "images at 0.64 of their size", "costs precision of small objects", _shrink_input),
)


"""In the order of least harm; each adds to those before it."""

_MARGIN = 0.9  # of the memory: proposals differ from step to step, and pieces of memory are lost between others


_BATCH_SIZES = (16, 8, 4, 2, 1)


_NAMED = 3  # images that do not fit, by their ids


class DoesNotFitError(ColabUtilsError):
    """An image that does not fit into the GPU's memory, whatever is saved."""


class MemoryProbe(Protocol):
    """What tells a device's memory."""

    def measure_limit(self) -> int:
        """Bytes that this process may have in all, what it holds now included."""

    def measure_peak(self, call: Callable[[], object]) -> int:
        """The most bytes that this process held at once while ``call`` ran.

        Raises:
            torch.cuda.OutOfMemoryError: memory ran out.
        """


class _CudaGauge:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def measure_limit(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0] + torch.cuda.memory_reserved(self._device)

    def measure_peak(self, call: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        call()
        return torch.cuda.max_memory_allocated(self._device)


def find_memory_probe(device: torch.device) -> MemoryProbe | None:
    """The gauge of a GPU; None on a CPU, whose memory no batch of a detection model fills.

    Example:
        >>> find_memory_probe(torch.device("cpu")) is None
        True
    """
    return _CudaGauge(device) if device.type == "cuda" else None


@dataclass(frozen=True)
class MemoryFit:
    """Bytes of a batch as a sum: ``fixed`` (weights, gradients), for each pixel of the padded input, each object, and
    each object times pixel, which stands for anchors, of which a feature pyramid has one for every four pixels.
    """

    fixed: float
    per_pixel: float
    per_object: float
    per_pair: float

    def predict(self, pixels: Any, objects: Any) -> Any:
        """Bytes for so many padded pixels and objects; arrays, or numbers.

        Example:
            >>> MemoryFit(100.0, 2.0, 10.0, 0.5).predict(4, 2)
            132.0
        """
        return self.fixed + self.per_pixel * pixels + self.per_object * objects + self.per_pair * pixels * objects

    def __str__(self) -> str:
        per_object = self.per_object + self.per_pair * 1e6
        return (
            f"{format_bytes(self.fixed)} + {format_bytes(self.per_pixel * 1e6)} a megapixel "
            f"+ {format_bytes(per_object)} an object in one"
        )


def fit_memory(pixels: Sequence[float], objects: Sequence[float], peaks: Sequence[float]) -> MemoryFit:
    """Least squares of what was measured, with no part below zero.

    Example:
        >>> fit = fit_memory([1, 2, 1, 2], [1, 1, 3, 3], [113, 115, 133, 135])
        >>> [round(part, 6) for part in (fit.fixed, fit.per_pixel, fit.per_object, fit.per_pair)]
        [101.0, 2.0, 10.0, 0.0]
    """
    x, n = np.array(pixels, float), np.array(objects, float)
    columns = np.stack([np.ones_like(x), x, n, x * n], 1)
    scale = columns.max(0)
    kept, solution = [0, 1, 2, 3], np.zeros(4)
    while kept:
        solution = np.zeros(4)
        solution[kept] = np.linalg.lstsq(columns[:, kept] / scale[kept], np.array(peaks, float), rcond=None)[0]
        worst = min(kept, key=lambda place: solution[place])
        if solution[worst] > -1e-9 * max(peaks):
            break
        kept.remove(worst)
    return MemoryFit(*(solution.clip(0) / scale).tolist())


@dataclass(frozen=True)
class MemoryPlan:
    """What was measured before the first step, and what was chosen; sizes in bytes.

    ``peak`` is that of the heaviest batch, which was trained once and forgotten; ``savings`` name `MEMORY_REDUCTIONS`;
    ``too_large`` are the ids of images that would not fit without them, even alone.
    """

    fit: MemoryFit
    limit: int
    peak: int
    batch_size: int
    objects: int
    savings: tuple[str, ...]
    too_large: tuple[int, ...]

    def __str__(self) -> str:
        chosen = [saving for saving in MEMORY_REDUCTIONS if saving.name in self.savings]
        costs = f"; so that it fits: {', '.join(map(str, chosen))}" if chosen else ""
        named = ", ".join(map(str, self.too_large[:_NAMED]))
        more = f" and {len(self.too_large) - _NAMED} more" if len(self.too_large) > _NAMED else ""
        large = f"; images that would not fit otherwise: {named}{more}" if self.too_large else ""
        return (
            f"the heaviest batch ({self.batch_size} images, {self.objects:,} objects) takes {format_bytes(self.peak)} "
            f"of {format_bytes(self.limit)}{costs}{large}"
        )


def plan_memory(
    step: TrainingStep,
    gauge: MemoryProbe,
    *,
    read: Callable[[int], PackedSample],
    ids: NDArray[np.integer],
    sizes: NDArray[np.integer],
    counts: NDArray[np.integer],
    batch_size: int | None,
    reserve: int = 0,
) -> MemoryPlan:
    """Make every batch of a dataset fit: measure, run the heaviest batch, and save memory where it does not fit.

    Six batches of noise tell what pixels and objects take. The heaviest batch is then trained once; as long as it does
    not fit into nine tenths of the memory, the next reduction is applied. Weights, statistics and random states are
    left as they were. No object is ever left out.

    Args:
        step: with its model on the device.
        read: gives the packed sample of each of I images.
        ids: int [I]: the id of each image.
        gauge: of the device.
        sizes: int [I, 2]: height and width of each image as the model sees it, pixels.
        counts: int [I]: objects of each image.
        batch_size: images of this process in each batch; None chooses the largest of 16, 8, 4, 2 and 1 that fits.
        reserve: bytes that will be needed beside the steps.

    Raises:
        DoesNotFitError: the heaviest image does not fit, whatever is saved.
    """
    ranks, limit = step.ranks, gauge.measure_limit() - reserve - _count_state(step)
    areas = (-(-sizes.astype(np.int64) // 32) * 32).prod(1)
    with _leave_no_trace(step):
        fit = _probe(step, gauge, areas, counts)
        alone = fit.predict(areas, counts)
        order = np.argsort(-alone, kind="stable")
        if batch_size is None:
            fits = [size for size in _BATCH_SIZES if _predict_batch(fit, areas, counts, order[:size]) < _MARGIN * limit]
            batch_size = min(ranks.gather(max(fits, default=1)))
        heaviest = order[:batch_size]
        batch = collate_packed([read(int(i)) for i in heaviest]).to(step.device)
        applied: list[str] = []
        savings = iter(MEMORY_REDUCTIONS)
        while True:
            peak = _try_batch(step, gauge, batch)
            fitting = peak is not None and peak < _MARGIN * limit
            if not ranks.agree(not fitting):
                break
            for saving in savings:
                if saving.apply(step, batch_size):
                    applied.append(saving.name)
                    break
            else:
                if not ranks.agree(peak is None or peak >= limit):  # it did fit, if barely
                    break
                raise DoesNotFitError(
                    f"expected images that fit into the GPU's memory one by one, found that image "
                    f"{int(batch.image_ids[0])} with {int(batch.counts[0]):,} objects does not, whatever is saved "
                    f"({format_bytes(limit)} are free). Train with a smaller min_size, or the lighter model."
                )
    return MemoryPlan(
        fit=fit,
        limit=limit,
        peak=int(peak or 0),
        batch_size=batch_size,
        objects=int(counts[heaviest].sum()),
        savings=tuple(applied),
        too_large=tuple(ids[order[alone[order] > _MARGIN * limit]].tolist()),
    )


def _predict_batch(fit: MemoryFit, areas: Any, counts: Any, images: NDArray[np.int64]) -> float:
    """All padded to the largest; each image's anchors meet its own objects only."""
    largest = areas[images].max()
    alone = fit.predict(largest, counts[images]) - fit.fixed
    return float(fit.fixed + alone.sum())


def _probe(step: TrainingStep, gauge: MemoryProbe, areas: NDArray[np.int64], counts: NDArray[np.integer]) -> MemoryFit:
    """Noise of few and many pixels, with few and many objects."""
    low, middle, high = (float(np.quantile(areas, share)) for share in (0.0, 0.5, 1.0))
    few, many = int(np.quantile(counts, 0.5)), int(counts.max())
    pixels, numbers, peaks = list[int](), list[int](), list[int]()
    for area, objects in ((low / 2, few), (low, few), (high, few), (low / 2, many), (middle, many), (high, many)):
        side = max(32, round(area**0.5 / 32) * 32)
        peak = _try_batch(step, gauge, _make_noise(side, objects, step.device), side=side)
        if peak is not None:
            pixels.append(side * side)
            numbers.append(objects)
            peaks.append(peak)
    if not peaks:
        raise DoesNotFitError(
            f"expected room for one image on the GPU, found {format_bytes(gauge.measure_limit())} in all. Restart the "
            "session, or end the other process that nvidia-smi lists."
        )
    return fit_memory(pixels, numbers, peaks)


def _make_noise(side: int, objects: int, device: torch.device) -> PackedBatch:
    """One square image of noise with objects all over it."""
    generator = torch.Generator().manual_seed(0)
    sides = torch.randint(side // 16, side // 4, (objects, 2), generator=generator)
    starts = (torch.rand(objects, 2, generator=generator) * (side - sides)).long()
    crops = torch.cat([starts, starts + sides], 1).int()
    lengths = -(-sides.prod(1) // 8)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return PackedBatch(
        pixels=torch.randint(0, 256, (3 * side * side,), dtype=torch.uint8, generator=generator),
        sizes=torch.tensor([[side, side]], dtype=torch.int32),
        image_ids=torch.zeros(1, dtype=torch.int64),
        counts=torch.tensor([objects]),
        boxes=crops.float(),
        labels=torch.ones(objects, dtype=torch.int64),
        areas=sides.prod(1).float(),
        iscrowd=torch.zeros(objects, dtype=torch.int64),
        masks=MaskBits(torch.full((int(offsets[-1]),), 255, dtype=torch.uint8), crops, offsets),
    ).to(device)


def _try_batch(step: TrainingStep, gauge: MemoryProbe, batch: PackedBatch, *, side: int | None = None) -> int | None:
    """Peak bytes of the gradients of a batch as large as chance may make it; None where memory runs out.

    ``side``: not resized.
    """
    transform: Any = step.model.transform
    before = transform.min_size, transform.max_size, step.jitter_side, step.shapes
    transform.min_size = (max(transform.min_size),)
    if side:
        transform.min_size, transform.max_size, step.jitter_side, step.shapes = (side,), side, None, ()
    done: list[Tensor | None] = []
    try:
        peak = gauge.measure_peak(lambda: done.append(step.add_gradients(batch)))
    except torch.cuda.OutOfMemoryError:  # `add_gradients` makes one of whatever a library says
        peak = 0
    finally:
        transform.min_size, transform.max_size, step.jitter_side, step.shapes = before
        free_memory(step)
    return peak if done and done[0] is not None else None


def _count_state(step: TrainingStep) -> int:
    """Bytes that the optimiser's state will take, where it has none yet."""
    copies = 2 if isinstance(step.optimizer, torch.optim.AdamW) else 1
    sizes = [
        p.nbytes for group in step.optimizer.param_groups for p in group["params"] if p not in step.optimizer.state
    ]
    return copies * sum(sizes)


@contextmanager
def _leave_no_trace(step: TrainingStep) -> Iterator[None]:
    """Statistics of normalisation, random states and the loss scale as they were."""
    model: nn.Module = step.model
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    devices = [step.device] if step.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])
