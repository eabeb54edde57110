"""Pages that need no network: the receipt of a comparison with its numbers as JSON beside it, a run, a dataset."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from colab_utils.data.coco import CocoDataset, read_coco
from colab_utils.drive import explain_write
from colab_utils.errors import ColabUtilsError
from colab_utils.errors import escape as escape_controls
from colab_utils.runtime import Machine, format_bytes, write_file
from colab_utils.show import comparison_charts
from colab_utils.show.charts import plot_first_seconds, plot_statistics
from colab_utils.show.pictures import draw_annotations, embed_figure
from colab_utils.show.table import Table, make_table

if TYPE_CHECKING:
    from colab_utils.comparison.compare import Comparison
    from colab_utils.data.checks import DatasetReport, Problem
    from colab_utils.diagnosis.summary import Summary

__all__ = [
    "build_page", "check_receipt_folder", "show_chart", "show_notes", "tabulate_comparison", "write_check",
    "write_receipt", "write_summary",
]  # fmt: skip

_CHECK = "Check: what is in a dataset, and what is wrong with it"
_TITLE, _SUMMARY = "Receipt: ways of loading, side by side", "Summary: where the time of a loop went"

_STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 78rem; color: #1a1a1a; background: #fff;
  font: 17px/1.55 system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
h1 { font-size: 2rem; line-height: 1.2; margin: .2em 0 .5em; }
h2 { font-size: 1.4rem; margin: 2.2em 0 .4em; }
a { color: #0060a0; }
img, svg { max-width: 100%; height: auto; }
table { font-size: 15px; }
.scroll, pre { overflow-x: auto; }
.quiet { color: #555; font-size: 15px; }
.note { background: #fff6e0; border-left: 4px solid #E69F00; padding: .6em 1em; margin: 1em 0; }
code { font-size: .92em; background: #f2f4f7; padding: .1em .3em; border-radius: 3px; }
@media (max-width: 45rem) { .chart img { max-width: none; width: 44rem; } } /* on a phone it scrolls */
@media print { body { padding: 0; } }
"""


def build_page(title: str, parts: Sequence[str], *, style: str = "") -> bytes:
    """A whole HTML page, readable offline and on paper; ``title`` is escaped, ``parts`` are HTML already.

    Example:
        >>> b"<title>a &lt; b</title>" in build_page("a < b", ["<p>hello</p>"])
        True
    """
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}{style}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    ).encode()


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
    return _write_page(folder / "index.html", _TITLE, parts)


def write_summary(summary: Summary, path: str | Path) -> Path:
    """Write the summary of a watched loop as one HTML page: steps and white gaps, causes, the slowest batches.

    Args:
        summary: from ``watch(loader).summary()``.
        path: of the page; an earlier summary there is replaced.

    Raises:
        ColabUtilsError: the page cannot be written, or another file is there.
    """
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
        *(_to_html("h2", f"{one.share:.0%} {one.id}") + _to_html("p", one.why) + _to_html("p", f"Next: {one.next}")
          for one in summary.causes),
        "<h2>Where the time went</h2>", _to_html("pre", "\n".join(str(summary).splitlines()[1:6])),
        "<h2>The slowest batches</h2>", make_table(worst).to_html(),
        *(_to_html("p", text, "note") for text in (*summary.stalls, *summary.unseen)),
        *(_to_html("p", text, "quiet") for text in str(summary.resources or "").splitlines()),
    ]  # fmt: skip
    return _write_page(Path(path), _SUMMARY, parts)


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
    before = read_coco(annotations)
    after = read_coco(repaired) if repaired else before
    places = {number: i for i, number in enumerate(after.image_ids.tolist())}
    worst = [
        (f"{textwrap.shorten(one.file_name, 40)}\n{textwrap.shorten(', '.join({*one.defects}), 40)}", after, i)
        for one in report.worst
        if (i := places.get(one.image_id)) is not None
    ]
    changed = {name for repair in report.repairs for name in repair.examples}
    pairs = list[tuple[str, CocoDataset, int]]()
    for i, number in enumerate(before.image_ids.tolist()):
        name = escape_controls(before.file_name(i))
        if name in changed and number in places and number not in before.repeated_ids:  # those get other ids
            heading = textwrap.shorten(name, 30)
            pairs += (f"{heading}, before", before, i), (f"{heading}, after", after, places[number])
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
        parts.append(show_chart(draw_annotations(images, pairs[:8], title="Before and after the repair", columns=2)))
    if worst:
        parts.append(show_chart(draw_annotations(images, worst, title="The images to look at first")))
    parts.append(show_chart(plot_statistics(report.statistics)))
    return _write_page(Path(path), _CHECK, parts)


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
    _refuse_other(Path(folder) / "index.html", _TITLE)


def _refuse_other(page: Path, title: str) -> None:
    if page.exists() and not (page.is_file() and f"<title>{title}</title>" in page.read_text(errors="replace")):
        raise ColabUtilsError(
            f"expected a new file or an earlier page of this kind, found something else at {page}. Name another: "
            "nothing of yours is overwritten."
        )


def _write_page(page: Path, title: str, parts: Sequence[str]) -> Path:
    _refuse_other(page, title)
    with explain_write(page.parent):
        page.parent.mkdir(parents=True, exist_ok=True)
        write_file(page, build_page(title, parts))
    return page


def tabulate_comparison(content: Mapping[str, Any]) -> Table:
    """What each strategy reached and what it costs: CPU milliseconds of an image, hours of COCO's 118,287 images."""

    def tabulate(row: Mapping[str, Any]) -> dict[str, Any]:
        def scale(key: str, factor: float = 1.0) -> float | None:
            return None if row[key] is None else round(row[key] * factor, 1)

        hours = comparison_charts.COCO_IMAGES / 3.6e6
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
        f"Machine: {machine}.",
    )
    return [_to_html("p", note, "note") for note in notes if note] + [_to_html("p", text, "quiet") for text in quiet]


def _to_html(tag: str, text: str, css_class: str = "") -> str:
    return f'<{tag} class="{css_class}">{escape(text)}</{tag}>'
