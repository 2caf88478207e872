"""The forms in which a file comes: base64, a name with an extension, a local path."""

import base64
import os
from pathlib import Path

import pytest

from whisper_worker import sources
from whisper_worker.errors import BadInput
from whisper_worker.request import InputRules, Request, parse_request

BYTES = bytes(range(256)) + b"\xfb\xff\xfe"  # has the digits + and / in base64


def request(**fields: str) -> Request:
    return parse_request(fields, InputRules(allow_local_files=True, max_base64_bytes=1000))


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
    with sources.from_base64(text) as file:
        assert file.read() == BYTES + b"1"


@pytest.mark.parametrize("padding", range(3))
def test_base64_may_lack_any_number_of_padding_signs(padding: int) -> None:
    data = BYTES[: 30 + padding]
    with sources.from_base64(base64.b64encode(data).decode().rstrip("=")) as file:
        assert file.read() == data


@pytest.mark.parametrize("text", ["A", "AAAAA", "AA=A", "=AAA", "AA!A", "AAA\0", "äöü", "data:audio/wav;base64,AAAA"])
def test_what_is_no_base64_is_bad_input_and_not_repeated(text: str) -> None:
    with pytest.raises(BadInput, match=r"^audio_base64: is not valid base64$"):
        sources.from_base64(text)


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
    assert sources.extension(request(audio=audio)) == extension


def test_base64_has_no_extension() -> None:
    assert sources.extension(request(audio_base64="AAAA")) == ""


@pytest.mark.parametrize(
    ("audio", "is_url"),
    [("http://a/", True), ("HTTPS://a/", True), ("ftp://a/", False), ("http:a", False), ("a.mp3", False)],
)
def test_urls_are_those_of_http_and_https(audio: str, is_url: bool) -> None:
    assert sources.is_url(audio) is is_url


def test_a_local_file_is_opened(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(BYTES)
    with sources.open_local(str(tmp_path / "a.wav")) as file:
        assert file.read() == BYTES


@pytest.mark.parametrize("name", ["missing.wav", "folder", "pipe", "link to nothing", "a\0b", "a" * 5000, "\ud800"])
def test_what_is_no_file_is_bad_input_and_its_path_not_repeated(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link to nothing").symlink_to(tmp_path / "nothing")
    with pytest.raises(BadInput) as caught:
        sources.open_local(f"{tmp_path}/{name}")
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "a.wav").touch(mode=0)
    with pytest.raises(BadInput):
        sources.open_local(str(tmp_path / "a.wav"))
