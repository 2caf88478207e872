"""A file → its container opened for reading, or why it is no audio; and what its headers say of its length.

No other file or address is ever opened, whatever it asks for. FFmpeg comes with PyAV: no ffmpeg program is needed.
"""

import codecs
import re
import struct
from dataclasses import dataclass
from typing import IO, NoReturn

import av
from av.audio.stream import AudioStream
from av.container.input import InputContainer

from whisper_worker.errors import BadInput, NoAudioStream, NotAudio
from whisper_worker.stop import Stop

# Audio and video containers, by FFmpeg's demuxer names. Not here: playlists and descriptions that name other files
# (hls, dash, concat, sdp, image2, …), subtitles, pictures, and raw samples that any bytes would pass for.
CONTAINERS = (
    "3dostr,aac,aax,ac3,ac4,act,aea,aiff,amr,amrnb,amrwb,ape,asf,ast,au,avi,caf,dsf,dss,dts,dtshd,dv,eac3,flac,flv,"
    "g722,g729,gsm,iff,ircam,ivf,kux,live_flv,loas,lvf,lxf,matroska,mlp,mov,mp3,mpc,mpc8,mpeg,mpegts,mxf,nistsphere,nsv,"
    "nut,ogg,oma,osq,pva,qcp,qoa,rm,shn,smjpeg,sol,sox,spdif,tak,truehd,tta,ty,voc,vqf,w64,wav,wsd,wtv,wv,xwma"
)
# Formats without any header, which content can't tell. Only the name a caller gave says what they are.
HEADERLESS = {"g722": "g722", "722": "g722"}

# First bytes of what people send instead of audio. FFmpeg calls most of them "invalid data", finds the MP3 in a ZIP.
LOOKS_LIKE = (
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"Rar!", "a RAR archive"),
    (b"%PDF", "a PDF document"),
    (b"\xff\xd8\xff", "a JPEG picture"),
    (b"\x89PNG", "a PNG picture"),
    (b"GIF8", "a GIF picture"),
    (b"#EXTM3U", "a playlist"),
    (b"ffconcat", "a playlist"),
    (b"<!doctype html", "an HTML page"),
    (b"<html", "an HTML page"),
    (b"<?xml", "an XML document"),
)

# Formats whose announced length FFmpeg guesses from their size, or doesn't know.
GUESSED = ("mp3", "aac", "ac3", "eac3", "amr", "mpeg", "mpegts", "gsm", "g722", "dts", "loas")
TIMED = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "ogg", "flac", "mp3", "mpegts")
UNCOMPRESSED = ("wav", "w64", "aiff", "au", "caf")  # as far as their codec is: others' times are guessed from bit rates

FIRST_OGG_PAGE = b"OggS\0\x02"
MAX_OGG_PAGE = 65_307  # bytes
HIDDEN_SHARE = 0.5  # share of an uncompressed file that its header doesn't account for, worth a warning
MIN_HIDDEN_BYTES = 10_000  # tags are no audio


@dataclass(frozen=True)
class _Chunks:
    """How a format divides its files into chunks.

    `first`: where the first one begins. `head`: a chunk's name and size. `counted`: bytes of the head in that size.
    `align`: each begins at a multiple of it. `wrapped`: all of them are in a chunk themselves, which states their size.
    `below`: sizes from here on are made up.
    """

    first: int
    head: struct.Struct
    counted: int
    align: int
    wrapped: bool
    below: int


CHUNKS = {  # by a file's first bytes; not RF64, whose sizes FFmpeg believes itself
    b"RIFF": _Chunks(12, struct.Struct("<4sI"), 0, 2, True, 0x3FFF_0000),  # 64 KB less than 1 GB
    b"RIFX": _Chunks(12, struct.Struct(">4sI"), 0, 2, True, 0x3FFF_0000),
    b"riff": _Chunks(40, struct.Struct("<16sQ"), 24, 8, True, 1 << 62),  # W64
    b"caff": _Chunks(8, struct.Struct(">4sq"), 0, 1, False, 1 << 62),
}
MAX_CHUNKS = 1_000  # before the samples; a hostile file may hold millions


