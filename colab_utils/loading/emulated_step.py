"""A step that takes a given time, for a machine without a GPU."""

import math
import zlib
from time import perf_counter, sleep, thread_time
from typing import Any

from colab_utils.require import require_number

# Of a core: what a training process takes to launch kernels.
_BUSY = 0.9
# A step that takes so many times its length was kept from its core.
_SLOW = 1.3
# A little work that releases Python's lock, as launching kernels does.
_BLOCK = bytes(32_768)


class EmulatedStep:
    """A placeholder step for a machine without a GPU; label its figures *emulated*.

    It uses ``busy`` of a core for ``step_ms`` milliseconds (both more than 0), and longer where
    others take the core away: a step that only sleeps flatters every loader. Raises ColabUtilsError
    for a step that takes no time.

    Example:
        >>> step = EmulatedStep(5)
        >>> step([], [])
        >>> print(step)
        emulated 5 ms
    """

    emulated = True

    def __init__(self, step_ms: float, busy: float = _BUSY) -> None:
        self.step_ms = require_number("step_ms", step_ms, above=0, below=math.inf)
        self.busy = busy

    def __call__(self, images: Any, targets: Any = None) -> None:
        """Spend the time of one step; takes ``(images, targets)`` or one packed batch, and looks at
        neither.
        """
        length_s = self.step_ms / 1000
        began_s = perf_counter()
        cpu_began_s = thread_time()
        # Work and rest alternate in slices of 2 ms.
        cpu_s = 0.0
        while cpu_s < self.busy * length_s:
            slice_end_s = cpu_began_s + min(cpu_s + 0.002, self.busy * length_s)
            while thread_time() < slice_end_s:
                zlib.crc32(_BLOCK)
            cpu_s = thread_time() - cpu_began_s
            end_s = began_s + min(cpu_s / self.busy, length_s)
            sleep(max(0.0, end_s - perf_counter()))

    def __str__(self) -> str:
        return f"emulated {self.step_ms:g} ms"


def describe_busy(step_ms: float, measured_ms: float) -> str:
    """Say that this machine is busy, where a step took 1.3 times its length or more; else nothing.

    Example:
        >>> describe_busy(100, 104)
        ''
        >>> describe_busy(100, 250)
        'This machine is busy with other work: the step took 250 ms, not 100. Run again.'
    """
    if measured_ms < _SLOW * step_ms:
        return ""
    return (
        f"This machine is busy with other work: the step took {measured_ms:.0f} ms, "
        f"not {step_ms:g}. Run again."
    )
