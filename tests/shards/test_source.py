"""A finished folder is known by what is kept of its files, and read again where they changed."""

import json
import os
import shutil

import pytest

from colab_utils.course.sample_data import make_dataset
from colab_utils.drive import Retries
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.opening import open_dataset
from colab_utils.shards import jobs, source
from colab_utils.shards.index import read_index
from colab_utils.shards.source import SOURCE_NAME, read_source
from colab_utils.shards.write import write_shards


@pytest.fixture
def data(tmp_path):
    """Eight images; two of them are bad."""
    made = make_dataset(tmp_path / "data", n=8, width=64, height=64, workers=1)
    names = sorted(path.name for path in made.images.iterdir())
    for name in names[1:4:2]:
        path = made.images / name
        shutil.copy(path, tmp_path / name)
        path.write_bytes(b"no image")
    return made.images, made.annotations


@pytest.fixture
def folder(data, tmp_path):
    write(data, tmp_path / "shards")
    return tmp_path / "shards"


def write(data, folder):
    return write_shards(*data, shards=folder, max_bad=0.5, workers=1)


def list_skipped(folder) -> list[str]:
    return [image.file_name for image in read_index(folder).skipped]


@pytest.fixture
def opened(monkeypatch):
    """The paths of the files that are opened to be read, but not those of shards."""
    paths = []
    real = os.open

    def note(path, *arguments, **options):
        paths.append(os.path.basename(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr("colab_utils.files.os.open", note)
    return paths


def test_a_finished_folder_is_known_without_reading_the_dataset(data, folder, opened):
    first = write(data, folder)
    assert opened == ["index.json", SOURCE_NAME]
    assert (first.images, len(first.skipped), first.shards) == (6, 2, 1)
    assert first.annotations > 6


def test_a_finished_folder_is_opened_without_reading_the_json(data, folder, opened):
    dataset = open_dataset(*data, drive=None, ssd=folder)
    assert len(dataset) == 6
    assert data[1].name not in opened


def test_a_json_of_another_time_is_read_once_more(data, folder, opened):
    before = (folder / "index.json").read_bytes()
    os.utime(data[1], ns=(1, 10**18))
    write(data, folder)
    assert opened.count(data[1].name) == 1
    # The images that were bad are those that they were.
    assert {*opened} <= {data[1].name, "index.json", SOURCE_NAME, *os.listdir(folder)}
    opened.clear()
    write(data, folder)
    assert data[1].name not in opened
    assert (folder / "index.json").read_bytes() == before


def test_a_json_that_was_changed_is_seen(data, folder):
    coco = json.loads(data[1].read_text())
    coco["annotations"][0]["area"] += 1
    data[1].write_text(json.dumps(coco))
    with pytest.raises(ColabUtilsError, match="of another dataset"):
        write(data, folder)


def test_only_a_bad_image_that_was_changed_is_read_again(data, folder, opened, tmp_path):
    first, second = list_skipped(folder)
    os.utime(data[0] / first, ns=(1, 10**18))
    report = write(data, folder)
    assert len(report.skipped) == 2
    assert opened.count(first) == 1
    assert second not in opened
    opened.clear()
    write(data, folder)
    assert first not in opened


def test_a_bad_image_that_was_repaired_is_written(data, folder, tmp_path):
    first, second = list_skipped(folder)
    shutil.copy(tmp_path / first, data[0] / first)
    report = write(data, folder)
    assert (report.images, [image.file_name for image in report.skipped]) == (7, [second])
    (data[0] / second).unlink()
    # It is bad in another way.
    assert write(data, folder).images == 7
    shutil.copy(tmp_path / second, data[0] / second)
    assert write(data, folder).images == 8


def test_bad_images_are_read_at_the_same_time(data, folder, monkeypatch):
    (folder / SOURCE_NAME).unlink()
    reading = []
    counts = []
    read = jobs.read_image

    def note(*arguments, **options):
        reading.append(1)
        counts.append(len(reading))
        Retries().stop.wait(0.2)
        reading.pop()
        return read(*arguments, **options)

    monkeypatch.setattr(jobs, "read_image", note)
    assert len(write(data, folder).skipped) == 2
    assert max(counts) == 2


def test_an_image_that_changes_while_shards_are_written_is_looked_at_again(data, tmp_path):
    # Its time is later than the run's.
    for path in data[0].iterdir():
        os.utime(path, ns=(2 * 10**18, 2 * 10**18))
    folder = tmp_path / "shards"
    write(data, folder)
    kept = read_source(folder, read_index(folder).fingerprint)
    assert kept is not None
    assert kept.skipped == {}


OTHER = b'{"fingerprint": "00000000000000000000000000000000", "skipped": {}}'


@pytest.mark.parametrize(
    "content", [b"", b"5", b"{}", b'{"skipped": 5}', b"\xff", b"[" * 10_000, OTHER]
)
def test_a_damaged_note_and_one_of_other_shards_are_none(data, folder, opened, content):
    good = (folder / SOURCE_NAME).read_bytes()
    (folder / SOURCE_NAME).write_bytes(content)
    assert write(data, folder).images == 6
    assert data[1].name in opened
    assert (folder / SOURCE_NAME).read_bytes() == good


def test_of_a_small_dataset_without_bad_images_nothing_is_kept(data, folder, tmp_path):
    for name in list_skipped(folder):
        shutil.copy(tmp_path / name, data[0] / name)
    other = tmp_path / "other"
    assert write(data, other).images == 8
    assert not (other / SOURCE_NAME).exists()


def test_of_a_large_json_its_time_is_kept(data, tmp_path, monkeypatch, opened):
    for name in os.listdir(tmp_path):
        if name.endswith(".jpg") or name.endswith(".png"):
            shutil.copy(tmp_path / name, data[0] / name)
    monkeypatch.setattr(source, "_SMALL_BYTES", 100)
    folder = tmp_path / "shards"
    write(data, folder)
    opened.clear()
    assert write(data, folder).images == 8
    assert data[1].name not in opened
