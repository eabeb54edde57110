"""The recipes of docs/FORMATS.md, run as they stand there: `make test-formats` installs the
converters and the trainers they name.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from torch.utils.data import DataLoader
from torchvision.transforms.v2.functional import pil_to_tensor

from colab_utils.course.sample_data import make_dataset
from colab_utils.data.checks import check_dataset
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.dataset import ShardDataset
from colab_utils.shards.write import write_shards

PAGE = Path("docs/FORMATS.md").read_text()


def find_code(page, mark):
    """Return the code below each heading of a page, by the heading."""
    pattern = rf"^{mark} (.*?)\n.*?```python\n(.*?)```"
    return dict(re.findall(pattern, page, re.DOTALL | re.MULTILINE))


RECIPES = find_code(PAGE.partition("## Out of COCO")[0], "##")
# The code of the page for other trainers.
TRAINERS = find_code(PAGE, "###")
WIDTH = 256
HEIGHT = 192
OBJECTS = {
    "a": [
        ("cat", [(20, 20), (120, 24), (112, 120), (24, 104)]),
        ("dog", [(160, 40), (240, 48), (200, 160)]),
    ],
    "b": [("dog", [(40, 40), (200, 32), (192, 160), (120, 176), (48, 152)])],
}
RUNS = "Run lengths in a CSV, as on Kaggle"
# Pascal VOC gives these classes these values.
CLASSES = {"cat": 8, "dog": 12}


def save_photo(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.effect_noise((WIDTH, HEIGHT), 90).convert("RGB").save(path)


def draw(values, outline=None):
    drawn = Image.new("P", (WIDTH, HEIGHT))
    drawn.putpalette(np.random.default_rng(0).integers(0, 256, 768, np.uint8).tobytes())
    for value, (_, points) in values:
        ImageDraw.Draw(drawn).polygon(
            points, fill=value, outline=value if outline is None else outline
        )
    return drawn


def make_pngs():
    for name, objects in OBJECTS.items():
        save_photo(Path(f"PennFudanPed/PNGImages/{name}.png"))
        Path("PennFudanPed/PedMasks").mkdir(exist_ok=True)
        draw(enumerate(objects, 1)).save(f"PennFudanPed/PedMasks/{name}_mask.png")


def make_object_files():
    for name, objects in OBJECTS.items():
        save_photo(Path(f"stage1_train/{name}/images/{name}.png"))
        Path(f"stage1_train/{name}/masks").mkdir()
        for number, outline in enumerate(objects):
            mask = draw([(255, outline)])
            mask.putpalette([value for grey in range(256) for value in (grey, grey, grey)])
            mask.convert("L").save(f"stage1_train/{name}/masks/{number}{name}.png")


def make_run_lengths():
    lines = ["ImageId,ClassId,EncodedPixels"]
    for name, objects in OBJECTS.items():
        save_photo(Path(f"kaggle/{name}.jpg"))
        for outline in objects:
            mask = np.array(draw([(1, outline)])).ravel("F")
            changes = np.flatnonzero(np.diff(mask, prepend=0, append=0))
            runs = np.stack([changes[::2] + 1, np.diff(changes)[::2]], 1)
            lines.append(f"{name}.jpg,{outline[0]},{' '.join(map(str, runs.ravel()))}")
    Path("train.csv").write_text("\n".join(lines))


def make_via():
    entries = {}
    for name, objects in OBJECTS.items():
        save_photo(Path(f"balloon/train/{name}.jpg"))
        regions = []
        for label, points in objects:
            shape = {
                "name": "polygon",
                "all_points_x": [x for x, _ in points],
                "all_points_y": [y for _, y in points],
            }
            regions.append({"shape_attributes": shape, "region_attributes": {"name": label}})
        # VIA 1 numbers the regions, VIA 2 lists them.
        numbered = {str(number): region for number, region in enumerate(regions)}
        entries[f"{name}.jpg9"] = {
            "filename": f"{name}.jpg",
            "size": 9,
            "regions": numbered if name == "a" else regions,
            "file_attributes": {},
        }
    Path("balloon/train/via_region_data.json").write_text(json.dumps(entries))


def make_labelme():
    for name, objects in OBJECTS.items():
        save_photo(Path(f"labelme/{name}.jpg"))
        shapes = [
            {"label": label, "points": points, "shape_type": "polygon"} for label, points in objects
        ]
        content = {
            "shapes": shapes,
            "imagePath": f"{name}.jpg",
            "imageHeight": HEIGHT,
            "imageWidth": WIDTH,
        }
        Path(f"labelme/{name}.json").write_text(
            json.dumps({"version": "5.0", "imageData": None, **content})
        )


def make_yolo():
    for name, objects in OBJECTS.items():
        save_photo(Path(f"yolo/images/train/{name}.jpg"))
        lines = [
            " ".join(
                map(
                    str,
                    [[*CLASSES].index(label), *(np.array(points) / (WIDTH, HEIGHT)).ravel()],
                )
            )
            for label, points in objects
        ]
        Path("yolo/labels/train").mkdir(parents=True, exist_ok=True)
        Path(f"yolo/labels/train/{name}.txt").write_text("\n".join(lines))
    Path("yolo/data.yaml").write_text("train: images/train\nnames:\n  0: cat\n  1: dog\n")


def make_voc():
    folder = Path("VOC2012")
    for name in ("SegmentationObject", "SegmentationClass", "ImageSets/Segmentation"):
        (folder / name).mkdir(parents=True)
    palette = [
        sum((value >> 3 * bit + part & 1) << 7 - bit for bit in range(3))
        for value in range(256)
        for part in range(3)
    ]
    for name, objects in OBJECTS.items():
        save_photo(folder / f"JPEGImages/{name}.jpg")
        for kind, values in (
            ("Object", [*range(1, 9)]),
            ("Class", [CLASSES[label] for label, _ in objects]),
        ):
            drawn = draw(zip(values, objects, strict=False), outline=255)
            drawn.putpalette(palette)
            drawn.save(folder / f"Segmentation{kind}/{name}.png")
    (folder / "ImageSets/Segmentation/train.txt").write_text("\n".join(OBJECTS))


def make_cvat():
    text = "".join(
        f"<label><name>{label}</name><attributes></attributes></label>" for label in CLASSES
    )
    text = (
        "<meta><task><name>t</name><size>2</size><mode>annotation</mode>"
        f"<labels>{text}</labels></task></meta>"
    )
    for number, (name, objects) in enumerate(OBJECTS.items()):
        save_photo(Path(f"cvat/images/{name}.jpg"))
        text += f'<image id="{number}" name="{name}.jpg" width="{WIDTH}" height="{HEIGHT}">'
        for label, points in objects:
            places = ";".join(f"{x:.2f},{y:.2f}" for x, y in points)
            text += (
                f'<polygon label="{label}" occluded="0" points="{places}" z_order="0"></polygon>'
            )
        text += "</image>"
    Path("cvat/annotations.xml").write_text(
        f"<annotations><version>1.1</version>{text}</annotations>"
    )


# The heading of a recipe gives what makes the export, and the images and the JSON that come out.
MADE = {
    "Masks as PNG files, one colour an object": (
        make_pngs,
        "PennFudanPed/PNGImages",
        "people.json",
    ),
    "Masks as PNG files, one file an object": (
        make_object_files,
        "nuclei/images",
        "nuclei.json",
    ),
    RUNS: (make_run_lengths, "kaggle", "kaggle.json"),
    "VIA": (
        make_via,
        "balloon/train",
        "balloon.json",
    ),
    "LabelMe": (make_labelme, "labelme", "labelme_coco/dataset.json"),
    "YOLO with outlines": (make_yolo, "yolo/images/train", "yolo.json"),
    "Pascal VOC": (make_voc, "voc_coco/images/train", "voc_coco/annotations/instances_train.json"),
    "CVAT's own XML": (
        make_cvat,
        "cvat_coco/images/annotations",
        "cvat_coco/annotations/instances_annotations.json",
    ),
}


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """The recipes run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs/recipes")


