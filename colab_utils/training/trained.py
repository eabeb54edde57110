"""The model that a run has trained, for looking at its predictions and for using it elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from torchvision.models.detection import MaskRCNN

from colab_utils.errors import ColabUtilsError
from colab_utils.training.checkpoint import CheckpointFolder
from colab_utils.training.model import assemble_mask_rcnn
from colab_utils.training.savings import shrink_transform

__all__ = ["load_trained_model"]


def load_trained_model(run: str | Path, *, which: Literal["best", "newest"] = "newest") -> MaskRCNN:
    """The model of a run's newest checkpoint, on the CPU, in evaluation mode; averaged weights where there are such.

    ``which="best"`` takes the weights with the highest average precision of masks on the validation images.

    Raises:
        ColabUtilsError: ``run`` holds no such checkpoint.

    Example:
        >>> load_trained_model("no/such/run")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected a checkpoint in no/such/run, found none. Train first.
    """
    folder = CheckpointFolder(run)
    state = folder.load_best() if which == "best" else folder.load_newest()
    if state is None:
        cure = "Train with validation shards first" if which == "best" else "Train first"
        raise ColabUtilsError(f"expected a checkpoint in {run}, found none. {cure}.")
    plan = state["plan"]
    names = ("num_classes", "starts_from", "min_size", "max_size")
    model = assemble_mask_rcnn(plan["model"], **{name: plan[name] for name in names})
    for saving in plan.get("savings", ()):
        if saving.startswith("input"):  # it was trained on smaller images than asked for
            shrink_transform(model.transform)
    model.load_state_dict((state.get("average") or state)["model"])
    return model.eval()
