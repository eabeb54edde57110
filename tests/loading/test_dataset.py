"""ShardDataset and CocoFolder against torchvision's own path on real images; and what goes wrong
with shards.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import shutil
import subprocess
import warnings
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools.coco import COCO
from torchvision import tv_tensors
from torchvision.datasets import CocoDetection
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import pil_to_tensor

from colab_utils.data.coco import read_coco
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning, UnavailableError
from colab_utils.files import open_store
from colab_utils.loading import dataset as dataset_module
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import make_loader
from colab_utils.loading.masks import unpack_masks
from colab_utils.shards.arrays import (
    IMAGE_TABLES,
    OBJECT_TABLES,
    describe_shard,
    dump_arrays,
    load_arrays,
)
from colab_utils.shards.copy import copy_shards
from colab_utils.shards.index import read_index, write_index
from colab_utils.shards.records import read_image, try_sample
from colab_utils.shards.verify import verify_shards
from colab_utils.shards.write import write_shards
from tests.coco_files import CocoFiles
from tests.pictures import make_exif

from .test_loader import ROOT, STRICT

KEYS = {
    "boxes": torch.float32,
    "labels": torch.int64,
    "masks": torch.uint8,
    "area": torch.float32,
    "iscrowd": torch.int64,
}


def convert_as_the_references(coco, image, annotations):
    """What ``ConvertCocoPolysToMask`` in torchvision's ``references/detection/coco_utils.py``
    does.
    """
    width, height = image.size
    annotations = [obj for obj in annotations if obj["iscrowd"] == 0]
    boxes = torch.tensor([obj["bbox"] for obj in annotations], dtype=torch.float32).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    boxes[:, 0::2].clamp_(min=0, max=width)
    boxes[:, 1::2].clamp_(min=0, max=height)
    masks = torch.zeros((len(annotations), height, width), dtype=torch.uint8)
    for mask, obj in zip(masks, annotations, strict=True):
        mask[:] = torch.from_numpy(coco.annToMask(obj))
    keep = (boxes[:, 3] > boxes[:, 1]) & (boxes[:, 2] > boxes[:, 0])
    target = {"boxes": boxes[keep], "masks": masks[keep]}
    for key, name in (("labels", "category_id"), ("area", "area"), ("iscrowd", "iscrowd")):
        target[key] = torch.tensor([obj[name] for obj in annotations], dtype=KEYS[key])[keep]
    return pil_to_tensor(image), target


@pytest.fixture(scope="session", params=["train2017", "val2017"])
def real(request, coco_mini, coco_mini_val, tmp_path_factory):
    """Real images, and the shards of them."""
    source = {"train2017": coco_mini, "val2017": coco_mini_val}[request.param]
    shards = tmp_path_factory.mktemp(request.param) / "shards"
    write_shards(source.images, source.annotations, shards=shards, shard_mb=4)
    return source, shards


# The loader of pycocotools leaves the JSON file open.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_both_datasets_equal_torchvisions_own_path(real):
    source, shards = real
    reference = CocoDetection(str(source.images), str(source.annotations))
    crowds = sum(annotation["iscrowd"] for annotation in reference.coco.anns.values())
    assert crowds > 0 or "train" in str(source.images)
    for dataset in (ShardDataset(shards), CocoFolder(source.images, source.annotations)):
        assert sorted(dataset.image_ids.tolist()) == reference.ids
        for image, target in dataset:
            place = reference.ids.index(target["image_id"])
            pixels, expected = convert_as_the_references(reference.coco, *reference[place])
            assert image.dtype == torch.uint8
            assert torch.equal(image, pixels)
            assert {key: target[key].dtype for key in KEYS} == KEYS
            torch.testing.assert_close(target["boxes"], expected["boxes"], rtol=0, atol=1e-3)
            torch.testing.assert_close(target["area"], expected["area"], rtol=1e-6, atol=0)
            for key in ("labels", "iscrowd", "masks"):
                assert torch.equal(target[key], expected[key])


@pytest.fixture
def shards(tiny_shards, tmp_path):
    """Shards that a test may spoil."""
    return Path(shutil.copytree(tiny_shards, tmp_path / "shards"))


def assert_equal_samples(first, other):
    assert torch.equal(first[0], other[0])
    assert first[1].keys() == other[1].keys()
    for key in KEYS:
        assert torch.equal(first[1][key], other[1][key]), key
    assert first[1]["image_id"] == other[1]["image_id"]


def test_the_documented_attributes_are_there(tiny_shards, loose):
    dataset = ShardDataset(tiny_shards)
    assert str(dataset).startswith("12 images in ")
    assert dataset.image_ids.dtype == np.int64
    assert dataset.fingerprint == loose.fingerprint
    assert dataset.counts.tolist() == [len(target["labels"]) for _, target in dataset]
    assert len(np.unique(dataset.shard_of)) == len(dataset.index.shards) >= 3
    for i, (image, target) in enumerate(dataset):
        assert tuple(image.shape[1:]) == (128, 160)
        assert torch.equal(dataset.decode(dataset.read(i)), image)
        masks = unpack_masks(dataset.read_masks(i), 128, 160)
        assert np.array_equal(masks, target["masks"])
        assert dataset.record(i)["image_id"] == target["image_id"] == dataset.image_ids[i]


@pytest.mark.parametrize("kind", ["shards", "folder"])
def test_indices_are_those_of_a_list(tiny_shards, loose, kind):
    dataset = ShardDataset(tiny_shards) if kind == "shards" else loose
    for index, same in ((-1, 11), (-12, 0), (np.int64(3), 3), (np.uint8(3), 3)):
        assert_equal_samples(dataset[index], dataset[same])
    assert dataset.read(-2) == dataset.read(10)
    for outside in (12, -13, 10**9):
        for method in (dataset.__getitem__, dataset.read, dataset.read_masks):
            with pytest.raises(IndexError):
                method(outside)
    for wrong in (1.0, "1"):
        with pytest.raises(TypeError):
            dataset[wrong]
    # The old protocol of iteration ends at IndexError.
    assert len(list(dataset)) == 12


PROCESS_SCRIPT = """
import multiprocessing, sys
from colab_utils.loading.dataset import ShardDataset

