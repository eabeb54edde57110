"""Decode an image from the bytes of its file.

torchcodec or torchvision decodes JPEGs, with libjpeg-turbo. Pillow decodes all other formats, and
JPEGs that are shrunk.
"""

import io
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.sizes import Size, plan_size
from colab_utils.errors import MACHINE_FAULTS, ColabUtilsError, ColabUtilsWarning

if TYPE_CHECKING:
    from PIL import Image

Encoded = bytes | bytearray
"""The content of an image file."""
Pixels = NDArray[np.uint8]
"""Decoded pixels, [H, W, 3]."""
JpegDecoder = Callable[[Encoded], Pixels]
"""Decodes a JPEG, or raises RuntimeError."""

MOST_PIXELS = 112_000_000
"""Largest number of pixels that an image may have. Photos of 108 megapixels are accepted. Decoding
one takes at most 1 GB of memory, because Pillow uses 4 bytes for each pixel.
"""

# Messages ask for one scale for all images. If each image had its own scale, the same value would
# become another colour in each of them.
_SCALE = "-scale 0 MAX IN OUT, where MAX is the largest value of all your images"
# Number of bytes at the start of a file that show its format.
_HEAD_BYTES = 2000
# Files that people often give instead of an image or a COCO JSON. A key is a pattern of the first
# bytes. Its value names the kind of file and says what to do.
_KINDS = {
    b"PK\x03\x04": "a zip: unpack it first",
    b"\x1f\x8b": "a gzip file: unpack it first",
    b"Rar!\x1a\x07": "a RAR archive: unpack it first",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive: unpack it first",
    b".{257}ustar": "a tar archive: unpack it first",
    b"version https://git-lfs": "a Git LFS pointer: run `git lfs pull` where it comes from",
    b"\\s*<(!doctype html|html)": "a web page: download the file itself",
    b"....ftyp(hei|hev|mif1|msf1)": "HEIC: save it as JPEG (heif-convert -q 95 IN.heic OUT.jpg)",
    b"%(PDF|!PS)": "a PDF or a PostScript file: save its pages as images",
    b".{128}DICM": "DICOM: save it as an 8-bit PNG",
    b"\\0{16}": "nothing but zeros: copy it again",
    b"\\s*\\w*id,.*(pixels|annotation|rle)": "a table of run lengths: see docs/FORMATS.md",
    b"$": "an empty file: copy it again",
    b"\\s*#?filename,file_size": "VIA's CSV: export its JSON, see docs/FORMATS.md",
    b"\\s*(<\\?xml.*)?<annotations?>": "CVAT's or VOC's XML: see docs/FORMATS.md",
    b"\\s*\\d+([ \\t]+[\\d.]+){4}": "YOLO's text: see docs/FORMATS.md",
    b"II[*+]\\0|MM\\0[*+]": (
        "a TIFF that is not a complete image, or whose bits or bands Pillow cannot decode: copy it "
        f"again, or run gdal_translate -ot Byte -b 1 -b 2 -b 3 {_SCALE}"
    ),
}
# What to do with an image that is too large to decode.
_CUT = "cut it and its annotations into tiles (pip install sahi; sahi coco slice)"
# The TIFF tag that is 0 where the pixel value 0 means white.
_PHOTOMETRIC = 262
# Markers of the segments of a JPEG that hold the image's size.
_JPEG_SIZES = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Markers of tables, of application data and of comments.
_JPEG_SEGMENTS = {0xC4, 0xCC, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE}
# Marker of the application data that holds EXIF.
_JPEG_EXIF = 0xE1
# Marker of the compressed pixels.
_JPEG_PIXELS = 0xDA
# Marker of application data that no decoder reads.
_JPEG_UNREAD = 0xEF
_JPEG = b"\xff\xd8\xff"
# A 16-bit image whose brightest pixel becomes less than this after conversion to 8 bits is too dark
# to train on. Cameras and sensors of 14 bits or fewer make such images.
_DARK = 64
# The formats that Pillow may open. EPS is left out because Pillow starts another program to read
# it. Icons are left out because they may hold a larger image than their header says.
_FORMATS = {
    "AVIF",
    "BMP",
    "GIF",
    "JPEG",
    "JPEG2000",
    "MPO",
    "PCX",
    "PNG",
    "PPM",
    "SGI",
    "TGA",
    "TIFF",
    "WEBP",
}


class _Limit(int):
    """Be a value for Pillow's ``MAX_IMAGE_PIXELS`` that stays the same when Pillow doubles it.

    Pillow warns about images above ``limit``, and refuses images above ``2 * limit``. With this
    class both are the same number, so Pillow refuses images and never warns.
    """

    def __rmul__(self, _: int, /) -> int:
        return self


