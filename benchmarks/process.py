"""A RunPod worker's process that is looked at from outside."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from local_endpoint import Job, LocalEndpoint
from worker_process import WorkerProcess

from benchmarks.contenders import Memory, Model, send


class Process(WorkerProcess):
    """Any Python program that is a worker, with jobs that name files of this machine."""

    def __enter__(self) -> "Process":
        super().__enter__()
        return self

    def __init__(self, endpoint: LocalEndpoint, model: Model, program: Sequence[str], **env: str) -> None:
        super().__init__(endpoint, program=program, **{"ALLOW_LOCAL_FILES": "true", **model.env, **env})
        self._jobs = endpoint

    def run(self, files: Sequence[Path], timeout_s: float) -> list[Job]:
        """A job for each file, all sent at once, when they have ended. Fails with the first that has failed."""
        jobs = [send(self._jobs, str(file)) for file in files]
        self.wait_for(lambda: all(job.is_final for job in jobs), timeout_s)
        for job in jobs:
            assert job.status == "COMPLETED", job.error or job.status
        return jobs

    @property
    def memory(self) -> Memory:
        return Memory.of(self.pid)


def forget_peak(pid: int) -> None:
    """Let the kernel's record of a process's peak memory begin anew. Where that isn't allowed, the old one stands."""
    with suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")
