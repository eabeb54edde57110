"""The demo: the five notebooks in order with tiny settings, and what it does with notebooks that
misbehave.
"""

from __future__ import annotations

import json
import re
import sys
from html import unescape

import pytest

from colab_utils.comparison import COURSE_STRATEGIES
from colab_utils.course.questions import QUESTIONS
from colab_utils.errors import ColabUtilsError
from tests.judged_pages import Page, check_page
from tools.pages import write_notebook_page
from tools.run_notebooks import inject_parameters, run_demo

TINY = {
    "SCENE": "good day",
    "N_BUILTIN_IMAGES": 26,
    "EMULATED_STEP_MS": 20,
    "SECONDS": 0.5,
    "PHOTO_MEGAPIXELS": 2,
    "SHARD_SIZE_MB": 2,
    "COMPARED_SAMPLES": 4,
    "MEASURED_SAMPLES": 4,
    "STEPS": 24,
    "COMPARED_STEPS": 3,
    "MAX_IMAGES": 8,
    "RUN_S": 0,
    "REPEATS": 1,
}


# The five notebooks have ten minutes of work on a machine that is busy with other tests.
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return run_demo(tmp_path_factory.mktemp("demo"), parameters=TINY)


@pytest.fixture
def results(demo):
    folder = demo.work / "drive" / "results"
    return {path.stem: json.loads(path.read_text()) for path in folder.iterdir()}


@pytest.fixture
def executed(demo):
    """The pages of the five notebooks and their cells of code."""
    # At the top, this import would take two seconds of every process that collects tests.
    import nbformat

    return {
        run.page: [
            cell
            for cell in nbformat.read(run.notebook, as_version=4).cells
            if cell.cell_type == "code"
        ]
        for run in demo.notebooks
    }


def test_all_five_ran_in_order(demo, executed):
    assert [page.name[:2] for page in executed] == ["01", "02", "03", "04", "05"]
    for cells in executed.values():
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    # The cache of loose files holds its place in the middle of a file; the next session goes on.
    unfinished = [*demo.index.parent.rglob("*.part")]
    assert {path.parent.name for path in unfinished} <= {".loose-files"}


def test_01_measures_the_plain_loop_by_hand(results):
    result = results["01"]
    # A file takes 59 ms, and a step takes 20 ms.
    assert 0.5 < result["wait_share"] <= 1
    assert result["load_s"] > 4 * 0.03 > result["step_s"]
    assert result["batches"]
    assert result["verdict"]


def test_01_measures_each_term_of_the_law(results):
    result = results["01"]
    # Drive takes at least 59 ms a file.
    assert result["read_s"] >= 0.059
    assert result["work_s"] > 0
    assert result["photo_work_s"] > 0
    assert set(result["files_per_second"]) == {"8", "48", "256"}
    assert result["files_per_second"]["48"] > result["files_per_second"]["8"]
    ways = {"plain loop", "8 workers", "48 threads, any order", "make_loader"}
    assert ways <= set(result["images_per_second"])


def test_01_answers_its_five_questions_by_measurements(results):
    questions = results["01"]["questions"]
    for question in questions.values():
        assert question["question"].endswith("?")
        # Nobody was at the keyboard.
        assert question["guess"] == ""
        assert question["measured"] > 0
    assert questions["waits_percent"]["measured"] == 100 * results["01"]["wait_share"]
    # Notebook 05 answers the same ones again.
    assert set(questions) == set(results["05"]["questions"]) == set(QUESTIONS)


def test_02_packs_and_loses_nothing_on_the_way_to_shards(results):
    result = results["02"]
    assert (result["images"], result["skipped"]) == (26, 0)
    assert result["tar_s"] < result["files_s"]
    assert result["readers_s"] < result["files_s"]
    assert result["shards"] >= 2
    # The largest of the four samples is a photo.
    assert result["shrunk_samples"] >= 1
    assert result["same_samples"] + result["shrunk_samples"] == 4
    assert result["other_samples"] == 0
    # Of the 26 images, 2 are photos of 12 megapixels.
    assert result["storage"] == "shrink"


def test_every_figure_has_its_numbers_as_alternative_text(executed):
    for page, cells in executed.items():
        shown = unescape(page.read_text(encoding="utf-8"))
        for output in (output for cell in cells for output in cell.outputs):
            if "image/png" in output.get("data", {}):
                text = output.metadata["image/png"]["alt"]
                assert re.search("[0-9]", text)
                assert text in shown


