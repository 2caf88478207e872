"""A media file → mono samples at 16 kHz, with limits, and nothing else: no other file or address is ever opened.

The decoding is our own, packet by packet: faster-whisper's `decode_audio` drops the rest of a file after one damaged
frame, follows playlists, and knows no limit. FFmpeg comes with PyAV: no ffmpeg program is needed. Runs on the media
pool.
"""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, NoReturn

import av
import numpy as np
from av.audio.fifo import AudioFifo
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container.input import InputContainer
from av.packet import Packet
from numpy.typing import NDArray

from whisper_worker.errors import NoAudioStream, NotAudio, TooLong
from whisper_worker.stop import Stop

SAMPLE_RATE = 16_000
Samples = NDArray[np.float32]

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

MIN_RATE, MAX_RATE = 1_000, 1_000_000  # Hz; outside, a small file becomes huge, and it's no recording
GROUP_S = 1.0  # seconds resampled at once: a call for each packet would cost more than the decoding
MAX_BROKEN_READS = 1_000  # in a row, before a container counts as ended
CANCELLED = 0.1  # a mix this much quieter (amplitude) than its loudest channel has cancelled itself out
SHORT_BY_S, SHORT_BY_SHARE = 0.3, 0.005  # missing seconds worth a warning; containers often announce a little more
HIDDEN_SHARE = 0.5  # share of an uncompressed file that its header doesn't account for, worth a warning
MIN_HIDDEN_BYTES = 10_000  # tags are no audio
MAX_OGG_PAGE = 65_307  # bytes


@dataclass(frozen=True)
class Audio:
    """`samples`: float32, shape (n,), 16 kHz mono, finite, within -1 and 1. `warnings`: sentences for the caller."""

    samples: Samples
    warnings: tuple[str, ...] = ()

    @property
    def duration(self) -> float:
        """Seconds."""
        return len(self.samples) / SAMPLE_RATE


def decode(file: IO[bytes], stop: Stop, *, max_seconds: float, extension: str = "") -> Audio:
    """Decode the default audio stream of `file` (seekable; read only, and not closed).

    `extension` is that of the caller's name for it, in lower case without the dot; only formats without a header need
    it. Raises NotAudio, NoAudioStream, TooLong (while decoding: a small file may hold days) or Stopped.
    """
    mixed = _decode(file, stop, extension, _Decoded(max_seconds))
    if mixed.loudest_if_cancelled is None:
        return mixed.audio()
    # The channels are each other's opposite (one was wired the wrong way round): take one of them.
    single = _decode(file, stop, extension, _Decoded(max_seconds, channel=mixed.loudest_if_cancelled))
    return single.audio(f"the channels cancel each other out when mixed: only channel {single.channel} was used")


