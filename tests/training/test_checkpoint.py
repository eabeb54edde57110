"""Checkpoints: whole or not at all, the newest two; torn ones are skipped, others left alone."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import threading
import time
import warnings
from pathlib import Path
from pickle import UnpicklingError

import pytest
import torch

from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.files import Store
from colab_utils.training import checkpoint
from colab_utils.training.checkpoint import CheckpointFolder
from tests.bad_reads import BadReads, alter, cut
from tests.drive_mount import mount_or_skip
from tests.training.small_shards import list_names


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """A folder that does not exist yet."""
    return CheckpointFolder(tmp_path / "deep" / "run")


def save_steps(folder: CheckpointFolder, *steps: int) -> Path:
    """Save a checkpoint after each of these steps, with the step in place of weights."""
    for step in steps:
        state = {"model": {"weight": torch.full((50, 50), step)}, "losses": [1.5, step]}
        path = folder.save({**state, "nested": {"a": (1, "b")}}, step=step)
    return path


def name_steps(*steps: int) -> list[str]:
    return [f"checkpoint-{step:08d}.pt" for step in steps]


def test_the_newest_two_stay_and_nothing_else_goes(folder):
    save_steps(folder, 10, 20)
    (folder.run / "checkpoint-best.pt").write_bytes(b"the user's")
    resumed = CheckpointFolder(folder.run)
    resumed.prepare(anew=False)
    save_steps(resumed, 30, 40)
    assert list_names(folder.run) == [*name_steps(30, 40), "checkpoint-best.pt"]


@pytest.mark.parametrize(
    "tear",
    [
        # A full disk cut the file short.
        lambda data: data[: len(data) // 2],
        # The file has the right size, and a hole in the middle.
        lambda data: data[:4000] + bytes(2000) + data[6000:],
        # The file holds something else altogether.
        lambda data: b"not a zip" * 100,
    ],
)
def test_a_torn_newest_is_skipped_and_named(folder, tear):
    """Reading changes no file: another process may be training in the folder."""
    torn = save_steps(folder, 10, 20)
    data = tear(torn.read_bytes())
    torn.write_bytes(data)
    with pytest.warns(ColabUtilsWarning, match=r"00020.pt is torn .* An older checkpoint is"):
        state = folder.read()
    assert (state["losses"], state["path"]) == ([1.5, 10], str(torn.with_name(*name_steps(10))))
    assert list_names(folder.run) == name_steps(10, 20)
    assert torn.read_bytes() == data
    # The run goes on. The torn one is not one of the two that are kept.
    save_steps(folder, 15)
    assert list_names(folder.run) == name_steps(10, 15, 20)


def test_a_torn_one_that_is_written_anew_is_sound(folder):
    path = save_steps(folder, 10, 20)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(ColabUtilsWarning, match="torn"):
        assert folder.read()["losses"] == [1.5, 10]
    save_steps(folder, 20, 30, 40)
    assert list_names(folder.run) == name_steps(30, 40)


def test_a_run_whose_checkpoints_are_all_torn_does_not_begin_anew_unasked(folder):
    folder.run.mkdir(parents=True)
    for name in name_steps(1, 2):
        (folder.run / name).write_bytes(b"torn")
    with (
        pytest.warns(ColabUtilsWarning, match="is torn"),
        pytest.raises(ColabUtilsError, match=r"is torn .*version wrote it.*resume='never'"),
    ):
        folder.read()
    folder.prepare(anew=True)
    assert list_names(folder.run / "previous-1") == name_steps(1, 2)
    assert folder.read() is None


@pytest.mark.parametrize(
    ("change", "times"),
    [(cut, 4), (alter, 2), (alter, 1000)],
)
def test_a_spell_of_bad_reads_condemns_no_checkpoint(folder, monkeypatch, change, times):
    """If no bytes can be relied on, the older checkpoint is not taken in its place."""
    save_steps(folder, 10, 20)
    reads = BadReads(monkeypatch, ".pt", change, times)
    if times == 1000:
        with pytest.raises(DriveLostError, match=r"00020\.pt .*Run the same again"):
            folder.read()
    else:
        assert folder.read()["losses"] == [1.5, 20]
        assert reads.times == 0
    assert list_names(folder.run) == name_steps(10, 20)


def test_full_disk_leaves_the_last_one_whole(folder):
    save_steps(folder, 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel refuses to write any further.
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(
            ColabUtilsError,
            match=f"Writing into {folder.waiting} failed",
        ):
            save_steps(folder, 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list_names(folder.run) == name_steps(10)
    assert folder.read()["step"] == 10


@pytest.fixture
def mount(tmp_path):
    (tmp_path / "backing").mkdir()
    with mount_or_skip(tmp_path / "backing", tmp_path / "drive") as mounted:
        yield mounted


@pytest.mark.parametrize(
    "fault", [{"lost": True}, {"lost_bytes": 500}], ids=["lost", "not stored as written"]
)
def test_what_drive_does_not_take_waits_here_and_is_sent_later(
    mount, tmp_path: Path, fault, monkeypatch
):
    monkeypatch.setattr("colab_utils.drive.RETRY_WAITS_S", (0.01,))
    folder = CheckpointFolder(mount.folder / "run")
    save_steps(folder, 10)
    mount.fail(**fault)
    for step in (20, 30, 40):
        with pytest.warns(
            ColabUtilsWarning, match=rf"checkpoint-000000{step}.pt waits in .*Another try is made"
        ):
            path = save_steps(folder, step)
        assert path.parent == folder.waiting
        assert folder.paths["newest"] == path
    assert list_names(folder.waiting) == name_steps(30, 40)
    if "lost" in fault:
        # An older checkpoint must not be taken for the newest.
        with pytest.raises(DriveLostError, match="remount"):
            folder.read()
    mount.fail()
    assert list_names(tmp_path / "backing" / "run") == name_steps(10)
    assert folder.read()["losses"] == [1.5, 40]
    folder.send_waiting()
    assert list_names(folder.run) == name_steps(10, 40)
    assert list_names(folder.waiting) == []


def test_while_a_write_hangs_checkpoints_wait_here(folder, monkeypatch):
    """Also where the write ends after all, when newer ones wait."""
    answers = threading.Event()
    write = Store.write

    def hang(store, *given):
        if store.place == folder.run:
            answers.wait(20)
        write(store, *given)

    monkeypatch.setattr(Store, "write", hang)
    monkeypatch.setattr(checkpoint, "_HUNG_S", 0.1)
    folder.submit({}, step=10)
    _, hung = folder._job
    time.sleep(0.1)
    with pytest.warns(ColabUtilsWarning, match=r"has not answered .*00010\.pt waits in"):
        folder.is_due(10)
    with pytest.warns(ColabUtilsWarning, match=r"00020\.pt waits in"):
        save_steps(folder, 20)
    folder.finish()
    with pytest.raises(DriveLostError, match=rf"00020\.pt .*lies only in {folder.waiting} of"):
        folder.send_waiting()
    answers.set()
    hung.result(20)
    assert list_names(folder.waiting) == name_steps(10, 20)
    assert folder.paths["newest"].parent == folder.waiting


def test_what_waits_belongs_to_the_place_of_its_run(folder):
    folder.prepare(anew=False)
    save_steps(CheckpointFolder(folder.waiting), 30)
    copied = shutil.copytree(folder.run, folder.run.with_name("copy"))
    assert CheckpointFolder(copied).read() is None
    shutil.rmtree(folder.run)
    assert folder.read()["step"] == 30
    # The next checkpoint that the run takes replaces it.
    assert save_steps(folder, 5) == folder.run / "checkpoint-00000005.pt"
    assert list_names(folder.waiting) == []


def test_the_folder_in_which_checkpoints_wait_is_the_users_own(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    waiting = CheckpointFolder("run").waiting
    assert str(os.getuid()) in waiting.parent.name
    assert waiting.parent.stat().st_mode & 0o777 == 0o700


def test_a_damaged_file_that_waits_is_not_sent(folder):
    os.truncate(save_steps(CheckpointFolder(folder.waiting), 30), 500)
    with pytest.raises(ColabUtilsError, match=r"00030\.pt is torn .* Move this file away"):
        folder.send_waiting()
    assert not folder.run.exists()


@pytest.mark.parametrize(
    ("number", "error"),
    [
        # The disk is broken.
        (errno.EIO, ColabUtilsError),
        # Drive is lost.
        (errno.ENOTCONN, DriveLostError),
    ],
)
def test_a_disk_that_does_not_answer_is_no_torn_file(folder, monkeypatch, number, error):
    def fail(path, *args, **options):
        raise OSError(number, os.strerror(number))

    save_steps(folder, 10)
    monkeypatch.setattr("colab_utils.files.read_whole", fail)
    with pytest.raises(error, match=r"cannot be read"):
        folder.read()
    assert list_names(folder.run) == name_steps(10)


@pytest.mark.parametrize("put", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_a_checkpoint_that_is_no_file_is_told(tmp_path: Path, put):
    put(tmp_path / "checkpoint-00000005.pt")
    with pytest.raises(
        ColabUtilsError,
        match=r"Checkpoints cannot be read in .*05\.pt|.*05\.pt is a device or a pipe",
    ):
        CheckpointFolder(tmp_path).read()


def test_loading_runs_no_code(tmp_path: Path):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "was-here"),)

    torch.save({"step": 5, "payload": Payload()}, tmp_path / "checkpoint-00000005.pt")
    torn = pytest.warns(ColabUtilsWarning, match="another program or version wrote it")
    with torn, pytest.raises(ColabUtilsError):
        CheckpointFolder(tmp_path).read()
    # This file has the checksum of a real checkpoint.
    CheckpointFolder(tmp_path).save({"payload": Payload()}, step=5)
    with pytest.raises(UnpicklingError, match="Weights only load failed"):
        CheckpointFolder(tmp_path).read()
    assert list_names(tmp_path) == name_steps(5)


def test_anew_moves_and_never_deletes(folder):
    """What waits on this machine moves, too."""
    for number in (1, 2):
        save_steps(folder, 10, 20)
        save_steps(CheckpointFolder(folder.waiting), 30)
        folder.prepare(anew=True)
        assert list_names(folder.run / f"previous-{number}") == name_steps(10, 20)
        assert list_names(folder.waiting / f"previous-{number}") == name_steps(30)
    assert folder.read() is None


def test_an_older_best_that_drive_does_not_give_up_harms_nothing(folder, monkeypatch):
    real = Path.unlink

    def refuse(path, **options):
        if path.name == "best-00000005.pt":
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        real(path, **options)

    folder.save({}, step=5, which="best")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        folder.save({}, step=9, which="best")
    assert list_names(folder.run) == ["best-00000005.pt", "best-00000009.pt"]
    assert folder.read("best")["step"] == 9
    # A run that was killed goes on from an earlier step.
    folder.save({}, step=7, which="best")
    assert list_names(folder.run) == ["best-00000007.pt"]


def test_any_bytes_of_a_checkpoint_are_read_as_they_were_or_told(folder):
    path = folder.save({"weight": torch.arange(6.0)}, step=10)
    whole = path.read_bytes()
    draw = random.Random(0)
    for place in range(0, len(whole), len(whole) // 200):
        content = bytearray(whole)
        for offset in range(draw.randint(1, 4)):
            content[(place + offset) % len(content)] = draw.randrange(256)
        path.write_bytes(content)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                state = folder.read()
            except (ColabUtilsError, ColabUtilsWarning):
                continue
        assert state["step"] == 10
        assert torch.equal(state["weight"], torch.arange(6.0))
