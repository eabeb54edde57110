"""The plan of a run: all of its settings, for its log and its checkpoints."""

from dataclasses import dataclass

from colab_utils.loading.loader import Loader
from colab_utils.training.data import OpenData
from colab_utils.training.memory import MemoryPlan
from colab_utils.training.prepare import PreparedStep
from colab_utils.training.settings import Settings
from colab_utils.units import format_count

# A GPU with less memory than this, such as a T4, also computes slowly. There, smaller images help
# most.
_SMALL_GPU_BYTES = 20e9
# The plan then proposes this shorter side, in pixels.
_SMALL_SIZE = 640


@dataclass(frozen=True)
class TrainingPlan:
    """Everything that was decided for a run. ``str()`` gives the line for the log."""

    dataset: str
    """Fingerprint of the annotations."""
    model: str
    """One of ``MODEL_NAMES``."""
    starts_from: str
    """The model's weights at the start: "coco", "imagenet" or "random"."""
    device: str
    """Name of the device in torch, such as "cuda:0"."""
    precision: str
    """The dtype of autocast; "float32" without autocast."""
    num_classes: int
    """Classes, the background included."""
    images: int
    """Images with objects. These are trained on."""
    skipped_images: int
    """Images without objects, which are left out."""
    objects: int
    """Objects that are trained on."""
    skipped_objects: int
    """Crowds, and boxes without area, which are left out."""
    batch_size: int
    """Images of a step, over all processes."""
    min_size: int
    """Shorter side that images are resized to, pixels."""
    max_size: int
    """Limit of the longer side, pixels."""
    learning_rate: float
    """The highest learning rate, reached after the warm-up."""
    steps: int
    """Steps of the run, those of earlier sessions included."""
    seed: int
    """Seed of the order of the images, the augmentation and random weights."""
    first_step: int = 0
    """Steps that earlier sessions did."""
    augment: str = "flip"
    """Name of the augmentation: "flip", "none", or "own" for transforms of your own."""
    norms: str = "frozen"
    """Whether pretrained batch norms are "frozen" or "trained"."""
    ranks: int = 1
    """Processes that train together."""
    most_objects: int = 0
    """Objects of the image that has the most."""
    memory: MemoryPlan | None = None
    """How the heaviest batch fits into the GPU's memory; None on a CPU."""

    def __str__(self) -> str:
        together = f" by {self.ranks} processes" if self.ranks > 1 else ""
        skipped = (
            f", {self.skipped_images} more left out (no objects)" if self.skipped_images else ""
        )
        if self.skipped_objects:
            every = self.objects + self.skipped_objects
            skipped += (
                f", {self.skipped_objects:,} of {every:,} objects left out (crowds, or "
                "boxes without area)"
            )
        classes = format_count(self.num_classes - 1, "class", "classes")
        resumed = f", resumed after step {self.first_step}" if self.first_step else " of a new run"
        memory = f"\nmemory: {self.memory}" if self.memory else ""
        memory += self._name_first_knob()
        return (
            f"{self.model} from {self.starts_from} weights on {self.device} "
            f"in {self.precision}{together}: {classes}, "
            f"{format_count(self.images, 'image')}{skipped}, batches of {self.batch_size}, "
            f"shorter side {self.min_size} px, augmentation {self.augment}, "
            f"learning rate {self.learning_rate:g}, {self.steps} steps{resumed}{memory}"
        )

    def _name_first_knob(self) -> str:
        """Return advice that makes a step on a small GPU faster; empty if there is none."""
        is_small = self.memory is not None and self.memory.total_bytes < _SMALL_GPU_BYTES
        if not is_small or self.min_size <= _SMALL_SIZE:
            return ""
        return (
            f"\nfaster: on a GPU this small, try min_size={_SMALL_SIZE} first. A step is then "
            "about 1.4 times as fast as with 800 (computed by a roofline model, not measured)."
        )


def count_steps(loader: Loader, data: OpenData, *, first_step: int, epochs: int) -> int:
    """Return how many steps a run of ``epochs`` epochs has, those of earlier sessions included.

    The first ``first_step`` of them are done. The ``loader`` stands at the place in the epoch where
    the run continues.
    """
    if loader.epoch >= epochs:
        return first_step
    steps_an_epoch = -(-len(data.rows) // loader.batch_size)
    return first_step + loader.left + (epochs - loader.epoch - 1) * steps_an_epoch


def make_plan(
    settings: Settings,
    data: OpenData,
    prepared: PreparedStep,
    *,
    seed: int,
    first_step: int,
    steps: int,
) -> TrainingPlan:
    """Write down everything that was decided for a run.

    Args:
        settings: The settings of the run.
        data: The images that it trains on.
        prepared: The step, with its batch size and learning rate.
        seed: Seed of the order of the images, the augmentation and random weights.
        first_step: Steps that earlier sessions did.
        steps: Steps of the run, those of earlier sessions included.
    """
    step = prepared.step
    return TrainingPlan(
        dataset=data.dataset.fingerprint,
        model=settings.model,
        starts_from=str(step.model.starts_from),
        device=str(step.device),
        precision=str(step.precision).removeprefix("torch."),
        num_classes=data.dataset.num_classes,
        images=len(data.rows),
        skipped_images=len(data.dataset) - len(data.rows),
        objects=data.dataset.objects,
        skipped_objects=data.dataset.left_out,
        batch_size=prepared.batch_size,
        min_size=settings.min_size,
        max_size=settings.max_size,
        learning_rate=prepared.learning_rate,
        steps=steps,
        seed=seed,
        first_step=first_step,
        augment=settings.augment,
        norms=settings.norms,
        ranks=step.ranks.count,
        most_objects=int(data.dataset.counts.max()),
        memory=prepared.memory,
    )
