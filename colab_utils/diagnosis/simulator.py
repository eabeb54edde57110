"""One model of a loop that loads batches and trains on them, event by event, without data or GPU.

`simulate` shows it, the course teaches it, and `diagnose` forecasts with it.
"""

import math
from collections import defaultdict, deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np

from colab_utils.errors import ColabUtilsError
from colab_utils.reader import AHEAD_IMAGES
from colab_utils.require import require_count, require_number

_ROUNDING_S = 1e-9
# A thread beside the step holds Python's lock for this share of its work.
_LOCK = 0.3
# More batches would take minutes to simulate, and show nothing new.
_MAX_BATCHES = 1_000_000
# So many random times are drawn. Then they come again.
_TIMES = 10_000


class Trace(NamedTuple):
    """What one worker, or the step, did. It handled ``batch[k]`` (int64 [K], counted from 0) from
    ``start_s[k]`` to ``end_s[k]`` (float64 [K], seconds). If a batch would end after the simulated
    time, its ``end_s`` is the end of that time.
    """

    batch: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray


@dataclass(frozen=True, eq=False)
class Simulation:
    """Result of `simulate`.

    Attributes:
        workers: Number of worker processes.
        seconds: How much time was simulated.
        batches: Number of batches whose step ended in this time.
        utilisation: Share of the time in which the step ran, 0 to 1.
        loads: One `Trace` for each worker. Without workers, one for the training process.
        steps: The `Trace` of the step.
        prefetch: Number of batches that the loader asks each worker for ahead of time. Never more
            than ``workers * prefetch`` batches are being loaded or wait for the step.
    """

    workers: int
    seconds: float
    batches: int
    utilisation: float
    loads: tuple[Trace, ...]
    steps: Trace
    prefetch: int = 2

    @property
    def stall_share(self) -> float:
        """Return the share of the time in which the step waited for its batch, 0 to 1."""
        return 1.0 - self.utilisation

    def __str__(self) -> str:
        return (
            f"{self.batches} batches in {self.seconds:g} s "
            f"with {self.workers} workers: "
            f"the step worked {self.utilisation:.0%} of the time "
            f"and waited {self.stall_share:.0%}"
        )


@dataclass(frozen=True)
class Loop:
    """A loop, in numbers: everything that the model knows of it. Seconds are those of one core."""

    workers: int
    """Number of worker processes. With 0, the training process loads."""
    step_s: float
    """Seconds that a step takes if nothing disturbs it."""
    load_s: float = 0.0
    """Mean seconds that a worker waits for a batch, beside its reads. A wait needs no core."""
    load_cv: float = 0.0
    """Standard deviation of ``load_s``, divided by its mean. The times are lognormal."""
    step_cv: float = 0.0
    """The same for the steps."""
    prefetch: int = 2
    """Batches that the loader asks each worker for ahead of time."""
    batch_size: int = 1
    """Images in a batch."""
    streams: int = 1
    """Reads at the same time, in each process that loads."""
    read_s: tuple[float, ...] = (0.0,)
    """Seconds of single reads. Each image takes one of them."""
    files_per_s: float = math.inf
    """Files that the link brings in a second, to all streams together."""
    work_s: float = 0.0
    """CPU seconds of an image."""
    handoff_s: float = 0.0
    """CPU seconds that a worker takes to hand over a batch, in a thread beside its work."""
    take_s: float = 0.0
    """CPU seconds that the training process takes to receive a batch."""
    cores: float = math.inf
    """Cores that this loop has."""
    in_order: bool = True
    """Whether the step takes the batches in order."""
    busy: float = 0.9
    """Share of a core that the step keeps busy."""
    read_ahead: int = AHEAD_IMAGES
    """Images that the streams of a process read before those of the batch that it loads."""
    epoch_batches: float = math.inf
    """Batches in an epoch. At its end, all that was asked for is used up."""
    start_s: float = 0.0
    """Seconds from the end of an epoch until workers can load again."""


