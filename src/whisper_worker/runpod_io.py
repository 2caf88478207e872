"""What only the RunPod SDK knows: start-up, the handler's kind, the concurrency, the fitness check.

Start-up, in this order: settings (bad ones end the process, before anything slow), the model's weights beside the SDK's
import (which takes seconds), then the SDK's loop: queue, `--test_input`, `test_input.json` or `--rp_serve_api`.
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from whisper_worker import log
from whisper_worker.settings import Settings, SettingsError, Threads, available_cores, on_runpod

if TYPE_CHECKING:
    from whisper_worker.service import Transcriber

WARM_UP_CLIP = "warm_up.ogg"


def main() -> None:
    """Run the worker until the SDK ends it. Settings or a model that can't be used end the process with code 1."""
    try:
        _run(Settings.from_env(os.environ))
    except SettingsError as error:
        sys.exit(f"whisper_worker: {error}")


def _run(settings: Settings) -> None:
    log.configure(settings.log_level)
    _quieten_sdk()
    _one_thread_a_product()

    # All imports by this thread, one after the other: two threads that import at once can see half-made modules.
    # The weights are read on another one meanwhile, without holding the GIL.
    from whisper_worker.engine import Engine, choose_compute_type, choose_device
    from whisper_worker.models import ModelUnavailable, find

    device = choose_device(settings)
    compute_type = choose_compute_type(settings, device)
    cores = available_cores()
    threads = Threads.plan(settings, device, cores)
    log.event(
        "settings",
        device=device,
        compute_type=compute_type,
        cores=cores,
        inter_threads=threads.inter,
        intra_threads=threads.intra,
        batch_size=threads.batch,
        job_concurrency=threads.jobs,
        media_threads=threads.media,
        fit_window_s=settings.fit_window_s if settings.fit_windows else "off",
        piece_seconds=settings.piece_seconds,
    )
    if threads.warning:
        log.event("oversubscribed", level=log.WARNING, note=threads.warning)

    with ThreadPoolExecutor(1, "load") as loader:
        loading = loader.submit(lambda: Engine.load(find(settings.model), device, compute_type, threads, settings))
        import runpod

        from whisper_worker.service import Service

        try:
            engine = loading.result()
        except ModelUnavailable as error:
            sys.exit(f"whisper_worker: {error}")
        except Exception as error:  # whatever CTranslate2 and the tokenizer say of broken files or a missing GPU
            sys.exit(f"whisper_worker: the model {settings.model or 'bundled'} can't be loaded: {error}")

    service = Service(settings, threads, engine)

    async def handle(job: dict[str, Any]) -> dict[str, Any]:
        return await service.run(job)

    @runpod.serverless.register_fitness_check  # type: ignore[untyped-decorator]
    def model_transcribes() -> None:
        """Runs on RunPod before the first job: a GPU that lacks a library says so only when the model is used."""
        warm_up(engine)

    try:
        # The number of jobs must never change: the SDK would wait for all of them to end before it takes another.
        runpod.serverless.start({"handler": handle, "concurrency_modifier": lambda _: threads.jobs})
    finally:
        service.close()


def warm_up(engine: "Transcriber") -> None:
    """Transcribe the clip in this package. Raises what the engine raises, or RuntimeError when it hears nothing."""
    from whisper_worker.audio import decode
    from whisper_worker.pieces import whole
    from whisper_worker.request import Request
    from whisper_worker.stop import Stop

    stop = Stop()
    with files("whisper_worker").joinpath(WARM_UP_CLIP).open("rb") as clip:
        audio = decode(clip, stop, max_seconds=60)
    started = time.monotonic()
    walk = engine.walk(whole(audio.samples), audio.samples, Request(language="en"), stop)
    if not walk.piece(0).segments:
        raise RuntimeError("the model hears nothing in a clip of clear speech")
    log.event("warmed_up", seconds=time.monotonic() - started)


def _one_thread_a_product() -> None:
    """numpy's matrix products share each out to all cores, however small, and make those wait spinning for each other:
    many times the work when several jobs' audio is decoded beside the model. Read when numpy is imported."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _quieten_sdk() -> None:
    """The SDK logs at DEBUG unless told otherwise, and then writes whole requests and transcripts into the log."""
    if not {"RUNPOD_LOG_LEVEL", "RUNPOD_DEBUG_LEVEL"} & os.environ.keys():
        os.environ["RUNPOD_LOG_LEVEL"] = "WARN" if on_runpod(os.environ) else "INFO"
