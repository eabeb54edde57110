"""Any dataset comes out of its shards as the independent path reads it; an index that was changed
is not taken.
"""

from __future__ import annotations

import io
import json
import tempfile
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pycocotools import mask as coco_mask

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.dataset import ShardDataset
from colab_utils.shards.index import ShardIndex, ShardInfo, SkippedImage, read_index, write_index
from tests.fuzz.originals import store
from tests.fuzz.truth import Truth, compare_record, compare_sample, shrink

SEEDED = settings(max_examples=40, deadline=None, derandomize=True)
coordinate = st.one_of(
    st.integers(-3, 40),
    st.floats(-3, 40).map(lambda x: round(x, 2)),
)


@st.composite
def objects(draw, height: int, width: int) -> dict[str, Any]:
    """An annotation with polygons or RLE, as JSON allows to write it; some fields may be
    missing.
    """
    points = draw(st.lists(coordinate, min_size=3, max_size=8).map(lambda xs: [*xs, *reversed(xs)]))
    mask = np.zeros((height, width), np.uint8, order="F")
    mask[draw(st.integers(0, height - 1)) :, draw(st.integers(0, width - 1)) :] = 1
    compressed = {
        "size": [height, width],
        "counts": coco_mask.encode(mask)["counts"].decode(),
    }
    annotation = {
        "category_id": draw(st.sampled_from([2, 5])),
        "segmentation": draw(
            st.sampled_from(
                [
                    [points],
                    [points, points[::-1]],
                    points,
                    compressed,
                ]
            )
        ),
        "bbox": draw(st.lists(coordinate, min_size=4, max_size=4)),
        "area": draw(st.floats(0, 1e4)),
        "iscrowd": draw(st.sampled_from([0, 0, 0, 1, False, "0", None])),
    }
    for name in draw(st.sets(st.sampled_from(["bbox", "area", "iscrowd"]), max_size=1)):
        del annotation[name]
    return annotation


@st.composite
def datasets(draw) -> tuple[dict[str, bytes], dict[str, Any]]:
    files = dict[str, bytes]()
    images = list[dict[str, Any]]()
    annotations = list[dict[str, Any]]()
    for number in draw(st.lists(st.integers(0, 999), min_size=1, max_size=3, unique=True)):
        height = draw(st.integers(1, 30))
        width = draw(st.integers(1, 30))
        file = io.BytesIO()
        pixels = np.random.default_rng(number).integers(
            0,
            255,
            (height, width, 3),
            np.uint8,
        )
        Image.fromarray(pixels).convert(draw(st.sampled_from(["RGB", "L"]))).save(
            file, draw(st.sampled_from(["PNG", "JPEG"]))
        )
        files[f"{number}.x"] = file.getvalue()
        images.append({"id": number, "file_name": f"{number}.x", "height": height, "width": width})
        drawn = draw(st.lists(objects(height, width), max_size=3))
        annotations += [
            {"id": len(annotations) + row, "image_id": number, **annotation}
            for row, annotation in enumerate(drawn, 1)
        ]
    return files, {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": 2, "name": "a"}, {"id": 5, "name": "b"}],
    }


@pytest.mark.filterwarnings("ignore:.*has bad objects")
@SEEDED
@given(dataset=datasets(), storage=st.sampled_from(["shrink", "keep"]), small=st.booleans())
def test_any_dataset_comes_out_of_shards_as_it_went_in(dataset, storage, small):
    files, coco = dataset
    sizes = {"min_size": 10, "max_size": 16} if small and storage != "keep" else {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, content in files.items():
            (root / name).write_bytes(content)
        (root / "coco.json").write_text(json.dumps(coco))
        store(root, root / "coco.json", root / "shards", storage=storage, **sizes)
        truth = Truth(root, (root / "coco.json").read_bytes())
        shards = ShardDataset(root / "shards")
        loose = CocoFolder(root, root / "coco.json")
        ids = [image["id"] for image in coco["images"]]
        assert loose.image_ids.tolist() == ids
        assert sorted(shards.image_ids.tolist()) == sorted(ids)
        for i, number in enumerate(shards.image_ids.tolist()):
            expected = shrink(truth(number), **sizes) if sizes else truth(number)
            compare_sample(*shards[i], expected, shards.category_ids, pixels=not sizes)
            compare_record(shards.record(i), expected)
            compare_sample(*loose[ids.index(number)], truth(number), loose.category_ids)


text = st.text(max_size=9)
size = st.integers(0, 2**50)
recipe = {
    "min_size": 800,
    "max_size": 1333,
    "shard_mb": 0.5,
    "images_per_shard": 7,
    "storage": "keep",
}


@st.composite
def indexes(draw) -> ShardIndex:
    """Any texts and sizes."""
    values = {str: text, int: size}
    infos = []
    for number in draw(st.sets(st.integers(0, 10**6), max_size=3)):
        names = {"name": f"shard-{number:06d}.tar", "arrays_name": f"shard-{number:06d}.arrays"}
        drawn = {field.name: draw(values[field.type]) for field in fields(ShardInfo)}
        # Each annotation takes more than a byte.
        drawn["annotations"] = min(drawn["annotations"], drawn["bytes"])
        infos.append(ShardInfo(**{**drawn, **names}))
    ids = draw(st.lists(st.integers(-(2**40), 2**40), max_size=3, unique=True))
    return ShardIndex(
        fingerprint=draw(text),
        recipe={
            **recipe,
            "min_size": draw(st.integers(1, 5000)),
            "storage": draw(st.sampled_from(["keep", "shrink"])),
        },
        categories=tuple({"id": number, "name": draw(text)} for number in ids),
        shards=tuple(infos),
        skipped=tuple(draw(st.lists(st.builds(SkippedImage, text, text), max_size=2))),
        partial=draw(st.booleans()),
    )


@settings(SEEDED, max_examples=80)
@given(
    index=indexes(),
    place=st.floats(0, 1, exclude_max=True),
    byte=st.integers(0, 255),
)
def test_an_index_comes_back_and_a_changed_one_does_not(index, place, byte):
    """Another byte anywhere is refused, or it was no part of the values (a space)."""
    with tempfile.TemporaryDirectory() as folder:
        write_index(Path(folder), index)
        assert read_index(folder) == index
        path = Path(folder, "index.json")
        content = bytearray(path.read_bytes())
        content[int(place * len(content))] = byte
        path.write_bytes(content)
        with suppress(ColabUtilsError):
            assert read_index(folder) == index
