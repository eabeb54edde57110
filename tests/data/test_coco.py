from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import Any

import fsspec
import numpy as np
import pytest

from colab_utils.data.coco import open_coco, read_coco, write_subset
from colab_utils.data.image_paths import explain_missing, list_base_names
from colab_utils.data.masks import encode_segmentation
from colab_utils.errors import ColabUtilsError, escape
from colab_utils.files import open_store
from tests.drive_mount import mount_or_skip

COCO = """
{
  "images": [
    {"id": 7, "file_name": "a/b.jpg", "height": 6, "width": 8},
    {"id": 3, "file_name": "c.jpg", "height": 6, "width": 8}
  ],
  "annotations": [
    {"id": 1, "image_id": 7, "category_id": 90, "bbox": [0, 0, 4, 4], "area": 16, "iscrowd": 0,
     "segmentation": [[0, 0, 4, 0, 4, 4]]}
  ],
  "categories": [{"id": 90, "name": "car"}, {"id": 2, "name": "bus"}]
}
"""


def make_coco(**changes: Any) -> dict[str, Any]:
    return {**json.loads(COCO), **changes}


def change_annotation(**changes: Any) -> dict[str, Any]:
    return make_coco(annotations=[{**make_coco()["annotations"][0], **changes}])


def name_image(**changes: Any) -> dict[str, Any]:
    return make_coco(images=[{"id": 7, "file_name": "a.jpg", **changes}])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "instances.json"


def read(path, content: Any):
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return read_coco(path)


def assert_same(dataset, coco: dict[str, Any]) -> None:
    """Everything that json.load finds comes back, grouped by image."""
    assert len(dataset) == len(coco["images"])
    for i, image in enumerate(coco["images"]):
        assert image | dataset.image(i) == image
        rows = [row for row in coco["annotations"] if row["image_id"] == image["id"]]
        merged = [row | entry for row, entry in zip(rows, dataset.annotations(i), strict=True)]
        assert merged == rows
    assert {c["id"]: c["name"] for c in dataset.categories} == {
        c["id"]: escape(c["name"]) for c in coco["categories"]
    }


@pytest.mark.parametrize("split", ["coco_mini", "coco_mini_val"])
def test_real_coco_is_what_json_reads(split, request):
    mini = request.getfixturevalue(split)
    assert_same(
        read_coco(mini.annotations),
        json.loads(mini.annotations.read_text()),
    )


@pytest.mark.parametrize(
    "encoding",
    # A pipe in PowerShell writes UTF-16, for instance.
    ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"],
)
def test_every_encoding_of_json_gives_the_same_names(path, encoding):
    coco = name_image(file_name="Straße/日本 🚲.jpg", height=6, width=8)
    assert_same(
        read(path, json.dumps(coco, ensure_ascii=False).encode(encoding)),
        coco,
    )


@pytest.mark.parametrize(
    ("changes", "key", "expected"),
    [
        # Some exports write ids as floats.
        ({"image_id": 7.0, "category_id": 90.0}, "category_id", 90),
        ({"id": "9007199254740993"}, "id", 9007199254740993),
        # The row stands in for an id that is no number.
        ({"id": "3f2b-uuid"}, "id", 1),
        ({"id": 1.5}, "id", 1),
        ({"image_id": "7", "category_id": "90.0"}, "image_id", 7),
        ({"bbox": ["0", 0.5, "4.25", 4]}, "bbox", [0, 0.5, 4.25, 4]),
        ({"area": "16.5"}, "area", 16.5),
        # The area is the number of pixels of the mask, as in pycocotools.
        ({"area": None}, "area", 6.0),
        # Without a mask, the area is that of the box.
        ({"area": None, "segmentation": []}, "area", 16.0),
        ({"bbox": []}, "bbox", [1, 0, 3, 3]),
        # The polygon is flat.
        (
            {"bbox": [], "segmentation": [0, 0, 4, 0, 4, 4]},
            "bbox",
            [1, 0, 3, 3],
        ),
        ({"iscrowd": " true"}, "iscrowd", 1),
    ],
)
def test_odd_but_readable_entries_are_read(path, changes, key, expected):
    # The lists come in any order, beside keys of other tools.
    coco = dict(reversed(change_annotation(**changes).items()))
    dataset = read(path, {"imagePath": 1, "features": [], **coco})
    [annotation] = dataset.annotations(0)
    assert annotation[key] == expected
    assert dataset.crowds == annotation["iscrowd"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bbox": [1, 2, 3]}, "bbox [1.0, 2.0, 3.0] where COCO has [x, y, width, height]"),
        ({"bbox": "1234"}, "bbox [1234.0] where COCO has [x, y, width, height]"),
        ({"bbox": [10**400, 2, 3, 4]}, "finite numbers"),
        ({"bbox": None, "segmentation": []}, "no bbox, and no mask to derive it from"),
        ({"area": "big"}, "area 'big' where"),
        # This was once read as a crowd, without a word.
        ({"iscrowd": 4}, "iscrowd 4 where COCO has 0 or 1"),
    ],
)
def test_a_faulty_annotation_costs_its_image_and_not_the_file(path, changes, reason):
    coco = change_annotation(**changes)
    coco["annotations"].append({**make_coco()["annotations"][0], "image_id": 3, "id": 9})
    dataset = read(path, coco)
    [(number, sentence)] = dataset.read_annotations(0)[1]
    assert (number, dataset.read_annotations(1)[1]) == (1, [])
    assert reason in sentence
    assert len(sentence) < 200
    with pytest.raises(ColabUtilsError, match=r"^annotation 1: "):
        dataset.annotations(0)
    assert [annotation["id"] for annotation in dataset.annotations(1)] == [9]
    assert dataset.crowds == 0
    part = read_coco(write_subset(dataset, [1, 0], path.parent / "part.json"))
    assert [reason for _, reason in part.read_annotations(1)[1]] == [sentence]


