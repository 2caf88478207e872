"""Pieces of a long recording, side by side, against one walk through the whole: word errors and time.

The recording is joined of real clips with pauses. The walk is faster-whisper's own, with its speech detection and
as many threads as it likes. In `data`: `settings`, each with its repeats, and its word errors.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import faster_whisper

from benchmarks import corpus, wer
from benchmarks.arguments import numbers
from benchmarks.contenders import Model, model
from benchmarks.report import Report, Table, Value
from benchmarks.turns import take_turns
from whisper_worker.audio import SAMPLE_RATE
from whisper_worker.engine import Engine
from whisper_worker.model_files import find
from whisper_worker.pieces import Track, cut
from whisper_worker.request import Request
from whisper_worker.settings import Settings, Threads, available_cores
from whisper_worker.speech import listen
from whisper_worker.stop import Stop
from whisper_worker.transcript import Growing

NAME = "pieces"
HELP = "pieces of a long recording against one walk: word errors and time"
QUICK = {"seconds": 60.0, "pieces": [30.0], "repeats": 1}

WALK = 0.0


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=600.0, help="of the recording (%(default)g)")
    parser.add_argument("--pieces", type=numbers, default=[30.0, 60.0, 120.0], help="longest pieces, s (30,60,120)")
    parser.add_argument("--language", default="en", help="of the recording (%(default)s)")
    parser.add_argument("--fit-windows", default="true", help="the worker's setting (%(default)s)")


def run(options: Namespace) -> Report:
    loaded = model(options)
    recording = corpus.long_recording(options.seconds, options.language)
    said = wer.normalise(recording.text, options.language)
    transcribe = {WALK: _walk(loaded, recording), **{s: _pieces(loaded, recording, s, options) for s in options.pieces}}
    errors: dict[float, float] = {}

    def measure(setting: float) -> Mapping[str, float]:
        began = time.monotonic()
        text = transcribe[setting]()
        seconds = time.monotonic() - began
        errors[setting] = 100 * wer.rate([wer.errors(wer.normalise(text, options.language), said)])
        return {"seconds": seconds, "wer": errors[setting]}

    figures = take_turns(list(transcribe), options.repeats, measure, "pieces")
    rows: list[list[Value]] = [
        [
            "faster-whisper, one walk" if setting == WALK else f"pieces of {setting:g} s",
            figures.median(setting, "seconds"),
            figures.ratio(WALK, "seconds", to=setting),
            figures.median(setting, "wer"),
            figures.median(setting, "wer") - figures.median(WALK, "wer"),
        ]
        for setting in transcribe
    ]
    columns = ["transcribed by", "seconds", "times faster", "WER, %", "more than the walk"]
    return Report(
        NAME,
        "Pieces of a long recording",
        tables=[Table(f"{options.seconds:g} s of real clips, joined with pauses", columns, rows)],
        notes=["Without endpoint, download and decoding of audio. Speech detection is in all of them."],
        data={"settings": figures.listed()},
    )


def _walk(loaded: Model, recording: corpus.LongRecording) -> Callable[[], str]:
    whisper = faster_whisper.WhisperModel(loaded.folder, device=loaded.device, compute_type=loaded.compute_type)

    def transcribe() -> str:
        segments, _ = whisper.transcribe(recording.samples, vad_filter=True, condition_on_previous_text=False)
        return "".join(segment.text for segment in segments)

    return transcribe


def _pieces(loaded: Model, recording: corpus.LongRecording, longest_s: float, options: Namespace) -> Callable[[], str]:
    settings = Settings.model_validate({"fit_windows": options.fit_windows})
    threads = Threads.plan(settings, loaded.device, available_cores())
    engine = Engine.load(find(loaded.folder), loaded.device, loaded.compute_type, threads, settings)
    duration = len(recording.samples) / SAMPLE_RATE

    def transcribe() -> str:
        stop = Stop()
        pieces = cut(listen(recording.samples, stop), longest_s, keep_silence=False)
        walk = engine.walk([Track(recording.samples, tuple(pieces))], Request(), stop)
        with ThreadPoolExecutor(threads.inter * threads.batch + 1) as pool:
            said = pool.map(lambda index: list(walk.piece(index)), range(len(walk)))
            heard = Growing(duration, chain.from_iterable(said)).transcript
        return "".join(segment.text for segment in heard.segments)

    return transcribe
