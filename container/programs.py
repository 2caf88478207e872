"""Other programs, within a time limit for all of them together; none is left running."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

LAST_LINES = 60  # of what a program that fails has said


class Failed(Exception):
    """The text says why, in one line, and then perhaps what the program has said."""


class Clock:
    """The time limit."""

    def __init__(self, limit_s: float) -> None:
        self.over = f"the time limit of {limit_s:g} s is over"
        self._end = time.monotonic() + limit_s

    def left_s(self, at_most: float = float("inf")) -> float:
        """Raises Failed when it is over."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise Failed(self.over)
        return min(left, at_most)


def output_of(command: Sequence[str], clock: Clock, env: Mapping[str, str] | None = None, stdin: str = "") -> str:
    """What a program prints. Raises Failed with that when the program does, or isn't there."""
    left_s = clock.left_s()
    try:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for us, who then end it
        )
    except FileNotFoundError:
        raise Failed(f"there is no program {command[0]}") from None
    try:
        output, _ = process.communicate(stdin, timeout=left_s)
    except subprocess.TimeoutExpired:
        raise Failed(f"{clock.over}, and {command[0]} goes on:\n{last_lines(end(process))}") from None
    finally:
        if process.poll() is None:
            end(process)
    if process.returncode:
        raise Failed(f"{command[0]} ended with code {process.returncode}:\n{last_lines(output)}")
    return output


def end(process: subprocess.Popen[str]) -> str:
    """End a program that leads a session of its own, and its children. What it has printed."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()[0]


def last_lines(output: str) -> str:
    return "\n".join(f"  | {line}" for line in output.splitlines()[-LAST_LINES:])
