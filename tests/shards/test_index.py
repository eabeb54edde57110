from __future__ import annotations

import json
from dataclasses import replace

import pytest

from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError
from colab_utils.shards.index import (
    ShardIndex,
    ShardInfo,
    SkippedImage,
    read_index,
    write_index,
)
from tests.bad_reads import BadReads, alter, cut

INFO = ShardInfo(
    "shard-000000.tar", 3, 9, 4096, "a" * 16, "shard-000000.arrays", 512, "b" * 16, "c" * 16
)
CATEGORIES = ({"id": 1, "name": "car"},)
INDEX = ShardIndex("f" * 32, {"storage": "keep"}, CATEGORIES, (INFO,), (SkippedImage("a", "b"),))


def is_refused(folder, words):
    with pytest.raises(ColabUtilsError) as error:
        read_index(folder)
    message = str(error.value)
    assert words in message
    assert str(folder) in message
    assert "\n" not in message
    assert len(message) < 600


def test_the_index_of_rf_detr_lies_beside_ours(tmp_path):
    """`tests/data/test_formats.py` reads it with RF-DETR."""
    second = replace(INFO, name="shard-000001.tar", arrays_name="shard-000001.arrays", images=2)
    write_index(tmp_path, replace(INDEX, shards=(INFO, second)))
    assert json.loads((tmp_path / "train-index.json").read_text()) == {
        "version": 1,
        "split": "train",
        "shards": ["shard-000000.tar", "shard-000001.tar"],
        "num_samples": 5,
        "categories": [{"id": 1, "name": "car"}],
        "annotated_category_ids": [1],
        "category_ids": "raw",
        "samples_per_shard": [3, 2],
    }


def test_an_index_comes_back_with_any_name_and_in_any_layout(tmp_path):
    names = "caf\u00e9 \U0001f431\u202e\n\0\udc80"
    categories = ({"id": -3, "name": names},)
    index = replace(INDEX, categories=categories, skipped=(SkippedImage(names, names),))
    write_index(tmp_path, index)
    assert read_index(tmp_path) == index
    assert (index.images, index.bytes) == (3, 4608)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", "train-index.json"]
    raw = json.loads((tmp_path / "index.json").read_text())
    assert (raw["format_version"], raw["images"], raw["bytes"]) == (2, 3, 4608)
    assert raw["shards"][0]["xxh3_64"] == "a" * 16
    (tmp_path / "index.json").write_text(json.dumps(dict(reversed(raw.items()))))
    assert read_index(tmp_path) == index


CHANGED = "was changed since it was written"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 3}, "that this version reads. Update colab_"),
        ({"format_version": 1}, "or run preprocess again, into another folder"),
        ({"format": "somebody else's"}, "is not one of colab_utils shards"),
        ({"categories": [{"id": 1, "name": "cat"}]}, CHANGED),
        ({"notes": "mine"}, CHANGED),
    ],
)
def test_an_index_that_was_edited_or_is_of_another_program_is_refused(tmp_path, changes, message):
    write_index(tmp_path, INDEX)
    raw = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps({**raw, **changes}))
    is_refused(tmp_path, message)


def rename(**names):
    return {"shards": (replace(INFO, **names),)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # A copy would write to these names.
        (rename(name="../shard-000000.tar", arrays_name="../shard-000000.arrays"), CHANGED),
        (rename(name=f"shard-{chr(0x663) * 6}.tar"), CHANGED),
        (rename(arrays_name="shard-000001.arrays"), CHANGED),
        # Older versions could store raw pixels.
        ({"recipe": {"storage": "pixels"}}, "that this version reads"),
    ],
)
def test_an_index_that_leads_out_of_its_folder_or_is_of_an_older_version_is_refused(
    tmp_path, changes, message
):
    write_index(tmp_path, replace(INDEX, **changes))
    is_refused(tmp_path, message)


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00",
        b"[]",
        b"[" * 100_000,
        # It has no checksum.
        b'{"format": "colab_utils shards", "format_version": 2}',
    ],
)
def test_what_is_no_index_is_refused(tmp_path, content):
    (tmp_path / "index.json").write_bytes(content)
    is_refused(tmp_path, "")


def test_a_file_too_large_for_an_index_is_not_read(tmp_path):
    with open(tmp_path / "index.json", "wb") as file:
        file.truncate(1 << 40)
    is_refused(tmp_path, "has 1.1 TB, and at most 400.0 MB can be read")


def test_no_folder_no_index_and_an_interrupted_run(tmp_path):
    with pytest.raises(ColabUtilsError, match="There are no shards in"):
        read_index(tmp_path / "no")
    with pytest.raises(ColabUtilsError, match="Run preprocess"):
        read_index(tmp_path)
    (tmp_path / "shard-000003.arrays").touch()
    with pytest.raises(ColabUtilsError, match="it continues where it stopped"):
        read_index(tmp_path)
    (tmp_path / "index.json").mkdir()
    with pytest.raises(ColabUtilsError, match="cannot be read"):
        read_index(tmp_path)


@pytest.mark.parametrize(
    ("change", "times"),
    [(cut, 4), (alter, 2)],
)
def test_an_index_that_was_read_badly_is_read_again(tmp_path, monkeypatch, change, times):
    write_index(tmp_path, INDEX)
    reads = BadReads(monkeypatch, ".json", change, times)
    assert read_index(tmp_path) == INDEX
    assert reads.times == 0


@pytest.mark.parametrize("change", [cut, alter])
def test_an_index_that_is_never_read_well_is_not_called_changed(tmp_path, monkeypatch, change):
    write_index(tmp_path, INDEX)
    BadReads(monkeypatch, ".json", change, 1000)
    with pytest.raises(DriveLostError, match=r"index\.json .*what is done is safe"):
        read_index(tmp_path)