@pytest.mark.parametrize(
    "depth",
    [1, 5, 63, 64, 65, 400, *range(930, 1001), 20_000],
)
def test_nesting_is_one_clear_line_at_every_depth(path, depth):
    text = json.dumps(change_annotation(segmentation="X")).replace(
        '"X"', "[" * depth + "5" + "]" * depth
    )
    with pytest.raises(ColabUtilsError, match=r"nested too deeply|polygon"):
        encode_segmentation(
            read(path, text.encode()).annotations(0)[0]["segmentation"],
            6,
            8,
        )


def test_a_name_that_is_missing_is_that_of_its_url(path):
    coco = name_image(file_name="", coco_url="http://images.cocodataset.org/val/000397133.jpg?x=1")
    assert read(path, coco).names[0] == "000397133.jpg"


def test_images_of_the_same_id_are_refused_with_the_way_out(path):
    """The first has the annotations; who reads images is told of `check`."""
    images = [*make_coco()["images"], {"id": 7, "file_name": "d.jpg", "height": 6, "width": 8}]
    dataset = read(path, make_coco(images=images))
    assert dataset.strangers["repeated image id"].tolist() == [7]
    assert [len(dataset.annotations(i)) for i in range(3)] == [1, 0, 0]
    with pytest.raises(
        ColabUtilsError,
        match=r"has 1 x repeated image id, such as 7\. See `check`.*--repair",
    ):
        open_coco(path.parent, path)


def test_empty_lists_are_read_as_nothing(path):
    assert len(read(path, make_coco(annotations=[])).annotations(0)) == 0
    assert len(read(path, {"images": [], "annotations": [], "categories": []})) == 0


