"""Awkward media, made by the tests from the worker's own clip of speech."""

import io
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from whisper_worker import health

CLIP = health.CLIP
CLIP_WORDS = health.WORDS
RATE = 16_000

Floats = NDArray[np.float32]


@cache
def speech() -> Floats:
    """The clip: float32, shape (n,), 16 kHz, 4.2 s."""
    resampler = av.AudioResampler(format="flt", layout="mono", rate=RATE)
    with av.open(str(CLIP)) as container:
        frames = [r for frame in container.decode(audio=0) for r in resampler.resample(frame)]
        frames += resampler.resample(None)
    return np.concatenate([frame.to_ndarray()[0] for frame in frames]).astype(np.float32)


def silence(seconds: float) -> Floats:
    return np.zeros(int(seconds * RATE), np.float32)


def noise(seconds: float, level: float = 0.1) -> Floats:
    return (np.random.default_rng(7).normal(0, level, int(seconds * RATE))).astype(np.float32)


def wav(samples: NDArray[Any], rate: int = RATE, data_size: int | None = None, riff_size: int | None = None) -> bytes:
    """A WAV file of samples of shape (n,) or (n, channels), int16 or float32/64; sizes in the header as told."""
    kind = 1 if samples.dtype.kind == "i" else 3
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    width = samples.dtype.itemsize
    data = samples.tobytes()
    fmt = struct.pack("<HHIIHH", kind, channels, rate, rate * channels * width, channels * width, width * 8)
    size = len(data) if data_size is None else data_size
    riff = 36 + len(data) if riff_size is None else riff_size
    header = b"RIFF" + struct.pack("<I", riff) + b"WAVEfmt " + struct.pack("<I", 16) + fmt + b"data"
    return header + struct.pack("<I", size) + data


def as_rifx(file: bytes) -> bytes:
    """A WAV file of 16-bit samples with its numbers the other way round."""
    numbers = struct.unpack("<IHHIIHH", file[16:36])
    samples = np.frombuffer(file[44:], "<i2").astype(">i2").tobytes()
    sizes = [struct.pack(">I", *struct.unpack("<I", file[at : at + 4])) for at in (4, 40)]
    return b"RIFX" + sizes[0] + b"WAVEfmt " + struct.pack(">IHHIIHH", *numbers) + b"data" + sizes[1] + samples


def pcm(samples: Floats) -> NDArray[np.int16]:
    return (np.clip(samples, -1, 1) * 32767).astype(np.int16)


def encode(
    container: str,
    codec: str,
    tracks: Sequence[Floats],
    *,
    rate: int = 48_000,
    picture: bool = False,
    default: int | None = None,
    options: dict[str, str] | None = None,
    begins_s: float = 0.0,
    gap: tuple[float, float] = (0.0, 0.0),
    is_sent: Callable[[float], bool] = lambda _: True,
) -> bytes:
    """A media file with one audio track for each array of samples (16 kHz mono, or (n, 2) stereo).

    The timestamps begin with `begins_s`, and leave out a gap: the seconds before it, and its own. Packets of which
    `is_sent` says no, by the second in which they begin, are not written.
    """
    with NamedTemporaryFile() as file, av.open(file.name, "w", format=container, options=options or {}) as output:
        show = _add_picture(output) if picture else None
        streams: list[Any] = []  # the stubs can't tell that an audio codec's name gives an audio stream
        for number, samples in enumerate(tracks):
            layout = "mono" if samples.ndim == 1 else "stereo"
            stream = output.add_stream(codec, rate=rate, layout=layout)
            if default is not None:
                flag = av.stream.Disposition.default
                stream.disposition = flag if number == default else av.stream.Disposition(0)
            streams.append(stream)
        for stream, samples in zip(streams, tracks, strict=True):
            layout = "mono" if samples.ndim == 1 else "stereo"
            frame = av.AudioFrame.from_ndarray(pcm(samples).reshape(1, -1), format="s16", layout=layout)
            frame.sample_rate, frame.time_base, frame.pts = RATE, Fraction(1, RATE), 0
            fmt = stream.codec_context.format.name
            resampler = av.AudioResampler(format=fmt, layout=layout, rate=rate, frame_size=stream.frame_size or 1024)
            for resampled in [*resampler.resample(frame), *resampler.resample(None)]:
                output.mux(_delayed(stream.encode(resampled), begins_s, *gap, is_sent))
            output.mux(_delayed(stream.encode(None), begins_s, *gap, is_sent))
        if show:
            show()
        output.close()
        return Path(file.name).read_bytes()


def _delayed(
    packets: list[Any], seconds: float, after_s: float, gap_s: float, is_sent: Callable[[float], bool]
) -> list[Any]:
    packets = [packet for packet in packets if is_sent(float(packet.pts * packet.time_base))]
    for packet in packets:
        shift = int((seconds + gap_s * (packet.pts * packet.time_base >= after_s)) / packet.time_base)
        packet.pts, packet.dts = packet.pts + shift, packet.dts + shift
    return packets


def video_without_sound() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        _add_picture(output)()
    return file.getvalue()


def _add_picture(output: av.container.OutputContainer) -> Callable[[], None]:
    """Add a video track; what is returned fills it. All tracks must exist before the first packet is written."""
    stream = output.add_stream("mpeg4", rate=10)
    stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"

    def show() -> None:
        for _ in range(10):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")))
        output.mux(stream.encode(None))

    return show


def subtitles_only() -> bytes:
    """A Matroska file whose only track is SubRip text: what a subtitle export leaves."""
    source = b"1\n00:00:00,000 --> 00:00:02,000\nHello\n\n"
    file = io.BytesIO()
    with av.open(io.BytesIO(source), "r", format="srt") as text, av.open(file, "w", format="matroska") as output:
        stream = output.add_stream_from_template(text.streams.subtitles[0])
        for packet in text.demux():
            if packet.dts is not None:
                packet.stream = stream
                output.mux(packet)
    return file.getvalue()


def envelope(samples: Floats) -> Floats:
    """Loudness in steps of 0.1 s: what survives any codec."""
    whole = samples[: len(samples) // 1600 * 1600].reshape(-1, 1600)
    return np.asarray(np.sqrt((whole**2).mean(axis=1)), np.float32)


def alike(a: Floats, b: Floats) -> float:
    """Correlation of two recordings' loudness over time, from -1 to 1."""
    length = min(len(a), len(b))
    return float(np.corrcoef(envelope(a[:length]), envelope(b[:length]))[0, 1])
