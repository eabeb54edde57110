from __future__ import annotations

import errno
import io
import json
import shutil
from typing import Any

import pytest
from PIL import Image

from colab_utils.data.checks import check_dataset, repair_annotations
from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError
from colab_utils.shards.write import write_shards


class Dataset:
    """A copy of the tiny dataset that a test may spoil."""

    def __init__(self, source, folder):
        self.images, self.annotations = folder / "images", folder / "annotations.json"
        shutil.copytree(source.images, self.images)
        self.coco: dict[str, Any] = json.loads(source.annotations.read_text())
        rows = self.coco["annotations"]
        bare = {image["id"] for image in self.coco["images"]} - {row["image_id"] for row in rows}
        rows += [{**rows[0], "image_id": number, "id": number} for number in sorted(bare)]
        self.save()

    def save(self):
        self.annotations.write_text(json.dumps(self.coco))

    def file(self, i):
        return self.images / self.coco["images"][i]["file_name"]

    def check(self):
        self.save()
        return check_dataset(self.images, self.annotations)


@pytest.fixture
def dataset(tiny_dataset, tmp_path):
    return Dataset(tiny_dataset, tmp_path)


def cut(path, bytes_left):
    path.write_bytes(path.read_bytes()[:bytes_left])


def spoil_annotation(**changes):
    return lambda dataset: dataset.coco["annotations"][2].update(changes)


def spoil_image(**changes):
    return lambda dataset: dataset.coco["images"][4].update(changes)


def repeat_name(dataset):
    dataset.coco["images"][4]["file_name"] = dataset.coco["images"][5]["file_name"]


def empty(dataset):
    first = dataset.coco["images"][4]["id"]
    dataset.coco["annotations"] = [one for one in dataset.coco["annotations"] if one["image_id"] != first]


DEFECTS = [
    (lambda d: d.file(4).unlink(), "missing image", True),
    (lambda d: (d.file(4).unlink(), d.file(4).mkdir()), "missing image", True),
    (lambda d: d.file(4).write_bytes(b""), "bad image", True),
    (lambda d: d.file(4).write_text("no picture"), "bad image", True),
    (lambda d: cut(d.file(4), 2000), "bad image", True),
    (lambda d: cut(d.file(4), d.file(4).stat().st_size - 2), "bad image", True),
    (spoil_image(file_name="../images/a.jpg"), "unsafe file_name", True),
    (spoil_image(file_name="/etc/passwd"), "unsafe file_name", True),
    (spoil_image(file_name="a\0b"), "unsafe file_name", True),
    (spoil_image(width=99), "size mismatch", True),
    (spoil_image(width=-160), "size mismatch", True),
    (spoil_annotation(image_id=10**9), "unknown image", True),
    (spoil_annotation(category_id=10**9), "unknown category", True),
    (spoil_annotation(segmentation=[]), "bad mask", True),
    (spoil_annotation(segmentation=[[1, 2, 3, 4]]), "bad mask", True),
    (spoil_annotation(segmentation=[[1e12, 2, 3, 4, 5, 6]]), "bad mask", True),
    (spoil_annotation(segmentation={"size": [1, 2], "counts": [2]}), "bad mask", True),
    (spoil_annotation(segmentation={"size": [128, 160], "counts": "xyz"}), "bad mask", True),
    (spoil_annotation(bbox=[float("nan"), 0, 5, 5]), "bad annotation", True),
    (spoil_annotation(area=float("inf")), "bad annotation", True),
    (spoil_annotation(bbox=[3, 3, 0, 5]), "box without area", False),
    (empty, "image without objects", False),
    (repeat_name, "repeated file_name", False),
]


@pytest.mark.parametrize(("spoil", "kind", "serious"), DEFECTS)
def test_each_defect_has_a_name_and_a_cure(dataset, spoil, kind, serious, tmp_path):
    spoil(dataset)
    report = dataset.check()
    assert [(problem.kind, problem.count) for problem in report.problems] == [(kind, 1)]
    assert report.ok is not serious
    assert report.images == 12
    assert report.annotations == len(dataset.coco["annotations"])
    example = report.problems[0].examples[0]
    named = ("annotation", dataset.coco["images"][4]["file_name"])
    assert any(name in example for name in named)
    assert kind in str(report)
    original = dataset.annotations.read_bytes()
    repaired = repair_annotations(dataset.images, dataset.annotations, output=tmp_path / "repaired.json")
    assert repaired.ok
    assert dataset.annotations.read_bytes() == original
    assert report.images - repaired.images == (serious and kind.split()[-1] in ("image", "file_name", "mismatch")) - (
        kind == "unknown image"
    )
    shards = write_shards(dataset.images, tmp_path / "repaired.json", shards=tmp_path / "shards", workers=1)
    assert shards.skipped == ()
    assert shards.images == repaired.images


