from __future__ import annotations

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colab_utils.data.coco import read_coco
from colab_utils.data.masks import PackedMasks, encode_segmentation, unpack_masks
from colab_utils.errors import ColabUtilsError
from colab_utils.shards.format import hash_bytes, read_index, split_member
from colab_utils.shards.records import (
    ArraysBuilder,
    convert_boxes,
    describe_shard,
    dump_arrays,
    dump_record,
    load_arrays,
    rebuild_arrays,
)  # fmt: skip
from colab_utils.shards.write import write_shards
from tests.sealed import describe_tar, load_bits, seal_arrays

HEAD = {"name": "shard-000000.tar", "images": 2, "annotations": 4, "bytes": 4096, "xxh3_64": "0" * 16}
CATEGORIES = ({"id": 3, "name": "car"}, {"id": 5, "name": "dog"})
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
        path = coco_shards / shard.arrays_name
        loaded = load_bits(path, load_arrays(path, shard, index.categories))
        assert_equal(loaded, rebuild_arrays(coco_shards / shard.name, shard, index.categories))
        head, info = describe_shard(path.read_bytes())
        assert (head["images"], head["bytes"], head["xxh3_64"]) == (shard.images, shard.bytes, shard.xxh3_64)
        assert info == shard


def test_spans_boxes_and_masks_are_those_of_the_records(coco_shards):
    index = read_index(coco_shards)
    for shard in index.shards:
        path = coco_shards / shard.arrays_name
        arrays = load_bits(path, load_arrays(path, shard, index.categories))
        blob = (coco_shards / shard.name).read_bytes()
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
    builder.add(make_record({"iscrowd": 1}, {"bbox": [1, 1, 0, 3]}, {"category_id": 5}), (b"image", b"{}"), (512, 1536))
    builder.add(make_record(), (b"image", b"{}"), (3000, 3600))
    arrays = builder.build()
    assert (arrays.labels.tolist(), arrays.counts.tolist(), len(arrays.crops)) == ([5], [1, 0], 1)


def test_no_images_and_no_objects(tmp_path):
    builder, path = ArraysBuilder(), tmp_path / "shard-000000.arrays"
    for images in range(2):
        path.write_bytes(dump_arrays(HEAD | {"images": images}, builder.build()))
        head, info = describe_shard(path.read_bytes())
        assert_equal(load_bits(path, load_arrays(path, info, CATEGORIES)), builder.build())
        assert head["images"] == info.images == images
        builder.add(make_record(), (b"image", b"{}"), (512, 1536))


@pytest.fixture(scope="module")
def small_shard(tmp_path_factory):
    """A tar of two records and its arrays, a few KB each; and the shard as an index lists it."""
    folder, builder, tar = tmp_path_factory.mktemp("small"), ArraysBuilder(), b""
    for number in range(2):
        record = make_record({}, {})
        files, starts = (b"image", dump_record(record)), []
        for name, data in zip((f"{number}.jpg", f"{number}.json"), files, strict=True):
            starts.append(len(tar) + 512)
            tar += b"".join(split_member(name, data))
        builder.add(record, files, starts)
    tar += bytes(1024)
    (folder / "a.tar").write_bytes(tar)
    head = HEAD | {"bytes": len(tar), "xxh3_64": hash_bytes(tar)}
    (folder / "a.arrays").write_bytes(content := dump_arrays(head, builder.build()))
    info = describe_shard(content)[1]
    assert_equal(rebuild_arrays(folder / "a.tar", info, CATEGORIES), load_small(folder, info))
    return folder, info


def load_small(folder, info):
    return load_bits(folder / "a.arrays", load_arrays(folder / "a.arrays", info, CATEGORIES))


def test_no_python_code_is_parsed_for_arrays(small_shard, monkeypatch):
    monkeypatch.setattr("ast.literal_eval", lambda _: 1 / 0)  # in Python 3.11 it sometimes fails in several threads
    assert len(load_small(*small_shard).image_ids)


@QUICK
@given(share=st.floats(0, 1, exclude_max=True))
def test_arrays_cut_short_are_refused(small_shard, tmp_path, share):
    folder, info = small_shard
    whole = (folder / "a.arrays").read_bytes()
    path = tmp_path / "cut.arrays"
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ColabUtilsError, match="Run verify on the shards"):
        load_arrays(path, info, CATEGORIES)


@QUICK
@given(changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8))
def test_damaged_arrays_and_tars_are_refused_or_as_they_were(small_shard, tmp_path, changes):
    folder, info = small_shard
    arrays = load_small(folder, info)
    for name, read in (("a.arrays", load_arrays), ("a.tar", rebuild_arrays)):
        data = bytearray((folder / name).read_bytes())
        for share, value in changes:
            data[int(len(data) * share)] = value
        path = tmp_path / name
        path.write_bytes(data)
        message = str(path)
        try:
            found = read(path, info, CATEGORIES)
        except ColabUtilsError as error:
            message = str(error)
        else:  # bits are compared when they are read
            found = dataclasses.replace(found, bits=arrays.bits) if name == "a.arrays" else found
            assert_equal(found, arrays)
        assert str(path) in message
        assert "\n" not in message


