"""The loop: it learns, it logs, it stops and goes on bit for bit, and it refuses in words."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from torchvision.transforms import v2
from torchvision.tv_tensors import BoundingBoxes

from colab_utils import drive, files
from colab_utils.course.sample_data import BuiltinDataset
from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading import clock
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import make_loader
from colab_utils.shards.lock import hold_folder
from colab_utils.shards.write import write_shards
from colab_utils.training import checkpoint, trainer
from colab_utils.training import evaluate as evaluate_module
from colab_utils.training import step as step_module
from colab_utils.training import train as loop
from colab_utils.training.checkpoint import CheckpointFolder
from colab_utils.training.evaluate import AveragePrecision, evaluate
from colab_utils.training.model import LIGHT_MODEL, build_mask_rcnn, load_trained_model
from colab_utils.training.report import LogLine, LossPoint, TrainReport
from colab_utils.training.step import TrainingStep
from colab_utils.training.train import train
from tests.tiny_model import TINY_MODEL
from tests.training.small_shards import TINY, list_names, make_shards

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*is finished"),
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> BuiltinDataset:
    """Six small images, so that a run of five steps of two is more than an epoch."""
    return make_shards(tmp_path_factory.mktemp("six"), n=6, shard_mb=0.01)


@pytest.fixture(scope="module")
def tiny_shards(dataset) -> Path:
    return dataset.images.parents[1] / "shards"


@pytest.fixture
def write_variant(dataset, tmp_path):
    """Write shards of the six images with other contents of their JSON."""

    def write(name, **changes):
        annotations = tmp_path / f"{name}.json"
        content = json.loads(dataset.annotations.read_text()) | changes
        annotations.write_text(json.dumps(content))
        shards = tmp_path / name
        write_shards(dataset.images, annotations, shards=shards, workers=1, max_bad=1)
        return shards

    return write


@pytest.fixture(scope="module")
def logged(one_thread, tiny_shards, tmp_path_factory) -> tuple[TrainReport, list]:
    """Five steps in one go, more than an epoch of the six images, and what was logged."""
    lines = []
    run = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "_LOG_STEPS", 3)
        report = train(tiny_shards, run, steps=5, checkpoint_steps=2, log=lines.append, **TINY)
    return report, lines


@pytest.fixture(scope="module")
def undisturbed(logged) -> TrainReport:
    return logged[0]


@pytest.fixture
def run(undisturbed, tmp_path) -> Path:
    """A copy of the run of five steps, to go on with."""
    return shutil.copytree(Path(undisturbed.checkpoint).parent, tmp_path / "run")


@pytest.fixture
def train_here(tiny_shards, tmp_path):
    """Train on the six images; without another run, the checkpoints go to the test's folder."""
    return partial(train, tiny_shards, run=tmp_path, **TINY)


def load_weights(report: TrainReport) -> dict[str, torch.Tensor]:
    return torch.load(report.checkpoint, weights_only=True)["model"]


def interrupt_call(monkeypatch, owner, name, number, action) -> None:
    """Do something else first in one call of a method, counted from 1."""
    real = getattr(owner, name)
    calls = []

    def count(*given, **more):
        calls.append(1)
        if len(calls) == number:
            action()
        return real(*given, **more)

    monkeypatch.setattr(owner, name, count)


def act_before_saving(monkeypatch, action) -> None:
    """Do something with the state and the step before each checkpoint is written."""
    save = CheckpointFolder.save

    def act(self, state, *, step, **options):
        action(state, step)
        return save(self, state, step=step, **options)

    monkeypatch.setattr(CheckpointFolder, "save", act)


def press_ctrl_c():
    raise KeyboardInterrupt


def fail_inside():
    raise ColabUtilsError("a batch does not fit")


def act_at(step, action):
    """Return a log that does something after a step; it needs ``every_step``."""

    def log(line):
        if getattr(line, "step", 0) == step:
            action()

    return log


def run_forked(target) -> int:
    """Return the exit code of a process that calls ``target``."""
    process = multiprocessing.get_context("fork").Process(target=target)
    process.start()
    process.join(120)
    return process.exitcode


