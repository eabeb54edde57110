"""The recipes of docs/FORMATS.md, run as they stand there: `make test-formats` installs the
converters and the trainers they name.
"""

from __future__ import annotations

import gc
import importlib.util
import re
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
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


# Exports as the tools write them: the folder of the photos, and each file with its text.
VIA = {
    "balloon/train/via_region_data.json": """
{"a.jpg9": {"filename": "a.jpg", "size": 9, "file_attributes": {}, "regions": {
  "0": {"shape_attributes": {"name": "polygon",
                             "all_points_x": [20, 120, 112, 24],
                             "all_points_y": [20, 24, 120, 104]},
        "region_attributes": {"name": "cat"}},
  "1": {"shape_attributes": {"name": "polygon",
                             "all_points_x": [160, 240, 200],
                             "all_points_y": [40, 48, 160]},
        "region_attributes": {"name": "dog"}}}},
 "b.jpg9": {"filename": "b.jpg", "size": 9, "file_attributes": {}, "regions": [
  {"shape_attributes": {"name": "polygon",
                        "all_points_x": [40, 200, 192, 120, 48],
                        "all_points_y": [40, 32, 160, 176, 152]},
   "region_attributes": {"name": "dog"}}]}}
"""
}
LABELME = {
    "labelme/a.json": """
{"version": "5.0", "imageData": null, "imagePath": "a.jpg", "imageHeight": 192, "imageWidth": 256,
 "shapes": [
  {"label": "cat", "points": [[20, 20], [120, 24], [112, 120], [24, 104]], "shape_type": "polygon"},
  {"label": "dog", "points": [[160, 40], [240, 48], [200, 160]], "shape_type": "polygon"}]}
""",
    "labelme/b.json": """
{"version": "5.0", "imageData": null, "imagePath": "b.jpg", "imageHeight": 192, "imageWidth": 256,
 "shapes": [
  {"label": "dog", "shape_type": "polygon",
   "points": [[40, 40], [200, 32], [192, 160], [120, 176], [48, 152]]}]}
""",
}
YOLO = {
    "yolo/data.yaml": "train: images/train\nnames:\n  0: cat\n  1: dog\n",
    "yolo/labels/train/a.txt": (
        "0 0.078125 0.104167 0.46875 0.125 0.4375 0.625 0.09375 0.541667\n"
        "1 0.625 0.208333 0.9375 0.25 0.78125 0.833333"
    ),
    "yolo/labels/train/b.txt": (
        "1 0.15625 0.208333 0.78125 0.166667 0.75 0.833333 0.46875 0.916667 0.1875 0.791667"
    ),
}
CVAT = {
    "cvat/annotations.xml": """
<annotations><version>1.1</version>
<meta><task><name>t</name><size>2</size><mode>annotation</mode><labels>
<label><name>cat</name><attributes></attributes></label>
<label><name>dog</name><attributes></attributes></label>
</labels></task></meta>
<image id="0" name="a.jpg" width="256" height="192">
<polygon label="cat" occluded="0" z_order="0"
 points="20.00,20.00;120.00,24.00;112.00,120.00;24.00,104.00"></polygon>
<polygon label="dog" occluded="0" z_order="0"
 points="160.00,40.00;240.00,48.00;200.00,160.00"></polygon>
</image>
<image id="1" name="b.jpg" width="256" height="192">
<polygon label="dog" occluded="0" z_order="0"
 points="40.00,40.00;200.00,32.00;192.00,160.00;120.00,176.00;48.00,152.00"></polygon>
</image>
</annotations>
"""
}