def open_container(file: IO[bytes], extension: str) -> InputContainer:
    """`extension` is in lower case without the dot; only formats without a header need it. Raises NotAudio."""
    file.seek(0)
    head = file.read(64)
    file.seek(0)
    if not head:
        raise NotAudio("the file is empty")
    if what := _looks_like(head):
        raise NotAudio(f"the file is {what}, not audio")
    try:
        return _open_as(file, None)
    except av.FFmpegError as error:
        if (headerless := HEADERLESS.get(extension)) is None:
            raise _not_audio(file) from error
    try:
        return _open_as(file, headerless)
    except av.FFmpegError as error:
        raise _not_audio(file) from error


def _looks_like(head: bytes) -> str | None:
    """What the first bytes of a file show it to be, where that is known and no audio."""
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for signature, what in LOOKS_LIKE:
        if start.startswith(signature.lower()):
            return what
    return "JSON" if start.startswith(b"{") and _is_text(head) else None  # samples may begin with any one byte


def _is_text(head: bytes) -> bool:
    """Whether bytes, which may end within a letter, are UTF-8 that people write."""
    if b"\0" in head:
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def _open_as(file: IO[bytes], demuxer: str | None) -> InputContainer:
    file.seek(0)
    return av.open(
        _Nameless(file),
        "r",
        format=demuxer,
        options={"format_whitelist": CONTAINERS, "protocol_whitelist": "none"},
        metadata_errors="ignore",
        io_open=_refuse_to_open,
    )


class _Nameless:
    """The file without its name: FFmpeg guesses formats by extension, and puts names into its messages."""

    def __init__(self, file: IO[bytes]) -> None:
        self.read, self.seek, self.tell = file.read, file.seek, file.tell


def _refuse_to_open(*_: object) -> NoReturn:
    """FFmpeg asks this for each further file that a file names."""
    raise PermissionError("a media file may not open another")


def _not_audio(file: IO[bytes]) -> NotAudio:
    """FFmpeg's own messages are left out: they hold paths, and say "invalid data" of everything."""
    file.seek(0)
    if _is_text(file.read(512)):
        return NotAudio("the file is text, not audio")
    return NotAudio("the file is no audio or video that can be read, or it is damaged at its start")


def audio_stream(container: InputContainer, number: int | None) -> AudioStream:
    """The audio stream with a number, from 0; without, the one that the file marks as its default, else the first."""
    streams = container.streams.audio
    if not streams:
        raise NoAudioStream("the file holds no audio stream")
    if number is None:
        marked = (s for s in streams if s.disposition & av.stream.Disposition.default)
        stream = next(marked, streams[0])
    elif number < len(streams):
        stream = streams[number]
    else:
        count = "1 audio stream" if len(streams) == 1 else f"{len(streams)} audio streams"
        raise BadInput(f"audio_stream: the file has {count}, numbered from 0")
    if stream.codec_context is None:
        raise NotAudio("the audio's codec is not known")
    return stream


def has_times(container: InputContainer, stream: AudioStream) -> bool:
    """Whether timestamps say where in the recording a packet belongs, and don't merely count packets."""
    name = container.format.name
    return name in TIMED or (name in UNCOMPRESSED and stream.codec_context.name.startswith("pcm_"))


def is_indexed(container: InputContainer, stream: AudioStream) -> bool:
    """Whether FFmpeg's way to a time is exact. Not in MP3: it goes by the header, even of joined files."""
    return container.format.name not in ("mp3", "mpegts") and has_times(container, stream)


def announced_s(container: InputContainer, stream: AudioStream, begins_s: float) -> float | None:
    """The seconds of audio that the container announces, where it does rather than being guessed from its size.

    `begins_s` is the time of the stream's first sample.
    """
    if container.format.name in GUESSED:
        return None
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    if container.duration is not None and len(container.streams) == 1:
        return container.duration / av.time_base - max(begins_s, 0.0)
    if tag := re.fullmatch(r"(\d+):(\d\d):(\d\d\.\d+)", stream.metadata.get("DURATION", "")):  # Matroska's, of a stream
        return int(tag[1]) * 3600 + int(tag[2]) * 60 + float(tag[3]) - max(begins_s, 0.0)
    return None


