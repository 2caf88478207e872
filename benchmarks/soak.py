"""Whether anything is lost, wrong or left when the worker runs for long, among bad jobs, cancelled ones and faults.

A check, not a measurement: with `failures` the command ends with code 1. In `data`: `jobs`, each with its kind, its
verdict and, when that is bad, why, and the worker's log of it; `kinds`, how often each kind was sent; `samples`, the
worker's process over time; `errors`, the lines of its log that shouldn't be there.
"""

import re
import time
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import mean
from tempfile import TemporaryDirectory
from threading import Event, Lock, Thread
from typing import Literal, NamedTuple

import psutil
import requests
from file_server import FileServer
from local_endpoint import ENDPOINT_ID, HANG_UP, TAKE_AND_HANG_UP, Job, LocalEndpoint
from worker_process import WorkerProcess

from benchmarks.contenders import START_S, model
from benchmarks.mix import LIMITS, Kind, Mix, Words
from benchmarks.report import Chart, Report, Table
from benchmarks.turns import progress
from whisper_worker.settings import MiB

NAME = "soak"
HELP = "minutes of good, bad and cancelled jobs among faults: what is lost, wrong or left (a check)"
QUICK = {"minutes": 0.4}
IS_IN_ALL = False  # a check, and a long one

JOB_S = 240.0  # at most, from a job's sending to its end
POST_S = 60.0
IDLE_S = 30.0  # at most, from the last job's end to a heartbeat that names none
CLOSED_S = 10.0  # and then until its files are closed
RESULT_TIMEOUT_S = 2
SAMPLES = 120  # at least, of the process
ROWS = 10  # of the table over time
WARM_UP = 0.1  # of the run: pools fill, and the allocator's arenas
MORE_FILES = 10  # connections that are kept for the next job, in the end beside those after the first job
MORE_THREADS = 10  # in the end, beside the most in the first half, when the pools may yet have been filling
MORE_MEMORY = 1.2  # the last quarter's, of the first's
STEADY_MINUTES = 5.0  # a shorter run says nothing about memory
TOLD = 20  # of the jobs that went wrong, and of the lines in the log

SETTINGS = {
    **LIMITS,
    "RESULT_TIMEOUT_S": f"{RESULT_TIMEOUT_S}",
    "PROGRESS_INTERVAL_S": "0.5",
    "CANARY_JOBS": "50",
    "SHUTDOWN_GRACE_S": "10",  # less than the patience of `WorkerProcess.stop`
}


class Fault(NamedTuple):
    """What the endpoint does wrong: it answers requests of a kind with a status, a few in a row."""

    operation: str
    status: int
    most: int = 1
    weight: float = 1.0  # how often, beside the others


FAULTS = [
    *(Fault("job-done", status, most=4) for status in (500, 502, HANG_UP, 429)),
    Fault("job-done", TAKE_AND_HANG_UP, most=2),
    *(Fault("job-take", status, most=2) for status in (500, HANG_UP, 400, 204)),
    Fault("job-take", 429, weight=0.2),  # the SDK takes no jobs for 5 s
    Fault("job-stop", 500),
    Fault("ping", 500),
]
STREAM_FAULTS = [Fault("job-stream", status, most=3) for status in (500, HANG_UP, 429)]
PAUSES_S = (0.5, 2.5)  # between two of them

ERRORS = re.compile(
    r"event=job_failed (?!.*\bcode=)|code=INTERNAL|event=(result_lost|unhealthy|reload_failed|model_reloaded"
    r"|canary_failed)|Error handling job|Uncaught exception|never retrieved|never awaited|Unclosed"
)

Verdict = Literal["right", "failed as expected", "cancelled", "wrong", "lost"]


