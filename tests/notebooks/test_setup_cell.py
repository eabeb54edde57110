"""The cell that starts every notebook: what it installs, and the one sentence with which it
stops.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tests.colab.environments import lay_over
from tests.colab.runtimes import read_runtime, read_runtimes
from tests.notebooks.test_exercises import read_cells
from tools.cells import ROOT, build_wheel, carry_wheel, main, read_setup_cell, write_setup_cells

# Mail and learning platforms take such a notebook, and Colab opens it at once.
MOST_BYTES = 520_000
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RUN = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="NoColor")
sys.modules.update(dict.fromkeys(sys.argv[2:]))  # None: cannot be imported
done = shell.run_cell(open(sys.argv[1], encoding="utf-8").read())
if done.success:
    print(sys.modules["colab_utils"].__file__, sys.modules["colab_utils"].ShardDataset.__name__)
    interrupt = "import signal; signal.raise_signal(signal.SIGINT); print('never')"
    stopped = shell.run_cell(interrupt)
    assert not stopped.success
sys.exit(not done.success)
"""
STOPPED = "Stopped. What was finished is safe: run this cell again, and it goes on there."


@pytest.fixture
def bare_python(tmp_path):
    """An environment in which all is installed that Colab has, and colab_utils is not."""
    return lay_over(tmp_path / "env", Path(sys.executable))


