"""What people expect of training: averaged weights, evaluation on the way, the best kept, schedules, events."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import warnings
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.transforms import v2

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.batch import collate_packed
from colab_utils.loading.dataset import ShardDataset
from colab_utils.sample_data import make_dataset
from colab_utils.shards.write import write_shards
from colab_utils.training.checkpoint import CheckpointFolder
from colab_utils.training.distributed import Ranks
from colab_utils.training.evaluate import AveragePrecision, Judge, Scorer, evaluate
from colab_utils.training.losses import compute_losses
from colab_utils.training.model import LIGHT_MODEL, build_mask_rcnn, load_trained_model
from colab_utils.training.settings import LogLine, check_objects, choose_settings, open_images
from colab_utils.training.step import TrainingStep, compute_rate
from colab_utils.training.train import train
from colab_utils.training.trainer import Board, WeightEMA

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = {"weights": None, "min_size": 64, "max_size": 96, "workers": 0, "device": "cpu", "batch_size": 2}


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("six")
    made = make_dataset(folder / "data", n=6, width=96, height=80, objects=(1, 3), workers=1)
    write_shards(made.images, made.annotations, shards=folder / "shards", workers=1)
    return folder / "shards"


def test_the_best_weights_are_kept(shards, tmp_path):
    lines = []
    report = train(shards, tmp_path, epochs=3, val_shards=shards, log=lines.append, log_steps=1, **TINY)
    judged = {line.ap_step: line.ap for line in lines if isinstance(line, LogLine) and line.ap}
    assert set(judged) <= {3, 6}  # after each epoch but the last, while the next one trains
    assert judged
    every = {**judged, 9: report.ap}
    best = max(every, key=lambda step: every[step].segm)
    assert report.best.segm == pytest.approx(every[best].segm)
    (kept,) = tmp_path.glob("best-*.pt")
    assert report.best.path == str(kept)
    weights = torch.load(kept, weights_only=True)
    assert weights["step"] == report.best.step
    model = load_trained_model(tmp_path, which="best")
    assert evaluate(model, ShardDataset(shards, contiguous_labels=True)).segm == pytest.approx(report.best.segm)
    assert json.dumps(report.ap.per_class[0].name)


def test_the_weights_that_were_judged_are_kept_beside_the_steps(shards, tmp_path, monkeypatch):
    """Here each evaluation ends when the next one begins, and the first one's weights are written for two steps."""
    judged, kept, written = {}, {}, threading.Event()
    begin, advance, save_best = Judge.begin, Judge.advance, CheckpointFolder.save_best

    def note_begin(self, model, step):
        judged[step] = {name: value.clone() for name, value in model.state_dict().items()}
        begin(self, model, step)

    def write_slowly(self, state, *, step):
        assert written.wait(60)
        kept[step] = state["model"]
        return save_best(self, state, step=step)

    def release(line):
        if getattr(line, "step", 0) == 8:
            written.set()

    monkeypatch.setattr(Judge, "begin", note_begin)
    monkeypatch.setattr(Judge, "advance", lambda self, to_end=False: advance(self, to_end=True) if to_end else None)
    monkeypatch.setattr(CheckpointFolder, "save_best", write_slowly)
    report = train(shards, tmp_path, epochs=3, val_shards=shards, log=release, log_steps=1, **TINY)
    assert 3 in kept
    for step, weights in kept.items():
        assert all(torch.equal(value, judged[step][name]) for name, value in weights.items() if step in judged)
    assert any(not torch.equal(value, judged[6][name]) for name, value in kept[3].items())
    assert report.best.step in kept


def script_precision(monkeypatch, values):
    """Evaluations find these average precisions of masks, one after another."""
    left = iter(values)

    def score(self, others=()):
        done = Future()
        done.set_result(AveragePrecision(0.0, next(left), 0.0, 0.0, 6, ()))
        return done

    monkeypatch.setattr(Scorer, "score", score)


