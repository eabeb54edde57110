"""How EXIF turns a photo, and whether its annotations were drawn on the turned photo.

Phones store photos as the sensor saw them, and EXIF says how to turn them. Some tools show the
turned photo to the person who draws, others show it as stored. The size in the annotations tells
which, if the turn changes the size.
"""

import io
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from colab_utils.data.coco import CocoDataset
from colab_utils.data.decoding import (
    Encoded,
    Pixels,
    guard_pillow,
    may_have_exif,
    open_lazily,
    open_reduced,
    shrink,
    to_rgb,
)
from colab_utils.data.sizes import Size, plan_size
from colab_utils.errors import MACHINE_FAULTS, ColabUtilsError, ColabUtilsWarning, UnavailableError
from colab_utils.files import open_store
from colab_utils.places import Place
from colab_utils.processes import ThreadPool

if TYPE_CHECKING:
    from PIL import Image

Exif = Literal["auto", "turn", "keep"]
"""What becomes of a photo that EXIF turns while its size does not tell how it was annotated: "turn"
turns it, "keep" uses it as stored, and "auto" does as the annotations of the other photos show.
"""
# How to turn images of the orientations 2 to 8, by the names that Pillow has for these turns.
_TURNS = (
    "FLIP_LEFT_RIGHT",
    "ROTATE_180",
    "FLIP_TOP_BOTTOM",
    "TRANSPOSE",
    "ROTATE_270",
    "TRANSVERSE",
    "ROTATE_90",
)
# How photos are used whose size does not tell, by the result of `pick_turn`.
_USED = {
    "turn": "turned, as the other photos were annotated",
    "keep": "used as stored, as the other photos were annotated",
    "": (
        "used as stored, because the other photos do not tell either, or disagree: see two of them "
        "both ways with check --report, then choose exif (--exif)"
    ),
}
# Photos whose sizes are compared, to see how those of a dataset were annotated. All of their files
# are read at the same time.
_SAMPLED_PHOTOS = 64
# The header of a photo, with its EXIF, lies in the first bytes of its file.
_HEADER_BYTES = 1 << 16


def read_orientation(image: "Image.Image") -> int:
    """Return the EXIF orientation of an image, 1 to 8, without decoding pixels.

    The orientation is 1 if the image has no EXIF, or if its EXIF is damaged. It is also 1 for a
    TIFF, which Pillow itself turns, and whose size it gives as turned.

    Example:
        >>> from PIL import Image
        >>> read_orientation(Image.new("RGB", (8, 8)))
        1
    """
    from PIL import ExifTags, Image

    try:
        # The method of Pillow's PNG class decodes the pixels first. This one does not.
        orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation)
    except MACHINE_FAULTS:
        raise
    # Damaged EXIF raises all kinds of errors.
    except Exception:
        return 1
    if isinstance(orientation, int) and 1 <= orientation <= 8 and image.format != "TIFF":
        return orientation
    return 1


def compare_turn(size: Size, stored: Size, orientation: int) -> str:
    """Compare the size in the annotations with that of a photo as stored, and as turned by EXIF.

    Args:
        size: height and width in the annotations; 0 if they give none.
        stored: height and width of the photo as stored.
        orientation: EXIF orientation, 1 to 8.

    Returns:
        "turn" if the annotations were drawn on the turned photo; "keep" if they were drawn on the
        photo as stored; "unclear" if the size does not tell; "misfit" if neither size fits; and ""
        if EXIF does not turn the photo.

    Example:
        >>> compare_turn((640, 480), (480, 640), 6), compare_turn((480, 640), (480, 640), 3)
        ('turn', 'unclear')
    """
    turned = stored[::-1] if orientation > 4 else stored
    if all(size) and size not in (stored, turned):
        return "misfit"
    if orientation == 1:
        return ""
    if stored == turned or not all(size):
        return "unclear"
    return "turn" if size == turned else "keep"


@guard_pillow()
def find_turn(data: Encoded, size: Size) -> str:
    """Return what `compare_turn` says of an image file, or of its first bytes."""
    if not may_have_exif(data):
        return ""
    try:
        image = open_lazily(io.BytesIO(data))
    except MACHINE_FAULTS:
        raise
    # Pillow's readers raise all kinds of errors on damaged data. Decoding says what is wrong.
    except Exception:
        return ""
    return compare_turn(size, (image.height, image.width), read_orientation(image))


