"""The receipt of a comparison: one page that needs no network, and its numbers as JSON beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import Machine, write_file
from colab_utils.show.html import WIDE, build_page, embed_figure
from colab_utils.show.plots import name_strategy, plot_comparison
from colab_utils.show.table import Table, make_table

if TYPE_CHECKING:
    from colab_utils.diagnosis.comparison import Comparison

__all__ = ["check_receipt_folder", "describe_comparison", "tabulate_comparison", "write_receipt"]

_TITLE = "Receipt: ways of loading, side by side"


def write_receipt(comparison: Comparison, folder: str | Path) -> Path:
    """Write ``index.html`` and ``comparison.json`` into ``folder`` (made if need be); returns the page.

    The page holds its style, its chart and every number; all text is escaped.

    Raises:
        ColabUtilsError: the folder cannot be written, or holds a page that is no receipt.
    """
    folder = Path(folder)
    check_receipt_folder(folder)
    content = json.loads(json.dumps(asdict(comparison)))
    parts = [describe_comparison(content), "<h2>What each name means</h2><dl>"]
    for row in content["strategies"]:
        parts.append(f"<dt><b>{escape(name_strategy(row['name']))}</b> <code>{escape(row['name'])}</code></dt>")
        parts.append(f"<dd>{escape(row['idea'])}</dd>")
    parts.append(
        '</dl><p class="quiet">All numbers of this page: <a href="comparison.json">comparison.json</a>. '
        f"Data: {escape(content['dataset']['name'])}, fingerprint {escape(content['dataset']['fingerprint'])}.</p>"
    )
    page = build_page(_TITLE, "\n".join(parts), style=WIDE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "comparison.json", (json.dumps(content, indent=1) + "\n").encode())
        write_file(folder / "index.html", page.encode())
    except OSError as error:
        raise ColabUtilsError(
            f"expected to write the receipt into {folder}, found: {error.strerror or error}. Choose another folder."
        ) from error
    return folder / "index.html"


def check_receipt_folder(folder: str | Path) -> None:
    """Refuse a folder where a receipt would overwrite somebody's page.

    Raises:
        ColabUtilsError: ``index.html`` is there and is no receipt.
    """
    page = Path(folder) / "index.html"
    if page.exists() and not (page.is_file() and f"<title>{_TITLE}</title>" in page.read_text(errors="replace")):
        raise ColabUtilsError(
            f"expected a new folder or one with an earlier receipt, found another index.html in {folder}. Name another "
            "folder: nothing of yours is overwritten."
        )


def tabulate_comparison(comparison: Comparison | Mapping[str, Any], *, brief: bool = False) -> Table:
    """Every figure of every strategy, one row each.

    Args:
        comparison: from `compare`, or what a receipt's ``comparison.json`` holds.
        brief: only the five columns that you read first.
    """
    content = comparison if isinstance(comparison, Mapping) else asdict(comparison)
    rows = [
        {
            "": name_strategy(row["name"]),
            "images/s": _round(row["images_per_second"]),
            "lowest to highest": _describe_spread(row["repeats_images_per_second"]),
            "waits": None if row["wait_share"] is None else f"{row['wait_share']:.0%}",
            "batch ms": _round(row["batch_ms_median"], 0),
            "p95 ms": _round(row["batch_ms_p95"], 0),
            "first batch s": _round(row["first_batch_s"]),
            "CPU ms per image": _round(row["cpu_ms_per_image"]),
            "same samples": "yes" if row["comparable"] else f"no: {row['difference']}",
            "read from": row["place"],
            "note": row["note"],
        }
        for row in content["strategies"]
    ]
    first = ("", "images/s", "waits", "first batch s", "CPU ms per image")
    return make_table([{key: row[key] for key in first} for row in rows] if brief else rows)


def describe_comparison(content: Mapping[str, Any], *, brief: bool = False) -> str:
    """The finding, the table, the chart, and what to know about them, as HTML.

    Args:
        content: what ``comparison.json`` holds.
        brief: a short table beside the chart, which fits on one screen.
    """
    figure = plot_comparison(content)
    finding = figure.get_suptitle().replace("\n", " ")
    figure.suptitle("")  # the page's heading says it
    if brief:
        figure.set_size_inches(8, 5)  # drawn smaller, its letters stay as large
    table, chart = tabulate_comparison(content, brief=brief).to_html(), embed_figure(figure, alt=finding)
    notes = []
    if content["step"] != "real":
        notes.append(
            f"The training step is <b>{escape(content['step'])}</b>: no GPU was here. It keeps 0.9 of a core busy, "
            "as a training process does that feeds a GPU."
        )
    if any("slowed" in row["place"] for row in content["strategies"]):
        notes.append(f"Drive is a <b>slowed folder</b> on this machine, profile {escape(content['drive'])}")
    if content["note"]:
        notes.append(escape(content["note"]))
    if any(not row["comparable"] for row in content["strategies"]):
        notes.append("A row that says <b>no</b> under “same samples” must not be compared with the others.")
    machine = Machine(**content["machine"])
    return "\n".join(
        [
            f"<h1>{escape(finding)}</h1>",
            f'<div class="side-by-side"><div>{table}</div>{chart}</div>'
            if brief
            else f'{chart}<div class="scroll">{table}</div>',
            *(f'<p class="note">{note}</p>' for note in notes),
            f'<p class="quiet">{content["dataset"]["images"]:,} images, batches of {content["batch_size"]}, '
            f"{content['workers']} workers. Each figure is the median of {content['repeats']} repeats of "
            f"{content['batches']} batches, taken in turns; warm-up and first batch are left out. The thin line is "
            "the lowest and the highest repeat.</p>",
            f'<p class="quiet">Machine: {escape(str(machine))}, torchvision {escape(str(machine.torchvision))}, '
            f"Python {escape(machine.python)}.</p>",
        ]
    )


def _describe_spread(rates: Sequence[float]) -> str | None:
    return f"{min(rates):.1f} to {max(rates):.1f}" if rates else None


def _round(value: float | None, digits: int = 1) -> float | None:
    return None if value is None else round(value, digits)