def test_the_report_holds_every_step(undisturbed, tiny_shards):
    dataset = ShardDataset(tiny_shards, contiguous_labels=True)
    plan = undisturbed.plan
    assert [point.step for point in undisturbed.losses] == [1, 2, 3, 4, 5]
    assert plan.images == (dataset.counts > 0).sum() == len(dataset) - plan.skipped_images
    assert str(undisturbed).startswith("5 steps, loss ")
    # A skipped step hides no loss.
    losses = tuple(LossPoint(0, loss) for loss in (math.inf, 3.0, 2.0, math.nan))
    for shown, expected in ((losses, "loss 3.00 -> 2.00, "), ((), "loss nan -> nan, ")):
        assert expected in str(dataclasses.replace(undisturbed, losses=shown))
    assert "tiny from random weights on cpu in float32 by 1 process: 6 classes" in str(plan)
    content = torch.load(undisturbed.checkpoint, weights_only=True)
    assert content["class_names"] == dataset.class_names
    assert content["category_ids"] == dataset.category_ids


@pytest.mark.usefixtures("every_step")
# The checkpoint lies within an epoch, and at the end of one.
@pytest.mark.parametrize(("saved", "workers"), [(2, 2), (3, 0)])
def test_killed_and_resumed_gives_the_same_losses(
    train_here, undisturbed, tmp_path, saved, workers
):
    newest = f"checkpoint-{saved:08d}.pt"

    def kill():
        while not (tmp_path / newest).exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    log = act_at(saved + 1, kill)
    assert run_forked(partial(train_here, steps=5, checkpoint_steps=saved, log=log)) == -9
    assert list_names(tmp_path) == [newest, "writer.txt"]
    # Random numbers that were drawn in between must not matter.
    torch.rand(17)
    resumed = train_here(steps=5, workers=workers)
    assert resumed.plan.first_step == saved
    assert resumed.losses == undisturbed.losses
    expected = dict(load_weights(undisturbed))
    torch.testing.assert_close(dict(load_weights(resumed)), expected, rtol=0, atol=0)


def test_a_second_train_is_refused_and_harms_nothing(train_here, run):
    before = list_names(run)
    with (
        hold_folder(run),
        pytest.raises(ColabUtilsError, match=f"Another writer .*'process {os.getpid()} on "),
    ):
        train_here(run=run, steps=1, log=pytest.fail, resume="never")
    assert list_names(run) == before


def test_a_refused_run_leaves_no_folder(write_variant, tmp_path):
    shards = write_variant("empty", annotations=[])
    with pytest.raises(ColabUtilsError, match=r"None of the 6 images in .* has objects"):
        train(shards, tmp_path / "run", **TINY)
    assert not (tmp_path / "run").exists()


def test_log_lines_cover_every_step_once(logged):
    # Checkpoints fell between the lines and took no losses from them.
    report, (plan, *lines) = logged
    losses = [point.loss for point in report.losses]
    assert plan == report.plan
    assert [line.step for line in lines] == [1, 3, 5]
    assert [line.loss for line in lines] == pytest.approx(
        [losses[0], sum(losses[1:3]) / 2, sum(losses[3:]) / 2]
    )


@pytest.mark.parametrize(
    ("owner", "name", "number", "action", "error", "step"),
    [
        # The second Ctrl-C comes at the second image of the third batch.
        (ShardDataset, "read_into", 6, press_ctrl_c, KeyboardInterrupt, 2),
        (TrainingStep, "add_gradients", 3, fail_inside, ColabUtilsError, 2),
        # A line of the log fails.
        (trainer, "average_losses", 2, fail_inside, ColabUtilsError, 3),
        # Ctrl-C comes in the middle of a step, which is finished.
        (TrainingStep, "__call__", 3, partial(signal.raise_signal, 2), KeyboardInterrupt, 3),
    ],
)
def test_whatever_ends_a_run_saves_what_was_done(
    train_here, undisturbed, tmp_path, monkeypatch, owner, name, number, action, error, step
):
    monkeypatch.setattr(trainer, "_LOG_STEPS", 3)
    interrupt_call(monkeypatch, owner, name, number, action)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(error):
        train_here(steps=5)
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.undo()
    assert list_names(tmp_path)[-1] == f"checkpoint-0000000{step}.pt"
    resumed = train_here(steps=5)
    assert (resumed.plan.first_step, resumed.losses) == (step, undisturbed.losses)


