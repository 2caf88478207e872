"""The end of the process, whatever its threads still do."""

import multiprocessing
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn

FLUSH_S = 1.0
LAST_RESORT_S = 20.0  # how long an orderly end may take


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
