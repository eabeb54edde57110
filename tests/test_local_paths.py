"""What arguments must be: a URL is refused wherever a path of this machine is meant, and
elsewhere if its package is missing.
"""

import re
import shutil
import threading
import traceback
import warnings
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import colab_utils
from colab_utils import drive
from colab_utils.__main__ import _make_parser, main
from colab_utils.course.questions import read_receipts, write_class
from colab_utils.course.sample_data import make_dataset
from colab_utils.course.workspace import Workspace, ensure_dataset
from colab_utils.data.archives import unpack_dataset
from colab_utils.data.coco import read_coco
from colab_utils.data.repair import repair_annotations
from colab_utils.errors import ColabUtilsError
from colab_utils.places import require_local_path
from colab_utils.shards.write import finish_shards, write_shards
from colab_utils.show.report import check_receipt_folder, write_check, write_receipt
from colab_utils.slow_drive import slow_down
from colab_utils.training.checkpoint import CheckpointFolder
from colab_utils.training.model import build_mask_rcnn

MESSAGE = (
    r"The URL .* is not a folder or file on this machine\. Mount it .*, or copy it "
    r"to a folder first"
)
# No test installs its package.
UNKNOWN = "tos://bucket/x"
NEEDS_PACKAGE = r"tos://bucket/x cannot be reached .ImportError.*tosfs"


@pytest.mark.parametrize("path", ["", "a/s3:/b", "/content/s3://b", "C:/data", "run:1/a"])
def test_names_with_colons_stay_usable(path):
    assert require_local_path(path) == require_local_path(Path(path)) == Path(path)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder to work in: nothing may be made in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    yield tmp_path
    assert [path.name for path in tmp_path.rglob("*")] == ["images"]


def take_comparison():
    """A comparison is not looked at before the folder for its receipt."""
    return None


CALLS = {
    "Workspace drive": lambda url: Workspace.open(url, ssd="ssd", scene="my Drive, my GPU"),
    "Workspace ssd": lambda url: Workspace.open("drive", ssd=url),
    "repair output": lambda url: repair_annotations("images", "a.json", output=url),
    "ArrivingShards target": lambda url: colab_utils.ArrivingShards("shards", url),
    "open_dataset ssd": lambda url: colab_utils.open_dataset(
        "images", "a.json", drive="drive", ssd=url
    ),
    "copy_images target": lambda url: colab_utils.copy_images("images", url),
    "train ssd": lambda url: colab_utils.train("shards", "run", ssd=url),
    "compare images": lambda url: colab_utils.compare(url, "a.json", folder="work"),
    "compare annotations": lambda url: colab_utils.compare("images", url, folder="work"),
    "compare folder": lambda url: colab_utils.compare("images", "a.json", folder=url),
    "write_receipt": lambda url: write_receipt(take_comparison(), url),
    "check_receipt_folder": check_receipt_folder,
    "write_check page": lambda url: write_check(None, "images", "a.json", url),
    "read_receipts": lambda url: read_receipts([url]),
    "write_class": lambda url: write_class(["a.json"], url),
    "slow_down": lambda url: slow_down(url, "bad"),
    "make_dataset": lambda url: make_dataset(url, n=1),
    "unpack_dataset source": lambda url: unpack_dataset(str(url), Path("ssd")),
    "unpack_dataset folder": lambda url: unpack_dataset("https://127.0.0.1:1/a.zip", url),
}

REMOTE_CALLS = {
    "build_mask_rcnn weights": lambda url: build_mask_rcnn(num_classes=2, weights=url),
    "load_trained_model": colab_utils.load_trained_model,
    "CheckpointFolder": CheckpointFolder,
    "train weights": lambda url: colab_utils.train("shards", "run", weights=url),
    "train run": lambda url: colab_utils.train("shards", url),
    "check_dataset images": lambda url: colab_utils.check_dataset(url, "a.json"),
    "read_coco": read_coco,
    "write_shards images": lambda url: write_shards(url, "a.json", shards="shards"),
    "write_shards shards": lambda url: write_shards("images", "a.json", shards=url),
    "finish_shards shards": lambda url: finish_shards("images", "a.json", shards=url),
    "verify_shards": colab_utils.verify_shards,
    "copy_shards source": lambda url: colab_utils.copy_shards(url, "ssd"),
    "copy_shards target": lambda url: colab_utils.copy_shards("shards", url),
    "copy_images source": lambda url: colab_utils.copy_images(url, "ssd"),
    "CocoFolder images": lambda url: colab_utils.CocoFolder(url, "a.json"),
    "ShardDataset": colab_utils.ShardDataset,
    "ArrivingShards source": lambda url: colab_utils.ArrivingShards(url, "ssd"),
    "open_dataset images": lambda url: colab_utils.open_dataset(
        url, "a.json", drive="drive", ssd="ssd"
    ),
    "open_dataset drive": lambda url: colab_utils.open_dataset(
        "images", "a.json", drive=url, ssd="ssd"
    ),
    "train shards": lambda url: colab_utils.train(url, "run"),
    "train val_shards": lambda url: colab_utils.train("shards", "run", val_shards=url),
}