class _PillowGuard:
    """Set Pillow's global switches to our values while any thread reads an image.

    The user's values are restored when the last of these threads has finished.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers = 0
        self._users_values: list[tuple[Any, str, Any]] = []

    def begin(self) -> None:
        """Set the switches. Each reader calls this, not only the first one."""
        with self._lock:
            self._readers += 1
            switches = _list_switches()
            if self._readers == 1:
                self._users_values = [
                    (holder, name, getattr(holder, name)) for holder, name, _ in switches
                ]
            _set(switches)

    def end(self) -> None:
        """Restore the user's values after the last reader."""
        with self._lock:
            self._readers -= 1
            if not self._readers:
                _set(self._users_values)

    def begin_anew(self) -> None:
        """Reset the guard in a forked process, which does not have its parent's threads."""
        self._lock = threading.Lock()
        if self._readers:
            self._readers = 0
            _set(self._users_values)


def _set(switches: Iterable[tuple[Any, str, Any]]) -> None:
    for switch in switches:
        setattr(*switch)


@cache
def _list_switches() -> tuple[tuple[Any, str, Any], ...]:
    """Return each switch: the object that holds it, its name, and our value."""
    from PIL import Image, ImageFile

    return (
        (ImageFile, "LOAD_TRUNCATED_IMAGES", False),
        # If this is too small, Pillow never finishes writing a JPEG.
        (ImageFile, "MAXBLOCK", 65_536),
        # Pillow opens images of up to twice `MOST_PIXELS`, so that `open_lazily` can refuse them
        # and say how large they are.
        (Image, "MAX_IMAGE_PIXELS", _Limit(2 * MOST_PIXELS)),
    )


_guard = _PillowGuard()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_guard.begin_anew)


@contextmanager
def guard_pillow() -> Iterator[None]:
    """Set Pillow's global switches to our values within a block, then restore the user's values.

    Many packages set ``ImageFile.LOAD_TRUNCATED_IMAGES``. Pillow then fills the missing part of a
    truncated photo with grey and raises no error. Other packages change
    ``Image.MAX_IMAGE_PIXELS``. The switches are global: while one thread is in the block, all
    threads see our values.

    Raises:
        ColabUtilsError: if the image, or a part of it, has more pixels than Pillow may decode.

    Example:
        >>> from PIL import ImageFile
        >>> ImageFile.LOAD_TRUNCATED_IMAGES = True
        >>> with guard_pillow():
        ...     ImageFile.LOAD_TRUNCATED_IMAGES
        False
        >>> ImageFile.LOAD_TRUNCATED_IMAGES
        True
        >>> ImageFile.LOAD_TRUNCATED_IMAGES = False
    """
    from PIL import Image

    _guard.begin()
    try:
        yield
    except Image.DecompressionBombError:
        raise ColabUtilsError(f"it has more than {MOST_PIXELS:,} pixels: {_CUT}") from None
    finally:
        _guard.end()


def decode_pixels(data: Encoded) -> Pixels:
    """Decode an image to uint8 [H, W, 3].

    The operator of torchcodec or torchvision decodes a JPEG directly into the array. If it refuses
    the JPEG, Pillow decodes the file or says what is wrong with it. Both give the same pixels.

    Raises:
        ColabUtilsError: if the bytes are not a complete image of at most `MOST_PIXELS` pixels.

    Example:
        >>> from PIL import Image
        >>> file = io.BytesIO()
        >>> Image.new("RGB", (3, 2)).save(file, "PNG")
        >>> decode_pixels(file.getvalue()).shape
        (2, 3, 3)
    """
    if 0 < _count_jpeg_pixels(data) <= MOST_PIXELS:
        try:
            return load_jpeg_decoder()(data)
        except RuntimeError:
            # Pillow may know this kind of JPEG. If not, its error says what is wrong.
            pass
    return _decode_by_pillow(data)


@guard_pillow()
def _decode_by_pillow(data: Encoded) -> Pixels:
    return np.array(to_rgb(open_reduced(data)[0]))


