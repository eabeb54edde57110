"""Pages that need no network (the receipt of a comparison, the check of a dataset), and tables."""

import base64
import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from colab_utils.data.checks import DatasetReport
from colab_utils.data.coco import CocoDataset, read_coco
from colab_utils.drive import explain_write
from colab_utils.files import require_new, write_file
from colab_utils.machine import Machine
from colab_utils.places import PlaceLike, require_local_path
from colab_utils.show import render
from colab_utils.show.comparison_charts import (
    describe_hours,
    plot_cold_start,
    plot_comparison,
)
from colab_utils.show.pictures import DescribedFigure, draw_annotations
from colab_utils.units import format_count

if TYPE_CHECKING:
    from colab_utils.comparison.compare import Comparison
import re
from collections.abc import Sequence
from dataclasses import dataclass

from colab_utils.errors import ColabUtilsError

# These texts count as numbers: 7.97e-05, +7%, 4.2 s, and the texts of a missing number (– and "not
# tried").
_NUMBER = r"–|not tried|[-+]?[\d.,]+(e[-+]\d+)?( ?[^\d\s]{1,8})?"


@dataclass(frozen=True)
class Table:
    """Headings and rows of text, made by `make_table`. Columns of numbers are aligned right."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    is_number: tuple[bool, ...]

    def to_html(self) -> Markup:
        """Return the table as one HTML element that contains its style. Every text is escaped."""
        return render(
            "table",
            headings=self.headings,
            rows=self.rows,
            is_number=self.is_number,
        )

    _repr_html_ = to_html
    __html__ = _repr_html_

    def __str__(self) -> str:
        columns = []
        texts = zip(self.headings, *self.rows, strict=True)
        for column, is_number in zip(texts, self.is_number, strict=True):
            side = ">" if is_number else "<"
            width = max(map(len, column))
            columns.append([f"{text:{side}{width}}" for text in column])
        return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))

    __repr__ = __str__


def make_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Make a table from one dict for each row. The keys of the first dict are the headings.

    A value that is None or missing becomes a dash.

    Raises:
        ColabUtilsError: There are no rows.

    Example:
        >>> rows = [{"read from": "Drive", "images/s": 16.4}, {"read from": "SSD", "images/s": 480}]
        >>> print(make_table(rows))
        read from  images/s
        Drive          16.4
        SSD             480
    """
    if not rows:
        raise ColabUtilsError("The table has no rows. Give at least one.")
    headings = tuple(rows[0])
    texts = tuple(tuple(_to_text(row.get(heading)) for heading in headings) for row in rows)
    columns = zip(*texts, strict=True)
    numbers = tuple(all(re.fullmatch(_NUMBER, text) for text in column) for column in columns)
    return Table(headings, texts, numbers)


def _to_text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    if abs(value) >= 100:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return f"{value:.4f}" if "e" in text else text


_TITLES = {
    "receipt": "Receipt: ways of loading, side by side",
    "check": "Check: what is in a dataset, and what is wrong with it",
}
_WORST = "The images to look at first"
_WAYS = "EXIF unclear: on which side do the outlines lie on their objects?"


def write_receipt(
    comparison: "Comparison", folder: str | Path, *, questions: Mapping[str, Any] | None = None
) -> Path:
    """Write the receipt of a comparison: a page and its numbers as JSON.

    The page contains its style, its charts and all numbers. All text in it is escaped.

    Args:
        comparison: Result of `compare`.
        folder: Folder for ``index.html`` and ``comparison.json``. It is made if it does not exist.
        questions: A learner's answers from `collect_answers`. They are saved in
            ``comparison.json``. The page does not show them.
            Default: None.

    Returns:
        Path of the page.

    Raises:
        ColabUtilsError: The folder cannot be written, or its ``index.html`` is not a receipt.
    """
    folder = require_local_path(folder)
    content = json.loads(json.dumps(asdict(comparison)))
    if questions:
        content["questions"] = dict(questions)
    page = _write_page(
        folder / "index.html",
        "receipt",
        content=content,
        charts=[plot_comparison(content), plot_cold_start(content)],
        hours=describe_hours(content),
        table=tabulate_comparison(content),
        notes=show_notes(content),
    )
    with explain_write(folder):
        write_file(folder / "comparison.json", (json.dumps(content, indent=1) + "\n").encode())
    return page


