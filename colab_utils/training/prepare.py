"""What a run needs before its first step: its images, its model on the device, its optimiser, and
the batch size that fits.

`plan_memory` trains the heaviest batch of a run once, to see that it fits into the memory of a GPU.
"""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from colab_utils.data.sizes import fit_size
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.files import hash_bytes
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.batch import PackedBatch, collate_packed, open_batch, write_batch
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.devices import Ranks
from colab_utils.loading.opening import open_dataset
from colab_utils.loading.sampler import find_wide
from colab_utils.loading.samples import BadSampleError, blame_sample
from colab_utils.loading.targets import pack_target
from colab_utils.places import PlaceLike
from colab_utils.training.checkpoint import State
from colab_utils.training.layers import fold_norms
from colab_utils.training.model import (
    LIGHT_MODEL,
    allow_detections,
    build_mask_rcnn,
    read_model,
)
from colab_utils.training.settings import (
    OWN_TRANSFORMS,
    TrainSettings,
    choose_rate,
    make_optimizer,
)
from colab_utils.training.step import MOST_PARTS, TrainingStep, share_errors
from colab_utils.units import format_bytes


@dataclass(frozen=True)
class OpenData:
    """The images that a run trains on, and those that it is evaluated on."""

    dataset: ShardDataset | CocoFolder
    """All images, with labels from 1 on."""
    rows: NDArray[np.int64]
    """Indices of the images with objects. Only these are trained on."""
    validation: ShardDataset | None
    """The images that the average precision is measured on; None without ``val_shards``."""
    facts: dict[str, Any]
    """What the plan of a run says of its images, see `TrainingPlan`."""

    def match_state(self, state: dict[str, Any], order: str) -> dict[str, Any]:
        """Fit a loader's state from a checkpoint to the images of this session, and return it.

        If the images differ, the epoch begins anew, with a warning. They differ if loose files
        turned out bad, if the order of the images has changed, or if the run read shards that are
        gone.

        Args:
            state: The state of the loader.
            order: The ``order`` of the plan in the checkpoint.
        """
        are_shards_gone = state["joined"] and self.dataset.shard_of is None
        if order == self.facts["order"] and not are_shards_gone:
            return state
        warnings.warn(
            "the images are others than when the run was begun, or lie in another order: the epoch "
            "begins anew",
            ColabUtilsWarning,
            stacklevel=3,
        )
        return {**state, "images": len(self.rows), "batch": 0, "joined": [], "earlier": []}

    def describe(self) -> dict[str, Any]:
        """Return facts that all processes must agree on, because they share the batches."""
        return {
            **self.facts,
            # The sizes decide which images share a batch.
            "sizes": hash_bytes(self.dataset.sizes.tobytes()),
            "validation dataset": getattr(self.validation, "fingerprint", None),
        }


def open_images(
    shards: PlaceLike | None,
    *,
    images: PlaceLike | None,
    annotations: PlaceLike | None,
    drive: PlaceLike | None,
    ssd: str | Path | None,
    seed: int,
) -> ShardDataset | CocoFolder:
    """Open the images of a run: shards if there are any, else the loose files.

    Args:
        shards: Folder of shards, in place of loose files.
        images: Folder of loose images.
        annotations: Their COCO JSON.
        drive: Folder on Drive for the shards that are made of the loose files.
        ssd: Folder for the shards, on this machine's disk.
        seed: Decides the order in which shards are copied, or written.

    Raises:
        ColabUtilsError: No data is named, or both shards and loose files.
    """
    if shards is None and images is not None and annotations is not None and ssd is not None:
        return open_dataset(
            images, annotations, drive=drive, ssd=ssd, seed=seed, contiguous_labels=True
        )
    if shards is None or (images or annotations or drive):
        raise ColabUtilsError(
            "A run needs either shards, or images with annotations and ssd: pass one of the two. "
            "Optional: ssd for shards, drive for images."
        )
    if ssd is None:
        return ShardDataset(shards, contiguous_labels=True)
    return ArrivingShards(shards, ssd, contiguous_labels=True, seed=seed)