def simulate(
    *,
    workers: int,
    step_s: float,
    load_s: float = 0.0,
    load_cv: float = 0.0,
    step_cv: float = 0.0,
    prefetch: int = 2,
    batch_size: int = 1,
    streams: int = 1,
    read_s: float | Sequence[float] = 0.0,
    work_s: float = 0.0,
    handoff_s: float = 0.0,
    cores: float = math.inf,
    in_order: bool = True,
    seconds: float = 30,
    seed: int = 0,
) -> Simulation:
    """Simulate how a loader feeds a training step in the course of time.

    The simulation follows the rule of ``torch.utils.data.DataLoader``: each worker loads its
    batches one after another, and the loader asks for one more whenever the step takes one. With W
    workers and P = ``prefetch``, batch i begins to load at
    ``start_i = max(done_(i-W), taken_(i-WP))``. If cores are not short and ``handoff_s`` is 0, it
    is loaded at ``done_i = start_i + load_i``, and its step begins at
    ``taken_i = max(done_i, taken_(i-1) + step_(i-1))``. To load a batch is to wait for ``load_s``,
    then to read and work on one image after the other. Then a thread of the worker hands the batch
    over, while the worker loads the next one. Waiting and reading need no core. Work, hand-over and
    the step share the cores.

    Args:
        workers: Number of worker processes. With 0, the training process loads, so loading and
            training alternate. With several streams, it has as many threads instead, which read and
            work on the next images beside the step, and share Python's lock with it.
        step_s: Mean seconds of one training step. It keeps 0.9 of a core busy, and takes longer if
            cores are short.
        load_s: Mean seconds that one worker waits for one batch, in all.
        load_cv: Coefficient of variation of these times: their standard deviation divided by their
            mean. The times are lognormal. With 0, all are equal.
        step_cv: The same for the steps.
        prefetch: Number of batches that the loader asks each worker for ahead of time (the
            DataLoader's ``prefetch_factor``).
        batch_size: Images in a batch.
        streams: Files that each process reads at the same time. Streams of workers read ahead, as
            those of `make_loader`.
        read_s: Seconds in which the file of an image is read: one number for all, or a list of
            measured times. Each comes once, in a random order, before any comes again.
        work_s: CPU seconds of an image: decoding, drawing masks, transforms.
        handoff_s: CPU seconds in which a thread of a worker hands over a batch.
        cores: Cores of the machine. By default, cores are never short.
        in_order: Whether the step takes the batches in order. If not, it takes what comes first:
            the batch of a worker, or single images where threads load them.
        seconds: How much time to simulate.
        seed: Seed of the random times. The same seed draws the same times for every number of
            workers.

    Raises:
        ColabUtilsError: An argument is out of its range, or ``seconds`` is 0, or there would be
            more than a million batches.

    Patrick Park (jpatrickpark.com/post/loader_sim) reports 98, 295 and 275 batches in 30 s, for
    loads of 2 s, 350 ms and 700 ms, with seven workers and a step of 100 ms. If all loads take
    equally long, this function gives 98, 296 and 293. With ``load_cv=0.22``, it gives 275 for the
    last.

    Example:
        >>> print(simulate(workers=0, load_s=0.3, step_s=0.1, seconds=10))
        25 batches in 10 s with 0 workers: the step worked 25% of the time and waited 75%
        >>> print(simulate(workers=1, streams=8, read_s=0.4, step_s=0.1, seconds=10))
        96 batches in 10 s with 1 workers: the step worked 96% of the time and waited 4%
    """
    settings = dict(locals())
    for name in ("workers", "seed"):
        require_count(name, settings[name], minimum=0)
    for name in ("prefetch", "batch_size", "streams"):
        require_count(name, settings[name])
    for name in ("step_s", "load_s", "load_cv", "step_cv", "work_s", "handoff_s", "seconds"):
        require_number(name, settings[name], minimum=0)
    if cores != math.inf:
        require_number("cores", cores, above=0)
    reads = tuple(np.atleast_1d(read_s).tolist())
    for read in reads or (None,):
        require_number("read_s", read, minimum=0)
    del settings["seconds"], settings["seed"]
    settings.update(read_s=reads, read_ahead=AHEAD_IMAGES if workers else streams)
    loop = Loop(**settings)
    # In a batch of so many seconds, each worker or stream may load one.
    least_s = max(step_s, (load_s + max(reads) + work_s) / max(1, workers * streams))
    if not 0 < seconds <= least_s * _MAX_BATCHES:
        raise ColabUtilsError(
            f"Cannot simulate {seconds} s with a batch every {least_s:.3g} s: that is no batch, or "
            f"more than {_MAX_BATCHES:,}. Give seconds more than 0, load_s or step_s more than 0, "
            "or fewer seconds."
        )
    run = _Run(loop, seed)
    run.play(seconds)
    steps = _make_trace(run.steps, seconds)
    return Simulation(
        workers=workers,
        seconds=float(seconds),
        batches=sum(end_s <= seconds + _ROUNDING_S for *_, end_s in run.steps),
        utilisation=float((steps.end_s - steps.start_s).sum() / seconds),
        loads=tuple(_make_trace(lane, seconds) for lane in run.loads),
        steps=steps,
        prefetch=prefetch,
    )


