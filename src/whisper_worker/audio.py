"""A media file, or a part of it → samples at 16 kHz, with limits.

The decoding is our own, packet by packet: faster-whisper's `decode_audio` drops the rest of a file after one damaged
frame, follows playlists, and knows no limit. How files are opened is known to `containers`, what is kept of their
channels to `channels`. Runs on the media pool.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Literal

import av
import numpy as np
from av.audio.fifo import AudioFifo
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container.input import InputContainer
from av.packet import Packet

from whisper_worker import containers
from whisper_worker.channels import SAMPLE_RATE, Kept, Mix, One, Samples, Split
from whisper_worker.errors import BadInput, NotAudio
from whisper_worker.stop import Stop

__all__ = ["SAMPLE_RATE", "Audio", "Part", "Samples", "decode"]

MIN_RATE, MAX_RATE = 1_000, 1_000_000  # Hz; outside, a small file becomes huge, and it's no recording
GROUP_S = 1.0  # seconds resampled at once: a call for each packet would cost more than the decoding
MAX_BROKEN_READS = 1_000  # in a row, before a container counts as ended
SHORT_BY_S, SHORT_BY_SHARE = 0.3, 0.005  # missing seconds worth a warning; containers often announce a little more

RUN_UP_S = 1.0  # seconds decoded before a part: codecs need up to 0.5 (MP3's bit reservoir), and HE-AAC its headers
MIN_RUN_UP_S = 0.25  # of them; Opus needs 0.08
GAP_S = 0.1  # seconds by which timestamps must leap ahead to mean that sound is missing there
LEAP_S = 1.0  # seconds by which they must leap back to mean that another recording begins
MAX_GAP_S = 10.0  # seconds; a longer gap is believed only within the length that the file announces
SPARSE = ("matroska,webm", "mov,mp4,m4a,3gp,3g2,mj2")  # formats in which gaps may be nothing wrong: nobody spoke
PAUSE_S = 0.5  # seconds; a shorter gap in them is a pause in a call, where Opus sends a packet every 0.4 s (DTX)
MIN_GAPS_S = 1.0  # seconds that their longer gaps add up to, worth a warning


@dataclass(frozen=True)
class Part:
    """What of a file is wanted.

    `stream`: which of its audio streams, from 0, or None for the default one. `channels`: their mix, each on its own,
    or the one with a number, from 0. `start` and `end`: seconds from that stream's first sample; no end is the file's.
    """

    stream: int | None = None
    channels: Literal["mix", "split"] | int = "mix"
    start: float = 0.0
    end: float | None = None


@dataclass(frozen=True)
class Audio:
    """A part of a file, decoded.

    `channels`: one array, or with "split" one for each channel, float32, all of one shape (n,), 16 kHz, finite, within
    -1 and 1. `warnings`: sentences for the caller. `offset`: the part's start, in seconds of the file.
    `reaches_end`: the file has no audio behind this part.
    """

    channels: tuple[Samples, ...]
    warnings: tuple[str, ...] = ()
    offset: float = 0.0
    reaches_end: bool = True

    @property
    def samples(self) -> Samples:
        """The only channel, or the first."""
        return self.channels[0]

    @property
    def duration(self) -> float:
        """Seconds, of one channel."""
        return len(self.samples) / SAMPLE_RATE


WHOLE = Part()


def decode(file: IO[bytes], stop: Stop, *, max_seconds: float, extension: str = "", part: Part = WHOLE) -> Audio:
    """Decode a part of `file` (seekable; read only, and not closed), and as little else as possible.

    Times count from the stream's first sample, as players do, with gaps in the sound as silence. `extension` is that of
    the caller's name for the file, in lower case without the dot; only formats without a header need it.

    Raises NotAudio, NoAudioStream, BadInput (for a stream, channel or start that isn't there), Stopped, or TooLong:
    while decoding, as a small file may hold days. `max_seconds` is for the part, with "split" for all its channels.
    """
    kept, reading = _read(file, stop, extension, part, max_seconds)
    return Audio(kept.tracks(), (*kept.warnings(), *reading.warnings()), part.start, reading.reached_end)


def _read(file: IO[bytes], stop: Stop, extension: str, part: Part, max_seconds: float) -> tuple[Kept, "_Reading"]:
    """By the shortest way to the part's start that leads there."""
    for way in _ways(file, stop, part):
        kept = _kept(part, max_seconds)
        try:
            with containers.open_container(file, extension) as container:
                stream = containers.audio_stream(container, part.stream)
                reading = _Reading(container, stream, part, kept)
                reading.read(file, stop, way)
            return kept, reading
        except _Lost:
            continue
    raise AssertionError("the last way can't be lost")


Way = Literal["jump", "walk", "decode"]
"""To where a part starts: FFmpeg seeks, packets before are read but not decoded, or everything is decoded."""


def _ways(file: IO[bytes], stop: Stop, part: Part) -> Iterator[Way]:
    if part.start > 2 * RUN_UP_S:
        if not (containers.is_ogg(file) and containers.is_chained(file, stop)):
            yield "jump"
        yield "walk"
    yield "decode"


class _Lost(Exception):
    """This way doesn't lead to the part's start for certain."""


def _kept(part: Part, max_seconds: float) -> Kept:
    most = max_seconds * SAMPLE_RATE
    if part.channels == "mix":
        return Mix(most, max_seconds)
    return Split(most, max_seconds) if part.channels == "split" else One(most, max_seconds, part.channels)


class _Reading:
    """One pass over a stream's packets, from where the way leads to the part's end."""

    def __init__(self, container: InputContainer, stream: AudioStream, part: Part, kept: Kept) -> None:
        self._container, self._stream, self._kept = container, stream, kept
        self._start_s, self._end_s = part.start, part.end
        self._first = round(part.start * SAMPLE_RATE)
        self._last = None if part.end is None else round(part.end * SAMPLE_RATE)
        self._has_times = containers.has_times(container, stream)
        self._is_sparse = container.format.name in SPARSE
        self._resampler = _Resampler()
        self._begins: float | None = None  # the time of the stream's first sample
        self._now = 0.0  # seconds from there to the end of the frames so far
        self._position = 0  # samples from there to the end of those that are resampled
        self._leap_s = 0.0  # by how much the last frame was not where it should be
        self._damaged = 0
        self._damaged_s = 0.0
        self._missing = 0  # samples, without those of pauses
        self._ended_early = False
        self._hidden_bytes = 0
        self._announced_s: float | None = None
        self.reached_end = True

    def read(self, file: IO[bytes], stop: Stop, way: Way) -> None:
        packets = self._packets()
        if way != "decode":
            packets = self._approach(packets, stop, way)
        for packet in packets:
            stop.check()
            if not all(self._take(frame) for frame in self._frames(packet)):
                self.reached_end = False
                break
        for block in self._resampler.flush():
            self._add(block)
        if self._damaged and not self._position:
            raise NotAudio("no audio could be decoded: the file is damaged")
        if self._first and self._position <= self._first:
            if way == "jump":  # joined files may go on, where FFmpeg's index doesn't
                raise _Lost
            raise _behind_end(self._position / SAMPLE_RATE)
        if self.reached_end:
            self._look_at_end(file)

    def warnings(self) -> Iterator[str]:
        if self._damaged:
            packets, were = ("packet", "was") if self._damaged == 1 else ("packets", "were")
            held = f" ({self._damaged_s:.2f} s)" if self._damaged_s else ""
            yield f"{self._damaged} damaged {packets} of audio{held} {were} skipped"
        missing_s = self._missing / SAMPLE_RATE
        if self._missing and (self._damaged or not self._is_sparse):
            yield f"{missing_s:.1f} s of audio are missing in between: there is silence instead"
        elif missing_s >= MIN_GAPS_S:  # FFmpeg leaves out what it can't read of these; or there never was more
            yield f"the file holds no audio for {missing_s:.1f} s in between: there is silence instead"
        seconds = self._position / SAMPLE_RATE
        if self._announced_s is not None and self._announced_s - seconds > max(
            SHORT_BY_S, SHORT_BY_SHARE * self._announced_s
        ):
            announced = f"the file announces {self._announced_s:.1f} s of audio but holds {seconds:.1f} s"
            yield f"{announced}: it is cut off or damaged"
        if self._ended_early:
            yield "the file ends in the middle of an Ogg page: it is cut off"
        if self._hidden_bytes:
            yield f"the file's header leaves out {self._hidden_bytes} bytes behind the audio, which may hold more of it"

    def _look_at_end(self, file: IO[bytes]) -> None:
        container, stream = self._container, self._stream
        self._announced_s = self._announced()
        if container.format.name == "mp3" and stream.duration and containers.counts_its_frames(file):
            self._announced_s = _seconds(stream.duration, stream)
        elif (counted_s := containers.counted_s(file, stream, self._position / SAMPLE_RATE)) is not None:
            self._announced_s = max(self._announced_s or 0.0, counted_s)
        self._ended_early = container.format.name == "ogg" and containers.ends_within_ogg_page(file)
        self._hidden_bytes = containers.hidden_bytes(file, container, stream, self._position / SAMPLE_RATE)

    def _announced(self) -> float | None:
        return containers.announced_s(self._container, self._stream, self._begins or 0.0)

    # --- packets

    def _packets(self) -> "Iterator[Packet[AudioStream] | None]":
        """All packets, and the empty one at the end that flushes the decoder. A broken place is skipped and counted."""
        broken = 0
        while broken < MAX_BROKEN_READS:
            try:
                for packet in self._container.demux(self._stream):
                    broken = 0
                    yield packet
                return
            except av.FFmpegError:  # raised by demux alone; it can be called again, but the generator is finished
                broken += 1
                self._count_damage(None)
            except IndexError:  # PyAV stumbles at the end over streams that came up midway (joined transport streams)
                yield None
                return

    def _frames(self, packet: "Packet[AudioStream] | None") -> list[AudioFrame]:
        """The frames in a packet, or what the decoder still holds."""
        try:
            frames = packet.decode() if packet else self._stream.codec_context.decode(None)
        except av.FFmpegError:
            self._count_damage(packet)
            return []
        return [frame for frame in frames if frame.samples]

    def _count_damage(self, packet: "Packet[AudioStream] | None") -> None:
        if self._now < self._start_s:  # a decoder that begins in the middle may stumble; and nobody asked for it
            return
        self._damaged += 1
        if packet and packet.duration:
            self._damaged_s += _seconds(packet.duration, packet)

    # --- the way to the start

    def _approach(
        self, packets: "Iterator[Packet[AudioStream] | None]", stop: Stop, way: Way
    ) -> "Iterator[Packet[AudioStream] | None]":
        """The packets from shortly before the part's start. Raises _Lost where timestamps don't lead there surely."""
        if not self._has_times or (way == "jump" and not containers.is_indexed(self._container, self._stream)):
            raise _Lost
        self._begins = self._first_time(packets)
        self._stream.codec_context.flush_buffers()
        target = self._start_s - RUN_UP_S
        if way == "jump":
            try:
                place = int((self._begins + target) / _seconds(1, self._stream))
                self._container.seek(place, stream=self._stream)
            except av.FFmpegError as error:
                raise _Lost from error
            packets = self._packets()
        before = None
        tick_s = _seconds(1, self._stream)  # asking each packet for it would take longer than reading it
        for packet in packets:
            stop.check()
            if packet is None or packet.pts is None:
                if packet is None or packet.size or way == "jump" or before is None:
                    raise _Lost
                raise _behind_end(before)
            at = packet.pts * tick_s - self._begins
            if before is not None and not -GAP_S < at - before < MAX_GAP_S:
                raise _Lost
            # A tick less than its duration, which Matroska rounds to milliseconds: it would sum up.
            before = max(at, before or at) + max((packet.duration or 0) - 1, 0) * tick_s
            if before >= target:
                break
        else:
            raise _Lost
        if at > self._start_s - MIN_RUN_UP_S:
            raise _Lost
        self._now = -1.0  # until the first frame tells
        yield packet
        yield from packets

    def _first_time(self, packets: "Iterator[Packet[AudioStream] | None]") -> float:
        for packet in packets:
            for frame in self._frames(packet):
                if frame.pts is None:
                    raise _Lost
                return _seconds(frame.pts, frame)
        raise _Lost

    # --- frames

    def _take(self, frame: AudioFrame) -> bool:
        """Whether more may follow that is wanted. A stretch that can't be read is no reason to lose those around it."""
        self._place(frame)
        if self._end_s is not None and self._now >= self._end_s:
            return False
        try:
            for block in self._resampler.push(frame):
                self._add(block)
        except NotAudio:
            if not self._position:
                raise
            self._count_damage(None)
            return True
        self._now += frame.samples / frame.sample_rate
        return self._end_s is None or self._now <= self._end_s + 1 / SAMPLE_RATE

    def _place(self, frame: AudioFrame) -> None:
        """Move on to where a frame belongs, if sound is missing before it.

        Two frames in a row must say so: a damaged timestamp is no gap. Times that leap far back, or ahead beyond
        belief, are those of another recording, joined to this one: it goes on where this one ended.
        """
        if not self._has_times or frame.pts is None:
            if self._now < 0:
                raise _Lost
            return
        time = _seconds(frame.pts, frame)
        if self._begins is None:
            self._begins = time
        at = time - self._begins
        if self._now < 0:
            if at > self._start_s:
                raise _Lost
            self._now, self._position = at, round(at * SAMPLE_RATE)
            return
        ahead = at - self._now
        if -LEAP_S < ahead < GAP_S:
            self._leap_s = 0.0
        elif not self._leap_s:
            self._leap_s = ahead
        else:
            longest = max(self._leap_s, ahead - self._leap_s)  # in a pause, each of the two frames comes after a gap
            self._leap_s = 0.0
            if ahead > 0 and self._is_believable(at, ahead):
                self._fill(at, is_pause=self._is_sparse and longest < PAUSE_S)
            else:
                self._begins += ahead

    def _is_believable(self, at: float, ahead: float) -> bool:
        announced = self._announced()
        return ahead <= MAX_GAP_S or (announced is not None and at <= announced)

    def _fill(self, at: float, *, is_pause: bool) -> None:
        for block in self._resampler.flush():
            self._add(block)
        end = round(at * SAMPLE_RATE)
        self._position = min(max(self._position, self._first), end)
        wanted = end if self._last is None else min(end, self._last)
        if not is_pause:
            self._missing += max(wanted - self._position, 0)
        while self._position < wanted:
            self._add(np.zeros((1, min(wanted - self._position, SAMPLE_RATE)), np.float32))
        self._now, self._position = at, end

    def _add(self, block: Samples) -> None:
        """Keep of a block what is in the part."""
        begin = max(self._first - self._position, 0)
        end = block.shape[1] if self._last is None else min(self._last - self._position, block.shape[1])
        self._position += block.shape[1]
        if begin < end:
            self._kept.add(block[:, begin:end])


def _seconds(ticks: int, of: "AudioStream | Packet[AudioStream] | AudioFrame") -> float:
    assert of.time_base is not None, "FFmpeg gives every audio stream one"
    return float(ticks * of.time_base)


def _behind_end(seconds: float) -> BadInput:
    return BadInput(f"clip: the audio ends at {seconds:.1f} s")


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
