"""JPEGs by torchcodec, by torchvision and without either."""

import io
import os
import struct
import sys
import threading
import warnings
from functools import cache, partial
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import pytest
import torch
import torchvision  # noqa: F401
from PIL import Image, ImageFile

from colab_utils.data import decoding
from colab_utils.data.decoding import (
    decode_pixels,
    guard_pillow,
    load_jpeg_decoder,
)
from colab_utils.data.orientation import decode_upright
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.shards.records import store_image
from tests.pictures import make_exif, make_png, save


def decode_as_torchcodec(source, *, mode="RGB"):
    """Decode as torchcodec 0.17 does, which obeys EXIF; by torchvision's operator."""
    assert (source.dtype, source.dim(), mode) == (torch.uint8, 1, "RGB")
    return torch.ops.image.decode_jpeg(source, 3, True)


@pytest.fixture
def fresh_decoder():
    """The decoder is chosen anew, in the test and after it."""
    load_jpeg_decoder.cache_clear()
    yield
    load_jpeg_decoder.cache_clear()


@pytest.fixture
def torchcodec_decoder(fresh_decoder, monkeypatch):
    """torchcodec decodes: the real one, or a stand-in where it is not installed."""
    if find_spec("torchcodec") is None:
        package = ModuleType("torchcodec")
        package.decoders = ModuleType("torchcodec.decoders")
        package.decoders.decode_jpeg = decode_as_torchcodec
        monkeypatch.setitem(sys.modules, "torchcodec", package)
        monkeypatch.setitem(sys.modules, "torchcodec.decoders", package.decoders)
    # Without any that works, a warning would be an error.
    monkeypatch.setattr(decoding, "_load_torchvision", None)
    return load_jpeg_decoder()


def make_jpeg(orientation=1, mode="RGB", **options):
    noise = Image.effect_noise((45, 31), 90).convert(mode)
    return save(noise, "JPEG", exif=make_exif(orientation), **options)


PHOTOS = {
    "baseline": make_jpeg(),
    "progressive": make_jpeg(progressive=True),
    "all colours": make_jpeg(subsampling=0),
    "grey": make_jpeg(mode="L"),
    "CMYK": make_jpeg(mode="CMYK"),
    # Bytes of its tables look like markers.
    "lowest quality": make_jpeg(quality=1),
    **{f"orientation {number}": make_jpeg(number) for number in range(2, 9)},
}
# A second segment of EXIF, before and behind the first one.
TURNED = make_jpeg(6)
SEGMENT = TURNED[TURNED.index(b"\xff\xe1") : TURNED.index(b"\xff\xdb")]
PHOTOS["two of EXIF"] = TURNED[:2] + SEGMENT + TURNED[2:]
PHOTOS["EXIF behind the size"] = make_jpeg().replace(b"\xff\xda", SEGMENT + b"\xff\xda", 1)


@pytest.mark.parametrize("name", PHOTOS)
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_torchcodec_gives_the_pixels_as_they_lie_in_the_file(torchcodec_decoder, name, kind):
    data = kind(PHOTOS[name])
    expected = decode_by_pillow(data)
    assert np.array_equal(torchcodec_decoder(data), expected)
    assert np.array_equal(decode_pixels(data), expected)
    assert data == PHOTOS[name]


OLD_PACKAGES = {
    "without decoders of images": "",
    "without its libraries": "raise OSError('libavutil.so.59: cannot open shared object file')",
    "other pixels": "import torch\n"
    "def decode_jpeg(source, *, mode): return torch.zeros(3, 40, 24, dtype=torch.uint8)",
    "turned pixels": "import torch\n"
    "def decode_jpeg(source, *, mode): return torch.ops.image.decode_jpeg(source, 3, True).mT",
}


