"""Average precision while training goes on: a few images after each step, the rest of the work in another process."""

from __future__ import annotations

import copy
import io
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.roi_heads import expand_boxes, expand_masks
from torchvision.models.detection.transform import resize_boxes

from colab_utils.data.masks import Runs, write_runs
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.dataset import ShardDataset
from colab_utils.runtime import fork_pool, show_progress
from colab_utils.training.distributed import Ranks

__all__ = [
    "AveragePrecision",
    "ClassPrecision",
    "Detections",
    "Judge",
    "Judgement",
    "Scorer",
    "collect_truth",
    "describe_detections",
    "detect",
    "encode_masks",
    "evaluate",
    "read_result",
    "score_results",
]


class Detections(NamedTuple):
    """What a model found in one image: D objects, on the CPU."""

    image_id: int
    size: tuple[int, int]
    """Height and width of the image, pixels."""
    category_ids: NDArray[np.int64]
    """int64 [D]."""
    scores: NDArray[np.float32]
    """float32 [D], 0 to 1."""
    boxes: NDArray[np.float32]
    """float32 [D, 4]: x0, y0, x1, y1 in pixels of the image."""
    masks: NDArray[Any]
    """float32 [D, 28, 28], 0 to 1, each of its box; of another model than Mask R-CNN uint8 [D, H, W]."""


def detect(model: nn.Module, dataset: ShardDataset, i: int, *, device: str | torch.device) -> Detections:
    """What a model in evaluation mode, on the device, finds in one image; without classes that the dataset has not.

    torchvision's own output would hold a float image of every mask on the device: 4.8 GB for 100 objects in a photo of
    12 megapixels, made in a loop that reads from the device again and again.
    """
    with torch.no_grad():  # not inference_mode: the model caches its anchors and trains with them later
        image = dataset.decode(dataset.read(i)).to(device).float().div_(255)
        if isinstance(model, MaskRCNN):
            found = _find_in_boxes(model, image)
        else:
            found = model([image])[0]
            if "masks" not in found:
                raise ColabUtilsError(
                    f"expected masks from the model, found {', '.join(found)}. Pass a model that finds masks."
                )
            found = {**found, "masks": (found["masks"] > 0.5).byte()}
    labels = found["labels"].tolist()
    known = [place for place, label in enumerate(labels) if label in dataset.category_ids]
    scores, boxes, masks = (found[name].cpu().numpy()[known] for name in ("scores", "boxes", "masks"))
    return Detections(
        image_id=int(dataset.image_ids[i]),
        size=(image.shape[1], image.shape[2]),
        category_ids=np.array([dataset.category_ids[labels[place]] for place in known], np.int64),
        scores=scores,
        boxes=boxes.astype(np.float32),
        masks=masks[:, 0],
    )


def describe_detections(found: Detections) -> list[dict[str, Any]]:
    """Detections as COCO's results, each with its box and its mask."""
    from pycocotools import mask as coco_mask

    if found.masks.dtype == np.uint8:
        rles = [coco_mask.encode(np.asfortranarray(mask)) for mask in found.masks]
    else:
        rles = encode_masks(torch.from_numpy(found.masks), torch.from_numpy(found.boxes), found.size)
    sides = np.concatenate([found.boxes[:, :2], found.boxes[:, 2:] - found.boxes[:, :2]], 1).tolist()
    rows = zip(found.category_ids.tolist(), found.scores.tolist(), sides, rles, strict=True)
    return [
        {"image_id": found.image_id, "category_id": category, "score": score, "bbox": box, "segmentation": rle}
        for category, score, box, rle in rows
    ]


def encode_masks(masks: Tensor, boxes: Tensor, size: Sequence[int]) -> list[dict[str, Any]]:
    """What torchvision pastes into an image of ``size`` (height and width), above 0.5, as compressed RLE.

    Bit for bit the masks of ``paste_masks_in_image`` in torchvision ``models/detection/roi_heads.py``, from ``masks``,
    float32 [D, 28, 28], and ``boxes``, float32 [D, 4] in pixels.

    Example:
        >>> [rle["counts"] for rle in encode_masks(torch.ones(1, 28, 28), torch.tensor([[2.0, 1, 3, 3]]), (4, 6))]
        [b'4<8']
    """
    height, width = size
    parts = [*_draw_runs(masks, boxes, height, width)]
    if not parts:
        return []
    return write_runs(Runs(*map(np.concatenate, zip(*parts, strict=True))), len(masks), height, width)


