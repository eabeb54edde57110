"""Where things lie: plain folders outside Colab, Google Drive on it, a slowed folder when the mount
fails; and what a fresh machine finds on Drive is used, what is missing is made once.
"""

from __future__ import annotations

import os
import sys
import types
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
from torch.utils.data import _utils

import colab_utils
from colab_utils import drive, files, slow_drive
from colab_utils.__main__ import main
from colab_utils.course import workspace as module
from colab_utils.course.workspace import SCENES, Workspace, ensure_dataset, ensure_shards
from colab_utils.data.checks import check_dataset
from colab_utils.errors import ColabUtilsError
from colab_utils.files import read_file
from colab_utils.shards.copy import copy_shards
from colab_utils.shards.index import read_index
from colab_utils.shards.write import write_shards
from colab_utils.slow_drive import DRIVE_PROFILES, find_profile, get_profile, slow_down
from tests.colab.mountpoint import check_mountpoint
from tests.data.test_archives import write_zip

REAL = "my Drive, my GPU"


class MessageError(Exception):
    """As google.colab raises it when the sign-in is declined."""


class FakeColabDrive:
    """google.colab.drive with its real rules on mount points; ``failure`` stands for the
    sign-in.
    """

    def __init__(self):
        self.failure = None
        self.calls = []
        self.empty = False
        # The system's table of mounts.
        self.table = {}

    def mount(self, mountpoint, **options):
        assert isinstance(mountpoint, str)
        check_mountpoint(mountpoint)
        self.calls.append(options)
        if self.failure:
            raise self.failure
        self.table[mountpoint] = "fuse.drive"
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
    monkeypatch.setattr(drive, "_read_mounts", lambda: google_drive.table)
    return google_drive


def test_outside_colab_two_folders_are_made_under_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 5)
    workspace = Workspace.open()
    # torch's workers need not end their batches.
    assert _utils.MP_STATUS_CHECK_INTERVAL < 1
    assert workspace.drive == tmp_path / "runs" / "drive"
    assert workspace.ssd == tmp_path / "runs" / "ssd"
    assert workspace.drive.is_dir()
    assert workspace.ssd.is_dir()
    assert Workspace.open("runs/drive", ssd="runs/ssd") == workspace


def test_str_says_where_things_are_and_what_is_slow(tmp_path, colab):
    text = str(Workspace.open(tmp_path / "d", ssd=tmp_path / "s"))
    assert f"Drive: {tmp_path / 'd'} (bad: 606 ms per file" in text
    real = str(Workspace.open(ssd=tmp_path / "s", scene=REAL))
    assert "(Google Drive; drive.flush_and_unmount() uploads new files)" in real


@pytest.mark.parametrize("scene", ["bad day", "good day"])
def test_a_scene_asks_for_nothing_and_refuses_a_folder_on_drive(colab, scene):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        workspace = Workspace.open(scene=scene)
    # A second Run all gives the same workspace.
    assert workspace == Workspace.open(scene=scene)
    assert workspace.drive == colab.content / "slow_drive"
    # The speed is emulated even where there is a GPU.
    assert workspace.emulated
    with pytest.raises(
        ColabUtilsError,
        match=rf"DRIVE_FOLDER is .*mine, and SCENE '{scene}' mounts no Drive\. Leave",
    ):
        Workspace.open(colab.content / "drive" / "MyDrive" / "mine", scene=scene)
    assert colab.calls == []


def test_another_scene_in_the_same_session_changes_the_speed(tmp_path):
    folders = {"drive": tmp_path / "d", "ssd": tmp_path / "d" / "ssd"}
    scenes = ["bad day", "good day", REAL, "bad day"]
    assert list(SCENES) == scenes[:3]
    for scene, profile in zip(scenes, ["bad", "typical", None, "bad"], strict=True):
        workspace = Workspace.open(**folders, scene=scene)
        assert workspace.profile == get_profile(profile)
        assert find_profile(workspace.drive / "shards" / "a.tar") == workspace.profile
        # An SSD folder inside the slowed one stays fast.
        assert find_profile(workspace.ssd / "a") is None


def test_my_gpu_is_real_where_there_is_one(workspace, monkeypatch):
    for has_gpu, emulated in ((True, False), (False, True)):
        monkeypatch.setattr("torch.cuda.is_available", lambda has_gpu=has_gpu: has_gpu)
        assert workspace.emulated is emulated


