"""The page of a watched loop: its verdict, the steps and their gaps, and nobody's file
overwritten.
"""

from __future__ import annotations

import pytest

from colab_utils.diagnosis.watch import watch
from colab_utils.errors import ColabUtilsError
from colab_utils.show.report import write_summary


def test_the_page_holds_the_verdict_the_picture_and_the_slowest_batches(tmp_path, capsys):
    watched = watch([[1, 2], [3]])
    for _ in watched:
        pass
    summary = watched.summary()
    page = write_summary(summary, tmp_path / "run.html")
    text = page.read_text()
    assert summary.verdict in text
    assert "<img" in text
    assert text.count("<tr>") == 1 + len(summary.worst)
    # The new page replaces an earlier one.
    assert write_summary(summary, page) == page
    other = tmp_path / "index.html"
    other.write_text("mine")
    with pytest.raises(ColabUtilsError, match="Name a new file"):
        write_summary(summary, other)
    assert other.read_text() == "mine"
