"""Lines that say ``key value`` in any notation, and JSON lines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from ampdebug.logs._format import NUMBER, Fields, LogFormat, number
from ampdebug.logs._keys import Pair, fields_of, is_evaluation

GENERIC_LIMIT = 1024
"""Longest line that the catch-all format is tried on."""

# In "loss nan lr 0.1" the second word is a value, not a part of the key "loss nan lr".
PAIR = re.compile(
    rb"(?<![A-Za-z0-9_./])([A-Za-z_][A-Za-z0-9_]{0,40}(?:[ \-./](?!(?i:nan|inf|infinity)\b)[A-Za-z_][A-Za-z0-9_]{0,40})"
    rb"{0,3})['\"]?\s{0,3}"
    rb"(?:is |[:=|])?\s{0,8}[\[('\"]{0,2}\s{0,8}(" + NUMBER + rb"|[Tt]rue\b|[Ff]alse\b)"
    rb"(?:,(\d{1,8})(?=\s|$))?(?![A-Za-z_])['\"\])]{0,2}(?: {0,2}/ {0,6}(\d{1,12}))?"
)
COUNTER = re.compile(rb"(?:^|[\s\]])\[? {0,8}(\d{1,12}) {0,2}/ {0,6}(\d{1,12})(?: {0,2}\( {0,3}\d+%\))?[\]\s,:]")
TENSOR = re.compile(
    rb"\b(?:[Tt]ensor|array|(?:[a-z]{2,5}\.)?(?:b?float|double)\d{0,2})\((?:[^()]{0,80}?value= ?)?\[?\s{0,4}("
    + NUMBER
    + rb")[^()]{0,120}(?:\([^()]*\))?\)"
)
"""A number as a tensor, an array or a scalar of a certain dtype prints itself."""

_WINDOWS = (
    (re.compile(rb"(?<![\w.])-?\d\.#(?:QNAN|SNAN|IND)\d*"), b"nan"),
    (re.compile(rb"(?<=\d)\.#INF\d*"), b"e999"),
)
"""NaN and infinity as old C libraries of Windows print them: ``1.#QNAN``, ``-1.#INF00``."""


def line_pairs(line: bytes) -> Iterator[Pair]:
    """``(key, value, total)`` of every pair in a line of any notation."""
    if b"(" in line:
        line = TENSOR.sub(rb"\1", line)
    if b".#" in line:
        for pattern, plain in _WINDOWS:
            line = pattern.sub(plain, line)
    comma = b"." not in line  # a decimal comma, where no number of the line has a point
    for key, text, rest, total in PAIR.findall(line):
        value: Any
        if text[:1] in b"tTfF":
            value = text.lower() == b"true"
        else:
            value = number(text + (b"." + rest if rest and comma else b""))
            if rest and not comma and text.isdigit() and len(rest) == 3:
                value = float(text + rest)  # thousands: "step 12,000"
        if value is not None:
            yield key.decode("ascii", "replace"), value, int(total) if total else None


class Keyed(LogFormat):
    """The catch-all: any line that says a step and a loss, in any order and notation."""

    def read(self, line: bytes) -> Fields | None:
        """The fields of ``line``, or None where it holds no step with a loss."""
        return self.read_signed(line)[0]

    def read_signed(self, line: bytes) -> tuple[Fields | None, tuple[str, ...]]:
        """The fields and the spelling of its keys, by which other lines of the same kind are known."""
        fields, keys = fields_of(line_pairs(line))
        if "loss" not in fields:
            return None, ()
        if "step" not in fields and "epoch_step" not in fields:
            counters = COUNTER.findall(line)
            if counters and "epoch" in fields and fields["epoch"] == int(counters[0][0]):
                counters = counters[1:]  # "epoch 3/10" itself
            if counters:
                at, total = int(counters[-1][0]), int(counters[-1][1])
                if at > total + 1:
                    return None, ()
                if "epoch" in fields:
                    fields["epoch_step"], fields["epoch_steps"] = at, total
                else:
                    fields["step"] = at
                keys = (*keys, "/")
        if "step" not in fields and "epoch_step" not in fields:
            return None, ()
        words = line[:200].lower()
        if any(is_evaluation(word) for word in re.findall(r"[a-z]+", words.decode("ascii", "replace"))[:12]) and (
            b"train" not in words
        ):
            return None, ()
        return fields, keys


def flat(data: dict[str, Any], depth: int = 0) -> Iterator[Pair]:
    """``(key, value, total)`` of what a JSON object says, nested ones included."""
    for key, value in data.items():
        if isinstance(value, dict) and depth < 2:
            yield from flat(value, depth + 1)
        elif isinstance(value, bool | int | float):
            yield key, value, None
        elif isinstance(value, list) and value and isinstance(value[-1], int) and key == "step":
            yield key, value[-1], None
        elif isinstance(value, str) and len(value) < 40:
            head, slash, tail = value.partition("/")
            if slash and head.strip().isdigit() and tail.strip().isdigit():
                # "global_step/max_steps": "10/100"
                yield key.partition("/max")[0], int(head), int(tail)
                continue
            known = number(value.encode())
            if known is not None:
                yield key, known, None


def json_object(text: bytes) -> dict[str, Any] | None:
    """The first JSON object in a line, None where there is none that can be read."""
    begin, end = text.find(b"{"), text.rfind(b"}")
    if begin < 0 or end < begin:
        return None
    try:
        data = json.loads(text[begin : end + 1])
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


class JsonLines(LogFormat):
    """One JSON object a line."""

    def read(self, line: bytes) -> Fields | None:
        """The fields of ``line``, or None where it is no JSON object with a training loss."""
        if b'num_updates"' in line:
            return None  # fairseq's, which has a row of its own
        data = json_object(line)
        if data is None or data.get("mode") not in (None, "train"):
            return None
        pairs = [pair for pair in flat(data) if not is_evaluation(pair[0])]
        fields, _ = fields_of(pairs)
        if "loss" not in fields and not ("scale" in fields and "step" in fields):
            return None
        if "step" not in fields and "epoch_step" not in fields and not fields.keys() & {"lr", "grad_norm", "scale"}:
            return None
        if data.get("mode") == "train" and "iter" in data and "epoch" in fields and "step" in fields:
            fields["epoch_step"] = fields.pop("step")  # mmcv 1 counts within the epoch
        return fields
