"""Pages that need no network: the receipt of a comparison with its numbers as JSON beside it, a
run, a dataset.
"""

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from colab_utils.data.checks import DatasetReport, Problem
from colab_utils.data.coco import CocoDataset, read_coco
from colab_utils.drive import explain_write
from colab_utils.errors import escape
from colab_utils.files import require_new, write_file
from colab_utils.machine import Machine
from colab_utils.places import Place
from colab_utils.require import require_local_path
from colab_utils.show import render
from colab_utils.show.charts import plot_first_seconds, plot_statistics
from colab_utils.show.comparison_charts import (
    COCO_IMAGES,
    plot_cold_start,
    plot_comparison,
    plot_epochs,
)
from colab_utils.show.pictures import DescribedFigure, draw_annotations, embed_figure
from colab_utils.show.receipts import summarise_receipt
from colab_utils.show.table import Table, make_table

if TYPE_CHECKING:
    from colab_utils.comparison.compare import Comparison
    from colab_utils.diagnosis.summary import Summary

_TITLES = {
    "receipt": "Receipt: ways of loading, side by side",
    "summary": "Summary: where the time of a loop went",
    "check": "Check: what is in a dataset, and what is wrong with it",
}


def write_receipt(
    comparison: "Comparison", folder: str | Path, *, questions: Mapping[str, Any] | None = None
) -> Path:
    """Write ``index.html`` and ``comparison.json`` into ``folder`` (made if need be); returns the
    page.

    The page holds its style, its charts and every number; all text is escaped.

    Args:
        comparison: from `compare`.
        folder: of the receipt.
        questions: a learner's answers (`collect_answers`), which ``comparison.json`` carries to the
            class sheet; the page does not show them.

    Raises:
        ColabUtilsError: the folder cannot be written, or holds a page that is no receipt.
    """
    folder = require_local_path(folder)
    content = json.loads(json.dumps(asdict(comparison)))
    if questions:
        content["questions"] = dict(questions)
    plots = (plot_comparison, plot_cold_start, plot_epochs)
    page = _write_page(
        folder / "index.html",
        "receipt",
        content=content,
        charts=[plot(content) for plot in plots],
        line="\t".join(map(str, summarise_receipt(content).values())),
        table=tabulate_comparison(content),
        notes=show_notes(content),
    )
    with explain_write(folder):
        write_file(folder / "comparison.json", (json.dumps(content, indent=1) + "\n").encode())
    return page


def write_summary(summary: "Summary", path: str | Path) -> Path:
    """Write the summary of a watched loop as one HTML page: steps and white gaps, causes, the
    slowest batches.

    Args:
        summary: from ``watch(loader).summary()``.
        path: of the page; an earlier summary there is replaced.

    Raises:
        ColabUtilsError: the page cannot be written, or another file is there.
    """
    worst = [
        {
            "batch": f"{batch.number:,}",
            "wait s": round(batch.wait_s, 3),
            "step s": round(batch.step_s, 3),
            "after it s": round(batch.between_s, 3),
            "samples seen": ", ".join(map(str, batch.samples)) or None,
        }
        for batch in summary.worst
    ]
    chart = plot_first_seconds(
        {"steps": summary.spans_s},
        title=" ",
        white="no step for",
    )
    return _write_page(
        require_local_path(path), "summary", summary=summary, chart=chart, worst=make_table(worst)
    )


