"""Data that comes in another form: a COCO export in a zip, on Drive or behind a URL; masks as image
files.
"""

import errno
import json
import os
import stat
import zlib
from collections.abc import Iterator
from functools import partial
from http.client import HTTPException
from lzma import LZMAError
from pathlib import Path, PureWindowsPath
from typing import Any, BinaryIO
from urllib.request import Request, urlopen
from zipfile import BadZipFile, ZipFile, ZipInfo

import numpy as np
import xxhash
from numpy.typing import NDArray
from PIL import Image

from colab_utils.data.coco import read_coco, take_base_name, write_coco
from colab_utils.data.decoding import guard_pillow, open_lazily, read_orientation
from colab_utils.data.masks import measure_mask
from colab_utils.drive import DriveLostError, Retries, explain_write
from colab_utils.errors import ColabUtilsError, escape
from colab_utils.files import open_file, require_new, write_file
from colab_utils.machine import require_space
from colab_utils.progress import show_progress
from colab_utils.require import require_local_path

_DOWNLOADS = ("http://", "https://", "ftp://")
_SILENT_S = 60.0  # after which a server that sends nothing is given up
_CURE = "or name a folder on a bigger disk"
# what zipfile raises: RuntimeError of encrypted files, ValueError of names that are no UTF-8,
# OSError of damaged bzip2
_DAMAGE = (BadZipFile, zlib.error, LZMAError, EOFError, RuntimeError, ValueError, OSError)
_MOST_OBJECTS = 5000  # in one mask: more colours are a photo, or a mask that was saved as JPEG
_DAMAGE_NUMBERS = {None, errno.EINVAL, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG}


def is_archive(source: str) -> bool:
    """Whether a dataset's name is a URL, or that of a zip.

    Example:
        >>> is_archive("https://example.org/export?format=coco"), is_archive("photos")
        (True, False)
    """
    return "://" in source or (source.lower().endswith(".zip") and not os.path.isdir(source))


def unpack_dataset(source: str, folder: Path, annotations: str = "") -> tuple[Path, Path]:
    """Unpack the annotations of a COCO export and the images that they name; what was unpacked
    before stays.

    A download that broke off goes on where it stopped, after growing waits and in a later call; so
    does unpacking. Every file is checked against its checksum in the zip.

    Args:
        source: a zip, or the URL of one.
        folder: where to unpack it, in a folder of its own.
        annotations: the JSON's name in the zip; empty takes the only one.

    Returns:
        The image folder and the COCO JSON.

    Raises:
        ColabUtilsError: no zip, a damaged or encrypted one, names or links that lead out of it, no
            annotations in it, none of their images, or a full disk.
        DriveLostError: Drive or the server went away for good; the same call continues.

    Example:
        >>> unpack_dataset("no/such/export.zip", Path("datasets"))
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected a zip at no/such/export.zip, found none: ...
    """
    folder = require_local_path(folder)
    is_url = source.lower().startswith(_DOWNLOADS)
    if not is_url and not os.path.isfile(require_local_path(source)):
        raise ColabUtilsError(f"expected a zip at {source}, found none: check IMAGES")
    version = 0 if is_url else os.stat(source).st_mtime_ns
    target = Path(
        folder, xxhash.xxh3_64_hexdigest(os.fsencode(f"{source} {annotations} {version}"))
    )
    done = target / "unpacked.json"
    download = target / "download.zip"
    if not done.is_file():  # it is written last
        with explain_write(target):
            target.mkdir(parents=True, exist_ok=True)
            if is_url:
                with (
                    open(download, "ab") as file,
                    show_progress("download", total=None, unit="B", scale=True) as bar,
                ):
                    Retries().run(partial(_receive, source, file, bar))
            try:
                found = _unpack(
                    download if is_url else Path(source), target / "files", annotations, source
                )
            except _DAMAGE as error:
                if getattr(error, "errno", None) not in _DAMAGE_NUMBERS:
                    raise
                download.unlink(missing_ok=True)  # it comes anew
                why = (
                    f"{str(error) or type(error).__name__}: open it on your computer, then "
                    "export or copy it again"
                )
                raise ColabUtilsError(
                    f"expected a whole zip of a COCO export at {source}, found {why}"
                ) from error
            write_file(done, json.dumps(found).encode())
            download.unlink(missing_ok=True)
    images, name = json.loads(done.read_bytes())
    return target / "files" / images, target / "files" / name