def run_recipe(name, *changes):
    """Run a recipe with changes, each the old text and the new one."""
    code = RECIPES[name]
    for change in changes:
        code = code.replace(*change)
    exec(compile(code, name, "exec"), {})


def test_every_recipe_is_tried():
    assert [*RECIPES] == [*MADE]


@pytest.mark.parametrize("name", RECIPES)
def test_the_objects_come_out_where_they_were_drawn(name, workplace):
    for package in re.findall(r"# pip install (\w+)", RECIPES[name]):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"no {package}: make test-formats installs it")
    make, images, annotations = MADE[name]
    make()
    run_recipe(name)
    assert check_dataset(images, annotations).ok
    dataset = CocoFolder(images, annotations)
    result = {
        Path(dataset.coco.file_name(index)).stem: dataset[index][1] for index in range(len(dataset))
    }
    assert result.keys() == OBJECTS.keys()
    for stem, objects in OBJECTS.items():
        target = result[stem]
        assert len(target["masks"]) == len(objects)
        drawn = [np.array(draw([(1, shape)])) for shape in objects]
        unions = [[(mask | shape).sum() for shape in drawn] for mask in target["masks"].numpy()]
        common = [[(mask & shape).sum() for shape in drawn] for mask in target["masks"].numpy()]
        overlap = np.array(common) / unions
        # Tools trace borders in different ways.
        assert overlap.max(1).min() > 0.9
        if len(dataset.class_names) > 1:
            labels = [dataset.class_names[label] for label in target["labels"].tolist()]
            assert labels == [objects[place][0] for place in overlap.argmax(1)]