class _Decoded:
    """What one walk over the packets gathers."""

    def __init__(self, max_seconds: float, channel: int | None = None) -> None:
        self.max_seconds = max_seconds
        self.channel = channel
        self._kept: Samples = np.empty(0, np.float32)
        self.samples = 0
        self.damaged = 0
        self.expected_s: float | None = None
        self.hidden_bytes = 0
        self.ends_early = False
        self._mix_energy = 0.0
        self._channel_energy = np.zeros(0)

    def add(self, block: Samples) -> None:
        """Mix a block of shape (channels, n) to mono and keep it. Raises TooLong once there is more than allowed."""
        block = np.nan_to_num(block, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        if self.channel is None:
            mono = block[0] if len(block) == 1 else block.mean(axis=0, dtype=np.float64).astype(np.float32)
            self._measure(block, mono)
        else:
            mono = block[min(self.channel, len(block) - 1)]
        start, self.samples = self.samples, self.samples + len(mono)
        if self.samples > self.max_seconds * SAMPLE_RATE:
            raise TooLong(f"the audio is longer than the {self.max_seconds:g} s that are allowed")
        if self.samples > len(self._kept):
            self._resize(max(self.samples, len(self._kept) * 5 // 4))
        self._kept[start : self.samples] = mono

    def _resize(self, samples: int) -> None:
        """In place: a list of blocks, joined in the end, takes twice the memory, and its pieces aren't given back."""
        self._kept.resize(samples, refcheck=False)

    def _measure(self, block: Samples, mono: Samples) -> None:
        energy = np.einsum("cn,cn->c", block, block, dtype=np.float64)
        if len(energy) > len(self._channel_energy):
            self._channel_energy = np.pad(self._channel_energy, (0, len(energy) - len(self._channel_energy)))
        self._channel_energy[: len(energy)] += energy
        self._mix_energy += float(np.dot(mono.astype(np.float64), mono))

    @property
    def loudest_if_cancelled(self) -> int | None:
        if len(self._channel_energy) != 2:  # of many channels one alone may speak: quiet, not cancelled
            return None
        loudest = int(self._channel_energy.argmax())
        cancelled = self._mix_energy < CANCELLED**2 * self._channel_energy[loudest]
        return loudest if cancelled else None

    def audio(self, *warnings: str) -> Audio:
        self._resize(self.samples)
        return Audio(_within_range(self._kept), (*warnings, *self._warnings()))

    def _warnings(self) -> Iterator[str]:
        seconds = self.samples / SAMPLE_RATE
        if self.damaged:
            yield f"{self.damaged} damaged packets of audio were skipped"
        if self.expected_s is not None and self.expected_s - seconds > max(
            SHORT_BY_S, SHORT_BY_SHARE * self.expected_s
        ):
            announced = f"the file announces {self.expected_s:.1f} s of audio but holds {seconds:.1f} s"
            yield f"{announced}: it is cut off or damaged"
        if self.ends_early:
            yield "the file ends without its end-of-stream mark: it may be cut off"
        if self.hidden_bytes:
            yield f"the file's header leaves out {self.hidden_bytes} bytes behind the audio, which may hold more of it"


def _within_range(samples: Samples) -> Samples:
    """Float files may hold any numbers: too loud ones are scaled down (a few outliers aside), the rest clipped."""
    if not len(samples) or max(samples.max(), -samples.min()) <= 1.0:
        return samples
    loud = float(np.percentile(np.abs(samples), 99.9))
    return np.asarray(np.clip(samples / max(loud, 1.0), -1.0, 1.0), np.float32)


def _decode(file: IO[bytes], stop: Stop, extension: str, decoded: _Decoded) -> _Decoded:
    with _open(file, extension) as container:
        stream = _audio_stream(container)
        resampler = _Resampler()
        for packet in _packets(container, stream, decoded):
            stop.check()
            for frame in _frames(packet, stream, decoded):
                _take(frame, resampler, decoded)
        for block in resampler.flush():
            decoded.add(block)
        if decoded.damaged and not decoded.samples:
            raise NotAudio("no audio could be decoded: the file is damaged")
        decoded.expected_s = _expected_s(container, stream)
        decoded.ends_early = container.format.name == "ogg" and not _has_last_ogg_page(file)
        decoded.hidden_bytes = _hidden_bytes(file, container, stream, decoded.samples / SAMPLE_RATE)
    return decoded


def _take(frame: AudioFrame, resampler: "_Resampler", decoded: _Decoded) -> None:
    """A stretch that can't be read is no reason to lose those before and after it."""
    try:
        for block in resampler.push(frame):
            decoded.add(block)
    except NotAudio:
        if not decoded.samples:
            raise
        decoded.damaged += 1


def _open(file: IO[bytes], extension: str) -> InputContainer:
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


def _audio_stream(container: InputContainer) -> AudioStream:
    """The stream that the file marks as its default, else the first."""
    streams = container.streams.audio
    if not streams:
        raise NoAudioStream("the file holds no audio stream")
    marked = (s for s in streams if s.disposition & av.stream.Disposition.default)
    stream = next(marked, streams[0])
    if stream.codec_context is None:
        raise NotAudio("the audio's codec is not known")
    return stream


def _packets(
    container: InputContainer, stream: AudioStream, decoded: _Decoded
) -> "Iterator[Packet[AudioStream] | None]":
    """All packets, and the empty one at the end that flushes the decoder. A broken place is skipped and counted."""
    broken = 0
    while broken < MAX_BROKEN_READS:
        try:
            for packet in container.demux(stream):
                broken = 0
                yield packet
            return
        except av.FFmpegError:  # raised by demux alone; it can be called again, but the generator is finished
            broken += 1
            decoded.damaged += 1
        except IndexError:  # PyAV stumbles at the end over streams that came up midway (joined transport streams)
            yield None
            return


def _frames(packet: "Packet[AudioStream] | None", stream: AudioStream, decoded: _Decoded) -> list[AudioFrame]:
    """The frames in a packet, or what the decoder still holds."""
    try:
        frames = packet.decode() if packet else stream.codec_context.decode(None)
    except av.FFmpegError:
        decoded.damaged += 1
        return []
    return [frame for frame in frames if frame.samples]


class _Resampler:
    """Frames as they come → float32 blocks of shape (channels, n) at 16 kHz.

    A stream may change its rate, layout or format midway (joined voicemail does): each stretch gets its own resampler.
    """

    def __init__(self) -> None:
        self._kind: tuple[int, str, str] | None = None
        self._waiting = AudioFifo()
        self._resampler: AudioResampler | None = None

    def push(self, frame: AudioFrame) -> Iterator[Samples]:
        kind = (frame.sample_rate, frame.layout.name, frame.format.name)
        if kind != self._kind:
            yield from self.flush()
            if not MIN_RATE <= frame.sample_rate <= MAX_RATE:
                raise NotAudio(f"the audio has {frame.sample_rate} samples a second")
            self._kind = kind
            self._waiting = AudioFifo()
            self._resampler = AudioResampler(format="flt", layout=frame.layout, rate=SAMPLE_RATE)
        frame.pts = None  # the FIFO insists on unbroken timestamps; real files have gaps
        self._waiting.write(frame)
        if self._waiting.samples >= GROUP_S * frame.sample_rate:
            yield from self._resample(self._waiting.read())

    def flush(self) -> Iterator[Samples]:
        """What is still held back; the stretch is over then."""
        if self._resampler is not None:
            if self._waiting.samples:
                yield from self._resample(self._waiting.read())
            yield from self._resample(None)
            self._resampler = self._kind = None

    def _resample(self, frame: AudioFrame | None) -> Iterator[Samples]:
        assert self._resampler is not None
        try:
            frames = self._resampler.resample(frame)
        except av.FFmpegError as error:  # it can't mix more than some 64 channels
            kind, self._resampler, self._kind = self._kind, None, None
            raise NotAudio(f"the audio can't be read as {kind and kind[1]} at {kind and kind[0]} Hz") from error
        for resampled in frames:
            # Interleaved: PyAV reads a planar frame of more than 8 channels past its pointers, and the process dies.
            interleaved = np.asarray(resampled.to_ndarray(), np.float32)
            yield interleaved.reshape(resampled.samples, -1).T


def _expected_s(container: InputContainer, stream: AudioStream) -> float | None:
    """The seconds of audio that the container announces, where it does rather than being guessed from its size."""
    if container.format.name in ("mp3", "aac", "ac3", "eac3", "amr", "mpeg", "mpegts", "gsm", "g722", "dts", "loas"):
        return None
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    if container.duration is not None and len(container.streams) == 1:
        return float(container.duration / av.time_base)
    return None


def _has_last_ogg_page(file: IO[bytes]) -> bool:
    """An Ogg file announces no length, but marks its last page (RFC 3533, section 6)."""
    size = file.seek(0, 2)
    file.seek(max(size - MAX_OGG_PAGE, 0))
    tail = file.read()
    page = tail.rfind(b"OggS")
    return page >= 0 and page + 5 < len(tail) and bool(tail[page + 5] & 4)


def _hidden_bytes(file: IO[bytes], container: InputContainer, stream: AudioStream, seconds: float) -> int:
    """Bytes of an uncompressed file that its header doesn't count in: joined files, or a header written too early."""
    if container.format.name not in ("wav", "aiff", "au", "w64") or not stream.bit_rate or not seconds:
        return 0
    size = file.seek(0, 2)
    hidden = int(size - seconds * stream.bit_rate / 8)
    return hidden if hidden > max(HIDDEN_SHARE * size, MIN_HIDDEN_BYTES) else 0