def read(dataset, queue):
    image, target = dataset[5]
    queue.put((int(image.sum()), int(target["masks"].sum()), target["boxes"].tolist()))

if __name__ == "__main__":
    dataset = ShardDataset(sys.argv[1])
    image, target = dataset[5]  # a file is open before the process starts
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=read, args=(dataset, queue))
        process.start()
        # Before the fork, this would start threads of torch, for which the process would wait.
        sums = int(image.sum()), int(target["masks"].sum())
        assert queue.get(timeout=100) == (*sums, target["boxes"].tolist())
        process.join()
        assert process.exitcode == 0
"""


def test_other_processes_read_the_same_and_end_quietly(tiny_shards, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROCESS_SCRIPT)
    done = subprocess.run(
        [*STRICT, script, tiny_shards],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def count_open(folder):
    """Count this process's open files in a folder. What other tests left may close at any time."""
    gc.collect()
    paths = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum(path.startswith(f"{folder.resolve()}/") for path in paths)


def test_files_are_closed_with_the_dataset_and_few_are_open_before(tiny_shards, monkeypatch):
    monkeypatch.setattr(dataset_module, "OPEN_FILES", 2)
    dataset = ShardDataset(tiny_shards)
    # A thousand shards must not need a thousand open files.
    assert count_open(tiny_shards) == 0
    samples = list(dataset)
    assert count_open(tiny_shards) == 2
    for sample, again in zip(samples, dataset, strict=True):
        assert_equal_samples(again, sample)
    del dataset
    assert count_open(tiny_shards) == 0


