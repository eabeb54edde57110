"""The step of a run: its model on the device, its optimiser, and the batch size that fits."""

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch

from colab_utils.data.statistics import describe_full_images
from colab_utils.errors import ColabUtilsWarning
from colab_utils.loading.ranks import Ranks
from colab_utils.places import PlaceLike
from colab_utils.training.checkpoint import State, explain_state
from colab_utils.training.data import OpenData
from colab_utils.training.memory import MemoryPlan, plan_memory
from colab_utils.training.model import allow_detections, assemble_mask_rcnn, build_mask_rcnn
from colab_utils.training.norms import fold_norms
from colab_utils.training.ranks import share_errors
from colab_utils.training.schedule import choose_rate, make_optimizer
from colab_utils.training.settings import OWN_TRANSFORMS, TrainSettings
from colab_utils.training.step import TrainingStep


@dataclass(frozen=True)
class PreparedStep:
    """A step that is ready to train, with the settings of its run."""

    step: TrainingStep
    settings: TrainSettings
    """All settings of the run, batch size and learning rate included."""
    memory: MemoryPlan | None
    """How the heaviest batch fits into the GPU's memory; None on a CPU, or with transforms of the
    user.
    """


def prepare_step(
    settings: TrainSettings,
    data: OpenData,
    *,
    device: torch.device,
    ranks: Ranks,
    weights: PlaceLike | None,
    state: State | None,
) -> PreparedStep:
    """Build the model on its device, the same in every process, and choose the batch size.

    Args:
        settings: The settings of the run. Batch size and learning rate may be open.
        data: The images that it trains on.
        device: Where the model is trained.
        ranks: The processes that train together.
        weights: The weights of a new run, see ``build_mask_rcnn``.
        state: The checkpoint that the run continues from; None for a new run.

    Raises:
        ColabUtilsError: The weights cannot be used, or the heaviest batch does not fit into the
            GPU's memory.
    """
    torch.manual_seed(settings.seed)
    network = _build_network(settings, data, ranks, weights, state)
    counts = data.dataset.counts
    full = describe_full_images(counts)
    if full and ranks.is_first:
        warnings.warn(full, ColabUtilsWarning, stacklevel=3)
    allow_detections(network, int(counts.max()))
    fold_norms(network)
    network.to(memory_format=torch.channels_last)
    step = TrainingStep(network, device, ranks=ranks)
    # The schedule sets the rate before each step.
    step.optimizer = make_optimizer(network, name=settings.model, learning_rate=0.0)
    if state:
        with explain_state(state):
            step.load_state(state)
    memory = _plan_memory(settings, data, step)
    batch_size = settings.batch_size or _choose_batch_size(memory, ranks)
    learning_rate = settings.learning_rate or choose_rate(settings.model, batch_size)
    settings = replace(settings, batch_size=batch_size, learning_rate=learning_rate)
    return PreparedStep(step, settings, memory)


def _build_network(
    settings: TrainSettings,
    data: OpenData,
    ranks: Ranks,
    weights: PlaceLike | None,
    state: State | None,
) -> Any:
    """Return the layers to load a checkpoint into, or the model that a new run starts from."""
    sizes: dict[str, Any] = {
        "num_classes": data.dataset.num_classes,
        "min_size": settings.min_size,
        "max_size": settings.max_size,
    }
    if state:
        with explain_state(state):
            starts_from = state["plan"]["starts_from"]
        return assemble_mask_rcnn(settings.model, starts_from=starts_from, **sizes)
    # The first process downloads the weights, and sends the model to the others.
    if not ranks.is_first:
        weights = None
    with share_errors(ranks):
        network = build_mask_rcnn(
            settings.model,
            weights=weights,
            **sizes,
        )
    return ranks.send(network)


def _plan_memory(settings: TrainSettings, data: OpenData, step: TrainingStep) -> MemoryPlan | None:
    """Return how batches fit into the GPU's memory; None on a CPU, or with transforms of the user.

    The size of the images that such transforms return is not known.
    """
    if step.device.type != "cuda" or settings.augment == OWN_TRANSFORMS:
        return None
    own_share = None
    if settings.batch_size:
        own_share = -(-settings.batch_size // step.ranks.count)
    with share_errors(step.ranks):
        return plan_memory(step, data.dataset, data.rows, batch_size=own_share)


def _choose_batch_size(memory: MemoryPlan | None, ranks: Ranks) -> int:
    """Return the largest batch size that fits in every process. If none was measured, it is two
    images for each process.
    """
    if memory is None:
        return 2 * ranks.count
    return min(ranks.gather(memory.batch_size)) * ranks.count
