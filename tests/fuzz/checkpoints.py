"""Cases of checkpoints: what is read was written, or it is refused."""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch

from colab_utils.training.checkpoint import CheckpointFolder
from tests.fuzz import mutate
from tests.fuzz.originals import read_tree, write_tree
from tests.fuzz.pool import Case
from tests.fuzz.truth import WrongDataError

_LAST = "checkpoint-00000002.pt"
_TENSORS = ("weight", "other")


def checkpoint_bytes(case: Case) -> None:
    """Change bytes of the newest of two checkpoints, or of both: one that was written is read, or
    it is refused, or told as torn.
    """
    rng = case.rng
    written = case.originals.checkpoints
    folder = case.folder / "run"
    tree = dict(written)
    for name in sorted(written)[rng.randrange(2) :]:
        tree[name] = mutate.change_bytes(rng, tree[name], changes=4)
    if rng.random() < 0.1:
        tree[_LAST] = rng.choice([b"", bytes(5000), b"PK\5\6" + bytes(18), case.originals.export])
    write_tree(folder, tree)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        state = case.attempt(CheckpointFolder(folder).read, repair=rng.random() < 0.5)
    case.refused += [str(warning.message) for warning in warned]
    if state is None and not case.refused:
        raise WrongDataError("no checkpoint found, and nothing said")
    if state is not None:
        del state["path"]
        contents = written.values()
        known = [torch.load(io.BytesIO(content), weights_only=True) for content in contents]
        if _spell(state) not in map(_spell, known):
            raise WrongDataError("a checkpoint that nobody wrote")
    if sorted(read_tree(folder).values()) != sorted(tree.values()):
        raise WrongDataError("checkpoint files were lost or changed")


def _spell(state: dict[str, Any]) -> str:
    """Return a text that differs where a state's types or values differ."""
    items = state.items()
    return repr([(key, value.tolist() if key in _TENSORS else value) for key, value in items])
