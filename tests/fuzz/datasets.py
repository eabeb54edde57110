"""Cases of COCO JSON, images and zips: what comes out of them must be what the independent path
reads.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image

from colab_utils.data.archives import unpack_dataset
from colab_utils.data.checks import check_dataset
from colab_utils.data.coco import read_coco
from colab_utils.data.repair import repair_annotations
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.dataset import ShardDataset
from colab_utils.shards.verify import verify_shards
from tests.fuzz import mutate
from tests.fuzz.originals import HEIGHT, WIDTH, read_tree, store, write_tree
from tests.fuzz.pool import Case
from tests.fuzz.truth import Truth, WrongDataError, compare_record, compare_sample


def _begin(case: Case) -> dict[str, Any]:
    """Write the dataset into ``data``; returns its JSON."""
    write_tree(case.folder / "data", case.originals.dataset)
    coco: dict[str, Any] = json.loads(case.originals.dataset["coco.json"])
    return coco


def _judge(case: Case, annotations: bytes) -> None:
    """Give the dataset in ``data``, with this JSON, to all that takes one; a repaired one, too."""
    images = case.folder / "data/images"
    path = case.folder / "data/coco.json"
    repaired = case.folder / "repaired.json"
    again = case.folder / "again.json"
    path.write_bytes(annotations)
    before = read_tree(case.folder / "data")
    _judge_json(case, images, path)
    if case.attempt(repair_annotations, images, path, output=repaired):
        skipped = _judge_json(case, images, repaired)
        if any(reason.startswith("annotation") for reason in skipped):
            raise WrongDataError(f"a repaired annotation is skipped\n{skipped}")
        repair_annotations(images, repaired, output=again)
        if json.loads(again.read_bytes()) != json.loads(repaired.read_bytes()):
            raise WrongDataError("repaired once more, it is another one")
    if read_tree(case.folder / "data") != before:
        raise WrongDataError("the user's files were changed")


def _judge_json(case: Case, images: Path, path: Path) -> list[str]:
    """Check it, read it as loose files and store it as shards; returns why images were skipped."""
    shards = case.folder / f"shards of {path.stem}"
    case.attempt(check_dataset, images, path, deep=True)
    storage = case.rng.choice(["shrink", "keep"])
    report = case.attempt(store, images, path, shards, storage=storage)
    loose = case.attempt(CocoFolder, images, path)
    if report is None and loose is None:
        return []
    truth = Truth(images, path.read_bytes())
    if loose is not None:
        for i, number in enumerate(loose.image_ids.tolist()):
            sample = case.attempt(loose.__getitem__, i)
            if sample is not None:
                compare_sample(*sample, truth(number, loose=True), loose.category_ids)
    if report is None:
        return []
    skipped = [image.reason for image in report.skipped]
    case.refused += skipped
    if report.images + len(skipped) != len(truth.entries):
        raise WrongDataError("images are neither stored nor named as skipped")
    bad = verify_shards(shards).bad
    if bad:
        raise WrongDataError(f"shards just written are bad\n{bad}")
    dataset = ShardDataset(shards)
    for i, number in enumerate(dataset.image_ids.tolist()):
        expected = truth(number)
        if storage == "shrink" and max(expected.pixels.shape) > 800:
            # A changed header has made the image larger than training needs.
            continue
        compare_sample(*dataset[i], expected, dataset.category_ids)
        compare_record(dataset.record(i), expected)
    return skipped


def json_bytes(case: Case) -> None:
    """Change any bytes, or a digit."""
    _begin(case)
    change = case.rng.choice([mutate.change_bytes, mutate.change_digit, mutate.change_digit])
    _judge(case, change(case.rng, case.originals.dataset["coco.json"]))


def json_tree(case: Case) -> None:
    """Replace, lose, repeat or wrap values anywhere."""
    coco = mutate.change_tree(case.rng, _begin(case))
    _judge(case, mutate.dump_json(case.rng, coco))


def json_field(case: Case) -> None:
    """Write one field of one entry as tools do, well or badly."""
    rng = case.rng
    coco = _begin(case)
    section = rng.choice(["images", "annotations", "annotations", "annotations", "categories"])
    entry = rng.choice(coco[section])
    key = rng.choice(sorted(entry))
    value = entry.pop(key)
    odd = mutate.draw_value(rng)
    text = json.loads(json.dumps(value), parse_int=str, parse_float=str)
    if rng.random() < 0.8:
        usual = deepcopy(rng.choice(mutate.FIELDS[key]))
        entry[key] = rng.choice([odd, text, usual, usual, usual])
    elif key == "file_name":
        entry["coco_url"] = f"http://images.cocodataset.org/val2017/{value}"
    _judge(case, mutate.dump_json(rng, coco))


def json_ids(case: Case) -> None:
    """Give images the same id: one image twice, two files of one id, or an export behind another
    that counts anew.
    """
    rng = case.rng
    coco = _begin(case)
    images = coco["images"]
    match rng.randrange(3):
        case 0:
            images.insert(rng.randrange(len(images)), dict(rng.choice(images)))
        case 1:
            rng.choice(images)["id"] = rng.choice(images)["id"]
        case 2:
            for section, key in (("images", "id"), ("annotations", "image_id")):
                for entry in coco[section]:
                    entry[key] = entry[key] % 2 + 1
            for row, entry in enumerate(coco["annotations"]):
                entry["id"] = row % 6
    _judge(case, json.dumps(coco).encode())


def image_kind(
    names: list[str], change: Callable[[Random, bytes], bytes]
) -> Callable[[Case], None]:
    """Return a kind that changes one of these images, and sometimes the sizes in the JSON."""

    def run(case: Case) -> None:
        coco = _begin(case)
        name = case.rng.choice(names)
        coco["images"] = [
            image for image in coco["images"] if image["file_name"] in (name, "3.png")
        ]
        known = [image["id"] for image in coco["images"]]
        coco["annotations"] = [row for row in coco["annotations"] if row["image_id"] in known]
        if case.rng.random() < 0.2:
            for image in coco["images"]:
                image["width"], image["height"] = case.rng.choice([(0, 0), (HEIGHT, WIDTH)])
        path = case.folder / "data/images" / name
        path.write_bytes(change(case.rng, path.read_bytes()))
        _judge(case, json.dumps(coco).encode())

    return run


def image_odd(case: Case) -> None:
    """Put no image at all in the place of one, or one of another mode and format."""
    coco = _begin(case)
    rng = case.rng
    path = case.folder / "data/images" / rng.choice(["0.jpg", "sub/1.png", "2.tif", "3.png"])
    path.unlink()
    match rng.randrange(6):
        case 0:
            path.mkdir()
        case 1:
            path.write_bytes(rng.choice([b"", b"\0", b"<html>"]))
        case _:
            _write_image(path, rng)
    _judge(case, json.dumps(coco).encode())


def _write_image(path: Path, rng: Random) -> None:
    mode = rng.choice(["I;16", "I", "F", "1", "L", "LA", "RGBA", "CMYK", "P", "YCbCr", "HSV"])
    kind = rng.choice(["PNG", "TIFF", "JPEG", "GIF", "WEBP", "BMP"])
    values = np.random.default_rng(rng.randrange(2**20)).integers(
        0,
        60_000,
        (HEIGHT, WIDTH),
    )
    deep = {"I;16": np.uint16, "I": np.int32, "F": np.float32}
    image = Image.fromarray(values.astype(deep.get(mode, np.uint8)))
    if mode not in deep:
        image = image.convert("RGB").convert(mode)
    try:
        image.save(path, kind)
    except (OSError, ValueError):
        # There is no such mode in that format.
        image.convert("L").save(path, "PNG")


def zip_bytes(case: Case) -> None:
    """Change any bytes of a zip."""
    _judge_zip(case, mutate.change_bytes(case.rng, case.originals.export))


def zip_members(case: Case) -> None:
    """Change its members: names, kinds, order, content."""
    content = case.originals.export
    for _ in range(case.rng.randint(1, 2)):
        edit = case.rng.choice([mutate.change_bytes, _edit_export])
        content = mutate.change_zip(case.rng, content, edit)
    _judge_zip(case, content)


def _edit_export(rng: Random, content: bytes) -> bytes:
    try:
        coco = json.loads(content)
    except ValueError:
        return rng.choice([b"", content[:100], b"\0"])
    names = [*mutate.TEXTS, "sub/", "images/0.jpg", "../coco.json", ""]
    rng.choice(coco["images"])["file_name"] = rng.choice(names)
    return mutate.dump_json(rng, coco)


def _judge_zip(case: Case, content: bytes) -> None:
    """Compare what is unpacked with what zipfile reads; a second call gives the same."""
    path = case.folder / "export.zip"
    folder = case.folder / "datasets"
    path.write_bytes(content)
    unpacked = case.attempt(unpack_dataset, str(path), folder)
    if unpacked is None:
        return
    if case.attempt(unpack_dataset, str(path), folder) != unpacked:
        raise WrongDataError("unpacked once more, it lies elsewhere")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        contents = [archive.read(info) for info in archive.infolist()]
        for file in read_tree(next(folder.glob("*"))).values():
            if file not in contents:
                raise WrongDataError("an unpacked file differs from the zip's")
    case.attempt(read_coco, unpacked[1])
    if path.read_bytes() != content:
        raise WrongDataError("the user's zip was changed")
