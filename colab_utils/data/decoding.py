"""Bytes of an image to pixels: JPEG by torchvision's libjpeg-turbo, raw pixels as they are, the rest by Pillow."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning

__all__ = ["MOST_PIXELS", "decode_pixels", "load_jpeg_decoder", "name_kind", "read_npy_header"]

MOST_PIXELS = 128_000_000
"""Of an image: phones of 108 megapixels pass, and a decoded image takes at most 0.4 GB."""

_NPY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<>|][a-z]\d+)', 'fortran_order': False, 'shape': \(([\d, ]*)\), \} *\n",
    re.DOTALL,
)
_KINDS = {
    b"PK\x03\x04": "a zip: unpack it first",
    b"\x1f\x8b": "a gzip file: unpack it first",
    b"version https://git-lfs": "a Git LFS pointer: run `git lfs pull` where it comes from",
    b"\\s*<(!doctype html|html)": "a web page: download the file itself",
    b"....ftyp(hei|hev|mif1|msf1)": "HEIC: save it as JPEG",
    b"%PDF": "a PDF: save its pages as images",
    b"\\0{16}": "nothing but zeros: copy it again",
    b"$": "an empty file: copy it again",
}  # what people have in place of an image or of a JSON, by its first bytes
_JPEG, _NUMPY = b"\xff\xd8\xff", b"\x93NUMPY"


def decode_pixels(data: bytes | bytearray) -> NDArray[np.uint8]:
    """JPEG, PNG, any other image, or raw pixels (``numpy.save`` of uint8 [H, W, 3]) as uint8 [H, W, 3].

    torchvision's operator decodes straight into the array, Pillow gives its pixels away through two copies; the
    pixels are the same. What the operator refuses (CMYK, cut short) Pillow decodes, or says what is wrong.

    Raises:
        ColabUtilsError: if the bytes are not a complete image.

    Example:
        >>> file = io.BytesIO()
        >>> np.save(file, np.full((2, 3, 3), 7, np.uint8))
        >>> decode_pixels(file.getvalue()).shape
        (2, 3, 3)
    """
    if data[:6] == _NUMPY:
        try:
            start, shape, dtype = read_npy_header(data)
            if dtype != np.uint8 or len(shape) != 3 or shape[2] != 3:
                raise ValueError(f"{dtype} {list(shape)}")
            return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
        except ValueError as error:
            raise ColabUtilsError(f"expected raw pixels as uint8 [H, W, 3], found: {error}") from None
    decode = load_jpeg_decoder()
    if decode is not None and data[:3] == _JPEG:
        try:
            return decode(data)
        except RuntimeError:
            pass  # Pillow says what is wrong, or knows the kind
    from PIL import Image

    try:
        return np.array(Image.open(io.BytesIO(data)).convert("RGB"))
    except Image.UnidentifiedImageError:
        raise ColabUtilsError("expected a complete image, found bytes of no known kind") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ColabUtilsError(f"expected a complete image, found: {error}") from None


def name_kind(data: bytes | bytearray) -> str:
    """What a file that is no image and no JSON is, and what to do; "" where that is not known.

    Example:
        >>> name_kind(b"version https://git-lfs.github.com/spec/v1")
        'a Git LFS pointer: run `git lfs pull` where it comes from'
    """
    head = bytes(data[:256])
    return next((name for kind, name in _KINDS.items() if re.match(kind, head, re.IGNORECASE | re.DOTALL)), "")


def read_npy_header(data: bytes | bytearray) -> tuple[int, tuple[int, ...], np.dtype[Any]]:
    """Where the values start in a ``.npy`` file that begins with ``data``, their shape and dtype.

    numpy reads the header as Python code: slower than an image's pixels, and Python 3.11 sometimes fails at it in
    several threads (SystemError of the AST, seen; see https://github.com/pytest-dev/pytest/issues/10763).

    Raises:
        ValueError: if it is no header that ``numpy.save`` writes for numbers in C order.

    Example:
        >>> file = io.BytesIO()
        >>> np.save(file, np.zeros((2, 3), np.float32))
        >>> read_npy_header(file.getvalue())
        (128, (2, 3), dtype('float32'))
    """
    found = _NPY_HEADER.match(data)
    if found is None or found.end() != 10 + int.from_bytes(data[8:10], "little"):
        raise ValueError("a header that is not numpy's")
    shape = tuple(int(part) for part in found[2].decode().split(",") if part.strip())
    try:
        return found.end(), shape, np.dtype(found[1].decode())
    except TypeError:
        raise ValueError(f"no type of numbers called {found[1]!r}") from None


@cache
def load_jpeg_decoder() -> Callable[[bytes | bytearray], NDArray[np.uint8]] | None:
    """The JPEG operator under torchvision's Python function, which newer versions deprecate;
    None where it fails.

    It imports torchvision, for a second or two: call it before worker processes start, so that they share it.
    """
    import torch
    import torchvision  # noqa: F401  # it registers the operator
    from PIL import Image

    def decode(data: bytes | bytearray) -> NDArray[np.uint8]:
        buffer = data if isinstance(data, bytearray) else bytearray(data)  # torch warns of memory it must not write
        pixels = torch.ops.image.decode_jpeg(torch.frombuffer(buffer, dtype=torch.uint8), 3, False).numpy()
        return pixels.transpose(1, 2, 0)

    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    try:
        decode(file.getvalue())
    except (AttributeError, RuntimeError, TypeError) as error:
        found = f"torchvision's JPEG operator failing ({str(error).splitlines()[0]:.100})"
        warnings.warn(f"found {found}: Pillow decodes instead, more slowly", ColabUtilsWarning, stacklevel=2)
        return None
    return decode
