"""How long a worker takes from its process's start to its first request for work, and to its first result.

Beside it, in turns: what no such worker can do without, the bare import of the SDK, and the bare model, loaded and
called once, each in a process of its own. Files are read before, so that all find them in the page cache: what a disk
or a network volume costs more, it costs all of them.

In `data`: `starts`, a list with each contender and what each repeat measured.
"""

import base64
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence

import requests
from local_endpoint import ENDPOINT_ID, LocalEndpoint
from media import CLIP
from worker_process import WorkerProcess, figures

from benchmarks.contenders import POST_S, START_S, Model, model
from benchmarks.report import Report, Table, Value
from benchmarks.turns import Figures, take_turns

NAME = "cold_start"
HELP = "from a process's start to its first request for work and its first result, and where the time goes"
QUICK = {"repeats": 1}

SDK = "the SDK's bare import"
MODEL = "the bare model, loaded and called once"
WORKER = "the worker"

BARE_SDK = "import runpod"
BARE_MODEL = """
import sys
from faster_whisper import WhisperModel
folder, device, compute_type, clip = sys.argv[1:]
model = WhisperModel(folder, device=device, compute_type=compute_type)
print(*(segment.text for segment in model.transcribe(clip, language="en")[0]))
"""

STEPS = {
    "python": "Python, and the settings",
    "import_libraries": "imports: CTranslate2, faster-whisper, onnxruntime, PyAV",
    "find_model": "the model's files found",
    "read_model": "the weights read, the speech detector made",
    "warm_up": "the first call of the model",
    "import_sdk": "import of the SDK",
    "import_service": "imports of what serves jobs",
    "wait_for_model": "waiting for the weights",
    "checks": "start-up checks, with what is left of the first call; the SDK's heartbeat",
}
ON_THE_LOADER = ("find_model", "read_model", "warm_up")


def add_arguments(parser: ArgumentParser) -> None:
    parser.set_defaults(repeats=7)


def run(options: Namespace) -> Report:
    loaded = model(options)
    for contender in (SDK, MODEL, WORKER):  # once, for the page cache
        _measure(contender, loaded)
    figures = take_turns([SDK, MODEL, WORKER], options.repeats, lambda contender: _measure(contender, loaded), "starts")
    return Report(
        NAME,
        "Cold start",
        tables=[_table(figures), _steps_table(figures)],
        notes=[
            "Seconds from the start of the process, medians; a ratio is the median of those within one repeat.",
            "The steps marked `beside` run on a thread of their own, while the main thread imports what follows.",
        ],
        data={"starts": figures.listed()},
    )


def _measure(contender: str, loaded: Model) -> Mapping[str, float]:
    if contender == WORKER:
        return _worker(loaded)
    arguments = [loaded.folder, loaded.device, loaded.compute_type, str(CLIP)] if contender == MODEL else []
    program = BARE_MODEL if contender == MODEL else BARE_SDK
    started = time.monotonic()
    subprocess.run(  # noqa: S603
        [sys.executable, "-c", program, *arguments], stdout=subprocess.DEVNULL, timeout=START_S, check=True
    )
    return {"ready_s": time.monotonic() - started}


def _worker(loaded: Model) -> Mapping[str, float]:
    """A job waits for it already."""
    with LocalEndpoint() as endpoint:
        clip = base64.b64encode(CLIP.read_bytes()).decode()
        body = {"input": {"audio_base64": clip, "language": "en"}}
        reply = requests.post(f"{endpoint.url}/{ENDPOINT_ID}/run", json=body, timeout=POST_S)
        job = endpoint.jobs[reply.json()["id"]]
        started = time.monotonic()
        with WorkerProcess(endpoint, **loaded.env) as worker:
            worker.wait_until_ready(START_S)
            ready_s = time.monotonic() - started
            worker.wait_for(lambda: job.is_final)
            result_s = time.monotonic() - started
            if job.status != "COMPLETED":
                raise RuntimeError(f"the first job failed: {job.error}")
            (steps,) = worker.events("ready")
    return {"ready_s": ready_s, "result_s": result_s, **figures(steps)}


def _table(figures: Figures[str]) -> Table:
    larger = max((SDK, MODEL), key=lambda contender: figures.median(contender, "ready_s"))
    rows: list[Sequence[Value]] = [
        [contender, figures.median(contender, "ready_s"), None, figures.ratio(contender, "ready_s", to=larger)]
        for contender in (SDK, MODEL)
    ]
    result_s = figures.median(WORKER, "result_s")
    rows.append([WORKER, figures.median(WORKER, "ready_s"), result_s, figures.ratio(WORKER, "ready_s", to=larger)])
    return Table(
        "From the start of the process", ["", "ready, s", "first result, s", "times the larger bare one"], rows
    )


def _steps_table(figures: Figures[str]) -> Table:
    rows = [
        [meaning, "beside" if step in ON_THE_LOADER else "", figures.median(WORKER, step)]
        for step, meaning in STEPS.items()
    ]
    return Table("Where the worker's time goes", ["step", "thread", "seconds"], rows)