@pytest.fixture
def run_cell(bare_python, tmp_path):
    """Runs a cell in an empty folder; answers the exit status and what is printed."""

    def run(source, *, folder=None, missing=()):
        folder = folder or tmp_path / "empty"
        folder.mkdir(exist_ok=True)
        cell = tmp_path / "cell.py"
        cell.write_text(source, encoding="utf-8")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {
            "IPYTHONDIR": str(tmp_path / "ipython"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        done = subprocess.run(
            [bare_python, "-c", RUN, cell, *missing],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.stderr == ""
        return done.returncode, done.stdout.strip()

    return run


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """What the command of the workshop prints, and the folder that it wrote."""
    folder = tmp_path_factory.mktemp("workshop") / "out"
    done = subprocess.run(
        [sys.executable, "-m", "tools.cells", "workshop", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout, folder


def test_setup_cells_and_drawings_are_written_where_they_differ(tmp_path):
    for folder in ("notebooks", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    # Whoever changes a drawing must write it into its cell.
    assert write_setup_cells(tmp_path) == [], "run make setup-cells"
    names = sorted(path.name for path in (tmp_path / "notebooks").iterdir())
    path = tmp_path / "notebooks" / NOTEBOOKS[1].name
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("import subprocess", "import os"), encoding="utf-8")
    assert write_setup_cells(tmp_path) == [path]
    assert path.read_text(encoding="utf-8") == text
    assert sorted(entry.name for entry in path.parent.iterdir()) == names
    texts = "".join(path.read_text() for path in tmp_path.glob("notebooks/*.ipynb"))
    drawn = re.findall(r'\(data:image/svg\+xml;base64,\S* \\"(\w+)\\"\)', texts)
    drawings = [path.stem for path in (tmp_path / "docs" / "drawings").glob("*.svg")]
    assert sorted(drawn) == sorted(drawings)
    (tmp_path / "docs" / "drawings" / f"{drawn[0]}.svg").write_text("<svg/>")
    assert len(write_setup_cells(tmp_path)) == 1


def test_a_checkout_around_the_notebook_is_used_and_an_interrupt_says_what_is_safe(run_cell):
    status, printed = run_cell(read_setup_cell(), folder=ROOT / "notebooks")
    met, used, interrupted = printed.splitlines()
    assert (status, used) == (0, f"{ROOT}/colab_utils/__init__.py ShardDataset")
    # The cell counts as failed, so that the cells behind it do not run.
    assert interrupted == STOPPED
    assert re.fullmatch(r"Python 3\.\d+, torch 2\.\d+\.", met)


def test_a_setup_that_fails_is_one_sentence(run_cell, tmp_path, wheel):
    missing = tmp_path / "no-such-0.1-py3-none-any.whl"
    for source, lacks, start, cure in (
        (
            read_setup_cell(),
            [],
            "This copy of the notebook does not carry the package colab_utils.",
            "by its badge",
        ),
        (
            re.sub("(?m)^SOURCE = .*$", f'SOURCE = "{missing}"', read_setup_cell()),
            [],
            f"pip did not install {missing}: ERROR: ",
            "run this cell again",
        ),
        (
            carry_wheel(read_setup_cell(), wheel),
            ["pycocotools"],
            "pycocotools cannot be imported (ModuleNotFoundError: ",
            "CPU or T4 GPU",
        ),
    ):
        status, printed = run_cell(source, missing=lacks)
        assert status == 1
        assert printed.count("\n") == 0, printed
        assert printed.startswith(start)
        assert cure in printed


@pytest.fixture
def meet_runtime(monkeypatch, capsys):
    """Runs the setup cell beside modules that have versions alone; answers what it prints."""
    import IPython

    assert IPython.get_ipython() is None

    def run(python, torch, *, is_colab=True):
        names = re.findall(r'^    "(\w+)",$', read_setup_cell(), flags=re.MULTILINE)
        for name in [*names, "google.colab"]:
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        if not is_colab:
            monkeypatch.delitem(sys.modules, "google.colab")
        sys.modules["torch"].__version__ = torch
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(sys, "version_info", tuple(map(int, python.split("."))))
        monkeypatch.chdir(ROOT)
        exec(compile(read_setup_cell(), "setup", "exec"), {"__name__": "__main__"})
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", read_runtimes())
def test_the_setup_knows_each_runtime_that_is_tested(meet_runtime, name):
    runtime = read_runtime(name)
    month = datetime.date.fromisoformat(runtime["date"]).strftime("of %B %Y")
    printed = meet_runtime(runtime["python"], f"{runtime['torch']}+cu128")
    assert printed.startswith(f"Colab's runtime {month if name == 'now' else name}: Python 3.")
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("python", "torch", "is_colab", "line"),
    [
        (
            "3.11.13",
            "2.6.0+cu124",
            True,
            "Warning: this runtime (Python 3.11, torch 2.6) is older than the oldest one that is "
            "tested, 2025.10: choose a newer one at Runtime > Change runtime type > Runtime "
            "version.\n",
        ),
        (
            "3.14.1",
            "3.0.1",
            True,
            "A runtime of Colab's that is not tested yet: Python 3.14, torch 3.0.\n",
        ),
        ("3.11.13", "2.6.0", False, "Python 3.11, torch 2.6.\n"),
    ],
)
def test_the_setup_warns_of_a_runtime_older_than_the_tested_ones(
    meet_runtime, python, torch, is_colab, line
):
    assert meet_runtime(python, torch, is_colab=is_colab) == line


def test_the_notebooks_of_a_workshop_carry_the_package(run_cell, bare_python, workshop, tmp_path):
    printed, out = workshop
    assert all(f"{path.name} (" in printed for path in NOTEBOOKS)
    assert "Upload notebook" in printed
    handed_out = sorted(out.iterdir())
    assert [path.name for path in handed_out] == [path.name for path in NOTEBOOKS]
    assert max(path.stat().st_size for path in handed_out) < MOST_BYTES
    for path in handed_out:
        cells = read_cells(path.stem, path.parent)
        first = next(iter(cells))
        # A badge leads nowhere before the first push.
        assert "OWNER/REPO" not in cells[first]
        assert "https://" not in cells["setup"]
        for name, source in read_cells(path.stem).items():
            assert name in (first, "setup") or cells[name] == source
    folder = tmp_path / "MyDrive"
    # A plain folder of that name is no package.
    (folder / "colab_utils" / "shards").mkdir(parents=True)
    status, printed = run_cell(read_cells("01", out)["setup"], folder=folder)
    used = printed.splitlines()[-2].split()
    assert (status, used[1]) == (0, "ShardDataset")
    # The package is the installed one, and not that of the checkout.
    assert Path(used[0]).is_relative_to(bare_python.parents[1])


def test_a_cell_without_a_place_for_the_wheel_is_refused(wheel):
    assert not (ROOT / "build").exists()
    with pytest.raises(Exception, match=r"The setup cell has 0 lines SOURCE = \.\.\."):
        carry_wheel("import sys", wheel)


@pytest.mark.parametrize("arguments", [[], ["badge"], ["badges", "no slug"]])
def test_a_command_that_is_none_is_refused_in_one_line(arguments, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_error_of_ours_is_one_line_in_a_notebook(capsys):
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    done = shell.run_cell("from colab_utils import Workspace\nWorkspace.open(scene='a fine day')")
    assert not done.success
    shown = capsys.readouterr().out.strip().splitlines()
    assert len(shown) == 1
    assert shown[0].startswith("ColabUtilsError: SCENE must be one of bad day, good day")
