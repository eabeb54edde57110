"""Unchanged scripts under watch: the cause of a planted stall is named, a healthy one has none, and
the script runs as without us.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).with_name("scripts")
RUN = ["-m", "colab_utils", "run"]
# Every script with every stall takes minutes, and `make test-formats` runs them. `make test` runs
# each script of torch alone once.
EVERY = bool(os.environ.get("EVERY_STALL"))
USUAL = [
    ("references", "work"),
    ("epochs", "read"),
    ("persistent", "gap"),
    ("thread", "healthy"),
    ("ahead", "read"),
    ("anew", "healthy"),
    ("iterations", "gap"),
]
FRAMEWORKS = ("lightning", "transformers", "accelerate", "ignite", "fastai")
KINDS = (*dict(USUAL), *(f"with_{name}" for name in FRAMEWORKS))
CAUSES = {
    "healthy": ("", ""),
    "read": ("read", "read_file"),
    "work": ("work", "draw_masks"),
    "gap": ("between", "write_log"),
}
# Who takes the batches in a thread does not step, and fastai has optimizers of its own. Their
# summary says that no step was seen.
UNSEEN = {("thread", "gap"), ("with_fastai", "gap")}
# A library that the machine need not have may tell of itself.
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
# Who opens one of these pipes waits there as at a slow file, 30 ms in the mean.
SERVE = """
import os, sys, time
while True:
    time.sleep(0.06)
    for path in sys.argv[1:]:
        # Nobody may wait there.
        try:
            pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            os.write(pipe, b"photo")
            os.close(pipe)
        except OSError:
            pass
"""


@pytest.fixture(scope="module")
def pipes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipes")
    paths = [folder / f"photo-{index}" for index in range(8)]
    for path in paths:
        os.mkfifo(path)
    server = subprocess.Popen([sys.executable, "-c", SERVE, *paths])
    yield folder
    server.kill()
    server.wait()


def call(*command, cwd, **variables):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=ENVIRONMENT | variables,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def run(*arguments, cwd):
    return call(*RUN, *arguments, cwd=cwd)


@pytest.mark.parametrize(("kind", "stall"), [*product(KINDS, CAUSES)] if EVERY else USUAL)
def test_the_planted_stall_of_an_unchanged_script_is_named(kind, stall, pipes, tmp_path):
    framework = kind.removeprefix("with_")
    if framework in FRAMEWORKS and importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: make test-formats installs it")
    result = tmp_path / "result.json"
    ended = run("--json", result, SCRIPTS / f"{kind}.py", stall, pipes, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    content = json.loads(result.read_text())
    assert content["command"] == "run"
    training = max(content["loaders"], key=lambda loader: loader["batches"])
    causes = {cause["id"]: cause["why"] for cause in training["causes"]}
    print(kind, stall, [*causes], training["verdict"])
    # What a busy machine adds is no fault of the script's.
    own = causes.keys() - {"other_programs", "contention", "starts", "restarts", "wait"}
    if stall == "healthy":
        assert own == set()
        return
    if (kind, stall) in UNSEEN:
        assert any("No optimizer of torch stepped" in text for text in training["unseen"])
        return
    cause, function = CAUSES[stall]
    assert function in causes[cause]


# These tests compare a script under watch with the same script alone.


def run_both(code, tmp_path, *arguments):
    """Run a script alone and under watch. Return both processes, the plain one first."""
    folder = tmp_path / "folder"
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(code)
    script = ["folder/script.py", *arguments]
    return [call(*command, *script, cwd=tmp_path) for command in ([], RUN)]


NOTHING = "No DataLoader was in use for 0.5 s: there is nothing to say of waits.\n"
SURROUNDINGS = """
import os, sys, warnings
print(sys.argv, __name__, __file__, sys.path[0], os.getcwd(), __spec__, sys.flags.optimize)
print("torch" in sys.modules, sys.modules["__main__"].__dict__ is globals(), warnings.filters)
assert "\\d" == r"\\d"
{end}
"""


@pytest.mark.parametrize(
    "end",
    [
        "",
        "sys.exit(7)",
        "sys.exit('stopped')",
        "def fail():\n    return {}['no']\nfail()",
        "import signal\nos.kill(os.getpid(), signal.SIGINT)",
        "sys.excepthook = lambda *seen: print(seen[:2])\n1 / 0",
        "if os.fork() == 0: sys.exit(3)\nprint(os.wait()[1])",
    ],
    ids=["end", "status", "message", "error", "ctrl-c", "hook", "fork"],
)
def test_a_script_runs_as_without_us(end, tmp_path):
    arguments = ["--json", "7", "--help", "--", "run"]
    plain, ours = run_both(SURROUNDINGS.format(end=end), tmp_path, *arguments)
    assert plain.stdout
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    # Each process compiles the script, and so warns of it, once.
    assert ours.stderr.replace(NOTHING, "", 1) == plain.stderr
    assert ours.stderr.count(NOTHING) == 1


LOADING = """
import os, random, sys, time
os.environ["OMP_NUM_THREADS"] = "2"
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __init__(self, bad=None):
        self.bad = bad
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index == self.bad == 0:
            os._exit(9)
        if index == self.bad:
            raise KeyError(index)
        return torch.tensor(float(index)) + torch.rand(())

def train(loader):
    for batch in loader:
        print(batch.tolist())