def _draw_runs(masks: Tensor, boxes: Tensor, height: int, width: int) -> Iterator[Runs]:
    padded, scale = expand_masks(masks[:, None], 1)
    places = expand_boxes(boxes, scale).long().tolist()
    for number, (mask, (x0, y0, x1, y1)) in enumerate(zip(padded, places, strict=True)):
        drawn = functional.interpolate(mask[None], (max(y1 - y0 + 1, 1), max(x1 - x0 + 1, 1)), mode="bilinear")[0, 0]
        left, top = max(x0, 0), max(y0, 0)
        shown = drawn[top - y0 : max(min(y1 + 1, height) - y0, 0), left - x0 : max(min(x1 + 1, width) - x0, 0)] > 0.5
        columns = np.zeros((shown.shape[1], shown.shape[0] + 1), np.int8)  # a 0 ends each
        columns[:, :-1] = shown.numpy().T
        edges = np.flatnonzero(np.diff(columns.ravel(), prepend=0))
        column, row = np.divmod(edges, columns.shape[1])
        yield Runs(np.full(len(edges) // 2, number), column[::2] + left, row[::2] + top, row[1::2] + top)


def _find_in_boxes(model: MaskRCNN, image: Tensor) -> dict[str, Tensor]:
    """``model([image])[0]``, with its masks as the model makes them. Source: torchvision's ``GeneralizedRCNN``."""
    given, _ = model.transform([image])
    features = model.backbone(given.tensors)
    if isinstance(features, Tensor):
        features = {"0": features}
    proposals, _ = model.rpn(given, features)
    (found,), _ = model.roi_heads(features, proposals, given.image_sizes)
    return {**found, "boxes": resize_boxes(found["boxes"], given.image_sizes[0], image.shape[-2:])}


@dataclass(frozen=True)
class ClassPrecision:
    """Average precision of one class, 0 to 1; None where the images hold no object of it."""

    name: str
    bbox: float | None
    segm: float | None


@dataclass(frozen=True)
class AveragePrecision:
    """COCO average precision, 0 to 1: over IoU 0.50 to 0.95, and at IoU 0.50 alone.

    Example:
        >>> print(AveragePrecision(0.25, 0.2, 0.5, 0.4, 60, ()))
        AP of boxes 0.250 (0.500 at IoU 0.5), of masks 0.200 (0.400 at IoU 0.5), 60 images
    """

    bbox: float
    segm: float
    bbox_50: float
    segm_50: float
    images: int
    per_class: tuple[ClassPrecision, ...]

    def __str__(self) -> str:
        return (
            f"AP of boxes {self.bbox:.3f} ({self.bbox_50:.3f} at IoU 0.5), "
            f"of masks {self.segm:.3f} ({self.segm_50:.3f} at IoU 0.5), {self.images} images"
        )


def score_results(truth: dict[str, Any], results: list[dict[str, Any]]) -> AveragePrecision:
    """The average precision of detections, by pycocotools; ``truth`` is of `collect_truth`."""
    from pycocotools.coco import COCO

    with redirect_stdout(io.StringIO()):  # pycocotools prints
        coco = COCO()
        coco.dataset = truth
        coco.createIndex()
        box, box_50, boxes = _compute_precision(coco, results, "bbox")
        mask, mask_50, masks = _compute_precision(coco, results, "segm")
    names = [category["name"] for category in truth["categories"]]
    per_class = tuple(ClassPrecision(*row) for row in zip(names, boxes, masks, strict=True))
    return AveragePrecision(box, mask, box_50, mask_50, len(truth["images"]), per_class)


def collect_truth(dataset: ShardDataset) -> dict[str, Any]:
    """The annotations of a dataset in COCO form.

    Raises:
        ColabUtilsError: The images hold no object to find.
    """
    records = [dataset.record(i) for i in range(len(dataset))]
    objects = [{**found, "image_id": record["image_id"]} for record in records for found in record["annotations"]]
    if all(found["iscrowd"] for found in objects):
        raise ColabUtilsError(
            f"expected objects to measure against, found none in {len(dataset)} images. "
            "Evaluate on a dataset with annotations."
        )
    return {
        "info": {},
        "images": [{"id": r["image_id"], "width": r["width"], "height": r["height"]} for r in records],
        # Ids from 1: COCOeval takes an annotation with id 0 for "no match".
        "annotations": [{**found, "id": number} for number, found in enumerate(objects, 1)],
        "categories": [
            {"id": int(category), "name": dataset.class_names[label]}
            for label, category in sorted(dataset.category_ids.items())
        ],
    }


def _compute_precision(truth: Any, results: list[dict[str, Any]], kind: str) -> tuple[float, float, list[float | None]]:
    """AP over all IoU, at IoU 0.5, and of each class in the order of the category ids."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    if kind == "segm":  # beside a box, loadRes does not look at the mask
        results = [{key: value for key, value in result.items() if key != "bbox"} for result in results]
    found = truth.loadRes(results) if results else COCO()  # loadRes takes no empty list
    evaluation = COCOeval(truth, found, kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    # precision: [IoU, recall, class, area range, detections an image]; -1 where a class has no object.
    classes = np.moveaxis(evaluation.eval["precision"][:, :, :, 0, -1], 2, 0)
    per_class = [float(values.mean()) if values.max() > -1 else None for values in classes]
    return float(evaluation.stats[0]), float(evaluation.stats[1]), per_class


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