def test_a_longer_run_does_not_lose_its_best(shards, tmp_path, monkeypatch):
    script_precision(monkeypatch, [0.5, 0.5, 0.3, 0.2])
    first = train(shards, tmp_path / "run", epochs=1, val_shards=shards, **TINY)
    assert (first.best.step, first.best.segm) == (3, 0.5)
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    report = train(shards, moved, epochs=3, val_shards=shards, **TINY)
    # step 3 is judged again: an epoch was over there
    assert (report.best.step, report.best.segm, report.best.path) == (3, 0.5, str(moved / "best-00000003.pt"))
    assert [path.name for path in moved.glob("best-*.pt")] == ["best-00000003.pt"]


def test_a_finished_run_does_not_lose_its_best(shards, tmp_path, monkeypatch):
    script_precision(monkeypatch, [0.1, 0.5, 0.2, 0.2])
    first = train(shards, tmp_path, epochs=3, val_shards=shards, **TINY)
    assert (first.best.step, first.best.segm) == (6, 0.5)
    second = train(shards, tmp_path, epochs=3, val_shards=shards, **TINY)
    assert (second.best.step, second.best.segm) == (6, 0.5)
    assert Path(second.best.path).exists()


def test_the_best_on_other_images_is_not_compared(shards, tmp_path, monkeypatch):
    made = make_dataset(tmp_path / "data", n=2, width=96, height=80, objects=(1, 3), seed=5, workers=1)
    write_shards(made.images, made.annotations, shards=tmp_path / "other", workers=1)
    script_precision(monkeypatch, [0.9, 0.1])
    train(shards, tmp_path / "run", steps=2, val_shards=shards, **TINY)
    report = train(shards, tmp_path / "run", steps=3, val_shards=tmp_path / "other", **TINY)
    assert report.best.segm == 0.1
    assert train(shards, tmp_path / "run", steps=3, **TINY).best is None


def test_an_epoch_that_was_over_is_judged_when_the_run_goes_on(shards, tmp_path):
    train(shards, tmp_path, epochs=1, **TINY)
    lines = []
    train(shards, tmp_path, epochs=2, val_shards=shards, log=lines.append, log_steps=1, **TINY)
    assert 3 in {line.ap_step for line in lines if isinstance(line, LogLine)}


def test_ctrl_c_at_the_end_of_a_run_is_not_lost(shards, tmp_path, monkeypatch):
    save = CheckpointFolder.save

    def interrupt(self, state, *, step, patiently=False):
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return save(self, state, step=step, patiently=patiently)

    monkeypatch.setattr(CheckpointFolder, "save", interrupt)
    monkeypatch.setattr("colab_utils.training.train.evaluate", lambda *given, **more: pytest.fail("it goes on"))
    with pytest.raises(KeyboardInterrupt):
        train(shards, tmp_path, steps=3, val_shards=shards, **TINY)
    assert (tmp_path / "checkpoint-00000003.pt").exists()


def test_nothing_is_written_when_train_has_ended(shards, tmp_path, monkeypatch):
    """A new run in the same folder would find a checkpoint of the one before."""
    save, real = CheckpointFolder.save, TrainingStep.__call__

    def save_slowly(self, state, *, step, patiently=False):
        time.sleep(1)
        return save(self, state, step=step, patiently=patiently)

    def fail_third(self, *given, **more):
        if self.calls == 2:
            raise ZeroDivisionError
        self.calls += 1
        return real(self, *given, **more)

    monkeypatch.setattr(CheckpointFolder, "save", save_slowly)
    monkeypatch.setattr(TrainingStep, "calls", 0, raising=False)
    monkeypatch.setattr(TrainingStep, "__call__", fail_third)
    with pytest.raises(ZeroDivisionError):
        train(shards, tmp_path, steps=4, checkpoint_steps=1, **TINY)
    before = sorted(tmp_path.iterdir())
    time.sleep(2)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("size", [64, 192])
