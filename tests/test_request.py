"""What a caller may send, and what they read when they may not."""

from typing import Any

import pytest
from faster_whisper.tokenizer import _LANGUAGE_CODES

from whisper_worker import request
from whisper_worker.errors import BadInput
from whisper_worker.languages import LANGUAGES
from whisper_worker.request import (
    Clip,
    InputRules,
    Request,
    Source,
    VadParameters,
    parse_request,
    parse_s3_config,
)

RULES = InputRules(allow_local_files=False, max_base64_bytes=100)
URL = "https://example.org/a.mp3"


def parse(rules: InputRules = RULES, **given: Any) -> Request:
    return parse_request(given, rules)


def refusal(**given: Any) -> str:
    with pytest.raises(BadInput) as caught:
        parse(**{"audio": URL, **given})
    return str(caught.value)


def test_null_counts_as_absent() -> None:
    nothing = dict.fromkeys(Request.model_fields)
    assert parse_request({**nothing, "audio": URL}, RULES) == parse(audio=URL)


def test_whole_numbers_are_fine_where_fractions_are() -> None:
    assert parse(audio=URL, temperature=1, patience=2).temperature == 1.0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": 0}, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        ({"temperature": 0.5}, [0.5, 0.7, 0.9]),
        ({"temperature": 1.0}, [1.0]),
        ({"temperature_increment_on_fallback": 0}, [0.0]),
        ({"temperature_increment_on_fallback": 0.3}, [0.0, 0.3, 0.6, 0.9]),
        ({"temperature": 0.1, "temperature_increment_on_fallback": 0.45}, [0.1, 0.55, 1.0]),
    ],
)
def test_temperatures_rise_to_one_at_most(given: dict[str, Any], expected: list[float]) -> None:
    assert parse(audio=URL, **given).temperatures == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [("-1", [-1]), ("", []), ("50257, 11,", [50257, 11]), ([1, 2], [1, 2]), ([], [])],
)
def test_suppressed_tokens_come_as_text_or_list(given: Any, expected: list[int]) -> None:
    assert parse(audio=URL, suppress_tokens=given).suppress_tokens == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [("de", "de"), ("DE", "de"), (" German ", "de"), ("mandarin", "zh"), ("yue", "yue"), ("auto", None), (None, None)],
)
def test_languages_come_as_code_or_name(given: str | None, expected: str | None) -> None:
    assert parse(audio=URL, language=given).language == expected


def test_the_languages_are_those_of_whisper() -> None:
    assert set(LANGUAGES) == set(_LANGUAGE_CODES)


