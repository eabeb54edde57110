"""The notebooks as files: their order, their size, their links; no kernel is started."""

from __future__ import annotations

import ast
import json
import re
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import pytest

from colab_utils.course.questions import QUESTIONS
from tests.density import count_nodes, find_packed_lines
from tools.run_notebooks import find_labs

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
DOCS = FOLDER.parent / "docs"
# The cells of all; and the cells, visible code lines and words of what a class runs: all that
# stands before the labs. Notebook 01 measures each term of the law in a cell of its own, 02 each
# kind of work, 03 each way to bring data near, and 05 each of twelve pieces of advice.
BUDGETS = {
    "01_detect_bottleneck": (71, 40, 150, 1200),
    "02_preprocess_to_shards": (54, 40, 150, 1000),
    "03_copy_to_local_ssd": (50, 32, 120, 850),
    "04_train_mask_rcnn": (72, 48, 190, 1300),
    "05_compare_timings": (76, 30, 100, 900),
}
NAMES = [*BUDGETS]
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


class Code:
    """A cell of code, as a reader and as Python have it."""

    def __init__(self, source, cell):
        self.id = cell["id"]
        self.source = source
        # What is folded need not be read.
        self.is_open = cell["metadata"].get("cellView") != "form"
        # A script that a reader takes home stands in one cell.
        self.is_script = source.startswith("%%writefile")
        lines = [line.strip() for line in source.splitlines()]
        self.lines = [line for line in lines if line and not line.startswith("#")]
        plain = re.sub(r"^(\s*)[%!].*$", r"\1pass", source, flags=re.MULTILINE)
        self.tree = ast.parse(plain)


def list_codes(sources):
    return [Code(source, cell) for kind, source, cell in sources if kind == "code"]


@pytest.fixture
def codes(sources):
    return list_codes(sources)


def test_the_folder_holds_these_five():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES


def test_the_file_is_written_the_one_way_and_nothing_that_ran_is_kept(text, notebook):
    assert text == json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
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
    texts = [source for kind, source, _ in sources if kind == "markdown"]
    counts = [len(re.findall("^# ", text, re.M)) for text in texts]
    assert counts == [1, *[0] * (len(texts) - 1)]


def test_the_title_has_a_badge_for_this_very_notebook(name, sources):
    (badge,) = BADGE.findall(sources[0][1])
    assert badge[1:] == ("colab", f"notebooks/{name}.ipynb")


def test_the_parts_come_in_order(spine):
    parts = (
        "What you will learn",
        "## Setup",
        "@title Setup",
        "import ",
        "## Settings",
        "# @title Settings",
        "## In this notebook you have",
        "## Exercise",
        "# @title Solution",
    )
    text = "\n".join(source for _, source, _ in spine[1:])
    assert re.search(".*".join(map(re.escape, parts)), text, re.DOTALL)
    assert ".ipynb)" in spine[-1][1]


def test_labs_are_folded_on_opening(sources, spine, notebook):
    labs = sources[len(spine) :]
    headings = [cell for _, source, cell in labs if source.startswith("## ")]
    assert all("".join(cell["source"]).startswith("## Lab ") for cell in headings)
    ids = [cell["id"] for cell in headings]
    assert notebook["metadata"]["colab"]["collapsed_sections"] == ids
    # Colab has its ids in the metadata.
    assert [cell["metadata"]["id"] for cell in headings] == ids


def test_a_class_can_run_the_spine(name, sources, spine):
    all_cells, most_cells, most_lines, most_words = BUDGETS[name]
    assert len(spine) < len(sources) <= all_cells
    texts = [source for kind, source, _ in spine if kind == "markdown"]
    # A check of a sentence is not read, and the words of a drawing are read in its place.
    unread = r"<!--.*?-->|!\[[^]]*\]\(data:[^)]*\)"
    words = re.sub(unread, "", "\n".join(texts), flags=re.DOTALL).split()
    lines = sum(len(code.lines) for code in list_codes(spine) if code.is_open)
    assert len(spine) <= most_cells
    assert lines <= most_lines
    assert len(words) <= most_words


def test_time_and_runtime_type_are_said(sources):
    assert "**Time:** about" in sources[1][1]
    assert "**Runtime type:**" in sources[1][1]


