"""Files of pictures that tests make: PNGs of every kind, and photos with an orientation."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterable
from typing import Any

from PIL import Image


def save(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The bytes of an image's file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def make_exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def make_chunk(name: bytes, data: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(name + data))
    return struct.pack(">I", len(data)) + name + data + checksum


def make_png(
    size: tuple[int, int], depth: int, colour: int, rows: Iterable[Any], *chunks: bytes
) -> bytes:
    """A PNG of a width and height, also one of a kind that Pillow does not write. Its rows are
    bytes or arrays.
    """
    parts = [
        make_chunk(b"IHDR", struct.pack(">IIBBBBB", *size, depth, colour, 0, 0, 0)),
        *chunks,
        make_chunk(b"IDAT", zlib.compress(b"".join(b"\0" + bytes(row) for row in rows))),
        make_chunk(b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
