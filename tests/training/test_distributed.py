"""Several processes train one model: each image once, one writer, the same weights; also on two
hosts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from colab_utils.errors import ColabUtilsError
from colab_utils.loading import opening
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import make_loader
from colab_utils.loading.opening import open_dataset
from colab_utils.loading.writing import Writing
from colab_utils.shards.copy import Copying, copy_shards
from colab_utils.shards.index import read_index, write_index
from colab_utils.shards.verify import verify_shards
from colab_utils.slow_drive import DriveProfile, slow_down
from colab_utils.training import trainer
from colab_utils.training.checkpoint import CheckpointFolder
from colab_utils.training.step import TrainingStep, join_ranks
from colab_utils.training.train import train
from tests.tiny_model import TINY_MODEL
from tests.training.small_shards import TINY, list_names, make_shards

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]
SLOW = DriveProfile("test", open_s=0.2, bytes_per_s=1e6, source="made up for the test")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Seven images, in several shards: no number of processes divides them."""
    return make_shards(tmp_path_factory.mktemp("seven"), n=7, shard_mb=0.02)


@pytest.fixture
def shards(made):
    return made.images.parents[1] / "shards"


def run_processes(folder, count, target, *arguments, patience_s=120):
    """Call ``target`` in so many processes, forked from this one, with the settings of torchrun;
    returns their JSON.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(
            target=be_rank,
            args=(target, rank, count, port, folder, arguments),
        )
        for rank in range(count)
    ]
    with warnings.catch_warnings():
        # Python 3.12 warns, because this process has threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        for process in processes:
            process.start()
    for process in processes:
        process.join(patience_s)
        # A process that was stopped holds the test up no longer.
        patience_s = 1 if process.exitcode else patience_s
        process.kill()
    assert [process.exitcode for process in processes] == [0] * count
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(count)]


@pytest.fixture
def run_ranks(tmp_path_factory):
    return partial(run_processes, tmp_path_factory.mktemp("ranks"))


def be_rank(target, rank, count, port, folder, arguments):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    warnings.simplefilter("ignore")
    (folder / f"rank-{rank}.json").write_text(json.dumps(target(*arguments)))


def train_and_look(shards, run, options):
    """What this rank saw and reports."""
    seen = []
    real = trainer.Trainer._train

    def note(self, batch):
        seen.append([self.done, [] if batch is None else batch.image_ids.tolist()])
        return real(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.Trainer, "_train", note)
        if os.environ.get("RANK", "0") != "0":
            # The first process alone writes checkpoints.
            patch.delattr(CheckpointFolder, "is_due")
        report = train(
            shards, run, log=lambda line: None, **(TINY | {"batch_size": "auto"} | options)
        )
    return {
        "seen": seen,
        "losses": [point.loss for point in report.losses],
        "ap": str(report.ap),
    }


def sort_images(reports, steps):
    return sorted(
        image
        for report in reports
        for step, ids in report["seen"]
        if step in steps
        for image in ids
    )


def test_each_image_once_an_epoch_over_all_ranks_and_one_writer(run_ranks, shards, tmp_path):
    """7 images in batches of 4 are two steps, and the second one has an image too few for four
    processes.
    """
    options = {
        "epochs": 2,
        "batch_size": 4,
        "val_shards": shards,
    }
    reports = run_ranks(4, train_and_look, shards, tmp_path / "run", options)
    every = sorted(ShardDataset(shards).image_ids.tolist())
    assert sort_images(reports, (0, 1)) == sort_images(reports, (2, 3)) == every
    # All ranks report the losses of the complete batch, and the same average precision.
    assert reports[0]["ap"].endswith("7 images")
    for name in ("losses", "ap"):
        assert all(report[name] == reports[0][name] for report in reports)
    best, newest = sorted(path.name for path in (tmp_path / "run").glob("*.pt"))
    assert best.startswith("best-")
    assert newest == "checkpoint-00000004.pt"


def test_all_ranks_stop_for_the_budget_after_the_same_step(run_ranks, shards, tmp_path):
    """They ask each other every ten steps."""
    options = {"steps": 30, "batch_size": 4, "budget": 0.1}
    reports = run_ranks(2, train_and_look, shards, tmp_path / "run", options)
    assert [len(report["losses"]) for report in reports] == [10, 10]
    assert list_names(tmp_path / "run")[-1] == "checkpoint-00000010.pt"


def test_another_number_of_ranks_goes_on_where_it_was(run_ranks, shards, tmp_path):
    options = {"steps": 3, "batch_size": 4}
    first = run_ranks(2, train_and_look, shards, tmp_path / "run", options)
    every = sorted(ShardDataset(shards).image_ids.tolist())
    assert sort_images(first, (0, 1)) == every
    # One process alone goes on, in the middle of an epoch.
    alone = train_and_look(shards, tmp_path / "run", {"steps": 4})
    assert sort_images([*first, alone], (2, 3)) == every
    assert alone["losses"][:3] == first[0]["losses"]


class Detector(nn.Module):
    """Losses without random numbers: several processes do what one does with the complete batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, images, targets):
        return {
            "loss": torch.stack(
                [(self.weight * image.mean()).square().sum() for image in images]
            ).mean()
        }


