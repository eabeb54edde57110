"""Cases of COCO JSON, images and zips: what comes out of them must be what the independent path
reads.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zipfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image

from colab_utils.data.checks import check_dataset
from colab_utils.data.coco import read_coco
from colab_utils.data.repair import repair_annotations
from colab_utils.data.sources import unpack_dataset
from colab_utils.loading.dataset import CocoFolder, ShardDataset
from colab_utils.shards.verify import verify_shards
from tests.fuzz import mutate
from tests.fuzz.originals import HEIGHT, WIDTH, read_tree, store, write_tree
from tests.fuzz.pool import REFUSED, Case
from tests.fuzz.truth import Truth, WrongDataError, compare_record, compare_sample, shrink

SECRET = "../../../outside/secret.png"  # from the image folder


def _begin(case: Case) -> dict[str, Any]:
    """Write the dataset into ``data``; returns its JSON."""
    write_tree(case.folder / "data", case.originals.dataset)
    coco: dict[str, Any] = json.loads(case.originals.dataset["coco.json"])
    return coco


def _judge(case: Case, annotations: bytes) -> None:
    """All that takes the dataset in ``data``, with this JSON; sometimes a repaired one, too."""
    images = case.folder / "data/images"
    path = case.folder / "data/coco.json"
    path.write_bytes(annotations)
    before = read_tree(case.folder / "data")
    _judge_json(case, images, path)
    repaired = case.folder / "repaired.json"
    again = case.folder / "again.json"
    if case.rng.random() < 0.2 and case.attempt(repair_annotations, images, path, output=repaired):
        skipped = _judge_json(case, images, repaired)
        if left := [reason for reason in skipped if reason.startswith("annotation")]:
            raise WrongDataError(f"a repaired annotation is skipped\n{left}")
        repair_annotations(images, repaired, output=again)
        if json.loads(again.read_bytes()) != json.loads(repaired.read_bytes()):
            raise WrongDataError("repaired once more, it is another one")
    if read_tree(case.folder / "data") != before:
        raise WrongDataError("the user's files were changed")


def _judge_json(case: Case, images: Path, path: Path) -> list[str]:
    """Check it, read it as loose files and store it as shards; returns why images were skipped."""
    shards = case.folder / f"shards of {path.stem}"
    case.attempt(check_dataset, images, path, deep=case.rng.random() < 0.3)
    storage = case.rng.choice(["shrink", "keep", "pixels"])
    small = (
        {"min_size": 12, "max_size": 20} if storage != "keep" and case.rng.random() < 0.2 else {}
    )
    report = case.attempt(store, images, path, shards, storage=storage, **small)
    loose = case.attempt(CocoFolder, images, path)
    if report is not REFUSED or loose is not REFUSED:
        truth = Truth(images, path.read_bytes())
    if report is not REFUSED:
        case.refused += [one.reason for one in report.skipped]
        if report.images + len(report.skipped) != len(truth.entries):
            raise WrongDataError("images are neither stored nor named as skipped")
        if bad := verify_shards(shards).bad:
            raise WrongDataError(f"shards just written are bad\n{bad}")
        dataset = ShardDataset(shards)
        for i, number in enumerate(dataset.image_ids.tolist()):
            expected = shrink(truth(number), **small) if small else truth(number)
            exact = not small or storage == "pixels"  # a JPEG that is written anew differs a little
            compare_sample(*dataset[i], expected, dataset.category_ids, pixels=exact)
            compare_record(dataset.record(i), expected)
    if loose is not REFUSED:
        for i, number in enumerate(loose.image_ids.tolist()):
            if (sample := case.attempt(loose.__getitem__, i)) is not REFUSED:
                compare_sample(*sample, truth(number, loose=True), loose.category_ids)
    return [] if report is REFUSED else [one.reason for one in report.skipped]


def json_bytes(case: Case) -> None:
    """Any bytes, or another digit."""
    _begin(case)
    change = case.rng.choice([mutate.change_bytes, mutate.change_digit, mutate.change_digit])
    _judge(case, change(case.rng, case.originals.dataset["coco.json"]))


def json_tree(case: Case) -> None:
    """Values anywhere: replaced, lost, repeated, wrapped."""
    _judge(case, mutate.dump_json(case.rng, mutate.change_tree(case.rng, _begin(case))))


def json_field(case: Case) -> None:
    """One field of one entry, as tools write it well or badly."""
    rng = case.rng
    coco = _begin(case)
    section = rng.choice(["images", "annotations", "annotations", "annotations", "categories"])
    entry = rng.choice(coco[section])
    key = rng.choice(sorted(entry))
    value = entry.pop(key)
    choices = [
        mutate.draw_value(rng),
        json.loads(json.dumps(value), parse_int=str, parse_float=str),
    ]
    if rng.random() < 0.8:
        entry[key] = rng.choice([*choices, *[deepcopy(rng.choice(mutate.FIELDS[key]))] * 3])
    elif key == "file_name":
        entry["coco_url"] = f"http://images.cocodataset.org/val2017/{value}"
    _judge(case, mutate.dump_json(rng, coco))


def json_odd(case: Case) -> None:
    """Change sizes, names or RLE of some entries to what broken exports hold, or repeat entries or
    a section.
    """
    rng = case.rng
    coco = _begin(case)
    added = ""
    match rng.randrange(5):
        case 0:
            _enlarge_image(rng, coco)
        case 1:
            coco["annotations"] = [
                {**entry, "id": row} for row, entry in enumerate(coco["annotations"] * 50)
            ]
        case 2:
            names = ["link.png", "folder", SECRET, f"sub/../{SECRET}", "/dev/zero"]
            coco["images"][0]["file_name"] = rng.choice(names)
            (case.folder / "data/images/folder").mkdir()
            os.symlink(
                rng.choice([SECRET, "/dev/zero", "0.jpg", "link.png"]),
                case.folder / "data/images/link.png",
            )
        case 3:
            added = (
                "," + json.dumps({rng.choice(list(coco)): coco[rng.choice(list(coco))][:1]})[1:-1]
            )
        case 4:
            for entry in coco["annotations"]:
                counts = rng.choice(["0" * 800, "_" * 50, "oooo0" * 9, "Pm8", ""])
                entry["segmentation"] = {"size": [HEIGHT, WIDTH], "counts": counts}
    _judge(case, f"{json.dumps(coco)[:-1]}{added}}}".encode())


def _enlarge_image(rng: Random, coco: dict[str, Any]) -> None:
    """Give an image, whose file may be missing, a size that no image has, and RLE of that size."""
    side = rng.choice([13_000, 30_000, 100_000, 2**31 - 1, 2**40])
    name = rng.choice(["0.jpg", "missing.jpg"])
    coco["images"][0].update(width=side, height=side, file_name=name)
    runs = rng.choice(
        [[0, 0, 10, side**2 - 10], [side**2], [0, side**2], [side, 0, 0, side**2 - side]]
    )
    entry = coco["annotations"][0]
    entry["segmentation"] = {"size": [side, side], "counts": runs}
    coco["annotations"] = [entry, *coco["annotations"][3:]]


def json_ids(case: Case) -> None:
    """Ids that images share: one twice, two files of one id, an export behind another that counts
    anew.
    """
    rng = case.rng
    coco = _begin(case)
    images = coco["images"]
    rows = coco["annotations"]
    if rng.random() < 0.3:
        images.insert(rng.randrange(len(images)), dict(rng.choice(images)))
    match rng.randrange(3):
        case 0:
            rng.choice(images)["id"] = rng.choice(images)["id"]
        case 1:
            numbers = {}
            behind = rng.randrange(1, len(images))
            for place, image in enumerate(images):
                numbers[image["id"]] = place % behind + 1
                image["id"] = numbers[image["id"]]
            for row, one in enumerate(rows):
                one["image_id"] = numbers.get(one["image_id"], 1)
                one["id"] = row % max(1, len(rows) // 2) + 1
    _judge(case, json.dumps(coco).encode())


def image_kind(
    names: list[str], change: Callable[[Random, bytes], bytes]
) -> Callable[[Case], None]:
    """A kind that changes one of these images, and sometimes the sizes that the JSON gives."""

    def run(case: Case) -> None:
        coco = _begin(case)
        name = case.rng.choice(names)
        coco["images"] = [
            image for image in coco["images"] if image["file_name"] in (name, "3.png")
        ]
        known = [image["id"] for image in coco["images"]]
        coco["annotations"] = [one for one in coco["annotations"] if one["image_id"] in known]
        for image in coco["images"] if case.rng.random() < 0.2 else ():
            image["width"], image["height"] = case.rng.choice([(0, 0), (HEIGHT, WIDTH)])
        path = case.folder / "data/images" / name
        path.write_bytes(change(case.rng, path.read_bytes()))
        _judge(case, json.dumps(coco).encode())

    return run


def image_odd(case: Case) -> None:
    """No image at all in its place, or one of another mode and format."""
    coco = _begin(case)
    name = case.rng.choice(["0.jpg", "sub/1.png", "2.tif", "3.png"])
    rng = case.rng
    path = case.folder / "data/images" / name
    content = path.read_bytes()
    path.unlink()
    match rng.randrange(10):
        case 0:
            path.mkdir()
        case 1:
            os.symlink(f"{'../' * name.count('/')}{SECRET}", path)
        case 2:
            os.mkfifo(path)
        case 3:
            path.touch()
            os.truncate(path, 30 * 2**30)  # 30 GB of nothing
        case 4 | 5:
            pointer = b"version https://git-lfs.github.com/spec/v1\n"
            path.write_bytes(rng.choice([b"", b"\0", b"<html>", pointer, gzip.compress(content)]))
        case _:
            mode = rng.choice(
                ["I;16", "I", "F", "1", "L", "LA", "RGBA", "CMYK", "P", "YCbCr", "LAB", "HSV"]
            )
            _write_image(
                path,
                mode,
                rng.choice(["PNG", "TIFF", "JPEG", "GIF", "WEBP", "BMP"]),
                rng.randrange(2**20),
            )
    _judge(case, json.dumps(coco).encode())


def _write_image(path: Path, mode: str, kind: str, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 60_000, (HEIGHT, WIDTH))
    deep = {"I;16": np.uint16, "I": np.int32, "F": np.float32}
    image = Image.fromarray(values.astype(deep.get(mode, np.uint8)))
    try:
        (image if mode in deep else image.convert("RGB").convert(mode)).save(path, kind)
    except (OSError, ValueError):  # no such mode in that format
        image.convert("L").save(path, "PNG")


def zip_bytes(case: Case) -> None:
    """Any bytes of a zip."""
    _judge_zip(case, mutate.change_bytes(case.rng, case.originals.export))


def zip_members(case: Case) -> None:
    """Its members: names, kinds, order, content."""
    content = case.originals.export
    for _ in range(case.rng.randint(1, 2)):
        content = mutate.change_zip(
            case.rng, content, case.rng.choice([mutate.change_member, _edit_export])
        )
    _judge_zip(case, content)


def _edit_export(rng: Random, name: str, content: bytes) -> bytes:
    try:
        coco = json.loads(content)
    except ValueError:
        return rng.choice([b"", content[:100], b"\0"])
    rng.choice(coco["images"])["file_name"] = rng.choice(
        [*mutate.TEXTS, "sub/", "images/0.jpg", "../coco.json", ""]
    )
    return mutate.dump_json(rng, coco)


def _judge_zip(case: Case, content: bytes) -> None:
    """What is unpacked is what zipfile reads; a second call gives the same, and reads the JSON."""
    path = case.folder / "export.zip"
    folder = case.folder / "datasets"
    path.write_bytes(content)
    if (found := case.attempt(unpack_dataset, str(path), folder)) is REFUSED:
        return
    if case.attempt(unpack_dataset, str(path), folder) != found:
        raise WrongDataError("unpacked once more, it lies elsewhere")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name, unpacked in read_tree(next(folder.glob("*/files"))).items():
            if unpacked != archive.read(name):
                raise WrongDataError("an unpacked file differs from the zip's")
    case.attempt(read_coco, found[1])
    if path.read_bytes() != content:
        raise WrongDataError("the user's zip was changed")
