"""Zips of COCO exports, unpacked once; and every way in which they, their server or the disk
fail.
"""

from __future__ import annotations

import io
import json
import os
import socket
import stat
import threading
import time
import zipfile
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from colab_utils import drive
from colab_utils.data.archives import is_archive, unpack_dataset
from colab_utils.data.checks import check_dataset
from colab_utils.data.coco import open_coco
from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning

JSON = "annotations/instances_train.json"


def write_zip(path, dataset, *, folder="train", more=(), kind=zipfile.ZIP_STORED):
    """An export as COCO's own tools make them; ``more`` are (name or ZipInfo, bytes) beside it."""
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.mkdir(folder)
        for image in sorted(dataset.images.iterdir()):
            archive.write(image, f"{folder}/{image.name}")
        archive.write(dataset.annotations, JSON)
        for name, content in more:
            archive.writestr(name, content)
    return str(path)


@pytest.fixture
def export(tmp_path, tiny_dataset):
    return write_zip(tmp_path / "export.zip", tiny_dataset)


@pytest.fixture
def ssd(tmp_path):
    return tmp_path / "ssd"


def assert_same(unpacked, dataset):
    images, annotations = unpacked
    assert annotations.read_bytes() == dataset.annotations.read_bytes()
    assert {path.name: path.read_bytes() for path in images.iterdir()} == {
        path.name: path.read_bytes() for path in dataset.images.iterdir()
    }
    assert check_dataset(images, annotations).ok


def test_a_zip_or_a_url_is_told_from_a_folder(tmp_path):
    (tmp_path / "folder.zip").mkdir()
    names = (
        "https://a.org/x",
        "HTTP://a.org/x.ZIP".lower(),
        "a/b.ZIP",
        "a/b",
        str(tmp_path / "folder.zip"),
        "",
    )
    assert [is_archive(name) for name in names] == [True, True, True, False, False, False]


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        # COCO packs its images like this.
        ("train", zipfile.ZIP_STORED),
        # Here the images lie in a folder within folders.
        ("deep/er/images", zipfile.ZIP_DEFLATED),
        # Images and JSON share a folder.
        ("annotations", zipfile.ZIP_STORED),
    ],
)
def test_images_and_annotations_are_unpacked_once(
    tmp_path, tiny_dataset, ssd, folder, kind, monkeypatch
):
    source = write_zip(
        tmp_path / "export.zip",
        tiny_dataset,
        folder=folder,
        kind=kind,
        more=[("README.txt", b"no")],
    )
    images, annotations = unpack_dataset(source, ssd)
    assert annotations.name == "instances_train.json"
    assert {path.name for path in images.iterdir() if path.suffix == ".jpg"} == {
        path.name for path in tiny_dataset.images.iterdir()
    }
    assert check_dataset(images, annotations).ok
    # What no annotation names is left in the zip.
    assert not list(ssd.rglob("README.txt"))
    # The second call opens nothing again.
    monkeypatch.setattr(zipfile.ZipFile, "__init__", None)
    assert unpack_dataset(source, ssd) == (images, annotations)


def test_names_with_folders_are_found_below_the_right_one(tmp_path, tiny_dataset, ssd):
    content = json.loads(tiny_dataset.annotations.read_text())
    for image in content["images"]:
        image["file_name"] = f"images/{image['file_name']}"
    with zipfile.ZipFile(tmp_path / "export.zip", "w") as archive:
        for path in tiny_dataset.images.iterdir():
            archive.write(path, f"project/images/{path.name}")
        archive.writestr("project/result.json", json.dumps(content))
        # macOS adds such files.
        archive.writestr("__MACOSX/project/._result.json", b"\0\5\26\7")
    images, annotations = unpack_dataset(str(tmp_path / "export.zip"), ssd)
    assert images.name == "project"
    assert check_dataset(images, annotations).ok


def test_of_several_jsons_one_is_to_be_named(tmp_path, tiny_dataset, ssd):
    more = [("valid/_annotations.coco.json", b"{}"), ("annotations/captions.json", b"{}")]
    source = write_zip(tmp_path / "export.zip", tiny_dataset, more=more)
    with pytest.raises(
        ColabUtilsError, match=r"instances_train\.json, valid/_annotations.*ANNOTATIONS"
    ):
        unpack_dataset(source, ssd)
    assert_same(unpack_dataset(source, ssd, "instances_train.json"), tiny_dataset)
    assert_same(unpack_dataset(source, ssd, JSON), tiny_dataset)
    with pytest.raises(
        ColabUtilsError, match=r"files in .*export\.zip is train\.json.*ANNOTATIONS"
    ):
        unpack_dataset(source, ssd, "train.json")


