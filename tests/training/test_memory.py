"""The plan for a GPU's memory, on a CPU whose memory counts as a GPU's does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import BatchNorm2d

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import collate_packed
from colab_utils.loading.dataset import ShardDataset
from colab_utils.sample_data import make_dataset
from colab_utils.shards.write import write_shards
from colab_utils.training import train as loop
from colab_utils.training.augment import view_sizes
from colab_utils.training.losses import compute_losses
from colab_utils.training.memory import MEMORY_REDUCTIONS, MemoryFit, fit_memory, plan_memory
from colab_utils.training.model import LIGHT_MODEL, assemble_mask_rcnn, build_mask_rcnn, load_trained_model
from colab_utils.training.settings import TrainingPlan
from colab_utils.training.step import TrainingStep, free_memory
from colab_utils.training.train import train
from tests.training.fake_gpu import FakeGpu

pytestmark = pytest.mark.usefixtures("one_thread", "few_objects")
GENEROUS = 4_000_000_000


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Eight images, one of them with many objects."""
    folder = tmp_path_factory.mktemp("mixed")
    made = make_dataset(folder / "data", n=8, width=160, height=128, objects=(1, 12), workers=1)
    write_shards(made.images, made.annotations, shards=folder / "shards", workers=1)
    return ShardDataset(folder / "shards", contiguous_labels=True)


def make_step(dataset, **sizes):
    torch.manual_seed(0)
    model = build_mask_rcnn(LIGHT_MODEL, num_classes=dataset.num_classes, weights=None, **{"min_size": 128, **sizes})
    return TrainingStep(model, "cpu")


def plan(step, dataset, gpu, *, batch_size=None):
    gpu.count(step.model.parameters())
    tables = dataset.describe(range(len(dataset)))
    return plan_memory(
        step, gpu, read=dataset.read_packed, ids=dataset.image_ids, batch_size=batch_size,
        sizes=view_sizes(tables["sizes"], step.model.transform), counts=tables["counts"],
    )  # fmt: skip


def test_a_sum_is_found_again():
    true = MemoryFit(5e8, 300.0, 2e5, 0.02)
    pixels, objects = np.meshgrid([1e5, 4e5, 1e6], [3, 300])
    peaks = true.predict(pixels, objects).ravel()
    found = fit_memory(pixels.ravel().tolist(), objects.ravel().tolist(), peaks.tolist())
    assert found.predict(2e6, 100) == pytest.approx(true.predict(2e6, 100), rel=1e-6)
    assert "a megapixel" in str(found)


def test_no_part_is_below_zero():
    found = fit_memory([1e5, 1e6, 1e5, 1e6], [1, 1, 50, 50], [9e8, 9.9e8, 8.9e8, 9.8e8])
    assert min(found.fixed, found.per_pixel, found.per_object, found.per_pair) >= 0


