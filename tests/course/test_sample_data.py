"""The built-in dataset: pixels and annotations agree, the same arguments give the same bytes,
nothing is lost.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

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


@pytest.fixture(scope="module")
def content(made):
    return json.loads(made.annotations.read_text())


def hash_folder(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def draw_polygons(polygons, height, width):
    return coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(polygons, height, width))) > 0


def test_dataset_is_what_pycocotools_reads(made, capsys):
    coco = COCO(made.annotations)
    capsys.readouterr()
    assert len(coco.imgs) == made.n == 12
    assert len(coco.anns) == made.objects
    assert {c["name"]: c["id"] for c in coco.dataset["categories"]} == {
        c["name"]: c["id"] for c in CATEGORIES
    }
    ids = sorted(coco.imgs)
    assert ids != list(range(ids[0], ids[0] + 12)), "image ids have gaps, as in COCO"
    for image in coco.imgs.values():
        with Image.open(made.images / image["file_name"]) as picture:
            assert (picture.format, picture.mode, picture.size) == ("JPEG", "RGB", (160, 120))
    for annotation in coco.anns.values():
        mask = coco.annToMask(annotation)
        rows, columns = np.nonzero(mask)
        x, y, width, height = annotation["bbox"]
        assert annotation["area"] == mask.sum() > 0
        assert (x, y) == (columns.min(), rows.min())
        assert (x + width, y + height) == (columns.max() + 1, rows.max() + 1)
    assert str(made).startswith(f"12 images, {made.objects} objects")


def test_each_image_has_its_objects_and_one_has_none(content):
    counts = dict.fromkeys((image["id"] for image in content["images"]), 0)
    for annotation in content["annotations"]:
        counts[annotation["image_id"]] += 1
    counts = [*counts.values()]
    assert counts[9] == 0
    assert all(1 <= count <= 15 for count in counts[:9] + counts[10:])


def test_no_object_hides_another(tmp_path, capsys):
    made = make_dataset(tmp_path, n=10, width=160, height=120, objects=(8, 30), workers=1)
    coco = COCO(made.annotations)
    capsys.readouterr()
    for objects in coco.imgToAnns.values():
        assert sum(map(coco.annToMask, objects)).max() == 1
    assert made.objects > 100


@pytest.mark.parametrize("name", [category["name"] for category in CATEGORIES])
def test_a_polygon_covers_the_pixels_that_were_drawn(name):
    for seed in range(8):
        rng = np.random.default_rng(seed)
        pixels = module._paint_ground(rng, 320, 240)
        before = pixels.copy()
        annotation = module._draw_object(rng, pixels, name, 150 + 120j, rng.uniform(2, 100))
        mask = draw_polygons(annotation["segmentation"], 240, 320)
        assert annotation["category_id"] == {each["name"]: each["id"] for each in CATEGORIES}[name]
        assert annotation["area"] == mask.sum() > 0
        assert np.array_equal((pixels != before).any(axis=2), mask)


def test_every_kind_fits_into_its_circle():
    for corners in module._SHAPES.values():
        assert 0.9 <= np.hypot(*np.transpose(corners)).max() <= 1.0


def test_workers_do_not_change_a_byte_but_the_seed_does(made, tmp_path):
    alone = make_dataset(tmp_path / "alone", **SMALL, workers=1)
    assert hash_folder(tmp_path / "alone") == hash_folder(made.annotations.parent)
    other = make_dataset(tmp_path / "other", **SMALL, workers=1, seed=1)
    assert other.annotations.read_bytes() != alone.annotations.read_bytes()
    assert not set(hash_folder(other.images).values()) & set(hash_folder(alone.images).values())


def test_finished_dataset_is_returned_untouched(made):
    before = {path: path.stat().st_mtime_ns for path in made.images.iterdir()}
    again = make_dataset(made.annotations.parent, **SMALL)
    assert (again.n, again.objects, again.bytes) == (made.n, made.objects, made.bytes)
    assert {path: path.stat().st_mtime_ns for path in made.images.iterdir()} == before


def test_foreign_content_is_never_overwritten(made, tmp_path):
    with pytest.raises(
        ColabUtilsError, match=r"holds another dataset than .*Choose another folder"
    ):
        make_dataset(made.annotations.parent, **{**SMALL, "n": 13})
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "annotations.json").write_text('{"images": []}')
    with pytest.raises(ColabUtilsError, match="holds another dataset"):
        make_dataset(mine, **SMALL)
    assert (mine / "annotations.json").read_text() == '{"images": []}'
    photos = tmp_path / "photos"
    (photos / "images").mkdir(parents=True)
    (photos / "images" / "cat.jpg").write_bytes(b"cat")
    with pytest.raises(ColabUtilsError, match=r"Writing into .* failed: Directory not empty"):
        make_dataset(photos, **SMALL)
    assert [path.name for path in photos.rglob("*") if path.is_file()] == ["cat.jpg"]
    with pytest.raises(ColabUtilsError, match=r"Writing into .* failed"):
        make_dataset(photos / "images" / "cat.jpg", **SMALL)


def test_a_damaged_dataset_is_refused(tmp_path):
    made = make_dataset(tmp_path, n=2, width=64, height=48, workers=1)
    image = next(made.images.iterdir())
    image.write_bytes(image.read_bytes()[:-10])
    with pytest.raises(ColabUtilsError, match=r"Some of the 2 images .* are missing or cut"):
        make_dataset(tmp_path, n=2, width=64, height=48)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_failure_leaves_nothing_behind(tmp_path, monkeypatch, error):
    def fail(*_):
        raise error

    # The workers are forked, so they see the patch, too.
    monkeypatch.setattr(module, "_draw_object", fail)
    expected = ColabUtilsError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        make_dataset(tmp_path, **SMALL, workers=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        # A JPEG holds fewer rows.
        {"height": 70_000},
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
    crowded = make_dataset(tmp_path / "crowded", n=1, objects=(300, 300), workers=1)
    assert crowded.objects == 300
    tiny = make_dataset(tmp_path / "tiny", n=30, width=32, height=33, workers=1)
    assert tiny.objects >= 29


def test_twelve_megapixel_photos_are_spread_evenly(tmp_path):
    settings = {"n": 9, "width": 64, "height": 48, "objects": (2, 3)}
    plain = make_dataset(tmp_path / "plain", **settings, workers=2)
    made = make_dataset(tmp_path / "made", **settings, photos=2, workers=2)
    content = json.loads(made.annotations.read_text())
    before = json.loads(plain.annotations.read_text())
    assert content["info"]["made_with"] == {**before["info"]["made_with"], "photos": 2}
    sizes = [(image["width"], image["height"]) for image in content["images"]]
    photos = [index for index, size in enumerate(sizes) if size == (4000, 3000)]
    assert photos == [3, 7]
    assert sizes.count((64, 48)) == 7
    paths = [made.images / image["file_name"] for image in content["images"]]
    for index, path in enumerate(paths):
        if index in photos:
            assert 1.5e6 < path.stat().st_size < 8e6
        else:
            assert path.read_bytes() == (plain.images / path.name).read_bytes()
    ids = {content["images"][index]["id"] for index in photos}
    areas = [each["area"] for each in content["annotations"] if each["image_id"] in ids]
    assert len(areas) >= 4
    # Objects are as large as in other pictures.
    assert min(areas) > 12_000


def test_categories_that_are_named_are_all_that_is_drawn(tmp_path):
    made = make_dataset(tmp_path, n=8, width=96, height=64, categories=("heart", "ball"), workers=1)
    content = json.loads(made.annotations.read_text())
    ids = {category["name"]: category["id"] for category in CATEGORIES}
    assert [category["name"] for category in content["categories"]] == ["ball", "heart"], "ids rise"
    assert {annotation["category_id"] for annotation in content["annotations"]} == {
        ids["ball"],
        ids["heart"],
    }
