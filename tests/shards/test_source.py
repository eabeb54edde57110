"""A finished folder is known by its notes on the JSON, and its bad images are read again."""

import json
import os
import shutil
import time

import pytest

from colab_utils.course.sample_data import make_dataset
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.opening import open_dataset
from colab_utils.shards import jobs, source
from colab_utils.shards.source import SOURCE_NAME
from colab_utils.shards.write import write_shards


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Eight images, of which the copies lie beside. The notes on their small JSON are kept."""
    monkeypatch.setattr(source, "_SMALL_BYTES", 100)
    made = make_dataset(tmp_path / "data", n=8, width=64, height=64, workers=1)
    return made.images, made.annotations


@pytest.fixture
def spoiled(data, tmp_path):
    """Two of the images, which are bad now, and are kept beside as they were."""
    names = sorted(path.name for path in data[0].iterdir())[1:4:2]
    for name in names:
        (data[0] / name).rename(tmp_path / name)
        (data[0] / name).write_bytes(b"no image")
    return names


@pytest.fixture
def folder(data, tmp_path):
    write(data, tmp_path / "shards")
    return tmp_path / "shards"


def write(data, folder):
    return write_shards(*data, shards=folder, max_bad=0.5, workers=1)


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
    assert (first.images, first.skipped, first.shards) == (8, (), 1)
    assert first.annotations > 8


def test_a_finished_folder_is_opened_without_reading_the_json(data, folder, opened):
    dataset = open_dataset(*data, drive=None, ssd=folder)
    assert len(dataset) == 8
    assert data[1].name not in opened
    assert opened.count("index.json") == 2


def test_a_json_of_another_time_is_read_once_more(data, folder, opened):
    before = (folder / "index.json").read_bytes()
    os.utime(data[1], ns=(1, 10**18))
    write(data, folder)
    assert opened.count(data[1].name) == 1
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


def test_a_bad_image_that_was_repaired_is_written(data, spoiled, folder, tmp_path):
    first, second = spoiled
    shutil.copy(tmp_path / first, data[0] / first)
    report = write(data, folder)
    assert (report.images, [image.file_name for image in report.skipped]) == (7, [second])
    (data[0] / second).unlink()
    # It is bad in another way.
    assert write(data, folder).images == 7
    shutil.copy(tmp_path / second, data[0] / second)
    assert write(data, folder).images == 8


def test_only_bad_images_are_read_again_and_at_the_same_time(data, spoiled, folder, monkeypatch):
    reading = []
    counts = []
    read = jobs.read_image

    def note(*arguments, **options):
        reading.append(1)
        counts.append(len(reading))
        time.sleep(0.2)
        reading.pop()
        return read(*arguments, **options)

    monkeypatch.setattr(jobs, "read_image", note)
    assert len(write(data, folder).skipped) == 2
    assert sorted(counts) == [1, 2]


OTHER = b'{"fingerprint": "00000000000000000000000000000000", "json": ["a", 1, 2]}'


@pytest.mark.parametrize(
    "content", [b"", b"5", b"{}", b'{"json": 5}', b"\xff", b"[" * 10_000, OTHER]
)
def test_a_damaged_note_and_one_of_other_shards_are_none(data, folder, opened, content):
    good = (folder / SOURCE_NAME).read_bytes()
    (folder / SOURCE_NAME).write_bytes(content)
    assert write(data, folder).images == 8
    assert data[1].name in opened
    assert (folder / SOURCE_NAME).read_bytes() == good


def test_of_a_small_json_nothing_is_kept(data, tmp_path, monkeypatch):
    monkeypatch.undo()
    assert write(data, tmp_path / "other").images == 8
    assert not (tmp_path / "other" / SOURCE_NAME).exists()
