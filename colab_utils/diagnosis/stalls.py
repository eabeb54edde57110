"""Describe a stall in words: which process has the batch that does not come, and why."""

from dataclasses import dataclass
from typing import NamedTuple

from colab_utils.diagnosis.processes import Activity
from colab_utils.loading.workers import WorkerJob

# A message names at most this many samples of a batch, and this many lines of a stack.
_NAMED_SAMPLES = 16
_NAMED_LINES = 4


class _Finding(NamedTuple):
    """The words for a verdict, and what to do about it."""

    text: str
    cure: str


FINDINGS = {
    # What to do about a dead worker depends on how it ended. `Stall.cure` says it.
    "dead": _Finding("ended ({call})", ""),
    "read": _Finding(
        "is stuck in a read ({call} of {file})",
        "Leave this file out, copy it to the disk, or remount Drive.",
    ),
    "lock": _Finding(
        "waits for a lock",
        "The lock was held when the worker was forked: start threads after the workers.",
    ),
    "lost": _Finding(
        "is idle, but its batch never arrived",
        "If /dev/shm is full, use smaller batches or make_loader.",
    ),
    "waiting": _Finding(
        "waits in {call}",
        "Find out why this call does not end. It needs a timeout.",
    ),
    "slow": _Finding(
        "is at work, only slow",
        "Wait, or make this sample smaller.",
    ),
}


@dataclass(frozen=True)
class Stall:
    """A batch that did not come in time, and why, as far as that is known."""

    verdict: str
    """Why the batch does not come, a key of `FINDINGS`. The process that has the batch is "dead",
    is stuck in a "read", waits for a "lock", is "waiting" in another system call, or is only
    "slow". If the process is idle, the batch was "lost" after it was loaded.
    """
    waited_s: float
    job: WorkerJob
    """The worker that has the batch. The number of the batch is known only for our own loader."""
    seen: Activity
    """What the worker, or this process, does. For a dead worker, ``call`` is how it ended."""
    file: str
    """The file that the sample is read from; "" if it is not known."""
    cure: str
    """What to do."""

    @property
    def why(self) -> str:
        """Return which process has the batch, and why the batch does not come."""
        if self.job.worker is None:
            who = "this process"
        else:
            who = f"worker {self.job.worker} (pid {self.job.pid})"
        finding = FINDINGS[self.verdict].text
        what = finding.format(call=self.seen.call or "a call", file=self.file)
        waited = f"No batch came for {self.waited_s:.3g} s"
        return f"{waited}: {who} {what}{self._describe_place()}."

    def __str__(self) -> str:
        return f"{self.why} {self.cure}"

    def _describe_place(self) -> str:
        """Return the sample, its file, and the lines of Python, as far as they are known."""
        place = ""
        if self.seen.sample is not None:
            place = f", at sample {self.seen.sample}"
            # For the verdict "read", the finding has named the file already.
            if self.file and self.verdict != "read":
                place += f" ({self.file})"
        elif self.job.indices:
            samples = ", ".join(map(str, self.job.indices[:_NAMED_SAMPLES]))
            place = f", at one of samples {samples}"
        if self.seen.stack:
            lines = [line.rpartition("/")[2] for line in self.seen.stack[:_NAMED_LINES]]
            place += f", in {' < '.join(lines)}"
        return place
