from __future__ import annotations

import gc
import json
import pickle
import tracemalloc
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colab_utils.data.coco import is_sound_box, read_coco, resolve_image
from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def make_coco(**changes: Any) -> dict[str, Any]:
    coco = {
        "images": [
            {"id": 7, "file_name": "a/b.jpg", "height": 6, "width": 8},
            {"id": 3, "file_name": "c.jpg", "height": 6, "width": 8},
        ],
        "annotations": [
            {
                "id": 1,
                "image_id": 7,
                "category_id": 90,
                "bbox": [0, 0, 4, 4],
                "area": 16,
                "iscrowd": 0,
                "segmentation": [[0, 0, 4, 0, 4, 4]],
            }
        ],
        "categories": [{"id": 90, "name": "car"}, {"id": 2, "name": "bus"}],
    }
    return {**coco, **changes}


def change_annotation(**changes: Any) -> dict[str, Any]:
    return make_coco(annotations=[{**make_coco()["annotations"][0], **changes}])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "instances.json"


def read(path, content: Any):
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return read_coco(path)


def assert_same(dataset, coco: dict[str, Any]) -> None:
    """Everything that json.load finds comes back, grouped by image."""
    by_image = defaultdict(list)
    for annotation in coco["annotations"]:
        by_image[annotation["image_id"]].append(annotation)
    assert len(dataset) == len(coco["images"])
    for i, image in enumerate(coco["images"]):
        assert dataset.image(i) == {key: image[key] for key in ("id", "file_name", "width", "height")}
        expected = by_image[image["id"]]
        found = dataset.annotations(i)
        assert [{key: annotation[key] for key in one} for one, annotation in zip(found, expected, strict=True)] == found
    assert {c["id"]: c["name"] for c in dataset.categories} == {c["id"]: c["name"] for c in coco["categories"]}


@pytest.mark.parametrize("split", ["coco_mini", "coco_mini_val"])
def test_real_coco_is_what_json_reads(split, request):
    mini = request.getfixturevalue(split)
    assert_same(read_coco(mini.annotations), json.loads(mini.annotations.read_text()))


def test_builtin_dataset_is_what_json_reads(tiny_dataset):
    assert_same(read_coco(tiny_dataset.annotations), json.loads(tiny_dataset.annotations.read_text()))


def numbers():
    return st.one_of(
        st.integers(-(10**6), 10**6),
        st.floats(allow_nan=False, allow_infinity=False),
        st.floats(-5000, 5000).map(lambda x: round(x, 2)),
        st.floats(-5000, 5000).map(lambda x: round(x, 5)),
    )


def segmentations():
    size = st.lists(st.integers(0, 5000), min_size=2, max_size=2)
    return st.one_of(
        st.lists(st.lists(numbers(), max_size=12), max_size=3),
        st.fixed_dictionaries({"size": size, "counts": st.lists(st.integers(0, 2**40), max_size=6)}),
        st.fixed_dictionaries({"size": size, "counts": st.text(max_size=8)}),
        st.none(),
        st.recursive(st.one_of(st.text(max_size=3), st.integers(-9, 9), st.booleans()), st.lists, max_leaves=4),
    )


@st.composite
def datasets(draw):
    ids = draw(st.lists(st.integers(-(2**40), 2**40), unique=True, max_size=6))
    category_ids = draw(st.lists(st.integers(-5, 2**33), unique=True, min_size=1, max_size=4))
    side = st.integers(0, 9000)
    images = [
        {"id": i, "file_name": draw(st.text(min_size=1, max_size=9)), "height": draw(side), "width": draw(side)}
        for i in ids
    ]
    annotations = [
        {
            "id": number,
            "image_id": draw(st.sampled_from(ids)),
            "category_id": draw(st.sampled_from(category_ids)),
            "bbox": draw(st.lists(numbers(), min_size=4, max_size=4)),
            "area": draw(numbers()),
            "iscrowd": draw(st.integers(0, 1)),
            "segmentation": draw(segmentations()),
        }
        for number in range(draw(st.integers(0, 8)) if ids else 0)
    ]
    categories = [{"id": c, "name": draw(st.text(max_size=4)), "supercategory": "x"} for c in category_ids]
    sections = {"images": images, "annotations": annotations, "categories": categories, "info": {"year": [1]}}
    order = draw(st.permutations(sorted(sections)))
    return {name: sections[name] for name in order}


@QUICK
@given(coco=datasets(), indent=st.sampled_from([None, 1]), ascii_only=st.booleans())
def test_any_dataset_is_what_json_reads(path, coco, indent, ascii_only):
    text = json.dumps(coco, indent=indent, ensure_ascii=ascii_only)
    assert_same(read(path, text.encode()), coco)


