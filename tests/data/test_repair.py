import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask

from colab_utils.data import repair
from colab_utils.data.masks import encode_segmentation
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.opening import open_dataset
from tests.coco_files import CocoFiles, make_object
from tests.pictures import make_exif

pytestmark = pytest.mark.usefixtures("no_fork")

HEIGHT = 64
WIDTH = 96
SQUARE_PIXELS = 480
NOISE = Image.effect_noise((WIDTH, HEIGHT), 90).convert("RGB")


class Export(CocoFiles):
    """Four photos of two squares each, which a test exports in its own way."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for i in range(1, 5):
            self.add_image(NOISE, f"{i - 1}.jpg")
            for x in (8, 38):
                self.add_object(i, [x, 10, 20, 24])

    def read_repaired(self):
        return json.loads(self.repaired.read_text())["annotations"]

    def read_sizes(self):
        """Return width and height of each image after the repair."""
        images = json.loads(self.repaired.read_text())["images"]
        return [(image["width"], image["height"]) for image in images]


@pytest.fixture
def export(tmp_path):
    return Export(tmp_path)


LEFTOVERS = [
    {"segmentation": [], "bbox": None, "area": None},
    {"segmentation": [[5, 5]], "bbox": [5, 5, 0, 0], "area": 0},
    {"segmentation": {"size": [0, 0], "counts": []}, "bbox": [0, 0, 0, 0], "area": 0},
]


@pytest.mark.parametrize("leftover", LEFTOVERS)
def test_an_empty_annotation_does_not_cost_its_image(export, leftover):
    export.add_object(1, [0, 0, 0, 0], **leftover)
    assert export.count_problems() == {"empty annotation": 1}
    report = export.write(max_bad=0)
    assert report.skipped == ()
    assert report.faults == {"empty annotation": 1}
    assert "1 x empty annotation: note: left out of training" in str(report)
    for dataset in (ShardDataset(export.shards), export.open()):
        assert dataset[0][1]["masks"].sum((1, 2)).tolist() == [SQUARE_PIXELS] * 2
    repaired = export.repair()
    assert repaired.ok
    assert repaired.annotations == 8


def test_a_set_without_objects_and_shards_among_the_images_are_told(export):
    export.coco["annotations"] = []
    assert export.count_problems() == {"no objects": 1, "image without objects": 4}
    assert "no object to train on" in str(export.write())
    export.shards = export.images
    with pytest.raises(ColabUtilsError, match="is the image folder"):
        export.write()


def test_a_folder_that_takes_no_file_is_refused_before_images_are_read(export, monkeypatch):
    monkeypatch.setattr(repair, "inspect_images", None)
    export.repaired = export.repaired / "missing" / "repaired.json"
    with pytest.raises(ColabUtilsError, match="Writing into"):
        export.repair()


def swap_sides(entry):
    width = entry["width"]
    entry.update(width=entry["height"], height=width)


def test_swapped_sides_are_mended_where_all_images_have_them(export):
    for entry in export.coco["images"]:
        swap_sides(entry)
    assert export.count_problems() == {"size mismatch": 4}
    report = export.repair()
    assert report.ok
    assert [(repair.kind, repair.count) for repair in report.repairs] == [
        ("width and height swapped", 4)
    ]
    assert export.read_sizes() == [(WIDTH, HEIGHT)] * 4
    assert len(export.read_repaired()) == 8


def test_files_that_were_turned_are_not_taken_for_swapped_sides(export):
    """An outline lies where the upright photo alone has pixels."""
    for entry in export.coco["images"]:
        swap_sides(entry)
    export.add_object(1, [10, 70, 20, 20])
    with pytest.raises(ColabUtilsError, match=r"no object to keep.*4 x size mismatch"):
        export.repair()


@pytest.mark.parametrize("missing", [("width", "height"), ("width",)])
def test_a_size_that_is_missing_comes_from_the_file(export, missing):
    for side in missing:
        del export.coco["images"][1][side]
    report = export.repair()
    assert export.read_sizes() == [(WIDTH, HEIGHT)] * 4
    assert "width written anew" in {repair.kind for repair in report.repairs}


def test_a_size_that_is_missing_stays_so_where_exif_makes_it_unclear(export):
    NOISE.save(export.images / "1.jpg", exif=make_exif(6))
    del export.coco["images"][1]["width"]
    report = export.repair()
    assert export.read_sizes()[1] == (0, HEIGHT)
    assert "EXIF rotation, unclear" in {problem.kind for problem in report.problems}


def test_swapped_sides_of_a_few_images_are_not_guessed(export):
    swap_sides(export.coco["images"][0])
    report = export.repair()
    assert report.images == 3
    assert [repair.kind for repair in report.repairs] == ["size mismatch"]


def make_crowd_of_darwin(annotation):
    """Write an object with a hole as V7 Darwin does."""
    mask = encode_segmentation(annotation["segmentation"], HEIGHT, WIDTH)
    pixels = np.asfortranarray(coco_mask.decode(mask))
    x, y = annotation["bbox"][:2]
    pixels[y + 5 : y + 10, x + 5 : x + 10] = 0
    counts = coco_mask.encode(pixels)["counts"].decode()
    rle = {"size": [HEIGHT, WIDTH], "counts": counts}
    annotation.update(segmentation=rle, area=0, iscrowd=1)


def test_a_crowd_without_area_is_serious_whatever_their_share(export):
    for image in range(1, 5):
        for x in range(0, 72, 8):
            export.add_object(image, [x, 40, 6, 6])
    make_crowd_of_darwin(export.objects[0])
    assert export.count_problems() == {"crowd without area": 1, "crowd": 1}
    with pytest.raises(ColabUtilsError, match=r"1 x crowd without area: .*--crowds objects"):
        export.write(max_bad=0.01)
    with pytest.warns(match="1 x crowd without area"):
        export.open()
    assert not export.repair().ok
    report = export.repair(crowds="objects")
    assert report.ok
    assert report.objects == 44
    annotation = export.read_repaired()[0]
    assert (annotation["iscrowd"], annotation["area"]) == (0, SQUARE_PIXELS - 25)


@pytest.mark.parametrize(
    ("area", "expected"),
    [
        # In shares of the image.
        (480 / 96 / 64, 480),
        (1920, 480),
        (None, 480),
        ("nan", 480),
        # Of a polygon, or of a mask with holes.
        (479.5, 479.5),
        (300, 300),
    ],
)
def test_an_area_that_fits_neither_box_nor_mask_is_that_of_the_mask(export, area, expected):
    export.objects[0]["area"] = area
    export.repair()
    assert export.read_repaired()[0]["area"] == expected


def test_shares_of_the_image_become_pixels(export):
    """As Azure's export has box, outline and area."""
    original = [dict(annotation) for annotation in export.objects]
    for annotation in export.objects:
        outline = np.array(annotation["segmentation"]) / ([WIDTH, HEIGHT] * 4)
        annotation.update(
            bbox=(np.array(annotation["bbox"]) / ([WIDTH, HEIGHT] * 2)).tolist(),
            area=annotation["area"] / WIDTH / HEIGHT,
            segmentation=outline.tolist(),
        )
    export.repair()
    assert [(entry["bbox"], entry["area"]) for entry in export.read_repaired()] == [
        (entry["bbox"], entry["area"]) for entry in original
    ]


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"segmentation": [[0.1, 0.2, 0.3, 0.2, 0.3, 0.5]]}, "normalised polygon"),
        ({"bbox": [60, 40, 20, 20]}, "mask and box disagree"),
    ],
)
def test_loose_files_say_what_check_calls_serious(export, fields, kind):
    export.objects[0].update(fields)
    assert export.count_problems() == {kind: 1}
    for opened in (CocoFolder, partial(open_dataset, drive=None, ssd=export.shards)):
        with pytest.warns(match=f"coco.json has bad objects: 1 x {kind}: object is trained"):
            opened(export.images, export.annotations).stop()


