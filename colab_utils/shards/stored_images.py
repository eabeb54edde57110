"""Images as a shard stores them: their bytes are kept where possible, and large ones shrunk."""

import io
from typing import NamedTuple

from PIL import Image

from colab_utils.data.decoding import guard_pillow, shrink, to_rgb
from colab_utils.data.orientation import open_upright
from colab_utils.data.sizes import plan_size
from colab_utils.shards.index import Storage

_JPEG_QUALITY = 95

_KEPT_KINDS = ("JPEG", "MPO", "PNG")

_KEPT_MODES = ("RGB", "L")

# Offset of the byte in a PNG file that says how many bits each channel has.
_PNG_DEPTH = 24


class StoredImage(NamedTuple):
    """An image as a shard stores it. Sizes are height and width in pixels."""

    extension: str
    data: bytes
    size: tuple[int, int]
    original: tuple[int, int]
    is_unclear: bool = False
    """Whether EXIF turns the image, and its size does not tell whether the annotations were drawn
    on the turned image or on the image as stored in the file.
    """


@guard_pillow()
def store_image(
    data: bytes,
    size: tuple[int, int],
    *,
    min_size: int,
    max_size: int,
    storage: Storage = "shrink",
    exif: str = "keep",
    is_reduced: bool = False,
) -> StoredImage:
    """Decode an image to be sure that it is complete, then keep its bytes or shrink it.

    JPEG and 8-bit PNG, RGB or grey, keep their bytes. Other kinds, and images that EXIF turns,
    become 8-bit RGB PNG. An image that is larger than training needs is shrunk with an antialiased
    filter. JPEG and WebP then become JPEG, and other kinds PNG.

    Args:
        data: the file's bytes.
        size: height and width in the annotations; 0 if they give none.
        min_size: shorter side that training needs, in pixels.
        max_size: longer side that training needs, in pixels.
        storage: "shrink" shrinks larger images; "keep" shrinks nothing.
        exif: "turn" or "keep": what becomes of an image that EXIF turns, if its size does not tell.
        is_reduced: whether a large JPEG is decoded at a part of its size, as in `open_reduced`.

    Raises:
        ColabUtilsError: if the data is not a complete image, or its size is not the size in the
            annotations.
    """
    limits = {} if storage == "keep" else {"min_size": min_size, "max_size": max_size}
    image, kind, original, turn, is_turned = open_upright(
        data, size, exif, **(limits if is_reduced else {})
    )
    stored = plan_size(*original, **limits)
    is_unclear = turn == "unclear"
    # When a PNG with 16 bits a channel is read, Pillow makes 8 bits of them, but torchvision does
    # not. So such a PNG is stored with 8 bits.
    is_deep = kind == "PNG" and data[_PNG_DEPTH] == 16
    is_kept = kind in _KEPT_KINDS and image.mode in _KEPT_MODES and not is_deep
    if is_kept and not is_turned and stored == original:
        return StoredImage("png" if kind == "PNG" else "jpg", data, stored, original, is_unclear)
    rgb = to_rgb(image)
    extension = "png"
    if stored != original:
        rgb = shrink(rgb, stored)
        if kind in ("JPEG", "MPO", "WEBP"):
            extension = "jpg"
    return StoredImage(extension, _encode(rgb, extension), stored, original, is_unclear)


def _encode(image: Image.Image, extension: str) -> bytes:
    file = io.BytesIO()
    # Else Pillow would write the metadata of the original file, too.
    image.info = {}
    if extension == "jpg":
        image.save(file, "JPEG", quality=_JPEG_QUALITY)
    else:
        image.save(file, "PNG", compress_level=1)
    return file.getvalue()
