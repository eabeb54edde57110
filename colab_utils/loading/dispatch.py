"""The batches of a pass: jobs to the workers as long as there are slots, results put in order and lent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import sleep
from typing import NamedTuple

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import PackedBatch, collate_packed, open_batch
from colab_utils.loading.order import BatchParts
from colab_utils.loading.sample import PackedSample
from colab_utils.loading.slots import SlotRing
from colab_utils.loading.source import Source
from colab_utils.loading.workers import HandOff, Job, Result, start_crew

__all__ = ["Dispatcher", "Loaded"]

# slots whoever iterates may hold: the batch at hand, the next while it replaces that, and two more that somebody keeps
# to look at; a slot that is never used takes no memory
_LENT_SLOTS = 4
_POLL_S = 0.02
_END = object()


class Loaded(NamedTuple):
    """A batch of the order; None where none of its images could be loaded, or it has no part for this process."""

    number: int
    batch: PackedBatch | None
    bad: list[tuple[int, ColabUtilsError]]


class _Pending(NamedTuple):
    number: int
    part: int
    member: int
    slot: int | None


class Dispatcher:
    """Workers, their slots, and who does what; ``prefetch``: batches ahead for each worker or thread.

    Raises:
        OSError: if worker processes cannot be started.
    """

    def __init__(self, source: Source, hand_off: HandOff, workers: int, prefetch: int) -> None:
        self._ahead = max(1, workers * prefetch)
        self._ring = SlotRing(self._ahead, _LENT_SLOTS)
        self._crew = start_crew(hand_off, workers, source, self._ring.slots)
        self.close = self._crew.close
        self._pending: dict[int, _Pending] = {}
        self._got: dict[int, list[tuple[_Pending, Result]]] = {}
        self._queued = [0] * self._crew.members
        self._ticket = 0

    def run(
        self, batches: Iterable[tuple[int, BatchParts] | None], *, seed: tuple[int, ...], in_order: bool, tolerant: bool
    ) -> Iterator[Loaded]:
        """Load numbered batches; in the order given, or as they get ready. None: the next one has to wait.

        Raises:
            ColabUtilsError: if a worker died, or a sample cannot be loaded (not ``tolerant``).
        """
        self._drop_pass()
        todo, got = iter(batches), self._got
        sent: dict[int, int] = {}  # number of a batch: parts that are missing
        over = False
        while True:
            while not over and len(sent) < self._ahead:
                item = next(todo, _END)
                over = item is _END
                if item is None or not isinstance(item, tuple):
                    break
                number, parts = item
                sent[number], got[number] = len(parts), []
                for part, (stream, indices) in enumerate(parts):
                    slot = self._ring.take() if len(parts) == 1 else None
                    self._send(_Pending(number, part, self._choose(stream), slot), indices, (*seed, number), tolerant)
            if not sent:
                if over:
                    return
                sleep(_POLL_S)
                continue
            first = next(iter(sent))
            ready = first if not sent[first] or in_order else next((n for n in sent if not sent[n]), first)
            if not sent[ready]:
                del sent[ready]
                yield self._finish(ready, got.pop(ready))
                continue
            pending, result = self._receive()
            sent[pending.number] -= 1
            got[pending.number].append((pending, result))

    def _drop_pass(self) -> None:
        """Free the slots of a pass that was broken off."""
        while self._pending:
            pending, result = self._receive()
            self._got.setdefault(pending.number, []).append((pending, result))
        for pending, _ in (pair for results in self._got.values() for pair in results):
            if pending.slot is not None:
                self._ring.give_back(pending.slot)
        self._got = {}

    def _choose(self, stream: int | None) -> int:
        if stream is not None:
            return stream % self._crew.members
        return min(range(self._crew.members), key=self._queued.__getitem__)

    def _send(self, pending: _Pending, indices: list[int], seed: tuple[int, ...], tolerant: bool) -> None:
        self._ticket += 1
        self._pending[self._ticket] = pending
        self._queued[pending.member] += 1
        self._crew.send(pending.member, Job(self._ticket, indices, pending.slot, (*seed, pending.part), tolerant))

    def _receive(self) -> tuple[_Pending, Result]:
        result = self._crew.receive()
        pending = self._pending.pop(result.ticket)
        self._queued[pending.member] -= 1
        return pending, result

    def _finish(self, number: int, results: list[tuple[_Pending, Result]]) -> Loaded:
        if not results:  # nothing of it was asked for
            return Loaded(number, None, [])
        bad = [pair for _, result in results for pair in result.bad]
        errors = [result.error for _, result in results if result.error is not None]
        (pending, result), *others = results
        batch = None
        if pending.slot is not None and (errors or result.shape is None):
            self._ring.give_back(pending.slot)
        elif pending.slot is not None and result.shape is not None:
            size = result.shape.lay_out()[1]
            batch = open_batch(self._ring.lend(pending.slot, size), result.shape)
        if errors:
            raise errors[0]
        if others:
            samples: list[PackedSample] = []
            for _, result in sorted(results, key=lambda pair: pair[0].part):
                samples += result.samples or []
            batch = collate_packed(samples) if samples else None
        return Loaded(number, batch, bad)
