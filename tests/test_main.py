"""The command line: JSON, exit codes, one line for every bad input, and files left as they were."""

from __future__ import annotations

import inspect
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from functools import partial
from pathlib import Path

import pytest

import colab_utils
from colab_utils import __main__ as commands
from colab_utils.__main__ import main
from colab_utils.comparison import compare as comparison
from colab_utils.diagnosis import diagnose as layers
from colab_utils.shards.index import read_index
from colab_utils.slow_drive import DriveProfile, slow_down
from colab_utils.training import train as loop
from tests.snapshots import snapshot
from tests.tiny_model import TINY_MODEL

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ("check", "diagnose", "preprocess", "verify", "copy", "train", "compare", "run")


@pytest.fixture
def run(capsys):
    def call(*arguments):
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            status = exit_.code
        return status, *capsys.readouterr()

    return call


def start(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "colab_utils", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


def finish(*arguments, **options):
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def assert_one_error(status, err, *, contains=""):
    lines = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert status == 2, err
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    assert "Traceback" not in err
    assert contains in lines[0]


@pytest.fixture
def world(tiny_dataset, tiny_shards, tmp_path):
    """A user's folder with everything in it, good and bad: {name: path}."""
    folder = tmp_path / "user"
    shutil.copytree(tiny_dataset.images, folder / "images")
    shutil.copy(tiny_dataset.annotations, folder / "coco.json")
    for name in ("shards", "cut", "newer", "lacking"):
        shutil.copytree(tiny_shards, folder / name)
    os.truncate(sorted((folder / "cut").glob("*.tar"))[1], 700)
    index = json.loads((folder / "newer" / "index.json").read_text())
    (folder / "newer" / "index.json").write_text(json.dumps({**index, "format_version": 99}))
    (folder / "lacking" / "index.json").unlink()
    (folder / "broken").mkdir()
    (folder / "broken" / "index.json").write_text("{")
    (folder / "text.json").write_text("hello")
    (folder / "captions.json").write_text(
        json.dumps({"images": [], "annotations": [{"caption": "a dog"}]})
    )
    (folder / "empty").mkdir()
    (folder / "empty.json").write_text(
        json.dumps({"images": [], "annotations": [], "categories": []})
    )
    return folder


COCO = "--images {}/images --annotations {}/coco.json"
NEW = "--shards {}/new"
SHARDS = "--shards {}/shards"

BAD = [
    # The command is missing or unknown.
    ("", "required"),
    ("bake", "invalid choice"),
    ("check --colour red COCO", "unrecognized"),
    ("copy SHARDS", "required"),
    # Files and folders are missing.
    ("check --images {}/nope --annotations {}/coco.json", "nope"),
    ("check --images {}/images --annotations {}/nope.json", "nope.json"),
    ("preprocess --images {}/nope --annotations {}/coco.json NEW", "There is no image folder"),
    ("verify --shards {}/nope", "nope"),
    ("copy --shards {}/nope --to {}/target", "nope"),
    ("train --shards {}/nope --run {}/run", "nope"),
    ("train SHARDS --val-shards {}/nope --run {}/run", "nope"),
    ("compare --images {}/nope --annotations {}/coco.json --report {}/report", "nope"),
    # The files hold no COCO.
    ("check --images {}/images --annotations {}/captions.json", "captions.json"),
    ("preprocess --images {}/images --annotations {}/text.json NEW", "text.json"),
    (
        "preprocess --images {}/images --annotations {}/empty.json NEW",
        "list no image. Name another",
    ),
    # The shards are none, not whole, or of a newer version.
    ("verify --shards {}/cut", "cut short"),
    ("verify --shards {}/newer", "version"),
    ("verify --shards {}/coco.json", ""),
    ("diagnose --shards {}/lacking", ""),
    # Nothing has these names.
    ("train SHARDS --run {}/run --model yolo", "yolo"),
    ("compare COCO --report {}/report --strategies magic", "magic"),
    ("compare COCO --report {}/report --drive-profile warp", "warp"),
    # Numbers are out of range, or are none.
    ("preprocess COCO NEW --min-size 0", ""),
    ("preprocess COCO NEW --shard-mb big", "invalid float"),
    ("preprocess COCO NEW --workers 0", "workers of 1 or more"),
    ("preprocess COCO NEW --storage zip", "invalid choice"),
    ("preprocess COCO NEW --part 3", "Pass (i, n)"),
    ("diagnose COCO --step-ms 0", ""),
    ("train SHARDS --run {}/run --steps 1 --epochs 1", ""),
    # One thing stands in place of another.
    ("diagnose SHARDS COCO", "--shards alone"),
    ("copy SHARDS --to {}/shards", "source and target at once"),
    ("copy SHARDS --to {}/coco.json", "coco.json"),
    ("copy --images {}/images --to {}/images/new", "lies in"),
    ("copy --images {}/images --to s3://bucket/new", "s3://bucket/new"),
    ("copy --images {}/images SHARDS --to {}/new", "See --help"),
    ("copy --annotations {}/coco.json SHARDS --to {}/new", "See --help"),
    ("preprocess COCO --shards {}/coco.json", "coco.json"),
    # Other shards are there already.
    ("preprocess COCO SHARDS --min-size 64", "shards"),
    ("preprocess COCO --shards {}/broken", "broken"),
    ("preprocess --images {}/empty --annotations {}/coco.json NEW", "No image that was tried"),
    ("compare COCO --report {}/coco.json", "coco.json"),
    ("compare --images {}/images --report {}/report", "--annotations"),
    # The folder holds no receipt.
    ("compare --against {}/coco.json --report {}/report", "coco.json"),
    ("check COCO --repair {}/coco.json", "nothing of yours is overwritten"),
    # The place of the JSON is checked before the work.
    ("check COCO --json {}/nope/out.json", "nope"),
    # The file belongs to somebody.
    ("check COCO --json {}/coco.json", "coco.json"),
    ("check COCO --json {}/new.json --repair {}/new.json", "Name a new file"),
    ("check COCO --json /dev/full", "/dev/full"),
    # Nothing can be written into these places.
    ("preprocess COCO --shards /proc/colab_utils", "Writing into /proc"),
]


def split(text, world):
    """Return the words of a command, whose short names stand for options and for the world."""
    for name in ("COCO", "NEW", "SHARDS"):
        text = text.replace(name, globals()[name])
    return text.replace("{}", str(world)).split()


@pytest.mark.parametrize(("text", "contains"), BAD)
def test_bad_input_is_one_line_and_leaves_everything_as_it_was(
    run, world, monkeypatch, text, contains
):
    # A test downloads nothing.
    monkeypatch.setattr(loop, "train", partial(loop.train, weights=None))
    before = snapshot(world)
    status, out, err = run(*split(text, world))
    assert_one_error(status, err, contains=contains)
    after = snapshot(world)
    assert before.items() <= after.items()
    assert not [name for name in after if name.endswith(".part")]
    # Only verify prints something, which is how many shards it looked at.
    if not text.startswith("verify"):
        assert out == ""


@pytest.mark.parametrize("options", ["size=4k,nr_inodes=1", "ro"])
def test_a_full_or_locked_dev_shm_is_named(world, options):
    """Locks of processes lie there: the folder of shards is not what is full."""
    words = split("preprocess COCO --shards {}/unwritten --storage keep", world)
    command = [sys.executable, "-m", "colab_utils", *words]
    mount = f"mount -t tmpfs -o {options} none /dev/shm && exec {shlex.join(command)}"
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount], capture_output=True, text=True, check=False
    )
    if "error: " not in result.stderr:
        pytest.skip(f"/dev/shm cannot be exchanged here: {result.stderr}")
    assert_one_error(result.returncode, result.stderr, contains="cannot be made in /dev/shm")


