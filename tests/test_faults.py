"""The fault table: each fault of Drive x each command; what the user sees, what is left, and how it
goes on.
"""

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from colab_utils import drive
from colab_utils.__main__ import main
from colab_utils.errors import ColabUtilsWarning
from colab_utils.shards.write import write_shards
from colab_utils.training import train as loop
from tests.drive_mount import DriveMount, mount_or_skip
from tests.snapshots import snapshot
from tests.tiny_model import TINY_MODEL

TINY = {
    "model": TINY_MODEL,
    "weights": None,
    "min_size": 64,
    "max_size": 96,
    "workers": 0,
    "batch_size": 4,
}
SHARD_MB = 0.02
# The steps make one epoch.
STEPS = 3
PREPROCESS = (
    "preprocess --images {drive}/images --annotations {drive}/annotations.json "
    f"--shards {{drive}}/new --shard-mb {SHARD_MB} --storage keep --workers 2"
)
COMMANDS = {
    "preprocess": PREPROCESS,
    "verify": "verify --shards {drive}/shards",
    "copy": "copy --shards {drive}/shards --to {ssd}/shards",
    "train": (
        "train --shards {drive}/shards --ssd {ssd}/shards --run {drive}/run "
        f"--steps {STEPS} --checkpoint-steps 1"
    ),
}
COMMANDS["resume"] = COMMANDS["train"]


@dataclass
class World:
    """A folder of a mounted Drive with images and shards, an SSD, and what the commands print.

    ``drive`` is the folder as the commands see it; ``backing`` the same folder without the mount;
    ``begun`` has the runs that can be resumed.
    """

    mount: DriveMount
    drive: Path
    backing: Path
    ssd: Path
    begun: dict[int, Path]
    output: pytest.CaptureFixture[str]

    def run(self, command: str) -> tuple[int, str, dict]:
        """Exit status, what the user sees, and the JSON."""
        text = COMMANDS[command].format(drive=self.drive, ssd=self.ssd)
        status = main([*text.split(), "--json", "-"])
        shown = self.output.readouterr()
        return status, shown.err, json.loads(shown.out) if status == 0 else {}


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_dataset) -> Path:
    folder = tmp_path_factory.mktemp("made")
    shutil.copytree(tiny_dataset.images, folder / "images")
    shutil.copy(tiny_dataset.annotations, folder / "annotations.json")
    write_shards(
        tiny_dataset.images,
        tiny_dataset.annotations,
        shards=folder / "shards",
        shard_mb=SHARD_MB,
        storage="keep",
        workers=1,
    )
    return folder


@pytest.fixture(scope="module")
def begun(made, tmp_path_factory, one_thread) -> dict[int, Path]:
    """Of each number of steps a run that did all of them but the last one."""
    runs = {}
    for steps in (STEPS - 1, STEPS):
        run = tmp_path_factory.mktemp("begun") / "run"
        loop.train(made / "shards", run, steps=steps, checkpoint_steps=1, **TINY)
        max(run.glob("*.pt")).unlink()
        runs[steps] = run
    return runs


@pytest.fixture(scope="module")
def mounted(tmp_path_factory) -> Iterator[DriveMount]:
    """One mount for all tests: each has a folder of its own on it."""
    folder = tmp_path_factory.mktemp("mounted")
    (folder / "backing").mkdir()
    with mount_or_skip(folder / "backing", folder / "drive") as mount:
        yield mount


@pytest.fixture
def world(mounted, made, begun, tmp_path, capsys, monkeypatch, one_thread) -> Iterator[World]:
    monkeypatch.setattr("colab_utils.drive.RETRY_WAITS_S", (0.02, 0.05, 0.2, 0.4))
    train = loop.train
    monkeypatch.setattr(
        loop, "train", lambda *arguments, **options: train(*arguments, **{**options, **TINY})
    )
    backing = mounted.folder.parent / "backing" / tmp_path.name
    shutil.copytree(made, backing)
    drive = mounted.folder / tmp_path.name
    yield World(mounted, drive, backing, tmp_path / "ssd", begun, capsys)
    mounted.fail()
    shutil.rmtree(backing)


@pytest.fixture
def direct_world(world, tmp_path) -> Iterator[World]:
    """The kernel keeps nothing of this mount, so that a short read reaches the reader."""
    with mount_or_skip(world.backing, tmp_path / "direct", direct=True) as mount:
        yield replace(world, mount=mount, drive=mount.folder)


