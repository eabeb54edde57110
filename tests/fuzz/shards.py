"""Cases of shards, their index and copies: what comes out of them must be the original, or nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import make_loader
from colab_utils.shards.copy import copy_shards, verify_shards
from colab_utils.shards.format import hash_bytes, read_index, write_index
from tests.fuzz import mutate
from tests.fuzz.originals import Originals, Tree, read_tree, write_tree
from tests.fuzz.pool import REFUSED, Case
from tests.fuzz.truth import WrongDataError, compare_sample
from tests.sealed import seal_index


def _judge(case: Case, folder: Path, *, forged: bool = False) -> None:
    """All that takes shards: the data must be those of the index; ``forged`` ones need only be well-formed."""
    before, report, dataset = read_tree(folder), case.attempt(verify_shards, folder), case.attempt(ShardDataset, folder)
    if dataset is not REFUSED:
        _judge_samples(case, dataset, forged=forged)
    elif report is not REFUSED and not report.bad and not forged:
        raise WrongDataError(f"verify finds nothing, the loader refuses\n{case.refused}")
    if report is not REFUSED:
        case.refused += [bad.reason for bad in report.bad]
    if case.rng.random() < 0.3 and case.attempt(copy_shards, folder, case.folder / "copy") is not REFUSED:
        if (copied := case.attempt(ShardDataset, case.folder / "copy")) is not REFUSED:
            _judge_samples(case, copied, forged=forged)
        elif dataset is not REFUSED:
            raise WrongDataError("a copy without an error cannot be opened, the source can")
    if (
        case.rng.random() < 0.1
        and (arriving := case.attempt(ArrivingShards, folder, case.folder / "ssd")) is not REFUSED
    ):
        try:
            _judge_samples(case, arriving, forged=forged)
        finally:
            arriving.stop()
    if read_tree(folder) != before:
        raise WrongDataError("reading changed the folder")


def _judge_samples(case: Case, dataset: ShardDataset, *, forged: bool = False, part: bool = False) -> None:
    """Classes, images, records and sometimes batches; ``part`` of the images is enough where there was a limit."""
    named = [one for one in case.originals.known if dataset.fingerprint in one.facts]
    known = (named or case.originals.known)[0]
    truth, ids = known.truth, dataset.image_ids.tolist()
    facts = dataset.class_names, dataset.category_ids, dataset.num_classes, dataset.fingerprint, dataset.is_decoded
    if not forged and facts != known.facts:
        raise WrongDataError("other classes, fingerprint or storage than there were")
    some = part and dataset.index.partial and ids and [number for number in truth if number in ids]
    if not forged and ids not in (list(truth), some):
        raise WrongDataError("other images than there were")
    for i, number in enumerate(ids):
        sample, record = case.attempt(dataset.__getitem__, i), case.attempt(dataset.record, i)
        case.attempt(dataset.list_annotations, i)
        if sample is not REFUSED:
            _check_form(*sample, dataset)
            if not forged:
                compare_sample(*sample, truth[number], dataset.category_ids)
        if record is not REFUSED and not forged and record != known.records[number]:
            raise WrongDataError("another record than there was")
    if case.rng.random() < 0.1:
        for image, target in case.attempt(_load_batches, dataset) or ():
            _check_form(image, target, dataset)
            if not forged:
                compare_sample(image, target, truth[int(target["image_id"])], dataset.category_ids)


def _load_batches(dataset: ShardDataset) -> list[tuple[Any, Any]]:
    loader = make_loader(dataset, batch_size=2, workers=0, image_dtype=torch.uint8)
    return [sample for images, targets in loader for sample in zip(images, targets, strict=True)]


def _check_form(image: Any, target: dict[str, Any], dataset: ShardDataset) -> None:
    """What torchvision's models ask for."""
    (height, width), boxes, masks = image.shape[1:], target["boxes"], target["masks"]
    sound = (boxes >= 0).all() and (boxes[:, 0::2] <= width).all() and (boxes[:, 1::2] <= height).all()
    sound &= (boxes[:, 2:] > boxes[:, :2]).all() and torch.isfinite(target["area"]).all() and (masks <= 1).all()
    same = masks.shape == (len(boxes), height, width) and len(target["labels"]) == len(boxes) == len(target["area"])
    if not sound or not same or not set(target["labels"].tolist()) <= set(dataset.class_names):
        raise WrongDataError("a sample whose boxes, areas, labels or masks cannot be trained on")


def shard_kind(change: Callable[[Random, Tree, Originals], str], *, forged: bool = False) -> Callable[[Case], None]:
    """A kind that changes the files of shards: in place, and ``forged`` makes the index right for the one it names."""

    def run(case: Case) -> None:
        tree, folder = dict(case.originals.shards[0]), case.folder / "shards"
        name = change(case.rng, tree, case.originals)
        write_tree(folder, tree)
        if forged:
            _seal(folder, name)
        _judge(case, folder, forged=forged)

    return run


