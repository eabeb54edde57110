"""The site around Sphinx: what its notebooks become, the doors of its first page, its links."""

import ast
import base64
import inspect
import re
import subprocess
import sys

import pytest

import colab_utils
from colab_utils.errors import ColabUtilsError
from tools.build_site import (
    _TEXTS,
    build_site,
    find_broken_links,
    prepare_notebook,
    write_first_page,
    write_llms,
)
from tools.cells import PLACEHOLDER, ROOT
from tools.write_commands import PAGE, write_page

BADGE = (
    "[![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    "(https://colab.research.google.com/github/OWNER/REPO/blob/colab/notebooks/01_a.ipynb)"
)
WIDGET = "application/vnd.jupyter.widget-view+json"


def make_notebook(*outputs):
    """An executed notebook: a title with its badge, a section, and one folded cell."""
    import nbformat.v4 as v4

    cell = v4.new_code_cell("# @title Setup", outputs=list(outputs), metadata={"cellView": "form"})
    cells = [
        v4.new_markdown_cell(f"# ![b](data:image/svg,c 'd')\n\n{BADGE}"),
        v4.new_markdown_cell("## Two clocks"),
        cell,
    ]
    return v4.new_notebook(cells=cells)


def show(data, **metadata):
    import nbformat.v4 as v4

    return v4.new_output("display_data", data=data, metadata=metadata)


def read_html(notebook):
    return [output["data"]["text/html"] for output in notebook.cells[-1].outputs]


def test_a_badge_stands_where_there_is_a_repository_and_a_drawing_is_shown():
    notebook = make_notebook()
    assert (
        prepare_notebook(notebook, PLACEHOLDER).cells[0].source
        == '# <img alt="b" src="data:image/svg,c">'
    )
    named = BADGE.replace("OWNER/REPO", "me/fast")
    assert (
        prepare_notebook(notebook, "me/fast").cells[0].source
        == f'# <img alt="b" src="data:image/svg,c">\n\n{named}'
    )
    assert notebook.cells[0].source == f"# ![b](data:image/svg,c 'd')\n\n{BADGE}"


def test_each_figure_has_its_alternative_text():
    picture = {"image/png": base64.b64encode(b"png").decode()}
    notebook = make_notebook(
        show(picture, **{"image/png": {"alt": 'waits 96 % & "more"'}}), show(picture)
    )
    known, unknown = read_html(prepare_notebook(notebook, PLACEHOLDER))
    assert 'alt="waits 96 % &amp; &quot;more&quot;"' in known
    assert '<p aria-hidden="true" class="words">waits 96 %' in known
    assert "Figure of the section “Two clocks”" in unknown
    assert 'class="words"' not in unknown
    assert all('src="data:image/png;base64,cG5n"' in html for html in (known, unknown))


def test_what_cannot_move_or_has_no_name_says_what_it_is():
    frame = {"text/html": '<iframe srcdoc="x"></iframe>'}
    named = {"text/html": '<iframe class="a" title="b"></iframe>'}
    notebook = make_notebook(show({WIDGET: {}, "text/plain": "VBox()"}), show(frame), show(named))
    sliders, framed, kept = read_html(prepare_notebook(notebook, PLACEHOLDER))
    assert '<a href="../index.html">' in sliders
    assert framed.startswith('<iframe title="')
    assert kept == named["text/html"]


def test_a_folded_cell_stays_folded_and_that_of_the_folders_is_left_out():
    notebook = make_notebook()
    assert prepare_notebook(notebook, PLACEHOLDER).cells[-1].metadata["tags"] == ["hide-input"]
    notebook.cells[-1].metadata["tags"] = ["injected-parameters"]
    assert len(prepare_notebook(notebook, PLACEHOLDER).cells) == 2


@pytest.mark.parametrize("slug", [PLACEHOLDER, "me/fast"])
def test_the_doors_of_the_first_page_lead_somewhere(tmp_path, slug):
    page = write_first_page(tmp_path, slug).read_text(encoding="utf-8")
    assert PLACEHOLDER not in page
    assert ("Upload notebook" in page) == (slug == PLACEHOLDER)
    for part in (
        "colab.research.google.com/github/me/fast/blob/colab/notebooks/01_detect_bottleneck.ipynb",
        "git clone https://github.com/me/fast",
        "git+https://github.com/me/fast",
    ):
        assert (part in page) == (slug == "me/fast")


def test_a_program_reads_what_the_package_does(tmp_path):
    text = write_llms(tmp_path, "me/fast").read_text()
    lines = text.splitlines()
    assert len(lines) <= 45
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert readme.startswith(lines[0])
    assert lines[2].removeprefix("> ") in readme
    assert "pip install --no-deps git+https://github.com/me/fast" in lines
    calls = re.findall(r"^- `colab_utils\.(\w+)`: (\w.+)\.$", text, re.MULTILINE)
    assert len(calls) == 5
    assert {name for name, _ in calls} < set(colab_utils.__all__)
    commands = dict(re.findall(r"^- `python -m colab_utils (\w+)`: (\w.+)\.$", text, re.MULTILINE))
    assert [*commands] == re.findall(r"^## (\w+)$", PAGE.read_text(), re.MULTILINE)
    assert all(meaning in PAGE.read_text() for meaning in commands.values())
    pages = re.findall(r"^- \[(.+)\]\((\w+)\.html\)$", text, re.MULTILINE)
    assert len(pages) == len(_TEXTS)
    for heading, name in pages:
        assert (ROOT / f"docs/{name}.md").read_text().startswith(f"# {heading}\n")
    # Each limit of README stands there, too.
    assert text.count("\n- **") == (ROOT / "README.md").read_text().count("\n- **") == 3


def test_links_that_lead_nowhere_are_found(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text(
        '<p id="top"><a href="#top"></a><a href="#gone"></a><a href="sub/b.html#here"></a>'
        '<a href="sub/b.html#there"></a><a href="sub/"></a><img src="gone.png">'
        '<a href="https://example.org/x"></a><a href="https://github.com/OWNER/REPO"></a>'
        '<img src="data:image/png;base64,xyz"><a href="#"></a><a href="with%20space.txt"></a>'
    )
    (tmp_path / "sub" / "b.html").write_text('<p id="here"><a href="../index.html"></a>')
    (tmp_path / "with space.txt").touch()
    assert find_broken_links(tmp_path) == [
        "index.html: #gone",
        "index.html: sub/b.html#there",
        "index.html: sub/",
        "index.html: gone.png",
        "index.html: https://github.com/OWNER/REPO",
    ]


def test_somebody_elses_folder_is_left_alone(tmp_path):
    mine = tmp_path / "site" / "mine.html"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(ColabUtilsError, match=r"holds files that make site has not made"):
        build_site(ROOT / "notebooks", mine.parent)
    assert mine.read_text() == "mine"


def test_the_site_has_every_notebook_and_every_text():
    contents = (ROOT / "docs" / "site" / "contents.md").read_text(encoding="utf-8")
    first = (ROOT / "docs" / "site" / "first" / "index.html").read_text(encoding="utf-8")
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"notebooks/{path.stem}\n" in contents
        assert f'href="notebooks/{path.stem}.html"' in first
    for path in (ROOT / "docs").glob("*.md"):
        assert re.search(rf"^{path.stem}$", contents, re.MULTILINE), path.name


def test_the_page_of_commands_has_the_help_of_each():
    text = PAGE.read_text(encoding="utf-8")
    commands = subprocess.run(
        [sys.executable, "-m", "colab_utils", "--help"], capture_output=True, check=True, text=True
    )
    names = re.search(r"{(.+?)}", commands.stdout)[1].split(",")
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == names
    assert write_page(text) == text


@pytest.mark.parametrize("page", ["README.md", "docs/SCRIPT.md", "docs/SCALE.md"])
def test_what_a_page_shows_can_be_called(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.+?)^```$", text, re.MULTILINE | re.DOTALL)
    tree = ast.parse("".join(blocks))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("colab_utils"):
            exec(ast.unparse(node))
        function = getattr(colab_utils, getattr(getattr(node, "func", None), "id", ""), None)
        if function is not None:
            parameters = inspect.signature(function).parameters
            given = {keyword.arg for keyword in node.keywords} - {None}
            assert given <= {*parameters}, ast.unparse(node)
    assert "colab_utils" in ast.unparse(tree)


def test_the_workflow_tests_before_it_publishes_and_calls_targets_of_the_makefile():
    workflow = (ROOT / ".github" / "workflows" / "test-and-publish.yml").read_text("utf-8")
    assert "needs: [test, site]" in workflow
    for action in re.findall(r"uses: (\S+)", workflow):
        assert re.fullmatch(r"actions/[a-z-]+@v[0-9]+", action), action
    makefile = (ROOT / "Makefile").read_text("utf-8")
    called = set(re.findall(r"\bmake ([a-z-]+)", re.sub("#.*", "", workflow)))
    assert called == {"test", "badges", "site", "demo"}
    assert called <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
