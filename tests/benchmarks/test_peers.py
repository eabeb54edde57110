"""Other libraries as strategies, where they are installed, and through the command that passes them
in.
"""

import gc
import json
import sys

import pytest

from benchmarks.compare import main
from benchmarks.peers import PEERS
from colab_utils.comparison.compare import compare
from colab_utils.loading.emulated_step import EmulatedStep


@pytest.fixture(autouse=True)
def no_workers_left():
    """Some libraries' loaders end their workers when Python collects them, and not before."""
    yield
    gc.collect()


@pytest.mark.filterwarnings("ignore")
def test_a_library_gives_the_same_samples(tiny_dataset, tmp_path):
    pytest.importorskip("webdataset")
    comparison = compare(
        tiny_dataset.images,
        tiny_dataset.annotations,
        folder=tmp_path,
        strategies=[PEERS["webdataset"]],
        drive_profile="none",
        step=EmulatedStep(2),
        batch_size=2,
        batches=2,
        repeats=1,
        workers=1,
        timeline_s=0.1,
    )
    (row,) = comparison.strategies
    assert (row.comparable, row.difference, row.note) == (True, "", "")
    assert row.images_per_second > 0


def test_the_command_passes_the_peers_in_and_names_a_library_that_is_missing(
    tiny_dataset, tmp_path, monkeypatch
):
    # This stands for a machine where litdata is not installed.
    monkeypatch.setitem(sys.modules, "litdata", None)
    arguments = {
        "--images": tiny_dataset.images,
        "--annotations": tiny_dataset.annotations,
        "--report": tmp_path / "report",
        "--strategies": "sequential,litdata",
        "--step-ms": 2,
        "--batch-size": 2,
        "--batches": 2,
        "--repeats": 1,
        "--seconds": 0.1,
    }
    assert main([str(part) for pair in arguments.items() for part in pair]) == 0
    receipt = json.loads((tmp_path / "report" / "comparison.json").read_bytes())
    ours, peer = receipt["strategies"]
    assert ours["images_per_second"] > 0
    assert peer["images_per_second"] is None
    assert "litdata" in peer["note"]
