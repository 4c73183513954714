"""Where the fields of one line stand and how their text becomes values, so that lines like it need no search.

For the rows of the table that is what their patterns found; for the catch-all, JSON lines and tables it is what their
keys say. ``None`` means that a line can only be read in full.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ampdebug.logs._format import CONVERTERS, Fields, LogFormat, number, scale_number, short_counter
from ampdebug.logs._keyed import COUNTER, PAIR, TENSOR, JsonLines, Keyed, flat, json_object
from ampdebug.logs._keys import best_keys, is_evaluation, put_counter, real_scale, truth, whole_number
from ampdebug.logs._tabular import Table

Part = tuple[str, Callable[[bytes], Any], int, int]
"""Field, converter, begin and end."""


@dataclass(frozen=True)
class Plan:
    """How to read a line and those like it.

    Attributes:
        parts: The fields.
        finish: Last word on the fields, as in ``LogFormat``; what it empties has to be read in full.
        pins: ``(begin, end)`` of text whose digits mean something (a key ``lr_0``), so that it has to be the same.
        plain: The step number can be told from the parts alone, without ``finish``.
    """

    parts: tuple[Part, ...]
    finish: Callable[[Fields, bytes], None] | None = None
    pins: tuple[tuple[int, int], ...] = ()
    plain: bool = True


ANY_DIGIT = re.compile(rb"\\.|\{[\d,]+\}|0-9")
"""Parts of a pattern with digits that mean no certain digit."""


def words_with_digits(row: LogFormat) -> set[bytes]:
    """Words of the patterns of a row that hold certain digits: ``Fp16``, ``optim0_lr0``."""
    patterns = row.pattern.pattern + b" " + (b"" if row.pairs is None else row.pairs.pattern)
    return set(re.findall(rb"[A-Za-z_]+\d\w*", ANY_DIGIT.sub(b" ", patterns)))


def plan_of(row: LogFormat, line: bytes) -> Plan | None:
    """The plan of a line of the format ``row``."""
    if isinstance(row, JsonLines):
        return _json_plan(line)
    if isinstance(row, Keyed):
        return _keyed_plan(line)
    return _table_plan(row, line) if isinstance(row, Table) else _row_plan(row, line)


def _row_plan(row: LogFormat, line: bytes) -> Plan | None:
    match = row.pattern.search(line)
    if match is None:
        return None
    own: tuple[tuple[int, str, Callable[[bytes], Any]], ...] = row._plan  # type: ignore[attr-defined]
    found = {name: (convert, *match.span(group + 1)) for group, name, convert in own if match.start(group + 1) >= 0}
    pins = []
    for word in words_with_digits(row):
        like = re.compile(re.sub(rb"\d", rb"\\d", re.escape(word)))
        pins += [place.span() for place in like.finditer(line)]
    if row.pairs is not None:
        for pair in row.pairs.finditer(line):
            field = row.keys.get(pair.group(1).strip())
            if field is not None and field not in found and CONVERTERS[field](pair.group(2)) is not None:
                found[field] = (CONVERTERS[field], *pair.span(2))
    if row.locate is not None:
        for name, (begin, end, convert) in row.locate(line).items():
            found[name] = (convert, begin, end)
    return Plan(tuple((name, *place) for name, place in found.items()), row.finish, tuple(pins))


# --- text to values, as the readers in full make them -----------------------------------------------------------------


@lru_cache(maxsize=1024)
def _scale(text: bytes) -> float | None:
    value = number(text)
    return None if value is None else real_scale(value)


def _whole(text: bytes) -> int | None:
    if text.isdigit():
        return whole_number(int(text))
    value = number(text)
    return None if value is None else whole_number(value)


@lru_cache(maxsize=256)
def _flag(text: bytes) -> bool | None:
    word = text.lower()
    return word == b"true" if word in (b"true", b"false") else truth(number(text))


def _not(text: bytes) -> bool | None:
    flag = _flag(text)
    return None if flag is None else not flag


_MAKE: dict[str, Callable[[bytes], Any]] = {
    "loss": number,
    "grad_norm": number,
    "lr": number,
    "scale": _scale,
    "epoch": _whole,
    "rank": _whole,
    "overflow": _flag,
    "finite": _not,
    "step": _whole,
    "iter": _whole,
}


def _count(fields: Fields, line: bytes) -> None:
    """Put ``3/100``, read as two parts, where it belongs."""
    total = fields.pop("total", None)
    at = fields.pop("step", None)
    if at is not None:
        put_counter(fields, at, total)


def _parts(places: dict[str, tuple[int, int]], total: tuple[int, int] | None) -> list[Part] | None:
    """The parts of the best keys: ``places`` says where their values stand, ``total`` what is after the slash."""
    if "overflow" in places and "finite" in places:
        return None  # which of them counts depends on their values
    if "step" in places:
        places.pop("iter", None)
    names = {"finite": "overflow", "iter": "step"}
    parts = [(names.get(name, name), _MAKE[name], *place) for name, place in places.items()]
    if total is not None:
        parts.append(("total", int, *total))
    return parts


# --- the catch-all ----------------------------------------------------------------------------------------------------


def _without_tensors(line: bytes) -> tuple[bytes, list[tuple[int, int]]]:
    """A line without its ``tensor(...)``, and ``(begin, shift)`` of its pieces: where they stood before."""
    out, shifts, at, size = [], [(0, 0)], 0, 0
    for match in TENSOR.finditer(line):
        for begin, end in ((at, match.start()), match.span(1)):
            out.append(line[begin:end])
            shifts.append((size, begin - size))
            size += end - begin
        at = match.end()
    shifts.append((size, at - size))
    return b"".join([*out, line[at:]]), shifts


def _keyed_plan(line: bytes) -> Plan | None:
    text, shifts = line, [(0, 0)]
    if b"(" in line:
        text, shifts = _without_tensors(line)

    def back(span: tuple[int, int]) -> tuple[int, int]:
        shift = next(shift for begin, shift in reversed(shifts) if begin <= span[0])
        return span[0] + shift, span[1] + shift

    matches = list(PAIR.finditer(text))
    best = best_keys([match.group(1).decode("ascii", "replace") for match in matches])
    pins = tuple(back(match.span(1)) for match in matches if re.search(rb"\d", match.group(1)))
    if any(matches[at].start(3) >= 0 for at in best.values()):
        return None  # a decimal comma, or thousands
    places = {name: back(matches[at].span(2)) for name, at in best.items()}
    if any(line[slice(*place)] != matches[best[name]].group(2) for name, place in places.items()):
        return None  # a number that was put together from two pieces
    counter = best.get("step", best.get("iter"))
    total = None
    if counter is not None and matches[counter].start(4) >= 0:
        total = back(matches[counter].span(4))
    finish, plain = None if total is None else _count, True
    if counter is None:
        counters = list(COUNTER.finditer(text))
        if not counters:
            return None
        places["step"], total = back(counters[-1].span(1)), back(counters[-1].span(2))
        finish, plain = _lone_counter if len(counters) == 1 else _counter, False
    parts = _parts(places, total)
    return None if parts is None else Plan(tuple(parts), finish, pins, plain)


def _counter(fields: Fields, line: bytes) -> None:
    at, total = fields.pop("step"), fields.pop("total")
    if at > total + 1:
        fields.clear()
    elif "epoch" in fields:
        fields["epoch_step"], fields["epoch_steps"] = at, total
    else:
        fields["step"] = at


def _lone_counter(fields: Fields, line: bytes) -> None:
    if fields.get("epoch") == fields["step"]:
        fields.clear()  # "epoch 3/10" itself
    else:
        _counter(fields, line)


# --- JSON lines -------------------------------------------------------------------------------------------------------

_JSON_PAIR = re.compile(
    rb'"([^"\\]{1,200})"\s{0,8}:\s{0,8}(?:"([^"\\]{0,40})"|(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|NaN|-?Infinity|true|false)'
    rb"(?=[\s,}]))"
)
_OF = re.compile(rb"\s*(\d+)\s*/\s*(\d+)\s*")


def _json_plan(line: bytes) -> Plan | None:
    data = json_object(line)
    if data is None or b"\\" in line:
        return None
    pairs = [pair for pair in flat(data) if not is_evaluation(pair[0])]
    best = best_keys([key for key, _, _ in pairs])
    raw: dict[str, list[re.Match[bytes]]] = {}
    pins = []
    for match in _JSON_PAIR.finditer(line, line.find(b"{")):
        key = match.group(1).decode("utf-8", "replace")
        raw.setdefault(key, []).append(match)
        if re.search(rb"\d", match.group(1)):
            pins.append(match.span(1))
    places, total = {}, None
    for name, at in best.items():
        key, _, of = pairs[at]
        matches = raw.get(key, [])
        if of is not None:
            matches = [match for full, found in raw.items() if full.partition("/max")[0] == key for match in found]
        if len(matches) != 1:
            return None
        match = matches[0]
        places[name] = match.span(2) if match.start(2) >= 0 else match.span(3)
        if of is not None:
            both = _OF.fullmatch(line, *places[name])
            if both is None:
                return None
            places[name] = both.span(1)
            if name == ("step" if "step" in best else "iter"):
                total = both.span(2)
    parts = _parts(places, total)
    if parts is None:
        return None
    within = data.get("mode") == "train" and "iter" in data
    return Plan(tuple(parts), _within if within else None if total is None else _count, tuple(pins))


def _within(fields: Fields, line: bytes) -> None:
    _count(fields, line)
    if "epoch" in fields and "step" in fields:
        fields["epoch_step"] = fields.pop("step")  # mmcv 1 counts within the epoch


# --- tables -----------------------------------------------------------------------------------------------------------

_CELL_FLAGS = {
    **dict.fromkeys((b"True", b"true", b"1", b"1.0"), True),
    **dict.fromkeys((b"False", b"false", b"0", b"0.0"), False),
}


def _cell_counter(text: bytes) -> int | None:
    text = text.removesuffix(b".0")
    return int(text) if text.isdigit() else None


COUNTERS = frozenset((CONVERTERS["step"], short_counter, _whole, _cell_counter))
"""Converters that make of at most 15 digits what ``int`` makes of them."""


def _table_plan(row: LogFormat, line: bytes) -> Plan | None:
    match = row.pattern.match(line)
    if match is None:
        return None
    make: dict[str, Callable[[bytes], Any]] = {
        **dict.fromkeys(("loss", "grad_norm", "lr"), number),
        **dict.fromkeys(("step", "epoch", "rank"), _cell_counter),
        "scale": scale_number,
        "overflow": _CELL_FLAGS.get,
    }
    return Plan(tuple(_cells(match, make)))


def _cells(match: re.Match[bytes], make: dict[str, Callable[[bytes], Any]]) -> Iterator[Part]:
    for name, text in match.groupdict().items():
        if text and not (name == "epoch" and b"." in text):
            yield name, make[name], *match.span(name)