def take_steps(batches, parts=1):
    """The losses, which steps were skipped, and the weights; images are of one value each."""
    with join_ranks(torch.device("cpu")) as ranks:
        model = Detector()
        # Each rank begins with other weights, and those of the first one are taken.
        model.weight.data += ranks.rank
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        step = TrainingStep(model, "cpu", optimizer=optimizer, ranks=ranks)
        step.parts = parts
        steps = []
        for values in batches:
            own = [torch.full((3, 4, 4), value) for value in values[ranks.rank :: ranks.count]]
            loss = step(own or None, [{}] * len(own), total=len(values))
            steps.append((round(float(loss), 3), bool(step.is_skipped)))
        return repr([steps, [round(weight, 4) for weight in model.weight.tolist()]])


@pytest.mark.parametrize(
    ("batches", "parts"),
    [
        # Of a batch of one image nothing is left for the second process.
        ([[1.0, 2.0, 3.0], [4.0]], 2),
        # The second process has the bad image.
        ([[1.0, math.nan], [2.0, 3.0], [1.0, math.nan]], 1),
    ],
)
def test_ranks_take_the_steps_of_one_process(run_ranks, batches, parts):
    """They begin with the same weights, skip the same batches, and end with the same weights."""
    alone = take_steps(batches)
    assert alone.count("True") == str(batches).count("nan")
    assert run_ranks(2, take_steps, batches, parts) == [alone, alone]


def run_out_of_memory():
    class Greedy(Detector):
        def forward(self, images, targets):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with join_ranks(torch.device("cpu")) as ranks:
        try:
            TrainingStep(Greedy(), "cpu", ranks=ranks)(
                [torch.ones(3, 4, 4)] * 2, [{"labels": [1]}] * 2
            )
        except ColabUtilsError as error:
            return str(error)


def test_memory_that_runs_out_in_one_of_several_processes_is_a_clear_error(run_ranks):
    for message in run_ranks(2, run_out_of_memory):
        assert "Train smaller batches" in message


def train_and_count_copies(options):
    """What this rank saw, and which shards it copied or wrote; with its own options."""
    rank = int(os.environ["RANK"])
    options = dict(options[rank])
    os.environ["LOCAL_RANK"] = options.pop("local_rank", str(rank))
    copied = []
    real = Copying.copy_file

    def note(self, name, *rest):
        if name.endswith(".tar"):
            copied.append(int(name[6:12]))
        return real(self, name, *rest)

    def write(job):
        copied.append("written")
        return Writing(job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Copying, "copy_file", note)
        patch.setattr(opening, "Writing", write)
        report = train_and_look(options.pop("shards", None), options.pop("run"), options)
    return {**report, "copied": sorted(copied)}


def check_two_epochs(reports, shards):
    """Check that both ranks took as many batches, which held each image once an epoch."""
    steps = [[step for step, _ in report["seen"]] for report in reports]
    half = len(steps[0]) // 2
    assert steps == [[*range(2 * half)]] * len(reports)
    every = sorted(ShardDataset(shards).image_ids.tolist())
    assert sort_images(reports, range(half)) == every
    assert sort_images(reports, range(half, 2 * half)) == every


