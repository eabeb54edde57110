"""The settings of a run: those you name, else those of its checkpoint, else the defaults."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from colab_utils.errors import ColabUtilsError
from colab_utils.require import require_choice, require_count, require_number
from colab_utils.training.model import BUILDERS, GPU_MODEL, LARGEST_SIDE, LIGHT_MODEL, TINY_MODEL
from colab_utils.training.norms import Norms

Augment = Literal["none", "flip"]
"""Augmentation by name: nothing, or random flips left to right."""
LARGEST_COUNT = (1 << 31) - 1
"""The largest number that is accepted for steps, for epochs, or for images in a batch."""
OWN_TRANSFORMS = "own"
"""The name of the augmentation if the user passes transforms."""


@dataclass(frozen=True)
class AskedSettings:
    """Settings that a user named, or that a checkpoint holds. None stands for a missing setting."""

    model: str | None = None
    min_size: int | None = None
    max_size: int | None = None
    augment: str | None = None
    norms: str | None = None
    batch_size: int | None = None
    learning_rate: float | None = None

    def check(self) -> None:
        """Refuse values that ``train`` does not know.

        Raises:
            ColabUtilsError: One of the settings has such a value.
        """
        if self.model is not None:
            require_choice("model", self.model, tuple(BUILDERS))
        for name, side in {"min_size": self.min_size, "max_size": self.max_size}.items():
            if side is not None:
                require_count(name, side, maximum=LARGEST_SIDE)
        names = get_args(Augment)
        if self.augment is not None and self.augment not in (*names, OWN_TRANSFORMS):
            raise ColabUtilsError(
                f"augment must be one of {names}, or transforms of your own; it is "
                f"{self.augment!r}. Pass another value."
            )
        if self.norms is not None:
            require_choice("norms", self.norms, get_args(Norms))
        if self.batch_size is not None:
            require_count("batch_size", self.batch_size, maximum=LARGEST_COUNT)
        if self.learning_rate is not None:
            require_number("learning_rate", self.learning_rate, above=0, below=math.inf)


@dataclass(frozen=True)
class Settings:
    """The settings of a run, as far as they are known before the model is built."""

    model: str
    """One of ``MODEL_NAMES``."""
    min_size: int
    """Shorter side that images are resized to, pixels."""
    max_size: int
    """Limit of the longer side, pixels."""
    augment: str
    """Name of the augmentation: "flip", "none", or "own" for transforms of the user."""
    norms: str
    """Whether pretrained batch norms are "frozen" or "trained"."""
    batch_size: int | None
    """Images of a step, over all processes; None for as many as fit."""
    learning_rate: float | None
    """The highest learning rate; None to choose it by the batch size."""


def read_settings(plan: Mapping[str, Any]) -> AskedSettings:
    """Read the settings of a run from the plan that its checkpoint holds.

    Raises:
        AttributeError, ValueError: The plan has no such settings, or bad values.

    Example:
        >>> read_settings({"model": "maskrcnn_tiny_fpn", "batch_size": 4}).batch_size
        4
    """
    stored = AskedSettings(**{field.name: plan.get(field.name) for field in fields(AskedSettings)})
    try:
        stored.check()
    except ColabUtilsError as error:
        # The message asks the user to pass another value, but this value is in the checkpoint.
        raise ValueError(str(error)) from error
    return stored


def choose_settings(asked: AskedSettings, stored: AskedSettings, *, on_gpu: bool) -> Settings:
    """Take each setting from the user, else from the run's checkpoint, else from the defaults.

    Args:
        asked: The settings that the caller of ``train`` named.
        stored: The settings in the run's checkpoint. All are None for a new run.
        on_gpu: Whether the model is trained on a GPU.

    Example:
        >>> settings = choose_settings(AskedSettings(batch_size=4), AskedSettings(), on_gpu=False)
        >>> settings.min_size, settings.max_size, settings.batch_size
        (192, 320, 4)
    """
    model = asked.model or stored.model or _choose_model(on_gpu)
    min_size = asked.min_size or stored.min_size or _choose_min_size(model, on_gpu)
    max_size = asked.max_size or stored.max_size or min(round(min_size * 5 / 3), LARGEST_SIDE)
    batch_size = asked.batch_size or stored.batch_size
    learning_rate = asked.learning_rate
    # A stored rate belongs to the stored batch size. For another one, choose a new rate.
    if learning_rate is None and batch_size == stored.batch_size:
        learning_rate = stored.learning_rate
    return Settings(
        model=model,
        min_size=min_size,
        max_size=max_size,
        augment=asked.augment or stored.augment or "flip",
        norms=asked.norms or stored.norms or "frozen",
        batch_size=batch_size,
        learning_rate=learning_rate,
    )


def _choose_model(on_gpu: bool) -> str:
    return GPU_MODEL if on_gpu else LIGHT_MODEL


def _choose_min_size(model: str, on_gpu: bool) -> int:
    if model == TINY_MODEL:
        return 128
    if model == LIGHT_MODEL and not on_gpu:
        return 192
    return 800
