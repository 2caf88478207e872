"""What `python -m benchmarks soak` finds bad in a run."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("psutil")  # as below: of the extra `bench`
pytest.importorskip("num2words")

from local_endpoint import Job

from benchmarks.mix import Kind, Words
from benchmarks.soak import Run, Sample, Sent
from whisper_worker.settings import MiB

IDLE = Sample(minutes=0, jobs_ended=1, held_bytes=500 * MiB, open_files=20, threads=30)
BUSY = replace(IDLE, held_bytes=600 * MiB, open_files=60, threads=80)
DURING = [replace(BUSY, minutes=minute / 10) for minute in range(1, 100)]
END = replace(IDLE, minutes=10, open_files=30, threads=90)
GOOD = Run(
    sent=[],
    samples=[IDLE, *DURING, END],
    exit_code=0,
    files_left=0,
    files_open=[],
    log=["event=shutdown jobs=0 grace_s=10", "event=shutdown_done unanswered=0"],
)
GROWN = [replace(sample, held_bytes=round(600 * MiB * (1 + sample.minutes / 20))) for sample in DURING]


def with_samples(*samples: Sample) -> Run:
    return replace(GOOD, samples=samples)


def test_a_run_that_leaves_nothing_is_good() -> None:
    assert GOOD.failures() == []


BAD = {
    "a code": (replace(GOOD, exit_code=3), "the worker ended with code 3"),
    "a file": (replace(GOOD, files_left=1), "1 temporary files are left"),
    "a nameless file": (replace(GOOD, files_open=["/folder/#1 (deleted)"]), "1 temporary files stay open: /folder/"),
    "open files": (with_samples(IDLE, *DURING, replace(END, open_files=31)), "31 files are open in the end, after"),
    "threads": (with_samples(IDLE, *DURING, replace(END, threads=91)), "91 threads are left in the end, in the first"),
    "memory": (with_samples(IDLE, *GROWN, END), "memory has grown from "),
    "jobs": (replace(GOOD, log=["event=shutdown jobs=1 grace_s=10"]), "told to end, the worker still held jobs"),
}


@pytest.mark.parametrize(("run", "told"), BAD.values(), ids=BAD.keys())
def test_what_is_left_in_the_end_is_told(run: Run, told: str) -> None:
    (failure,) = run.failures()
    assert failure.startswith(told)


def test_threads_that_only_come_in_the_second_half_are_told() -> None:
    later = [replace(sample, threads=200) if sample.minutes > 6 else sample for sample in DURING]
    assert len(with_samples(IDLE, *later, replace(END, threads=200)).failures()) == 1


def test_a_short_run_says_nothing_about_memory() -> None:
    grown = [replace(sample, minutes=sample.minutes / 10) for sample in GROWN]
    assert with_samples(IDLE, *grown, replace(END, minutes=1)).failures() == []


def test_a_worker_that_died_at_its_start_is_told_as_that() -> None:
    assert replace(GOOD, samples=[], exit_code=1).failures() == ["the worker ended with code 1"]


RESULT = {"output": {"transcription": "Hello."}}


@pytest.mark.parametrize(
    ("posts", "verdict"),
    [([RESULT], "right"), ([RESULT, RESULT], "right"), ([RESULT, {"output": {"transcription": "Hello"}}], "wrong")],
    ids=["once", "twice", "two results"],
)
def test_a_result_may_come_twice_if_it_is_the_same(posts: list[dict[str, Any]], verdict: str) -> None:
    job = Job("job-1", {}, status="COMPLETED", output=posts[-1]["output"], posts=posts)
    assert Sent(Kind("greeting", {}, Words("hello")), job).verdict()[0] == verdict
