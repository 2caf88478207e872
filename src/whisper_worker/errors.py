"""What can go wrong, as the caller reads it: a code for programs and a sentence for people.

Every failure that a caller can meet is a class here. The rest of the worker raises them (foreign errors are
translated where they appear, `from` their cause); `service.py` alone turns them into replies.
"""

import traceback
from typing import Any, ClassVar

EXIT_HUNG = 3  # the process' exit code when a call of the model never came back
EXIT_SICK = 4  # the same, when the device failed, or the model hears nothing right any more


class WorkerError(Exception):
    """A failure to tell the caller about. `str(error)` is the sentence; it must hold no path, trace or URL query."""

    code: ClassVar[str]
    breaks_off: ClassVar[bool] = False
    """Whether it can end a job in the midst of its transcription; what was done by then goes with the error."""

    @property
    def reply(self) -> dict[str, Any]:
        """The handler's output. One string: the SDK drops errors of any other type."""
        return {"error": f"{self.code}: {self}"}


class BadInput(WorkerError):
    """The request can't be understood, or asks for something that can't be done."""

    code = "BAD_INPUT"


class DownloadRefused(WorkerError):
    """The URL leads to an address this worker must not visit."""

    code = "DOWNLOAD_REFUSED"


class DownloadFailed(WorkerError):
    """The URL is allowed, but its file couldn't be had."""

    code = "DOWNLOAD_FAILED"


class TooLarge(WorkerError):
    """The file has more bytes than the operator allows."""

    code = "TOO_LARGE"


class TimedOut(WorkerError):
    """The download or the whole job took longer than the operator, or the caller, allows."""

    code = "TIMEOUT"
    breaks_off = True


class NotAudio(WorkerError):
    """The bytes are no audio or video file that can be read."""

    code = "NOT_AUDIO"


class NoAudioStream(WorkerError):
    """A readable media file without sound."""

    code = "NO_AUDIO_STREAM"


class TooLong(WorkerError):
    """The audio has more seconds than the operator allows."""

    code = "TOO_LONG"


class UnknownModel(WorkerError):
    """The request names a model that this worker does not offer."""

    code = "UNKNOWN_MODEL"


class ModelFailed(WorkerError):
    """The model that the request names can't be loaded."""

    code = "MODEL_UNAVAILABLE"


class UploadRefused(WorkerError):
    """The result would go to an address this worker must not visit."""

    code = "UPLOAD_REFUSED"


class UploadFailed(WorkerError):
    """The result is too large for a reply, and where it should have gone instead it couldn't."""

    code = "UPLOAD_FAILED"


class OutOfMemory(WorkerError):
    """The device ran out of memory while it transcribed."""

    code = "OUT_OF_MEMORY"
    breaks_off = True


class ResultTooLarge(WorkerError):
    """The reply has more bytes than the platform takes; sent anyway, it would be lost without a word."""

    code = "RESULT_TOO_LARGE"


class ShuttingDown(WorkerError):
    """The worker was told to end, and its grace was over before the job was done."""

    code = "SHUTTING_DOWN"
    breaks_off = True


class Unhealthy(WorkerError):
    """The worker can't transcribe any more, this job or another: it fails those it has, and ends."""

    code = "WORKER_UNHEALTHY"
    breaks_off = True

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code

    @property
    def reply(self) -> dict[str, Any]:
        """With RunPod's sign to replace the worker."""
        return {**super().reply, "refresh_worker": True}


class InternalError(WorkerError):
    """Something we did not foresee. The log has the whole of it, under the job's id."""

    code = "INTERNAL"


def forget_locals(error: BaseException) -> None:
    """Of the functions that it passed through: they may be a model or hours of audio, and errors and what keeps them
    know each other, so that both would stay until Python next looks for such circles."""
    link: BaseException | None = error
    while link:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
