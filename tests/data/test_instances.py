from __future__ import annotations

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
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
                [[0, 0, 0], [255, 0, 0], [255, 0, 1]],
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
        "1 file has no partner, such as Fudan1_mask",
    ),
    (
        lambda folder: (folder / "PNGImages/Fudan1.png").unlink(),
        "1 file has no partner, such as Fudan1_mask",
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
    (spoil_size, "a mask of 60 x 40 pixels at .*, found 9 x 9"),
    (spoil_kind, "is a JPEG, which does not keep its values"),
    (spoil_colours, "has .* colours, and each would be one object"),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILED)
def test_what_is_wrong_is_told_and_nothing_is_written(people, spoil, message):
    spoil(people)
    before = sorted(path.name for path in people.iterdir())
    with pytest.raises(ColabUtilsError, match=message):
        convert(people)
    assert sorted(path.name for path in people.iterdir()) == before


def test_a_folder_without_images_is_refused(people):
    (people / "empty").mkdir()
    with pytest.raises(ColabUtilsError, match=r"empty has no image files"):
        convert_masks(people / "empty", people / "PedMasks", output=people / "people.json")


def test_a_file_that_cannot_be_written(people):
    with pytest.raises(ColabUtilsError, match=r"Writing into .* failed"):
        convert_masks(
            people / "PNGImages", people / "PedMasks", output=people / "no/such/people.json"
        )


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
    with pytest.raises(ColabUtilsError, match=rf"{void} beside 2 others.*background=\(0, {void}\)"):
        convert_masks(**folders)
    assert not folders["output"].exists()
    assert list_areas(folders, background=(0, void)) == [DISC.sum(), OTHER.sum()]


def test_pascal_vocs_colours_have_one_for_pixels_without_a_label(tmp_path):
    colours = np.zeros((256, 3), np.uint8)
    colours[[1, 2, 255]] = [[128, 0, 0], [192, 0, 128], [224, 224, 192]]
    folders = save_masks(tmp_path, colours[add_rim(IDS, 255)])
    with pytest.raises(ColabUtilsError, match="pixels without a label"):
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
    with pytest.raises(ColabUtilsError, match=r"1\.png.*soft edges.*threshold"):
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
    with pytest.raises(ColabUtilsError, match=r"is a JPEG.*threshold=127"):
        convert_masks(**folders)
    (area,) = list_areas(folders, threshold=127)
    assert abs(area - DISC.sum()) < 0.03 * DISC.sum()


def test_an_object_in_the_corners_may_be_the_background(tmp_path):
    folders = save_masks(
        tmp_path,
        IDS.astype(np.uint8),
        np.where(DISC, 0, 255).astype(np.uint8),
    )
    with pytest.raises(ColabUtilsError, match=r"1\.png.*255 is in its corners and in 89% of.*=255"):
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
    share = DISC.mean()
    assert capsys.readouterr().out == (
        f"2 images, 2 objects; the largest covers {share:.0%} of its image\n"
    )


def test_masks_without_any_object_are_refused(tmp_path):
    folders = save_masks(tmp_path, np.zeros((64, 96), np.uint8))
    with pytest.raises(ColabUtilsError, match="hold only background"):
        convert_masks(**folders)


def test_a_mask_file_an_object_is_another_layout(people):
    Image.new("L", (60, 40)).save(people / "PedMasks/Fudan1_mask2.png")
    with pytest.raises(ColabUtilsError, match=r"file has no partner.*FORMATS\.md"):
        convert(people)
    with pytest.raises(ColabUtilsError, match=r"has no image files.*FORMATS\.md"):
        convert_masks(people, people, output=people / "people.json")


def test_programs_from_outside_find_the_names_where_they_were():
    from colab_utils.data import archives, sources

    assert sources.convert_masks is convert_masks
    assert sources.unpack_dataset is archives.unpack_dataset
    assert sources.is_archive is archives.is_archive


def test_a_mask_of_several_pages_is_refused(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    Image.new("RGB", (24, 16)).save(tmp_path / "images" / "a.png")
    page = Image.new("L", (24, 16))
    page.paste(1, (2, 2, 8, 8))
    page.save(tmp_path / "masks" / "a.tif", save_all=True, append_images=[page])
    with pytest.raises(ColabUtilsError, match="several pages: save each as a file"):
        convert_masks(tmp_path / "images", tmp_path / "masks", output=tmp_path / "coco.json")


def test_regions_of_cityscapes_are_no_objects(tmp_path):
    values = np.full((16, 24), 7, np.uint16)
    values[:8] = 23
    values[4:12, 4:12] = 26000
    values[4:12, 14:20] = 26001
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    Image.new("RGB", (24, 16)).save(tmp_path / "images" / "a.png")
    Image.fromarray(values).save(tmp_path / "masks" / "a.png")
    folders = tmp_path / "images", tmp_path / "masks"
    with pytest.raises(
        ColabUtilsError, match=r"has 2 values below 1,000 .*background=range\(1000\)"
    ):
        convert_masks(*folders, output=tmp_path / "coco.json")
    made = convert_masks(*folders, output=tmp_path / "coco.json", background=range(1000))
    areas = [annotation["area"] for annotation in json.loads(made.read_text())["annotations"]]
    assert areas == [64, 48]


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
    assert (
        "2 objects; the largest covers 8% of its image; 1 lie in pieces" in capsys.readouterr().out
    )


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
    with pytest.raises(ColabUtilsError, match="save its alpha channel as the mask"):
        convert_masks(**folders)
