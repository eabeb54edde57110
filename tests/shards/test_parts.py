"""Shards that are written in parts: in any order, at the same time, twice, killed and again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from colab_utils import finish_shards, write_shards
from colab_utils.__main__ import main
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.dataset import ShardDataset
from colab_utils.shards.index import read_index
from colab_utils.slow_drive import slow_down
from tests.file_server import FileServer
from tests.snapshots import snapshot

SHARD_MB = 0.025


def write(dataset, folder, **options):
    settings = {"shard_mb": SHARD_MB, "workers": 1, **options}
    return write_shards(*dataset, shards=folder, **settings)


def write_alone(dataset, folder, **options):
    write(dataset, folder, **options)
    return snapshot(folder)


def write_parts(dataset, folder, *numbers, parts, **options):
    return [write(dataset, folder, part=(number, parts), **options) for number in numbers]


def name_options(dataset, folder):
    return f"--images {dataset[0]} --annotations {dataset[1]} --shards {folder}".split()


def start_part(dataset, folder, part):
    words = f"--shard-mb 0.05 --storage keep --workers 1 --streams 1 --part {part}".split()
    words += name_options(dataset, folder)
    command = [sys.executable, "-m", "colab_utils", "preprocess", *words]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_of_four_parts_at_once_one_is_killed_and_done_by_two(sixty, folder, tmp_path, capsys):
    data = (sixty.images, sixty.annotations)
    expected = write_alone(data, tmp_path / "alone", shard_mb=0.05, storage="keep")
    slow_down(sixty.images, "typical")
    parts = [start_part(data, folder, f"{number}/4") for number in range(1, 5)]
    killed = parts.pop(1)
    while not (folder / "shard-000001.tar").exists():
        assert killed.poll() is None
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    for process in parts:
        errors = process.communicate()[1]
        assert process.returncode == 0, errors
    finish = ["preprocess", *name_options(data, folder), "--finish"]
    assert main(finish) == 2
    missing = [number for number in range(15) if not (folder / f"shard-{number:06d}.tar").exists()]
    assert missing
    assert all(number % 4 == 1 for number in missing)
    error = capsys.readouterr().err
    assert f"{len(missing)} of 15 shards are missing in {folder}" in error
    assert f": number {missing[0]}" in error
    assert not (folder / "index.json").exists()
    for process in [start_part(data, folder, "2/4") for _ in range(2)]:
        errors = process.communicate()[1]
        assert process.returncode == 0, errors
    assert main(finish) == 0
    assert snapshot(folder) == expected


# More parts than shards: some parts have none.
@pytest.mark.parametrize("parts", [3, 8])
def test_parts_in_any_order_and_twice_are_the_shards_of_one_machine(
    dataset, folder, tmp_path, parts
):
    expected = write_alone(dataset, tmp_path / "alone")
    numbers = [*range(parts, 0, -1), 1, parts]
    reports = write_parts(dataset, folder, *numbers, parts=parts)
    assert not list(folder.glob("*index.json"))
    assert sum(report.images for report in reports[:parts]) == 12
    report = finish_shards(*dataset, shards=folder)
    assert report.images == 12
    assert report.shards == len(read_index(folder).shards)
    assert snapshot(folder) == expected


def test_what_one_machine_began_parts_go_on_with_and_the_other_way_round(dataset, tmp_path):
    expected = write_alone(dataset, tmp_path / "alone")
    begun = shutil.copytree(tmp_path / "alone", tmp_path / "begun")
    (begun / "index.json").unlink()
    (begun / "shard-000001.tar").unlink()
    times = {path: path.stat().st_mtime_ns for path in begun.glob("shard-*")}
    write_parts(dataset, begun, 1, 2, parts=2)
    finish_shards(*dataset, shards=begun)
    assert snapshot(begun) == expected
    later = {path: path.stat().st_mtime_ns for path in times}
    changed = [path.name for path in times if times[path] != later[path]]
    assert sorted(changed) == ["shard-000001.arrays"]
    write_parts(dataset, tmp_path / "parts", 2, parts=3)
    assert write_alone(dataset, tmp_path / "parts") == expected


def test_a_shard_without_a_usable_image_is_not_missing(dataset, folder, tmp_path):
    every = write_alone(dataset, tmp_path / "all")
    shards = ShardDataset(tmp_path / "all")
    numbers = np.flatnonzero(shards.shard_of == 1)
    bad = [shards.record(i)["file_name"] for i in numbers]
    whole = snapshot(dataset[0])
    for name in bad:
        (dataset[0] / name).write_bytes(b"")
    expected = write_alone(dataset, tmp_path / "alone", max_bad=1.0)
    assert "shard-000001.tar" not in expected
    write_parts(dataset, folder, 1, 2, 2, 1, parts=2, max_bad=1.0)
    assert "shard-000001.tar" not in snapshot(folder)
    with pytest.raises(ColabUtilsError, match=f"Bad images so far: {len(bad)},"):
        finish_shards(*dataset, shards=folder)
    report = finish_shards(*dataset, shards=folder, max_bad=1.0)
    assert [image.file_name for image in report.skipped] == bad
    assert snapshot(folder) == expected
    # Repaired, they are taken in.
    for name in bad:
        (dataset[0] / name).write_bytes(whole[name])
    write_parts(dataset, folder, 1, 2, parts=2)
    assert finish_shards(*dataset, shards=folder).images == 12
    assert snapshot(folder) == every


def test_parts_of_other_settings_and_what_was_lost_or_cut_are_named(dataset, folder, tmp_path):
    """Neither part saw a shard of the other one when it began."""
    expected = write_alone(dataset, tmp_path / "alone")
    write_parts(dataset, folder, 1, parts=2)
    write_parts(dataset, tmp_path / "other", 2, parts=2, min_size=40, max_size=60)
    shutil.copytree(tmp_path / "other", folder, dirs_exist_ok=True)
    (folder / "shard-000002.tar").unlink()
    os.truncate(folder / "shard-000004.arrays", 2000)
    with pytest.raises(
        ColabUtilsError, match=r"5 of 6 shards .* settings: number 1, 2, 3, 4, 5\. "
    ):
        finish_shards(*dataset, shards=folder)
    write_parts(dataset, folder, 1, 2, parts=2)
    finish_shards(*dataset, shards=folder)
    assert snapshot(folder) == expected


def test_no_password_and_no_signature_is_left_in_the_folder(dataset, folder, tmp_path):
    """They stand in the addresses of the images and of the JSON."""
    (dataset[0] / sorted(os.listdir(dataset[0]))[0]).write_bytes(b"no image")
    with FileServer(tmp_path, tmp_path / "none") as server:
        url = server.url.replace("//", "//me:s3cret@")
        images = f"{url}/images"
        annotations = f"{url}/annotations.json?signature=s1gned"
        for number in (1, 2):
            write((images, annotations), folder, part=(number, 2), max_bad=1)
        report = finish_shards(images, annotations, shards=folder, max_bad=1)
    assert (report.images, len(report.skipped)) == (11, 1)
    contents = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"s3cret" not in contents
    assert b"s1gned" not in contents


def test_finish_has_nothing_without_parts(dataset, folder):
    with pytest.raises(ColabUtilsError, match=r"There are no shards in .* Write their parts"):
        finish_shards(*dataset, shards=folder)
    assert not folder.exists()