def test_one_small_image_alone_has_a_batch_norm(tmp_path, size):
    """Large-scale jitter makes it a tenth as large: padded to 32 pixels, its last features would be a single one."""
    made = make_dataset(tmp_path / "data", n=1, width=96, height=80, objects=(1, 3), workers=1)
    write_shards(made.images, made.annotations, shards=tmp_path / "shards", workers=1)
    model = build_mask_rcnn(LIGHT_MODEL, num_classes=9, weights=None, min_size=size)
    batch = collate_packed([ShardDataset(tmp_path / "shards", contiguous_labels=True).read_packed(0)])
    for seed in range(12 if size == 64 else 2):
        torch.manual_seed(seed)
        assert sum(compute_losses(model, batch, jitter_side=size).values()) > 0


def test_boxes_without_an_area_are_said_to_come_from_your_transforms(shards, tmp_path):
    own = v2.RandomCrop((20, 20))
    with pytest.raises(ColabUtilsError, match=r"from your transforms, found: .* v2\.SanitizeBoundingBoxes"):
        train(shards, tmp_path, steps=6, transforms=own, **TINY)


def test_transforms_may_keep_only_what_torchvision_needs(shards, tmp_path):
    def keep(image, target):
        return image, {name: target[name] for name in ("boxes", "labels", "masks")}

    assert train(shards, tmp_path, steps=1, transforms=keep, **TINY).steps == 1


def test_no_best_without_validation_images(shards, tmp_path):
    report = train(shards, tmp_path, steps=1, **TINY)
    assert report.best is None
    with pytest.raises(ColabUtilsError, match="Train with validation shards first"):
        load_trained_model(tmp_path, which="best")


def test_an_evaluation_in_pieces_is_a_whole_one(shards):
    dataset = ShardDataset(shards, contiguous_labels=True)
    torch.manual_seed(0)
    from colab_utils.training.model import build_mask_rcnn

    model = build_mask_rcnn(LIGHT_MODEL, num_classes=dataset.num_classes, weights=None, min_size=64)
    judge = Judge(dataset, torch.device("cpu"), steps=3, ranks=Ranks())
    try:
        assert judge.advance() is None  # nothing was begun
        judge.begin(model, 7)
        with torch.no_grad():  # training goes on
            for parameter in model.parameters():
                parameter += 1
        while (found := judge.advance()) is None:
            time.sleep(0.01)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1
        assert found.step == 7
        expected = evaluate(model, dataset)
        assert (found.ap.bbox, found.ap.segm) == pytest.approx((expected.bbox, expected.segm), abs=1e-6)
        assert model.training
        judge.begin(model, 9)
        assert judge.advance(to_end=True).step == 9
    finally:
        judge.close()


def test_averaged_weights_follow_and_lag(shards):
    model = nn.Linear(1, 1, bias=False)
    averaged = WeightEMA(model, decay=0.9)
    values = []
    for value in [1.0] * 30 + [2.0] * 5:
        nn.init.constant_(model.weight, value)
        averaged.update()
        values.append(averaged.model.weight.item())
    assert values[29] == pytest.approx(1.0)
    assert 1.2 < values[-1] < 2.0
    again = WeightEMA(nn.Linear(1, 1, bias=False), decay=0.9)
    again.load_state_dict(averaged.state_dict())
    for one, linear in ((averaged, model), (again, again._source)):
        nn.init.constant_(linear.weight, 3.0)
        one.update()
    assert again.model.weight.item() == averaged.model.weight.item()


