"""Zips of COCO exports, unpacked once; and every way in which they, their server or the disk
fail.
"""

from __future__ import annotations

import os
import socket
import stat
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

from colab_utils.data.archives import unpack_dataset
from colab_utils.data.checks import check_dataset
from colab_utils.data.coco import open_coco
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from tests import file_server

JSON = "annotations/instances_train.json"
NAME = b'"file_name": "'


def read_images(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def put(folder, files):
    return {f"{folder}/{name}": content for name, content in files.items()}


def pack(path, files, kind=zipfile.ZIP_STORED):
    """Write a zip of files by their names; return its path."""
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return str(path)


def write_zip(path, dataset, *, more=(), kind=zipfile.ZIP_STORED):
    """An export as COCO's own tools make them; ``more`` are (name or ZipInfo, bytes) beside it."""
    files = {"train/": b"", **put("train", read_images(dataset.images))}
    return pack(path, {**files, JSON: dataset.annotations.read_bytes(), **dict(more)}, kind)


def rename_images(dataset, start):
    """Return the JSON of a dataset whose names of images begin with ``start``."""
    return dataset.annotations.read_text().replace('"file_name": "', f'"file_name": "{start}')


@pytest.fixture
def export(tmp_path, tiny_dataset):
    return write_zip(tmp_path / "export.zip", tiny_dataset)


@pytest.fixture
def ssd(tmp_path):
    return tmp_path / "ssd"


def assert_same(unpacked, dataset):
    images, annotations = unpacked
    assert annotations.read_bytes() == dataset.annotations.read_bytes()
    assert read_images(images) == read_images(dataset.images)
    assert check_dataset(images, annotations).ok


# Zips that are understood, made of images and their JSON; and the image folder that is meant.
LAYOUTS = {
    "folders": (lambda images, text: {**put("deep/er/images", images), JSON: text}, "images"),
    "shared": (lambda images, text: {**put("annotations", images), JSON: text}, "annotations"),
    "backslashes": (
        lambda images, text: {
            "export\\images\\": b"",
            **{f"export\\images\\{name}": content for name, content in images.items()},
            "export\\instances.json": text,
        },
        "images",
    ),
    # The JSON names the images with their folder.
    "named": (
        lambda images, text: {
            **put("project/images", images),
            "project/result.json": text.replace(NAME, NAME + b"images/"),
        },
        "project",
    ),
    # As COCO packs it, with files that systems and tools leave, and one that no annotation names.
    "leftovers": (
        lambda images, text: {
            **put("train", images),
            JSON: text,
            "__MACOSX/train/._instances_train.json": b"left",
            "annotations/.ipynb_checkpoints/instances_train-checkpoint.json": b"left",
            "README.txt": b"left",
        },
        "train",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_images_and_annotations_are_unpacked_once(tmp_path, tiny_dataset, ssd, name, monkeypatch):
    make, folder = LAYOUTS[name]
    content = read_images(tiny_dataset.images)
    source = pack(tmp_path / "a.zip", make(content, tiny_dataset.annotations.read_bytes()))
    images, annotations = unpack_dataset(source, ssd)
    assert images.name == folder
    assert check_dataset(images, annotations).ok
    unpacked = {path.name: path.read_bytes() for path in ssd.rglob("*.jpg")}
    assert unpacked == content
    # The second call opens nothing again.
    monkeypatch.setattr(zipfile.ZipFile, "__init__", None)
    assert unpack_dataset(source, ssd) == (images, annotations)


def test_of_several_jsons_one_is_to_be_named(tmp_path, tiny_dataset, ssd):
    more = [("valid/_annotations.coco.json", b"{}"), ("annotations/captions.json", b"{}")]
    source = write_zip(tmp_path / "export.zip", tiny_dataset, more=more)
    with pytest.raises(
        ColabUtilsError, match=r"3 files .* are a \.json: .*instances_train\.json.*ANNOTATIONS"
    ):
        unpack_dataset(source, ssd)
    assert_same(unpack_dataset(source, ssd, "instances_train.json"), tiny_dataset)
    assert_same(unpack_dataset(source, ssd, JSON), tiny_dataset)
    with pytest.raises(
        ColabUtilsError, match=r"0 files in .*export\.zip are train\.json: it holds .*ANNOTATIONS"
    ):
        unpack_dataset(source, ssd, "train.json")


@pytest.mark.parametrize("head", [bytes(512), b"<!doctype html>", b"1 2 3 4 5"])
def test_a_zip_may_begin_with_something_else(tiny_dataset, export, ssd, head):
    content = Path(export).read_bytes()
    Path(export).write_bytes(head + content)
    assert_same(unpack_dataset(export, ssd), tiny_dataset)


def test_a_changed_zip_is_unpacked_anew(tiny_dataset, export, ssd):
    before = unpack_dataset(export, ssd)
    os.utime(export, ns=(0, 1))
    after = unpack_dataset(export, ssd)
    assert after[0] != before[0]
    assert_same(after, tiny_dataset)


def make_link():
    link = zipfile.ZipInfo("train/link.jpg")
    link.create_system = 3
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    return link


@pytest.mark.parametrize(
    "name",
    [
        "../evil.jpg",
        "/tmp/evil.jpg",
        "C:\\evil.jpg",
        "a\\..\\..\\evil.jpg",
        # The next file would be written through this link.
        make_link(),
    ],
)
def test_nothing_is_written_outside_of_the_folder(tmp_path, tiny_dataset, ssd, name):
    source = write_zip(tmp_path / "export.zip", tiny_dataset, more=[(name, b"/etc/passwd")])
    unpacked = unpack_dataset(source, ssd)
    assert unpacked[1].read_bytes() == tiny_dataset.annotations.read_bytes()
    outside = [path for path in tmp_path.rglob("*") if not path.is_relative_to(ssd)]
    assert {path for path in outside if path.is_file()} == {tmp_path / "export.zip"}
    assert not [path for path in ssd.rglob("*") if path.is_symlink()]
    assert not Path("/tmp/evil.jpg").exists()


@pytest.mark.parametrize(
    "kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
)
def test_damage_amid_a_zip_is_told_whatever_packed_it(tmp_path, tiny_dataset, ssd, kind):
    path = Path(write_zip(tmp_path / "export.zip", tiny_dataset, kind=kind))
    with zipfile.ZipFile(path) as archive:
        place = archive.getinfo(JSON).header_offset + 200
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(60 * b"\xff")
    with pytest.raises(ColabUtilsError, match="cannot be read"):
        unpack_dataset(str(path), ssd)


def test_images_under_names_of_another_machine_are_unpacked_and_found(tmp_path, tiny_dataset, ssd):
    text = rename_images(tiny_dataset, "C:\\\\export\\\\")
    more = [("x.txt", b""), (JSON, text)]
    source = write_zip(tmp_path / "export.zip", tiny_dataset, more=more)
    images, annotations = unpack_dataset(source, ssd)
    with pytest.warns(ColabUtilsWarning, match="do not lie where the annotations say"):
        dataset = open_coco(images, annotations)
    paths = [dataset.find_image(images, i)[0] for i in range(len(dataset))]
    expected = read_images(tiny_dataset.images)
    assert {path.name: path.read_bytes() for path in paths} == expected


def test_a_full_disk_is_told_before_and_while_it_is_written(export, tiny_dataset, ssd, monkeypatch):
    def fill(self, info, target):
        # Half of a file is left.
        Path(target, JSON).parent.mkdir(parents=True)
        Path(target, JSON).write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    for name, value, message in (
        (
            "colab_utils.machine.find_free_space",
            lambda _: 1000,
            r"of free disk, and 1\.0 kB are free\. Free some space, or name",
        ),
        ("zipfile.ZipFile.extract", fill, "No space left on device"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            with pytest.raises(ColabUtilsError, match=message):
                unpack_dataset(export, ssd)
    assert_same(unpack_dataset(export, ssd), tiny_dataset)


class Handler(file_server.Handler):
    """Answers with the server's content, or with its start, and closes the connection."""

    def do_GET(self):  # noqa: N802
        server = self.server
        server.paths.append(self.path)
        if "no.zip" in self.path:
            self.send_error(404)
            return
        self.send_response(200)
        if server.tells_size:
            self.send_header("Content-Length", len(server.content))
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(server.content[: server.ends.pop(0)])
        self.close_connection = True


class Server(file_server.FileServer):
    """Serves one file, for as long as its block lasts."""

    handler = Handler

    def __init__(self, file):
        super().__init__(file.parent, file.parent)
        self.content = file.read_bytes()
        self.tells_size = True
        # Where each answer ends. None stands for a whole answer.
        self.ends = [None, None]
        self.paths = []
        self.url += "/files/export.zip?key=SECRET"


@pytest.fixture
def server(export):
    with Server(Path(export)) as server:
        yield server


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<!DOCTYPE html><title>Quota exceeded</title>", "it is a web page: download the file"),
        (b"version https://git-lfs.github.com/spec/v1", "it is a Git LFS pointer"),
        (b"Rar!\x1a\x07\x01\x00", "it is a RAR archive: unpack it first"),
        (b"a.jpg".ljust(257, b"\0") + b"ustar", "it is a tar archive: unpack it first"),
        (b"", "it is an empty file: copy it again"),
        # The zip is cut short.
        (b"PK\3\4" + bytes(99), "not a zip file"),
    ],
)
def test_what_is_no_whole_zip_is_named_from_a_disk_and_from_a_url(
    server, tmp_path, ssd, content, message
):
    (tmp_path / "x.zip").write_bytes(content)
    server.content = content
    for source in (str(tmp_path / "x.zip"), server.url):
        with pytest.raises(ColabUtilsError, match=rf"cannot be read: .*{message}"):
            unpack_dataset(source, ssd)
    assert not list(ssd.rglob("*.zip"))


@pytest.mark.parametrize("tells_size", [True, False])
def test_a_zip_at_a_url_is_downloaded_once_it_comes_whole(server, tiny_dataset, ssd, tells_size):
    server.tells_size = tells_size
    server.ends[0] = 10_000
    with pytest.raises(ColabUtilsError, match=r"export\.zip.* cannot be read"):
        unpack_dataset(server.url, ssd)
    assert not list(ssd.rglob("*.zip"))
    unpacked = unpack_dataset(server.url, ssd)
    assert_same(unpacked, tiny_dataset)
    assert unpack_dataset(server.url, ssd) == unpacked
    assert len(server.paths) == 2
    assert not list(ssd.rglob("*.zip"))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", ".*404.*Not Found"),
        ("http://127.0.0.1:1/x.zip", ""),
        ("http://[/x.zip", ""),
        ("http://me:SECRET@a.b/x.zip", ""),
    ],
)
def test_an_address_that_gives_nothing_is_told_at_once(server, ssd, url, reason):
    with pytest.raises(
        ColabUtilsError, match=rf"The zip at http{reason}.*Check IMAGES and the network"
    ) as error:
        unpack_dataset(url or server.url.replace("export", "no"), ssd)
    assert "SECRET" not in str(error.value)
    assert len(server.paths) == (not url)


def test_a_server_that_falls_silent_is_given_up(ssd, monkeypatch):
    monkeypatch.setattr("colab_utils.data.archives._SILENT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x.zip"
        with pytest.raises(ColabUtilsError, match=r"The zip at .*timed out.*Check IMAGES"):
            unpack_dataset(url, ssd)


def test_names_with_spaces_and_letters_of_any_language_are_addresses(server, tiny_dataset, ssd):
    url = server.url.replace("export.zip?key=SECRET", "my 图片.zip")
    assert_same(unpack_dataset(url.replace("http", "HTTP", 1), ssd), tiny_dataset)
    assert server.paths == ["/files/my%20%E5%9B%BE%E7%89%87.zip"]


class OldName(zipfile.ZipInfo):
    """A file whose name is in a code page, without the mark of UTF-8."""

    def __init__(self, name, page):
        super().__init__(name)
        self.page = page

    def _encodeFilenameFlags(self):  # noqa: N802
        return self.filename.encode(self.page), self.flag_bits & ~0x800


def write_old_zip(path, dataset, page, stem):
    """An export of a dataset whose names begin with ``stem``, in a code page."""
    images = {f"{stem}{name}": content for name, content in read_images(dataset.images).items()}
    files = {**put(f"{stem} 1", images), f"{stem}.json": rename_images(dataset, stem)}
    return pack(path, {OldName(name, page): content for name, content in files.items()})


def test_names_that_macos_wrote_are_utf8_and_those_of_another_page_are_told(
    tmp_path, tiny_dataset, ssd
):
    stem = "图片 été"
    source = write_old_zip(tmp_path / "export.zip", tiny_dataset, "utf-8", stem)
    for named in ("", f"{stem}.json"):
        images, annotations = unpack_dataset(source, ssd, named)
        assert images.name == f"{stem} 1"
        assert all(path.name.startswith(stem) for path in images.iterdir())
        assert check_dataset(images, annotations).ok
    source = write_old_zip(tmp_path / "other.zip", tiny_dataset, "gbk", "图片")
    with pytest.raises(ColabUtilsError, match=r"12 of the 12 images.*names in UTF-8"):
        unpack_dataset(source, ssd)


@pytest.mark.parametrize("split", ["train", "valid"])
def test_of_splits_with_equal_names_the_one_beside_the_json_is_taken(
    tmp_path, tiny_dataset, ssd, split
):
    """Roboflow's zips have the JSON of each split beside its images."""
    files = {}
    for part in ("train", "valid"):
        files |= put(part, dict.fromkeys(read_images(tiny_dataset.images), part))
        files[f"{part}/_annotations.coco.json"] = tiny_dataset.annotations.read_bytes()
    source = pack(tmp_path / "splits.zip", files)
    images, _ = unpack_dataset(source, ssd, f"{split}/_annotations.coco.json")
    assert {path.read_text() for path in images.glob("*.jpg")} == {split}


# What is refused: the files of a zip by its name, made of images and their JSON, and the message.
REFUSED = {
    "pictures.zip": (
        lambda images, _: images,
        r"0 files in .*pictures\.zip are a \.json: it holds .*jpg.*COCO",
    ),
    "texts.zip": (
        lambda _, text: {JSON: text},
        r"12 of the 12 images of the JSON are not in .*texts\.zip",
    ),
    "nested.zip": (
        lambda _, text: {JSON: text, "images.tar.gz": b"PK"},
        r"holds .*images\.tar\.gz.* unpack all",
    ),
    "zips.zip": (lambda *_: {"images.zip": b"PK"}, r"it holds images\.zip"),
    "photos-20260101T120000Z-1-001.zip": (
        lambda images, text: {JSON: text, **put("train", dict([*images.items()][:8]))},
        r"4 of the 12 images .*one of several zips",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_zip_that_is_no_whole_export_is_told(tmp_path, tiny_dataset, ssd, name):
    make, message = REFUSED[name]
    files = make(read_images(tiny_dataset.images), tiny_dataset.annotations.read_bytes())
    source = pack(tmp_path / name, files)
    with pytest.raises(ColabUtilsError, match=message):
        unpack_dataset(source, ssd)


def test_of_an_image_that_lies_twice_none_is_guessed(tmp_path, tiny_dataset, ssd):
    """One image of a dozen may be missing, too."""
    images = read_images(tiny_dataset.images)
    [twice, missing, *_] = sorted(images)
    del images[missing]
    files = {JSON: tiny_dataset.annotations.read_bytes(), **put("train", images)}
    source = pack(tmp_path / "photos.zip", {**files, f"copy/{twice}": b""})
    images, annotations = unpack_dataset(source, ssd)
    report = check_dataset(images, annotations)
    problems = {problem.kind: problem for problem in report.problems}
    assert problems["missing image"].count == 2
    assert "several folders" in str(problems["missing image"].examples)
