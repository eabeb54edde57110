"""What makes a batch fit into a GPU's memory, on a CPU whose memory counts as a GPU's does."""

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
from colab_utils.training.augment import resize_all
from colab_utils.training.losses import compute_losses
from colab_utils.training.memory import _find_heaviest, checkpoint_activations, plan_memory
from colab_utils.training.model import LIGHT_MODEL, build_mask_rcnn
from colab_utils.training.settings import TrainingPlan
from colab_utils.training.step import TrainingStep, free_memory
from colab_utils.training.train import train
from tests.simulated_gpu import FakeGpu
from tests.tiny_model import TINY_MODEL

pytestmark = pytest.mark.usefixtures("one_thread", "few_objects")
GENEROUS = 4_000_000_000


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Eight images, one of them with many objects."""
    folder = tmp_path_factory.mktemp("mixed")
    made = make_dataset(folder / "data", n=8, width=160, height=128, objects=(1, 12), workers=1)
    write_shards(made.images, made.annotations, shards=folder / "shards", workers=1)
    return ShardDataset(folder / "shards", contiguous_labels=True)


def make_step(dataset, *, model=TINY_MODEL):
    torch.manual_seed(0)
    network = build_mask_rcnn(model, num_classes=dataset.num_classes, weights=None, min_size=128)
    return TrainingStep(network, "cpu")


def count_objects(dataset):
    return np.array([len(dataset[i][1]["labels"]) for i in range(len(dataset))])


def plan(step, dataset, gpu, *, batch_size=None):
    gpu.count(step.model.parameters())
    return plan_memory(
        step, gpu, read=dataset.read_packed, batch_size=batch_size, counts=count_objects(dataset),
        sizes=resize_all(dataset.sizes, step.model.transform),
    )  # fmt: skip


def test_the_heaviest_batch_is_the_largest_image_and_those_with_most_objects():
    sizes = np.array([[100, 100], [64, 200], [200, 320], [200, 320], [280, 200], [64, 200]])
    counts = np.array([1, 50, 5, 7, 90, 3])
    # the larger of two as large, then wide ones by their objects; the tall one last, beside which it would be padded
    assert _find_heaviest(sizes, counts).tolist() == [3, 1, 2, 5, 0, 4]


def test_the_heaviest_batch_is_tried(dataset):
    found = plan(make_step(dataset), dataset, FakeGpu(GENEROUS), batch_size=2)
    assert (found.batch_size, found.parts, found.checkpointing) == (2, 1, False)
    assert 0 < found.peak_bytes < found.limit_bytes < GENEROUS
    assert str(found).startswith("the heaviest batch (2 images) takes ")


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
    assert generous.batch_size == 8  # there are no more images
    tight = plan(make_step(dataset), dataset, FakeGpu(int(generous.peak_bytes * 0.8)))
    assert tight.batch_size in (2, 4)
    assert (tight.parts, tight.checkpointing) == (1, False)
    assert tight.peak_bytes < generous.peak_bytes


def test_a_named_batch_is_trained_in_parts_then_with_checkpointing_then_refused(dataset):
    """The less memory, the more is done for it; every object is still trained on, by the same model."""
    generous = plan(make_step(dataset), dataset, FakeGpu(GENEROUS), batch_size=4)
    seen = []
    for share in (0.9, 0.6, 0.45, 0.36, 0.3, 0.25):
        try:
            found = plan(make_step(dataset), dataset, FakeGpu(int(generous.peak_bytes * share)), batch_size=4)
        except ColabUtilsError as error:
            assert "\n" not in str(error)
            for word in ("min_size", LIGHT_MODEL, "frozen stages", "half of the proposals"):
                assert word in str(error)
            seen.append((9, True))
            break
        assert found.peak_bytes < generous.peak_bytes
        assert found.batch_size == 4
        seen.append((found.parts, found.checkpointing))
    assert seen == sorted(seen)
    assert seen[0][0] >= 2
    assert (4, True) in seen or seen[-1] == (9, True)


def test_the_heaviest_batch_has_the_largest_of_several_sizes(dataset):
    peaks = []
    for seed in range(3):
        step = make_step(dataset)
        step.model.transform.min_size = (64, 128)
        torch.manual_seed(seed)
        peaks.append(plan(step, dataset, FakeGpu(GENEROUS), batch_size=1).peak_bytes)
        assert step.model.transform.min_size == (64, 128)
    assert max(peaks) < 1.1 * min(peaks)


def test_an_image_that_does_not_fit_alone_is_said(dataset):
    with pytest.raises(ColabUtilsError, match=r"fit into the GPU's memory one by one, .* Free memory: min_size"):
        plan(make_step(dataset), dataset, FakeGpu(6_000_000))


def test_checkpointing_gives_the_same_gradients_and_statistics(dataset):
    batch = collate_packed([dataset.read_packed(i) for i in range(2)])
    plain, saved = make_step(dataset, model=LIGHT_MODEL), make_step(dataset, model=LIGHT_MODEL)
    checkpoint_activations(saved.model)
    for step in (plain, saved):
        torch.manual_seed(1)
        step.add_gradients(batch)
    pairs = zip(plain.model.named_parameters(), saved.model.parameters(), strict=True)
    assert all(torch.allclose(a.grad, b.grad, atol=1e-6) for (_, a), b in pairs if a.grad is not None)
    for (name, a), (_, b) in zip(plain.model.named_buffers(), saved.model.named_buffers(), strict=True):
        if name.endswith(("running_mean", "running_var")):
            assert torch.allclose(a, b, atol=1e-5), name


def test_stages_that_need_no_gradients_are_not_run_again(dataset):
    step = make_step(dataset)
    stages = [*step.model.backbone.body.children()]
    stages[0].requires_grad_(False)
    norms = [[norm for norm in stage.modules() if isinstance(norm, BatchNorm2d)] for stage in stages]
    before = [norm.momentum for stage in norms for norm in stage]
    checkpoint_activations(step.model)
    assert "forward" not in vars(stages[0])
    assert all("forward" in vars(stage) for stage in stages[1:])
    after = [norm.momentum for stage in norms for norm in stage]
    assert after[0] == before[0]
    assert all(new < old for old, new in zip(before[1:], after[1:], strict=True))


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


def test_a_dense_set_trains_where_torchvisions_path_runs_out_of_memory(tmp_path, monkeypatch):
    """Images of 300 objects: dense masks of one are 300 x 240 x 320 bytes, and four times that as floats."""
    made = make_dataset(tmp_path / "data", n=4, width=320, height=240, objects=(300, 300), workers=1)
    write_shards(made.images, made.annotations, shards=tmp_path / "shards", workers=1)
    gpu, plans = FakeGpu(150_000_000), []
    monkeypatch.setattr(loop, "find_memory_probe", lambda device: gpu)
    step = TrainingStep.__call__

    def count_memory(self, *given, **more):
        gpu.count(self.model.parameters())
        with gpu:
            return step(self, *given, **more)

    monkeypatch.setattr(TrainingStep, "__call__", count_memory)
    sizes = {"model": TINY_MODEL, "weights": None, "min_size": 320, "max_size": 480, "device": "cpu", "workers": 0}
    report = train(tmp_path / "shards", tmp_path / "run", epochs=1, log=plans.append, **sizes)
    assert report.steps * report.plan.batch_size >= 4
    assert isinstance(plans[0], TrainingPlan)
    assert "memory: the heaviest batch (" in str(plans[0])
    assert gpu.peak <= gpu.limit
    # the same images by torchvision's own path
    dataset = ShardDataset(tmp_path / "shards", contiguous_labels=True)
    model = build_mask_rcnn(TINY_MODEL, num_classes=dataset.num_classes, weights=None, min_size=320, max_size=480)
    image, target = dataset[0]
    with pytest.raises(torch.cuda.OutOfMemoryError):
        gpu.measure_peak(lambda: sum(model([image.float() / 255], [target]).values()).backward())