def test_a_run_with_averaged_weights_resumes_bit_for_bit(shards, tmp_path):
    whole = train(shards, tmp_path / "whole", steps=4, ema=0.99, val_shards=shards, **TINY)
    train(shards, tmp_path / "parts", steps=2, ema=0.99, **TINY)
    parts = train(shards, tmp_path / "parts", steps=4, val_shards=shards, **TINY)
    assert parts.plan.ema == 0.99
    assert parts.losses == whole.losses
    a, b = (torch.load(report.checkpoint, weights_only=True)["average"] for report in (whole, parts))
    assert all(torch.equal(value, b["model"][name]) for name, value in a["model"].items())
    assert parts.ap.segm == whole.ap.segm
    raw = torch.load(whole.checkpoint, weights_only=True)["model"]
    trained = load_trained_model(tmp_path / "whole").state_dict()
    assert any(not torch.equal(trained[name], value) for name, value in raw.items())  # it is the average
    assert all(torch.equal(trained[name], value) for name, value in a["model"].items())


@pytest.mark.parametrize("augment", ["none", "flip", "multiscale", "lsj"])
def test_every_augmentation_trains_and_resumes(shards, tmp_path, augment):
    whole = train(shards, tmp_path / "whole", steps=3, augment=augment, **TINY)
    train(shards, tmp_path / "parts", steps=2, augment=augment, **TINY)
    parts = train(shards, tmp_path / "parts", steps=3, **TINY)
    assert parts.plan.augment == augment
    assert parts.losses == whole.losses


def test_augmentations_differ(shards, tmp_path):
    losses = [train(shards, tmp_path / name, steps=2, augment=name, **TINY).losses[1].loss
              for name in ("none", "flip", "multiscale", "lsj")]  # fmt: skip
    assert len(set(losses)) == 4


def test_transforms_of_ones_own_run_on_the_device_and_resume(shards, tmp_path):
    seen = []

    class Look(nn.Module):
        def forward(self, image, target):
            seen.append((image.dtype, type(target["boxes"]).__name__, tuple(target["masks"].shape[1:])))
            return image, target

    own = v2.Compose([v2.RandomHorizontalFlip(0.5), v2.RandomPhotometricDistort(), Look()])
    whole = train(shards, tmp_path / "whole", steps=4, transforms=own, **TINY)
    train(shards, tmp_path / "parts", steps=2, transforms=own, **TINY)
    parts = train(shards, tmp_path / "parts", steps=4, transforms=own, **TINY)
    assert parts.losses == whole.losses
    assert seen[0] == (torch.uint8, "BoundingBoxes", (80, 96))
    with pytest.raises(ColabUtilsError, match=r"the transforms that the run in .* was begun with"):
        train(shards, tmp_path / "parts", steps=5, **TINY)


def test_the_step_schedule_falls_twice():
    rates = [compute_rate(step, steps=900, highest=1.0, schedule="step") for step in range(900)]
    assert [rates[step] for step in (100, 599, 600, 799, 800, 899)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": "mosaic"}, "augment as one of none, flip, multiscale, lsj"),
        ({"schedule": "linear"}, "schedule as one of cosine, step"),
        ({"ema": 1.5}, "ema between 0 and 1"),
        ({"learning_rate": -0.1}, "learning_rate above 0"),
        ({"min_size": 0}, "min_size of at least 1"),
    ],
)
def test_settings_that_there_are_not(options, message, tmp_path):
    with pytest.raises(ColabUtilsError, match=message) as caught:
        train("no/such/shards", tmp_path, **options)  # before anything is opened
    assert "\n" not in str(caught.value)


def test_a_setting_that_is_not_named_stays_as_it_was():
    known = {"model": "maskrcnn_resnet50_fpn", "min_size": 480, "max_size": 640, "augment": "lsj", "schedule": "step",
             "ema": 0.99, "batch_size": 6, "learning_rate": 0.3}  # fmt: skip
    kept = choose_settings(known, on_gpu=False)
    assert {name: getattr(kept, name) for name in known} == known
    assert choose_settings(known, on_gpu=False, batch_size=8).learning_rate is None  # it follows the batch
    assert choose_settings(known, on_gpu=False, batch_size=8, learning_rate=0.1).learning_rate == 0.1
    assert choose_settings(known, on_gpu=True, min_size=300).min_size == 300