def run_along_rows(outline):
    """Return RLE whose runs go along the rows of the image."""
    mask = coco_mask.decode(encode_segmentation(outline, HEIGHT, WIDTH))
    runs = coco_mask.encode(np.asfortranarray(mask.ravel().reshape(WIDTH, HEIGHT).T))
    return {"size": [HEIGHT, WIDTH], "counts": runs["counts"].decode()}


@pytest.mark.parametrize(
    "change",
    [
        lambda outline: [np.reshape(outline, (-1, 2))[:, ::-1].ravel().tolist()],
        run_along_rows,
    ],
    ids=["y before x", "along rows"],
)
def test_outlines_in_another_order_make_no_boxes(export, change):
    """The boxes are right, and the outlines wrong. Nothing else shows it."""
    for annotation in export.objects:
        annotation["segmentation"] = change(annotation["segmentation"])
    assert export.count_problems()["mask and box disagree"] >= 4
    with pytest.raises(ColabUtilsError, match="boxes lie elsewhere than their outlines"):
        export.repair()
    assert not export.repaired.exists()
    with pytest.raises(ColabUtilsError, match="x mask and box disagree"):
        export.write()


def test_boxes_of_corners_near_the_origin_are_mended_with_the_others(export):
    for annotation in export.objects:
        x, y, width, height = annotation["bbox"]
        annotation["bbox"] = [x, y, x + width, y + height]
    export.repair()
    boxes = {tuple(annotation["bbox"]) for annotation in export.read_repaired()}
    assert boxes == {(8, 10, 20, 24), (38, 10, 20, 24)}


def test_objects_of_an_image_in_several_entries_are_told_until_they_are_joined(export):
    entry = export.coco["images"][0]
    export.coco["images"].append(entry | {"id": 9})
    export.objects[0]["image_id"] = 9
    assert export.count_problems() == {"objects in several entries of an image": 1}
    for read in (export.write, export.open):
        with pytest.warns(match=r"several entries of '0\.jpg' with different objects"):
            read()
    export.repair()
    assert len(CocoFolder(export.images, export.repaired)) == 4


def test_ids_that_repeat_are_noted_and_renewed(export):
    for n, annotation in enumerate(export.objects):
        annotation["id"] = n % 2 + 1
    assert export.count_problems() == {"repeated annotation id": 2}
    report = export.repair()
    assert report.ok
    assert not report.problems
    assert [entry["id"] for entry in export.read_repaired()] == [*range(1, 9)]


@pytest.mark.parametrize(
    "fields",
    [
        # The area is that of the box, as in many exports.
        {"segmentation": [[8, 10, 28, 10, 28, 34]]},
        # The box also holds what is hidden.
        {"bbox": [8, 10, 20, 28]},
    ],
)
def test_objects_that_are_as_tools_write_them_are_not_odd(export, fields):
    export.objects[0].update(fields)
    assert export.count_problems() == {}


def test_outlines_of_smaller_images_are_told(export):
    for annotation in export.objects:
        box = [side / 4 for side in annotation["bbox"]]
        annotation.update(make_object(annotation["id"], annotation["image_id"], box))
    report = export.check()
    assert report.ok
    [problem] = report.problems
    assert problem.kind == "objects in one corner"
    assert problem.examples == (
        "all 8 objects lie in the left 15% and the upper 13% of their images",
    )
