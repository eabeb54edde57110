"""Decode the bytes of an image: JPEG by the libjpeg-turbo of torchcodec or torchvision, raw pixels
as they are, the rest by Pillow.
"""

import io
import logging
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning

if TYPE_CHECKING:
    from PIL import Image

Encoded = bytes | bytearray
"""The content of an image file."""
Pixels = NDArray[np.uint8]
"""Decoded pixels, [H, W, 3]."""
JpegDecoder = Callable[[Encoded], Pixels]
"""Decodes a JPEG, or raises RuntimeError."""

MOST_PIXELS = 112_000_000
"""Pixels of the largest image: phones of 108 megapixels pass, and reading one takes at most 1 GB,
as Pillow has 4 bytes for each pixel.
"""

_NPY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<>|][a-z]\d+)', 'fortran_order': False, 'shape': \(([\d, "
    rb"]*)\), \} *\n",
    re.DOTALL,
)
# Bytes of a file that say what it is.
_HEAD_BYTES = 2000
# What people have in place of an image or of a JSON, by its first bytes.
_KINDS = {
    b"PK\x03\x04": "a zip: unpack it first",
    b"\x1f\x8b": "a gzip file: unpack it first",
    b"version https://git-lfs": "a Git LFS pointer: run `git lfs pull` where it comes from",
    b"\\s*<(!doctype html|html)": "a web page: download the file itself",
    b"....ftyp(hei|hev|mif1|msf1)": "HEIC: save it as JPEG",
    b"%(PDF|!PS)": "a PDF or a PostScript file: save its pages as images",
    b".{128}DICM": "DICOM: save it as an 8-bit PNG",
    b"\\0{16}": "nothing but zeros: copy it again",
    b"\\s*\\w*id,.*(pixels|annotation|rle)": "a table of run lengths: see docs/FORMATS.md",
    b"$": "an empty file: copy it again",
    b"\\s*#?filename,file_size": "VIA's CSV: export its JSON, see docs/FORMATS.md",
    b"\\s*(<\\?xml.*)?<annotations?>": "CVAT's or VOC's XML: see docs/FORMATS.md",
    b"\\s*\\d+([ \\t]+[\\d.]+){4}": "YOLO's text: see docs/FORMATS.md",
}
# What a JSON without a list of images is, by a key in its first bytes.
_FOREIGN = {
    b'(_via_|__VIA_|filename".*"regions")': "VIA's JSON",
    b'(shapes|imagePath)"': "LabelMe's JSON",
    b'(data_row|DataRow ID|Labeled Data)"': "Labelbox's JSON",
    b'(Feature|FeatureCollection)"': "GeoJSON",
    b'(classTitle"|tags".*"size")': "Supervisely's JSON",
    b'(imgHeight|gtCoarse)"': "Cityscapes' JSON",
    b'(slots|item)".*"': "V7 Darwin's JSON",
    b'(crop_box|predicted_iou)"': "the JSON of Segment Anything",
    b'(completed_by|from_name|polygonlabels|brushlabels)"': "Label Studio's own JSON",
    b'coordinates"': "CreateML's JSON",
}
# An object in a line, and the next one after it.
_JSON_LINES = re.compile(rb"\s*\{[^\n]*\}\s*\n\s*\{")
# The number of the orientation in EXIF.
_ORIENTATION = 0x0112
# The number of the tag of a TIFF that says whether 0 is white (0) or black.
_PHOTOMETRIC = 262
# The markers of a JPEG that its size, EXIF and its pixels follow, one of what nobody reads, and
# those of tables, of programs and of comments.
_JPEG_SIZES = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_SEGMENTS = {0xC4, 0xCC, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE}
_JPEG_EXIF = 0xE1
_JPEG_PIXELS = 0xDA
_JPEG_UNREAD = 0xEF
# The chunks without which a PNG has other pixels.
_PNG_NEEDED = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
_NUMPY = b"\x93NUMPY"
_TIFFS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# One scale for all images: each image's own would change what their colours mean.
_SCALE = "-scale 0 MAX IN OUT, where MAX is the largest value of all your images"
# A brightest value under it is of a camera or a sensor of 14 bits or fewer.
_DARK = 64
# Rows that are taken from Pillow at a time.
_BAND = 1024
# What Pillow may open: for EPS it starts another program, and an icon holds a larger image than it
# says.
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
    """Be a number that twice itself is no more than: Pillow warns above a limit, and refuses above
    two of them.
    """

    def __rmul__(self, _: int, /) -> int:
        return self


