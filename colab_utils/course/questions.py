"""Five questions before the course and after it, and the receipts of a class.

Notebook 1 asks the questions, measures the answers and saves both. Notebook 5 asks again.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from colab_utils.errors import ColabUtilsError, describe_error
from colab_utils.places import require_local_path
from colab_utils.show.charts import format_figure, plot_bars
from colab_utils.show.comparison_charts import find_gain, read_comparison
from colab_utils.show.pictures import DescribedFigure
from colab_utils.show.report import Table, make_table
from colab_utils.units import format_count

# A guess within this factor of the measurement is close.
_CLOSE = 1.25
# From the name of a question to a dict with the keys "question", "unit", "guess", "guess_before"
# and "measured". JSON can hold all of it.
Answers = dict[str, dict[str, Any]]


QUESTIONS: dict[str, tuple[str, str]] = {
    "waits_percent": (
        "Of 100 seconds, how many does the step of a plain loop wait for its batch?",
        "%",
    ),
    "faster_gpu_percent": (
        "Your GPU becomes twice as fast. How many percent more images a second does the plain "
        "loop train?",
        "%",
    ),
    "times_8_workers": (
        "How many times as fast as the plain loop does a loop with 8 workers train?",
        "times",
    ),
    "times_48_threads": ("How many times as fast as 8 threads do 48 threads read files?", "times"),
    "times_photos": (
        "With photos of 12 megapixels, how many times as fast as 24 threads do 48 threads load "
        "them?",
        "times",
    ),
}
"""The five questions by name, each with the unit of its answer."""

OWN_LOADER = "own_loader"
"""Name of the answer that ``LoaderGrade.to_answer`` returns. Nobody guesses it."""


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
            ``guess_before``, and their measurements are used where ``measured`` has none. The
            answer of an own loader is kept. Default: None.

    Example:
        >>> answers = collect_answers({"times_8_workers": "8"}, {"times_8_workers": 5.0})
        >>> answers["times_8_workers"]["guess"], answers["waits_percent"]["measured"]
        ('8', None)
    """
    answers: Answers = {}
    before = before or {}
    for name, (question, unit) in QUESTIONS.items():
        earlier = before.get(name, {})
        measurement = measured.get(name)
        if measurement is None:
            measurement = earlier.get("measured")
        answers[name] = {
            "question": question,
            "unit": unit,
            "guess": guesses.get(name, ""),
            "guess_before": earlier.get("guess", ""),
            "measured": measurement,
        }
    if OWN_LOADER in before:
        answers[OWN_LOADER] = before[OWN_LOADER]
    return answers


def describe_answers(answers: Mapping[str, Any]) -> str:
    """Return a text that compares the guess and the measurement of each question of `QUESTIONS`.

    Example:
        >>> answers = collect_answers({"waits_percent": "50"}, {"waits_percent": 96.0})
        >>> print(describe_answers(answers).splitlines()[1])
            You guessed 50, it was 96 %: more than you thought.
    """
    lines = []
    for name, answer in answers.items():
        if name == OWN_LOADER:
            continue
        lines.append(str(answer["question"]))
        measured = answer["measured"]
        if measured is None:
            lines.append("    It was not measured on this machine. Notebook 1 measures it.")
            continue
        lines.append(f"    {compare_guess(answer['guess'], measured, answer['unit'])}")
        before = read_guess(answer.get("guess_before"))
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
            if name in (*QUESTIONS, OWN_LOADER) and isinstance(answer, dict):
                answers[name] = answer
    return answers


def read_guess(guess: object) -> float | None:
    """Return the number in a field of a form, or None if the field holds no number.

    Example:
        >>> read_guess("50 %"), read_guess("many"), read_guess("")
        (50.0, None, None)
    """
    try:
        number = float(str(guess).replace("%", ""))
    except ValueError:
        return None
    return number if isfinite(number) else None