@pytest.mark.parametrize("name", OLD_PACKAGES)
def test_a_torchcodec_that_does_not_fit_is_left_out_in_silence(
    fresh_decoder, monkeypatch, tmp_path, name, recwarn
):
    (tmp_path / "torchcodec/decoders").mkdir(parents=True)
    (tmp_path / "torchcodec/__init__.py").touch()
    (tmp_path / "torchcodec/decoders/__init__.py").write_text(OLD_PACKAGES[name])
    for module in [name for name in sys.modules if name.split(".")[0] == "torchcodec"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        # Without torchvision's operator, a warning would be an error.
        load_jpeg_decoder()
        expected = decode_by_pillow(PHOTOS["baseline"])
        assert np.array_equal(decode_pixels(PHOTOS["baseline"]), expected)
        assert not recwarn.list
    finally:
        for module in [name for name in sys.modules if name.split(".")[0] == "torchcodec"]:
            del sys.modules[module]


def test_without_any_operator_that_is_told_once_and_pillow_decodes(fresh_decoder, monkeypatch):
    def fail():
        raise AttributeError("decode_jpeg")

    monkeypatch.setattr(decoding, "_load_torchcodec", fail)
    monkeypatch.setattr(decoding, "_load_torchvision", fail)
    expected = decode_by_pillow(PHOTOS["baseline"])
    with pytest.warns(ColabUtilsWarning, match="Pillow decodes instead"):
        assert np.array_equal(decode_pixels(PHOTOS["baseline"]), expected)
    # A second warning would be an error.
    assert np.array_equal(decode_pixels(PHOTOS["baseline"]), expected)


# What any other package of the process may have set: (LOAD_TRUNCATED_IMAGES, MAX_IMAGE_PIXELS).
SWITCHES = [(True, None), (False, 1)]


@pytest.fixture(params=SWITCHES, ids=str)
def switches(request, monkeypatch):
    """Pillow's switches as another package sets them; they must be the same after the test."""
    skips_damage, most_pixels = request.param
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", skips_damage)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most_pixels)
    yield request.param
    assert request.param == (ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS)


def decode_by_pillow(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@cache
def encode(kind, **options):
    """A photo with noise, so that no half of its file holds all of it."""
    noise = np.random.default_rng(0).integers(0, 256, (1100, 96), np.uint8)
    return save(Image.fromarray(noise).convert("RGB"), kind, **options)


KINDS = [
    ("JPEG", {}),
    ("JPEG", {"progressive": True}),
    ("PNG", {}),
    ("TIFF", {}),
    ("TIFF", {"compression": "tiff_lzw"}),
    ("WEBP", {}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
def test_images_cut_short_are_refused_whatever_pillow_was_told(switches, kind, options):
    data = encode(kind, **options)
    assert decode_pixels(data).shape == decode_upright(data, (1100, 96))[0].shape == (1100, 96, 3)
    for share in (0.5, 0.98):
        for decode in (decode_pixels, partial(decode_upright, size=(1100, 96))):
            with pytest.raises(ColabUtilsError, match=r"not (a complete|an) image"):
                decode(data[: int(len(data) * share)])


@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_without_its_last_bytes_is_refused_by_the_operator_and_by_pillow(
    switches, progressive
):
    data = encode("JPEG", progressive=progressive)
    for missing in range(1, 40):
        with pytest.raises(RuntimeError):
            load_jpeg_decoder()(data[:-missing])
        with pytest.raises(ColabUtilsError, match="not a complete image"):
            decode_pixels(data[:-missing])


@pytest.mark.parametrize("size", [(12_000, 11_000), (16_000, 16_000)])
def test_too_many_pixels_are_told_in_our_words(switches, size):
    """Between one and two of Pillow's limits it warns, and above two of them it speaks of an
    attack.
    """
    with pytest.raises(
        ColabUtilsError, match=r"more than 112,000,000 pixels: cut it .* into tiles"
    ):
        decode_pixels(make_png(size, 1, 0, [b"\0"]))


def test_a_process_forked_while_another_thread_reads_has_the_users_values(switches):
    inside = threading.Event()
    leave = threading.Event()

    def read():
        with guard_pillow():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=read)
    thread.start()
    assert inside.wait(60)
    with warnings.catch_warnings():
        # Python warns of forking beside threads, which is what this test is about.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        with guard_pillow():
            ours = ImageFile.LOAD_TRUNCATED_IMAGES, int(Image.MAX_IMAGE_PIXELS)
        is_right = ours == (False, 224_000_000)
        is_right &= switches == (ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS)
        os._exit(0 if is_right else 1)
    leave.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"II*\0", r"a TIFF that is not .* -scale 0 MAX IN OUT"),
        (b"MM\0*", r"a TIFF that is not .* -scale 0 MAX IN OUT"),
        (b"II+\0", r"a TIFF that is not .* -scale 0 MAX IN OUT"),
        (bytes(128) + b"DICM", "can be read: DICOM: save it as an 8-bit PNG"),
        (bytes(400), "can be read: nothing but zeros"),
    ],
)
def test_what_pillow_cannot_decode_is_named_with_its_cure(head, words):
    with pytest.raises(ColabUtilsError, match=words):
        decode_pixels(head + bytes(100))