class _PillowGuard:
    """Hold Pillow's switches for the whole process: ours while a thread reads here, then the
    user's again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers = 0
        self._users_values: dict[str, Any] = {}

    def begin(self) -> None:
        """Set the switches, for the first reader and again for each further one."""
        with self._lock:
            self._readers += 1
            for holder, name, ours in _list_switches():
                value = getattr(holder, name)
                # Other threads may have set them since.
                if self._readers == 1 or value is not ours:
                    self._users_values[name] = value
                setattr(holder, name, ours)

    def end(self) -> None:
        """Give the user's values back after the last reader."""
        with self._lock:
            self._readers -= 1
            if not self._readers:
                self._give_back()

    def begin_anew(self) -> None:
        """Forget, in a forked process, the threads that it does not have."""
        self._lock = threading.Lock()
        if self._readers:
            self._readers = 0
            self._give_back()

    def _give_back(self) -> None:
        for holder, name, ours in _list_switches():
            if getattr(holder, name) is ours:
                setattr(holder, name, self._users_values[name])


@cache
def _list_switches() -> tuple[tuple[Any, str, Any], ...]:
    """Return where each switch is, its name, and our value."""
    from PIL import Image, ImageFile

    return (
        (ImageFile, "LOAD_TRUNCATED_IMAGES", False),
        # Into too small a block JPEGs are written without end.
        (ImageFile, "MAXBLOCK", 65_536),
        # Between one and two times `MOST_PIXELS`, `open_lazily` can say how large the image is.
        (Image, "MAX_IMAGE_PIXELS", _Limit(2 * MOST_PIXELS)),
        # It writes to the screen what an error of ours says better.
        (logging.getLogger("PIL.TiffImagePlugin"), "disabled", True),
    )


_guard = _PillowGuard()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_guard.begin_anew)