def write_table(names, lines):
    for name in names:
        save_photo(Path("kaggle", name))
    Path("train.csv").write_text("\n".join(lines))


def read_classes(annotations):
    """Return the classes of each image's objects, by the image's name."""
    coco = json.loads(Path(annotations).read_text())
    names = {category["id"]: category["name"] for category in coco["categories"]}
    classes = {image["file_name"]: [] for image in coco["images"]}
    files = {image["id"]: image["file_name"] for image in coco["images"]}
    for annotation in coco["annotations"]:
        classes[files[annotation["image_id"]]].append(names[annotation["category_id"]])
    return classes


def test_a_table_keeps_its_classes_and_images_without_a_line(workplace):
    lines = ["ImageId,ClassId,EncodedPixels", "a[1].jpg,1,65 3", "a[1].jpg,3,100 5", "b.jpg,4,"]
    write_table(["a[1].jpg", "b.jpg", "c.jpg"], lines)
    run_recipe(RUNS)
    assert read_classes("kaggle.json") == {"a[1].jpg": ["1", "3"], "b.jpg": [], "c.jpg": []}


def test_a_class_behind_the_name_of_an_image_is_a_class(workplace):
    write_table(["a_1.jpg"], ["ImageId_ClassId,EncodedPixels", "a_1.jpg_2,65 3", "a_1.jpg_4,"])
    run_recipe(RUNS, ('"ImageId"', '"ImageId_ClassId"'))
    assert read_classes("kaggle.json") == {"a_1.jpg": ["2"]}


def test_a_table_with_two_columns_of_classes_is_refused(workplace):
    write_table(["a.jpg"], ["ImageId,ClassId,Label,EncodedPixels", "a.jpg,1,cat,65 3"])
    with pytest.raises(ValueError, match="Which of"):
        run_recipe(RUNS)


