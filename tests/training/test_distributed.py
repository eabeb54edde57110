"""Several processes train one model: each image once, one writer, the same weights; also on two hosts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch

from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import make_loader
from colab_utils.sample_data import make_dataset
from colab_utils.shards.write import write_shards
from colab_utils.training import trainer as session
from colab_utils.training.distributed import Ranks
from colab_utils.training.train import train

ROOT = Path(__file__).parents[2]
TRAIN = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
from colab_utils.training import trainer as session
from colab_utils.training.train import train
shards, run, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
seen, real = [], session.Trainer._train_batch
def note(self, batch, **more):
    seen.append([self.done, [] if batch is None else batch.image_ids.tolist()])
    return real(self, batch, **more)
session.Trainer._train_batch = note
report = train(shards, run, weights=None, min_size=64, max_size=96, device="cpu", workers=0, log=lambda line: None,
               **options)
rank = os.environ["RANK"]
with open(f"{run}-rank-{rank}.json", "w") as file:
    json.dump({"rank": int(rank), "seen": seen, "losses": [p.loss for p in report.losses],
               "ap": report.ap and report.ap.segm, "images": report.ap and report.ap.images}, file)
"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Seven images: no number of ranks divides them."""
    folder = tmp_path_factory.mktemp("seven")
    made = make_dataset(folder / "data", n=7, width=96, height=80, objects=(1, 3), workers=1)
    write_shards(made.images, made.annotations, shards=folder / "shards", workers=1)
    return folder / "shards"


def launch(shards, run, *, ranks, prefix=(), more=("--standalone",), **options):
    """All ranks, as ``torchrun`` starts them."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = Path(run).parent / "train.py"
    script.write_text(TRAIN)
    command = [
        *prefix, sys.executable, "-m", "torch.distributed.run", *more, f"--nproc-per-node={ranks}", str(script),
        str(shards), str(run), json.dumps(options),
    ]  # fmt: skip
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process, run):
    """What each rank reports."""
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err[-3000:]
    return [json.loads(path.read_text()) for path in sorted(run.parent.glob(f"{run.name}-rank-*.json"))]


def run_ranks(shards, run, *, ranks, **options):
    return finish(launch(shards, run, ranks=ranks, **options), run)


def sort_images(reports, steps):
    return sorted(image for report in reports for step, ids in report["seen"] if step in steps for image in ids)


def test_each_image_once_an_epoch_over_all_ranks_and_one_writer(shards, tmp_path):
    """7 images in batches of 4 are two steps, and the second one has an image too few for four ranks."""
    reports = run_ranks(shards, tmp_path / "run", ranks=4, epochs=2, batch_size=4, val_shards=str(shards))
    every = sorted(ShardDataset(shards).image_ids.tolist())
    assert sorted(report["rank"] for report in reports) == list(range(4))
    assert sort_images(reports, (0, 1)) == sort_images(reports, (2, 3)) == every
    # all of them say the same of the whole batch, and of all validation images
    assert len({json.dumps(report["losses"]) for report in reports}) == 1
    assert {report["images"] for report in reports} == {7}
    assert len({report["ap"] for report in reports}) == 1
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert [name for name in names if name.startswith("checkpoint")] == [
        "checkpoint-00000002.pt",  # the end of an epoch
        "checkpoint-00000004.pt",
    ]
    assert len([name for name in names if name.startswith("best")]) == 1


def test_another_number_of_ranks_goes_on_where_it_was(shards, tmp_path):
    first = run_ranks(shards, tmp_path / "run", ranks=2, steps=3, batch_size=4)
    every = sorted(ShardDataset(shards).image_ids.tolist())
    assert sort_images(first, (0, 1)) == every
    seen, real = [], session.Trainer._train_batch

    def note(self, batch, **more):
        seen.append([self.done, batch.image_ids.tolist()])
        return real(self, batch, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session.Trainer, "_train_batch", note)
        alone = train(shards, tmp_path / "run", steps=4, device="cpu", workers=0)  # one process, in the middle of it
    assert sort_images([*first, {"seen": seen}], (2, 3)) == every
    assert [point.loss for point in alone.losses[:3]] == first[0]["losses"]
    assert (alone.plan.first_step, alone.plan.batch_size) == (3, 4)


def test_ranks_begin_with_the_same_weights_and_end_with_them(shards, tmp_path):
    """Without chance in the step, two ranks do what one does with the whole batch."""
    code = """
import json, os, sys, torch
from torch import distributed, nn
from colab_utils.training.distributed import join_ranks
from colab_utils.training.step import TrainingStep
class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))
    def forward(self, images, targets):
        return {"loss": torch.stack([(self.weight * image.mean()).square().sum() for image in images]).mean()}
