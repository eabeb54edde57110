"""COCO average precision: perfect, empty and noisy models, against pycocotools called directly."""

from __future__ import annotations

import contextlib
import json
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import nn

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning, UnavailableError
from colab_utils.loading.dataset import ShardDataset
from colab_utils.shards.write import write_shards
from colab_utils.training import evaluate as evaluate_module
from colab_utils.training.evaluate import detect, evaluate
from colab_utils.training.model import build_mask_rcnn, load_trained_model
from colab_utils.training.train import train
from tests.coco_files import CocoFiles
from tests.tiny_model import TINY_MODEL
from tests.training.small_shards import TINY


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


def predict_targets(dataset) -> list[dict]:
    """What is annotated, as predictions; crowds are left out."""
    predictions = []
    for _, target in dataset:
        predictions.append(
            {
                "boxes": target["boxes"],
                "labels": target["labels"],
                "scores": torch.linspace(1, 0.5, len(target["labels"])),
                "masks": target["masks"][:, None].float(),
            }
        )
    return predictions


def spoil(predictions: list[dict]) -> list[dict]:
    """Shifted boxes, eaten masks, missing and invented objects: an AP between 0 and 1."""
    generator = torch.Generator().manual_seed(0)
    spoiled = []
    for p in predictions:
        keep = torch.rand(len(p["labels"]), generator=generator) > 0.2
        kept = {name: values[keep] for name, values in p.items()}
        kept["boxes"] += torch.randn(kept["boxes"].shape, generator=generator).mul(2)
        kept["masks"] *= torch.rand(kept["masks"].shape, generator=generator) > 0.1
        kept["scores"] = torch.rand(len(kept["scores"]), generator=generator)
        spoiled.append(kept)
    return spoiled


def encode(masks: torch.Tensor) -> list[dict]:
    return [coco_mask.encode(np.asfortranarray(mask[0].numpy() > 0.5, np.uint8)) for mask in masks]


@pytest.fixture(scope="module")
def dataset(tiny_shards):
    return ShardDataset(tiny_shards, contiguous_labels=True)


@pytest.mark.parametrize(("count", "expected"), [(None, 1), (0, 0)])
def test_perfect_model_reaches_one_and_without_detections_it_is_zero(
    dataset, capsys, count, expected
):
    predictions = predict_targets(dataset)
    kept = [{name: values[:count] for name, values in each.items()} for each in predictions]
    model = ScriptedModel(kept).train()
    model.frozen_part.eval()
    ap = evaluate(model, dataset)
    assert (ap.bbox, ap.segm, ap.bbox_50, ap.segm_50) == pytest.approx((expected,) * 4, abs=1e-6)
    # Each part of the model is left as it came in.
    assert (model.training, model.frozen_part.training) == (True, False)
    assert capsys.readouterr().out == ""


