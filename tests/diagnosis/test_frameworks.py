"""Frameworks and loaders of others under watch: their batches stay the same, and every step is
seen.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from itertools import count, islice
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from colab_utils.diagnosis.watch import watch

pytestmark = pytest.mark.usefixtures("one_thread", "same_environment")
ROOT = Path(__file__).parents[2]
# A dataset has this many samples, and a loop takes at most MOST batches of a loader.
ITEMS = 12
MOST = 9


@pytest.fixture
def same_environment():
    """A framework may set variables of the environment. This test puts them back."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


# Each sample is its own number, twice.
NUMBERS = [{"x": torch.full((2,), float(number))} for number in range(ITEMS)]


class _Stream(IterableDataset):
    """A stream of numbers that may be endless. It has no length."""

    def __init__(self, length=None):
        self.length = length

    def __iter__(self):
        return islice((torch.full((2,), float(number)) for number in count()), self.length)


class _WithoutLength:
    """A loader that can only be iterated over."""

    def __iter__(self):
        return (torch.full((2, 2), float(number)) for number in range(4))


class _Model(nn.Module):
    """One layer that keeps the numbers that it has seen."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.seen = []

    def forward(self, x):
        self.seen.append(x.tolist())
        return {"loss": self.layer(x).sum()}


def make_training():
    """The same model, optimizer and shuffled loader at every call."""
    torch.manual_seed(3)
    model = _Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, DataLoader([*NUMBERS], batch_size=2, shuffle=True)


def read_weights(model):
    return [values.tolist() for values in model.parameters()]


def assert_saw(watched, batches, passes=1):
    """The watch saw each batch, and an optimizer that stepped."""
    summary = watched.summary()
    assert summary.passes == passes
    # Lightning asks for nothing after the last batch, so nobody sees where its step ends.
    assert batches - 1 <= summary.batches <= batches
    assert not any("No optimizer" in text for text in summary.unseen)
    assert sum(part.share for part in summary.parts) <= 1.001


def assert_unchanged(train):
    """Training gets the same batches with and without watch, and each of them is seen."""
    _, plain = train(lambda loader: loader)
    watched, model = train(watch)
    assert len(model.seen) == ITEMS
    assert (model.seen, read_weights(model)) == (plain.seen, read_weights(plain))
    assert_saw(watched, ITEMS, passes=2)


# These tests run the frameworks.


def make_lightning(accumulated):
    """A Lightning module and a trainer that write nothing."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = _Model()

        def training_step(self, batch, _):
            return self.model(batch["x"])["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        enable_model_summary=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        accumulate_grad_batches=accumulated,
    )
    return Module(), trainer


ignore_lightning = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers:UserWarning",
    "ignore:.*isinstance.treespec, LeafSpec:FutureWarning",
)


@ignore_lightning
@pytest.mark.parametrize("accumulated", [1, 3])
def test_lightning_fits_a_watched_loader(accumulated):
    def fit(around):
        loader = around(make_training()[2])
        module, trainer = make_lightning(accumulated)
        trainer.fit(module, loader)
        return loader, module.model

    assert_unchanged(fit)


@ignore_lightning
def test_lightning_gives_its_own_loader_to_watch():
    module, trainer = make_lightning(1)
    # At this point Lightning has put a sampler for each process into the loader.
    trainer.strategy.process_dataloader = watch
    trainer.fit(module, make_training()[2])
    assert len(module.model.seen) == ITEMS
    assert_saw(trainer.train_dataloader, ITEMS, passes=2)


@pytest.fixture
def accelerators():
    """Accelerate keeps one state for a process. The next test starts without it."""
    state = pytest.importorskip("accelerate.state")
    yield
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


@pytest.mark.parametrize("accumulated", [1, 4])
def test_accelerate_prepares_a_loader_before_it_is_watched(accumulated, accelerators):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)

    def train(around):
        model, optimizer, loader = accelerator.prepare(*make_training())
        loader = around(loader)
        for _ in range(2):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch["x"])["loss"])
                    optimizer.step()
                    optimizer.zero_grad()
        return loader, model

    assert_unchanged(train)


