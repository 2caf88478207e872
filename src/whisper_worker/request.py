"""What a caller may ask: names, defaults, limits and help of every input field live here and nowhere else.

The fields are those of RunPod's own faster-whisper worker, and what callers of other transcription APIs are used to. A
value that is null counts as absent. Types are strict: a number in quotes is refused, as is a field that doesn't exist.
What is asked for has an effect, or `remarks` say that it has none.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from whisper_worker.errors import BadInput
from whisper_worker.languages import language_code

URL_SCHEMES = ("http://", "https://")
PORTS = {"http": 80, "https": 443}
DATA_URL = "data:"
MAX_FIELDS = 100  # in a request, real or not: more aren't worth the event loop's time
MAX_ITEMS = 1024  # of `audios`, where the operator allows so many
MAX_PROBLEMS = 20  # told at once
MAX_URL_LENGTH = 8192
MAX_TOKENS_LENGTH = 1000  # items of a list, or characters of a text
MAX_TOKEN_ID = 51865  # the last id of the largest Whisper vocabulary (large-v3)
MAX_PROMPT_LENGTH = 10_000  # characters; their tokens are counted by the engine
MAX_HEADERS, MAX_HEADERS_LENGTH = 32, 16_384
UNSETTABLE_HEADERS = {  # those that say how the download itself goes on
    "accept-encoding",
    "connection",
    "content-length",
    "expect",
    "host",
    "proxy-authorization",
    "range",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}

SUBTITLES = ("srt", "vtt")
LAID_OUT = ("max_line_width", "max_line_count", "max_words_per_line", "highlight_words")
USED_BY_DETECTION = {  # fields that `detect_language` reads
    *("audio", "audio_base64", "audios", "audio_headers", "audio_stream", "channels", "clip", "model", "task"),
    *("languages", "enable_vad", "vad_parameters", "timeout_s", "upload_url"),
}


@dataclass(frozen=True)
class InputRules:
    """What the operator allows of an input, beyond what the fields say themselves."""

    allow_local_files: bool
    max_base64_bytes: int
    max_audios: int = 100


def _audio_place(value: str, info: ValidationInfo) -> str:
    """An http(s) URL with a host, a data: URL, or a local path where those are allowed."""
    if is_data_url(value):
        return _short_enough(value, info)
    if len(value) > MAX_URL_LENGTH:
        raise ValueError(f"has more than {MAX_URL_LENGTH} characters")
    if not value.lower().startswith(URL_SCHEMES) and "://" not in value and _rules(info).allow_local_files:
        return value
    return _url(value)


def _url(value: str) -> str:
    if not value.lower().startswith(URL_SCHEMES):
        raise ValueError("must be an http or https URL")
    try:
        parts = urlsplit(value)
        named = bool(parts.hostname) and parts.port != 0
    except ValueError:
        named = False
    if not named:
        raise ValueError("is no valid URL")
    return value


def _short_enough(value: str, info: ValidationInfo) -> str:
    limit = _rules(info).max_base64_bytes
    if len(value) > limit:
        raise ValueError(f"has {len(value)} characters, {limit} are allowed: send a URL in audio instead")
    return value


def _rules(info: ValidationInfo) -> InputRules:
    assert isinstance(info.context, InputRules), "requests are made by parse_request"
    return info.context


def _headers(value: dict[str, str]) -> dict[str, str]:
    """What HTTP can carry: the values aren't repeated in any message, they are what a stranger may not read."""
    if len(value) > MAX_HEADERS or sum(len(name) + len(text) for name, text in value.items()) > MAX_HEADERS_LENGTH:
        raise ValueError(f"has more than {MAX_HEADERS} headers or {MAX_HEADERS_LENGTH} characters")
    if len({name.lower() for name in value}) < len(value):
        raise ValueError("has a header twice: capitals make no difference")
    for name, text in value.items():
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
            raise ValueError("has a name that isn't an HTTP header's")
        if name.lower() in UNSETTABLE_HEADERS:
            raise ValueError(f"{name} can't be set")
        if not re.fullmatch(r"[\x20-\x7e\t]*", text) or text != text.strip():
            raise ValueError(f"{name} has a value that HTTP can't carry")
    return value


def _language_or_auto(value: str) -> str | None:
    return None if value.strip().lower() == "auto" else _language(value)


