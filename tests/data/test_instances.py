from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.ops import masks_to_boxes

from colab_utils.data.checks import check_dataset
from colab_utils.data.mask_files import convert_masks
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.dataset import CocoFolder


@pytest.fixture
def people(tmp_path):
    """Penn-Fudan's layout: photos, and masks whose values are 0 and the number of each person."""
    chance = np.random.default_rng(0)
    (tmp_path / "PNGImages").mkdir()
    (tmp_path / "PedMasks").mkdir()
    for number in range(3):
        mask = np.zeros((40, 60), np.uint8)
        for person in range(number):
            mask[5 + 9 * person : 20 + 9 * person, 4:30] = person + 1
            mask[2 + person, 50 + person] = person + 1  # an object may have several parts
        photo = chance.integers(0, 256, (40, 60, 3), np.uint8)
        Image.fromarray(photo).save(tmp_path / f"PNGImages/Fudan{number}.png")
        Image.fromarray(mask).save(tmp_path / f"PedMasks/Fudan{number}_mask.png")
    return tmp_path


def convert(folder, **options):
    return convert_masks(
        folder / "PNGImages", folder / "PedMasks", output=folder / "people.json", **options
    )


def test_objects_are_those_of_torchvisions_tutorial(people):
    dataset = CocoFolder(people / "PNGImages", convert(people, category="person"))
    assert dataset.class_names == {1: "person"}
    assert check_dataset(people / "PNGImages", people / "people.json").ok
    for number in range(3):
        _, target = dataset[number]
        drawn = torch.from_numpy(np.array(Image.open(people / f"PedMasks/Fudan{number}_mask.png")))
        ids = torch.unique(drawn)[1:]
        masks = (drawn == ids[:, None, None]).to(torch.uint8)
        assert torch.equal(target["masks"], masks)
        # the tutorial's boxes end at the last pixel
        corners = masks_to_boxes(masks) + torch.tensor([0, 0, 1, 1])
        assert torch.equal(target["boxes"], corners)
        assert target["area"].tolist() == masks.sum((1, 2)).tolist()


@pytest.mark.parametrize("kind", ["RGB", "P", "I;16", "1"])
def test_every_kind_of_mask(people, kind):
    values = np.zeros((40, 60), np.uint16)
    values[3:9, 2:8] = 1
    values[20:30, 20:40] = 1 if kind == "1" else 2
    if kind == "RGB":
        mask = Image.fromarray(np.array([[0, 0, 0], [255, 0, 0], [255, 0, 1]], np.uint8)[values])
    elif kind == "P":
        mask = Image.fromarray(values.astype(np.uint8))
        mask.putpalette([0, 0, 0, 9, 9, 9, 9, 9, 9])  # colours that look the same
    else:
        mask = Image.fromarray(values > 0) if kind == "1" else Image.fromarray(values * 300)
    mask.save(people / "PedMasks/Fudan0_mask.png")
    areas = [
        one["area"]
        for one in json.loads(convert(people).read_text())["annotations"]
        if one["image_id"] == 1
    ]
    assert areas == ([236] if kind == "1" else [36, 200])


def test_names_without_an_ending_and_a_photo_that_was_turned(people):
    for mask in (people / "PedMasks").iterdir():
        mask.rename(mask.with_name(mask.name.replace("_mask", "")))
    photo = Image.open(people / "PNGImages/Fudan2.png").transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6
    photo.save(people / "PNGImages/Fudan2.png", exif=exif)
    dataset = CocoFolder(people / "PNGImages", convert(people))
    assert dataset.sizes[2].tolist() == [40, 60]
    assert len(dataset.list_annotations(2)) == 2


def spoil_size(folder):
    Image.new("L", (9, 9)).save(folder / "PedMasks/Fudan1_mask.png")


def spoil_kind(folder):
    (folder / "PedMasks/Fudan1_mask.png").rename(folder / "PedMasks/Fudan1_mask.jpg")
    Image.new("L", (60, 40)).save(folder / "PedMasks/Fudan1_mask.jpg")


def spoil_colours(folder):
    photo = np.arange(40 * 60 * 3, dtype=np.uint8).reshape(40, 60, 3)
    Image.fromarray(np.repeat(np.repeat(photo, 9, 0), 9, 1)).save(folder / "PNGImages/Fudan1.png")
    noise = np.random.default_rng(0).integers(0, 256, (360, 540, 3), np.uint8)
    Image.fromarray(noise).save(folder / "PedMasks/Fudan1_mask.png")


SPOILED = [
    (
        lambda folder: (folder / "PedMasks/Fudan1_mask.png").unlink(),
        "1 files without the other, such as Fudan1_mask",
    ),
    (
        lambda folder: (folder / "PNGImages/Fudan1.png").unlink(),
        "1 files without the other, such as Fudan1_mask",
    ),
    (
        lambda folder: (folder / "PNGImages/Fudan1.jpg").touch(),
        "one file called Fudan1 .* found two",
    ),
    (
        lambda folder: (folder / "PedMasks/Fudan1_mask.png").write_bytes(b"no mask"),
        "a mask at .*Fudan1_mask.png",
    ),
    (lambda folder: (folder / "people.json").touch(), "expected a new file"),
    (spoil_size, "a mask of 60 x 40 pixels at .*, found 9 x 9"),
    (spoil_kind, "keeps its values at .*, found a JPEG"),
    (spoil_colours, "one colour an object at .*, found .* colours"),
]


@pytest.mark.parametrize(("spoil", "told"), SPOILED)
def test_what_is_wrong_is_told_and_nothing_is_written(people, spoil, told):
    spoil(people)
    before = sorted(path.name for path in people.iterdir())
    with pytest.raises(ColabUtilsError, match=told):
        convert(people)
    assert sorted(path.name for path in people.iterdir()) == before


def test_a_folder_without_images(people):
    (people / "empty").mkdir()
    with pytest.raises(
        ColabUtilsError, match=r"expected a folder of image files at .*empty, found none"
    ):
        convert_masks(people / "empty", people / "PedMasks", output=people / "people.json")


def test_a_file_that_cannot_be_written(people):
    with pytest.raises(ColabUtilsError, match="expected to write"):
        convert_masks(
            people / "PNGImages", people / "PedMasks", output=people / "no/such/people.json"
        )
