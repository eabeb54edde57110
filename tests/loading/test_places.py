"""Datasets at URLs: shards that arrive from there, that are sent there, and loose files there."""

import shutil
import warnings

import pytest

from colab_utils.data.checks import check_dataset
from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.image_copy import copy_images
from colab_utils.loading.loader import make_loader
from colab_utils.loading.opening import LooseFiles, open_dataset
from tests.faulty_server import FaultyFileSystem, fail_from, fail_times

from .test_dataset import assert_equal_samples
from .test_open_dataset import read_files

URL = "faulty://bucket/shards"
IMAGES = "faulty://bucket/images"
JSON = "faulty://bucket/instances.json"


@pytest.fixture(autouse=True)
def bucket(tmp_path, tiny_dataset, tiny_shards):
    """The folder of a server with shards, images and their JSON."""
    root = tmp_path / "server"
    FaultyFileSystem.reset(root)
    shutil.copytree(tiny_shards, root / "bucket" / "shards")
    shutil.copytree(tiny_dataset.images, root / "bucket" / "images")
    shutil.copy(tiny_dataset.annotations, root / "bucket" / "instances.json")
    yield root / "bucket"
    FaultyFileSystem.reset("")


def assert_same_samples(dataset, expected):
    assert len(dataset) == len(expected)
    for index, sample in enumerate(expected):
        assert_equal_samples(dataset[index], sample)


def test_a_server_that_goes_while_shards_arrive_is_told(ssd):
    ArrivingShards(URL, ssd).stop()
    shutil.rmtree(ssd)
    FaultyFileSystem.fault = fail_from(9, ConnectionResetError("gone"))
    with pytest.raises(DriveLostError, match=r"cannot be reached .*gone"):
        ArrivingShards(URL, ssd).wait()


def test_loose_files_at_a_url_are_a_dataset(loose):
    FaultyFileSystem.fault = fail_times(3, TimeoutError(), name=".jpg")
    dataset = CocoFolder(IMAGES, JSON)
    assert_same_samples(dataset, loose)
    batches = make_loader(dataset, batch_size=4, workers=2)
    assert sum(len(targets) for _, targets in batches) == 12


def test_loose_files_at_a_url_are_checked(tiny_dataset, bucket):
    expected = check_dataset(tiny_dataset.images, tiny_dataset.annotations)
    assert check_dataset(IMAGES, JSON) == expected
    names = sorted(path.name for path in (bucket / "images").iterdir())
    (bucket / "images" / names[0]).unlink()
    (bucket / "images" / names[1]).write_bytes(b"")
    kinds = {problem.kind for problem in check_dataset(IMAGES, JSON).problems}
    assert {"missing image", "empty file"} <= kinds


def test_shards_are_written_from_loose_files_at_a_url_and_sent_to_one(bucket, ssd):
    places = {"drive": "faulty://bucket/new", "ssd": ssd}
    dataset = open_dataset(IMAGES, JSON, **places)
    assert isinstance(dataset, LooseFiles)
    dataset.wait()
    assert read_files(bucket / "new") == read_files(ssd)


def test_images_are_copied_from_a_server_that_fails_now_and_then(tmp_path, bucket):
    lost = ConnectionError("lost")
    for call in ("info", "read"):
        FaultyFileSystem.fault = fail_times(2, lost, call=call, name=".jpg")
        copy_images(IMAGES, tmp_path / call, annotations=JSON)
        assert read_files(tmp_path / call) == read_files(bucket / "images")


def test_a_url_without_data_is_told(ssd):
    nothing = "faulty://bucket/nothing"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in (
            lambda: ShardDataset(nothing),
            lambda: ArrivingShards(nothing, ssd),
            lambda: CocoFolder(nothing, JSON),
            lambda: CocoFolder(IMAGES, f"{nothing}.json"),
            lambda: check_dataset(nothing, JSON),
            lambda: copy_images(nothing, ssd),
            lambda: copy_images(IMAGES, ssd, annotations=f"{JSON}.txt"),
        ):
            with pytest.raises(
                ColabUtilsError, match=r"(There (are no shards|is no image folder)|cannot be read)"
            ):
                call()
    assert not ssd.exists()