def test_circles_ellipses_and_boxes_to_check_of_via(workplace):
    save_photo(Path("balloon/train/x.jpg"))
    shapes = [
        ({"name": "circle", "cx": 60, "cy": 60, "r": 20}, {"name": "ball"}),
        (
            {"name": "ellipse", "cx": 150, "cy": 90, "rx": 40, "ry": 10, "theta": np.pi / 2},
            {"type": {"car": True, "dog": False}},
        ),
        (
            {"name": "rect", "x": 8, "y": 120, "width": 30, "height": 20},
            {"type": {"car": True, "dog": True}},
        ),
    ]
    regions = [
        {"shape_attributes": shape, "region_attributes": attributes} for shape, attributes in shapes
    ]
    via = {"x.jpg1": {"filename": "x.jpg", "size": 1, "regions": regions}}
    Path("balloon/train/via_region_data.json").write_text(json.dumps(via))
    run_recipe("VIA")
    assert read_classes("balloon.json") == {"x.jpg": ["ball", "car", "car dog"]}
    target = CocoFolder("balloon/train", "balloon.json")[0][1]
    assert np.allclose(target["boxes"][0], [40, 40, 80, 80], atol=1.5)
    assert np.allclose(target["boxes"][1], [140, 50, 160, 130], atol=1.5)
    areas = target["masks"].sum((1, 2)).tolist()
    assert np.allclose(areas, [np.pi * 400, np.pi * 400, 600], rtol=0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the shards of 60 images in `shards/train` and `shards/val`."""
    folder = tmp_path_factory.mktemp("trainers")
    made = make_dataset(folder / "data", n=60, width=320, height=240, workers=1)
    for split in ("train", "val"):
        shards = folder / "shards" / split
        report = write_shards(made.images, made.annotations, shards=shards, shard_mb=1, workers=1)
        assert report.images == 60
        assert report.shards > 1
    return folder


def read_ours(folder, **options):
    dataset = ShardDataset(folder / "shards/train", **options)
    return [dataset[index] for index in range(len(dataset))]


def run_lines(name, code=None):
    """Run the lines of a trainer as the page has them, or changed ones; return their names."""
    package = {"WebDataset": "webdataset", "RF-DETR": "rfdetr"}[name]
    pytest.importorskip(package, reason=f"no {package}: make test-formats installs it")
    names = {}
    exec(compile(code or TRAINERS[name], name, "exec"), names)
    return names


def read_with_rf_detr(code, *, split="train"):
    """Return what RF-DETR's own reader gives; no model of it is loaded."""
    run_lines("RF-DETR", code)
    from rfdetr.datasets.webdataset.load import WebDatasetDetection

    dataset = WebDatasetDetection("shards", split, None, include_masks=True)
    assert dataset.total_samples == 60
    return [(pil_to_tensor(image), target) for image, target in dataset]


def assert_same(samples, expected, *, first_label=0):
    """Compare images, masks, boxes and labels of all samples, whose order is free."""
    samples = {int(target["image_id"]): (image, target) for image, target in samples}
    assert len(samples) == len(expected) == 60
    objects = 0
    for image, target in expected:
        other_image, other = samples[int(target["image_id"])]
        keep = target["iscrowd"] == 0
        objects += int(keep.sum())
        assert torch.equal(other_image, image)
        assert torch.equal(other["masks"].to(torch.uint8), target["masks"][keep])
        assert torch.equal(other["boxes"], target["boxes"][keep])
        assert torch.equal(other["labels"] + first_label, target["labels"][keep])
    assert objects > 60


def test_a_stock_data_loader_reads_the_same(folder):
    dataset = ShardDataset(folder / "shards/train")
    batches = DataLoader(dataset, batch_size=7, num_workers=2, collate_fn=list)
    assert_same([sample for batch in batches for sample in batch], read_ours(folder))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_webdataset_reads_the_same(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert_same(run_lines("WebDataset")["dataset"], read_ours(folder))
    # It leaves the last tar open.
    gc.collect()


def test_rf_detr_reads_the_same(folder, monkeypatch):
    monkeypatch.chdir(folder)
    code = TRAINERS["RF-DETR"]
    assert_same(read_with_rf_detr(code), read_ours(folder))
    # Ours count from 1, as torchvision's models want it.
    remapped = code.replace('"raw"', '"remap"')
    expected = read_ours(folder, contiguous_labels=True)
    assert_same(read_with_rf_detr(remapped), expected, first_label=1)
    assert_same(read_with_rf_detr(remapped, split="val"), expected, first_label=1)


def test_rf_detr_reads_the_folder_itself(folder):
    run_lines("RF-DETR", "pass")
    from rfdetr.datasets.webdataset.load import WebDatasetDetection

    train = folder / "shards/train"
    dataset = WebDatasetDetection(train, "train", None, include_masks=True)
    names = ShardDataset(train).class_names
    assert {label: name for label, name in enumerate(dataset.class_names) if name} == names
    samples = [(pil_to_tensor(image), target) for image, target in dataset]
    assert_same(samples, read_ours(folder))