def list_options(hosts, folder, **source):
    """The options of two ranks, on one host or on two, each with a disk of its own."""
    return [
        {
            **source,
            "ssd": folder / f"ssd-{rank % hosts}",
            "local_rank": str(rank // hosts),
            "run": folder / f"run-{rank % hosts}",
            "epochs": 2,
            "batch_size": 4,
            "workers": 2 - hosts,
        }
        for rank in range(2)
    ]


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("form", ["shards", "files"])
def test_one_process_of_a_host_makes_its_shards_and_all_take_the_same_batches(
    run_ranks, made, shards, tmp_path, hosts, form
):
    """Shards are copied, or written from loose files, which the host of rank 0 sends to Drive."""
    source = {"images": made.images, "annotations": made.annotations, "drive": tmp_path / "drive"}
    made_on_host = ["written"]
    if form == "shards":
        source = {"shards": shards}
        made_on_host = [*range(len(ShardDataset(shards).index.shards))]
        if hosts == 2:
            # On a host where all shards lie, the order would be another one than on a new host.
            copy_shards(shards, tmp_path / "ssd-1")
    slow_down(next(iter(source.values())), SLOW)
    reports = run_ranks(2, train_and_count_copies, list_options(hosts, tmp_path, **source))
    check_two_epochs(reports, shards)
    others = [[]] * (2 - hosts)
    assert sorted(report["copied"] for report in reports) == [*others, *[made_on_host] * hosts]
    for host in range(hosts):
        ssd = tmp_path / f"ssd-{host}"
        if form == "files":
            open_dataset(**source, ssd=ssd).wait()
            assert verify_shards(source["drive"]).bad == ()
        assert verify_shards(ssd).bad == ()
        assert len(ShardDataset(ssd)) == 7
    # One host alone writes checkpoints.
    assert list((tmp_path / "run-0").glob("checkpoint-*.pt"))
    assert not (tmp_path / "run-1").exists()


def load_epoch(made, folder):
    """The images of a loop of the user's own; each rank has a disk of its own."""
    ssd = folder / f"ssd-{os.environ['RANK']}"
    os.environ["LOCAL_RANK"] = "0"
    with join_ranks(torch.device("cpu")):
        dataset = open_dataset(made.images, made.annotations, drive=None, ssd=ssd, shard_mb=0.02)
        loader = make_loader(dataset, batch_size=4, workers=0, deliver="packed")
        images = [image for batch in loader for image in batch.image_ids.tolist()]
        dataset.stop()
    return [type(dataset).__name__, images]


def test_a_loop_of_the_users_own_agrees_on_the_order(run_ranks, made, shards, tmp_path):
    copy_shards(shards, tmp_path / "ssd-1")
    slow_down(made.images, SLOW)
    (kind, images), (other_kind, others) = run_ranks(2, load_epoch, made, tmp_path)
    assert (kind, other_kind) == ("LooseFiles", "ShardDataset")
    assert sorted(images + others) == sorted(ShardDataset(shards).image_ids.tolist())


def refuse_to_train(folders, run, options):
    """The message of this rank, which has its own shards and its own options."""
    rank = int(os.environ["RANK"])
    with pytest.raises(ColabUtilsError) as caught:
        train(
            folders[rank],
            run,
            log=pytest.fail,
            **{**TINY, **options[rank]},
        )
    return str(caught.value)


def test_ranks_with_other_settings_are_refused_in_all_of_them(run_ranks, shards, tmp_path):
    own = [{"steps": 1}, {"steps": 1, "augment": "none"}]
    messages = run_ranks(2, refuse_to_train, [shards, shards], tmp_path / "run", own)
    assert messages[0] == messages[1]
    assert "other data or settings" in messages[0]
    assert "'augment': 'none'" in messages[0]
    assert not (tmp_path / "run").exists()


def test_ranks_with_other_images_of_the_same_number_are_refused(run_ranks, shards, tmp_path):
    """Their shards have the same images in another order."""
    index = read_index(shards)
    folders = [shards, shutil.copytree(shards, tmp_path / "other")]
    write_index(folders[1], dataclasses.replace(index, shards=index.shards[::-1]))
    messages = run_ranks(2, refuse_to_train, folders, tmp_path / "run", [{"steps": 1}] * 2)
    assert messages[0] == messages[1]
    assert "other data or settings" in messages[0]


@pytest.mark.parametrize(("rank", "shards_of_1"), [(1, "none"), (0, "shards")])
def test_ranks_do_not_wait_for_one_that_finds_no_shards_or_cannot_make_the_folder(
    run_ranks, shards, tmp_path, monkeypatch, rank, shards_of_1
):
    error = ColabUtilsError("The folder cannot be written. Choose another one.")
    if not rank:
        monkeypatch.setattr(CheckpointFolder, "prepare", Mock(side_effect=error))
    folders = [shards, shards.with_name(shards_of_1)]
    messages = run_ranks(2, refuse_to_train, folders, tmp_path / "run", [{"steps": 1}] * 2)
    own = messages.pop(rank)
    assert own.startswith(("There are no shards in ", str(error))[not rank])
    text = f"Rank {rank} stopped before the first step, and so did all others. It says: {own}"
    assert messages == [text]


def test_the_command_under_torchrun_speaks_once(run_ranks, shards, tmp_path):
    """The one real torchrun: as in a terminal."""
    script = tmp_path / "command.py"
    script.write_text(
        "import sys, tests.tiny_model, colab_utils.training.train as loop\n"
        "from functools import partial\n"
        "loop.train = partial(loop.train, weights=None)\n"
        "from colab_utils.__main__ import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    words = (
        f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2 -- {script} "
    )
    words += f"train --shards {shards} --run {tmp_path / 'run'} --steps 1 --batch-size 2 "
    words += f"--min-size 64 --model {TINY_MODEL} --json {tmp_path / 'out.json'}"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCH_HOME": str(tmp_path),
    }
    done = subprocess.run(
        words.split(), env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "out.json").read_text())["plan"]["ranks"] == 2
    assert done.stdout.count("1 steps, loss") == 1
    assert done.stderr.count("on cpu in float32 by 2 processes") == 1