def forecast_rate(loop: Loop, *, batches: int = 120, seed: int = 0) -> float:
    """Return the images per second of a loop, once it has got going.

    Example:
        >>> round(forecast_rate(Loop(workers=2, step_s=0.1, load_s=0.4)), 1)
        5.0
    """
    run = _Run(loop, seed)
    run.play(math.inf, batches)
    ends_s = [end_s for *_, end_s in run.steps[:batches]]
    first = batches // 5
    return loop.batch_size * (batches - 1 - first) / max(ends_s[-1] - ends_s[first], 1e-9)


# A batch, and when its load or its step began and ended, in seconds.
_Span = list[float]


def _make_trace(spans: list[_Span], seconds: float) -> Trace:
    """Return the spans that began within the simulated time. None ends later than that time."""
    batch, start_s, end_s = np.array(spans, np.float64).reshape(-1, 3).T
    count = np.searchsorted(start_s, seconds - _ROUNDING_S)
    ends_s = np.minimum(end_s, seconds)
    return Trace(batch[:count].astype(np.int64), start_s[:count], ends_s[:count])


# A process yields what it waits for: an activity, or the name of a queue. It is sent what the queue
# gives.
_Process = Generator[Any, Any, None]


@dataclass(slots=True, eq=False)
class _Activity:
    """A wait, or work, that takes so many seconds if it has its share of a core."""

    seconds: float
    share: float = 0.0
    end_s: float = 0.0
    speed: float = 1.0
    process: Any = None


