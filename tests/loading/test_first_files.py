"""The files of the first shard, which are read while shards are planned."""

import pytest

from colab_utils.data.coco import open_coco
from colab_utils.loading.first_files import FirstFiles
from colab_utils.places import open_place
from colab_utils.shards.jobs import WorkerProgress, write_shard
from colab_utils.shards.plan import complete_recipe, make_recipe
from colab_utils.shards.write import ShardRun, cut_jobs


def list_jobs(tiny_dataset, folder, image_bytes):
    """Return the recipe before it is complete, the annotations, and the jobs of all shards."""
    images = open_place(tiny_dataset.images)
    dataset = open_coco(images, tiny_dataset.annotations)
    recipe = make_recipe("shrink", min_size=800, max_size=1333, shard_mb=128)
    complete = complete_recipe(recipe, image_bytes)
    return recipe, dataset, list(cut_jobs(ShardRun(folder, images, dataset, complete), "auto"))


# The first shard has fewer files than are guessed, and all that there are.
@pytest.mark.parametrize("image_bytes", [2_000_000, 100])
def test_the_contents_are_those_of_the_first_shard(tiny_dataset, tmp_path, image_bytes):
    recipe, dataset, jobs = list_jobs(tiny_dataset, tmp_path, image_bytes)
    files = FirstFiles(jobs[0].images, dataset, recipe, "auto")
    job = files.fill(jobs[0])
    names = [job.dataset.file_name(place) for place in range(len(job.dataset))]
    right = {place: (job.images / name).read_bytes() for place, name in enumerate(names)}
    assert job.contents == right


def test_a_guess_that_is_too_small_is_completed(tiny_dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("colab_utils.loading.first_files._GUESSED_BYTES", 2_000_000)
    recipe, dataset, jobs = list_jobs(tiny_dataset, tmp_path, 100)
    files = FirstFiles(jobs[0].images, dataset, recipe, 3)
    job = files.fill(jobs[0])
    assert sorted(job.contents) == list(range(len(dataset)))
    assert job.streams == 3


def test_what_was_not_read_is_read_by_the_writer(tiny_dataset, tmp_path, monkeypatch):
    """After the first 64 MB, here after the first file."""
    monkeypatch.setattr("colab_utils.loading.first_files.AHEAD_BYTES", 1)
    recipe, dataset, jobs = list_jobs(tiny_dataset, tmp_path, 100)
    expected = write_shard(jobs[0], WorkerProgress())
    tar = jobs[0].path.read_bytes()
    jobs[0].path.unlink()
    job = FirstFiles(jobs[0].images, dataset, recipe, "auto").fill(jobs[0])
    assert list(job.contents) == [0]
    assert write_shard(job, WorkerProgress()) == expected
    assert job.path.read_bytes() == tar


def test_a_file_that_cannot_be_read_is_left_to_the_writer(tiny_dataset, tmp_path):
    recipe, dataset, jobs = list_jobs(tiny_dataset, tmp_path, 100)
    empty = tmp_path / "empty"
    empty.mkdir()
    job = FirstFiles(open_place(empty), dataset, recipe, "auto").fill(jobs[0])
    assert job.contents == {}
    assert len(write_shard(job, WorkerProgress()).skipped) == 0