def test_a_changed_zip_is_unpacked_anew(tmp_path, tiny_dataset, export, ssd):
    before = unpack_dataset(export, ssd)
    content = json.loads(tiny_dataset.annotations.read_text())
    wanted = {image["file_name"] for image in content["images"][:3]}
    content["images"] = content["images"][:3]
    with zipfile.ZipFile(export, "w") as archive:
        for name in wanted:
            archive.write(tiny_dataset.images / name, f"train/{name}")
        archive.writestr(JSON, json.dumps({**content, "annotations": []}))
    os.utime(export, ns=(0, 1))
    images, _ = unpack_dataset(export, ssd)
    assert images != before[0]
    assert {path.name for path in images.iterdir()} == wanted


def test_an_unpacking_that_was_stopped_goes_on(tiny_dataset, export, ssd, monkeypatch):
    extract = zipfile.ZipFile.extract
    asked = []

    def stop(self, info, target):
        asked.append(info.filename)
        if len(asked) == 6:
            # A killed process leaves half a file like this.
            (Path(target) / info.filename).write_bytes(b"half of it")
            raise KeyboardInterrupt
        return extract(self, info, target)

    monkeypatch.setattr(zipfile.ZipFile, "extract", stop)
    with pytest.raises(KeyboardInterrupt):
        unpack_dataset(export, ssd)
    first = asked[:]
    assert_same(unpack_dataset(export, ssd), tiny_dataset)
    # The file that was half written comes again.
    assert asked[6:][0] == first[5]
    assert not set(asked[6:]) & set(first[:5])


def test_a_flipped_bit_is_found(tiny_dataset, export, ssd):
    with zipfile.ZipFile(export) as archive:
        place = archive.infolist()[3].header_offset + 2000
    with open(export, "r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(
        ColabUtilsError, match=r"export\.zip is not a whole zip of a COCO export.*Bad CRC-32"
    ):
        unpack_dataset(export, ssd)


def make_link():
    link = zipfile.ZipInfo("train/link.jpg")
    link.create_system = 3
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    return link


@pytest.mark.parametrize(
    "name",
    [
        # This leaves the folder.
        "../evil.jpg",
        # This leaves the folder later in the path.
        "train/../../evil.jpg",
        # This path is absolute.
        "/tmp/evil.jpg",
        # This path is absolute on Windows.
        "C:\\evil.jpg",
        # This leaves the folder with the slashes of Windows.
        "..\\evil.jpg",
        # This is a link, through which the next file would be written.
        make_link(),
    ],
)
def test_what_leads_out_of_the_zip_is_refused_before_anything_is_written(
    tmp_path, tiny_dataset, ssd, name
):
    source = write_zip(tmp_path / "export.zip", tiny_dataset, more=[(name, b"/etc/passwd")])
    with pytest.raises(ColabUtilsError, match=r"(evil|link)\.jpg.*nothing is unpacked"):
        unpack_dataset(source, ssd)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".zip"]


def encrypt(path):
    content = bytearray(path.read_bytes())
    for mark, flags in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        place = content.find(mark)
        while place >= 0:
            content[place + flags] |= 1
            place = content.find(mark, place + 4)
    path.write_bytes(content)


@pytest.mark.parametrize(
    "kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
)
def test_damage_amid_a_zip_is_told_whatever_packed_it(tmp_path, tiny_dataset, ssd, kind):
    path = Path(write_zip(tmp_path / "export.zip", tiny_dataset, kind=kind))
    with zipfile.ZipFile(path) as archive:
        place = archive.getinfo(JSON).header_offset + 200
    content = bytearray(path.read_bytes())
    content[place : place + 60] = 60 * b"\xff"
    path.write_bytes(content)
    with pytest.raises(ColabUtilsError, match="is not a whole zip of a COCO export"):
        unpack_dataset(str(path), ssd)


