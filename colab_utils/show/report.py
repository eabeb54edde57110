"""Pages that need no network: the receipt of a comparison with its numbers as JSON beside it, a run, a dataset."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colab_utils.data.coco import read_coco
from colab_utils.drive import explain_write
from colab_utils.errors import ColabUtilsError
from colab_utils.errors import escape as escape_controls
from colab_utils.runtime import Machine, format_bytes, write_file
from colab_utils.show import comparison_charts
from colab_utils.show.charts import plot_first_seconds, plot_statistics
from colab_utils.show.html import WIDE, build_page, embed_figure
from colab_utils.show.pictures import draw_annotations
from colab_utils.show.table import Table, make_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from colab_utils.comparison.compare import Comparison
    from colab_utils.data.checks import DatasetReport, Problem
    from colab_utils.diagnosis.summary import Summary

__all__ = [
    "check_receipt_folder", "show_chart", "show_notes", "tabulate_comparison", "write_check", "write_receipt",
    "write_summary",
]  # fmt: skip

_CHECK = "Check: what is in a dataset, and what is wrong with it"
_TITLE, _SUMMARY = "Receipt: ways of loading, side by side", "Summary: where the time of a loop went"
_COCO_IMAGES = 118_287


def write_receipt(comparison: Comparison, folder: str | Path) -> Path:
    """Write ``index.html`` and ``comparison.json`` into ``folder`` (made if need be); returns the page.

    The page holds its style, its charts and every number; all text is escaped.

    Args:
        comparison: from `compare`.
        folder: of the receipt.

    Raises:
        ColabUtilsError: the folder cannot be written, or holds a page that is no receipt.
    """
    folder, content = Path(folder), json.loads(json.dumps(asdict(comparison)))
    check_receipt_folder(folder)
    line = "\t".join(map(str, comparison_charts.summarise_receipt(content).values()))
    data, rows = content["dataset"], content["strategies"]
    parts = [
        show_chart(comparison_charts.plot_comparison(content), "h1"),
        "<h2>Your line for the class sheet</h2>", _to_html("pre", line),
        show_chart(comparison_charts.plot_cold_start(content)),
        show_chart(comparison_charts.plot_epochs(content)),
        "<h2>All figures; hours are those of COCO</h2>", tabulate_comparison(content).to_html(), *show_notes(content),
        "<h2>What each name means</h2>",
        *(_to_html("p", f"{row['title']} ({row['name']}): {row['idea']}") for row in rows),
        '<p class="quiet">All numbers of this page: <a href="comparison.json">comparison.json</a>.</p>',
        _to_html("p", f"Data: {data['name']}, fingerprint {data['fingerprint']}.", "quiet"),
    ]  # fmt: skip
    with explain_write(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "comparison.json", (json.dumps(content, indent=1) + "\n").encode())
        write_file(folder / "index.html", build_page(_TITLE, "\n".join(parts), style=WIDE).encode())
    return folder / "index.html"


def write_summary(summary: Summary, path: str | Path) -> Path:
    """Write the summary of a watched loop as one HTML page: steps and white gaps, causes, the slowest batches.

    Args:
        summary: from ``watch(loader).summary()``.
        path: of the page; an earlier summary there is replaced.

    Raises:
        ColabUtilsError: the page cannot be written, or another file is there.
    """
    path = Path(path)
    _refuse_other(path, _SUMMARY, "summary")
    causes = [(f"{cause.share:.0%} {cause.id}", cause.why, f"Next: {cause.next}") for cause in summary.causes]
    worst = [
        {
            "batch": f"{batch.number:,}", "wait s": round(batch.wait_s, 3), "step s": round(batch.step_s, 3),
            "after it s": round(batch.between_s, 3), "samples seen": ", ".join(map(str, batch.samples)) or None,
        }
        for batch in summary.worst
    ]  # fmt: skip
    parts = [
        _to_html("h1", summary.verdict),
        show_chart(plot_first_seconds({"steps": summary.spans_s}, title=" ", white="no step for"), heading=""),
        *(_to_html(tag, text) for lines in causes for tag, text in zip(("h2", "p", "p"), lines, strict=True)),
        "<h2>Where the time went</h2>", _to_html("pre", "\n".join(str(summary).splitlines()[1:6])),
        "<h2>The slowest batches</h2>", make_table(worst).to_html(),
        *(_to_html("p", text, "note") for text in (*summary.stalls, *summary.unseen)),
        *(_to_html("p", text, "quiet") for text in str(summary.resources or "").splitlines()),
    ]  # fmt: skip
    with explain_write(path.parent):
        write_file(path, build_page(_SUMMARY, "\n".join(parts), style=WIDE).encode())
    return path


def write_check(
    report: DatasetReport, images: str | Path, annotations: str | Path, path: str | Path, *, repaired: str | Path = ""
) -> Path:
    """Write the report of a dataset as one HTML page: what to do, what is wrong, the worst images, the data in numbers.

    Args:
        report: from `check_dataset`, or from ``repair_annotations``.
        images: the image folder.
        annotations: the COCO JSON that was checked; of a repair, the original.
        path: of the page; an earlier page there is replaced.
        repaired: of a repair, the new JSON: images are drawn before and after.

    Raises:
        ColabUtilsError: the page cannot be written, or another file is there.
    """
    path, before = Path(path), read_coco(annotations)
    _refuse_other(path, _CHECK, "page")
    after = read_coco(repaired) if repaired else before
    places = {int(number): i for i, number in enumerate(after.image_ids)}
    worst = [
        (f"{textwrap.shorten(one.file_name, 40)}\n{textwrap.shorten(', '.join({*one.defects}), 40)}", after, i)
        for one in report.worst
        if (i := places.get(one.image_id)) is not None
    ]
    changed = {name: None for repair in report.repairs for name in repair.examples}
    pairs = [
        (f"{textwrap.shorten(name, 30)}, {when}", dataset, place)
        for i in range(len(before))
        if (name := escape_controls(before.file_name(i))) in changed
        and before.image_ids[i] not in before.repeated_ids  # the new file has other ids there
        and (j := places.get(int(before.image_ids[i]))) is not None
        for when, dataset, place in (("before", before, i), ("after", after, j))
    ][:8]
    serious = [one for one in report.problems if not one.effect.startswith("note")]
    serious.sort(key=lambda one: -one.count)
    found = ", ".join(f"{one.count:,} x {one.kind}" for one in serious[:3]) or "every image can be used"
    found += f" and {len(serious) - 3} more kinds" if len(serious) > 3 else ""
    parts = [
        _to_html("h1", f"{report.images:,} images, {report.annotations:,} annotations: {found}"),
        *(_to_html("p", sentence, "note") for sentence in report.statistics.advice),
        *(["<h2>What was repaired</h2>", _tabulate_problems(report.repairs)] if report.repairs else []),
        "<h2>What was found</h2>", _tabulate_problems(report.problems),
    ]  # fmt: skip
    if pairs:
        parts.append(show_chart(draw_annotations(images, pairs, title="Before and after the repair", columns=2)))
    if worst:
        parts.append(show_chart(draw_annotations(images, worst, title="The images to look at first")))
    parts.append(show_chart(plot_statistics(report.statistics)))
    with explain_write(path.parent):
        write_file(path, build_page(_CHECK, "\n".join(parts), style=WIDE).encode())
    return path


def _tabulate_problems(problems: Sequence[Problem]) -> str:
    rows = [
        {
            "": f"{one.count:,}", "what": one.kind, "what becomes of it": one.effect,
            "such as": "; ".join(textwrap.shorten(example, 80) for example in one.examples[:2]),
        }
        for one in problems
    ]  # fmt: skip
    return make_table(rows).to_html() if rows else "<p>Nothing.</p>"


def check_receipt_folder(folder: str | Path) -> None:
    """Refuse a folder where a receipt would overwrite somebody's page.

    Raises:
        ColabUtilsError: ``index.html`` is there and is no receipt.
    """
    page = Path(folder) / "index.html"
    if not _is_free(page, _TITLE):
        raise ColabUtilsError(
            f"expected a new folder or one with an earlier receipt, found another index.html in {folder}. Name another "
            "folder: nothing of yours is overwritten."
        )


def _refuse_other(path: Path, title: str, what: str) -> None:
    if not _is_free(path, title):
        raise ColabUtilsError(
            f"expected a new file or an earlier {what}, found something else at {path}. Name another."
        )


def _is_free(page: Path, title: str) -> bool:
    """Whether nothing is lost where a page with this title is written."""
    return not page.exists() or (page.is_file() and f"<title>{title}</title>" in page.read_text(errors="replace"))


def tabulate_comparison(content: Mapping[str, Any]) -> Table:
    """What each strategy reached and what it costs: CPU milliseconds of an image, hours of COCO's 118,287 images."""

    def tabulate(row: Mapping[str, Any]) -> dict[str, Any]:
        def scale(key: str, factor: float = 1.0) -> float | None:
            return None if row[key] is None else round(row[key] * factor, 1)

        hours = _COCO_IMAGES / 3.6e6
        return {
            "": row["title"],
            "images/s": scale("images_per_second"),
            "waits": None if row["wait_share"] is None else f"{row['wait_share']:.0%}",
            "first batch s": scale("first_batch_s"),
            "CPU ms": scale("cpu_ms_per_image"),
            "times": scale("ratio"),
            "on SSD": None if row["ssd_bytes"] is None else format_bytes(row["ssd_bytes"]),
            "once, h": scale("once_ms_per_image", hours),
            "session, h": scale("session_ms_per_image", hours),
            "epoch, h": scale("cold_ms_per_image", hours),
            "same samples": f"{'yes' if row['comparable'] else 'no'} {row['note'] or row['difference']}".strip(),
        }

    return make_table([tabulate(row) for row in content["strategies"]])