ALL_CALLS = CALLS | REMOTE_CALLS


def clean(place):
    """Remove what a function makes where no server or home folder hinders it."""
    for name in ("images/no", "ssd", "drive", "runs"):
        shutil.rmtree(place / name, ignore_errors=True)


@pytest.mark.parametrize("url", ["HDFS://bucket/x", Path("gs://bucket/x")], ids=repr)
@pytest.mark.parametrize("entry", CALLS)
def test_every_function_refuses_a_url_before_it_makes_anything(place, entry, url):
    with pytest.raises(ColabUtilsError, match=MESSAGE):
        CALLS[entry](url)


@pytest.mark.parametrize("entry", REMOTE_CALLS)
def test_a_url_whose_package_is_missing_is_told_before_anything_is_made(place, entry):
    with pytest.raises(ColabUtilsError, match=NEEDS_PACKAGE):
        REMOTE_CALLS[entry](Path(UNKNOWN))


@pytest.mark.parametrize("entry", ALL_CALLS)
def test_a_folder_called_tilde_is_never_made(place, monkeypatch, entry):
    """Each function reads or writes in the home folder instead, or refuses what is not there."""
    home = place / "images" / "no" / "home"
    monkeypatch.setenv("HOME", str(home))
    with suppress(ColabUtilsError, OSError, TypeError):
        ALL_CALLS[entry]("~/x")
    clean(place)


@pytest.mark.parametrize("entry", ALL_CALLS)
def test_every_function_refuses_a_drive_that_is_not_mounted(place, monkeypatch, entry):
    monkeypatch.setattr(drive, "is_colab", lambda: True)
    with pytest.raises(ColabUtilsError, match=r"Google Drive is not mounted.*drive\.mount"):
        ALL_CALLS[entry]("gdrive/MyDrive/x")


class RefusingHandler(BaseHTTPRequestHandler):
    """Answers each request with the status that its path begins with."""

    def do_GET(self):
        self.send_error(int(self.path.split("/")[1]))

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def refusing_server():
    with ThreadingHTTPServer(("127.0.0.1", 0), RefusingHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


# Of these, one says that the file is missing, and one that the server refuses.
@pytest.mark.parametrize("status", [404, 403])
@pytest.mark.parametrize("entry", ALL_CALLS)
def test_no_message_holds_the_secrets_of_a_url(place, refusing_server, entry, status):
    """A traceback stays in the output of a notebook that is shared: neither the error, nor one
    that it comes from, nor a warning shows a password or a signature.
    """
    url = f"http://me:S3CRET@{refusing_server}/{status}/a.zip?Signature=TOPSIG&X=TOPSIG"
    shown = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            ALL_CALLS[entry](url)
        except (ColabUtilsError, OSError, TypeError) as error:
            shown = traceback.format_exception(error)
    shown += [str(warning.message) for warning in warned]
    assert not re.search("S3CRET|TOPSIG|mount Drive", "".join(shown))
    clean(place)


@pytest.mark.parametrize("images", ["s3://bucket/export.zip", "s3://bucket/images"])
def test_a_notebook_refuses_a_dataset_of_a_bucket(tmp_path, images):
    workspace = Workspace.open(tmp_path / "drive", ssd=tmp_path / "ssd")
    with pytest.raises(ColabUtilsError, match=MESSAGE):
        ensure_dataset(workspace, images=images, annotations="a.json")
    assert not (tmp_path / "drive" / "settings.json").exists()


COMMANDS = _make_parser()._subparsers._group_actions[0].choices


def list_path_options():
    """Every option whose value is a folder or a file, and whether it may be a URL."""
    return [
        (command, action.option_strings[0], action.metavar.endswith("URL"))
        for command, parser in COMMANDS.items()
        for action in parser._actions
        if str(action.metavar).startswith(("DIR", "FILE"))
    ]


@pytest.mark.parametrize(("command", "option", "takes_url"), list_path_options())
def test_every_option_refuses_a_url_that_it_cannot_read_before_any_work(
    place, capsys, command, option, takes_url
):
    needed = [action.option_strings for action in COMMANDS[command]._actions if action.required]
    # What stands behind a script is the script's.
    words = [word for name in needed if option not in name for word in (*name, "images")]
    assert main([command, option, UNKNOWN, *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    reason = f"The URL {UNKNOWN} is not a folder or file on this machine. Mount it "
    if takes_url:
        reason = f"{UNKNOWN} cannot be reached (ImportError: Install tosfs"
    assert printed.err.startswith(f"error: {reason}")