def write_check(
    report: DatasetReport,
    images: str | Place,
    annotations: str | Place | CocoDataset,
    path: str | Path,
    *,
    repaired: str | Path = "",
) -> Path:
    """Write the report of a dataset as one HTML page: what to do, what is wrong, the worst images,
    the data in numbers.

    Args:
        report: from `check_dataset`, or from ``repair_annotations``.
        images: the image folder.
        annotations: the COCO JSON that was checked, or what `read_coco` gave; of a repair, the
            original.
        path: of the page; an earlier page there is replaced.
        repaired: of a repair, the new JSON: images are drawn before and after.

    Raises:
        ColabUtilsError: the page cannot be written, or another file is there.
    """
    page = require_local_path(path)
    before = read_coco(annotations)
    after = read_coco(repaired) if repaired else before
    places = {number: i for i, number in enumerate(after.image_ids.tolist())}
    worst = list[tuple[str, CocoDataset, int]]()
    for number, kinds in report.worst.items():
        i = places.get(number)
        if i is not None:
            name = textwrap.shorten(escape(after.file_name(i)), 40)
            faults = textwrap.shorten(", ".join(kinds), 40)
            worst.append((f"{name}\n{faults}", after, i))
    changed = {name for repair in report.repairs for name in repair.examples}
    pairs = list[tuple[str, CocoDataset, int]]()
    for i, number in enumerate(before.image_ids.tolist()):
        name = escape(before.file_name(i))
        # Repeated ids become other ids.
        if name in changed and number in places and number not in before.repeated_ids:
            heading = textwrap.shorten(name, 30)
            pairs.append((f"{heading}, before", before, i))
            pairs.append((f"{heading}, after", after, places[number]))
    figures = []
    if pairs:
        title = "Before and after the repair"
        figures.append(
            draw_annotations(
                images,
                pairs[:8],
                title=title,
                columns=2,
            )
        )
    if worst:
        figures.append(
            draw_annotations(
                images,
                worst,
                title="The images to look at first",
            )
        )
    figures.append(plot_statistics(report.statistics))
    serious = [problem for problem in report.problems if not problem.effect.startswith("note")]
    serious.sort(key=lambda problem: -problem.count)
    faults = ", ".join(f"{problem.count:,} x {problem.kind}" for problem in serious)
    finding = f"{report.images:,} images, {report.annotations:,} annotations: "
    finding += faults or "every image can be used"
    return _write_page(
        page, "check", report=report, finding=finding, charts=figures, tabulate=_tabulate_problems
    )


def _tabulate_problems(problems: Sequence[Problem]) -> Table | str:
    if not problems:
        return "Nothing."
    rows = []
    for problem in problems:
        examples = [textwrap.shorten(example, 80) for example in problem.examples[:2]]
        rows.append(
            {
                "": f"{problem.count:,}",
                "what": problem.kind,
                "what becomes of it": problem.effect,
                "such as": "; ".join(examples),
            }
        )
    return make_table(rows)


def check_receipt_folder(folder: str | Path) -> None:
    """Refuse a folder where a receipt would overwrite somebody's page.

    Raises:
        ColabUtilsError: ``index.html`` is there and is no receipt.
    """
    _refuse_other(require_local_path(folder) / "index.html", "receipt")


def _refuse_other(page: Path, kind: str) -> None:
    require_new(page, f"<title>{_TITLES[kind]}</title>".encode())


def _write_page(page: Path, kind: str, **content: Any) -> Path:
    _refuse_other(page, kind)
    with explain_write(page.parent):
        page.parent.mkdir(parents=True, exist_ok=True)
        write_file(
            page,
            render(
                kind,
                title=_TITLES[kind],
                show_chart=show_chart,
                **content,
            ).encode(),
        )
    return page


def tabulate_comparison(content: Mapping[str, Any]) -> Table:
    """Tabulate what each strategy reached and what it costs: CPU milliseconds of an image, and
    hours of COCO's 118,287 images.
    """
    hours = COCO_IMAGES / 3.6e6
    columns = {
        "images/s": ("images_per_second", 1),
        "waits, %": ("wait_share", 100),
        "first batch, s": ("first_batch_s", 1),
        "CPU, ms": ("cpu_ms_per_image", 1),
        "once, h": ("once_ms_per_image", hours),
        "session, h": ("session_ms_per_image", hours),
        "epoch, h": ("cold_ms_per_image", hours),
    }
    rows = []
    # The figures of a strategy that was not timed are None.
    for row in content["strategies"]:
        figures = {}
        for name, (key, factor) in columns.items():
            figures[name] = None if row[key] is None else round(factor * row[key], 1)
        equal = "yes" if row["comparable"] else "no"
        remark = row["note"] or row["difference"]
        rows.append(
            {
                "": row["title"],
                **figures,
                "same samples": f"{equal} {remark}".strip(),
            }
        )
    return make_table(rows)


def show_chart(figure: DescribedFigure, heading: str = "h2") -> Markup:
    """Return a chart as HTML under its title, which a page breaks where it must. On a narrow
    screen, the chart scrolls.
    """
    finding = figure.get_suptitle().replace("\n", " ")
    title = Markup("<{0}>{1}</{0}>").format(heading, finding) if heading else ""
    return Markup('{}<div class="scroll chart">{}</div>').format(title, embed_figure(figure))


def show_notes(content: Mapping[str, Any]) -> Markup:
    """Return what to know about a comparison's figures, as HTML: what was slowed or emulated, and
    the machine.
    """
    return render(
        "notes",
        content=content,
        machine=Machine(**content["machine"]),
    )
