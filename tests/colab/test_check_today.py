"""What is done with today's list of Colab's packages: a saved one, a changed one, and one that
cannot be had.
"""

from __future__ import annotations

import json
import sys

import pytest

from tests.colab import check_today
from tests.colab.runtimes import read_runtime, read_runtimes

GH = """#!{python}
import json, pathlib, sys
folder = pathlib.Path({folder!r})
with open(folder / "calls.jsonl", "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[2] == "list":
    print((folder / "open.json").read_text())
else:
    sys.exit("HTTP 403") if (folder / "closed").exists() else print("https://example.org/issues/7")
"""


def write_lists(folder, **changes):
    """Write lists in the form of Colab's; returns the address of their folder."""
    versions = read_runtimes()["now"] | changes
    lines = ["# Do not modify this file directly"]
    for name, version in versions.items():
        if name == "torch":
            wheel = f"torch-{version}%2Bcpu-cp313-cp313-manylinux_2_28_x86_64.whl"
            lines.append(f"torch @ https://example.org/whl/cpu/{wheel}")
        elif name not in ("commit", "date", "python"):
            lines.append(f"{name}=={version}")
    folder.mkdir()
    (folder / "pip-freeze.txt").write_text("\n".join(lines))
    (folder / "os-info.txt").write_text(f"Ubuntu 22.04.5 LTS\nPython {versions['python']}\n")
    return folder.as_uri()


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Checks lists with a check that passes or fails, and a stand-in of GitHub's command; answers
    the status and the calls of that command.
    """
    (tmp_path / "checks").mkdir()
    (tmp_path / "checks" / "passes.py").write_text("print('2 passed, 0 failed')")
    (tmp_path / "checks" / "fails.py").write_text("import sys\nsys.exit('no numpy ' + sys.argv[2])")
    gh = tmp_path / "bin" / "gh"
    gh.parent.mkdir()
    gh.write_text(GH.format(python=sys.executable, folder=str(tmp_path)))
    gh.chmod(0o755)
    (tmp_path / "open.json").write_text("[]")
    monkeypatch.setenv("PATH", str(gh.parent))
    monkeypatch.setattr(check_today, "ROOT", tmp_path / "checks")

    def run(address, *checks):
        monkeypatch.setattr(check_today, "CHECKS", checks)
        arguments = ["--lists", address, "--work", str(tmp_path / "work"), "--issue"]
        status = check_today.main(arguments)
        calls = tmp_path / "calls.jsonl"
        lines = calls.read_text().splitlines() if calls.exists() else []
        return status, [json.loads(line)[1:] for line in lines]

    return run


def test_a_list_that_passes_opens_nothing(check, tmp_path, capsys):
    address = write_lists(tmp_path / "lists")
    assert check(address, "passes") == (0, [])
    assert "Colab has the versions that runtimes.txt names." in capsys.readouterr().out
    versions = read_runtime(str(tmp_path / "work" / "today.txt"))
    assert versions.items() <= read_runtime("now").items()


def test_a_changed_list_that_fails_opens_one_issue_that_names_the_change(check, tmp_path):
    address = write_lists(tmp_path / "lists", numpy="3.0.0", torch="2.13.0")
    status, calls = check(address, "passes", "fails")
    assert status == 1
    assert [call[0] for call in calls] == ["list", "create"]
    body = calls[1][calls[1].index("--body") + 1]
    assert "numpy: 2.1.3 before, 3.0.0 now" in body
    assert "torch: 2.11.0 before, 2.13.0 now" in body
    assert "`python -m fails` ended with status 1:" in body
    assert f"no numpy {tmp_path / 'work' / 'today.txt'}" in body
    assert "passes" not in body


def test_no_second_issue_is_opened_while_one_is_open(check, tmp_path, capsys):
    address = write_lists(tmp_path / "lists")
    issues = [{"number": 3, "title": "other"}, {"number": 5, "title": check_today.TITLE}]
    (tmp_path / "open.json").write_text(json.dumps(issues))
    status, calls = check(address, "fails")
    assert status == 1
    assert [call[0] for call in calls] == ["list"]
    assert "Issue 5 is open from before." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "pip-freeze.txt cannot be had"),
        # This list has another form.
        ("lists", "names no aiohttp, fsspec,"),
    ],
)
def test_a_list_that_tells_nothing_is_one_line_and_no_issue(check, tmp_path, capsys, name, words):
    write_lists(tmp_path / "lists")
    (tmp_path / "lists" / "pip-freeze.txt").write_text("numpy 2.1.3\n")
    assert check((tmp_path / name).as_uri(), "fails") == (2, [])
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error


def test_an_issue_that_cannot_be_opened_is_one_line(check, tmp_path, capsys):
    (tmp_path / "closed").touch()
    status, calls = check(write_lists(tmp_path / "lists"), "fails")
    assert (status, len(calls)) == (2, 2)
    assert "gh issue create failed: HTTP 403" in capsys.readouterr().err
