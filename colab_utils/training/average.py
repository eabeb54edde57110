"""The average of the weights over the steps (EMA), by ``torch.optim.swa_utils``."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

__all__ = ["AveragedWeights"]


class AveragedWeights:
    """An exponential moving average of a model's weights; ``model`` holds it, and can be evaluated.

    The decay grows with the steps, ``(1 + steps) / (10 + steps)`` at first, as in TensorFlow's
    ``ExponentialMovingAverage``: else the first, random weights would stay in it for thousands of steps.

    Args:
        model: on its device.
        decay: between 0 and 1; 0.999 looks back over about 1,000 steps.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> averaged = AveragedWeights(layer, decay=0.999)
        >>> _ = nn.init.constant_(layer.weight, 2.0)
        >>> averaged.update(); _ = nn.init.constant_(layer.weight, 4.0); averaged.update()
        >>> round(averaged.model.weight.item(), 2)
        3.64
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        self._source, self._decay, self._steps = model, decay, 0
        self._averaged = AveragedModel(model, multi_avg_fn=self._average)

    @property
    def model(self) -> nn.Module:
        """The model with the averaged weights."""
        module: nn.Module = self._averaged.module
        return module

    def update(self) -> None:
        """Take in the model's weights, after a step."""
        self._averaged.update_parameters(self._source)
        self._steps += 1

    def _average(self, averaged: Any, current: Any, count: Any) -> None:
        decay = min(self._decay, (1 + self._steps) / (10 + self._steps))
        get_ema_multi_avg_fn(decay)(averaged, current, count)

    def state_dict(self) -> dict[str, Any]:
        """Weights, and over how many steps they are averaged."""
        return {"model": self.model.state_dict(), "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.model.load_state_dict(state["model"])
        self._steps = state["steps"]
        self._averaged.n_averaged.fill_(state["steps"])
