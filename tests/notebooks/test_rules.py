"""The notebooks as files: their order, their size, their links; no kernel is started."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import statistics
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import pytest

from colab_utils.course.questions import QUESTIONS
from tests.density import count_nodes, find_packed_lines
from tools.run_notebooks import find_labs

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
DOCS = FOLDER.parent / "docs"
NAMES = [
    "01_detect_bottleneck",
    "02_preprocess_to_shards",
    "03_copy_to_local_ssd",
    "04_train_mask_rcnn",
    "05_compare_timings",
]
# Notebook 01 measures each term of the law in a cell of its own, and 02 each kind of work.
MOST_CELLS = {
    "01_detect_bottleneck": 71,
    "02_preprocess_to_shards": 54,
    # Each way to bring data near, and each measure against full memory, has a cell of its own.
    "03_copy_to_local_ssd": 50,
    "04_train_mask_rcnn": 72,
    # Each of twelve pieces of advice has a text and one or two cells.
    "05_compare_timings": 76,
}
MOST_NAMES = {
    "04_train_mask_rcnn": 12,
    "05_compare_timings": 12,
}
# The cells, visible code lines and words of what a class runs: all that stands before the labs.
MOST_OF_A_SPINE = {
    "01_detect_bottleneck": (40, 150, 1200),
    "02_preprocess_to_shards": (40, 150, 1000),
    "03_copy_to_local_ssd": (32, 120, 850),
    "04_train_mask_rcnn": (48, 190, 1300),
    "05_compare_timings": (30, 100, 900),
}
BADGE = re.compile(
    r"\[!\[Open In Colab\]\(https://colab\.research\.google\.com/assets/colab-badge\.svg\)\]"
    r"\(https://colab\.research\.google\.com/github/([\w.-]+/[\w.-]+)"
    r"/blob/([\w.-]+)/(notebooks/\w+\.ipynb)\)"
)


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def text(name):
    return (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")


@pytest.fixture
def notebook(text):
    return json.loads(text)


@pytest.fixture
def sources(notebook):
    return [(cell["cell_type"], "".join(cell["source"]), cell) for cell in notebook["cells"]]


@pytest.fixture
def spine(sources):
    return sources[: find_labs(source for _, source, _ in sources)]


@pytest.fixture
def prose(sources):
    return "\n".join(source for kind, source, _ in sources if kind == "markdown")


@pytest.fixture
def codes(sources):
    return [source for kind, source, _ in sources if kind == "code"]


def strip_magics(source):
    return re.sub(r"^(\s*)[%!].*$", r"\1pass", source, flags=re.MULTILINE)


def test_the_folder_holds_these_five():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES


def test_the_file_is_written_the_one_way(text, notebook):
    assert text == json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def test_nothing_that_ran_is_kept(notebook):
    for cell in notebook["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
    assert "widgets" not in notebook["metadata"]


def test_the_metadata_selects_the_machine(name, notebook):
    metadata = notebook["metadata"]
    assert metadata["kernelspec"]["name"] == "python3"
    assert metadata["colab"]["provenance"] == []
    # The emulated step of the scenes needs no GPU, which costs quota.
    wants_gpu = name[:2] == "04"
    assert metadata.get("accelerator") == ("GPU" if wants_gpu else None)
    assert metadata["colab"].get("gpuType") == ("T4" if wants_gpu else None)


def test_cell_ids_are_readable_and_unique(notebook):
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z][a-z0-9-]+", cell_id) for cell_id in ids)


def test_one_heading_of_the_first_level_in_the_first_cell(sources):
    heads = [
        n
        for n, (kind, source, _) in enumerate(sources)
        if kind == "markdown" and re.search(r"^# ", source, re.M)
    ]
    assert heads == [0]
    assert len(re.findall(r"^# ", sources[0][1], re.M)) == 1


def test_the_title_has_a_badge_for_this_very_notebook(name, sources):
    (badge,) = BADGE.findall(sources[0][1])
    assert badge[1:] == ("colab", f"notebooks/{name}.ipynb")


def test_the_parts_come_in_order(spine):
    order = [
        "What you will learn",
        "## Setup",
        "@title Setup",
        "import ",
        "## Settings",
        "# @title Settings",
    ]
    order += ["## In this notebook you have", "## Exercise", "# @title Solution", ".ipynb)"]
    positions = []
    for part in order:
        start = positions[-1] if positions else 1
        positions.append(
            next(n for n, (_, source, _) in enumerate(spine) if n >= start and part in source)
        )
    assert positions == sorted(positions)
    assert positions[-1] == len(spine) - 1


def test_labs_are_folded_on_opening(sources, spine, notebook):
    labs = sources[len(spine) :]
    headings = [cell for _, source, cell in labs if source.startswith("## ")]
    assert all("".join(cell["source"]).startswith("## Lab ") for cell in headings)
    ids = [cell["id"] for cell in headings]
    assert notebook["metadata"]["colab"]["collapsed_sections"] == ids
    # Colab has its ids in the metadata.
    assert [cell["metadata"]["id"] for cell in headings] == ids


def test_a_class_can_run_the_spine(name, sources, spine):
    assert len(spine) < len(sources)
    most_cells, most_lines, most_words = MOST_OF_A_SPINE[name]
    texts = [source for kind, source, _ in spine if kind == "markdown"]
    # A check of a sentence is not read, and the words of a drawing are read in its place.
    unread = r"<!--.*?-->|!\[[^]]*\]\(data:[^)]*\)"
    words = re.sub(unread, "", "\n".join(texts), flags=re.DOTALL).split()
    lines = [list_code_lines(source) for source in find_open_cells(spine)]
    assert len(spine) <= most_cells
    assert sum(map(len, lines)) <= most_lines
    assert len(words) <= most_words


def test_time_and_runtime_type_are_said(sources):
    assert "**Time:** about" in sources[1][1]
    assert "**Runtime type:**" in sources[1][1]


def test_the_number_of_cells_keeps_its_budget(name, sources, codes):
    assert 25 <= len(sources) <= MOST_CELLS[name]
    assert 0.65 <= (len(sources) - len(codes)) / len(codes) <= 1.5


def find_open_cells(sources):
    """The code that a reader sees: what is folded need not be read."""
    return [
        source
        for kind, source, cell in sources
        if kind == "code" and cell["metadata"].get("cellView") != "form"
    ]


def test_the_code_keeps_its_budget(sources):
    codes = [source for kind, source, cell in sources if kind == "code" and cell["id"] != "setup"]
    nodes = [count_nodes(ast.parse(strip_magics(source))) for source in codes]
    # The technique is shown as code, and not called by name.
    assert 20 <= statistics.median(nodes) <= 91
    cells = [code for code in find_open_cells(sources) if not code.startswith("%%writefile")]
    assert max(count_nodes(ast.parse(strip_magics(code))) for code in cells) <= 170
    assert max(len(line) for source in codes for line in source.splitlines()) <= 120


def list_code_lines(source):
    lines = [line.strip() for line in source.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_a_cell_that_is_read_has_at_most_12_lines(sources):
    for source in find_open_cells(sources):
        # A script that a reader takes home stands in one cell.
        most_lines = 45 if source.startswith("%%writefile") else 12
        assert len(list_code_lines(source)) <= most_lines, source
        assert max(len(line) for line in source.splitlines()) <= 92, source


def test_cells_are_plain_python(sources):
    nodes = 0
    lines = 0
    for kind, source, cell in sources:
        if kind == "code" and cell["id"] != "setup":
            nodes += count_nodes(ast.parse(strip_magics(source)))
            lines += len(list_code_lines(source))
    # Each cell prints what it measured, and an f-string holds many nodes.
    assert round(nodes / lines, 1) <= 6.7
    for source in find_open_cells(sources):
        tree = ast.parse(strip_magics(source))
        assert not list(find_packed_lines(tree)), source
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Lambda | ast.IfExp | ast.NamedExpr), source


def test_no_function_is_long(codes):
    for source in codes:
        for node in ast.walk(ast.parse(strip_magics(source))):
            if isinstance(node, ast.FunctionDef):
                assert count_nodes(node) <= 110, node.name


def test_what_you_should_see_is_said(prose):
    assert prose.count("*What you should see:*") >= 4
    assert "ours will differ" in prose


def test_parameters_are_literals_with_forms(sources):
    tagged = [
        source for _, source, cell in sources if "parameters" in cell["metadata"].get("tags", ())
    ]
    assert len(tagged) == 1
    for node in ast.parse(tagged[0]).body:
        assert isinstance(node, ast.Assign)
        assert node.targets[0].id.isupper()
        ast.literal_eval(node.value)
    assignments = [
        line for line in tagged[0].splitlines() if "=" in line and not line.startswith("#")
    ]
    assert all("# @param" in line for line in assignments)


def test_every_setting_is_used(sources):
    tagged = next(
        source for _, source, cell in sources if "parameters" in cell["metadata"].get("tags", ())
    )
    rest = "\n".join(source for _, source, cell in sources if source is not tagged)
    for node in ast.parse(tagged).body:
        assert re.search(rf"\b{node.targets[0].id}\b", rest), node.targets[0].id


def test_names_imported_from_the_package_exist(codes):
    count = 0
    for source in codes:
        for node in ast.walk(ast.parse(strip_magics(source))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("colab_utils"):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    count += 1
                    name = f"{node.module}.{alias.name}"
                    assert hasattr(module, alias.name) or importlib.util.find_spec(name), name
    assert count > 4


def test_only_the_setup_installs(sources):
    for _, source, cell in sources:
        if re.search(r"\bpip3?\s+install\b|\bconda\s+install\b|\bapt(-get)?\s+install\b", source):
            assert cell["id"] == "setup"
            assert "--no-deps" in source


def test_no_state_by_magic(codes):
    for source in codes:
        assert not re.search(r"^\s*[%!](?!pip |%writefile )", source, re.MULTILINE), source


def test_colab_utils_is_imported_before_torch(codes):
    """It sets OMP_WAIT_POLICY, which is read once, when torch is loaded."""
    lines = [line for source in codes for line in source.splitlines()]
    first = next(
        n for n, line in enumerate(lines) if re.match(r"(from|import) (torch|torchvision)\b", line)
    )
    assert lines.index("import colab_utils  # noqa: F401") < first


def test_folded_cells_are_forms(sources):
    for _, source, cell in sources:
        assert ('display-mode: "form"' in source) == (cell["metadata"].get("cellView") == "form")


def test_relative_links_lead_somewhere(prose):
    links = re.findall(r"\]\((?!https?:|data:)([^)#]+)", prose)
    assert links
    for link in links:
        assert (FOLDER / link).is_file(), link


def test_links_lead_on(name, prose):
    position = NAMES.index(name)
    assert position == 0 or ("Previous: [" in prose and f"({NAMES[position - 1]}.ipynb)" in prose)
    assert position == len(NAMES) - 1 or (
        "Next: [" in prose and f"({NAMES[position + 1]}.ipynb)" in prose
    )


def test_the_scene_is_one_field_the_same_everywhere(codes):
    field = 'SCENE = "bad day"  # @param ["bad day", "good day", "my Drive, my GPU"]'
    assert sum(field in source for source in codes) == 1


def test_the_signature_figure_and_the_measuring_function_are_everywhere(name, codes):
    text = "\n".join(codes)
    assert ("plot_cold_start(" if name[:2] == "05" else "plot_first_seconds(") in text
    # Notebook 05 measures with `compare`.
    assert name[:2] == "05" or text.count("def train_for(batches") == 1


def find_package_names(codes):
    names = set()
    for source in codes:
        for node in ast.walk(ast.parse(strip_magics(source))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("colab_utils"):
                names |= {alias.asname or alias.name for alias in node.names}
    return names


def test_few_names_of_the_package(name, codes):
    assert len(find_package_names(codes)) <= MOST_NAMES.get(name, 12)


def test_half_of_the_code_is_without_the_package(name, sources):
    if name[:2] not in ("01", "02", "03"):
        pytest.skip("04 trains and 05 compares, by the package")
    names = find_package_names([source for kind, source, _ in sources if kind == "code"])
    lines = []
    for kind, source, cell in sources:
        if kind == "code" and cell["id"] not in ("setup", "imports", "parameters"):
            lines += [
                line
                for line in source.splitlines()
                if line.strip() and not line.strip().startswith("#")
            ]
    plain = [line for line in lines if not names & set(re.findall(r"\w+", line))]
    assert len(plain) >= len(lines) / 2


def test_solutions_stay_shut(sources):
    solutions = [source for _, source, _ in sources if "@title Solution" in source]
    assert solutions
    for solution in solutions:
        switch = re.search(r"^(SHOW_\w*SOLUTION) = False  # @param", solution, re.MULTILINE)
        assert switch, solution
        for node in ast.parse(solution).body:
            is_shut = ast.unparse(node).startswith(f"if {switch[1]}:")
            assert isinstance(node, ast.Assign) or is_shut, solution


def test_exercises_say_what_is_off_while_they_are_untouched(sources):
    checks = [source for _, source, cell in sources if cell["id"].startswith("exercise")]
    assert any("Not yet" in source for source in checks)


def test_two_exercises_and_each_has_a_check_and_a_solution(prose, sources):
    titles = [source.splitlines()[0] for _, source, _ in sources if source.startswith("# @title")]
    for number in (1, 2):
        assert f"## Exercise {number}" in prose
        assert any(title.startswith(f"# @title Check exercise {number}") for title in titles)
        assert any(title.startswith(f"# @title Solution of exercise {number}") for title in titles)


def test_minutes_are_given_per_section(prose):
    sections = re.findall(r"^## \d+\. .*$", prose, re.MULTILINE)
    assert len(sections) >= 3
    minutes = [int(*re.findall(r"\((\d+) minutes\)$", section)) for section in sections]
    all_minutes = int(re.search(r"(\d+) minutes to work through", prose)[1])
    assert all_minutes - 3 <= sum(minutes) <= all_minutes


def test_notebook_5_asks_what_notebook_1_asked_and_a_class_sheet_shows(name, sources):
    if name[:2] not in ("01", "05"):
        pytest.skip("01 asks before the course, 05 after it")
    [form] = [source for _, source, cell in sources if cell["id"] == "questions"]
    asked = re.findall(r"^# @markdown \d\. (.*)$", form, re.MULTILINE)
    assert asked == [question.text for question in QUESTIONS.values()]


def test_the_words_are_plain(prose):
    assert not re.findall(r"\b(just|simply|easily|easy|obviously)\b", prose, re.IGNORECASE)


def test_no_path_of_another_machine(text):
    assert not re.search(r'"[^"]*(/work/|/home/|/tmp/|C:\\\\)', text)


def test_the_ninety_minutes_name_cells_of_the_spine(name, spine):
    """A class that runs the cells that TEACHING names skips none of which a later one needs."""
    rows = re.findall(r"^\| \d+ \| .*$", (DOCS / "TEACHING.md").read_text("utf-8"), re.MULTILINE)
    ranges = []
    for row in rows:
        section, cells = re.split(r" *\| *", row)[3:5]
        if section.startswith(name[:2]) and re.fullmatch(r"[\d, -]+", cells):
            ranges += [(int(a), int(b)) for a, b in re.findall(r"(\d+)-(\d+)", cells)]
    if name[:2] == "04":
        assert not ranges
        return
    assert ranges == sorted(ranges)
    assert ranges[-1][1] < len(spine)
    for (_, last), (first, _) in pairwise(ranges):
        assert first > last
        assert first == last + 1 or name[:2] == "02"
    if name[:2] != "02":
        assert all("## " in spine[first][1] for first, _ in ranges)


def test_the_two_clocks_of_the_handout_run(capsys):
    text = (DOCS / "HANDOUT.md").read_text("utf-8")
    [block] = re.findall(r"^```python\n(.+?)^```$", text, re.MULTILINE | re.DOTALL)
    steps = []
    names = {"loader": [(1, 2), (3, 4)], "perf_counter": perf_counter}
    exec(block, {**names, "step": lambda images, targets: steps.append((images, targets))})
    assert steps == [(1, 2), (3, 4)]
    assert re.fullmatch(r"waits \d+% of the time\n", capsys.readouterr().out)