def test_a_good_dataset(tiny_dataset, coco_mini):
    report = check_dataset(tiny_dataset.images, tiny_dataset.annotations)
    assert report.ok
    assert {problem.kind for problem in report.problems} <= {"image without objects"}
    report = check_dataset(coco_mini.images, coco_mini.annotations)
    assert report.ok
    assert (report.images, report.annotations) == (
        80,
        len(json.loads(coco_mini.annotations.read_text())["annotations"]),
    )


def test_no_images_at_all(dataset):
    dataset.coco["images"] = dataset.coco["annotations"] = []
    report = dataset.check()
    assert not report.ok
    assert report.problems[0].kind == "no images"


def test_many_defects_are_counted_and_a_few_shown(dataset):
    for i in range(9):
        dataset.file(i).unlink()
    problem = dataset.check().problems[0]
    assert (problem.count, len(problem.examples)) == (9, 5)


def test_ids_that_start_again_in_each_image(dataset, tmp_path):
    """Only the bad annotation of that image goes, not those of the same id in others."""
    seen: dict[int, int] = {}
    for one in dataset.coco["annotations"]:
        one["id"] = seen[one["image_id"]] = seen.get(one["image_id"], 0) + 1
    dataset.coco["annotations"][0]["segmentation"] = []
    dataset.save()
    repair_annotations(dataset.images, dataset.annotations, output=tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["annotations"] == dataset.coco["annotations"][1:]


def test_repair_without_ids_in_utf_16(dataset, tmp_path):
    for one in dataset.coco["annotations"]:
        del one["id"]
    dataset.coco["annotations"][3]["category_id"] = 999
    dataset.annotations.write_bytes(json.dumps(dataset.coco).encode("utf-16"))
    report = repair_annotations(dataset.images, dataset.annotations, output=tmp_path / "out.json")
    assert report.annotations == len(dataset.coco["annotations"]) - 1


def test_repair_overwrites_nothing(dataset, tmp_path):
    for output in (dataset.annotations, tmp_path):
        with pytest.raises(ColabUtilsError, match="nothing is overwritten"):
            repair_annotations(dataset.images, dataset.annotations, output=output)
    with pytest.raises(ColabUtilsError, match="expected to write"):
        repair_annotations(dataset.images, dataset.annotations, output=tmp_path / "no" / "out.json")


def test_a_jpeg_with_something_after_its_end_is_whole(dataset):
    """Phones put a video or a map behind the picture."""
    with open(dataset.file(4), "ab") as file:
        file.write(b"\x01" * 20_000)
    assert dataset.check().problems == ()


def test_masks_are_checked_where_the_json_has_no_size(dataset):
    for image in dataset.coco["images"]:
        del image["width"], image["height"]
    assert dataset.check().problems == ()
    dataset.coco["annotations"][0]["segmentation"] = {"size": [1, 1], "counts": [1]}
    assert [problem.kind for problem in dataset.check().problems] == ["bad mask"]


def test_a_turned_photo_is_no_mismatch(dataset):
    image = dataset.coco["images"][4]
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (image["height"], image["width"])).save(dataset.file(4), "JPEG", exif=exif)
    assert dataset.check().problems == ()


def test_what_check_does_not_see_preprocess_does(dataset, tmp_path):
    """A PNG cut short behind its header, and a JPEG cut behind an end marker in its metadata."""
    png, picture = io.BytesIO(), Image.effect_noise((160, 128), 90)
    picture.convert("RGB").save(png, "PNG")
    dataset.file(4).write_bytes(png.getvalue()[:9000])
    jpeg = io.BytesIO()
    picture.save(jpeg, "JPEG", comment=b"\xff\xd9")
    dataset.file(5).write_bytes(jpeg.getvalue()[:3000])
    assert dataset.check().ok
    report = write_shards(dataset.images, dataset.annotations, shards=tmp_path / "s", workers=1, max_bad=0.5)
    names = {dataset.coco["images"][i]["file_name"] for i in (4, 5)}
    assert {image.file_name for image in report.skipped} == names
    assert all("not a complete image" in image.reason for image in report.skipped)


@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.EIO])
def test_a_lost_drive_is_not_a_folder_of_bad_images(dataset, monkeypatch, number):
    def fail(*_, **__):
        raise OSError(number, "gone")

    monkeypatch.setattr(Image, "open", fail)
    monkeypatch.setattr("colab_utils.drive.is_on_drive", lambda path: True)
    with pytest.raises(DriveLostError):
        dataset.check()


def test_what_a_broken_disk_does_not_give_is_a_bad_image(dataset, monkeypatch):
    real = Image.open

    def fail(path):
        if path == dataset.file(4):
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    monkeypatch.setattr(Image, "open", fail)
    assert [problem.kind for problem in dataset.check().problems] == ["bad image"]


def test_missing_folder_and_file(dataset, tmp_path):
    with pytest.raises(ColabUtilsError, match="expected an image folder"):
        check_dataset(tmp_path / "no", dataset.annotations)
    with pytest.raises(ColabUtilsError, match="expected an image folder"):
        check_dataset(dataset.annotations, dataset.annotations)
    with pytest.raises(ColabUtilsError, match="expected an annotations file"):
        check_dataset(dataset.images, tmp_path / "no.json")