REFUSED = [
    ({"language": "klingon"}, "language: is neither a code nor"),
    ({"language": ""}, "language: is neither"),
    ({"beam_size": 0}, "beam_size: Input should be greater than or equal to 1"),
    ({"beam_size": 11}, "beam_size: "),
    ({"beam_size": 2.5}, "beam_size: "),
    ({"beam_size": True}, "beam_size: "),
    ({"beam_size": "5"}, "beam_size: Input should be a valid integer, without quotes"),
    ({"best_of": 11}, "best_of: "),
    ({"temperature": -0.1}, "temperature: "),
    ({"temperature": 1.1}, "temperature: "),
    ({"temperature": "0"}, "temperature: Input should be a valid number, without quotes"),
    ({"temperature": float("nan")}, "temperature: Input should be a finite number"),
    ({"patience": 0}, "patience: "),
    ({"patience": 0.15}, "patience: beam_size × patience must be at least 1"),
    ({"patience": float("inf")}, "patience: "),
    ({"length_penalty": 3}, "length_penalty: "),
    ({"temperature_increment_on_fallback": 0.001}, "temperature_increment_on_fallback: must be 0"),
    ({"compression_ratio_threshold": 0}, "compression_ratio_threshold: "),
    ({"logprob_threshold": 1}, "logprob_threshold: "),
    ({"no_speech_threshold": 2}, "no_speech_threshold: "),
    ({"translate": "true"}, "translate: Input should be a valid boolean, without quotes"),
    ({"translate": 1}, "translate: "),
    ({"transcription": "pdf"}, "transcription: Input should be 'plain_text', 'formatted_text', 'srt', 'vtt', 'json'"),
    ({"suppress_tokens": "a,b"}, "suppress_tokens: must be token ids"),
    ({"suppress_tokens": [-2]}, "suppress_tokens.0: "),
    ({"suppress_tokens": [999_999]}, "suppress_tokens.0: "),
    ({"suppress_tokens": "1," * 1_000_000}, "suppress_tokens: has too many"),
    ({"suppress_tokens": [1] * 1001}, "suppress_tokens: has too many"),
    ({"suppress_tokens": ["5"]}, "suppress_tokens.0: "),
    ({"initial_prompt": ["a"]}, "initial_prompt: "),
    ({"initial_prompt": "x" * 10_001}, "initial_prompt: "),
    ({"initial_prompt": "\ud800"}, "initial_prompt: "),
    ({"model": ""}, "model: "),
    ({"word_timestamp": True}, "word_timestamp: unknown field, did you mean word_timestamps?"),
    ({"beamsize": 3}, "beamsize: unknown field, did you mean beam_size?"),
    ({"zzz": 3}, "zzz: unknown field"),
    ({"audio": "ftp://example.org/a.mp3"}, "audio: must be an http or https URL"),
    ({"audio": "file:///etc/passwd"}, "audio: must be an http or https URL"),
    ({"audio": "/etc/passwd"}, "audio: must be an http or https URL"),
    ({"audio": "https://"}, "audio: is no valid URL"),
    ({"audio": "http://[::1"}, "audio: is no valid URL"),
    ({"audio": "http://a:99999/"}, "audio: is no valid URL"),
    ({"audio": 5}, "audio: "),
    ({"audio": ""}, "audio: "),
    ({"audio": None}, "give exactly one of audio, audio_base64 and audios"),
    ({"audio_base64": "UklG"}, "give exactly one of audio, audio_base64 and audios"),
    ({"audios": [URL]}, "give exactly one of audio, audio_base64 and audios"),
    ({"audio": "data:audio/wav;base64," + "A" * 100}, "audio: has 122 characters, 100 are allowed"),
    ({"audio": "https://a.test/" + "x" * 9000}, "audio: has more than 8192 characters"),
    ({"audio": None, "audios": []}, "audios: "),
    ({"audio": None, "audios": [URL, "/etc/passwd"]}, "audios.1: must be an http or https URL"),
    ({"audio": None, "audios": [{"audio": URL, "audio_base64": "UklG"}]}, "audios.0: give exactly one of"),
    ({"audio": None, "audios": [{"url": URL}]}, "audios.0.url: unknown field"),
    ({"audio": None, "audios": [5]}, "audios.0: "),
    ({"audio": None, "audios": [URL] * 101}, "audios: has 101 files, 100 are allowed"),
    ({"audio": None, "audios": [{f"x{n}": 1 for n in range(101)}]}, "audios.0: has 101 fields, 100 are allowed"),
    ({"audio": None, "audio_base64": "UklG", "audio_headers": {"A": "b"}}, "audio_headers: there is no URL"),
    ({"audio_headers": {"Host": "a.test"}}, "audio_headers: Host can't be set"),
    ({"audio_headers": {"content-LENGTH": "5"}}, "audio_headers: content-LENGTH can't be set"),
    ({"audio_headers": {"A b": "c"}}, "audio_headers: has a name that isn't an HTTP header's"),
    ({"audio_headers": {"A": "b\r\nC: d"}}, "audio_headers: A has a value that HTTP can't carry"),
    ({"audio_headers": {"A": "é"}}, "audio_headers: A has a value that HTTP can't carry"),
    ({"audio_headers": {"A": 5}}, "audio_headers.A: "),
    ({"audio_headers": {f"x{n}": "" for n in range(33)}}, "audio_headers: has more than 32 headers"),
    ({"audio_headers": {f"x{n}": "" for n in range(101)}}, "audio_headers: has 101 fields, 100 are allowed"),
    ({"audio_headers": {"A": "b", "a": "c"}}, "audio_headers: has a header twice"),
    (
        {"audio": None, "audios": [{"audio_base64": "UklG", "audio_headers": {"A": "b"}}]},
        "audios.0: audio_headers: there is no URL",
    ),
    (
        {"audio": None, "audios": [{"audio": URL, "audio_headers": {}}], "audio_headers": {"A": "b"}},
        "audio_headers: there is no URL that hasn't its own to send them to",
    ),
    (
        {"audio": None, "audios": [URL, "http://example.org/a.mp3"], "audio_headers": {"A": "b"}},
        "audio_headers: the files are at several hosts",
    ),
    ({"audio_stream": -1}, "audio_stream: "),
    ({"channels": "left"}, "channels: Input should be 'mix' or 'split'"),
    ({"channels": -1}, "channels: "),
    ({"channels": True}, "channels: "),
    ({"clip": {"start": 5, "end": 5}}, "clip: end must be after start"),
    ({"clip": {"start": -1}}, "clip.start: "),
    ({"clip": {"begin": 1}}, "clip.begin: unknown field"),
    ({"clip": [1, 2]}, "clip: "),
    ({"task": "summarize"}, "task: "),
    ({"task": "detect_language", "language": "de"}, "language: is what the task detect_language finds"),
    ({"languages": ["klingon"]}, "languages.0: is neither a code"),
    ({"languages": []}, "languages: "),
    ({"language": "de", "languages": ["en", "fr"]}, "language: is not one of languages"),
    ({"formats": ["pdf"]}, "formats.0: "),
    ({"formats": []}, "formats: "),
    ({"max_line_width": 5}, "max_line_width: "),
    ({"max_line_count": 0}, "max_line_count: "),
    ({"highlight_words": True}, "highlight_words: needs word_timestamps"),
    ({"hallucination_silence_threshold": 2}, "hallucination_silence_threshold: needs word_timestamps"),
    ({"upload_url": "s3://bucket/key"}, "upload_url: must be an http or https URL"),
    ({"temperature": [0.4, 0.2]}, "temperature: must rise"),
    ({"temperature": []}, "temperature: "),
    ({"temperature": [0, 2]}, "temperature.1: "),
    ({"temperature": [0, 1], "temperature_increment_on_fallback": 0.2}, "temperature_increment_on_fallback: has no"),
    ({"repetition_penalty": 0.5}, "repetition_penalty: "),
    ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size: "),
    ({"max_new_tokens": 221}, "max_new_tokens: "),
    ({"vad_parameters": {"threshold": 1}}, "vad_parameters.threshold: "),
    ({"vad_parameters": {"threshold": 0.5, "neg_threshold": 0.6}}, "vad_parameters: neg_threshold must not be above"),
    ({"vad_parameters": {"onset": 0.5}}, "vad_parameters.onset: unknown field"),
    ({"vad_parameters": {"max_speech_duration_s": 1}}, "vad_parameters.max_speech_duration_s: "),
    ({"vad_parameters": {}, "enable_vad": False}, "vad_parameters: needs enable_vad"),
    ({"audio": None, "audio_base64": "A" * 101}, "audio_base64: has 101 characters, 100 are allowed"),
]