def counted_s(file: IO[bytes], stream: AudioStream, seconds: float) -> float | None:
    """The seconds of audio for which an uncompressed file's header states the bytes, if `seconds` are all it holds.

    FFmpeg looks at the file's size instead, so a file that is cut off is as long to it as what is left.
    """
    if (sizes := _bytes_of_audio(file)) is None:
        return None
    stated, held = sizes
    if held and seconds:
        return seconds * max(stated / held, 1.0)
    return stated * 8 / stream.bit_rate if stream.bit_rate else None


def _bytes_of_audio(file: IO[bytes]) -> tuple[int, int] | None:
    """How many bytes of samples the header states, where it can be believed, and how many there are from their start.

    A program that writes to a pipe can't come back to fill in the sizes, and makes them up: 0, or near 1, 2 or 4 GB,
    or one number for both the file and its samples, where true ones differ by the header. A true size of more than
    1 GB passes for made up too; so much isn't downloaded anyway, unless the operator wants it.
    """
    size = file.seek(0, 2)
    file.seek(0)
    if (layout := CHUNKS.get(file.read(4))) is None:
        return None
    place, total = layout.first, layout.below - 1
    if layout.wrapped:
        file.seek(0)
        _, total = layout.head.unpack(file.read(layout.head.size))
    for _ in range(MAX_CHUNKS):
        file.seek(place)
        if len(head := file.read(layout.head.size)) < layout.head.size:
            return None
        name, length = layout.head.unpack(head)
        length -= layout.counted
        place += layout.head.size
        if name[:4] == b"data":
            return (length, max(size - place, 0)) if 0 < length < total < layout.below else None
        if length < 0:
            return None
        place += length + -length % layout.align
    return None


def counts_its_frames(file: IO[bytes]) -> bool:
    """Whether an MP3 file begins with a Xing or Info frame that tells how many follow: its length then is no guess."""
    file.seek(0)
    head = file.read(10)
    while head[:3] == b"ID3" and len(head) == 10:
        size = sum((byte & 0x7F) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True))
        file.seek(size + (10 if head[5] & 0x10 else 0), 1)
        head = file.read(10)
    tag = re.search(rb"(?:Xing|Info)...(.)(....)", head + file.read(60), re.DOTALL)
    return bool(tag and tag[1][0] & 1 and any(tag[2]))


def is_chained(file: IO[bytes], stop: Stop) -> bool:
    """Whether an Ogg file is several, one after the other: their times each begin anew (RFC 3533, section 4).

    All of it is searched, which takes a second for some GB; nothing else tells.
    """
    place = 0
    while (page := _page(file, place))[0] == 2:  # the first pages of streams that go on side by side
        place += page[1]
    file.seek(place)
    last = b""
    while block := file.read(1 << 20):
        stop.check()
        if FIRST_OGG_PAGE in last + block:
            return True
        last = block[1 - len(FIRST_OGG_PAGE) :]
    return False


def _page(file: IO[bytes], place: int) -> tuple[int, int]:
    """The flags and the length of the Ogg page that begins at a place; no length where there is none."""
    file.seek(place)
    head = file.read(27 + 255)
    if head[:4] != b"OggS" or len(head) < 27:
        return 0, 0
    return head[5], 27 + head[26] + sum(head[27 : 27 + head[26]])


def is_ogg(file: IO[bytes]) -> bool:
    file.seek(0)
    return file.read(4) == b"OggS"


def ends_within_ogg_page(file: IO[bytes]) -> bool:
    """An Ogg file announces no length, but is made of pages. The last one's mark is no help: browsers leave it out."""
    size = file.seek(0, 2)
    start = max(size - MAX_OGG_PAGE, 0)
    file.seek(start)
    last = start + file.read().rfind(b"OggS")
    _, length = _page(file, last)
    return last < start or not length or last + length > size


def hidden_bytes(file: IO[bytes], container: InputContainer, stream: AudioStream, seconds: float) -> int:
    """Bytes of an uncompressed file that its header doesn't count in: joined files, or a header written too early."""
    if container.format.name not in ("wav", "aiff", "au", "w64") or not stream.bit_rate or not seconds:
        return 0
    size = file.seek(0, 2)
    hidden = int(size - seconds * stream.bit_rate / 8)
    return hidden if hidden > max(HIDDEN_SHARE * size, MIN_HIDDEN_BYTES) else 0