def test_names_that_no_disk_takes_are_told_and_an_empty_one_leads_nowhere(
    tmp_path, tiny_dataset, ssd
):
    content = json.loads(tiny_dataset.annotations.read_text())
    content["images"][0]["file_name"] = "x" * 300
    with zipfile.ZipFile(tmp_path / "long.zip", "w") as archive:
        archive.writestr("a.json", json.dumps(content))
        archive.writestr("x" * 300, b"1")
    with pytest.raises(ColabUtilsError, match=r"not a whole zip .*File name too long"):
        unpack_dataset(str(tmp_path / "long.zip"), ssd)
    content["images"][0]["file_name"] = ""
    with zipfile.ZipFile(tmp_path / "empty.zip", "w") as archive:
        archive.writestr("a.json", json.dumps(content))
        archive.mkdir("images")
    with pytest.raises(ColabUtilsError, match=r"empty\.zip has none of the .* images of a\.json"):
        unpack_dataset(str(tmp_path / "empty.zip"), ssd)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        # The file is empty.
        (lambda path: path.write_bytes(b""), "an empty file"),
        # The file is a web page.
        (lambda path: path.write_bytes(b"<!doctype html>" * 99), "a web page"),
        # The file is cut short.
        (
            lambda path: path.write_bytes(path.read_bytes()[:-3000]),
            "not a zip file",
        ),
    ],
)
def test_what_is_no_whole_zip_is_told(export, ssd, break_it, words):
    break_it(Path(export))
    with pytest.raises(
        ColabUtilsError, match=rf"export\.zip is not a whole zip of a COCO export.*{words}"
    ):
        unpack_dataset(export, ssd)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ([("a\x1b[2J.txt", b"1")], "a name with control characters"),
        ([("a\u202egpj.exe", b"1")], "a name with control characters"),
    ],
)
def test_what_no_export_holds_is_refused_before_anything_is_written(
    tmp_path, tiny_dataset, ssd, more, why
):
    source = write_zip(tmp_path / "export.zip", tiny_dataset, more=more, kind=zipfile.ZIP_DEFLATED)
    with pytest.raises(ColabUtilsError, match=f"{why}.*, so nothing is unpacked") as error:
        unpack_dataset(source, ssd)
    assert str(error.value).isprintable()
    assert not [path for path in ssd.rglob("*") if path.is_file()]


def test_images_under_names_of_another_machine_are_unpacked_and_found(tmp_path, tiny_dataset, ssd):
    coco = json.loads(tiny_dataset.annotations.read_text())
    for image in coco["images"]:
        image["file_name"] = f"C:\\export\\{image['file_name']}"
    changed = tmp_path / "a.json"
    changed.write_text(json.dumps(coco))
    source = write_zip(
        tmp_path / "export.zip", replace(tiny_dataset, annotations=changed), more=[("x.txt", b"")]
    )
    images, annotations = unpack_dataset(source, ssd)
    with pytest.warns(ColabUtilsWarning, match="do not lie where the annotations say"):
        dataset = open_coco(images, annotations)
    assert [dataset.find_image(images, i)[0].read_bytes() for i in range(len(dataset))] == [
        (tiny_dataset.images / image["file_name"].split("\\")[-1]).read_bytes()
        for image in coco["images"]
    ]


def test_an_encrypted_zip_is_told(export, ssd):
    encrypt(Path(export))
    with pytest.raises(
        ColabUtilsError, match=r"not a whole zip .* it has a password.*Zip it again without"
    ):
        unpack_dataset(export, ssd)


def test_a_zip_without_annotations_or_images_is_told(tmp_path, tiny_dataset, ssd):
    pictures = tmp_path / "pictures.zip"
    texts = tmp_path / "texts.zip"
    with zipfile.ZipFile(pictures, "w") as archive:
        for path in tiny_dataset.images.iterdir():
            archive.write(path, path.name)
    with zipfile.ZipFile(texts, "w") as archive:
        archive.write(tiny_dataset.annotations, JSON)
    with pytest.raises(
        ColabUtilsError, match=r"None of the 12 files in .*pictures\.zip is a \.json.*COCO"
    ):
        unpack_dataset(str(pictures), ssd)
    with pytest.raises(ColabUtilsError, match=r"texts\.zip has none of the 12 images of"):
        unpack_dataset(str(texts), ssd)
    with zipfile.ZipFile(texts, "w") as archive:
        archive.writestr("captions.json", '{"images": [], "annotations": []}')
    with pytest.raises(ColabUtilsError, match="does not hold COCO instances"):
        unpack_dataset(str(texts), ssd)
    with pytest.raises(ColabUtilsError, match=r"There is no zip at .*none\.zip\. Check IMAGES"):
        unpack_dataset(str(tmp_path / "none.zip"), ssd)


