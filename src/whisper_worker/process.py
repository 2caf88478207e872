"""The end of the process, whatever its threads still do."""

import multiprocessing
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn

LAST_RESORT_S = 20.0  # how long an orderly end may take


def end_process(code: int) -> NoReturn:
    """End at once. Python's own end waits for every thread, and one may be in a call of the model that never comes
    back, or in the socket of a server that has gone silent."""
    for child in multiprocessing.active_children():
        child.kill()  # the SDK's heartbeat: it would go on saying that the worker lives
    for output in (sys.stdout, sys.stderr):
        with suppress(Exception):  # called by a signal in the midst of a write, it can't be flushed
            output.flush()
    os._exit(code)


def end_process_in(seconds: float, code: int) -> None:
    """If it hasn't ended by then: the orderly end may hang as well."""
    last_resort = threading.Timer(seconds, end_process, [code])
    last_resort.daemon = True
    last_resort.start()