WHOLE = json.dumps(make_coco()).encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "an empty file"),
        (b"PK\x03\x04\x14\x00\x00\x00\x08\x00\xff\xfe", "a zip: unpack it first"),
        (b"\n<!DOCTYPE html><html>", "a web page"),
        (
            WHOLE.replace(b"car", b"B\xe4r"),
            "bytes that are not UTF-8 text, perhaps Latin-1. Save the JSON as UTF-8",
        ),
        (b"{}", "no list of images and annotations and categories"),
        # Detection results are a list.
        (b"[]", "does not hold COCO instances: it is a list"),
        (b"{" + WHOLE, "text that is not JSON"),
        (b"{[1]: 2}", "text that is not JSON"),
        (b'{"info": ' + b"[" * 100_000, "JSON that is nested too deeply"),
        (name_image(file_name=5000 * "a"), "longer than a path may be"),
        # The number has more digits than Python reads.
        (b'{"info": ' + b"1" * 5000 + b"}", "5000 digits"),
        ({"images": 5, "annotations": [], "categories": []}, "not that of COCO, at character 11 "),
        (make_coco(categories={"90": "car"}), "'categories' (id 'car') with str where"),
        (name_image(file_name=None), "a file_name that is not text"),
        (name_image(file_name="\ud800"), "'images' (id 7)"),
        (name_image(id=7.5), "id 7.5 where"),
        (name_image(height=2**40), "'images' (id 7)"),
        (
            make_coco(categories=[{"id": 1, "name": "a"}, {"id": 1, "name": "b"}]),
            "the name 'b', but an earlier entry of this id has the name 'a'",
        ),
        (
            name_image(id=-(2**63)),
            "an integer (below 2**63)",
        ),
        # A file of a tool that was cut is no JSON first of all.
        (b'{"version": "5.0", "imagePath": "a.jpg", "shapes": [', "not JSON, or"),
        # Outlines of a competition, one image a line.
        (
            b'{"id": "a", "annotations": [{"coordinates": [[[4, 4]]]}]}\n{"id": "b"}\n',
            "JSON Lines: see docs/FORMATS.md",
        ),
        # Characters are counted, and not bytes.
        ('{"info": "Größe", "images": [x'.encode(), "at character 29 of 30."),
        (b'{"images": [], "annotations": [{"a": "never ends', "at character 37 of 48."),
    ],
)
def test_what_is_not_coco_is_one_clear_line(path, content, words):
    with pytest.raises(ColabUtilsError) as error:
        read(path, content)
    message = str(error.value)
    assert words in message
    assert f"{path} does not hold COCO instances: " in message
    assert "\n" not in message
    assert len(message) < 500


# Files of other tools, short ones or their first letters, by the name in the message.
OTHER_FORMATS = [
    ("VIA", '{"a.jpg9": {"filename": "a.jpg", "size": 9, "regions": []}}'),
    ("VIA", '{"_via_settings": {}, "_via_img_metadata": {}}'),
    ("VIA", "filename,file_size,file_attributes,region_count"),
    ("LabelMe", '{"version": "5.0", "flags": {}, "shapes": [], "imagePath": "a.jpg"}'),
    ("Labelbox", '[{"ID": "c1", "DataRow ID": "d", "Labeled Data": "a.jpg", "Label": {}}]'),
    ("Labelbox", '{"data_row": {"id": 1}, "projects": {}}\n{"data_row": {"id": 2}}'),
    ("GeoJSON", '{"type": "FeatureCollection", "features": []}'),
    ("Supervisely", '{"description": "", "tags": [], "size": {"height": 1}, "objects": []}'),
    ("Label Studio", '[{"id": 1, "annotations": [{"completed_by": 1, "result": []}]}]'),
    ("CreateML", '[{"image": "a.jpg", "annotations": [{"coordinates": {"x": 1}}]}]'),
    ("CVAT", '<?xml version="1.0"?><annotations><version>1.1</version></annotations>'),
    ("VOC", "<annotation><folder>VOC2012</folder></annotation>"),
    ("YOLO", "0 0.5 0.5 0.25 0.25"),
    ("a table of run lengths", "ImageId,EncodedPixels"),
    ("a table of run lengths", "id,annotation,width,height"),
    ("Cityscapes", '{"imgHeight": 1024, "imgWidth": 2048, "objects": []}'),
    ("V7 Darwin", '{"version": "2.0", "item": {"name": "a", "slots": []}, "annotations": []}'),
    (
        "Segment Anything",
        '{"image": {"image_id": 1}, "annotations": [{"bbox": [], "predicted_iou": 0.9}]}',
    ),
    ("JSON Lines", '{"image": {"id": 1}}\n{"image": {"id": 2}}\n'),
]


@pytest.mark.parametrize(("name", "text"), OTHER_FORMATS)
def test_another_format_is_named(path, name, text):
    with pytest.raises(
        ColabUtilsError, match=rf"does not hold COCO instances: .*{name}.*see docs/FORMATS\.md"
    ):
        read(path, text.encode())


def test_images_may_be_selected_in_any_order(coco_mini):
    dataset = read_coco(coco_mini.annotations)
    order = np.random.default_rng(0).permutation(len(dataset))
    for indices in (order, order[:1], order[1:1], order[5:8]):
        part = dataset.select(indices)
        assert len(part) == len(indices)
        assert np.array_equal(part.count_objects(), dataset.count_objects()[indices])
        for place, index in enumerate(indices.tolist()):
            assert part.image(place) == dataset.image(index)
            assert part.annotations(place) == dataset.annotations(index)


