"""Receipts from many machines: a line of a table for each, and one chart of all."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from colab_utils.course.questions import OWN_LOADER, read_guess
from colab_utils.errors import ColabUtilsError, describe_error
from colab_utils.places import require_local_path
from colab_utils.show.charts import format_figure, plot_bars
from colab_utils.show.comparison_charts import Content, find_gain, read_comparison
from colab_utils.show.pictures import DescribedFigure
from colab_utils.show.table import Table, make_table
from colab_utils.units import format_count


def write_class(receipts: Sequence[str | Path], folder: str | Path) -> Table:
    """Write the chart of a class, ``receipts.png``, and return the table of its receipts.

    Args:
        receipts: ``comparison.json`` files of many machines.
        folder: Where to write the chart. The folder is made if it is missing.

    Raises:
        ColabUtilsError: No file is given, or a file is not a receipt.
    """
    target = require_local_path(folder)
    lines = read_receipts(receipts)
    target.mkdir(parents=True, exist_ok=True)
    plot_class(lines).savefig(target / "receipts.png")
    return make_table(lines)


def plot_class(lines: Sequence[Mapping[str, Any]]) -> DescribedFigure:
    """Draw how many times as fast each machine trains with its best way of loading.

    Each bar also says for which share of the time the step waits, with the first and with the best
    way of loading. The title names the fastest own loader.

    Args:
        lines: Result of `read_receipts`.
    """
    values = dict[str, float]()
    notes = dict[str, str]()
    for number, line in enumerate(lines, start=1):
        name = f"{number}. {line['receipt']}: {line['machine']}"
        values[name] = line["times as fast"]
        notes[name] = f"waits {line['waits before']:.0%} → {line['waits after']:.0%}"
    gain = format_figure(median(values.values()))
    title = f"{format_count(len(lines), 'receipt')}: training is {gain} times as fast (median)"
    winner = max(lines, key=lambda line: line["own loader"] or 0)
    if winner["own loader"]:
        times = format_figure(winner["own loader"])
        title += f". The fastest own loader: {winner['receipt']}, {times} times the plain loop"
    unit = "times as many images/s as before"
    return plot_bars(values, title=title, unit=unit, notes=notes, highlight=values)


def read_receipts(receipts: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Return the line that `summarise_receipt` makes of each file, with the receipt's name. The
    machine that gains most comes first.

    The name is that of the file, or of its folder if the file is named ``comparison.json``.

    Raises:
        ColabUtilsError: No file is given, or a file is not a receipt.
    """
    if not receipts:
        raise ColabUtilsError("There are no receipts. Name at least one comparison.json.")
    lines = []
    for receipt in receipts:
        path = require_local_path(receipt).absolute()
        name = path.parent.name if path.stem == "comparison" else path.stem
        try:
            line = summarise_receipt(json.loads(path.read_text(encoding="utf-8")))
        except Exception as error:
            raise ColabUtilsError(
                f"{path} is no receipt ({describe_error(error)}). Name a comparison.json that "
                "compare wrote."
            ) from None
        lines.append({"receipt": name, **line})
    return sorted(lines, key=lambda line: -line["times as fast"])


def summarise_receipt(comparison: Content) -> dict[str, Any]:
    """Return the line of one receipt in a table of many machines: the machine, what its first and
    its best strategy reached, and the speed of an own loader that passes all checks.

    Raises:
        ColabUtilsError: No strategy was timed.
    """
    content = read_comparison(comparison)
    machine = content["machine"]
    busy = ", busy with other work" if content.get("busy") else ""
    before, after = find_gain(content)
    own_loader = content.get("questions", {}).get(OWN_LOADER, {})
    return {
        "machine": f"{machine['gpu'] or 'no GPU'}, {machine['cores']} cores{busy}",
        "step": content["step"],
        "drive": content["drive"].partition(",")[0],
        "before": before["title"],
        "waits before": round(before["wait_share"], 3),
        "after": after["title"],
        "waits after": round(after["wait_share"], 3),
        "times as fast": round(after["images_per_second"] / before["images_per_second"], 1),
        "own loader": read_guess(own_loader.get("times_as_fast")),
    }
