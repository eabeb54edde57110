"""CocoFolder with the sizes that training needs."""

import json
from functools import partial

import pytest
import torch
from PIL import Image, ImageFilter

from colab_utils.course.sample_data import make_dataset
from colab_utils.data import decoding
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.dataset import ShardDataset
from colab_utils.shards.write import write_shards


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    made = make_dataset(tmp_path_factory.mktemp("made"), n=4, width=1603, height=1201, workers=1)
    for path in made.images.iterdir():
        # A lens shows less than each single pixel.
        with Image.open(path) as image:
            image.filter(ImageFilter.GaussianBlur(1.5)).save(path, quality=92)
    return made


@pytest.fixture
def content(photos):
    """What their JSON holds, to be changed."""
    return json.loads(photos.annotations.read_bytes())


def open_photos(photos, **options):
    return CocoFolder(photos.images, photos.annotations, **options)


def write_photos(shards, photos, **options):
    write_shards(photos.images, photos.annotations, shards=shards, workers=1, **options)


def assert_same_objects(target, expected):
    assert len(target["masks"])
    for name in ("masks", "labels", "image_id"):
        assert torch.equal(torch.as_tensor(target[name]), torch.as_tensor(expected[name]))
    for name in ("boxes", "area"):
        assert torch.allclose(target[name], expected[name])


def difference(image, expected):
    assert image.shape == expected.shape
    return (image.int() - expected.int()).abs().float().mean()


@pytest.mark.parametrize("min_size", [580, 300, 150])
def test_a_smaller_photo_has_the_objects_and_the_pixels_of_all_that_were_decoded(photos, min_size):
    reduced = open_photos(photos, min_size=min_size, max_size=1333)
    whole = open_photos(photos, min_size=min_size, max_size=1333)
    # As shards of older recipes.
    whole._is_reduced = False
    for index in range(4):
        image, target = reduced[index]
        expected, objects = whole[index]
        assert image.shape[1] == min_size
        assert 0 < difference(image, expected) < 1
        assert_same_objects(target, objects)
        assert torch.equal(reduced.load_image(index), image)


def test_a_smaller_photo_is_that_of_the_shards(photos, tmp_path):
    # A size may be a fraction.
    sizes = {"min_size": 300.5, "max_size": 600}
    write_photos(tmp_path, photos, **sizes)
    shards = ShardDataset(tmp_path)
    loose = open_photos(photos, **sizes)
    order = loose.image_ids.tolist()
    for index, number in enumerate(shards.image_ids.tolist()):
        image, target = loose[order.index(number)]
        expected, objects = shards[index]
        # A shard compresses the smaller photo once more, which alone changes it by about 1.
        assert difference(image, expected) < 1.5
        assert_same_objects(target, objects)


def test_the_pixels_of_a_smaller_photo_are_pillows_whatever_else_is_installed(photos, monkeypatch):
    folder = open_photos(photos, min_size=300)
    image = folder.load_image(0)
    monkeypatch.setattr(decoding, "load_jpeg_decoder", None)
    assert torch.equal(folder.load_image(0), image)


def test_one_size_is_enough_and_small_files_are_as_ever(photos):
    plain = open_photos(photos)
    assert open_photos(photos, max_size=801)[0][0].shape == (3, 600, 801)
    assert open_photos(photos, min_size=1201, max_size=1603).sizes.tolist() == [[1201, 1603]] * 4
    for sizes in ({"min_size": 1201}, {"max_size": 1603}, {"min_size": 5000, "max_size": 9000}):
        image, target = open_photos(photos, **sizes)[0]
        assert torch.equal(image, plain[0][0])
        assert_same_objects(target, plain[0][1])


def test_a_turned_photo_and_one_without_a_size_are_shrunk(photos, content, tmp_path):
    first, second = content["images"][:2]
    exif = Image.Exif()
    exif[0x0112] = 6
    for entry, turn in ((first, Image.Transpose.ROTATE_90), (second, None)):
        with Image.open(photos.images / entry["file_name"]) as image:
            stored = image if turn is None else image.transpose(turn)
            stored.save(tmp_path / entry["file_name"], quality=95, exif=exif)
    del second["width"], second["height"], content["images"][2:]
    kept = {first["id"], second["id"]}
    content["annotations"] = [a for a in content["annotations"] if a["image_id"] in kept]
    (tmp_path / "coco.json").write_text(json.dumps(content))
    folder = CocoFolder(tmp_path, tmp_path / "coco.json", min_size=300, exif="keep")
    upright = open_photos(photos, min_size=300)
    for index in (0, 1):
        image, target = folder[index]
        expected, objects = upright[index]
        assert difference(image, expected) < 2
        assert_same_objects(target, objects)


@pytest.mark.parametrize("size", [0, 2**17, float("nan"), "800"])
@pytest.mark.parametrize("name", ["min_size", "max_size"])
def test_sizes_out_of_range_are_refused_as_in_write_shards(photos, tmp_path, name, size):
    for call in (open_photos, partial(write_photos, tmp_path)):
        with pytest.raises(ColabUtilsError, match=f"^expected {name} "):
            call(photos, **{name: size})