@pytest.fixture
def refusals(monkeypatch) -> Counter[str]:
    """How often Drive refuses a file of a run's folder from now on, by its name."""
    times = Counter()
    write = files.write_file

    def refuse(path, *parts):
        if times[path.name] > 0 and "colab_utils-checkpoints-" not in str(path):
            times[path.name] -= 1
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        return write(path, *parts)

    monkeypatch.setattr(files, "write_file", refuse)
    return times


ALWAYS = 1000
NEWEST = "checkpoint-00000003.pt"
BEST = "best-00000003.pt"


@pytest.mark.filterwarnings("ignore:.* waits in ")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        # No checkpoint was due.
        (NEWEST, {}),
        # A checkpoint was due at the last step.
        (BEST, {"checkpoint_steps": 3}),
    ],
)
def test_a_run_whose_last_file_lies_here_alone_is_no_success(
    train_here, tiny_shards, tmp_path, refusals, name, options
):
    folder = CheckpointFolder(tmp_path)
    refusals[name] = ALWAYS
    lies = rf"{name} is not in {tmp_path}\. It lies only in {folder.waiting} of"
    with pytest.raises(DriveLostError, match=lies):
        train_here(steps=3, val_shards=tiny_shards, **options)
    # It was tried as it was written, and patiently once.
    assert ALWAYS - refusals.pop(name) == 2 + len(drive.RETRY_WAITS_S)
    assert list_names(folder.waiting) == [name]
    assert name not in list_names(tmp_path)
    # The run is finished, also without validation.
    assert train_here(steps=3).plan.first_step == 3
    assert {NEWEST, BEST} <= set(list_names(tmp_path))
    assert list_names(folder.waiting) == []


@pytest.mark.usefixtures("every_step")
@pytest.mark.parametrize(("error", "times"), [(KeyboardInterrupt, 3), (DriveLostError, ALWAYS)])
def test_what_ends_a_run_is_raised_and_what_waits_is_sent(
    train_here, tmp_path, refusals, error, times
):
    name = "checkpoint-00000002.pt"
    waiting = CheckpointFolder(tmp_path).waiting
    refusals[name] = times

    def stop():
        raise error("the reason")

    with (
        pytest.warns(ColabUtilsWarning, match=f"{name} waits in {waiting}"),
        pytest.raises(error, match="the reason"),
    ):
        train_here(steps=3, log=act_at(2, stop))
    assert list_names(waiting if times == ALWAYS else tmp_path) == [name]
    # Another run of the tests may use the same folder.
    shutil.rmtree(waiting, ignore_errors=True)


def test_what_waits_is_sent_where_the_state_itself_is_not_saved(
    train_here, tmp_path, refusals, monkeypatch
):
    """The weights have moved in part; the checkpoint of the step before waits."""
    refusals["checkpoint-00000001.pt"] = 1
    interrupt_call(monkeypatch, TrainingStep, "apply_gradients", 2, press_ctrl_c)
    with pytest.warns(ColabUtilsWarning, match="waits"), pytest.raises(KeyboardInterrupt):
        train_here(steps=3, checkpoint_steps=1)
    assert list_names(tmp_path) == ["checkpoint-00000001.pt"]


def test_finished_run_has_nothing_left_to_do(train_here, undisturbed):
    text = r"^.* is finished: all of its 5 steps are done, .* resume='never'.*$"
    with pytest.warns(ColabUtilsWarning, match=text):
        again = train_here(run=Path(undisturbed.checkpoint).parent, steps=5)
    assert again.losses == undisturbed.losses
    assert again.checkpoint == undisturbed.checkpoint


def test_never_moves_older_checkpoints_away(train_here, undisturbed, run):
    report = train_here(run=run, steps=1, resume="never")
    assert report.plan.first_step == 0
    assert report.losses == undisturbed.losses[:1]
    assert list_names(run) == ["checkpoint-00000001.pt", "previous-1"]
    assert list_names(run / "previous-1") == ["checkpoint-00000004.pt", "checkpoint-00000005.pt"]