def write_check(
    report: DatasetReport,
    images: PlaceLike,
    annotations: PlaceLike | CocoDataset,
    path: str | Path,
) -> Path:
    """Write the report of a dataset as one HTML page.

    The page says what to do and what is wrong, draws the worst images, and shows statistics of the
    data.

    Args:
        report: Result of `check_dataset` or of ``repair_annotations``.
        images: Image folder.
        annotations: COCO JSON that was checked, or the result of `read_coco`. For a repair, this is
            the new JSON.
        path: Path of the page. An earlier report at this path is replaced.

    Returns:
        Path of the page.

    Raises:
        ColabUtilsError: The page cannot be written, or ``path`` is a file that is not a report.
    """
    page = require_local_path(path)
    dataset = read_coco(annotations)
    places = {number: i for i, number in enumerate(dataset.image_ids.tolist())}
    turns = [
        (f"--exif {exif}", places[number], exif)
        for number in report.unclear
        for exif in ("keep", "turn")
    ]
    worst = [
        (", ".join(kinds), places[number], report.exif)
        for number, kinds in report.worst.items()
        if number in places
    ]
    figures = []
    if turns:
        figures.append(draw_annotations(images, dataset, turns, title=_WAYS, columns=2))
    if worst:
        figures.append(draw_annotations(images, dataset, worst, title=_WORST))
    faults = ", ".join(
        f"{problem.count:,} x {problem.kind}"
        for problem in report.problems
        if not problem.effect.startswith("note")
    )
    images = format_count(report.images, "image")
    annotations = format_count(report.annotations, "annotation")
    finding = f"{images}, {annotations}: {faults or 'every image can be used'}"
    return _write_page(page, "check", report=report, finding=finding, charts=figures)


def check_receipt_folder(folder: str | Path) -> None:
    """Raise an error if a receipt in this folder would overwrite another page.

    Raises:
        ColabUtilsError: The folder has an ``index.html`` that is not a receipt.
    """
    _refuse_other(require_local_path(folder) / "index.html", "receipt")


def _refuse_other(page: Path, kind: str) -> None:
    require_new(page, f"<title>{_TITLES[kind]}</title>".encode())


def _write_page(page: Path, kind: str, **content: Any) -> Path:
    _refuse_other(page, kind)
    with explain_write(page.parent):
        page.parent.mkdir(parents=True, exist_ok=True)
        html = render(kind, title=_TITLES[kind], show_chart=show_chart, **content)
        write_file(page, html.encode())
    return page


def tabulate_comparison(content: Mapping[str, Any]) -> Table:
    """Make a table of the speed of each strategy, and of the CPU time that an image takes."""
    columns = {
        "images/s": ("images_per_second", 1),
        "waits, %": ("wait_share", 100),
        "first batch, s": ("first_batch_s", 1),
        "CPU, ms": ("cpu_ms_per_image", 1),
    }
    rows = []
    # The figures of a strategy that was not timed are None.
    for row in content["strategies"]:
        figures = {
            name: None if row[key] is None else factor * row[key]
            for name, (key, factor) in columns.items()
        }
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
    """Return a chart as HTML that contains its drawing, an SVG, with its title as a heading above.

    On a narrow screen, the heading wraps and the chart scrolls. An empty ``heading`` leaves the
    title out. The alternative text has the title and the figure's numbers.
    """
    text = figure.alternative_text
    finding = figure.get_suptitle().replace("\n", " ")
    title = Markup("<{0}>{1}</{0}>").format(heading, finding) if heading else ""
    figure.suptitle("")
    drawing = io.BytesIO()
    figure.savefig(drawing, format="svg", metadata={"Date": None})
    data = base64.b64encode(drawing.getvalue()).decode()
    return Markup(
        '{}<div class="scroll chart"><img alt="{}" src="data:image/svg+xml;base64,{}"></div>'
    ).format(title, text, data)


def show_notes(content: Mapping[str, Any]) -> Markup:
    """Return notes on the figures of a comparison as HTML: the machine, and what was slowed or
    emulated.
    """
    return render(
        "notes",
        content=content,
        machine=Machine(**content["machine"]),
    )
