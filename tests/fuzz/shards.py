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
from tests.fuzz.pool import Case
from tests.fuzz.truth import WrongDataError, compare_sample


def _judge(case: Case, folder: Path) -> None:
    """Give the folder to all that takes shards: the data must be those of the index."""
    before = read_tree(folder)
    report = case.attempt(verify_shards, folder)
    dataset = case.attempt(ShardDataset, folder)
    if dataset is not None:
        _judge_samples(case, dataset)
    elif report is not None and not report.bad:
        raise WrongDataError(f"verify finds nothing, the loader refuses\n{case.refused}")
    if report is not None:
        case.refused += [bad.reason for bad in report.bad]
    if case.rng.random() < 0.3:
        _judge_copy(case, folder, is_readable=dataset is not None)
    if case.rng.random() < 0.1:
        _judge_arriving(case, folder)
    if read_tree(folder) != before:
        raise WrongDataError("reading changed the folder")


def _judge_copy(case: Case, folder: Path, *, is_readable: bool) -> None:
    if case.attempt(copy_shards, folder, case.folder / "copy") is None:
        return
    copied = case.attempt(ShardDataset, case.folder / "copy")
    if copied is not None:
        _judge_samples(case, copied)
    elif is_readable:
        raise WrongDataError("a copy without an error cannot be opened, the source can")


def _judge_arriving(case: Case, folder: Path) -> None:
    arriving = case.attempt(ArrivingShards, folder, case.folder / "ssd")
    if arriving is None:
        return
    try:
        _judge_samples(case, arriving)
    finally:
        arriving.stop()


def _judge_samples(case: Case, dataset: ShardDataset) -> None:
    """Compare classes, images, records and sometimes batches."""
    facts = (
        dataset.class_names,
        dataset.category_ids,
        dataset.num_classes,
        dataset.fingerprint,
    )
    known = next((known for known in case.originals.known if known.facts == facts), None)
    if known is None:
        raise WrongDataError("other classes or another fingerprint than there were")
    ids = dataset.image_ids.tolist()
    if ids != list(known.records):
        raise WrongDataError("other images than there were")
    for i, number in enumerate(ids):
        sample = case.attempt(dataset.__getitem__, i)
        if sample is not None:
            compare_sample(*sample, known.truth[number], dataset.category_ids)
        record = case.attempt(dataset.record, i)
        if record is not None and record != known.records[number]:
            raise WrongDataError("another record than there was")
    if case.rng.random() < 0.1:
        for image, target in case.attempt(_load_batches, dataset) or []:
            expected = known.truth[int(target["image_id"])]
            compare_sample(image, target, expected, dataset.category_ids)


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


def damage(rng: Random, tree: Tree, _: Any) -> None:
    """Damage, lose or cut one of the files, or exchange it for another."""
    name = rng.choice(sorted(tree))
    other = rng.choice(sorted(tree))
    match rng.randrange(8):
        case 0:
            del tree[name]
        case 1:
            tree[name], tree[other] = tree[other], tree[name]
        case 2 | 3 | 4:
            tree[name] = mutate.change_digit(rng, tree[name])
        case _:
            tree[name] = mutate.change_bytes(rng, tree[name])


def make_twin(rng: Random, tree: Tree, _: Any) -> None:
    """Lose or damage arrays, so that they are made again, from a tar with another digit."""
    name = rng.choice([name for name in sorted(tree) if name.endswith(".tar")])
    arrays = name.replace(".tar", ".arrays")
    change = mutate.change_digit if rng.random() < 0.8 else mutate.change_bytes
    tree[name] = change(rng, tree[name])
    tree[arrays] = mutate.change_bytes(rng, tree[arrays])
    if rng.random() < 0.5:
        del tree[arrays]


def change_index(rng: Random, tree: Tree, _: Any) -> None:
    """Replace, lose, repeat or wrap values of the index, or change a digit."""
    if rng.random() < 0.3:
        tree["index.json"] = mutate.change_digit(rng, tree["index.json"])
    else:
        changed = mutate.change_tree(rng, json.loads(tree["index.json"]))
        tree["index.json"] = mutate.dump_json(rng, changed)


def swap(rng: Random, tree: Tree, originals: Originals) -> None:
    """Put files of another folder of shards under the same names."""
    other = rng.choice(originals.shards[1:])
    for name in rng.sample(sorted(tree), rng.randint(1, len(tree) - 1)):
        tree[name] = other[name]
