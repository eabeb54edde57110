"""One image as a shard stores it, its record, and the two members of the tar that hold both.

The bytes of an image are kept where possible, and a large image is shrunk.
"""

import io
import json
import tarfile
from collections import Counter
from collections.abc import Callable, Sequence
from errno import EDQUOT, ENOSPC
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from colab_utils.data.coco import CocoDataset
from colab_utils.data.decoding import guard_pillow, shrink, to_rgb
from colab_utils.data.masks import encode_segmentation, resize_rles
from colab_utils.data.object_checks import count_faults
from colab_utils.data.orientation import open_upright
from colab_utils.data.segmentations import Entry, Rle, is_nothing
from colab_utils.data.sizes import plan_size
from colab_utils.errors import ColabUtilsError, UnavailableError
from colab_utils.files import Store
from colab_utils.places import Place
from colab_utils.shards.index import SkippedImage

if TYPE_CHECKING:
    from colab_utils.file_cache import FileCache

MISSING = "the file is missing"
"""The reason for leaving out an image whose file was not found."""

# How Pillow writes an image, by the extension of its file.
_ENCODINGS: dict[str, dict[str, Any]] = {
    "jpg": {"format": "JPEG", "quality": 95},
    "png": {"format": "PNG", "compress_level": 1},
}

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


class Sample(NamedTuple):
    """One image as it goes into a shard."""

    record: dict[str, Any]
    """The result of `make_record`."""
    files: dict[str, bytes]
    """Files of the tar by name: the image, then its record."""
    faults: Counter[str]
    """For each kind of fault (see `count_faults`), the number of objects that have it. Training
    may use these objects wrongly, or not at all. An image whose rotation is unclear counts, too.
    """


