"""Five questions before the course and after it, answered by the learner's own measurements.

Notebook 1 asks, measures and publishes; notebook 5 asks again; `plot_guesses` shows a class what
it believed.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from colab_utils.show.charts import BLUE, GREY, ORANGE, format_figure
from colab_utils.show.guesses import compare_guess, read_guess
from colab_utils.show.pictures import DescribedFigure, make_figure

# Bars of a histogram.
_BINS = 20
# By the name of a question: "question", "unit", "guess", "measured" and, from the second time on,
# "guess_before". It can be written as JSON.
Answers = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Question:
    """A question that a measurement answers."""

    text: str
    unit: str
    """Of the guess and of the measurement."""


QUESTIONS = {
    "waits_percent": Question(
        "Of 100 seconds, how many does the step of a plain loop wait for its batch?", "%"
    ),
    "faster_gpu_percent": Question(
        "Your GPU becomes twice as fast. How many percent more images a second does the plain "
        "loop train?",
        "%",
    ),
    "times_8_workers": Question(
        "How many times the images a second of the plain loop do 8 workers bring?", "times"
    ),
    "times_48_threads": Question(
        "How many times as many files a second do 48 threads read as 8 threads?", "times"
    ),
    "times_photos": Question(
        "The images are photos of 12 megapixels. How many times the images a second do 24 threads "
        "bring, beside 8?",
        "times",
    ),
}
"""The five, by name."""


def collect_answers(
    guesses: Mapping[str, object],
    measured: Mapping[str, float | None],
    *,
    before: Mapping[str, Any] | None = None,
) -> Answers:
    """Set guesses and measurements side by side, in the order of `QUESTIONS`.

    Args:
        guesses: what stands in the form, by the name of the question.
        measured: the answers; None, or no entry, where nothing was measured.
        before: answers of an earlier time (`read_answers`): their guesses are kept as
            ``guess_before``, and they give the measurements that ``measured`` lacks.

    Example:
        >>> answers = collect_answers({"times_8_workers": "8"}, {"times_8_workers": 5.0})
        >>> answers["times_8_workers"]["guess"], answers["waits_percent"]["measured"]
        ('8', None)
    """
    answers: Answers = {}
    for name, question in QUESTIONS.items():
        earlier = (before or {}).get(name, {})
        measurement = measured.get(name)
        if measurement is None:
            measurement = earlier.get("measured")
        answers[name] = {
            "question": question.text,
            "unit": question.unit,
            "guess": guesses.get(name, ""),
            "measured": measurement,
        }
        if before is not None:
            answers[name]["guess_before"] = earlier.get("guess", "")
    return answers


def describe_answers(answers: Mapping[str, Any]) -> str:
    """Return each question with its guess beside what was measured.

    Example:
        >>> answers = collect_answers({"waits_percent": "50"}, {"waits_percent": 96.0})
        >>> print(describe_answers(answers).splitlines()[1])
            You guessed 50 %, it was 96 %: more than you thought.
    """
    lines = []
    for answer in answers.values():
        lines.append(str(answer["question"]))
        measured = answer["measured"]
        if measured is None:
            lines.append("    It was not measured on this machine: notebook 1 does.")
            continue
        lines.append(f"    {compare_guess(answer['guess'], measured, answer['unit'])}")
        before = read_guess(answer.get("guess_before", ""))
        if before is not None:
            lines.append(f"    Before the course you guessed {format_figure(before)}.")
    return "\n".join(lines)


def read_answers(drive: str | Path) -> Answers:
    """Return what notebook 1 published of the questions; nothing where it did not, or is half done.

    Args:
        drive: the slow folder of the workspace.
    """
    answers: Answers = {}
    with suppress(OSError, ValueError, AttributeError):
        text = (Path(drive) / "results" / "01.json").read_text(encoding="utf-8")
        for name, answer in json.loads(text).get("questions", {}).items():
            if name in QUESTIONS and isinstance(answer, dict):
                answers[name] = answer
    return answers


def plot_guesses(receipts: Sequence[str | Path]) -> DescribedFigure | None:
    """Draw what a class believed, before the course and after it, beside what it measured.

    A guess that is no number is left out; the heading of each question says how many are drawn.

    Args:
        receipts: ``comparison.json`` files, some of which hold answers (`write_receipt`).

    Returns:
        A histogram for each question that anybody answered; None where nobody did.
    """
    panels = {}
    for name, question in QUESTIONS.items():
        answers = []
        for receipt in receipts:
            content = json.loads(Path(receipt).read_text(encoding="utf-8"))
            answers.append(content.get("questions", {}).get(name, {}))
        before = _list_numbers(answers, "guess_before")
        after = _list_numbers(answers, "guess")
        if before or after:
            panels[question] = (before, after, _list_numbers(answers, "measured"))
    if not panels:
        return None
    title = f"What {len(receipts)} people guessed before the course, and after it"
    figure = make_figure(title, width=12, height=1 + 2.4 * len(panels))
    axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for axis, (question, groups) in zip(axes, panels.items(), strict=True):
        before, after, measured = groups
        _draw_histogram(axis, before, after, measured)
        axis.set_title(question.text, loc="left", fontsize=14, parse_math=False)
        axis.set_xlabel(f"{question.unit} guessed", fontsize=12)
        figure.words.append(_describe_guesses(question, before, after, measured))
    axes[0].legend(fontsize=12)
    return figure


def _list_numbers(answers: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    numbers = [read_guess(answer.get(key, "")) for answer in answers]
    return [number for number in numbers if number is not None]


def _draw_histogram(
    axis: Axes, before: Sequence[float], after: Sequence[float], measured: Sequence[float]
) -> None:
    numbers = [*before, *after, *measured]
    edges = np.linspace(min(0.0, *numbers), max(1.0, *numbers), _BINS + 1)
    labels = [f"{len(before)} before", f"{len(after)} after"]
    axis.hist([before, after], bins=list(edges), color=[GREY, BLUE], label=labels)
    if measured:
        middle = statistics.median(measured)
        label = f"measured: {format_figure(middle)} (median)"
        axis.axvline(middle, color=ORANGE, linewidth=4, label=label)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_ylabel("people", fontsize=12)
    axis.spines[["top", "right"]].set_visible(False)


def _describe_guesses(
    question: Question, before: Sequence[float], after: Sequence[float], measured: Sequence[float]
) -> str:
    medians = []
    for when, numbers in (("before", before), ("after", after), ("measured", measured)):
        if numbers:
            middle = format_figure(statistics.median(numbers))
            medians.append(f"{when} {middle} {question.unit} ({len(numbers)} people)")
    return f"{question.text} Medians: {', '.join(medians)}"
