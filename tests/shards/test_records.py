from __future__ import annotations

import contextlib
import io
import json
import tracemalloc
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageFilter, ImageOps
from pycocotools import mask as coco_mask
from torchvision.io import ImageReadMode, decode_image
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from colab_utils.data.coco import read_coco
from colab_utils.data.decoding import decode_pixels
from colab_utils.data.masks import encode_segmentation
from colab_utils.data.orientation import decode_upright
from colab_utils.data.sizes import plan_size
from colab_utils.errors import ColabUtilsError
from colab_utils.shards.arrays import convert_boxes
from colab_utils.shards.records import dump_record, make_record, store_image
from tests.coco_files import make_object
from tests.pictures import make_chunk, make_exif, make_png, save

SIZES = {"min_size": 800, "max_size": 1333}
ROWS, COLUMNS = np.mgrid[:48, :64]
PIXELS = np.stack(
    [ROWS * 5, COLUMNS * 4, 250 - ROWS - COLUMNS * 2],
    axis=2,
).astype(np.uint8)


def store(data, size, **recipe):
    return store_image(data, size, {"storage": "shrink", **recipe})


def decode(data):
    """By torchvision, as plain scripts do (0.29 points to TorchCodec)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*TorchCodec", DeprecationWarning)
        return decode_image(
            torch.frombuffer(bytearray(data), dtype=torch.uint8),
            ImageReadMode.RGB,
        )


def assert_equal_to_torchvision(dataset, folder, i, min_size, max_size):
    """Compare size, masks and boxes of the record with torchvision's transform of the target."""
    image = dataset.image(i)
    annotations = dataset.annotations(i)
    size = (image["height"], image["width"])
    data = (folder / image["file_name"]).read_bytes()
    stored = store(data, size, min_size=min_size, max_size=max_size)
    record = make_record(image, annotations, stored, Counter())
    target = make_target(annotations, size)
    transform = GeneralizedRCNNTransform(min_size, max_size, [0.0] * 3, [1.0] * 3)
    expected, target = transform.resize(torch.zeros(3, *size), target)
    if max(expected.shape) >= max(size):
        # It is never larger on disk than it was.
        assert stored.size == size
        return 0
    assert stored.size == tuple(expected.shape[-2:])
    assert stored.size == (record["height"], record["width"])
    assert stored.size == tuple(decode(stored.data).shape[-2:])
    stored_target = make_target(record["annotations"], stored.size)
    assert torch.equal(stored_target["masks"], target["masks"])
    torch.testing.assert_close(stored_target["boxes"], target["boxes"], rtol=0, atol=2e-4)
    return len(annotations)


def make_target(annotations, size):
    boxes, _ = convert_boxes([annotation["bbox"] for annotation in annotations], *size)
    rles = [encode_segmentation(annotation["segmentation"], *size) for annotation in annotations]
    masks = np.array([coco_mask.decode(rle) for rle in rles]).reshape(-1, *size)
    return {"boxes": torch.from_numpy(boxes), "masks": torch.from_numpy(masks)}


@pytest.mark.parametrize(("min_size", "max_size"), [(200, 260), (127, 1000)])
def test_shrunk_coco_images_equal_torchvisions_transform(coco_mini, min_size, max_size):
    dataset = read_coco(coco_mini.annotations)
    objects = [
        assert_equal_to_torchvision(dataset, coco_mini.images, i, min_size, max_size)
        for i in range(0, len(dataset), 3)
    ]
    assert sum(objects) > 100


@pytest.mark.parametrize(("min_size", "max_size"), [(50, 80), (64, 10_000)])
def test_planned_sizes_are_torchvisions(min_size, max_size):
    transform = GeneralizedRCNNTransform(min_size, max_size, [0.0], [1.0])
    for height in range(min_size, 300, 3):
        for width in range(min_size, 300, 7):
            planned = plan_size(height, width, min_size=min_size, max_size=max_size)
            resized, _ = transform.resize(torch.zeros(1).expand(1, height, width))
            # Nothing is ever enlarged.
            assert planned == min(tuple(resized.shape[-2:]), (height, width))


