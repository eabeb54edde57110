"""Unpack a COCO export from a zip, on Drive or behind a URL."""

import os
from collections.abc import Sequence
from functools import partial
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import urlopen
from zipfile import BadZipFile, ZipFile, is_zipfile

import xxhash

from colab_utils.data.coco import read_coco
from colab_utils.data.decoding import name_kind
from colab_utils.data.image_paths import list_files, list_meanings, take_base_name
from colab_utils.drive import explain_write
from colab_utils.errors import MACHINE_FAULTS, ColabUtilsError, describe_error
from colab_utils.machine import require_space
from colab_utils.places import require_local_path
from colab_utils.progress import show_progress

_ENDINGS = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar")
_PIECE_BYTES = 1_000_000
# A server that sends nothing for so long is given up.
_SILENT_S = 60.0
# A zip in which more than this share of the images is missing is no whole export.
_FEW_MISSING = 0.1


def is_archive(source: str) -> bool:
    """Return whether a dataset's name is a URL or the path of a zip or of another archive.

    Example:
        >>> is_archive("https://example.org/export?format=coco"), is_archive("photos")
        (True, False)
    """
    return "://" in source or (source.lower().endswith(_ENDINGS) and not os.path.isdir(source))


def unpack_dataset(source: str, folder: Path, annotations: str = "") -> tuple[Path, Path]:
    """Unpack a COCO export: its annotations, and the images that they name.

    A zip at a URL is downloaded to the disk first, and is gone when it is unpacked. What was
    unpacked as a whole is found by the next call.

    Args:
        source: the path of a zip, or its ``https://`` or ``http://`` URL.
        folder: the folder to unpack into. Each zip gets a folder of its own in it.
        annotations: the JSON's name in the zip. By default, the zip must have only one JSON.

    Returns:
        The image folder and the COCO JSON.

    Raises:
        ColabUtilsError: if there is no zip; if it is damaged or encrypted; if it has no
            annotations, or lacks many of their images; or if the disk is full.
        DriveLostError: if Drive went away. Call the function again to continue.

    Example:
        >>> unpack_dataset("no/such/export.zip", Path("datasets"))
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: There is no zip at no/such/export.zip. Check IMAGES.
    """
    folder = require_local_path(folder)
    is_url = source.lower().startswith(("http://", "https://"))
    version = 0
    if not is_url:
        path = require_local_path(source)
        if not path.is_file():
            raise ColabUtilsError(f"There is no zip at {path}. Check IMAGES.")
        version = path.stat().st_mtime_ns
    target = folder / xxhash.xxh3_64_hexdigest(os.fsencode(f"{source} {version}"))
    if not target.is_dir():
        # The folder gets its name last. If it exists, everything was unpacked.
        partial_target = Path(f"{target}.part")
        with explain_write(target):
            partial_target.mkdir(parents=True, exist_ok=True)
            try:
                with TemporaryFile(dir=folder) if is_url else open(path, "rb") as file:
                    if is_url:
                        _download(source, file)
                    _extract(file, partial_target)
            except (ColabUtilsError, *MACHINE_FAULTS):
                raise
            # zipfile and urllib raise all kinds of errors. Those with a number are the disk's, or
            # the connection's.
            except Exception as error:
                if isinstance(error, HTTPError):
                    error.close()
                if getattr(error, "errno", None) and not isinstance(error, ConnectionError):
                    raise
                # An error of an address may quote a password in it.
                is_address = isinstance(error, HTTPException)
                reason = type(error).__name__ if is_address else describe_error(error)
                raise ColabUtilsError(
                    f"The zip at {source} cannot be read: {reason}. Check IMAGES and the network. "
                    "If the zip is not whole, copy it again. If it has a password or a rare "
                    "compression, zip it anew with `zip -r`."
                ) from None
            partial_target.rename(target)
    files = [*list_files(target)]
    text = _choose_annotations(files, annotations, source)
    names = read_coco(target / text).names
    _require_images(names, files, source)
    return target / _find_folder(files, text, *names[:1]), target / text


def _download(url: str, file: IO[bytes]) -> None:
    # Names with spaces and letters of any language are allowed in an address.
    address = quote(url, safe=":/?#[]@!$&'()*+,;=%~")
    with urlopen(address, timeout=_SILENT_S) as answer:
        pieces = iter(partial(answer.read, _PIECE_BYTES), b"")
        count = int(answer.headers.get("Content-Length") or 0) // _PIECE_BYTES
        for piece in show_progress("download", pieces, total=count, unit="MB"):
            file.write(piece)


def _extract(file: IO[bytes], target: Path) -> None:
    """Unpack a zip. Backslashes in names separate folders, as in unzip.

    zipfile compares checksums, writes no links, and leaves out of names what would lead out of the
    folder.
    """
    file.seek(0)
    kind = name_kind(file.read(_PIECE_BYTES))
    # A zip may begin with something else, such as a program that unpacks it.
    if kind and not (kind.startswith("a zip") or is_zipfile(file)):
        raise BadZipFile(f"it is {kind}. Then name the zip, or the folder with its images")
    with _open_zip(file) as archive:
        members = archive.infolist()
        needed = sum(info.file_size for info in members)
        require_space(target, needed, "or name a folder on a bigger disk")
        for info in show_progress("unpacking", members, unit="file"):
            info.filename = info.filename.replace("\\", "/")
            archive.extract(info, target)


def _open_zip(file: IO[bytes]) -> ZipFile:
    """Open a zip. macOS writes names in UTF-8 without saying so."""
    try:
        return ZipFile(file, metadata_encoding="utf-8")
    except UnicodeDecodeError:
        return ZipFile(file)


def _choose_annotations(files: Sequence[str], annotations: str, source: str) -> str:
    """Return the name of the only JSON in a zip, or of the one called ``annotations``.

    Raises:
        ColabUtilsError: if there is no such file, or several.
    """
    end = f"/{annotations}" if annotations else ".json"
    texts = [name for name in files if f"/{name}".endswith(end)]
    if len(texts) != 1:
        raise ColabUtilsError(
            f"{len(texts)} files in {source} are {annotations or 'a .json'}: it holds "
            f"{', '.join(texts or files):.300}. Name in ANNOTATIONS the JSON that you mean, or "
            "export COCO instances."
        )
    return texts[0]


def _require_images(names: Sequence[str], files: Sequence[str], source: str) -> None:
    """Raise ColabUtilsError if many images are not in a zip."""
    bases = set(map(take_base_name, files))
    missing = [name for name in names if bases.isdisjoint(list_meanings(name))]
    if len(missing) > _FEW_MISSING * len(names):
        raise ColabUtilsError(
            f"{len(missing):,} of the {len(names):,} images of the JSON are not in {source}, which "
            f"holds {', '.join(files):.300}. If it is one of several zips, or holds another "
            "archive, unpack all of them and name the folder. If not, name another JSON in "
            "ANNOTATIONS, or zip it again with its images, names in UTF-8."
        )


def _find_folder(files: Sequence[str], text: str, name: str = "") -> str:
    """Return the folder below which the images lie, by the name of the first image.

    If several folders have an image of this name, it is the folder of the JSON ``text``. In other
    cases, return "", which stands for the whole zip: `CocoDataset.find_image` finds images by their
    base names there, and `check` names those that it cannot tell apart.
    """
    end = "/" + name.replace("\\", "/")
    folders = {path.removesuffix(end[1:]) for path in files if f"/{path}".endswith(end)}
    if len(folders) > 1:
        folders &= {text[: text.rfind("/") + 1]}
    return folders.pop() if folders else ""