def test_03_copies_once_and_reads_faster(results):
    result = results["03"]
    assert result["shards"] == results["02"]["shards"]
    assert min(result["read_ms"].values()) < 59 / 2 < max(result["read_ms"].values())


def test_04_trains_loses_little_and_goes_on(results):
    result = results["04"]
    assert result["steps"] == 24
    assert 0 <= result["lost_steps"] <= 24
    assert 0 < result["last_loss"] < 20


def test_05_times_the_course_on_equal_samples(results):
    result = results["05"]
    assert result["comparable"]
    assert tuple(result["images_per_second"]) == (*COURSE_STRATEGIES, "dataloader_on_ssd")
    assert tuple(result["good_day"]) == ("sequential", "streams", "packed")
    # Nothing passes an emulated step of 20 ms for 4 images, and each file of Drive costs its 59 ms.
    assert all(0 < rate <= 1.05 * 4 / 0.020 for rate in result["images_per_second"].values())
    assert result["images_per_second"]["sequential"] < 1 / 0.03


def test_05_tests_twelve_pieces_of_advice(results):
    rows = results["05"]["advice"]
    assert len({row["advice"] for row in rows}) == 12
    for row in rows:
        assert row["your guess"] == ""
        assert row["here"] in ("true here", "false here", "it depends")
        assert re.search(r"\d", row["measured"])
    verdicts = {row["advice"]: row["here"] for row in rows}
    # These do not depend on a clock.
    assert verdicts["shuffle buffers do not matter"] == "false here"
    assert verdicts["EfficientDet-Lite as checkpoint"] == "false here"
    assert verdicts["pruning saves memory"] == "false here"


def test_the_index_shows_the_result_first_and_leads_to_all_pages(demo):
    page = Page(demo.index)
    assert page.text.index("The step waits") < page.text.index("Detect the bottleneck")
    assert page.text.index("And on a good day") < page.text.index("Detect the bottleneck")
    assert "images/s" in page.text
    assert [link for link in page.links if link.endswith(".html")] == [
        run.page.name for run in demo.notebooks
    ]
    assert any(source.startswith("data:image/svg+xml") for source in page.loads)
    assert "emulated" in page.text


def test_the_run_can_judge_every_marked_sentence(demo):
    """Under other settings than the notebooks' own a sentence may well be contradicted."""
    errors = [line.error for run in demo.notebooks for line in run.judgements if line.error]
    assert errors == []
    assert f"{sum(len(run.judgements) for run in demo.notebooks)} sentences judged" in str(demo)


def test_the_run_contradicts_neither_the_receipt_nor_the_index(demo):
    receipt = demo.work / "drive" / "receipt"
    comparison = json.loads((receipt / "comparison.json").read_text(encoding="utf-8"))
    check_page(receipt / "index.html", comparison)
    check_page(demo.index, comparison)


def test_the_pages_need_no_network_and_show_code_figures_and_links(demo):
    assert all(source.startswith("data:") for source in Page(demo.index).loads)
    names = [run.page.name for run in demo.notebooks]
    for number, run in enumerate(demo.notebooks):
        page = Page(run.page)
        assert all(source.startswith("data:") for source in page.loads), run.page
        assert "What you should see" in page.text
        assert any(source.startswith("data:image/png") for source in page.loads)
        # The set-up and the solution are folded.
        assert page.tags.count("details") >= 2
        neighbours = {*names[max(0, number - 1) : number], *names[number + 1 : number + 2]}
        assert neighbours <= set(page.links)


# The tests below run small notebooks of their own, for what a demo does when things go wrong.


@pytest.fixture
def run(tmp_path):
    """Run a demo of one small notebook in the folder ``out``."""
    import nbformat
    import nbformat.v4 as v4

    folder = tmp_path / "notebooks"
    folder.mkdir()

    def call(source="pass", more=(), **options):
        cells = [
            v4.new_markdown_cell("# 1. Small", id="title"),
            v4.new_code_cell(
                "LIMIT = 3\nNAME = ''", id="parameters", metadata={"tags": ["parameters"]}
            ),
            v4.new_code_cell(source, id="work"),
            *more,
        ]
        nbformat.write(v4.new_notebook(cells=cells), folder / "01_small.ipynb")
        return run_demo(tmp_path / "out", **{"notebooks": folder} | options)

    return call


