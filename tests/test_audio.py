"""Decoding: what real and hostile media do to `audio.decode`."""

import io
import re
import socket
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Recording
from media import (
    RATE,
    alike,
    as_rifx,
    encode,
    noise,
    pcm,
    silence,
    speech,
    subtitles_only,
    video_without_sound,
    wav,
)

from whisper_worker import audio, channels, containers
from whisper_worker.audio import Audio, Part, decode
from whisper_worker.errors import BadInput, NoAudioStream, NotAudio, TooLong
from whisper_worker.stop import Stop, Stopped


def heard(file: bytes, *, extension: str = "", max_seconds: float = 60) -> Audio:
    decoded = decode(io.BytesIO(file), Stop(), max_seconds=max_seconds, extension=extension)
    assert decoded.samples.dtype == np.float32
    assert decoded.samples.ndim == 1
    assert np.isfinite(decoded.samples).all()
    assert not len(decoded.samples) or np.abs(decoded.samples).max() <= 1
    return decoded


def both_sides(left: audio.Samples, right: audio.Samples) -> audio.Samples:
    return np.stack([left, right], axis=1)


FORMATS = {
    "mp3": ("mp3", "libmp3lame", 44_100),
    "m4a": ("ipod", "aac", 44_100),
    "mp4": ("mp4", "aac", 48_000),
    "ogg": ("ogg", "libopus", 48_000),
    "webm": ("webm", "libopus", 48_000),
    "flac at 96 kHz": ("flac", "flac", 96_000),
    "wav at 8 kHz": ("wav", "pcm_s16le", 8_000),
    "wav at 11025 Hz, 24 bit": ("wav", "pcm_s24le", 11_025),
    "aac": ("adts", "aac", 44_100),
    "ac3": ("ac3", "ac3", 48_000),
    "mpeg transport stream": ("mpegts", "aac", 48_000),
    "avi": ("avi", "mp3", 44_100),
    "flv": ("flv", "aac", 44_100),
    "aiff": ("aiff", "pcm_s16be", 22_050),
    "au": ("au", "pcm_s16be", 8_000),
    "caf": ("caf", "alac", 44_100),
    "amr": ("amr", "libopencore_amrnb", 8_000),
    "matroska": ("matroska", "libopus", 48_000),
}


@pytest.mark.parametrize(("container", "codec", "rate"), FORMATS.values(), ids=FORMATS.keys())
def test_formats_decode_to_the_same_speech(container: str, codec: str, rate: int) -> None:
    decoded = heard(encode(container, codec, [speech()], rate=rate))
    assert decoded.duration == pytest.approx(len(speech()) / RATE, abs=0.06)
    assert alike(decoded.samples, speech()) > 0.9
    assert decoded.warnings == ()


def test_a_format_without_header_is_known_by_its_extension_alone() -> None:
    g722 = encode("g722", "g722", [speech()], rate=16_000)
    assert alike(heard(g722, extension="g722").samples, speech()) > 0.9
    with pytest.raises(NotAudio):
        heard(g722)


@pytest.mark.parametrize("first", [b"{", b"\n {", b"{}"])
def test_samples_that_begin_like_json_are_still_samples(first: bytes) -> None:
    g722 = encode("g722", "g722", [speech()], rate=16_000)
    assert alike(heard(first + g722[len(first) :], extension="g722").samples, speech()) > 0.9


NOT_AUDIO = {
    "empty": (b"", "empty"),
    "text named .mp3": (b"good morning to you all\n" * 9, "text"),
    "HTML": (b"\n <!DOCTYPE html><html><body>log in</body></html>", "HTML"),
    "JSON": (b'{"error": "expired"}', "JSON"),
    "JSON of other alphabets, cut within a letter": (('{"a": "' + "é" * 99 + '"}').encode(), "JSON"),
    "subtitles": (b"1\n00:00:01,000 --> 00:00:02,000\nHello\n\n", "text"),
    "a picture": (b"\xff\xd8\xff\xe0\x00\x10JFIF" + bytes(99), "JPEG"),
    "a ZIP that holds an MP3": (b"PK\x03\x04" + encode("mp3", "libmp3lame", [speech()], rate=44_100), "ZIP"),
    "random bytes": (np.random.default_rng(0).bytes(100_000), "no audio"),
    "mp4 without moov": (encode("mp4", "aac", [speech()])[:20_000], "no audio"),
    "half a WAV header": (wav(pcm(speech()))[:30], "no audio"),
    "0 samples a second": (wav(pcm(speech()), rate=0), "no audio"),
    "1 sample a second": (wav(pcm(speech()), rate=1), "1 samples"),
    "255 channels": (wav(np.zeros((100, 255), np.int16)), "255 channels"),
    "a codec nobody knows": (wav(pcm(speech())).replace(b"\x10\0\0\0\x01\0", b"\x10\0\0\0\x34\x12", 1), "codec"),
    "a billion samples a second": (wav(pcm(speech()), rate=1_000_000_000), "samples a second"),
}