RGB = Image.fromarray(PIXELS)
GREY = RGB.convert("L")
PALETTE = RGB.quantize(17)
TRANSPARENT = RGB.quantize(17)
TRANSPARENT.info["transparency"] = bytes(range(17))
DEEP_RGB = (PIXELS.astype(np.uint16) << 8 | 77).astype(">u2")
DEEP_GREY = DEEP_RGB[..., 0]
KINDS = [
    ("rgb.jpg", save(RGB, "JPEG"), True),
    ("grey.jpg", save(GREY, "JPEG"), True),
    ("cmyk.jpg", save(RGB.convert("CMYK"), "JPEG"), False),
    ("several.mpo", save(RGB, "MPO", save_all=True, append_images=[RGB.rotate(90)]), True),
    ("rgb.png", save(RGB, "PNG"), True),
    ("grey.png", save(GREY, "PNG"), True),
    ("rgba.png", save(RGB.convert("RGBA"), "PNG"), False),
    ("grey and alpha.png", save(GREY.convert("LA"), "PNG"), False),
    ("palette.png", save(PALETTE, "PNG"), False),
    ("transparent palette.png", save(TRANSPARENT, "PNG"), False),
    ("one bit.png", save(GREY.convert("1"), "PNG"), False),
    # Pillow says RGB, and torchvision gives uint16.
    ("16 bits.png", make_png((64, 48), 16, 2, DEEP_RGB), False),
    # The call convert("RGB") of Pillow turns it white.
    ("16 bits grey.png", make_png((64, 48), 16, 0, DEEP_GREY), False),
    ("lossy.webp", save(RGB, "WEBP"), False),
    ("moving.gif", save(PALETTE, "GIF", save_all=True, append_images=[PALETTE.rotate(90)]), False),
    ("plain.tiff", save(RGB, "TIFF"), False),
]


every_kind = pytest.mark.parametrize(
    ("name", "data", "kept"), KINDS, ids=[name for name, _, _ in KINDS]
)


@every_kind
def test_every_kind_of_image_decodes_to_its_pixels(name, data, kept):
    stored = store(data, (48, 64), **SIZES)
    assert (stored.data == data) is kept
    is_jpeg = kept and not name.endswith("png")
    assert stored.extension == ("jpg" if is_jpeg else "png")
    pixels = decode(stored.data).permute(1, 2, 0).numpy()
    assert pixels.dtype == np.uint8
    if name == "16 bits grey.png":
        expected = np.repeat(PIXELS[..., :1], 3, axis=2)
    else:
        image = Image.open(io.BytesIO(data))
        expected = np.array(image.convert("RGBA").convert("RGB"))
    allowed = 2 if is_jpeg and "grey" not in name else 0
    assert np.abs(pixels.astype(int) - expected).max() <= allowed
    if name == "16 bits.png":
        assert np.array_equal(expected, PIXELS)
    # What comes from files is what comes from shards.
    assert np.array_equal(decode_pixels(data), decode_pixels(stored.data))


@every_kind
@pytest.mark.parametrize("reduced_decode", [False, True])
def test_every_kind_of_image_is_shrunk(name, data, kept, reduced_decode):
    stored = store(data, (48, 64), min_size=24, max_size=100, reduced_decode=reduced_decode)
    assert stored.size == (24, 32)
    assert stored.original == (48, 64)
    is_lossy = name.endswith(("jpg", "mpo", "webp"))
    assert stored.extension == ("jpg" if is_lossy else "png")
    whole = Image.fromarray(decode_pixels(data))
    expected = np.array(whole.resize((32, 24), Image.Resampling.BILINEAR))
    pixels = decode(stored.data).permute(1, 2, 0).numpy().astype(int)
    assert np.abs(pixels - expected).mean() < 3


