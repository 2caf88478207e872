"""What only the RunPod SDK knows: start-up, the handler's kind, the concurrency, the fitness check, the end.

Start-up, in this order: settings (bad ones end the process, before anything slow); the model's weights and first call,
beside the imports of the SDK and of what serves jobs; the checks; then the SDK's loop: queue, `--test_input`,
`test_input.json` or `--rp_serve_api`.

The process ends with code 0 when it was told to end, 1 when it can't start or its one local job failed, and with one of
`errors` when the worker is past help.
"""

import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from whisper_worker import log
from whisper_worker.fitness import check_cublas, check_temp_space, is_made_writable
from whisper_worker.process import LAST_RESORT_S, StartUp, end_process, end_process_in, is_given_jobs
from whisper_worker.settings import VOLUME, Settings, SettingsError, Threads, available_cores, on_runpod

if TYPE_CHECKING:
    from concurrent.futures import Future

    from whisper_worker.health import Health
    from whisper_worker.registry import Registry
    from whisper_worker.service import Service

LAST_ANSWERS_S = 2.0
LOADERS_IMPORTS = ("multiprocessing.synchronize", "onnxruntime")  # else it would import them

Json = dict[str, Any]


def main() -> None:
    """Run the worker until the SDK ends it. Settings or a model that can't be used end the process with code 1."""
    start_up = StartUp()
    try:
        _run(Settings.from_env(os.environ), start_up)
    except Exception as error:
        if isinstance(error, (SettingsError, CannotStart)):
            sys.stderr.write(f"whisper_worker: {error}\n")
        else:
            traceback.print_exc()
        end_process(1)  # a thread may wait for a download


class CannotStart(Exception):
    """The text is one line for the operator."""


@dataclass(frozen=True)
class Prepared:
    """All that a worker is but for the SDK. Its model may still be loading, and be warmed up after that."""

    settings: Settings
    threads: Threads
    device: str
    registry: "Registry"
    health: "Health"
    loading: "Future[None]"
    warming: "Future[None]"

    @property
    def fitness_checks(self) -> "list[Callable[[], None]]":
        """The SDK tells of those that fail by their names."""

        def check_disk() -> None:
            check_temp_space(self.settings)

        def check_gpu_libraries() -> None:
            check_cublas(self.device)

        def check_model() -> None:
            self.warming.result()
            # Not before: a GPU newer than the kernels may need minutes for the first call.
            self.health.watch(lambda: self.registry.longest_call_s)

        return [check_disk, check_gpu_libraries, check_model]


def _run(settings: Settings, start_up: StartUp) -> None:
    log.configure(settings.log_level)
    _quieten_sdk()
    _one_thread_a_product()
    _keep_compiled_kernels()
    loader = ThreadPoolExecutor(1, "load")
    prepared = _prepare(settings, loader, start_up)
    loader.shutdown(wait=False)  # when it has done what it was given
    with start_up.timing("import_sdk"), _processor_named_at_once():
        import runpod  # noqa: F401
    with start_up.timing("import_service"):
        import whisper_worker.job_loop  # noqa: F401
    try:
        with start_up.timing("wait_for_model"):
            prepared.loading.result()
    except CannotStart:
        raise
    except Exception as error:  # whatever CTranslate2 and the tokenizer say of broken files or a missing GPU
        raise CannotStart(f"the model {settings.model or 'bundled'} can't be loaded: {error}") from error
    _serve(prepared, start_up)


def _prepare(settings: Settings, loader: ThreadPoolExecutor, start_up: StartUp) -> Prepared:
    """Begins to load the model on `loader`, without holding the GIL. Raises SettingsError and CannotStart."""
    # All imports by this thread, one after the other: two threads that import at once can see half-made modules.
    with start_up.timing("import_libraries"):
        for name in LOADERS_IMPORTS:
            import_module(name)
        from whisper_worker.engine import Engine, choose_compute_type, choose_device
        from whisper_worker.health import Canary, Health
        from whisper_worker.model_files import ModelFiles, find
        from whisper_worker.models import Catalog, ModelUnavailable
        from whisper_worker.registry import Loaded, Registry

    try:
        catalog = Catalog.from_settings(settings)
    except ModelUnavailable as error:
        raise CannotStart(f"MODEL: {error}") from error
    device = choose_device(settings)
    compute_type = choose_compute_type(settings, device)
    cores = available_cores()
    threads = Threads.plan(settings, device, cores)
    _log_choices(settings, device, compute_type, cores, threads)

    def load(files: ModelFiles) -> Engine:
        return Engine.load(files, device, compute_type, threads, settings)

    health = Health(settings, on_alarm=lambda error: end_process_in(_last_resort_s(), error.exit_code))
    registry = Registry(settings, catalog, health, load)

    def preload() -> None:  # the registry alone may hold the model: it may free it
        try:
            with start_up.timing("find_model"):
                files = find(settings.model, settings)
        except ModelUnavailable as error:
            raise CannotStart(str(error)) from error
        with start_up.timing("read_model"):
            engine = load(files)
        registry.preload(Loaded(engine, Canary(engine, settings, health), engine.name))

    def warm_up() -> None:
        with start_up.timing("warm_up"):
            registry.warm_up()  # of nothing, if it couldn't be loaded

    return Prepared(settings, threads, device, registry, health, loader.submit(preload), loader.submit(warm_up))


