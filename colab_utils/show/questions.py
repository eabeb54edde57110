"""Five questions before the course and after it, answered by the learner's own measurements.

Notebook 1 asks, measures and publishes; notebook 5 asks again; `plot_guesses` shows a class what
it believed.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from colab_utils.show.charts import BLUE, GREY, ORANGE, format_figure
from colab_utils.show.guesses import compare_guess, read_guess
from colab_utils.show.pictures import DescribedFigure, make_figure

# Bars of a histogram, and what is drawn.
_BINS = 20
_GROUPS = {
    "guess_before": "before",
    "guess": "after",
    "measured": "measured",
}
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
        "With photos of 12 megapixels, how many times the images a second do 24 threads bring, "
        "beside 12?",
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
            You guessed 50, it was 96 %: more than you thought.
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
    """Draw a histogram of each question: what a class guessed and measured.

    A guess that is no number is left out.

    Args:
        receipts: ``comparison.json`` files, some of which hold answers (`write_receipt`).

    Returns:
        The figure; None where no receipt holds answers.
    """
    contents = [json.loads(Path(receipt).read_text(encoding="utf-8")) for receipt in receipts]
    learners = [content["questions"] for content in contents if "questions" in content]
    if not learners:
        return None
    title = f"What {len(learners)} people guessed before the course and after it"
    figure = make_figure(title, width=12, height=14)
    axes = figure.subplots(len(QUESTIONS))
    for axis, (name, question) in zip(axes, QUESTIONS.items(), strict=True):
        groups = [_list_numbers(learners, name, key) for key in _GROUPS]
        labels = list(map(_describe_group, _GROUPS.values(), groups))
        axis.hist(groups, bins=_BINS, color=[GREY, BLUE, ORANGE], label=labels)
        axis.set_title(f"{question.text} ({question.unit})", loc="left", fontsize=13)
        axis.set_ylabel("people", fontsize=12)
        axis.legend(fontsize=12)
        figure.words.append(f"{question.text} {', '.join(labels)}")
    return figure


def _list_numbers(learners: Sequence[Answers], name: str, key: str) -> list[float]:
    numbers = [read_guess(answers.get(name, {}).get(key, "")) for answers in learners]
    return [number for number in numbers if number is not None]


def _describe_group(word: str, numbers: Sequence[float]) -> str:
    if not numbers:
        return f"{word}: nobody"
    return f"{word}: {len(numbers)} people, median {format_figure(median(numbers))}"
