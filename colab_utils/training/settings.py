"""The settings of a run: what is asked for, else what the run was begun with, else what suits the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from colab_utils.errors import ColabUtilsError
from colab_utils.training.model import GPU_MODEL, LIGHT_MODEL, check_model_name
from colab_utils.training.views import Augment

__all__ = ["RunSettings", "check_at_least_one", "choose_settings"]

_LIGHT_SIDE, _USUAL_SIDE = 192, 800
_CHOICES: dict[str, tuple[str, ...]] = {"augment": (*get_args(Augment), "own"), "schedule": ("cosine", "step")}


@dataclass(frozen=True)
class RunSettings:
    """What ``train`` takes under these names; None where a batch size or learning rate is still to be found."""

    model: str
    min_size: int
    max_size: int
    augment: str
    schedule: str
    ema: float | None = None
    batch_size: int | None = None
    learning_rate: float | None = None


def choose_settings(known: Mapping[str, Any], *, on_gpu: bool, **asked: Any) -> RunSettings:
    """Settle what a run is done with.

    Args:
        known: the plan of an earlier session; empty where there is none.
        on_gpu: whether it is trained on a GPU.
        asked: fields of `RunSettings`; None where nothing is asked for.

    Raises:
        ColabUtilsError: a setting that there is not.

    Example:
        >>> choose_settings({}, on_gpu=False).min_size, choose_settings({"min_size": 400}, on_gpu=True).max_size
        (192, 667)
    """
    if asked.get("model"):
        check_model_name(asked["model"])
    check_at_least_one(min_size=asked.get("min_size"), max_size=asked.get("max_size"))
    for name, choices in _CHOICES.items():
        if asked.get(name) not in (None, *choices):
            raise ColabUtilsError(
                f"expected {name} as one of {', '.join(choices)}, found {asked[name]!r}. Pass one of them."
            )
    if asked.get("ema") is not None and not 0 < asked["ema"] < 1:
        raise ColabUtilsError(f"expected ema between 0 and 1, say 0.999, found {asked['ema']}. Pass another decay.")
    if asked.get("learning_rate") is not None and not 0 < asked["learning_rate"] < float("inf"):
        raise ColabUtilsError(
            f"expected a learning_rate above 0, say 0.005, found {asked['learning_rate']}. Pass another one."
        )
    found = {
        field.name: known.get(field.name) if asked.get(field.name) is None else asked[field.name]
        for field in fields(RunSettings)
    }
    if found["batch_size"] != known.get("batch_size"):  # the rate follows the batch
        found["learning_rate"] = asked.get("learning_rate")
    model = found["model"] or (GPU_MODEL if on_gpu else LIGHT_MODEL)
    side = found["min_size"] or (_LIGHT_SIDE if model == LIGHT_MODEL and not on_gpu else _USUAL_SIDE)
    rest = {"max_size": round(side * 5 / 3), "augment": "flip", "schedule": "cosine"}
    settled = {name: found[name] or value for name, value in rest.items()}
    return RunSettings(**(found | settled | {"model": model, "min_size": side}))


def check_at_least_one(**numbers: int | None) -> None:
    """Refuse numbers below 1, by their names.

    Example:
        >>> check_at_least_one(steps=0)
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected steps of at least 1, found 0. Pass a larger number.
    """
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ColabUtilsError(f"expected {name} of at least 1, found {value}. Pass a larger number.")
