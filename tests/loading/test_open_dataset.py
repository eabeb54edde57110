"""The nearest form of a dataset, and shards that are written while they are trained on."""

import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from colab_utils import files, make_loader, open_dataset
from colab_utils.course.sample_data import make_dataset
from colab_utils.data import orientation
from colab_utils.data.coco import read_coco
from colab_utils.data.decoding import load_jpeg_decoder
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading import writing
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.opening import LooseFiles
from colab_utils.processes import end_process
from colab_utils.shards import plan, write
from colab_utils.shards.copy import Copying
from colab_utils.shards.index import read_index
from colab_utils.shards.lock import WRITER_NAME, hold_folder
from colab_utils.shards.plan import make_recipe
from colab_utils.shards.write import write_shards
from colab_utils.slow_drive import DriveProfile, slow_down

from ..drive_mount import mount_or_skip
from .test_bounded_wait import stop_mounts
from .test_dataset import assert_equal_samples, flip_bit

SHARD_MB = 0.02


@pytest.fixture(scope="module")
def reference(tmp_path_factory, tiny_dataset):
    """The files of the tiny dataset's shards, as `write_shards` writes them, with their folder."""
    # The first loader imports torchvision for seconds, in which all shards would be written.
    load_jpeg_decoder()
    folder = tmp_path_factory.mktemp("reference") / "shards"
    data = tiny_dataset.images, tiny_dataset.annotations
    write_shards(*data, shards=folder, shard_mb=SHARD_MB, workers=1)
    assert len(read_index(folder).shards) > 4
    return folder


@pytest.fixture
def places(tmp_path):
    return {"drive": tmp_path / "drive", "ssd": tmp_path / "ssd"}


@pytest.fixture
def own_dataset(tiny_dataset, tmp_path):
    """A copy of the tiny dataset, to be changed."""
    folder = tmp_path / "own"
    shutil.copytree(tiny_dataset.images.parent, folder)
    return folder / "images", folder / "annotations.json"


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 60 kB, which is less than the shards take."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=60k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def mount(tmp_path):
    """A mounted Drive."""
    (tmp_path / "backing").mkdir()
    with mount_or_skip(tmp_path / "backing", tmp_path / "mount") as mount:
        yield mount


@pytest.fixture
def open_tiny(tiny_dataset, places):
    """Open the tiny dataset; options and places may be others."""
    data = tiny_dataset.images, tiny_dataset.annotations
    return partial(open_dataset, *data, **places, shard_mb=SHARD_MB)


@pytest.fixture
def open_own(own_dataset, places):
    """Open the copy of the tiny dataset."""
    return partial(open_dataset, *own_dataset, **places, shard_mb=SHARD_MB)


def list_ids(loader):
    return [int(target["image_id"]) for _, targets in loader for target in targets]


def count_samples(dataset):
    return len(list_ids(make_loader(dataset, batch_size=3, workers=0)))


def read_files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def tear_off(folder, *names):
    """Leave what an interrupted session leaves: no index, and not all files."""
    for name in ("index.json", *names):
        (folder / name).unlink()


def test_the_next_calls_take_the_shards_of_the_ssd_and_those_of_drive(open_tiny, reference, places):
    open_tiny().wait()
    assert type(open_tiny()) is ShardDataset
    shutil.rmtree(places["ssd"])
    arriving = open_tiny()
    assert type(arriving) is ArrivingShards
    assert count_samples(arriving) == 12
    arriving.stop()
    assert read_files(places["ssd"]) == read_files(reference)
    assert type(open_tiny()) is ShardDataset


def test_shards_of_the_ssd_that_are_not_on_drive_are_sent(open_tiny, reference, places):
    open_tiny(drive=None).wait()
    assert not places["drive"].exists()
    assert type(open_tiny(drive=None)) is ShardDataset
    dataset = open_tiny()
    assert type(dataset) is ShardDataset
    assert count_samples(dataset) == 12
    dataset.wait()
    count = len(read_index(reference).shards)
    assert len(dataset.arrival.arrived) == count
    assert read_files(places["drive"]) == read_files(reference)