def _language(value: str) -> str:
    try:
        return language_code(value)
    except KeyError:
        raise ValueError("is neither a code nor an English name of a language that Whisper knows") from None


def _unless_blank(value: str) -> str | None:
    """faster-whisper would show the model a lone space, which bewilders it."""
    return value if value.strip() else None


def _token_ids(value: Any) -> Any:
    """The official worker's comma-separated string, or a list of numbers."""
    if isinstance(value, (str, list)) and len(value) > MAX_TOKENS_LENGTH:  # before each is looked at
        raise ValueError("has too many token ids")
    if not isinstance(value, str):
        return value
    try:
        return [int(part) for part in value.split(",") if part.strip()]
    except ValueError:
        raise ValueError("must be token ids separated by commas") from None


def _underscored(value: Any) -> Any:
    """The official worker's own examples write `plain text`."""
    return value.strip().lower().replace(" ", "_") if isinstance(value, str) else value


def _spaced(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.replace("_", " ") for name in names)


def _fallback_step(value: float) -> float:
    if 0 < value < 0.05:
        raise ValueError("must be 0 (no fallback) or at least 0.05")
    return value


def _rising(value: list[float]) -> list[float]:
    if value != sorted(set(value)):
        raise ValueError("must rise: each is tried when the one before it failed")
    return value


def _list_or_one(value: Any) -> str:
    return "[list]" if isinstance(value, list) else "[one]"


def _word_or_number(value: Any) -> str:
    return "[word]" if isinstance(value, str) else "[number]"


def _text_or_object(value: Any) -> str:
    return "[text]" if isinstance(value, str) else "[object]"


FormatName = Literal["plain_text", "formatted_text", "srt", "vtt", "json", "verbose_json", "tsv", "lrc"]
FORMAT_NAMES: tuple[str, ...] = get_args(FormatName)
Format = Annotated[
    FormatName,
    BeforeValidator(_underscored),
    WithJsonSchema({"type": "string", "enum": list(dict.fromkeys(FORMAT_NAMES + _spaced(FORMAT_NAMES)))}),
]
Task = Literal["transcribe", "translate", "detect_language"]
TokenId = Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)]
TokenIds = Annotated[
    list[TokenId],
    BeforeValidator(_token_ids),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": {"type": "integer", "minimum": -1, "maximum": MAX_TOKEN_ID}},
                {"type": "string", "description": "Separated by commas"},
            ]
        }
    ),
]
Temperature = Annotated[float, Field(ge=0, le=1)]
Temperatures = Annotated[
    Annotated[Temperature, Tag("[one]")]
    | Annotated[list[Temperature], Field(min_length=1, max_length=20), AfterValidator(_rising), Tag("[list]")],
    Discriminator(_list_or_one),
]
Channels = Annotated[
    Annotated[Literal["mix", "split"], Tag("[word]")] | Annotated[int, Field(ge=0, le=255), Tag("[number]")],
    Discriminator(_word_or_number),
]
LanguageCode = Annotated[str, AfterValidator(_language)]
Place = Annotated[str, Field(min_length=1), AfterValidator(_audio_place)]
Base64 = Annotated[str, Field(min_length=1), AfterValidator(_short_enough)]
Headers = Annotated[dict[str, str], AfterValidator(_headers)]
Prompt = Annotated[str, Field(max_length=MAX_PROMPT_LENGTH), AfterValidator(_unless_blank)]
Seconds = Annotated[float, Field(ge=0, le=10_000_000)]
Url = Annotated[str, Field(max_length=MAX_URL_LENGTH), AfterValidator(_url)]


