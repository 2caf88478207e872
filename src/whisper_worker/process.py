"""The end of the process, whatever its threads still do."""

import logging
import multiprocessing
import os
import sys
from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """End at once. Python's own end waits for every thread, and one may be in a call of the model that never comes
    back, or in the socket of a server that has gone silent."""
    for child in multiprocessing.active_children():
        child.terminate()  # the SDK's heartbeat: it would go on saying that the worker lives
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
