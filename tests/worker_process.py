"""The worker as RunPod runs it: `python handler.py`, a process with an environment, log lines and an end."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread

from local_endpoint import WORKER_ID, LocalEndpoint

from whisper_worker.settings import Settings

ROOT = Path(__file__).parent.parent
START_S = 60
STOP_S = 30
LOOK_S = 0.2  # how often it is looked whether the process still lives


def worker_env(**env: str) -> dict[str, str]:
    """This process's environment without what configures a worker, and with `env`."""
    plain = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("RUNPOD_") and key.lower() not in Settings.model_fields
    }
    return {**plain, "PYTHONUNBUFFERED": "1", **env}


def run_handler(
    *arguments: str, program: Sequence[str] = ("handler.py",), **env: str
) -> subprocess.CompletedProcess[str]:
    """`python handler.py` off RunPod, until it ends by itself."""
    return subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=ROOT,
        env=worker_env(**env),
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )


class WorkerProcess:
    """A running worker; use it in a `with`, which waits for nothing at its start and stops the process at its end.

    With an endpoint it takes that one's jobs; without, it does what its `arguments` say.
    """

    def __init__(
        self, endpoint: LocalEndpoint | None, *arguments: str, program: Sequence[str] = ("handler.py",), **env: str
    ) -> None:
        self._endpoint = endpoint
        self._command = [sys.executable, *program, *arguments]
        self._env = worker_env(**{**(endpoint.worker_env() if endpoint else {}), **env})
        self._lines: list[str] = []
        self._news = Condition()  # a line came, or the output ended
        self._output_ended = False
        self._reader = Thread(target=self._read, name="worker-output")

    def __enter__(self) -> "WorkerProcess":
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # a group of its own: the SDK's heartbeat is a second process
        )
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def messages(self) -> list[str]:
        """Its log so far, each line without the JSON around it that is written on RunPod."""
        with self._news:
            return list(map(_message, self._lines))

    def events(self, name: str) -> list[str]:
        return [message for message in self.messages if message.startswith(f"event={name} ")]

    def open_files_in(self, folder: Path) -> list[str]:
        """Also those that have no name there, or have lost it."""
        files = []
        for link in Path(f"/proc/{self.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                files.append(str(link.readlink()))
        return [file for file in files if file.startswith(f"{folder}/")]

    def wait_for_message(self, *parts: str, timeout_s: float = 60) -> str:
        """The first message with all of `parts` in it. Fails once the worker has ended without."""

        def found() -> str | None:
            return next((m for m in map(_message, self._lines) if all(part in m for part in parts)), None)

        with self._news:
            self._news.wait_for(lambda: found() or self._output_ended, timeout_s)
            message = found()
        assert message, f"no message with {parts} within {timeout_s} s in:\n" + "\n".join(self.messages)
        return message

    def wait_until_ready(self, timeout_s: float = START_S) -> None:
        """Until it has asked for its first job."""
        self.wait_for(lambda: self._endpoint and self._endpoint.requests[f"job-take/{WORKER_ID}"], timeout_s)

    def wait_for(self, holds: Callable[[], object], timeout_s: float = 60) -> None:
        """As the endpoint's `wait_for`, but fails as soon as the worker has ended."""
        assert self._endpoint, "only a worker with an endpoint has something to wait for there"
        for _ in range(int(timeout_s / LOOK_S)):
            with suppress(asyncio.TimeoutError):
                self._endpoint.wait_for(holds, LOOK_S)
                return
            assert not self.has_ended, "the worker has ended:\n" + "\n".join(self.messages)
        raise AssertionError(f"not within {timeout_s} s; the worker's log:\n" + "\n".join(self.messages))

    def send(self, signal_number: int) -> None:
        """To the worker alone, not to its heartbeat."""
        self._process.send_signal(signal_number)

    def send_to_all(self, signal_number: int) -> None:
        """To the worker and its heartbeat."""
        os.killpg(self._process.pid, signal_number)

    def wait_until_ended(self, timeout_s: float = 60) -> int:
        """By itself, with all its children: they share its output. The exit code."""
        try:
            exit_code = self._process.wait(timeout_s)
            self._reader.join(timeout_s)
            assert not self._reader.is_alive(), "the worker has left a child behind"
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the worker goes on after {timeout_s} s:\n" + "\n".join(self.messages)) from None
        return exit_code

    def stop(self) -> int:
        """SIGTERM, and SIGKILL to one that doesn't end within `STOP_S`. The exit code; called again, the same."""
        if not self.has_ended:
            self._process.send_signal(signal.SIGTERM)
            self._wait_for_end()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its heartbeat, where the worker couldn't end it
        self._reader.join()
        assert self._process.stdout
        self._process.stdout.close()
        return self._process.wait()

    def _wait_for_end(self) -> None:
        for _ in range(int(STOP_S / LOOK_S)):
            if self._endpoint:
                self._endpoint.release_polls()  # the SDK ends only when the server has answered them
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(LOOK_S)
                return
        os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            with self._news:
                self._lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._output_ended = True
            self._news.notify_all()


def figures(message: str) -> dict[str, float]:
    """The numbers of one, by their keys."""
    return {key: float(value) for key, value in re.findall(r"(\w+)=([\d.]+)", message)}


def _message(line: str) -> str:
    with suppress(ValueError):
        parsed = json.loads(line)
        if isinstance(parsed, dict) and isinstance(parsed.get("message"), str):
            return str(parsed["message"])
    return line
