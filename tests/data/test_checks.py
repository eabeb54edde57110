from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from contextlib import nullcontext

import numpy as np
import pytest
from PIL import Image

from colab_utils import files
from colab_utils.data.checks import check_dataset
from colab_utils.data.repair import repair_annotations
from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning, escape
from colab_utils.loading.dataset import ShardDataset
from colab_utils.shards.write import write_shards
from tests.coco_files import CocoFiles, count_problems
from tests.pictures import make_exif, save


class Dataset(CocoFiles):
    """A copy of the tiny dataset that a test may spoil."""

    def __init__(self, source, folder):
        super().__init__(folder)
        shutil.copytree(source.images, self.images, dirs_exist_ok=True)
        self.coco = json.loads(source.annotations.read_text())
        rows = self.objects
        bare = {image["id"] for image in self.coco["images"]} - {row["image_id"] for row in rows}
        rows += [{**rows[0], "image_id": number, "id": number} for number in sorted(bare)]
        self.save()

    def file(self, i):
        return self.images / self.coco["images"][i]["file_name"]

    def list_objects(self, i):
        number = self.coco["images"][i]["id"]
        return [row for row in self.objects if row["image_id"] == number]

    def keep_objects(self, keep):
        self.coco["annotations"] = [*filter(keep, self.objects)]


@pytest.fixture
def dataset(tiny_dataset, tmp_path):
    return Dataset(tiny_dataset, tmp_path)