def _unpack(path: Path, target: Path, annotations: str, source: str) -> tuple[str, str]:
    """Unpack what is needed; returns the image folder and the JSON, relative to ``target``."""
    with ZipFile(path) as archive:
        members = _list_members(archive, source)
        end = f"/{annotations}" if annotations else ".json"
        texts = [name for name in members if f"/{name}".endswith(end)]
        if len(texts) != 1:
            found = (
                ", ".join(texts[:9])
                or f"{len(members):,} files and no such one: export COCO instances"
            )
            cure = "or name in ANNOTATIONS the one that you mean"
            raise ColabUtilsError(
                f"expected {annotations or 'one .json'} in {source}, found {found}; {cure}"
            )
        _extract(archive, [members[texts[0]]], target)
        coco = read_coco(target / texts[0])
        names = [coco.file_name(i) for i in range(len(coco))]
        bases = {*map(take_base_name, names)} - {""}
        wanted = [info for name, info in members.items() if take_base_name(name) in bases]
        if not wanted:
            found = (
                f"found none of {len(names):,}: name another JSON in ANNOTATIONS, or export "
                "it with its images"
            )
            raise ColabUtilsError(f"expected in {source} the images of {texts[0]}, {found}")
        _extract(archive, wanted, target)
        pairs = [(name, one) for name in filter(None, names[:9]) for one in members]
        folders = [one.removesuffix(name) for name, one in pairs if f"/{one}".endswith(f"/{name}")]
        # none where the names are of another machine: `CocoDataset.find_image` finds the files
        return next(iter(folders), ""), texts[0]


def _list_members(archive: ZipFile, source: str) -> dict[str, ZipInfo]:
    """What is in a zip, by name.

    Raises:
        ColabUtilsError: something in it is not what an export holds; nothing of it is unpacked.
    """
    members = dict[str, ZipInfo]()
    for info in archive.infolist():
        name = info.filename
        kind = stat.S_IFMT(info.external_attr >> 16)
        if name.startswith("__MACOSX/") or name.endswith("/"):
            continue
        why = ""
        named = PureWindowsPath(name)
        if named.anchor or ".." in named.parts or kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            why = "a link or a name that leads out of it"
        elif not name or escape(name) != name:
            why = "a name with control characters, or none at all"
        if why:
            found = f"found {name!r:.80}, {why}: nothing is unpacked, zip it again"
            raise ColabUtilsError(f"expected only files and folders in {source}, {found}")
        members[name] = info
    return members


def _extract(archive: ZipFile, members: list[ZipInfo], target: Path) -> None:
    """Unpack these files; zipfile compares their checksums, and those that are there are compared
    here.
    """
    missing = [info for info in members if not _is_there(target / info.filename, info)]
    require_space(target, sum(info.file_size for info in missing), _CURE)
    unpacking = (archive.extract(info, target) for info in missing)
    list(show_progress("unpacking", unpacking, total=len(missing), unit="file"))


def _is_there(path: Path, info: ZipInfo) -> bool:
    return (
        path.is_file()
        and path.stat().st_size == info.file_size
        and zlib.crc32(path.read_bytes()) == info.CRC
    )


def _receive(url: str, file: BinaryIO, bar: Any) -> None:
    """Add what is missing at a file's end; where the server cannot do that, the file comes from its
    beginning.

    Raises:
        ColabUtilsError: the server gives nothing.
        DriveLostError: it broke off.
    """
    try:
        request = Request(
            url, headers={"User-Agent": "colab_utils", "Range": f"bytes={file.tell()}-"}
        )
        with urlopen(request, timeout=_SILENT_S) as reply:
            if not reply.headers.get("Content-Range", "").startswith(f"bytes {file.tell()}-"):
                file.truncate(file.seek(0))
            size = file.tell() + int(reply.headers.get("Content-Length") or 0)
            # the zip, and what is in it
            require_space(Path(file.name).parent, 2 * size - file.tell(), _CURE)
            while piece := reply.read(1 << 20):
                file.write(piece)
                bar.update(len(piece))
            if file.tell() < size:
                raise ConnectionError(f"{file.tell():,} of {size:,} bytes came")
    except (OSError, HTTPException, ValueError) as error:
        getattr(error, "close", int)()  # a reply that says no is a file
        if getattr(error, "errno", 0) == errno.ENOSPC:
            raise
        if not file.tell():
            raise ColabUtilsError(
                f"expected a zip at {url}, found {error}: check IMAGES and the network"
            ) from error
        if getattr(error, "code", 0) != 416:  # it is whole
            why = f"found that the download broke off ({error}): run this again, it goes on there"
            raise DriveLostError(f"expected all of {url}, {why}") from error


