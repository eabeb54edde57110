"""What a learner guessed, beside what was measured."""

from math import isfinite

from colab_utils.show.charts import format_figure

# A guess within this factor of the measurement is close.
_CLOSE = 1.25


def read_guess(guess: object) -> float | None:
    """Return the number in a form's field, and None where there is none.

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
    """Return a sentence that sets a guess beside what was measured.

    A field that is empty, or holds no number, is named: it is no wrong guess.

    Args:
        guess: what a form's field holds: a number, or a text such as "50" or "50 %".
        measured: the number that was asked for.
        unit: stands after it.

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
