"""Training from loose files, which become shards meanwhile: by `train` and by the command line."""

import json
import shutil
from functools import partial

import pytest

from colab_utils import open_dataset, train
from colab_utils.__main__ import main
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.shards.index import read_index
from colab_utils.shards.lock import hold_folder
from colab_utils.shards.verify import verify_shards
from colab_utils.shards.write import write_shards
from colab_utils.training import train as loop
from colab_utils.training.trainer import Trainer
from tests.tiny_model import TINY_MODEL
from tests.training.small_shards import TINY

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def source(tiny_dataset, tmp_path):
    """A copy of the tiny dataset, and the folders that train it."""
    folder = shutil.copytree(tiny_dataset.images.parent, tmp_path / "data")
    return {
        "images": folder / "images",
        "annotations": folder / "annotations.json",
        "drive": tmp_path / "drive",
        "ssd": tmp_path / "ssd",
    }


def open_source(source):
    folders = {name: source[name] for name in ("drive", "ssd")}
    return open_dataset(source["images"], source["annotations"], **folders)


def train_tiny(source, tmp_path, **options):
    return train(run=tmp_path / "run", **source, **TINY | {"batch_size": 3} | options)


def test_a_run_that_stops_on_loose_files_goes_on_with_shards_as_on_shards_alone(source, tmp_path):
    # Of one shard, all images are shuffled together at once.
    folder = tmp_path / "shards"
    write_shards(source["images"], source["annotations"], shards=folder)
    whole = train_tiny({"shards": folder}, tmp_path / "whole", steps=6)
    train_tiny(source, tmp_path / "parts", steps=2)
    open_source(source).wait()
    rest = train_tiny(source, tmp_path / "parts", steps=6)
    assert rest.plan.first_step == 2
    assert rest.losses == whole.losses


def test_a_bad_image_is_left_out_and_the_run_goes_on_without_it(source, tmp_path, monkeypatch):
    names = sorted(path.name for path in source["images"].iterdir())
    (source["images"] / names[3]).unlink()
    monkeypatch.setattr("colab_utils.loading.opening.count_allowed", lambda *_: 1)
    monkeypatch.setattr("colab_utils.shards.write.count_allowed", lambda *_: 1)
    with pytest.warns(ColabUtilsWarning, match=rf"left out .*{names[3]}"):
        train_tiny(source, tmp_path, steps=4)
    open_source(source).wait()
    assert [image.file_name for image in read_index(source["ssd"]).skipped] == [names[3]]
    with pytest.warns(ColabUtilsWarning, match="images are others than when the run was begun"):
        report = train_tiny(source, tmp_path, steps=6)
    assert report.steps == 6
    assert report.plan.images == 10


def test_an_epoch_whose_last_image_is_bad_is_evaluated(source, tmp_path, monkeypatch):
    shards = tmp_path / "shards"
    write_shards(source["images"], source["annotations"], shards=shards)
    ids = []
    real = Trainer._train

    def note(trainer, batch):
        ids.extend(batch.image_ids.tolist())
        real(trainer, batch)

    monkeypatch.setattr(Trainer, "_train", note)
    options = {"batch_size": 1, "val_shards": shards}
    train_tiny(source, tmp_path, steps=11, **options)
    images = json.loads(source["annotations"].read_text())["images"]
    names = {image["id"]: image["file_name"] for image in images}
    (source["images"] / names[ids[-1]]).unlink()
    monkeypatch.setattr("colab_utils.loading.opening.count_allowed", lambda *_: 1)
    steps = []
    monkeypatch.setattr(Trainer, "_measure_precision", lambda own, _: steps.append(own.done))
    anew = {**source, "ssd": tmp_path / "other", "drive": None}
    with pytest.warns(ColabUtilsWarning, match="left out"):
        train_tiny(anew, tmp_path / "anew", steps=14, **options)
    assert steps == [11, 14]


def test_beside_another_writer_it_trains_on_loose_files(source, tmp_path):
    with (
        hold_folder(source["ssd"]),
        pytest.warns(ColabUtilsWarning, match="this call writes no shards"),
    ):
        report = train_tiny(source, tmp_path, epochs=1)
    assert report.plan.images == 11
    # Shards have the same order.
    assert train_tiny(source, tmp_path, epochs=2).plan.first_step == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shards": "shards"}, "either shards, or images"),
        ({"annotations": None}, "either shards, or images"),
        ({"ssd": None}, "either shards, or images"),
        ({"run": None}, "a folder for its checkpoints"),
    ],
)
def test_data_is_named_once_and_a_run_has_a_folder(source, tmp_path, change, message):
    folders = {**source, "run": tmp_path / "run", **change}
    with pytest.raises(ColabUtilsError, match=f"A run needs {message}"):
        train(**folders)
    assert not (tmp_path / "run").exists()


def test_the_command_line_trains_from_images(source, tmp_path, capsys, monkeypatch):
    # A test downloads nothing.
    monkeypatch.setattr(loop, "train", partial(loop.train, weights=None))
    words = "train --images {images} --annotations {annotations} --drive {drive} --ssd {ssd}"
    words += " --run {run} --model {model} --min-size 64 --epochs 1 --json -"
    folders = {**source, "run": tmp_path / "run", "model": TINY_MODEL}
    assert main(words.format(**folders).split()) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 6
    # Training may end before the last shard is written. The next session goes on there.
    open_source(source).wait()
    assert verify_shards(source["ssd"]).bad == ()
