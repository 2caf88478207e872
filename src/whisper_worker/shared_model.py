"""The CTranslate2 model as faster-whisper sees it, shared by the threads of all jobs.

It stands in for `ctranslate2.models.Whisper` inside an unchanged `faster_whisper.WhisperModel`. Each call of a window
(one `encode`, one `generate` for each temperature tried) passes here: so this is where a job that nobody wants any more
is stopped, even one whose windows yield no segment.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from whisper_worker.stop import Stop


class SharedModel:
    """All methods and attributes of the model it is made of; those that take long first look at the caller's `Stop`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._caller = threading.local()

    @contextmanager
    def called_for(self, stop: Stop) -> Iterator[None]:
        """Calls of this thread, inside the `with`, raise Stopped once `stop` is set."""
        self._caller.stop = stop
        try:
            yield
        finally:
            del self._caller.stop

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        self._look()
        return self._model.encode(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self._look()
        return self._model.generate(*args, **kwargs)

    def align(self, *args: Any, **kwargs: Any) -> Any:
        self._look()
        return self._model.align(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _look(self) -> None:
        stop: Stop | None = getattr(self._caller, "stop", None)
        if stop is not None:
            stop.check()
