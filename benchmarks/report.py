"""What the loaders' benchmark measured, as text for the terminal and, by `python -m
benchmarks.report FILE`, for benchmarks/README.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.command import write_between
from benchmarks.scenarios import SCENARIOS
from colab_utils.show.report import make_table
from colab_utils.units import format_bytes

__all__ = ["format_scenario", "summarise", "write_readme"]

MARKS = "<!-- results: written by benchmarks.report -->", "<!-- end of results -->"
_FIGURES = ("images_per_second", "cpu_ms_per_image", "wait_share")


def summarise(repeats: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians of the repeats, and the lowest and highest speed."""
    speeds = [repeat["images_per_second"] for repeat in repeats]
    figures = {name: median(repeat[name] for repeat in repeats) for name in _FIGURES}
    return {**figures, "lowest": min(speeds), "highest": max(speeds)}


def format_scenario(scenario: dict[str, Any]) -> str:
    """Return a scenario's idea, table and targets."""
    rows = sorted(scenario["rows"], key=_read_speed, reverse=True)
    table = make_table([_format_row(row) for row in rows])
    targets = [f"  {_format_target(target)}" for target in scenario["targets"]]
    idea = SCENARIOS[scenario["name"]].idea
    return "\n".join([f"{scenario['name']}: {idea}", str(table), *targets])


def write_readme(results: dict[str, Any]) -> None:
    """Put the tables between their marks."""
    machine = results["machine"]
    versions = ", ".join(f"{name} {text}" for name, text in sorted(results["versions"].items()))
    head = (
        f"{machine['cores']} cores ({machine['cpu']}), {format_bytes(machine['ram_bytes'])} RAM, "
        f"{machine['software']}, on {results['date']}; --samples {results['samples']} --repeats "
        f"{results['repeats']} --seconds {results['seconds']:g}. Peers: {versions or 'none'}."
    )
    tables = "\n\n".join(format_scenario(scenario) for scenario in results["scenarios"])
    write_between(MARKS, f"{head}\n\n```text\n{tables}\n```")


def _read_speed(row: dict[str, Any]) -> float:
    """Return images a second, 0 where nothing was measured."""
    speed: float = row["figures"]["images_per_second"] if row["figures"] else 0.0
    return speed


def _format_row(row: dict[str, Any]) -> dict[str, Any]:
    line: dict[str, Any] = {"system": row["system"], "loads with": row["crew"]}
    line |= {"images/s": None, "CPU-ms/image": None, "waiting": None}
    figures: dict[str, Any] | None = row["figures"]
    if figures:
        spread = f"[{figures['lowest']:,.4g}-{figures['highest']:,.4g}]"
        line["images/s"] = f"{figures['images_per_second']:,.4g} {spread}"
        line["CPU-ms/image"] = f"{figures['cpu_ms_per_image']:.3g}"
        line["waiting"] = f"{figures['wait_share']:.1%}"
    line["kB/image"] = f"{row['kb_per_image']:,.0f}" if row["kb_per_image"] else None
    difference = f"not comparable: {row['difference']}" if row["difference"] else ""
    return {**line, "remark": row["reason"] or difference}


def _format_target(target: dict[str, Any]) -> str:
    if target["value"] is None:
        return f"{target['text']}: {target['wanted']} wanted, not measured"
    outcome = "reached" if target["reached"] else "NOT reached"
    return f"{target['text']}: {target['value']:.3g}, {target['wanted']} wanted, {outcome}"


if __name__ == "__main__":
    write_readme(json.loads(Path(sys.argv[1]).read_text()))