@pytest.mark.parametrize(("given", "expected"), REFUSED)
def test_what_cannot_be_done_is_refused_with_its_field(given: dict[str, Any], expected: str) -> None:
    assert refusal(**given).startswith(expected)


def test_all_problems_are_told_at_once() -> None:
    text = refusal(audio=None, beam_size="5", language="klingon", zzz=1)
    assert [part.split(":")[0] for part in text.split("; ")] == [
        "language",
        "beam_size",
        "zzz",
        "give exactly one of audio, audio_base64 and audios",
    ]


def test_the_callers_values_are_not_repeated() -> None:
    assert "s3cret" not in refusal(audio="ftp://example.org/?token=s3cret", initial_prompt=["s3cret"])


def test_many_problems_make_a_short_answer() -> None:
    assert len(refusal(**{f"{'x' * 5000}{n}": 1 for n in range(90)})) < 5000


def test_fields_beyond_counting_are_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would hold the event loop for seconds."""
    explained: list[Any] = []

    def explain(detail: Any, fields: Any) -> str:
        explained.append(detail)
        return "wrong"

    monkeypatch.setattr(request, "_explain", explain)
    assert refusal(**{f"x{n}": 1 for n in range(100_000)}).startswith("input: has 100001 fields")
    refusal(**{f"x{n}": 1 for n in range(90)})
    refusal(suppress_tokens=["x"] * 1_000_000)
    assert len(explained) <= 21


@pytest.mark.parametrize("raw", [None, [], "https://example.org/a.mp3", 5])
def test_an_input_that_is_no_object_is_refused(raw: Any) -> None:
    with pytest.raises(BadInput, match="must be an object"):
        parse_request(raw, RULES)


def test_local_paths_are_allowed_where_the_operator_says_so() -> None:
    assert parse(InputRules(True, 100), audio="talk.mp3").audio == "talk.mp3"
    with pytest.raises(BadInput):
        parse(InputRules(True, 100), audio="file:///etc/passwd")


# --- what follows from what was asked


def test_a_job_has_one_source_or_many() -> None:
    headers = {"Authorization": "Bearer t"}
    assert parse(audio=URL, audio_headers=headers).sources == (Source(URL, None, headers),)
    request = parse(audios=[URL, {"audio": URL, "audio_headers": {}}, {"audio_base64": "UklG"}], audio_headers=headers)
    assert request.sources == (Source(URL, None, headers), Source(URL, None, {}), Source(None, "UklG", headers))


def test_what_a_stranger_may_not_read_is_in_no_text_of_a_request() -> None:
    secret, headers = URL + "?token=s3cret", {"Authorization": "Bearer s3cret"}
    request = parse(audio=secret, audio_headers=headers, upload_url=secret)
    several = parse(audios=[secret, {"audio": secret, "audio_headers": headers}])
    assert "s3cret" not in repr((request, request.sources, several, several.sources))


def test_files_of_one_host_share_their_headers() -> None:
    assert parse(audios=[URL, "https://EXAMPLE.org:443/b"], audio_headers={"A": "b"}).audio_headers == {"A": "b"}


@pytest.mark.parametrize("field", ["prefix", "hotwords", "initial_prompt"])
def test_what_is_blank_is_not_shown_to_the_model(field: str) -> None:
    assert getattr(parse(audio=URL, **dict[str, Any]({field: " \t"})), field) is None


def test_nothing_of_the_secret_is_told_of_a_bucket() -> None:
    given = {"accessId": "id", "accessSecret": "s3cret", "bucketName": "b" * 5, "endpointUrl": "https://s3.test"}
    assert "s3cret" not in repr(parse_s3_config(given))
    with pytest.raises(BadInput, match=r"s3Config\.bucketName: Field required") as caught:
        parse_s3_config({**{name: value for name, value in given.items() if name != "bucketName"}, "endpointUrl": "x"})
    assert "s3cret" not in str(caught.value)
    assert "s3Config.endpointUrl: must be an http or https URL" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "transcription", "translation"),
    [
        ({}, True, False),
        ({"translate": True}, True, True),
        ({"task": "translate"}, False, True),
        ({"task": "translate", "translate": True}, False, True),
        ({"task": "detect_language"}, False, False),
        ({"task": "detect_language", "translate": True}, False, False),
    ],
)
def test_the_task_says_which_texts_are_wanted(given: dict[str, Any], transcription: bool, translation: bool) -> None:
    request = parse(audio=URL, **given)
    assert (request.wants_transcription, request.wants_translation) == (transcription, translation)


@pytest.mark.parametrize(
    ("given", "remark"),
    [
        ({}, ""),
        ({"task": "detect_language", "languages": ["de", "en"], "timeout_s": 5}, ""),
        ({"task": "detect_language", "translate": True, "beam_size": 5, "prefix": "A"}, "use translate, prefix"),
        ({"max_line_width": 40}, "only the formats srt and vtt use max_line_width"),
        ({"max_line_width": 40, "transcription": "srt"}, ""),
        ({"max_line_width": 40, "formats": ["vtt"]}, ""),
        ({"max_line_count": 2, "translation": "srt"}, "only the formats srt and vtt use max_line_count"),
        ({"max_line_count": 2, "max_line_width": 40, "translation": "srt", "translate": True}, ""),
        ({"max_line_count": 2, "max_words_per_line": 3, "transcription": "srt"}, ""),
        ({"max_line_count": 2, "transcription": "srt"}, "max_line_count has no effect without max_line_width"),
        ({"max_line_count": 2, "transcription": "srt", "task": "translate"}, "only the formats srt and vtt"),
        ({"transcription": "srt", "task": "translate"}, "there is no transcription: its format has no effect"),
        ({"translation": "srt"}, "there is no translation: its format has no effect"),
        ({"translation": "plain_text", "translate": False}, ""),
        ({"language": "de", "languages": ["de", "en"]}, "languages has no effect"),
        ({"language": "de", "languages": ["de", "en"], "multilingual": True}, ""),
        ({"prefix": "A", "hotwords": "B"}, "hotwords has no effect there"),
        ({"best_of": 3}, ""),
        ({"best_of": 3, "temperature_increment_on_fallback": 0}, "best_of has no effect"),
        ({"beam_size": 3, "temperature": 0.5}, "without a temperature of 0, beam_size has no effect"),
        ({"beam_size": 3, "patience": 2, "temperature": [0, 0.5]}, ""),
    ],
)
def test_what_has_no_effect_is_remarked(given: dict[str, Any], remark: str) -> None:
    remarks = " ".join(parse(audio=URL, **given).remarks)
    assert remark in remarks
    assert bool(remark) == bool(remarks)


def test_a_part_that_is_null_counts_as_absent() -> None:
    request = parse(audio=URL, clip={"start": None, "end": 5}, vad_parameters={"threshold": None})
    assert request.clip == Clip(start=0, end=5)
    assert request.vad_parameters == VadParameters()


@pytest.mark.parametrize(("given", "silent"), [({}, 0.35), ({"threshold": 0.1}, 0.01), ({"neg_threshold": 0.2}, 0.2)])
def test_speech_ends_below_its_threshold(given: dict[str, Any], silent: float) -> None:
    assert VadParameters(**given).silent == pytest.approx(silent)