def compare_guess(guess: object, measured: float, unit: str = "") -> str:
    """Return a sentence that compares a guess with the measurement.

    If the field is empty, or its text is not a number, the sentence says that, and does not call
    the guess wrong.

    Args:
        guess: Content of a field of a form: a number, or a text such as "50" or "50 %".
        measured: The measured number.
        unit: Unit, written after the measured number. Default: "".

    Example:
        >>> compare_guess("50", 96, "%")
        'You guessed 50, it was 96 %: more than you thought.'
        >>> compare_guess("half", 96, "%")
        "'half' is no number. Type digits, such as 50 or 7.5. It was 96 %."
    """
    truth = f"{format_figure(measured)} {unit}".rstrip()
    if guess in (None, ""):
        return f"You made no guess. It was {truth}."
    number = read_guess(guess)
    if number is None:
        return f"{str(guess)!r} is no number. Type digits, such as 50 or 7.5. It was {truth}."
    verdict = "more than you thought"
    if measured / _CLOSE <= number <= measured * _CLOSE:
        verdict = "close"
    elif number > measured:
        verdict = "less than you thought"
    return f"You guessed {format_figure(number)}, it was {truth}: {verdict}."


def write_class(receipts: Sequence[str | Path], folder: str | Path) -> Table:
    """Write the chart of a class, ``receipts.png``, and return the table of its receipts.

    Args:
        receipts: ``comparison.json`` files of many machines.
        folder: Where to write the chart. The folder is made if it is missing.

    Raises:
        ColabUtilsError: No file is given, or a file is not a receipt.
    """
    target = require_local_path(folder)
    lines = read_receipts(receipts)
    target.mkdir(parents=True, exist_ok=True)
    plot_class(lines).savefig(target / "receipts.png")
    return make_table(lines)


def plot_class(lines: Sequence[Mapping[str, Any]]) -> DescribedFigure:
    """Draw how many times as fast each machine trains with its best way of loading.

    Each bar also says for which share of the time the step waits, with the first and with the best
    way of loading. The title names the fastest own loader.

    Args:
        lines: Result of `read_receipts`.
    """
    values = dict[str, float]()
    notes = dict[str, str]()
    for number, line in enumerate(lines, start=1):
        name = f"{number}. {line['receipt']}: {line['machine']}"
        values[name] = line["times as fast"]
        notes[name] = f"waits {line['waits before']:.0%} → {line['waits after']:.0%}"
    gain = format_figure(median(values.values()))
    title = f"{format_count(len(lines), 'receipt')}: training is {gain} times as fast (median)"
    winner = max(lines, key=lambda line: line["own loader"] or 0)
    if winner["own loader"]:
        times = format_figure(winner["own loader"])
        title += f". The fastest own loader: {winner['receipt']}, {times} times the plain loop"
    unit = "times as many images/s as before"
    return plot_bars(values, title=title, unit=unit, notes=notes, highlight=values)


def read_receipts(receipts: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Return a line for each receipt: its name, the machine, what its first and its best strategy
    reached, and the speed of an own loader that passes all trials. The machine that gains most
    comes first.

    The name is that of the file, or of its folder if the file is named ``comparison.json``.

    Raises:
        ColabUtilsError: No file is given, or a file is not a receipt.
    """
    if not receipts:
        raise ColabUtilsError("There are no receipts. Name at least one comparison.json.")
    return sorted(map(_read_receipt, receipts), key=lambda line: -line["times as fast"])


def _read_receipt(receipt: str | Path) -> dict[str, Any]:
    path = require_local_path(receipt).absolute()
    try:
        content = read_comparison(json.loads(path.read_text(encoding="utf-8")))
        machine = content["machine"]
        busy = ", busy with other work" if content.get("busy") else ""
        before, after = find_gain(content)
        own_loader = content.get("questions", {}).get(OWN_LOADER, {})
        return {
            "receipt": path.parent.name if path.stem == "comparison" else path.stem,
            "machine": f"{machine['gpu'] or 'no GPU'}, {machine['cores']} cores{busy}",
            "step": content["step"],
            "drive": content["drive"].partition(",")[0],
            "before": before["title"],
            "waits before": round(before["wait_share"], 3),
            "after": after["title"],
            "waits after": round(after["wait_share"], 3),
            "times as fast": round(after["images_per_second"] / before["images_per_second"], 1),
            "own loader": read_guess(own_loader.get("times_as_fast")),
        }
    except Exception as error:
        raise ColabUtilsError(
            f"{path} is no receipt ({describe_error(error)}). Name a comparison.json that compare "
            "wrote."
        ) from None