def save_deep(array, kind):
    if array.ndim == 3:
        return make_png((24, 16), 16, 2, array.astype(">u2"))
    return save(Image.fromarray(array), kind)


def paint_deep(brightest, channels):
    array = np.full((16, 24, channels), brightest // 2, np.uint16)
    array[3, 4] = brightest
    return array if channels > 1 else array[..., 0]


@pytest.mark.parametrize(
    ("channels", "kind"),
    [
        (1, "PNG"),
        (1, "TIFF"),
        (3, "PNG"),
    ],
)
def test_an_image_of_16_bits_keeps_the_upper_8_unless_they_are_dark(channels, kind):
    """It would become almost black, without a word."""
    recipe = {"storage": "shrink", "min_size": 16, "max_size": 24}
    store = partial(store_image, size=(16, 24), recipe=recipe)
    for bits in (8, 14):
        data = save_deep(paint_deep((1 << bits) - 1, channels), kind)
        peak = (1 << bits) - 1 >> 8
        match = f"brightest pixel becomes {peak} of 255, almost black: run gdal_translate -ot Byte"
        for read in (decode_pixels, partial(decode_upright, size=(16, 24)), store):
            with pytest.raises(ColabUtilsError, match=f"{match} -scale"):
                read(data)
    array = paint_deep(65_535, channels)
    data = save_deep(array, kind)
    expected = np.broadcast_to((array >> 8).reshape(16, 24, channels), (16, 24, 3))
    assert np.array_equal(decode_pixels(data), expected)
    assert np.array_equal(decode_pixels(store(data).data), expected)


@pytest.mark.parametrize("marker", [0xC4, 0xDB])
@pytest.mark.parametrize("change", ["renamed", "longer", "shorter"])
def test_a_jpeg_whose_tables_are_damaged_is_refused_as_by_pillow(marker, change):
    noise = Image.effect_noise((48, 32), 80).convert("RGB")
    data = bytearray(save(noise, "JPEG", quality=40))
    place = data.index(bytes([0xFF, marker]))
    if change == "renamed":
        data[place + 1] = 0x01
    else:
        data[place + 3] += 9 if change == "longer" else -9
    with pytest.raises(ColabUtilsError, match="not a"):
        decode_pixels(data)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("white", [0, 1])
def test_a_tiff_in_which_zero_is_white_is_no_negative(bits, white):
    values = np.arange(0, 61_440, 10, np.uint16).reshape(64, 96)
    stored = values if bits == 16 else (values >> 8).astype(np.uint8)
    data = bytearray(save(Image.fromarray(stored), "TIFF"))
    # The tag 262 says whether 0 is white (0) or black (1).
    place = data.index(struct.pack("<HHI", 262, 3, 1))
    data[place + 8] = white
    dark = (values >> 8).astype(np.uint8)
    expected = dark if white else 255 - dark
    assert np.array_equal(decode_pixels(data)[..., 0], expected)