@contextmanager
def guard_pillow() -> Iterator[None]:
    """Read by Pillow as if no other package had changed its switches, and give their values back.

    Many packages set ``ImageFile.LOAD_TRUNCATED_IMAGES``, with which a photo that is cut short
    becomes grey in silence; and ``Image.MAX_IMAGE_PIXELS`` may be any number. The switches are the
    whole process's: while a thread is in the block, other threads meet our values, too.

    Raises:
        ColabUtilsError: the image, or a part of it, has more pixels than Pillow may make.

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
        raise ColabUtilsError(
            f"it has more than {MOST_PIXELS:,} pixels: save the image smaller"
        ) from None
    finally:
        _guard.end()


def decode_pixels(data: Encoded) -> Pixels:
    """Return a JPEG, PNG, any other image, or raw pixels (``numpy.save`` of uint8 [H, W, 3]) as
    uint8 [H, W, 3].

    A JPEG operator decodes straight into the array, Pillow gives its pixels away through two
    copies; the pixels are the same. What the operator refuses (cut short) Pillow decodes, or says
    what is wrong.

    Raises:
        ColabUtilsError: if the bytes are not a complete image of at most `MOST_PIXELS` pixels.

    Example:
        >>> file = io.BytesIO()
        >>> np.save(file, np.full((2, 3, 3), 7, np.uint8))
        >>> decode_pixels(file.getvalue()).shape
        (2, 3, 3)
    """
    if data[:6] == _NUMPY:
        return _read_raw_pixels(data)
    if 0 < _count_jpeg_pixels(data) <= MOST_PIXELS:
        try:
            return load_jpeg_decoder()(data)
        except RuntimeError:
            # Pillow says what is wrong, or knows the kind.
            pass
    return decode_upright(data, 0, 0)


def _read_raw_pixels(data: Encoded) -> Pixels:
    try:
        start, shape, dtype = read_npy_header(data)
        if dtype != np.uint8 or len(shape) != 3 or shape[2] != 3:
            raise ValueError(f"{dtype} {list(shape)}")
        return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
    except ValueError as error:
        raise ColabUtilsError(f"expected raw pixels as uint8 [H, W, 3], found: {error}") from None


@guard_pillow()
def decode_upright(data: Encoded, height: int, width: int) -> Pixels:
    """Decode by Pillow, at the size that annotations give, 0 for none: see `turn_upright`."""
    return _take_pixels(to_rgb(turn_upright(open_image(data), height, width)))


def _take_pixels(image: "Image.Image") -> Pixels:
    """Return the pixels, taken in bands, because Pillow gives pixels away through two copies."""
    width, height = image.size
    pixels = np.empty((height, width, 3), np.uint8)
    for top in range(0, height, _BAND):
        end = min(top + _BAND, height)
        pixels[top:end] = np.asarray(image.crop((0, top, width, end)))
    return pixels


@guard_pillow()
def open_image(data: Encoded) -> "Image.Image":
    """Open a complete image by Pillow. A PNG's damaged metadata (profile, texts, EXIF) does not
    refuse its pixels.

    Raises:
        ColabUtilsError: if the bytes are none, or have more than `MOST_PIXELS` pixels, before any
            of them is decoded; or 16 bits a channel of which so few are used that it becomes black.
    """
    try:
        return _load_image(data)
    except ColabUtilsError:
        if data[:8] == _PNG:
            with suppress(ColabUtilsError):
                return _load_image(_strip_png(data))
        raise


@guard_pillow()
def open_lazily(file: Any) -> "Image.Image":
    """Open by `PIL.Image.open` the formats that datasets have; nothing is decoded yet.

    What decodes the image is to stand under `guard_pillow`, too.

    Raises:
        ColabUtilsError: it is no image, or has more than `MOST_PIXELS` pixels.
    """
    from PIL import Image

    # It loads what knows the formats.
    Image.init()
    try:
        image = Image.open(file, formats=sorted(_FORMATS & Image.OPEN.keys()))
    except Image.UnidentifiedImageError:
        file.seek(0)
        head = file.read(256)
        if head.startswith(_TIFFS):
            raise ColabUtilsError(_name_tiff(file)) from None
        kind = name_kind(head)
        raise ColabUtilsError(f"not an image: {kind}" if kind else "not an image") from None
    if image.width * image.height > MOST_PIXELS:
        raise ColabUtilsError(
            f"{image.width} x {image.height} is more than {MOST_PIXELS:,} pixels: save the image "
            "smaller"
        )
    return image


def _load_image(data: Encoded) -> "Image.Image":
    from PIL import Image

    try:
        image = open_lazily(io.BytesIO(data))
        is_deep = has_16_bits(image)
        image.load()
    except (ColabUtilsError, Image.DecompressionBombError):
        raise
    # On damaged data Pillow's readers raise all kinds of errors.
    except Exception as error:
        raise ColabUtilsError(
            f"not a complete image: {str(error) or type(error).__name__}"
        ) from None
    peak = int(np.asarray(to_rgb(image)).max()) if is_deep else 255
    if peak < _DARK:
        raise ColabUtilsError(
            f"its 16 bits hold no value above {peak * 256 + 255:,} of 65,535, so that the "
            f"brightest pixel becomes {peak} of 255, almost black: gdal_translate -ot Byte {_SCALE}"
        )
    return image


def has_16_bits(image: "Image.Image") -> bool:
    """Return whether an image that is not loaded yet has 16 bits a channel, of which 8 are kept."""
    return "16" in f"{image.mode} {[tile[3] for tile in getattr(image, 'tile', ())]}"


def read_orientation(image: "Image.Image") -> int:
    """Return the orientation that EXIF gives, 1 to 8; 1 where there is none or it is damaged.
    Nothing is decoded for it.

    Example:
        >>> from PIL import Image
        >>> read_orientation(Image.new("RGB", (8, 8)))
        1
    """
    from PIL import Image

    try:
        # PNG's own method decodes the pixels first.
        orientation = Image.Image.getexif(image).get(_ORIENTATION)
    # Damaged EXIF raises all kinds of errors.
    except Exception:
        return 1
    if isinstance(orientation, int) and 1 <= orientation <= 8:
        return orientation
    return 1


def is_turn_unclear(image: "Image.Image", height: int, width: int) -> bool:
    """Return whether EXIF turns an image, and the size that annotations give (0: none) does not say
    whether they are of it turned: half a turn, and that of a square, change no size.
    """
    orientation = read_orientation(image)
    is_same_size = orientation <= 4 or image.width == image.height
    return orientation != 1 and (is_same_size or not height or not width)


def turn_upright(image: "Image.Image", height: int, width: int) -> "Image.Image":
    """Return the image at the size that annotations give (0: none), turned by EXIF only where its
    orientation explains that.

    Raises:
        ColabUtilsError: it has another size.
    """
    from PIL import Image

    if not height or not width or image.size == (width, height):
        return image
    turn = Image.Transpose
    turns = {5: turn.TRANSPOSE, 6: turn.ROTATE_270, 7: turn.TRANSVERSE, 8: turn.ROTATE_90}
    orientation = read_orientation(image)
    if orientation in turns and image.size == (height, width):
        return image.transpose(turns[orientation])
    raise ColabUtilsError(
        f"the annotations say {width} x {height} pixels, the file has {image.width} x "
        f"{image.height}"
    )


def to_rgb(image: "Image.Image") -> "Image.Image":
    """Convert to 8-bit RGB; 16-bit grey loses its low byte, where Pillow's own conversion would
    turn most of it white.

    Raises:
        ColabUtilsError: the pixels are numbers that do not fit 8 bits (32-bit integers, floats), or
            not in the palette.
    """
    from PIL import Image

    if image.mode in ("I", "F"):
        kind = "floating point numbers" if image.mode == "F" else "integers beyond 8 bits"
        raise ColabUtilsError(
            f"its pixels are {kind}: scale them to 0 to 255 and save them as an 8-bit PNG"
        )
    if image.mode.startswith("I;16"):
        pixels = (np.asarray(image) >> 8).astype(np.uint8)
        # Pillow turns white and black in a TIFF of 8 bits alone.
        is_negative = getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) == 0
        image = Image.fromarray(255 - pixels if is_negative else pixels)
    try:
        if image.mode == "P" and "transparency" in image.info:
            # Straight to RGB would warn.
            image = image.convert("RGBA")
        return image if image.mode == "RGB" else image.convert("RGB")
    # The palette is damaged.
    except ValueError as error:
        raise ColabUtilsError(f"not a complete image: {error}") from None


def _count_jpeg_pixels(data: Encoded) -> int:
    """Return the pixels that a JPEG's header gives; 0 where the bytes are no JPEG, or its markers
    are damaged: operators leave out what they do not know, such as a table, and decode the rest.
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
    """Give each marker of a JPEG's header and where it stands, the last one that of its pixels."""
    if data[:3] != _JPEG:
        return
    place = 2
    marker = 0
    while place + 9 < len(data) and data[place] == 0xFF and marker != _JPEG_PIXELS:
        marker = data[place + 1]
        yield marker, place
        place += 2 + int.from_bytes(data[place + 2 : place + 4])