def test_a_full_disk_is_told_before_and_while_it_is_written(export, tiny_dataset, ssd, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("colab_utils.machine.find_free_space", lambda folder: 1000)
        with pytest.raises(
            ColabUtilsError, match=r"of free disk, and 1\.0 kB are free\. Free some space, or name"
        ):
            unpack_dataset(export, ssd)

    def fill(self, info, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(zipfile.ZipFile, "extract", fill)
        with pytest.raises(ColabUtilsError, match=r"No space left on device.*it continues there"):
            unpack_dataset(export, ssd)
    assert_same(unpack_dataset(export, ssd), tiny_dataset)


class Server(ThreadingHTTPServer):
    """A web server of one file. It knows no HEAD, as addresses that are signed for GET."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = b""
        self.knows_ranges = True
        self.tells_size = True
        # Bytes after which the next answers break off. None stands for a whole answer.
        self.breaks = []
        # The next answers have these statuses.
        self.statuses = []
        # Ranges, paths and accepted encodings of all requests.
        self.asked = []
        self.paths = []
        self.encodings = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/files/export.zip?key=secret"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server = self.server
        server.paths.append(self.path)
        if self.path.startswith("/moved"):
            self.send_response(302)
            self.send_header("Location", server.url)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        part = self.headers["Range"]
        server.asked.append(part)
        server.encodings.append(self.headers["Accept-Encoding"])
        knows_ranges = server.knows_ranges
        size = len(server.content)
        start = 0
        stop = size
        if knows_ranges:
            first, last = map(int, part.removeprefix("bytes=").split("-"))
            start = first
            stop = min(size, last + 1)
        status = server.statuses.pop(0) if server.statuses else 200
        if status != 200 or start >= size:
            self.send_error(416 if status == 200 else status)
            return
        self.send_response(206 if knows_ranges else 200)
        if knows_ranges:
            total = size if server.tells_size else "*"
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{total}")
        if server.tells_size:
            self.send_header("Content-Length", str(stop - start))
        else:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        end = server.breaks.pop(0) if server.breaks else None
        content = server.content[start:stop]
        if not server.tells_size:
            # All bytes are one chunk, and an empty chunk is the end.
            content = b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)
        # The reader closes the connection when it has what it needs.
        with suppress(OSError):
            self.wfile.write(content[:end])
        self.close_connection = end is not None

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(export):
    server = Server()
    server.content = Path(export).read_bytes()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def find_start(server, name):
    """Return the byte of the server's zip with which a file in it begins."""
    with zipfile.ZipFile(io.BytesIO(server.content)) as archive:
        return archive.getinfo(name).header_offset


def find_starts(server):
    """Return the byte with which each request begins."""
    return [int(part.removeprefix("bytes=").partition("-")[0]) for part in server.asked]


def list_images(server):
    """Return the names of the images in the server's zip, in its order."""
    with zipfile.ZipFile(io.BytesIO(server.content)) as archive:
        return [name for name in archive.namelist() if name.endswith(".jpg")]


def test_a_zip_at_a_url_stays_there_and_is_not_asked_again(server, tiny_dataset, ssd, monkeypatch):
    monkeypatch.setattr("builtins.open", refuse_zips(open))
    unpacked = unpack_dataset(server.url, ssd)
    assert_same(unpacked, tiny_dataset)
    # All images come by the last request.
    assert find_starts(server)[-1] == find_start(server, list_images(server)[0])
    count = len(server.asked)
    assert count <= 8
    assert unpack_dataset(server.url, ssd) == unpacked
    assert len(server.asked) == count


def refuse_zips(open_any):
    """Return an ``open`` that never makes a zip."""

    def open_other(path, *arguments, **options):
        assert not str(path).endswith(".zip")
        return open_any(path, *arguments, **options)

    return open_other


def test_files_that_no_annotation_names_are_not_asked_for(tmp_path, server, tiny_dataset, ssd):
    path = tmp_path / "large.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("videos/long.mp4", os.urandom(12_000_000))
        archive.write(tiny_dataset.annotations, JSON)
        for image in sorted(tiny_dataset.images.iterdir()):
            archive.write(image, f"train/{image.name}")
        archive.writestr("videos/longer.mp4", os.urandom(12_000_000))
    server.content = path.read_bytes()
    assert_same(unpack_dataset(server.url, ssd), tiny_dataset)
    # The first request asks for one byte, to learn the size.
    assert min(find_starts(server)[2:]) >= find_start(server, JSON)


def test_a_file_in_another_order_than_the_listing_of_its_zip_comes_by_one_request(
    server, tiny_dataset, ssd, tmp_path
):
    with zipfile.ZipFile(tmp_path / "turned.zip", "w") as archive:
        for image in sorted(tiny_dataset.images.iterdir()):
            archive.write(image, f"train/{image.name}")
        archive.write(tiny_dataset.annotations, JSON)
        archive.filelist.reverse()
    server.content = (tmp_path / "turned.zip").read_bytes()
    assert_same(unpack_dataset(server.url, ssd), tiny_dataset)
    assert len(server.asked) <= 8


def test_an_answer_that_breaks_off_goes_on_where_it_was(server, tiny_dataset, ssd):
    unpack_dataset(server.url, ssd / "first")
    count = len(server.asked)
    server.asked.clear()
    server.breaks = [None] * (count - 1) + [10_000, 0, 5_000]
    assert_same(unpack_dataset(server.url, ssd / "second"), tiny_dataset)
    starts = find_starts(server)[count - 1 :]
    assert len(starts) == 4
    assert starts == sorted(starts)


@pytest.mark.parametrize(("knows_ranges", "tells_size"), [(False, True), (True, False)])
def test_a_server_that_sends_no_parts_or_tells_no_size_is_refused_at_once(
    server, ssd, knows_ranges, tells_size
):
    server.knows_ranges = knows_ranges
    server.tells_size = tells_size
    with pytest.raises(ColabUtilsError, match=r"http.*sends no parts of files\. Copy") as error:
        unpack_dataset(server.url, ssd)
    assert "secret" not in str(error.value)
    assert len(server.asked) == 1


def test_a_server_that_stays_away_is_told_and_asked_again_in_the_next_call(
    server, tiny_dataset, ssd
):
    server.breaks = [None, None] + [0] * (1 + len(drive.RETRY_WAITS_S))
    with pytest.raises(
        DriveLostError, match=r"http.*the server failed .*Run the same again later"
    ) as error:
        unpack_dataset(server.url, ssd)
    assert "secret" not in str(error.value)
    assert_same(unpack_dataset(server.url, ssd), tiny_dataset)


def stop_unpacking(server, ssd, monkeypatch, *, before):
    """Unpack the server's zip up to one file, and stop there as by Ctrl-C."""
    extract = zipfile.ZipFile.extract

    def stop(self, info, target):
        if info.filename == before:
            raise KeyboardInterrupt
        return extract(self, info, target)

    with monkeypatch.context() as patch:
        patch.setattr(zipfile.ZipFile, "extract", stop)
        with pytest.raises(KeyboardInterrupt):
            unpack_dataset(server.url, ssd)


def test_an_unpacking_from_a_url_that_was_stopped_goes_on(server, tiny_dataset, ssd, monkeypatch):
    names = list_images(server)
    stop_unpacking(server, ssd, monkeypatch, before=names[5])
    assert_same(unpack_dataset(server.url, ssd), tiny_dataset)
    assert find_starts(server)[-1] == find_start(server, names[5])


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (404, "There is no zip at http.*Check IMAGES"),
        (403, "http.*refused .403 Forbidden.*Look at the address"),
        (503, "http.*failed .503 Service Unavailable.*Run the same again later"),
    ],
)
def test_a_server_that_gives_nothing_is_told_at_once(server, ssd, status, words):
    server.statuses = [status]
    with pytest.raises(ColabUtilsError, match=words) as error:
        unpack_dataset(server.url, ssd)
    assert "secret" not in str(error.value)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("status", "words"),
    [
        # The file was removed meanwhile.
        (404, "There is no zip at http"),
        # The signature of the address has expired meanwhile.
        (403, "the server refused .403 Forbidden.*may have expired"),
    ],
)
def test_a_server_that_refuses_in_the_middle_is_told_at_once(server, ssd, status, words):
    unpack_dataset(server.url, ssd / "first")
    count = len(server.asked)
    server.statuses = [200] * (count - 1) + [status]
    with pytest.raises(ColabUtilsError, match=words) as error:
        unpack_dataset(server.url, ssd / "second")
    assert "secret" not in str(error.value)
    assert len(server.asked) == 2 * count