def test_drive_gets_arrays_then_tars_then_the_index(open_tiny, places, monkeypatch):
    """A session that is killed between two of them leaves a folder that it knows again."""
    real = writing.write_index
    real_copy = Copying.copy_file

    def write_index(folder, index):
        assert all((folder / name).stat().st_size == size for name, size, _ in index.files())
        # The index of the SSD is written before that of Drive.
        assert folder == places["ssd"] or (places["ssd"] / "index.json").exists()
        real(folder, index)

    def copy_file(self, name, *rest):
        if name.endswith(".tar"):
            assert (places["drive"] / name).with_suffix(".arrays").exists()
        return real_copy(self, name, *rest)

    monkeypatch.setattr(writing, "write_index", write_index)
    monkeypatch.setattr(Copying, "copy_file", copy_file)
    open_tiny().wait()
    assert all((folder / "index.json").exists() for folder in places.values())


def call_before_writing(monkeypatch, call):
    """Call a function with the path of each file of a shard before it is written."""
    write_file = files.write_file

    def write(path, *parts):
        if path.suffix in (".tar", ".arrays"):
            call(path)
        write_file(path, *parts)

    monkeypatch.setattr(files, "write_file", write)


def test_the_writer_follows_the_first_epoch_at_the_lowest_priority(
    open_tiny, tmp_path, monkeypatch
):
    log = tmp_path / "written"

    def note(path):
        with open(log, "a") as file:
            file.write(f"{os.nice(0)} {path.name}\n")

    call_before_writing(monkeypatch, note)
    dataset = open_tiny()
    dataset.wait()
    tars = [line for line in log.read_text().splitlines() if line.endswith(".tar")]
    assert tars == [f"19 shard-{number:06d}.tar" for number in chain(*dataset.windows)]


