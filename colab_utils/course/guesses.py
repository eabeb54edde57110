"""A comparison of what a learner guessed with what was measured."""

from math import isfinite

from colab_utils.show.charts import format_figure

# A guess within this factor of the measurement is close.
_CLOSE = 1.25


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
