"""The recipe docs/recipes/coco_to_yolo.py: what it writes, and what it says of the rest."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from colab_utils.data.masks import read_counts

RECIPE = Path(__file__).parents[2] / "docs/recipes/coco_to_yolo.py"
convert_coco = runpy.run_path(str(RECIPE))["convert_coco"]
HEIGHT = 80
WIDTH = 120
ROWS, COLUMNS = np.mgrid[:HEIGHT, :WIDTH]
DISC = np.hypot(ROWS - 40, COLUMNS - 40) < 25
RING = DISC & (np.hypot(ROWS - 40, COLUMNS - 40) > 8)
PAIR = DISC | (np.hypot(ROWS - 40, COLUMNS - 95) < 15)
BOX = [[10, 10, 50, 10, 50, 40, 10, 40]]
TWO_BOXES = [*BOX, [60, 50, 100, 50, 100, 70, 60, 70]]


def encode(mask):
    rle = coco_mask.encode(np.asfortranarray(mask, np.uint8))
    return rle | {"counts": rle["counts"].decode()}


def write(folder, outline, /, **more):
    image = {"id": 7, "file_name": "sub/a.jpg", "width": WIDTH, "height": HEIGHT}
    coco = {
        "images": [image, {**image, "id": 9, "file_name": "b.png"}],
        "annotations": [
            {"id": 1, "image_id": 7, "category_id": 3, "segmentation": outline, **more}
        ],
        "categories": [{"id": 3, "name": "dog"}, {"id": 1, "name": "cat"}],
    }
    path = folder / "coco.json"
    path.write_text(json.dumps(coco))
    return path


def read(folder):
    """Return class and mask of each object."""
    objects = []
    for line in (folder / "labels/sub/a.txt").read_text().splitlines():
        label, *numbers = map(float, line.split())
        points = np.reshape(numbers, (-1, 2)) * (WIDTH, HEIGHT)
        rles = coco_mask.frPyObjects([points.ravel().tolist()], HEIGHT, WIDTH)
        objects.append((label, coco_mask.decode(rles)[..., 0] > 0))
    return objects


def draw(polygons):
    rles = coco_mask.frPyObjects(polygons, HEIGHT, WIDTH)
    return coco_mask.decode(coco_mask.merge(rles)) > 0


CASES = {
    "polygon": (BOX, draw(BOX), {}),
    "parts": (TWO_BOXES, draw(TWO_BOXES), {"objects whose parts are joined by lines": 1}),
    "runs": (encode(DISC), DISC, {}),
    "plain runs": (
        {"size": [HEIGHT, WIDTH], "counts": read_counts(encode(DISC)["counts"].encode()).tolist()},
        DISC,
        {},
    ),
    "runs to the border": (encode(COLUMNS < 30), COLUMNS < 30, {}),
    "a hole": (encode(RING), DISC, {"holes filled": 1}),
    "runs in parts": (encode(PAIR), PAIR, {"objects whose parts are joined by lines": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_outlines_are_those_of_the_masks(tmp_path, name, capsys):
    segmentation, expected, words = CASES[name]
    counts = convert_coco(write(tmp_path, segmentation), tmp_path / "yolo")
    ((label, mask),) = read(tmp_path / "yolo")
    assert label == 1
    assert (mask & expected).sum() > 0.97 * (mask | expected).sum()
    assert {what: count for what, count in counts.items() if count} == {
        "images": 2,
        "objects": 1,
        **words,
    }
    printed = capsys.readouterr().out
    assert all(f"{count} {what}" in printed for what, count in words.items())


def test_what_is_left_out_is_counted(tmp_path):
    for more, words in [
        ({"iscrowd": 1}, "left out, a crowd"),
        ({"image_id": 8}, "left out, of an unknown image or category"),
        ({"category_id": 2}, "left out, of an unknown image or category"),
        ({"segmentation": []}, "left out, without an outline"),
        ({"segmentation": [[1, 1, 2, 2]]}, "left out, without an outline"),
        ({"segmentation": encode(DISC & ~DISC)}, "left out, without an outline"),
    ]:
        counts = convert_coco(write(tmp_path, BOX, **more), tmp_path / "yolo")
        assert counts[words] == 1, more
        assert counts["objects"] == 0
        assert read(tmp_path / "yolo") == []


def test_images_without_objects_have_empty_labels_and_classes_their_names(tmp_path):
    convert_coco(write(tmp_path, BOX), tmp_path / "yolo")
    assert (tmp_path / "yolo/labels/b.txt").read_text() == ""
    data = json.loads((tmp_path / "yolo/data.yaml").read_text())
    assert data["names"] == {"0": "cat", "1": "dog"}


def test_the_lines_of_the_page_run(tmp_path, monkeypatch):
    code = (RECIPE.parents[1] / "FORMATS.md").read_text().partition("## Out of COCO")[2]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(RECIPE.parent)
    write(tmp_path, BOX).rename("photos.json")
    exec(code.partition("```python")[2].partition("```")[0], {})
    assert len(read(tmp_path / "yolo")) == 1


def test_two_images_of_one_name_are_refused(tmp_path):
    path = write(tmp_path, BOX)
    coco = json.loads(path.read_text())
    coco["images"].append({**coco["images"][0], "id": 10, "file_name": "sub/a.png"})
    path.write_text(json.dumps(coco))
    with pytest.raises(ValueError, match="the same name"):
        convert_coco(path, tmp_path / "yolo")
    assert not (tmp_path / "yolo").exists()