def read_limits(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the limits of `plan_size` that a recipe has; none if its images keep their size."""
    return {
        name: recipe[name] for name in ("min_size", "max_size") if recipe["storage"] == "shrink"
    }


@guard_pillow()
def store_image(
    data: bytes,
    size: tuple[int, int],
    recipe: dict[str, Any],
) -> StoredImage:
    """Decode an image to be sure that it is complete, then keep its bytes or shrink it.

    JPEG and 8-bit PNG, RGB or grey, keep their bytes. Other kinds, and images that EXIF turns,
    become 8-bit RGB PNG. An image that is larger than training needs is shrunk with an antialiased
    filter. JPEG and WebP then become JPEG, and other kinds PNG.

    Args:
        data: the file's bytes.
        size: height and width in the annotations; 0 if they give none.
        recipe: how to store the image, see `ShardIndex`. The recipe of a trial has no ``exif`` yet,
            and those of older versions have no ``reduced_decode``.

    Raises:
        ColabUtilsError: if the data is not a complete image, or its size is not the size in the
            annotations.
    """
    limits = read_limits(recipe)
    image, kind, original, turn, is_turned = open_upright(
        data,
        size,
        recipe.get("exif", "keep"),
        **(limits if recipe.get("reduced_decode") else {}),
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
    # Else Pillow would write the metadata of the original file, too.
    rgb.info = {}
    file = io.BytesIO()
    rgb.save(file, **_ENCODINGS[extension])
    return StoredImage(extension, file.getvalue(), stored, original, is_unclear)


def make_record(
    image: dict[str, Any],
    annotations: list[dict[str, Any]],
    stored: StoredImage,
    faults: Counter[str],
) -> dict[str, Any]:
    """Make the record of an image. In the shard, the record is the file ``KEY.json``.

    The record has the form of COCO. Its boxes, areas and masks are those of the stored image,
    which may be smaller than the original.

    Masks are compressed RLE, whose counts are bytes. They are rasterised at the original size and
    then resized, as torchvision's transform does. Empty annotations are left out. The results of
    `count_faults` and the number of empty annotations are added to ``faults``.

    Raises:
        ColabUtilsError: if an annotation has no usable mask or box.
    """
    height, width = stored.size
    original_height, original_width = stored.original
    drawn = [annotation for annotation in annotations if not is_nothing(annotation)]
    rles = encode_masks(drawn, stored.original)
    faults.update(count_faults(drawn, rles))
    faults.update(["empty annotation"] * (len(annotations) - len(drawn)))
    if stored.size != stored.original:
        rles = resize_rles(rles, height, width)
    scaled = [
        {**scale_annotation(annotation, stored.original, stored.size), "segmentation": rle}
        for annotation, rle in zip(drawn, rles, strict=True)
    ]
    return {
        "image_id": image["id"],
        "file_name": image["file_name"],
        "width": width,
        "height": height,
        "original_width": original_width,
        "original_height": original_height,
        "annotations": scaled,
    }


def encode_masks(annotations: Sequence[Entry], size: Sequence[int]) -> list[Rle]:
    """Return the masks of annotations in RLE, for an image of this height and width.

    Raises:
        ColabUtilsError: if an annotation has no usable mask. The error names the annotation.
    """
    rles = []
    for annotation in annotations:
        try:
            rles.append(encode_segmentation(annotation["segmentation"], *size))
        except ColabUtilsError as error:
            raise ColabUtilsError(f"annotation {annotation['id']}: {error}") from None
    return rles


def scale_annotation(
    annotation: dict[str, Any], original: Sequence[int], size: Sequence[int]
) -> dict[str, Any]:
    """Return an annotation with the box and the area that it has at another size of its image."""
    scale_y = size[0] / original[0]
    scale_x = size[1] / original[1]
    left, top, width, height = annotation["bbox"]
    box = [left * scale_x, top * scale_y, width * scale_x, height * scale_y]
    return {**annotation, "bbox": box, "area": annotation["area"] * scale_x * scale_y}


def dump_record(record: dict[str, Any]) -> bytes:
    """Return the bytes of ``KEY.json``, where the counts of RLE are text."""
    return json.dumps(record, separators=(",", ":"), default=bytes.decode).encode()


def name_image(images: Place, dataset: CocoDataset, i: int) -> str:
    """Return the name of one image's file in a `FileCache`."""
    return f"{images.absolute()}/{dataset.names[i]}"


def read_image(
    store: Store, dataset: CocoDataset, i: int, cache: "FileCache | None" = None
) -> bytes:
    """Read the bytes of one image's file. With ``cache``, they are kept there.

    Raises:
        ColabUtilsError: if the file is missing, cannot be read, or lies outside the folder.
        DriveLostError: if Drive went away.
    """
    if cache is not None:
        read = partial(read_image, store, dataset, i)
        return cache.read(name_image(store.place, dataset, i), read)
    try:
        return store.read(dataset.find_image(store.place, i)[0])
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise ColabUtilsError(MISSING) from None
    except OSError as error:
        reason = f"the file cannot be read: {error.strerror}"
        if error.errno in (ENOSPC, EDQUOT):
            # Drive or its cache is full. The file itself may be sound.
            raise UnavailableError(
                f"{store.place}: {reason}. Free some space there, and run the same again."
            ) from None
        raise ColabUtilsError(reason) from None


def try_sample(
    read: Callable[[], bytes], dataset: CocoDataset, i: int, recipe: dict[str, Any]
) -> Sample | SkippedImage:
    """Make the sample of one image; return a `SkippedImage` if the image or an annotation is bad.

    Args:
        read: returns the bytes of the image's file.
        dataset: the annotations.
        i: the image's index in ``dataset``.
        recipe: how to store the image.

    Raises:
        DriveLostError: if Drive went away. The image may be sound.
    """
    image = dataset.image(i)
    faults = Counter[str]()
    try:
        stored = store_image(read(), (image["height"], image["width"]), recipe)
        record = make_record(image, dataset.annotations(i), stored, faults)
    except UnavailableError:
        raise
    except ColabUtilsError as error:
        return SkippedImage(image["file_name"], str(error))
    if stored.is_unclear:
        faults[f"EXIF rotation, {'turned' if recipe.get('exif') == 'turn' else 'unclear'}"] += 1
    key = f"{image['id']:012d}"
    files = {f"{key}.{stored.extension}": stored.data, f"{key}.json": dump_record(record)}
    return Sample(record, files, faults)


def frame_file(name: str, size: int) -> tuple[bytes, bytes]:
    """Return what stands before and after a file in a tar. It depends on name and size alone.

    Example:
        >>> [len(part) for part in frame_file("000000000001.json", 2)]
        [512, 510]
    """
    header = tarfile.TarInfo(name)
    header.size = size
    return header.tobuf(tarfile.USTAR_FORMAT), bytes(-size % tarfile.BLOCKSIZE)
