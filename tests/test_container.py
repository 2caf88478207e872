"""How scripts/container-smoke runs other programs; what it does with them, it shows itself, in CI."""

import time
from pathlib import Path

import pytest

from container.programs import Clock, Failed, output_of

LONG_S = 30


def test_a_program_that_fails_is_quoted() -> None:
    with pytest.raises(Failed, match=r"(?s)sh ended with code 3:.* the reason"):
        output_of(["sh", "-c", "echo the reason >&2; exit 3"], Clock(20))


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(Failed, match="there is no program no-such-program"):
        output_of(["no-such-program"], Clock(20))


def test_when_the_time_is_over_the_program_is_ended_with_its_children() -> None:
    begin = time.monotonic()
    with pytest.raises(Failed, match=r"(?s)the time limit of 1 s is over, .* last words"):
        output_of(["sh", "-c", f"echo last words; sleep {LONG_S} & wait"], Clock(1))
    assert time.monotonic() - begin < LONG_S  # its output, which they share, has ended


def test_nothing_begins_when_the_time_is_over(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="the time limit"):
        output_of(["touch", str(tmp_path / "begun")], Clock(0))
    assert not (tmp_path / "begun").exists()
