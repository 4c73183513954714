"""A user's pattern can't hang the reader."""

from __future__ import annotations

import io
import threading
import time

import pytest

from ampdebug._errors import ArgumentError
from ampdebug.logs import read_log
from ampdebug.logs._pattern import user_format

BOMBS = [
    r"(?P<loss>(a+)+)$",
    r"(?P<loss>(\d+\s*)*)x",
    r"(?P<loss>(?:ab|a)*)!",
    r"(?P<loss>(?:(?:x*)*)*)y",
    r"(?=(?P<loss>(a*)*b))",
    r"((a|b)?(?P<loss>(c*d*)*))+",
]


@pytest.mark.parametrize("pattern", BOMBS)
def test_nested_repeats_are_refused(pattern: str) -> None:
    with pytest.raises(ArgumentError, match="repeated without bound"):
        user_format(pattern)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(?P<loss>", "is not a regular expression"),
        (r"(?P<step>\d+)", "reads nothing that can be judged"),
        (r"(?P<loss>\S+) (?P<speed>\d+)", "mean nothing here"),
    ],
)
def test_useless_patterns_are_refused(pattern: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        user_format(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"step (?P<step>\d+): loss (?P<loss>[-+.\w]+)",
        r"(?P<loss>\d{1,5}\.\d+) (?:lr|LR)=(?P<lr>\S+)",
        r"(?i)loss[=: ]+(?P<loss>\S+)(?: .*?scale[=: ]+(?P<scale>\S+))?",
    ],
)
def test_ordinary_patterns_are_taken(pattern: str) -> None:
    assert user_format(pattern).name == "pattern"


def test_a_slow_pattern_is_stopped() -> None:
    # Not nested, so not refused, but of the fifth power in the length of the line.
    pattern = r".*a.*a.*a.*a.*a(?P<loss>\d+)b"
    data = (b"a" * 2000 + b"\n") * 50
    begin = time.monotonic()
    with pytest.raises(ArgumentError, match="took over 1 s on three lines"):
        read_log(io.BytesIO(data), pattern=pattern)
    assert time.monotonic() - begin < 30


def test_the_alarm_is_put_back() -> None:
    import signal

    def mine(signum: int, frame: object) -> None:
        raise AssertionError("not now")

    before = signal.signal(signal.SIGALRM, mine)
    try:
        read_log(io.BytesIO(b"loss 1\n"), pattern=r"loss (?P<loss>\d+)")
        assert signal.getsignal(signal.SIGALRM) is mine
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_in_a_thread_it_works_without_the_alarm() -> None:
    result: list[float | None] = []

    def work() -> None:
        history, _ = read_log(io.BytesIO(b"loss 1.5\n"), pattern=r"loss (?P<loss>\S+)")
        result.append(history.records[0].step.loss)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert result == [1.5]
