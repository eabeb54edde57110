"""Decode the bytes of an image: JPEG by torchvision's libjpeg-turbo, raw pixels as they are, the
rest by Pillow.
"""

import io
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning

if TYPE_CHECKING:
    from PIL import Image

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
    b"\\0{16}": "nothing but zeros: copy it again",
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
    b'(completed_by|from_name|polygonlabels|brushlabels)"': "Label Studio's own JSON",
    b'coordinates"': "CreateML's JSON",
}
# The number of the orientation in EXIF.
_ORIENTATION = 0x0112
# The markers of a JPEG that its size follows.
_JPEG_SIZES = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# The chunks without which a PNG has other pixels.
_PNG_NEEDED = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
_NUMPY = b"\x93NUMPY"
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
        self._skips_damage: Any = None
        self._most_pixels: Any = None

    def begin(self) -> None:
        """Set the switches, for the first reader and again for each further one."""
        from PIL import Image, ImageFile

        with self._lock:
            self._readers += 1
            # Other threads may have set them since.
            if self._readers == 1 or ImageFile.LOAD_TRUNCATED_IMAGES is not False:
                self._skips_damage = ImageFile.LOAD_TRUNCATED_IMAGES
            if self._readers == 1 or Image.MAX_IMAGE_PIXELS is not _PILLOW_LIMIT:
                self._most_pixels = Image.MAX_IMAGE_PIXELS
            ImageFile.LOAD_TRUNCATED_IMAGES = False
            Image.MAX_IMAGE_PIXELS = _PILLOW_LIMIT

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
        from PIL import Image, ImageFile

        if ImageFile.LOAD_TRUNCATED_IMAGES is False:
            ImageFile.LOAD_TRUNCATED_IMAGES = self._skips_damage
        if Image.MAX_IMAGE_PIXELS is _PILLOW_LIMIT:
            Image.MAX_IMAGE_PIXELS = self._most_pixels


# Between one and two times `MOST_PIXELS`, `open_lazily` can say how large the image is.
_PILLOW_LIMIT = _Limit(2 * MOST_PIXELS)
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


def decode_pixels(data: bytes | bytearray) -> NDArray[np.uint8]:
    """Return a JPEG, PNG, any other image, or raw pixels (``numpy.save`` of uint8 [H, W, 3]) as
    uint8 [H, W, 3].

    torchvision's operator decodes straight into the array, Pillow gives its pixels away through two
    copies; the pixels are the same. What the operator refuses (CMYK, cut short) Pillow decodes, or
    says what is wrong.

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
        except (AttributeError, TypeError) as error:
            # Another version of torchvision takes or returns something else.
            warnings.warn(
                "found torchvision's JPEG operator failing "
                f"({str(error).splitlines()[0]:.100}): Pillow decodes instead, more slowly",
                ColabUtilsWarning,
                stacklevel=2,
            )
    with guard_pillow():
        return _take_pixels(to_rgb(open_image(data)))


def _read_raw_pixels(data: bytes | bytearray) -> NDArray[np.uint8]:
    try:
        start, shape, dtype = read_npy_header(data)
        if dtype != np.uint8 or len(shape) != 3 or shape[2] != 3:
            raise ValueError(f"{dtype} {list(shape)}")
        return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
    except ValueError as error:
        raise ColabUtilsError(f"expected raw pixels as uint8 [H, W, 3], found: {error}") from None


@guard_pillow()
def decode_upright(data: bytes | bytearray, height: int, width: int) -> NDArray[np.uint8]:
    """Decode as `decode_pixels`, at the size that annotations give: see `turn_upright`."""
    return _take_pixels(to_rgb(turn_upright(open_image(data), height, width)))


def _take_pixels(image: "Image.Image") -> NDArray[np.uint8]:
    """Return the pixels, taken in bands, because Pillow gives pixels away through two copies."""
    width, height = image.size
    pixels = np.empty((height, width, 3), np.uint8)
    if height <= _BAND:
        pixels[:] = np.asarray(image)
        return pixels
    for top in range(0, height, _BAND):
        end = min(top + _BAND, height)
        pixels[top:end] = np.asarray(image.crop((0, top, width, end)))
    return pixels


@guard_pillow()
def open_image(data: bytes | bytearray) -> "Image.Image":
    """Open a complete image by Pillow. A PNG's damaged metadata (profile, texts, EXIF) does not
    refuse its pixels.

    Raises:
        ColabUtilsError: if the bytes are none, or have more than `MOST_PIXELS` pixels, before any
            of them is decoded.
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
        kind = name_kind(file.read(256))
        raise ColabUtilsError(f"not an image: {kind}" if kind else "not an image") from None
    if image.width * image.height > MOST_PIXELS:
        raise ColabUtilsError(
            f"{image.width} x {image.height} is more than {MOST_PIXELS:,} pixels: save the image "
            "smaller"
        )
    return image