class Upright(NamedTuple):
    """An image as its annotations were drawn on it."""

    image: "Image.Image"
    kind: str
    """The format of its file."""
    original: Size
    """Height and width in pixels before it was shrunk."""
    turn: str
    """What `compare_turn` says of it."""
    is_turned: bool


@guard_pillow()
def open_upright(data: Encoded, size: Size, exif: str = "keep", **limits: float) -> Upright:
    """Decode an image with Pillow, and turn it as its annotations were drawn on it.

    It is turned by its EXIF orientation if the size in the annotations tells so. If the size does
    not tell, the image is turned if ``exif`` is "turn". With ``limits``, a large JPEG is shrunk, as
    in `open_reduced`.

    Raises:
        ColabUtilsError: if the data is not a complete image, or has another size, turned or not.
    """
    from PIL.Image import Transpose

    image, stored = open_reduced(data, **limits)
    kind = image.format or ""
    orientation = read_orientation(image)
    turn = compare_turn(size, stored, orientation)
    if turn == "misfit":
        raise ColabUtilsError(
            f"the annotations say {size[1]} x {size[0]} pixels, the file has {stored[1]} x "
            f"{stored[0]}"
        )
    is_turned = turn == "turn" or (turn == "unclear" and exif == "turn")
    if is_turned:
        image = image.transpose(Transpose[_TURNS[orientation - 2]])
        stored = stored[::-1] if orientation > 4 else stored
    return Upright(image, kind, stored, turn, is_turned)


def decode_upright(
    data: Encoded, size: Size, exif: str = "keep", *, is_reduced: bool = False, **limits: float
) -> tuple[Pixels, Size]:
    """Decode an image with `open_upright` to uint8 [H, W, 3], and shrink it to its `plan_size`.

    Without ``is_reduced``, it is shrunk after all of its pixels were decoded.

    Returns:
        The pixels, and the height and width before the image was shrunk.
    """
    upright = open_upright(data, size, exif, **(limits if is_reduced else {}))
    pixels = shrink(to_rgb(upright.image), plan_size(*upright.original, **limits))
    return np.asarray(pixels), upright.original


def pick_turn(turns: Iterable[str]) -> str:
    """Return "turn" or "keep", as all photos were annotated whose size tells; "" if none tells, or
    they disagree.

    ``turns`` are results of `compare_turn`.

    Example:
        >>> pick_turn(["turn", "unclear", "turn"]), pick_turn(["turn", "keep"])
        ('turn', '')
    """
    kinds = {"turn", "keep"}.intersection(turns)
    return kinds.pop() if len(kinds) == 1 else ""


def choose_turn(
    images: Place,
    dataset: CocoDataset,
    *,
    is_met: bool = False,
    read: Callable[[int], bytes] | None = None,
) -> str:
    """Return "turn" or "keep" for the photos of a dataset whose size does not tell.

    A few photos are looked at, always the same ones. A warning says what becomes of the photos
    whose size does not tell, if one of these is such a photo, or if one was met (``is_met``).
    ``read`` reads the whole file of a photo; by default, its first bytes are read.

    Raises:
        DriveLostError: if Drive went away.
    """
    store = open_store(images)
    # A photo that Drive does not show now has no vote. Whoever reads it later looks for it again.
    store.trusts_absence = True

    def read_head(row: int) -> bytes:
        path, _ = dataset.find_image(images, row)
        with store.open(path) as file:
            return file.pread(_HEADER_BYTES, 0)

    def look(row: int) -> str:
        try:
            head = (read or read_head)(row)
            return find_turn(head, tuple(dataset.sizes[row].tolist()))
        except UnavailableError:
            raise
        # What is wrong with a file is said where it is read for a shard or a batch.
        except (ColabUtilsError, OSError, ValueError):
            return ""

    count = min(len(dataset), _SAMPLED_PHOTOS)
    rows = np.linspace(0, len(dataset) - 1, count).astype(np.int64)
    with ThreadPool(count) as pool:
        turns = set(pool.map(look, rows.tolist()))
    turn = pick_turn(turns)
    if is_met or "unclear" in turns:
        text = (
            f"EXIF turns or mirrors photos in {images} so that the size in the annotations does "
            f"not tell how they were annotated. They are {_USED[turn]}."
        )
        warnings.warn(text, ColabUtilsWarning, stacklevel=2)
    return turn or "keep"
