"""The process: where the seconds of its start go, and its end, whatever its threads still do."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

FLUSH_S = 1.0
SIGNALLED = 128  # and the signal's number: the code of what a signal has ended, to a shell
LAST_RESORT_S = 20.0  # how long an orderly end may take


class StartUp:
    """Where the seconds of a start go. Steps run side by side: their sum is no total."""

    def __init__(self) -> None:
        """To be made as early as can be."""
        self._made = time.monotonic()
        self._age_s = _age_s()
        self._seconds = {"python": self._age_s}

    @contextmanager
    def timing(self, step: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.ended(step, began)

    def ended(self, step: str, began: float) -> None:
        """Now. `began`: by `time.monotonic`."""
        self._seconds[step] = time.monotonic() - began

    def seconds(self) -> dict[str, Any]:
        """Of each step so far, and in `total` since the process began."""
        return {**self._seconds, "total": self._age_s + time.monotonic() - self._made}


def _age_s() -> float:
    """Seconds since this process began, as the kernel counts; 0 where it doesn't tell."""
    try:
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(uptime_s - ticks / os.sysconf("SC_CLK_TCK"), 0.0)


def end_when_told() -> None:
    """To be called before all else, for as long as there are no jobs to lose: what takes jobs, or serves them, has its
    own handlers then. In a container this process has the number 1, and the kernel keeps signals from that one for
    which it has no handler."""
    # Else there is one job, on this machine, which isn't done then. The SDK takes what it knows off the command line.
    goes_on_for_ever = is_given_jobs() or "--rp_serve_api" in sys.argv
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: end_process(0 if goes_on_for_ever else SIGNALLED + number))


def is_given_jobs() -> bool:
    """Whether RunPod gives jobs; the command line isn't looked at."""
    return bool(os.environ.get("RUNPOD_WEBHOOK_GET_JOB"))


def end_process(code: int) -> NoReturn:
    """End at once. Python's own end waits for every thread, and one may be in a call of the model that never comes
    back, or in the socket of a server that has gone silent."""
    for child in multiprocessing.active_children():
        child.kill()  # the SDK's heartbeat: it would go on saying that the worker lives
    flushing = threading.Thread(target=_flush, daemon=True)  # nobody may read it any more
    flushing.start()
    flushing.join(FLUSH_S)
    os._exit(code)


def _flush() -> None:
    for output in (sys.stdout, sys.stderr):
        with suppress(Exception):  # in the midst of a write, when a signal called for the end, it can't be flushed
            output.flush()


def end_process_in(seconds: float, code: int) -> None:
    """If it hasn't ended by then: the orderly end may hang as well."""
    last_resort = threading.Timer(seconds, end_process, [code])
    last_resort.daemon = True
    last_resort.start()