def _strip_png(data: Encoded) -> bytes:
    """Return a PNG without the chunks that its pixels do not need."""
    pieces = [data[:8]]
    place = 8
    while place + 12 <= len(data):
        end = place + 12 + int.from_bytes(data[place : place + 4])
        if data[place + 4 : place + 8] in _PNG_NEEDED:
            pieces.append(data[place:end])
        place = end
    return b"".join(pieces)


def name_kind(data: Encoded) -> str:
    """Return what a file that is no image and no JSON is, and what to do; "" where that is not
    known.

    Example:
        >>> name_kind(b"version https://git-lfs.github.com/spec/v1")
        'a Git LFS pointer: run `git lfs pull` where it comes from'
    """
    head = bytes(data[:_HEAD_BYTES])
    for kind, name in _KINDS.items():
        if re.match(kind, head, re.IGNORECASE | re.DOTALL):
            return name
    for key, name in _FOREIGN.items():
        if re.match(b'\\s*[{\\[](?!.*"images").*"' + key, head, re.DOTALL):
            return f"{name}: see docs/FORMATS.md"
    return "JSON Lines: see docs/FORMATS.md" if _JSON_LINES.match(head) else ""


def _name_tiff(file: IO[bytes]) -> str:
    """Return what a TIFF that Pillow cannot decode holds, and what to do."""
    from PIL.TiffImagePlugin import BITSPERSAMPLE, SAMPLESPERPIXEL, ImageFileDirectory_v2

    file.seek(0)
    head = file.read(8)
    try:
        # A BigTIFF has a longer header.
        tags = ImageFileDirectory_v2(head if 42 in head[:4] else head + file.read(8))
        file.seek(tags.next)
        tags.load(file)
        bits = max(tags[BITSPERSAMPLE])
        bands = tags[SAMPLESPERPIXEL]
    # Damaged tags raise all kinds of errors.
    except Exception:
        return "not a complete image: a damaged TIFF"
    chosen = "-b 1 -b 2 -b 3" if bands > 2 else "-b 1"
    return (
        f"a TIFF of {bits} bits x {bands} bands, which Pillow cannot decode: gdal_translate -ot "
        f"Byte {chosen} {_SCALE}"
    )