def read_few_before(monkeypatch):
    """Let the plan read two images, and not all of the tiny dataset."""
    monkeypatch.setattr(orientation, "_SAMPLED_PHOTOS", 2)
    monkeypatch.setattr(plan, "_TRIED_IMAGES", 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_loose_files_are_read_once_and_trained_on_while_they_become_shards(
    open_tiny, tiny_dataset, reference, places, tmp_path, monkeypatch, workers
):
    """By the plan, the vote on EXIF, the writer and the loader together, in all processes."""
    read_few_before(monkeypatch)
    log = tmp_path / "reads"
    read_whole = files.read_whole

    def note(path, **options):
        if path.parent == tiny_dataset.images:
            with open(log, "a") as file:
                file.write(f"{path.name}\n")
        return read_whole(path, **options)

    monkeypatch.setattr(files, "read_whole", note)
    dataset = open_tiny()
    assert type(dataset) is LooseFiles
    loader = make_loader(dataset, batch_size=2, workers=workers)
    assert len(loader) == 6
    epochs = [list_ids(loader), list_ids(loader)]
    loader.close()
    ids = read_coco(tiny_dataset.annotations).image_ids.tolist()
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(ids)
    assert epochs[0] != epochs[1]
    dataset.wait()
    for folder in places.values():
        assert read_files(folder) == read_files(reference)
    names = sorted(path.name for path in tiny_dataset.images.iterdir())
    assert sorted(log.read_text().split()) == names


def blacken(image, target):
    return image * 0, target


@pytest.mark.parametrize("transforms", [None, blacken])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_next_pass_finds_the_shards(open_tiny, places, workers, transforms):
    dataset = open_tiny()
    dataset.transforms = transforms
    loader = make_loader(dataset, batch_size=2, workers=workers, seed=3)
    epochs = [list_ids(loader)]
    dataset.wait()
    # Loose files are not read any more.
    shutil.rmtree(places["ssd"] / ".loose-files")
    dataset.folder = places["ssd"] / "no folder"
    epochs.append(list_ids(loader))
    dataset.transforms = blacken
    assert not any(image.any() for images, _ in loader for image in images)
    loader.close()
    whole = make_loader(open_tiny(), batch_size=2, workers=0, seed=3)
    assert [list_ids(whole), list_ids(whole)] == epochs
    # The bytes of the files are not kept beside shards.
    assert not (places["ssd"] / ".loose-files").exists()


def test_a_fork_looks_for_the_shards_too(open_tiny):
    dataset = open_tiny()
    process = multiprocessing.get_context("fork").Process(target=dataset.find_nearest)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_photos_of_an_older_recipe_are_decoded_by_it(tmp_path, places, monkeypatch):
    made = make_dataset(tmp_path / "made", n=4, width=1000, height=900, workers=1)
    data = made.images, made.annotations
    older = tmp_path / "older"
    # Before there was a ramp, shards had the order of the annotations.
    recipe = make_recipe("shrink", min_size=200, max_size=1333, shard_mb=SHARD_MB)
    recipe["images_per_shard"] = 2
    with monkeypatch.context() as patch:
        patch.setattr(write, "make_recipe", lambda *_, **__: recipe)
        write_shards(*data, shards=older, workers=1)
    shutil.copytree(older, places["drive"])
    tear_off(places["drive"], "shard-000001.tar")
    dataset = open_dataset(*data, **places)
    # Its order is that of the annotations.
    assert np.array_equal(dataset.image_ids, read_coco(made.annotations).image_ids)
    assert dataset.sizes.tolist() == [[200, 222]] * 4
    image = Image.open(made.images / dataset.name_image(0))
    whole = image.resize((222, 200), Image.Resampling.BILINEAR, reducing_gap=3.0)
    assert np.array_equal(dataset[0][0], np.asarray(whole).transpose(2, 0, 1))
    dataset.wait()
    assert read_files(places["drive"]) == read_files(older)


def test_samples_are_those_of_the_shards(open_tiny, reference):
    whole = ShardDataset(reference, contiguous_labels=True)
    dataset = open_tiny(contiguous_labels=True)
    for index in (0, 5, -1):
        assert_equal_samples(dataset[index], whole[index])
    for name in ("sizes", "counts", "shard_of", "image_ids"):
        assert np.array_equal(getattr(dataset, name), getattr(whole, name))
    # The writing belongs to the process that began it.
    assert pickle.loads(pickle.dumps(dataset)).arrival is None
    assert dataset.class_names == whole.class_names


# The process opens the dataset, whose images are slow, and tells when it did.
SESSION = """
import sys, time
from colab_utils import file_cache, files, make_loader, open_dataset
from colab_utils.slow_drive import DriveProfile, slow_down
images, annotations, drive, ssd, shard_mb = sys.argv[1:]
slow_down(images, DriveProfile("test", open_s=0.1, bytes_per_s=1e6, source="made up"))
dataset = open_dataset(
    images, annotations, drive=drive, ssd=ssd, shard_mb=float(shard_mb), streams=1
)
for _ in make_loader(dataset, batch_size=1, workers=1):
    pass
print("trained", flush=True)
time.sleep(60)
"""


def run_until(dataset, places, is_reached):
    """Run a session, and kill it (-9) once ``is_reached``."""
    command = [
        *[sys.executable, "-c", SESSION, dataset.images, dataset.annotations],
        *[places["drive"], places["ssd"], str(SHARD_MB)],
    ]
    session = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": os.getcwd()}, start_new_session=True
    )
    with session:
        wait_until(lambda: is_reached() or session.poll() is not None)
        assert session.poll() is None
        session.send_signal(signal.SIGKILL)
    wait_until(lambda: not list_group(session.pid))


