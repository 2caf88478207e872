"""What a job's output holds: names, types and meaning of every field live here and nowhere else.

These are types alone: `reply` makes the values, and `schema` prints what is written here.
"""

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

Json = dict[str, Any]


Channel = Annotated[int, Field(description='With `channels: "split"`: its number, from 0')]
Start = Annotated[float, Field(description="Seconds from the file's start")]
End = Annotated[float, Field(description="Seconds from the file's start, never before `start`")]


class WordOutput(TypedDict):
    """One word with the punctuation that sticks to it, and the space before it."""

    word: str
    start: Start
    end: End
    channel: NotRequired[Channel]


class SegmentWordOutput(TypedDict):
    word: str
    start: Start
    end: End
    probability: Annotated[float, Field(description="From 0 to 1")]


class SegmentOutput(TypedDict):
    """A stretch of text between two timestamps of the model. Segments come in the order of their starts."""

    id: Annotated[int, Field(description="From 1")]
    seek: Annotated[int, Field(description="Place of its window in the speech that the model heard, in 10 ms")]
    start: Start
    end: End
    text: str
    tokens: Annotated[list[int], Field(description="The model's, timestamps included")]
    temperature: Annotated[float, Field(description="At which its window was decoded")]
    avg_logprob: Annotated[float, Field(description="Mean log probability of the window's tokens")]
    compression_ratio: Annotated[float, Field(description="Of the window's text: high when it repeats itself")]
    no_speech_prob: Annotated[float, Field(description="Probability that the window is silence")]
    words: NotRequired[Annotated[list[SegmentWordOutput], Field(description="With `word_timestamps`")]]
    language: NotRequired[Annotated[str, Field(description="With `multilingual`: the code of the language spoken")]]
    channel: NotRequired[Channel]


Text = str | Json
Times = Annotated[
    dict[str, float],
    Field(
        description="Seconds: `download`, `decode` (audio, speech detection), `queue` (waiting for a place, the model, "
        "a thread, and for the first window's turn), `inference` (from that on), `upload`, `total`; of several files "
        "added up"
    ),
]
Warnings = Annotated[
    list[str],
    Field(
        description="Sentences: damaged or missing audio, channels that cancel out, options without an effect, what "
        "the model can't do"
    ),
]
LanguageCode = Annotated[str | None, Field(description="Code of the language spoken; null when nobody speaks")]
Stored = Annotated[
    dict[str, str],
    Field(
        description="When the result is too large for a reply: where it is, by file name; `result.json` is all of the "
        "output, and there is a file for each format asked for"
    ),
]


class Summary(TypedDict):
    """What a stored result is like."""

    segments: int
    characters: Annotated[int, Field(description="Of the text")]
    text_start: Annotated[str, Field(description="How the text begins")]


class FactsOutput(TypedDict):
    """What every output says."""

    device: Annotated[Literal["cpu", "cuda"] | str, Field(description="`cpu` or `cuda`")]
    model: Annotated[str, Field(description="The model's name")]
    duration: Annotated[float, Field(description="Seconds of the audio that was read")]
    duration_after_vad: Annotated[float, Field(description="Seconds of speech in it; of channels apart added up")]
    warnings: Warnings
    timings: NotRequired[Times]
    stored: NotRequired[Stored]
    bytes: NotRequired[Annotated[int, Field(description="With `stored`: of the whole output, as JSON")]]


class LanguageOutput(TypedDict):
    detected_language: LanguageCode
    language_probability: Annotated[float | None, Field(description="Its probability; 1 when it was given")]
    language_probabilities: Annotated[
        dict[str, float], Field(description="The most probable languages by code, at most five")
    ]


class SegmentsOutput(TypedDict):
    segments: Annotated[list[SegmentOutput], Field(description="In order; of the translation with `task: translate`")]
    word_timestamps: NotRequired[
        Annotated[list[WordOutput], Field(description="With `word_timestamps`: all words, in order")]
    ]


