"""What makes a batch fit into a GPU's memory, on a CPU whose memory counts as a GPU's does."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
import torch

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import collate_packed
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.dataset import ShardDataset
from colab_utils.shards.copy import Copying
from colab_utils.training.losses import compute_losses
from colab_utils.training.model import build_mask_rcnn
from colab_utils.training.prepare import _find_heaviest, plan_memory
from colab_utils.training.settings import TrainSettings
from colab_utils.training.step import TrainingStep
from colab_utils.training.train import train
from tests.simulated_gpu import SimulatedGpu
from tests.tiny_model import TINY_MODEL
from tests.training.small_shards import TINY, make_shards

pytestmark = [
    pytest.mark.usefixtures("one_thread", "few_objects"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a real GPU takes no limit"),
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Eight images, one of them with many objects."""
    folder = tmp_path_factory.mktemp("mixed")
    make_shards(folder, n=8, width=160, height=128, objects=(1, 12))
    return ShardDataset(folder / "shards", contiguous_labels=True)


def make_step(dataset, device="cpu"):
    torch.manual_seed(0)
    classes = dataset.num_classes
    network = build_mask_rcnn(TINY_MODEL, num_classes=classes, weights=None, min_size=128)
    return TrainingStep(network, device)


def plan(dataset, monkeypatch, *, limit=4_000_000_000, batch_size=0):
    """The plan on a GPU of so many bytes, and the step that it is for."""
    with SimulatedGpu(monkeypatch, limit=limit):
        step = make_step(dataset, "cuda")
        settings = TrainSettings(batch_size=batch_size)
        return plan_memory(step, dataset, np.arange(len(dataset)), settings), step


def test_the_heaviest_batch_is_the_largest_image_and_those_with_most_objects():
    sizes = np.array(
        [
            [100, 100],
            [64, 200],
            [200, 320],
            [200, 320],
            [280, 200],
            [64, 200],
        ]
    )
    counts = np.array([1, 50, 5, 7, 90, 3])
    # Of two images of the largest size, the one with more objects comes first. Wide ones follow by
    # their objects, and the tall one, beside which they would be padded, comes last.
    assert _find_heaviest(sizes, counts).tolist() == [3, 1, 2, 5, 0, 4]


def test_the_heaviest_batch_is_tried_and_forgotten(dataset, monkeypatch):
    shard_plan, step = plan(dataset, monkeypatch, batch_size=2)
    assert (shard_plan.batch_size, shard_plan.parts) == (2, 1)
    assert 0 < shard_plan.peak_bytes < shard_plan.limit_bytes < 4_000_000_000
    expected = make_step(dataset).model.state_dict()
    for name, value in step.model.state_dict().items():
        assert torch.equal(value.cpu(), expected[name])
    assert step.model.transform.min_size == (128,)
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_the_batch_that_is_tried_is_as_heavy_as_the_one_that_is_trained(dataset, monkeypatch):
    with SimulatedGpu(monkeypatch) as gpu:
        step = make_step(dataset, "cuda")
        tried = plan_memory(step, dataset, np.arange(len(dataset)), TrainSettings(batch_size=4))
        counts = dataset.describe(range(len(dataset)))["counts"]
        heaviest = _find_heaviest(dataset.sizes, counts)[:4].tolist()
        batch = collate_packed([dataset.read_packed(i) for i in heaviest]).to("cuda")
        gpu.memory.reset_peak()
        step.add_gradients(batch)
        assert tried.peak_bytes == pytest.approx(gpu.memory.peak, rel=0.1)


def test_loose_files_are_tried_without_sizes_and_without_the_bad_one(tmp_path, monkeypatch):
    made = make_shards(tmp_path, n=4)
    content = json.loads(made.annotations.read_text())
    for image in content["images"]:
        del image["width"], image["height"]
    made.annotations.write_text(json.dumps(content))
    loose = CocoFolder(made.images, made.annotations, contiguous_labels=True)
    loose.find_path(int(loose.counts.argmax())).unlink()
    assert plan(loose, monkeypatch, batch_size=2)[0].batch_size == 2


