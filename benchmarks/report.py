"""What was measured, as tables: on the terminal, and in benchmarks/README.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.scenarios import SCENARIOS
from colab_utils.errors import ColabUtilsError
from colab_utils.files import write_file
from colab_utils.show.table import Table, make_table
from colab_utils.units import format_bytes

__all__ = ["format_scenario", "summarise", "write_readme"]

README = Path(__file__).with_name("README.md")
BEGIN = "<!-- results: written by --readme -->"
END = "<!-- end of results -->"
_FIGURES = ("images_per_second", "cpu_ms_per_image", "wait_share")


def summarise(repeats: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians of the repeats, and the lowest and highest speed."""
    speeds = [repeat["images_per_second"] for repeat in repeats]
    figures = {name: median(repeat[name] for repeat in repeats) for name in _FIGURES}
    return {**figures, "lowest": min(speeds), "highest": max(speeds)}


def format_scenario(scenario: dict[str, Any]) -> str:
    """Return a scenario's table and targets, for the terminal."""
    targets = "\n".join(f"  {line}" for line in _list_targets(scenario))
    head = f"{scenario['name']}: {SCENARIOS[scenario['name']].idea}"
    return "\n".join(part for part in (head, str(_tabulate(scenario)), targets) if part)


def write_readme(results: dict[str, Any], path: Path = README) -> None:
    """Put the tables between the markers of a README.

    Raises:
        ColabUtilsError: if the README lacks the markers.
    """
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ColabUtilsError(
            f"expected the lines {BEGIN!r} and {END!r} in {path}, found them not. Put them back."
        )
    parts = [_describe_run(results)]
    for scenario in results["scenarios"]:
        table = _tabulate(scenario)
        rules = ["--:" if number else "---" for number in table.is_number]
        rows = "\n".join(_format_line(line) for line in (table.headings, rules, *table.rows))
        targets = "\n".join(f"- {line}" for line in _list_targets(scenario))
        idea = SCENARIOS[scenario["name"]].idea
        head = f"### {scenario['name']}\n\n{idea[0].upper()}{idea[1:]}."
        parts.append("\n\n".join((head, rows, targets)))
    body = "\n\n".join(part.strip() for part in parts)
    write_file(path, f"{before}{BEGIN}\n\n{body}\n\n{END}{after}".encode())


def _format_line(cells: Sequence[str]) -> str:
    """Return a line of a table in Markdown."""
    text = " | ".join(cell.replace("|", "/") for cell in cells)
    return f"| {text} |"


def _describe_run(results: dict[str, Any]) -> str:
    machine = results["machine"]
    rows = [row for scenario in results["scenarios"] for row in scenario["rows"]]
    controls = [repeat["control_s"] for row in rows for repeat in row["repeats"]]
    drift = "not measured"
    if controls:
        drift = f"{min(controls) * 1000:.0f} to {max(controls) * 1000:.0f} ms"
    versions = ", ".join(
        f"{name} {version}" for name, version in sorted(results["versions"].items())
    )
    return (
        f"Measured on {results['date']}: {machine['cores']} cores ({machine['cpu']}), "
        f"{format_bytes(machine['ram_bytes'])} RAM, {machine['software']}. "
        f"{results['repeats']} repeats of about {results['seconds']:g} s, in "
        "turns; medians [lowest-highest]. "
        f"The fixed control job beside each repeat took {drift}.\n\n"
        f"Peers: {versions or 'none'}.\n\n```\n{results['command']}\n```"
    )


def _tabulate(scenario: dict[str, Any]) -> Table:
    rows = sorted(scenario["rows"], key=_read_speed, reverse=True)
    waits = SCENARIOS[scenario["name"]].step_ms is not None
    return make_table([_format_row(row, waits=waits) for row in rows])


def _read_speed(row: dict[str, Any]) -> float:
    """Return images a second, 0 where nothing was measured."""
    speed: float = row["figures"]["images_per_second"] if row["figures"] else 0.0
    return speed


def _format_row(row: dict[str, Any], *, waits: bool) -> dict[str, Any]:
    figures: dict[str, Any] | None = row["figures"]
    speed = None
    cpu_ms = None
    waiting = None
    if figures:
        lowest = _round(figures["lowest"])
        highest = _round(figures["highest"])
        speed = f"{_round(figures['images_per_second'])} [{lowest}-{highest}]"
        cpu_ms = _round(figures["cpu_ms_per_image"])
        waiting = f"{figures['wait_share']:.1%}"
    cells: dict[str, Any] = {
        "system": row["system"],
        "loads with": row["crew"] or None,
        "images/s": speed,
        "CPU-ms/image": cpu_ms,
        "kB/image": f"{row['kb_per_image']:,.0f}" if row["kb_per_image"] else None,
    }
    if waits:
        cells["waiting"] = waiting
    cells["remark"] = row["reason"]
    if row["difference"] and not row["reason"]:
        cells["remark"] = f"not comparable: {row['difference']}"
    return cells


def _round(number: float) -> str:
    """Return a number with three digits or more."""
    if number >= 100:
        return f"{number:,.0f}"
    if number >= 10:
        return f"{number:.1f}"
    return f"{number:.2f}"


def _list_targets(scenario: dict[str, Any]) -> list[str]:
    lines = []
    for target in scenario["targets"]:
        if target["value"] is None:
            lines.append(f"{target['text']}: {target['wanted']} wanted, not measured")
            continue
        outcome = "reached" if target["reached"] else "NOT reached"
        lines.append(
            f"{target['text']}: {target['value']:.3g}, {target['wanted']} wanted, {outcome}"
        )
    return lines