def test_the_heaviest_batch_is_found_and_tried(dataset):
    step = make_step(dataset)
    found = plan(step, dataset, gpu := FakeGpu(GENEROUS), batch_size=2)
    counts = dataset.describe(range(len(dataset)))["counts"]
    assert found.objects >= counts.max()
    assert found.savings == ()
    assert found.too_large == ()
    assert 0 < found.peak < found.limit < GENEROUS
    # what is predicted of one image is about what is then measured
    batch = collate_packed([dataset.read_packed(int(counts.argmax()))])
    peak = gpu.measure_peak(lambda: step.add_gradients(batch))
    size = view_sizes(dataset.sizes, step.model.transform)[counts.argmax()]
    area = int((-(-size // 32) * 32).prod())
    assert found.fit.predict(area, counts.max()) == pytest.approx(peak, rel=0.3)
    assert str(found).startswith("the heaviest batch (2 images, ")


def test_nothing_is_changed_by_planning(dataset):
    step, other = make_step(dataset), make_step(dataset)
    before = torch.get_rng_state()
    plan(step, dataset, FakeGpu(GENEROUS), batch_size=2)
    assert torch.equal(torch.get_rng_state(), before)
    state, expected = step.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in state.items())
    assert step.model.transform.min_size == (128,)
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_auto_takes_the_largest_batch_that_fits(dataset):
    generous = plan(make_step(dataset), dataset, FakeGpu(GENEROUS))
    assert generous.batch_size == 16 or generous.batch_size == 8  # more than there are images is no use to try
    step = make_step(dataset)
    fit = plan(step, dataset, FakeGpu(GENEROUS), batch_size=1).fit
    tight = plan(make_step(dataset), dataset, FakeGpu(int(fit.predict(160 * 128, 12) * 1.6)))
    assert tight.batch_size < generous.batch_size
    assert tight.savings == ()


def test_savings_come_in_the_order_of_least_harm(dataset):
    """The less memory, the more is saved; every object is still trained on."""
    whole = plan(make_step(dataset), dataset, FakeGpu(GENEROUS), batch_size=4)
    seen = []
    for share in (0.8, 0.5):
        found = plan(make_step(dataset), dataset, FakeGpu(int(whole.peak * share)), batch_size=4)
        assert list(found.savings) == [saving.name for saving in MEMORY_REDUCTIONS if saving.name in found.savings]
        assert found.peak < whole.peak
        assert found.objects == whole.objects
        seen.append(len(found.savings))
    assert seen == sorted(seen)
    assert seen[-1] > seen[0] >= 1
    assert "so that it fits: each batch in 2 parts (a little slower)" in str(found)


def test_the_heaviest_batch_is_as_large_as_chance_may_make_it(dataset):
    """Large-scale jitter shows an image at a tenth of its size, too."""
    peaks = []
    for seed in range(3):
        step = make_step(dataset)
        step.jitter_side = 160
        step.model.transform.min_size = (64, 128)
        torch.manual_seed(seed)
        tables = dataset.describe(range(len(dataset)))
        gpu = FakeGpu(GENEROUS)
        gpu.count(step.model.parameters())
        sizes = view_sizes(tables["sizes"], step.model.transform, jitter_side=160)
        found = plan_memory(step, gpu, read=dataset.read_packed, ids=dataset.image_ids, sizes=sizes,
                            counts=tables["counts"], batch_size=1)  # fmt: skip
        peaks.append(found.peak)
        assert step.model.transform.min_size == (64, 128)
    assert max(peaks) < 1.1 * min(peaks)


def test_a_gpu_that_is_full_is_said(dataset):
    with pytest.raises(ColabUtilsError, match="room for one image on the GPU"):
        plan(make_step(dataset), dataset, FakeGpu(30_000_000), batch_size=2)


@pytest.mark.parametrize("saving", MEMORY_REDUCTIONS, ids=str)
def test_a_saving_leaves_a_step_that_trains(dataset, saving):
    step = make_step(dataset)
    step.model.starts_from = "imagenet"
    batch = collate_packed([dataset.read_packed(i) for i in range(8)])
    applied = saving.apply(step, 8)
    while applied and saving.name.endswith("parts") and step.parts < int(saving.name[0]):
        saving.apply(step, 8)
    assert applied
    before = [parameter.clone() for parameter in step.model.parameters() if parameter.requires_grad]
    step.optimizer = torch.optim.SGD([p for p in step.model.parameters() if p.requires_grad], lr=0.01)
    assert torch.isfinite(step(batch))
    after = [parameter for parameter in step.model.parameters() if parameter.requires_grad]
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_checkpointing_gives_the_same_gradients_and_statistics(dataset):
    batch = collate_packed([dataset.read_packed(i) for i in range(2)])
    plain, saved = make_step(dataset), make_step(dataset)
    (checkpointing,) = (saving for saving in MEMORY_REDUCTIONS if saving.name == "checkpointing")
    assert checkpointing.apply(saved, 2)
    assert not checkpointing.apply(saved, 2)  # nothing is left to save
    for step in (plain, saved):
        torch.manual_seed(1)
        step.add_gradients(batch)
    pairs = zip(plain.model.named_parameters(), saved.model.parameters(), strict=True)
    assert all(torch.allclose(a.grad, b.grad, atol=1e-6) for (_, a), b in pairs if a.grad is not None)
    for (name, a), (_, b) in zip(plain.model.named_buffers(), saved.model.named_buffers(), strict=True):
        if name.endswith(("running_mean", "running_var")):
            assert torch.allclose(a, b, atol=1e-5), name


def test_random_weights_are_never_frozen(dataset):
    (freezing,) = (saving for saving in MEMORY_REDUCTIONS if saving.name == "frozen")
    step = make_step(dataset)
    assert not freezing.apply(step, 1)
    assert all(parameter.requires_grad for parameter in step.model.parameters())


@pytest.fixture(scope="module")
def dense_shards(tmp_path_factory):
    """Four images of 300 objects: dense masks of one are 300 x 240 x 320 bytes, and four times that as floats."""
    folder = tmp_path_factory.mktemp("dense")
    made = make_dataset(folder / "data", n=4, width=320, height=240, objects=(300, 300), workers=1)
    write_shards(made.images, made.annotations, shards=folder / "shards", workers=1)
    return folder / "shards"


def test_what_a_try_took_that_failed_is_free_again(dataset):
    """Autograd keeps the graph of a backward pass that failed: a smaller batch would find no room beside it."""
    step, batch = make_step(dataset), collate_packed([dataset.read_packed(i) for i in range(8)])
    gpu = FakeGpu(GENEROUS)
    gpu.count(step.model.parameters())
    peak = gpu.measure_peak(lambda: step.add_gradients(batch))
    free_memory(step)
    gpu.measure_peak(int)
    before = gpu.held
    gpu.limit, step.parts = int(0.95 * peak), 8
    with pytest.raises(torch.cuda.OutOfMemoryError):
        gpu.measure_peak(lambda: fail_in_backward(step, batch, gpu))
    free_memory(step)
    gpu.measure_peak(int)
    assert gpu.held < before + 1_000_000


def fail_in_backward(step, batch, gpu):
    loss = torch.stack([*compute_losses(step.model, batch).values()]).sum()
    gpu.limit = gpu.held  # the forward pass did fit
    loss.backward()


def test_a_dense_set_trains_where_torchvisions_path_runs_out_of_memory(dense_shards, tmp_path, monkeypatch):
    gpu, plans = FakeGpu(500_000_000), []
    monkeypatch.setattr(loop, "find_memory_probe", lambda device: gpu)
    step = TrainingStep.__call__

    def count_memory(self, *given, **more):
        gpu.count(self.model.parameters())
        with gpu:
            return step(self, *given, **more)

    monkeypatch.setattr(TrainingStep, "__call__", count_memory)
    sizes = {"weights": None, "min_size": 320, "max_size": 480, "device": "cpu", "workers": 0}
    report = train(dense_shards, tmp_path / "run", epochs=1, log=plans.append, **sizes)
    assert report.steps * report.plan.batch_size >= 4
    assert isinstance(plans[0], TrainingPlan)
    assert "memory: the heaviest batch (" in str(plans[0])
    assert gpu.peak <= gpu.limit
    # the same images by torchvision's own path
    dataset = ShardDataset(dense_shards, contiguous_labels=True)
    model = build_mask_rcnn(LIGHT_MODEL, num_classes=dataset.num_classes, weights=None, min_size=320, max_size=480)
    image, target = dataset[0]
    with pytest.raises(torch.cuda.OutOfMemoryError):
        gpu.measure_peak(lambda: sum(model([image.float() / 255], [target]).values()).backward())


def test_a_resumed_run_saves_as_it_did_before(dataset, tmp_path, monkeypatch):
    """On a machine with more memory, too: what the model sees must not change in the middle of a run."""
    whole = plan(make_step(dataset), dataset, FakeGpu(GENEROUS), batch_size=4)
    monkeypatch.setattr(loop, "find_memory_probe", lambda device: FakeGpu(int(whole.peak * 0.7)))
    sizes = {"weights": None, "min_size": 128, "device": "cpu", "workers": 0, "batch_size": 4}
    first = train(dataset.folder, tmp_path, steps=1, **sizes)
    assert first.plan.savings
    monkeypatch.setattr(loop, "find_memory_probe", lambda device: FakeGpu(GENEROUS))
    second = train(dataset.folder, tmp_path, steps=2, **sizes)
    assert second.plan.savings == first.plan.savings
    assert second.plan.first_step == 1
    smaller = any(name.startswith("input") for name in first.plan.savings)
    assert (load_trained_model(tmp_path).transform.min_size[0] < 128) == smaller


def test_layers_that_are_frozen_later_leave_the_optimiser(dataset, tmp_path, monkeypatch):
    """As where a run goes on with less memory than it was begun with."""
    (freezing,) = (saving for saving in MEMORY_REDUCTIONS if saving.name == "frozen")

    def build(name, *, weights, class_names, **sizes):
        return assemble_mask_rcnn(name, starts_from="imagenet", **sizes)  # random weights are never frozen

    monkeypatch.setattr(loop, "build_mask_rcnn", build)
    sizes = {"min_size": 64, "device": "cpu", "workers": 0, "batch_size": 2}
    first = train(dataset.folder, tmp_path, steps=1, **sizes)
    monkeypatch.setattr(loop, "_plan_memory", lambda step, *given: freezing.apply(step, 2) and None)
    second = train(dataset.folder, tmp_path, steps=2, **sizes)
    before, after = (torch.load(report.checkpoint, weights_only=True)["optimizer"] for report in (first, second))
    assert 0 < len(after["state"]) < len(before["state"])
    assert second.losses[:1] == first.losses


def test_what_is_run_again_sees_each_batch_twice_and_nothing_else_does(dataset):
    (checkpointing, freezing) = (saving for saving in MEMORY_REDUCTIONS if saving.name in ("checkpointing", "frozen"))
    step = make_step(dataset)
    step.model.starts_from = "imagenet"
    stages = [stage for stage in step.model.backbone.body.children() if any(True for _ in stage.parameters())]
    stages[0].requires_grad_(False)
    norms = [norm for stage in stages for norm in stage.modules() if isinstance(norm, BatchNorm2d)]
    of_first, of_last = (sum(isinstance(n, BatchNorm2d) for n in stages[i].modules()) for i in (0, -1))
    before = [norm.momentum for norm in norms]
    checkpointing.apply(step, 2)
    found = [norm.momentum for norm in norms]
    assert found[:of_first] == before[:of_first]  # it needs no gradients
    assert all(new < old for old, new in zip(before[of_first:], found[of_first:], strict=True))
    freezing.apply(step, 2)
    found = [norm.momentum for norm in norms]
    kept = len(norms) - of_last
    assert found[:kept] == pytest.approx(before[:kept])