@pytest.mark.parametrize(
    "encoding",
    ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"],  # a PowerShell pipe writes UTF-16
)
def test_encodings_and_unicode_names(path, encoding):
    coco = make_coco(images=[{"id": 7, "file_name": "Straße/日本 🚲.jpg", "height": 6, "width": 8}])
    assert_same(read(path, json.dumps(coco, ensure_ascii=False).encode(encoding)), coco)


@pytest.mark.parametrize(
    ("coco", "key", "expected"),
    [
        (change_annotation(id=5.0), "id", 5),  # float ids
        (change_annotation(image_id=7.0, category_id=90.0), "category_id", 90),
        (change_annotation(area=None), "area", 16.0),  # no area: that of the box
        (change_annotation(iscrowd=None), "iscrowd", 0),
        (change_annotation(iscrowd=True), "iscrowd", 1),
        (change_annotation(segmentation=[]), "segmentation", []),  # kept for the checks
        (change_annotation(segmentation="text"), "segmentation", "text"),
        (change_annotation(segmentation=[""]), "segmentation", [""]),
        (change_annotation(segmentation=[1, 2, 3, 4, 5, 6]), "segmentation", [1, 2, 3, 4, 5, 6]),
    ],
)
def test_odd_but_readable_entries(path, coco, key, expected):
    assert read(path, coco).annotations(0)[0][key] == expected


def test_nan_comes_through_for_the_checks(path):
    annotation = read(path, change_annotation(bbox=[float("nan"), 0, 1, 1])).annotations(0)[0]
    assert not is_sound_box(annotation)


def test_missing_sizes_are_zero_and_missing_ids_are_rows(path):
    annotation = make_coco()["annotations"][0]
    del annotation["id"]
    dataset = read(path, make_coco(images=[{"id": 7, "file_name": "a"}], annotations=[annotation] * 2))
    assert dataset.image(0) == {"id": 7, "file_name": "a", "width": 0, "height": 0}
    assert [one["id"] for one in dataset.annotations(0)] == [1, 2]


def test_unknown_references_are_set_aside(path):
    one = make_coco()["annotations"][0]
    rows = [{**one, "id": 1, "image_id": 8}, {**one, "id": 2, "category_id": 3}, {**one, "id": 3}]
    dataset = read(path, make_coco(annotations=rows))
    assert dataset.unknown_images.tolist() == [1]
    assert dataset.unknown_categories.tolist() == [2]
    assert dataset.ids.tolist() == [3]


def test_empty_lists(path):
    assert len(read(path, make_coco(annotations=[])).annotations(0)) == 0
    assert len(read(path, {"images": [], "annotations": [], "categories": []})) == 0


WHOLE = json.dumps(make_coco()).encode()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "text that is not JSON at character 0"),
        (b"   ", "text that is not JSON"),
        (b"PK\x03\x04\x14\x00\x00\x00\x08\x00\xff\xfe", "bytes that are not text"),  # a zip
        (b"\xff\xd8\xff\xe0", "bytes that are not text"),  # a JPEG
        (b"hello", "text that is not JSON at character 0"),
        (b"{}", "no list of images and annotations and categories"),
        (b"[]", "found a list"),  # detection results
        (b'"text"', "text that is not JSON"),
        (b"{" + WHOLE, "text that is not JSON"),
        (WHOLE + b"}", "text that is not JSON"),
        (WHOLE[:-1] + b",}", "text that is not JSON"),
        (WHOLE.replace(b"}],", b"},],", 1), "text that is not JSON"),
        (b'{"info": ' + b"[" * 100_000, "text that is not JSON"),  # nested too deep
        (b'{"info": ' + b"1" * 5000 + b"}", "text that is not JSON"),  # more digits than Python reads
        ({"images": {}, "annotations": [], "categories": []}, "no list of images"),
        (make_coco(images=[5]), "'images' (id 5)"),
        (make_coco(images=["a\nb" * 99]), "'images'"),
        (make_coco(images=[{"id": 7}]), "no 'file_name'"),
        (make_coco(images=[{"id": 7, "file_name": 5}]), "a file_name that is not text"),
        (make_coco(images=[{"id": 7, "file_name": "\ud800"}]), "'images' (id 7)"),
        (make_coco(images=[{"id": "7", "file_name": "a"}]), "id '7' where COCO has an integer"),
        (make_coco(images=[{"id": 7.5, "file_name": "a"}]), "id 7.5 where"),
        (make_coco(images=[{"id": float("nan"), "file_name": "a"}]), "NaN"),
        (make_coco(images=[{"id": 2**70, "file_name": "a"}]), "id 1180591620717411303424 where"),
        (make_coco(images=[{"id": 7, "file_name": "a", "height": 2**40}]), "'images' (id 7)"),
        (make_coco(images=make_coco()["images"] * 2), "image id 3 twice"),
        (change_annotation(bbox=None), "a bbox that is not"),
        (change_annotation(bbox=[1, 2, 3]), "a bbox that is not"),
        (change_annotation(bbox=["1", 2, 3, 4]), "'annotations' (id 1)"),
        (change_annotation(image_id=None), "image_id None"),
        (change_annotation(category_id="car"), "category_id 'car'"),
        (change_annotation(area="big"), "'annotations' (id 1)"),
        (make_coco(annotations=[{"id": 4, "image_id": 7, "caption": "a dog"}]), "no 'bbox'"),  # a captions file
        (make_coco(categories=[{"id": 1}]), "'categories' (id 1) with no 'name'"),
        (make_coco(categories=[5]), "'categories' (id 5)"),
        (make_coco(categories=[{"id": 1, "name": "a"}, {"id": 1, "name": "b"}]), "another name, 'b', than 'a'"),
    ],
)
def test_what_is_not_coco_is_one_clear_line(path, content, found):
    with pytest.raises(ColabUtilsError) as error:
        read(path, content)
    message = str(error.value)
    assert found in message
    assert str(path) in message
    assert "\n" not in message
    assert len(message) < 500


