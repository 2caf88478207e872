"""Who is inside the model: several calls at once, or one thread alone. Knows no model."""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Calls go in together; who needs the model alone waits until they are out, and those that come later wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards all below
        self._inside: dict[object, float] = {}  # each call, and when it went in
        self._loners = 0  # those alone inside, or waiting for it

    @contextmanager
    def together(self) -> Iterator[int]:
        """With others; gives how many are inside, oneself included."""
        call = object()
        with self._changed:
            self._changed.wait_for(lambda: not self._loners)
            self._inside[call] = time.monotonic()
            count = len(self._inside)
        try:
            yield count
        finally:
            self._leave(call)

    @contextmanager
    def alone(self, *, watched: bool = True) -> Iterator[None]:
        """With nobody else. Not for a thread that is inside. If it isn't `watched`, `longest_s` leaves it out."""
        call = object()
        with self._changed:
            self._loners += 1
            self._changed.wait_for(lambda: not self._inside)
            self._inside[call] = time.monotonic() if watched else math.inf
        try:
            yield
        finally:
            with self._changed:
                self._loners -= 1
            self._leave(call)

    @property
    def longest_s(self) -> float:
        """Seconds that the one has been inside who went in first; 0 when nobody is."""
        with self._changed:
            now = time.monotonic()
            return now - min(now, *self._inside.values()) if self._inside else 0.0

    def _leave(self, call: object) -> None:
        with self._changed:
            del self._inside[call]
            self._changed.notify_all()