# These tests look at the help and at imports.


@pytest.mark.parametrize(
    "arguments",
    [[], *[[command] for command in COMMANDS]],
)
def test_help_works_and_loads_nothing_heavy(arguments):
    script = (
        "import sys, runpy\n"
        "try: runpy.run_module('colab_utils', run_name='__main__', alter_sys=True)\n"
        "finally: print('loaded:', *sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments, "--help"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "usage: python -m colab_utils" in done.stdout
    loaded = set(done.stderr.rpartition("loaded:")[2].split())
    assert {"torch", "numpy", "PIL", "matplotlib"} & loaded == set()
    if not arguments:
        assert all(command in done.stdout for command in COMMANDS)


def test_the_installed_script_is_the_same_command_line():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"colab-utils": "colab_utils.__main__:main"}


def test_a_number_of_bad_images_stays_a_number_and_a_share_a_share():
    parsed = [commands._read_number(text) for text in ("1", "1.0", "0.05", "many")]
    assert list(map(repr, parsed)) == ["1", "1.0", "0.05", "'many'"]


@pytest.mark.parametrize(
    ("command", "function"),
    [
        ("check", colab_utils.check_dataset),
        ("preprocess", colab_utils.write_shards),
        ("train", colab_utils.train),
        ("compare", colab_utils.compare),
    ],
)
def test_the_help_names_the_defaults_of_the_function(command, function):
    parameters = inspect.signature(function).parameters
    checked = 0
    for name, _, _, meaning in commands._OPTION.findall(commands._OPTIONS[command]):
        default = re.search(r"\((\S+)\)$", meaning)
        if default and name in parameters:
            assert str(parameters[name].default) == default[1], name
            checked += 1
    assert checked


# These tests look at the JSON.


