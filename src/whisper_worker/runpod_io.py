"""What only the RunPod SDK knows: start-up, the handler's kind, the concurrency, the fitness check, the end.

Start-up, in this order: settings (bad ones end the process, before anything slow), the model's weights beside the SDK's
import (which takes seconds), then the SDK's loop: queue, `--test_input`, `test_input.json` or `--rp_serve_api`.

The process ends with code 0 when it was told to end, 1 when it can't start or its one local job failed, and with one of
`errors` when the worker is past help.
"""

import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from whisper_worker import log
from whisper_worker.process import LAST_RESORT_S, end_process, end_process_in
from whisper_worker.settings import Settings, SettingsError, Threads, available_cores, on_runpod

if TYPE_CHECKING:
    from whisper_worker.health import Health
    from whisper_worker.registry import Registry
    from whisper_worker.service import Service

LAST_ANSWERS_S = 2.0

Json = dict[str, Any]


def main() -> None:
    """Run the worker until the SDK ends it. Settings or a model that can't be used end the process with code 1."""
    try:
        _run(Settings.from_env(os.environ))
    except SettingsError as error:
        sys.exit(f"whisper_worker: {error}")


def _run(settings: Settings) -> None:
    log.configure(settings.log_level)
    _end_when_told()
    _quieten_sdk()
    _one_thread_a_product()

    # All imports by this thread, one after the other: two threads that import at once can see half-made modules.
    # The weights are read on another one meanwhile, without holding the GIL.
    from whisper_worker.engine import Engine, choose_compute_type, choose_device
    from whisper_worker.health import Canary, Health
    from whisper_worker.models import Catalog, ModelFiles, ModelUnavailable, find
    from whisper_worker.registry import Loaded, Registry

    try:
        catalog = Catalog.from_settings(settings)
    except ModelUnavailable as error:
        sys.exit(f"whisper_worker: MODEL: {error}")
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

    def load(files: ModelFiles) -> Engine:
        return Engine.load(files, device, compute_type, threads, settings)

    health = Health(settings, on_alarm=lambda error: end_process_in(_last_resort_s(), error.exit_code))
    registry = Registry(settings, catalog, health, load)

    def preload() -> None:  # the registry alone may hold the model: it may free it
        engine = load(find(settings.model))
        registry.preload(Loaded(engine, Canary(engine, settings, health), engine.name))

    with ThreadPoolExecutor(1, "load") as loader:
        loading = loader.submit(preload)
        import whisper_worker.job_loop  # noqa: F401  (and with it the SDK)

        try:
            loading.result()
        except ModelUnavailable as error:
            sys.exit(f"whisper_worker: {error}")
        except Exception as error:  # whatever CTranslate2 and the tokenizer say of broken files or a missing GPU
            sys.exit(f"whisper_worker: the model {settings.model or 'bundled'} can't be loaded: {error}")

    _serve(settings, threads, registry, health)


def _serve(settings: Settings, threads: Threads, registry: "Registry", health: "Health") -> None:
    import runpod
    from runpod.serverless.modules import rp_scale

    from whisper_worker.job_loop import JobLoop
    from whisper_worker.service import Service

    takes_jobs, serves_api = _takes_jobs(), _arguments().rp_serve_api
    service = Service(settings, threads, registry, health)
    signals: list[int] = []
    rp_scale.JobScaler = partial(JobLoop, service=service, health=health, settings=settings, signals=signals)

    def warm_up() -> None:
        registry.warm_up()
        # Not before: a GPU newer than the kernels may need minutes for the first call.
        health.watch(lambda: registry.longest_call_s)

    def check_fitness() -> None:
        warm_up()
        _leave_to_the_loop(signals)

    runpod.serverless.register_fitness_check(check_fitness)
    if serves_api:  # the SDK checks no fitness there
        warm_up()
    try:
        runpod.serverless.start(
            {
                "handler": _handler(service, settings, on_this_machine=not (takes_jobs or serves_api)),
                "return_aggregate_stream": True,
                # It must never change: the SDK would wait for all jobs to end before it takes another.
                "concurrency_modifier": lambda _: threads.jobs,
            }
        )
    finally:
        if health.unhealthy:
            end_process(health.unhealthy.exit_code)
        health.close()
        service.close()
        registry.close()
        if takes_jobs:
            has_failed = not isinstance(sys.exc_info()[1], (SystemExit, type(None)))
            if has_failed:
                log.event("worker_failed", level=log.ERROR, trace=True)
            end_process(int(has_failed))


def _handler(service: "Service", settings: Settings, *, on_this_machine: bool) -> Callable[[Json], Any]:
    """What the SDK calls for a job. It can't run a generator on a test input: it prints its address."""
    from whisper_worker import local

    if on_this_machine:
        return partial(local.printed if settings.streaming else local.with_bar, service)
    return service.stream if settings.streaming else service.run


def _end_when_told() -> None:
    """Until the SDK's loop has its own handler there is no job to lose. In a container this process has the number 1,
    and the kernel keeps signals from that one for which it has no handler."""
    if _is_given_jobs():
        signal.signal(signal.SIGTERM, lambda *_: end_process(0))
        signal.signal(signal.SIGINT, lambda *_: end_process(0))


def _leave_to_the_loop(signals: list[int]) -> None:
    """From now on signals to end are only noted. The SDK is about to fork its heartbeat: while that is being made it
    can't be ended, and would outlive us. It goes on as long as the worker, which signals to all its group end too."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: signals.append(number))
        os.register_at_fork(after_in_child=partial(signal.signal, number, signal.SIG_IGN))


def _arguments() -> Any:
    import runpod

    return runpod.serverless.parser.parse_known_args()[0]


def _takes_jobs() -> bool:
    """Whether jobs come from RunPod. Once the SDK is imported."""
    arguments = _arguments()
    return _is_given_jobs() and not (arguments.rp_serve_api or arguments.test_input)


def _last_resort_s() -> float:
    """The job loop ends in order, if it can; on this machine there is nothing to wait for but the answers."""
    return LAST_RESORT_S if _takes_jobs() else LAST_ANSWERS_S


def _is_given_jobs() -> bool:
    return bool(os.environ.get("RUNPOD_WEBHOOK_GET_JOB"))


def _one_thread_a_product() -> None:
    """numpy's matrix products share each out to all cores, however small, and make those wait spinning for each other:
    many times the work when several jobs' audio is decoded beside the model. Read when numpy is imported."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _quieten_sdk() -> None:
    """The SDK logs at DEBUG unless told otherwise, and then writes whole requests and transcripts into the log."""
    if not {"RUNPOD_LOG_LEVEL", "RUNPOD_DEBUG_LEVEL"} & os.environ.keys():
        os.environ["RUNPOD_LOG_LEVEL"] = "WARN" if on_runpod(os.environ) else "INFO"
