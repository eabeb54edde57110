"""Executed notebooks as pages to read without Jupyter and without a network, and the index that
leads to them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colab_utils.files import write_file
from colab_utils.show import render
from colab_utils.show.charts import count_batches, format_figure
from colab_utils.show.comparison_charts import plot_cold_start, plot_comparison, read_comparison
from colab_utils.show.report import show_chart, show_notes, tabulate_comparison
from colab_utils.units import format_count

if TYPE_CHECKING:
    from colab_utils.show.pictures import DescribedFigure
    from tools.sentences import Judgement

__all__ = [
    "NotebookRun",
    "collapse_progress",
    "read_title",
    "write_demo_index",
    "write_notebook_page",
]

WIDGET = "application/vnd.jupyter.widget-view+json"

_CELLS = """
body { max-width: 62rem; }
.cell { margin: 1em 0; }
.input_area { background: var(--soft); border-radius: 6px; padding: .1em 1em; overflow-x: auto;
  font-size: 14px; }
.output_area { overflow-x: auto; margin: .4em 0; }
.output_area pre { padding: 0 1em; font-size: 14px; white-space: pre-wrap; margin: .3em 0; }
.output_error pre { border-left: 4px solid #D55E00; }
.output_stderr pre, details { color: var(--quiet); }
.output_area img { background: #fff; }
.text_cell_render table { display: block; overflow-x: auto; }
iframe { box-sizing: border-box; }
.words { display: none; font-size: .85rem; }
@media (max-width: 45rem) { .words { display: block; } }
.anchor-link { display: none; }
blockquote { background: var(--note); border-left: 4px solid #E69F00; padding: .1em 1em;
  margin: 1em 0; }
details summary { cursor: pointer; font-size: 15px; }
"""

# The findings lie side by side where there is room, and the charts are no higher than one screen.
_FIRST_SCREEN = """
h1 { font-size: 1.7rem; margin: 0 0 .3em; }
.first { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 0 2rem; }
.first h2, .first p { margin: .3em 0; } .first li { line-height: 1.4; }
.first h2 { font-size: 1.15rem; margin: .4em 0 .2em; }
@media (max-width: 60rem) { .first { display: block; } }
.phone { display: none; padding: 0; list-style: none; } .phone li { margin: .5em 0; }
.phone span { display: block; height: 12px; min-width: 2px; background: #0072B2; }
@media (max-width: 45rem) { .wide { display: none; } .phone { display: block; } }
"""


@dataclass(frozen=True)
class NotebookRun:
    """One notebook that ran: its page, its title, the seconds it took, and what it says of the
    sentences that are marked in its text.
    """

    page: Path
    title: str
    seconds: float
    judgements: tuple[Judgement, ...] = ()

    @property
    def notebook(self) -> Path:
        """The executed copy of the notebook."""
        return self.page.with_suffix(".ipynb")


def read_title(notebook: Any) -> str:
    """Return the first heading of a notebook; "" where it has none."""
    lines = [line for cell in notebook.cells for line in cell.source.splitlines()]
    return next((line[2:] for line in lines if line[:2] == "# "), "")


def write_notebook_page(notebook: Any, path: Path) -> Path:
    """Write an executed notebook as one HTML file, images inside; the code of folded cells is
    folded here too.

    Args:
        notebook: an nbformat notebook; it is not changed.
        path: the HTML file; links between notebooks become links between such pages.
    """
    from nbconvert import HTMLExporter
    from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]

    exporter = HTMLExporter(
        template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True
    )
    parts = [_convert_cell(exporter, notebook, cell) for cell in notebook.cells]
    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    # The cell has the ground, in both colour schemes.
    colours = re.sub(
        r"background(-color)?: #(f8f8f8|0d1117);?",
        "",
        f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}",
    )
    style = f"{_CELLS}{colours}"
    write_file(
        path,
        render(
            "page", title=read_title(notebook) or path.stem, body="\n".join(parts), style=style
        ).encode(),
    )
    return path


def write_demo_index(
    path: Path,
    runs: Sequence[NotebookRun],
    *,
    comparison: Mapping[str, Any] | None = None,
    good_day: Mapping[str, Any] | None = None,
) -> Path:
    """Write the first page: what a comparison found, the same on a good day, and the pages of the
    notebooks.

    Args:
        path: the HTML file.
        runs: the notebooks, in order; their pages lie beside the index.
        comparison: what ``comparison.json`` of a receipt holds; None leaves it out.
        good_day: the same of a second comparison, on a day when Drive is quick.
    """
    total_s = sum(run.seconds for run in runs)
    parts = [f"<h2>The notebooks, run in {total_s / 60:.1f} minutes</h2><ol>"]
    for number, run in enumerate(runs, start=1):
        title = re.sub(r"^[0-9]+[.] ", "", run.title)
        parts.append(
            f'<li value="{number}"><a href="{escape(run.page.name)}">{escape(title)}</a> '
            f'<span class="quiet">{run.seconds:.0f} s</span></li>'
        )
    parts += ["</ol>", *_show_contradictions(runs)]
    if comparison:
        parts = _show_comparison(comparison, good_day, parts)
        parts += [
            "<h2>All figures</h2>",
            tabulate_comparison(comparison).to_html(),
        ]
        parts.append(show_notes(comparison))
    else:
        parts.insert(0, "<h1>The notebooks</h1>")
    title = "Data loading for Mask R-CNN: the demo"
    write_file(
        path, render("page", title=title, body="\n".join(parts), style=_FIRST_SCREEN).encode()
    )
    return path


def _show_contradictions(runs: Sequence[NotebookRun]) -> list[str]:
    """Return how many sentences the runs contradict, and a link to each note on a page."""
    judged = [(run, judgement) for run in runs for judgement in run.judgements]
    places: list[str] = []
    for run, judgement in judged:
        if judgement.is_contradicted:
            address = escape(f"{run.page.name}#{judgement.anchor}")
            words = escape(judgement.check.words)
            places.append(f'<a href="{address}">{run.page.name[:2]}: “{words}”</a>')
    if not places:
        return []
    return [
        f'<p class="note"><b>This run contradicts {len(places)} of '
        f"{format_count(len(judged), 'sentence')}.</b> "
        "Your machine was busy there, or it or your data are not like ours. The pages mark them:"
        f"<br>{'<br>'.join(places)}</p>"
    ]


def _show_comparison(
    comparison: Mapping[str, Any], good_day: Mapping[str, Any] | None, notebooks: Sequence[str]
) -> list[str]:
    """Return the first screen: the finding, its bars and first seconds, and beside them a good day
    and the notebooks.
    """
    bars = plot_comparison(comparison)
    finding = bars.get_suptitle().replace("\n", " ")
    parts = [f"<h1>{escape(finding)}</h1>", '<div class="first"><div>']
    parts.append(_show_chart(bars, "", _list_rates(comparison)))
    cold = plot_cold_start(comparison)
    parts += [_show_chart(cold, "h2", _list_cold_starts(comparison, cold)), "</div><div>"]
    if good_day:
        parts.append("<h2>And on a good day</h2>")
        parts.append(_show_chart(plot_comparison(good_day), "p", _list_rates(good_day)))
    return [*parts, *notebooks, "</div></div>"]


def _show_chart(figure: DescribedFigure, heading: str, bars: str) -> str:
    """Return a chart under its title, and the same as bars of HTML, which fit on a phone."""
    figure.set_size_inches(10, 1.1 + 0.42 * len(figure.axes[0].get_yticklabels()))
    title = figure.get_suptitle().replace("\n", " ")
    heading_html = f"<{heading}>{escape(title)}</{heading}>" if heading else ""
    return f'{heading_html}<div class="wide">{show_chart(figure, "")}</div>{bars}'


def _list_rates(comparison: Mapping[str, Any]) -> str:
    content = read_comparison(comparison)
    bars = []
    for row in content["timed"].values():
        rate = row["images_per_second"]
        text = f"{format_figure(rate)} images/s, waits {row['wait_share']:.0%}"
        bars.append((row["title"], rate, text))
    return _draw_bars(bars)


def _list_cold_starts(comparison: Mapping[str, Any], figure: DescribedFigure) -> str:
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    seconds = figure.axes[0].get_xlim()[1]
    bars = []
    for row in read_comparison(comparison)["timed"].values():
        if row["title"] in labels:
            count = count_batches(row["timeline"], seconds)
            text = format_count(count, "batch", "batches")
            bars.append((row["title"], float(count), text))
    return _draw_bars(bars)


def _draw_bars(bars: Sequence[tuple[str, float, str]]) -> str:
    """Return bars of HTML: a name, a length and a text for each."""
    longest = max((length for _, length, _ in bars), default=0.0) or 1.0
    parts = ['<ul class="phone">']
    for name, length, text in bars:
        parts.append(
            f"<li>{escape(name)}: <b>{escape(text)}</b>"
            f'<span style="width: {100 * length / longest:.1f}%"></span></li>'
        )
    return "".join([*parts, "</ul>"])


def _convert_cell(exporter: Any, notebook: Any, cell: Any) -> str:
    if cell.metadata.get("cellView") != "form":
        return _convert_shown(exporter, notebook, cell)
    match = re.match(r"#\s*@title\s+([^{\n]*)", cell.source)
    title = match[1].strip() if match else "Code"
    # As on Colab, the code is folded, and what it shows is not.
    exporter.exclude_output = True
    code = _convert_shown(exporter, notebook, cell)
    exporter.exclude_output = False
    exporter.exclude_input = True
    shown = _convert_shown(exporter, notebook, cell)
    exporter.exclude_input = False
    return f"<details><summary>{escape(title)}</summary>{code}</details>{shown}"


def _convert_shown(exporter: Any, notebook: Any, cell: Any) -> str:
    import nbformat.v4 as v4

    # Every cell would carry the state of all widgets, which do nothing offline.
    metadata = {name: value for name, value in notebook.metadata.items() if name != "widgets"}
    cell = collapse_progress(cell)
    if "outputs" in cell:
        cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
    shown = v4.new_notebook(cells=[cell], metadata=metadata)
    body, _ = exporter.from_notebook_node(shown)
    # The badges are of no use offline.
    body = re.sub(r'<a href="[^"]*(colab[.]research|kaggle)[^"]*"><img[^>]*></a>', "", body)
    body = re.sub(r'href="([0-9]{2}_[a-z_]+)[.]ipynb"', r'href="\1.html"', body)
    body = body.replace(
        "No description has been provided for this image", "the figure that the cell above draws"
    )
    # On a phone the letters of a figure are too small: its words stand below it there.
    picture = r'<img alt="([^"]*)"[^>]*src="data:image/png[^>]*>'
    words = r'\g<0><p aria-hidden="true" class="words">\1</p>'
    return re.sub(picture, words, str(body))


def collapse_progress(cell: Any) -> Any:
    """Return the cell as a terminal would leave it: of a progress bar that was redrawn, only the
    last line stays, and nothing of one that was wiped.
    """
    from nbconvert.preprocessors import CoalesceStreamsPreprocessor

    cell, _ = CoalesceStreamsPreprocessor().preprocess_cell(copy.deepcopy(cell), {}, 0)
    for output in cell.get("outputs", [])[::-1]:
        if output.output_type == "stream" and not output.text.strip():
            cell.outputs.remove(output)
    return cell
