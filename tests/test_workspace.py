"""Where things lie: plain folders outside Colab, Google Drive on it, a slowed folder when the mount fails; and what a
fresh machine finds on Drive is used, what is missing is made once.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import types
import warnings
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from colab_utils import drive
from colab_utils import workspace as module
from colab_utils.drive import DRIVE_PROFILES
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading import ShardDataset
from colab_utils.shards.format import read_index
from colab_utils.shards.write import write_shards
from colab_utils.workspace import (
    Workspace,
    ensure_dataset,
    ensure_shards,
    ensure_validation_shards,
    publish_results,
)


class MessageError(Exception):
    """As google.colab raises it when the sign-in is declined."""


class FakeColabDrive:
    """google.colab.drive with its real rules on mount points; ``failure`` stands for the sign-in."""

    def __init__(self):
        self.failure, self.calls, self.empty = None, [], False

    def mount(self, mountpoint, force_remount=False, timeout_ms=120000, readonly=False):
        assert isinstance(mountpoint, str)
        assert isinstance(timeout_ms, int)
        if " " in mountpoint:
            raise ValueError("Mountpoint must not contain a space.")
        if os.path.isdir(os.path.join(mountpoint, "MyDrive")) and not force_remount:
            return
        if os.path.islink(mountpoint):
            raise ValueError("Mountpoint must not be a symlink")
        if os.path.isdir(mountpoint) and os.listdir(mountpoint):
            raise ValueError("Mountpoint must not already contain files")
        if not os.path.isdir(mountpoint) and os.path.exists(mountpoint):
            raise ValueError("Mountpoint must either be a directory or not exist")
        if not os.path.exists(os.path.dirname(mountpoint)):
            raise ValueError("Mountpoint must be in a directory that exists")
        self.calls.append({"force_remount": force_remount, "timeout_ms": timeout_ms})
        if self.failure:
            raise self.failure
        if not self.empty:
            os.makedirs(os.path.join(mountpoint, "MyDrive"))


@pytest.fixture
def colab(tmp_path, monkeypatch):
    """Colab with its /content in a temporary folder."""
    content = tmp_path / "content"
    content.mkdir()
    for place in (module, drive):
        monkeypatch.setattr(place, "COLAB_ROOT", content)
    google_drive = FakeColabDrive()
    package = types.ModuleType("google.colab")
    package.drive = google_drive
    monkeypatch.setitem(sys.modules, "google", types.ModuleType("google"))
    monkeypatch.setitem(sys.modules, "google.colab", package)
    google_drive.content = content
    return google_drive


def test_outside_colab_two_folders_are_made_under_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    workspace = Workspace.open()
    assert workspace.drive == tmp_path / "runs" / "drive"
    assert workspace.ssd == tmp_path / "runs" / "ssd"
    assert workspace.drive.is_dir()
    assert workspace.ssd.is_dir()
    assert workspace.profile is DRIVE_PROFILES["typical"]
    assert Workspace.open() == workspace


def test_importing_makes_no_folder(tmp_path, monkeypatch):
    root = str(Path(module.__file__).parents[1])
    command = [sys.executable, "-c", "import colab_utils.workspace"]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, check=True)
    assert list(tmp_path.iterdir()) == []


def test_properties_name_what_lies_where(tmp_path):
    workspace = Workspace.open(tmp_path / "d", ssd=tmp_path / "s")
    assert workspace.shards_on_drive == tmp_path / "d" / "shards"
    assert workspace.runs == tmp_path / "d" / "runs"
    assert workspace.shards_on_ssd == tmp_path / "s" / "shards"
    with pytest.raises(FrozenInstanceError):
        workspace.drive = tmp_path


def test_relative_paths_stay_valid_after_a_change_of_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    workspace = Workspace.open("d", ssd="s")
    monkeypatch.chdir("/")
    assert workspace.drive.is_dir()
    assert workspace.ssd.is_dir()


def test_str_says_where_things_are_and_what_is_slow(tmp_path, colab):
    text = str(Workspace.open(tmp_path / "d", ssd=tmp_path / "s", profile="bad"))
    assert f"Drive: {tmp_path / 'd'} (bad: 606 ms per file" in text
    assert f"SSD: {tmp_path / 's'}" in text
    assert "full speed" in str(Workspace.open(tmp_path / "d", ssd=tmp_path / "s", profile="none"))
    assert "(Google Drive)" in str(Workspace.open(ssd=tmp_path / "s"))


def test_on_colab_google_drive_is_mounted(colab):
    workspace = Workspace.open()
    assert workspace.drive == colab.content / "drive" / "MyDrive" / "colab_utils"
    assert workspace.ssd == colab.content / "colab_utils"
    assert workspace.drive.is_dir()
    assert workspace.ssd.is_dir()
    assert workspace.profile is None
    assert colab.calls == [{"force_remount": True, "timeout_ms": 120000}]
    assert Workspace.open() == workspace  # mounted already: nobody is asked again
    assert len(colab.calls) == 1


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (
            MessageError("Error: credential propagation was unsuccessful"),
            "credential propagation",
        ),  # declined
        (ValueError("mount failed"), "mount failed"),  # also what a timeout raises
        (NotImplementedError(), "NotImplementedError"),  # Enterprise
        (
            AttributeError("'NoneType' object has no attribute 'kernel'"),
            "AttributeError",
        ),  # a terminal on Colab
        (ValueError("several\nlines"), "several lines"),  # the note stays one line
    ],
)
def test_a_failed_mount_is_replaced_and_told(colab, failure, words):
    colab.failure = failure
    with pytest.warns(ColabUtilsWarning, match="Google Drive is not mounted") as caught:
        workspace = Workspace.open(profile="fast")
    assert Path(caught[0].filename) == Path(__file__)
    assert workspace.drive == colab.content / "slow_drive"
    assert workspace.drive.is_dir()
    assert workspace.profile is DRIVE_PROFILES["fast"]
    assert words in workspace.note
    assert "\n" not in workspace.note
    assert workspace.note in str(workspace)


@pytest.mark.parametrize("cause", ["files", "symlink", "nothing"])
def test_a_mount_point_that_cannot_be_used_is_told(colab, tmp_path, cause):
    mount_point = colab.content / "drive"
    if cause == "files":  # somebody wrote there before mounting
        (mount_point / "photos").mkdir(parents=True)
    elif cause == "symlink":
        mount_point.symlink_to(tmp_path)
    else:  # mount came back, but the folder stayed empty
        colab.empty = True
    with pytest.warns(ColabUtilsWarning, match=r"must not already contain|must not be a symlink|no MyDrive appeared"):
        assert Workspace.open().drive == colab.content / "slow_drive"


def test_without_google_drive_nobody_is_asked_and_nothing_warns(colab):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        workspace = Workspace.open(use_google_drive=False)
    assert colab.calls == []
    assert workspace.drive == colab.content / "slow_drive"
    assert workspace.profile is DRIVE_PROFILES["typical"]
    Workspace.open()  # a Drive that is mounted already is left alone as well
    assert Workspace.open(use_google_drive=False) == workspace


def test_a_folder_named_in_google_drive_mounts_it(colab):
    workspace = Workspace.open(colab.content / "drive" / "MyDrive" / "mine")
    assert workspace.drive == colab.content / "drive" / "MyDrive" / "mine"
    assert workspace.profile is None
    assert len(colab.calls) == 1


def test_a_folder_named_in_google_drive_is_never_replaced(colab):
    colab.failure = ValueError("mount failed")
    wanted = colab.content / "drive" / "MyDrive" / "mine"
    with pytest.raises(ColabUtilsError, match=r"Drive not mounted \(ValueError: mount failed\).*sign in"):
        Workspace.open(wanted)
    assert not (colab.content / "drive").exists()
    assert not (colab.content / "slow_drive").exists()


def test_a_folder_elsewhere_on_colab_is_slowed_and_nobody_is_asked(colab, tmp_path):
    workspace = Workspace.open(tmp_path / "bucket", profile="bad")
    assert workspace.drive == tmp_path / "bucket"
    assert workspace.profile is DRIVE_PROFILES["bad"]
    assert colab.calls == []


def test_a_mount_at_another_path_is_drive(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "is_on_drive", lambda path: "gdrive" in str(path))
    monkeypatch.setattr(module, "is_colab", lambda: True)
    (tmp_path / "gdrive" / "MyDrive").mkdir(parents=True)
    with pytest.raises(ColabUtilsError, match=r"own disk.*on Drive"):
        Workspace.open(tmp_path / "d", ssd=tmp_path / "gdrive" / "MyDrive" / "ssd")
    workspace = Workspace.open(tmp_path / "gdrive" / "MyDrive" / "mine", ssd=tmp_path / "s")
    assert workspace.drive.is_dir()
    assert workspace.profile is None


def test_mistakes_are_named(tmp_path, colab):
    (tmp_path / "file").touch()
    slow, ssd = tmp_path / "d", tmp_path / "s"
    with pytest.raises(ColabUtilsError, match=r"nowhere.*No such file or directory.*name another one"):
        Workspace.open(tmp_path / "nowhere" / "d", ssd=ssd)
    with pytest.raises(ColabUtilsError, match=r"File exists|Not a directory"):
        Workspace.open(tmp_path / "file", ssd=ssd)
    with pytest.raises(ColabUtilsError, match=r"File exists|Not a directory"):
        Workspace.open(slow, ssd=tmp_path / "file" / "ssd")
    with pytest.raises(ColabUtilsError, match="'slowly'"):
        Workspace.open(slow, ssd=ssd, profile="slowly")
    with pytest.raises(ColabUtilsError, match="own disk"):
        Workspace.open(slow, ssd=tmp_path / "x" / ".." / "d")
    with pytest.raises(ColabUtilsError, match=r"own disk.*on Drive"):
        Workspace.open(ssd=colab.content / "drive" / "MyDrive" / "ssd")


def test_a_folder_that_may_not_be_written_is_named(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ColabUtilsError, match="Permission denied"):
        Workspace.open(tmp_path / "d", ssd=tmp_path / "s")


@pytest.fixture
def workspace(tmp_path):
    return Workspace.open(tmp_path / "drive", ssd=tmp_path / "ssd", profile="none")


def test_the_built_in_dataset_is_made_once_and_kept(workspace):
    made = ensure_dataset(workspace, n=2)
    stamps = {path: path.stat().st_mtime_ns for path in made.images.parent.rglob("*")}
    found = ensure_dataset(workspace, n=7)
    assert ("made now" in str(made), "found" in str(found)) == (True, True)
    assert (found.images, found.annotations) == (made.images, made.annotations)
    assert {path: path.stat().st_mtime_ns for path in made.images.parent.rglob("*")} == stamps


def test_the_two_parts_are_other_pictures(workspace):
    train, val = ensure_dataset(workspace, n=2), ensure_dataset(workspace, n=2, part="val")
    pixels = [{path.read_bytes() for path in part.images.iterdir()} for part in (train, val)]
    assert not pixels[0] & pixels[1]


def test_your_own_dataset_is_used_where_it_lies(workspace, tiny_dataset):
    data = ensure_dataset(workspace, images=str(tiny_dataset.images), annotations=str(tiny_dataset.annotations))
    assert (data.images, data.annotations) == (tiny_dataset.images, tiny_dataset.annotations)
    assert not (workspace.drive / "dataset").exists()


@pytest.mark.parametrize("names", [{"images": "photos"}, {"annotations": "a.json"}])
def test_half_of_a_dataset_is_refused(workspace, names):
    with pytest.raises(ColabUtilsError, match="found only one of them"):
        ensure_dataset(workspace, **names)


def test_shards_are_made_then_found(workspace, tiny_dataset):
    names = {"images": str(tiny_dataset.images), "annotations": str(tiny_dataset.annotations)}
    made = ensure_shards(workspace, **names)
    assert (made.folder, made.index.images, made.note) == (workspace.shards_on_drive, 12, "Made now.")
    assert ensure_shards(workspace, **names).note == "Found on Drive."
    assert ensure_shards(workspace).note == "Found on Drive."  # without names: those that are there
    assert "12 images" in str(made)


def test_shards_of_another_dataset_are_refused_and_kept(workspace, tiny_dataset):
    data = ensure_dataset(workspace, n=2)
    write_shards(data.images, data.annotations, shards=workspace.shards_on_drive, workers=1)
    before = {path.name: path.read_bytes() for path in workspace.shards_on_drive.iterdir()}
    with pytest.raises(ColabUtilsError, match="found shards of another dataset"):
        ensure_shards(workspace, images=str(tiny_dataset.images), annotations=str(tiny_dataset.annotations))
    assert {path.name: path.read_bytes() for path in workspace.shards_on_drive.iterdir()} == before


def test_validation_takes_what_fits_to_the_training_shards(workspace, tiny_dataset, tmp_path):
    train = ensure_shards(workspace, n=2)
    builtin = ensure_validation_shards(workspace, train, n=2)
    assert builtin.folder == workspace.ssd / "shards_val"
    assert read_index(builtin.folder).fingerprint != read_index(train.folder).fingerprint
    assert read_index(builtin.folder).fingerprint == read_index(workspace.drive / "shards_val").fingerprint
    named = {"images": str(tiny_dataset.images), "annotations": str(tiny_dataset.annotations)}
    with pytest.raises(ColabUtilsError, match="another dataset"):  # named data never mixes with what is there
        ensure_validation_shards(workspace, train, **named)


def test_your_own_data_without_validation_is_evaluated_on_itself(workspace, tiny_dataset, tmp_path):
    content = json.loads(tiny_dataset.annotations.read_text())
    for category in content["categories"]:
        category["name"] = f"my {category['name']}"
    (tmp_path / "mine.json").write_text(json.dumps(content))
    names = {"images": str(tiny_dataset.images), "annotations": str(tmp_path / "mine.json")}
    write_shards(*names.values(), shards=workspace.shards_on_drive, shard_mb=tiny_dataset.bytes / 4e6, workers=1)
    train = ensure_shards(workspace, **names)
    seen = ensure_validation_shards(workspace, train)
    assert (len(train.index.shards) > 1, len(seen.index.shards), ensure_validation_shards(workspace, train)) == (
        True,
        1,
        seen,
    )
    assert "the model has seen these images" in str(seen)
    assert set(ShardDataset(seen.folder).image_ids) < set(ShardDataset(train.folder).image_ids)
    assert not (workspace.drive / "dataset_val").exists()


def test_published_results_replace_those_before(workspace):
    publish_results(workspace, "03", shards=1)
    path = publish_results(workspace, "03", shards=2)
    assert json.loads(path.read_text()) == {"shards": 2}
    assert [file.name for file in path.parent.iterdir()] == ["03.json"]
