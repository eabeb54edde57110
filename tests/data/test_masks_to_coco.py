"""The recipe docs/recipes/masks_to_coco.py, run on masks of many kinds."""

from __future__ import annotations

import io
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
            # An object may have several parts.
            mask[2 + person, 50 + person] = person + 1
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
        # The tutorial's boxes end at the last pixel.
        corners = masks_to_boxes(masks) + torch.tensor([0, 0, 1, 1])
        assert torch.equal(target["boxes"], corners)
        assert target["area"].tolist() == masks.sum((1, 2)).tolist()


@pytest.mark.parametrize("kind", ["RGB", "P", "I;16", "1"])
def test_every_kind_of_mask(people, kind):
    values = np.zeros((40, 60), np.uint16)
    values[3:9, 2:8] = 1
    values[20:30, 20:40] = 1 if kind == "1" else 2
    if kind == "RGB":
        mask = Image.fromarray(
            np.array(
                [[0, 0, 0], [255, 0, 0], [255, 0, 9]],
                np.uint8,
            )[values]
        )
    elif kind == "P":
        mask = Image.fromarray(values.astype(np.uint8))
        # The palette gives several values the same colour.
        mask.putpalette([0, 0, 0, 9, 9, 9, 9, 9, 9])
    else:
        mask = Image.fromarray(values > 0) if kind == "1" else Image.fromarray(values * 300)
    mask.save(people / "PedMasks/Fudan0_mask.png")
    areas = [
        annotation["area"]
        for annotation in json.loads(convert(people).read_text())["annotations"]
        if annotation["image_id"] == 1
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
        "3 images, among them Fudan0, do not fit 2 masks",
    ),
    (
        lambda folder: (folder / "PNGImages/Fudan1.png").unlink(),
        "2 images, among them Fudan0, do not fit 3 masks",
    ),
    (
        lambda folder: (folder / "PNGImages/Fudan1.jpg").touch(),
        "has two files called Fudan1",
    ),
    (
        lambda folder: (folder / "PedMasks/Fudan1_mask.png").write_bytes(b"no mask"),
        "its mask .*Fudan1_mask.png cannot be read",
    ),
    (lambda folder: (folder / "people.json").touch(), "Name a new file"),
    (spoil_size, "Fudan1_mask.png has another size than .*Fudan1.png"),
    (spoil_kind, "is a JPEG or a photo, whose values mean nothing"),
    (spoil_colours, "is a JPEG or a photo, whose values mean nothing"),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILED)
def test_what_is_wrong_is_told_and_nothing_is_written(people, spoil, message):
    spoil(people)
    before = sorted(path.name for path in people.iterdir())
    with pytest.raises(ValueError, match=message):
        convert(people)
    assert sorted(path.name for path in people.iterdir()) == before