@dataclass(frozen=True)
class Sent:
    """A job, and what was sent for it."""

    kind: Kind
    job: Job

    def verdict(self) -> tuple[Verdict, str | None]:
        """With the reason why it is wrong or lost. To be asked when the worker has ended: late posts count as well."""
        job, expected = self.job, self.kind.expected
        if not job.is_final:
            return "lost", f"it is {job.status}"
        if any(result != job.results[0] for result in job.results):
            return "wrong", "it has several results that differ"
        if job.status == "CANCELLED":
            return ("cancelled", None) if self.kind.cancelled_while_it else ("wrong", "nobody cancelled it")
        if job.status == "FAILED":
            if not job.error:
                return "lost", "it failed without an error"
            is_expected = isinstance(expected, str) and job.error.startswith(f"{expected}: ")
            return ("failed as expected", None) if is_expected else ("wrong", job.error)
        if not job.output:
            return "lost", f"it is {job.status}, without output"
        if isinstance(expected, str):
            return "wrong", f"it didn't fail as {expected}"
        why = self._mismatch(expected)
        return ("wrong", why) if why else ("right", None)

    def _mismatch(self, expected: Words) -> str | None:
        output = self.job.output
        if isinstance(output, dict):
            return expected.mismatch(self.kind.input, output)
        if self.job.streamed != output:
            return "what was streamed differs from the result"
        if [item["type"] for item in output if item["type"] != "segments"] != ["info", "result"]:
            return "the stream isn't whole"
        return expected.mismatch(self.kind.input, output[-1])


@dataclass(frozen=True)
class Sample:
    """Of the worker's process alone; the SDK's heartbeat is another one."""

    minutes: float
    jobs_ended: int
    held_bytes: int
    open_files: int
    threads: int

    @property
    def row(self) -> list[float | int]:
        return [self.minutes, self.jobs_ended, self.held_bytes / MiB, self.open_files, self.threads]


