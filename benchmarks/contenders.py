"""Those that transcribe: the worker, the plain worker that most people write, and faster-whisper alone.

Each is a process that is started, warmed up, given loads and stopped. The two workers are real SDK processes behind a
local endpoint, and download each job's file; faster-whisper alone is spared both. Only loopback addresses are used, and
nothing is waited for without a limit.
"""

import multiprocessing
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Semaphore
from typing import Any, Protocol

import requests
from file_server import Answer as Reply
from file_server import Exchange, FileServer, head
from local_endpoint import ENDPOINT_ID, Job, LocalEndpoint
from worker_process import WorkerProcess

from benchmarks import load as jobs
from benchmarks.corpus import wav_bytes
from benchmarks.load import Answer, JobFailed, Load, Sound
from benchmarks.models import find
from whisper_worker.settings import Settings, Threads, available_cores

DOWNLOAD_S = 0.3  # from the request for a file to its first byte: what an object store takes
START_S = 600  # at most: the SDK's import, the weights, the first call of the model
POST_S = 60  # at most, as is the next
STOP_S = 30
LOG_LINES = 30  # of a worker whose jobs fail
WARM_UP = (2.0, 5.0)  # the shortest and longest clip to warm up with, in seconds


@dataclass(frozen=True)
class Model:
    """What all contenders load, and where."""

    folder: str
    device: str
    compute_type: str

    @property
    def env(self) -> dict[str, str]:
        settings = {"MODEL": self.folder, "DEVICE": self.device, "COMPUTE_TYPE": self.compute_type}
        return {**settings, "CHECK_WORDS": "false"}  # random weights have their own


class Running(Protocol):
    """A contender's process that has warmed up."""

    def answers(self, load: Load) -> list[Answer]:
        """In the order of the load's sounds."""

    def memory(self) -> "Memory":
        """Of the process."""


@dataclass(frozen=True)
class Memory:
    """What a process holds (its resident set), and the most that it ever held."""

    held_bytes: int
    peak_bytes: int

    @classmethod
    def of(cls, pid: int) -> "Memory":
        """Zero of a process that has ended. Linux only."""
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        kilobytes = {
            key: value.split()[0] for key, _, value in (line.partition(":") for line in lines) if value.split()
        }
        return cls(int(kilobytes.get("VmRSS", 0)) * 1024, int(kilobytes.get("VmHWM", 0)) * 1024)


class Contender(Protocol):
    """Something that can be started; the end of the `with` ends its process. No wait is longer than `timeout_s`."""

    def running(self, timeout_s: float) -> AbstractContextManager[Running]: ...


@dataclass(frozen=True)
class Worker:
    """`handler.py` with its defaults, or with some of its settings."""

    model: Model
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def threads(self) -> Threads:
        """Those that the process will have."""
        return Threads.plan(Settings.from_env(self.settings), self.model.device, available_cores())

    def running(self, timeout_s: float) -> AbstractContextManager[Running]:
        return _serving(["handler.py"], {**self.model.env, **self.settings}, timeout_s)


@dataclass(frozen=True)
class PlainWorker:
    """`baseline_worker`: one job at a time."""

    model: Model
    vad_filter: bool = False

    def running(self, timeout_s: float) -> AbstractContextManager[Running]:
        env = {**self.model.env, "VAD_FILTER": str(self.vad_filter).lower()}
        return _serving(["-m", "benchmarks.baseline_worker"], env, timeout_s)


@contextmanager
def _serving(program: Sequence[str], env: Mapping[str, str], timeout_s: float) -> Iterator[Running]:
    env = {"RUNPOD_ALLOW_PRIVATE_DOWNLOAD_URLS": "true", **env}
    with FileServer() as files, LocalEndpoint() as endpoint, WorkerProcess(endpoint, program=program, **env) as process:
        process.wait_until_ready(START_S)
        serving = _Serving(files, endpoint, process, timeout_s)
        warm_up(serving)
        yield serving


class _Serving:
    def __init__(self, files: FileServer, endpoint: LocalEndpoint, process: WorkerProcess, timeout_s: float) -> None:
        self._files = files
        self._endpoint = endpoint
        self._process = process
        self._timeout_s = timeout_s

    def answers(self, load: Load) -> list[Answer]:
        paths = {sound: f"/{number}.wav" for number, sound in enumerate(load.sounds)}
        self._files.routes.update({path: _slow_reply(wav_bytes(sound.samples)) for sound, path in paths.items()})
        try:
            answers = jobs.answers(load, lambda sound: self._result(self._files.url(paths[sound])))
        finally:
            self._files.routes.clear()
        if any(answer.failure for answer in answers):
            print(*self._process.messages[-LOG_LINES:], sep="\n", file=sys.stderr)
        return answers

    def _result(self, url: str) -> str:
        job = send(self._endpoint, url)
        try:
            self._process.wait_for(lambda: job.is_final, self._timeout_s)
        except AssertionError:
            late = f"no result within {self._timeout_s:g} s"
            raise JobFailed("the worker has ended" if self._process.has_ended else late) from None
        if job.status != "COMPLETED":
            raise JobFailed(job.error or job.status)
        return str(job.output["transcription"])

    def memory(self) -> Memory:
        return Memory.of(self._process.pid)