def test_on_colab_google_drive_is_mounted(colab):
    workspace = Workspace.open(scene=REAL)
    assert workspace.drive == colab.content / "drive" / "MyDrive" / "colab_utils"
    assert workspace.ssd == colab.content / "colab_utils"
    assert workspace.drive.is_dir()
    assert workspace.ssd.is_dir()
    assert colab.calls == [{"force_remount": True, "timeout_ms": 120000}]
    # Drive is mounted already, so nobody is asked again.
    assert Workspace.open(scene=REAL) == workspace
    assert len(colab.calls) == 1


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        # Somebody declined the sign-in.
        (MessageError("Error: credential propagation was unsuccessful"), "credential propagation"),
        # The error stays one line.
        (ValueError("several\nlines"), r"\(ValueError: several\)"),
    ],
)
def test_a_failed_mount_is_told_and_nothing_else_is_measured_in_its_place(colab, failure, words):
    colab.failure = failure
    with pytest.raises(ColabUtilsError, match=rf"{words}.*Sign in.*another SCENE"):
        Workspace.open(scene=REAL)
    assert not (colab.content / "slow_drive").exists()
    # The next Run all has another scene.
    assert Workspace.open().drive == colab.content / "slow_drive"
    colab.failure = None
    assert Workspace.open(scene=REAL).drive == colab.content / "drive" / "MyDrive" / "colab_utils"


@pytest.mark.parametrize(
    ("words", "spoil"),
    [
        ("must not be a symlink", lambda colab, place: place.symlink_to(colab.content)),
        # The mount came back, but the folder stayed empty.
        ("no MyDrive appeared", lambda colab, place: setattr(colab, "empty", True)),
    ],
)
def test_a_mount_point_that_cannot_be_used_is_told(colab, words, spoil):
    spoil(colab, colab.content / "drive")
    with pytest.raises(ColabUtilsError, match=words):
        Workspace.open(scene=REAL)


def test_a_plain_folder_with_the_name_of_drives_is_not_drive(colab):
    """Somebody made it before Drive was mounted. What is written there would be lost."""
    mount_point = colab.content / "drive"
    (mount_point / "MyDrive" / "data").mkdir(parents=True)
    with pytest.raises(
        ColabUtilsError, match=rf"not already contain.*`!mv {mount_point} {mount_point}_before`"
    ) as caught:
        Workspace.open(scene=REAL)
    assert "Sign in" not in str(caught.value)
    mount_point.rename(f"{mount_point}_before")
    assert Workspace.open(scene=REAL).drive == mount_point / "MyDrive" / "colab_utils"


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        (
            {"drive": "nowhere/d", "ssd": "s"},
            r"nowhere.*No such file or directory. Name another DRIVE_FOLDER",
        ),
        ({"drive": "file", "ssd": "s"}, "File exists|Not a directory"),
        ({"drive": "d", "ssd": "x/../d"}, "own disk"),
        ({"ssd": "content/drive/MyDrive/ssd"}, "Google Drive is not mounted"),
        ({"scene": "fog"}, "SCENE must be one of bad day, good day, my Drive, my GPU; it is 'fog'"),
    ],
)
def test_mistakes_are_named(tmp_path, colab, monkeypatch, folders, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ColabUtilsError, match=words):
        Workspace.open(**folders)


def test_an_ssd_on_drive_is_refused(colab):
    colab.mount(str(colab.content / "drive"))
    with pytest.raises(ColabUtilsError, match=r"ssd is .*, which is on Drive"):
        Workspace.open(ssd=colab.content / "drive" / "MyDrive" / "ssd")


@pytest.fixture
def workspace(tmp_path):
    return Workspace.open(tmp_path / "drive", ssd=tmp_path / "ssd", scene=REAL)


@pytest.fixture
def on_another_machine(workspace, tmp_path):
    return Workspace.open(workspace.drive, ssd=tmp_path / "another_machine", scene=REAL)


@pytest.fixture
def own(tiny_dataset):
    return {"images": str(tiny_dataset.images), "annotations": str(tiny_dataset.annotations)}