@guard_pillow()
def open_reduced(data: Encoded, **limits: float) -> tuple["Image.Image", Size]:
    """Open an image with Pillow and decode all of it; return it, and its height and width in the
    file.

    With the ``limits`` of `plan_size`, a JPEG of at least twice the planned size becomes an RGB
    image of the planned size. Pillow decodes it at 1/2, 1/4 or 1/8 of its size, at the smallest of
    these that is not below the planned one. That takes less time than to decode all pixels, and
    gives nearly the same ones. Other decoders do not give the same pixels as Pillow.

    Raises:
        ColabUtilsError: if the bytes are not a complete image; if it has more than `MOST_PIXELS`
            pixels, which is checked before any is decoded; or if it has 16 bits a channel and uses
            so few of them that it would become black.

    Example:
        >>> from PIL import Image
        >>> file = io.BytesIO()
        >>> Image.new("RGB", (400, 300)).save(file, "JPEG")
        >>> image, size = open_reduced(file.getvalue(), min_size=100, max_size=200)
        >>> image.size, size
        ((133, 100), (300, 400))
    """
    from PIL import Image

    try:
        image = open_lazily(io.BytesIO(data))
        size = image.height, image.width
        planned = plan_size(*size, **limits)
        is_deep = has_16_bits(image)
        # A mode would let Pillow change the colours. Only a JPEG has a draft.
        draft = image.draft(None, planned[::-1])
        image.load()
    except (ColabUtilsError, Image.DecompressionBombError, *MACHINE_FAULTS):
        raise
    # Pillow's readers raise all kinds of errors on damaged data.
    except Exception as error:
        raise ColabUtilsError(
            f"not a complete image: {str(error) or type(error).__name__}"
        ) from None
    peak = int(np.asarray(to_rgb(image)).max()) if is_deep else 255
    if peak < _DARK:
        raise ColabUtilsError(
            f"its 16 bits hold no value above {peak * 256 + 255:,} of 65,535, so that the "
            f"brightest pixel becomes {peak} of 255, almost black: run gdal_translate -ot "
            f"Byte {_SCALE}"
        )
    if draft is None or image.size == size[::-1]:
        # Pillow turns a TIFF while it loads its pixels.
        return image, (image.height, image.width)
    # The last row and column may lie partly outside of the photo. The draft's box leaves that out.
    shrunk = shrink(to_rgb(image), planned, draft[1])
    shrunk.format = image.format
    return shrunk, size


def shrink(
    image: "Image.Image", size: Size, box: tuple[float, float, float, float] | None = None
) -> "Image.Image":
    """Shrink an image, or a box of it, to this height and width with an antialiased filter."""
    from PIL.Image import Resampling

    return image.resize(size[::-1], Resampling.BILINEAR, box=box, reducing_gap=3.0)


@guard_pillow()
def open_lazily(file: Any) -> "Image.Image":
    """Open an image file with `PIL.Image.open`, without decoding its pixels.

    Only the formats that datasets use are opened. Decode the image under `guard_pillow`, too.

    Raises:
        ColabUtilsError: if the file is no image, or has more than `MOST_PIXELS` pixels.
    """
    from PIL import Image, UnidentifiedImageError

    # This imports Pillow's readers of all formats.
    Image.init()
    try:
        image = Image.open(file, formats=sorted(_FORMATS & Image.OPEN.keys()))
    except UnidentifiedImageError:
        file.seek(0)
        kind = name_kind(file.read(256)) or "its format is not known"
        raise ColabUtilsError(f"not an image that can be read: {kind}") from None
    if image.width * image.height > MOST_PIXELS:
        raise ColabUtilsError(
            f"{image.width} x {image.height} is more than {MOST_PIXELS:,} pixels: {_CUT}"
        )
    return image


def has_16_bits(image: "Image.Image") -> bool:
    """Return whether an image has 16 bits a channel, of which decoding keeps only the upper 8.

    The image must not be loaded yet: once it is, Pillow no longer knows how many bits the file has.
    """
    return "16" in f"{image.mode} {[tile[3] for tile in getattr(image, 'tile', ())]}"


def to_rgb(image: "Image.Image") -> "Image.Image":
    """Convert an image to 8-bit RGB.

    16-bit grey is converted by dropping the low byte, because Pillow's own conversion makes most
    pixels white.

    Raises:
        ColabUtilsError: if the pixels do not fit into 8 bits (32-bit integers, floats), or are not
            in the palette.
    """
    from PIL import Image

    if image.mode in ("I", "F"):
        kind = "floating point numbers" if image.mode == "F" else "integers beyond 8 bits"
        raise ColabUtilsError(
            f"its pixels are {kind}: scale them to 0 to 255 and save them as an 8-bit PNG"
        )
    if image.mode.startswith("I;16"):
        pixels = (np.asarray(image) >> 8).astype(np.uint8)
        # If 0 means white in a TIFF, Pillow swaps black and white at 8 bits, but not at 16.
        is_negative = getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) == 0
        image = Image.fromarray(255 - pixels if is_negative else pixels)
    try:
        if image.mode == "P" and "transparency" in image.info:
            # Pillow warns if such an image is converted to RGB directly.
            image = image.convert("RGBA")
        return image if image.mode == "RGB" else image.convert("RGB")
    # Pillow raises this for a damaged palette.
    except ValueError as error:
        raise ColabUtilsError(f"not a complete image: {error}") from None


