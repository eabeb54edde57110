"""Cases of checkpoints: what is read was written, or it is refused."""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch

from colab_utils.training.checkpoint_folder import CheckpointFolder
from tests.fuzz import mutate
from tests.fuzz.originals import read_tree, write_tree
from tests.fuzz.pool import Case
from tests.fuzz.truth import WrongDataError

_LAST = "checkpoint-00000002.pt"
_PARTS = ("plan", "model", "optimizer", "loader")


def checkpoint_bytes(case: Case) -> None:
    """Any bytes of the newest of two, or of both: one that was written is read, or it is refused,
    or told as torn.
    """
    rng = case.rng
    run = case.originals.checkpoints
    folder = case.folder / "run"
    tree = dict(run)
    for name in sorted(run)[rng.randrange(2) :]:
        tree[name] = mutate.change_bytes(rng, tree[name], changes=4)
    if rng.random() < 0.1:
        tree[_LAST] = rng.choice([b"", bytes(5000), b"PK\5\6" + bytes(18), case.originals.export])
    write_tree(folder, tree)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        state = case.attempt(CheckpointFolder(folder).read, repair=rng.random() < 0.5)
    case.refused += [str(one.message) for one in said]
    if state is None and not said:
        raise WrongDataError("no checkpoint found, and nothing said")
    known = (torch.load(io.BytesIO(content), weights_only=True) for content in run.values())
    if isinstance(state, dict) and not any(
        _are_equal({**one, "path": state["path"]}, state) for one in known
    ):
        raise WrongDataError("a checkpoint that nobody wrote")
    if sorted(read_tree(folder).values()) != sorted(tree.values()):
        raise WrongDataError("checkpoint files were lost or changed")


def _are_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)
