"""Receipts and the index of a demo, read as a person reads them, and judged by their numbers.

The sentences are those of `colab_utils.show.comparison_charts`. What is true of them is computed
here anew, from the rows of ``comparison.json``.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from html import unescape
from pathlib import Path
from typing import Any

__all__ = ["find_contradictions"]

Content = Mapping[str, Any]
_COCO_IMAGES = 118_287
_SESSION_EPOCHS = 3
_BUSY = "This machine is busy with other work"
# An emulated step that takes so many times its length was kept from its core; a receipt holds
# medians, so that a step this near to the limit may be called one or the other.
_SLOW = 1.3
_NEAR = 0.1
_GOOD_DAY = "And on a good day"
_NOTEBOOKS = "The notebooks, run in"
_NUMBER = r"([\d.,]*\d)"
_GAIN = re.compile(
    rf"The step waits (\d+)% → (\d+)% of the time, and trains {_NUMBER} times as many images/s as "
    r"the (.+)$"
)
_NO_GAIN = re.compile(
    r"The step waits (\d+)% of the time with the (.+?)(?:: no way is (\d+)% faster)?$"
)
_FIRST_SECONDS = re.compile(rf"Batches in the first {_NUMBER} seconds: (.+)$")
_BATCHES = re.compile(rf"{_NUMBER} with (.+)")
_HOURS = re.compile(rf"(\d+) epochs of 118,287 images: {_NUMBER} hours with (.+)$")
_MORE_HOURS = re.compile(rf"^(.+), {_NUMBER} hours with (.+)$")
_BAR = re.compile(rf"^{_NUMBER}  waits (\d+)%")
_ROW = re.compile(r"^waits (\d+)%, ([\d,]+) batch")
_LIMIT = re.compile(rf"^the step alone: {_NUMBER}$")


def find_contradictions(
    page: Path, comparison: Content, good_day: Content | None = None
) -> list[str]:
    """Return a line for each sentence of a page that the numbers of its comparison contradict.

    Args:
        page: a receipt, or the index of a demo.
        comparison: what ``comparison.json`` of the receipt holds.
        good_day: the same of the comparison under the heading of the good day.
    """
    html = page.read_text(encoding="utf-8")
    parts = [(html, comparison)]
    if good_day is not None:
        before, _, rest = html.partition(_GOOD_DAY)
        middle, _, after = rest.partition(_NOTEBOOKS)
        parts = [(before + after, comparison), (middle, good_day)]
    lines: list[str] = []
    for text, content in parts:
        sentences = _read_sentences(text)
        for sentence in sentences:
            truth = _judge_sentence(sentence, content)
            if truth:
                lines.append(f'"{sentence}" {truth}')
        lines += _judge_first_seconds(sentences, content)
        lines += _judge_busy(sentences, content)
        lines += _judge_table(text, content)
    return [f"{page.parent.name}/{page.name}: {line}" for line in dict.fromkeys(lines)]


def _read_sentences(html: str) -> list[str]:
    """Return the headings, the paragraphs, and what is written in the charts."""
    texts = re.findall(r"<(?:h1|h2|p)\b[^>]*>(.*?)</(?:h1|h2|p)>", html, re.DOTALL)
    for drawing in re.findall(r"svg\+xml;base64,([^\"]+)\"", html):
        # matplotlib draws letters as outlines, and writes the text in a comment above them.
        texts += re.findall(r"<!-- (.*?) -->", base64.b64decode(drawing).decode())
    return [unescape(re.sub(r"<[^>]+>", "", text)).strip() for text in texts]


def _judge_sentence(sentence: str, content: Content) -> str:
    """Return what is true instead of a sentence; nothing where it is true, or says no figure."""
    judges = (_judge_gain, _judge_no_gain, _judge_hours, _judge_bar, _judge_limit)
    for judge_sentence in judges:
        truth = judge_sentence(sentence, content)
        if truth:
            return truth
    return ""


def _judge_gain(sentence: str, content: Content) -> str:
    match = _GAIN.search(sentence)
    if not match:
        return ""
    now = _find_row(content, match[4])
    if now is None or not _agrees(match[1], 100 * now["wait_share"]):
        return _tell_rows(content)
    for row in _list_fair(content):
        gain = row["images_per_second"] / now["images_per_second"]
        if _agrees(match[2], 100 * row["wait_share"]) and _agrees(match[3], gain):
            if max(now["repeats_images_per_second"]) < min(row["repeats_images_per_second"]):
                return ""
            return f"measured: the repeats of {now['title']} and {row['title']} overlap"
    return _tell_rows(content)


def _judge_no_gain(sentence: str, content: Content) -> str:
    match = _NO_GAIN.search(sentence)
    if not match:
        return ""
    now = _find_row(content, match[2])
    if now is None or not _agrees(match[1], 100 * now["wait_share"]):
        return _tell_rows(content)
    most = max(row["images_per_second"] for row in _list_fair(content))
    if match[3] and most >= (1 + float(match[3]) / 100) * now["images_per_second"]:
        return _tell_rows(content)
    return ""


def _judge_hours(sentence: str, content: Content) -> str:
    match = _HOURS.search(sentence)
    if not match:
        return ""
    epochs = int(match[1])
    pairs = [(match[2], match[3])]
    more = _MORE_HOURS.search(match[3])
    if more:
        pairs = [(match[2], more[1]), (more[2], more[3])]
    for hours, title in pairs:
        row = _find_row(content, title)
        if row is None:
            return f"measured: nothing that is called {title}"
        true_hours = _count_hours(row, epochs)
        if not _agrees(hours, true_hours):
            return f"measured: {true_hours:.3g} hours with {title}"
    return ""


def _count_hours(row: Content, epochs: int) -> float:
    """Return the hours of so many epochs of COCO, in sessions that begin with a copy."""
    sessions = epochs // _SESSION_EPOCHS
    spent_ms = row["once_ms_per_image"]
    spent_ms += sessions * (row["session_ms_per_image"] + row["cold_ms_per_image"])
    spent_ms += (epochs - sessions) * 1000 / row["images_per_second"]
    return float(spent_ms * _COCO_IMAGES / 3.6e6)


def _judge_bar(sentence: str, content: Content) -> str:
    match = _BAR.search(sentence)
    if not match:
        return ""
    for row in _list_timed(content):
        is_rate = _agrees(match[1], row["images_per_second"])
        if is_rate and _agrees(match[2], 100 * row["wait_share"]):
            return ""
    return _tell_rows(content)


def _judge_limit(sentence: str, content: Content) -> str:
    match = _LIMIT.search(sentence)
    if not match:
        return ""
    limit = float(match[1].replace(",", ""))
    most = max(row["images_per_second"] for row in _list_timed(content))
    if most > limit and not _agrees(match[1], most):
        return f"measured: {most:.3g} images/s"
    step_ms = _read_step_ms(content)
    if step_ms and limit > 1.05 * 1000 * content["batch_size"] / step_ms:
        return f"measured: a step that is {content['step']}"
    return ""


def _judge_first_seconds(sentences: Iterable[str], content: Content) -> list[str]:
    """Return what is wrong of a chart of the first seconds: its title, and the text of its rows."""
    lines: list[str] = []
    shown_s = 0.0
    counted: list[tuple[float, int]] = []
    for sentence in sentences:
        title = _FIRST_SECONDS.search(sentence)
        row_text = _ROW.search(sentence)
        if title:
            shown_s = float(title[1].replace(",", ""))
            counted = [_count_first_seconds(row, shown_s) for row in _list_timed(content)]
            for count, name in _BATCHES.findall(title[2].replace(", ", "\n")):
                row = _find_row(content, name)
                batches = _count_first_seconds(row, shown_s)[1] if row else None
                if batches != int(count.replace(",", "")):
                    lines.append(f'"{sentence}" measured: {batches} with {name}')
        elif row_text and counted:
            batches = int(row_text[2].replace(",", ""))
            if not any(_agrees(row_text[1], 100 * share) and batches == n for share, n in counted):
                lines.append(f'"{sentence}" measured: no row of the first {shown_s:g} s')
    return lines


def _count_first_seconds(row: Content, shown_s: float) -> tuple[float, int]:
    """Return the share of waiting, and the batches, of the first seconds of a cold run."""
    spans = [span for span in row["timeline"] if span[0] < shown_s]
    worked_s = sum(min(end_s, shown_s) - begin_s for begin_s, end_s in spans)
    end_s = min(shown_s, row["timeline"][-1][1])
    return 1 - worked_s / end_s, sum(end_s <= shown_s for _, end_s in spans)


def _judge_busy(sentences: Sequence[str], content: Content) -> list[str]:
    """Return whether a finding keeps silent about a machine that is busy, or calls a quiet one
    so.
    """
    findings = [text for text in sentences if _GAIN.search(text) or _NO_GAIN.search(text)]
    step_ms = _read_step_ms(content)
    if not findings or not step_ms:
        return []
    lengths_ms = [
        1000 * content["batch_size"] * (1 - row["wait_share"]) / row["images_per_second"]
        for row in _list_timed(content)
    ]
    times = min(lengths_ms) / step_ms
    lines: list[str] = []
    for finding in findings:
        says_busy = _BUSY in finding
        is_wrong = times < _SLOW - _NEAR if says_busy else times > _SLOW + _NEAR
        if is_wrong:
            silence = "" if says_busy else ", and the machine is not called busy"
            lines.append(
                f'"{finding}" measured: the step took {times:.2f} times its length{silence}'
            )
    return lines


def _read_step_ms(content: Content) -> float | None:
    match = re.search(r"emulated ([\d.]+) ms", content["step"])
    return float(match[1]) if match else None


def _judge_table(html: str, content: Content) -> list[str]:
    """Return the cells of the table of all figures that are not the row's own."""
    columns: list[str] = []
    lines: list[str] = []
    for line in re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL):
        cells = [unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line)]
        row = _find_row(content, cells[0])
        if row is None:
            columns = cells
            continue
        truths = {
            "images/s": row["images_per_second"],
            "waits, %": 100 * row["wait_share"],
            "first batch, s": row["first_batch_s"],
        }
        for name, cell in zip(columns, cells, strict=False):
            if name in truths and not _agrees(cell, truths[name]):
                lines.append(f'"{cells[0]}: {name} {cell}" measured: {truths[name]:.4g}')
    return lines


def _agrees(text: str, value: float) -> bool:
    """Whether a number is the value, rounded once or twice.

    Example:
        >>> _agrees("3.8", 3.84), _agrees("1,234", 1233.7), _agrees("24", 26.0)
        (True, True, False)
    """
    digits = text.replace(",", "")
    decimals = len(digits.partition(".")[2])
    return abs(float(digits) - value) <= 0.6 * 10**-decimals


def _list_timed(content: Content) -> list[Content]:
    return [row for row in content["strategies"] if row["images_per_second"]]


def _list_fair(content: Content) -> list[Content]:
    timed = _list_timed(content)
    return [row for row in timed if row["comparable"]] or timed


def _find_row(content: Content, title: str) -> Content | None:
    for row in _list_timed(content):
        if row["title"] == title:
            return row
    return None


def _tell_rows(content: Content) -> str:
    rows = [
        f"{row['title']} {row['images_per_second']:.3g} images/s, waits {row['wait_share']:.1%}"
        for row in _list_timed(content)
    ]
    return f"measured: {'; '.join(rows)}"
