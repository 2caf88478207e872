"""What a request points at → an open file of its bytes. Runs on the I/O pool; downloads are in `fetch.py`."""

import base64
import binascii
import io
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from whisper_worker.errors import BadInput
from whisper_worker.request import URL_SCHEMES, Request


def is_url(audio: str) -> bool:
    return audio.lower().startswith(URL_SCHEMES)


def extension(request: Request) -> str:
    """That of the caller's name for the file, in lower case without the dot; may be empty."""
    audio = request.audio or ""
    name = unquote(urlsplit(audio).path) if is_url(audio) else audio
    return PurePosixPath(name).suffix[1:].lower()


def from_base64(text: str) -> BinaryIO:
    """The bytes of standard or URL-safe base64, with or without line breaks and padding. Raises BadInput."""
    packed = "".join(text.split()).translate(str.maketrans("-_", "+/")).rstrip("=")
    try:
        return io.BytesIO(base64.b64decode(packed + "=" * (-len(packed) % 4), validate=True))
    except (binascii.Error, ValueError) as error:
        raise BadInput("audio_base64: is not valid base64") from error


def open_local(path: str) -> BinaryIO:
    """Raises BadInput without repeating the path. Pipes and devices, which may never end, are not opened."""
    try:
        if not Path(path).is_file():
            raise BadInput("audio: no such file on this machine")
        return Path(path).open("rb")
    except (OSError, ValueError) as error:
        raise BadInput("audio: the file can't be read") from error