def show_chart(figure: Figure, heading: str = "h2") -> str:
    """A chart as HTML under its title, which a page breaks where it must; on a narrow screen the chart scrolls."""
    finding = figure.get_suptitle().replace("\n", " ")
    figure.suptitle("")
    title = _to_html(heading, finding) if heading else ""
    return f'{title}<div class="scroll chart">{embed_figure(figure, alt=finding)}</div>'


def show_notes(content: Mapping[str, Any]) -> list[str]:
    """What to know about a comparison's figures, as HTML: what was slowed or emulated, and the machine."""
    notes, machine = [content["note"]], Machine(**content["machine"])
    if content["step"] != "real":
        notes.append(f"The training step is {content['step']}: it keeps 0.9 of a core busy, like one that feeds a GPU.")
    if content["drive"] != "as it is, not slowed":
        notes.append(f"Drive is a slowed folder on this machine, profile {content['drive']}")
    images, times = f"{content['dataset']['images']:,} images", f"{content['repeats']} repeats"
    quiet = (
        f"{images}, batches of {content['batch_size']}, {content['workers']} workers. Each figure is the median of "
        f"{times} of {content['batches']} batches, taken in turns; warm-up and first batch are left out.",
        f"Machine: {machine}, torchvision {machine.torchvision}, Python {machine.python}.",
    )
    return [_to_html("p", note, "note") for note in notes if note] + [_to_html("p", text, "quiet") for text in quiet]


def _to_html(tag: str, text: str, css_class: str = "") -> str:
    return f'<{tag} class="{css_class}">{escape(text)}</{tag}>'