def test_image_ids_may_be_names(path):
    coco = change_annotation(image_id="0000001_02999_d_0000005")
    images = [{"id": number, "file_name": "b.jpg"} for number in (1, "0000001_02999_d_0000005")]
    ids = set()
    # Whatever comes before it, a name has the same integer.
    for start in (0, 1):
        dataset = read(path, coco | {"images": images[start:]})
        [annotation] = dataset.annotations(len(dataset) - 1)
        ids |= {annotation["image_id"], dataset.image_ids[-1]}
    [number] = ids
    assert 0 < number < 2**52


@pytest.mark.parametrize(
    "name",
    [
        "..%2Fsecret.jpg",
        "..%255Csecret.jpg",
        "/data/local-files/?d=../secret.jpg",
        "/data/local-files/?d=%2Ftmp%2Fsecret.jpg",
    ],
)
def test_no_address_leads_out_of_the_folder(tmp_path, name):
    (tmp_path / "secret.jpg").touch()
    with suppress(ColabUtilsError):
        assert not (tmp_path / "images" / find(tmp_path, [name], files=["x.jpg"])[0]).exists()


def test_cut_short_anywhere_is_told(path):
    for length in range(7, len(WHOLE), 7):
        with pytest.raises(ColabUtilsError, match=r"not JSON, or|no list of"):
            read(path, WHOLE[:length])


def test_same_category_twice_is_one(path):
    assert read(path, make_coco(categories=make_coco()["categories"] * 2)).categories == (
        {"id": 2, "name": "bus"},
        {"id": 90, "name": "car"},
    )


def test_a_path_that_is_no_file_is_told(tmp_path):
    with pytest.raises(ColabUtilsError, match="No such file"):
        read_coco(tmp_path / "no.json")
    # LabelMe and Pascal VOC have a folder with a file for each image.
    with pytest.raises(ColabUtilsError, match=r"Is a directory\. Name the JSON in it\. If each"):
        read_coco(tmp_path)


def test_a_pipe_and_a_json_larger_than_the_memory_are_refused_at_once(path):
    # Opening the pipe would wait for its writer for ever.
    os.mkfifo(path)
    with pytest.raises(ColabUtilsError, match="is a device or a pipe"):
        read_coco(path)
    path.unlink()
    with open(path, "wb") as file:
        # The file is sparse, so it takes no room.
        file.truncate(2 * 2**40)
    with pytest.raises(ColabUtilsError, match=r"has [\d,.]+ .B, and at most"):
        read_coco(path)


@pytest.mark.parametrize(
    "name",
    [
        "../a.jpg",
        "a/../../b.jpg",
        "/etc/passwd",
        # This would be a Windows path, were it unpacked there.
        "..\\a.jpg",
        "C:\\a.jpg",
        "",
        "a\0.jpg",
    ],
)
def test_no_name_leaves_the_folder(tmp_path, name):
    with pytest.raises(ColabUtilsError, match="leads out of"):
        find(tmp_path, [name], files=["x.jpg"])


def find(tmp_path, names, *, files, index=0):
    """Where the image of an index is found, below a folder with these files."""
    for file in files:
        (tmp_path / "images" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "images" / file).touch()
    images = [{"id": i, "file_name": name} for i, name in enumerate(names)]
    dataset = read(tmp_path / "a.json", make_coco(images=images, annotations=[]))
    list_base_names.cache_clear()
    path, by_name = dataset.find_image(tmp_path / "images", index)
    return path.relative_to(tmp_path / "images").as_posix(), by_name