def list_group(leader):
    """Return the processes of a session that have not ended, with all their threads."""
    pids = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.Error):
            has_ended = process.status() == psutil.STATUS_ZOMBIE and process.num_threads() == 1
            if os.getpgid(process.pid) == leader and not has_ended:
                pids.append(process.pid)
    return pids


def wait_until(is_true):
    until_s = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < until_s
        time.sleep(0.005)


def count_tars(folder):
    return len(list(folder.glob("shard-*.tar")))


@pytest.mark.parametrize(
    ("folder", "shards", "is_new_machine"),
    [("ssd", 0, False), ("drive", 2, True), ("ssd", 4, False)],
)
def test_a_session_that_was_killed_goes_on_after_its_last_shard(
    open_tiny, tiny_dataset, reference, places, folder, shards, is_new_machine
):
    def is_reached():
        return (places["ssd"] / WRITER_NAME).exists() and count_tars(places[folder]) >= shards

    run_until(tiny_dataset, places, is_reached)
    if is_new_machine:
        shutil.rmtree(places["ssd"])
    on_drive = {path: path.stat().st_mtime_ns for path in places["drive"].glob("shard-*")}
    dataset = open_tiny()
    assert count_samples(dataset) == 12
    # It may be an `ArrivingShards`, too.
    dataset.wait()
    for place in places.values():
        files = read_files(place)
        # If all was there, the mark of the killed writer stays. Nobody heeds it for long.
        files.pop(WRITER_NAME, None)
        assert files == read_files(reference)
    # What was there was not sent again.
    assert all(path.stat().st_mtime_ns == time_ns for path, time_ns in on_drive.items())


def test_an_image_that_was_repaired_is_read_anew(open_own, own_dataset, places):
    images, annotations = own_dataset
    path = images / read_coco(annotations).names[4]
    content = path.read_bytes()
    path.write_bytes(b"no image")
    for skipped in ([path.name], []):
        open_own(max_bad=1).wait()
        index = read_index(places["drive"])
        assert [image.file_name for image in index.skipped] == skipped
        # The session is interrupted before its end.
        for folder in places.values():
            tear_off(folder)
        path.write_bytes(content)


def test_a_cell_may_run_again_while_shards_are_written(open_own, own_dataset, reference, places):
    slow_down(own_dataset[0], DriveProfile("test", open_s=0.1, bytes_per_s=1e9, source="made up"))
    first = open_own(streams=1)
    again = open_own()
    assert again.arrival._process.is_alive()
    again.wait()
    assert read_files(places["drive"]) == read_files(reference)
    with pytest.raises(ColabUtilsError, match="was stopped"):
        first.wait()


def test_bad_images_are_told_and_left_out(open_own, own_dataset, places):
    """The files of one shard are missing, and one of another shard is damaged."""
    images, annotations = own_dataset
    coco = read_coco(annotations)
    dataset = open_own()
    dataset.wait()
    bad = [*dataset.image_ids[dataset.shard_of == 1], dataset.image_ids[dataset.shard_of == 2][0]]
    rows = np.flatnonzero(np.isin(coco.image_ids, bad)).tolist()
    names = [coco.names[row] for row in rows]
    for name in names:
        (images / name).unlink()
    damaged = coco.names[coco.image_ids.tolist().index(bad[-1])]
    (images / damaged).write_bytes(b"no image")
    for folder in places.values():
        shutil.rmtree(folder)
    dataset = open_own(max_bad=0.5)
    assert dataset.max_bad == 6
    with pytest.warns(ColabUtilsWarning, match="An image is left out") as caught:
        ids = list_ids(make_loader(dataset, batch_size=2, workers=0))
    text = " ".join(str(warning.message) for warning in caught)
    assert all(words in text for words in (*names, f"(number {len(names)} so far)"))
    assert sorted(ids) == sorted(np.delete(coco.image_ids, rows).tolist())
    dataset.wait()
    skipped = read_index(places["drive"]).skipped
    assert sorted(image.file_name for image in skipped) == sorted(names)
    assert len(open_own()) == len(ids)


