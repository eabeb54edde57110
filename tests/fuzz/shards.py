"""Cases of shards, their index and copies: what comes out of them must be the original, or
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import make_loader
from colab_utils.shards.copy import copy_shards
from colab_utils.shards.verify import verify_shards
from tests.fuzz import mutate
from tests.fuzz.originals import Originals, Tree, read_tree, write_tree
from tests.fuzz.pool import REFUSED, Case
from tests.fuzz.truth import WrongDataError, compare_sample


def _judge(case: Case, folder: Path) -> None:
    """Give the folder to all that takes shards: the data must be those of the index."""
    before = read_tree(folder)
    report = case.attempt(verify_shards, folder)
    dataset = case.attempt(ShardDataset, folder)
    if dataset is not REFUSED:
        _judge_samples(case, dataset)
    elif report is not REFUSED and not report.bad:
        raise WrongDataError(f"verify finds nothing, the loader refuses\n{case.refused}")
    if report is not REFUSED:
        case.refused += [bad.reason for bad in report.bad]
    if case.rng.random() < 0.3:
        _judge_copy(case, folder, dataset)
    if case.rng.random() < 0.1:
        _judge_arriving(case, folder)
    if read_tree(folder) != before:
        raise WrongDataError("reading changed the folder")


def _judge_copy(case: Case, folder: Path, dataset: Any) -> None:
    if case.attempt(copy_shards, folder, case.folder / "copy") is REFUSED:
        return
    copied = case.attempt(ShardDataset, case.folder / "copy")
    if copied is not REFUSED:
        _judge_samples(case, copied)
    elif dataset is not REFUSED:
        raise WrongDataError("a copy without an error cannot be opened, the source can")


def _judge_arriving(case: Case, folder: Path) -> None:
    arriving = case.attempt(ArrivingShards, folder, case.folder / "ssd")
    if arriving is REFUSED:
        return
    try:
        _judge_samples(case, arriving)
    finally:
        arriving.stop()


def _judge_samples(case: Case, dataset: ShardDataset, *, part: bool = False) -> None:
    """Compare classes, images, records and sometimes batches; a limit (``part``) may have left some
    images out.
    """
    matching = [known for known in case.originals.known if dataset.fingerprint in known.facts]
    known = (matching or case.originals.known)[0]
    facts = (
        dataset.class_names,
        dataset.category_ids,
        dataset.num_classes,
        dataset.fingerprint,
        dataset.is_decoded,
    )
    if facts != known.facts:
        raise WrongDataError("other classes, fingerprint or storage than there were")
    ids = dataset.image_ids.tolist()
    expected_ids = list(known.truth)
    if part and dataset.index.partial and ids:
        expected_ids = [number for number in expected_ids if number in ids]
    if ids != expected_ids:
        raise WrongDataError("other images than there were")
    for i, number in enumerate(ids):
        sample = case.attempt(dataset.__getitem__, i)
        if sample is not REFUSED:
            compare_sample(*sample, known.truth[number], dataset.category_ids)
        record = case.attempt(dataset.record, i)
        if record is not REFUSED and record != known.records[number]:
            raise WrongDataError("another record than there was")
    if case.rng.random() < 0.1:
        for image, target in case.attempt(_load_batches, dataset) or ():
            compare_sample(
                image, target, known.truth[int(target["image_id"])], dataset.category_ids
            )


def _load_batches(dataset: ShardDataset) -> list[tuple[Any, Any]]:
    loader = make_loader(dataset, batch_size=2, workers=0, image_dtype=torch.uint8)
    return [sample for images, targets in loader for sample in zip(images, targets, strict=True)]


def shard_kind(change: Callable[[Random, Tree, Originals], None]) -> Callable[[Case], None]:
    """Return a kind that changes the files of shards in place."""

    def run(case: Case) -> None:
        tree = dict(case.originals.shards[0])
        change(case.rng, tree, case.originals)
        write_tree(case.folder / "shards", tree)
        _judge(case, case.folder / "shards")

    return run


def damage(rng: Random, tree: Tree, _: Any = None) -> None:
    """One of the files damaged, lost, cut or exchanged for another."""
    name = rng.choice(sorted(tree))
    other = rng.choice(sorted(tree))
    match rng.randrange(8):
        case 0:
            del tree[name]
        case 1:
            tree[name], tree[other] = tree[other], tree[name]
        case 2 | 3 | 4:  # of the same size
            tree[name] = mutate.change_digit(rng, tree[name])
        case _:
            tree[name] = mutate.change_bytes(rng, tree[name])


def make_twin(rng: Random, tree: Tree, _: Any) -> None:
    """Arrays that are lost or damaged, so that they are made again, from a tar with another
    digit.
    """
    name = rng.choice([name for name in sorted(tree) if name.endswith(".tar")])
    arrays = name.replace(".tar", ".arrays")
    tree[name] = (mutate.change_digit if rng.random() < 0.8 else mutate.change_bytes)(
        rng, tree[name]
    )
    tree[arrays] = mutate.change_bytes(rng, tree[arrays])
    if rng.random() < 0.5:
        del tree[arrays]


def change_index(rng: Random, tree: Tree, _: Any) -> None:
    """Values of the index: replaced, lost, repeated, wrapped; or another digit."""
    changed = mutate.dump_json(rng, mutate.change_tree(rng, json.loads(tree["index.json"])))
    tree["index.json"] = (
        mutate.change_digit(rng, tree["index.json"]) if rng.random() < 0.3 else changed
    )


def swap(rng: Random, tree: Tree, originals: Originals) -> None:
    """Files of another folder of shards under the same names."""
    other = rng.choice(originals.shards[1:])
    for name in rng.sample(sorted(tree), rng.randint(1, len(tree) - 1)):
        tree[name] = other[name]


def copy(case: Case) -> None:
    """A copy with a limit or without, damage at the source or the target, and another copy."""
    rng = case.rng
    source = case.folder / "shards"
    target = case.folder / "copy"
    write_tree(source, case.originals.shards[0])
    size = sum(
        len(content) for name, content in case.originals.shards[0].items() if "000000" in name
    )
    case.attempt(copy_shards, source, target, limit_gb=rng.choice([None, None, size * 1.1e-9]))
    for _ in range(rng.randint(1, 2)):
        where = rng.choice([source, target, target])
        tree = read_tree(where)
        for name in tree:
            (where / name).unlink()
        if tree:
            damage(rng, tree)
        write_tree(where, tree)
        limit = rng.choice(
            [None, size * 1.1e-9, size * 1.1e-9, size * 0.5e-9, 0.0, -1.0, float("nan")]
        )
        report = case.attempt(copy_shards, source, target, limit_gb=limit)
    if report is not REFUSED and (bad := verify_shards(target).bad):
        raise WrongDataError(f"a copy without an error is bad\n{bad}")
    if (target / "index.json").exists() and (
        dataset := case.attempt(ShardDataset, target)
    ) is not REFUSED:
        _judge_samples(case, dataset, part=True)
        if (
            report is not REFUSED
            and limit is None
            and len(dataset) < len(case.originals.known[0].truth)
        ):
            raise WrongDataError("a copy without a limit left images out")