@pytest.mark.parametrize(("file", "word"), NOT_AUDIO.values(), ids=NOT_AUDIO.keys())
def test_what_is_no_audio_is_refused_and_named(file: bytes, word: str) -> None:
    with pytest.raises(NotAudio, match=word):
        heard(file)


@pytest.mark.parametrize("make", [video_without_sound, subtitles_only])
def test_media_without_sound_has_no_audio_stream(make: object) -> None:
    assert callable(make)
    with pytest.raises(NoAudioStream):
        heard(make())


@pytest.mark.parametrize(
    "samples", [speech()[:0], speech()[:1], speech()[:160]], ids=["header only", "one sample", "10 ms"]
)
def test_next_to_nothing_decodes_to_next_to_nothing(samples: audio.Samples) -> None:
    decoded = heard(wav(pcm(samples)))
    assert len(decoded.samples) == len(samples)
    assert decoded.warnings == ()


def test_a_wav_cut_after_its_header_is_empty() -> None:
    decoded = heard(wav(pcm(speech()))[:44])
    assert decoded.duration == 0
    assert decoded.warnings == ("the file announces 4.2 s of audio but holds 0.0 s: it is cut off or damaged",)


STREAMED = {  # what programs write in place of the sizes that they don't know yet: of the samples, of the file
    "zero": (0, 0),
    "zero, and the header's own size": (0, 36),
    "4 GB": (0xFFFFFFFF, 0xFFFFFFFF),
    "4 GB with the header": (0xFFFFFFFF - 36, 0xFFFFFFFF),
    "2 GB": (0x7FFFFFFF, 0x7FFFFFFF),
    "2 GB and the header": (0x80000000, 0x80000024),
    "2 GB but a page": (0x7FFFF000, 0x7FFFF024),
    "2 GB but 64 KB": (0x7FFF0000, 0x7FFF0024),
    "1 GB": (1 << 30, 1 << 30),
    "1 GB and the header": (1 << 30, (1 << 30) + 36),
    "any number twice": (100_000_000, 100_000_000),
    "samples beyond the file": (100_000_000, 36 + 2 * len(speech())),
}


@pytest.mark.parametrize(("data_size", "riff_size"), STREAMED.values(), ids=STREAMED.keys())
def test_a_streamed_wav_header_promises_anything_and_all_is_decoded(data_size: int, riff_size: int) -> None:
    decoded = heard(wav(pcm(speech()), data_size=data_size, riff_size=riff_size))
    assert len(decoded.samples) == len(speech())
    assert decoded.warnings == ()


def test_a_wav_header_that_leaves_samples_out_is_warned_about() -> None:
    decoded = heard(wav(pcm(speech()), data_size=16_000))
    assert decoded.duration == 0.5
    assert "leaves out" in decoded.warnings[0]


def test_joined_wav_files_give_the_first_and_a_warning() -> None:
    decoded = heard(wav(pcm(speech())) * 2)
    assert len(decoded.samples) == len(speech())
    assert "leaves out" in decoded.warnings[0]


def test_the_track_marked_as_default_is_taken() -> None:
    tracks = [noise(4), speech()]
    assert alike(heard(encode("matroska", "libopus", tracks, default=1)).samples, speech()) > 0.9
    assert alike(heard(encode("matroska", "libopus", tracks[::-1], default=0)).samples, speech()) > 0.9


def test_the_sound_of_a_video_is_decoded() -> None:
    assert alike(heard(encode("mp4", "aac", [speech()], picture=True)).samples, speech()) > 0.9


# --- channels


def test_stereo_is_mixed() -> None:
    decoded = heard(encode("ogg", "libopus", [both_sides(speech(), speech())]))
    assert alike(decoded.samples, speech()) > 0.9
    assert decoded.warnings == ()


def test_one_silent_side_is_no_cancellation() -> None:
    decoded = heard(wav(both_sides(silence(4.2)[: len(speech())], speech()[: int(4.2 * RATE)])))
    assert alike(decoded.samples, speech()) > 0.9
    assert decoded.warnings == ()


def test_stereo_that_cancels_itself_out_falls_back_to_one_channel() -> None:
    decoded = heard(wav(both_sides(speech() * 0.5, -speech() * 0.52)))
    assert alike(decoded.samples, speech()) > 0.99
    [warning] = decoded.warnings
    assert re.fullmatch(r"the channels cancel each other .*, for [34]\.\d s: only channel 0 was used there", warning)


def test_a_stretch_that_cancels_itself_out_is_not_lost_among_others() -> None:
    left = np.concatenate([speech(), speech(), speech()])
    right = np.concatenate([speech(), -speech(), speech()])
    decoded = heard(wav(both_sides(left, right)))
    assert alike(decoded.samples, left) > 0.99
    assert "only channel 0 was used there" in decoded.warnings[0]