def test_images_with_more_than_100_objects_are_counted(dataset):
    assert "more than 100 objects" not in str(dataset.check())
    first = dataset.objects[0]
    for k in range(120):
        box = [10 * (k % 12), 10 * (k // 12), 8, 8]
        category = first["category_id"]
        dataset.add_object(first["image_id"], box, id=10_000 + k, category_id=category)
    report = dataset.check()
    assert report.ok
    assert "1 image has more than 100 objects (12" in str(report)


def spoil_annotation(**changes):
    return lambda dataset: dataset.objects[2].update(changes)


def spoil_image(**changes):
    return lambda dataset: dataset.coco["images"][4].update(changes)


def repeat_name(dataset):
    dataset.coco["images"][4]["file_name"] = dataset.coco["images"][5]["file_name"]


def repeat_entry(dataset):
    """The image once more, with the same objects."""
    repeat_name(dataset)
    empty(dataset)
    image_id = dataset.coco["images"][4]["id"]
    for n, row in enumerate(dataset.list_objects(5)):
        dataset.objects.append({**row, "image_id": image_id, "id": 900 + n})


def empty(dataset):
    gone = dataset.list_objects(4)
    dataset.keep_objects(lambda row: row not in gone)


def paint(mode="RGB", kind="JPEG", **options):
    """Another picture in place of one."""

    def spoil(dataset):
        picture = Image.effect_noise((160, 128), 90)
        if mode == "I;16":
            picture = Image.fromarray(np.asarray(picture, np.uint16) * 256)
        picture.convert(mode).save(dataset.file(4), kind, **options)

    return spoil


def move(dataset, path, name):
    """Move a photo below the folder, and name it."""
    (dataset.images / path).parent.mkdir(exist_ok=True)
    dataset.file(4).rename(dataset.images / path)
    dataset.coco["images"][4]["file_name"] = name


def cut_end(dataset):
    # Bytes of a small file's tables may look like the mark of its end.
    paint()(dataset)
    os.truncate(dataset.file(4), dataset.file(4).stat().st_size - 2)


def pipe(dataset):
    dataset.file(4).unlink()
    os.mkfifo(dataset.file(4))


def draw(polygon, box):
    """A mask with a box."""

    def spoil(dataset):
        dataset.objects[2].update(segmentation=[polygon], bbox=box)
        # It was that of another mask.
        del dataset.objects[2]["area"]

    return spoil


def bound(*box):
    """A square with another box."""
    return draw([60, 50, 90, 50, 90, 80, 60, 80], box=[*box])


def repeat_id(dataset):
    number = dataset.coco["images"][3]["id"]
    for annotation in dataset.list_objects(4):
        annotation["image_id"] = number
    dataset.coco["images"][4]["id"] = number


def repeat_annotation(dataset):
    dataset.objects.append({**dataset.objects[2], "id": 999})


# Each row has what is done to a dataset, the kind of defect that it is, or None, whether it is
# serious, and the images that are left of 12 when it is repaired.
DEFECTS = [
    (lambda d: d.file(4).unlink(), "missing image", True, 11),
    (lambda d: d.file(4).write_bytes(b""), "empty file", True, 11),
    (lambda d: d.file(4).write_text("no picture"), "bad image", True, 11),
    (pipe, "bad image", True, 11),
    (paint("F", "TIFF"), "bad image", True, 11),
    (cut_end, "truncated image", True, 11),
    (spoil_image(file_name="../images/a.jpg"), "unsafe file_name", True, 11),
    (
        lambda d: move(d, "here/a.jpg", "C:\\Users\\me\\a.jpg"),
        "found by base name",
        False,
        12,
    ),
    (spoil_image(width=99), "size mismatch", True, 11),
    (paint("I;16", "PNG"), "16-bit image", False, 12),
    (paint("RGBA", "PNG"), "image with alpha", False, 12),
    (
        lambda d: (paint("RGB", "PNG")(d), move(d, "a.jpg", "a.jpg")),
        None,
        False,
        12,
    ),
    # The photo is upside down.
    (paint(exif=make_exif(3)), "EXIF rotation, unclear", False, 12),
    (spoil_annotation(image_id=10**9), "unknown image", True, 12),
    (
        lambda d: d.coco["images"].append(d.coco["images"][4]),
        "repeated image id",
        True,
        12,
    ),
    # Nobody knows which image these objects belong to.
    (repeat_id, "repeated image id", True, 10),
    (spoil_annotation(category_id=10**9), "unknown category", True, 11),
    (spoil_annotation(segmentation=[]), "object without mask", True, 11),
    # The box is made no outline.
    (spoil_annotation(segmentation=[[30, 30, 20, 20]]), "bad mask", True, 11),
    # Nothing is lost here.
    (
        spoil_annotation(segmentation=[[1, 2, 3, 4]], bbox=[1, 2, 0, 0]),
        "bad mask",
        True,
        12,
    ),
    (
        spoil_annotation(segmentation={"size": [128, 160], "counts": [128 * 160]}),
        "empty mask",
        True,
        11,
    ),
    (
        draw([0.2, 0.2, 0.7, 0.2, 0.7, 0.9], box=[0.2, 0.2, 0.5, 0.7]),
        "normalised polygon",
        True,
        12,
    ),
    (bound(60, 50, 30, 42), "loose box", False, 12),
    (
        draw([120, 90, 220, 90, 220, 120, 120, 120], box=[120, 90, 40, 30]),
        "polygon beyond the image",
        False,
        12,
    ),
    (spoil_annotation(bbox=[float("nan"), 0, 5, 5]), "bad annotation", True, 12),
    (bound(90, 80, -30, -30), "box outside the image", True, 12),
    (bound(60, 50, 8, 30), "mask and box disagree", True, 12),
    (bound(60, 50, 90, 80), "box of corners", True, 12),
    (
        draw([20, 90, 60, 90, 60, 400, 20, 400], box=[20, 90, 40, 310]),
        None,
        False,
        12,
    ),
    (spoil_annotation(bbox=[3, 3, 0, 5]), "box without area", False, 12),
    (spoil_annotation(area=0), "area and mask disagree", False, 12),
    (repeat_annotation, "repeated annotation", False, 12),
    (empty, "image without objects", False, 12),
    (repeat_entry, "repeated file_name", False, 11),
    (repeat_name, "objects in several entries of an image", True, 11),
]


def list_serious(report):
    return [problem.kind for problem in report.problems if not problem.effect.startswith("note")]


@pytest.mark.parametrize(("spoil", "kind", "serious", "kept"), DEFECTS)
def test_each_defect_has_a_name_and_a_cure(dataset, spoil, kind, serious, kept, tmp_path, no_fork):
    before = dataset.count_problems()
    spoil(dataset)
    report = dataset.check()
    if kind is not None:
        assert count_problems(report).get(kind, 0) == before.get(kind, 0) + 1
    others = count_problems(report).keys() - before.keys() - {kind}
    # The first of the two images has all objects.
    if kind == "repeated image id":
        others -= {
            "image without objects",
            "repeated file_name",
            "objects in several entries of an image",
        }
    assert others <= {"polygon beyond the image"}
    assert report.ok is not serious
    for problem in report.problems:
        if problem.kind == kind:
            named = (
                "annotation",
                "id ",
                dataset.coco["images"][4]["file_name"],
                dataset.coco["categories"][-1]["name"],
            )
            assert any(escape(name) in problem.examples[-1] for name in named)
            assert f"{kind} ({problem.effect})" in str(report)
    original = dataset.annotations.read_bytes()
    repaired = dataset.repair()
    assert repaired.ok
    assert repaired.images == kept
    assert dataset.annotations.read_bytes() == original
    output = tmp_path / "again.json"
    again = repair_annotations(dataset.images, dataset.repaired, output=output)
    assert again.repairs == ()
    assert output.read_bytes() == dataset.repaired.read_bytes()
    warned = nullcontext()
    if kind == "EXIF rotation, unclear":
        warned = pytest.warns(ColabUtilsWarning, match="used as stored, because")
    with warned:
        shards = write_shards(
            dataset.images, dataset.repaired, shards=tmp_path / "shards", workers=1
        )
    assert (shards.skipped, shards.images) == ((), kept)
    for _, target in ShardDataset(tmp_path / "shards"):
        assert (target["masks"].flatten(1).sum(1) > 0).all()
        assert (target["boxes"][:, 2:] > target["boxes"][:, :2]).all()


def test_a_good_dataset_has_only_harmless_problems(tiny_dataset, coco_mini):
    harmless = {"image without objects", "crowd"}
    for source in (tiny_dataset, coco_mini):
        report = check_dataset(source.images, source.annotations)
        assert report.ok
        assert count_problems(report).keys() <= harmless
    rows = json.loads(coco_mini.annotations.read_text())["annotations"]
    assert (report.images, report.annotations) == (80, len(rows))
    objects = [row for row in rows if not row["iscrowd"]]
    classes = report.classes
    assert report.objects == len(objects) == sum(classes.values())
    assert next(iter(classes)) == "person"
    assert classes["person"] == sum(row["category_id"] == 1 for row in objects)


def test_masks_painted_with_cvat_are_crowds_unless_taken_as_objects(dataset):
    """All are crowds: 0 objects, unless they are taken as objects."""
    for annotation in dataset.objects:
        annotation["iscrowd"] = 1
        annotation["attributes"] = {"iscrowd": 0}
    report = dataset.check()
    assert list_serious(report) == ["many crowds"]
    assert report.problems[0].examples[0] == "31 of 31 objects are crowds and left out"
    with pytest.raises(
        ColabUtilsError, match=r"no object to keep.*\(31 x crowd\).* --crowds objects"
    ):
        dataset.repair()
    assert not dataset.repaired.exists()
    repaired = dataset.repair(crowds="objects")
    assert repaired.ok
    assert repaired.objects == 31
    assert [(repair.kind, repair.count) for repair in repaired.repairs] == [
        ("iscrowd written anew", 31)
    ]


def test_a_file_for_something_else_is_told(dataset):
    """It has boxes and keypoints."""
    for annotation in dataset.objects:
        annotation.pop("segmentation")
        annotation["keypoints"] = [1, 2, 2]
    report = dataset.check()
    assert list_serious(report) == ["object without mask"]
    assert "make them from the boxes" in str(report)
    with pytest.raises(
        ColabUtilsError, match=r"no object to keep: .* x object without a whole mask"
    ):
        dataset.repair()


def test_objects_without_a_mask_take_their_images_along(dataset):
    """As in a mixed export: none of them becomes background."""
    rows = dataset.objects
    for annotation in rows[:9]:
        annotation["segmentation"] = []
    gone = {annotation["image_id"] for annotation in rows[:9]}
    objects = sum(annotation["image_id"] in gone for annotation in rows)
    assert dataset.check().problems[0].count == 9
    report = dataset.repair()
    assert (report.images, report.annotations) == (12 - len(gone), 31 - objects)
    [repair] = report.repairs
    assert (repair.kind, repair.count) == ("object without a whole mask", len(gone))
    assert "images left out whole" in repair.effect


def test_repair_of_what_tools_write(dataset):
    """Numbers as text, flat polygons, parts of two points, ids as text, a box and an area that are
    missing.
    """
    original = dataset.check().classes
    rows = dataset.objects
    for row in rows:
        if isinstance(row["segmentation"], list):
            row["segmentation"] = [*map(str, row["segmentation"][0])]
        row.update(image_id=str(row["image_id"]), bbox=[*map(str, row["bbox"])])
        row["iscrowd"] = str(bool(row["iscrowd"]))
    rows[0].update(bbox=[], area=None)
    rows[1]["segmentation"] = [rows[1]["segmentation"], [1, 2, 3, 4]]
    report = dataset.repair()
    assert report.ok
    assert report.classes == original
    assert {repair.kind for repair in report.repairs} == {
        "segmentation written anew",
        "bbox written anew",
        "area written anew",
        "iscrowd written anew",
    }
    repaired = json.loads(dataset.repaired.read_text())["annotations"]
    assert {type(number) for row in repaired for number in row["bbox"]} <= {float, int}


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"area": 1e300}, 12),
        ({"bbox": {}}, 12),
        ({"image_id": [1]}, 12),
        ({"category_id": [1]}, 11),
        ({"iscrowd": 2}, 11),
        ({"segmentation": [[None] * 6]}, 11),
    ],
)
def test_repair_of_what_nobody_expects(dataset, change, kept):
    dataset.objects[2].update(change)
    report = dataset.repair()
    assert report.ok
    assert report.images == kept