def read_npy_header(data: Encoded) -> tuple[int, tuple[int, ...], np.dtype[Any]]:
    """Return where the values start in a ``.npy`` file that begins with ``data``, their shape and
    dtype.

    numpy reads the header as Python code: slower than an image's pixels, and Python 3.11 sometimes
    fails at it in several threads (SystemError of the AST, seen; see
    https://github.com/pytest-dev/pytest/issues/10763).

    Raises:
        ValueError: if it is no header that ``numpy.save`` writes for numbers in C order.

    Example:
        >>> file = io.BytesIO()
        >>> np.save(file, np.zeros((2, 3), np.float32))
        >>> read_npy_header(file.getvalue())
        (128, (2, 3), dtype('float32'))
    """
    header = _NPY_HEADER.match(data)
    if header is None or header.end() != 10 + int.from_bytes(data[8:10], "little"):
        raise ValueError("a header that is not numpy's")
    shape = tuple(int(part) for part in header[2].decode().split(",") if part.strip())
    try:
        return header.end(), shape, np.dtype(header[1].decode())
    except TypeError:
        raise ValueError(f"no type of numbers called {header[1]!r}") from None


@cache
def load_jpeg_decoder() -> JpegDecoder:
    """Return what decodes a JPEG's bytes to uint8 [H, W, 3]: torchcodec (from 0.16), else the
    operator under torchvision's Python function, which newer versions deprecate, else Pillow.

    Each is tried on a small JPEG, and left out where it fails or gives other pixels than Pillow. It
    imports torchvision, for a second or two: call it before worker processes start, so that they
    share it.
    """
    sample = _make_sample_jpeg()
    pixels = decode_upright(sample, 0, 0)
    for load, prepare in ((_load_torchcodec, _hide_exif), (_load_torchvision, _make_writable)):
        # What is missing, too old or damaged raises all kinds of errors.
        with suppress(Exception):
            decode = _decode_by(load(), prepare)
            if np.array_equal(decode(sample), pixels):
                return decode
    warnings.warn(
        "Neither torchcodec nor torchvision decodes a JPEG as Pillow does: Pillow decodes instead, "
        "more slowly. Install versions of torch and torchvision that fit each other.",
        ColabUtilsWarning,
        stacklevel=2,
    )
    return partial(decode_upright, height=0, width=0)


@guard_pillow()
def _make_sample_jpeg() -> bytes:
    """Return a JPEG that EXIF would turn."""
    from PIL import Image

    exif = Image.Exif()
    exif[_ORIENTATION] = 6
    file = io.BytesIO()
    Image.new("RGB", (24, 40), "teal").save(file, "JPEG", exif=exif)
    return file.getvalue()


def _load_torchcodec() -> Any:
    from torchcodec.decoders import decode_jpeg

    return decode_jpeg


def _load_torchvision() -> Any:
    import torch

    # It registers the operator.
    import torchvision  # noqa: F401

    return partial(torch.ops.image.decode_jpeg, mode=3)


def _decode_by(operator: Any, prepare: Callable[[Encoded], bytearray]) -> JpegDecoder:
    """Return a decoder by what makes RGB of a tensor of bytes."""
    import torch

    def decode(data: Encoded) -> Pixels:
        encoded = torch.frombuffer(prepare(data), dtype=torch.uint8)
        pixels: Pixels = operator(encoded).numpy()
        return pixels.transpose(1, 2, 0)

    return decode


def _make_writable(data: Encoded) -> bytearray:
    """Return the bytes in memory that may be written to; of other memory torch warns."""
    return data if isinstance(data, bytearray) else bytearray(data)


def _hide_exif(data: Encoded) -> bytearray:
    """Return a copy of a JPEG that torchcodec does not turn: it always obeys EXIF, annotations need
    not.
    """
    hidden = bytearray(data)
    for marker, place in _list_jpeg_markers(data):
        if marker == _JPEG_EXIF:
            hidden[place + 1] = _JPEG_UNREAD
    return hidden
