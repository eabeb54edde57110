"""Any dataset comes out of its shards as the independent path reads it; an index that was changed
is not taken.
"""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pycocotools import mask as coco_mask

from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.dataset import ShardDataset
from tests.fuzz.originals import store
from tests.fuzz.truth import Truth, compare_record, compare_sample, shrink

SEEDED = settings(max_examples=15, deadline=None, derandomize=True)
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