def test_cut_short_anywhere_is_told(path):
    for length in range(0, len(WHOLE), 7):
        with pytest.raises(ColabUtilsError, match=r"not JSON at character|no list of"):
            read(path, WHOLE[:length])


def test_same_category_twice_is_one(path):
    assert read(path, make_coco(categories=make_coco()["categories"] * 2)).categories == (
        {"id": 2, "name": "bus"},
        {"id": 90, "name": "car"},
    )


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(ColabUtilsError, match="No such file"):
        read_coco(tmp_path / "no.json")
    with pytest.raises(ColabUtilsError, match="Is a directory"):
        read_coco(tmp_path)


def test_a_broken_disk_is_not_a_lost_drive(path, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("builtins.open", fail)
    with pytest.raises(ColabUtilsError, match="Input/output error") as caught:
        read_coco(path)
    assert not isinstance(caught.value, DriveLostError)


def test_lost_drive_is_no_bad_file(path, monkeypatch):
    def fail(*_):
        raise OSError(107, "Transport endpoint is not connected")

    monkeypatch.setattr("builtins.open", fail)
    with pytest.raises(DriveLostError):
        read_coco(path)


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("a.jpg", True),
        ("train/a.jpg", True),
        ("./a.jpg", True),
        ("a..b/..c.jpg", True),
        ("日本.jpg", True),
        ("../a.jpg", False),
        ("a/../../b.jpg", False),
        ("..", False),
        ("/etc/passwd", False),
        ("//host/share/a.jpg", False),
        ("..\\a.jpg", False),  # a Windows path, were it unpacked there
        ("C:\\a.jpg", False),
        ("", False),
        (".", False),
        ("a\0.jpg", False),
    ],
)
def test_no_name_leaves_the_folder(tmp_path, name, safe):
    if safe:
        assert resolve_image(tmp_path, name) == tmp_path / name
    else:
        with pytest.raises(ColabUtilsError, match="leads out of it"):
            resolve_image(tmp_path, name)


def test_subset_is_the_same_images_and_small_to_send(coco_mini):
    dataset = read_coco(coco_mini.annotations)
    part = pickle.loads(pickle.dumps(dataset.subset(10, 13)))
    assert [part.image(i) for i in range(3)] == [dataset.image(i) for i in range(10, 13)]
    assert [part.annotations(i) for i in range(3)] == [dataset.annotations(i) for i in range(10, 13)]
    assert len(pickle.dumps(part)) < len(pickle.dumps(dataset)) / 8


def test_memory_is_that_of_the_text_and_no_objects(path):
    rng = np.random.default_rng(0)
    images = [{"id": i, "file_name": f"{i:012d}.jpg", "height": 480, "width": 640} for i in range(800)]
    one = make_coco()["annotations"][0]
    annotations = [
        {**one, "id": n, "image_id": n % 800, "segmentation": [np.round(rng.uniform(0, 640, 40), 2).tolist()]}
        for n in range(6_000)
    ]
    path.write_text(json.dumps(make_coco(images=images, annotations=annotations)))
    del images, annotations
    gc.collect()
    objects = len(gc.get_objects())
    tracemalloc.start()
    dataset = read_coco(path)
    left, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    gc.collect()
    assert len(dataset.ids) == 6_000
    assert len(gc.get_objects()) - objects < 500  # none for each annotation
    text = path.stat().st_size
    assert left < text + 200_000
    assert peak < 4 * text + 5_000_000
