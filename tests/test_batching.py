"""The batcher's promises, each with plain integers."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager

import pytest

from whisper_worker.batching import PATIENCE, Batcher, BatcherClosed

LONG_S = 600  # never waited for: a test that does hangs, and is seen
SOON_S = 20


class Doubler:
    """A `run` that doubles, notes each batch, and can be held at its start."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.threads: set[str] = set()
        self.running = threading.Semaphore(0)
        self._open = threading.Event()
        self._open.set()

    def __call__(self, batch: Sequence[int]) -> list[int]:
        self.batches.append(list(batch))
        self.threads.add(threading.current_thread().name)
        self.running.release()
        assert self._open.wait(SOON_S)
        return [2 * item for item in batch]

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()


@contextmanager
def batcher(
    run: Callable[[Sequence[int]], Sequence[int]], threads: int = 1, size: int = 4, **options: object
) -> Iterator[Batcher[int, int]]:
    made = Batcher(run, threads=threads, max_size=size, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        if isinstance(run, Doubler):
            run.release()
        made.close()


@contextmanager
def busy(run: Doubler, to: "Batcher[int, int]") -> Iterator[None]:
    """Inside, the only thread is held with an item 0, so that what is submitted waits; then it is let go."""
    run.hold()
    first = to.submit(0, owner="first")
    assert run.running.acquire(timeout=SOON_S)
    yield
    run.release()
    first.result(SOON_S)


def results(futures: "list[Future[int]]") -> list[int]:
    return [future.result(SOON_S) for future in futures]


def test_each_item_gets_its_own_result() -> None:
    with batcher(Doubler(), threads=3) as b:
        futures = [b.submit(i, owner=i % 7) for i in range(100)]
        assert results(futures) == [2 * i for i in range(100)]


def test_only_the_batchers_own_threads_run() -> None:
    run = Doubler()
    with batcher(run, threads=2, name="model") as b:
        results([b.submit(i) for i in range(20)])
    assert run.threads <= {"model_0", "model_1"}


def test_as_many_run_at_once_as_there_are_threads() -> None:
    run = Doubler()
    run.hold()
    with batcher(run, threads=3, size=1) as b:
        futures = [b.submit(i) for i in range(5)]
        for _ in range(3):
            assert run.running.acquire(timeout=SOON_S)
        assert len(run.batches) == 3
        run.release()
        results(futures)


def test_what_waits_runs_together_up_to_the_size() -> None:
    run = Doubler()
    with batcher(run, size=4) as b:
        with busy(run, b):
            futures = [b.submit(i) for i in range(1, 7)]
        results(futures)
    assert run.batches == [[0], [1, 2, 3, 4], [5, 6]]


def test_only_equal_keys_share_a_batch() -> None:
    run = Doubler()
    with batcher(run) as b:
        with busy(run, b):
            futures = [b.submit(i, key=i % 2) for i in range(1, 7)]
        results(futures)
    assert run.batches == [[0], [1, 3, 5], [2, 4, 6]]


def test_owners_take_turns() -> None:
    run = Doubler()
    with batcher(run, size=2) as b:
        with busy(run, b):
            long = [b.submit(i, owner="long") for i in range(10, 16)]
            short = b.submit(1, owner="short")
        results([*long, short])
    assert run.batches == [[0], [10, 1], [11, 12], [13, 14], [15]]


def test_a_short_job_beside_long_ones_runs_in_the_next_batch() -> None:
    run = Doubler()
    with batcher(run, size=1) as b:
        with busy(run, b):
            waiting = [b.submit(10 * owner + i, owner=owner) for owner in (1, 2) for i in range(3)]
        results(waiting)
        with busy(run, b):
            waiting = [b.submit(10 * owner + i, owner=owner) for owner in (1, 2) for i in range(3)]
            waiting.append(b.submit(99, owner="short"))
        results(waiting)
    assert run.batches == [[i] for i in (0, 10, 20, 11, 21, 12, 22, 0, 10, 20, 99, 11, 21, 12, 22)]


def test_an_owner_that_comes_with_one_item_goes_before_those_that_have_led() -> None:
    doubled, short = Doubler(), []

    def run(batch: Sequence[int]) -> list[int]:
        if batch == [11]:
            short.append(b.submit(99, owner="short"))
        return doubled(batch)

    with batcher(run, size=1) as b:
        with busy(doubled, b):
            futures = [b.submit(10 * owner + i, owner=owner) for owner in (1, 2, 3) for i in range(3)]
        results(futures)
        results(short)
    assert doubled.batches == [[i] for i in (0, 10, 20, 30, 11, 99, 21, 31, 12, 22, 32)]


def test_what_was_begun_first_is_finished_first() -> None:
    run = Doubler()
    with batcher(run, size=1) as b:
        with busy(run, b):
            futures = [b.submit(item, owner=item, since=since) for item, since in ((1, 30), (2, 10), (3, 20))]
            futures += [b.submit(item, owner="one", since=since) for item, since in ((6, 60), (5, 50), (4, 40))]
        results(futures)
    assert run.batches == [[0], [2], [3], [1], [4], [5], [6]]


def test_of_one_owners_items_those_of_a_lower_rank_go_first() -> None:
    run = Doubler()
    with batcher(run, size=1) as b:
        with busy(run, b):
            futures = [b.submit(item, owner="one", rank=rank, since=0) for item, rank in ((3, 2), (1, 0), (2, 1))]
            futures += [b.submit(4, owner="another", rank=9, since=-1)]
        results(futures)
    assert run.batches == [[0], [4], [1], [2], [3]]


def test_newcomers_never_keep_others_from_going_on() -> None:
    run = Doubler()
    with batcher(run, size=1) as b:
        with busy(run, b):
            futures = [b.submit(i, owner="many") for i in (1, 2)]
            futures += [b.submit(10 + i, owner=("new", i)) for i in range(9)]
        results(futures)
    assert run.batches.index([2]) == 2 + PATIENCE


def test_an_owner_whose_key_did_not_fit_keeps_its_turn() -> None:
    run = Doubler()
    with batcher(run, size=2) as b:
        with busy(run, b):
            futures = [b.submit(i, key="a", owner="many") for i in (1, 2, 3)]
            futures.insert(0, b.submit(7, key="b", owner="other"))
        results(futures)
    assert run.batches == [[0], [1, 2], [7], [3]]


def test_riding_along_costs_an_owner_no_turn() -> None:
    """One whose odd item waits rides along with others again and again: it must come to lead with it all the same."""
    run = Doubler()
    with batcher(run, size=2) as b:
        with busy(run, b):
            futures = [b.submit(100 + i, key="a", owner="one") for i in range(9)]
            futures.append(b.submit(7, key="odd", owner="two"))
            futures += [b.submit(200 + i, key="a", owner="two") for i in range(9)]
        results(futures)
    assert run.batches.index([7]) <= 2


def test_those_who_left_are_skipped() -> None:
    run = Doubler()
    with batcher(run) as b:
        with busy(run, b):
            futures = [b.submit(i) for i in range(1, 5)]
            assert futures[1].cancel()
        wait(futures, SOON_S)
    assert run.batches == [[0], [1, 3, 4]]


def test_all_may_leave() -> None:
    run = Doubler()
    with batcher(run) as b:
        with busy(run, b):
            assert b.submit(1).cancel()
        assert b.submit(2).result(SOON_S) == 4
    assert run.batches == [[0], [2]]


# --- company


def test_a_lone_item_runs_at_once() -> None:
    with batcher(Doubler(), max_wait_s=LONG_S) as b:
        for i in range(3):  # the second and third come from one who has just been served
            assert b.submit(i).result(SOON_S) == 2 * i


def test_those_just_served_are_waited_for() -> None:
    run = Doubler()
    with batcher(run, size=3, max_wait_s=LONG_S) as b:
        with busy(run, b):
            futures = [b.submit(i) for i in (1, 2, 3)]
        results(futures)
        results([b.submit(i) for i in (4, 5, 6)])
    assert run.batches == [[0], [1, 2, 3], [4, 5, 6]]


def test_who_goes_on_is_waited_for_even_where_others_would_fill_the_batch() -> None:
    run = Doubler()
    with batcher(run, size=1, max_wait_s=LONG_S) as b:
        with busy(run, b):
            first = b.submit(1, owner="one", has_sequel=True)
            others = [b.submit(item, owner=item) for item in (10, 11)]
        first.result(SOON_S)
        results([b.submit(2, owner="one", since=0), *others])
    assert run.batches == [[0], [1], [2], [10], [11]]


def test_who_does_not_go_on_is_not_waited_for_for_long() -> None:
    run = Doubler()
    with batcher(run, size=1, max_wait_s=0.05) as b:
        with busy(run, b):
            futures = [b.submit(1, owner="one", has_sequel=True), b.submit(2, owner="two")]
        assert results(futures) == [2, 4]


def test_nobody_is_waited_for_longer_than_the_limit() -> None:
    run = Doubler()
    with batcher(run, max_wait_s=0.05) as b:
        with busy(run, b):
            futures = [b.submit(i) for i in (1, 2, 3)]
        results(futures)
        assert b.submit(4).result(SOON_S) == 8  # the two others never come


def test_a_full_batch_waits_for_nobody() -> None:
    run = Doubler()
    with batcher(run, size=2, max_wait_s=LONG_S) as b:
        with busy(run, b):
            futures = [b.submit(i) for i in range(1, 7)]
        results(futures)
    assert run.batches == [[0], [1, 2], [3, 4], [5, 6]]


# --- failures


def test_one_failing_item_does_not_fail_its_neighbours() -> None:
    run = Doubler()

    def fail_at_3(batch: Sequence[int]) -> list[int]:
        doubled = run(batch)
        if 3 in batch:
            raise ValueError("three")
        return doubled

    with batcher(fail_at_3) as b:
        with busy(run, b):
            futures = [b.submit(i) for i in (1, 2, 3, 4)]
        assert results([futures[0], futures[1], futures[3]]) == [2, 4, 8]
        with pytest.raises(ValueError, match="three"):
            futures[2].result(SOON_S)
        assert b.submit(5).result(SOON_S) == 10


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_wrong_number_of_results_is_a_failure(count: int) -> None:
    with batcher(lambda batch: [0] * (count if count != len(batch) else 2)) as b, pytest.raises(RuntimeError):
        b.submit(1).result(SOON_S)


def test_even_a_thread_told_to_exit_settles_its_items() -> None:
    def leave(batch: Sequence[int]) -> list[int]:
        raise SystemExit

    with batcher(leave) as b:
        futures = [b.submit(i) for i in range(3)]
        for future in futures:
            with pytest.raises(SystemExit):
                future.result(SOON_S)


def test_too_little_memory_halves_the_batches_for_a_while() -> None:
    run = Doubler()

    def scarce(batch: Sequence[int]) -> list[int]:
        doubled = run(batch)
        if len(batch) > 2:
            raise MemoryError
        return doubled

    with batcher(scarce, size=4, halved_for_s=LONG_S) as b:
        with busy(run, b):
            futures = [b.submit(i) for i in range(1, 9)]
        assert results(futures) == [2 * i for i in range(1, 9)]
    assert run.batches == [[0], [1, 2, 3, 4], [1, 2], [3, 4], [5, 6], [7, 8]]


def test_the_size_comes_back() -> None:
    run = Doubler()

    def scarce_once(batch: Sequence[int]) -> list[int]:
        doubled = run(batch)
        if len(run.batches) == 2:
            raise MemoryError
        return doubled

    with batcher(scarce_once, size=4, halved_for_s=0) as b:
        with busy(run, b):
            futures = [b.submit(i) for i in range(1, 9)]
        results(futures)
    assert run.batches == [[0], [1, 2, 3, 4], [1, 2], [3, 4], [5, 6, 7, 8]]


def test_each_failure_is_told_with_its_size() -> None:
    told: list[tuple[str, int]] = []

    def fail_at_2(batch: Sequence[int]) -> list[int]:
        if 2 in batch:
            raise ValueError("two")
        return list(batch)

    run = Doubler()
    with batcher(run, size=2, on_failure=lambda error, size: told.append((str(error), size))) as b:
        with busy(run, b):
            futures = [b.submit(i) for i in (1, 2)]
            b._run = fail_at_2
        with pytest.raises(ValueError, match="two"):
            results(futures)
    assert told == [("two", 2), ("two", 1)]


def test_a_lone_item_without_memory_fails_alone() -> None:
    def none(batch: Sequence[int]) -> list[int]:
        raise MemoryError

    with batcher(none) as b, pytest.raises(MemoryError):
        b.submit(1).result(SOON_S)


# --- the end


def test_after_close_nothing_hangs() -> None:
    run = Doubler()
    run.hold()
    b = Batcher(run, threads=1, max_size=1)
    running = b.submit(1)
    assert run.running.acquire(timeout=SOON_S)
    waiting = [b.submit(i) for i in (2, 3)]
    closer = threading.Thread(target=b.close)
    closer.start()
    for future in waiting:
        with pytest.raises(BatcherClosed):
            future.result(SOON_S)
    with pytest.raises(BatcherClosed):
        b.submit(4)
    run.release()
    closer.join(SOON_S)
    assert not closer.is_alive()
    assert running.result(SOON_S) == 2
    b.close()  # once more does no harm


def test_many_callers_lose_nothing() -> None:
    """Callers of ten threads come and go, cancel and fail; each future is settled with its own result."""

    def run(batch: Sequence[int]) -> list[int]:
        if any(item % 17 == 0 for item in batch):
            raise ValueError("seventeen")
        return [2 * item for item in batch]

    wrong: list[object] = []

    def call(b: "Batcher[int, int]", owner: int) -> None:
        for i in range(owner, 600, 10):
            future = b.submit(i, key=i % 3, owner=owner)
            if i % 13 == 0 and future.cancel():
                continue
            error = future.exception(SOON_S)
            if (i % 17 == 0) != isinstance(error, ValueError) or (not error and future.result() != 2 * i):
                wrong.append((i, error))

    with batcher(run, threads=3, size=5, max_wait_s=0.002) as b:
        callers = [threading.Thread(target=call, args=(b, owner)) for owner in range(10)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(60)
    assert not wrong