KEYS = {
    "check": "images annotations ok problems",
    "diagnose": "verdict headspace images_per_second stall_share layers fixes confidence",
    "preprocess": "images skipped shards bytes seconds",
    "verify": "shards images bad",
    "copy": "shards bytes seconds skipped_shards",
    "train": "steps losses images_per_second wait_share checkpoint ap",
    "compare": "machine dataset strategies",
    # These are the keys of the rows of a list, or of an object.
    "ap": "bbox segm",
    "layers": "name median_ms p95_ms cpu_ms",
    "fixes": "name forecast_images_per_second measured_images_per_second",
    "losses": "step loss",
    "strategies": (
        "name comparable images_per_second batch_ms_median batch_ms_p95 wait_share first_batch_s "
        "cpu_ms_per_image"
    ),
    "problems": "kind count examples",
    "skipped": "file_name reason",
    "bad": "shard reason",
}
GOOD = [
    "check COCO",
    "diagnose COCO --step-ms 5 --batch-size 2 --workers 1",
    "preprocess COCO NEW --workers 1 --max-bad 0.05",
    "verify SHARDS",
    "copy SHARDS --to {}/to",
    "compare COCO --report {}/r --strategies dataloader_on_ssd,packed --seconds 0.2 --repeats 1",
    "train SHARDS --run {}/run --val-shards {}/shards --steps 2 --batch-size 1 --max-size 96 "
    f"--model {TINY_MODEL} --min-size 64",
]


def assert_keys(name, result):
    assert result.keys() >= set(KEYS[name].split())
    for key in result.keys() & KEYS:
        rows = result[key]
        for row in rows if isinstance(rows, list) else [rows]:
            assert_keys(key, row)


def refuse_constant(text):
    raise ValueError(f"{text} is no JSON")


@pytest.mark.parametrize("text", GOOD)
def test_json_goes_to_a_file_in_place_of_an_earlier_result(
    run, world, tmp_path, monkeypatch, one_thread, text
):
    monkeypatch.setattr(layers, "diagnose", partial(layers.diagnose, seconds=1))
    monkeypatch.setattr(comparison, "compare", partial(comparison.compare, batches=2, run_s=0))
    # The test downloads no weights.
    monkeypatch.setattr(loop, "train", partial(loop.train, weights=None))
    before = snapshot(world)
    target = tmp_path / "out.json"
    target.write_text('{\n "command": "earlier"}')
    status, out, err = run(*split(text, world), "--json", target)
    assert status == 0, err
    assert out.strip()
    assert_keys(text.split()[0], json.loads(target.read_text(), parse_constant=refuse_constant))
    assert before.items() <= snapshot(world).items()


def test_defects_are_listed_in_the_json_too(run, world):
    (world / "images" / sorted(os.listdir(world / "images"))[0]).unlink()
    status, out, err = run(*split("check COCO --json -", world))
    assert_one_error(status, err, contains="--repair OUT.json")
    result = json.loads(out)
    assert_keys("check", result)
    assert result["ok"] is False
    status, out, err = run("verify", "--shards", world / "cut", "--json", "-")
    assert_one_error(status, err, contains="cut short")
    assert_keys("verify", json.loads(out))
    assert len(json.loads(out)["bad"]) == 1


# These tests look at Ctrl-C, full disks, and closed pipes.


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_leaves_only_finished_shards_and_the_same_command_continues(world, workers):
    slow_down(world / "images", DriveProfile("slow", 0.3, 1e9, "a test"))
    target = world / "new"
    options = f"--storage keep --shard-mb 0.03 --streams 1 --workers {workers}"
    arguments = split(f"preprocess COCO NEW {options}", world)
    process = start(*arguments, start_new_session=True)
    try:
        while not list(target.glob("*.arrays")) and process.poll() is None:
            time.sleep(0.01)
        # A terminal sends the signal to the workers, too.
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, ""), err
    assert err == (
        "\nstopped: nothing half-done is left, and the same command uses what was finished\n"
    )
    assert not (target / "index.json").exists()
    assert not list(target.glob("*.part"))
    finished = {path: path.stat().st_mtime_ns for path in target.glob("*.arrays")}
    assert finished
    status, _, err = finish(*arguments)
    assert status == 0, err
    assert read_index(target).images == 12
    assert {path: path.stat().st_mtime_ns for path in finished} == finished


def test_images_that_cannot_be_copied_are_named_in_the_end(run, world):
    name = json.loads((world / "coco.json").read_text())["images"][1]["file_name"]
    (world / "images" / name).unlink()
    status, out, err = run(*split("copy COCO --to {}/to --json -", world))
    assert status == 2
    assert json.loads(out)["missing"][0].keys() == {"file_name", "reason"}
    *_, skipped, error = err.splitlines()
    assert skipped.startswith(f"skipped {name}: not in ")
    assert error.startswith(f"error: Files could not be copied, such as {name}. The others")


def limit_files():
    # The limit stands in for a disk that is full.
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))


@pytest.mark.parametrize(
    "text",
    [
        "preprocess COCO NEW --storage keep --workers 2",
        "copy --images {}/images --to {}/to",
    ],
)
def test_a_full_disk_is_one_line(world, text):
    arguments = split(text, world)
    status, out, err = finish(*arguments, preexec_fn=limit_files)
    assert_one_error(status, err)
    assert out == ""
    assert not list(world.rglob("*.part"))
    assert finish(*arguments)[0] == 0


def test_a_reader_that_has_seen_enough_is_no_error(world):
    with start("verify", "--shards", world / "shards", "--json", "-") as process:
        # The command `head` closes its pipe like this.
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (0, "")
