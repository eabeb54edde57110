"""A training step that takes a given time, for a machine without a GPU."""

import zlib
from time import perf_counter, sleep, thread_time
from typing import Any

from colab_utils.require import require_number

# A training process uses this share of a core to launch kernels.
_BUSY = 0.9
# If a step takes this many times its length or more, other processes had its core.
_SLOW = 1.3
# To keep the core busy, the step computes checksums of this block. They release Python's lock, as
# kernel launches do.
_BLOCK = bytes(32_768)


class EmulatedStep:
    """A step for a machine without a GPU. Show its figures with the label *emulated*.

    It uses the share ``busy`` of a core for ``step_ms`` milliseconds, and takes longer if other
    processes use the core. A step that only sleeps would leave the whole core to the loader, and so
    every loader would look fast.

    Args:
        step_ms: Length of a step in milliseconds, above 0.
        busy: Share of a core that the step uses, above 0. Default: 0.9.

    Raises:
        ColabUtilsError: ``step_ms`` is not above 0.

    Example:
        >>> step = EmulatedStep(5)
        >>> step([], [])
        >>> print(step)
        emulated 5 ms
    """

    emulated = True

    def __init__(self, step_ms: float, busy: float = _BUSY) -> None:
        self.step_ms = require_number("step_ms", step_ms, above=0)
        self.busy = busy

    def __call__(self, images: Any, targets: Any = None) -> None:
        """Spend the time of one step.

        It takes ``(images, targets)`` or one packed batch, and uses neither.
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
    """Return a warning if a step took at least 1.3 times its length, else "".

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
