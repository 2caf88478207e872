"""What a request points at → an open file of its bytes. Runs on the I/O pool; downloads are in `fetch.py`."""

import base64
import binascii
import io
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from whisper_worker.errors import BadInput
from whisper_worker.request import DATA_URL, Source, is_data_url, is_url


def open_source(source: Source) -> BinaryIO:
    """The file of a source that need not be downloaded. Raises BadInput, which names the field."""
    if source.audio is None:
        text = (source.audio_base64 or "").strip()
        return from_data_url(text, "audio_base64") if is_data_url(text) else from_base64(text, "audio_base64")
    return from_data_url(source.audio, "audio") if is_data_url(source.audio) else open_local(source.audio)


def extension(source: Source) -> str:
    """That of the caller's name for the file, in lower case without the dot; may be empty.

    A data: URL has none, but its media type may say the same: `audio/g722`, which has no header to be known by.
    """
    audio = source.audio if source.audio is not None else (source.audio_base64 or "").strip()
    if is_data_url(audio):
        subtype = (_media_type(audio) or "").partition(";")[0].partition("/")[2]
        return subtype.strip().lower().removeprefix("x-")
    if source.audio is None:
        return ""
    name = unquote(urlsplit(audio).path) if is_url(audio) else audio
    return PurePosixPath(name).suffix[1:].lower()


def from_base64(text: str, field: str) -> BinaryIO:
    """The bytes of standard or URL-safe base64, with or without line breaks and padding. Raises BadInput."""
    packed = "".join(text.split()).translate(str.maketrans("-_", "+/")).rstrip("=")
    try:
        return io.BytesIO(base64.b64decode(packed + "=" * (-len(packed) % 4), validate=True))
    except (binascii.Error, ValueError) as error:
        raise BadInput(f"{field}: is not valid base64") from error


def from_data_url(url: str, field: str) -> BinaryIO:
    """The bytes in a `data:[media type][;base64],data` (RFC 2397). Raises BadInput."""
    media_type = _media_type(url)
    if media_type is None:
        raise BadInput(f"{field}: is no valid data: URL, there is no comma before its data")
    data = url[len(DATA_URL) + len(media_type) + 1 :]
    if media_type.rpartition(";")[2].strip().lower() == "base64":
        return from_base64(unquote(data) if "%" in data else data, field)
    try:
        return io.BytesIO(unquote_to_bytes(data))
    except UnicodeError as error:  # half a surrogate pair
        raise BadInput(f"{field}: is no valid data: URL") from error


def open_local(path: str) -> BinaryIO:
    """Raises BadInput without repeating the path. Pipes and devices, which may never end, are not opened."""
    try:
        if not Path(path).is_file():
            raise BadInput("audio: no such file on this machine")
        return Path(path).open("rb")
    except (OSError, ValueError) as error:
        raise BadInput("audio: the file can't be read") from error


def _media_type(url: str) -> str | None:
    """All between `data:` and the comma, `;base64` included."""
    comma = url.find(",")
    return None if comma < 0 else url[len(DATA_URL) : comma]
