"""What am I waiting for: clocks, stages, simulator, comparison, watchdog."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = ["watch"]

if TYPE_CHECKING:
    from colab_utils.diagnosis.watchdog import watch


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'colab_utils.diagnosis' has no attribute {name!r}")
    return getattr(import_module("colab_utils.diagnosis.watchdog"), name)
