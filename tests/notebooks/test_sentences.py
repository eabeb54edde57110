"""Sentences that are marked in a notebook's text, and what a run says of them."""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from colab_utils.errors import ColabUtilsError
from tools.run_notebooks import main, run_demo
from tools.sentences import read_checks, split_sentences

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
FIGURE = re.compile(
    r"\d\s*(?:%|ms\b|s\b|seconds\b|minutes\b|hours\b|times\b|images/s|[MG]B\b)"
    r"|\b(?:half|twice|tens|per cent|many times)\b"
    r"|\ban? (?:dozen|tenth|fifth|quarter|third|millisecond|second|minute|hour)\b"
)
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

It is 7 s. <!-- check "7 s": lost_s < 7 -->
"""
SHORT = 'It takes under 5 s. <!-- check "under 5 s": took_s < 5 -->'


def make_notebook(text, *, code="pass"):
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


def write_notebook(folder, text, **settings):
    """Write one small notebook; returns its folder."""
    import nbformat

    folder.mkdir()
    nbformat.write(make_notebook(text, **settings), folder / "01_small.ipynb")
    return folder


def read_page(report):
    return report.notebooks[0].page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """One small notebook, run as `make demo` runs the five, while other programs have 47 % of the
    cores.
    """
    folder = tmp_path_factory.mktemp("small")
    text = f"It waits half of the time.\n\n{SEE}"
    notebooks = write_notebook(folder / "notebooks", text, code="waits = 0.95\ntook_s = 7.5")
    seconds = iter([(100.0, 10.0), (110.0, 14.7)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tools.run_notebooks._measure_cores", lambda: np.array(next(seconds)))
        return run_demo(folder / "out", notebooks=notebooks)


def test_a_false_sentence_is_named_with_what_was_measured_and_a_true_one_is_not(report):
    row = "| bad day | 60 % to 75 % |"
    start = "01_small, cell see:"
    assert list(map(str, report.contradictions)) == [
        f'{start} "60 % to 75 %" of "{row}" measured: 100 * waits = 95',
        f'{start} "under 5 s" of "It takes under 5 s, on a good day 1 s." measured: took_s = 7.5',
        f'{start} "7 s" of "It is 7 s." could not be judged: '
        "NameError: name 'lost_s' is not defined",
    ]
    (notebook,) = report.notebooks
    holds = [judgement.holds for judgement in notebook.judgements]
    assert holds == [True, False, False, None, None]
    assert "5 sentences judged" in str(report)
    # The check itself does not show on the page.
    shown = re.sub("<!--.*?-->", "", read_page(report), flags=re.DOTALL)
    assert "It takes under 5 s" in shown
    assert "check" not in shown
    assert "took_s &lt;" not in shown


def test_a_page_has_a_note_below_each_paragraph_that_the_run_contradicts_and_the_index_leads_there(
    report,
):
    page = read_page(report)
    notes = re.findall("<blockquote>(.*?)</blockquote>", page, re.DOTALL)
    assert len(notes) == 3
    assert page.index("60 % to 75 %</td>") < page.index(notes[0]) < page.index("It takes under 5 s")
    for note, words, measured in (
        (notes[0], "60 % to 75 %", "100 * waits = 95"),
        (notes[1], "under 5 s", "took_s = 7.5"),
    ):
        assert "Your machine was busy here: other programs had 47% of its cores." in note
        assert f"The text says “{words}”, this run measured <code>{measured}</code>." in note
    assert "This sentence could not be judged." in notes[2]
    quiet = replace(report.contradictions[0], others=0.0)
    assert "busy here, or it or your data are not like ours." in quiet.write_note()
    index = report.index.read_text(encoding="utf-8")
    assert "This run contradicts 3 of 5 sentences." in index
    links = re.findall('href="01_small.html#([^"]+)"', index)
    assert len(links) == 3
    assert all(f'<a id="{link}"></a>' in page for link in links)


@pytest.fixture
def demonstrate(tmp_path, capsys, monkeypatch):
    """Run `make demo` on one small notebook; returns the status and what it printed."""

    def call(*options, code="took_s = 7.5"):
        paths = sorted(write_notebook(tmp_path / "notebooks", SHORT, code=code).iterdir())
        monkeypatch.setattr("tools.run_notebooks._find_notebooks", lambda _: paths)
        status = main(["--output", str(tmp_path / "out"), *options])
        return status, capsys.readouterr()

    return call


def test_a_contradicted_sentence_is_no_failure_and_the_last_line_counts_it(demonstrate, tmp_path):
    status, printed = demonstrate()
    assert status == 0
    assert '"under 5 s" of "It takes under 5 s." measured: took_s = 7.5' in printed.err
    last = printed.out.splitlines()[-1]
    assert "1 sentence judged, 1 contradicted by this run and marked on its page." in last
    assert str(tmp_path / "out" / "index.html") in last


def test_a_sentence_that_two_runs_contradict_fails_a_strict_demo(demonstrate, tmp_path):
    status, printed = demonstrate("--strict")
    assert status == 1
    assert '"under 5 s"' in printed.err.splitlines()[-1]
    assert (tmp_path / "out-again" / "01_small.html").is_file()


def test_a_timing_that_a_second_run_does_not_repeat_fails_no_strict_demo(demonstrate, tmp_path):
    ran = str(tmp_path / "ran")
    code = (
        f"import os\ntook_s = 2.5 if os.path.exists({ran!r}) else 7.5\nopen({ran!r}, 'w').close()"
    )
    status, printed = demonstrate("--strict", code=code)
    assert status == 0
    assert '"under 5 s"' in printed.err
    assert "1 sentence judged. Open" in printed.out.splitlines()[-1]
    # The second run fits its text.
    assert "<blockquote>" not in (tmp_path / "out-again" / "01_small.html").read_text()
    assert "contradicts" not in (tmp_path / "out-again" / "index.html").read_text()


def test_a_cell_that_raises_is_a_failure(demonstrate):
    status, printed = demonstrate(code="raise ValueError('no')")
    assert status == 1
    assert "01_small stopped in cell 'work': ValueError: no" in printed.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("It is 5 s. <!-- check took_s < 5 -->", "no words or no comparison"),
        ('It is 5 s. <!-- check "5 s" took_s < 5 -->', "no words or no comparison"),
        ('It is 5 s. <!-- check "5 s": took_s < -->', "no comparison with a measured name"),
        ('It is 5 s. <!-- check "5 s": 4 < 5 -->', "no comparison with a measured name"),
        ('It is 5 s. <!-- check "6 s": took_s < 6 -->', 'no words "6 s"'),
        ('It is 5 s. <!-- check "5 s": took_s < 50 -->', "say 5, the comparison"),
        ('It is 7 %. <!-- check "7 %": waits < 0.7 -->', "say 7, the comparison"),
    ],
)
def test_a_check_that_is_not_written_as_it_should_be_is_said_before_anything_runs(
    tmp_path, text, message
):
    notebooks = write_notebook(tmp_path / "notebooks", text)
    with pytest.raises(ColabUtilsError, match=f"01_small, cell see.*{message}"):
        run_demo(tmp_path / "out", notebooks=notebooks)
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


def find_unmarked(notebook):
    """Return the sentences of *What you should see* that hold a figure and carry no check."""
    checks = read_checks(notebook, "notebook")
    unmarked = []
    for cell in notebook.cells:
        if cell.cell_type != "markdown" or "What you should see" not in cell.source:
            continue
        judged = [check.words for check in checks.get(cell.id, ())]
        # The minutes of a section are a plan, and a question says nothing.
        for sentence in split_sentences(re.sub("^## .*$", "", cell.source, flags=re.MULTILINE)):
            is_judged = any(words in sentence for words in judged)
            if FIGURE.search(sentence) and not is_judged and not sentence.endswith("?"):
                unmarked.append(f"cell {cell.id}: {textwrap.shorten(sentence, 100)}")
    return unmarked


def test_every_sentence_of_the_five_notebooks_with_a_figure_is_judged():
    import nbformat

    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        assert find_unmarked(nbformat.read(path, as_version=4)) == [], path.stem