def prepare(world: World, command: str, *, steps: int = STEPS) -> None:
    """A run that is to be resumed was begun before, and did all of these steps but the last one."""
    if command == "resume":
        shutil.copytree(world.begun[steps], world.backing / "run")


def check_result(world: World, command: str, result: dict) -> None:
    """The command did all of its work, and what it left is whole."""
    if command == "preprocess":
        assert main(["verify", "--shards", str(world.backing / "new")]) == 0
        assert snapshot(world.backing / "new") == snapshot(world.backing / "shards")
    elif command == "copy":
        assert snapshot(world.ssd / "shards") == snapshot(world.backing / "shards")
    elif command == "verify":
        assert result["bad"] == []
    else:
        assert result["steps"] == STEPS
        assert max((world.backing / "run").glob("*.pt")).name == f"checkpoint-{STEPS:08}.pt"
    assert not list(world.backing.rglob("*.part"))
    world.output.readouterr()


def run_complete(world: World, command: str) -> dict:
    """Run a command that succeeds, and check what it left."""
    status, shown, result = world.run(command)
    assert status == 0, shown
    check_result(world, command, result)
    return result


every = pytest.mark.parametrize("command", list(COMMANDS))


@every
@pytest.mark.parametrize("fault", [{"errors": 3}, {"call_errors": 2}], ids=["read", "look"])
def test_a_burst_of_errors_is_tried_again(world, command, fault):
    prepare(world, command)
    world.mount.fail(**fault)
    run_complete(world, command)


@pytest.fixture
def hide(world, monkeypatch):
    """Hide a file until somebody lists its folder."""
    list_folder = os.listdir

    def show(folder="."):
        world.mount.fail()
        return list_folder(folder)

    def hide_file(name):
        world.mount.fail(hidden_name=name)
        monkeypatch.setattr(os, "listdir", show)

    return hide_file


@every
def test_a_listed_file_that_does_not_show_for_a_while(world, command, hide):
    prepare(world, command)
    images = sorted(path.name for path in (world.backing / "images").iterdir())
    hide(images[0] if command == "preprocess" else "shard-000001.tar")
    result = run_complete(world, command)
    assert result.get("skipped", []) == []


def test_repair_drops_no_image_that_drive_does_not_show_for_a_while(world, hide):
    images = sorted(path.name for path in (world.backing / "images").iterdir())
    hide(images[0])
    output = world.backing / "repaired.json"
    data = f"--images {world.drive}/images --annotations {world.drive}/annotations.json"
    assert main(f"check {data} --repair {output}".split()) == 0
    assert "Drive does not show 1 of the files" in world.output.readouterr().err
    assert len(json.loads(output.read_text())["images"]) == len(images)


def test_images_that_are_gone_are_left_out_after_one_wait(world, monkeypatch):
    images = sorted((world.backing / "images").iterdir())
    for path in images[:2]:
        path.unlink()
    listed = []
    list_folder = os.listdir
    monkeypatch.setattr(
        os,
        "listdir",
        lambda folder: listed.append(folder) or list_folder(folder),
    )
    with pytest.warns(ColabUtilsWarning, match="Drive does not show 2 of the files"):
        report = write_shards(
            world.drive / "images",
            world.drive / "annotations.json",
            shards=world.drive / "new",
            max_bad=0.5,
            workers=1,
        )
    skipped = sorted(image.file_name for image in report.skipped)
    assert skipped == [path.name for path in images[:2]]
    assert listed.count(world.drive / "images") == 1 + len(drive.RETRY_WAITS_S)


@every
def test_a_mount_that_comes_back(world, command):
    prepare(world, command)
    world.mount.fail(lost=True)
    timer = threading.Timer(0.2, world.mount.fail)
    timer.start()
    run_complete(world, command)
    timer.join()


@every
@pytest.mark.parametrize(
    "fault",
    [{"lost": True}, {"errors": 10**6}],
    ids=["lost", "errors"],
)
def test_a_drive_that_is_gone_ends_in_one_line_and_the_same_command_continues(
    world, command, fault
):
    prepare(world, command)
    world.mount.fail(**fault)
    status, shown, _ = world.run(command)
    errors = [line for line in shown.splitlines() if line.startswith("error: ")]
    assert status == 2, shown
    assert len(errors) == 1, shown
    assert "Traceback" not in shown
    for words in ("Drive got disconnected", "drive.mount(", "Then run the same again"):
        assert words in errors[0]
    world.mount.fail()
    run_complete(world, command)


