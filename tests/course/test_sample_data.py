"""The built-in dataset: pixels and annotations agree, the same arguments give the same bytes,
nothing is lost.
"""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO

from colab_utils.course import sample_data as module
from colab_utils.course.sample_data import CATEGORIES, make_dataset
from colab_utils.errors import ColabUtilsError

SMALL = {"n": 12, "width": 160, "height": 120}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("builtin"), **SMALL, workers=2)


def read_files(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")}


def test_dataset_is_what_pycocotools_reads(made, capsys):
    coco = COCO(made.annotations)
    capsys.readouterr()
    assert coco.dataset["categories"] == [*CATEGORIES]
    ids = sorted(coco.imgs)
    assert ids != list(range(ids[0], ids[0] + 12)), "image ids have gaps, as in COCO"
    counts = [len(coco.imgToAnns[number]) for number in ids]
    assert (len(ids), sum(counts)) == (12, len(coco.anns))
    # One image has no object.
    assert counts.pop(9) == 0
    assert all(1 <= count <= 15 for count in counts)
    for image in coco.imgs.values():
        with Image.open(made.images / image["file_name"]) as picture:
            assert (picture.format, picture.mode, picture.size) == ("JPEG", "RGB", (160, 120))
    for annotation in coco.anns.values():
        mask = coco.annToMask(annotation)
        rows, columns = np.nonzero(mask)
        assert annotation["area"] == mask.sum() > 0
        size = [np.ptp(columns) + 1, np.ptp(rows) + 1]
        assert annotation["bbox"] == [columns.min(), rows.min(), *size]


def test_no_object_hides_another(tmp_path, capsys):
    made = make_dataset(tmp_path, n=10, width=160, height=120, objects=(8, 30), workers=1)
    coco = COCO(made.annotations)
    capsys.readouterr()
    for objects in coco.imgToAnns.values():
        assert sum(map(coco.annToMask, objects)).max() == 1
    assert len(coco.anns) > 100


@pytest.mark.parametrize("category", CATEGORIES, ids=lambda category: category["name"])
def test_a_polygon_covers_the_pixels_that_were_drawn(category):
    for seed in range(8):
        rng = np.random.default_rng(seed)
        pixels = np.zeros((240, 320, 3), np.uint8)
        before = pixels.copy()
        radius = rng.uniform(2, 100)
        annotation = module._draw_object(rng, pixels, category, 150 + 120j, radius)
        [polygon] = coco_mask.frPyObjects(annotation["segmentation"], 240, 320)
        mask = coco_mask.decode(polygon)
        assert annotation["area"] == mask.sum() > 0
        assert np.array_equal((pixels != before).any(axis=2), mask)


def test_workers_do_not_change_a_byte_but_the_seed_does(made, tmp_path):
    alone = make_dataset(tmp_path / "alone", **SMALL, workers=1)
    assert read_files(tmp_path / "alone") == read_files(made.annotations.parent)
    other = make_dataset(tmp_path / "other", **SMALL, workers=1, seed=1)
    assert other.annotations.read_bytes() != alone.annotations.read_bytes()
    assert not {*read_files(other.images).values()} & {*read_files(alone.images).values()}


def test_a_finished_dataset_is_returned_untouched(made):
    folder = made.annotations.parent
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert make_dataset(folder, **SMALL) == made
    with pytest.raises(
        ColabUtilsError, match=r"holds another dataset than .*Choose another folder"
    ):
        make_dataset(folder, **{**SMALL, "n": 13})
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize(
    ("name", "words"),
    [
        # The JSON holds a list.
        ("annotations.json", "holds another dataset"),
        ("images/cat.jpg", r"Writing into .* failed: Directory not empty"),
        # A file has the name of the folder.
        ("", r"Writing into .* failed"),
    ],
)
def test_foreign_content_is_never_overwritten(tmp_path, name, words):
    mine = tmp_path / "mine" / name
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("[1]")
    with pytest.raises(ColabUtilsError, match=words):
        make_dataset(tmp_path / "mine", **SMALL)
    assert mine.read_text() == "[1]"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KeyboardInterrupt, KeyboardInterrupt),
        (OSError(28, "No space left on device"), ColabUtilsError),
    ],
)
def test_failure_leaves_nothing_behind(tmp_path, monkeypatch, error, raised):
    # The workers are forked, so they see the patch, too.
    monkeypatch.setattr(module, "_draw_object", Mock(side_effect=error))
    with pytest.raises(raised):
        make_dataset(tmp_path, **SMALL, workers=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        {"height": 31},
        {"workers": -1},
        # The bounds are reversed.
        {"objects": (5, 2)},
        # There are fewer images than this.
        {"photos": 501},
        # The letters of a text are no categories.
        {"categories": "ball"},
        {"categories": ()},
    ],
)
def test_parameters_without_sense_are_refused(tmp_path, wrong):
    with pytest.raises(ColabUtilsError, match=r"^(expected|categories must be) .*(found|it is) "):
        make_dataset(tmp_path / "new", **wrong)
    assert not (tmp_path / "new").exists()


def test_files_weigh_what_photos_weigh(tmp_path):
    made = make_dataset(tmp_path, n=6)
    assert 100_000 <= np.median([path.stat().st_size for path in made.images.iterdir()]) <= 200_000


def test_three_hundred_small_objects_and_tiny_pictures(tmp_path):
    for least, settings in (
        (300, {"n": 1, "objects": (300, 300)}),
        (29, {"n": 30, "width": 32, "height": 33}),
    ):
        made = make_dataset(tmp_path / str(least), **settings, workers=1)
        assert len(json.loads(made.annotations.read_bytes())["annotations"]) >= least


def test_twelve_megapixel_photos_are_spread_evenly(tmp_path):
    named = {"categories": ("heart", "ball"), "objects": (2, 3)}
    made = make_dataset(tmp_path / "made", n=9, width=64, height=48, **named, photos=2)
    content = json.loads(made.annotations.read_text())
    # Only the categories that were named are drawn.
    assert {annotation["category_id"] for annotation in content["annotations"]} == {1, 29}
    for index, image in enumerate(content["images"]):
        path = made.images / image["file_name"]
        if index in (3, 7):
            assert (image["width"], image["height"]) == (4000, 3000)
            assert 1.5e6 < path.stat().st_size < 8e6
        else:
            assert (image["width"], image["height"]) == (64, 48)
