"""What is mutated: small datasets of several kinds of images and masks, their shards, and a zip."""

from __future__ import annotations

import io
import json
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from PIL import Image

from colab_utils.shards.write import write_shards
from tests.fuzz.truth import Expected, Truth, compare_record
from tests.pictures import save

Tree = dict[str, bytes]
"""Files of a folder: relative name to content."""
HEIGHT = 24
WIDTH = 32


@dataclass(frozen=True)
class Known:
    """What a dataset holds, by the independent path."""

    truth: dict[int, Expected]
    """By image id."""
    records: dict[int, Any]
    """By image id, as they lie in the tars."""
    facts: tuple[Any, ...]
    """Classes and fingerprint."""


@dataclass(frozen=True)
class Originals:
    """Everything a case starts from, in memory."""

    dataset: Tree
    """``images/...`` and ``coco.json``."""
    shards: list[Tree]
    """Of the dataset; of the same images with other annotations; and of other images under the same
    names.
    """
    export: bytes
    """The dataset as a zip."""
    known: list[Known]
    """What must come out of each folder of shards."""


class Inline(Executor):
    """Runs what is submitted at once: no process to start."""

    def submit(self, work: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        future = Future[Any]()
        try:
            future.set_result(work(*arguments, **named))
        except BaseException as error:
            future.set_exception(error)
        return future


def run_here(workers: int, initializer: Callable[..., object] = int, *arguments: Any) -> Executor:
    """In place of ``fork_pool``: a case stays in its own process, where time and memory are
    measured.
    """
    initializer(*arguments)
    return Inline()


def store(images: Path, annotations: Path, shards: Path, **settings: Any) -> Any:
    """Write shards of two images each, whatever is bad left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return write_shards(
            images,
            annotations,
            shards=shards,
            shard_mb=0.006,
            workers=1,
            max_bad=1.0,
            **settings,
        )


def make_originals(folder: Path) -> Originals:
    """Make them; threads that this starts must not be forked."""
    import torch

    # A forked process has lost OpenMP's threads, and would wait for them for ever.
    torch.set_num_threads(1)
    datasets = [_make_dataset(number) for number in range(3)]
    shards = []
    known = []
    for number, dataset in enumerate(datasets):
        root = folder / str(number)
        write_tree(root, dataset)
        store(root / "images", root / "coco.json", root / "shards")
        shards.append(read_tree(root / "shards"))
        known.append(_read_known(root, shards[-1]))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(datasets[0].items()):
            archive.writestr(zipfile.ZipInfo(f"export/{name}"), content, zipfile.ZIP_DEFLATED)
    return Originals(datasets[0], shards, file.getvalue(), known)


def read_tree(folder: Path) -> Tree:
    """Read all plain files below a folder."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def write_tree(folder: Path, tree: Tree) -> None:
    """Write files into a folder."""
    for name, content in tree.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def _read_known(root: Path, shards: Tree) -> Known:
    """Read the records by tarfile and json alone, and compare them with the dataset."""
    data = (root / "coco.json").read_bytes()
    read = Truth(root / "images", data)
    truth = {number: read(number) for number in read.entries}
    records = {}
    for name, content in shards.items():
        if not name.endswith(".tar"):
            continue
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            for member in tar:
                if member.name.endswith(".json"):
                    record = json.load(tar.extractfile(member))
                    compare_record(record, truth[record["image_id"]])
                    records[record["image_id"]] = record
    facts = ({3: "car", 18: "dog"}, {3: 3, 18: 18}, 19, xxhash.xxh3_128_hexdigest(data))
    return Known(truth, records, facts)


def _make_dataset(number: int) -> Tree:
    """Make four images; ``number`` 1 has the same ones with other annotations, 2 has others.

    An object has a box, an area and a mask: one polygon or two, compressed RLE, or uncompressed for
    a crowd.
    """
    tree: Tree = {}
    rng = np.random.default_rng(number // 2)
    formats = {"0.jpg": "JPEG", "sub/1.png": "PNG", "2.tif": "TIFF", "3.png": "PNG"}
    images = []
    for row, (name, kind) in enumerate(formats.items(), 7):
        smooth = Image.fromarray(rng.integers(0, 255, (3, 4, 3), np.uint8)).resize((WIDTH, HEIGHT))
        tree[f"images/{name}"] = save(smooth.convert("P" if row == 10 else "RGB"), kind)
        images.append({"id": row, "file_name": name, "width": WIDTH, "height": HEIGHT})
    categories = [{"id": 3, "name": "car"}, {"id": 18, "name": "dog"}]
    annotations = json.loads(Path(__file__).with_name("annotations.json").read_text())[number]
    coco = {"images": images, "categories": categories, "annotations": annotations}
    tree["coco.json"] = json.dumps(coco).encode()
    return tree