def test_another_batch_size_goes_on_with_the_images_that_are_left(
    train_here, tiny_shards, run, monkeypatch
):
    seen = []
    real = trainer.Trainer._train

    def note(self, batch):
        seen.extend(batch.image_ids.tolist())
        return real(self, batch)

    monkeypatch.setattr(trainer.Trainer, "_train", note)
    train_here(run=run, steps=8, batch_size=1)
    # Two of the six images of the second epoch are left, and the third epoch begins.
    position = CheckpointFolder(run).read()["loader"]
    assert (position["epoch"], position["batch"], position["batch_size"]) == (2, 1, 1)
    loader = make_loader(ShardDataset(tiny_shards), batch_size=2, workers=0, deliver="packed")
    loader.load_state_dict({**loader.state_dict(), "epoch": 1})
    *_, last = loader
    assert sorted(seen[:2]) == sorted(last.image_ids.tolist())
    # The run goes on once more, from a state in such an epoch: three images are left to it.
    train_here(run=run, steps=9, batch_size=3)
    assert len({*seen[2:]}) == len(seen[2:]) == 4


def test_epochs_are_counted_in_images_whatever_the_batches(train_here, tiny_shards, tmp_path):
    train_here(steps=2)
    report = train_here(epochs=2, batch_size=1)
    # The steps are two with batches of two, then two that end the epoch, and six of the next.
    assert report.steps == 2 + 2 + 6
    assert train(tiny_shards, tmp_path, epochs=2, workers=0).steps == report.steps


def break_images(monkeypatch, is_broken):
    """Let the losses of batches with some images be no numbers."""
    real = step_module.compute_losses

    def compute(model, batch, **options):
        losses = real(model, batch, **options)
        if any(is_broken(number) for number in batch.image_ids.tolist()):
            losses["loss_mask"] = losses["loss_mask"] * float("nan")
        return losses

    monkeypatch.setattr(step_module, "compute_losses", compute)


def test_a_run_survives_a_bad_batch_and_resumes_exactly(
    train_here, tiny_shards, tmp_path, monkeypatch
):
    broken = int(ShardDataset(tiny_shards).image_ids[0])
    break_images(monkeypatch, lambda number: number == broken)
    with pytest.warns(ColabUtilsWarning, match=rf"skipped, .*\b{broken}\b") as caught:
        whole = train_here(run=tmp_path / "whole", steps=9)
    assert len(caught) == 1
    is_finite = [math.isfinite(point.loss) for point in whole.losses]
    assert is_finite.count(False) == whole.skipped_steps == 3
    assert "3 steps skipped" in str(whole)
    assert "nan" not in str(whole)
    assert all(torch.isfinite(value).all() for value in load_weights(whole).values())

    monkeypatch.setattr(trainer, "_LOG_STEPS", 1)
    with pytest.warns(ColabUtilsWarning, match="skipped"), pytest.raises(KeyboardInterrupt):
        train_here(run=tmp_path / "cut", steps=9, log=act_at(5, press_ctrl_c))
    with pytest.warns(ColabUtilsWarning, match="skipped"):
        resumed = train_here(run=tmp_path / "cut", steps=9)
    assert resumed.plan.first_step == 5
    # A NaN is not equal to itself.
    assert str(resumed.losses) == str(whole.losses)


@pytest.mark.filterwarnings("ignore:.*skipped")
def test_a_run_of_nothing_but_skipped_steps_ends_in_words(train_here, tmp_path, monkeypatch):
    """The checkpoint before them stays the newest, however long they go on."""
    seen = []

    def is_broken(number):
        seen.append(number)
        return len(seen) > 4

    break_images(monkeypatch, is_broken)
    text = r"^.*last 20 steps\. .* step 22, .* ids \d+, \d+\. .*learning_rate.*$"
    with pytest.raises(ColabUtilsError, match=text):
        train_here(steps=30, checkpoint_steps=1)
    assert list_names(tmp_path) == ["checkpoint-00000001.pt", "checkpoint-00000002.pt"]


