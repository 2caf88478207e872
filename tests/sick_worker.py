"""The worker with a model that falls ill when it is told to: a program like `handler.py`, and who tells it.

It is told in a file, which is read before each `encode` and `generate`; the rest of the worker, and of the model, is
real.
"""

import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILE = "SICKNESS_FILE"  # the key of the environment with its path
LOOK_S = 0.01


@dataclass(frozen=True)
class Sickness:
    """What is wrong with the model."""

    where: str = "generate"
    """Which calls go wrong: those of `generate`, or of `encode`."""
    error: str | None = None
    """The text of the RuntimeError that a call raises."""
    hangs: bool = False
    """A call doesn't come back, until the model is well again."""
    slow_s: float = 0
    """A call takes so much longer."""
    deaf: bool = False
    """A call of `generate` hears nothing, in whatever it is given."""
    after: int = 0
    """So many calls still go well."""
    calls: int | None = None
    """So many go wrong, None: all."""
    until_reload: bool = False


class Control:
    """Tells the model of a worker, which has this folder's file, what to suffer from."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "sickness.json"
        self._told = 0
        self.heal()

    def ail(self, **symptoms: Any) -> None:
        self._tell(Sickness(**symptoms))

    def heal(self) -> None:
        self._tell(Sickness())

    def _tell(self, sickness: Sickness) -> None:
        self._told += 1
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps([self._told, asdict(sickness)]))
        new.replace(self.file)  # never read half-written


class Patient:
    """A CTranslate2 model that is well but for the sickness it is told."""

    def __init__(self, model: Any, file: Path) -> None:
        self._model = model
        self._file = file
        self._lock = threading.Lock()  # guards all below
        self._number = 0  # of what it was told last
        self._calls = 0  # since then
        self._is_reloaded = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def load_model(self, *args: Any, **options: Any) -> None:
        self._model.load_model(*args, **options)
        with self._lock:
            self._is_reloaded = True

    def encode(self, features: Any, **options: Any) -> Any:
        self._suffer("encode")
        return self._model.encode(features, **options)

    def generate(self, features: Any, prompts: list[list[int]], **options: Any) -> Any:
        if self._suffer("generate").deaf:
            options["max_length"] = len(prompts[0]) + 1  # then it says when it begins, and not a word
        return self._model.generate(features, prompts, **options)

    def _suffer(self, where: str) -> Sickness:
        """What is wrong with this call, once the time is over that it takes longer. Raises RuntimeError if it fails."""
        began = time.monotonic()
        number, sickness = self._begin(where)
        while sickness.hangs or time.monotonic() < began + sickness.slow_s:
            if self._read()[0] != number:
                return self._suffer(where)
            time.sleep(LOOK_S)
        if sickness.error:
            raise RuntimeError(sickness.error)
        return sickness

    def _begin(self, where: str) -> tuple[int, Sickness]:
        with self._lock:
            number, sickness = self._read()
            if number != self._number:
                self._number, self._calls, self._is_reloaded = number, 0, False
            if sickness.where != where:
                return number, Sickness()
            self._calls += 1
            wrong = self._calls - sickness.after
            is_well = wrong <= 0 or wrong > (sickness.calls or wrong) or (sickness.until_reload and self._is_reloaded)
            return number, Sickness() if is_well else sickness

    def _read(self) -> tuple[int, Sickness]:
        number, symptoms = json.loads(self._file.read_text())
        return number, Sickness(**symptoms)


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
    import faster_whisper.transcribe as fw

    from whisper_worker import runpod_io

    well, file = fw.WhisperModel, Path(os.environ[FILE])

    def load(*args: Any, **options: Any) -> Any:
        whisper = well(*args, **options)
        whisper.model = Patient(whisper.model, file)
        return whisper

    fw.WhisperModel = load
    runpod_io.main()


if __name__ == "__main__":
    main()
