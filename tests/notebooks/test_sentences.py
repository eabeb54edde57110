"""Sentences that are marked in a notebook's text, and what a run says of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from colab_utils.errors import ColabUtilsError
from tools import sentences
from tools.run_notebooks import main, run_demo
from tools.sentences import find_unmarked, read_checks

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
SEE = """*What you should see:* much white. The loop **waits** 90 % to 98 %
of the time.

| scene | waits |
| --- | --: |
| bad day | 60 % to 75 % |

It takes under 5 s, on a good day 1 s.

<!-- check "90 % to 98 %": 0.90 <= waits <= 0.98 -->
<!-- check "60 % to 75 %": 60 <= 100 * waits <= 75 -->
<!-- check "under 5 s": took_s < 5 if SCENE == "bad day" -->
<!-- check "on a good day 1 s": took_s < 1 if SCENE == "good day" -->
"""


def make_notebook(text, *, code="waits = 0.95\ntook_s = 2.5"):
    # At the top, this import would take two seconds of every process that collects tests.
    import nbformat.v4 as v4

    cells = [
        v4.new_markdown_cell("# 1. Small", id="title"),
        v4.new_code_cell('SCENE = "bad day"', id="parameters", metadata={"tags": ["parameters"]}),
        v4.new_code_cell(code, id="work"),
        v4.new_markdown_cell(text, id="see"),
        v4.new_code_cell("waits = 0.1  # later than the text", id="later"),
    ]
    return v4.new_notebook(cells=cells)


@pytest.fixture
def run(tmp_path):
    """Run one small notebook as `make demo` runs the five."""
    import nbformat

    def call(text, **settings):
        folder = tmp_path / "notebooks"
        folder.mkdir()
        nbformat.write(make_notebook(text, **settings), folder / "01_small.ipynb")
        return run_demo(tmp_path / "out", notebooks=folder)

    return call


def test_a_false_sentence_is_named_with_what_was_measured_and_a_true_one_is_not(run):
    report = run(SEE)
    (line,) = report.contradictions
    row = "| bad day | 60 % to 75 % |"
    assert line == f'01_small, cell see: "60 % to 75 %" of "{row}" measured: 100 * waits = 95'
    (notebook,) = report.notebooks
    assert [judgement.holds for judgement in notebook.judgements] == [True, False, True, None]
    assert notebook.judgements[2].check.sentence == "It takes under 5 s, on a good day 1 s."
    assert "4 sentences judged" in str(report)


def test_a_check_neither_shows_on_the_page_nor_counts_as_a_cell(run):
    import nbformat

    report = run(SEE)
    page = report.notebooks[0].page.read_text(encoding="utf-8")
    shown = re.sub("<!--.*?-->", "", page, flags=re.DOTALL)
    assert "It takes under 5 s" in shown
    assert "check" not in shown
    assert "took_s &lt;" not in shown
    cells = nbformat.read(report.notebooks[0].notebook, as_version=4).cells
    counts = [cell.execution_count for cell in cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))


def test_a_check_of_a_name_that_is_not_there_fails_the_run(run):
    report = run('It is 5 s. <!-- check "5 s": lost_s < 5 -->')
    (line,) = report.contradictions
    assert "cell see" in line
    assert "could not be judged: NameError: name 'lost_s' is not defined" in line


def test_the_command_fails_where_a_sentence_is_contradicted(tmp_path, monkeypatch, capsys, run):
    report = run(SEE)
    monkeypatch.setattr("tools.run_notebooks.run_demo", lambda *_, **__: report)
    assert main(["--output", str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    assert str(report.index) in captured.out
    assert captured.err.splitlines()[0] == report.contradictions[0]
    assert "Correct them, or run again" in captured.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("It is 5 s. <!-- check took_s < 5 -->", "no words or no comparison"),
        ('It is 5 s. <!-- check "5 s" took_s < 5 -->', "no words or no comparison"),
        ('It is 5 s. <!-- check "5 s": -->', "no words or no comparison"),
        ('It is 5 s. <!-- check "5 s": took_s << 5 -->', "no comparison with a measured name"),
        ('It is 5 s. <!-- check "5 s": took_s < -->', "no comparison with a measured name"),
        ('It is 5 s. <!-- check "5 s": 4 < 5 -->', "no comparison with a measured name"),
        ('It is 5 s. <!-- check "6 s": took_s < 6 -->', 'no words "6 s"'),
        ('It is 5 s. <!-- check "5 s": took_s < 50 -->', "say 5, the comparison"),
        ('It is 7 %. <!-- check "7 %": waits < 0.7 -->', "say 7, the comparison"),
    ],
)
def test_a_check_that_is_not_written_as_it_should_be_is_said_before_anything_runs(
    run, tmp_path, text, message
):
    with pytest.raises(ColabUtilsError, match=f"01_small, cell see.*{message}"):
        run(text)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "comparison"),
    [
        ("about 25 s", "25 / 1.5 <= took_s <= 25 * 1.5"),
        ("1,234 images", "count == 1234"),
        ("7 %", "round(waits, 2) == 0.07"),
        ("8 workers half", 'rows["8 workers"] > 0.5'),
        ("many times", "files_s / tar_s > 3"),
    ],
)
def test_words_and_comparison_hold_the_same_numbers_in_either_form(words, comparison):
    notebook = make_notebook(f'It is {words} here. <!-- check "{words}": {comparison} -->')
    (check,) = read_checks(notebook, "01")["see"]
    assert check.sentence == f"It is {words} here."
    assert check.operands


@pytest.mark.parametrize(
    "sentence",
    [
        "Then 3 times as fast.",
        "It waits 1,200 ms.",
        "8 workers more than half of it.",
        "Such a photo takes a tenth of the space.",
        "| bad day | a few per cent |",
    ],
)
def test_a_sentence_with_a_figure_and_no_check_is_listed(sentence):
    table = "| scene | 5 % |\n| --- | --- |\n| good day | few |"
    mark = '<!-- check "5 s": a < 5 -->'
    if sentence.startswith("|"):
        text = f"What you should see: 5 s, at most.\n\n{table}\n{sentence}\n\n{mark}"
    else:
        text = f"What you should see: 5 s, at most. {sentence}\n\n{table}\n\n{mark}"
    assert find_unmarked(make_notebook(text)) == [f"cell see: {sentence}"]
    assert find_unmarked(make_notebook(sentence)) == []


def test_the_command_reads_the_checks_and_runs_nothing(tmp_path, capsys):
    import nbformat

    path = tmp_path / "01_small.ipynb"
    nbformat.write(make_notebook(f"{SEE}\nIt grows 7 times.", code="raise ValueError"), path)
    assert sentences.main([str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "01_small: 4 sentences have a check, not these:",
        "  cell see: It grows 7 times.",
    ]
    nbformat.write(make_notebook('It is 5 s. <!-- check "6 s": took_s < 6 -->'), path)
    assert sentences.main([str(path)]) == 2
    assert 'no words "6 s"' in capsys.readouterr().err


def test_the_checks_of_the_five_notebooks_fit_their_text():
    import nbformat

    paths = sorted(NOTEBOOKS.glob("*.ipynb"))
    assert len(paths) == 5
    for path in paths:
        for checks in read_checks(nbformat.read(path, as_version=4), path.stem).values():
            assert all(check.sentence for check in checks)


def test_every_sentence_of_the_five_notebooks_with_a_figure_is_judged():
    import nbformat

    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        assert find_unmarked(nbformat.read(path, as_version=4)) == [], path.stem
