"""The end of the process, seen from outside: each end is that of a small Python of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOON_S = 20

IMPORTS = "import multiprocessing, signal, threading; from whisper_worker.process import *"
FULL = Path("/dev/full")  # takes no byte


def exit_code_of(code: str, output: Path = Path("/dev/null")) -> int:
    """Raises TimeoutExpired if it doesn't end, or leaves a child behind, which shares its errors' pipe."""
    with output.open("w") as stdout:
        return subprocess.run(
            [sys.executable, "-c", f"{IMPORTS}\n{code}"],
            stdout=stdout,
            stderr=subprocess.PIPE,
            timeout=SOON_S,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
            check=False,
        ).returncode


def test_the_process_ends_though_a_thread_never_does() -> None:
    assert exit_code_of("threading.Thread(target=threading.Event().wait).start(); end_process(3)") == 3


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_the_process_ends_though_its_output_cannot_be_flushed() -> None:
    assert exit_code_of("print('lost'); end_process(3)", FULL) == 3


def test_no_child_is_left_not_even_one_that_is_deaf_to_signals() -> None:
    deaf = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True).start()
end_process(3)
"""
    assert exit_code_of(deaf) == 3


def test_the_process_ends_in_time_whatever_it_does() -> None:
    assert exit_code_of("end_process_in(0.1, 3); threading.Event().wait()") == 3