def edit(name, change):
    """Tables with one of them changed."""

    def apply(arrays):
        values = getattr(arrays, name).copy()
        return dataclasses.replace(arrays, **{name: change(values)})

    return apply


def put(place, value):
    def change(values):
        values[place] = value
        return values

    return change


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (edit("boxes", lambda v: v[:-1]), "boxes as float32"),
        (edit("boxes", lambda v: v[:, :3]), "boxes as"),
        (edit("boxes", lambda v: v.astype(np.float64)), "boxes as float64"),
        (edit("labels", lambda v: v.astype(">i8")), "labels as >i8"),
        (edit("image_ids", lambda v: v[:-1]), "image_ids as"),  # fewer images than the index has
        (edit("checks", lambda v: v[:, :2]), "checks as"),
        (edit("areas", lambda v: v[0]), "areas as"),  # one number, and no list
        (edit("counts", put(0, 3)), "counts"),  # a sum that is not N
        (edit("counts", put(slice(None), (-1, 5))), "counts"),
        (edit("counts", put(slice(None), (2**62, 2**62))), "counts"),
        (edit("sizes", put((0, 0), 0)), "sizes"),
        (edit("sizes", put((0, 0), -6)), "sizes"),
        (edit("sizes", put(0, 2**31 - 1)), "sizes"),  # memory for it is not there
        (edit("image_spans", put((0, 0), -1)), "places"),
        (edit("image_spans", put((0, 0), 2**62)), "places"),  # beyond the file
        (edit("record_spans", put((1, 1), 2**63 - 1)), "places"),
        (edit("crops", put((0, 2), 9)), "outside its image"),
        (edit("crops", put((0, 0), -1)), "outside its image"),
        (edit("crops", put((0, 0), 3)), "masks of other sizes"),
        (edit("boxes", put((0, 0), np.nan)), "outside its image"),
        (edit("boxes", put((0, 3), np.inf)), "outside its image"),
        (edit("boxes", put((0, 0), 7)), "outside its image"),  # right of its own right side
        (edit("boxes", put((0, 2), 1)), "without area"),
        (edit("areas", put(0, np.nan)), "without area"),
        (edit("mask_ends", put(1, 2**62)), "masks of other sizes"),
        (edit("mask_ends", put(slice(None), -1)), "masks of other sizes"),
        (edit("bits", lambda v: v[:-1]), "cut short"),
        (edit("labels", put(0, 4)), "no category"),
    ],
)
def test_tables_of_right_checksums_that_contradict_each_other_are_refused(small_shard, tmp_path, change, found):
    folder, info = small_shard
    path = tmp_path / "a.arrays"
    shutil.copy(folder / "a.arrays", path)
    sealed = seal_arrays(path, change(load_small(folder, info)))
    with pytest.raises(ColabUtilsError, match=found) as error:
        load_arrays(path, sealed, CATEGORIES)
    assert "\n" not in str(error.value)


def test_an_image_larger_than_any_is_refused_whatever_the_tar_holds(small_shard, tmp_path):
    path = tmp_path / "a.arrays"
    shutil.copy(small_shard[0] / "a.arrays", path)
    arrays = edit("image_spans", put((0, 1), 2 * 10**9))(load_arrays(path, small_shard[1], CATEGORIES))
    sealed = seal_arrays(path, arrays, bytes=2**40)
    with pytest.raises(ColabUtilsError, match="places"):
        load_arrays(path, sealed, CATEGORIES)


@pytest.mark.parametrize(
    "head",
    [
        {"tables_bytes": 2**62}, {"tables_bytes": -1}, {"tables_bytes": "9"}, {"bits_bytes": 2**31},
        {"bits_bytes": -1},
    ],
)  # fmt: skip
def test_heads_of_right_checksums_with_other_sizes_are_refused(small_shard, tmp_path, head):
    folder, info = small_shard
    content = (folder / "a.arrays").read_bytes()
    length = int.from_bytes(content[:8], "little")
    raw = json.loads(content[16 : 16 + length])
    text = json.dumps({**raw, **head}).encode()
    path = tmp_path / "a.arrays"
    path.write_bytes(len(text).to_bytes(8, "little") + bytes(8) + text + content[16 + length :])
    sealed = dataclasses.replace(
        info, tables_xxh3_64=hash_bytes(path.read_bytes()[: 16 + len(text) + raw["tables_bytes"]])
    )
    with pytest.raises(ColabUtilsError, match="a damaged file"):
        load_arrays(path, sealed, CATEGORIES)