def test_too_many_bad_images_end_in_one_message(open_own, own_dataset):
    images, annotations = own_dataset
    (images / read_coco(annotations).names[4]).unlink()
    dataset = open_own(max_bad=0)
    with pytest.raises(ColabUtilsError, match=r"The image file .* cannot be read"):
        count_samples(dataset)
    with pytest.raises(ColabUtilsError, match="Bad images so far: 1,"):
        dataset.wait()


@pytest.fixture(params=["another writer", "full", "read-only"])
def closed_drive(request, small_disk):
    """A folder that takes no files, for three reasons."""
    if request.param == "another writer":
        with hold_folder(small_disk):
            yield small_disk
        return
    if request.param == "full":
        with suppress(OSError):
            (small_disk / "movie.mp4").write_bytes(bytes(100_000))
    else:
        remount = ["mount", "-o", "remount,ro", str(small_disk)]
        subprocess.run(remount, check=True)
    yield small_disk


def test_a_drive_that_takes_no_files_leaves_the_shards_on_the_ssd(
    open_tiny, reference, places, closed_drive
):
    with pytest.warns(ColabUtilsWarning, match="The shards are not sent to Drive"):
        dataset = open_tiny(drive=closed_drive)
    assert count_samples(dataset) == 12
    dataset.wait()
    assert read_files(places["ssd"]) == read_files(reference)
    assert not list(closed_drive.glob("shard-*"))


def test_a_drive_that_is_gone_is_not_missed_where_the_ssd_has_all_shards(
    tiny_dataset, places, mount, tmp_path
):
    shutil.copytree(tiny_dataset.images.parent, tmp_path / "backing" / "data")
    data = mount.folder / "data"
    call = partial(
        open_dataset,
        data / "images",
        data / tiny_dataset.annotations.name,
        drive=mount.folder / "shards",
        ssd=places["ssd"],
        shard_mb=SHARD_MB,
    )
    call().wait()
    mount.fail(lost=True)
    with pytest.warns(ColabUtilsWarning, match="Drive got disconnected.*unchecked"):
        dataset = call()
    assert count_samples(dataset) == 12
    (places["ssd"] / "shard-000001.tar").unlink()
    with pytest.raises(ColabUtilsError, match="Drive got disconnected"):
        call()


@pytest.fixture
def no_space(monkeypatch):
    monkeypatch.setattr("colab_utils.machine.find_free_space", lambda folder: 1000)


def test_on_a_disk_that_is_too_small_loose_files_are_trained_on(open_tiny, places, no_space):
    with pytest.warns(ColabUtilsWarning, match="of free disk, .* writes no shards"):
        dataset = open_tiny()
    assert count_samples(dataset) == 12
    assert read_files(places["ssd"]) == {}


def test_an_index_whose_shards_are_gone_is_not_trusted(open_tiny, places, reference, no_space):
    shutil.copytree(reference, places["ssd"])
    for path in places["ssd"].glob("*.tar"):
        path.unlink()
    with pytest.warns(ColabUtilsWarning, match="writes no shards"):
        assert count_samples(open_tiny()) == 12


def test_shards_that_do_not_fit_are_read_on_drive(open_tiny, places, reference, no_space):
    shutil.copytree(reference, places["drive"])
    with pytest.warns(ColabUtilsWarning, match="of free disk, .* the shards in .* themselves"):
        dataset = open_tiny()
    assert dataset.folder == places["drive"]


def test_a_disk_that_fills_ends_the_writing_alone(
    open_tiny, reference, places, small_disk, monkeypatch
):
    monkeypatch.setattr(files, "require_space", lambda *_: None)
    with pytest.warns(ColabUtilsWarning, match="too full to keep more files"):
        dataset = open_tiny(ssd=small_disk)
    with pytest.raises(ColabUtilsError, match=r"No space left .* it continues there"):
        dataset.wait()
    with pytest.warns(ColabUtilsWarning, match=r"No space left .* Training goes on"):
        assert count_samples(dataset) == 12
    open_tiny().wait()
    assert read_files(places["drive"]) == read_files(reference)