@every
def test_a_full_drive_ends_what_writes_there(world, command):
    prepare(world, command)
    before = snapshot(world.backing / "run")
    world.mount.fail(full=True)
    # Neither command writes anything there.
    if command in ("verify", "copy"):
        run_complete(world, command)
        return
    status, shown, _ = world.run(command)
    assert status == 2, shown
    assert "disk full" in shown or "No space left" in shown
    assert not list((world.backing).rglob("*.part"))
    assert snapshot(world.backing / "run") == before
    world.mount.fail()
    run_complete(world, command)


@pytest.mark.parametrize(
    ("command", "cut_name"),
    [
        *((command, "") for command in COMMANDS),
        ("preprocess", ".jpg"),
        ("verify", "index.json"),
        ("copy", "index.json"),
        ("train", "index.json"),
        ("resume", "index.json"),
        ("resume", "checkpoint-"),
    ],
)
def test_short_reads_and_files_that_end_too_early_for_a_while(direct_world, command, cut_name):
    prepare(direct_world, command)
    fault = {"cut_opens": 3, "cut_name": cut_name} if cut_name else {"short_read": 10_000}
    direct_world.mount.fail(**fault)
    result = run_complete(direct_world, command)
    assert result.get("skipped", []) == []


@every
def test_a_listing_that_times_out_is_not_needed(world, command):
    prepare(world, command)
    for number in range(40):
        (world.backing / "images" / f"other-{number}.jpg").touch()
    world.mount.fail(most_entries=40)
    run_complete(world, command)


@pytest.mark.parametrize("command", ["verify", "copy"])
def test_second_names_of_the_same_file_are_left_alone(world, command):
    twin = world.backing / "shards" / "shard-000000 (1).tar"
    shutil.copy(twin.with_name("shard-000000.tar"), twin)
    before = snapshot(world.backing)
    status, shown, _ = world.run(command)
    assert status == 0, shown
    assert snapshot(world.backing) == before


def change(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:1000] + bytes(40) + data[1040:])


@pytest.mark.parametrize("command", ["verify", "copy", "train", "resume"])
def test_a_torn_shard_is_named_and_never_trained_on(world, command):
    # The steps that are left need images of every shard.
    prepare(world, command, steps=2)
    change(world.backing / "shards" / "shard-000001.tar")
    status, shown, _ = world.run(command)
    assert status == 2, shown
    assert "shard-000001.tar" in shown
    assert "Traceback" not in shown
    assert not (world.ssd / "shards" / "shard-000001.tar").exists()
    # The message names this cure.
    (world.drive / "shards" / "shard-000001.tar").unlink()
    text = PREPROCESS.format(drive=world.drive).replace("/new", "/shards")
    assert main(text.split()) == 0
    world.output.readouterr()
    run_complete(world, command)


@pytest.mark.parametrize("command", ["verify", "copy", "train"])
def test_a_shard_that_another_machine_wrote_and_that_does_not_show_yet(world, command):
    world.mount.fail(hidden_name="shard-000002.tar")
    status, shown, _ = world.run(command)
    assert status == 2, shown
    assert "shard-000002.tar" in shown
    world.mount.fail()
    run_complete(world, command)


def test_training_goes_on_from_the_ssd_when_drive_is_lost(world, monkeypatch):
    """The mount dies between two steps: the steps go on, the checkpoints wait, and are sent by the
    next command.
    """
    log = []
    train = loop.train

    def look(line):
        log.append(str(line))
        if getattr(line, "step", 0) == 1:
            world.mount.fail(lost=True)

    assert world.run("copy")[0] == 0
    monkeypatch.setattr(
        loop, "train", lambda *arguments, **options: train(*arguments, **{**options, "log": look})
    )
    status, shown, _ = world.run("train")
    assert status == 2, shown
    assert f"step {STEPS}/{STEPS}" in log[-1]
    assert re.search(r"Drive got disconnected.* checkpoint checkpoint-\d+\.pt waits in", shown)
    errors = [line for line in shown.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, shown
    assert (
        f"checkpoint-{STEPS:08}.pt is not in {world.drive / 'run'}. It lies only in " in errors[0]
    )
    assert f"drive.mount('{world.mount.folder}', force_remount=True)" in errors[0]
    world.mount.fail()
    assert not (world.backing / "run" / f"checkpoint-{STEPS:08}.pt").exists()
    run_complete(world, "resume")