def test_a_server_that_fails_for_a_moment_is_asked_again(server, tiny_dataset, ssd):
    server.statuses = [200, 503, 429, 500, 200, 502]
    assert_same(unpack_dataset(server.url, ssd), tiny_dataset)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/x.zip", "http://", "http://[/x.zip"])
def test_an_address_without_a_server_is_told_at_once(ssd, url):
    started = time.monotonic()
    with pytest.raises(ColabUtilsError, match=r"http:.* cannot be reached: the server"):
        unpack_dataset(url, ssd)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("url", ["ftp://example.org/x.zip", "s3://bucket/x.zip"])
def test_a_zip_at_another_server_than_a_web_server_is_to_be_copied_first(ssd, url):
    with pytest.raises(ColabUtilsError, match=r"The URL .*, or copy it to a folder first"):
        unpack_dataset(url, ssd)
    assert not ssd.exists()


def test_a_server_that_falls_silent_is_given_up(ssd, monkeypatch):
    monkeypatch.setattr("colab_utils.places._SILENT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x.zip"
        with pytest.raises(ColabUtilsError, match=r"x\.zip cannot be reached: .*[Tt]imeout"):
            unpack_dataset(url, ssd)


def test_a_redirection_to_a_signed_address_is_followed_each_time(server, tiny_dataset, ssd):
    url = server.url.replace("/files/export.zip?key=secret", "/moved/ds/?key=a%2Bb/")
    assert_same(unpack_dataset(url, ssd), tiny_dataset)
    # Each slash of the address arrives.
    assert server.paths[0] == "/moved/ds/?key=a%2Bb/"
    assert server.paths.count("/files/export.zip?key=secret") == len(server.paths) / 2


def test_names_with_spaces_and_letters_of_any_language_are_addresses(server, tiny_dataset, ssd):
    url = server.url.replace("export.zip?key=secret", "my 图片.zip")
    assert_same(unpack_dataset(url.replace("http", "HTTP", 1), ssd), tiny_dataset)
    assert set(server.paths) == {"/files/my%20%E5%9B%BE%E7%89%87.zip"}


def test_a_zip_is_asked_for_as_it_is(server, ssd):
    unpack_dataset(server.url, ssd)
    assert set(server.encodings) == {"identity"}


def test_a_proxy_of_the_environment_is_asked(server, tiny_dataset, ssd, monkeypatch):
    monkeypatch.setenv("http_proxy", server.url.partition("/files")[0])
    assert_same(unpack_dataset("http://nowhere.invalid/export.zip", ssd), tiny_dataset)
    assert set(server.paths) == {"http://nowhere.invalid/export.zip"}


@pytest.mark.parametrize("content", [b"PK", b"<!doctype html> sign in, please"])
def test_what_is_no_zip_at_a_url_is_told_and_asked_for_anew(server, tiny_dataset, ssd, content):
    whole = server.content
    server.content = content
    with pytest.raises(
        ColabUtilsError, match=r"http.*is not a whole zip of a COCO export.*not a zip file"
    ):
        unpack_dataset(server.url, ssd)
    assert not list(ssd.rglob("*.zip"))
    server.content = whole
    assert_same(unpack_dataset(server.url, ssd), tiny_dataset)


def test_an_empty_file_at_a_url_is_told(server, ssd):
    server.content = b""
    with pytest.raises(ColabUtilsError, match=r"http.*refused .416 "):
        unpack_dataset(server.url, ssd)


def test_another_zip_after_a_stop_is_found_by_its_checksums(
    server, tiny_dataset, ssd, monkeypatch, tmp_path
):
    names = list_images(server)
    stop_unpacking(server, ssd, monkeypatch, before=names[5])
    # By now, the first image of the server's zip has other bytes, as many as before.
    with zipfile.ZipFile(io.BytesIO(server.content)) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    contents[names[0]] = contents[names[0]][::-1]
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    server.content = (tmp_path / "other.zip").read_bytes()
    images, _ = unpack_dataset(server.url, ssd)
    assert {f"train/{path.name}": path.read_bytes() for path in images.iterdir()} == {
        name: contents[name] for name in names
    }


def test_a_full_disk_is_told_before_the_first_image_is_asked_for(server, ssd, monkeypatch):
    monkeypatch.setattr("colab_utils.machine.find_free_space", lambda folder: 1000)
    with pytest.raises(ColabUtilsError, match="of free disk, and"):
        unpack_dataset(server.url, ssd)
    assert not [path for path in ssd.rglob("*") if path.is_file()]


class OldName(zipfile.ZipInfo):
    """A file whose name is in a code page, without the mark of UTF-8."""

    page = "cp437"

    def _encodeFilenameFlags(self):  # noqa: N802
        return self.filename.encode(self.page), self.flag_bits & ~0x800


def write_old_zip(path, dataset, page, stem, folder="images"):
    """An export of the dataset's images, called after ``stem``; returns their names."""
    content = json.loads(dataset.annotations.read_text())
    with zipfile.ZipFile(path, "w") as archive:
        for number, image in enumerate(content["images"]):
            data = (dataset.images / image["file_name"]).read_bytes()
            image["file_name"] = f"{stem}_{number}.jpg"
            info = OldName(f"{folder}/{image['file_name']}")
            info.page = page
            archive.writestr(info, data)
        info = OldName(f"{stem}.json")
        info.page = page
        archive.writestr(info, json.dumps(content, ensure_ascii=False))
    return {image["file_name"] for image in content["images"]}


@pytest.mark.parametrize(
    ("page", "stem"),
    [
        ("gbk", "图片"),
        # In Japan's and China's, the second byte of a character may be a backslash.
        ("cp932", "表示"),
        ("gbk", "誠"),
        ("cp949", "사진"),
        ("cp866", "Снимок"),
        ("cp1251", "Снимок"),
        ("cp1252", "été"),
        ("cp850", "Größe"),
        # A zip of macOS has its names in UTF-8.
        ("utf-8", "图片 été"),
    ],
)
def test_names_of_a_code_page_are_those_of_the_json(tmp_path, tiny_dataset, ssd, page, stem):
    path = tmp_path / "export.zip"
    names = write_old_zip(path, tiny_dataset, page, stem, folder=f"{stem} 1")
    for named in ("", f"{stem}.json"):
        images, annotations = unpack_dataset(str(path), ssd, named)
        assert {file.name for file in images.iterdir() if file.suffix == ".jpg"} == names
        assert images.name == f"{stem} 1"
        assert check_dataset(images, annotations).ok


def test_names_that_no_code_page_explains_are_garbled(tmp_path, tiny_dataset, ssd):
    path = tmp_path / "export.zip"
    write_old_zip(path, tiny_dataset, "utf-8", "图片")
    with zipfile.ZipFile(path) as archive:
        content = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            # What the first program made of the names is marked as UTF-8.
            archive.writestr(name, data)
    with pytest.raises(ColabUtilsError, match="The names in the zip are garbled"):
        unpack_dataset(str(path), ssd)


def test_backslashes_part_folders(tmp_path, tiny_dataset, ssd):
    path = tmp_path / "export.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("export\\images\\", b"")
        for image in tiny_dataset.images.iterdir():
            archive.writestr(f"export\\images\\{image.name}", image.read_bytes())
        archive.writestr("export\\annotations.json", tiny_dataset.annotations.read_bytes())
    images, annotations = unpack_dataset(str(path), ssd)
    assert (images.name, annotations.parent.name) == ("images", "export")
    assert_same((images, annotations), tiny_dataset)


@pytest.mark.parametrize(
    "name", ["..\\..\\out.jpg", "a\\..\\..\\out.jpg", "C:\\out.jpg", "\\out.jpg"]
)
def test_backslashes_lead_nowhere_else(tmp_path, tiny_dataset, ssd, name):
    source = write_zip(tmp_path / "export.zip", tiny_dataset, more=[(name, b"")])
    with pytest.raises(ColabUtilsError, match="leads out of it, so nothing is unpacked"):
        unpack_dataset(source, ssd)
    assert not list(tmp_path.rglob("out.jpg"))


@pytest.mark.parametrize(
    ("annotations", "folders"),
    [
        # Roboflow: each split has its JSON beside its images.
        ("{}/_annotations.coco.json", "{}"),
        # COCO and CVAT: the JSON is called after its folder.
        ("annotations/instances_{}.json", "images/{}"),
    ],
)
@pytest.mark.parametrize("split", ["train", "Validation"])
def test_of_splits_with_equal_names_the_one_of_the_json_is_taken(
    tmp_path, tiny_dataset, ssd, annotations, folders, split
):
    source = tmp_path / "splits.zip"
    names = [path.name for path in tiny_dataset.images.iterdir()]
    with zipfile.ZipFile(source, "w") as archive:
        for part in ("train", "Validation"):
            archive.write(tiny_dataset.annotations, annotations.format(part))
            for name in names:
                archive.writestr(f"{folders.format(part)}/{name}", part)
    images, _ = unpack_dataset(str(source), ssd, annotations.format(split))
    assert {(images / name).read_text() for name in names} == {split}


def test_of_copies_in_several_folders_none_is_guessed(tmp_path, tiny_dataset, ssd):
    source = tmp_path / "copies.zip"
    with zipfile.ZipFile(source, "w") as archive:
        archive.write(tiny_dataset.annotations, JSON)
        for folder in ("first", "second"):
            for path in tiny_dataset.images.iterdir():
                archive.writestr(f"{folder}/{path.name}", folder)
    with pytest.raises(
        ColabUtilsError, match=r"in several folders: 'first/', 'second/'\. Unpack the zip"
    ):
        unpack_dataset(str(source), ssd)


@pytest.mark.parametrize(
    "left",
    [
        "train/__MACOSX/._instances.json",
        "._instances.json",
        "annotations/.ipynb_checkpoints/instances_train-checkpoint.json",
        ".vscode/settings.json",
        "@eaDir/thumbs.json",
        ".Trash-0/train/{}",
    ],
)
def test_what_systems_and_tools_leave_in_a_zip_is_passed_over(tmp_path, tiny_dataset, ssd, left):
    name = min(path.name for path in tiny_dataset.images.iterdir())
    more = [(left.format(name), b"left")]
    source = write_zip(tmp_path / "left.zip", tiny_dataset, more=more)
    assert_same(unpack_dataset(source, ssd), tiny_dataset)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<!DOCTYPE html><title>Quota exceeded</title>", "a web page: download the file itself"),
        (b"version https://git-lfs.github.com/spec/v1", "a Git LFS pointer"),
        (b"Rar!\x1a\x07\x01\x00", "a RAR archive: unpack it first"),
        (b"7z\xbc\xaf\x27\x1c", "a 7z archive: unpack it first"),
        (b"\x1f\x8b\x08", "a gzip file: unpack it first"),
        (b"a.jpg".ljust(257, b"\0") + b"ustar", "a tar archive: unpack it first"),
        (b"", "an empty file: copy it again"),
    ],
)
def test_another_file_with_the_name_of_a_zip_is_named(tmp_path, ssd, content, message):
    source = tmp_path / "export.zip"
    source.write_bytes(content)
    with pytest.raises(ColabUtilsError, match=f"it is {message}"):
        unpack_dataset(str(source), ssd)


def test_a_compression_that_python_does_not_know_is_told(export, ssd):
    content = Path(export).read_bytes()
    start = content.rindex(b"PK\x01\x02")
    # The last entry of the listing is that of the JSON; 9 stands for Deflate64.
    Path(export).write_bytes(content[: start + 10] + b"\x09" + content[start + 11 :])
    with pytest.raises(ColabUtilsError, match="Deflate64"):
        unpack_dataset(export, ssd)


def test_an_archive_in_place_of_the_image_folder_is_told(tmp_path, tiny_dataset):
    archive = tmp_path / "images.tar.gz"
    archive.write_bytes(b"\x1f\x8b")
    with pytest.raises(ColabUtilsError, match=r"It is a file\. Name a folder"):
        check_dataset(archive, tiny_dataset.annotations)