def test_a_drive_that_fills_leaves_training_alone(open_tiny, reference, places, small_disk):
    dataset = open_tiny(drive=small_disk)
    loader = make_loader(dataset, batch_size=3, workers=0)
    with pytest.raises(ColabUtilsError, match="No space left"):
        dataset.wait()
    # The shards on the SSD are complete.
    assert read_files(places["ssd"]) == read_files(reference)
    with pytest.warns(ColabUtilsWarning, match=r"No space left .* Training goes on") as warned:
        assert len(list_ids(loader)) == len(list_ids(loader)) == 12
    assert len(warned) == 1
    assert not (small_disk / "index.json").exists()
    assert type(open_tiny()) is ShardDataset
    open_tiny().wait()
    assert read_files(places["drive"]) == read_files(reference)


def test_without_any_answer_of_drive_the_shards_stay_on_the_ssd(
    open_tiny, reference, places, mount
):
    mount.fail(lost=True)
    with pytest.warns(ColabUtilsWarning, match="Drive got disconnected.*not sent to Drive"):
        dataset = open_tiny(drive=mount.folder / "shards")
    dataset.wait()
    assert read_files(places["ssd"]) == read_files(reference)


def test_training_ends_though_drive_answers_nothing(
    open_tiny, reference, mount, tmp_path, monkeypatch
):
    monkeypatch.setattr(writing, "_STOP_S", 0.2)
    # The process hangs in the system, and cannot even be killed.
    monkeypatch.setattr(writing, "end_process", partial(end_process, wait_s=0.2))
    drive = mount.folder / "shards"
    dataset = open_tiny(drive=drive)
    with stop_mounts():
        assert count_samples(dataset) == 12
        dataset.stop()
    wait_until(lambda: not dataset.arrival._process.is_alive())
    open_tiny(drive=drive).wait()
    assert read_files(tmp_path / "backing" / "shards") == read_files(reference)


def test_a_writer_that_waits_for_a_file_for_ever_is_ended(
    open_tiny, tiny_dataset, places, tmp_path, monkeypatch
):
    read_few_before(monkeypatch)
    monkeypatch.setattr("colab_utils.reader._GIVE_UP_S", 1.0)
    shutil.copytree(tiny_dataset.images, tmp_path / "backing")
    with mount_or_skip(tmp_path / "backing", tmp_path / "mount", direct=True) as mount:
        dataset = open_dataset(
            mount.folder, tiny_dataset.annotations, **places, shard_mb=SHARD_MB, streams=1
        )
        with stop_mounts(), pytest.raises(ColabUtilsError, match="did not come within 1 seconds"):
            dataset.wait()
        open_tiny().wait()
    assert len(ShardDataset(places["drive"])) == 12


def test_the_end_of_a_program_ends_the_writing(open_tiny, tiny_dataset, reference, places):
    program = """
import sys
from colab_utils import open_dataset
from colab_utils.loading import writing
from colab_utils.slow_drive import DriveProfile, slow_down

images, annotations, drive, ssd = sys.argv[1:]
slow_down(images, DriveProfile("slow", open_s=3600, bytes_per_s=1e9, source="a test"))
writing._STOP_S = 0.2
open_dataset(images, annotations, drive=drive, ssd=ssd, shard_mb=0.02)
print("opened")
"""
    # The shards are planned already, so that no image is read to plan them.
    shutil.copytree(reference, places["ssd"])
    tear_off(places["ssd"], "shard-000001.tar")
    words = [tiny_dataset.images, tiny_dataset.annotations, *places.values()]
    ended = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        timeout=60,
        check=True,
        text=True,
    )
    assert ended.stdout == "opened\n"
    open_tiny().wait()
    assert read_files(places["drive"]) == read_files(reference)


