from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colab_utils.data.masks import encode_segmentation
from colab_utils.errors import ColabUtilsError
from colab_utils.files import open_store
from colab_utils.shards.arrays import (
    describe_shard,
    dump_arrays,
    join_records,
    load_arrays,
    pack_record,
    rebuild_arrays,
)
from colab_utils.shards.index import read_index
from colab_utils.shards.write import write_shards

HEAD = {
    "fingerprint": "",
    "recipe": {},
    "skipped": [],
    "name": "shard-000000.tar",
    "annotations": 4,
    "bytes": 4096,
    "xxh3_64": "",
}
QUICK = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SHARE = st.floats(0, 1, exclude_max=True)


@pytest.fixture(scope="module")
def coco_shards(coco_mini, tmp_path_factory):
    folder = tmp_path_factory.mktemp("arrays") / "shards"
    write_shards(
        coco_mini.images,
        coco_mini.annotations,
        shards=folder,
        shard_mb=4,
        min_size=300,
        max_size=500,
        workers=2,
    )
    return folder


def load_bits(folder, shard):
    """The arrays of a shard, with the masks' bits in memory."""
    arrays = load_arrays(open_store(folder), shard)
    bits = np.fromfile(folder / shard.arrays_name, np.uint8, offset=arrays["bits"])
    return arrays | {"bits": bits}


def assert_equal(first, other):
    assert first.keys() == other.keys()
    for name, table in first.items():
        assert table.dtype == other[name].dtype, name
        assert np.array_equal(table, other[name]), name


def test_arrays_are_those_of_the_records_and_are_made_again_from_the_tars(coco_shards):
    index = read_index(coco_shards)
    assert len(index.shards) > 1
    for shard in index.shards:
        path = coco_shards / shard.arrays_name
        arrays = load_bits(coco_shards, shard)
        assert_equal(arrays, rebuild_arrays(open_store(coco_shards), shard))
        assert describe_shard(path.read_bytes()).shards == (shard,)


def make_record(*annotations):
    rle = encode_segmentation([[1, 1, 5, 1, 5, 4]], 6, 8)
    base = {"category_id": 3, "bbox": [1, 1, 4, 3], "area": 6.0, "iscrowd": 0}
    rows = [{**base, "segmentation": rle, **annotation} for annotation in annotations]
    return {"image_id": 9, "height": 6, "width": 8, "annotations": rows}


def test_crowds_and_boxes_without_area_are_left_out_and_boxes_end_at_the_borders():
    beyond = {"bbox": [-2, 1, 4, 1e6], "category_id": 5}
    record = make_record({"iscrowd": 1}, {"bbox": [1, 1, 0, 3]}, {"bbox": [-9, 1, 5, 3]}, beyond)
    files = (b"image", b"{}")
    records = [
        pack_record(record, files, (512, 1536)),
        pack_record(make_record(), files, (3000, 3600)),
    ]
    arrays = join_records(records)
    assert (arrays["labels"].tolist(), arrays["counts"].tolist()) == ([5], [1, 0])
    assert arrays["boxes"].tolist() == [[0, 1, 2, 6]]
    assert len(arrays["crops"]) == 1


def test_no_images_and_no_objects(tmp_path):
    record = pack_record(make_record(), (b"image", b"{}"), (512, 1536))
    path = tmp_path / "shard-000000.arrays"
    for images in range(2):
        arrays = join_records([record] * images)
        path.write_bytes(dump_arrays(HEAD | {"images": images}, arrays))
        [info] = describe_shard(path.read_bytes()).shards
        assert_equal(load_bits(tmp_path, info), arrays)
        assert info.images == images


def test_no_python_code_is_parsed_for_arrays(local, monkeypatch):
    shard = read_index(local).shards[0]
    # In Python 3.11 it sometimes fails in several threads.
    monkeypatch.setattr("ast.literal_eval", lambda _: 1 / 0)
    assert len(load_bits(local, shard)["image_ids"])


@QUICK
@given(
    changes=st.lists(st.tuples(SHARE, st.integers(0, 255)), max_size=8),
    kept=st.one_of(SHARE, st.just(1)),
)
def test_damaged_arrays_and_tars_are_refused_or_as_they_were(local, tmp_path, changes, kept):
    shard = read_index(local).shards[0]
    arrays = load_bits(local, shard)
    for name, read in ((shard.arrays_name, load_arrays), (shard.name, rebuild_arrays)):
        data = bytearray((local / name).read_bytes())
        for share, value in changes:
            data[int(len(data) * share)] = value
        path = tmp_path / name
        path.write_bytes(data[: int(len(data) * kept)])
        message = f"{path}: Run verify on the shards"
        try:
            result = read(open_store(tmp_path), shard)
        except ColabUtilsError as error:
            message = str(error)
        else:
            # The bits of the masks are compared with their checksum only when they are read.
            bits = (arrays if read is load_arrays else result)["bits"]
            assert_equal(result | {"bits": bits}, arrays)
        assert str(path) in message
        assert "Run verify on the shards" in message
        assert "\n" not in message