def test_a_folder_without_images_is_refused(people):
    (people / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no image files"):
        convert_masks(people / "empty", people / "PedMasks", output=people / "people.json")


ROWS, COLUMNS = np.mgrid[:64, :96]
DISC = np.hypot(ROWS - 32, COLUMNS - 40) < 15
OTHER = np.hypot(ROWS - 50, COLUMNS - 80) < 8


def save_masks(folder, *masks, ending=".png", **options):
    """Write masks and images of their size; returns what `convert_masks` is called with."""
    (folder / "images").mkdir()
    (folder / "masks").mkdir()
    for number, mask in enumerate(masks):
        image = mask if isinstance(mask, Image.Image) else Image.fromarray(mask)
        image.save(folder / f"masks/{number}{ending}", **options)
        Image.new("RGB", image.size).save(folder / f"images/{number}.png")
    return {
        "images": folder / "images",
        "masks": folder / "masks",
        "output": folder / "coco.json",
    }


def list_areas(folders, **options):
    annotations = json.loads(convert_masks(**folders, **options).read_text())["annotations"]
    return [annotation["area"] for annotation in annotations]


def add_rim(ids, void, width=2):
    """Draw a band of pixels without a label around all objects, as Pascal VOC has it."""
    drawn = Image.fromarray((ids > 0).astype(np.uint8) * 255)
    drawn = drawn.filter(ImageFilter.MaxFilter(2 * width + 1))
    return np.where((np.array(drawn) > 0) & (ids == 0), void, ids)


IDS = np.where(DISC, 1, np.where(OTHER, 2, 0))


@pytest.mark.parametrize(
    ("void", "kind"),
    [(255, np.uint8), (65535, np.uint16)],
)
def test_pixels_without_a_label_are_no_object(tmp_path, void, kind):
    folders = save_masks(tmp_path, add_rim(IDS, void).astype(kind))
    with pytest.raises(ValueError, match=rf"{void} beside objects.*background=\(0, {void}\)"):
        convert_masks(**folders)
    assert not folders["output"].exists()
    assert list_areas(folders, background=(0, void)) == [DISC.sum(), OTHER.sum()]


def test_pascal_vocs_colours_have_one_for_pixels_without_a_label(tmp_path):
    colours = np.zeros((256, 3), np.uint8)
    colours[[1, 2, 255]] = [[128, 0, 0], [192, 0, 128], [224, 224, 192]]
    folders = save_masks(tmp_path, colours[add_rim(IDS, 255)])
    with pytest.raises(ValueError, match="pixels without a label"):
        convert_masks(**folders)
    assert list_areas(folders, background=(0, 0xE0E0C0)) == [DISC.sum(), OTHER.sum()]


@pytest.mark.parametrize(
    "values",
    [
        # 255 touches no other: it is the number of an object.
        (1, 255),
        # Numbers spread over the greys, so that they can be seen.
        (127, 255),
    ],
)
def test_255_may_be_an_object(tmp_path, values):
    mask = np.where(
        DISC,
        values[0],
        np.where(OTHER, values[1], 0),
    ).astype(np.uint8)
    assert list_areas(save_masks(tmp_path, mask)) == [DISC.sum(), OTHER.sum()]


def blur(radius):
    image = Image.fromarray((DISC | OTHER).astype(np.uint8) * 255)
    return image.filter(ImageFilter.GaussianBlur(radius))


def resize_colours():
    colours = np.array([[0, 0, 0], [255, 0, 0], [0, 255, 0]], np.uint8)
    return Image.fromarray(colours[IDS]).resize(
        (67, 45),
        Image.Resampling.BILINEAR,
    )


def save_as_jpeg():
    file = io.BytesIO()
    Image.fromarray(DISC.astype(np.uint8) * 255).save(file, "JPEG")
    return Image.open(file)


def draw_grey_edge():
    rim = add_rim(DISC.astype(np.uint8), 128, width=1)
    return np.where(rim == 1, 255, rim).astype(np.uint8)


@pytest.mark.parametrize(
    "mask",
    [
        blur(1),
        blur(4),
        resize_colours(),
        save_as_jpeg(),
        draw_grey_edge(),
    ],
    ids=["blurred", "far blurred", "resized colours", "was a JPEG", "one grey"],
)
def test_soft_edges_are_no_objects(tmp_path, mask):
    folders = save_masks(tmp_path, IDS.astype(np.uint8), mask)
    with pytest.raises(ValueError, match=r"1\.png.*soft edges.*threshold"):
        convert_masks(**folders)
    assert not folders["output"].exists()


def test_a_threshold_makes_one_object_of_a_mask(tmp_path):
    folders = save_masks(
        tmp_path,
        blur(1),
        (DISC | OTHER).astype(np.uint16) * 255,
    )
    drawn = int((DISC | OTHER).sum())
    areas = list_areas(folders, threshold=127)
    assert len(areas) == 2
    assert abs(areas[0] - drawn) < 0.05 * drawn
    assert areas[1] == drawn


def test_a_jpeg_is_a_mask_by_its_threshold(tmp_path):
    folders = save_masks(tmp_path, DISC.astype(np.uint8) * 255, ending=".jpg", quality=90)
    with pytest.raises(ValueError, match=r"is a JPEG.*threshold=127"):
        convert_masks(**folders)
    (area,) = list_areas(folders, threshold=127)
    assert abs(area - DISC.sum()) < 0.03 * DISC.sum()


def test_an_object_in_the_corners_may_be_the_background(tmp_path):
    folders = save_masks(
        tmp_path,
        IDS.astype(np.uint8),
        np.where(DISC, 0, 255).astype(np.uint8),
    )
    with pytest.raises(ValueError, match=r"1\.png.*255 in its corners.*background=255"):
        convert_masks(**folders)
    assert list_areas(folders, background=0) == [DISC.sum(), OTHER.sum(), (~DISC).sum()]


def test_objects_may_be_black_on_white(tmp_path):
    folders = save_masks(tmp_path, np.where(DISC, 0, 255).astype(np.uint8))
    assert list_areas(folders, background=255) == [DISC.sum()]


def make_transparent(kind, below):
    alpha = (DISC * 255).astype(np.uint8)
    colour = np.where(DISC, 255, below).astype(np.uint8)
    if kind == "RGBA":
        return Image.fromarray(np.dstack([colour, colour, colour, alpha]))
    if kind == "LA":
        return Image.fromarray(np.dstack([colour, alpha]))
    image = Image.fromarray(np.where(DISC, 1, 3).astype(np.uint8))
    if kind == "P":
        image.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0, 9, 9, 9])
    image.info["transparency"] = 3
    return image