@pytest.mark.parametrize("accumulated", [1, 4])
def test_the_hugging_face_trainer_trains_with_a_watched_loader(accumulated, accelerators, tmp_path):
    transformers = pytest.importorskip("transformers")

    def train(around):
        model = make_training()[0]
        settings = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=accumulated,
            num_train_epochs=2,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model, settings, train_dataset=NUMBERS)
        make_loader = trainer.get_train_dataloader
        trainer.get_train_dataloader = lambda: around(make_loader())
        trainer.train()
        return trainer.callback_handler.train_dataloader, model

    assert_unchanged(train)


RANK = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from colab_utils.diagnosis.watch import watch

dist.init_process_group("gloo")
loader = watch(DataLoader(range(16), batch_size=2, sampler=DistributedSampler(range(16))))
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
seen = []
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for batch in loader:
        seen += batch.tolist()
        model(batch[:, None].float()).sum().backward()
        optimizer.step()
print("seen", *seen, loader.summary().unseen)
dist.destroy_process_group()
"""


def test_torchrun_has_a_summary_for_each_rank(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    ended = subprocess.run(
        [sys.executable, *torchrun, "--tee", "3", "rank.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    # The optimizer of each rank is seen to step, and the ranks divide each epoch among them.
    lines = re.findall(r"seen ([\d ]+) \(\)$", ended.stdout, re.MULTILINE)
    first, second = map(str.split, lines)
    for half in (slice(8), slice(8, 16)):
        assert {*map(int, first[half] + second[half])} == {*range(16)}
    # Each says its rank.
    ranks = re.findall(r"^\[default(\d)\]:Rank (\d): ", ended.stderr, re.MULTILINE)
    assert {*ranks} == {("0", "0"), ("1", "1")}


# These tests run other loaders.


def train(loader, pick):
    """Train on a few batches of a loader; returns what they hold."""
    layer = nn.Linear(1, 1)
    seen = []
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    for batch in islice(loader, MOST):
        values = pick(batch)
        seen.append(values.tolist())
        layer(values.reshape(-1, 1).float()).sum().backward()
        optimizer.step()
    return seen


def check(make, batches, pick=lambda batch: batch):
    """A loader gives the same batches with and without watch."""
    plain = train(make(), pick)
    watched = watch(make())
    assert train(watched, pick) == plain
    assert len(plain) == batches
    assert_saw(watched, batches)
    return watched


SAMPLES = [{"x": torch.full((3, 2), float(number))} for number in range(4)]


# A loader, or a dataset with the size of its batches; the batches, and their images.
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("source", "size", "batches", "images"),
    [
        (_WithoutLength(), 0, 4, 8),
        # A stream has an end, or none.
        (_Stream(6), None, 6, 12),
        (_Stream(6), 2, 3, 6),
        (_Stream(), 2, MOST, 2 * MOST),
        # The dataset makes batches.
        (SAMPLES, None, 4, 12),
    ],
)
def test_a_loader_of_any_kind_is_watched(source, size, batches, images, workers):
    def make():
        return source if size == 0 else DataLoader(source, size, num_workers=workers)

    def pick(batch):
        return batch["x"] if isinstance(batch, dict) else batch

    assert check(make, batches, pick).summary().images == images


@pytest.mark.filterwarnings(
    "ignore:unclosed file:ResourceWarning", "ignore:.*with_length:UserWarning"
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_of_webdataset_is_watched(workers, tmp_path):
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as shard:
        for number in range(ITEMS):
            shard.write({"__key__": str(number), "x.pyd": float(number)})

    def make():
        data = webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False)
        data = data.decode().to_tuple("x.pyd").map_tuple(torch.tensor).batched(2)
        loader = webdataset.WebLoader(data.repeat(), batch_size=None, num_workers=workers)
        return loader.with_epoch(4).with_length(4)

    check(make, 4, pick=lambda batch: batch[0])
    # Nothing may be left to collect once the warning of a shard that stays open counts again.
    gc.collect()