def test_agrees_with_pycocotools_on_the_annotation_file(dataset, tiny_dataset):
    predictions = spoil(predict_targets(dataset))
    ap = evaluate(ScriptedModel(predictions), dataset)
    # The truth comes from the polygons of the file, and not from the package's records.
    truth = json.loads(tiny_dataset.annotations.read_text())
    results = []
    for number, p in zip(dataset.image_ids.tolist(), predictions, strict=True):
        for box, label, score, rle in zip(
            p["boxes"].tolist(), p["labels"], p["scores"], encode(p["masks"]), strict=True
        ):
            results.append(
                {
                    "image_id": number,
                    "category_id": dataset.category_ids[int(label)],
                    "score": float(score),
                    "bbox": [*box[:2], box[2] - box[0], box[3] - box[1]],
                    "segmentation": rle,
                }
            )
    coco = COCO()
    coco.dataset = {"info": {}, **truth}
    coco.createIndex()
    for kind, measured in (("bbox", (ap.bbox, ap.bbox_50)), ("segm", (ap.segm, ap.segm_50))):
        evaluation = COCOeval(coco, coco.loadRes(results), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        assert 0.05 < evaluation.stats[0] < 0.95
        assert measured == tuple(evaluation.stats[:2])
    assert str(ap).endswith("12 images")


def draw_squares(folder, count):
    """Make a dataset of an image with this many squares, and one with a single square."""
    files = CocoFiles(folder)
    files.coco["categories"] = [{"id": 1, "name": "cell"}, {"id": 2, "name": "seed"}]
    for number, squares in ((1, count), (2, 1)):
        files.add_image(Image.new("RGB", (300, 200)), f"{number}.png")
        for k in range(squares):
            box = [10 * (k % 30), 10 * (k // 30), 8, 8]
            files.add_object(number, box, category_id=1 + k % 2)
    return files.open()


@pytest.mark.parametrize("count", [100, 300])
def test_every_object_counts_however_many_an_image_has(tmp_path, count):
    folder = draw_squares(tmp_path, count)
    warning = contextlib.nullcontext()
    if count > 100:
        warning = pytest.warns(ColabUtilsWarning, match=rf"has more than 100 .*\({count} at")
    with warning:
        ap = evaluate(ScriptedModel(predict_targets(folder)), folder)
    assert min(ap.bbox, ap.segm) > 0.999999


@pytest.mark.filterwarnings("ignore:1 image has more than 100 objects")
def test_a_model_finds_as_many_objects_as_its_images_have(tmp_path):
    folder = draw_squares(tmp_path, 120)
    model = build(folder)
    evaluate(model, folder)
    assert model.roi_heads.detections_per_img == 120
    shards = tmp_path / "shards"
    write_shards(tmp_path / "images", tmp_path / "coco.json", shards=shards, workers=1)
    report = train(shards, tmp_path / "run", steps=1, **TINY)
    assert report.plan.most_objects == 120
    # The model of a run does so, too.
    model = load_trained_model(tmp_path / "run")
    assert model.roi_heads.detections_per_img == 120
    assert min(model.rpn.post_nms_top_n(), model.rpn.pre_nms_top_n()) >= 240


def test_images_without_objects_are_refused(dataset, monkeypatch):
    record = dataset.record
    crowds = [{**annotation, "iscrowd": 1} for annotation in record(0)["annotations"]]
    monkeypatch.setattr(dataset, "record", lambda i: {**record(i), "annotations": crowds})
    with pytest.raises(ColabUtilsError, match=f"None of the {len(dataset)} images"):
        evaluate(ScriptedModel([]), dataset)


@pytest.fixture
def on_drive(tiny_shards, monkeypatch):
    """A dataset that reads four parts at once, and whose reads call ``act`` with their part."""

    def open_dataset(act):
        def read_slowly(dataset, part):
            act(part)
            return read(dataset, part)

        read = ShardDataset._read_part
        monkeypatch.setattr(ShardDataset, "_read_part", read_slowly)
        dataset = ShardDataset(tiny_shards, contiguous_labels=True)
        dataset.is_slow = True
        dataset.streams = 4
        return dataset

    return open_dataset


def test_a_read_that_never_ends_ends_the_evaluation(on_drive, dataset, monkeypatch):
    never = threading.Event()
    model = ScriptedModel(predict_targets(dataset))
    monkeypatch.setattr("colab_utils.reader._GIVE_UP_S", 0.3)
    with pytest.raises(UnavailableError, match="did not come within"):
        evaluate(model, on_drive(lambda part: never.wait() if part == (3, 0) else None))
    never.set()


def test_records_and_images_on_drive_are_read_at_once(on_drive, dataset):
    together = threading.Barrier(4)
    model = ScriptedModel(predict_targets(dataset))
    seen = on_drive(lambda _: together.wait(20))
    assert evaluate(model, seen).segm == pytest.approx(1)
    assert not seen._open_reader()._ahead


def build(dataset):
    """A model that has learned nothing: 100 detections an image, with an average precision that is
    not zero.
    """
    torch.manual_seed(0)
    model = build_mask_rcnn(
        TINY_MODEL, num_classes=dataset.num_classes, weights=None, min_size=96, max_size=160
    )
    model.roi_heads.score_thresh = 0.0
    return model


def test_boxes_stay_exact_in_half_precision(dataset, monkeypatch):
    """torchvision's own boxes would be rounded to bfloat16: 800 pixels have places at every fourth
    pixel.
    """
    monkeypatch.setattr(evaluate_module, "choose_precision", lambda device: torch.bfloat16)
    model = build(dataset)
    ids = {label: label for label in range(dataset.num_classes)}
    with evaluate_module._set_up(model):
        results = detect(model, dataset.load_image(0), image_id=1, category_ids=ids)
    boxes = torch.tensor([result["bbox"] for result in results])
    assert (boxes != boxes.bfloat16().float()).float().mean() > 0.5
    # The model is left as it was.
    assert not model.rpn.head._forward_hooks


def test_detections_are_those_of_torchvision(dataset):
    model = build(dataset).eval()
    image = dataset.load_image(0)
    with torch.no_grad():
        (stock,) = model([image.float() / 255])
    assert len(stock["labels"].unique()) > 1
    # The model knows a class that the dataset does not have.
    unknown = int(stock["labels"][-1])
    ids = {label: 10 * label for label in range(dataset.num_classes) if label != unknown}
    with evaluate_module._set_up(model):
        results = detect(model, image, image_id=7, category_ids=ids)
    boxes = stock["boxes"]
    boxes[:, 2:] -= boxes[:, :2]
    expected = {
        "image_id": [7] * len(boxes),
        "category_id": [ids.get(label, -1) for label in stock["labels"].tolist()],
        "score": stock["scores"].tolist(),
        "segmentation": encode(stock["masks"]),
    }
    for name, values in expected.items():
        assert [result[name] for result in results] == values, name
    torch.testing.assert_close(torch.tensor([result["bbox"] for result in results]), boxes)