@dataclass(frozen=True)
class Run:
    """What is left of a worker that has ended."""

    sent: Sequence[Sent]
    samples: Sequence[Sample]  # the first after one job, the last when all had ended
    exit_code: int
    files_left: int
    files_open: Sequence[str]  # of the temporary ones, when all jobs had ended
    log: Sequence[str]

    @property
    def verdicts(self) -> list[tuple[Sent, Verdict, str | None]]:
        return [(sent, *sent.verdict()) for sent in self.sent]

    @property
    def errors(self) -> list[str]:
        return [line for line in self.log if ERRORS.search(line)]

    @property
    def quarters_bytes(self) -> tuple[float, float] | None:
        """Memory held, on average, in the first and in the last quarter of the time after the warm-up."""
        during = self.samples[1:-1]
        warm = [sample.held_bytes for sample in during[int(len(during) * WARM_UP) :]]
        quarter = len(warm) // 4
        return (mean(warm[:quarter]), mean(warm[-quarter:])) if quarter else None

    def failures(self) -> list[str]:
        bad = [f"{s.kind.name}, {s.job.id}: {verdict}: {why}" for s, verdict, why in self.verdicts if why]
        told = bad[:TOLD] + ([f"{len(bad) - TOLD} more jobs"] if len(bad) > TOLD else [])
        if self.exit_code:
            told.append(f"the worker ended with code {self.exit_code}")
        if not self._said("event=shutdown jobs=0 ") or not self._said("event=shutdown_done unanswered=0"):
            told.append("told to end, the worker still held jobs")
        return [*told, *self._leaks(), *(f"in the log: {line.splitlines()[0]}" for line in self.errors[:TOLD])]

    def _leaks(self) -> Iterator[str]:
        if self.files_left:
            yield f"{self.files_left} temporary files are left"
        if self.files_open:
            yield f"{len(self.files_open)} temporary files stay open: {', '.join(self.files_open[:TOLD])}"
        if len(self.samples) < 2:
            return
        first, *during, last = self.samples
        if last.open_files > first.open_files + MORE_FILES:
            yield f"{last.open_files} files are open in the end, after the first job there were {first.open_files}"
        most = max(sample.threads for sample in (first, *during[: len(during) // 2]))
        if last.threads > most + MORE_THREADS:
            yield f"{last.threads} threads are left in the end, in the first half they were {most} at most"
        before, after = self.quarters_bytes or (0.0, 0.0)
        if last.minutes - first.minutes >= STEADY_MINUTES and after > MORE_MEMORY * before:
            yield f"memory has grown from {before / MiB:.0f} MiB in the first quarter to {after / MiB:.0f} in the last"

    def log_of(self, job: Job) -> list[str]:
        return [line for line in self.log if f"job={job.id} " in f"{line} "]

    def _said(self, start: str) -> bool:
        return any(line.startswith(start) for line in self.log)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=15.0, help="for which jobs are sent (%(default)g)")
    parser.add_argument("--jobs-at-once", type=int, default=8, help="jobs in flight (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the jobs and the faults (%(default)s)")
    parser.add_argument("--streaming", action=BooleanOptionalAction, default=False, help="answer with streams")


def run(options: Namespace) -> Report:
    ended = _run(options)
    tables = [_jobs_table(ended), _time_table(ended), _end_table(ended)]
    return Report(
        NAME,
        "Soak: what is lost, wrong or left",
        tables=tables,
        charts=[_chart(ended)],
        notes=[
            "Right: a short clip's words all are, a long file's for the most part. The faults of the endpoint and of "
            "the file server are such that every good job can succeed.",
            "Memory, files and threads are those of the worker's process; the first row is after one job, the last "
            "when all have ended. The quarters are those of the time after a warm-up, the first tenth.",
        ],
        failures=ended.failures(),
        data={
            "jobs": [
                {"kind": sent.kind.name, "job": sent.job.id, "verdict": verdict, "why": why}
                | ({"log": ended.log_of(sent.job)} if why else {})
                for sent, verdict, why in ended.verdicts
            ],
            "kinds": dict(Counter(sent.kind.name for sent in ended.sent)),
            "samples": [asdict(sample) for sample in ended.samples],
            "errors": ended.errors,
        },
    )


def _run(options: Namespace) -> Run:
    mix = Mix(options.seed)
    with TemporaryDirectory() as folder:
        env = {**model(options).env, **SETTINGS, "STREAMING": str(options.streaming).lower(), "TMPDIR": folder}
        with FileServer() as files, LocalEndpoint() as endpoint, WorkerProcess(endpoint, **env) as worker:
            worker.wait_until_ready(START_S)
            callers = Callers(mix, endpoint, files, worker)
            watch = Watch(worker, callers)
            callers.send(mix.good)
            _wait_until_idle(endpoint, worker, folder)
            watch.look()
            with callers.calling(options.jobs_at_once), _faults(endpoint, options):
                watch.look_for(options.minutes * 60)
            files_open = _wait_until_idle(endpoint, worker, folder)
            watch.look()
            exit_code = worker.stop()
            files_left = sum(1 for _ in Path(folder).rglob("*"))
            return Run(callers.sent, watch.samples, exit_code, files_left, files_open, worker.messages)


def _wait_until_idle(endpoint: LocalEndpoint, worker: WorkerProcess, folder: str) -> list[str]:
    """A cancelled job has ended for its caller before it has for the worker, and for its threads. The files in the
    folder that stay open all the same."""
    before = len(endpoint.pings)
    with suppress(AssertionError):  # the worker has ended, or says at its end which jobs it has
        worker.wait_for(lambda: len(endpoint.pings) > before and not endpoint.pings[-1], IDLE_S)
        worker.wait_for(lambda: not worker.open_files_in(Path(folder)), CLOSED_S)
    return [] if worker.has_ended else worker.open_files_in(Path(folder))


class Callers:
    """Send jobs, one after the other in each thread, and cancel some of them."""

    def __init__(self, mix: Mix, endpoint: LocalEndpoint, files: FileServer, worker: WorkerProcess) -> None:
        self.sent: list[Sent] = []
        self._mix = mix
        self._endpoint = endpoint
        self._files = files
        self._worker = worker
        self._lock = Lock()  # of `mix` and `_number`
        self._number = 0
        self._over = Event()

    @contextmanager
    def calling(self, jobs_at_once: int) -> Iterator[None]:
        """Jobs are sent within the `with`; it is left when all have ended, or their time is over."""
        with ThreadPoolExecutor(jobs_at_once, "caller") as pool:
            calls = [pool.submit(self._call) for _ in range(jobs_at_once)]
            try:
                yield
            finally:
                self._over.set()
        for call in calls:
            call.result()

    def _call(self) -> None:
        while not (self._over.is_set() or self._worker.has_ended):
            self.send(self._mix.draw)

    def send(self, draw: Callable[[], Kind]) -> None:
        """A job, and wait until it has ended."""
        with self._lock:
            kind = draw()
            self._number += 1
            path = f"/{self._number}{kind.suffix}"
        job_input = kind.input
        if kind.route:
            self._files.routes[path] = kind.route
            job_input = {**job_input, "audio": self._files.url(path)}
        url = f"{self._endpoint.url}/{ENDPOINT_ID}"
        posted = requests.post(f"{url}/run", json={"input": job_input}, timeout=POST_S).json()
        job = self._endpoint.jobs[posted["id"]]
        self.sent.append(Sent(kind, job))
        with suppress(AssertionError):  # too late, or the worker has ended: the verdict tells it
            if kind.cancelled_while_it:
                self._worker.wait_for(lambda: job.is_final or self._has_come_to(kind, job, path), JOB_S)
                requests.post(f"{url}/cancel/{job.id}", timeout=POST_S)
            self._worker.wait_for(lambda: job.is_final, JOB_S)
        self._files.routes.pop(path, None)

    def _has_come_to(self, kind: Kind, job: Job, path: str) -> bool:
        if kind.cancelled_while_it == "downloads":
            return bool(self._files.requests[path])
        if kind.cancelled_while_it == "runs":
            return bool(job.streamed) or any(report["stage"] == "transcribe" for report in job.reports)
        return True


@contextmanager
def _faults(endpoint: LocalEndpoint, options: Namespace) -> Iterator[None]:
    """One after the other, until the `with` ends: the next requests of a kind fail, or results wait too long."""
    random, over = Random(options.seed), Event()
    faults = FAULTS + (STREAM_FAULTS if options.streaming else [])

    def order() -> None:
        while not over.wait(random.uniform(*PAUSES_S)):
            if random.random() < 0.1:
                endpoint.slow["job-done"] = 2.0 * RESULT_TIMEOUT_S
                over.wait(RESULT_TIMEOUT_S)
                del endpoint.slow["job-done"]
            else:
                (fault,) = random.choices(faults, [fault.weight for fault in faults])
                if not endpoint.faults_left(fault.operation):  # while nobody asks they would grow past all patience
                    endpoint.fail_next(fault.operation, fault.status, random.randint(1, fault.most))

    thread = Thread(target=order, name="faults")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Watch:
    """Over the worker's process. Once that has ended, nothing more is seen."""

    def __init__(self, worker: WorkerProcess, callers: Callers) -> None:
        self.samples: list[Sample] = []
        self._began = time.monotonic()
        self._worker = worker
        self._callers = callers
        self._process = psutil.Process(worker.pid)

    def look_for(self, seconds: float) -> None:
        count = max(SAMPLES, int(seconds))
        began = time.monotonic()
        for number in progress(range(1, count + 1), NAME):
            time.sleep(max(0.0, began + seconds * number / count - time.monotonic()))
            if self._worker.has_ended:
                return
            self.look()

    def look(self) -> None:
        with suppress(psutil.Error), self._process.oneshot():
            sample = Sample(
                minutes=(time.monotonic() - self._began) / 60,
                jobs_ended=sum(sent.job.is_final for sent in list(self._callers.sent)),
                held_bytes=self._process.memory_info().rss,
                open_files=self._process.num_fds(),
                threads=self._process.num_threads(),
            )
            self.samples.append(sample)


# The report.


def _jobs_table(ended: Run) -> Table:
    counts: Mapping[str, int] = Counter(verdict for _, verdict, _ in ended.verdicts)
    verdicts: Sequence[Verdict] = ("right", "failed as expected", "cancelled", "wrong", "lost")
    again = sum(len(sent.job.results) > 1 for sent in ended.sent)
    rows = [("sent", len(ended.sent)), *((verdict, counts[verdict]) for verdict in verdicts)]
    return Table("Jobs", ["", "jobs"], [*rows, ("result posted more than once", again)])


def _time_table(ended: Run) -> Table:
    steps = len(ended.samples) - 1
    chosen = sorted({steps * number // ROWS for number in range(ROWS + 1)} | {max(steps - 1, 0)})
    rows = [ended.samples[number].row for number in chosen]
    return Table("Over time", ["minutes", "jobs ended", "memory, MiB", "open files", "threads"], rows)


def _end_table(ended: Run) -> Table:
    first, last = ended.quarters_bytes or (None, None)
    traces = sum("Traceback" in line for line in ended.log)
    rows: list[tuple[str, float | int | None]] = [
        ("exit code", ended.exit_code),
        ("temporary files left", ended.files_left),
        ("temporary files still open", len(ended.files_open)),
        ("errors in the log", len(ended.errors)),
        ("traces in the log, expected causes included", traces),
        ("deliveries tried again", sum(line.startswith("event=delivery_retried ") for line in ended.log)),
        ("memory in the first quarter, MiB", first and first / MiB),
        ("memory in the last quarter, MiB", last and last / MiB),
        ("last quarter, of the first", last / first if first and last else None),
    ]
    return Table("In the end", ["", "value"], rows)


def _chart(ended: Run) -> Chart:
    minutes = [sample.minutes for sample in ended.samples]
    memory = [sample.held_bytes / MiB for sample in ended.samples]
    return Chart("memory", "The worker's memory", "minutes", "MiB", minutes, {"memory": memory})
