"""Bytes of an image to pixels: JPEG by torchvision's libjpeg-turbo, raw pixels as they are, the rest by Pillow."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.errors import ColabUtilsError

__all__ = ["decode_pixels", "find_operator", "read_raw_header"]

_HEADER_BYTES = 128  # of an image's; numpy reads each as Python code, which takes longer than its pixels
_MOST_HEADERS = 65_536
_headers: dict[bytes, tuple[int, int, int]] = {}
_JPEG, _NUMPY = b"\xff\xd8\xff", b"\x93NUMPY"


def decode_pixels(data: bytes | bytearray) -> NDArray[np.uint8]:
    """JPEG, PNG, any other image, or raw pixels (``numpy.save`` of uint8 [H, W, 3]) as uint8 [H, W, 3].

    torchvision's operator decodes straight into the array, Pillow gives its pixels away through two copies; the
    pixels are the same. What the operator refuses (CMYK, cut short) Pillow decodes or names.

    Raises:
        ColabUtilsError: if the bytes are not a whole image.

    Example:
        >>> file = io.BytesIO()
        >>> np.save(file, np.full((2, 3, 3), 7, np.uint8))
        >>> decode_pixels(file.getvalue()).shape
        (2, 3, 3)
    """
    if data[:6] == _NUMPY:
        start, shape = read_raw_header(data)
        if len(data) - start != int(np.prod(shape)):
            raise ColabUtilsError(
                f"expected a whole image, found {len(data) - start:,} bytes of raw pixels for {shape}"
            )
        return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
    decode = find_operator()
    if decode is not None and data[:3] == _JPEG:
        try:
            return decode(data)
        except RuntimeError:
            pass  # Pillow says what is wrong, or knows the kind
    from PIL import Image

    try:
        return np.array(Image.open(io.BytesIO(data)).convert("RGB"))
    except Image.UnidentifiedImageError:
        raise ColabUtilsError("expected a whole image, found bytes of no known kind") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ColabUtilsError(f"expected a whole image, found: {error}") from None


def read_raw_header(data: bytes | bytearray) -> tuple[int, tuple[int, int, int]]:
    """Where raw pixels start in a ``.npy`` file that begins with ``data``, and their shape (H, W, 3).

    Raises:
        ColabUtilsError: if the header is not of uint8 [H, W, 3] in C order.
    """
    known = _headers.get(bytes(data[:_HEADER_BYTES]))
    if known is not None:
        return _HEADER_BYTES, known
    file = io.BytesIO(data)
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("another version of the format")
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(file)
        if by_columns or dtype != np.uint8 or len(shape) != 3 or shape[2] != 3:
            raise ValueError(f"{dtype} {list(shape)}")
    except Exception as error:  # numpy reads the header as Python, and raises whatever that raises
        raise ColabUtilsError(f"expected raw pixels as uint8 [H, W, 3], found: {error}") from None
    if file.tell() == _HEADER_BYTES and len(_headers) < _MOST_HEADERS:
        _headers[bytes(data[:_HEADER_BYTES])] = shape
    return file.tell(), shape


@cache
def find_operator() -> Callable[[bytes | bytearray], NDArray[np.uint8]] | None:
    """The JPEG operator under torchvision's Python function, which newer versions deprecate; None without it.

    It imports torchvision, for a second or two: call it before worker processes start, so that they share it.
    """
    try:
        import torch
        import torchvision  # noqa: F401  # it registers the operator

        operator: Any = torch.ops.image.decode_jpeg
    except (ImportError, AttributeError, RuntimeError):
        return None

    def decode(data: bytes | bytearray) -> NDArray[np.uint8]:
        buffer = data if isinstance(data, bytearray) else bytearray(data)  # torch warns of memory it must not write
        pixels: NDArray[np.uint8] = operator(torch.frombuffer(buffer, dtype=torch.uint8), 3, False).numpy()
        return pixels.transpose(1, 2, 0)

    return decode