def test_an_evaluation_that_fails_is_told_and_tried_again(train_here, tiny_shards, monkeypatch):
    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory")

    interrupt_call(monkeypatch, evaluate_module, "detect", 1, fail)
    text = r"^this evaluation is skipped: .*CUDA out of memory.*$"
    with pytest.warns(ColabUtilsWarning, match=text) as caught:
        report = train_here(epochs=2, val_shards=tiny_shards)
    assert len(caught) == 1
    assert report.best.step == 6


@pytest.mark.usefixtures("every_step")
def test_a_session_that_is_ended_saves_its_step_first(train_here, undisturbed, tmp_path):
    """As `timeout` does it: the workers get the signal, too."""

    log = act_at(4, lambda: os.killpg(0, signal.SIGTERM))

    def train_alone():
        os.setpgid(0, 0)
        train_here(steps=5, log=log, workers=2)

    assert run_forked(train_alone) == 143
    assert list_names(tmp_path) == ["checkpoint-00000004.pt"]
    resumed = train_here(steps=5)
    assert resumed.plan.first_step == 4
    assert resumed.losses == undisturbed.losses


@pytest.mark.usefixtures("every_step")
def test_a_signal_that_is_ignored_ends_no_training(train_here):
    """As nohup does."""
    end = act_at(2, partial(signal.raise_signal, signal.SIGTERM))
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert train_here(steps=3, log=end).steps == 3
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, previous)


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The time, which stands still; each step moves it by a second."""
    now = [1000.0]
    for module in (loop, trainer, clock, checkpoint):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    train_step = trainer.Trainer._train

    def take_a_second(self, batch):
        train_step(self, batch)
        now[0] += 1

    monkeypatch.setattr(trainer.Trainer, "_train", take_a_second)
    return now


def test_a_budget_stops_in_time_and_the_same_call_goes_on(train_here, undisturbed, tmp_path, now):
    report = train_here(steps=5, budget=2.5)
    assert now == [1002]
    assert report.steps == 2
    assert report.losses == undisturbed.losses[:2]
    assert "before step 3 of 5: run the same again to go on" in str(report)
    assert list_names(tmp_path)[-1] == Path(report.checkpoint).name == "checkpoint-00000002.pt"
    resumed = train_here(steps=5, budget="1h")
    assert resumed.plan.first_step == 2
    assert resumed.losses == undisturbed.losses
    assert "stopped" not in str(resumed)


def test_a_budget_has_time_for_its_last_checkpoint(train_here, now, monkeypatch):
    """The first step's checkpoint shows what one takes: here, four seconds."""

    def take_four_seconds(state, step):
        now[0] += 4

    act_before_saving(monkeypatch, take_four_seconds)
    report = train_here(steps=50, budget="30s")
    assert 1 < report.steps < 50
    assert now[0] <= 1030
    # However small the budget, a session does a step.
    again = train_here(steps=50, budget=0.1)
    assert again.steps == report.steps + 1


def test_a_budget_leaves_out_an_evaluation_that_would_not_fit(
    train_here, tiny_shards, now, monkeypatch
):
    evaluated = []

    def take_a_minute(model, dataset, *, device):
        evaluated.append(now[0])
        now[0] += 60
        return AveragePrecision(0.5, 0.5, 0.5, 0.5, len(dataset))

    monkeypatch.setattr(trainer, "evaluate", take_a_minute)
    more = {"val_shards": tiny_shards, "budget": "100s"}
    report = train_here(epochs=3, **more)
    # An epoch has three steps. After the second one there is no time for another minute.
    assert evaluated == [1003]
    assert report.steps == 9
    assert report.ap is None
    assert report.best.step == 3