def test_on_a_gpu_training_begins_with_the_first_shard(tiny_shards, tmp_path, monkeypatch):
    arrived = []
    opened = threading.Event()
    real = Copying.copy_file

    def copy_file(self, name, *rest):
        # The index and the first shard arrive, and the others after the first step.
        if list((tmp_path / "ssd").glob("*.tar")):
            opened.wait(20)
        return real(self, name, *rest)

    def note(line):
        if getattr(line, "step", 0) == 1:
            arrived.extend((tmp_path / "ssd").glob("*.tar"))
            opened.set()

    monkeypatch.setattr(Copying, "copy_file", copy_file)
    monkeypatch.setattr("colab_utils.training.prepare._BATCH_SIZES", (2, 1))
    options = {**TINY, "batch_size": "auto", "ssd": tmp_path / "ssd", "log": note}
    with SimulatedGpu(monkeypatch):
        report = train(tiny_shards, tmp_path / "run", **options)
    assert len(arrived) == 1
    assert report.plan.peak_bytes > 0


def test_auto_takes_the_largest_batch_that_fits(dataset, monkeypatch):
    generous, _ = plan(dataset, monkeypatch)
    # There are no more images than these.
    assert generous.batch_size == 8
    tight, _ = plan(dataset, monkeypatch, limit=int(generous.peak_bytes * 0.9))
    assert tight.batch_size in (2, 4)
    assert tight.parts == 1
    assert tight.peak_bytes < generous.peak_bytes


def test_a_named_batch_is_trained_in_more_and_more_parts(dataset, monkeypatch):
    """The less memory, the more is done for it; every object is still trained on, by the same
    model.
    """
    generous, _ = plan(dataset, monkeypatch, batch_size=4)
    limit = int(generous.peak_bytes * 0.6)
    shard_plan, _ = plan(dataset, monkeypatch, limit=limit, batch_size=4)
    assert shard_plan.peak_bytes < generous.peak_bytes
    assert (shard_plan.batch_size, shard_plan.parts) == (4, 4)


def test_an_image_that_does_not_fit_alone_is_said(dataset, monkeypatch):
    with pytest.raises(
        ColabUtilsError,
        match=r"^One image with .* does not fit .* set min_size .*freeze stages.*lists\.$",
    ):
        plan(dataset, monkeypatch, limit=6_000_000, batch_size=1)


def test_what_a_try_took_that_failed_is_free_again(dataset, monkeypatch):
    """Autograd keeps the graph of a backward pass that failed: a smaller batch would find no room
    beside it.
    """
    with SimulatedGpu(monkeypatch) as gpu:
        step = make_step(dataset, "cuda")
        batch = collate_packed([dataset.read_packed(i) for i in range(8)]).to("cuda")
        step.add_gradients(batch)
        step.free_memory()
        before = gpu.memory.count_held()
        loss = torch.stack([*compute_losses(step.model, batch).values()]).sum()
        # The forward pass did fit into this memory.
        gpu.memory.limit = gpu.memory.count_held()
        with pytest.raises(torch.cuda.OutOfMemoryError):
            loss.backward()
        del loss
        gpu.memory.limit = 4_000_000_000
        step.free_memory()
        assert gpu.memory.count_held() < before + 1_000_000


def test_a_dense_set_trains_in_little_memory(tmp_path, monkeypatch):
    """Images of 300 objects: dense masks of one are 300 x 240 x 320 bytes, and four times that as
    floats.
    """
    make_shards(tmp_path, n=2, width=320, height=240, objects=(200, 200))
    options = {**TINY, "batch_size": "auto", "min_size": 320, "max_size": 480}
    with SimulatedGpu(monkeypatch, limit=150_000_000) as gpu:
        report = train(tmp_path / "shards", tmp_path / "run", epochs=1, **options)
        assert report.steps * report.plan.batch_size >= 2
        assert "memory: the heaviest batch takes" in str(report.plan)
        assert gpu.memory.peak <= gpu.memory.limit
