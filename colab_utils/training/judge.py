"""Average precision while training goes on: a few images after each step, the rest of the work in another process."""

from __future__ import annotations

import copy
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from colab_utils.loading.dataset import ShardDataset
from colab_utils.training.detections import detect
from colab_utils.training.evaluation import Scorer, read_result
from colab_utils.training.ranks import Ranks
from colab_utils.training.scoring import AveragePrecision, collect_truth

__all__ = ["Judge", "Judgement"]


@dataclass(frozen=True)
class Judgement:
    """What the weights after ``step`` steps are worth; ``weights`` are theirs, on the device."""

    step: int
    ap: AveragePrecision
    weights: dict[str, Any]

    def __str__(self) -> str:
        return f"after step {self.step}: {self.ap}"


class Judge:
    """Evaluates a copy of the model in small pieces, so that no step waits for a whole evaluation.

    Args:
        dataset: validation images; each rank looks at its share of them.
        device: where the model runs.
        steps: in which an evaluation should be over.
        ranks: the processes that train together.

    Raises:
        ColabUtilsError: the images hold no object to find.
    """

    def __init__(self, dataset: ShardDataset, device: torch.device, *, steps: int, ranks: Ranks) -> None:
        self._dataset, self._device, self._ranks = dataset, device, ranks
        self.fingerprint = dataset.fingerprint
        self._each = -(-len(dataset) // ranks.count // max(1, steps))  # images after each step
        self._scorer = Scorer(collect_truth(dataset) if ranks.is_first else {})
        self._model: nn.Module | None = None
        self._step, self._next = 0, len(dataset)
        self._scoring: Future[AveragePrecision] | None = None

    def begin(self, model: nn.Module, step: int) -> None:
        """Take a copy of the model as it is now."""
        if self._model is None:
            self._model = copy.deepcopy(model)
        else:
            self._model.load_state_dict(model.state_dict())
        self._model.eval()
        self._step, self._next = step, 0

    def advance(self, *, to_end: bool = False) -> Judgement | None:
        """Look at the next images; what the model is worth, once that is known. Every rank calls it as often."""
        count = len(self._dataset)
        while self._next < count:
            last = min(count, self._next + self._each * self._ranks.count)
            for i in self._ranks.share(range(self._next, last)):
                if self._model is not None:
                    self._scorer.add(detect(self._model, self._dataset, i, device=self._device))
            self._next = last
            if last == count:
                others = self._ranks.gather([] if self._ranks.is_first else self._scorer.take_results())
                if self._ranks.is_first:
                    self._scoring = self._scorer.score([result for part in others for result in part])
            if not to_end:
                break
        if self._scoring is None or self._model is None or not (to_end or self._scoring.done()):
            return None
        scoring, self._scoring = self._scoring, None
        return Judgement(self._step, read_result(scoring), self._model.state_dict())

    def close(self) -> None:
        """End the other process; an evaluation that is under way is lost."""
        self._scorer.close()