def convert_masks(
    images: str | Path, masks: str | Path, *, output: str | Path, category: str = "object"
) -> Path:
    """Write the COCO instance JSON of a folder of images and a folder of masks, such as
    Penn-Fudan's.

    A mask has its image's size. 0, or black, is the background; every other value or colour is one
    object. The mask of ``a.jpg`` is called ``a.png``, or ``a_mask.png`` with the same ending for
    all. The objects become RLE with the same pixels; boxes and areas are theirs, as pycocotools
    computes them.

    Args:
        images: the image folder.
        masks: the folder of masks, without subfolders.
        output: the JSON file to write, which must not exist.
        category: what every object is.

    Returns:
        ``output``.

    Raises:
        ColabUtilsError: an image without a mask or a mask without an image, a mask of another size
            or that is no mask, or ``output`` exists.

    Example:
        >>> convert_masks("PNGImages", "no/such/PedMasks", output="people.json", category="person")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected a folder of image files at PNGImages, found ...
    """
    output = require_new(require_local_path(output))
    rows = list[dict[str, Any]]()
    annotations = list[dict[str, Any]]()
    pairs = _pair_files(require_local_path(images), require_local_path(masks))
    for number, (image, mask) in enumerate(
        show_progress("masks", pairs, total=len(pairs), unit="image"), 1
    ):
        values = _read_mask(image, mask)
        height, width = values.shape
        rows.append({"id": number, "file_name": image.name, "width": width, "height": height})
        for rle, box, area in _encode_objects(values, mask):
            ids = {"id": len(annotations) + 1, "image_id": number, "category_id": 1, "iscrowd": 0}
            annotations.append({**ids, "bbox": box, "area": area, "segmentation": rle})
    texts = [json.dumps(one).encode() for one in annotations]
    categories = [{"id": 1, "name": category}]
    with explain_write(output.parent):
        return write_coco(output, rows, texts, categories)


def _list_images(folder: Path) -> dict[str, Path]:
    """Image files by their name without its ending."""
    known = Image.registered_extensions()
    found = dict[str, Path]()
    for path in sorted(folder.glob("*")):
        if path.suffix.lower() in known and found.setdefault(path.stem, path) != path:
            raise ColabUtilsError(
                f"expected one file called {path.stem} in {folder}, found two. Remove one of them."
            )
    if not found:
        raise ColabUtilsError(
            f"expected a folder of image files at {folder}, found none. Check the name."
        )
    return found


def _pair_files(images: Path, masks: Path) -> list[tuple[Path, Path]]:
    """Each image with its mask; what their names differ in is the same for all."""
    pictures = _list_images(images)
    drawn = _list_images(masks)
    first = next(iter(pictures))
    ends = sorted(
        (name.removeprefix(first) for name in drawn if name.startswith(first)), key=len
    ) or [""]
    end = next((end for end in ends if {stem + end for stem in pictures} == {*drawn}), ends[0])
    if alone := {stem + end for stem in pictures} ^ {*drawn}:
        found = f"{len(alone)} files without the other, such as {min(alone)}. Rename them"
        raise ColabUtilsError(
            f"expected a mask called like each image, with one ending for all, found {found}."
        )
    return [(path, drawn[stem + end]) for stem, path in pictures.items()]


@guard_pillow()
def _read_mask(image: Path, mask: Path) -> NDArray[np.int64]:
    """The mask's values, int64 [H, W]; 0 is the background."""
    try:
        with open_file(image) as file, open_lazily(file) as opened:
            size = opened.size
            turned = read_orientation(opened) > 4
        with open_file(mask) as file, open_lazily(file) as opened:
            kind = opened.format
            is_flat = opened.mode in ("1", "L", "P", "I") or opened.mode.startswith("I;16")
            if opened.mode == "F":
                raise ValueError("floating point numbers: save whole ones")
            values = np.asarray(opened if is_flat else opened.convert("RGB")).astype(np.int64)
    except Exception as error:  # Pillow's many readers raise whatever they like on damaged data
        raise ColabUtilsError(
            f"expected an image at {image} and a mask at {mask}, found: {error}"
        ) from None
    if values.shape[1::-1] != (size[::-1] if turned else size):
        found = (
            f"as {image} has, found {values.shape[1]} x {values.shape[0]}. Export the masks again"
        )
        raise ColabUtilsError(
            f"expected a mask of {size[0]} x {size[1]} pixels at {mask}, {found}."
        )
    if kind == "JPEG":
        raise ColabUtilsError(
            f"expected a mask that keeps its values at {mask}, found a JPEG. Export masks as PNG."
        )
    return values @ (65536, 256, 1) if values.ndim == 3 else values


def _encode_objects(
    values: NDArray[np.int64], mask: Path
) -> Iterator[tuple[dict[str, Any], list[float], float]]:
    """RLE with text counts, box (x, y, width, height) and area of each object."""
    from pycocotools import mask as coco_mask

    objects = [value for value in np.unique(values).tolist() if value]
    if len(objects) > _MOST_OBJECTS:
        found = f"{len(objects):,} colours. Is it a photo?"
        raise ColabUtilsError(f"expected a mask with one colour an object at {mask}, found {found}")
    for value in objects:
        rle = coco_mask.encode(np.asarray(values == value, np.uint8, order="F"))
        box, pixels = measure_mask(rle)
        yield {**rle, "counts": rle["counts"].decode()}, box, float(pixels)
