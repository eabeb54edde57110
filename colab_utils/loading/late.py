"""A prefetcher that does not wait for ever: what is late is loaded once more by new processes, and
a sample that is late again is given up.
"""

from collections import deque
from time import perf_counter
from typing import NamedTuple

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.fetcher import Fetcher
from colab_utils.loading.prefetcher import Loaded, Prefetcher, Worker, end_workers

# The workers are looked at this many times in max_wait_s.
_LOOKS = 8


class LateSample(NamedTuple):
    """A sample that was not loaded in time."""

    image: int
    """Index of the sample in the loader's dataset."""
    waited_s: float
    """Seconds that the loader waited for it before the second try."""


class LateError(ColabUtilsError):
    """The error for a sample that was not loaded in time and may not be left out."""


class BoundedPrefetcher(Prefetcher):
    """A `Prefetcher` that waits for a sample at most two times ``max_wait_s``.

    If the worker that loads the next batch begins no other sample for ``max_wait_s``, all workers
    are killed. New ones, with new buffers, load what has not been delivered. A sample that is late
    there, too, is left out.

    Args:
        fetcher, workers, prefetch: As for `Prefetcher`.
        max_wait_s: Seconds to wait for a sample before the second try.
        late: List to which late samples are appended.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        workers: int,
        prefetch: int,
        *,
        max_wait_s: float,
        late: list[LateSample],
    ) -> None:
        self._max_wait_s = max_wait_s
        self._late = late
        # A killed process that hangs in a read may live on, and may still write to its old buffer.
        self._killed: list[Worker] = []
        # Samples of the next batch that have had their first try.
        self._tried: set[int] = set()
        # Samples that were given up, and the reason, by the number of their batch.
        self._given_up: dict[int, list[tuple[int, str]]] = {}
        super().__init__(fetcher, workers, prefetch)

    def close(self) -> None:
        """End the workers. Batches that they are loading are lost."""
        super().close()
        end_workers(self._killed)

    def _wait_for(self, number: int) -> bool:
        worker = self._workers[self._sent[number].job.worker or 0]
        reading = -1
        changed_s = perf_counter()
        while number not in self._done:
            self._receive(self._max_wait_s / _LOOKS)
            silent_s = perf_counter() - changed_s
            if worker.at_work[0] != reading:
                reading = int(worker.at_work[0])
                changed_s = perf_counter()
            elif silent_s > self._max_wait_s and number not in self._done:
                self._try_again(number, reading, silent_s)
                return False
        return True

    def _try_again(self, number: int, reading: int, silent_s: float) -> None:
        """Load everything in new processes, but for a sample that was late before.

        Args:
            number: Number of the batch that is late.
            reading: Index of the sample that its worker reads, if it is known.
            silent_s: Seconds in which the worker began no other sample.

        Raises:
            LateError: A sample was late twice, and no sample may be left out.
        """
        todo = {key: list(request.job.indices) for key, request in self._sent.items()}
        todo |= dict(self._planned)
        stuck = [reading] if reading in todo[number] else todo[number]
        if self._tried.issuperset(stuck):
            self._give_up(number, stuck)
            todo[number] = [index for index in todo[number] if index not in stuck]
        else:
            self._tried.update(stuck)
            self._late += [LateSample(index, silent_s) for index in stuck]
        self._replace_workers()
        self._sent = {}
        self._done = {}
        self._early = {}
        self._planned = deque()
        for key, indices in todo.items():
            self._add(key, indices)

    def _give_up(self, number: int, stuck: list[int]) -> None:
        reason = (
            f"{self._fetcher.name_sample(stuck[0])} did not come within {self._max_wait_s:g} "
            "seconds, nor when a new process was asked for it."
        )
        if not self._skips_bad:
            raise LateError(
                f"{reason} See whether its file can be read, allow more time (max_wait_s), or "
                "leave it out (max_bad)."
            )
        self._given_up.setdefault(number, []).extend((index, reason) for index in stuck)

    def _replace_workers(self) -> None:
        """Kill the workers, without waiting for their end, and start new ones."""
        for worker in self._workers:
            worker.process.kill()
            worker.connection.close()
        alive = [worker for worker in self._killed if worker.process.is_alive()]
        self._killed = [*alive, *self._workers]
        self._workers = []
        self._start()

    def _finish(self, number: int) -> Loaded:
        self._tried.clear()
        bad = self._given_up.pop(number, [])
        loaded = super()._finish(number)
        return loaded._replace(bad=[*bad, *loaded.bad])
