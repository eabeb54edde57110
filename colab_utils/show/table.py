"""A small table that a notebook shows as HTML and a terminal as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from colab_utils.errors import ColabUtilsError

__all__ = ["Table", "make_table"]

_CELL = "padding:.4em .7em;border-bottom:1px solid #d9d9d9;font-size:15px;"
_WIDEST_LINE = 34  # characters of a cell that stay on one line


@dataclass(frozen=True)
class Table:
    """Headings and rows of text; numbers stand on the right. Use `make_table` to make one."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    is_number: tuple[bool, ...]

    def to_html(self) -> str:
        """The table as one HTML element, every text escaped; it brings its own style."""
        sides = ["right" if number else "left" for number in self.is_number]
        head = "".join(
            f'<th style="{_CELL}text-align:{side};background:#f2f4f7;color:#1a1a1a">{escape(text)}</th>'
            for side, text in zip(sides, self.headings, strict=True)
        )
        body = "".join(
            "<tr>"
            + "".join(
                f'<td style="{_CELL}text-align:{side};{_keep_line(text)}">{escape(text)}</td>'
                for side, text in zip(sides, row, strict=True)
            )
            + "</tr>"
            for row in self.rows
        )
        return (
            '<table style="border-collapse:collapse;margin:.5em 0;font-variant-numeric:tabular-nums">'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )

    _repr_html_ = to_html

    def __str__(self) -> str:
        lines = [self.headings, *self.rows]
        widths = [max(len(line[n]) for line in lines) for n in range(len(self.headings))]
        return "\n".join(
            "  ".join(
                text.rjust(width) if number else text.ljust(width)
                for text, width, number in zip(line, widths, self.is_number, strict=True)
            ).rstrip()
            for line in lines
        )

    __repr__ = __str__


def make_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Make a table of dicts that share their keys: a key is a heading, ``None`` becomes a dash.

    Raises:
        ColabUtilsError: there are no rows, or a row lacks a key of the first.

    Example:
        >>> print(make_table([{"read from": "Drive", "images/s": 16.4}, {"read from": "SSD", "images/s": 480}]))
        read from  images/s
        Drive          16.4
        SSD             480
    """
    if not rows:
        raise ColabUtilsError("expected rows for a table, found none: give at least one")
    headings = tuple(rows[0])
    for row in rows:
        if tuple(row) != headings:
            raise ColabUtilsError(f"expected the columns {list(headings)} in every row, found {list(row)}")
    texts = tuple(tuple(_to_text(value) for value in row.values()) for row in rows)
    is_number = tuple(all(re.fullmatch(r"–|-?[\d.,]+%?", row[n]) for row in texts) for n in range(len(headings)))
    return Table(headings, texts, is_number)


def _keep_line(text: str) -> str:
    return "white-space:nowrap" if len(text) <= _WIDEST_LINE else f"min-width:{_WIDEST_LINE / 3:.0f}em"


def _to_text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if value == 0 or abs(value) >= 1000:
            return f"{value:,.0f}"
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
