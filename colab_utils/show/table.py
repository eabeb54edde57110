"""A small table that a notebook shows as HTML and a terminal as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from colab_utils.errors import ColabUtilsError

__all__ = ["Table", "make_table"]

_NUMBER = r"–|not tried|[-+]?[\d.,]+(e[-+]\d+)?( ?[^\d\s]{1,8})?"  # 7.97e-05, +7%, 4.2 s
_CELL = "padding:.4em .7em;border-bottom:1px solid #d9d9d9;font-size:15px;"


@dataclass(frozen=True)
class Table:
    """Headings and rows of text; numbers stand on the right. Use `make_table` to make one."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    is_number: tuple[bool, ...]

    def to_html(self) -> str:
        """The table as one HTML element, every text escaped; it brings its own style."""

        def write_row(tag: str, texts: Sequence[str], style: str = "") -> str:
            cells = (
                f'<{tag} style="{_CELL}{style}text-align:{"right" if number else "left"};'
                f'min-width:{min(len(text), 24) / 2}em">{escape(text)}</{tag}>'
                for text, number in zip(texts, self.is_number, strict=True)
            )
            return f"<tr>{''.join(cells)}</tr>"

        head = write_row("th", self.headings, "background:#f2f4f7;color:#1a1a1a;position:sticky;top:0;")
        body = "".join(write_row("td", row) for row in self.rows)
        style = "border-collapse:collapse;margin:.5em 0;font-variant-numeric:tabular-nums"
        table = f'<table style="{style}"><thead>{head}</thead><tbody>{body}</tbody></table>'
        box = "display:inline-block;max-width:100%;max-height:36em;overflow:auto"
        return f'<div tabindex="0" style="{box}">{table}</div>'

    _repr_html_ = __html__ = to_html

    def __str__(self) -> str:
        lines = [self.headings, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        sides = [str.rjust if number else str.ljust for number in self.is_number]
        return "\n".join(
            "  ".join(map(lambda side, *cell: side(*cell), sides, line, widths)).rstrip() for line in lines
        )

    __repr__ = __str__


def make_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Make a table of dicts: the keys of the first are the headings; ``None``, and what a row lacks, becomes a dash.

    Raises:
        ColabUtilsError: there are no rows.

    Example:
        >>> print(make_table([{"read from": "Drive", "images/s": 16.4}, {"read from": "SSD", "images/s": 480}]))
        read from  images/s
        Drive          16.4
        SSD             480
    """
    if not rows:
        raise ColabUtilsError("expected rows for a table, found none: give at least one")
    headings = tuple(rows[0])
    texts = tuple(tuple(_to_text(row.get(heading)) for heading in headings) for row in rows)
    numbers = tuple(all(re.fullmatch(_NUMBER, text) for text in column) for column in zip(*texts, strict=True))
    return Table(headings, texts, numbers)


def _to_text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "–", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
        return f"{value:.4f}" if "e" in text else text
    return f"{value:,}" if isinstance(value, int) else str(value)