def find_images(
    dataset: ShardDataset | CocoFolder,
    place: PlaceLike | None,
    val_shards: PlaceLike | None,
) -> OpenData:
    """Find the images with objects, and open the validation images.

    Args:
        dataset: All images of a run.
        place: Where they lie, for messages.
        val_shards: Shards to measure the average precision on.

    Raises:
        ColabUtilsError: No image has objects, or the validation images have other categories.
    """
    validation = None
    if val_shards:
        validation = ShardDataset(val_shards, contiguous_labels=True)
        ours = (dataset.category_ids, dataset.class_names)
        if (validation.category_ids, validation.class_names) != ours:
            raise ColabUtilsError(
                f"{val_shards} has other category ids or names than {place}. Make both from "
                "annotations with the same categories."
            )
    rows = np.flatnonzero(dataset.counts)
    if not len(rows):
        raise ColabUtilsError(
            f"None of the {len(dataset)} images in {place} has objects. "
            "Check the annotations that the shards were made from."
        )
    facts = {
        "dataset": dataset.fingerprint,
        "num_classes": dataset.num_classes,
        "images": len(rows),
        "skipped_images": len(dataset) - len(rows),
        "most_objects": int(dataset.counts.max()),
        "order": hash_bytes(dataset.image_ids[rows], find_wide(dataset.sizes[rows])),
    }
    return OpenData(dataset, rows, validation, facts)


# The share of the memory that a batch may take. The rest is for steps with more proposals, and for
# gaps between allocations.
_MARGIN = 0.9
_BATCH_SIZES = (16, 8, 4, 2, 1)


def prepare_step(
    settings: TrainSettings,
    data: OpenData,
    *,
    device: torch.device,
    ranks: Ranks,
    weights: PlaceLike | None,
    state: State | None,
) -> tuple[TrainingStep, TrainSettings]:
    """Build the model on its device, the same in every process, and choose the batch size.

    Args:
        settings: The settings of the run. Batch size and learning rate may be open.
        data: The images that it trains on.
        device: Where the model is trained.
        ranks: The processes that train together.
        weights: The weights of a new run, see ``build_mask_rcnn``.
        state: The checkpoint that the run continues from; None for a new run.

    Returns:
        The step, and all settings of the run.

    Raises:
        ColabUtilsError: The weights cannot be used, or the heaviest batch does not fit into the
            GPU's memory.
    """
    torch.manual_seed(settings.seed)
    network: Any
    with share_errors(ranks):
        if state:
            network = read_model(state)
        else:
            # The first process downloads the weights, and sends the model to the others.
            network = build_mask_rcnn(
                settings.model,
                num_classes=data.dataset.num_classes,
                weights=weights if ranks.is_first else None,
                min_size=settings.min_size,
                max_size=settings.max_size,
            )
    network = ranks.send(network)
    allow_detections(network, int(data.dataset.counts.max()))
    fold_norms(network)
    network.to(memory_format=torch.channels_last)
    # The schedule sets the rate before each step.
    optimizer = make_optimizer(network, name=settings.model, learning_rate=0.0)
    step = TrainingStep(network, device, optimizer=optimizer, ranks=ranks)
    if state:
        step.load_state(state)
    if device.type == "cuda" and settings.augment != OWN_TRANSFORMS:
        with share_errors(ranks):
            settings = plan_memory(step, data.dataset, data.rows, settings)
    # The batch must fit in every process. With transforms of the user, the size of the images that
    # these return is not known.
    batch_size = min(ranks.gather(settings.batch_size)) or 2 * ranks.count
    rate = settings.learning_rate or choose_rate(settings.model, batch_size)
    return step, replace(settings, batch_size=batch_size, learning_rate=rate)


