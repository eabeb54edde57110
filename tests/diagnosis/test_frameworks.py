"""Frameworks and loaders of others under watch: their batches stay the same, and every step is
seen.
"""

from __future__ import annotations

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


class _Model(nn.Module):
    """One layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        return {"loss": self.layer(x).sum()}


def make_training():
    """Return a model, an optimizer and a shuffled loader."""
    model = _Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, DataLoader([*NUMBERS], batch_size=2, shuffle=True)


def assert_saw(watched, batches, passes=1):
    """The watch saw each batch, and an optimizer that stepped."""
    summary = watched.summary()
    assert summary.passes == passes
    # Lightning asks for nothing after the last batch, so nobody sees where its step ends.
    assert batches - 1 <= summary.batches <= batches
    assert not any("No optimizer" in text for text in summary.unseen)
    assert sum(part.share for part in summary.parts) <= 1.001


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
def test_lightning_fits_a_watched_loader():
    module, trainer = make_lightning(3)
    trainer.fit(module, watched := watch(make_training()[2]))
    assert_saw(watched, ITEMS, passes=2)


@ignore_lightning
def test_lightning_gives_its_own_loader_to_watch():
    module, trainer = make_lightning(1)
    # At this point Lightning has put a sampler for each process into the loader.
    trainer.strategy.process_dataloader = watch
    trainer.fit(module, make_training()[2])
    assert_saw(trainer.train_dataloader, ITEMS, passes=2)


@pytest.fixture
def accelerators():
    """Accelerate keeps one state for a process. The next test starts without it."""
    state = pytest.importorskip("accelerate.state")
    yield
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


def test_accelerate_prepares_a_loader_before_it_is_watched(accelerators):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer, loader = accelerator.prepare(*make_training())
    loader = watch(loader)
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch["x"])["loss"])
                optimizer.step()
                optimizer.zero_grad()
    assert_saw(loader, ITEMS, passes=2)


def test_the_hugging_face_trainer_trains_with_a_watched_loader(accelerators, tmp_path):
    transformers = pytest.importorskip("transformers")
    settings = transformers.TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        num_train_epochs=2,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(_Model(), settings, train_dataset=NUMBERS)
    make_loader = trainer.get_train_dataloader
    trainer.get_train_dataloader = lambda: watch(make_loader())
    trainer.train()
    assert_saw(trainer.callback_handler.train_dataloader, ITEMS, passes=2)


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


def train(loader):
    """Train on a few batches of a loader; returns what they hold."""
    layer = nn.Linear(1, 1)
    seen = []
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    for values in islice(loader, MOST):
        seen.append(values.tolist())
        layer(values.reshape(-1, 1).float()).sum().backward()
        optimizer.step()
    return seen


# A dataset with the size of its batches; the batches, and their images.
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("source", "size", "batches", "images"),
    [
        # A stream has an end, or none.
        (_Stream(6), None, 6, 12),
        (_Stream(), 2, MOST, 2 * MOST),
    ],
)
def test_a_stream_gives_the_same_batches_under_watch(source, size, batches, images, workers):
    loader = DataLoader(source, size, num_workers=workers)
    plain = train(loader)
    watched = watch(loader)
    assert train(watched) == plain
    assert len(plain) == batches
    assert_saw(watched, batches)
    assert watched.summary().images == images