@pytest.mark.parametrize("names", [{"images": "photos"}, {"annotations": "a.json"}])
def test_half_of_a_dataset_is_refused(workspace, names):
    with pytest.raises(ColabUtilsError, match="Only one of IMAGES and ANNOTATIONS"):
        ensure_dataset(workspace, **names)


def test_your_own_data_is_remembered_on_drive(workspace, own, on_another_machine):
    named = ensure_dataset(workspace, **own)
    again = ensure_dataset(on_another_machine)
    assert (again.images, again.name) == (named.images, named.name)
    assert named.images == Path(own["images"])
    assert not (workspace.drive / "dataset").exists()
    assert ensure_dataset(on_another_machine, images="built-in", n=2).name == "built-in"
    # The choice is remembered, too.
    assert ensure_dataset(on_another_machine).name == "built-in"


def test_relative_names_are_remembered_as_they_were_meant(workspace, own, monkeypatch):
    monkeypatch.chdir(Path(own["images"]).parent)
    ensure_dataset(workspace, images="images", annotations="annotations.json")
    monkeypatch.chdir("/")
    assert ensure_dataset(workspace).images == Path(own["images"])


@pytest.mark.parametrize("text", ["", "[1]"])
def test_damaged_settings_are_as_none(workspace, text):
    (workspace.drive / "settings.json").write_text(text)
    assert ensure_dataset(workspace, n=2).name == "built-in"


@pytest.mark.parametrize("url", ["http://me:S3CRET@h/a.zip", "https://h/a.zip?key=S3CRET"])
def test_a_secret_of_a_url_is_not_stored_and_the_url_is_asked_for_again(
    workspace, own, monkeypatch, url
):
    paths = (Path(own["images"]), Path(own["annotations"]))
    unpacked = []
    monkeypatch.setattr(module, "unpack_dataset", lambda *names: unpacked.append(names) or paths)
    named = ensure_dataset(workspace, images=url)
    # The whole URL is unpacked.
    assert unpacked[0][0] == url
    assert "S3CRET" not in (workspace.drive / "settings.json").read_text()
    with pytest.raises(ColabUtilsError, match=r"IMAGES was https?://h/a\.zip, and .*not stored"):
        ensure_dataset(workspace)
    assert ensure_dataset(workspace, images=url) == named
    ensure_dataset(workspace, images="https://h/a.zip")
    assert ensure_dataset(workspace).images == paths[0]


def test_a_wrong_name_is_told_and_not_remembered(workspace, own, colab):
    with pytest.raises(
        ColabUtilsError, match=r"Your own dataset is not in /no/such and .*Check IMAGES.*'built-in'"
    ):
        ensure_dataset(workspace, **own | {"images": "/no/such"})
    with pytest.raises(ColabUtilsError, match="Google Drive is not mounted"):
        ensure_dataset(
            workspace, **own | {"annotations": str(colab.content / "drive" / "MyDrive" / "a.json")}
        )
    assert ensure_dataset(workspace, n=2).name == "built-in"


@pytest.mark.parametrize(
    ("scene", "slowed"),
    [("bad day", True), (REAL, False)],
)
def test_local_photos_are_slowed_only_where_the_scene_says_so(tmp_path, own, scene, slowed):
    workspace = Workspace.open(tmp_path / "d", ssd=tmp_path / "s", scene=scene)
    data = ensure_dataset(workspace, **own)
    assert (find_profile(data.images / "1.jpg") is not None) is slowed
    assert ("slows down" in data.note) is slowed


def test_a_zip_is_unpacked_to_the_ssd_alone(workspace, tiny_dataset, tmp_path, on_another_machine):
    source = write_zip(tmp_path / "export.zip", tiny_dataset)
    data = ensure_dataset(workspace, images=source)
    assert data.name.startswith("export-")
    assert data.images.is_relative_to(workspace.ssd)
    assert data.annotations.is_relative_to(workspace.ssd)
    assert ensure_shards(data).images == read_index(data.shards_on_drive).images == 12
    assert not list(workspace.drive.rglob("*.jpg"))
    # On a fresh machine an upload is lost.
    os.remove(source)
    with pytest.raises(ColabUtilsError, match=r"There is no zip at .*export\.zip"):
        ensure_dataset(on_another_machine)