def plan_memory(
    step: TrainingStep,
    dataset: ShardDataset | CocoFolder,
    rows: NDArray[np.int64],
    settings: TrainSettings,
) -> TrainSettings:
    """Find a batch size and a number of parts with which every batch of a dataset fits.

    Forward and backward pass run once on the heaviest batch. The weights do not change, and the
    running statistics of the normalisation layers are restored afterwards. With shards, the batch
    is made of black images of the right sizes and numbers of objects, so that no image is read.
    Without a ``batch_size``, smaller and smaller batches are tried. A given ``batch_size`` is kept,
    and the batch is cut into more and more parts. No object is left out.

    Args:
        step: The training step, with its model on a GPU.
        dataset: The images, with the labels of the model.
        rows: Indices of the images that are trained on.
        settings: Without a batch size, the largest of 16, 8, 4, 2 and 1 images a process is chosen
            that fits.

    Returns:
        The settings, with a batch size and how the heaviest batch fits.

    Raises:
        ColabUtilsError: The heaviest batch does not fit. The message says what would free memory.
    """
    model = step.model
    counts = dataset.counts[rows]
    transform = model.transform
    largest = {"min_size": transform.min_size[-1], "max_size": transform.max_size}
    # An image of unknown size may be as large as the model takes.
    sizes = [
        fit_size(*size, **largest) if all(size) else (*largest.values(),)
        for size in dataset.sizes[rows].tolist()
    ]
    heaviest = rows[_find_heaviest(np.array(sizes), counts)].tolist()
    # The images of this process in a batch, and the parts.
    tries = [(size, 1) for size in _BATCH_SIZES if size <= len(heaviest)]
    if settings.batch_size:
        own = -(-settings.batch_size // step.ranks.count)
        tries = [(own, parts) for parts in (1, 2, 4, MOST_PARTS) if parts <= own]
    free = torch.cuda.mem_get_info(step.device)[0] + torch.cuda.memory_reserved(step.device)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    # The optimiser's first step makes one or two averages of each gradient, which stay in memory.
    limit = free - 2 * trained
    buffers = [buffer.clone() for buffer in model.buffers()]
    try:
        for images, step.parts in tries:
            batch = _make_batch(dataset, heaviest, images).to(step.device)
            torch.cuda.reset_peak_memory_stats(step.device)
            fits = step.add_gradients(batch, synchronize=False) is not None
            peak = torch.cuda.max_memory_allocated(step.device)
            step.free_memory()
            if fits and peak < _MARGIN * limit:
                return replace(
                    settings,
                    batch_size=settings.batch_size or images * step.ranks.count,
                    parts=step.parts,
                    peak_bytes=peak,
                    limit_bytes=limit,
                )
    finally:
        # Restore the statistics of the normalisation layers, which the tries have changed.
        torch._foreach_copy_([*model.buffers()], buffers)
    raise ColabUtilsError(
        f"One image with {int(counts.max()):,} objects does not fit into the GPU's memory "
        f"({format_bytes(limit)} are free). To free memory, set min_size to 0.8 of its value "
        "(activations then take two thirds of their memory), use "
        f"model={LIGHT_MODEL!r}, freeze stages of the backbone (requires_grad_(False)), halve the "
        "number of proposals, or end other processes that nvidia-smi lists."
    )


def _draw_black(place: int, pixels: NDArray[np.uint8], bits: NDArray[np.uint8]) -> None:
    """Write a black image, with masks that fill their boxes."""
    pixels[:] = 0
    bits[:] = 0xFF


def _make_batch(
    dataset: ShardDataset | CocoFolder, indices: Sequence[int], count: int
) -> PackedBatch:
    """Make a batch with as many pixels and objects as the first ``count`` of these images have.

    Loose files are read, because the sizes of their masks are not known before. In place of a bad
    image, which the loader names when it meets it, the next one is taken.
    """
    if isinstance(dataset, CocoFolder):
        dataset.read_ahead(indices[:count])
        samples = []
        for index in indices:
            with suppress(BadSampleError), blame_sample(0):
                samples.append(pack_target(*dataset[index]))
            if len(samples) == count:
                break
        return collate_packed(samples)
    shape, memory = write_batch(
        dataset.describe(indices[:count]), _draw_black, lambda size: np.empty(size, np.uint8)
    )
    return open_batch(torch.from_numpy(memory), shape)


def _find_heaviest(sizes: NDArray[np.integer], counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the images in an order in which the first B are the heaviest batch of B images.

    The largest image comes first, because the others are padded to its size. Images of the same
    orientation, wide or upright, follow. Of these, images with the most objects come first.
    """
    areas = (-(-sizes.astype(np.int64) // 32) * 32).prod(1)
    largest = int(np.lexsort((counts, areas))[-1])
    is_wide = find_wide(sizes)
    order = np.lexsort((areas, counts, is_wide == is_wide[largest]))[::-1]
    return np.array([largest, *order[order != largest]], np.int64)
