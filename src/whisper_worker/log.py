"""Log lines: one per event, `event=… job=… key=value …`, so that they can be grepped.

On RunPod each line is a JSON object of the shape that the SDK's own logger prints (`requestId`, `message`, `level`):
the console groups lines by job that way.
"""

import json
import logging
import os
import sys
from typing import Any

DEBUG, INFO, WARNING, ERROR = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR

_logger = logging.getLogger("whisper_worker")


def configure(level: str) -> None:
    """Send the worker's lines, and the warnings of the libraries under it, to stderr. Called once, at start."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_RunPodFormatter() if os.environ.get("RUNPOD_ENDPOINT_ID") else _PlainFormatter())
    logging.getLogger().handlers = [handler]
    _logger.setLevel(level)


def event(name: str, *, job: str | None = None, level: int = INFO, trace: bool = False, **fields: Any) -> None:
    """Log one event. With `trace`, the exception being handled is logged in full."""
    if not _logger.isEnabledFor(level):
        return
    parts = [f"event={name}"]
    parts += [f"job={_value(job)}"] if job else []
    parts += [f"{key}={_value(value)}" for key, value in fields.items() if value is not None]
    _logger.log(level, " ".join(parts), exc_info=trace, extra={"job": job})


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    text = str(value)
    plain = text.isprintable() and not any(c in text for c in ' "=')
    return text if text and plain else json.dumps(text, ensure_ascii=not text.isprintable())


class _PlainFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(levelname)-7s| %(message)s")


class _RunPodFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        level = {"WARNING": "WARN", "CRITICAL": "ERROR"}.get(record.levelname, record.levelname)
        line = {"requestId": getattr(record, "job", None), "message": super().format(record), "level": level}
        return json.dumps(line, ensure_ascii=False)