def test_a_dataset_without_images_is_not_ok(dataset):
    dataset.coco.update(images=[], annotations=[])
    report = dataset.check()
    assert not report.ok
    assert report.problems[0].kind == "no images"


def test_many_defects_are_counted_and_a_few_shown(dataset):
    for i in range(9):
        dataset.file(i).unlink()
    problem = dataset.check().problems[0]
    assert (problem.count, len(problem.examples)) == (9, 5)


def test_repair_overwrites_nothing(dataset, tmp_path):
    for output, message in (
        (dataset.annotations, "nothing of yours is overwritten"),
        (tmp_path, "nothing of yours is overwritten"),
        (tmp_path / "no" / "out.json", r"Writing into .* failed"),
    ):
        with pytest.raises(ColabUtilsError, match=message):
            repair_annotations(dataset.images, dataset.annotations, output=output)


def test_a_jpeg_with_something_after_its_end_is_whole(dataset):
    """Phones put a video or a map behind the picture."""
    with open(dataset.file(4), "ab") as file:
        file.write(b"\x01" * 20_000)
    assert dataset.check().ok


def test_masks_are_checked_where_the_json_has_no_size(dataset):
    for image in dataset.coco["images"]:
        del image["width"], image["height"]
    assert dataset.check().ok
    dataset.objects[0]["segmentation"] = {"size": [1, 1], "counts": [1]}
    assert list_serious(dataset.check()) == ["bad mask"]