def test_a_second_run_all_does_nothing_twice(tmp_path, tiny_dataset, monkeypatch):
    source = write_zip(tmp_path / "export.zip", tiny_dataset)

    def run_all():
        workspace = Workspace.open(tmp_path / "d", ssd=tmp_path / "s")
        data = ensure_dataset(workspace, images=source)
        shards = ensure_shards(data)
        copy_shards(data.shards_on_drive, data.shards_on_ssd)
        ensure_shards(ensure_dataset(workspace, n=2, part="val"))
        workspace.publish("03", shards=shards.shards)
        return {
            path: path.stat().st_mtime_ns
            for path in tmp_path.rglob("*")
            if path.suffix in (".tar", ".jpg")
        }

    monkeypatch.setattr(slow_drive, "sleep", lambda seconds: None)
    assert run_all() == run_all()


@pytest.fixture
def waits(tmp_path, monkeypatch):
    """Names of the files that were waited for, here and in forked processes."""
    log = tmp_path / "waits"
    log.touch()

    def wait(profile, path, place, count, started):
        if profile is not None:
            with open(log, "a") as file:
                file.write(f"{Path(path).name}\n")

    monkeypatch.setattr(files, "wait_as_drive", wait)
    return lambda: set(log.read_text().split())


def test_below_a_slowed_folder_check_and_preprocess_wait_for_every_file(
    tiny_dataset, tmp_path, waits
):
    slow_down(tiny_dataset.images.parent, "typical")
    names = {path.name for path in tiny_dataset.images.iterdir()} | {"annotations.json"}
    data = (tiny_dataset.images, tiny_dataset.annotations)
    assert check_dataset(*data).ok
    assert waits() == names
    (tmp_path / "waits").write_text("")
    write_shards(*data, shards=tmp_path / "shards", workers=1)
    assert waits() == names


def test_compare_takes_the_profile_of_a_slowed_folder(tiny_dataset, tmp_path, monkeypatch):
    profiles = []
    result = ColabUtilsError("enough")
    monkeypatch.setattr("colab_utils.compare", Mock(side_effect=result))
    command = (
        f"compare --images {tiny_dataset.images} --annotations {tiny_dataset.annotations} "
        f"--report {tmp_path}/report"
    )
    for folder in (tmp_path, tiny_dataset.images):
        slow_down(folder, "bad")
        assert main(command.split()) == 2
        profiles.append(colab_utils.compare.call_args.kwargs["drive_profile"])
    assert profiles == ["typical", DRIVE_PROFILES["bad"]]


def test_what_a_notebook_finds_missing_is_made_at_full_speed(tmp_path, waits):
    workspace = Workspace.open(tmp_path / "d", ssd=tmp_path / "s")
    data = ensure_dataset(workspace, n=2)
    ensure_shards(data)
    assert waits() == set()
    read_file(data.shards_on_drive / "shard-000000.tar")
    assert waits() == {"shard-000000.tar"}


def test_shards_that_another_notebook_left_half_way_are_completed(workspace, own, monkeypatch):
    """With its settings, whatever they were."""
    folder = ensure_dataset(workspace, **own).shards_on_drive
    recipe = {"shard_mb": 0.02, "min_size": 32, "max_size": 64}
    with monkeypatch.context() as patch:
        patch.setattr("colab_utils.shards.write.write_index", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write_shards(**own, shards=folder, workers=1, **recipe)
    left = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.tar")}
    assert len(left) > 1
    ensure_shards(ensure_dataset(workspace, **own))
    index = read_index(folder)
    assert recipe.items() <= index.recipe.items()
    assert index.images == 12
    assert {path.name: path.stat().st_mtime_ns for path in folder.glob("*.tar")} == left


def test_validation_data_are_other_pictures_that_are_named_apart(workspace, own):
    train = ensure_dataset(workspace, n=2)
    val = ensure_dataset(workspace, n=2, part="val")
    assert (train.name, val.name) == ("built-in", "built-in-val")
    fingerprints = set()
    for data in (train, val):
        ensure_shards(data)
        fingerprints.add(read_index(data.shards_on_drive).fingerprint)
    assert len(fingerprints) == 2
    named = ensure_dataset(workspace, **own, part="val")
    assert ensure_dataset(workspace, part="val").name == named.name
    # The training data stay what they are.
    assert ensure_dataset(workspace).name == "built-in"
