"""What a caller may ask: names, defaults, limits and help of every input field live here and nowhere else.

The fields are those of RunPod's own faster-whisper worker. A value that is null counts as absent. Types are strict:
a number in quotes is refused, as is a field that doesn't exist.

`python -m whisper_worker.request` prints the README's table.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from whisper_worker.errors import BadInput
from whisper_worker.languages import language_code

URL_SCHEMES = ("http://", "https://")
BOUND_SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
MAX_FIELDS = 100  # in a request, real or not: more aren't worth the event loop's time
MAX_PROBLEMS = 20  # told at once
MAX_TOKENS_LENGTH = 1000  # items of a list, or characters of a text
MAX_TOKEN_ID = 51865  # the last id of the largest Whisper vocabulary (large-v3)


@dataclass(frozen=True)
class InputRules:
    """What the operator allows of an input, beyond what the fields say themselves."""

    allow_local_files: bool
    max_base64_bytes: int


def _audio_place(value: str, info: ValidationInfo) -> str:
    """An http(s) URL with a host, or a local path where those are allowed."""
    if value.lower().startswith(URL_SCHEMES):
        try:
            parts = urlsplit(value)
            named = bool(parts.hostname) and parts.port != 0
        except ValueError:
            named = False
        if not named:
            raise ValueError("is no valid URL")
        return value
    if "://" in value or not _rules(info).allow_local_files:
        raise ValueError("must be an http or https URL")
    return value


def _short_enough(value: str, info: ValidationInfo) -> str:
    limit = _rules(info).max_base64_bytes
    if len(value) > limit:
        raise ValueError(f"has {len(value)} characters, {limit} are allowed: send a URL in audio instead")
    return value


def _rules(info: ValidationInfo) -> InputRules:
    assert isinstance(info.context, InputRules), "requests are made by parse_request"
    return info.context


def _language(value: str) -> str | None:
    if value.strip().lower() == "auto":
        return None
    try:
        return language_code(value)
    except KeyError:
        raise ValueError("is neither a code nor an English name of a language that Whisper knows") from None


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


def _fallback_step(value: float) -> float:
    if 0 < value < 0.05:
        raise ValueError("must be 0 (no fallback) or at least 0.05")
    return value


Format = Annotated[Literal["plain_text", "formatted_text", "srt", "vtt"], BeforeValidator(_underscored)]
TokenId = Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)]


class Request(BaseModel):
    """One job's input, checked. Make it with `parse_request`."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    audio: Annotated[str, Field(min_length=1, max_length=8192), AfterValidator(_audio_place)] | None = Field(
        None, description="http(s) URL of an audio or video file; when the worker runs locally also a path"
    )
    audio_base64: Annotated[str, Field(min_length=1), AfterValidator(_short_enough)] | None = Field(
        None, description="The file itself in base64, instead of `audio`"
    )
    model: Annotated[str, Field(min_length=1, max_length=200)] | None = Field(
        None, description="Must name the model that the worker serves, when given"
    )
    transcription: Format = Field(
        "plain_text", description="Format of `transcription`: `plain_text`, `formatted_text`, `srt` or `vtt`"
    )
    translate: bool = Field(False, description="Also translate the speech to English")
    translation: Format = Field("plain_text", description="Format of `translation`, as for `transcription`")
    language: Annotated[str, AfterValidator(_language)] | None = Field(
        None, description="Code or English name of the language spoken; `auto` or absent: detected"
    )
    temperature: float = Field(0.0, ge=0, le=1, description="Sampling temperature; 0 is beam search")
    best_of: int = Field(5, ge=1, le=10, description="Candidates when the temperature isn't 0")
    beam_size: int = Field(5, ge=1, le=10, description="Beams when the temperature is 0")
    patience: float = Field(1.0, gt=0, le=5, description="Beam search patience")
    length_penalty: float = Field(1.0, ge=0, le=2, description="Exponent of the length by which beams are scored")
    suppress_tokens: Annotated[list[TokenId], BeforeValidator(_token_ids)] = Field(
        [-1],
        description="Token ids never to be produced, as a list or separated by commas; -1 stands for the model's own "
        "list of symbols that aren't spoken; empty: none",
    )
    initial_prompt: Annotated[str, Field(max_length=10_000)] | None = Field(
        None, description="Text before the first window, for names and style: at most 223 tokens"
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
    enable_vad: bool = Field(True, description="Leave out what voice activity detection takes for no speech")
    word_timestamps: bool = Field(False, description="Add `word_timestamps`, each word with its times")
    timeout_s: float | None = Field(
        None, gt=0, le=7 * 24 * 3600, description="Longest job, in seconds, where that is less than the worker allows"
    )

    @model_validator(mode="after")
    def _beams_left(self) -> "Request":
        """CTranslate2's condition for beam search; it would fail in the middle of the job."""
        if self.beam_size * self.patience < 1:
            raise ValueError("patience: beam_size × patience must be at least 1")
        return self

    @property
    def temperatures(self) -> list[float]:
        """The temperatures tried in turn on a window, from `temperature` upwards to 1."""
        step = self.temperature_increment_on_fallback
        if not step:
            return [self.temperature]
        count = int((1.0 - self.temperature) / step + 1e-6) + 1
        return [round(self.temperature + i * step, 6) for i in range(count)]


def parse_request(raw: Any, rules: InputRules) -> Request:
    """Raises BadInput with every problem of `raw` (a job's input), each with its field."""
    if not isinstance(raw, Mapping):
        raise BadInput("input: must be an object with the field audio or audio_base64")
    if len(raw) > MAX_FIELDS:
        raise BadInput(f"input: has {len(raw)} fields, there are only {len(Request.model_fields)}")
    given = {name: value for name, value in raw.items() if value is not None}
    problems = []
    if ("audio" in given) == ("audio_base64" in given):
        problems.append("give exactly one of audio and audio_base64")
    try:
        request = Request.model_validate(given, context=rules)
    except ValidationError as error:
        # The caller's value isn't repeated: it may be a whole file, or a URL with a token.
        details = error.errors(include_url=False, include_context=False)
        problems = [_explain(dict(detail)) for detail in details[:MAX_PROBLEMS]] + problems
    if problems:
        raise BadInput("; ".join(problems))
    return request


def _explain(detail: dict[str, Any]) -> str:
    field = ".".join(str(part) for part in detail["loc"])[:100]
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(field, Request.model_fields, n=1)
        return f"{field}: unknown field" + (f", did you mean {near[0]}?" if near else "")
    reason = detail["msg"].removeprefix("Value error, ")
    if isinstance(detail["input"], str) and detail["type"].startswith(("int", "float", "bool")):
        reason += ", without quotes"
    return f"{field}: {reason}" if field else reason


def markdown_table() -> str:
    """The README's table of inputs."""
    rows = ["| field | default | meaning |", "| --- | --- | --- |"]
    for name, field in Request.model_fields.items():
        default = "" if field.default is None else f"`{json.dumps(field.default)}`"
        rows.append(f"| `{name}` | {default} | {field.description}{_bounds(field.metadata)} |")
    return "\n".join(rows)


def _bounds(metadata: list[Any]) -> str:
    bounds = {sign: getattr(m, key) for m in metadata for key, sign in BOUND_SIGNS.items() if hasattr(m, key)}
    return f" ({', '.join(f'{sign} {bound:g}' for sign, bound in bounds.items())})" if bounds else ""


if __name__ == "__main__":
    print(markdown_table())
