"""Steps that were skipped because their loss or a gradient was not finite."""

import math
import warnings
from collections.abc import Sequence

from colab_utils.errors import ColabUtilsWarning

# After so many skipped steps in a row, the weights are to blame, and not the batches.
_MOST_IN_A_ROW = 10
# With float16, each skipped step halves the scale, from 2**16 on. After so many steps the scale is
# too small to be the cause.
_MOST_WITH_SCALE = 40


class SkippedSteps:
    """Counts skipped steps, warns of them, and finds out when training is in vain.

    With float16, a gradient may overflow while the loss is finite. The scaler then tries a smaller
    scale. This is usual, so such a step causes no warning.

    Args:
        has_scale: Whether the gradients are scaled, as float16 needs.

    Example:
        >>> skipped = SkippedSteps(has_scale=False)
        >>> skipped.add(7, loss=math.nan, ids=[3, 5])
        >>> skipped.count, skipped.in_a_row
        (1, 1)
    """

    def __init__(self, *, has_scale: bool) -> None:
        self.count = 0
        self.in_a_row = 0
        self._has_scale = has_scale
        self._told = 0
        # The first step to warn of, and the first of the steps skipped in a row, each as text.
        self._first = ""
        self._first_in_a_row = ""

    def add(self, step: int, *, loss: float, ids: Sequence[int]) -> None:
        """Count a skipped step. ``ids`` are the ids of its images."""
        text = f"step {step}, of the images with the ids {', '.join(map(str, ids))}"
        if not self.in_a_row:
            self._first_in_a_row = text
        self.in_a_row += 1
        if self._has_scale and math.isfinite(loss):
            return
        self.count += 1
        self._first = self._first or text

    def warn(self, *, is_last: bool) -> None:
        """Warn when the first steps are skipped, and again of all of them at the end of a run."""
        if self.count == self._told or (self._told and not is_last):
            return
        self._told = self.count
        steps = "1 step was" if self.count == 1 else f"{self.count} steps were"
        text = (
            f"{steps} skipped, because a loss or a gradient was not finite. "
            f"{'The first' if self.count > 1 else 'It'} was {self._first}. "
            "The weights are as they were before. Look at these images. If more steps are "
            "skipped, pass a lower learning_rate"
        )
        warnings.warn(text, ColabUtilsWarning, stacklevel=2)

    def find_failure(self, *, trained: int, is_last: bool) -> str:
        """Return a text if too many steps are skipped for training to go on, else "".

        Args:
            trained: Steps of this session.
            is_last: Whether the run ends here. Then half of the session's steps are too many.
        """
        limit = _MOST_WITH_SCALE if self._has_scale else _MOST_IN_A_ROW
        if self.in_a_row >= limit:
            return (
                f"none in the last {self.in_a_row} steps. "
                f"The first of these was {self._first_in_a_row}"
            )
        if is_last and self.count and 2 * self.count >= trained:
            return f"none in {self.count} of {trained} steps. The first of these was {self._first}"
        return ""
