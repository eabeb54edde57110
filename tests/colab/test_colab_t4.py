"""The run on a T4, with a stand-in of Google's command that keeps its arguments, its exit codes and
its paths (google-colab-cli at 1005593): `exec` ends with 0 whatever its code does.
"""

from __future__ import annotations

import json
import sys

import pytest

from tools.colab_t4 import main

COLAB = """
import json, pathlib, shutil, subprocess, sys
here = pathlib.Path({folder!r})
fails = json.loads((here / "fails.json").read_text())
verb, session, name, *rest = sys.argv[1:]
assert session == "-s"
with open(here / "calls.jsonl", "a") as calls:
    calls.write(json.dumps([verb, *rest]) + "\\n")
if verb in fails:
    sys.exit(fails[verb])
if verb == "drivemount":
    (here / "content/drive/MyDrive").mkdir(parents=True)
if verb == "upload":
    shutil.copy(rest[0], here / rest[1])
if verb == "exec":
    code = pathlib.Path(rest[1]).read_text().replace("/content", str(here / "content"))
    code = code.replace("sys.executable", repr(str(here / "python")))
    subprocess.run([sys.executable, "-c", code])
if verb == "download":
    if not (here / rest[0]).is_file():
        sys.exit(1)
    shutil.copy(here / rest[0], rest[1])
"""
PYTHON = """#!{python}
import json, pathlib, re, sys
assert pathlib.Path("colab_utils/__init__.py").is_file()
if "{breaks}":
    sys.exit("no GPU")
if "benchmarks.gpu" in sys.argv:
    pathlib.Path("gpu.json").write_text(json.dumps({{"rows": [{{"step_ms": 700.0}}]}}))
else:
    results = pathlib.Path(re.search('"DRIVE_FOLDER": "(.*?)"', sys.argv[2])[1]) / "results"
    results.mkdir(parents=True)
    (results / "05.json").write_text(json.dumps({{"images_per_second": 5.5}}))
"""


@pytest.fixture
def measure(tmp_path, capfd):
    """Runs the command with a stand-in; answers the status, its calls and its error."""
    (tmp_path / "content").mkdir()
    (tmp_path / "colab.py").write_text(COLAB.format(folder=str(tmp_path)))
    python = tmp_path / "python"

    def run(*options, fails=None, breaks=""):
        (tmp_path / "fails.json").write_text(json.dumps(fails or {}))
        python.write_text(PYTHON.format(python=sys.executable, breaks=breaks))
        python.chmod(0o755)
        command = f"{sys.executable} {tmp_path / 'colab.py'}"
        status = main(["--colab", command, "--receipts", str(tmp_path / "receipts"), *options])
        calls = (tmp_path / "calls.jsonl").read_text().splitlines()
        error = capfd.readouterr().err
        return status, [json.loads(call) for call in calls], error

    return run


def test_a_t4_is_rented_measures_and_is_given_back(measure, tmp_path):
    status, calls, _ = measure()
    assert status == 0
    assert [call[0] for call in calls] == ["new", "upload", "exec", "download", "stop"]
    assert calls[0] == ["new", "--gpu", "T4"]
    assert calls[1][2] == "content/colab_utils.tar.gz"
    [receipt] = (tmp_path / "receipts").iterdir()
    result = json.loads(receipt.read_text())
    assert receipt.name == f"t4-{result['date']}.json"
    assert result["gpu"] == {"rows": [{"step_ms": 700.0}]}
    assert result["05"] == {"images_per_second": 5.5}
    assert result["01"] is None
    assert not result["drive_is_mounted"]


def test_with_drive_the_notebooks_run_on_it(measure, tmp_path):
    status, calls, _ = measure("--drive")
    assert status == 0
    assert [call[0] for call in calls][:3] == ["new", "drivemount", "upload"]
    assert (tmp_path / "content/drive/MyDrive/colab_utils_t4/results/05.json").is_file()
    [receipt] = (tmp_path / "receipts").iterdir()
    assert json.loads(receipt.read_text())["drive_is_mounted"]


@pytest.mark.parametrize("reason", ["no account", "Backend rejected accelerator 'T4'"])
def test_without_an_account_or_a_t4_nothing_is_rented(measure, tmp_path, reason):
    status, calls, error = measure(fails={"new": reason})
    assert status == 2
    assert [call[0] for call in calls] == ["new"]
    assert error.splitlines()[0] == reason
    assert error.splitlines()[1].startswith("error: `colab new` ended with status 1.")
    assert not (tmp_path / "receipts").exists()


@pytest.mark.parametrize("verb", ["upload", "exec", "download"])
def test_the_t4_is_given_back_whatever_fails(measure, verb):
    status, calls, error = measure(fails={verb: 1})
    assert status == 2
    assert calls[-1] == ["stop"]
    assert f"`colab {verb}` ended with status 1" in error


def test_a_script_that_measures_nothing_leaves_no_receipt(measure, tmp_path):
    status, calls, error = measure(breaks="yes")
    assert status == 2
    assert calls[-1] == ["stop"]
    assert "The T4 measured nothing." in error
    assert not (tmp_path / "receipts").exists()


def test_a_missing_command_is_one_line(capsys):
    assert main(["--colab", "no-such-command"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "pip install google-colab-cli" in error
