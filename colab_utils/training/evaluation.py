"""A model's average precision: it looks at one image after another, and another process does the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.dataset import ShardDataset
from colab_utils.runtime import fork_pool, show_progress
from colab_utils.training.detections import Detections, describe_detections, detect
from colab_utils.training.scoring import AveragePrecision, collect_truth, score_results

__all__ = ["AveragePrecision", "Scorer", "evaluate", "read_result"]

T = TypeVar("T")
_MOST_WAITING = 64  # images whose masks are not drawn yet: 20 MB of them


def evaluate(model: nn.Module, dataset: ShardDataset, *, device: str | torch.device = "cpu") -> AveragePrecision:
    """Measure a model's average precision as ``COCOeval`` does: crowds included, 100 detections an image.

    Args:
        model: A Mask R-CNN, or a model that answers like one; it is left in the mode (training or not) it came in.
        dataset: Its ``category_ids`` map the model's labels back to COCO's category ids.
        device: Where the model runs, an image at a time; another process draws the masks meanwhile.

    Raises:
        ColabUtilsError: The images hold no object to find.

    Example:
        >>> evaluate(nn.Identity(), ShardDataset("no/such/val-shards"))
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected a folder of shards, found nothing at no/such/val-shards. ...
    """
    truth = collect_truth(dataset)
    modes = [(module, module.training) for module in model.modules()]
    model.to(device).eval()
    try:
        with (
            closing(Scorer(truth)) as scorer,
            show_progress("evaluating", total=len(dataset), unit="image") as bar,
        ):
            for i in range(len(dataset)):
                scorer.add(detect(model, dataset, i, device=device))
                bar.update(1)
            return read_result(scorer.score())
    finally:
        for module, mode in modes:
            module.training = mode


class Scorer:
    """Draws masks and adds up COCO's sums in another process, so that the one with the model waits for neither.

    Args:
        truth: of `collect_truth`; empty where another rank's scorer does the sums.
    """

    def __init__(self, truth: dict[str, Any]) -> None:
        self._pool = fork_pool(1, _keep_truth, truth)
        self._waiting: deque[Future[None]] = deque()

    def add(self, found: Detections) -> None:
        """Take in what was found in one image; waits only where many are not drawn yet."""
        self._waiting.append(self._submit(_describe, found))
        if len(self._waiting) > _MOST_WAITING:
            read_result(self._waiting.popleft())

    def take_results(self) -> list[dict[str, Any]]:
        """What was added since the last time, as COCO's results."""
        return read_result(self._submit(_take_results))

    def score(self, others: Sequence[dict[str, Any]] = ()) -> Future[AveragePrecision]:
        """The average precision of what was added since the last time, and of other ranks' results."""
        return self._submit(_score, others)

    def close(self) -> None:
        """End the other process, and forget what it was doing."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        with _tell_end():
            return self._pool.submit(call, *arguments)


def read_result(future: Future[T]) -> T:
    """What a `Scorer` made.

    Raises:
        ColabUtilsError: Its process was ended.
    """
    with _tell_end():
        return future.result()


@contextmanager
def _tell_end() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool as error:
        raise ColabUtilsError(
            "expected the average precision from another process, found that it was ended, as happens where memory is "
            "full. Evaluate on fewer images, or on a machine with more memory."
        ) from error


_truth: dict[str, Any] = {}
_results: list[list[dict[str, Any]] | Exception] = []  # of each image


def _keep_truth(truth: dict[str, Any]) -> None:
    torch.set_num_threads(1)  # the threads of the process that this one was forked from are not here
    _truth.update(truth)


def _describe(found: Detections) -> None:
    try:
        _results.append(describe_detections(found))
    except Exception as error:  # it is for whoever asks for the results
        _results.append(error)


def _take_results() -> list[dict[str, Any]]:
    taken = list[dict[str, Any]]()
    for one in _results:
        if isinstance(one, Exception):
            raise one
        taken += one
    _results.clear()
    return taken


def _score(others: Sequence[dict[str, Any]]) -> AveragePrecision:
    return score_results(_truth, [*_take_results(), *others])
