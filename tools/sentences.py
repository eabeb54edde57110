"""Sentences of the notebooks that hold a figure, judged by the run beside them.

An author marks such a sentence with a comment, which no page shows, in the same cell:

    <!-- check "90 % to 98 %": 0.90 <= waits <= 0.98 if SCENE == "bad day" -->

First the words that are judged, as they stand in the cell; then a comparison in Python, of names
that the notebook has where the sentence stands. The numbers of the words stand in the comparison,
too, so that a text cannot be changed alone.

Below a sentence that the run contradicts, the page has a note. That is no failure: the machine may
have been busy, or the data may be a user's own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from colab_utils.errors import ColabUtilsError

__all__ = ["Check", "Judgement", "add_notes", "judge", "read_checks", "split_sentences"]

_MARK = re.compile(r"<!--\s*check\b(.*?)\s*-->", re.DOTALL)
_CHECK = re.compile(r'\s+"([^"]+)":\s*(\S.*)', re.DOTALL)
_HOW = 'Write <!-- check "the words of the text": 0.90 <= a_name <= 0.98 --> in the same cell.'
_PARAGRAPHS = re.compile(r"\n\s*\n")
_NUMBER = r"\d[\d,]*(?:\.\d+)?"
# From this share of the cores on, the work of other programs explains another measurement.
_BUSY = 0.2


@dataclass(frozen=True)
class Check:
    """A sentence of a notebook, and the comparison that holds where the sentence is true."""

    notebook: str
    """Name of the notebook."""
    cell: str
    """Id of the cell."""
    words: str
    """What is judged, as the cell has it."""
    sentence: str
    """The sentence, or the row of a table, that holds the words."""
    comparison: str
    """In Python."""
    operands: tuple[str, ...]
    """Of these, what the run measures: what holds a name."""
    condition: str
    """In Python: where the sentence is meant; "True" where it always is."""

    def make_expression(self) -> str:
        """Return what a kernel evaluates: whether the comparison holds, and what was measured.

        Example:
            >>> words = "under 5 s"
            >>> check = Check("01", "see", words, words, "took_s < 5", ("took_s",), "True")
            >>> check.make_expression()
            "(bool(took_s < 5), [format(took_s, '.4g')]) if True else (None, [])"
        """
        measured = ", ".join(f"format({operand}, '.4g')" for operand in self.operands)
        return f"(bool({self.comparison}), [{measured}]) if {self.condition} else (None, [])"


@dataclass(frozen=True)
class Judgement:
    """What a run says of a sentence."""

    check: Check
    holds: bool | None
    """None where the sentence is not meant for this run, or could not be judged."""
    measured: str
    """The numbers that the run measured."""
    error: str = ""
    """Why it could not be judged."""
    others: float = 0.0
    """Share of the cores that other programs had, from the sentence judged before to this one."""

    @property
    def is_contradicted(self) -> bool:
        """Whether the run says something else, or nothing, because its names are not there."""
        return self.holds is False or bool(self.error)

    @property
    def anchor(self) -> str:
        """Where the note of a contradicted sentence stands on its page."""
        return re.sub(r"\W+", "-", f"{self.check.cell} {self.check.words}")

    def write_note(self) -> str:
        """Return what a page says below a contradicted sentence, in Markdown."""
        reason = "Your machine was busy here, or it or your data are not like ours."
        if self.others >= _BUSY:
            reason = (
                f"Your machine was busy here: other programs had {self.others:.0%} of its cores."
            )
        result = f"this run measured `{self.measured}`."
        if self.error:
            reason = "This sentence could not be judged."
            result = f"this run has no such number (`{self.error}`)."
        words = self.check.words
        return f'> <a id="{self.anchor}"></a>**{reason}** The text says “{words}”, {result}'

    def __str__(self) -> str:
        verdict = f"measured: {self.measured}"
        if self.error:
            verdict = f"could not be judged: {self.error}"
        check = self.check
        place = f"{check.notebook}, cell {check.cell}"
        return f'{place}: "{check.words}" of "{check.sentence}" {verdict}'


def read_checks(notebook: Any, name: str) -> dict[str, list[Check]]:
    """Return the checks of a notebook, by the id of their cell.

    Args:
        notebook: an nbformat notebook.
        name: of the notebook, for messages.

    Raises:
        ColabUtilsError: a check is not written as it should be, or does not fit its text.

    Example:
        >>> import nbformat.v4 as v4
        >>> source = 'It takes under 5 s. <!-- check "under 5 s": took_s < 5 -->'
        >>> cell = v4.new_markdown_cell(source, id="see")
        >>> [check.sentence for check in read_checks(v4.new_notebook(cells=[cell]), "01")["see"]]
        ['It takes under 5 s.']
    """
    checks: dict[str, list[Check]] = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            marks = _MARK.findall(cell.source)
            if marks:
                checks[cell.id] = [_read_check(mark, cell, name) for mark in marks]
    return checks


def _read_check(mark: str, cell: Any, name: str) -> Check:
    place = f"{name}, cell {cell.id}"
    match = _CHECK.fullmatch(mark)
    if not match:
        raise ColabUtilsError(f"{place}: this check has no words or no comparison. {_HOW}")
    words = _join(match[1])
    code = _join(match[2])
    compare, condition = _parse_comparison(code, place)
    comparison = ast.unparse(compare)
    sides = [compare.left, *compare.comparators]
    operands = tuple(ast.unparse(side) for side in sides if _has_name(side))
    sentences = [text for text in split_sentences(cell.source) if words in text]
    if not sentences:
        raise ColabUtilsError(
            f'{place}: the text has no words "{words}". Quote it as it stands in this cell.'
        )
    missing = _find_missing(words, comparison)
    if missing:
        raise ColabUtilsError(
            f'{place}: the words "{words}" say {missing[0]}, the comparison {comparison} does not. '
            "Write the same numbers in both: a percentage as 90 or as 0.90."
        )
    return Check(name, cell.id, words, sentences[0], comparison, operands, condition)


def _parse_comparison(code: str, place: str) -> tuple[ast.Compare, str]:
    """Return a comparison, and in Python the condition behind its ``if``."""
    node: ast.expr | None = None
    condition = "True"
    for ending in ("", " else None"):
        try:
            node = ast.parse(code + ending, mode="eval").body
        except SyntaxError:
            continue
        break
    if isinstance(node, ast.IfExp):
        condition = ast.unparse(node.test)
        node = node.body
    if not isinstance(node, ast.Compare) or not _has_name(node):
        raise ColabUtilsError(f"{place}: {code} is no comparison with a measured name. {_HOW}")
    return node, condition


def _has_name(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Name) for part in ast.walk(node))


def _find_missing(words: str, comparison: str) -> list[str]:
    """Return the numbers of the words that the comparison lacks, as they are and as shares."""
    known = {_to_number(text) for text in re.findall(_NUMBER, comparison)}
    missing: list[str] = []
    for text in re.findall(_NUMBER, words):
        value = _to_number(text)
        share = round(value / 100, 9)
        if value not in known and share not in known:
            missing.append(text)
    return missing


def _to_number(text: str) -> float:
    return float(text.replace(",", ""))


def split_sentences(source: str) -> list[str]:
    """Return the sentences of a cell, and the rows of its tables, without its checks."""
    text = _MARK.sub("", source)
    blocks: list[str] = []
    for paragraph in _PARAGRAPHS.split(text):
        lines = paragraph.splitlines()
        is_table = any(re.fullmatch(r"[|\s:-]+", line) for line in lines)
        if is_table:
            # The headings and the line below them are no sentence.
            blocks.extend(lines[2:])
        else:
            blocks.extend(re.split(r"(?<=[.!?])\s+", paragraph))
    return [_join(block) for block in blocks if block.strip()]


def _join(text: str) -> str:
    """Return a text in one line, with single spaces."""
    return " ".join(text.split())


def add_notes(notebook: Any, judgements: Sequence[Judgement]) -> None:
    """Write a note below each paragraph with a contradicted sentence.

    Args:
        notebook: an nbformat notebook, changed in place.
        judgements: of its sentences.
    """
    contradicted = [judgement for judgement in judgements if judgement.is_contradicted]
    for cell in notebook.cells:
        notes = [judgement for judgement in contradicted if judgement.check.cell == cell.id]
        if notes:
            cell.source = _add_notes(cell.source, notes)


def _add_notes(source: str, judgements: Sequence[Judgement]) -> str:
    parts: list[str] = []
    for paragraph in _PARAGRAPHS.split(source):
        parts.append(paragraph)
        text = _join(_MARK.sub("", paragraph))
        for judgement in judgements:
            if judgement.check.sentence in text:
                parts.append(judgement.write_note())
    return "\n\n".join(parts)


def judge(checks: Sequence[Check], answers: Mapping[str, Mapping[str, Any]]) -> list[Judgement]:
    """Return the judgement of each check.

    Args:
        checks: of one cell.
        answers: what the kernel answered to ``make_expression`` of each check, by its number, as
            the ``user_expressions`` of a reply of Jupyter's have it.
    """
    judgements: list[Judgement] = []
    for number, check in enumerate(checks):
        answer = answers.get(str(number), {})
        if answer.get("status") == "ok":
            judgements.append(_read_answer(check, answer["data"]["text/plain"]))
        else:
            name = answer.get("ename", "no answer")
            reason = f"{name}: {answer.get('evalue', '')}"
            judgements.append(Judgement(check, None, "", reason))
    return judgements


def _read_answer(check: Check, text: str) -> Judgement:
    """Return the judgement of what a kernel wrote as the value of ``make_expression``."""
    holds, values = ast.literal_eval(text)
    if holds is None:
        return Judgement(check, None, "")
    measured: list[str] = []
    for operand, value in zip(check.operands, values, strict=True):
        measured.append(f"{operand} = {value}")
    return Judgement(check, holds, ", ".join(measured))