def _log_choices(settings: Settings, device: str, compute_type: str, cores: int, threads: Threads) -> None:
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


def _serve(prepared: Prepared, start_up: StartUp) -> None:
    import runpod
    from runpod.serverless.modules import rp_scale

    from whisper_worker.job_loop import JobLoop
    from whisper_worker.service import Service

    settings, threads, registry, health = prepared.settings, prepared.threads, prepared.registry, prepared.health
    takes_jobs, serves_api = _takes_jobs(), _arguments().rp_serve_api
    service = Service(settings, threads, registry, health)
    signals: list[int] = []
    checks_began = time.monotonic()

    def job_loop(config: Json) -> JobLoop:
        start_up.ended("checks", checks_began)  # the SDK's own as well
        log.event("ready", **start_up.seconds())
        return JobLoop(config, service=service, health=health, settings=settings, signals=signals)

    def check_signals() -> None:
        _leave_to_the_loop(signals)

    rp_scale.JobScaler = job_loop
    if takes_jobs:
        for check in (*prepared.fitness_checks, check_signals):
            runpod.serverless.register_fitness_check(check)
    else:  # the SDK checks no fitness then
        _check(prepared.fitness_checks)
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


def _check(checks: "list[Callable[[], None]]") -> None:
    for check in checks:
        try:
            check()
        except Exception as error:  # the warm-up fails with whatever CTranslate2 says
            raise CannotStart(f"{check.__name__}: {error}") from error


def _handler(service: "Service", settings: Settings, *, on_this_machine: bool) -> Callable[[Json], Any]:
    """What the SDK calls for a job. It can't run a generator on a test input: it prints its address."""
    from whisper_worker import local

    if on_this_machine:
        return partial(local.printed if settings.streaming else local.with_bar, service)
    return service.stream if settings.streaming else service.run


def _leave_to_the_loop(signals: list[int]) -> None:
    """From now on signals to end are only noted, and the job loop acts on them. The SDK is about to fork its heartbeat:
    a signal that ended us in the midst of that would leave it running. The heartbeat itself ignores signals: one to
    the whole group reaches it too, and it must go on for as long as jobs do."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: signals.append(number))
        os.register_at_fork(after_in_child=partial(signal.signal, number, signal.SIG_IGN))


def _arguments() -> Any:
    import runpod

    return runpod.serverless.parser.parse_known_args()[0]


def _takes_jobs() -> bool:
    """Whether jobs come from RunPod. Once the SDK is imported."""
    arguments = _arguments()
    return is_given_jobs() and not (arguments.rp_serve_api or arguments.test_input)


def _last_resort_s() -> float:
    """The job loop ends in order, if it can; on this machine there is nothing to wait for but the answers."""
    return LAST_RESORT_S if _takes_jobs() else LAST_ANSWERS_S


def _one_thread_a_product() -> None:
    """numpy's matrix products share each out to all cores, however small, and make those wait spinning for each other:
    many times the work when several jobs' audio is decoded beside the model. Read when numpy is imported."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _keep_compiled_kernels() -> None:
    """CTranslate2 brings machine code for GPUs up to Ada (4090, L4, L40S), and for newer ones, as H100, code that CUDA
    compiles when it is first used. CUDA keeps what comes of it: on the network volume it outlives this worker."""
    if "CUDA_CACHE_PATH" in os.environ or not VOLUME.is_dir():
        return
    folder = VOLUME / ".cache/cuda"
    if is_made_writable(folder):  # else CUDA keeps them in the home folder, or not at all
        os.environ["CUDA_CACHE_PATH"] = str(folder)


@contextmanager
def _processor_named_at_once() -> Iterator[None]:
    """While it is imported, the SDK asks py-cpuinfo for the processor's name, for debug output that this worker doesn't
    send; which starts a process that also measures the clock, with a busy wait of a second."""
    import cpuinfo

    asked, cpuinfo.get_cpu_info = cpuinfo.get_cpu_info, lambda: {"brand_raw": platform.machine()}
    try:
        yield
    finally:
        cpuinfo.get_cpu_info = asked


def _quieten_sdk() -> None:
    """The SDK logs at DEBUG unless told otherwise, and then writes whole requests and transcripts into the log."""
    if not {"RUNPOD_LOG_LEVEL", "RUNPOD_DEBUG_LEVEL"} & os.environ.keys():
        os.environ["RUNPOD_LOG_LEVEL"] = "WARN" if on_runpod(os.environ) else "INFO"
