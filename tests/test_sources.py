"""The forms in which a file comes: base64, a data: URL, a name with an extension, a local path."""

import base64
import os
from pathlib import Path
from urllib.parse import quote

import pytest

from whisper_worker import sources
from whisper_worker.errors import BadInput
from whisper_worker.request import InputRules, Source, parse_request

BYTES = bytes(range(256)) + b"\xfb\xff\xfe"  # has the digits + and / in base64


def source(**fields: str) -> Source:
    """As a request has it."""
    return parse_request(fields, InputRules(allow_local_files=True, max_base64_bytes=1000)).sources[0]


def content(**fields: str) -> bytes:
    with sources.open_source(source(**fields)) as file:
        return file.read()


@pytest.mark.parametrize(
    "text",
    [
        base64.b64encode(BYTES + b"1").decode(),
        base64.urlsafe_b64encode(BYTES + b"1").decode(),
        base64.b64encode(BYTES + b"1").decode().rstrip("="),
        base64.urlsafe_b64encode(BYTES + b"1").decode().rstrip("="),
        base64.encodebytes(BYTES + b"1").decode(),
        base64.encodebytes(BYTES + b"1").decode().replace("\n", "\r\n"),
        " " + base64.b64encode(BYTES + b"1").decode() + "\t\n",
    ],
    ids=["standard", "url-safe", "no padding", "url-safe, no padding", "lines", "CRLF lines", "spaces around"],
)
def test_base64_is_read_in_all_its_dialects(text: str) -> None:
    assert content(audio_base64=text) == BYTES + b"1"


@pytest.mark.parametrize("padding", range(3))
def test_base64_may_lack_any_number_of_padding_signs(padding: int) -> None:
    data = BYTES[: 30 + padding]
    assert content(audio_base64=base64.b64encode(data).decode().rstrip("=")) == data


@pytest.mark.parametrize("text", ["A", "AAAAA", "AA=A", "=AAA", "AA!A", "AAA\0", "äöü", "dat:audio/wav;base64,AAAA"])
def test_what_is_no_base64_is_bad_input_and_not_repeated(text: str) -> None:
    with pytest.raises(BadInput, match=r"^audio_base64: is not valid base64$"):
        content(audio_base64=text)


DATA = base64.b64encode(BYTES).decode()


@pytest.mark.parametrize("field", ["audio", "audio_base64"])
@pytest.mark.parametrize(
    "url",
    [
        f"data:audio/mpeg;base64,{DATA}",
        f"DATA:Audio/MPEG;BASE64,{DATA}",
        f'data:audio/ogg;codecs="opus";rate=48000;base64,{DATA}',
        f"data:;base64,{DATA}",
        f"data:audio/mpeg; base64 ,{DATA}",
        f"data:audio/mpeg;base64,{DATA.rstrip('=')}",
        f"data:audio/mpeg;base64,{base64.urlsafe_b64encode(BYTES).decode()}",
        f"data:audio/mpeg;base64,{quote(DATA, safe='')}",
        f"data:audio/mpeg,{quote(BYTES)}",
        f"data:,{quote(BYTES, safe='/+,')}",
        "data:audio/x;name=base64;rate=1," + "".join(f"%{byte:02x}" for byte in BYTES),
    ],
)
def test_a_data_url_is_read_in_either_field_in_all_its_forms(field: str, url: str) -> None:
    assert content(**{field: url}) == BYTES


def test_space_around_a_data_url_in_base64_is_ignored() -> None:
    assert content(audio_base64=f" \ndata:audio/mpeg;base64,{DATA}\n") == BYTES


@pytest.mark.parametrize("field", ["audio", "audio_base64"])
@pytest.mark.parametrize(
    "url", ["data:", "data:audio/mpeg;base64", "data:a/b;base64,A", "data:a/b;base64,A!", "data:,\ud800"]
)
def test_a_data_url_that_is_none_is_bad_input_that_names_the_field(field: str, url: str) -> None:
    with pytest.raises(BadInput, match=rf"^{field}: "):
        sources.open_source(Source(url, None) if field == "audio" else Source(None, url))


@pytest.mark.parametrize("field", ["audio", "audio_base64"])
@pytest.mark.parametrize(
    ("url", "extension"),
    [
        ("data:audio/g722;base64,AAAA", "g722"),
        ("Data:Audio/X-G722 ;rate=16000;base64,AAAA", "g722"),
        ("data:audio/mpeg,a.wav", "mpeg"),
        ("data:,a.wav", ""),
        ("data:;base64,AAAA", ""),
        ("data:audio/g722", ""),
    ],
)
def test_the_extension_of_a_data_url_is_its_subtype(field: str, url: str, extension: str) -> None:
    assert sources.extension(source(**{field: url})) == extension


@pytest.mark.parametrize(
    ("audio", "extension"),
    [
        ("https://files.example/a.mp3", "mp3"),
        ("https://files.example/a.MP3?name=b.wav#c.ogg", "mp3"),
        ("HTTPS://files.example/a.tar.gz", "gz"),
        ("https://files.example/a%2Emp3", "mp3"),
        ("https://files.example/a%20b.m4a", "m4a"),
        ("https://files.example/a?name=b.wav", ""),
        ("https://files.example", ""),
        ("https://files.example/.mp3", ""),
        ("https://files.example/a.", ""),
        ("recordings/a.Flac", "flac"),
        ("recordings.old/a", ""),
        ("a?b#c.opus", "opus"),
    ],
)
def test_the_extension_is_that_of_the_name(audio: str, extension: str) -> None:
    assert sources.extension(source(audio=audio)) == extension


def test_base64_has_no_extension() -> None:
    assert sources.extension(source(audio_base64="AAAA")) == ""


def test_a_local_file_is_opened(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(BYTES)
    assert content(audio=str(tmp_path / "a.wav")) == BYTES


@pytest.mark.parametrize("name", ["missing.wav", "folder", "pipe", "link to nothing", "a\0b", "a" * 5000, "\ud800"])
def test_what_is_no_file_is_bad_input_and_its_path_not_repeated(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link to nothing").symlink_to(tmp_path / "nothing")
    with pytest.raises(BadInput) as caught:
        sources.open_source(Source(f"{tmp_path}/{name}", None))
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "a.wav").touch(mode=0)
    with pytest.raises(BadInput):
        sources.open_source(Source(str(tmp_path / "a.wav"), None))
