"""The receipt of a comparison: one page that needs no network, and its numbers as JSON beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import Machine, format_bytes, write_file
from colab_utils.show.comparison_charts import name_strategy, plot_comparison, plot_epochs, plot_first_seconds
from colab_utils.show.html import WIDE, build_page, embed_figure
from colab_utils.show.table import Table, make_table

if TYPE_CHECKING:
    from colab_utils.comparison.compare import Comparison

__all__ = [
    "check_receipt_folder", "describe_comparison", "describe_null_results", "tabulate_comparison", "write_receipt",
]  # fmt: skip

_TITLE = "Receipt: ways of loading, side by side"


def write_receipt(comparison: Comparison, folder: str | Path) -> Path:
    """Write ``index.html`` and ``comparison.json`` into ``folder`` (made if need be); returns the page.

    The page holds its style, its charts and every number; all text is escaped.

    Args:
        comparison: from `compare`.
        folder: of the receipt.

    Raises:
        ColabUtilsError: the folder cannot be written, or holds a page that is no receipt.
    """
    folder = Path(folder)
    check_receipt_folder(folder)
    content = json.loads(json.dumps(asdict(comparison)))
    parts = [describe_comparison(content), _to_html("p", describe_null_results(content), "note")]
    for heading, plot in (("When it is paid back", plot_epochs), ("The first seconds, cold", plot_first_seconds)):
        try:
            parts += [f"<h2>{heading}</h2>", embed_figure(plot(content))]
        except ColabUtilsError:
            continue  # nothing of it was measured
    parts.append("<h2>What each name means</h2><dl>")
    for row in content["strategies"]:
        parts.append(_to_html("dt", f"{name_strategy(row['name'])} ({row['name']})") + _to_html("dd", row["idea"]))
    parts.append('</dl><p class="quiet">All numbers of this page: <a href="comparison.json">comparison.json</a>.</p>')
    data = content["dataset"]
    parts.append(_to_html("p", f"Data: {data['name']}, fingerprint {data['fingerprint']}.", "quiet"))
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
    """What each strategy reached and what it costs, one row each; ``comparison.json`` holds more.

    Args:
        comparison: from `compare`, or what a receipt's ``comparison.json`` holds.
        brief: only the five columns that you read first.
    """
    content = comparison if isinstance(comparison, Mapping) else asdict(comparison)
    rows = [_tabulate_row(row) for row in content["strategies"]]
    first = ("", "images/s", "waits", "first batch s", "CPU ms per image")
    return make_table([{key: row[key] for key in first} for row in rows] if brief else rows)


def _tabulate_row(row: Mapping[str, Any]) -> dict[str, Any]:
    def show(key: str) -> float | str | None:
        if row[key] is None:
            return None
        return format_bytes(row[key]) if key.endswith("_bytes") else round(row[key], 1)

    ratio = row["ratio"]
    return {
        "": name_strategy(row["name"]),
        "images/s": show("images_per_second"),
        "times as fast": f"{ratio:.2f} [{row['ratio_low']:.2f}-{row['ratio_high']:.2f}]" if ratio is not None else None,
        "cold images/s": show("cold_images_per_second"),
        "waits": None if row["wait_share"] is None else f"{row['wait_share']:.0%}",
        "first batch s": show("first_batch_s"),
        "CPU ms per image": show("cpu_ms_per_image"),
        "RAM": show("ram_bytes"),
        "on Drive": show("drive_bytes"),
        "on SSD": show("ssd_bytes"),
        "once, min": show("once_minutes"),
        "each session, min": show("session_minutes"),
        "epoch, min": show("epoch_minutes"),
        "paid back after, epochs": show("paid_back_epochs"),
        "same samples": "yes" if row["comparable"] else f"no: {row['difference']}",
        "read from": row["place"],
        "note": row["note"],
    }


def describe_comparison(content: Mapping[str, Any], *, brief: bool = False) -> str:
    """The finding, the table, the chart, and what to know about them, as HTML.

    Args:
        content: what ``comparison.json`` holds.
        brief: a short table under a flat chart, which fits on one screen.
    """
    figure = plot_comparison(content)
    finding = figure.get_suptitle().replace("\n", " ")
    figure.suptitle("")  # the page's heading says it
    if brief:
        figure.set_size_inches(12, 1.6 + 0.45 * len(content["strategies"]))
    notes = [content["note"]]
    if any("slowed" in row["place"] for row in content["strategies"]):
        notes.insert(0, f"Drive is a slowed folder on this machine, profile {content['drive']}")
    if content["step"] != "real":
        notes.insert(
            0,
            f"The training step is {content['step']}: no GPU was here. It keeps 0.9 of a core busy, as a training "
            "process does that feeds a GPU.",
        )
    if any(not row["comparable"] for row in content["strategies"]):
        notes.append("A row that says no under “same samples” must not be compared with the others.")
    machine = Machine(**content["machine"])
    return "\n".join(
        [
            _to_html("h1", finding),
            embed_figure(figure, alt=finding),
            f'<div class="scroll">{tabulate_comparison(content, brief=brief).to_html()}</div>',
            *(_to_html("p", note, "note") for note in notes if note),
            f'<p class="quiet">{content["dataset"]["images"]:,} images, batches of {content["batch_size"]}, '
            f"{content['workers']} workers. Each figure is the median of {content['repeats']} repeats of "
            f"{content['batches']} batches, taken in turns; warm-up and first batch are left out. The thin line is "
            "the lowest and the highest repeat.</p>",
            _to_html("p", f"Machine: {machine}, torchvision {machine.torchvision}, Python {machine.python}.", "quiet"),
        ]
    )


def describe_null_results(content: Mapping[str, Any]) -> str:
    """What did not help, said plainly.

    Example:
        >>> describe_null_results({"no_help": ["saved_tensors"], "baseline": "dataloader"})
        'Did not help here (less than 1.1 times as fast as loose files on Drive): .pt files on Drive.'
    """
    base = name_strategy(content["baseline"])
    if not content["no_help"]:
        return f"Every other way was at least 1.1 times as fast as {base}."
    names = "; ".join(map(name_strategy, content["no_help"]))
    return f"Did not help here (less than 1.1 times as fast as {base}): {names}."


def _to_html(tag: str, text: str, css_class: str = "") -> str:
    return f'<{tag} class="{css_class}">{escape(text)}</{tag}>'