if __name__ == "__main__":
    print(torch.get_num_threads())
    torch.manual_seed(0)
    for context in ("fork", "spawn"):
        loader = DataLoader(
            Numbers(), 2, shuffle=True, num_workers=1, multiprocessing_context=context
        )
        train(loader)
    batches = iter(DataLoader(Numbers(), 4, shuffle=True))
    print(torch.rand(()), len(batches), batches._num_yielded)
    print(next(batches), torch.rand(()))
    print(*zip(DataLoader(range(4), 2), DataLoader(range(4), 2)))
    try:
        list(DataLoader(Numbers(bad=0), 2, num_workers=1))
    except RuntimeError as error:
        print(type(error), "exited unexpectedly" in str(error))
    train(DataLoader(Numbers(bad=3), 2))
"""


def test_batches_and_errors_of_loaders_are_as_without_us(tmp_path):
    plain, ours = run_both(LOADING, tmp_path)
    assert plain.stdout.startswith("2\n")
    assert plain.stderr.endswith("KeyError: 3\n")
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    # A note says which sample failed. No line of the traceback is ours.
    assert ours.stderr.endswith("KeyError: 3\nSample 3 of the dataset raised this error.\n")
    plain_trace = plain.stderr[plain.stderr.index("Traceback") :]
    ours_trace = ours.stderr[ours.stderr.index("Traceback") :]
    assert ours_trace.startswith(plain_trace)


OWN = """
import torch
from torch import nn
import time
from colab_utils import make_loader, watch
from torch.utils.data import DataLoader, Dataset, TensorDataset

class Photos(Dataset):
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        target = {
            "boxes": torch.tensor([[0.0, 0, 4, 4]]), "labels": torch.tensor([1]),
            "masks": torch.ones(1, 8, 8, dtype=torch.uint8), "image_id": index,
            "area": torch.tensor([16.0]), "iscrowd": torch.tensor([0]),
        }
        return torch.zeros(3, 8, 8, dtype=torch.uint8), target

def train(loader):
    for _ in loader:
        time.sleep(0.06)

train(make_loader(Photos(20), batch_size=2, workers=0))
dataset = TensorDataset(torch.zeros(12))
for _ in range(2):
    # As Lightning does, this keeps an iterator that has given all its batches.
    kept = iter(DataLoader(dataset, 2))
    train(next(kept) for _ in range(6))
train(watch(DataLoader(TensorDataset(torch.zeros(11)), 1)))
# And this begins another loader before it lets go of an iterator.
batches = iter(DataLoader(TensorDataset(torch.zeros(9)), 1))
next(batches)
train(DataLoader(TensorDataset(torch.zeros(1)), 1))
time.sleep(0.6)
del batches
batches = iter(DataLoader(TensorDataset(torch.zeros(8)), 1))
next(batches)
"""


def test_each_loader_that_mattered_has_one_summary(tmp_path):
    (tmp_path / "script.py").write_text(OWN)
    ended = run("--json", "out.json", "script.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    shown = [line[3:] for line in ended.stderr.splitlines() if line.startswith("== ")]
    own, anew = json.loads((tmp_path / "out.json").read_text())["loaders"]
    assert shown == [own["loader"], anew["loader"]]
    assert own["loader"] == "Photos (20 samples), batches of 2, 0 workers, at script.py:22"
    assert anew["loader"] == "TensorDataset (12 samples), batches of 2, 0 workers, at script.py:29"
    assert (own["batches"], anew["batches"], anew["passes"]) == (10, 12, 2)
    # That of the loader that the script itself watches is printed by `watch`.
    assert ended.stderr.count(" images/s") == 3


def test_rank_0_reports(tmp_path):
    (tmp_path / "script.py").write_text(
        "import os, sys\nsys.stdout.write(f\"rank {os.environ['RANK']} {__name__}\\n\")"
    )
    launch = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "--"]
    ended = call("-m", *launch, "colab_utils", "run", "script.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["rank 0 __main__", "rank 1 __main__"]
    assert ended.stderr.count(NOTHING) == 1


CELLS = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell()
shell.run_line_magic("load_ext", "colab_utils")
shell.run_cell("import time\\nfrom torch.utils.data import DataLoader")
shell.run_cell("loader = DataLoader(range(12), 2)")
shell.run_cell("print(next(iter(loader)))")
shell.run_cell("for batch in loader: time.sleep(0.1)\\nprint('trained')")
shell.run_cell("for batch in loader: time.sleep(0.1)\\nfail()")
shell.run_cell("print('done')")
"""


def test_a_notebook_is_watched_cell_by_cell(tmp_path):
    ended = call("-c", CELLS, cwd=tmp_path, IPYTHONDIR=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    shown = [number for number, line in enumerate(lines) if line.startswith("== range (12")]
    assert len(shown) == 2
    assert lines[shown[0] - 1] == "trained"
    assert lines[-1] == "done"


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("nope.py", None, "No such file"),
        ("photo.py", b"\xff\xd8\xff\xe0", "is not valid Python"),
        ("open.py", b"print(", "was never closed"),
    ],
)
def test_what_is_no_script_is_one_line(name, content, why, tmp_path):
    if content:
        (tmp_path / name).write_bytes(content)
    ended = run("--json", "out.json", name, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert why in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


def test_a_result_that_cannot_be_written_leaves_the_status_of_the_script(tmp_path):
    code = "import os\nos.mkdir('out.json')\nraise SystemExit(4)"
    (tmp_path / "script.py").write_text(code)
    ended = run("--json", "out.json", "script.py", cwd=tmp_path)
    assert ended.returncode == 4
    assert ended.stderr.startswith("error: ")
    assert "Traceback" not in ended.stderr