images = [torch.full((3, 4, 4), float(n)) for n in range(1, 6)]
with join_ranks(torch.device("cpu")) as ranks:
    model = Detector()
    model.weight.data += ranks.rank  # another beginning on each
    ranks.copy_weights(model)
    step = TrainingStep(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.01), ranks=ranks)
    own = list(ranks.share(images[:3])) if ranks.count > 1 else images[:3]
    first = step(own, [{}] * len(own), total=3)
    own = list(ranks.share(images[3:4]))  # one image: nothing is left for the second rank
    second = step(own or None, [{}] * len(own), total=1, stop=ranks.rank == 1)
    numbers = [round(value, 4) for value in (*model.weight.tolist(), float(first), float(second))]
    with open(f"{sys.argv[1]}/{ranks.rank}.json", "w") as file:
        json.dump({"numbers": numbers, "stops": float(step.stops)}, file)
"""
    script = tmp_path / "step.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found = []
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]):
        folder = tmp_path / f"{len(found)}"
        folder.mkdir()
        command = [sys.executable, *launcher, str(script), str(folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        found += [json.loads(path.read_text()) for path in sorted(folder.iterdir())]
    assert len(found) == 3
    assert found[0]["numbers"] == found[1]["numbers"] == found[2]["numbers"]
    assert [one["stops"] for one in found] == [0, 1, 1]  # both know that one wants to stop


def test_the_command_under_torchrun_speaks_once(shards, tmp_path):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "--", "colab_utils",
        "train", "--shards", shards, "--run", tmp_path / "run", "--steps", 1, "--batch-size", 2, "--min-size", 64,
        "--json", tmp_path / "out.json",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_HOME": str(tmp_path)}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "out.json").read_text())["plan"]["ranks"] == 2
    assert done.stdout.count("1 steps, loss") == 1
    assert done.stderr.count("on cpu in float32 by 2 processes") == 1


def can_make_namespaces():
    if os.geteuid() or not shutil.which("ip"):
        return False
    made = subprocess.run(["ip", "netns", "add", "colab-utils-try"], capture_output=True)
    subprocess.run(["ip", "netns", "del", "colab-utils-try"], capture_output=True)
    return made.returncode == 0


@pytest.fixture
def hosts():
    """Two hosts with a cable between them."""
    if not can_make_namespaces():
        pytest.skip("needs root and iproute2 (apt-get install iproute2)")
    names = ("colab-utils-a", "colab-utils-b")
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    commands = [f"ip netns add {name}" for name in names]
    commands.append("ip link add cable-a type veth peer name cable-b")
    for name, end, address in zip(names, ("cable-a", "cable-b"), ("10.77.0.1", "10.77.0.2"), strict=True):
        commands += [
            f"ip link set {end} netns {name}", f"ip -n {name} addr add {address}/24 dev {end}",
            f"ip -n {name} link set {end} up", f"ip -n {name} link set lo up",
        ]  # fmt: skip
    for command in commands:
        subprocess.run(command.split(), check=True, capture_output=True)
    yield names
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_two_hosts_train_one_model(shards, tmp_path, hosts):
    processes = []
    for number, (name, end) in enumerate(zip(hosts, ("cable-a", "cable-b"), strict=True)):
        folder = tmp_path / name  # each has its own disk
        folder.mkdir()
        copied = shutil.copytree(shards, folder / "shards")
        more = ("--nnodes=2", f"--node-rank={number}", "--master-addr=10.77.0.1", "--master-port=29555")
        prefix = ("ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={end}")
        processes.append(launch(copied, folder / "run", ranks=1, prefix=prefix, more=more, epochs=1, batch_size=4))
    reports = [report for process, name in zip(processes, hosts, strict=True)
               for report in finish(process, tmp_path / name / "run")]  # fmt: skip
    assert sort_images(reports, (0, 1)) == sorted(ShardDataset(shards).image_ids.tolist())
    assert reports[0]["losses"] == reports[1]["losses"]
    assert (tmp_path / hosts[0] / "run" / "checkpoint-00000002.pt").is_file()
    assert not (tmp_path / hosts[1] / "run").exists()  # one writer


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shares_of_a_loader_make_up_its_batches(shards, ranks):
    dataset = ShardDataset(shards)
    whole = [batch.image_ids.tolist() for batch in make_loader(dataset, batch_size=4, workers=0, deliver="packed")]
    parts, totals = [], []
    for rank in range(ranks):
        loader = make_loader(dataset, batch_size=4, workers=0, deliver="packed", rank=rank, ranks=ranks)
        parts.append([])
        for batch in loader:
            parts[-1].append([] if batch is None else batch.image_ids.tolist())
            totals.append(loader.total)
    assert {len(part) for part in parts} == {len(whole)}
    together = [sorted(chain.from_iterable(shares)) for shares in zip(*parts, strict=True)]
    assert together == [sorted(batch) for batch in whole]
    assert totals == [len(batch) for batch in whole] * ranks


def test_alone_a_rank_talks_to_nobody():
    ranks = Ranks()
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    (number,) = ranks.add_gradients([parameter], torch.tensor(3.0))
    assert number == 3
    assert torch.equal(parameter.grad, torch.ones(2))
    assert ranks.send("it") == "it"
    assert list(ranks.share([1, 2])) == [1, 2]
    assert str(ranks) == "one process"
