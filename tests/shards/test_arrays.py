from __future__ import annotations

import dataclasses
import json
import tarfile

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colab_utils.data.coco import read_coco
from colab_utils.data.masks import PackedMasks, encode_segmentation, unpack_masks
from colab_utils.errors import ColabUtilsError
from colab_utils.shards.arrays import ArraysBuilder, convert_boxes, dump_arrays, load_arrays, read_head, rebuild_arrays
from colab_utils.shards.format import read_index, split_member
from colab_utils.shards.images import dump_record
from colab_utils.shards.write import write_shards

QUICK = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def coco_shards(coco_mini, tmp_path_factory):
    folder = tmp_path_factory.mktemp("arrays") / "shards"
    write_shards(
        coco_mini.images, coco_mini.annotations, shards=folder, shard_mb=4, min_size=300, max_size=500, workers=2
    )
    return folder


def assert_equal(one, other):
    for field in dataclasses.fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        assert a.dtype == b.dtype, field.name
        assert np.array_equal(a, b), field.name


def test_arrays_are_made_again_from_the_tars(coco_shards):
    index = read_index(coco_shards)
    assert len(index.shards) > 1
    for shard in index.shards:
        assert_equal(load_arrays(coco_shards / shard.arrays_name), rebuild_arrays(coco_shards / shard.name))
        head = read_head(coco_shards / shard.arrays_name)
        assert (head["images"], head["bytes"], head["xxh3_64"]) == (shard.images, shard.bytes, shard.xxh3_64)


def test_spans_boxes_and_masks_are_those_of_the_records(coco_shards):
    for shard in read_index(coco_shards).shards:
        arrays, blob = load_arrays(coco_shards / shard.arrays_name), (coco_shards / shard.name).read_bytes()
        first = 0
        for i in range(shard.images):
            start, length = arrays.record_spans[i]
            record = json.loads(blob[start : start + length])
            start, length = arrays.image_spans[i]
            assert blob[start : start + 2] == b"\xff\xd8"
            assert blob[start + length - 2 : start + length] == b"\xff\xd9"
            assert record["image_id"] == arrays.image_ids[i]
            rows = slice(first, first + arrays.counts[i])
            first += arrays.counts[i]
            kept = [one for one in record["annotations"] if not one["iscrowd"]]
            kept = [one for one in kept if one["bbox"][2] > 0 and one["bbox"][3] > 0]
            assert arrays.labels[rows].tolist() == [one["category_id"] for one in kept]
            ends = arrays.mask_ends[rows.start : rows.stop + 1]
            packed = PackedMasks(arrays.bits[ends[0] : ends[-1]], arrays.crops[rows], ends - ends[0])
            size = record["height"], record["width"]
            assert arrays.sizes[i].tolist() == list(size)
            from pycocotools import mask as coco_mask

            expected = [
                coco_mask.decode({**r, "counts": r["counts"].encode()}) for r in (k["segmentation"] for k in kept)
            ]
            assert np.array_equal(unpack_masks(packed, *size), np.array(expected, np.uint8).reshape(-1, *size))


def test_boxes_are_those_of_torchvisions_references(coco_mini):
    """ConvertCocoPolysToMask: float32 corners, clamped, boxes without area dropped."""
    dataset = read_coco(coco_mini.annotations)
    for i in range(len(dataset)):
        boxes = [one["bbox"] for one in dataset.annotations(i)] + [[5, 5, 0, 9], [-9, -9, 5, 5], [1, 1, 1e6, 1e6]]
        height, width = dataset.sizes[i].tolist()
        expected = torch.as_tensor(boxes, dtype=torch.float32).reshape(-1, 4)
        expected[:, 2:] += expected[:, :2]
        expected[:, 0::2].clamp_(min=0, max=width)
        expected[:, 1::2].clamp_(min=0, max=height)
        keep = (expected[:, 3] > expected[:, 1]) & (expected[:, 2] > expected[:, 0])
        found, kept = convert_boxes(boxes, height, width)
        assert torch.equal(torch.from_numpy(found), expected)
        assert torch.equal(torch.from_numpy(kept), keep)


def make_record(*annotations):
    rle = encode_segmentation([[1, 1, 5, 1, 5, 4]], 6, 8)
    base = {"category_id": 3, "bbox": [1, 1, 4, 3], "area": 6.0, "iscrowd": 0}
    rows = [{**base, "segmentation": rle, **one} for one in annotations]
    return {"image_id": 9, "height": 6, "width": 8, "annotations": rows}


