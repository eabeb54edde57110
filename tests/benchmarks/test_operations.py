"""What a step asks of a device: these figures fall, and never rise."""

from __future__ import annotations

import json

import pytest

from benchmarks import operations
from benchmarks.operations import count_step, main, make_batch, make_small
from colab_utils.training.model import GPU_MODEL, LIGHT_MODEL
from tests.tiny_model import TINY_MODEL


@pytest.mark.parametrize(
    ("name", "operations", "references", "share"),
    [
        ("maskrcnn_resnet50_fpn", 1349, 4104, 0.33),
        (GPU_MODEL, 1421, 4336, 0.33),
        (LIGHT_MODEL, 1394, 3761, 0.38),
    ],
)
def test_a_step_asks_for_a_third_of_the_references_operations(
    name, operations, references, share, one_thread
):
    """With a batch of 8; the references were counted by the command."""
    found = count_step(make_small(name), make_batch(8), ours=True)
    assert found["operations"] <= operations <= share * references
    assert found["waits"] == 1


def test_operations_hardly_grow_with_the_batch(one_thread):
    few, many = (
        count_step(make_small(TINY_MODEL), make_batch(size), ours=True)["operations"]
        for size in (2, 16)
    )
    assert many <= 1.1 * few


def test_the_command_counts_both(tmp_path, monkeypatch, capsys, one_thread):
    monkeypatch.setattr(operations, "MODELS", (TINY_MODEL,))
    assert (
        main(["--json", str(tmp_path / "found.json"), "--models", TINY_MODEL, "--batch-sizes", "2"])
        == 0
    )
    ours, theirs = json.loads((tmp_path / "found.json").read_text())
    assert ours["operations"] < theirs["operations"]
    assert ours["waits"] < theirs["waits"]
    assert f"{ours['operations']:,}" in capsys.readouterr().out