@pytest.fixture
def open_all():
    """Open files until this process may open no more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []

    def open_all_files():
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, limits[1]))
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))

    yield open_all_files
    for descriptor in held:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_too_many_open_files_get_their_own_cure(tiny_shards, open_all):
    open_all()
    with pytest.raises(ColabUtilsError, match=r"Too many open files\. Raise the limit"):
        ShardDataset(tiny_shards)


def test_an_image_is_not_bad_because_too_many_files_are_open(coco_mini, open_all):
    coco = read_coco(coco_mini.annotations)
    recipe = {"storage": "keep", "min_size": 800, "max_size": 1333}
    open_all()
    with pytest.raises(UnavailableError, match="Raise the limit"):
        try_sample(partial(read_image, open_store(coco_mini.images), coco, 0), coco, 0, recipe)


@pytest.mark.parametrize(
    ("categories", "contiguous", "labels"),
    [
        # Ids from 1 on stay as they are.
        (
            [3, 9, 90],
            False,
            {3: 3, 9: 9, 90: 90},
        ),
        (
            [3, 9, 90],
            True,
            {1: 3, 2: 9, 3: 90},
        ),
        # The label 0 is that of the background. Categories may not be in order in the file.
        (
            [7, 0],
            False,
            {1: 0, 2: 7},
        ),
    ],
)
def test_labels_name_their_category_ids(tmp_path, categories, contiguous, labels):
    data = CocoFiles(tmp_path)
    data.coco["categories"] = [{"id": number, "name": f"c{number}"} for number in categories]
    data.add_image(Image.new("RGB", (32, 24)), "0.png")
    for number in categories:
        data.add_object(1, [2, 3, 8, 8], category_id=number)
    data.write()
    for dataset in (
        ShardDataset(data.shards, contiguous_labels=contiguous),
        data.open(contiguous_labels=contiguous),
    ):
        assert dataset.category_ids == labels
        assert dataset.class_names == {label: f"c{number}" for label, number in labels.items()}
        assert dataset.num_classes == max(labels) + 1
        # The image has an object of each category.
        assert sorted(dataset[0][1]["labels"].tolist()) == sorted(labels)
        assert 0 not in labels
        assert pickle.loads(pickle.dumps(dataset)).category_ids == labels


def test_missing_or_damaged_arrays_are_made_again_from_the_tar(shards, tiny_shards):
    missing, short, strange = sorted(shards.glob("*.arrays"))[:3]
    missing.unlink()
    short.write_bytes(short.read_bytes()[:-5])
    # This file holds something else.
    strange.write_bytes(b"x" * strange.stat().st_size)
    with pytest.warns(ColabUtilsWarning, match="made again") as caught:
        dataset = ShardDataset(shards)
    assert sum(issubclass(warning.category, ColabUtilsWarning) for warning in caught) == 3
    for again in (dataset, pickle.loads(pickle.dumps(dataset))):
        for sample, expected in zip(again, ShardDataset(tiny_shards), strict=True):
            assert_equal_samples(sample, expected)


@pytest.mark.parametrize("name", [*IMAGE_TABLES, *OBJECT_TABLES])
def test_arrays_with_tables_of_another_length_are_made_again(shards, tiny_shards, name):
    """Their checksums are right: somebody else wrote them, or another version did."""
    index = read_index(shards)
    shard = index.shards[0]
    path = shards / shard.arrays_name
    head = asdict(index) | asdict(shard)
    arrays = load_arrays(open_store(shards), shard)
    bits = np.frombuffer(path.read_bytes()[arrays["bits"] :], np.uint8)
    table = arrays[name]
    for change in (table[:0], np.concatenate([table, table])):
        content = dump_arrays(head, arrays | {"bits": bits, name: change})
        path.write_bytes(content)
        entries = describe_shard(content).shards
        write_index(shards, replace(index, shards=entries + index.shards[1:]))
        with pytest.warns(ColabUtilsWarning, match="made again"):
            assert_equal_samples(ShardDataset(shards)[0], ShardDataset(tiny_shards)[0])


@pytest.fixture
def twins(tmp_path):
    """Two folders of shards of the same sizes, whose images and masks differ: ids are 1 to 6 and 7
    to 12.
    """
    folders = []
    for first in (1, 7):
        data = CocoFiles(tmp_path / str(first))
        for i in range(first, first + 6):
            picture = Image.new("RGB", (48, 32), (20 * i, 5, 250 - 20 * i))
            data.add_image(picture, f"{i:02d}.png", compress_level=0)["id"] = i
            # All these numbers have two digits, so that the records have one size.
            data.add_object(i, [10 + i, 11, 12, 10])
        data.write(storage="keep", shard_mb=0.02)
        folders.append(data.shards)
    return folders


def swap(folder, first, other):
    (folder / first).rename(folder / "kept")
    (folder / other).rename(folder / first)
    (folder / "kept").rename(folder / other)


def flip_bit(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def take(*names):
    """Put files of the other folder there."""
    return lambda folder, other: [shutil.copy(other / name, folder / name) for name in names]


ONE = ["shard-000000.tar", "shard-000000.arrays"]
TWO = ["shard-000001.tar", "shard-000001.arrays"]


@pytest.mark.parametrize(
    "mix",
    [
        # A shard comes from another folder.
        take(*ONE),
        # The tar and its arrays do not belong together.
        take(ONE[0]),
        take(ONE[1]),
        lambda folder, _: [swap(folder, *names) for names in zip(ONE, TWO, strict=True)],
        lambda folder, _: swap(folder, ONE[0], TWO[0]),
        lambda folder, _: swap(folder, ONE[1], TWO[1]),
        # An old index lies beside new shards.
        take("index.json"),
    ],
)
def test_files_that_do_not_belong_together_are_refused_by_all_alike(twins, tmp_path, mix):
    folder, other = twins
    whole = ShardDataset(folder)
    truth = [(whole[i], whole.record(i)) for i in range(6)]
    mix(folder, other)
    assert verify_shards(folder).bad
    with pytest.raises(ColabUtilsError, match="its checksum was wrong twice"):
        copy_shards(folder, tmp_path / "ssd")
    with warnings.catch_warnings(), suppress(ColabUtilsError):
        warnings.simplefilter("ignore", ColabUtilsWarning)
        # Nothing is trained on where opening is refused.
        dataset = ShardDataset(folder)
        for i, (sample, record) in enumerate(truth):
            with suppress(ColabUtilsError):
                assert_equal_samples(dataset[i], sample)
            with suppress(ColabUtilsError):
                assert dataset.record(i) == record


def test_a_changed_digit_of_a_record_is_refused(shards):
    whole = ShardDataset(shards)
    path = whole.find_path(3)
    start, length = whole._tables["record_spans"][3].tolist()
    place = path.read_bytes().index(b'"area":', start) + 7
    assert place < start + length
    flip_bit(path, place)
    dataset = ShardDataset(shards)
    # The image and its arrays are as they were.
    assert_equal_samples(dataset[3], whole[3])
    message = rf"image {dataset.image_ids[3]} is damaged \(its bytes do not match"
    for read in (lambda: dataset.record(3), lambda: dataset.list_annotations(3), dataset.to_coco):
        with pytest.raises(ColabUtilsError, match=message):
            read()


@pytest.mark.parametrize("file", ["tar", "arrays"])
def test_a_shard_cut_short_after_it_was_opened_is_named(shards, file):
    dataset = ShardDataset(shards)
    path = dataset.find_path(11).with_suffix(f".{file}")
    os.truncate(path, 600)
    with pytest.raises(ColabUtilsError, match="cut short") as error:
        dataset[11]
    assert path.name in str(error.value)


def test_an_index_of_no_shards_is_refused(shards):
    write_index(shards, replace(read_index(shards), shards=()))
    with pytest.raises(ColabUtilsError, match="Run preprocess again"):
        ShardDataset(shards)


def test_a_folder_that_vanishes_is_told(shards):
    dataset = ShardDataset(shards)
    shutil.rmtree(shards)
    for method in (dataset.__getitem__, dataset.record, dataset.read):
        with pytest.raises(ColabUtilsError, match="No such file"):
            method(0)


def test_an_annotation_whose_mask_cannot_be_drawn_is_named(tmp_path):
    data = CocoFiles(tmp_path)
    data.add_image(Image.new("RGB", (32, 24)), "0.png")
    data.add_object(1, [2, 3, 8, 8], id=77, segmentation=[[1, 2]])
    dataset = data.open()
    for read in (dataset.__getitem__, dataset.read_masks):
        with pytest.raises(
            ColabUtilsError, match=r"^annotation 77: expected polygons .*Run check on the dataset"
        ):
            read(0)


def test_a_faulty_image_of_a_folder_is_named(tiny_dataset, tmp_path):
    images = Path(shutil.copytree(tiny_dataset.images, tmp_path / "images"))
    dataset = CocoFolder(images, tiny_dataset.annotations)
    path = images / dataset.coco.names[3]
    # The file was cut short, is empty, begins as a PNG does and is none, or is gone.
    for content in (path.read_bytes()[:200], b"", b"\x89PNG\r\n\x1a\nxxxxyyyyzzzzwwww", None):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ColabUtilsError, match=rf"image.*{path.name}|{path.name}.*image"):
            dataset[3]


@pytest.mark.parametrize("part", ["image", "masks"])
def test_a_flipped_bit_is_never_fed_to_the_model(twins, part):
    """In the middle of an image or a mask it decodes to something, and nothing but a checksum
    tells.
    """
    folder, _ = twins
    whole = ShardDataset(folder)
    path = whole.find_path(5)
    place = int(whole._tables["image_spans"][5].sum()) - 200
    if part == "masks":
        path = path.with_suffix(".arrays")
        place = path.read_bytes().rindex(whole.read_masks(5).bits.tobytes()) + 3
    flip_bit(path, place)
    dataset = ShardDataset(folder)
    message = rf"image {dataset.image_ids[5]} is damaged \(its bytes do not match"
    with pytest.raises(ColabUtilsError, match=message):
        dataset[5]
    with pytest.raises(ColabUtilsError, match=message):
        list(make_loader(dataset, batch_size=4, workers=0))
    with pytest.warns(ColabUtilsWarning, match=message):
        assert len(list(make_loader(dataset, batch_size=1, workers=0, max_bad=1))) == 5


@pytest.mark.parametrize("kind", ["shards", "loose files"])
def test_one_wrong_read_is_no_damage(kind, twins, tiny_dataset, monkeypatch):
    seen = set()

    def spoil(data, *key):
        if key not in seen:
            seen.add(key)
            data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        return data

    def fill(dataset, data, name, start):
        real_fill(dataset, data, name, start)
        spoil(data, name, start)

    def load(store, shard):
        if shard not in seen:
            seen.add(shard)
            raise ColabUtilsError("a wrong read")
        return real_load(store, shard)

    real_fill = ShardDataset._fill
    real_load = load_arrays
    real_read = CocoFolder._read_slowly
    monkeypatch.setattr(ShardDataset, "_fill", fill)
    monkeypatch.setattr("colab_utils.loading.dataset.load_arrays", load)
    monkeypatch.setattr(
        CocoFolder,
        "_read_slowly",
        lambda dataset, index: bytes(spoil(bytearray(real_read(dataset, index)), index)),
    )
    if kind == "shards":
        dataset = ShardDataset(twins[0])
    else:
        dataset = CocoFolder(tiny_dataset.images, tiny_dataset.annotations)
    samples = [*make_loader(dataset, batch_size=1, workers=0)]
    assert len(samples) == len(dataset)
    assert len(seen) >= len(dataset)


def list_annotations(entries):
    return sorted(
        (entry["image_id"], entry["category_id"], entry["iscrowd"], round(entry["area"], 3))
        for entry in entries
    )


def test_another_evaluator_sees_crowds_and_polygons_as_in_the_file(real, capsys):
    source, shards = real
    raw = json.loads(Path(source.annotations).read_text())
    for dataset in (ShardDataset(shards), CocoFolder(source.images, source.annotations)):
        coco = dataset.to_coco()
        assert isinstance(coco, COCO)
        assert sorted(coco.getImgIds()) == sorted(image["id"] for image in raw["images"])
        names = {category["id"]: category["name"] for category in raw["categories"]}
        assert {key: category["name"] for key, category in coco.cats.items()} == names
        assert sorted(coco.getAnnIds()) == list(range(1, len(raw["annotations"]) + 1))
        entries = coco.loadAnns(coco.getAnnIds())
        assert list_annotations(entries) == list_annotations(raw["annotations"])
        assert coco.annToMask(entries[0]).any()
    # Copies of the view say nothing.
    assert capsys.readouterr().out == ""


def test_loose_images_are_those_of_the_annotations(tmp_path):
    """Their size, the way up that it asks for, and all of their objects: as where shards are
    written.
    """
    data = CocoFiles(tmp_path)
    upright = np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8)
    # A PNG keeps each pixel as it is.
    turned = Image.fromarray(np.rot90(upright))
    data.add_image(turned, "turned.png", exif=make_exif(6)).update(width=32, height=24)
    data.add_image(Image.new("RGB", (32, 24)), "wide.png")["width"] += 1
    data.add_object(1, [2, 3, 8, 8])
    dataset = data.open()
    image, target = dataset[0]
    assert np.array_equal(image.permute(1, 2, 0), upright)
    assert target["masks"].shape == (1, 24, 32)
    with pytest.raises(ColabUtilsError, match=r"wide\.png: the annotations say"):
        dataset[1]


def test_an_image_that_another_version_of_a_decoder_refuses_is_named(tiny_shards, monkeypatch):
    refuse = Mock(side_effect=ColabUtilsError("not a complete image: no such coding"))
    monkeypatch.setattr(dataset_module, "decode_pixels", refuse)
    dataset = ShardDataset(tiny_shards)
    message = rf"image {dataset.image_ids[4]} is damaged \(not a complete image"
    with pytest.raises(ColabUtilsError, match=message):
        dataset[4]


@pytest.mark.parametrize("kind", ["shards", "files"])
def test_own_transforms_are_applied_to_each_sample(kind, tiny_shards, tiny_dataset):
    source = {
        "shards": partial(ShardDataset, tiny_shards),
        "files": partial(CocoFolder, tiny_dataset.images, tiny_dataset.annotations),
    }[kind]
    seen = set()

    def spy(image, target):
        seen.add((type(image), type(target["boxes"]), type(target["masks"])))
        return image, target

    dataset = source(transforms=v2.Compose([spy, v2.RandomHorizontalFlip(1)]))
    image, target = dataset[3]
    original, objects = source()[3]
    assert dataset.get_height_and_width(3) == tuple(original.shape[1:])
    # A loader applies them, too.
    loader = make_loader(dataset, batch_size=1, sampler=[3], workers=0)
    assert torch.equal(next(iter(loader))[0][0], original.flip(-1) / 255)
    assert seen == {(tv_tensors.Image, tv_tensors.BoundingBoxes, tv_tensors.Mask)}
    assert torch.equal(image, original.flip(-1))
    assert torch.equal(target["boxes"][:, 0], 160 - objects["boxes"][:, 2])
    assert type(image) is type(target["boxes"]) is torch.Tensor