def test_where_channels_cancel_the_louder_one_is_taken_unless_both_are_alike() -> None:
    """Each change from one to the other would be heard."""
    decoded = heard(wav(both_sides(speech() * 0.5 * np.float32(1.05), speech() * np.float32(-0.5))))
    assert alike(decoded.samples[: RATE // 2], speech()[: RATE // 2]) > 0.99
    assert alike(decoded.samples, speech()) > 0.99


def test_noise_of_opposite_channels_in_a_pause_is_not_worth_a_word() -> None:
    hiss = noise(3, 0.0005)
    left = np.concatenate([speech(), hiss])
    assert heard(wav(both_sides(left, np.concatenate([speech(), -hiss])))).warnings == ()


@pytest.mark.parametrize("channels", [3, 6, 8, 9, 16, 64])
def test_any_number_of_channels_is_mixed(channels: int) -> None:
    samples = np.repeat(speech()[:, None], channels, axis=1)
    decoded = heard(wav(samples))
    assert len(decoded.samples) == len(speech())
    assert alike(decoded.samples, speech()) > 0.99


# --- numbers


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_samples_that_are_no_numbers_do_not_spread(value: float) -> None:
    samples = speech().copy()
    samples[::4000] = value
    assert alike(heard(wav(samples)).samples, speech()) > 0.99


def test_nothing_but_nan_is_silence() -> None:
    assert not heard(wav(np.full(RATE, np.nan, np.float32))).samples.any()


@pytest.mark.parametrize("scale", [1.5, 1000.0, 1e30])
def test_float_samples_that_are_too_loud_are_scaled_not_crushed(scale: float) -> None:
    assert alike(heard(wav(speech() * np.float32(scale))).samples, speech()) > 0.99


def test_the_loudest_numbers_there_are_can_be_mixed() -> None:
    loud = speech() / np.abs(speech()).max() * np.float32(3e38)
    assert alike(heard(wav(both_sides(loud, loud))).samples, speech()) > 0.99


def test_one_absurd_sample_does_not_silence_the_rest() -> None:
    samples = speech().copy()
    samples[1000] = 1e20
    assert alike(heard(wav(samples)).samples, speech()) > 0.9


# --- damage


def hurt(file: bytes, seed: int, places: int = 10) -> bytes:
    """Random bytes changed in the middle of the file."""
    rng = np.random.default_rng(seed)
    damaged = bytearray(file)
    for place in rng.integers(int(len(file) * 0.3), int(len(file) * 0.7), places):
        damaged[place] = rng.integers(256)
    return bytes(damaged)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("container", "codec"), [("ipod", "aac"), ("adts", "aac"), ("mp3", "libmp3lame")])
def test_damaged_packets_are_skipped_and_the_rest_is_kept(container: str, codec: str, seed: int) -> None:
    decoded = heard(hurt(encode(container, codec, [speech()], rate=44_100), seed))
    assert decoded.duration > 0.9 * len(speech()) / RATE
    tail = speech()[int(0.75 * len(speech())) :]
    assert alike(decoded.samples[-len(tail) :], tail) > 0.5  # what follows the damage is there


def test_skipped_packets_are_counted_in_a_warning() -> None:
    decoded = heard(hurt(encode("ipod", "aac", [speech()], rate=44_100), seed=0))
    assert "damaged packets" in decoded.warnings[0]


def test_a_browsers_ogg_without_an_end_mark_is_whole() -> None:
    file = bytearray(encode("ogg", "libopus", [speech()]))
    file[file.rindex(b"OggS") + 5] &= ~4
    assert heard(bytes(file)).warnings == ()


CUT = {
    "flac": encode("flac", "flac", [speech()]),
    "webm": encode("webm", "libopus", [speech()]),
    "mp4 with its index first": encode("mp4", "aac", [speech()], options={"movflags": "faststart"}),
    "ogg": encode("ogg", "libopus", [speech()]),
}


@pytest.mark.parametrize("file", CUT.values(), ids=CUT.keys())
def test_a_file_that_is_cut_off_says_so(file: bytes) -> None:
    assert heard(file).warnings == ()
    decoded = heard(file[: len(file) // 2])
    assert 0.5 < decoded.duration < 3
    assert any("cut off" in warning for warning in decoded.warnings)


WHOLE_UNCOMPRESSED = {
    "wav, 16 kHz": wav(pcm(silence(60))),
    "wav, 44.1 kHz stereo": wav(pcm(np.zeros((60 * 44_100, 2), np.float32)), rate=44_100),
    "wav, 8 kHz, with chunks before and behind": encode("wav", "pcm_s16le", [silence(60)], rate=8_000)
    + b"LIST\4\0\0\0INFO",
    "wav, big-endian": as_rifx(wav(pcm(silence(60)))),
    "wav, A-law": encode("wav", "pcm_alaw", [silence(60)], rate=8_000),
    "wav over 4 GB": encode("wav", "pcm_s16le", [silence(60)], rate=8_000, options={"rf64": "always"}),
    "w64": encode("w64", "pcm_s24le", [silence(60)], rate=8_000),
    "caf": encode("caf", "pcm_s16le", [silence(60)], rate=8_000),
    "aiff": encode("aiff", "pcm_s16be", [silence(60)], rate=8_000),
    "au": encode("au", "pcm_s16be", [silence(60)], rate=8_000),
}


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("file", WHOLE_UNCOMPRESSED.values(), ids=WHOLE_UNCOMPRESSED.keys())
def test_uncompressed_audio_that_is_cut_off_says_what_is_left(file: bytes, share: float) -> None:
    assert heard(file).warnings == ()
    (warning,) = heard(file[: int(share * len(file))]).warnings
    held = f"{60 * share:.1f}"
    assert warning == f"the file announces 60.0 s of audio but holds {held} s: it is cut off or damaged"


def test_a_part_of_a_wav_that_is_cut_off_says_so_where_it_misses_something() -> None:
    cut = wav(pcm(silence(60)))[: 30 * 2 * RATE]
    assert "announces 60.0 s of audio but holds 30.0 s" in played(cut, start=20, end=55).warnings[0]
    assert played(cut, start=10, end=20).warnings == ()


def test_a_rate_and_layout_that_change_midway_lose_nothing() -> None:
    stereo = encode("mp3", "libmp3lame", [both_sides(speech(), speech())], rate=44_100)
    decoded = heard(stereo + encode("mp3", "libmp3lame", [speech()], rate=8_000))
    assert decoded.duration == pytest.approx(2 * len(speech()) / RATE, abs=0.3)


def test_a_stream_that_comes_up_midway_ends_nothing() -> None:
    around = encode("mpegts", "aac", [np.tile(speech(), 4)])
    other = encode("mpegts", "aac", [speech()], options={"mpegts_start_pid": "300"})
    decoded = heard(around + other + around)  # FFmpeg looks at both ends when it opens a file: the middle is news
    assert decoded.duration == pytest.approx(8 * len(speech()) / RATE, rel=0.05)


def test_an_unreadable_stretch_in_the_middle_is_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    at_8_khz = encode("mp3", "libmp3lame", [speech()], rate=8_000)
    monkeypatch.setattr(audio, "MIN_RATE", 10_000)
    with pytest.raises(NotAudio):
        heard(at_8_khz)
    at_44_khz = encode("mp3", "libmp3lame", [speech()], rate=44_100)
    decoded = heard(at_44_khz + at_8_khz + at_44_khz)
    assert decoded.duration == pytest.approx(3 * len(speech()) / RATE, abs=0.5)
    assert not decoded.samples[int(4.6 * RATE) : int(8.4 * RATE)].any()
    assert alike(decoded.samples[-len(speech()) :], speech()) > 0.9
    assert "damaged" in decoded.warnings[0]


def test_chained_ogg_streams_are_all_decoded() -> None:
    decoded = heard(encode("ogg", "libopus", [speech()]) * 2)
    assert decoded.duration == pytest.approx(2 * len(speech()) / RATE, abs=0.1)


def test_rubbish_before_an_mp3_is_skipped() -> None:
    rubbish = np.random.default_rng(0).bytes(5000)
    decoded = heard(rubbish + encode("mp3", "libmp3lame", [speech()], rate=44_100))
    assert alike(decoded.samples, speech()) > 0.9


# --- limits


def test_a_small_file_that_holds_too_much_is_stopped_while_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    ten_minutes = encode("flac", "flac", [silence(600)], rate=16_000)
    assert len(ten_minutes) < 200_000
    added: list[int] = []
    real = channels.Mix.add

    def count(decoded: channels.Mix, block: audio.Samples) -> None:
        added.append(1)
        real(decoded, block)

    monkeypatch.setattr(channels.Mix, "add", count)
    with pytest.raises(TooLong, match="10 s"):
        heard(ten_minutes, max_seconds=10)
    assert len(added) <= 12  # of 600 blocks of a second


def test_audio_of_just_the_allowed_length_passes() -> None:
    assert heard(wav(pcm(silence(2))), max_seconds=2).duration == 2
    with pytest.raises(TooLong):
        heard(wav(pcm(silence(2.01))), max_seconds=2)


def test_decoding_ends_when_the_job_is_stopped() -> None:
    stop = Stop()
    stop.set()
    with pytest.raises(Stopped):
        decode(io.BytesIO(wav(pcm(speech()))), stop, max_seconds=60)


# --- nothing but the given bytes is opened


@pytest.fixture
def knocked() -> Iterator[tuple[int, list[bytes]]]:
    """A port on loopback, and what came in there."""
    requests: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    requests.append(connection.recv(1000))

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1], requests
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


PLAYLISTS = {
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:4,\n{target}\n#EXT-X-ENDLIST\n",
    "ffconcat": "ffconcat version 1.0\nfile '{target}'\n",
    "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio {port} RTP/AVP 0\n"
    "a=control:{target}\n",
    "dash": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" '
    'mediaPresentationDuration="PT4S" profiles="urn:mpeg:dash:profile:isoff-on-demand:2011"><Period><AdaptationSet '
    'mimeType="audio/mp4"><Representation id="0" bandwidth="9"><BaseURL>{target}</BaseURL></Representation>'
    "</AdaptationSet></Period></MPD>",
    "smil of subtitles": '<window type="generic"><audio src="{target}"/></window>',
    "image pattern": "{target}%03d.jpg",
    "asx": '<asx version="3.0"><entry><ref href="{target}"/></entry></asx>',
    "pls": "[playlist]\nFile1={target}\nNumberOfEntries=1\n",
    "rtsp url": "RTSPtext\nrtsp://127.0.0.1:{port}/x\n",
}


@pytest.mark.parametrize("signatures", [True, False], ids=["as it is", "by the container list alone"])
@pytest.mark.parametrize("as_file", [True, False], ids=["file", "bytes"])
@pytest.mark.parametrize("where", ["other file", "relative name", "address"])
@pytest.mark.parametrize("kind", PLAYLISTS)
def test_a_playlist_in_disguise_reads_nothing_else(
    kind: str,
    where: str,
    as_file: bool,
    signatures: bool,
    tmp_path: Path,
    knocked: tuple[int, list[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port, requests = knocked
    if not signatures:
        monkeypatch.setattr(containers, "LOOKS_LIKE", ())
    (tmp_path / "secret.wav").write_bytes(wav(pcm(speech())))
    monkeypatch.chdir(tmp_path)
    targets = {
        "other file": str(tmp_path / "secret.wav"),
        "relative name": "secret.wav",
        "address": f"http://127.0.0.1:{port}/secret.wav",
    }
    text = PLAYLISTS[kind].format(target=targets[where], port=port).encode()
    disguise = tmp_path / "song.mp3"
    disguise.write_bytes(text)
    with disguise.open("rb") if as_file else io.BytesIO(text) as file, pytest.raises(NotAudio):
        decode(file, Stop(), max_seconds=60, extension="mp3")
    assert requests == []


def test_the_same_playlist_would_be_followed_without_the_container_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above could not fail if FFmpeg refused these by itself."""
    import av

    (tmp_path / "secret.wav").write_bytes(wav(pcm(speech())))
    (tmp_path / "song.mp3").write_bytes(PLAYLISTS["ffconcat"].format(target="secret.wav").encode())
    monkeypatch.chdir(tmp_path)
    with av.open("song.mp3") as container:
        assert sum(frame.samples for frame in container.decode(audio=0)) == len(speech())


# --- which channels


def played(file: bytes, **part: Any) -> Audio:
    return decode(io.BytesIO(file), Stop(), max_seconds=200, part=Part(**part))


ANSWER = speech()[::-1].copy()  # the other one on the line


def test_split_channels_are_apart() -> None:
    decoded = played(wav(pcm(both_sides(speech(), ANSWER))), channels="split")
    assert [channel.shape for channel in decoded.channels] == [(len(speech()),)] * 2
    assert alike(decoded.channels[0], speech()) > 0.99
    assert alike(decoded.channels[1], ANSWER) > 0.99
    assert decoded.samples is decoded.channels[0]
    assert decoded.warnings == ()


def test_a_silent_channel_is_a_channel() -> None:
    decoded = played(wav(pcm(both_sides(speech(), speech() * 0))), channels="split")
    assert not decoded.channels[1].any()


def test_splitting_a_mono_file_says_that_there_is_one_channel() -> None:
    decoded = played(wav(pcm(speech())), channels="split")
    assert len(decoded.channels) == 1
    assert "only one channel" in decoded.warnings[0]


DUAL_MONO = {
    "wav": wav(pcm(both_sides(speech(), speech()))),
    "wav, one side a little louder": wav(pcm(both_sides(speech(), speech() * np.float32(0.99)))),
    "mp3": encode("mp3", "libmp3lame", [both_sides(speech(), speech())], rate=44_100),
    "aac": encode("ipod", "aac", [both_sides(speech(), speech())], rate=44_100),
    "opus": encode("ogg", "libopus", [both_sides(speech(), speech())]),
    "three channels": wav(pcm(np.repeat(speech()[:, None], 3, axis=1))),
}


@pytest.mark.parametrize("file", DUAL_MONO.values(), ids=DUAL_MONO.keys())
def test_channels_that_are_the_same_are_one(file: bytes) -> None:
    decoded = played(file, channels="split")
    assert len(decoded.channels) == 1
    assert "channels are the same" in decoded.warnings[0]
    assert alike(decoded.samples, speech()) > 0.9


def test_channels_that_differ_for_a_moment_are_not_the_same() -> None:
    left = np.tile(speech(), 12)
    right = left.copy()
    right[RATE : 2 * RATE] += noise(1, 0.05)
    assert len(played(wav(pcm(both_sides(left, right))), channels="split").channels) == 2


def test_a_channel_is_taken_by_its_number() -> None:
    file = wav(pcm(both_sides(speech(), ANSWER)))
    assert alike(played(file, channels=0).samples, speech()) > 0.99
    assert alike(played(file, channels=1).samples, ANSWER) > 0.99


@pytest.mark.parametrize(
    ("samples", "number", "sentence"),
    [
        (both_sides(speech(), ANSWER), 2, "channels: the audio has 2 channels, numbered from 0"),
        (speech(), 1, "channels: the audio has 1 channel, numbered from 0"),
        (speech(), 255, "channels: the audio has 1 channel, numbered from 0"),
    ],
)
def test_a_channel_that_is_not_there_is_bad_input(samples: audio.Samples, number: int, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        played(wav(pcm(samples)), channels=number)


def test_eight_channels_can_be_split_and_nine_not() -> None:
    samples = np.stack([np.roll(speech(), 4000 * number) for number in range(9)], axis=1)
    assert len(played(wav(pcm(samples[:, :8])), channels="split").channels) == 8
    with pytest.raises(BadInput, match="channels: the audio has 9, no more than 8 can be split"):
        played(wav(pcm(samples)), channels="split")


@pytest.mark.parametrize("stereo_first", [True, False])
def test_a_mono_stretch_of_a_stereo_recording_is_on_both_channels(stereo_first: bool) -> None:
    parts = [
        encode("mp3", "libmp3lame", [both_sides(speech(), speech() * 0)], rate=44_100),
        encode("mp3", "libmp3lame", [speech()], rate=8_000),
    ]
    file = b"".join(parts if stereo_first else parts[::-1])
    one, (left, right) = played(file, channels=1).samples, played(file, channels="split").channels
    assert len(left) == len(right)
    halves = np.array_split(right, 2)
    stereo, mono = halves if stereo_first else halves[::-1]
    assert np.abs(stereo[RATE:-RATE]).max() < 0.01
    assert np.abs(mono[RATE:-RATE]).max() > 0.1
    assert np.array_equal(one, right)


def test_the_limit_counts_the_seconds_of_all_channels_that_are_split() -> None:
    file = io.BytesIO(wav(pcm(both_sides(speech(), ANSWER))))
    assert decode(file, Stop(), max_seconds=8.5, part=Part(channels="split")).duration == len(speech()) / RATE
    with pytest.raises(TooLong, match="8 s that are allowed, which count for each of its 2 channels"):
        decode(file, Stop(), max_seconds=8, part=Part(channels="split"))


def test_a_stream_is_taken_by_its_number() -> None:
    file = encode("matroska", "libopus", [noise(4), speech()], default=0)
    assert alike(played(file, stream=1).samples, speech()) > 0.9
    assert alike(played(file, stream=0).samples, speech()) < 0.5


@pytest.mark.parametrize(("tracks", "count"), [(1, "1 audio stream"), (2, "2 audio streams")])
def test_a_stream_that_is_not_there_is_bad_input(tracks: int, count: str) -> None:
    file = encode("matroska", "libopus", [speech()] * tracks)
    with pytest.raises(BadInput, match=f"audio_stream: the file has {count}, numbered from 0"):
        played(file, stream=tracks)


# --- a part of the file


@cache
def minute() -> audio.Samples:
    """Noise that never sounds the same twice: what is from another place isn't alike."""
    times = np.arange(60 * RATE) / RATE
    rough = np.convolve(noise(60, 0.1), np.full(16, 1 / 4), "same")  # nothing near the limit of what 16 kHz can hold
    shaped = rough * (1 + np.sin(7 * times + 0.3 * times**2))
    return np.asarray(0.9 * shaped / np.abs(shaped).max(), np.float32)


CLIPPED: dict[str, Any] = {
    **FORMATS,
    "wav": ("wav", "pcm_s16le", 16_000),
    "adpcm": ("wav", "adpcm_ms", 8_000),
    "mp4 in fragments": ("mp4", "aac", 48_000, {"movflags": "frag_keyframe+empty_moov", "frag_duration": "2000000"}),
    "webm as it is recorded": ("webm", "libopus", 48_000, {"live": "1"}),
    "mp3 without a header": ("mp3", "libmp3lame", 44_100, {"write_xing": "0"}),
    "mp3 in matroska": ("matroska", "libmp3lame", 44_100),
    "opus in mp4": ("mp4", "libopus", 48_000),
}
DECODES_ALL = {"aac", "ac3", "avi", "flv", "caf", "amr", "adpcm"}


def as_minute(container: str, codec: str, rate: int, options: dict[str, str] | None = None) -> bytes:
    return encode(container, codec, [minute()], rate=rate, options=options)


@pytest.mark.parametrize("name", CLIPPED)
def test_a_part_is_what_all_of_the_file_has_there(name: str) -> None:
    file = as_minute(*CLIPPED[name])
    whole = played(file)
    assert whole.reaches_end
    for start, end in [(0, 5), (1.5, 4), (10.37, 14.2), (41.001, 57.3), (55, None), (58, 70)]:
        part = played(file, start=start, end=end)
        expected = whole.samples[round(start * RATE) : end and round(end * RATE)]
        assert part.offset == start
        assert part.warnings == ()
        assert part.reaches_end == (end is None or end > 60)
        assert len(part.samples) == pytest.approx(len(expected), abs=0.005 * RATE)
        assert abs(lag(part.samples, expected)) <= 0.003 * RATE


def lag(part: audio.Samples, expected: audio.Samples) -> int:
    """By how many samples it is late."""
    length = min(len(part), len(expected)) - 1000
    inner = part[500 : 500 + length]
    likeness = [float(np.dot(inner, expected[500 + shift : 500 + shift + length])) for shift in range(-500, 501)]
    assert max(likeness) > 0.9 * np.linalg.norm(inner) * np.linalg.norm(expected[500 : 500 + length])
    return 500 - int(np.argmax(likeness))


def test_a_part_of_uncompressed_audio_is_exact() -> None:
    file = as_minute("wav", "pcm_s16le", 16_000)
    part = played(file, start=20.3, end=31.7)
    assert np.array_equal(part.samples, played(file).samples[round(20.3 * RATE) : round(31.7 * RATE)])


class Counting(io.BytesIO):
    """A file that knows how much of it was read."""

    bytes_read = 0

    def read(self, size: int | None = -1) -> bytes:
        read = super().read(size)
        self.bytes_read += len(read)
        return read


@pytest.fixture
def decoded_seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the frames were that came out of the decoder."""
    seconds: list[float] = []
    real = audio._Reading._frames

    def count(reading: audio._Reading, packet: Any) -> Any:
        frames = real(reading, packet)
        seconds.extend(frame.samples / frame.sample_rate for frame in frames)
        return frames

    monkeypatch.setattr(audio._Reading, "_frames", count)
    return seconds


@pytest.mark.parametrize("name", sorted(set(CLIPPED) - DECODES_ALL))
def test_no_more_than_the_part_is_decoded(name: str, decoded_seconds: list[float]) -> None:
    played(as_minute(*CLIPPED[name]), start=40, end=44)
    assert 4 < sum(decoded_seconds) < 7


@pytest.mark.parametrize("name", CLIPPED)
def test_nothing_behind_the_part_is_decoded(name: str, decoded_seconds: list[float]) -> None:
    played(as_minute(*CLIPPED[name]), end=4)
    assert sum(decoded_seconds) < 6


@pytest.mark.parametrize("name", ["m4a", "webm", "flac at 96 kHz", "wav", "aiff"])
def test_of_a_long_file_little_is_read(name: str) -> None:
    container, codec, rate = CLIPPED[name][:3]
    file = Counting(encode(container, codec, [np.tile(minute(), 6)], rate=rate))
    part = decode(file, Stop(), max_seconds=10, part=Part(start=250, end=260))
    assert part.duration == 10
    assert file.bytes_read < 0.3 * len(file.getvalue())


@pytest.mark.parametrize("name", ["mp3", "m4a", "ogg", "webm", "flac at 96 kHz", "wav", "aac", "mpeg transport stream"])
@pytest.mark.parametrize("start", [60.2, 1000])
def test_a_start_behind_the_end_is_bad_input(name: str, start: float) -> None:
    with pytest.raises(BadInput, match=r"^clip: the audio ends at 60\.[01] s$"):
        played(as_minute(*CLIPPED[name]), start=start)


def test_a_start_at_the_end_is_bad_input() -> None:
    with pytest.raises(BadInput, match=r"clip: the audio ends at 4\.0 s"):
        played(wav(pcm(silence(4))), start=4)


def test_a_file_read_part_by_part_says_where_it_ends() -> None:
    file = wav(pcm(minute()))
    parts = [played(file, start=start, end=start + 20) for start in (0, 20, 40)]
    assert [part.reaches_end for part in parts] == [False, False, True]
    assert np.array_equal(np.concatenate([part.samples for part in parts]), played(file).samples)


def test_a_part_may_be_split() -> None:
    file = wav(pcm(both_sides(minute(), minute()[::-1].copy())))
    left, right = played(file, channels="split", start=30, end=33).channels
    assert np.array_equal(left, played(file, channels=0).samples[30 * RATE : 33 * RATE])
    assert np.array_equal(right, played(file, channels=1).samples[30 * RATE : 33 * RATE])


def test_a_part_whose_channels_cancel_each_other_out_falls_back_too() -> None:
    part = played(wav(both_sides(minute() * 0.5, minute() * -0.52)), start=10, end=12)
    assert part.duration == 2
    assert lag(part.samples, minute()[10 * RATE : 12 * RATE]) == 0
    assert "only channel 0" in part.warnings[0]


JOINED = {
    "chained ogg": encode("ogg", "libopus", [minute()[: 20 * RATE]])
    + encode("ogg", "libopus", [minute()[20 * RATE :]]),
    "joined mp3": encode("mp3", "libmp3lame", [minute()[: 20 * RATE]], rate=44_100)
    + encode("mp3", "libmp3lame", [minute()[20 * RATE :]], rate=16_000),
    "joined transport streams": encode("mpegts", "aac", [minute()[: 20 * RATE]])
    + encode("mpegts", "aac", [minute()[20 * RATE :]]),
}


@pytest.mark.parametrize("start", [3, 15, 30, 50])
@pytest.mark.parametrize("file", JOINED.values(), ids=JOINED.keys())
def test_a_part_of_joined_files_is_the_right_one(file: bytes, start: int) -> None:
    whole, part = played(file), played(file, start=start, end=start + 4)
    assert abs(lag(part.samples, whole.samples[start * RATE : (start + 4) * RATE])) < 0.03 * RATE


def test_times_begin_with_the_first_sample() -> None:
    file = encode("matroska", "libopus", [minute()], begins_s=30)
    assert played(file).warnings == ()
    assert abs(lag(played(file, start=20, end=25).samples, minute()[20 * RATE : 25 * RATE])) < 0.01 * RATE


@pytest.mark.parametrize("container", ["matroska", "mp4"])
def test_a_gap_in_the_sound_is_silence(container: str) -> None:
    file = encode(container, "aac", [minute()[: 20 * RATE]], gap=(8, 5))
    whole = played(file)
    assert whole.duration == pytest.approx(25, abs=0.1)
    assert whole.warnings == ("the file holds no audio for 5.0 s in between: there is silence instead",)
    assert not whole.samples[int(8.2 * RATE) : int(12.8 * RATE)].any()
    assert abs(lag(whole.samples[15 * RATE : 20 * RATE], minute()[10 * RATE : 15 * RATE])) < 0.01 * RATE
    part = played(file, start=15, end=20)
    assert abs(lag(part.samples, whole.samples[15 * RATE : 20 * RATE])) < 0.01 * RATE
    assert part.warnings == ()
    within = played(file, start=9, end=12)
    assert not within.samples.any()
    assert "no audio for 3.0 s" in within.warnings[0]


@pytest.mark.parametrize("container", ["webm", "mp4"])
def test_pauses_that_were_not_sent_are_nothing_worth_telling(container: str) -> None:
    """Opus in a call sends but one packet in 420 ms while nobody speaks, and this is how the call is recorded."""

    def is_sent(second: float) -> bool:
        return not 20 < second < 40 or round(second / 0.02) % 21 == 0

    decoded = played(encode(container, "libopus", [minute()], is_sent=is_sent))
    assert decoded.duration == pytest.approx(60, abs=0.1)
    assert (decoded.samples[20 * RATE : 40 * RATE] == 0).mean() > 0.8
    assert decoded.warnings == ()


def test_a_moment_without_audio_is_nothing_worth_telling() -> None:
    assert played(encode("webm", "libopus", [minute()], is_sent=lambda second: not 30 < second < 30.9)).warnings == ()
    pauses = encode("webm", "libopus", [minute()], is_sent=lambda second: second % 20 < 19.3)
    assert "no audio for 1.4 s" in played(pauses).warnings[0]  # the last of them is at the end


def test_a_part_of_a_file_that_is_cut_off_says_so_where_it_misses_something() -> None:
    file = as_minute("mp4", "aac", 48_000, {"movflags": "faststart"})
    cut = file[: len(file) // 2]
    assert any("cut off" in warning for warning in played(cut, start=20, end=55).warnings)
    assert played(cut, start=20, end=25).warnings == ()


def test_an_mp3_that_holds_fewer_frames_than_its_header_counts_is_cut_off() -> None:
    file = encode("mp3", "libmp3lame", [speech()], rate=44_100)
    assert "cut off" in heard(file[: len(file) // 2]).warnings[0]
    without_header = encode("mp3", "libmp3lame", [speech()], rate=44_100, options={"write_xing": "0"})
    assert heard(without_header[: len(without_header) // 2]).warnings == ()


def test_damage_before_the_part_is_not_told() -> None:
    file = hurt(as_minute("ipod", "aac", 44_100), seed=0)
    assert "damaged" in played(file).warnings[0]
    assert played(file, start=45, end=50).warnings == ()


def test_what_damage_took_away_is_told_in_seconds() -> None:
    file = bytearray(as_minute("flac", "flac", 16_000))
    place = len(file) // 2
    file[place : place + len(file) // 20] = bytes(len(file) // 20)
    decoded = played(bytes(file))
    assert decoded.duration == pytest.approx(60, abs=0.1)
    assert any(re.search(r"3\.\d s of audio are missing", warning) for warning in decoded.warnings)
    assert abs(lag(decoded.samples[40 * RATE :], minute()[40 * RATE :])) < 0.01 * RATE


@pytest.mark.parametrize("container", ["webm", "matroska"])
def test_what_a_demuxer_leaves_out_without_a_word_is_told_too(container: str) -> None:
    file = bytearray(as_minute(container, "libopus", 48_000))
    place = len(file) // 2
    file[place : place + len(file) // 20] = noise(60).tobytes()[: len(file) // 20]
    decoded = played(bytes(file))
    assert decoded.duration == pytest.approx(60, abs=0.1)
    silent_s = (decoded.samples == 0).sum() / RATE
    assert silent_s > 2
    told = re.fullmatch(
        r"the file holds no audio for (.+) s in between: there is silence instead", decoded.warnings[-1]
    )
    assert told
    assert float(told[1]) == pytest.approx(silent_s, abs=0.1)


@pytest.mark.parametrize(
    "name",
    [
        "de_kerstin_0726.webm",
        "en_asterisk_queue-periodic-announce.g722",
        "en_asterisk_vm-invalid-password_8k.wav",
        "en_jfk_16k.flac",
        "en_lj001-0014.mp3",
        "en_stereo_two_speakers.flac",
        "es_mls_13697_11991_000000.opus",
        "ja_commonvoice_24511055.mp3",
    ],
)
def test_recordings_that_are_whole_have_no_warnings(name: str, recording: Callable[[str], Recording]) -> None:
    with recording(name).path.open("rb") as file:
        decoded = decode(file, Stop(), max_seconds=60, extension=name.rpartition(".")[2])
    assert decoded.duration > 2
    assert decoded.warnings == ()
