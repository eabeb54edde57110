"""The causes of a slow loop, and of a batch that does not come, with what to do about each."""

from dataclasses import dataclass
from typing import Any

from colab_utils.diagnosis.processes import Activity
from colab_utils.loading.workers import WorkerJob

# A message names at most this many lines of a stack.
_NAMED_LINES = 4


CURES = {
    "read": "Read many files at once: a CocoFolder in make_loader does so, after some seconds in "
    "which it finds out how many; or give your dataset the __getitems__ of docs/SCRIPT.md. Then "
    "store the data on the local disk, in few large files: preprocess, and copy. Large images are "
    "limited by the bandwidth: shrink them once, offline (preprocess).",
    "work": "Make a sample cheaper, or do its work once, offline. Run transforms on the device, or "
    "do those that are not random offline.",
    "other_programs": "End the other programs, or measure again when they are done.",
    "alone": "Use worker processes (num_workers): they load while this process trains.",
    "lock": "More workers would not help: hold the lock for a shorter time, or give each worker a "
    "file or a connection of its own.",
    "other_process": "Ask the other process for less, or keep its answers in each worker or in a "
    "file. If each sample starts a program, make this program faster. If one process answers all "
    "workers, they take turns: give each worker a connection of its own.",
    "sleep": "Look at what sleeps: a limit on requests, a retry, a database that another worker "
    "has locked, or a wait for something that is not there yet.",
    "wait": "Look at what a sample waits for. If this loader takes its batches from another one, "
    "watch that one.",
    "decode": "Shrink images once, offline (preprocess), to the size that training needs.",
    "masks": "Load shards with make_loader: masks stay packed until the device has them.",
    "collate": "Make collate_fn cheaper, and batches smaller: stack tensors, and do all else in "
    "the dataset.",
    "hand-off": "Make batches smaller: uint8 images, packed masks; or use make_loader's own "
    "buffers.",
    "prepare": "Do this work in the dataset or in collate_fn, where workers do it beside the step, "
    "or do it on the device.",
    "main_process": "Make that line cheaper, or do its work once, before the loop. If it only "
    "waits, for the network for example, look at why that is late.",
    "idle": "Look at what this process does before it takes a batch: more workers would not help.",
    "restarts": "Workers start again in each pass: make the loader once, with "
    "persistent_workers=True. This does not help if workers do something in each pass before the "
    "first batch, such as filling a buffer.",
    "iterator": "next(iter(loader)) starts a new pass, with new workers. Make the iterator once, "
    "batches = iter(loader), and call next(batches) in each step.",
    "starts": "No batch is ready when a pass begins: make passes longer. With a ShardDataset or a "
    "CocoFolder, the workers of make_loader go on to the next pass.",
    "too_many_workers": "Use fewer workers: num_workers={cores}. Make a sample cheaper: more "
    "workers only take turns.",
    "slow_sample": "Look at sample {sample}: make it smaller, store it on the local disk, or leave "
    "it out.",
    "other_loader": "Look at that loader: watch(it) says why it is late.",
    "periodic": "If this process writes checkpoints, logs or images, or evaluates, do so less "
    "often, or in a thread.",
    "between": "Look at what follows optimizer.step(). If it logs, or reads losses (.item()), do "
    "so less often, or in a thread.",
    "contention": "Make loading cheaper, or do its work once, offline. If workers have threads of "
    "their own, use fewer: torch.set_num_threads(1), cv2.setNumThreads(0).",
}
"""Texts that say what to do. A key is the id of a cause, or names a special kind of a cause."""


@dataclass(frozen=True)
class Cause:
    """Why the loop takes longer than its steps, and what to do."""

    id: str
    share: float
    """Share of the loop's time, 0 to 1."""
    why: str
    """What was seen."""
    next: str
    """What to do."""

    def __str__(self) -> str:
        return f"{self.share:.0%} {self.id}\n  why:  {self.why}\n  next: {self.next}"


def make_cause(id: str, share: float, why: str, *, cure: str = "", **words: Any) -> Cause:
    """Return a cause with its text from `CURES`. The key of the text is ``cure`` if that is given,
    else ``id``. ``words`` fill the placeholders of the text.

    Example:
        >>> make_cause("slow_sample", 0.5, "", sample=37).next.partition(":")[0]
        'Look at sample 37'
    """
    return Cause(id, share, why, CURES[cure or id].format(**words))


FILES = (
    "each tensor that a worker sends takes one until the batch is freed. Raise the limit (`ulimit "
    '-n 65536`, before Python starts), call torch.multiprocessing.set_sharing_strategy("file_system'
    '"), or keep no batches. make_loader sends a batch in few files.'
)
"""What to do where a process has used up the files that it may open."""

# The words for each verdict, and what to do about it.
FINDINGS = {
    # What to do about a dead worker depends on how it ended. `Stall.cure` says it.
    "dead": ("ended ({call})", ""),
    "read": (
        "waits in a read ({call} of {path})",
        "Leave this file out, copy it to the disk, or remount Drive.",
    ),
    "lock": (
        "waits for a lock",
        "The lock was held when the worker was forked: start threads after the workers.",
    ),
    "lost": (
        "is idle, but its batch never arrived",
        "If /dev/shm is full, use smaller batches or make_loader.",
    ),
    "waiting": (
        "waits in {call}",
        "Find out why this call does not end. It needs a timeout.",
    ),
    "slow": (
        "is at work, only slow",
        "Wait, or make this sample smaller.",
    ),
}


@dataclass(frozen=True)
class Stall:
    """A batch that did not come in time, and why, as far as that is known."""

    verdict: str
    """Why the batch does not come, a key of `FINDINGS`. The process that has the batch is "dead",
    waits in a "read", waits for a "lock", is "waiting" in another system call, or is only
    "slow". If the process is idle, the batch was "lost" after it was loaded.
    """
    waited_s: float
    job: WorkerJob
    """The worker that has the batch. The number of the batch is known only for our own loader."""
    seen: Activity
    """What the worker, or this process, does. For a dead worker, ``call`` is how it ended."""
    file: str
    """The file that the sample is read from; "" if it is not known, or if ``seen`` has it."""
    cure: str
    """What to do."""

    @property
    def why(self) -> str:
        """Return which process has the batch, and why the batch does not come."""
        if self.job.worker is None:
            who = "this process"
        else:
            who = f"worker {self.job.worker} (pid {self.job.pid})"
        words, _ = FINDINGS[self.verdict]
        what = words.format(call=self.seen.call or "a call", path=self.seen.path)
        waited = f"No batch came for {self.waited_s:.3g} s"
        return f"{waited}: {who} {what}{self._describe_place()}."

    def __str__(self) -> str:
        return f"{self.why} {self.cure}"

    def _describe_place(self) -> str:
        """Return the sample, its file, and the lines of Python, as far as they are known."""
        place = ""
        if self.seen.sample is not None:
            place = f", at sample {self.seen.sample}"
            if self.file:
                place += f" ({self.file})"
        elif self.job.indices:
            place = f", at one of samples {', '.join(map(str, self.job.indices))}"
        if self.seen.stack:
            lines = [line.rpartition("/")[2] for line in self.seen.stack[:_NAMED_LINES]]
            place += f", in {' < '.join(lines)}"
        return place