def make_photo(height, width):
    """A photo with soft spots, edges and grain."""
    rng = np.random.default_rng(0)
    spots = Image.fromarray(rng.integers(40, 200, (6, 8, 3), dtype=np.uint8))
    pixels = np.array(spots.resize((width, height), Image.Resampling.BICUBIC))
    pixels[height // 3 : height // 2, width // 4 : width // 2] = (250, 40, 90)
    grain = rng.normal(0, 8, pixels.shape)
    photo = Image.fromarray((pixels + grain).clip(0, 255).astype(np.uint8))
    # A lens shows less than each single pixel.
    return photo.filter(ImageFilter.GaussianBlur(1.5))


PHOTO = make_photo(601, 803)
PHOTOS = {
    "rgb": save(PHOTO, "JPEG", quality=92),
    "progressive": save(PHOTO, "JPEG", quality=92, progressive=True),
    "grey": save(PHOTO.convert("L"), "JPEG", quality=92),
    "cmyk": save(PHOTO.convert("CMYK"), "JPEG", quality=92),
    "several": save(PHOTO, "MPO", quality=92, save_all=True, append_images=[PHOTO.rotate(90)]),
}


def compare_scales(data, size, **limits):
    """The mean difference of a photo from one of which all pixels were decoded."""
    reduced, original = decode_upright(data, size, is_reduced=True, **limits)
    whole, expected = decode_upright(data, size, **limits)
    assert original == expected
    return np.abs(reduced.astype(int) - whole).mean()


@pytest.mark.parametrize("kind", PHOTOS)
@pytest.mark.parametrize(("min_size", "scale"), [(280, 2), (140, 4), (60, 8)])
def test_a_photo_is_decoded_at_the_scale_that_training_needs(kind, min_size, scale, monkeypatch):
    drafts = []
    real = Image.Image.resize

    def resize(image, *args, **options):
        drafts.append(image.size)
        return real(image, *args, **options)

    monkeypatch.setattr(Image.Image, "resize", resize)
    limits = {"min_size": min_size, "max_size": 1333}
    stored = store(PHOTOS[kind], (601, 803), **limits, reduced_decode=True)
    assert drafts[0] == (-(-803 // scale), -(-601 // scale))
    whole = store(PHOTOS[kind], (601, 803), **limits)
    assert stored._replace(data=b"") == whole._replace(data=b"")
    assert stored.size == plan_size(601, 803, **limits)
    assert 0 < compare_scales(PHOTOS[kind], (601, 803), **limits) < 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_photo_is_decoded_at_the_scale_that_training_needs(orientation):
    data = save(PHOTO, "JPEG", quality=92, exif=make_exif(orientation))
    size = (803, 601) if orientation > 4 else (601, 803)
    options = {"exif": "turn", "min_size": 140, "max_size": 1333}
    stored = store(data, size, **options, reduced_decode=True)
    whole = store(data, size, **options)
    assert stored.data != whole.data
    assert stored._replace(data=b"") == whole._replace(data=b"")
    assert stored.original == size
    assert 0 < compare_scales(data, size, **options) < 1
    with pytest.raises(ColabUtilsError, match="the file has 803 x 601"):
        store(data, (601, 804), **options, reduced_decode=True)


@pytest.mark.parametrize("min_size", [301, 601, 800])
def test_a_photo_that_is_kept_or_below_twice_the_size_has_the_same_bytes_as_ever(min_size):
    for data in (*PHOTOS.values(), save(PHOTO, "WEBP"), save(PHOTO, "PNG")):
        whole = store(data, (601, 803), min_size=min_size, max_size=1333)
        reduced = store(data, (601, 803), min_size=min_size, max_size=1333, reduced_decode=True)
        assert reduced == whole
    limits = {"min_size": 140, "max_size": min_size, "storage": "keep", "reduced_decode": True}
    assert store(PHOTOS["rgb"], (601, 803), **limits).data == PHOTOS["rgb"]


def turn(orientation):
    return save(RGB, "JPEG", exif=make_exif(orientation))


@pytest.mark.parametrize(
    ("orientation", "size", "turned"),
    [
        (1, (48, 64), False),
        # The annotations follow the file as it lies and torchvision reads it, so it is kept.
        (6, (48, 64), False),
        # The annotations follow the photo as people see it.
        (6, (64, 48), True),
        (5, (64, 48), True),
        # The photo is upside down, and its size says nothing about that.
        (3, (48, 64), False),
        # The annotations give no size, so the file counts as torchvision reads it.
        (6, (0, 0), False),
    ],
)
def test_photos_are_turned_where_the_annotations_say_so(orientation, size, turned):
    data = turn(orientation)
    stored = store(data, size, **SIZES)
    assert (stored.data == data) is not turned
    assert stored.size == ((64, 48) if turned else (48, 64))
    assert np.array_equal(decode_upright(data, size)[0], decode_pixels(stored.data))
    if turned:
        upright = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
        again = Image.open(io.BytesIO(stored.data))
        assert again.getexif().get(0x0112, 1) == 1
        assert np.array_equal(np.array(again), upright)


@pytest.mark.parametrize(
    ("data", "size", "message"),
    [
        (b"\0\0\0\x18ftypheic\0\0\0\0", (48, 64), "can be read: HEIC: save it as JPEG"),
        (b"%PDF-1.4 ...", (48, 64), "can be read: a PDF"),
        (
            save(Image.fromarray(DEEP_GREY.astype(np.int32)), "TIFF"),
            (48, 64),
            "pixels are integers beyond 8 bits: scale them",
        ),
        (
            save(Image.fromarray(DEEP_GREY / np.float32(99)), "TIFF"),
            (48, 64),
            "floating point",
        ),
        (turn(3), (64, 48), "the annotations say 48 x 64 pixels, the file has 64 x 48"),
    ],
)
def test_what_is_not_the_image_is_refused(data, size, message):
    with pytest.raises(ColabUtilsError, match=message):
        store(data, size, **SIZES)


@pytest.mark.parametrize(
    "chunk",
    [
        make_chunk(b"eXIf", b"no TIFF at all"),
        # The orientation stands there as text.
        make_chunk(b"eXIf", b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\0\0\0\x04six\0\0\0\0\0"),
    ],
)
def test_damaged_exif_refuses_no_image(chunk):
    data = make_png((64, 48), 8, 2, PIXELS, chunk)
    assert np.array_equal(decode_pixels(data), PIXELS)
    assert store(data, (48, 64), **SIZES).data == data
    with pytest.raises(ColabUtilsError, match="the annotations say 48 x 64 pixels"):
        store(data, (64, 48), **SIZES)


def test_photos_of_phones_pass_and_bombs_are_refused_before_they_are_decoded():
    # The image has 108 megapixels, for which Pillow would warn.
    phone = save(Image.new("1", (12_000, 9_000)), "PNG")
    assert store(phone, (9_000, 12_000), **SIZES).size[0] == 800
    bomb = save(Image.new("1", (16_000, 16_000)), "PNG")
    jpeg = bytearray(save(GREY, "JPEG"))
    place = jpeg.index(b"\xff\xc0")
    jpeg[place + 5 : place + 9] = b"\xff\x00\xff\x00"
    refusal = "more than 112,000,000 pixels|exceeds limit of 224000000 pixels|not an image"
    for data in (bomb, bytes(jpeg), bomb.replace(b"IHDR\0\0\x3e\x80", b"IHDR\0\x7f\xff\xff", 1)):
        for read in (decode_pixels, lambda data: store(data, (0, 0), **SIZES)):
            tracemalloc.start()
            with pytest.raises(ColabUtilsError, match=refusal):
                read(data)
            assert tracemalloc.get_traced_memory()[1] < 20e6
            tracemalloc.stop()


@pytest.mark.parametrize("kind", [kind for kind in PHOTOS if kind != "several"])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.99])
def test_photos_cut_short_are_refused_at_any_scale(kind, share, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    data = PHOTOS[kind][: int(len(PHOTOS[kind]) * share)]
    with pytest.raises(ColabUtilsError, match=r"not an image|not a complete image"):
        store(data, (601, 803), min_size=60, max_size=100, reduced_decode=True)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_images_are_stored_or_refused_never_anything_else(data):
    _, content, _ = data.draw(st.sampled_from(KINDS))
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 6))):
        damaged[data.draw(st.integers(0, min(len(damaged) - 1, 900)))] = data.draw(
            st.integers(0, 255)
        )
    with contextlib.suppress(ColabUtilsError):
        stored = store(bytes(damaged), (48, 64), min_size=24, max_size=40, reduced_decode=True)
        assert max(stored.size) <= 40


def test_area_and_crowds_are_scaled_and_extras_dropped():
    rle = {"size": [48, 64], "counts": [0, 24 * 64, 24 * 64]}
    annotation = make_object(5, 1, [0, 0, 32, 48], iscrowd=1, segmentation=rle)
    stored = store(save(RGB, "PNG"), (48, 64), min_size=24, max_size=100)
    record = make_record({"id": 1, "file_name": "a/b.png"}, [annotation], stored, Counter())
    (kept,) = record["annotations"]
    assert (kept["bbox"], kept["area"], kept["iscrowd"]) == ([0, 0, 16, 24], 384.0, 1)
    assert kept["segmentation"]["size"] == [24, 32]
    # RLE stays bytes until the JSON is written.
    text = kept["segmentation"]["counts"].decode()
    assert json.loads(dump_record(record))["annotations"][0]["segmentation"]["counts"] == text
    assert (record["original_height"], record["original_width"]) == (48, 64)
