"""Checkpoints: whole or not at all, the newest two; torn ones are skipped, others left alone."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import warnings
from pathlib import Path
from pickle import UnpicklingError

import pytest
import torch

from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.training.checkpoint import CheckpointFolder
from tests.bad_reads import BadReads, alter, cut
from tests.drive_mount import mount_or_skip


def make_state(value: float = 1.0) -> dict:
    return {
        "model": {"weight": torch.full((50, 50), value)},
        "losses": [1.5, value],
        "nested": {"a": (1, "b")},
    }


def list_names(folder: Path) -> list[str]:
    """Without the file that shows that a run has begun."""
    return sorted(path.name for path in folder.iterdir() if path.name != "begun.txt")


def test_what_was_saved_is_loaded(tmp_path: Path):
    folder = CheckpointFolder(tmp_path / "deep" / "run")
    assert folder.read() is None
    assert folder.newest is None
    path = folder.save(make_state(2.0), step=7)
    state = CheckpointFolder(folder.run).read()
    assert path == folder.newest == folder.run / "checkpoint-00000007.pt"
    assert torch.equal(state["model"]["weight"], torch.full((50, 50), 2.0))
    assert (state["losses"], state["nested"], state["step"]) == ([1.5, 2.0], {"a": (1, "b")}, 7)


def test_the_newest_two_stay_and_nothing_else_goes(tmp_path: Path):
    (tmp_path / "checkpoint-best.pt").write_bytes(b"the user's")
    for step in (10, 20):
        CheckpointFolder(tmp_path).save(make_state(step), step=step)
    resumed = CheckpointFolder(tmp_path)
    resumed.prepare(anew=False)
    for step in (30, 40):
        resumed.save(make_state(step), step=step)
    assert list_names(tmp_path) == [
        "checkpoint-00000030.pt",
        "checkpoint-00000040.pt",
        "checkpoint-best.pt",
    ]


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
def test_a_torn_newest_is_skipped_and_named(tmp_path: Path, tear):
    """Reading changes no file: another process may be training in the folder."""
    folder = CheckpointFolder(tmp_path)
    folder.save(make_state(10), step=10)
    torn = folder.save(make_state(20), step=20)
    data = tear(torn.read_bytes())
    torn.write_bytes(data)
    with pytest.warns(ColabUtilsWarning, match=r"00020.pt is torn .*: it is skipped, .* is one$"):
        state = CheckpointFolder(tmp_path).read()
    assert (state["step"], state["path"]) == (10, str(tmp_path / "checkpoint-00000010.pt"))
    assert state["losses"][1] == 10
    assert list_names(tmp_path) == ["checkpoint-00000010.pt", "checkpoint-00000020.pt"]
    assert torn.read_bytes() == data


@pytest.mark.parametrize("steps", [(2,), (1, 2)])
def test_a_run_whose_checkpoints_are_all_torn_does_not_begin_anew_unasked(tmp_path: Path, steps):
    for step in steps:
        (tmp_path / f"checkpoint-{step:08d}.pt").write_bytes(b"torn")
    before = list_names(tmp_path)
    folder = CheckpointFolder(tmp_path)
    # The same call says the same again.
    for _ in range(2):
        with pytest.raises(ColabUtilsError, match=r"is torn .*00002\.pt.*resume='never'") as error:
            folder.read()
        assert "\n" not in str(error.value)
        assert list_names(tmp_path) == before
    folder.prepare(anew=True)
    assert list_names(tmp_path / "previous-1") == before
    assert folder.read() is None


@pytest.mark.parametrize(
    ("change", "times"),
    [(cut, 1), (cut, 4), (alter, 1), (alter, 2)],
)
def test_a_spell_of_bad_reads_condemns_no_checkpoint(tmp_path: Path, monkeypatch, change, times):
    folder = CheckpointFolder(tmp_path)
    for step in (10, 20):
        folder.save(make_state(step), step=step)
    before = list_names(tmp_path)
    reads = BadReads(monkeypatch, ".pt", change, times)
    state = folder.read()
    assert reads.times == 0
    assert (state["step"], state["losses"][1]) == (20, 20)
    assert list_names(tmp_path) == before


@pytest.mark.parametrize("change", [cut, alter])
def test_a_drive_that_gives_no_bytes_to_rely_on_is_an_error(tmp_path: Path, monkeypatch, change):
    """The older checkpoint is not taken in its place, and nothing is renamed."""
    folder = CheckpointFolder(tmp_path)
    for step in (10, 20):
        folder.save(make_state(step), step=step)
    before = list_names(tmp_path)
    BadReads(monkeypatch, ".pt", change, 1000)
    with pytest.raises(DriveLostError, match=r"00020\.pt .*Run the same again"):
        folder.read()
    assert list_names(tmp_path) == before


def test_full_disk_leaves_the_last_one_whole(tmp_path: Path):
    folder = CheckpointFolder(tmp_path / "run")
    folder.save(make_state(), step=10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel refuses to write any further.
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(
            ColabUtilsError,
            match=r"The checkpoint .*0020.pt cannot be written.* newest complete one is .*0010.pt",
        ):
            folder.save(make_state(), step=20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list_names(tmp_path / "run") == ["checkpoint-00000010.pt"]
    assert CheckpointFolder(tmp_path / "run").read()["step"] == 10


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
    folder.save(make_state(), step=10)
    mount.fail(**fault)
    for step in (20, 30, 40):
        with pytest.warns(
            ColabUtilsWarning, match=rf"checkpoint-000000{step}.pt waits in .*Another try is made"
        ):
            path = folder.save(make_state(step), step=step)
        assert path.parent == folder.waiting
        assert folder.newest == path
    assert list_names(folder.waiting) == ["checkpoint-00000030.pt", "checkpoint-00000040.pt"]
    if "lost" in fault:
        # An older checkpoint must not be taken for the newest.
        with pytest.raises(DriveLostError, match="remount"):
            CheckpointFolder(folder.run).read()
    mount.fail()
    assert list_names(tmp_path / "backing" / "run") == ["checkpoint-00000010.pt"]
    with pytest.warns(ColabUtilsWarning, match=r"00040\.pt waits in .* resume='never'"):
        assert CheckpointFolder(folder.run).read()["losses"] == [1.5, 40]
    CheckpointFolder(folder.run).send_waiting()
    assert list_names(folder.run) == ["checkpoint-00000010.pt", "checkpoint-00000040.pt"]
    assert list_names(folder.waiting) == []


def test_what_waits_belongs_to_the_place_of_its_run(tmp_path: Path):
    folder = CheckpointFolder(tmp_path / "run")
    folder.prepare(anew=False)
    CheckpointFolder(folder.waiting).save(make_state(), step=30)
    copied = shutil.copytree(folder.run, tmp_path / "copy")
    assert CheckpointFolder(copied).read() is None
    shutil.rmtree(folder.run)
    with pytest.warns(ColabUtilsWarning, match="If you deleted its run, pass resume='never'"):
        assert CheckpointFolder(folder.run).read()["step"] == 30
    # The next checkpoint that the run takes replaces it.
    assert folder.save(make_state(), step=5) == folder.newest
    assert list_names(folder.waiting) == []


def test_what_waits_moves_away_with_its_run(tmp_path: Path):
    folder = CheckpointFolder(tmp_path / "run")
    folder.prepare(anew=False)
    CheckpointFolder(folder.waiting).save(make_state(), step=30)
    CheckpointFolder(folder.run).prepare(anew=True)
    assert list_names(folder.waiting / "previous-1") == ["checkpoint-00000030.pt"]
    assert list_names(folder.waiting) == ["previous-1"]
    assert folder.read() is None


def test_the_folder_in_which_checkpoints_wait_is_the_users_own(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    waiting = CheckpointFolder("run").waiting
    assert str(os.getuid()) in waiting.parent.name
    assert waiting.parent.stat().st_mode & 0o777 == 0o700


def test_a_damaged_file_that_waits_is_not_sent(tmp_path):
    folder = CheckpointFolder(tmp_path / "run")
    path = CheckpointFolder(folder.waiting).save(make_state(), step=30)
    os.truncate(path, 500)
    with pytest.raises(ColabUtilsError, match=r"00030\.pt is torn .* Move it away"):
        folder.send_waiting()
    assert not folder.run.exists()


@pytest.mark.parametrize(
    "number", [errno.EIO, errno.ENOTCONN], ids=["a broken disk", "a lost Drive"]
)
def test_a_disk_that_does_not_answer_is_no_torn_file(tmp_path: Path, monkeypatch, number):
    folder = CheckpointFolder(tmp_path)
    folder.save(make_state(), step=10)

    def fail(path, *args, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("colab_utils.files.open_file", fail)
    with pytest.raises(
        ColabUtilsError if number == errno.EIO else DriveLostError, match=r"cannot be read"
    ):
        CheckpointFolder(tmp_path).read()
    assert list_names(tmp_path) == ["checkpoint-00000010.pt"]


@pytest.mark.parametrize(
    "put",
    [
        os.mkfifo,
        Path.mkdir,
        lambda path: path.symlink_to("/dev/zero"),
    ],
)
def test_a_checkpoint_that_is_no_file_is_told(tmp_path: Path, put):
    put(tmp_path / "checkpoint-00000005.pt")
    with pytest.raises(
        ColabUtilsError,
        match=r"Checkpoints cannot be read in .*05\.pt|.*05\.pt is a device or a pipe",
    ):
        CheckpointFolder(tmp_path).read()


def test_a_newer_format_is_refused_in_words(tmp_path: Path):
    path = CheckpointFolder(tmp_path).save(make_state(), step=5)
    path.write_bytes(path.read_bytes().replace(b"colab_utils 2 ", b"colab_utils 3 "))
    with pytest.raises(
        ColabUtilsError,
        match=r"another program or version wrote it.* update colab_utils",
    ):
        CheckpointFolder(tmp_path).read()


def test_loading_runs_no_code(tmp_path: Path):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "was-here"),)

    torch.save({"step": 5, "payload": Payload()}, tmp_path / "checkpoint-00000005.pt")
    with pytest.raises(ColabUtilsError, match="another program or version wrote it"):
        CheckpointFolder(tmp_path).read()
    # This file has the checksum of a real checkpoint.
    CheckpointFolder(tmp_path).save({"payload": Payload()}, step=5)
    with pytest.raises(UnpicklingError, match="Weights only load failed"):
        CheckpointFolder(tmp_path).read()
    assert list_names(tmp_path) == ["checkpoint-00000005.pt"]


def test_anew_moves_and_never_deletes(tmp_path: Path):
    folder = CheckpointFolder(tmp_path)
    folder.prepare(anew=True)
    assert list_names(tmp_path) == []
    for number in (1, 2):
        folder.save(make_state(), step=10)
        folder.save(make_state(), step=20)
        folder.prepare(anew=True)
        assert list_names(tmp_path / f"previous-{number}") == [
            "checkpoint-00000010.pt",
            "checkpoint-00000020.pt",
        ]
    assert folder.read() is None


def test_an_older_best_that_drive_does_not_give_up_harms_nothing(tmp_path: Path, monkeypatch):
    folder = CheckpointFolder(tmp_path)
    folder.save(make_state(1.0), step=5, which="best")

    real = os.truncate

    def refuse(path, length):
        if Path(path).name == "best-00000005.pt":
            raise OSError(107, "Transport endpoint is not connected")
        real(path, length)

    with monkeypatch.context() as patch:
        patch.setattr(os, "truncate", refuse)
        assert folder.save(make_state(2.0), step=9, which="best") == tmp_path / "best-00000009.pt"
    assert list_names(tmp_path) == ["best-00000005.pt", "best-00000009.pt"]
    best = folder.read("best")
    assert best is not None
    assert best["step"] == 9
    folder.save(make_state(3.0), step=12, which="best")
    assert list_names(tmp_path) == ["best-00000012.pt"]


@pytest.mark.parametrize("start", range(0, 400, 100))
def test_any_bytes_of_a_checkpoint_are_read_as_they_were_or_told(tmp_path: Path, start):
    folder = CheckpointFolder(tmp_path)
    folder.save({"weight": torch.arange(6.0)}, step=10)
    [path] = tmp_path.iterdir()
    whole = path.read_bytes()
    draw = random.Random(start)
    for place in (len(whole) * (start + part) // 400 for part in range(100)):
        content = bytearray(whole)
        for offset in range(draw.randint(1, 4)):
            content[(place + offset) % len(content)] = draw.randrange(256)
        path.write_bytes(content)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                state = folder.read()
            except ColabUtilsError as error:
                state = None
                caught = [error]
        assert state is None or (
            state["step"] == 10 and torch.equal(state["weight"], torch.arange(6.0))
        )
        assert state is not None or caught
