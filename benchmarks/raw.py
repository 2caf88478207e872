"""The libraries called directly, without the worker: what they can do by themselves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import faster_whisper.transcribe as fw
import numpy as np
from faster_whisper.audio import pad_or_trim
from faster_whisper.tokenizer import Tokenizer
from media import speech as demo_clip
from numpy.typing import NDArray

from benchmarks import BEAM_SIZE, corpus
from benchmarks.contenders import Model
from whisper_worker.audio import SAMPLE_RATE, Samples
from whisper_worker.shared_model import FRAMES_PER_S

WINDOW_S = 30.0
LANGUAGE = "en"  # the demo model knows no other

Mel = NDArray[np.float32]


def speech(seconds: float) -> Samples:
    """Exactly so much: of the corpus, or the worker's own clip again and again where there is no corpus."""
    if corpus.clips([LANGUAGE]):
        return corpus.long_recording(seconds, LANGUAGE).samples
    return np.resize(demo_clip(), round(seconds * SAMPLE_RATE))


@dataclass(frozen=True)
class RawModel:
    """A loaded model with the threads of `inter` calls, each with `intra` of its own on a CPU."""

    whisper: fw.WhisperModel

    @classmethod
    def load(cls, model: Model, inter: int, intra: int = 1) -> "RawModel":
        return cls(
            fw.WhisperModel(
                model.folder,
                device=model.device,
                compute_type=model.compute_type,
                num_workers=inter,
                cpu_threads=intra,
            )
        )

    def windows(self, count: int, seconds: float) -> list[Mel]:
        """Features of so many windows of speech."""
        samples = speech(count * seconds).reshape(count, -1)
        frames = round(seconds * FRAMES_PER_S)
        return [pad_or_trim(self.whisper.feature_extractor(window), frames) for window in samples]

    def decode(self, batch: Sequence[Mel]) -> None:
        """One call of `encode` and one of `generate`, as faster-whisper makes them for a window."""
        model: Any = self.whisper.model
        encoded = model.encode(fw.get_ctranslate2_storage(np.stack(batch)))
        prompt = Tokenizer(
            self.whisper.hf_tokenizer, model.is_multilingual, task="transcribe", language=LANGUAGE
        ).sot_sequence
        model.generate(encoded, [prompt] * len(batch), beam_size=BEAM_SIZE, max_initial_timestamp_index=50)

    def transcribe(self, samples: Samples) -> None:
        """All of it, with faster-whisper's own Python around each window."""
        segments, _ = self.whisper.transcribe(
            samples, language=LANGUAGE, beam_size=BEAM_SIZE, condition_on_previous_text=False
        )
        for _ in segments:
            pass
