"""A small table, which a notebook shows as HTML and a terminal shows as text."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from colab_utils.errors import ColabUtilsError
from colab_utils.show import render

# These texts count as numbers: 7.97e-05, +7%, 4.2 s, and the texts of a missing number (– and "not
# tried").
_NUMBER = r"–|not tried|[-+]?[\d.,]+(e[-+]\d+)?( ?[^\d\s]{1,8})?"


@dataclass(frozen=True)
class Table:
    """Headings and rows of text, made by `make_table`. Columns of numbers are aligned right."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    is_number: tuple[bool, ...]

    def to_html(self) -> Markup:
        """Return the table as one HTML element that contains its style. Every text is escaped."""
        return render(
            "table",
            headings=self.headings,
            rows=self.rows,
            is_number=self.is_number,
        )

    _repr_html_ = to_html
    __html__ = _repr_html_

    def __str__(self) -> str:
        columns = []
        texts = zip(self.headings, *self.rows, strict=True)
        for column, is_number in zip(texts, self.is_number, strict=True):
            width = max(map(len, column))
            columns.append(
                [text.rjust(width) if is_number else text.ljust(width) for text in column]
            )
        return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))

    __repr__ = __str__


def make_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Make a table from one dict for each row. The keys of the first dict are the headings.

    A value that is None or missing becomes a dash.

    Raises:
        ColabUtilsError: There are no rows.

    Example:
        >>> rows = [{"read from": "Drive", "images/s": 16.4}, {"read from": "SSD", "images/s": 480}]
        >>> print(make_table(rows))
        read from  images/s
        Drive          16.4
        SSD             480
    """
    if not rows:
        raise ColabUtilsError("The table has no rows. Give at least one.")
    headings = tuple(rows[0])
    texts = tuple(tuple(_to_text(row.get(heading)) for heading in headings) for row in rows)
    columns = zip(*texts, strict=True)
    numbers = tuple(all(re.fullmatch(_NUMBER, text) for text in column) for column in columns)
    return Table(headings, texts, numbers)


def _to_text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    if abs(value) >= 100:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return f"{value:.4f}" if "e" in text else text
