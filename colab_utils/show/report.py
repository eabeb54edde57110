"""The receipt of a comparison: one page that needs no network, and its numbers as JSON beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
    "check_receipt_folder", "describe_comparison", "describe_null_results", "read_receipt", "tabulate_comparison",
    "tabulate_machines", "write_receipt",
]  # fmt: skip

_TITLE = "Receipt: ways of loading, side by side"


def write_receipt(comparison: Comparison, folder: str | Path, *, against: Sequence[Mapping[str, Any]] = ()) -> Path:
    """Write ``index.html`` and ``comparison.json`` into ``folder`` (made if need be); returns the page.

    The page holds its style, its charts and every number; all text is escaped.

    Args:
        comparison: from `compare`.
        folder: of the receipt.
        against: receipts of other machines, from `read_receipt`, to lay beside it.

    Raises:
        ColabUtilsError: the folder cannot be written, or holds a page that is no receipt.
    """
    folder = Path(folder)
    check_receipt_folder(folder)
    content = json.loads(json.dumps(asdict(comparison)))
    parts = [describe_comparison(content), *_describe_more(content, against), "<h2>What each name means</h2><dl>"]
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


def read_receipt(path: str | Path) -> dict[str, Any]:
    """The numbers of a receipt: its ``comparison.json``, its folder, or what ``compare --json`` wrote.

    Raises:
        ColabUtilsError: there is no such file, or it is of something else.

    Example:
        >>> read_receipt("no/such/receipt")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected a comparison.json of an earlier receipt, found nothing at ...
    """
    path = Path(path)
    path = path / "comparison.json" if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for row in content["strategies"]:
            _ = row["name"], row["images_per_second"], row["comparable"]
        Machine(**content["machine"])
        _ = content["dataset"]["fingerprint"], content["step"], content["drive"]
    except OSError:
        raise ColabUtilsError(
            f"expected a comparison.json of an earlier receipt, found nothing at {path}. Correct the path."
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ColabUtilsError(
            f"expected the numbers of a receipt in {path}, found something else ({type(error).__name__}: {error}). "
            "Name the comparison.json beside an index.html that compare wrote."
        ) from None
    found: dict[str, Any] = content
    return found


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
            "times as fast": _describe_ratio(row),
            "cold images/s": _round(row["cold_images_per_second"]),
            "waits": None if row["wait_share"] is None else f"{row['wait_share']:.0%}",
            "batch ms": _round(row["batch_ms_median"], 0),
            "p95 ms": _round(row["batch_ms_p95"], 0),
            "first batch s": _round(row["first_batch_s"]),
            "CPU ms per image": _round(row["cpu_ms_per_image"]),
            "RAM": _describe_bytes(row["ram_bytes"]),
            "on Drive": _describe_bytes(row["drive_bytes"]),
            "on SSD": _describe_bytes(row["ssd_bytes"]),
            "once, min": _round(row["once_minutes"]),
            "each session, min": _round(row["session_minutes"]),
            "epoch, min": _round(row["epoch_minutes"]),
            "paid back after, epochs": _round(row["paid_back_epochs"]),
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
        brief: a short table under a flat chart, which fits on one screen.
    """
    figure = plot_comparison(content)
    finding = figure.get_suptitle().replace("\n", " ")
    figure.suptitle("")  # the page's heading says it
    if brief:
        figure.set_size_inches(12, 1.6 + 0.45 * len(content["strategies"]))
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
            f'{chart}<div class="scroll">{table}</div>',
            *(f'<p class="note">{note}</p>' for note in notes),
            f'<p class="quiet">{content["dataset"]["images"]:,} images, batches of {content["batch_size"]}, '
            f"{content['workers']} workers. Each figure is the median of {content['repeats']} repeats of "
            f"{content['batches']} batches, taken in turns; warm-up and first batch are left out. The thin line is "
            "the lowest and the highest repeat.</p>",
            f'<p class="quiet">Machine: {escape(str(machine))}, torchvision {escape(str(machine.torchvision))}, '
            f"Python {escape(machine.python)}.</p>",
        ]
    )


def _describe_more(content: Mapping[str, Any], against: Sequence[Mapping[str, Any]]) -> list[str]:
    """The sections under the table: what did not help, the charts over time, other machines."""
    parts = [f'<p class="note">{escape(describe_null_results(content))}</p>']
    for heading, plot in (("When it is paid back", plot_epochs), ("The first seconds, cold", plot_first_seconds)):
        try:
            figure = plot(content)
        except ColabUtilsError:
            continue  # nothing of it was measured
        finding = figure.get_suptitle().replace("\n", " ")
        parts += [f"<h2>{heading}</h2>", embed_figure(figure, alt=finding)]
    if against:
        parts += ["<h2>Beside other machines</h2>", tabulate_machines([content, *against]).to_html()]
        for one in (content, *against):
            about = (
                f"{_name_machine(one)}: {Machine(**one['machine'])}",
                f"step {one['step']}",
                f"Drive {one['drive']}",
            )
            parts.append(
                f'<p class="quiet">{escape("; ".join(about))}; data {escape(one["dataset"]["fingerprint"])}</p>'
            )
    return parts


def describe_null_results(content: Mapping[str, Any]) -> str:
    """What did not help, said plainly.

    Example:
        >>> describe_null_results({"no_help": ["saved_tensors"], "baseline": "dataloader"})
        'Did not help here (less than 1.1 times as fast as loose files on Drive): .pt files on Drive.'
    """
    base = name_strategy(content["baseline"])
    if not content["no_help"]:
        return f"Every other way was at least 1.1 times as fast as {base}."
    names = ", ".join(map(name_strategy, content["no_help"]))
    return f"Did not help here (less than 1.1 times as fast as {base}): {names}."


def tabulate_machines(receipts: Sequence[Mapping[str, Any]]) -> Table:
    """Images a second of each strategy on each machine; one that is not comparable there has a dash."""
    rates = [
        {row["name"]: row["images_per_second"] for row in one["strategies"] if row["comparable"]} for one in receipts
    ]
    names = dict.fromkeys(row["name"] for one in receipts for row in one["strategies"])
    headings = [f"{number}. {_name_machine(one)}" for number, one in enumerate(receipts, start=1)]
    return make_table(
        [
            {"images/s": name_strategy(name)}
            | {heading: _round(own.get(name)) for heading, own in zip(headings, rates, strict=True)}
            for name in names
        ]
    )


def _name_machine(content: Mapping[str, Any]) -> str:
    machine = Machine(**content["machine"])
    return f"{machine.gpu or 'no GPU'}, {machine.cores} cores{', Colab' if machine.colab else ''}"


def _describe_ratio(row: Mapping[str, Any]) -> str | None:
    if row["ratio"] is None:
        return None
    return f"{row['ratio']:.2f} [{row['ratio_low']:.2f}-{row['ratio_high']:.2f}]"


def _describe_bytes(count: float | None) -> str | None:
    return None if count is None else format_bytes(count)


def _describe_spread(rates: Sequence[float]) -> str | None:
    return f"{min(rates):.1f} to {max(rates):.1f}" if rates else None


def _round(value: float | None, digits: int = 1) -> float | None:
    return None if value is None else round(value, digits)