def test_of_a_folded_cell_the_page_folds_the_code_and_shows_the_output(tmp_path):
    import nbformat.v4 as v4

    cell = v4.new_code_cell("# @title The last screen {}\nlook()", metadata={"cellView": "form"})
    cell.outputs = [v4.new_output("stream", text="what you found")]
    page = write_notebook_page(v4.new_notebook(cells=[cell]), tmp_path / "page.html")
    folded, shown = page.read_text(encoding="utf-8").split("</details>")
    assert "<summary>The last screen</summary>" in folded
    assert "look" in folded
    assert "look" not in shown
    assert "what you found" in shown
    assert "what you found" not in folded


def test_settings_are_injected_and_labs_left_out_and_a_progress_bar_leaves_one_line(run):
    import nbformat
    import nbformat.v4 as v4

    source = (
        "import sys\nfor n in range(5): print(f'\\rbar {n}', end='', file=sys.stderr, flush=True)\n"
        "print(LIMIT == 7, 'NAME' in dir())"
    )
    lab = v4.new_code_cell("raise ValueError('a lab')")
    cells = [v4.new_markdown_cell("## Lab A: more"), lab]
    [done] = run(source, cells, labs=False, parameters={"LIMIT": 7}).notebooks
    sources = [cell.source for cell in nbformat.read(done.notebook, as_version=4).cells]
    assert sources[1:] == ["LIMIT = 3\nNAME = ''", "LIMIT = 7", source]
    text = Page(done.page).text
    assert "True True" in text
    assert "bar 4" in text
    assert "bar 3" not in text


def test_a_failing_notebook_names_itself_and_its_cell_and_keeps_its_page(run, tmp_path):
    page = tmp_path / "out" / "01_small.html"
    with pytest.raises(ColabUtilsError, match=r"01_small.*'work'.*the last line") as error:
        run("print('so far')\nraise ValueError('one line\\nthe last line')")
    assert "\n" not in str(error.value)
    assert str(page) in str(error.value)
    assert "so far" in Page(page).text
    assert not page.with_name("index.html").exists()


def test_a_kernel_that_dies_is_said(run):
    with pytest.raises(ColabUtilsError, match=r"01_small.*'work'.*died"):
        run("import os; os._exit(1)")


def test_a_second_demo_replaces_its_own_files_only(run, tmp_path):
    source = "import os; os.makedirs('empty/folder'); open('made.txt', 'w').close()"
    first = run(source)
    mine = [tmp_path / "out" / "mine.txt", first.work / "mine.txt"]
    for path in mine:
        path.write_text("keep me")
    second = run(source)
    assert all(path.read_text() == "keep me" for path in mine)
    assert [path.name for path in first.work.iterdir()] == ["mine.txt"]
    assert (second.work / "made.txt").exists()


def test_files_of_somebody_else_are_not_overwritten(run, tmp_path):
    mine = tmp_path / "out" / "index.html"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(ColabUtilsError, match=r"holds index\.html, which no demo made"):
        run()
    assert [*mine.parent.iterdir()] == [mine]
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # The images are half of a dataset.
        ({"images": "photos"}, "Only images are named"),
        # The annotations are the other half.
        ({"annotations": "a.json"}, "Only annotations are named"),
        # The name of the setting is misspelt.
        ({"parameters": {"LIMITS": 1}}, "has settings called LIMITS"),
        # An installed package has no notebooks.
        ({"notebooks": "no/such/folder"}, "Clone the repository"),
    ],
)
def test_bad_arguments_are_said_before_anything_runs(run, tmp_path, arguments, message):
    with pytest.raises(ColabUtilsError, match=message):
        run(**arguments)
    assert not (tmp_path / "out").exists()


def test_missing_nbclient_is_said(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "nbclient", None)
    with pytest.raises(ColabUtilsError, match="pip install nbclient"):
        run()


def test_a_notebook_without_settings_is_said():
    import nbformat.v4 as v4

    with pytest.raises(ColabUtilsError, match="tagged 'parameters'"):
        inject_parameters(v4.new_notebook(cells=[v4.new_code_cell("A = 1")]), {"A": 2})