def test_what_is_read_is_short_and_plain_python(codes):
    for code in codes:
        if not code.is_open:
            continue
        assert count_nodes(code.tree) <= 170 or code.is_script, code.source
        assert len(code.lines) <= (45 if code.is_script else 12), code.source
        assert max(map(len, code.source.splitlines())) <= 92, code.source
        assert not list(find_packed_lines(code.tree)), code.source
        for node in ast.walk(code.tree):
            assert not isinstance(node, ast.Lambda | ast.IfExp | ast.NamedExpr), code.source


def test_what_you_should_see_is_said(prose):
    assert prose.count("*What you should see:*") >= 4
    assert "ours will differ" in prose


def test_parameters_are_literals_with_forms_and_each_is_used(sources):
    [tagged] = [
        source for _, source, cell in sources if "parameters" in cell["metadata"].get("tags", ())
    ]
    rest = "\n".join(source for _, source, _ in sources if source is not tagged)
    for node in ast.parse(tagged).body:
        name = node.targets[0].id
        assert name.isupper()
        ast.literal_eval(node.value)
        assert re.search(rf"\b{name}\b", rest), name
    assert all("# @param" in line for line in re.findall("^[^#\n]*=.*", tagged, re.MULTILINE))


def test_only_the_setup_installs_and_no_state_comes_by_magic(codes):
    for code in codes:
        if re.search(r"\b(pip3?|conda|apt(-get)?)\s+install\b", code.source):
            assert code.id == "setup"
            assert "--no-deps" in code.source
        magic = r"^\s*[%!](?!pip |%writefile )"
        assert not re.search(magic, code.source, re.MULTILINE), code.source


def test_colab_utils_is_imported_before_torch(codes):
    """It sets OMP_WAIT_POLICY, which is read once, when torch is loaded."""
    text = "\n".join(code.source for code in codes)
    first = re.search(r"^(from|import) (torch|torchvision)\b", text, re.MULTILINE)
    assert "\nimport colab_utils  # noqa: F401\n" in text[: first.start()]


def test_folded_cells_are_forms(sources):
    for _, source, cell in sources:
        assert ('display-mode: "form"' in source) == (cell["metadata"].get("cellView") == "form")


def test_relative_links_lead_somewhere(prose):
    links = re.findall(r"\]\((?!https?:|data:)([^)#]+)", prose)
    assert links
    for link in links:
        assert (FOLDER / link).is_file(), link


def test_the_scene_the_signature_figure_and_the_measuring_function_are_everywhere(name, codes):
    field = 'SCENE = "bad day"  # @param ["bad day", "good day", "my Drive, my GPU"]'
    assert sum(field in code.source for code in codes) == 1
    text = "\n".join(code.source for code in codes)
    # Notebook 05 measures with `compare`.
    is_last = name[:2] == "05"
    assert ("plot_cold_start(" if is_last else "plot_first_seconds(") in text
    assert is_last or text.count("def train_for(batches") == 1


def test_few_names_of_the_package_and_half_of_the_code_without_it(name, codes):
    names = set()
    for node in ast.walk(ast.Module([code.tree for code in codes])):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("colab_utils"):
            names |= {alias.asname or alias.name for alias in node.names}
    assert len(names) <= 12
    cells = [code for code in codes if code.id not in ("setup", "imports", "parameters")]
    lines = [line for code in cells for line in code.lines]
    plain = [line for line in lines if not names & set(re.findall(r"\w+", line))]
    # 04 trains and 05 compares, by the package.
    assert len(plain) >= len(lines) / 2 or name[:2] in ("04", "05")


def test_solutions_stay_shut(sources):
    solutions = [source for _, source, _ in sources if "@title Solution" in source]
    assert solutions
    for solution in solutions:
        switch = re.search(r"^(SHOW_\w*SOLUTION) = False  # @param", solution, re.MULTILINE)
        assert switch, solution
        for node in ast.parse(solution).body:
            is_shut = ast.unparse(node).startswith(f"if {switch[1]}:")
            assert isinstance(node, ast.Assign) or is_shut, solution


def test_two_exercises_and_each_has_a_check_and_a_solution(sources):
    text = "\n".join(source for _, source, _ in sources)
    assert "Not yet" in text
    for number in (1, 2):
        assert f"## Exercise {number}" in text
        assert f"\n# @title Check exercise {number}" in text
        assert f"\n# @title Solution of exercise {number}" in text


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
    assert asked == [question for question, _ in QUESTIONS.values()]


def test_the_words_are_plain_and_no_path_is_of_another_machine(prose, text):
    assert not re.findall(r"\b(just|simply|easily|easy|obviously)\b", prose, re.IGNORECASE)
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
