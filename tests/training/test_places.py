"""Runs at URLs: checkpoints that wait on this machine while the server fails, and go on there."""

import shutil
import warnings

import pytest

from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.training.model import load_trained_model
from colab_utils.training.train import train
from tests.faulty_server import FaultyFileSystem, fail_from
from tests.training.small_shards import TINY

pytestmark = pytest.mark.usefixtures("one_thread")
URL = "faulty://bucket/run"
EXPIRED = PermissionError("The provided token has expired.")


@pytest.fixture(autouse=True)
def bucket(tmp_path):
    """The folder in which the server keeps the run."""
    FaultyFileSystem.reset(tmp_path / "server")
    yield tmp_path / "server" / "bucket" / "run"
    FaultyFileSystem.reset("")


@pytest.fixture
def few_shards(tiny_shards, bucket):
    """Shards at the same server."""
    shutil.copytree(tiny_shards, bucket.parent / "shards")
    return "faulty://bucket/shards"


def test_credentials_that_expire_lose_nothing_and_a_run_goes_on_there_as_in_a_folder(
    few_shards, tiny_shards, bucket, tmp_path
):
    whole = train(tiny_shards, tmp_path / "run", steps=4, **TINY)

    def expire(call, path):
        if call == "write" and "checkpoint-" in path:
            raise EXPIRED

    FaultyFileSystem.fault = expire
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ColabUtilsWarning)
        with pytest.raises(DriveLostError, match=r"token has expired.* Then run the same command"):
            train(few_shards, URL, steps=2, **TINY)
        FaultyFileSystem.fault = None
        report = train(few_shards, URL, steps=4, val_shards=few_shards, **TINY)
    assert report.losses == whole.losses
    assert report.checkpoint == f"{URL}/checkpoint-00000004.pt"
    assert not (bucket / "writer.txt").exists()
    assert load_trained_model(URL).class_names == load_trained_model(tmp_path / "run").class_names


def test_a_run_at_a_url_that_cannot_be_written_is_told_before_the_first_step(few_shards):
    FaultyFileSystem.fault = fail_from(0, EXPIRED, call="write")
    with pytest.raises(ColabUtilsError, match=r"token has expired.*credentials"):
        train(few_shards, URL, steps=2, **TINY)