def _seal(folder: Path, name: str) -> None:
    index, content = read_index(folder), (folder / name).read_bytes()
    shards = list(index.shards)
    for row, shard in enumerate(shards):
        if name == shard.name:
            shards[row] = replace(shard, bytes=len(content), xxh3_64=hash_bytes(content))
        elif name == shard.arrays_name:
            start = end = 16 + int.from_bytes(content[:8], "little")
            head = json.loads(content[16:start])
            if isinstance(head, dict):
                end += head["tables_bytes"]
            checksums = {"arrays_xxh3_64": hash_bytes(content), "tables_xxh3_64": hash_bytes(content[:end])}
            shards[row] = replace(shard, arrays_bytes=len(content), **checksums)
    write_index(folder, replace(index, shards=tuple(shards)))


def _pick(rng: Random, tree: Tree, ending: str) -> str:
    return rng.choice([name for name in sorted(tree) if name.endswith(ending)])


def damage(rng: Random, tree: Tree, _: Any = None) -> str:
    """One of the files damaged, lost, cut or exchanged for another."""
    name, other = rng.choice(sorted(tree)), rng.choice(sorted(tree))
    match rng.randrange(8):
        case 0:
            del tree[name]
        case 1:
            tree[name], tree[other] = tree[other], tree[name]
        case 2 | 3 | 4:  # of the same size
            tree[name] = mutate.change_digit(rng, tree[name])
        case _:
            tree[name] = mutate.change_bytes(rng, tree[name])
    return name


def make_twin(rng: Random, tree: Tree, _: Any) -> str:
    """Arrays that are lost or damaged, so that they are made again, from a tar with another digit."""
    name = _pick(rng, tree, ".tar")
    arrays = name.replace(".tar", ".arrays")
    tree[name] = (mutate.change_digit if rng.random() < 0.8 else mutate.change_bytes)(rng, tree[name])
    tree[arrays] = mutate.change_bytes(rng, tree[arrays])
    if rng.random() < 0.5:
        del tree[arrays]
    return name


def change_index(rng: Random, tree: Tree, _: Any) -> str:
    """Values of the index: replaced, lost, repeated, wrapped; or another digit."""
    changed = mutate.dump_json(rng, mutate.change_tree(rng, json.loads(tree["index.json"])))
    tree["index.json"] = mutate.change_digit(rng, tree["index.json"]) if rng.random() < 0.3 else changed
    return "index.json"


def swap(rng: Random, tree: Tree, originals: Originals) -> str:
    """Files of another folder of shards under the same names."""
    other = rng.choice(originals.shards[1:])
    for name in rng.sample(sorted(tree), rng.randint(1, len(tree) - 1)):
        tree[name] = other[name]
    return name


def forge_tar(rng: Random, tree: Tree, _: Any) -> str:
    """A tar with other members; most often its arrays are made again."""
    name = _pick(rng, tree, ".tar")
    tree[name] = mutate.change_tar(rng, tree[name])
    if rng.random() < 0.8:
        del tree[name.replace(".tar", ".arrays")]
    return name


def forge_arrays(rng: Random, tree: Tree, _: Any) -> str:
    """Arrays with other numbers."""
    name = _pick(rng, tree, ".arrays")
    tree[name] = mutate.change_arrays(rng, tree[name], hash_bytes)
    return name


def hostile_index(case: Case) -> None:
    """An index with other values, whose own checksum is right."""
    folder, tree = case.folder / "shards", case.originals.shards[0]
    changed = mutate.change_tree(case.rng, json.loads(tree["index.json"]))
    write_tree(folder, {**tree, "index.json": json.dumps(changed).encode()})
    if isinstance(changed, dict):
        seal_index(folder)
    _judge(case, folder, forged=True)


def copy(case: Case) -> None:
    """A copy with a limit or without, damage at the source or the target, and another copy."""
    rng, source, target = case.rng, case.folder / "shards", case.folder / "copy"
    write_tree(source, case.originals.shards[0])
    size = sum(len(content) for name, content in case.originals.shards[0].items() if "000000" in name)
    case.attempt(copy_shards, source, target, limit_gb=rng.choice([None, None, size * 1.1e-9]))
    for _ in range(rng.randint(1, 2)):
        where = rng.choice([source, target, target])
        tree = read_tree(where)
        for name in tree:
            (where / name).unlink()
        if tree:
            damage(rng, tree)
        write_tree(where, tree)
        limit = rng.choice([None, size * 1.1e-9, size * 1.1e-9, size * 0.5e-9, 0.0, -1.0, float("nan")])
        report = case.attempt(copy_shards, source, target, limit_gb=limit)
    if report is not REFUSED and (bad := verify_shards(target).bad):
        raise WrongDataError(f"a copy without an error is bad\n{bad}")
    if (target / "index.json").exists() and (dataset := case.attempt(ShardDataset, target)) is not REFUSED:
        _judge_samples(case, dataset, part=True)
        if report is not REFUSED and limit is None and len(dataset) < len(case.originals.known[0].truth):
            raise WrongDataError("a copy without a limit left images out")