@pytest.mark.parametrize(
    ("name", "files", "expected", "by_name"),
    [
        ("x.jpg", ["x.jpg", "a/x.jpg"], "x.jpg", False),
        ("a..b/..c.jpg", ["a..b/..c.jpg"], "a..b/..c.jpg", False),
        ("q/.zip", ["q.zip"], "q/.zip", False),
        # Cityscapes' converters write no folder.
        ("x.jpg", ["a/x.jpg"], "a/x.jpg", True),
        ("x.jpg", ["a/x.jpg", "b/x.jpg"], "x.jpg", False),
        ("a/x.jpg", ["a/y.jpg", "x.jpg"], "a/x.jpg", False),
        # There is no folder a.
        ("a/x.jpg", ["x.jpg"], "x.jpg", True),
        # Label Studio writes this on Windows.
        ("images\\x.jpg", ["x.jpg"], "x.jpg", True),
        ("images\\x.jpg", ["images/x.jpg", "x.jpg"], "images/x.jpg", False),
        # Linux allows a backslash in a name.
        ("images\\x.jpg", ["images\\x.jpg", "x.jpg"], "images\\x.jpg", False),
        ("/home/me/x.jpg", ["a/x.jpg"], "a/x.jpg", True),
        ("../../label-studio/data/x.jpg", ["x.jpg"], "x.jpg", True),
        ("https://example.org/up/my%20x.jpg?v=1", ["my x.jpg"], "my x.jpg", True),
        # Tools write addresses. The name itself comes first.
        ("Capture_d%C3%A9cran%201.jpg", ["Capture_décran 1.jpg"], "Capture_décran 1.jpg", True),
        ("images/a%2Bb.jpg", ["sub/a+b.jpg"], "sub/a+b.jpg", True),
        ("my%2520photo.jpg", ["my photo.jpg"], "my photo.jpg", True),
        ("my%2520photo.jpg", ["my photo.jpg", "my%2520photo.jpg"], "my%2520photo.jpg", False),
        ("/data/local-files/?d=0.jpg", ["0.jpg"], "0.jpg", True),
        ("http://me:80/local-files/?d=sub/my%20x.jpg", ["sub/my x.jpg"], "sub/my x.jpg", True),
        # A Mac's zip takes accents apart like this.
        ("Stra\u00dfe \u00e9.jpg", ["Stra\u00dfe e\u0301.jpg"], "Stra\u00dfe e\u0301.jpg", False),
        ("\u00e9/\u00e9.jpg", ["e\u0301/\u00e9.jpg", "b/\u00e9.jpg"], "e\u0301/\u00e9.jpg", False),
    ],
)
def test_images_are_found_by_their_base_names(tmp_path, name, files, expected, by_name):
    assert find(tmp_path, [name, "other.jpg"], files=files) == (expected, by_name)


@pytest.mark.parametrize(
    ("names", "files"),
    [
        (["/d/x.jpg"], ["a/x.jpg", "b/x.jpg"]),
        # The file belongs to only one of the two images.
        (["/d/1/x.jpg", "/d/2/x.jpg"], ["x.jpg"]),
        (["/d/x.jpg"], ["y.jpg"]),
    ],
)
def test_an_image_that_may_be_another_is_not_taken(tmp_path, names, files):
    with pytest.raises(ColabUtilsError, match=r"leads out of .*, and no single file there"):
        find(tmp_path, names, files=files)


def test_a_folder_that_cannot_be_listed_is_told(tmp_path):
    with pytest.raises(
        ColabUtilsError, match=r"The images in .*images cannot be listed: .*Check the folder"
    ):
        find(tmp_path, ["C:\\photos\\a.jpg"], files=[])


def test_no_image_is_found_for_two(tmp_path):
    """A folder of the annotations is missing, and another one has a file of the same name."""
    assert find(tmp_path, ["val/x.jpg", "train/x.jpg"], files=["train/x.jpg"]) == (
        "val/x.jpg",
        False,
    )


def test_no_link_is_followed_to_an_image(tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "x.jpg").touch()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a").symlink_to(tmp_path / "secret")
    (tmp_path / "images" / "x.jpg").symlink_to(tmp_path / "secret" / "x.jpg")
    with pytest.raises(ColabUtilsError, match="no single file there has its base name"):
        find(tmp_path, ["/d/x.jpg"], files=[])
    with pytest.raises(ColabUtilsError, match="which is not opened"):
        find(tmp_path, ["a/x.jpg"], files=[])
    (tmp_path / "images" / "loop").symlink_to("loop")
    assert find(tmp_path, ["loop/x.jpg"], files=[]) == ("loop/x.jpg", False)


@pytest.fixture
def shortcut(tmp_path):
    """A folder of images on Drive, in which a shared folder is a shortcut."""
    shared = tmp_path / ".shortcut-targets-by-id" / "1AbC" / "photos"
    shared.mkdir(parents=True)
    (shared / "x.jpg").touch()
    # It leads back to itself.
    (shared / "loop").symlink_to(shared)
    images = tmp_path / "images"
    images.mkdir()
    (images / "train").symlink_to(shared)
    (images / "y.jpg").symlink_to(shared / "x.jpg")
    return shared


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("train/x.jpg", "train/x.jpg"),
        ("y.jpg", "y.jpg"),
        # The image is found by its base name.
        ("/d/x.jpg", "train/x.jpg"),
    ],
)
def test_shortcuts_of_drive_are_followed(tmp_path, shortcut, name, expected):
    assert find(tmp_path, [name], files=[])[0] == expected