class TextsOutput(TypedDict):
    transcription: Annotated[
        Text | None, Field(description="The text, in the format asked for; null with `task: translate`")
    ]
    translation: Annotated[
        Text | None, Field(description="The English text, with `translate` or `task: translate`; else null")
    ]
    outputs: NotRequired[Annotated[dict[str, Text], Field(description="With `formats`: the text in each, by its name")]]
    translation_outputs: NotRequired[
        Annotated[dict[str, Text], Field(description="With `formats` and `translate`: the translation in each")]
    ]
    summary: NotRequired[
        Annotated[Summary, Field(description="With `stored`: of what is left out here, the segments and all text")]
    ]


class TextOutput(SegmentsOutput, TextsOutput):
    """What was said."""


class TranscriptOutput(TextOutput, LanguageOutput, FactsOutput):
    """The output for one file."""


class DetectionOutput(LanguageOutput, FactsOutput):
    """The output for one file with `task: detect_language`."""


class PartialOutput(TypedDict):
    """What had been done of a file when it, or its job, was broken off in the midst of its transcription."""

    segments: NotRequired[
        Annotated[list[SegmentOutput], Field(description="A stream's result has none: they are in it")]
    ]
    word_timestamps: NotRequired[list[WordOutput]]
    seconds_done: float
    seconds_total: float
    transcription: NotRequired[Text | None]
    translation: NotRequired[
        Annotated[Text | None, Field(description="With `task: translate`, instead of `transcription`")]
    ]
    summary: NotRequired[Annotated[Summary, Field(description="With `stored`, instead of segments and text")]]
    detected_language: LanguageCode
    language_probability: float | None
    language_probabilities: dict[str, float]
    warnings: NotRequired[Warnings]


class FileErrorOutput(TypedDict):
    """A failure of one of several files."""

    error: Annotated[str, Field(description="`CODE: sentence`")]
    partial: NotRequired[PartialOutput]


class PartialResultsOutput(TypedDict):
    """What had been done of several files: a file's output, its error, a part of it, or null where nothing was."""

    results: list[TranscriptOutput | DetectionOutput | FileErrorOutput | PartialOutput | None]
    warnings: NotRequired[Warnings]


class ErrorOutput(TypedDict):
    """A failure of a job."""

    error: Annotated[str, Field(description="`CODE: sentence`")]
    partial: NotRequired[PartialOutput | PartialResultsOutput]


class ResultsOutput(TypedDict):
    results: Annotated[
        list[TranscriptOutput | DetectionOutput | FileErrorOutput],
        Field(description="With `audios`: one output, or `error`, for each file in the order of the request"),
    ]


class SeveralOutput(ResultsOutput, FactsOutput):
    """The output for `audios`."""


Output = TranscriptOutput | DetectionOutput | SeveralOutput | ErrorOutput


class FromFile(TypedDict):
    audio: NotRequired[Annotated[int, Field(description="With `audios`: which file, from 0")]]


class InfoItem(FromFile, LanguageOutput, FactsOutput):
    """Of a stream, once for each file, before its first segments."""

    type: Literal["info"]


class SegmentsItem(FromFile, SegmentsOutput):
    """Of a stream: new segments, in order."""

    type: Literal["segments"]


class UnstreamedOutput(TextsOutput, LanguageOutput, FactsOutput):
    """The output for one file but for what was streamed."""


class ResultItem(UnstreamedOutput):
    """Of a stream, its last item."""

    type: Literal["result"]


class DetectionResultItem(DetectionOutput):
    """The same with `task: detect_language`."""

    type: Literal["result"]


class SeveralResultItem(FactsOutput):
    """The same with `audios`."""

    type: Literal["result"]
    results: list[UnstreamedOutput | DetectionOutput | FileErrorOutput]


class ErrorItem(TypedDict):
    """Of a stream, its last item when the job fails."""

    type: Literal["error"]
    code: str
    message: str


Item = InfoItem | SegmentsItem | ResultItem | DetectionResultItem | SeveralResultItem | ErrorItem
