"""The recipe docs/recipes/masks_to_coco.py, run on masks of many kinds."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from torchvision.ops import masks_to_boxes

from colab_utils.data.checks import check_dataset
from colab_utils.loading.coco_folder import CocoFolder

RECIPE = Path(__file__).parents[2] / "docs/recipes/masks_to_coco.py"
convert_masks = runpy.run_path(str(RECIPE))["convert_masks"]
ROWS, COLUMNS = np.mgrid[:64, :96]
DISC = np.hypot(ROWS - 32, COLUMNS - 40) < 15
OTHER = np.hypot(ROWS - 50, COLUMNS - 80) < 8
IDS = np.where(DISC, 1, np.where(OTHER, 2, 0)).astype(np.uint8)
AREAS = [int(DISC.sum()), int(OTHER.sum())]
GREY = DISC.astype(np.uint8) * 255


@pytest.fixture
def people(tmp_path):
    """Penn-Fudan's layout: photos, and masks whose values are 0 and the number of each person."""
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    for number in range(3):
        mask = np.zeros((40, 60), np.uint8)
        for person in range(number):
            mask[5 + 9 * person : 20 + 9 * person, 4:30] = person + 1
            # An object may have several parts.
            mask[2 + person, 50 + person] = person + 1
        Image.new("RGB", (60, 40)).save(tmp_path / f"images/Fudan{number}.png")
        Image.fromarray(mask).save(tmp_path / f"masks/Fudan{number}_mask.png")
    return tmp_path


def convert(folder, **options):
    (folder / "coco.json").unlink(missing_ok=True)
    return convert_masks(
        folder / "images", folder / "masks", output=folder / "coco.json", **options
    )


def test_objects_are_those_of_torchvisions_tutorial(people):
    dataset = CocoFolder(people / "images", convert(people, category="person"))
    assert dataset.class_names == {1: "person"}
    assert check_dataset(people / "images", people / "coco.json").ok
    for number in range(3):
        _, target = dataset[number]
        drawn = torch.from_numpy(np.array(Image.open(people / f"masks/Fudan{number}_mask.png")))
        ids = torch.unique(drawn)[1:]
        masks = (drawn == ids[:, None, None]).to(torch.uint8)
        assert torch.equal(target["masks"], masks)
        # The tutorial's boxes end at the last pixel.
        corners = masks_to_boxes(masks) + torch.tensor([0, 0, 1, 1])
        assert torch.equal(target["boxes"], corners)
        assert target["area"].tolist() == masks.sum((1, 2)).tolist()