def write_export(photos, files):
    """Return what writes an export: its files, and photos into a folder."""

    def write():
        for name in OBJECTS:
            save_photo(Path(photos, f"{name}.jpg"))
        for name, text in files.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text.lstrip())

    return write


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
        write_export("balloon/train", VIA),
        "balloon/train",
        "balloon.json",
    ),
    "LabelMe": (write_export("labelme", LABELME), "labelme", "labelme_coco/dataset.json"),
    "YOLO with outlines": (
        write_export("yolo/images/train", YOLO),
        "yolo/images/train",
        "yolo.json",
    ),
    "Pascal VOC": (make_voc, "voc_coco/images/train", "voc_coco/annotations/instances_train.json"),
    "CVAT's own XML": (
        write_export("cvat/images", CVAT),
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
    assert {Path(name).stem for name in dataset.coco.names} == OBJECTS.keys()
    for index, name in enumerate(dataset.coco.names):
        objects = OBJECTS[Path(name).stem]
        target = dataset[index][1]
        assert len(target["masks"]) == len(objects)
        drawn = np.array([draw([(1, shape)]) for shape in objects])
        masks = target["masks"].numpy()[:, None]
        overlap = (masks & drawn).sum((2, 3)) / (masks | drawn).sum((2, 3))
        # Tools trace borders in different ways.
        assert overlap.max(1).min() > 0.9
        if len(dataset.class_names) > 1:
            labels = [dataset.class_names[label] for label in target["labels"].tolist()]
            assert labels == [objects[place][0] for place in overlap.argmax(1)]


def read_classes(images, annotations):
    """Return the classes of each image's objects, by the image's name."""
    dataset = CocoFolder(images, annotations)
    classes = {}
    for index, name in enumerate(dataset.coco.names):
        labels = dataset[index][1]["labels"].tolist()
        classes[name] = [dataset.class_names[label] for label in labels]
    return classes


@pytest.mark.parametrize(
    ("column", "lines", "expected"),
    [
        # Images without a line, or without runs, are kept.
        (
            "ImageId",
            ["ImageId,ClassId,EncodedPixels", "a[1].jpg,1,65 3", "a[1].jpg,3,100 5", "b_1.jpg,4,"],
            {"a[1].jpg": ["1", "3"], "b_1.jpg": [], "c.jpg": []},
        ),
        # The class stands behind the name.
        (
            "ImageId_ClassId",
            ["ImageId_ClassId,EncodedPixels", "b_1.jpg_2,65 3", "b_1.jpg_4,"],
            {"a[1].jpg": [], "b_1.jpg": ["2"], "c.jpg": []},
        ),
        ("ImageId", ["ImageId,ClassId,Label,EncodedPixels", "b_1.jpg,1,cat,65 3"], None),
    ],
)
def test_a_table_keeps_its_classes_and_images(workplace, column, lines, expected):
    for name in ("a[1].jpg", "b_1.jpg", "c.jpg"):
        save_photo(Path("kaggle", name))
    Path("train.csv").write_text("\n".join(lines))
    # Two columns of classes are refused.
    with nullcontext() if expected else pytest.raises(ValueError, match="Which of"):
        run_recipe(RUNS, ('"ImageId"', f'"{column}"'))
        assert read_classes("kaggle", "kaggle.json") == expected


SHAPES_OF_VIA = """
{"x.jpg1": {"filename": "x.jpg", "size": 1, "regions": [
  {"shape_attributes": {"name": "circle", "cx": 60, "cy": 60, "r": 20},
   "region_attributes": {"name": "ball"}},
  {"shape_attributes": {"name": "ellipse", "cx": 150, "cy": 90, "rx": 40, "ry": 10,
                        "theta": 1.5707963},
   "region_attributes": {"type": {"car": true, "dog": false}}},
  {"shape_attributes": {"name": "rect", "x": 8, "y": 120, "width": 30, "height": 20},
   "region_attributes": {"type": {"car": true, "dog": true}}}]}}
"""


def test_circles_ellipses_and_boxes_to_check_of_via(workplace):
    save_photo(Path("balloon/train/x.jpg"))
    Path("balloon/train/via_region_data.json").write_text(SHAPES_OF_VIA)
    run_recipe("VIA")
    assert read_classes("balloon/train", "balloon.json") == {"x.jpg": ["ball", "car", "car dog"]}
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