def _count_jpeg_pixels(data: Encoded) -> int:
    """Return the number of pixels that a JPEG's header gives.

    It is 0 if the bytes are no JPEG or if a marker is damaged. The JPEG operators must not decode
    such a file: they skip a table whose marker is damaged, and return wrong pixels.
    """
    pixels = 0
    for marker, place in _list_jpeg_markers(data):
        if marker == _JPEG_PIXELS:
            return pixels
        if marker in _JPEG_SIZES:
            height = int.from_bytes(data[place + 5 : place + 7])
            pixels = height * int.from_bytes(data[place + 7 : place + 9])
        elif marker not in _JPEG_SEGMENTS:
            return 0
    return 0


def _list_jpeg_markers(data: Encoded) -> Iterator[tuple[int, int]]:
    """Yield each marker of a JPEG's header and its position, up to the marker of the pixels."""
    if data[:3] != _JPEG:
        return
    place = 2
    marker = 0
    while place + 9 < len(data) and data[place] == 0xFF and marker != _JPEG_PIXELS:
        marker = data[place + 1]
        yield marker, place
        place += 2 + int.from_bytes(data[place + 2 : place + 4])


def may_have_exif(data: Encoded) -> bool:
    """Return whether an image file may have EXIF. Only JPEGs are looked into."""
    if data[:3] == _JPEG:
        return any(marker == _JPEG_EXIF for marker, _ in _list_jpeg_markers(data))
    return True


def name_kind(data: Encoded) -> str:
    """Return what kind of file this is, if it is neither an image nor COCO JSON, and what to do.

    The text is empty if the kind is not known.

    Example:
        >>> name_kind(b"version https://git-lfs.github.com/spec/v1")
        'a Git LFS pointer: run `git lfs pull` where it comes from'
    """
    head = bytes(data[:_HEAD_BYTES])
    for kind, name in _KINDS.items():
        if re.match(kind, head, re.IGNORECASE | re.DOTALL):
            return name
    return ""


@cache
def load_jpeg_decoder() -> JpegDecoder:
    """Return the fastest function that decodes JPEGs to uint8 [H, W, 3] as Pillow does.

    The candidates are torchcodec (0.16 or newer), then torchvision, then Pillow. torchvision's
    operator is called directly, because newer versions deprecate its Python function. Each
    candidate decodes a small JPEG first, and is used only if it gives the same pixels as Pillow.

    The first call imports torchvision, which takes a second or two. Call it before worker
    processes start, so that they share the import.
    """
    sample = _make_sample_jpeg()
    pixels = _decode_by_pillow(sample)
    for load in (_load_torchcodec, _load_torchvision):
        # A package that is missing, too old or damaged raises all kinds of errors.
        with suppress(Exception):
            decode = load()
            if np.array_equal(decode(sample), pixels):
                return decode
    warnings.warn(
        "Neither torchcodec nor torchvision decodes a JPEG as Pillow does: Pillow decodes instead, "
        "more slowly. Install versions of torch and torchvision that fit each other.",
        ColabUtilsWarning,
        stacklevel=2,
    )
    return _decode_by_pillow


@guard_pillow()
def _make_sample_jpeg() -> bytes:
    """Return a small JPEG with an EXIF orientation. A decoder that turns it gives other pixels."""
    from PIL import ExifTags, Image

    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    file = io.BytesIO()
    Image.new("RGB", (24, 40), "teal").save(file, "JPEG", exif=exif)
    return file.getvalue()


def _load_torchcodec() -> JpegDecoder:
    from torchcodec.decoders import decode_jpeg

    return _decode_by(decode_jpeg, _hide_exif)


def _load_torchvision() -> JpegDecoder:
    import torch

    # This import registers the operator.
    import torchvision  # noqa: F401

    return _decode_by(partial(torch.ops.image.decode_jpeg, mode=3), _make_writable)


def _decode_by(operator: Any, prepare: Callable[[Encoded], bytearray]) -> JpegDecoder:
    """Return a decoder that calls an operator: uint8 [bytes] to uint8 [3, H, W]."""
    import torch

    def decode(data: Encoded) -> Pixels:
        encoded = torch.frombuffer(prepare(data), dtype=torch.uint8)
        pixels: Pixels = operator(encoded).numpy()
        return pixels.transpose(1, 2, 0)

    return decode


def _make_writable(data: Encoded) -> bytearray:
    """Return the bytes in writable memory. torch warns about memory that is read-only."""
    return data if isinstance(data, bytearray) else bytearray(data)


def _hide_exif(data: Encoded) -> bytearray:
    """Return a copy of a JPEG whose EXIF torchcodec does not read.

    torchcodec always turns images by EXIF. The annotations may belong to the image as stored, which
    must not be turned then.
    """
    hidden = bytearray(data)
    for marker, place in _list_jpeg_markers(data):
        if marker == _JPEG_EXIF:
            hidden[place + 1] = _JPEG_UNREAD
    return hidden