@pytest.mark.parametrize(
    ("call", "is_stopped", "message"),
    [
        (lambda path: os.kill(os.getpid(), signal.SIGKILL), False, "The system ended a process"),
        (lambda path: time.sleep(60), True, r"was stopped\. Run the same again"),
        (lambda path: 1 / 0, False, "The writing of shards failed: ZeroDivisionError"),
    ],
)
def test_a_writing_that_ends_early_is_told(open_tiny, monkeypatch, call, is_stopped, message):
    monkeypatch.setattr(writing, "_STOP_S", 0.1)
    call_before_writing(monkeypatch, call)
    dataset = open_tiny()
    if is_stopped:
        dataset.stop()
    with pytest.raises(ColabUtilsError, match=message):
        dataset.wait()
    dataset.stop()


def test_a_folder_begun_with_other_settings_goes_on_by_these(
    open_tiny, tiny_dataset, places, tmp_path
):
    older = tmp_path / "older"
    data = tiny_dataset.images, tiny_dataset.annotations
    options = {"shard_mb": 0.03, "storage": "keep", "min_size": 64, "workers": 1}
    write_shards(*data, shards=older, **options)
    shutil.copytree(older, places["drive"])
    tear_off(places["drive"], "shard-000001.tar")
    dataset = open_tiny()
    assert count_samples(dataset) == 12
    dataset.wait()
    assert read_files(places["drive"]) == read_files(older)


@pytest.mark.parametrize("held", ["drive", "ssd"])
@pytest.mark.parametrize("has_index", [False, True])
def test_shards_of_other_annotations_are_refused(
    open_own, own_dataset, places, reference, held, has_index
):
    annotations = own_dataset[1]
    annotations.write_bytes(annotations.read_bytes() + b"\n")
    shutil.copytree(reference, places[held])
    if not has_index:
        tear_off(places[held])
    before = read_files(places[held])
    with pytest.raises(ColabUtilsError, match=r"other annotations|of another dataset"):
        open_own()
    assert read_files(places[held]) == before


def test_a_damaged_shard_of_an_earlier_session_is_written_anew(open_tiny, reference, places):
    shutil.copytree(reference, places["drive"])
    tear_off(places["drive"])
    flip_bit(places["drive"] / "shard-000002.tar", 600)
    dataset = open_tiny()
    assert count_samples(dataset) == 12
    dataset.wait()
    assert read_files(places["ssd"]) == read_files(reference)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ssd": Path("same"), "drive": Path("same")}, "are both same"),
        ({"shard_mb": 0}, "expected shard_mb of"),
        ({"max_bad": 1.5}, "expected max_bad of 0"),
        ({"annotations": Path("none.json")}, "The annotations none.json cannot be read"),
    ],
)
def test_bad_arguments_are_refused(tiny_dataset, places, change, message):
    options = {"images": tiny_dataset.images, "annotations": tiny_dataset.annotations}
    with pytest.raises(ColabUtilsError, match=message):
        open_dataset(**options | places | change)
    assert not places["ssd"].exists()


def test_small_shards_come_first_and_are_those_of_write_shards(
    open_tiny, tiny_dataset, places, tmp_path, monkeypatch
):
    # The ramp begins at a size that few small images fill.
    monkeypatch.setattr(plan, "_FIRST_SHARDS_MB", (0.02, 0.04))
    folder = tmp_path / "written"
    data = tiny_dataset.images, tiny_dataset.annotations
    write_shards(*data, shards=folder, shard_mb=0.06, workers=1)
    dataset = open_tiny(shard_mb=0.06)
    assert dataset.windows[:2] == [[0], [1]]
    images = np.bincount(dataset.shard_of)
    assert images[0] < images[1] < images[2]
    dataset.wait()
    assert read_files(places["drive"]) == read_files(folder)