def pack_tar(*members):
    return b"".join(b"".join(split_member(*member)) for member in members) + bytes(1024)


RLE = {"size": [6, 8], "counts": "71100000O10"}
ONE = {"category_id": 3, "bbox": [1, 1, 4, 3], "area": 6.0, "iscrowd": 0, "segmentation": RLE}
RECORD = {"image_id": 9, "height": 6, "width": 8, "annotations": [ONE]}


@pytest.mark.parametrize(
    "record",
    [
        [], "x", 5, {}, {**RECORD, "annotations": 5}, {**RECORD, "annotations": [5]}, {**RECORD, "height": "6"},
        {**RECORD, "height": 2**31}, {**RECORD, "image_id": 2**70}, {**RECORD, "image_id": "x"},
        *({**RECORD, "annotations": [{**ONE, **change}]} for change in (
            {"bbox": [1, 1, 4]}, {"bbox": ["1", 1, 4, 3]}, {"bbox": None}, {"area": None}, {"iscrowd": 5},
            {"category_id": "3"}, {"category_id": 4}, {"segmentation": {"size": [6, 8], "counts": "7110"}},
            {"segmentation": {"size": [6, 9], "counts": "71100000O10"}}, {"segmentation": []}, {"bbox": [1] * 8},
            {"segmentation": [[1, 2, 3, 4, 5, 6]]},
        )),
    ],
)  # fmt: skip
def test_records_of_right_checksums_that_are_none_are_refused(small_shard, tmp_path, record):
    check_damaged_tar(tmp_path, small_shard[1], pack_tar(("a.jpg", b"image"), ("a.json", json.dumps(record).encode())))


@pytest.mark.parametrize(
    "content",
    [
        b"", b"x" * 1024, pack_tar(("a.jpg", b"image")), pack_tar(("a.jpg", b"image"), ("a.json", b"[" * 100_000)),
        pack_tar(("a.jpg", b"image"), ("a.json", b"\xff{")),
        split_member("a.jpg", b"image")[0].replace(b"00000000005", b"77777777777") + bytes(1024),  # 8 GB
        split_member("a.jpg", b"image")[0].replace(b"00000000005", b"\xff" * 10 + b"\xfe") + bytes(1024),  # below 0
        split_member("././@PaxHeader", b"13 size=-512\n")[0][:156] + b"x" + bytes(355) + b"13 size=-512\n" + bytes(999),
        split_member("././@PaxHeader", b"9" * 600)[0][:156] + b"x" + bytes(355) + b"9" * 600 + bytes(936),
    ],
)  # fmt: skip
def test_tars_of_right_checksums_that_are_none_are_refused(small_shard, tmp_path, content):
    check_damaged_tar(tmp_path, small_shard[1], content)


def check_damaged_tar(folder, info, content):
    path = folder / "a.tar"
    path.write_bytes(content)
    with pytest.raises(ColabUtilsError, match="Run verify on the shards") as error:
        rebuild_arrays(path, dataclasses.replace(describe_tar(path, info), images=1), CATEGORIES)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04 a zip", b"\x80\x04 a pickle", b"\x93NUMPY\x01\x00\xff\xff{", b"x" * 99]
)
def test_other_files_are_no_arrays(small_shard, tmp_path, content):
    path = tmp_path / "a.arrays"
    path.write_bytes(content)
    with pytest.raises(ColabUtilsError, match="damaged file"):
        load_arrays(path, small_shard[1], CATEGORIES)
    with pytest.raises((OverflowError, ValueError)):
        describe_shard(content)


def test_a_flipped_bit_in_a_table_is_noticed(coco_shards, tmp_path):
    index = read_index(coco_shards)
    shard = index.shards[0]
    content = bytearray((coco_shards / shard.arrays_name).read_bytes())
    boxes = load_arrays(coco_shards / shard.arrays_name, shard, index.categories).boxes
    content[content.index(boxes.tobytes()) + 40] ^= 4  # still a box
    (tmp_path / "a.arrays").write_bytes(content)
    with pytest.raises(ColabUtilsError, match="another checksum"):
        load_arrays(tmp_path / "a.arrays", shard, index.categories)


def test_a_changed_digit_in_a_tar_is_noticed_before_arrays_are_made_of_it(coco_shards, tmp_path):
    index = read_index(coco_shards)
    shard = index.shards[0]
    content = (coco_shards / shard.name).read_bytes()
    (tmp_path / "a.tar").write_bytes(re.sub(rb'("bbox":\[)\d', rb"\g<1>7", content, count=1))
    assert (tmp_path / "a.tar").stat().st_size == shard.bytes
    with pytest.raises(ColabUtilsError, match="another checksum"):
        rebuild_arrays(tmp_path / "a.tar", shard, index.categories)
