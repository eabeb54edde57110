"""What a fresh machine finds on Drive is used; what is missing is made once."""

from __future__ import annotations

import json

import pytest

from colab_utils.errors import ColabUtilsError
from colab_utils.loading import ShardDataset
from colab_utils.shards.format import read_index
from colab_utils.shards.write import write_shards
from colab_utils.workspace import (
    Workspace,
    ensure_dataset,
    ensure_local_shards,
    ensure_shards,
    ensure_validation_shards,
    publish_results,
)


@pytest.fixture
def workspace(tmp_path):
    return Workspace.open(tmp_path / "drive", ssd=tmp_path / "ssd", profile="none")


def test_the_built_in_dataset_is_made_once_and_kept(workspace):
    made = ensure_dataset(workspace, n=2)
    stamps = {path: path.stat().st_mtime_ns for path in workspace.dataset.rglob("*")}
    found = ensure_dataset(workspace, n=7)
    assert (made.made, found.made) == (True, False)
    assert (found.images, found.annotations) == (made.images, made.annotations)
    assert {path: path.stat().st_mtime_ns for path in workspace.dataset.rglob("*")} == stamps


def test_the_two_parts_are_other_pictures(workspace):
    train, val = ensure_dataset(workspace, n=2), ensure_dataset(workspace, n=2, part="val")
    pixels = [{path.read_bytes() for path in part.images.iterdir()} for part in (train, val)]
    assert not pixels[0] & pixels[1]


def test_your_own_dataset_is_used_where_it_lies(workspace, tiny_dataset):
    data = ensure_dataset(workspace, images=str(tiny_dataset.images), annotations=str(tiny_dataset.annotations))
    assert (data.images, data.annotations, data.made) == (tiny_dataset.images, tiny_dataset.annotations, False)
    assert not workspace.dataset.exists()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"images": "photos"}, "found only images"),  # half of it
        ({"annotations": "a.json"}, "found only annotations"),  # the other half
        ({"images": "no/photos", "annotations": "a.json"}, "expected an image folder, found nothing at no/photos"),
        ({"images": ".", "annotations": "no.json"}, "expected a COCO JSON file, found nothing at no.json"),
    ],
)
def test_wrong_names_are_said(workspace, names, message):
    with pytest.raises(ColabUtilsError, match=message):
        ensure_dataset(workspace, **names)


def test_shards_are_made_then_found_then_copied(workspace, tiny_dataset):
    names = {"images": str(tiny_dataset.images), "annotations": str(tiny_dataset.annotations)}
    made = ensure_shards(workspace, **names)
    assert (made.folder, made.images, made.made) == (workspace.shards_on_drive, 12, True)
    assert not ensure_shards(workspace, **names).made
    assert not ensure_shards(workspace).made  # without names: those that are there
    copied, again = ensure_local_shards(workspace), ensure_local_shards(workspace)
    assert (copied.folder, copied.made, again.made) == (workspace.shards_on_ssd, True, False)
    assert read_index(workspace.shards_on_ssd).fingerprint == read_index(workspace.shards_on_drive).fingerprint


def test_shards_of_another_dataset_are_refused_and_kept(workspace, tiny_dataset):
    data = ensure_dataset(workspace, n=2)
    write_shards(data.images, data.annotations, shards=workspace.shards_on_drive, workers=1)
    before = {path.name: path.read_bytes() for path in workspace.shards_on_drive.iterdir()}
    with pytest.raises(ColabUtilsError, match="found shards of another dataset"):
        ensure_shards(workspace, images=str(tiny_dataset.images), annotations=str(tiny_dataset.annotations))
    assert {path.name: path.read_bytes() for path in workspace.shards_on_drive.iterdir()} == before


def test_validation_takes_what_fits_to_the_training_shards(workspace, tiny_dataset, tmp_path):
    train = ensure_local_shards(workspace, n=2)
    builtin = ensure_validation_shards(workspace, train, n=2)
    assert builtin.folder == workspace.ssd / "shards_val"
    assert read_index(builtin.folder).fingerprint != read_index(train.folder).fingerprint
    named = {"images": str(tiny_dataset.images), "annotations": str(tiny_dataset.annotations)}
    with pytest.raises(ColabUtilsError, match="another dataset"):  # named data never mixes with what is there
        ensure_validation_shards(workspace, train, **named)


def test_your_own_data_without_validation_is_judged_on_itself(workspace, tiny_dataset, tmp_path):
    content = json.loads(tiny_dataset.annotations.read_text())
    for category in content["categories"]:
        category["name"] = f"my {category['name']}"
    (tmp_path / "mine.json").write_text(json.dumps(content))
    names = {"images": str(tiny_dataset.images), "annotations": str(tmp_path / "mine.json")}
    train = ensure_local_shards(workspace, **names, shard_mb=tiny_dataset.bytes / 4e6)
    seen = ensure_validation_shards(workspace, train)
    assert (seen.shards, seen.made, ensure_validation_shards(workspace, train).made) == (1, True, False)
    assert set(ShardDataset(seen.folder).image_ids) < set(ShardDataset(train.folder).image_ids)
    assert not (workspace.drive / "dataset_val").exists()


def test_published_results_are_whole_files(workspace):
    publish_results(workspace, "03", shards=1)
    path = publish_results(workspace, "03", shards=2)
    assert json.loads(path.read_text()) == {"shards": 2}
    assert [file.name for file in path.parent.iterdir()] == ["03.json"]
