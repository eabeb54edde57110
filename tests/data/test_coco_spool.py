"""A dataset whose annotations lie on disk gives the same images as one that memory holds."""

import gc
import json
import os
import tempfile
import tracemalloc

import numpy as np
import pytest

from colab_utils.data import coco_json, coco_spool, json_window
from colab_utils.data.coco import open_coco
from colab_utils.data.coco_spool import spool_coco
from colab_utils.errors import ColabUtilsError


def assert_same_images(part, dataset, indices) -> None:
    assert len(part) == len(indices)
    for place, index in enumerate(indices):
        assert part.image(place) == dataset.image(index)
        assert part.annotations(place) == dataset.annotations(index)
        assert part.count_objects()[place] == dataset.count_objects()[index]


@pytest.fixture(params=[None, 500], ids=["one block", "many blocks"])
def blocks(request, monkeypatch):
    """As many blocks as a large file has."""
    if request.param:
        monkeypatch.setattr(coco_json, "_BLOCK_BYTES", request.param)
        monkeypatch.setattr(coco_spool, "_MEMORY_BYTES", request.param)
        monkeypatch.setattr(json_window, "_PIECE_BYTES", request.param)


def test_parts_are_those_of_a_dataset_in_memory(coco_mini, blocks):
    expected = open_coco(coco_mini.images, coco_mini.annotations)
    dataset = spool_coco(coco_mini.images, coco_mini.annotations)
    order = np.random.default_rng(0).permutation(len(expected))
    parts = [order[:1], order[1:1], order[1:30], order[40:]]
    for part, indices in zip(dataset.cut(parts), parts, strict=True):
        assert_same_images(part, expected, indices.tolist())
    assert_same_images(dataset.select(order[5:8]), expected, order[5:8].tolist())
    assert dataset.images.fingerprint == expected.fingerprint
    assert (dataset.annotations, dataset.crowds) == (len(expected.ids), expected.crowds)
    assert dataset.images.categories == expected.categories


def make_annotation(number, image_id, points=3):
    polygon = [0, 0, 4, 0, 4, 4, *[1.25] * (2 * points - 6)]
    return {
        "id": number,
        "image_id": image_id,
        "category_id": 1,
        "segmentation": [polygon],
        "iscrowd": 0,
        "bbox": [0, 0, 4, 4],
        "area": 8,
    }


def write_coco(tmp_path, **changes):
    images = [{"id": n, "file_name": f"{n}.jpg", "width": 8, "height": 8} for n in range(5)]
    annotations = [make_annotation(n, n % 5) for n in range(9)]
    coco = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "a"}]}
    (tmp_path / "images").mkdir(exist_ok=True)
    path = tmp_path / "annotations.json"
    path.write_text(json.dumps({**coco, **changes}))
    return tmp_path / "images", path


def test_annotations_may_come_before_images_and_categories(tmp_path, blocks):
    images, path = write_coco(tmp_path)
    expected = open_coco(images, path)
    coco = json.loads(path.read_text())
    path.write_text(json.dumps({key: coco[key] for key in ("annotations", "categories", "images")}))
    dataset = spool_coco(images, path)
    assert_same_images(dataset.select(np.arange(5)), expected, range(5))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        (
            {"images": [{"id": 1, "file_name": "a"}, {"id": 1, "file_name": "b"}]},
            "with the id of another",
        ),
        ({"images": [{"id": 1, "file_name": "a"}]}, "of an unknown image"),
        ({"categories": [{"id": 2, "name": "a"}]}, "of an unknown category"),
    ],
)
def test_strangers_are_refused_as_in_memory(tmp_path, blocks, changes, kind):
    data = write_coco(tmp_path, **changes)
    with pytest.raises(ColabUtilsError, match=kind) as expected:
        open_coco(*data)
    with pytest.raises(ColabUtilsError) as error:
        spool_coco(*data)
    assert str(error.value) == str(expected.value)


def test_a_disk_that_is_too_small_is_told_first(tmp_path, monkeypatch):
    images, path = write_coco(tmp_path)
    # Sparse.
    os.truncate(path, 2**43)
    with pytest.raises(ColabUtilsError, match=r"of free disk, .*Free some space, or .*TMPDIR"):
        spool_coco(images, path)


def test_a_disk_that_is_full_is_told(tmp_path, blocks, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "write", fail)
    with pytest.raises(ColabUtilsError, match=r"Writing into .* failed: No space left"):
        spool_coco(*write_coco(tmp_path))


def test_no_file_is_left(tmp_path, blocks, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    dataset = spool_coco(*write_coco(tmp_path))
    assert len(dataset.select(np.arange(5)).ids) == 9
    assert list(folder.iterdir()) == []
    descriptors = len(os.listdir("/proc/self/fd"))
    del dataset
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def trace_peak(call) -> int:
    """Return the bytes that a call allocates at its peak."""
    gc.collect()
    tracemalloc.start()
    call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_memory_does_not_grow_with_annotations(tmp_path, monkeypatch):
    monkeypatch.setattr(coco_json, "_BLOCK_BYTES", 50_000)
    monkeypatch.setattr(coco_spool, "_MEMORY_BYTES", 50_000)
    monkeypatch.setattr(json_window, "_PIECE_BYTES", 50_000)
    peaks = []
    for count in (4_000, 16_000):
        rows = [make_annotation(n, 4 if n > 99 else n % 5, points=40) for n in range(count)]
        images, path = write_coco(tmp_path, annotations=rows)
        # Most annotations are those of the fifth image.
        parts = [np.array([n]) for n in range(4)]
        del rows

        def deal(images=images, path=path, parts=parts):
            dataset = spool_coco(images, path)
            assert sum(len(part) for part in dataset.cut(parts)) == 4

        peaks.append(trace_peak(deal))
    assert path.stat().st_size > 6_000_000
    assert peaks[1] < peaks[0] * 1.2
    assert peaks[1] < 3_000_000


def test_images_take_less_than_a_hundred_bytes(tmp_path):
    names = [
        {"id": n, "file_name": f"{n:012d}.jpg", "width": 8, "height": 8} for n in range(20_000)
    ]
    images, path = write_coco(tmp_path, images=names)
    del names
    # What is made once.
    spool_coco(images, path)
    gc.collect()
    tracemalloc.start()
    dataset = spool_coco(images, path)
    left, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert left < 100 * len(dataset)
