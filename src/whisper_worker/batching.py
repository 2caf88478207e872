"""Many `submit()` → few `run(batch)`: items of different owners meet in one call. Knows no speech.

Each item has a key (only equal keys share a batch) and an owner (owners take turns). The batcher's own threads, and no
others, call `run`; who submits gets a future and holds nothing else.
"""

import time
from bisect import insort
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Generic, TypeVar

PATIENCE = 4  # so many newcomers in a row pass those who have been served

Item = TypeVar("Item")
Result = TypeVar("Result")


class BatcherClosed(RuntimeError):
    """Nothing runs any more."""


@dataclass(eq=False)
class _Entry(Generic[Item, Result]):
    item: Item
    key: Hashable
    owner: Hashable
    arrived: float
    since: float
    rank: int
    has_sequel: bool
    future: "Future[Result]" = field(default_factory=Future)


class Batcher(Generic[Item, Result]):
    """Runs what is submitted in batches of up to `max_size` items, on `threads` threads of its own.

    Every future is settled, whatever happens. One that is cancelled before its turn is skipped. When `run` fails, or
    returns another number of results than it got items, the batch is split and tried again, so that only the item at
    fault fails; `on_failure` is told the error and the batch's size. After an error that `is_memory_error` recognises,
    batches are at most half as large for `halved_for_s`.

    A free thread takes what is there. Only callers that have just been served, and are thus about to come back with
    their next item, are waited for: never for longer than `max_wait_s`, and not where they make no larger batch, unless
    they have said that they will be back, and what they began would be kept waiting by what others begin.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Sequence[Result]],
        *,
        threads: int,
        max_size: int = 1,
        max_wait_s: float = 0.0,
        is_memory_error: Callable[[BaseException], bool] = lambda error: isinstance(error, MemoryError),
        halved_for_s: float = 60.0,
        on_failure: Callable[[BaseException, int], None] = lambda _error, _size: None,
        name: str = "batch",
    ) -> None:
        self._run = run
        self._max_size = max_size
        self._max_wait_s = max_wait_s
        self._is_memory_error = is_memory_error
        self._halved_for_s = halved_for_s
        self._on_failure = on_failure

        self._changed = Condition()  # guards all below
        self._waiting: _Turns[Item, Result] = _Turns()
        self._closed = False
        self._halved_size, self._halved_until = max_size, 0.0
        self._coming, self._coming_until = 0, 0.0
        self._sequels: set[Hashable] = set()  # owners

        self._threads = [Thread(target=self._work, name=f"{name}_{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        item: Item,
        *,
        key: Hashable = None,
        owner: Hashable = None,
        since: float | None = None,
        rank: int = 0,
        has_sequel: bool = False,
    ) -> "Future[Result]":
        """The future of the item's result. Raises BatcherClosed after `close()`.

        `since`: when, in monotonic seconds, the work began that the item goes on with, if not now: what was begun first
        is finished first. `rank`: of one owner's items, those with a lower one go first. `has_sequel`: the owner goes
        on with it as soon as it has the result.
        """
        now = time.monotonic()
        entry: _Entry[Item, Result] = _Entry(item, key, owner, now, now if since is None else since, rank, has_sequel)
        with self._changed:
            if self._closed:
                raise BatcherClosed("submitted after close()")
            self._coming = max(self._coming - 1, 0)
            self._sequels.discard(owner)
            self._waiting.put(entry)
            self._changed.notify()
        return entry.future

    def close(self) -> None:
        """Fail what waits with BatcherClosed, and return once what runs has ended. Not to be called by `run`."""
        with self._changed:
            self._closed = True
            left = self._waiting.take_all()
            self._changed.notify_all()
        for entry in left:
            entry.future.set_exception(BatcherClosed("closed before its turn"))
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while batch := self._next_batch():
            self._settle(batch)
            del batch  # don't keep it alive while waiting for the next

    def _next_batch(self) -> list[_Entry[Item, Result]]:
        """Waits for one; empty once closed."""
        with self._changed:
            while not self._closed:
                wait_s = self._seconds_to_wait()
                if wait_s is None or wait_s > 0:
                    self._changed.wait(wait_s)
                elif batch := self._waiting.take(self._size()):
                    if self._waiting:
                        self._changed.notify()  # more for another thread
                    return batch
            return []

    def _seconds_to_wait(self) -> float | None:
        """For company; None: there is nothing to run."""
        if not self._waiting:
            return None
        now = time.monotonic()
        if now >= self._coming_until:
            self._coming = 0
            self._sequels.clear()
        if self._sequels:
            return self._coming_until - now
        if not self._coming or self._waiting.count >= self._size():
            return 0
        return min(self._coming_until, self._waiting.oldest + self._max_wait_s) - now

    def _size(self) -> int:
        return self._halved_size if time.monotonic() < self._halved_until else self._max_size

    def _settle(self, batch: list[_Entry[Item, Result]]) -> None:
        try:
            results = self._run([entry.item for entry in batch])
            if len(results) != len(batch):
                raise RuntimeError(f"{len(results)} results for a batch of {len(batch)}")
        except BaseException as error:
            self._settle_failed(batch, error)
        else:
            with self._changed:  # before they are served: they may be back at once
                self._coming += len(batch)
                self._sequels.update(entry.owner for entry in batch if entry.has_sequel)
                self._coming_until = time.monotonic() + self._max_wait_s
            for entry, result in zip(batch, results, strict=True):
                entry.future.set_result(result)

    def _settle_failed(self, batch: list[_Entry[Item, Result]], error: BaseException) -> None:
        self._on_failure(error, len(batch))
        if len(batch) == 1:
            batch[0].future.set_exception(error)
            return
        half = len(batch) // 2
        if self._is_memory_error(error):
            with self._changed:
                self._halved_size, self._halved_until = min(half, self._size()), time.monotonic() + self._halved_for_s
        self._settle(batch[:half])
        self._settle(batch[half:])


class _Turns(Generic[Item, Result]):
    """What waits, by owner.

    The owner whose turn it is leads a batch: its first entry decides the key, and it goes to the end of the line if it
    has more. The others ride along with what they have of that key, one each and then round again, and keep their
    place, so that each entry leads in the end.

    Owners who come with nothing waiting yet are newcomers, and go before those who have led: so one with a single item
    is served before the next of those with many. But no more than `PATIENCE` newcomers pass them in a row. Among
    newcomers that one is first whose first entry's work began first. Among the entries of one owner the lowest rank is
    first, and then the work that began first.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, list[_Entry[Item, Result]]] = {}
        self._newcomers: dict[Hashable, None] = {}
        self._line: dict[Hashable, None] = {}
        self._passed = 0

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def count(self) -> int:
        return sum(map(len, self._entries.values()))

    @property
    def oldest(self) -> float:
        """When what waits longest arrived."""
        return min(entry.arrived for entries in self._entries.values() for entry in entries)

    def put(self, entry: _Entry[Item, Result]) -> None:
        if entry.owner not in self._entries:
            self._entries[entry.owner] = []
            self._newcomers[entry.owner] = None
        insort(self._entries[entry.owner], entry, key=lambda entry: (entry.rank, entry.since))

    def take(self, size: int) -> list[_Entry[Item, Result]]:
        """Up to `size` entries of one key, their futures running. Empty when all that waited had been cancelled."""
        leader = self._lead()
        if leader is None:
            return []
        batch = [leader]
        before = 0
        while before < len(batch) < size:
            before = len(batch)
            for owner in [*sorted(self._newcomers, key=self._since), *self._line]:
                if len(batch) < size and (entry := self._take_of(owner, leader.key)):
                    batch.append(entry)
        return batch

    def take_all(self) -> list[_Entry[Item, Result]]:
        """All that is left and not cancelled, futures running."""
        left = []
        while entry := self._lead():
            left.append(entry)
        return left

    def _lead(self) -> _Entry[Item, Result] | None:
        while self._entries:
            newcomers_turn = bool(self._newcomers) and (not self._line or self._passed < PATIENCE)
            self._passed = self._passed + 1 if newcomers_turn and self._line else 0
            owner = min(self._newcomers, key=self._since) if newcomers_turn else next(iter(self._line))
            entry = self._take_of(owner, self._entries[owner][0].key)
            if owner in self._entries:
                self._newcomers.pop(owner, None)
                self._line.pop(owner, None)
                self._line[owner] = None
            if entry:
                return entry
        return None

    def _since(self, owner: Hashable) -> float:
        return self._entries[owner][0].since

    def _take_of(self, owner: Hashable, key: Hashable) -> _Entry[Item, Result] | None:
        """The owner's first entry with the key, unless nobody waits for any of them; an owner with none left is out."""
        entries = self._entries[owner]
        found = None
        for entry in [entry for entry in entries if entry.key == key]:
            entries.remove(entry)
            if entry.future.set_running_or_notify_cancel():
                found = entry
                break
        if not entries:
            del self._entries[owner]
            self._newcomers.pop(owner, None)
            self._line.pop(owner, None)
        return found