SPOILED = [
    (
        lambda d: (d / "masks/Fudan1_mask.png").unlink(),
        "3 images, among them Fudan0, do not fit 2",
    ),
    (
        lambda d: Image.new("L", (60, 40)).save(d / "masks/Fudan1_mask2.png"),
        r"do not fit 4 masks.*FORMATS\.md",
    ),
    (lambda d: (d / "images/Fudan1.jpg").touch(), "has two files called Fudan1"),
    (
        lambda d: (d / "masks/Fudan1_mask.png").write_bytes(b"no"),
        "Fudan1_mask.png cannot be read",
    ),
    (
        lambda d: Image.new("L", (9, 9)).save(d / "masks/Fudan1_mask.png"),
        "Fudan1_mask.png has another size than .*Fudan1.png",
    ),
    (
        lambda d: (d / "images").rename(d / "photos"),
        r"has no image files.*FORMATS\.md",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILED)
def test_what_is_wrong_is_told_and_nothing_is_written(people, spoil, message):
    spoil(people)
    with pytest.raises(ValueError, match=message):
        convert(people)
    assert not (people / "coco.json").exists()
    (people / "coco.json").touch()
    with pytest.raises(ValueError, match="Name a new file"):
        convert_masks(people / "images", people / "masks", output=people / "coco.json")


def save_masks(folder, *masks, ending=".png", **options):
    """Write masks, and images of their size; return the folder."""
    (folder / "images").mkdir()
    (folder / "masks").mkdir()
    for number, mask in enumerate(masks):
        image = mask if isinstance(mask, Image.Image) else Image.fromarray(mask)
        image.save(folder / f"masks/{number}{ending}", **options)
        Image.new("RGB", image.size).save(folder / f"images/{number}.png")
    return folder


def assert_objects(folder, expected, **options):
    """Compare how many objects come out, or their areas."""
    annotations = json.loads(convert(folder, **options).read_text())["annotations"]
    areas = [annotation["area"] for annotation in annotations]
    assert (len(areas) if isinstance(expected, int) else areas) == expected


def add_palette(values, *, transparency=None):
    """Return an image with a palette that gives several values the same colour."""
    image = Image.fromarray(values)
    image.putpalette([0, 0, 0, 9, 9, 9, 9, 9, 9, 7, 7, 7])
    if transparency is not None:
        image.info["transparency"] = transparency
    return image


def make_transparent(mode, below):
    """Return a white disc on a transparent ground of the grey ``below``."""
    grey = np.where(DISC, 255, below).astype(np.uint8)
    return Image.merge(mode, [Image.fromarray(grey)] * (len(mode) - 1) + [Image.fromarray(GREY)])


def draw_stripes(values, kind=np.int32):
    """Return a mask with a stripe for each value or colour, and background between them."""
    values = np.array(values, kind)
    mask = np.zeros((24, 8 * len(values) + 4, *values.shape[1:]), kind)
    for number, value in enumerate(values):
        mask[4:20, 8 * number + 4 : 8 * number + 10] = value
    return mask


COLOURS = np.array([[0, 0, 0], [255, 0, 0], [255, 0, 9]], np.uint8)
# Each mask is understood as it is.
UNDERSTOOD = {
    "colours": (COLOURS[IDS], AREAS),
    "one bit": (Image.fromarray(IDS > 0), [sum(AREAS)]),
    "255 touches no other": (np.where(IDS == 2, 255, IDS).astype(np.uint8), AREAS),
    "spread so that they can be seen": (
        np.array([0, 127, 255], np.uint8)[IDS],
        AREAS,
    ),
    "transparent white": (make_transparent("RGBA", 255), AREAS[:1]),
    "transparent palette": (
        add_palette(np.where(DISC, 1, 3).astype(np.uint8), transparency=3),
        1,
    ),
    "spread over 16 bits": (
        draw_stripes(range(257, 257 * 30, 257), np.uint16),
        29,
    ),
    "one class": (draw_stripes([26000, 26001, 26002], np.uint16), 3),
    "random": (
        draw_stripes(np.random.default_rng(0).integers(1, 256, (40, 3)), np.uint8),
        40,
    ),
}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_every_kind_of_mask_keeps_its_objects(tmp_path, name):
    mask, expected = UNDERSTOOD[name]
    assert_objects(save_masks(tmp_path, mask), expected)


def add_rim(ids, void, width=2):
    """Draw a band of pixels without a label around all objects, as Pascal VOC has it."""
    drawn = Image.fromarray((ids > 0).astype(np.uint8) * 255)
    drawn = drawn.filter(ImageFilter.MaxFilter(2 * width + 1))
    return np.where((np.array(drawn) > 0) & (ids == 0), void, ids.astype(np.int64))


RIM = add_rim(IDS, 255).astype(np.uint8)
ALPHA = Image.merge("LA", [Image.fromarray(GREY * 0), Image.fromarray(GREY)])
REGIONS = np.where(ROWS < 32, 70, np.where(COLUMNS < 48, 80, 90)).astype(np.uint8)
SOFT = r"0\.png.*soft edges.*threshold"
# Each mask may mean two things. Each row has the refusal, the argument that decides, and the
# number of objects or their areas then.
REFUSED = {
    "void of 8 bits": (RIM, r"255 beside.*=\(0, 255\)", {"background": (0, 255)}, AREAS),
    "resized": (
        Image.fromarray(COLOURS[IDS]).resize((67, 45), Image.Resampling.BILINEAR),
        SOFT,
        {"threshold": 50},
        1,
    ),
    "a JPEG": (
        GREY,
        r"is a JPEG.*threshold=127",
        {"threshold": 127},
        pytest.approx(AREAS[:1], rel=0.03),
    ),
    "black on white": (
        255 - GREY,
        "255 in its corners",
        {"background": 255},
        AREAS[:1],
    ),
    "no background": (REGIONS, "no background.*classes=", {"background": 0}, 3),
    "nothing": (GREY * 0, "have no object", {"background": 1}, 1),
    "floats": (IDS.astype(np.float32), "no whole numbers", None, 0),
    "alpha alone": (ALPHA, "Save its alpha as the mask", None, 0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mask_that_may_mean_two_things_is_refused_until_an_argument_decides(tmp_path, name):
    mask, message, options, expected = REFUSED[name]
    ending = {"floats": ".tif", "a JPEG": ".jpg"}.get(name, ".png")
    folder = save_masks(tmp_path, mask, ending=ending)
    with pytest.raises(ValueError, match=message):
        convert(folder)
    assert not (folder / "coco.json").exists()
    if options is not None:
        assert_objects(folder, expected, **options)


def test_a_mask_of_several_pages_is_refused(tmp_path):
    page = Image.fromarray(IDS)
    folder = save_masks(tmp_path, page, ending=".tif", save_all=True, append_images=[page])
    with pytest.raises(ValueError, match=r"has several pages.*Save it as a PNG"):
        convert(folder)


def list_classes(folder, **options):
    made = json.loads(convert(folder, **options).read_text())
    names = {category["id"]: category["name"] for category in made["categories"]}
    return [names[annotation["category_id"]] for annotation in made["annotations"]]


PANOPTIC = [[n % 256, n // 256 % 256, n // 65_536] for n in (7, 26000, 26001, 24000)]
CODES = [
    # Cityscapes: regions have their class alone.
    (
        [7, 26000, 26001, 23, 24000],
        r"\* 1000 ",
        1000,
        {26: "car", 24: "b"},
        ["car", "b", "car"],
    ),
    # Mapillary Vistas: regions have the number 0.
    (
        [27 * 256, 55 * 256 + 1, 13 * 256, 55 * 256 + 2],
        r"\* 256 ",
        256,
        {55: "a"},
        ["a", "a"],
    ),
    ([101, 102, 201, 1101], r"\* 100 ", 100, {1: "a", 2: "b"}, ["a", "a", "b"]),
    # Colours with the class in red, and no blue.
    (
        [(4, 0, 0), (5, 1, 0), (5, 2, 0), (9, 1, 0)],
        "value // 256 // 256",
        65_536,
        {5: "a", 9: "b"},
        ["a", "a", "b"],
    ),
    # Panoptic colours: the number is red + 256 * green + 65536 * blue.
    (PANOPTIC, r"'little'\) // 1000", None, {}, ["car", "car"]),
]


@pytest.mark.parametrize(("values", "message", "factor", "names", "result"), CODES)
def test_codes_of_classes_are_refused_or_mapped(tmp_path, values, message, factor, names, result):
    kind = np.uint8 if np.ndim(values) > 1 else np.int32
    # No mask alone shows the code.
    stripes = [draw_stripes(values[:2], kind), draw_stripes(values[2:], kind)]
    folder = save_masks(tmp_path, *stripes, ending=".tif")
    for options in ({}, {"background": 0}):
        with pytest.raises(ValueError, match=r"class \* .*number.*classes=") as error:
            convert(folder, **options)
        assert re.search(message, str(error.value))
    assert not (folder / "coco.json").exists()
    classes = lambda value: names.get(value // factor)  # noqa: E731
    if factor is None:
        # The message gives the function.
        classes = eval(re.search(r"(lambda value: .*?// 1000\))", str(error.value))[1])
    assert list_classes(folder, classes=classes) == result