def test_damage_that_only_decoding_shows_is_seen_by_a_deep_check(dataset):
    """A JPEG cut behind an end marker in its metadata, and a PNG damaged in its middle."""
    paint(kind="PNG")(dataset)
    damaged = bytearray(dataset.file(4).read_bytes())
    damaged[9000] ^= 255
    dataset.file(4).write_bytes(damaged)
    jpeg = save(Image.effect_noise((160, 128), 90), "JPEG", comment=b"\xff\xd9")
    dataset.file(5).write_bytes(jpeg[:3000])
    assert dataset.check().ok
    assert list_serious(dataset.check(deep=True)) == ["truncated image", "bad image"]


def test_a_lost_drive_is_not_a_folder_of_bad_images(dataset, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EIO, "gone")

    monkeypatch.setattr("colab_utils.files.read_whole", fail)
    monkeypatch.setattr("colab_utils.drive.is_on_drive", lambda path: True)
    with pytest.raises(DriveLostError):
        dataset.check()


def test_what_a_broken_disk_does_not_give_is_a_bad_image(dataset, monkeypatch):
    real = files.read_whole

    def fail(path, **options):
        if path == dataset.file(4):
            raise OSError(errno.EIO, "Input/output error")
        return real(path, **options)

    monkeypatch.setattr(files, "read_whole", fail)
    assert dataset.count_problems()["bad image"] == 1


def test_a_process_that_the_system_ends_is_told(dataset, monkeypatch):
    monkeypatch.setattr(
        "colab_utils.data.checks.check_image", lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    )
    with pytest.raises(ColabUtilsError, match="The system ended a process"):
        dataset.check()


def test_a_missing_folder_is_told(dataset, tmp_path):
    for images in (tmp_path / "no", dataset.annotations):
        with pytest.raises(ColabUtilsError, match="There is no image folder"):
            check_dataset(images, dataset.annotations)


def test_categories_whose_names_are_alike_are_noted(dataset):
    names = ["a b", "a  B", "dog"]
    dataset.coco["categories"] = [{"id": n, "name": name} for n, name in enumerate(names, 1)]
    [problem] = [p for p in dataset.check().problems if p.kind == "name of several categories"]
    assert problem.examples == ("'a b', 'a  B'",)


def test_fields_that_change_what_an_evaluation_means_are_noted(dataset):
    # Elsewhere in the file, these keys mean something else.
    dataset.coco["info"] = {"not_exhaustive_category_ids": []}
    dataset.objects[3]["attributes"] = {"ignore": True}
    assert not dataset.count_problems()
    dataset.coco["images"][0]["not_exhaustive_category_ids"] = []
    for annotation in dataset.objects[:3]:
        annotation["ignore"] = True
    counts = dataset.count_problems()
    assert counts["annotation to ignore"] == 3
    assert counts["classes not looked for"] == 1


@pytest.mark.parametrize("fault", [MemoryError, ImportError])
def test_a_fault_of_the_machine_is_no_bad_image(dataset, monkeypatch, fault):
    def fail(*_, **__):
        raise fault("no")

    monkeypatch.setattr(Image.Image, "load", fail)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", fail)
    with pytest.raises(fault):
        dataset.check(deep=True)
