"""Threads at the gate of the model."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

from whisper_worker.gate import Gate

SOON_S = 20


class Visit:
    """A thread that goes in as soon as it is let, and stays until it is released."""

    def __init__(self, pool: ThreadPoolExecutor, way_in: AbstractContextManager[object]) -> None:
        self.is_in = threading.Event()
        self.released = threading.Event()
        self._way_in = way_in
        self._work: Future[None] = pool.submit(self._stay)

    def _stay(self) -> None:
        with self._way_in:
            self.is_in.set()
            assert self.released.wait(SOON_S), "nobody released the visit"

    def wait_until_in(self) -> None:
        assert self.is_in.wait(SOON_S)

    def leave(self) -> None:
        self.released.set()
        self._work.result(SOON_S)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def wait_for_loners(gate: Gate, count: int) -> None:
    """Until so many are alone inside, or wait for it."""
    with gate._changed:
        while gate._loners < count:
            gate._changed.wait(0.01)


def test_calls_are_inside_together_and_know_how_many_they_are(gate: Gate) -> None:
    with gate.together() as first, gate.together() as second:
        assert (first, second) == (1, 2)
    with gate.together() as third:
        assert third == 1


def test_a_loner_waits_for_those_inside_and_those_that_come_later_wait_for_it(
    gate: Gate, pool: ThreadPoolExecutor
) -> None:
    before = Visit(pool, gate.together())
    before.wait_until_in()
    loner = Visit(pool, gate.alone())
    wait_for_loners(gate, 1)
    after = Visit(pool, gate.together())

    assert not loner.is_in.wait(0.05)
    assert not after.is_in.is_set()
    before.leave()
    loner.wait_until_in()
    assert not after.is_in.wait(0.05)
    loner.leave()
    after.wait_until_in()
    after.leave()


def test_two_loners_go_in_one_after_the_other_and_before_the_calls(gate: Gate, pool: ThreadPoolExecutor) -> None:
    loners = [Visit(pool, gate.alone()), Visit(pool, gate.alone())]
    wait_for_loners(gate, 2)
    call = Visit(pool, gate.together())
    while not any(loner.is_in.is_set() for loner in loners):
        threading.Event().wait(0.01)
    first, second = sorted(loners, key=lambda loner: not loner.is_in.is_set())

    assert not second.is_in.wait(0.05)
    first.leave()
    second.wait_until_in()
    assert not call.is_in.wait(0.05)
    second.leave()
    call.wait_until_in()
    call.leave()


def test_who_fails_inside_is_out(gate: Gate, pool: ThreadPoolExecutor) -> None:
    for way_in in (gate.together, gate.alone):
        with pytest.raises(RuntimeError), way_in():
            raise RuntimeError
    visit = Visit(pool, gate.alone())
    visit.wait_until_in()
    visit.leave()
    assert gate.longest_s == 0


def test_the_longest_stay_is_that_of_who_went_in_first(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("whisper_worker.gate.time.monotonic", lambda: now)
    assert gate.longest_s == 0
    with gate.together():
        now = 103.0
        with gate.together():
            now = 105.0
            assert gate.longest_s == 5
    with gate.alone():
        now = 106.0
        assert gate.longest_s == 1
    assert gate.longest_s == 0


def test_the_longest_stay_leaves_out_who_is_alone_unwatched_but_not_those_after_it(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("whisper_worker.gate.time.monotonic", lambda: now)
    with gate.alone(watched=False):
        now = 1000.0
        assert gate.longest_s == 0
    with gate.together():
        now = 1001.0
        assert gate.longest_s == 1