class _Object(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


def _exactly_one(*names: str) -> ConfigDict:
    given: list[Any] = [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in names]
    return ConfigDict(json_schema_extra={"oneOf": given})


class AudioItem(_Object):
    """One of several files: exactly one of `audio` and `audio_base64`."""

    model_config = _exactly_one("audio", "audio_base64")

    audio: Place | None = Field(None, repr=False, description="As the field `audio`")
    audio_base64: Base64 | None = Field(None, repr=False, description="As the field `audio_base64`")
    audio_headers: Headers | None = Field(None, repr=False, description="Instead of the job's `audio_headers`")

    @model_validator(mode="after")
    def _fits_together(self) -> "AudioItem":
        if (self.audio is None) == (self.audio_base64 is None):
            raise ValueError("give exactly one of audio and audio_base64")
        if self.audio_headers and not is_url(self.audio):
            raise ValueError("audio_headers: there is no URL to send them to")
        return self


class Clip(_Object):
    """A part of a file, in seconds from its start."""

    start: Seconds = Field(0.0, description="Seconds from the file's start")
    end: Seconds | None = Field(None, description="Seconds from the file's start; absent: the file's end")

    @model_validator(mode="after")
    def _is_some(self) -> "Clip":
        if self.end is not None and self.end <= self.start:
            raise ValueError("end must be after start")
        return self


class VadParameters(_Object):
    """How speech is told from silence, by faster-whisper's names and with its defaults."""

    threshold: float = Field(0.5, gt=0, lt=1, description="Probability from which speech begins")
    neg_threshold: float | None = Field(
        None, gt=0, lt=1, description="Probability below which it may end. Default: 0.15 less than `threshold`"
    )
    min_speech_duration_ms: int = Field(0, ge=0, le=60_000, description="Shorter stretches of speech are left out")
    min_silence_duration_ms: int = Field(
        2000, ge=0, le=600_000, description="Shorter pauses are part of the speech around them"
    )
    speech_pad_ms: int = Field(400, ge=0, le=10_000, description="So much around speech belongs to it")
    max_speech_duration_s: float | None = Field(
        None, ge=5, le=3600, description="Longest piece transcribed at once, where less than the worker's own"
    )

    @model_validator(mode="after")
    def _end_is_below(self) -> "VadParameters":
        if self.neg_threshold is not None and self.neg_threshold > self.threshold:
            raise ValueError("neg_threshold must not be above threshold")
        return self

    @property
    def silent(self) -> float:
        """The probability below which speech may end."""
        return max(self.threshold - 0.15, 0.01) if self.neg_threshold is None else self.neg_threshold


@dataclass(frozen=True)
class Source:
    """One file to transcribe: `audio` is a URL, a data: URL or a path, else there is `audio_base64`."""

    audio: str | None = field(repr=False)
    audio_base64: str | None = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


class Request(_Object):
    """One job's input."""

    model_config = _exactly_one("audio", "audio_base64", "audios")

    audio: Place | None = Field(
        None,
        repr=False,
        description="http(s) URL of an audio or video file, or a `data:` URL; when the worker runs locally also a path",
    )
    audio_base64: Base64 | None = Field(
        None, repr=False, description="The file itself in base64, or as a `data:` URL, instead of `audio`"
    )
    audios: (
        Annotated[
            list[
                Annotated[
                    Annotated[Place, Tag("[text]")] | Annotated[AudioItem, Tag("[object]")],
                    Discriminator(_text_or_object),
                ]
            ],
            Field(min_length=1),
        ]
        | None
    ) = Field(
        None,
        repr=False,
        description="Several files in one job, instead of `audio`: each as in `audio`, or an object with `audio` or "
        "`audio_base64`, and `audio_headers`. The output is then `results`, one for each in this order",
    )
    audio_headers: Headers | None = Field(
        None, repr=False, description="HTTP headers for the download (`Authorization` …); not sent on to another host"
    )
    audio_stream: int | None = Field(
        None, ge=0, le=255, description="Which audio stream of the file, from 0; absent: its default one"
    )
    channels: Channels = Field(
        "mix",
        description="`mix` of all, `split` (each transcribed apart, its segments say `channel`), or one channel's "
        "number, from 0",
    )
    clip: Clip | None = Field(
        None, description="Only this part of the file, `{start, end}` in seconds; times stay the file's"
    )
    model: Annotated[str, Field(min_length=1, max_length=200)] | None = Field(
        None, description="One of the models that the worker offers (`MODELS`); absent: its `MODEL`"
    )
    task: Task = Field(
        "transcribe",
        description="`transcribe`; `translate` (only the English translation); `detect_language` (no text, and no "
        "more of the audio is decoded than that needs)",
    )
    language: Annotated[str, AfterValidator(_language_or_auto)] | None = Field(
        None, description="Code or English name of the language spoken; `auto` or absent: detected"
    )
    languages: Annotated[list[LanguageCode], Field(min_length=1, max_length=100)] | None = Field(
        None, description="The only languages that may be detected"
    )
    multilingual: bool = Field(
        False,
        description="The language may change: it is detected in each window, and segments say `language`; where that "
        "is uncertain, the one before goes on",
    )
    translate: bool = Field(False, description="Also translate the speech to English")
    transcription: Format = Field(
        "plain_text",
        description="Format of `transcription`: `plain_text`, `formatted_text` (a line a segment), `srt`, `vtt`, "
        "`json` (the segments), `verbose_json` (OpenAI's), `tsv` or `lrc`",
    )
    translation: Format = Field("plain_text", description="Format of `translation`, as for `transcription`")
    formats: Annotated[list[Format], Field(min_length=1, max_length=20)] | None = Field(
        None, description="More formats, which the output has in `outputs` (and `translation_outputs`) by their names"
    )
    word_timestamps: bool = Field(
        False, description="Add `word_timestamps`, and `words` to each segment: each word with its times"
    )
    max_line_width: int | None = Field(
        None, ge=10, le=1000, description="Longest line of subtitles, in characters (wide ones count twice)"
    )
    max_line_count: int | None = Field(
        None, ge=1, le=10, description="Most lines of one subtitle; it is split into several where there are more"
    )
    max_words_per_line: int | None = Field(None, ge=1, le=100, description="Most words in a line of subtitles")
    highlight_words: bool = Field(
        False, description="Underline each word of subtitles as it is spoken; needs `word_timestamps`"
    )
    upload_url: Url | None = Field(
        None,
        repr=False,
        description="Presigned URL to which a result that is too large for a reply is sent by PUT, as JSON",
    )
    temperature: Temperatures = Field(
        0.0, description="Sampling temperature, 0 is beam search; or a list of those to try, instead of steps"
    )
    best_of: int = Field(5, ge=1, le=10, description="Candidates when the temperature isn't 0")
    beam_size: int = Field(5, ge=1, le=10, description="Beams when the temperature is 0")
    patience: float = Field(1.0, gt=0, le=5, description="Beam search patience")
    length_penalty: float = Field(1.0, ge=0, le=2, description="Exponent of the length by which beams are scored")
    repetition_penalty: float = Field(
        1.0, ge=1, le=10, description="Divides the score of tokens that were produced before; 1: off"
    )
    no_repeat_ngram_size: int = Field(
        0, ge=0, le=50, description="So many tokens in a row never come twice in a window; 0: off"
    )
    max_new_tokens: int | None = Field(
        None, ge=1, le=220, description="Most tokens of a window's text, timestamps included"
    )
    suppress_tokens: TokenIds = Field(
        [-1],
        description="Token ids never to be produced, as a list or separated by commas; -1 stands for the model's own "
        "list of symbols that aren't spoken; empty: none",
    )
    initial_prompt: Prompt | None = Field(
        None,
        description="Text before the first window, for names and style; with `hotwords`, `prefix` at most 223 tokens",
    )
    prefix: Prompt | None = Field(
        None, description="Text that the first window's begins with (not its translation's), whatever is said there"
    )
    hotwords: Prompt | None = Field(
        None, description="Words and names to listen for, shown before each window but one with a `prefix`"
    )
    condition_on_previous_text: bool = Field(False, description="Show each window the text of those before it")
    temperature_increment_on_fallback: Annotated[float, Field(ge=0, le=1), AfterValidator(_fallback_step)] = Field(
        0.2, description="Step to the next temperature when a window fails a threshold; 0: no second try"
    )
    compression_ratio_threshold: float = Field(
        2.4, gt=0, le=100, description="A window whose text compresses better than this is repetitive: it failed"
    )
    logprob_threshold: float = Field(
        -1.0, ge=-20, le=0, description="A window with a lower mean log probability failed"
    )
    no_speech_threshold: float = Field(
        0.6, ge=0, le=1, description="A failed window that is silence with a higher probability gives no text"
    )
    hallucination_silence_threshold: float | None = Field(
        None,
        gt=0,
        le=30,
        description="Leave out text that seems invented, where silence around it is longer than this, in seconds; "
        "needs `word_timestamps`",
    )
    enable_vad: bool = Field(True, description="Leave out what voice activity detection takes for no speech")
    vad_parameters: VadParameters | None = Field(
        None,
        description="How it is told from speech: `threshold`, `neg_threshold`, `min_speech_duration_ms`, "
        "`min_silence_duration_ms`, `speech_pad_ms`, `max_speech_duration_s`",
    )
    timeout_s: float | None = Field(
        None, gt=0, le=7 * 24 * 3600, description="Longest job, in seconds, where that is less than the worker allows"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> "Request":
        if problems := list(self._contradictions()):
            raise ValueError("; ".join(problems))
        return self

    def _contradictions(self) -> Iterator[str]:
        """Fields of which one takes from the other what it needs."""
        if self.beam_size * self.patience < 1:  # CTranslate2 would say so in the middle of the job
            yield "patience: beam_size × patience must be at least 1"
        if isinstance(self.temperature, list) and "temperature_increment_on_fallback" in self.model_fields_set:
            yield "temperature_increment_on_fallback: has no place beside a list of temperatures"
        if self.language and self.languages and self.language not in self.languages:
            yield "language: is not one of languages"
        if self.vad_parameters and not self.enable_vad:
            yield "vad_parameters: needs enable_vad"
        if not self.word_timestamps:
            if self.hallucination_silence_threshold is not None:
                yield "hallucination_silence_threshold: needs word_timestamps"
            if self.highlight_words:
                yield "highlight_words: needs word_timestamps"
        if self.audio_headers:
            urls = {
                source.audio for source in self.sources if is_url(source.audio) and source.headers is self.audio_headers
            }
            if not urls:
                others = " that hasn't its own" if any(is_url(source.audio) for source in self.sources) else ""
                yield f"audio_headers: there is no URL{others} to send them to"
            elif len({origin(url) for url in urls if url}) > 1:
                yield "audio_headers: the files are at several hosts, name each one's headers with it"
        if self.task == "detect_language" and self.language:
            yield "language: is what the task detect_language finds"

    @property
    def sources(self) -> tuple[Source, ...]:
        """The files to transcribe, at least one."""
        shared = {} if self.audio_headers is None else self.audio_headers
        if self.audios is None:
            return (Source(self.audio, self.audio_base64, shared),)
        items = (AudioItem.model_construct(audio=item) if isinstance(item, str) else item for item in self.audios)
        return tuple(
            Source(item.audio, item.audio_base64, shared if item.audio_headers is None else item.audio_headers)
            for item in items
        )

    @property
    def vad(self) -> VadParameters:
        return self.vad_parameters or VadParameters()

    @property
    def heard_channels(self) -> Literal["mix", "split"] | int:
        """`channels`, as far as it matters: a language is that of the whole recording."""
        return "mix" if self.task == "detect_language" and self.channels == "split" else self.channels

    @property
    def wants_transcription(self) -> bool:
        """Whether the text is wanted in the language spoken."""
        return self.task == "transcribe"

    @property
    def wants_translation(self) -> bool:
        return self.task == "translate" or (self.task == "transcribe" and self.translate)

    @property
    def wants_both(self) -> bool:
        return self.wants_transcription and self.wants_translation

    @property
    def temperatures(self) -> list[float]:
        """The temperatures tried in turn on a window."""
        if isinstance(self.temperature, list):
            return self.temperature
        step = self.temperature_increment_on_fallback
        if not step:
            return [self.temperature]
        count = int((1.0 - self.temperature) / step + 1e-6) + 1
        return [round(self.temperature + i * step, 6) for i in range(count)]

    @property
    def remarks(self) -> tuple[str, ...]:
        """What of the request has no effect, in sentences for the caller."""
        given = [name for name in type(self).model_fields if name in self.model_fields_set]
        if self.task == "detect_language":
            unused = [name for name in given if name not in USED_BY_DETECTION and self._differs(name)]
            return (f"the task detect_language doesn't use {', '.join(unused)}",) if unused else ()
        return tuple(self._unused(given))

    def _unused(self, given: list[str]) -> Iterator[str]:
        laid_out = [name for name in given if name in LAID_OUT and self._differs(name)]
        if laid_out and not self._made_formats & set(SUBTITLES):
            yield f"only the formats srt and vtt use {', '.join(laid_out)}"
        elif laid_out == ["max_line_count"]:
            yield "max_line_count has no effect without max_line_width or max_words_per_line"
        if self._differs("transcription") and not self.wants_transcription:
            yield "there is no transcription: its format has no effect"
        if self._differs("translation") and not self.wants_translation:
            yield "there is no translation: its format has no effect"
        if self.language and self.languages and not self.multilingual:
            yield "the language is given: languages has no effect"
        if self.prefix and self.hotwords:
            yield "the first window has a prefix: hotwords has no effect there"
        if self._differs("best_of") and not any(self.temperatures):
            yield "without a temperature above 0, best_of has no effect"
        searching = [name for name in ("beam_size", "patience") if self._differs(name)]
        if searching and all(self.temperatures):
            yield f"without a temperature of 0, {', '.join(searching)} has no effect"

    @property
    def _made_formats(self) -> set[str]:
        return {
            *([self.transcription] if self.wants_transcription else []),
            *([self.translation] if self.wants_translation else []),
            *(self.formats or []),
        }

    def _differs(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).model_fields[name].default)


class S3Config(_Object):
    """A job's own bucket, in the fields of RunPod's API. The secret is in no message and no log."""

    endpoint_url: Url = Field(alias="endpointUrl", repr=False)
    access_id: str = Field(alias="accessId", min_length=1, max_length=200)
    access_secret: str = Field(alias="accessSecret", min_length=1, max_length=400, repr=False)
    bucket_name: str = Field(alias="bucketName", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{1,253}$")


def origin(url: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port: what two URLs have in common when a secret for one may be sent to the other.

    Raises ValueError.
    """
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or PORTS.get(parts.scheme)


def is_data_url(audio: str) -> bool:
    return audio[: len(DATA_URL)].lower() == DATA_URL


def is_url(audio: str | None) -> bool:
    return audio is not None and audio.lower().startswith(URL_SCHEMES)


def parse_request(raw: Any, rules: InputRules) -> Request:
    """Raises BadInput with every problem of `raw` (a job's input), each with its field."""
    if not isinstance(raw, Mapping):
        raise BadInput("input: must be an object with the field audio or audio_base64")
    if len(raw) > MAX_FIELDS:
        raise BadInput(f"input: has {len(raw)} fields, there are only {len(Request.model_fields)}")
    given = {name: _without_nulls(name, value) for name, value in raw.items() if value is not None}
    problems = []
    if sum(name in given for name in ("audio", "audio_base64", "audios")) != 1:
        problems.append("give exactly one of audio, audio_base64 and audios")
    audios = raw.get("audios")
    if isinstance(audios, list) and len(audios) > rules.max_audios:  # before each is looked at
        raise BadInput(f"audios: has {len(audios)} files, {rules.max_audios} are allowed")
    try:
        request = Request.model_validate(given, context=rules)
    except ValidationError as error:
        problems = _explained(error, Request.model_fields) + problems
    if problems:
        raise BadInput("; ".join(problems))
    return request


def parse_s3_config(raw: Any) -> S3Config:
    """Raises BadInput with every problem of `raw` (a job's `s3Config`), and none of its values."""
    try:
        return S3Config.model_validate(raw)
    except ValidationError as error:
        raise BadInput("; ".join(f"s3Config.{problem}" for problem in _explained(error, ()))) from None


def _without_nulls(field: str, value: Any) -> Any:
    """Objects inside a request, too, may name what they leave out, and may not have fields beyond counting."""
    if isinstance(value, list) and field == "audios":
        return [_without_nulls(f"{field}.{index}", item) for index, item in enumerate(value[: MAX_ITEMS + 1])]
    if not isinstance(value, Mapping):
        return value
    if len(value) > MAX_FIELDS:
        raise BadInput(f"{field[:100]}: has {len(value)} fields, {MAX_FIELDS} are allowed")
    return {name: inner for name, inner in value.items() if inner is not None}


def _explained(error: ValidationError, fields: Mapping[str, Any] | tuple[()]) -> list[str]:
    # The caller's value isn't repeated: it may be a whole file, or a URL with a token.
    details = error.errors(include_url=False, include_context=False)
    return [_explain(dict(detail), fields) for detail in details[:MAX_PROBLEMS]]


def _explain(detail: dict[str, Any], fields: Mapping[str, Any] | tuple[()]) -> str:
    place = ".".join(str(part) for part in detail["loc"] if not str(part).startswith("["))[:100]
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(place, list(fields), n=1)
        return f"{place}: unknown field" + (f", did you mean {near[0]}?" if near else "")
    reason = detail["msg"].removeprefix("Value error, ")
    if isinstance(detail["input"], str) and detail["type"].startswith(("int", "float", "bool")):
        reason += ", without quotes"
    return f"{place}: {reason}" if place else reason
