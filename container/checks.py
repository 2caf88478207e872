"""What is shown of an image, each thing by a container of it. A check returns in words what it has seen, or raises
Failed or AssertionError."""

import base64
import signal
from contextlib import ExitStack
from threading import Barrier
from typing import Any

import requests
from caller import words
from file_server import Answer, FileServer, answer
from local_endpoint import ENDPOINT_ID, Job, LocalEndpoint
from media import CLIP, CLIP_WORDS

from container.engine import Engine
from container.programs import Failed, last_lines
from container.worker import WorkerContainer

STATION_WORDS = "first train to london"  # in test_input.json
GRACE_S = 60  # RunPod gives less, but this machine may be busy
FILES_S = 120  # for all files to be asked for at the same moment
JOBS = 4

WORKER_FILES = {"handler.py", "src", "test_input.json", "LICENSE"}
RIGHTS = """
id -u
touch /worker/file /tmp/file 2>/dev/null
ls /worker/file /tmp/file 2>/dev/null || true
"""
# As root, and with root's right to look into all folders.
NOT_NEEDED = """
ls -A /worker
for tool in cc gcc g++ c++ clang make cargo; do command -v "$tool"; done
find / -xdev '(' -path /proc -o -path /sys ')' -prune -o '(' -path '*/.cache/*' -o -path '/locks' ')' -print || true
find /worker /opt -type d -name tests
"""

# A worker imports these before its first job.
BYTE_CODE = """
import sys, faster_whisper, runpod, whisper_worker.runpod_io
from pathlib import Path
modules = [module for module in list(sys.modules.values()) if getattr(module, "__cached__", None)]
missing = [module.__cached__ for module in modules if not Path(module.__cached__).exists()]
assert not missing, missing
print(len(modules))
"""
CUBLAS = """
import ctypes, ctranslate2
ctypes.CDLL("libcublas.so.12")
print(ctranslate2.get_cuda_device_count())
"""


def test_input(engine: Engine, model: str | None) -> str:
    """The command of the image, where nothing of RunPod is set, does the job in test_input.json."""
    output = engine.run()
    for part in (STATION_WORDS, "Local testing complete", f"'model': {model or 'bundled'!r}"):
        _expect(part.lower() in output.lower(), f"the output has no {part!r}", output)
    _expect("Traceback" not in output, "the output has a traceback", output)
    return "test_input.json is transcribed without network on a read-only root, exit code 0"


def contents(engine: Engine) -> str:
    """Nothing that isn't needed, and no rights that aren't."""
    rights = engine.run("sh", "-c", RIGHTS)
    user, *written = rights.split()
    _expect(user != "0", "the user is root", rights)
    _expect(written == ["/tmp/file"], "not /tmp alone can be written to", rights)  # noqa: S108
    files = engine.run("sh", "-c", NOT_NEEDED, options=("--user", "0", "--cap-add", "DAC_READ_SEARCH"))
    _expect(set(files.split()) == WORKER_FILES, "there is more than the worker, or less", files)
    return f"user {user}; no compiler, caches or tests"


def byte_code(engine: Engine) -> str:
    return f"the byte code of all {int(engine.run('python', '-c', BYTE_CODE))} imported modules is in the image"


def cublas(engine: Engine) -> str:
    output = engine.run("python", "-c", CUBLAS)
    _expect(output.strip() == "0", "CTranslate2 sees GPUs, though the container has none", output)
    return "libcublas.so.12 loads, and CTranslate2 looks for GPUs and finds none"


def jobs(engine: Engine) -> str:
    """The image's command as RunPod runs it: ready, jobs whose files all wait for each other, SIGTERM, the end."""
    together = Barrier(JOBS)
    clip = CLIP.read_bytes()
    routes: dict[str, Answer] = {f"/{number}.ogg": _when_all_ask(together, clip) for number in range(JOBS)}
    with ExitStack() as stack:
        files = stack.enter_context(FileServer(routes))
        endpoint = stack.enter_context(LocalEndpoint())
        worker = stack.enter_context(WorkerContainer(engine, endpoint, RUNPOD_ALLOW_PRIVATE_DOWNLOAD_URLS="true"))
        worker.wait_until_ready(engine.clock.left_s(120))
        sent = [_send(endpoint, {"audio": files.url(path)}) for path in routes]
        sent.append(_send(endpoint, {"audio_base64": base64.b64encode(clip).decode()}))
        worker.wait_for(lambda: all(job.is_final for job in sent), engine.clock.left_s(FILES_S))
        for job in sent:
            log = "\n".join(worker.messages)
            _expect(job.status == "COMPLETED", f"a job has ended as {job.status}: {job.error}", log)
            _expect(
                words(job.output["transcription"]) == CLIP_WORDS, f"other words: {job.output['transcription']}", log
            )
        worker.send(signal.SIGTERM)
        code = worker.wait_until_ended(engine.clock.left_s(GRACE_S))
        _expect(code == 0, f"after SIGTERM the exit code is {code}", "\n".join(worker.messages))
    return f"ready, {JOBS} downloads at once and a file in base64 transcribed, SIGTERM, exit code 0"


def _when_all_ask(together: Barrier, file: bytes) -> Answer:
    def act(exchange: Any) -> None:
        together.wait(FILES_S)
        answer(200, file)(exchange)

    return act


def _send(endpoint: LocalEndpoint, job_input: dict[str, str]) -> Job:
    reply = requests.post(f"{endpoint.url}/{ENDPOINT_ID}/run", json={"input": job_input}, timeout=FILES_S)
    return endpoint.jobs[reply.json()["id"]]


def _expect(holds: bool, otherwise: str, output: str) -> None:
    if not holds:
        raise Failed(f"{otherwise}:\n{last_lines(output)}")
