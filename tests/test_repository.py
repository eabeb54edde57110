"""What holds for the repository as a whole: floors, size, light imports, public names, make."""

from __future__ import annotations

import ast
import math
import os
import shutil
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import colab_utils
from tests.density import count_nodes, measure_density

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "colab_utils"
# An inner ring never imports an outer one. A script that trains imports the core.
CORE = (
    "errors",
    "require",
    "units",
    "progress",
    "machine",
    "processes",
    "drive",
    "urls",
    "places",
    "slow_drive",
    "streams",
    "files",
    "reader",
    "file_cache",
    "data",
    "shards",
    "loading",
)
COURSE = ("comparison", "show", "course", "__main__")
FLOORS = (*CORE, "training", "diagnosis", *COURSE)
LIGHT = FLOORS[: FLOORS.index("loading")]


def list_modules(package):
    """{dotted name: path} of every module but the package's own ``__init__``, which imports by name
    only.
    """
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name != package.name:
            modules[name] = path
    return modules


def find_imports(path, modules):
    """The package's own modules that a module imports, inside functions and under TYPE_CHECKING
    too.
    """
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                lazy = (
                    colab_utils._MODULES.get(alias.name) if node.module == "colab_utils" else None
                )
                names.add(lazy or (whole if whole in modules else node.module))
    return {name for name in names if name in modules}


def find_faults(package):
    """Imports that go up, and circles, in words."""
    modules = list_modules(package)
    graph = {name: find_imports(path, modules) for name, path in modules.items()}
    faults = []
    for name, imported in graph.items():
        floor = name.split(".")[1]
        assert floor in FLOORS, f"give {name} a floor in {Path(__file__).name}"
        for other in sorted(imported):
            below = other.split(".")[1]
            if FLOORS.index(below) > FLOORS.index(floor):
                faults.append(f"{name} imports {other}, which lies above it")
            if (floor, below) == ("diagnosis", "training"):
                faults.append(f"{name} imports {other}, which lies beside it")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        faults.append("circle: " + " > ".join(error.args[1]))
    return faults


def test_modules_import_from_lower_floors_only():
    assert find_faults(PACKAGE) == []


# What a reader meets in each tree of files. A change may lower these figures. Only an issue may
# raise them.
LIMITS = {
    "colab_utils": {"nodes": 83_978, "nodes_a_line": 5.6},
    "tests": {"nodes": 138_311, "nodes_a_line": 5.7},
    "benchmarks": {"nodes": 17_566, "nodes_a_line": 5.6},
    "tools": {"nodes": 8_912, "nodes_a_line": 5.7},
}


@pytest.mark.parametrize("tree", LIMITS)
def test_code_is_no_denser_than_before(tree):
    density = measure_density(ROOT / tree)
    limits = LIMITS[tree]
    assert density.nodes <= limits.get("nodes", math.inf)
    assert round(density.nodes_a_line, 1) <= limits["nodes_a_line"]
    assert density.packed == ()
    assert density.format_skips == 0


def find_empty_names(code):
    """Return the locals and parameters of some code whose names say nothing."""
    empty = {"found", "told", "said", "one", "here", "there", "of", "most"}
    nodes = list(ast.walk(ast.parse(code)))
    stored = [
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    parameters = [node.arg for node in nodes if isinstance(node, ast.arg)]
    return empty.intersection(stored + parameters)


@pytest.mark.parametrize("tree", LIMITS)
def test_names_say_what_they_hold(tree):
    faults = {}
    for path in sorted((ROOT / tree).rglob("*.py")):
        names = find_empty_names(path.read_text(encoding="utf-8"))
        if names:
            faults[str(path.relative_to(ROOT))] = names
    assert faults == {}


def test_light_modules_load_nothing_heavy_and_touch_nothing(tmp_path):
    modules = [name for name in list_modules(PACKAGE) if name.split(".")[1] in LIGHT]
    assert len(modules) > 10
    script = (
        "import sys, importlib\nfor name in sys.argv[1:]: "
        "importlib.import_module(name)\nprint(*sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script, "colab_utils", *modules],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert "colab_utils.shards.copy" in loaded
    heavy = {"torch", "torchvision", "matplotlib", "google.colab", "ipywidgets", "IPython", "dask"}
    assert heavy & set(loaded) == set()
    assert list(tmp_path.iterdir()) == []


def test_watch_loads_no_dataset_and_no_loader_of_ours(tmp_path):
    script = "import sys, colab_utils\ncolab_utils.watch\nprint(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    modules = list_modules(PACKAGE)
    ours = {name.removeprefix("colab_utils."): modules[name] for name in loaded if name in modules}
    rooms = {name.split(".")[0] for name in ours}
    assert not rooms & {"data", "shards", "training", "comparison", "show", "places", "files"}
    of_loading = {name.removeprefix("loading.") for name in ours if name.startswith("loading.")}
    assert of_loading == {"clock", "devices", "workers"}
    nodes = (count_nodes(ast.parse(path.read_text(encoding="utf-8"))) for path in ours.values())
    assert sum(nodes) <= 16_000


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["demo"], "-m tools.run_notebooks --output runs/demo"),
        (
            ["demo", "IMAGES=my photos", "ANNOTATIONS=a.json"],
            '--images "my photos" --annotations "a.json"',
        ),
        (["demo", "STRICT=1"], "--strict"),
        (["demo", "LABS=0"], "--no-labs"),
        (["test"], "-m pytest"),
        (["setup", "-B"], "pip install -r requirements.txt -e '.[dev]'"),
        (["badges", "REPO=me/fast"], '-m tools.cells badges "me/fast"'),
        (["badges"], '-m tools.cells badges ""'),
        (["setup-cells"], "-m tools.cells setup"),
        (["site"], "-m tools.build_site"),
        (["workshop"], "-m tools.cells workshop"),
        (["slides"], "-m tools.slides"),
        (["test-browser"], "-m pytest -m browser"),
        (["test-colab"], '-m tests.colab.run_scenarios --runtime "now"'),
        (["test-colab", "RUNTIME=2026.04"], '-m tests.colab.run_scenarios --runtime "2026.04"'),
        (["test-overlay"], '-m tests.colab.run_scenarios --overlay --runtime "now"'),
        (["test-today"], "RUNTIME=runs/today/today.txt"),
        (["test-lowest"], "sed 's/>=/==/' requirements.txt > runs/lowest/constraints.txt"),
        (["gpu"], "-m benchmarks.gpu --json"),
        (["colab", "DRIVE=1"], '-m tools.colab_t4 --colab "colab" --drive'),
    ],
)
def test_make_runs_what_the_readme_says(arguments, command):
    done = subprocess.run(
        ["make", "-n", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert command in done.stdout


def test_continuous_integration_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = script.read_text(encoding="utf-8").splitlines()
    assert "make test" in commands
    assert "make test-overlay" in commands
