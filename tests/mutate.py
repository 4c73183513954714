"""Logs damaged in every way that files get damaged, and some that people think of."""

from __future__ import annotations

import gzip
import importlib.util
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType


def _simulate() -> ModuleType:
    if "simulate" not in sys.modules:
        spec = importlib.util.spec_from_file_location("simulate", Path(__file__).with_name("simulate.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules["simulate"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["simulate"])
    return sys.modules["simulate"]


def _flip(data: bytes, rng: random.Random) -> bytes:
    result = bytearray(data)
    for _ in range(max(1, len(data) // rng.choice((50, 500, 5000)))):
        result[rng.randrange(len(result))] = rng.randrange(256)
    return bytes(result)


def _lines(change: Callable[[list[bytes], random.Random], list[bytes]]) -> Callable[[bytes, random.Random], bytes]:
    return lambda data, rng: b"\n".join(change(data.split(b"\n"), rng))


def _cut(lines: list[bytes], rng: random.Random) -> list[bytes]:
    return [line[: rng.randrange(len(line) + 1)] if rng.random() < 0.2 else line for line in lines]


def _swap(lines: list[bytes], rng: random.Random) -> list[bytes]:
    for _ in range(len(lines) // 5):
        a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
        lines[a], lines[b] = lines[b], lines[a]
    return lines


def _repeat(lines: list[bytes], rng: random.Random) -> list[bytes]:
    return [line for line in lines for _ in range(rng.choice((1, 1, 1, 2, 30)))]


def _drop(lines: list[bytes], rng: random.Random) -> list[bytes]:
    return [line for line in lines if rng.random() < 0.7]


def _numbers(data: bytes, rng: random.Random) -> bytes:
    import re

    odd = (
        b"9" * 400,
        b"1e999999",
        b"-0",
        b"nan",
        b"-inf",
        b"0x10",
        b"1_000",
        b"\xd9\xa3",
        b"1e-400",
        b"",
        b"True",
        b"4" * 5000,
    )
    return re.sub(rb"\d+(?:\.\d+)?", lambda m: rng.choice(odd) if rng.random() < 0.05 else m.group(), data)


def _long(data: bytes, rng: random.Random) -> bytes:
    filler = rng.choice((b"a", b" ", b"1", b"loss: 1.0 ", b"\r", b"(", b"step 1 ", b"'a': 1, ", b"\x00", b"| a: 1 "))
    at = rng.randrange(len(data))
    return data[:at] + filler * (rng.choice((10_000, 100_000, 1_000_000)) // len(filler)) + data[at:]


def _nest(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    pair = rng.choice((b"[]", b"{}", b"()"))
    return data[:at] + pair[:1] * 20_000 + pair[1:] * 20_000 + data[at:]


def _controls(data: bytes, rng: random.Random) -> bytes:
    codes = (
        b"\x1b[31m",
        b"\x1b]0;x\x07",
        b"\x1b[",
        b"\r",
        b"\x00",
        b"\x08",
        b"\xff\xfe",
        b"\x9b",
        b"\xe2\x80\xae",
        b"\x1b]" + b"a" * 600,
    )
    parts = data.split(b" ")
    return b" ".join(part + rng.choice(codes) if rng.random() < 0.02 else part for part in parts)


def _encode(data: bytes, rng: random.Random) -> bytes:
    text = data.decode("utf-8", "replace")
    return text.encode(rng.choice(("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "cp1252", "utf-7")), "replace")


def _pack(data: bytes, rng: random.Random) -> bytes:
    packed = bytearray(gzip.compress(data))
    if rng.random() < 0.5:
        packed = packed[: rng.randrange(12, len(packed))]
    else:
        packed[rng.randrange(10, len(packed))] ^= 0xFF
    return bytes(packed)


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flip,
    _lines(_cut),
    _lines(_swap),
    _lines(_repeat),
    _lines(_drop),
    _numbers,
    _long,
    _nest,
    _controls,
    _encode,
    _pack,
)


def mutated(seed: int) -> bytes:
    """A generated log with one to three kinds of damage."""
    simulate = _simulate()
    rng = random.Random(seed)
    run = (simulate.healthy if rng.random() < 0.5 else simulate.faulty)(rng.randrange(10_000))
    data: bytes = run.text[: rng.choice((3_000, 20_000, 100_000))]
    for _ in range(rng.choice((1, 1, 2, 3))):
        data = rng.choice(MUTATIONS)(data, rng) or b"\n"
    return data