def test_a_class_without_objects_is_named(shards, tmp_path):
    images = open_images(shards, local=None, limit_gb=None, val_shards=None, seed=0)
    images.dataset.class_names[99] = "zebra"
    with pytest.warns(ColabUtilsWarning, match="classes have no object in the training images .*zebra"):
        check_objects(images, min_size=64, max_size=96)


def test_objects_smaller_than_a_pixel_are_refused_or_counted(shards, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ColabUtilsWarning)
        with pytest.raises(ColabUtilsError, match="objects of a pixel or more at a shorter side of 1 pixels"):
            train(shards, tmp_path, **{**TINY, "min_size": 1, "max_size": 1})
    images = open_images(shards, local=None, limit_gb=None, val_shards=None, seed=0)
    images.dataset._boxes[0, 2:] = images.dataset._boxes[0, :2] + 0.5
    with pytest.warns(ColabUtilsWarning, match=r"1 of \d+ objects are less than a pixel"):
        check_objects(images, min_size=64, max_size=96)


def test_a_weight_that_is_no_number_is_named(shards, tmp_path):
    report = train(shards, tmp_path, steps=2, **TINY)
    content = torch.load(report.checkpoint, weights_only=True)
    name = next(iter(content["model"]))
    content["model"][name].view(-1)[0] = float("nan")
    torch.save(content, report.checkpoint)
    with pytest.raises(ColabUtilsError, match=f"expected numbers in the weights of .*, found others in {name}"):
        train(shards, tmp_path, steps=3, **TINY)


def test_the_batch_of_a_loss_that_is_no_number_is_saved(shards, tmp_path, monkeypatch):
    real = TrainingStep.__call__
    monkeypatch.setattr(TrainingStep, "__call__", lambda self, batch, **more: real(self, batch, **more) * float("nan"))
    with pytest.raises(ColabUtilsError, match=r"found nan at step 1, .* \(saved in .*nonfinite-00000001\.pt\)"):
        train(shards, tmp_path, steps=1, **TINY)
    saved = torch.load(tmp_path / "nonfinite-00000001.pt", weights_only=True)
    assert saved["pixels"].dtype == torch.uint8
    assert len(saved["image_ids"]) == 2
    assert len(saved["boxes"]) == int(saved["counts"].sum()) == len(saved["masks"][1])


def test_events_for_tensorboard(shards, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(shards, tmp_path, steps=4, log_steps=1, tensorboard=True, val_shards=shards, **TINY)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {"train/loss", "train/learning_rate", "train/images_per_second", "train/wait_share"} <= set(
        events.Tags()["scalars"]
    )
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]
    assert [event.step for event in events.Scalars("val/AP of masks")] == [3, 4]


def test_events_on_drive_are_written_here_and_sent(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setattr("colab_utils.training.trainer.is_on_drive", lambda folder: True)
    board = Board(tmp_path)
    ap = AveragePrecision(0.25, 0.2, 0.5, 0.4, 60, ())
    board.add(LogLine(3, 10, 1.5, 0.01, 5.0, 0.1, 2_000_000_000, ap, 2))
    assert not (tmp_path / "tensorboard").exists()  # Drive would not send a file that stays open
    board.close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_a_log_line_with_everything():
    line = LogLine(40, 200, 1.9123, 0.005, 5.31, 0.024, 9_100_000_000, AveragePrecision(0.3, 0.2, 0.5, 0.4, 9, ()), 30)
    assert str(line) == (
        "step 40/200  loss 1.912  lr 0.00500  5.3 images/s  wait 2%  GPU 9.1 GB  after step 30: AP of boxes 0.300 "
        "(0.500 at IoU 0.5), of masks 0.200 (0.400 at IoU 0.5), 9 images"
    )
