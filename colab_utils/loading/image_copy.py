"""Copy loose image files from Drive to this machine's disk, for any trainer."""

from collections.abc import Callable, Collection, Generator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from colab_utils.data.coco import read_coco
from colab_utils.data.image_paths import explain_missing, find_file, list_files, require_folder
from colab_utils.drive import explain_write
from colab_utils.errors import ColabUtilsError, UnavailableError, explain_os_error
from colab_utils.files import Store, open_store
from colab_utils.places import (
    PlaceLike,
    identify_place,
    name_below,
    open_place,
    require_local_path,
)
from colab_utils.progress import show_progress
from colab_utils.reader import Reader
from colab_utils.shards.index import SkippedImage
from colab_utils.shards.lock import lock_here
from colab_utils.streams import guess_streams, require_streams
from colab_utils.units import format_bytes, format_count

# A file has this name until it is complete. Only one copy at a time writes into a folder.
_UNFINISHED = ".image.part"
# A disk gives whole blocks of this size to a file.
_BLOCK_BYTES = 4096


@dataclass(frozen=True)
class ImageCopyReport:
    """Report of :func:`copy_images`."""

    files: int
    """Files in the target now, of those to copy."""
    bytes: int
    """Bytes that were copied."""
    seconds: float
    skipped_files: int
    """Files that were in the target before."""
    missing: tuple[SkippedImage, ...]
    """Files that could not be copied, each with the reason."""

    def __str__(self) -> str:
        text = (
            f"{format_count(self.files, 'file')} in place: {format_bytes(self.bytes)} copied in "
            f"{self.seconds:.1f} s, {self.skipped_files:,} were there already"
        )
        if self.missing:
            text += f", {len(self.missing):,} could not be copied"
        return text


def copy_images(
    source: PlaceLike,
    target: str | Path,
    *,
    annotations: PlaceLike | None = None,
    streams: int | str = "auto",
) -> ImageCopyReport:
    """Copy loose image files to this machine's disk, where any trainer reads them.

    Many files are read at the same time. They keep their sub-folders, and a file gets its name only
    when it is complete. A file that has the same size in ``target`` is not read again, so an
    interrupted copy continues. A file of another size is replaced. What cannot be copied is named
    in the report, and the rest is copied.

    Args:
        source: Image folder, usually on Drive. It may be a URL that fsspec knows, with
            ``annotations``.
        target: Folder to copy into, usually on the SSD. It is made if it does not exist.
        annotations: COCO JSON, a path or a URL: only the files that it names are copied, as
            ``CocoFolder`` finds them. Default: None, all files but hidden ones.
        streams: Files that are read at the same time, up to 256. "auto" measures how many
            ``source`` can serve.

    Raises:
        ColabUtilsError: There is no image folder, the disk has too little space, ``target`` lies in
            ``source``, another copy writes there, or ``streams`` is out of range.
        DriveLostError: Drive failed for 81 seconds. What was copied stays, and the same call
            continues.

    Example:
        >>> copy_images("no/such/folder", "ssd")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: There is no image folder at ...no/such/folder. ...
    """
    folder = open_place(source).absolute()
    ssd = require_local_path(target).absolute()
    streams = require_streams(streams)
    require_folder(folder)
    if Path(identify_place(ssd)).is_relative_to(identify_place(folder)):
        raise ColabUtilsError(f"{ssd} lies in {folder}, which is copied. Name another target.")
    shared_names = frozenset[str]()
    if annotations is None:
        names = open_store(folder).attempt(folder, lambda: [*list_files(folder, links=True)])
    else:
        coco = read_coco(annotations)
        names = list(dict.fromkeys(coco.names))
        shared_names = coco.shared_names
    if not names:
        raise ColabUtilsError(
            f"There is no file to copy in {annotations or folder}. Name another one."
        )
    with lock_here(ssd) as is_free:
        if not is_free:
            raise ColabUtilsError(
                f"Another copy writes into {ssd}. Let it end, or stop it. Then run the same again."
            )
        return _copy_files(open_store(folder), open_store(ssd), names, shared_names, streams)


def _copy_files(
    source: Store,
    target: Store,
    names: Collection[str],
    shared_names: frozenset[str],
    streams: int | str,
) -> ImageCopyReport:
    """Copy files as `copy_images` does.

    Threads read, and this thread writes. So nothing is written after an error or Ctrl-C.
    """
    began_s = perf_counter()
    missing: list[SkippedImage] = []
    read_all = partial(_read_all, source, missing)
    find = partial(_find, source, target, shared_names)
    # How fast sizes come does not tell how many files to read at once.
    looks = guess_streams(source.place) if streams == "auto" else streams
    with closing(read_all("comparing sizes", find, names, looks)) as files:
        sizes = dict(file for _, file in files)
    waiting = {name: size for name, size in sizes.items() if size is not None}
    target.require_room(
        sum(waiting.values()) + _BLOCK_BYTES * len(waiting),
        "name a folder on a bigger disk, or copy only what a COCO JSON names (annotations)",
    )
    copied: list[int] = []
    with (
        explain_write(target.place),
        closing(read_all("copying images", source.read_listed, waiting, streams)) as contents,
    ):
        target.make()
        for name, content in contents:
            _write_image(target.place, name, content)
            copied.append(len(content))
    skipped = len(sizes) - len(waiting)
    return ImageCopyReport(
        files=skipped + len(copied),
        bytes=sum(copied),
        seconds=perf_counter() - began_s,
        skipped_files=skipped,
        missing=tuple(missing),
    )


def _read_all(
    source: Store,
    missing: list[SkippedImage],
    label: str,
    read: Callable[[str], Any],
    names: Collection[str],
    streams: int | str,
) -> Generator[tuple[str, Any], None, None]:
    """Yield each name with what ``read``, which threads call, returns for it.

    ``missing`` gets each file that cannot be read, with the reason.
    """
    began_s = perf_counter()
    reader = Reader(read, source, streams=streams)
    with closing(reader), show_progress(label, total=len(names), unit=" files") as bar:
        for reading in reader.read_all(names):
            name = reading.name
            reason = ""
            try:
                content = reading.take()
            except UnavailableError:
                raise
            except FileNotFoundError:
                reason = explain_missing(source.place, name)
            except ColabUtilsError as error:
                reason = str(error)
            except OSError as error:
                reason = explain_os_error(error, "Run check on the dataset.")
            if reason:
                missing.append(SkippedImage(name, reason))
            else:
                yield name, content
            speed = format_bytes(reader.read_bytes / (perf_counter() - began_s))
            bar.set_postfix_str(f"{speed}/s {source.tell_failures()}", refresh=False)
            bar.update()


def _find(
    source: Store, target: Store, shared_names: frozenset[str], name: str
) -> tuple[str, int | None]:
    """Return the path of a file in the source, and its size; None if the target has it."""
    place, _ = find_file(source.place, name, shared_names)
    path = name_below(place, source.place)
    size = source.stamp(place).bytes
    is_done = 0 <= size == target.stamp(path).bytes
    return path, None if is_done else size


def _write_image(folder: Path, name: str, content: bytes) -> None:
    """Write a file, which appears under its name when it is complete."""
    path = folder / name
    unfinished = folder / _UNFINISHED
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
