"""The kinds of cases: each changes something, runs the package's own entry points, and compares what comes out."""

from __future__ import annotations

import gzip
import io
import json
import os
import warnings
import zipfile
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from colab_utils.data.archive import unpack_dataset
from colab_utils.data.checks import check_dataset
from colab_utils.data.coco import read_coco
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.dataset import CocoFolder, ShardDataset
from colab_utils.loading.loader import make_loader
from colab_utils.shards.copy import copy_shards
from colab_utils.shards.format import ShardIndex, ShardInfo, hash_bytes, read_index, write_index
from colab_utils.shards.verify import verify_shards
from colab_utils.training.checkpoint import CheckpointFolder
from colab_utils.training.model import load_trained_model
from colab_utils.training.train import train
from tests.fuzz import mutate
from tests.fuzz.originals import HEIGHT, TRAINING, WIDTH, Tree, read_tree, store, write_tree
from tests.fuzz.pool import Case, Kinds
from tests.fuzz.truth import WrongDataError, compare_record, compare_sample, read_truth, shrink

_NOTHING: Any = object()


class _Attempts:
    """Calls entry points; what they refuse in one line is noted, anything else that they raise is a bug."""

    def __init__(self) -> None:
        self.refused: list[str] = []

    def __call__(self, work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        try:
            return work(*arguments, **named)
        except ColabUtilsError as error:
            if len(text := str(error)) < 3 or not text.isprintable():
                raise WrongDataError(f"a message that is not one printable line: {text!r:.300}") from error
            self.refused.append(text)
            return _NOTHING


# ---- COCO JSON and images


def _judge_dataset(case: Case, annotations: bytes | None = None) -> bool:
    """All that takes the dataset in ``data``: each sample and record must be what the independent path reads."""
    attempt, rng, images, path = _Attempts(), case.rng, case.folder / "data/images", case.folder / "data/coco.json"
    if annotations is not None:
        path.write_bytes(annotations)
    before = read_tree(case.folder / "data")
    attempt(check_dataset, images, path)
    small = {"min_size": 12, "max_size": 20} if rng.random() < 0.15 else {}
    storage = rng.choice(["shrink", "keep", "pixels"])
    report = attempt(store, images, path, case.folder / "shards", storage=storage, **small)
    loose = attempt(CocoFolder, images, path)
    if report is not _NOTHING or loose is not _NOTHING:
        truth = _Truth(images, path.read_bytes())
    if report is not _NOTHING:
        attempt.refused += [one.reason for one in report.skipped]
        if report.images + len(report.skipped) != len(truth.entries):
            raise WrongDataError("images are neither stored nor named as skipped")
        if (bad := verify_shards(case.folder / "shards").bad) and report.images:
            raise WrongDataError(f"shards just written are bad: {bad}")
        dataset = ShardDataset(case.folder / "shards")
        for i, number in enumerate(dataset.image_ids.tolist()):
            expected = truth(number)
            if small and storage != "keep":
                expected = shrink(expected, **small)
            image, target = dataset[i]
            exact = not small or storage != "shrink"  # a JPEG that is written anew differs a little
            compare_sample(image, target, expected, dataset.category_ids, pixels=exact)
            compare_record(dataset.record(i), expected)
    if loose is not _NOTHING:
        for i, number in enumerate(loose.image_ids.tolist()):
            if (sample := attempt(loose.__getitem__, i)) is not _NOTHING:
                compare_sample(*sample, truth(number, loose=True), loose.category_ids)
    if read_tree(case.folder / "data") != before:
        raise WrongDataError("the user's files were changed")
    return bool(attempt.refused)


class _Truth:
    """What the independent path reads, image by image, once; whatever it raises on what was accepted is a bug."""

    def __init__(self, images: Path, data: bytes) -> None:
        self.known: dict[int, Any] = {}
        self.entries = self._understand(read_truth, images, data)

    def __call__(self, number: int, *, loose: bool = False) -> Any:
        if number not in self.known:
            known = self._understand(self.entries[number], loose)
            if loose:
                return known
            self.known[number] = known
        return self.known[number]

    @staticmethod
    def _understand(work: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return work(*arguments)
        except WrongDataError:
            raise
        except Exception as error:
            raise WrongDataError(
                f"accepted what the independent path does not understand: {type(error).__name__} {error}"
            ) from error


def _begin(case: Case) -> dict[str, Any]:
    """The dataset in its folder; returns its JSON."""
    write_tree(case.folder / "data", case.originals.dataset)
    return json.loads(case.originals.dataset["coco.json"])


def json_bytes(case: Case) -> bool:
    _begin(case)
    change = case.rng.choice([mutate.change_bytes, mutate.change_digit, mutate.change_digit])
    return _judge_dataset(case, change(case.rng, case.originals.dataset["coco.json"]))


def json_tree(case: Case) -> bool:
    return _judge_dataset(case, mutate.dump_json(case.rng, mutate.change_tree(case.rng, _begin(case))))


def json_field(case: Case) -> bool:
    """A value of another kind in one field of one entry: what a tool's export may hold."""
    rng, coco = case.rng, _begin(case)
    section = rng.choice(["images", "annotations", "annotations", "annotations", "categories"])
    entry = rng.choice(coco[section])
    key = rng.choice(sorted(entry))
    match rng.randrange(4):
        case 0:
            entry[key] = mutate.draw_value(rng)
        case 1:
            entry[key] = json.loads(json.dumps(entry[key]), parse_int=str, parse_float=str)
        case 2:
            del entry[key]
        case 3:
            entry[key] = deepcopy(rng.choice(mutate.FIELDS[key]))
    if section == "images" and key == "file_name" and rng.random() < 0.3:
        entry.pop("file_name", None)
        entry["coco_url"] = "http://images.cocodataset.org/val2017/0.jpg"
    return _judge_dataset(case, mutate.dump_json(rng, coco))


def json_hostile(case: Case) -> bool:
    """What asks for memory or time, and names that lead out."""
    rng, coco = case.rng, _begin(case)
    image, one = coco["images"][0], coco["annotations"][0]
    side = rng.choice([5_000, 13_000, 30_000, 60_000, 100_000, 2**31 - 1, 2**40])
    match rng.randrange(6):
        case 0:  # RLE of a huge image, whose file is missing
            image.update(width=side, height=side, file_name=rng.choice(["0.jpg", "missing.jpg"]))
            runs = rng.choice(
                [[0, 0, 10, side * side - 10], [side * side], [0, side * side], [side, 0, 0, side * side - side]]
            )
            one["segmentation"] = {"size": [side, side], "counts": runs}
            coco["annotations"] = [one] + [{**other, "image_id": 8} for other in coco["annotations"][3:]]
        case 1:  # an outline of many pixels
            one["segmentation"] = [
                [float(rng.choice([0, 2_000_000, -2_000_000, 31])) for _ in range(rng.choice([6, 600, 60_000]))]
            ]
        case 2:
            coco["annotations"] = [{**other, "id": row} for row, other in enumerate(coco["annotations"] * 50)]
        case 3:
            image["file_name"] = rng.choice(
                ["link.png", "folder", "../../../outside/secret.png", "sub/../../../../outside/secret.png", "/dev/zero"]
            )
            os.symlink(
                rng.choice(["../../../outside/secret.png", "/dev/zero", "0.jpg", "link.png"]),
                case.folder / "data/images/link.png",
            )
            (case.folder / "data/images/folder").mkdir()
        case 4:
            text = json.dumps(coco)
            again = json.dumps({rng.choice(list(coco)): coco[rng.choice(list(coco))][:1]})
            return _judge_dataset(case, f"{text[:-1]},{again[1:]}".encode())  # a section twice
        case 5:
            for other in coco["annotations"]:
                other["segmentation"] = {
                    "size": [HEIGHT, WIDTH],
                    "counts": rng.choice(["0" * 800, "_" * 50, "oooo0" * 9, "Pm8", ""]),
                }
    return _judge_dataset(case, json.dumps(coco).encode())


def _image_kind(names: list[str], change: Callable[[Any, bytes], bytes]) -> Callable[[Case], bool]:
    def run(case: Case) -> bool:
        coco, name = _begin(case), case.rng.choice(names)
        coco["images"] = [image for image in coco["images"] if image["file_name"] in (name, "0.jpg", "3.png")][:3]
        known = [image["id"] for image in coco["images"]]
        coco["annotations"] = [one for one in coco["annotations"] if one["image_id"] in known]
        path = case.folder / "data/images" / name
        path.write_bytes(change(case.rng, path.read_bytes()))
        if case.rng.random() < 0.2:
            for image in coco["images"]:
                sides = (0, 0) if case.rng.random() < 0.5 else (image["height"], image["width"])
                image["width"], image["height"] = sides
        return _judge_dataset(case, json.dumps(coco).encode())

    return run


def image_odd(case: Case) -> bool:
    """No image at all in its place, or one of another kind."""
    coco, name = _begin(case), case.rng.choice(["0.jpg", "sub/1.png", "2.tif", "3.png"])
    path = case.folder / "data/images" / name
    content = path.read_bytes()
    path.unlink()
    match case.rng.randrange(9):
        case 0:
            path.mkdir()
        case 1:
            os.symlink("../" * path.parts[::-1].index("work") + "outside/secret.png", path)
        case 2:
            os.mkfifo(path)
        case 3:
            path.touch()
            os.truncate(path, 30 * 2**30)  # 30 GB of nothing
        case 4:
            path.write_bytes(
                case.rng.choice(
                    [b"", b"\0", b"<html>", b"version https://git-lfs.github.com/spec/v1\n", gzip.compress(content)]
                )
            )
        case 5 | 6 | 7:
            mode = case.rng.choice(["I;16", "I", "F", "1", "L", "LA", "RGBA", "CMYK", "P", "YCbCr", "LAB", "HSV"])
            _write_image(
                path, mode, case.rng.choice(["PNG", "TIFF", "JPEG", "GIF", "WEBP", "BMP"]), case.rng.randrange(2**20)
            )
        case 8:
            pass
    return _judge_dataset(case, json.dumps(coco).encode())


def _write_image(path: Path, mode: str, kind: str, seed: int) -> None:
    from PIL import Image

    values = np.random.default_rng(seed).integers(0, 60_000, (HEIGHT, WIDTH))
    deep = {"I;16": np.uint16, "I": np.int32, "F": np.float32}
    image = Image.fromarray(values.astype(deep.get(mode, np.uint8)))
    try:
        (image if mode in deep else image.convert("RGB").convert(mode)).save(path, kind)
    except (OSError, ValueError):  # no such mode in that format
        image.convert("L").save(path, "PNG")


# ---- shards


def _judge_shards(case: Case, folder: Path, *, forged: bool = False) -> bool:
    """All that takes shards: what comes out equals the original; ``forged``, with right checksums, is well-formed."""
    attempt, before = _Attempts(), read_tree(folder)
    report = attempt(verify_shards, folder)
    dataset = attempt(ShardDataset, folder)
    if dataset is _NOTHING and report is not _NOTHING and not report.bad and not forged:
        raise WrongDataError(f"verify finds nothing, the loader refuses: {attempt.refused[-1]}")
    if dataset is not _NOTHING:
        _judge_samples(case, attempt, dataset, forged=forged)
    if case.rng.random() < 0.3 and attempt(copy_shards, folder, case.folder / "copy") is not _NOTHING:
        if (copied := attempt(ShardDataset, case.folder / "copy")) is not _NOTHING:
            _judge_samples(case, attempt, copied, forged=forged)
        elif dataset is not _NOTHING:
            raise WrongDataError("a copy without an error cannot be opened, the source can")
    if case.rng.random() < 0.1:
        _judge_arriving(case, attempt, folder, forged=forged)
    if read_tree(folder) != before:
        raise WrongDataError("reading changed the folder")
    return bool(attempt.refused or (report is not _NOTHING and report.bad))


def _judge_samples(
    case: Case, attempt: _Attempts, dataset: ShardDataset, *, forged: bool = False, part: bool = False
) -> None:
    """Every sample, record and batch; ``part`` of the images is enough where a limit was asked for."""
    truth, records = case.originals.truth, case.originals.records
    ids = dataset.image_ids.tolist()
    if not forged:
        whole = ids == list(truth) or (
            part and dataset.index.partial and ids and ids == [one for one in truth if one in ids]
        )
        if not whole:
            raise WrongDataError("other images than there were")
        facts = dataset.class_names, dataset.category_ids, dataset.num_classes, dataset.fingerprint, dataset.is_decoded
        if facts != case.originals.facts:
            raise WrongDataError("other classes, fingerprint or storage than there were")
    for i, number in enumerate(ids):
        sample, record = attempt(dataset.__getitem__, i), attempt(dataset.record, i)
        attempt(dataset.list_annotations, i)
        if sample is not _NOTHING:
            _check_form(*sample, dataset)
            if not forged:
                compare_sample(*sample, truth[number], dataset.category_ids)
        if record is not _NOTHING and not forged and record != records[number]:
            raise WrongDataError("another record than there was")
    if case.rng.random() < 0.1:
        attempt(_judge_batches, truth, dataset, forged)


def _judge_batches(truth: dict[int, Any], dataset: ShardDataset, forged: bool) -> None:
    for images, targets in make_loader(dataset, batch_size=2, workers=0, image_dtype=torch.uint8):
        for image, target in zip(images, targets, strict=True):
            if not forged:
                compare_sample(image, target, truth[int(target["image_id"])], dataset.category_ids)


def _check_form(image: Any, target: dict[str, Any], dataset: ShardDataset) -> None:
    """What torchvision's models ask for."""
    (height, width), boxes, masks = image.shape[1:], target["boxes"], target["masks"]
    sound = bool((boxes[:, 2:] > boxes[:, :2]).all() and (boxes >= 0).all() and torch.isfinite(target["area"]).all())
    sound &= bool((boxes[:, 0::2] <= width).all() and (boxes[:, 1::2] <= height).all())
    sound &= (
        masks.shape == (len(boxes), height, width) and bool((masks <= 1).all()) and len(target["labels"]) == len(boxes)
    )
    if not sound or not set(target["labels"].tolist()) <= set(dataset.class_names):
        raise WrongDataError("a sample whose boxes, areas, labels or masks cannot be trained on")


def _judge_arriving(case: Case, attempt: _Attempts, folder: Path, *, forged: bool) -> None:
    """Shards that are copied while they are read; a file that is damaged at the source ends in an error."""
    dataset = attempt(ArrivingShards, folder, case.folder / "ssd")
    if dataset is _NOTHING:
        return
    try:
        for i, number in enumerate(dataset.image_ids.tolist()):
            sample = attempt(dataset.__getitem__, i)
            if sample is not _NOTHING and not forged:
                compare_sample(*sample, case.originals.truth[number], dataset.category_ids)
    finally:
        dataset.stop()


def _change_some(rng: Any, tree: Tree) -> Tree:
    """The same files with one of them damaged, lost, cut or exchanged."""
    tree, name = dict(tree), rng.choice(sorted(tree))
    match rng.randrange(8):
        case 0:
            del tree[name]
        case 1:
            other = rng.choice(sorted(tree))
            tree[name], tree[other] = tree[other], tree[name]
        case 2 | 3 | 4:  # of the same size
            tree[name] = mutate.change_digit(rng, tree[name])
        case _:
            tree[name] = mutate.change_bytes(rng, tree[name])
    return tree


def shard_bytes(case: Case) -> bool:
    write_tree(case.folder / "shards", _change_some(case.rng, case.originals.shards[0]))
    return _judge_shards(case, case.folder / "shards")


def shard_twin(case: Case) -> bool:
    """Arrays that are lost or damaged, so that they are made again, from a tar with another digit."""
    rng, tree = case.rng, dict(case.originals.shards[0])
    name = rng.choice([name for name in sorted(tree) if name.endswith(".tar")])
    arrays = name.replace(".tar", ".arrays")
    tree[name] = (mutate.change_digit if rng.random() < 0.8 else mutate.change_bytes)(rng, tree[name])
    tree[arrays] = mutate.change_bytes(rng, tree[arrays])
    if rng.random() < 0.5:
        del tree[arrays]
    write_tree(case.folder / "shards", tree)
    return _judge_shards(case, case.folder / "shards")


def index_tree(case: Case) -> bool:
    tree = dict(case.originals.shards[0])
    tree["index.json"] = mutate.dump_json(case.rng, mutate.change_tree(case.rng, json.loads(tree["index.json"])))
    write_tree(case.folder / "shards", tree)
    return _judge_shards(case, case.folder / "shards")


def index_digit(case: Case) -> bool:
    tree = dict(case.originals.shards[0])
    tree["index.json"] = mutate.change_digit(case.rng, tree["index.json"])
    write_tree(case.folder / "shards", tree)
    return _judge_shards(case, case.folder / "shards")


def swap(case: Case) -> bool:
    """Files of another folder of shards under the same names."""
    rng, tree = case.rng, dict(case.originals.shards[0])
    other = rng.choice(case.originals.shards[1:])
    for name in rng.sample(sorted(tree), rng.randint(1, len(tree) - 1)):
        tree[name] = other.get(name, tree[name])
    if all(other.get(name) == content for name, content in tree.items()):
        return False  # all of the other folder
    write_tree(case.folder / "shards", tree)
    return _judge_shards(case, case.folder / "shards")


def _seal(folder: Path, name: str) -> None:
    """Make the index right for a changed file."""
    index, content = read_index(folder), (folder / name).read_bytes()
    shards = list(index.shards)
    for row, shard in enumerate(shards):
        if name == shard.name:
            shards[row] = replace(shard, bytes=len(content), xxh3_64=hash_bytes(content))
        elif name == shard.arrays_name:
            shards[row] = replace(shard, arrays_bytes=len(content), arrays_xxh3_64=hash_bytes(content))
    write_index(folder, replace(index, shards=tuple(shards)))


def hostile_tar(case: Case) -> bool:
    """A tar with other members; its checksum in the index is right, its arrays are made again."""
    tree, folder = dict(case.originals.shards[0]), case.folder / "shards"
    name = case.rng.choice([name for name in sorted(tree) if name.endswith(".tar")])
    tree[name] = mutate.change_tar(case.rng, tree[name])
    if case.rng.random() < 0.8:
        del tree[name.replace(".tar", ".arrays")]
    write_tree(folder, tree)
    _seal(folder, name)
    return _judge_shards(case, folder, forged=True)


def hostile_arrays(case: Case) -> bool:
    """Arrays with other numbers; all checksums are right."""
    tree, folder = dict(case.originals.shards[0]), case.folder / "shards"
    name = case.rng.choice([name for name in sorted(tree) if name.endswith(".arrays")])
    tree[name] = mutate.change_arrays(case.rng, tree[name], hash_bytes)
    write_tree(folder, tree)
    _seal(folder, name)
    return _judge_shards(case, folder, forged=True)


def hostile_index(case: Case) -> bool:
    """An index with other values, whose own checksum is right."""
    tree, folder = dict(case.originals.shards[0]), case.folder / "shards"
    write_tree(folder, tree)
    index = read_index(folder)
    values = mutate.change_tree(case.rng, asdict(index))
    try:
        shards = tuple(ShardInfo(**shard) for shard in values["shards"])
        write_index(folder, ShardIndex(**{**values, "shards": shards}))
    except (TypeError, ValueError, KeyError, AttributeError):
        return True  # nothing that could be written
    return _judge_shards(case, folder, forged=True)


def copy(case: Case) -> bool:
    """A copy with a limit or without, damage at the source or the target, and another copy."""
    rng, attempt, source, target = case.rng, _Attempts(), case.folder / "shards", case.folder / "copy"
    tree = case.originals.shards[0]
    write_tree(source, tree)
    size = sum(len(content) for name, content in tree.items() if "000000" in name)
    report, limit = attempt(copy_shards, source, target, limit_gb=rng.choice([None, None, size * 1.1e-9])), None
    for _ in range(rng.randint(1, 2)):
        where = rng.choice([source, target, target])
        before = read_tree(where)
        for name in before:
            (where / name).unlink()
        write_tree(where, _change_some(rng, before) if before else before)
        limit = rng.choice([None, size * 1.1e-9, size * 1.1e-9, size * 0.5e-9, 0.0, -1.0, float("nan")])
        report = attempt(copy_shards, source, target, limit_gb=limit)
    if report is not _NOTHING and (bad := verify_shards(target).bad):
        raise WrongDataError(f"a copy without an error is bad\n{bad}")
    if (target / "index.json").exists() and (dataset := attempt(ShardDataset, target)) is not _NOTHING:
        _judge_samples(case, attempt, dataset, part=True)
        if report is not _NOTHING and limit is None and len(dataset) < len(case.originals.truth):
            raise WrongDataError("a copy without a limit left images out")
    return bool(attempt.refused)


# ---- checkpoints


def _judge_run(case: Case, run: Tree, tree: Tree) -> bool:
    """What is read is one of the checkpoints that were written, or it is refused, or said to be torn."""
    attempt, folder = _Attempts(), case.folder / "run"
    write_tree(folder, tree)
    known = [torch.load(io.BytesIO(content), weights_only=True) for content in run.values()]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        state = attempt(CheckpointFolder(folder).read, repair=case.rng.random() < 0.5)
    if state is None and not said and tree:
        raise WrongDataError("no checkpoint found, and nothing said")
    if isinstance(state, dict):
        state.pop("path")
        if not any(_are_equal(state, one) for one in known):
            raise WrongDataError("a checkpoint that nobody wrote")
    if sorted(read_tree(folder).values()) != sorted(tree.values()):
        raise WrongDataError("checkpoint files were lost or changed")
    return bool(attempt.refused or said)


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(_are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


def checkpoint_bytes(case: Case) -> bool:
    run = case.originals.runs[0]
    tree, changed = dict(run), case.rng.choice([sorted(run)[-1:], sorted(run)])
    for name in changed:
        tree[name] = mutate.change_bytes(case.rng, tree[name], changes=1 + case.rng.randrange(4))
    if case.rng.random() < 0.1:
        tree[sorted(run)[-1]] = case.rng.choice([b"", bytes(5000), b"PK\5\6" + bytes(18), case.originals.export])
    return _judge_run(case, run, tree)


def _load_forged(case: Case, content: bytes) -> bool:
    """What has right checksums, and was not written by this package: no traceback, and nothing runs."""
    attempt, folder, name = _Attempts(), case.folder / "run", case.rng.choice(["checkpoint", "best"])
    write_tree(folder, {f"{name}-00000002.pt": content})
    which = "newest" if name == "checkpoint" else "best"
    if isinstance(attempt(CheckpointFolder(folder).read, which, repair=case.rng.random() < 0.5), dict):
        attempt(load_trained_model, folder, which=which)
    return bool(attempt.refused)


def checkpoint_zip(case: Case) -> bool:
    """Other members, and other bytes in the pickle and the tensors; the checksums are right."""
    content = case.originals.runs[case.rng.random() < 0.3]["checkpoint-00000002.pt"]
    return _load_forged(case, mutate.change_zip(case.rng, content))


class _Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def checkpoint_state(case: Case) -> bool:
    """Values of other types, shapes and steps in a real run's state."""
    return _load_forged(case, _forge_state(case.rng, case.originals.runs[1]["checkpoint-00000002.pt"]))


def _forge_state(rng: Any, content: bytes) -> bytes:
    state = torch.load(io.BytesIO(content), weights_only=True)
    tensors = [torch.zeros(0), torch.zeros(2, 3), torch.tensor(float("nan")), torch.zeros(3, dtype=torch.int8)]
    for _ in range(rng.randint(1, 2)):
        holder = rng.choice([state, state, state["plan"], state["model"], state["optimizer"], state["loader"]])
        key = rng.choice(sorted(holder, key=str))
        match rng.randrange(4):
            case 0:
                holder[key] = rng.choice([mutate.draw_value(rng), _Bomb() if rng.random() < 0.2 else 5])
            case 1:
                holder[key] = rng.choice(tensors)
            case 2 if len(holder) > 1 and not (holder is state and key in ("plan", "model", "optimizer", "loader")):
                del holder[key]
            case _ if isinstance(holder[key], torch.Tensor) and holder[key].is_floating_point():
                holder[key] = holder[key].flatten()[:-1] if rng.random() < 0.5 else holder[key] * float("nan")
            case _ if isinstance(holder[key], int | float):
                holder[key] += rng.choice([1, -1, 10**9, 0.5])
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def resume(case: Case) -> bool:
    """The same call goes on from a changed checkpoint: two steps in all, or it is refused."""
    attempt, folder = _Attempts(), case.folder / "run"
    write_tree(case.folder / "shards", case.originals.shards[0])
    content = _forge_state(case.rng, case.originals.runs[1]["checkpoint-00000002.pt"])
    write_tree(folder, {"checkpoint-00000002.pt": content})
    torch.manual_seed(0)
    report = attempt(train, case.folder / "shards", folder, log=lambda line: None, **TRAINING)
    if report is not _NOTHING and (report.steps, len(report.losses)) != (2, 2):
        raise WrongDataError("other steps than were asked for")
    return bool(attempt.refused)


# ---- zips


def zip_bytes(case: Case) -> bool:
    return _judge_zip(case, mutate.change_bytes(case.rng, case.originals.export))


def zip_members(case: Case) -> bool:
    content = case.originals.export
    for _ in range(case.rng.randint(1, 2)):
        content = mutate.change_zip(case.rng, content, case.rng.choice([mutate.change_member, _edit_export]))
    return _judge_zip(case, content)


def _edit_export(rng: Any, name: str, content: bytes) -> bytes:
    if content[:1] != b"{":
        return rng.choice([b"", content[:100], bytes(50_000_000) if rng.random() < 0.1 else b"\0"])
    coco = json.loads(content)
    rng.choice(coco["images"])["file_name"] = rng.choice([*mutate.TEXTS, "sub/", "images/0.jpg", "../coco.json", ""])
    return mutate.dump_json(rng, coco)


def _judge_zip(case: Case, content: bytes) -> bool:
    """What is unpacked is what zipfile reads, and lies in the folder; a second call gives the same."""
    attempt, path, folder = _Attempts(), case.folder / "export.zip", case.folder / "datasets"
    path.write_bytes(content)
    found = attempt(unpack_dataset, str(path), folder)
    if found is _NOTHING:
        return True
    if attempt(unpack_dataset, str(path), folder) != found:
        raise WrongDataError("unpacked once more, it lies elsewhere")
    root = next(folder.glob("*/files"))
    with zipfile.ZipFile(path) as archive:
        for name, unpacked in read_tree(root).items():
            if unpacked != archive.read(name):
                raise WrongDataError("an unpacked file differs from the zip's")
    coco = attempt(read_coco, found[1])
    if coco is not _NOTHING and path.read_bytes() != content:
        raise WrongDataError("the user's zip was changed")
    return bool(attempt.refused)


KINDS: Kinds = {
    "json_bytes": (7, json_bytes),
    "json_tree": (9, json_tree),
    "json_field": (12, json_field),
    "json_hostile": (4, json_hostile),
    "image_bytes": (8, _image_kind(["0.jpg", "sub/1.png", "2.tif", "3.png"], mutate.change_bytes)),
    "image_png": (4, _image_kind(["sub/1.png", "3.png"], mutate.change_png)),
    "image_jpeg": (4, _image_kind(["0.jpg"], mutate.change_jpeg)),
    "image_odd": (3, image_odd),
    "shard_bytes": (9, shard_bytes),
    "shard_twin": (5, shard_twin),
    "index_tree": (8, index_tree),
    "index_digit": (3, index_digit),
    "swap": (4, swap),
    "hostile_tar": (5, hostile_tar),
    "hostile_arrays": (5, hostile_arrays),
    "hostile_index": (3, hostile_index),
    "copy": (7, copy),
    "checkpoint_bytes": (6, checkpoint_bytes),
    "checkpoint_zip": (5, checkpoint_zip),
    "checkpoint_state": (3, checkpoint_state),
    "resume": (1, resume),
    "zip_bytes": (5, zip_bytes),
    "zip_members": (5, zip_members),
}