def _load_image(data: bytes | bytearray) -> "Image.Image":
    from PIL import Image

    try:
        image = open_lazily(io.BytesIO(data))
        image.load()
    except (ColabUtilsError, Image.DecompressionBombError):
        raise
    # On damaged data Pillow's readers raise all kinds of errors.
    except Exception as error:
        raise ColabUtilsError(
            f"not a complete image: {str(error) or type(error).__name__}"
        ) from None
    return image


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
        kind = "floating point numbers" if image.mode == "F" else "32-bit integers"
        raise ColabUtilsError(
            f"its pixels are {kind}: scale them to 0 to 255 and save them as an 8-bit PNG"
        )
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    try:
        if image.mode == "P" and "transparency" in image.info:
            # Straight to RGB would warn.
            image = image.convert("RGBA")
        return image if image.mode == "RGB" else image.convert("RGB")
    # The palette is damaged.
    except ValueError as error:
        raise ColabUtilsError(f"not a complete image: {error}") from None


def _count_jpeg_pixels(data: bytes | bytearray) -> int:
    """Return the pixels that a JPEG's header gives; 0 where the bytes are none, or its markers are
    damaged.
    """
    if data[:3] != _JPEG:
        return 0
    place = 2
    while place + 9 < len(data) and data[place] == 0xFF:
        if data[place + 1] in _JPEG_SIZES:
            height = int.from_bytes(data[place + 5 : place + 7])
            width = int.from_bytes(data[place + 7 : place + 9])
            return height * width
        place += 2 + int.from_bytes(data[place + 2 : place + 4])
    return 0


def _strip_png(data: bytes | bytearray) -> bytes:
    """Return a PNG without the chunks that its pixels do not need."""
    pieces = [data[:8]]
    place = 8
    while place + 12 <= len(data):
        end = place + 12 + int.from_bytes(data[place : place + 4])
        if data[place + 4 : place + 8] in _PNG_NEEDED:
            pieces.append(data[place:end])
        place = end
    return b"".join(pieces)


def name_kind(data: bytes | bytearray) -> str:
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
    return ""


def read_npy_header(data: bytes | bytearray) -> tuple[int, tuple[int, ...], np.dtype[Any]]:
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
def load_jpeg_decoder() -> Callable[[bytes | bytearray], NDArray[np.uint8]]:
    """Return the JPEG operator under torchvision's Python function, which newer versions deprecate.

    It imports torchvision, for a second or two: call it before worker processes start, so that they
    share it.
    """
    import torch

    # It registers the operator.
    import torchvision  # noqa: F401

    def decode(data: bytes | bytearray) -> NDArray[np.uint8]:
        # torch warns of memory it must not write.
        buffer = data if isinstance(data, bytearray) else bytearray(data)
        encoded = torch.frombuffer(buffer, dtype=torch.uint8)
        pixels: NDArray[np.uint8] = torch.ops.image.decode_jpeg(encoded, 3, False).numpy()
        return pixels.transpose(1, 2, 0)

    return decode
