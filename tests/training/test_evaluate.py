"""COCO average precision: perfect, empty and noisy models, against pycocotools called directly."""

from __future__ import annotations

import contextlib
import io
import json

import numpy as np
import pytest
import torch
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import nn
from torchvision.models.detection.roi_heads import paste_masks_in_image

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.dataset import ShardDataset
from colab_utils.training.evaluate import (
    Detections,
    Scorer,
    collect_truth,
    describe_detections,
    detect,
    encode_masks,
    evaluate,
    read_result,
)
from colab_utils.training.model import LIGHT_MODEL, build_mask_rcnn


class ScriptedModel(nn.Module):
    """Answers with predictions made beforehand, in the order of the images."""

    def __init__(self, predictions: list[dict]) -> None:
        super().__init__()
        self.frozen_part = nn.Linear(1, 1).eval()
        self.predictions = iter(predictions)

    def forward(self, images):
        assert not self.training
        assert not torch.is_grad_enabled()
        assert all(image.dtype == torch.float32 and image.max() <= 1 for image in images)
        return [next(self.predictions) for _ in images]


def predict_truth(dataset: ShardDataset) -> list[dict]:
    """What is annotated, as predictions with a score of 1, crowds left out."""
    labels = {number: label for label, number in dataset.category_ids.items()}
    predictions = []
    for i in range(len(dataset)):
        record = dataset.record(i)
        objects = [annotation for annotation in record["annotations"] if not annotation["iscrowd"]]
        boxes = np.array([annotation["bbox"] for annotation in objects], np.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        masks = [coco_mask.decode(annotation["segmentation"]) for annotation in objects]
        shape = (0, record["height"], record["width"])
        predictions.append(
            {
                "boxes": torch.from_numpy(boxes),
                "labels": torch.tensor([labels[annotation["category_id"]] for annotation in objects]),
                "scores": torch.ones(len(objects)),
                "masks": torch.from_numpy(np.stack(masks) if masks else np.zeros(shape))[:, None].float(),
            }
        )
    return predictions


def spoil(predictions: list[dict]) -> list[dict]:
    """Shifted boxes, eaten masks, missing and invented objects: an AP between 0 and 1."""
    generator = torch.Generator().manual_seed(0)
    spoiled = []
    for p in predictions:
        keep = torch.rand(len(p["labels"]), generator=generator) > 0.2
        boxes = p["boxes"][keep] + torch.randn(int(keep.sum()), 4, generator=generator).mul(2)
        masks = p["masks"][keep] * (torch.rand(p["masks"][keep].shape, generator=generator) > 0.1)
        scores = torch.rand(int(keep.sum()), generator=generator)
        spoiled.append({"boxes": boxes, "labels": p["labels"][keep], "scores": scores, "masks": masks})
    return spoiled


@pytest.fixture(scope="module")
def dataset(tiny_shards):
    return ShardDataset(tiny_shards, contiguous_labels=True)


def test_perfect_model_reaches_one(dataset, capsys):
    model = ScriptedModel(predict_truth(dataset)).train()
    model.frozen_part.eval()
    ap = evaluate(model, dataset)
    assert (ap.bbox, ap.segm, ap.bbox_50, ap.segm_50) == pytest.approx((1, 1, 1, 1), abs=1e-6)
    assert ap.images == len(dataset)
    assert {c.bbox for c in ap.per_class} <= {1.0, None}
    assert [c.name for c in ap.per_class] == list(dataset.class_names.values())
    assert model.training
    assert not model.frozen_part.training  # as it came in, part by part
    assert capsys.readouterr().out == ""


def test_model_that_finds_nothing_reaches_zero(dataset):
    nothing = [{k: v[:0] for k, v in prediction.items()} for prediction in predict_truth(dataset)]
    ap = evaluate(ScriptedModel(nothing), dataset)
    assert (ap.bbox, ap.segm) == (0, 0)


def test_agrees_with_pycocotools_on_the_annotation_file(dataset, tiny_dataset):
    predictions = spoil(predict_truth(dataset))
    ap = evaluate(ScriptedModel(predictions), dataset)
    truth = json.loads(tiny_dataset.annotations.read_text())  # polygons, not our records
    for kind, found in (("bbox", (ap.bbox, ap.bbox_50)), ("segm", (ap.segm, ap.segm_50))):
        results = []
        for i, p in enumerate(predictions):
            for k in range(len(p["labels"])):
                x0, y0, x1, y1 = p["boxes"][k].tolist()
                result = {
                    "image_id": int(dataset.image_ids[i]),
                    "category_id": dataset.category_ids[int(p["labels"][k])],
                    "score": float(p["scores"][k]),
                }
                if kind == "bbox":
                    result["bbox"] = [x0, y0, x1 - x0, y1 - y0]
                else:
                    mask = (p["masks"][k, 0] > 0.5).byte().numpy()
                    result["segmentation"] = coco_mask.encode(np.asfortranarray(mask))
                results.append(result)
        with contextlib.redirect_stdout(io.StringIO()):
            coco = COCO()
            coco.dataset = {"info": {}, **truth}
            coco.createIndex()
            evaluation = COCOeval(coco, coco.loadRes(results), kind)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        assert 0.05 < evaluation.stats[0] < 0.95
        assert found == pytest.approx(tuple(evaluation.stats[:2]), abs=1e-9)


def test_images_without_objects_are_refused(dataset):
    class CrowdsOnly:
        category_ids, class_names = dataset.category_ids, dataset.class_names

        def __len__(self):
            return 3

        def record(self, i):
            record = dataset.record(i)
            return {**record, "annotations": [{**a, "iscrowd": 1} for a in record["annotations"]]}

    with pytest.raises(ColabUtilsError, match="found none in 3 images"):
        evaluate(ScriptedModel([]), CrowdsOnly())


def encode_dense(masks: torch.Tensor) -> list[dict]:
    return [coco_mask.encode(np.asfortranarray((mask > 0.5).byte().numpy())) for mask in masks]


@pytest.mark.parametrize("size", [(37, 53), (120, 90), (8, 8), (1, 64)])
def test_masks_in_boxes_are_those_that_torchvision_pastes(size):
    height, width = size
    generator = torch.Generator().manual_seed(height)
    corners = (torch.rand(60, 2, 2, generator=generator) * 1.2 - 0.1) * torch.tensor([width, height])
    boxes = torch.cat([corners.amin(1), corners.amax(1)], 1)
    boxes[:40] = boxes[:40].clamp(min=0).minimum(torch.tensor([width, height] * 2))  # as a model's are
    boxes[0] = torch.tensor([0.0, 0, width, height])
    boxes[1] = torch.tensor([0.2, 0.2, 0.3, 0.3])
    inside = ((boxes[:, :2] < torch.tensor([width, height])) & (boxes[:, 2:] > 0)).all(1)
    boxes = boxes[inside]
    masks = torch.rand(len(boxes), 28, 28, generator=generator)
    masks[2], masks[3] = 0, 1
    expected = encode_dense(paste_masks_in_image(masks[:, None], boxes, size)[:, 0])
    assert encode_masks(masks, boxes, size) == expected
    assert encode_masks(masks[:0], boxes[:0], size) == []


def test_detections_are_those_of_torchvision(dataset, monkeypatch):
    torch.manual_seed(0)
    model = build_mask_rcnn(LIGHT_MODEL, num_classes=dataset.num_classes, weights=None, min_size=96).eval()
    model.roi_heads.score_thresh = 0.0  # a model that has learned nothing is sure of nothing
    with torch.no_grad():
        (stock,) = model([dataset.decode(dataset.read(0)).float() / 255])
    assert len(stock["labels"].unique()) > 1
    monkeypatch.delitem(dataset.category_ids, int(stock["labels"][-1]))  # the model knows a class, the data has it not
    found = describe_detections(detect(model, dataset, 0, device="cpu"))
    known = [place for place, label in enumerate(stock["labels"].tolist()) if label in dataset.category_ids]
    assert 0 < len(known) < len(stock["labels"])
    assert [result["score"] for result in found] == stock["scores"][known].tolist()
    assert [result["segmentation"] for result in found] == encode_dense(stock["masks"][known, 0])
    assert [result["bbox"][:2] for result in found] == stock["boxes"][known, :2].tolist()
    assert {result["image_id"] for result in found} == {int(dataset.image_ids[0])}


def test_a_scorer_tells_what_went_wrong(dataset):
    good = detect(ScriptedModel(predict_truth(dataset)).eval(), dataset, 0, device="cpu")
    scorer = Scorer(collect_truth(dataset))
    try:
        scorer.add(Detections(**{**good._asdict(), "boxes": good.boxes[:0]}))
        scoring = scorer.score()
        with pytest.raises(ValueError, match="zip"):  # not left out in silence
            read_result(scoring)
        for process in scorer._pool._processes.values():
            process.kill()
            process.join()
        with pytest.raises(ColabUtilsError, match="from another process, found that it was ended"):
            scorer.take_results()
    finally:
        scorer.close()
