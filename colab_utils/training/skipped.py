"""Steps that left the weights as they were, since their loss or a gradient was not finite."""

import math
import warnings
from collections.abc import Sequence

from colab_utils.errors import ColabUtilsWarning

# So many different batches in a row are not to blame: the weights are.
_MOST_IN_A_ROW = 10
# float16 halves its scale of 2**16 at each of them, and is then where no gradient overflows.
_MOST_WITH_SCALE = 40


class SkippedSteps:
    """Counts the steps that were skipped, tells of them, and says when training is in vain.

    Where float16 overflows while the loss is finite, it only looks for its scale: such a step is
    not told.

    Args:
        has_scale: Whether the gradients are scaled, as float16 needs it.

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
        # Those of the first one that was told, and of the first one in a row.
        self._first = ""
        self._first_in_a_row = ""

    def add(self, step: int, *, loss: float, ids: Sequence[int]) -> None:
        """Count a step that was skipped, of the images with these ids."""
        text = f"step {step}, of the images with the ids {', '.join(map(str, ids))}"
        if not self.in_a_row:
            self._first_in_a_row = text
        self.in_a_row += 1
        if self._has_scale and math.isfinite(loss):
            return
        self.count += 1
        self._first = self._first or text

    def warn(self, *, is_last: bool) -> None:
        """Tell of the first steps that were skipped, and at the end of a run of all of them."""
        if self.count == self._told or (self._told and not is_last):
            return
        self._told = self.count
        steps = "1 step was" if self.count == 1 else f"{self.count} steps were"
        text = (
            f"{steps} skipped, for a loss or a gradient that was no finite number: "
            f"{self._first}{', is the first' if self.count > 1 else ''}. "
            "The weights are as they were before. Look at these images; where it goes on, "
            "pass a lower learning_rate"
        )
        warnings.warn(text, ColabUtilsWarning, stacklevel=2)

    def find_failure(self, *, trained: int, is_last: bool) -> str:
        """Return in words that nothing but skipped steps comes, or "" where it does.

        Args:
            trained: Steps of this session.
            is_last: Whether the run ends after them. At least half of them must not be skipped
                then.
        """
        limit = _MOST_WITH_SCALE if self._has_scale else _MOST_IN_A_ROW
        if self.in_a_row >= limit:
            return f"none in the last {self.in_a_row} steps, from {self._first_in_a_row}, on"
        if is_last and self.count and 2 * self.count >= trained:
            return f"none in {self.count} of {trained} steps, first in {self._first}"
        return ""