class _Clock:
    """Simulated time, the cores that processes share in it, and queues of items that they take, the
    first come first.
    """

    def __init__(self, cores: float) -> None:
        self.now_s = 0.0
        self._cores = cores
        self._active: list[_Activity] = []
        self._ready: deque[tuple[_Process, Any]] = deque()
        # By the name of a queue, its items, or the processes that wait for an item.
        self._items = defaultdict[Any, list[Any]](list)
        self._takers = defaultdict[Any, list[_Process]](list)

    def start(self, process: _Process, item: Any = None) -> None:
        """Let a process begin or go on."""
        self._ready.append((process, item))

    def put(self, queue: Any, item: Any) -> None:
        """Put an item into a queue, or give it to the process that waits for it."""
        if self._takers[queue]:
            self.start(self._takers[queue].pop(0), item)
        else:
            self._items[queue].append(item)

    def advance(self, until_s: float) -> bool:
        """Let all processes go on that can, then go to the next event. Return whether there is one
        until then.
        """
        while self._ready:
            self._resume(*self._ready.popleft())
        self.now_s = min(activity.end_s for activity in self._active)
        done = [activity for activity in self._active if activity.end_s == self.now_s]
        for activity in done:
            self._active.remove(activity)
            self.start(activity.process)
        self._share_cores()
        return self.now_s <= until_s + _ROUNDING_S

    def _resume(self, process: _Process, item: Any) -> None:
        """Run a process until it waits again."""
        wanted = process.send(item)
        if isinstance(wanted, _Activity):
            wanted.end_s = self.now_s + wanted.seconds
            wanted.process = process
            self._active.append(wanted)
            self._share_cores()
        elif self._items[wanted]:
            self.start(process, self._items[wanted].pop(0))
        else:
            self._takers[wanted].append(process)

    def _share_cores(self) -> None:
        """Give work its share of the cores. If they are short, work that wants little gets it, and
        all other work gets equal shares.
        """
        work = sorted((a for a in self._active if a.share), key=lambda a: a.share)
        left = self._cores
        for place, activity in enumerate(work):
            given = min(activity.share, left / (len(work) - place))
            left -= given
            speed = given / activity.share
            if speed != activity.speed:
                rest_s = (activity.end_s - self.now_s) * activity.speed
                activity.end_s = self.now_s + rest_s / speed
                activity.speed = speed


def _draw_times(mean_s: float, cv: float, seed: list[int]) -> list[float]:
    """Return lognormal times with this mean and coefficient of variation."""
    log_variance = math.log1p(cv * cv)
    generator = np.random.default_rng(seed)
    times = generator.lognormal(-log_variance / 2, math.sqrt(log_variance), _TIMES)
    return (mean_s * times).tolist()


