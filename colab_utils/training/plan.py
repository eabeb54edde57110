"""The plan of a run: all of its settings, for its log and its checkpoints."""

from dataclasses import asdict, dataclass, replace

from colab_utils.loading.loader import Loader
from colab_utils.training.data import OpenData
from colab_utils.training.memory import MemoryPlan
from colab_utils.training.prepare import PreparedStep
from colab_utils.training.settings import TrainSettings
from colab_utils.units import format_count


@dataclass(frozen=True, kw_only=True)
class TrainingPlan(TrainSettings):
    """Everything that was decided for a run. ``str()`` gives the line for the log."""

    dataset: str
    """Fingerprint of the annotations."""
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
    first_step: int = 0
    """Steps that earlier sessions did."""
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
        return (
            f"{self.model} from {self.starts_from} weights on {self.device} "
            f"in {self.precision}{together}: {classes}, "
            f"{format_count(self.images, 'image')}{skipped}, batches of {self.batch_size}, "
            f"shorter side {self.min_size} px, augmentation {self.augment}, "
            f"learning rate {self.learning_rate:g}, {self.steps} steps{resumed}{memory}"
        )


def make_plan(
    prepared: PreparedStep, data: OpenData, loader: Loader, *, first_step: int
) -> TrainingPlan:
    """Write down everything that was decided for a run.

    Args:
        prepared: The step, and the settings of the run.
        data: The images that it trains on.
        loader: It stands at the place in the epoch where the run continues.
        first_step: Steps that earlier sessions did.
    """
    step = prepared.step
    settings = prepared.settings
    steps = settings.steps or _count_steps(
        loader, data, first_step=first_step, epochs=settings.epochs or 1
    )
    return TrainingPlan(
        **asdict(replace(settings, steps=steps)),
        **data.count(),
        starts_from=str(step.model.starts_from),
        device=str(step.device),
        precision=str(step.precision).removeprefix("torch."),
        first_step=first_step,
        ranks=step.ranks.count,
        memory=prepared.memory,
    )


def _count_steps(loader: Loader, data: OpenData, *, first_step: int, epochs: int) -> int:
    """Return how many steps a run of ``epochs`` epochs has, those of earlier sessions included."""
    if loader.epoch >= epochs:
        return first_step
    steps_an_epoch = -(-len(data.rows) // loader.batch_size)
    return first_step + loader.left + (epochs - loader.epoch - 1) * steps_an_epoch
