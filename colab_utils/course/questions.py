"""Five questions before the course and after it, answered by the learner's own measurements.

Notebook 1 asks the questions, measures the answers and saves both. Notebook 5 asks again.
`plot_guesses` shows the guesses of a whole class.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from colab_utils.course.guesses import compare_guess, read_guess
from colab_utils.show.charts import BLUE, GREY, ORANGE, format_figure
from colab_utils.show.pictures import DescribedFigure, make_figure
from colab_utils.units import format_count

# A histogram has this many bars for each group.
_BINS = 20
# The groups of a histogram: from a key of an answer, see `Answers`, to the word in the legend.
_GROUPS = {
    "guess_before": "before",
    "guess": "after",
    "measured": "measured",
}
# From the name of a question to a dict with the keys "question", "unit", "guess" and "measured". If
# the question was asked before, there is the key "guess_before" too. JSON can hold all of it.
Answers = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Question:
    """A question that a measurement answers."""

    text: str
    unit: str
    """Unit of the guess and of the measurement."""


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
        "How many times as fast as the plain loop does a loop with 8 workers train?", "times"
    ),
    "times_48_threads": Question(
        "How many times as fast as 8 threads do 48 threads read files?", "times"
    ),
    "times_photos": Question(
        "With photos of 12 megapixels, how many times as fast as 24 threads do 48 threads load "
        "them?",
        "times",
    ),
}
"""The five questions, by name."""


def collect_answers(
    guesses: Mapping[str, object],
    measured: Mapping[str, float | None],
    *,
    before: Mapping[str, Any] | None = None,
) -> Answers:
    """Return the guess and the measurement of each question, in the order of `QUESTIONS`.

    Args:
        guesses: Dict from the name of a question to what was typed into its field in
            the notebook.
        measured: Dict from the name of a question to its measured answer. The answer is None or
            missing if nothing was measured.
        before: Answers from an earlier time (see `read_answers`). Their guesses become
            ``guess_before``, and their measurements are used where ``measured`` has none. Default:
            None.

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
    """Return a text that compares the guess and the measurement of each question.

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
            lines.append("    It was not measured on this machine. Notebook 1 measures it.")
            continue
        lines.append(f"    {compare_guess(answer['guess'], measured, answer['unit'])}")
        before = read_guess(answer.get("guess_before", ""))
        if before is not None:
            lines.append(f"    Before the course you guessed {format_figure(before)}.")
    return "\n".join(lines)


def read_answers(drive: str | Path) -> Answers:
    """Return the answers that notebook 1 saved, or an empty dict if it saved none.

    Args:
        drive: Slow folder of the workspace.
    """
    answers: Answers = {}
    with suppress(OSError, ValueError, AttributeError):
        text = (Path(drive) / "results" / "01.json").read_text(encoding="utf-8")
        for name, answer in json.loads(text).get("questions", {}).items():
            if name in QUESTIONS and isinstance(answer, dict):
                answers[name] = answer
    return answers


def plot_guesses(receipts: Sequence[str | Path]) -> DescribedFigure | None:
    """Draw a histogram for each question: the guesses and the measurements of a class.

    A guess that is not a number is left out.

    Args:
        receipts: ``comparison.json`` files. Those without answers (see `write_receipt`) are left
            out.

    Returns:
        The figure, or None if no receipt holds answers.
    """
    contents = [json.loads(Path(receipt).read_text(encoding="utf-8")) for receipt in receipts]
    learners = [content["questions"] for content in contents if "questions" in content]
    if not learners:
        return None
    people = format_count(len(learners), "person", "people")
    title = f"What {people} guessed before the course and after it"
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
    people = format_count(len(numbers), "person", "people")
    return f"{word}: {people}, median {format_figure(median(numbers))}"