class _Run(_Clock):
    """The processes of one simulated loop, and what they did.

    Their queues are, for each worker, the batches that it is "asked" for, those that it has
    "loaded", and not handed over, and the images that its streams must read, "unread"; each "image"
    that was read; and each "batch" that can be taken. If the next worker that is free begins, or
    the step takes what comes first, one queue serves for all: its name has None for the number.

    Attributes:
        loads: The spans of the batches of each worker.
        steps: The spans of the steps.
    """

    def __init__(self, loop: Loop, seed: int) -> None:
        self._loop = loop
        # Of the threads beside a step, only one holds Python's lock.
        super().__init__(loop.cores if loop.workers else min(loop.cores, 1 / _LOCK))
        lanes = range(max(1, loop.workers))
        self.loads: list[list[_Span]] = [[] for _ in lanes]
        self.steps: list[_Span] = []
        self._load_s = _draw_times(loop.load_s, loop.load_cv, [seed, 0])
        self._step_s = _draw_times(loop.step_s, loop.step_cv, [seed, 1])
        # Each of the measured times comes once before any comes again.
        rounds = np.tile(loop.read_s, (_TIMES // len(loop.read_s) + 1, 1))
        self._read_s = np.random.default_rng([seed, 2]).permuted(rounds, axis=1).ravel().tolist()
        # The time from which the link is free.
        self._link_s = 0.0
        # Number of batches that were asked for.
        self._asked = 0
        # The images of each worker: those that no stream must read yet, and those that it loads.
        self._unplanned = [*map(self._list_images, lanes)]
        self._unloaded = [*map(self._list_images, lanes)]

    def _list_images(self, lane: int) -> Iterator[int]:
        """Yield the images of a worker, batch after batch."""
        size = self._loop.batch_size
        for first in count(lane * size, len(self.loads) * size):
            yield from range(first, first + size)

    def play(self, seconds: float, batches: float = math.inf) -> None:
        """Run the loop for so many seconds, or until so many steps have ended."""
        loop = self._loop
        self.start(self._train())
        for lane in range(loop.workers):
            self.start(self._work(lane))
            self.start(self._hand_over(lane))
        for lane in range(len(self.loads) if loop.streams > 1 else 0):
            self._plan(lane, loop.read_ahead)
            for _ in range(loop.streams):
                self.start(self._stream(lane))
        while self.advance(seconds) and len(self.steps) <= batches:
            pass

    def _train(self) -> _Process:
        """Take one batch after the other, and train on it."""
        loop = self._loop
        epoch_end = loop.epoch_batches
        self._ask(loop.workers * loop.prefetch, epoch_end)
        for number in count():
            batch = number
            if loop.workers:
                batch = yield "batch", number if loop.in_order else None
                self._ask(1, epoch_end)
            else:
                yield from self._load(0, batch)
            if loop.take_s:
                yield _Activity(loop.take_s, 1.0)
            span = [batch, self.now_s, math.inf]
            self.steps.append(span)
            yield _Activity(self._step_s[number % _TIMES], loop.busy)
            span[2] = self.now_s
            if number + 1 == epoch_end:
                yield _Activity(loop.start_s)
                epoch_end += loop.epoch_batches
                self._ask(loop.workers * loop.prefetch, epoch_end)

    def _ask(self, number: int, epoch_end: float) -> None:
        """Ask the workers for the next batches of the epoch, in turns."""
        for batch in range(self._asked, int(min(self._asked + number, epoch_end))):
            lane = batch % self._loop.workers if self._loop.in_order else None
            self.put(("asked", lane), batch)
            self._asked += 1

    def _work(self, lane: int) -> _Process:
        """Load the batches that a worker is asked for."""
        while True:
            batch = yield "asked", lane if self._loop.in_order else None
            yield from self._load(lane, batch)
            self.put(("loaded", lane), batch)

    def _hand_over(self, lane: int) -> _Process:
        """Hand over the batches of a worker, in a thread beside its work."""
        while True:
            batch = yield "loaded", lane
            if self._loop.handoff_s:
                yield _Activity(self._loop.handoff_s, 1.0)
            self.put(("batch", batch if self._loop.in_order else None), batch)

    def _load(self, lane: int, batch: int) -> _Process:
        """Wait for a batch, read and work on its images."""
        loop = self._loop
        span = [batch, self.now_s, math.inf]
        self.loads[lane].append(span)
        if loop.load_s:
            yield _Activity(self._load_s[batch % _TIMES])
        if loop.streams > 1:
            self._plan(lane, loop.batch_size)
        for image in islice(self._unloaded[lane], loop.batch_size):
            if loop.streams > 1:
                yield self._name_image(image)
            else:
                yield from self._read(image)
            if loop.work_s and (loop.streams == 1 or loop.workers):
                yield _Activity(loop.work_s, 1.0)
        span[2] = self.now_s

    def _name_image(self, image: int) -> tuple[str, int | None]:
        """Return the queue into which an image comes. Without workers, a batch in any order takes
        the images that come first.
        """
        return "image", image if self._loop.in_order or self._loop.workers else None

    def _plan(self, lane: int, number: int) -> None:
        """Let the streams of a worker read its next images."""
        for image in islice(self._unplanned[lane], number):
            self.put(("unread", lane), image)

    def _stream(self, lane: int) -> _Process:
        """Read one file after the other. The threads of a loop without workers work on them."""
        while True:
            image = yield "unread", lane
            yield from self._read(image)
            if self._loop.work_s and not self._loop.workers:
                yield _Activity(self._loop.work_s, 1.0)
            self.put(self._name_image(image), image)

    def _read(self, image: int) -> _Process:
        """Read a file. It comes when it is served, and when the link has brought it."""
        now_s = self.now_s
        self._link_s = max(self._link_s, now_s) + 1 / self._loop.files_per_s
        seconds = max(self._read_s[image % len(self._read_s)], self._link_s - now_s)
        if seconds:
            yield _Activity(seconds)