def test_crowds_and_boxes_without_area_are_left_out():
    builder = ArraysBuilder()
    builder.add(make_record({"iscrowd": 1}, {"bbox": [1, 1, 0, 3]}, {"category_id": 5}), b"image", (512, 9), (1536, 9))
    builder.add(make_record(), b"image", (3000, 9), (3600, 9))
    arrays = builder.build()
    assert (arrays.labels.tolist(), arrays.counts.tolist(), len(arrays.crops)) == ([5], [1, 0], 1)


def test_no_images_and_no_objects(tmp_path):
    builder = ArraysBuilder()
    for images in range(2):
        path = tmp_path / f"{images}.arrays"
        path.write_bytes(dump_arrays({"images": images}, builder.build()))
        assert_equal(load_arrays(path), builder.build())
        assert read_head(path)["images"] == images
        builder.add(make_record(), b"image", (512, 9), (1536, 9))


@pytest.fixture(scope="module")
def small_shard(tmp_path_factory):
    """A tar of two records and its arrays, a few KB each."""
    folder, builder, tar = tmp_path_factory.mktemp("small"), ArraysBuilder(), b""
    for number in range(2):
        record = make_record({}, {})
        for member in ((f"{number}.jpg", b"image"), (f"{number}.json", dump_record(record))):
            tar += b"".join(split_member(*member))
        builder.add(record, b"image", (0, 5), (0, 5))
    (folder / "a.tar").write_bytes(tar + bytes(1024))
    (folder / "a.arrays").write_bytes(dump_arrays({"images": 2}, builder.build()))
    rebuild_arrays(folder / "a.tar")
    load_arrays(folder / "a.arrays")
    return folder


@QUICK
@given(share=st.floats(0, 1, exclude_max=True))
def test_arrays_cut_short_are_refused(small_shard, tmp_path, share):
    whole = (small_shard / "a.arrays").read_bytes()
    path = tmp_path / "cut.arrays"
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ColabUtilsError, match="Run verify on the shards"):
        load_arrays(path)


@QUICK
@given(changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8))
def test_damaged_arrays_and_tars_give_one_kind_of_error(small_shard, tmp_path, changes):
    for name, read in (("a.arrays", load_arrays), ("a.arrays", read_head), ("a.tar", rebuild_arrays)):
        data = bytearray((small_shard / name).read_bytes())
        for share, value in changes:
            data[int(len(data) * share)] = value
        path = tmp_path / name
        path.write_bytes(data)
        try:
            read(path)
        except ColabUtilsError as error:
            message = str(error)
        else:
            message = str(path)
        assert str(path) in message
        assert "\n" not in message


@QUICK
@given(share=st.floats(0, 1, exclude_max=True))
def test_tars_cut_short_never_lose_a_record_silently(small_shard, tmp_path, share):
    whole = (small_shard / "a.tar").read_bytes()
    path = tmp_path / "cut.tar"
    path.write_bytes(whole[: int(len(whole) * share)])
    try:
        images = len(rebuild_arrays(path).image_ids)
    except ColabUtilsError:
        return
    with tarfile.open(path) as tar:
        assert images == len(tar.getmembers()) / 2


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04 a zip", b"\x80\x04 a pickle", b"\x93NUMPY\x01\x00\xff\xff{", b"x" * 99]
)
def test_other_files_are_no_arrays(tmp_path, content):
    path = tmp_path / "a.arrays"
    path.write_bytes(content)
    for read in (read_head, load_arrays):
        with pytest.raises(ColabUtilsError, match="damaged file"):
            read(path)


def test_a_flipped_bit_in_a_table_is_noticed(coco_shards, tmp_path):
    shard = read_index(coco_shards).shards[0]
    content = bytearray((coco_shards / shard.arrays_name).read_bytes())
    boxes = load_arrays(coco_shards / shard.arrays_name).boxes
    content[content.index(boxes.tobytes()) + 40] ^= 4  # still a box
    (tmp_path / "a.arrays").write_bytes(content)
    with pytest.raises(ColabUtilsError, match="another checksum"):
        load_arrays(tmp_path / "a.arrays")