def send(endpoint: LocalEndpoint, audio: str, **options: Any) -> Job:
    """A new job: to transcribe a URL, or a file of this machine."""
    job = {"input": {"audio": audio, **options}}
    reply = requests.post(f"{endpoint.url}/{ENDPOINT_ID}/run", json=job, timeout=POST_S)
    return endpoint.jobs[reply.json()["id"]]


def _slow_reply(body: bytes) -> Reply:
    def reply(exchange: Exchange) -> None:
        time.sleep(DOWNLOAD_S)
        exchange.send(head(200, f"Content-Length: {len(body)}"))
        exchange.send(body)

    return reply


@dataclass(frozen=True)
class FasterWhisper:
    """faster-whisper alone, called by as many threads as its model has workers: what the machine can do at all.

    The sounds are decoded beforehand; the decoding options are the worker's.
    """

    model: Model
    threads: Threads
    vad_filter: bool = False

    @contextmanager
    def running(self, timeout_s: float) -> Iterator[Running]:
        spawn = multiprocessing.get_context("spawn")  # CTranslate2 has threads, which a fork would lose
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_transcribe_loads, args=(theirs, self), daemon=True)
        process.start()
        theirs.close()  # so that ours tells of its end
        try:
            alone = _Alone(ours, int(process.pid or 0), timeout_s)
            warm_up(alone)
            yield alone
        finally:
            ours.close()
            process.join(STOP_S)
            process.kill()  # if it still lives


class _Alone:
    def __init__(self, connection: Connection, pid: int, timeout_s: float) -> None:
        self._connection = connection
        self._pid = pid
        self._timeout_s = timeout_s

    def answers(self, load: Load) -> list[Answer]:
        self._connection.send(load)
        if not self._connection.poll(self._timeout_s):
            raise TimeoutError(f"faster-whisper alone has not answered a load within {self._timeout_s:g} s")
        try:
            answers: list[Answer] = self._connection.recv()
        except EOFError:
            raise RuntimeError("faster-whisper alone has ended; its error stands above") from None
        return answers

    def memory(self) -> Memory:
        return Memory.of(self._pid)


def _transcribe_loads(connection: Connection, contender: FasterWhisper) -> None:
    """The process: loads come in, answers go out, until the other side closes."""
    from faster_whisper import WhisperModel

    model, threads = contender.model, contender.threads
    whisper = WhisperModel(
        model.folder,
        device=model.device,
        compute_type=model.compute_type,
        num_workers=threads.inter,
        cpu_threads=threads.intra,
    )
    turns = Semaphore(threads.inter)

    def transcribe(sound: Sound) -> str:
        with turns:
            segments, _ = whisper.transcribe(
                sound.samples, beam_size=5, condition_on_previous_text=False, vad_filter=contender.vad_filter
            )
            return "".join(segment.text for segment in segments)

    while True:
        try:
            load = connection.recv()
        except EOFError:
            return
        connection.send(jobs.answers(load, transcribe))


def warm_up(contender: Running) -> None:
    """One job, which must succeed."""
    (answer,) = contender.answers(Load(jobs.clips(*WARM_UP, count=1)))
    if answer.failure:
        raise RuntimeError(f"the first job failed: {answer.failure}")


def model(options: Namespace) -> Model:
    """The one that the command line names."""
    return Model(str(find(options.model).folder), options.device, options.compute_type)


def add_worker_argument(parser: ArgumentParser) -> None:
    """`options.worker`: a list of names and settings."""
    parser.add_argument(
        "--worker",
        type=variant,
        action="append",
        default=[],
        metavar="NAME:KEY=VALUE,…",
        help="also measure the worker with these settings, under this name; may be given several times",
    )


def variant(text: str) -> tuple[str, dict[str, str]]:
    """`NAME:KEY=VALUE,KEY=VALUE`"""
    name, colon, settings = text.partition(":")
    pairs = [pair.partition("=") for pair in settings.split(",") if pair]
    if not name or not colon or not all(key.isupper() and equals for key, equals, _ in pairs):
        raise ArgumentTypeError(f"{text!r} is not NAME:KEY=VALUE,KEY=VALUE")
    return name, {key: value for key, _, value in pairs}