def test_a_thread_trains_without_handlers(tiny_shards, tmp_path):
    handlers = [signal.getsignal(number) for number in trainer._SIGNALS]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(train, tiny_shards, tmp_path, steps=1, **TINY).result().steps == 1
    assert [signal.getsignal(number) for number in trainer._SIGNALS] == handlers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # Two lengths are given.
        ({"steps": 1, "epochs": 1}, r"Both steps and epochs \(1\) are given"),
        # The budget has no unit of time.
        ({"budget": "soon"}, "expected budget as a time, found 'soon'. Pass a text such as 2h"),
        # A model stands in place of its name.
        (
            {"model": torch.nn.Linear(2, 2)},
            r"model must be one of maskrcnn_resnet50_fpn_v2, .* it is Linear",
        ),
    ],
)
def test_bad_arguments_are_refused_in_words(train_here, tmp_path, options, message):
    with pytest.raises(ColabUtilsError, match=f"^.*{message}.*$"):
        train_here(run=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"model": "maskrcnn_resnet50_fpn"},
            "has model tiny, and this training has maskrcnn_resnet50_fpn",
        ),
        ({"min_size": 32}, "has min size 64, and this training has 32"),
        ({"seed": 7}, "has seed 0, and this training has 7"),
    ],
)
def test_checkpoint_of_other_settings_is_refused(train_here, undisturbed, options, message):
    run = Path(undisturbed.checkpoint).parent
    names = list_names(run)
    with pytest.raises(ColabUtilsError, match=message):
        train_here(run=run, steps=6, **options)
    assert list_names(run) == names


def test_validation_with_other_categories_is_refused_before_training(
    train_here, dataset, write_variant, tmp_path
):
    categories = json.loads(dataset.annotations.read_text())["categories"]
    names = [category["name"] for category in categories]
    swapped = [{**old, "name": name} for old, name in zip(categories, reversed(names), strict=True)]
    shards = write_variant("swapped", categories=swapped)
    with pytest.raises(ColabUtilsError, match=r"other category ids or names"):
        train_here(run=tmp_path / "run", val_shards=shards)
    assert not (tmp_path / "run").exists()


def test_training_goes_on_while_a_checkpoint_is_written(train_here, undisturbed, monkeypatch):
    later_steps = threading.Event()
    saved = {}

    def save_slowly(state, step):
        if step < 5:
            assert later_steps.wait(60), "no step was done while the checkpoint was written"
        saved[step] = state

    act_before_saving(monkeypatch, save_slowly)
    interrupt_call(monkeypatch, TrainingStep, "__call__", 4, later_steps.set)
    monkeypatch.setattr(checkpoint, "_PAUSE_S", 0.0)
    report = train_here(steps=5)
    assert report.losses == undisturbed.losses
    # The state is saved as it was when it was asked for.
    first = saved[1]
    assert (len(first["losses"]), first["loader"]["batch"]) == (1, 1)
    key = "roi_heads.box_predictor.cls_score.weight"
    assert not torch.equal(first["model"][key], saved[5]["model"][key])


