"""Sentences that are marked in a notebook's text, and what a run says of them."""

from __future__ import annotations

import re
import textwrap
from html import unescape
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
"""


SHORT = 'It takes under 5 s. <!-- check "under 5 s": took_s < 5 -->'


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
def write(tmp_path):
    """Write one small notebook; returns its folder."""
    import nbformat

    def call(text, **settings):
        folder = tmp_path / "notebooks"
        folder.mkdir()
        nbformat.write(make_notebook(text, **settings), folder / "01_small.ipynb")
        return folder

    return call


@pytest.fixture
def run(write, tmp_path):
    """Run one small notebook as `make demo` runs the five."""
    return lambda text, **settings: run_demo(tmp_path / "out", notebooks=write(text, **settings))


def test_a_false_sentence_is_named_with_what_was_measured_and_a_true_one_is_not(run):
    report = run(SEE)
    (line,) = report.contradictions
    row = "| bad day | 60 % to 75 % |"
    assert str(line) == f'01_small, cell see: "60 % to 75 %" of "{row}" measured: 100 * waits = 95'
    (notebook,) = report.notebooks
    assert [judgement.holds for judgement in notebook.judgements] == [True, False, True, None]
    assert notebook.judgements[2].check.sentence == "It takes under 5 s, on a good day 1 s."
    assert "4 sentences judged" in str(report)
    # The check itself does not show on the page.
    shown = re.sub("<!--.*?-->", "", read_page(report), flags=re.DOTALL)
    assert "It takes under 5 s" in shown
    assert "check" not in shown
    assert "took_s &lt;" not in shown


def test_a_check_of_a_name_that_is_not_there_is_said(run):
    report = run('It is 5 s. <!-- check "5 s": lost_s < 5 -->')
    (line,) = report.contradictions
    error = "NameError: name 'lost_s' is not defined"
    assert "cell see" in str(line)
    assert f"could not be judged: {error}" in str(line)
    page = unescape(read_page(report))
    assert "This sentence could not be judged." in page
    assert error in page


def read_page(report):
    return report.notebooks[0].page.read_text(encoding="utf-8")


def test_a_page_has_a_note_below_each_paragraph_that_the_run_contradicts_and_the_index_leads_there(
    run,
):
    first = "It waits half of the time.\n\n"
    report = run(f"{first}{SEE}", code="waits = 0.95\ntook_s = 7.5")
    page = read_page(report)
    notes = re.findall("<blockquote>(.*?)</blockquote>", page, re.DOTALL)
    for note, words, measured in (
        (notes[0], "60 % to 75 %", "100 * waits = 95"),
        (notes[1], "under 5 s", "took_s = 7.5"),
    ):
        assert note.count("Your machine was busy here") == 1
        assert f"The text says “{words}”, this run measured <code>{measured}</code>." in note
    assert len(notes) == 2
    assert page.index("60 % to 75 %</td>") < page.index(notes[0]) < page.index("It takes under 5 s")
    index = report.index.read_text(encoding="utf-8")
    assert "This run contradicts 2 of 4 sentences." in index
    links = re.findall('href="01_small.html#([^"]+)"', index)
    assert len(links) == 2
    assert all(f'<a id="{link}"></a>' in page for link in links)


def test_a_run_that_fits_its_text_has_no_note(run):
    report = run(SHORT)
    assert report.contradictions == []
    assert "<blockquote>" not in read_page(report)
    assert "contradicts" not in report.index.read_text(encoding="utf-8")
    assert "1 sentence judged. Open" in str(report)


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        (0.0, "Your machine was busy here, or it or your data are not like ours."),
        (0.47, "Your machine was busy here: other programs had 47% of its cores."),
    ],
)
def test_a_note_calls_a_machine_busy_where_other_programs_were_measured(
    run, monkeypatch, others, reason
):
    seconds = iter([(100.0, 10.0), (110.0, 10.0 + 10 * others)])
    monkeypatch.setattr("tools.run_notebooks._measure_cores", lambda: np.array(next(seconds)))
    (judgement,) = run(SEE).contradictions
    assert judgement.others == pytest.approx(others)
    assert f"**{reason}**" in judgement.write_note()


@pytest.fixture
def demonstrate(write, tmp_path, capsys, monkeypatch):
    """Run `make demo` on one small notebook; returns the status and what it printed."""

    def call(*options, code="took_s = 7.5"):
        paths = sorted(write(SHORT, code=code).iterdir())
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


@pytest.mark.parametrize("options", [(), ("--strict",)])
def test_a_cell_that_raises_is_a_failure(demonstrate, options):
    status, printed = demonstrate(*options, code="raise ValueError('no')")
    assert status == 1
    assert "01_small stopped in cell 'work': ValueError: no" in printed.err


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
