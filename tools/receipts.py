"""Receipts and the index of a demo, read as a person reads them, and judged by their numbers.

The sentences are those of `colab_utils.show.comparison_charts`. What is true of them is computed
here anew, from the rows of ``comparison.json``.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from html import unescape
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["find_contradictions"]

Content = Mapping[str, Any]
_COCO_IMAGES = 118_287
_SESSION_EPOCHS = 3
_BUSY = "This machine is busy with other work"
# An emulated step that takes so many times its length was kept from its core.
_SLOW = 1.3
_GOOD_DAY = "And on a good day"
_NOTEBOOKS = "The notebooks, run in"
_NUMBER = r"([\d.,]*\d)"
_GAIN = re.compile(
    rf"The step waits (\d+)% → (\d+)% of the time, and trains {_NUMBER} times as many images/s as "
    r"the (.+)$"
)
_NO_GAIN = re.compile(
    r"The step waits (\d+)% of the time with the (.+?)(?:: no other way is (\d+)% faster)?$"
)
_FIRST_SECONDS = re.compile(rf"Batches in the first {_NUMBER} seconds: (.+)$")
_BATCHES_OF = re.compile(rf"{_NUMBER} with (.+?)(?=, [\d,]+ with |$)")
_HOURS = re.compile(r"(\d+) epochs of 118,287 images: (.+)$")
_HOURS_OF = re.compile(rf"{_NUMBER} hours with (.+?)(?=, [\d.,]+ hours with |$)")
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
        parts = [
            (before + after, comparison),
            (middle, good_day),
        ]
    lines: list[str] = []
    for part, content in parts:
        lines += _judge_part(part, content)
    place = f"{page.parent.name}/{page.name}"
    return [f"{place}: {line}" for line in dict.fromkeys(lines)]


def _judge_part(html: str, content: Content) -> list[str]:
    lines: list[str] = []
    sentences = _read_sentences(html)
    for sentence in sentences:
        truth = _judge_sentence(sentence, content)
        if truth:
            lines.append(f'"{sentence}" {truth}')
    lines += _judge_first_seconds(sentences, content)
    lines += _judge_busy(sentences, content)
    lines += _judge_table(html, content)
    return lines


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
    waits_before, waits_after, times, title = match.groups()
    now = _find_row(content, title)
    if now is None or not _agrees_share(waits_before, now["wait_share"]):
        return _tell_rows(content)
    truth = _tell_rows(content)
    for row in _list_fair(content):
        gain = row["images_per_second"] / now["images_per_second"]
        if not _agrees(times, gain) or not _agrees_share(waits_after, row["wait_share"]):
            continue
        if gain >= 1 + max(_measure_spread(row), _measure_spread(now)):
            return ""
        truth = f"measured: the repeats of {title} or {row['title']} differ by more than that"
    return truth


def _measure_spread(row: Content) -> float:
    """Return by how much the repeats of a way differ, as a share of their median."""
    repeats = row["repeats_images_per_second"]
    return float((max(repeats) - min(repeats)) / median(repeats))


def _judge_no_gain(sentence: str, content: Content) -> str:
    match = _NO_GAIN.search(sentence)
    if not match:
        return ""
    waits, title, percent = match.groups()
    now = _find_row(content, title)
    if now is None or not _agrees_share(waits, now["wait_share"]):
        return _tell_rows(content)
    if percent is None:
        return ""
    least = (1 + float(percent) / 100) * now["images_per_second"]
    fastest = max(row["images_per_second"] for row in _list_fair(content))
    if fastest >= least:
        return _tell_rows(content)
    return ""


def _judge_hours(sentence: str, content: Content) -> str:
    match = _HOURS.search(sentence)
    if not match:
        return ""
    epochs = int(match[1])
    for hours, title in _HOURS_OF.findall(match[2]):
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
    rate, waits = match.groups()
    for row in _list_timed(content):
        is_rate = _agrees(rate, row["images_per_second"])
        if is_rate and _agrees_share(waits, row["wait_share"]):
            return ""
    return _tell_rows(content)


def _judge_limit(sentence: str, content: Content) -> str:
    match = _LIMIT.search(sentence)
    if not match:
        return ""
    limit = _to_number(match[1])
    fastest = max(row["images_per_second"] for row in _list_timed(content))
    if fastest > limit and not _agrees(match[1], fastest):
        return f"measured: {fastest:.3g} images/s"
    step_ms = _read_step_ms(content)
    if step_ms is None:
        return ""
    possible = 1000 * content["batch_size"] / step_ms
    if limit > 1.05 * possible:
        return f"measured: a step that is {content['step']}"
    return ""


def _judge_first_seconds(sentences: Sequence[str], content: Content) -> list[str]:
    """Return what is wrong of a chart of the first seconds: its title, and the text of its rows."""
    titles = [match for match in map(_FIRST_SECONDS.search, sentences) if match]
    if not titles:
        return []
    title = titles[0]
    shown_s = _to_number(title[1])
    if shown_s < 1:
        # The chart ends with the shortest run, and its title says when, rounded.
        ends_s = [row["timeline"][-1][1] for row in _list_timed(content)]
        shown_s = next((end_s for end_s in ends_s if _agrees(title[1], end_s)), shown_s)
    lines: list[str] = []
    for count, name in _BATCHES_OF.findall(title[2]):
        row = _find_row(content, name)
        batches = None
        if row is not None:
            batches = _count_batches(row, shown_s)
        if batches != _to_number(count):
            lines.append(f'"{title.string}" measured: {batches} with {name}')
    for match in map(_ROW.search, sentences):
        if match and not _is_drawn_row(match, shown_s, content):
            lines.append(f'"{match.string}" measured: no row of the first {shown_s:g} s')
    return lines


def _is_drawn_row(match: re.Match[str], shown_s: float, content: Content) -> bool:
    """Whether a row of the first seconds waits as long, and has as many batches, as its text."""
    waits, batches = match.groups()
    for row in _list_timed(content):
        is_count = _count_batches(row, shown_s) == _to_number(batches)
        if is_count and _agrees_share(waits, _measure_waits(row, shown_s)):
            return True
    return False


def _count_batches(row: Content, shown_s: float) -> int:
    return len([end_s for _, end_s in row["timeline"] if end_s <= shown_s])


def _measure_waits(row: Content, shown_s: float) -> float:
    """Return the share of waiting in the first seconds of a cold run."""
    worked_s = 0.0
    for begin_s, end_s in row["timeline"]:
        worked_s += max(0.0, min(end_s, shown_s) - begin_s)
    last_end_s = row["timeline"][-1][1]
    return float(1 - worked_s / min(shown_s, last_end_s))


def _judge_busy(sentences: Sequence[str], content: Content) -> list[str]:
    """Return the findings that keep silent about a machine that is busy, or call a quiet one so."""
    step_ms = _read_step_ms(content)
    if step_ms is None:
        return []
    shortest_ms = min(row["step_ms_median"] for row in _list_timed(content))
    is_busy = shortest_ms >= _SLOW * step_ms
    lines: list[str] = []
    for sentence in sentences:
        is_finding = _GAIN.search(sentence) or _NO_GAIN.search(sentence)
        if is_finding and is_busy != (_BUSY in sentence):
            measured = f"measured: the step took {shortest_ms:.0f} ms, not {step_ms:g}"
            lines.append(f'"{sentence}" {measured}')
    return lines


def _read_step_ms(content: Content) -> float | None:
    match = re.search(r"emulated ([\d.]+) ms", content["step"])
    return float(match[1]) if match else None


def _judge_table(html: str, content: Content) -> list[str]:
    """Return the cells of the table of all figures that are not the row's own."""
    headings: list[str] = []
    lines: list[str] = []
    for line in re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL):
        texts = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line)
        cells = [unescape(text) for text in texts]
        row = _find_row(content, cells[0])
        if row is None:
            headings = cells
            continue
        shown = dict(zip(headings, cells, strict=False))
        true_values = {
            "images/s": row["images_per_second"],
            "waits, %": 100 * row["wait_share"],
            "first batch, s": row["first_batch_s"],
        }
        for heading, value in true_values.items():
            if heading in shown and not _agrees(shown[heading], value):
                sentence = f"{cells[0]}: {heading} {shown[heading]}"
                lines.append(f'"{sentence}" measured: {value:.4g}')
    return lines


def _agrees(text: str, value: float) -> bool:
    """Whether a number is the value, rounded once or twice.

    Example:
        >>> _agrees("3.8", 3.84), _agrees("1,234", 1233.7), _agrees("24", 26.0)
        (True, True, False)
    """
    decimals = len(text.partition(".")[2])
    return abs(_to_number(text) - value) <= 0.6 * 10**-decimals


def _agrees_share(percent: str, share: float) -> bool:
    return _agrees(percent, 100 * share)


def _to_number(text: str) -> float:
    return float(text.replace(",", ""))


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
    rows: list[str] = []
    for row in _list_timed(content):
        rate = f"{row['images_per_second']:.3g} images/s"
        rows.append(f"{row['title']} {rate}, waits {row['wait_share']:.1%}")
    return f"measured: {'; '.join(rows)}"