def test_checkpoints_are_a_minute_apart(tmp_path, monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(checkpoint, "perf_counter", lambda: now_s[0])
    folder = CheckpointFolder(tmp_path)
    now_s[0] = 1059.0
    assert not folder.is_due(1)
    now_s[0] = 1060.0
    assert folder.is_due(1)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_at_once(train_here, monkeypatch):
    act_before_saving(monkeypatch, lambda state, step: fail_inside())
    # A run that did not end at once would come to this step.
    interrupt_call(monkeypatch, TrainingStep, "__call__", 100, pytest.fail)
    monkeypatch.setattr(checkpoint, "_PAUSE_S", 0.0)
    with pytest.raises(ColabUtilsError, match="does not fit"):
        train_here(steps=10_000)


@pytest.mark.parametrize("own", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_that_falls_into_pieces_is_joined_unless_you_chose_otherwise(
    own, monkeypatch, tmp_path
):
    environment = {own: "x:1"} if own else {}
    monkeypatch.setattr(os, "environ", environment)
    with pytest.raises(ColabUtilsError, match="There are no shards"):
        train(tmp_path / "none", tmp_path / "run")
    expected = {"x:1"} if own else {"expandable_segments:True"}
    assert {value for name, value in environment.items() if "ALLOC" in name} == expected


@pytest.mark.usefixtures("every_step")
def test_images_per_second_is_by_the_wall_clock_of_the_run(
    train_here, tiny_shards, now, monkeypatch
):
    """What lies between the steps counts: logs, checkpoints and evaluation."""
    lines = []

    def log_slowly(line):
        lines.append(line)
        now[0] += 2

    def evaluate_slowly(*given, **more):
        now[0] += 3
        return AveragePrecision(0.3, 0.2, 0.5, 0.4, 6)

    monkeypatch.setattr(trainer, "evaluate", evaluate_slowly)
    report = train_here(steps=4, val_shards=tiny_shards, log=log_slowly)
    # Four steps take a second each, their lines two, and two evaluations three.
    assert report.images_per_second == pytest.approx(8 / (4 + 8 + 6))
    assert report.wait_share == 0
    # Before the last line came another line, an evaluation and a step.
    assert lines[-1].images_per_second == pytest.approx(2 / 6)


def test_weights_of_another_run_are_where_a_run_starts(undisturbed):
    """With the same number of classes, the last layers stay, too."""
    run = Path(undisturbed.checkpoint).parent
    weights = load_weights(undisturbed)
    for num_classes, changed in ((7, set()), (8, {"cls_score", "bbox_pred", "mask_fcn_logits"})):
        model = build_mask_rcnn(TINY_MODEL, num_classes=num_classes, weights=run)
        assert model.starts_from == "random"
        state = model.state_dict()
        differing = {key for key, value in state.items() if not value.equal(weights[key])}
        assert {key.split(".")[-2] for key in differing} == changed
    with pytest.raises(ColabUtilsError, match=r"of the model tiny, and not of .*mobilenet"):
        build_mask_rcnn(LIGHT_MODEL, num_classes=3, weights=str(run))


def test_bad_objects_of_the_shards_are_said(train_here, dataset, write_variant, tmp_path):
    annotations = json.loads(dataset.annotations.read_text())["annotations"]
    spoilt = next(annotation for annotation in annotations if not annotation["iscrowd"])
    spoilt["bbox"] = [90, 70, 6, 6]
    shards = write_variant("shards", annotations=annotations)
    text = r"shards has bad objects: 1 x mask and box disagree: object is trained"
    with pytest.warns(ColabUtilsWarning, match=text):
        train_here(run=tmp_path / "other", val_shards=shards, steps=1)


# These tests look at the best weights, at the end of a run, and at augmentation.


def script_precision(monkeypatch, values):
    """Let evaluations find these average precisions of masks, one after another."""
    left = iter(values)

    def score(model, dataset, **more):
        return AveragePrecision(0.0, next(left), 0.0, 0.0, 6)

    monkeypatch.setattr(trainer, "evaluate", score)


@pytest.mark.usefixtures("every_step")
def test_the_best_weights_are_kept(train_here, tiny_shards, tmp_path, capsys):
    lines = []
    report = train_here(epochs=2, val_shards=tiny_shards, log=lines.append)
    evaluated = {line.ap.step: line.ap for line in lines if isinstance(line, LogLine) and line.ap}
    assert capsys.readouterr().out == ""
    # Each epoch but the last was evaluated in a line, and the last is that of the report.
    assert set(evaluated) == {3}
    best = max(evaluated[3], report.ap, key=lambda ap: ap.segm)
    assert report.best.segm == best.segm
    [kept] = tmp_path.glob("best-*.pt")
    assert kept.name == f"best-{report.best.step:08d}.pt"
    dataset = ShardDataset(tiny_shards, contiguous_labels=True)
    model = load_trained_model(tmp_path, which="best")
    assert evaluate(model, dataset).segm == pytest.approx(best.segm)
    # A renamed file of the best weights has no optimiser to go on with.
    kept.rename(tmp_path / "checkpoint-00000099.pt")
    with pytest.raises(ColabUtilsError, match=r"checkpoint-00000099\.pt holds a model alone"):
        train_here(steps=7)


def test_a_longer_run_does_not_lose_its_best(
    train_here, tiny_shards, write_variant, tmp_path, monkeypatch
):
    script_precision(monkeypatch, [0.5, 0.3, 0.2, 0.1])
    first = train_here(run=tmp_path / "run", epochs=1, val_shards=tiny_shards)
    assert (first.best.step, first.best.segm) == (3, 0.5)
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    report = train_here(run=moved, epochs=3, val_shards=tiny_shards)
    assert (report.best.step, report.best.segm) == (3, 0.5)
    assert [path.name for path in moved.glob("best-*.pt")] == ["best-00000003.pt"]
    # A precision on other images is not compared with it.
    other = write_variant("other", info={"year": 1999})
    assert train_here(run=moved, steps=10, val_shards=other).best.segm == 0.1
    assert list_names(moved / "previous-1") == ["best-00000003.pt"]


def test_an_epoch_is_the_default_and_has_no_best_without_validation_images(train_here, tmp_path):
    report = train_here(batch_size=4)
    assert report.steps == -(-report.plan.images // 4) == 2
    assert report.best is None
    with pytest.raises(ColabUtilsError, match="for the best with val_shards"):
        load_trained_model(tmp_path, which="best")


# Ctrl-C comes while an epoch is evaluated, and while the last checkpoint is written.
@pytest.mark.parametrize(
    ("owner", "name", "epochs"), [(trainer, "evaluate", 2), (CheckpointFolder, "save", 1)]
)
def test_ctrl_c_between_steps_is_not_lost(
    train_here, tiny_shards, tmp_path, monkeypatch, owner, name, epochs
):
    monkeypatch.setattr(trainer, "evaluate", lambda *given, **more: pytest.fail("it goes on"))
    interrupt_call(monkeypatch, owner, name, 1, partial(os.kill, os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        train_here(epochs=epochs, val_shards=tiny_shards)
    assert (tmp_path / "checkpoint-00000003.pt").exists()


def test_nothing_is_written_when_train_has_ended(train_here, tmp_path, monkeypatch):
    """A new run in the same folder would find a checkpoint of the one before."""
    act_before_saving(monkeypatch, lambda state, step: time.sleep(0.3))
    interrupt_call(monkeypatch, TrainingStep, "__call__", 3, fail_inside)
    with pytest.raises(ColabUtilsError, match="does not fit"):
        train_here(steps=4, checkpoint_steps=1)
    # Both have arrived, and the mark of the writer is gone.
    assert list_names(tmp_path) == ["checkpoint-00000001.pt", "checkpoint-00000002.pt"]


def test_boxes_without_an_area_are_said_to_come_from_your_transforms(train_here):
    own = v2.RandomCrop((20, 20))
    with pytest.raises(
        ColabUtilsError, match=r"which has no area.*your transforms with v2\.SanitizeBoundingBoxes"
    ):
        train_here(steps=6, augment=own)


def test_a_run_without_flips_stays_so_and_trains_otherwise(train_here, undisturbed):
    train_here(steps=2, augment="none")
    report = train_here(steps=3)
    assert report.plan.augment == "none"
    assert report.losses != undisturbed.losses[:3]


def test_transforms_of_ones_own_run_on_the_device_and_resume(train_here, tmp_path):
    """They may keep only what torchvision needs."""
    seen = []

    def look(image, target):
        seen.append((image.dtype, type(target["boxes"]), target["masks"].shape[1:]))
        return image, {name: target[name] for name in ("boxes", "labels", "masks", "image_id")}

    own = v2.Compose([v2.RandomHorizontalFlip(0.5), v2.RandomPhotometricDistort(), look])
    whole = train_here(run=tmp_path / "whole", steps=4, augment=own)
    train_here(steps=2, augment=own)
    parts = train_here(steps=4, augment=own)
    assert parts.losses == whole.losses
    assert seen[0] == (torch.uint8, BoundingBoxes, (80, 96))
    with pytest.raises(ColabUtilsError, match=r"The run of .* was begun with transforms"):
        train_here(steps=5)


def test_resume_takes_the_settings_of_the_run(undisturbed, tiny_shards, run):
    train(tiny_shards, run, steps=6, workers=0, learning_rate=0.0005)
    report = train(tiny_shards, run, steps=6, workers=0)
    assert report.plan.learning_rate == 0.0005
    assert (report.plan.min_size, report.plan.max_size, report.plan.batch_size) == (64, 96, 2)
    # Random weights mean that nothing was downloaded.
    assert report.plan.starts_from == "random"
    assert report.losses[:5] == undisturbed.losses
