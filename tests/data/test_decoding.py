"""Headers of ``.npy`` files, read without Python's parser; and JPEGs without torchvision's operator."""

import gc
import io
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from colab_utils.data.decoding import (
    decode_pixels,
    load_jpeg_decoder,
    read_npy_header,
    to_rgb,
)
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning


def dump(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("shape", [(), (0,), (7,), (0, 4), (2, 3, 3)])
@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.float32])
def test_headers_are_those_of_numpy(shape, dtype):
    data = dump(np.ones(shape, dtype))
    start, *found = read_npy_header(data)
    assert found == [shape, np.dtype(dtype)]
    assert len(data) - start == np.ones(shape, dtype).nbytes


@pytest.mark.parametrize(
    "data",
    [b"", b"\x93NUMPY", dump(np.ones(3))[:60], dump(np.asfortranarray(np.ones((2, 3)))),
     dump(np.ones(3)).replace(b"<f8", b"<q9"), dump(np.ones(3)).replace(b"NUMPY\x01", b"NUMPY\x02")],
    ids=["empty", "magic only", "cut short", "by columns", "unknown type", "another version"],
)  # fmt: skip
def test_other_headers_are_refused(data):
    with pytest.raises(ValueError, match=r"header|type"):
        read_npy_header(data)


@pytest.mark.parametrize(
    ("array", "found"),
    [
        (np.ones((2, 3, 3)), r"float64 \[2, 3, 3\]"),
        (np.ones((2, 3), np.uint8), r"uint8 \[2, 3\]"),
        (np.ones((2, 3, 4), np.uint8), r"uint8 \[2, 3, 4\]"),
    ],
)
def test_other_arrays_than_pixels_are_refused(array, found):
    with pytest.raises(ColabUtilsError, match=rf"expected raw pixels as uint8 \[H, W, 3\], found: {found}"):
        decode_pixels(dump(array))
    with pytest.raises(ColabUtilsError, match="raw pixels"):
        decode_pixels(dump(array)[:70])  # cut short in its header


def test_a_palette_with_more_transparencies_than_colours_is_told():
    image = Image.new("P", (4, 4), 9)
    image.info["transparency"] = bytes(300)  # as the chunk of a damaged PNG gives it
    with pytest.raises(ColabUtilsError, match="not a complete image: palette index out of range"):
        to_rgb(image)


def test_images_that_would_fill_the_memory_are_refused():
    file = io.BytesIO()
    Image.new("1", (12_000, 11_000)).save(file, "PNG")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's own
        with pytest.raises(
            ColabUtilsError, match="12000 x 11000 is more than 112,000,000 pixels: save the image smaller"
        ):
            decode_pixels(file.getvalue())


def test_threads_do_not_disturb_each_other():
    data, before = dump(np.ones((2, 3), np.float32)), gc.get_threshold()

    def give_way(*_):
        time.sleep(1e-5)  # another thread runs in the middle of whatever allocates; Python's own parser fails at that

    gc.callbacks.append(give_way)
    gc.set_threshold(10)
    try:
        with ThreadPoolExecutor(8) as pool:
            found = set(pool.map(lambda _: read_npy_header(data), range(5000)))
    finally:
        gc.callbacks.remove(give_way)
        gc.set_threshold(*before)
    assert found == {(128, (2, 3), np.dtype(np.float32))}


def test_an_operator_that_changed_is_told_and_pillow_decodes(monkeypatch):
    """torchvision may change its private operator in any version."""
    import torch

    def fail(*_):
        raise TypeError("decode_jpeg() got an unexpected argument")

    picture, file = Image.effect_noise((9, 7), 50).convert("RGB"), io.BytesIO()
    picture.save(file, "JPEG")
    expected = decode_pixels(file.getvalue())
    load_jpeg_decoder.cache_clear()
    monkeypatch.setattr(torch.ops.image, "decode_jpeg", fail)
    try:
        with pytest.warns(ColabUtilsWarning, match="unexpected argument.*Pillow decodes instead"):
            assert np.array_equal(decode_pixels(file.getvalue()), expected)
    finally:
        load_jpeg_decoder.cache_clear()