def test_a_link_within_the_mount_of_drive_is_followed(tmp_path):
    for name in ("images", "shared"):
        (tmp_path / "backing" / name).mkdir(parents=True)
    (tmp_path / "backing" / "shared" / "x.jpg").touch()
    with mount_or_skip(tmp_path / "backing", tmp_path / "drive") as mount:
        (tmp_path / "backing" / "images" / "a").symlink_to(mount.folder / "shared")
        assert find(mount.folder, ["a/x.jpg"], files=[]) == ("a/x.jpg", False)


def test_plain_names_list_nothing(tmp_path, monkeypatch):
    find(tmp_path, ["x.jpg", "/d/y.jpg", "b\\z.jpg"], files=["x.jpg", "y.jpg", "z.jpg"])
    dataset = read_coco(tmp_path / "a.json")
    with monkeypatch.context() as patch:
        patch.setattr("os.scandir", None)
        assert dataset.find_image(tmp_path / "images", 0) == (tmp_path / "images/x.jpg", False)
    assert dataset.find_image(tmp_path / "images", 1)[1]
    monkeypatch.setattr("os.scandir", None)
    # The folder was listed once, so nothing lists it again.
    assert dataset.find_image(tmp_path / "images", 2)[1]


@pytest.mark.parametrize(
    ("names", "count"),
    [
        (["1_10", "11_0", "110"], 3),
        (["1e3", "1000", "nan"], 3),
        # These are numbers in text.
        (["110", " 110", "110.0"], 1),
    ],
)
def test_ids_of_images_in_text_are_numbers_only_if_they_are_written_so(path, names, count):
    dataset = read(path, make_coco(images=[{"id": name, "file_name": name} for name in names]))
    assert len(set(dataset.image_ids.tolist())) == count
    assert (dataset.image_ids[2] == 110) == ("110" in names[2])
    assert dataset.strangers["repeated image id"].size == 3 - count


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        (["0 (1).jpg"], "but 0 (1).jpg is there"),
        (["0.png"], "but 0.png is there"),
        (["images.zip"], "which holds images.zip: unpack it first"),
        (["a/0.jpg", "b/0.jpg"], "in several folders (a/0.jpg and b/0.jpg)"),
    ],
)
def test_what_may_be_a_missing_image_is_named(tmp_path, files, hint):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    list_base_names.cache_clear()
    assert hint in explain_missing(tmp_path, "0.jpg")


@pytest.mark.parametrize("name", ["what?.jpg", "50%20off.jpg"])
def test_a_missing_image_is_looked_for_under_its_own_name(tmp_path, name):
    (tmp_path / "a").mkdir()
    for path in (f"a/{name}", "q.zip"):
        (tmp_path / path).touch()
    assert f"(a/{name})" in explain_missing(tmp_path, name)


@pytest.mark.parametrize(
    "name",
    ["50%20off.jpg", "scan?1.jpg", "a+b c.jpg"],
)
def test_at_a_url_the_name_itself_is_tried_first(path, name):
    bucket = fsspec.filesystem("memory")
    bucket.pipe(f"/names/{name}", b"")
    dataset = read(path, name_image(file_name=name))
    store = open_store("memory://names")
    path, by_name = dataset.find_image(store.place, 0)
    assert (store.find_kind(path), by_name) == ("file", False)
    bucket.rm("/names", recursive=True)


@pytest.mark.parametrize("section", ["images", "annotations", "categories"])
def test_a_list_may_be_an_object_with_ids_as_keys(path, section):
    coco = make_coco()
    by_id = {str(entry["id"]): entry for entry in coco[section]}
    assert_same(read(path, coco | {section: by_id}), coco)


@pytest.mark.parametrize("package", ["PIL.Image", "pycocotools"])
@pytest.mark.parametrize(
    "fault",
    [
        ValueError("numpy.dtype size changed, may indicate binary incompatibility"),
        ImportError("The _imaging extension was built for another version of Pillow"),
    ],
)
def test_a_package_that_does_not_fit_is_no_fault_of_the_data(path, monkeypatch, package, fault):
    class Broken:
        def find_spec(self, name, *_):
            if name.startswith(package):
                raise fault

    for name in list(sys.modules):
        if name == package or name.startswith(f"{package}."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(ColabUtilsError, match=r"cannot be imported .*restart it") as caught:
        read_coco(path)
    assert str(fault) in str(caught.value)
