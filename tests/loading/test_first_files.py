"""The files of the first shard, which are read while shards are planned."""

import pytest

from colab_utils.data.coco import open_coco
from colab_utils.loading.first_files import FirstFiles
from colab_utils.places import open_place
from colab_utils.shards.jobs import WorkerProgress, write_part
from colab_utils.shards.plan import complete_recipe, make_recipe
from colab_utils.shards.write import cut_parts


def list_parts(tiny_dataset, folder, image_bytes):
    """Return the recipe before it is complete, the annotations, and the parts of all shards."""
    images = open_place(tiny_dataset.images)
    dataset = open_coco(images, tiny_dataset.annotations)
    recipe = make_recipe("shrink", min_size=800, max_size=1333, shard_mb=128)
    complete = complete_recipe(recipe, image_bytes)
    return recipe, dataset, list(cut_parts(folder, images, dataset, complete, "auto"))


# The first shard has fewer files than are guessed, and all that there are.
@pytest.mark.parametrize("image_bytes", [2_000_000, 100])
def test_the_contents_are_those_of_the_first_shard(tiny_dataset, tmp_path, image_bytes):
    recipe, dataset, parts = list_parts(tiny_dataset, tmp_path, image_bytes)
    files = FirstFiles(parts[0].images, dataset, recipe, "auto")
    part = files.fill(parts[0])
    names = [part.dataset.file_name(place) for place in range(len(part.dataset))]
    right = {place: (part.images / name).read_bytes() for place, name in enumerate(names)}
    assert part.contents == right


def test_a_guess_that_is_too_small_is_completed(tiny_dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("colab_utils.loading.first_files._GUESSED_BYTES", 2_000_000)
    recipe, dataset, parts = list_parts(tiny_dataset, tmp_path, 100)
    files = FirstFiles(parts[0].images, dataset, recipe, 3)
    part = files.fill(parts[0])
    assert sorted(part.contents) == list(range(len(dataset)))
    assert part.streams == 3


def test_what_was_not_read_is_read_by_the_writer(tiny_dataset, tmp_path, monkeypatch):
    """After the first 64 MB, here after the first file."""
    monkeypatch.setattr("colab_utils.loading.first_files.AHEAD_BYTES", 1)
    recipe, dataset, parts = list_parts(tiny_dataset, tmp_path, 100)
    expected = write_part(parts[0], WorkerProgress())
    tar = parts[0].path.read_bytes()
    parts[0].path.unlink()
    part = FirstFiles(parts[0].images, dataset, recipe, "auto").fill(parts[0])
    assert list(part.contents) == [0]
    assert write_part(part, WorkerProgress()) == expected
    assert part.path.read_bytes() == tar


def test_a_file_that_cannot_be_read_is_left_to_the_writer(tiny_dataset, tmp_path):
    recipe, dataset, parts = list_parts(tiny_dataset, tmp_path, 100)
    empty = tmp_path / "empty"
    empty.mkdir()
    part = FirstFiles(open_place(empty), dataset, recipe, "auto").fill(parts[0])
    assert part.contents == {}
    assert len(write_part(part, WorkerProgress()).skipped) == 0
