"""One step by its own: precision, parts of a batch, learning rate and timer."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch import nn

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.training.step import TrainingStep


class TinyDetector(nn.Module):
    """Losses as torchvision gives them, from one weight: what a step does to it is known
    exactly.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, images, targets):
        return {
            "loss_box": self.weight * images[0].mean(),
            "loss_mask": self.weight**2,
        }


def test_step_sums_the_losses_and_moves_the_weights():
    model = TinyDetector().eval()
    step = TrainingStep(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    loss = step([torch.ones(3, 4, 4)], [{}])
    assert model.training
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(2 + 4)
    assert model.weight.item() == pytest.approx(2 - 0.1 * (1 + 2 * 2))


# Only float16 goes through the scaler.
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_step_in_half_precision_moves_the_weights_as_far(precision, monkeypatch):
    reference = TrainingStep(TinyDetector(), "cpu")
    monkeypatch.setattr("colab_utils.training.step.choose_precision", lambda device: precision)
    step = TrainingStep(TinyDetector(), "cpu")
    assert step.scaler.is_enabled() == (precision == torch.float16)
    for _ in range(3):
        expected = reference([torch.ones(3, 4, 4)], [{}]).item()
        assert step([torch.ones(3, 4, 4)], [{}]).item() == pytest.approx(expected, rel=0.01)
    assert step.model.weight.item() == pytest.approx(reference.model.weight.item(), rel=0.001)


class NormedDetector(nn.Module):
    """A detector with a norm that is trained, whose statistics a bad batch would spoil."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 2, 1),
            nn.BatchNorm2d(2),
            nn.Flatten(),
        )

    def forward(self, images, targets):
        return {"loss": self.layers(torch.stack(images)).square().mean(1).sum()}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize(
    "precision",
    [torch.float32, torch.bfloat16, torch.float16],
)
def test_a_batch_with_a_bad_number_changes_nothing(monkeypatch, precision, kind):
    """Neither weights nor averages nor statistics, whichever step it is: what follows is the same
    as without it.
    """
    monkeypatch.setattr("colab_utils.training.step.choose_precision", lambda device: precision)
    good = [[torch.full((3, 4, 4), value)] for value in (0.5, 0.25, 0.75)]
    broken = [torch.full((3, 4, 4), float("nan"))]
    ends = []
    for batches in (good, [broken, *good[:2], broken, broken, good[2]]):
        model = NormedDetector()
        more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(model.parameters(), lr=0.01, **more)
        step = TrainingStep(model, "cpu", optimizer=optimizer)
        if step.scaler.is_enabled():
            # None of the good ones overflows.
            step.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        skipped = []
        for images in batches:
            step(images, [{}])
            skipped.append(bool(step.is_skipped))
        assert skipped == [images is broken for images in batches]
        averages = [state.values() for state in optimizer.state.values()]
        ends.append([*model.state_dict().values(), *chain(*averages)])
    for whole, disturbed in zip(*ends, strict=True):
        assert torch.allclose(whole, disturbed, atol=1e-6)


class Greedy(TinyDetector):
    """A model on a GPU that holds so many images."""

    def __init__(self, largest_batch: int, error: Exception | None = None) -> None:
        super().__init__()
        self.most = largest_batch
        self.seen = []
        self.error = error or torch.cuda.OutOfMemoryError("CUDA out of memory")

    def forward(self, images, targets):
        self.seen.append(len(images))
        if len(images) > self.most:
            raise self.error
        return super().forward(images, targets)


def make_images(count):
    """Images that a model takes, and targets that it does not look at."""
    return [torch.rand(3, 4, 4)] * count, [{"labels": torch.ones(1)}] * count


@pytest.mark.parametrize(
    ("largest_batch", "seen"),
    [
        (3, [8, 4, 2, 2, 2, 2]),
        (1, [8, 4, 2, *[1] * 8]),
    ],
)
def test_a_batch_too_large_is_trained_in_parts_with_the_same_gradients(largest_batch, seen):
    images, targets = make_images(8)
    step = TrainingStep(Greedy(largest_batch), "cpu")
    whole = TrainingStep(TinyDetector(), "cpu")
    words = "trained in [248] parts .* The effective batch size stays the same"
    with pytest.warns(ColabUtilsWarning, match=words):
        loss = step(images, targets)
    assert step.model.seen == seen
    assert loss.item() == pytest.approx(whole(images, targets).item())
    assert step.model.weight.item() == pytest.approx(whole.model.weight.item())
    step.model.seen.clear()
    # A size that did not fit is not tried again.
    step(images, targets)
    assert len(step.model.seen) == step.parts


@pytest.mark.parametrize(
    "text",
    [
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
        "non-contiguous input.",
        "GET was unable to find an engine to execute this computation",
        "CUDA error: out of memory",
    ],
)
def test_libraries_run_out_of_memory_in_words_of_their_own(text):
    step = TrainingStep(Greedy(4, RuntimeError(text)), "cpu")
    with pytest.warns(ColabUtilsWarning, match="trained in 2 parts"):
        step(*make_images(8))
    broken = TrainingStep(Greedy(4, RuntimeError("shapes do not match")), "cpu")
    with pytest.raises(RuntimeError, match="shapes"):
        broken(*make_images(8))


def test_out_of_memory_is_said_in_words():
    step = TrainingStep(Greedy(0), "cpu")
    words = "2 images of a batch do not fit .*, in 2 parts .* a smaller min_size"
    with pytest.warns(ColabUtilsWarning), pytest.raises(ColabUtilsError, match=words):
        step(*make_images(2))