@pytest.mark.parametrize(
    ("kind", "below"),
    [
        ("RGBA", 255),
        ("RGBA", 0),
        ("LA", 255),
        ("P", 0),
        ("L", 0),
    ],
)
def test_transparent_pixels_are_background(tmp_path, kind, below):
    mask = make_transparent(kind, below)
    options = {"transparency": 3} if kind in "PL" else {}
    assert list_areas(save_masks(tmp_path, mask, **options)) == [DISC.sum()]


def test_what_was_understood_is_printed(tmp_path, capsys):
    convert_masks(
        **save_masks(
            tmp_path,
            IDS.astype(np.uint8),
            np.zeros((64, 96), np.uint8),
        )
    )
    assert capsys.readouterr().out == "2 images, 2 objects: object\n"


def test_masks_without_any_object_are_refused(tmp_path):
    folders = save_masks(tmp_path, np.zeros((64, 96), np.uint8))
    with pytest.raises(ValueError, match="have no object"):
        convert_masks(**folders)


def test_a_mask_file_an_object_is_another_layout(people):
    Image.new("L", (60, 40)).save(people / "PedMasks/Fudan1_mask2.png")
    with pytest.raises(ValueError, match=r"do not fit 4 masks.*FORMATS\.md"):
        convert(people)
    with pytest.raises(ValueError, match=r"has no image files.*FORMATS\.md"):
        convert_masks(people, people, output=people / "people.json")


