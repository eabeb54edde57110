"""Cases of checkpoints: what is read was written, or it is refused; what was forged runs nothing."""

from __future__ import annotations

import io
import os
import warnings
from random import Random
from typing import Any

import torch

from colab_utils.training.checkpoint import CheckpointFolder
from colab_utils.training.model import load_trained_model
from colab_utils.training.train import train
from tests.fuzz import mutate
from tests.fuzz.originals import TRAINING, read_tree, write_tree
from tests.fuzz.pool import REFUSED, Case
from tests.fuzz.truth import WrongDataError
from tests.sealed import seal_checkpoint

_LAST = "checkpoint-00000002.pt"
_PARTS = ("plan", "model", "optimizer", "loader")


def checkpoint_bytes(case: Case) -> None:
    """Any bytes of the newest of two, or of both: one that was written is read, or it is refused, or told as torn."""
    rng, run, folder = case.rng, case.originals.runs[0], case.folder / "run"
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
    if isinstance(state, dict) and not any(_are_equal({**one, "path": state["path"]}, state) for one in known):
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


def _seal(rng: Random, content: bytes) -> bytes:
    """With the checksum of a real one, mostly: what is behind it is reached then."""
    return content if rng.random() < 0.1 else seal_checkpoint(content)


def _load_forged(case: Case, content: bytes) -> None:
    which = case.rng.choice(["newest", "best"])
    name = _LAST if which == "newest" else "best-00000002.pt"
    write_tree(case.folder / "run", {name: _seal(case.rng, content)})
    if case.attempt(CheckpointFolder(case.folder / "run").read, which, repair=case.rng.random() < 0.5):
        case.attempt(load_trained_model, case.folder / "run", which=which)


def checkpoint_zip(case: Case) -> None:
    """Other members, and other bytes of the pickle and the tensors; the zip's checksums are right."""
    content = case.originals.runs[case.rng.random() < 0.3][_LAST]
    _load_forged(case, mutate.change_zip(case.rng, content))


def checkpoint_state(case: Case) -> None:
    """Values of other types, shapes and steps in a real run's state, and what would run a command when it is loaded."""
    _load_forged(case, _forge_state(case.rng, case.originals.runs[1][_LAST]))


def resume(case: Case) -> None:
    """The same call goes on from such a state: two steps in all, or it is refused."""
    write_tree(case.folder / "shards", case.originals.shards[0])
    forged = _forge_state(case.rng, case.originals.runs[1][_LAST])
    write_tree(case.folder / "run", {_LAST: _seal(case.rng, forged)})
    report = case.attempt(train, case.folder / "shards", case.folder / "run", log=lambda line: None, **TRAINING)
    if report is not REFUSED and (report.steps, len(report.losses)) != (2, 2):
        raise WrongDataError("other steps than were asked for")


class _Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def _forge_state(rng: Random, content: bytes) -> bytes:
    state = torch.load(io.BytesIO(content), weights_only=True)
    tensors = [torch.zeros(0), torch.zeros(2, 3), torch.tensor(float("nan")), torch.zeros(3, dtype=torch.int8)]
    for _ in range(rng.randint(1, 2)):
        holder = rng.choice([state, state, *(state[part] for part in _PARTS if isinstance(state.get(part), dict))])
        key = rng.choice(sorted(holder, key=str))
        value = holder[key]
        match rng.randrange(5):
            case 0:
                holder[key] = rng.choice([*[mutate.draw_value(rng)] * 4, _Bomb()])
            case 1:
                holder[key] = rng.choice(tensors)
            case 2 if len(holder) > 1:
                del holder[key]
            case _ if isinstance(value, torch.Tensor) and value.is_floating_point():
                holder[key] = value.flatten()[:-1] if rng.random() < 0.5 else value * float("nan")
            case _ if isinstance(value, int | float):
                holder[key] = value + rng.choice([1, -1, 10**9, 0.5])
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()
