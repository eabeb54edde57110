"""The GPU's side of training, by a GPU's rules: on the simulated one, which every machine has, or
on a real one.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.batch import collate_packed
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import make_loader
from colab_utils.training.evaluate import _set_up, detect, evaluate
from colab_utils.training.model import assemble_mask_rcnn
from colab_utils.training.step import TrainingStep
from colab_utils.training.train import train
from tests.simulated_gpu import SimulatedGpu
from tests.tiny_model import TINY_MODEL
from tests.training.small_shards import TINY, make_shards

pytestmark = pytest.mark.usefixtures("one_thread", "few_objects")
REAL = torch.cuda.is_available()
simulated = pytest.mark.skipif(
    REAL, reason="there is a real one, which tells no waits and takes no limit"
)
real = pytest.mark.skipif(not REAL, reason="no GPU")
QUICK = {**TINY, "batch_size": 4}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    make_shards(folder, n=8, width=160, height=128, objects=(1, 8))
    return folder / "shards"


@pytest.fixture
def gpu(monkeypatch):
    if REAL:
        yield None
    else:
        with SimulatedGpu(monkeypatch) as simulated:
            yield simulated


@pytest.fixture
def train_here(shards, tmp_path):
    return partial(train, shards, tmp_path, **QUICK)


def make_model(shards):
    """As from pretrained weights: with frozen layers, and norms that can be folded."""
    torch.manual_seed(0)
    classes = ShardDataset(shards, contiguous_labels=True).num_classes
    return assemble_mask_rcnn(
        TINY_MODEL, num_classes=classes, starts_from="imagenet", min_size=96, max_size=160
    )


def test_a_gpu_that_is_not_there_is_told(train_here, shards, gpu, monkeypatch):
    """As under torchrun with more processes than GPUs."""
    count = torch.cuda.device_count()
    message = f"'cuda:{count}'.*: this machine has {count} GPUs"
    with pytest.raises(ColabUtilsError, match=message):
        make_loader(ShardDataset(shards), batch_size=1, device=f"cuda:{count}")
    monkeypatch.setenv("LOCAL_RANK", str(count))
    with pytest.raises(ColabUtilsError, match="With torchrun, start at most one process"):
        train_here(steps=1)


@simulated
def test_batches_arrive_without_waiting(shards, gpu):
    """Pinned: a copy from other memory would wait for the step before."""
    load = partial(make_loader, ShardDataset(shards), batch_size=4, workers=0, deliver="packed")
    for batch, expected in zip(load(device="cuda"), load(), strict=True):
        assert [part.is_cuda for part in (batch.pixels, batch.masks.bits, batch.sizes)] == [1, 1, 0]
        assert torch.equal(batch.pixels.cpu(), expected.pixels)
    # The only waits are those of the comparison above.
    assert {call[0] for call in gpu.waits} <= {"cpu"}


@simulated
def test_evaluation_waits_no_more_for_many_objects(shards, gpu):
    """torchvision's output of masks waits for each of them."""
    dataset = ShardDataset(shards, contiguous_labels=True)
    model = make_model(shards).eval()
    model.roi_heads.score_thresh = 0.0
    image = dataset[0][0]
    facts = {"image_id": 1, "category_ids": dataset.category_ids}
    with _set_up(model):
        expected = detect(model, image, device="cpu", **facts)
        model.to("cuda")
        gpu.waits.clear()
        results = detect(model, image, device="cuda", **facts)
        waits = gpu.waits.total()
    assert len(results) > 20
    with torch.no_grad():
        model([image.to("cuda").float() / 255])
    assert gpu.waits.total() > 2 * waits + 4 * len(results)
    for result, other in zip(results, expected, strict=True):
        assert result["segmentation"] == other["segmentation"]


def test_a_run_goes_on_there_and_elsewhere(train_here, tmp_path, gpu, monkeypatch):
    lines = []
    make_shards(tmp_path, n=2)
    val_shards = tmp_path / "shards"
    more = {"augment": "none"}
    first = train_here(steps=2, val_shards=val_shards, log=lines.append, **more)
    assert first.plan.device == "cuda:0"
    assert first.plan.precision in ("float16", "bfloat16")
    assert lines[-1].gpu_bytes > 500_000
    assert first.ap is not None
    with monkeypatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: False)
        second = train_here(steps=3, **more)
    third = train_here(steps=4)
    assert [second.plan.device, third.plan.device] == ["cpu", "cuda:0"]
    assert third.losses[:3] == second.losses
    assert second.losses[:2] == first.losses


@simulated
def test_a_run_in_float16_goes_on_with_one_that_was_not(train_here, monkeypatch):
    """There was no loss scale then."""
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: True)
    with SimulatedGpu(monkeypatch, capability=(8, 0)):
        first = train_here(steps=1)
    with SimulatedGpu(monkeypatch):
        second = train_here(steps=2)
    assert second.losses[:1] == first.losses
    # A T4 emulates bfloat16.
    assert (first.plan.precision, second.plan.precision) == ("bfloat16", "float16")
    assert math.isfinite(second.losses[1].loss)


@simulated
def test_losses_stay_on_the_gpu_until_they_are_asked_for(train_here, gpu):
    """They are after the first step, the first epoch and the last step."""
    report = train_here(steps=4)
    assert report.plan.parts == 1
    assert gpu.waits["tolist", "colab_utils.training.trainer"] <= 3


@simulated
def test_a_bad_gradient_skips_its_step_without_waiting(shards, monkeypatch):
    with SimulatedGpu(monkeypatch) as gpu:
        step = TrainingStep(make_model(shards), "cuda")
        dataset = ShardDataset(shards, contiguous_labels=True)
        batch = collate_packed([dataset.read_packed(i) for i in range(4)]).to("cuda")
        step(batch)
        bias = step.model.roi_heads.box_predictor.cls_score.bias
        before = bias.detach().clone()
        handle = bias.register_hook(lambda gradient: gradient * float("nan"))
        gpu.waits.clear()
        step(batch)
        waits = {module for _, module in gpu.waits}
        assert "colab_utils.training.step" not in waits
        assert bool(step.is_skipped)
        assert torch.equal(bias, before)
        handle.remove()
        step(batch)
        assert not bool(step.is_skipped)
        assert not torch.equal(bias, before)


@simulated
@pytest.mark.usefixtures("every_step")
def test_memory_that_runs_out_later_halves_the_batch(train_here, gpu):
    """Another program takes some of the GPU's memory in the middle of a run."""

    def take_memory(line):
        if getattr(line, "step", 0) == 2:
            held = gpu.memory.count_held()
            gpu.memory.limit = held + int(0.6 * (line.gpu_bytes - held))

    with pytest.warns(ColabUtilsWarning, match=r"trained in \d parts"):
        report = train_here(steps=4, log=take_memory)
    assert report.steps == 4
    assert report.plan.batch_size == 4


@simulated
def test_a_gpu_that_is_full_is_said(train_here, monkeypatch):
    full = pytest.raises(ColabUtilsError, match=r"does not fit into the GPU's memory")
    with SimulatedGpu(monkeypatch, limit=500_000), full:
        train_here(steps=1)


@real
def test_workers_and_evaluation_start_after_cuda(shards):
    dataset = ShardDataset(shards, contiguous_labels=True)
    model = make_model(shards).to("cuda")
    load = partial(make_loader, dataset, batch_size=4, deliver="packed", seed=1)
    for batch, expected in zip(load(workers=2, device="cuda"), load(workers=0), strict=True):
        assert torch.equal(batch.pixels.cpu(), expected.pixels)
    assert 0 <= evaluate(model, dataset, device="cuda").segm <= 1
