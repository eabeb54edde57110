"""What people expect of training: evaluation, the best weights kept, augmentation, clear
settings.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.transforms import v2

from colab_utils.course.sample_data import make_dataset
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.dataset import ShardDataset
from colab_utils.shards.write import write_shards
from colab_utils.training import trainer
from colab_utils.training.checkpoint import CheckpointFolder
from colab_utils.training.evaluate import AveragePrecision, evaluate
from colab_utils.training.model import load_trained_model
from colab_utils.training.report import LogLine
from colab_utils.training.step import TrainingStep
from colab_utils.training.train import train
from tests.tiny_model import TINY_MODEL

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*is finished"),
]
TINY = {
    "model": TINY_MODEL,
    "weights": None,
    "min_size": 64,
    "max_size": 96,
    "workers": 0,
    "device": "cpu",
    "batch_size": 2,
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("six")
    made = make_dataset(
        folder / "data",
        n=6,
        width=96,
        height=80,
        objects=(1, 3),
        workers=1,
    )
    write_shards(made.images, made.annotations, shards=folder / "shards", workers=1)
    return folder / "shards"


def script_precision(monkeypatch, values):
    """Evaluations find these average precisions of masks, one after another; returns the steps of
    the calls.
    """
    left = iter(values)

    def score(model, dataset, **more):
        return AveragePrecision(0.0, next(left), 0.0, 0.0, 6)

    monkeypatch.setattr(trainer, "evaluate", score)


@pytest.mark.usefixtures("every_step")
def test_the_best_weights_are_kept(shards, tmp_path):
    lines = []
    report = train(
        shards,
        tmp_path,
        epochs=2,
        val_shards=shards,
        log=lines.append,
        **TINY,
    )
    evaluated = {line.ap.step: line.ap for line in lines if isinstance(line, LogLine) and line.ap}
    # Each epoch but the last was evaluated in a line, and the last is that of the report.
    assert set(evaluated) == {3}
    every = {**evaluated, 6: report.ap}
    best = max(every, key=lambda step: every[step].segm)
    assert report.best.segm == pytest.approx(every[best].segm)
    (kept,) = tmp_path.glob("best-*.pt")
    assert kept.name == f"best-{report.best.step:08d}.pt"
    weights = torch.load(kept, weights_only=True)
    assert weights["step"] == report.best.step
    assert weights["class_names"] == ShardDataset(shards, contiguous_labels=True).class_names
    model = load_trained_model(tmp_path, which="best")
    assert evaluate(model, ShardDataset(shards, contiguous_labels=True)).segm == pytest.approx(
        report.best.segm
    )


def test_a_longer_run_does_not_lose_its_best(shards, tmp_path, monkeypatch):
    script_precision(monkeypatch, [0.5, 0.3, 0.2])
    first = train(
        shards,
        tmp_path / "run",
        epochs=1,
        val_shards=shards,
        **TINY,
    )
    assert (first.best.step, first.best.segm) == (3, 0.5)
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    report = train(
        shards,
        moved,
        epochs=3,
        val_shards=shards,
        **TINY,
    )
    assert (report.best.step, report.best.segm) == (3, 0.5)
    assert [path.name for path in moved.glob("best-*.pt")] == ["best-00000003.pt"]


def test_the_best_on_other_images_is_not_compared(shards, tmp_path, monkeypatch):
    made = make_dataset(
        tmp_path / "data", n=2, width=96, height=80, objects=(1, 3), seed=5, workers=1
    )
    write_shards(made.images, made.annotations, shards=tmp_path / "other", workers=1)
    script_precision(monkeypatch, [0.9, 0.1])
    train(
        shards,
        tmp_path / "run",
        steps=2,
        val_shards=shards,
        **TINY,
    )
    report = train(
        shards,
        tmp_path / "run",
        steps=3,
        val_shards=tmp_path / "other",
        **TINY,
    )
    assert report.best.segm == 0.1
    assert train(shards, tmp_path / "run", steps=3, **TINY).best is None


def test_ctrl_c_at_the_end_of_a_run_is_not_lost(shards, tmp_path, monkeypatch):
    save = CheckpointFolder.save

    def interrupt(self, state, *, step, **more):
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return save(self, state, step=step, **more)

    monkeypatch.setattr(CheckpointFolder, "save", interrupt)
    monkeypatch.setattr(trainer, "evaluate", lambda *given, **more: pytest.fail("it goes on"))
    with pytest.raises(KeyboardInterrupt):
        train(
            shards,
            tmp_path,
            steps=3,
            val_shards=shards,
            **TINY,
        )
    assert (tmp_path / "checkpoint-00000003.pt").exists()


def test_ctrl_c_during_an_evaluation_interrupts_at_once_and_saves(shards, tmp_path, monkeypatch):
    def interrupt(*given, **more):
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it goes on")

    monkeypatch.setattr(trainer, "evaluate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(
            shards,
            tmp_path,
            epochs=2,
            val_shards=shards,
            **TINY,
        )
    assert (tmp_path / "checkpoint-00000003.pt").exists()


def test_nothing_is_written_when_train_has_ended(shards, tmp_path, monkeypatch):
    """A new run in the same folder would find a checkpoint of the one before."""
    save = CheckpointFolder.save
    real = TrainingStep.__call__
    running = []

    def save_slowly(self, state, *, step, **more):
        running.append(step)
        time.sleep(0.3)
        path = save(self, state, step=step, **more)
        running.remove(step)
        return path

    def fail_third(self, *given, **more):
        if self.calls == 2:
            raise ZeroDivisionError
        self.calls += 1
        return real(self, *given, **more)

    monkeypatch.setattr(CheckpointFolder, "save", save_slowly)
    monkeypatch.setattr(TrainingStep, "calls", 0, raising=False)
    monkeypatch.setattr(TrainingStep, "__call__", fail_third)
    with pytest.raises(ZeroDivisionError):
        train(
            shards,
            tmp_path,
            steps=4,
            checkpoint_steps=1,
            **TINY,
        )
    assert running == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "begun.txt",
        "checkpoint-00000001.pt",
        "checkpoint-00000002.pt",
    ]


def test_boxes_without_an_area_are_said_to_come_from_your_transforms(shards, tmp_path):
    own = v2.RandomCrop((20, 20))
    with pytest.raises(
        ColabUtilsError, match=r"which has no area.*your transforms with v2\.SanitizeBoundingBoxes"
    ):
        train(
            shards,
            tmp_path,
            steps=6,
            augment=own,
            **TINY,
        )


def test_transforms_may_keep_only_what_torchvision_needs(shards, tmp_path):
    def keep(image, target):
        return (
            image,
            {name: target[name] for name in ("boxes", "labels", "masks", "image_id")},
        )

    assert (
        train(
            shards,
            tmp_path,
            steps=1,
            augment=keep,
            **TINY,
        ).steps
        == 1
    )


def test_no_best_without_validation_images(shards, tmp_path):
    report = train(shards, tmp_path, steps=1, **TINY)
    assert report.best is None
    with pytest.raises(ColabUtilsError, match="Train with validation shards first"):
        load_trained_model(tmp_path, which="best")


def test_a_run_without_flips_stays_so_and_trains_otherwise(shards, tmp_path):
    flipped = train(shards, tmp_path / "flipped", steps=3, **TINY)
    whole = train(shards, tmp_path / "whole", steps=3, augment="none", **TINY)
    train(shards, tmp_path / "parts", steps=2, augment="none", **TINY)
    parts = train(shards, tmp_path / "parts", steps=3, **TINY)
    assert parts.plan.augment == "none"
    assert parts.losses == whole.losses != flipped.losses


def test_transforms_of_ones_own_run_on_the_device_and_resume(shards, tmp_path):
    seen = []

    class Look(nn.Module):
        def forward(self, image, target):
            seen.append(
                (
                    image.dtype,
                    type(target["boxes"]).__name__,
                    tuple(target["masks"].shape[1:]),
                )
            )
            return image, target

    own = v2.Compose([v2.RandomHorizontalFlip(0.5), v2.RandomPhotometricDistort(), Look()])
    whole = train(
        shards,
        tmp_path / "whole",
        steps=4,
        augment=own,
        **TINY,
    )
    train(
        shards,
        tmp_path / "parts",
        steps=2,
        augment=own,
        **TINY,
    )
    parts = train(
        shards,
        tmp_path / "parts",
        steps=4,
        augment=own,
        **TINY,
    )
    assert parts.losses == whole.losses
    assert seen[0] == (torch.uint8, "BoundingBoxes", (80, 96))
    with pytest.raises(ColabUtilsError, match=r"The run of .* was begun with transforms"):
        train(shards, tmp_path / "parts", steps=5, **TINY)


def test_a_log_line_tells_every_value():
    line = LogLine(
        40,
        200,
        1.9123,
        0.005,
        5.31,
        0.024,
        9_100_000_000,
        AveragePrecision(0.3, 0.2, 0.5, 0.4, 9, 30),
    )
    assert str(line) == (
        "step 40/200  loss 1.912  lr 0.00500  5.3 images/s  wait 2%  GPU 9.1 GB  after step 30: "
        "AP of boxes 0.300 "
        "(0.500 at IoU 0.5), of masks 0.200 (0.400 at IoU 0.5), 9 images"
    )
