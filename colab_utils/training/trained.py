"""The model that a run has trained, for looking at its predictions and for using it elsewhere."""

from __future__ import annotations

from pathlib import Path

from torchvision.models.detection import MaskRCNN

from colab_utils.errors import ColabUtilsError
from colab_utils.training.checkpoint import CheckpointFolder
from colab_utils.training.model import assemble_mask_rcnn

__all__ = ["load_trained_model"]


def load_trained_model(run: str | Path) -> MaskRCNN:
    """The model of a run's newest checkpoint, on the CPU, in evaluation mode.

    Raises:
        ColabUtilsError: ``run`` holds no checkpoint.

    Example:
        >>> load_trained_model("no/such/run")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected a checkpoint in no/such/run, found none. Train first.
    """
    state = CheckpointFolder(run).load_newest()
    if state is None:
        raise ColabUtilsError(f"expected a checkpoint in {run}, found none. Train first.")
    plan = state["plan"]
    names = ("num_classes", "starts_from", "min_size", "max_size")
    model = assemble_mask_rcnn(plan["model"], **{name: plan[name] for name in names})
    model.load_state_dict(state["model"])
    return model.eval()