def test_a_mask_of_several_pages_is_refused(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    Image.new("RGB", (24, 16)).save(tmp_path / "images" / "a.png")
    page = Image.new("L", (24, 16))
    page.paste(1, (2, 2, 8, 8))
    page.save(tmp_path / "masks" / "a.tif", save_all=True, append_images=[page])
    with pytest.raises(ValueError, match=r"has several pages.*Save it as a PNG"):
        convert_masks(tmp_path / "images", tmp_path / "masks", output=tmp_path / "coco.json")


def draw_stripes(values, kind=np.int32):
    """Return a mask with a stripe for each value or colour, and background between them."""
    values = np.array(values, kind)
    mask = np.zeros((24, 8 * len(values) + 4, *values.shape[1:]), kind)
    for number, value in enumerate(values):
        mask[4:20, 8 * number + 4 : 8 * number + 10] = value
    return mask


def list_classes(folders, **options):
    made = json.loads(convert_masks(**folders, **options).read_text())
    names = {category["id"]: category["name"] for category in made["categories"]}
    return [names[annotation["category_id"]] for annotation in made["annotations"]]


CODES = [
    # Cityscapes: regions have their class alone.
    (1000, [7, 26000, 26001, 23, 24000], {26: "car", 24: "person"}, ["car", "person", "car"]),
    # Mapillary Vistas: regions have the number 0.
    (256, [27 * 256, 55 * 256 + 1, 13 * 256, 55 * 256 + 2], {55: "car"}, ["car", "car"]),
    (100, [101, 102, 201, 1101], {1: "a", 2: "b"}, ["a", "a", "b"]),
    (10_000, [10_001, 20_001, 20_002], {1: "a", 2: "b"}, ["a", "b", "b"]),
    (65_536, [65_537, 65_538, 9 * 65_536 + 1], {1: "a", 9: "b"}, ["a", "a", "b"]),
]


@pytest.mark.parametrize(("factor", "values", "names", "result"), CODES)
def test_codes_of_classes_are_refused_or_mapped(tmp_path, factor, values, names, result):
    # No mask alone shows the code.
    folders = save_masks(
        tmp_path, draw_stripes(values[:2]), draw_stripes(values[2:]), ending=".tif"
    )
    for options in ({}, {"background": 0}):
        with pytest.raises(ValueError, match=rf"class \* {factor} \+ number.*value // {factor}\)"):
            convert_masks(**folders, **options)
    assert not folders["output"].exists()
    assert list_classes(folders, classes=lambda value: names.get(value // factor)) == result


def test_regions_that_background_leaves_out_do_not_merge_the_other_classes(tmp_path):
    folders = save_masks(tmp_path, draw_stripes([7, 23, 26000, 26001], np.uint16))
    assert list_classes(folders, background=range(1000)) == ["object", "object"]
    folders["output"].unlink()
    Image.fromarray(draw_stripes([7, 24000, 26000, 26001], np.uint16)).save(
        tmp_path / "masks/0.png"
    )
    with pytest.raises(ValueError, match="class \\* 1000"):
        convert_masks(**folders, background=range(1000))


def test_colours_with_the_class_in_red_are_refused_or_mapped(tmp_path):
    colours = [(4, 0, 0), (5, 1, 0), (5, 2, 0), (9, 1, 0)]
    folders = save_masks(tmp_path, draw_stripes(colours, np.uint8))
    with pytest.raises(ValueError, match=r"value // 256 // 256\)"):
        convert_masks(**folders)
    names = {5: "chair", 9: "door"}
    result = list_classes(folders, classes=lambda value: names.get(value // 65_536))
    assert result == ["chair", "chair", "door"]


def test_panoptic_colours_are_refused_or_mapped(tmp_path):
    """A panoptic PNG has a number as red + 256 * green + 65536 * blue."""
    numbers = [7, 26000, 26001, 24000]
    colours = [[number % 256, number // 256 % 256, number // 65_536] for number in numbers]
    folders = save_masks(tmp_path, draw_stripes(colours, np.uint8))
    with pytest.raises(ValueError, match=r"classes=(lambda value: .*// 1000\))") as error:
        convert_masks(**folders)
    classes = eval(re.search(r"(lambda value: .*?// 1000\))", str(error.value))[1])
    assert list_classes(folders, classes=classes) == ["car", "car"]


def test_masks_without_background_are_refused(tmp_path):
    values = np.where(ROWS < 32, 70, np.where(COLUMNS < 48, 80, 90)).astype(np.uint8)
    folders = save_masks(tmp_path, values)
    with pytest.raises(ValueError, match=r"no background.*classes="):
        convert_masks(**folders)
    assert len(list_areas(folders, background=0)) == 3


PLAIN = {
    "counted": range(1, 301),
    "counted from 100 on": range(100, 140),
    "spread over the greys": range(51, 256, 51),
    "spread over 16 bits": range(257, 257 * 30, 257),
    "hundreds": [1, 200, 300, 400, 500],
    "one class": [26000, 26001, 26002],
}


@pytest.mark.parametrize("values", PLAIN.values(), ids=PLAIN)
def test_plain_values_are_no_code(tmp_path, values):
    assert len(list_areas(save_masks(tmp_path, draw_stripes(values, np.uint16)))) == len(values)


COLOURS = {
    "pure": [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)],
    "Pascal VOC": [(128, 0, 0), (0, 128, 0), (128, 128, 0), (0, 0, 128), (64, 0, 0)],
    "grey": [(1, 1, 1), (2, 2, 2)],
    "random": np.random.default_rng(0).integers(1, 256, (40, 3)),
}


@pytest.mark.parametrize("colours", COLOURS.values(), ids=COLOURS)
def test_plain_colours_are_no_code(tmp_path, colours):
    folders = save_masks(tmp_path, draw_stripes(colours, np.uint8))
    assert len(list_areas(folders)) == len(colours)


def test_masks_of_every_depth_keep_their_objects(tmp_path):
    values = np.repeat(np.array([[1, 200, 300, 400, 500, 0]]), 3, 0)
    folders = save_masks(tmp_path, values.astype(np.uint16))
    (tmp_path / "masks/0.png").unlink()
    mask = Image.frombytes("I;16B", (6, 3), values.astype(">u2").tobytes())
    mask.save(tmp_path / "masks/0.tif")
    assert list_areas(folders) == [3] * 5
    folders["output"].unlink()
    Image.fromarray(values.astype(np.float32)).save(tmp_path / "masks/0.tif")
    with pytest.raises(ValueError, match="no whole numbers"):
        convert_masks(**folders)


def test_objects_in_pieces_are_counted(tmp_path, capsys):
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    for name, boxes in (("a", [(2, 2, 6, 6), (12, 2, 16, 6)]), ("b", [(2, 2, 6, 6)])):
        Image.new("RGB", (24, 16)).save(tmp_path / "images" / f"{name}.png")
        mask = Image.new("L", (24, 16))
        for box in boxes:
            mask.paste(255, box)
        mask.save(tmp_path / "masks" / f"{name}.png")
    convert_masks(tmp_path / "images", tmp_path / "masks", output=tmp_path / "coco.json")
    assert "2 objects: object\n1 objects lie in pieces." in capsys.readouterr().out


def test_hidden_files_and_folders_are_no_masks(people):
    expected = convert(people).read_bytes()
    (people / "people.json").unlink()
    (people / "PNGImages/._Fudan0.png").write_bytes(b"macOS")
    (people / "PedMasks/._Fudan0_mask.png").write_bytes(b"macOS")
    (people / "PedMasks/.ipynb_checkpoints").mkdir()
    (people / "PedMasks/old.png").mkdir()
    assert convert(people).read_bytes() == expected


def test_a_shape_that_only_the_alpha_shows_is_not_lost(tmp_path):
    nothing = np.zeros_like(DISC, np.uint8)
    alpha = (DISC * 255).astype(np.uint8)
    mask = Image.fromarray(np.dstack([nothing, nothing, nothing, alpha]))
    folders = save_masks(tmp_path, mask)
    with pytest.raises(ValueError, match="Save its alpha as the mask"):
        convert_masks(**folders)
