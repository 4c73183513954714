"""Cells × steps as a picture: which binary exponents each cell's output used, against what float16 can hold.

Colours are told apart with every common kind of colour blindness: a blue-to-yellow scale by brightness for float16's
normal range, and colours of the Okabe-Ito palette for what lies outside of it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ampdebug._formats import FLOAT16
from ampdebug._stats import EXPONENT_BIAS
from ampdebug.report._font import HEIGHT, WIDTH, text_mask

Which = Literal["largest", "smallest"]
Image = npt.NDArray[np.uint8]

# Codes beside the exponents (-127 … 128), ordered so that the larger of two is the one worth showing.
NONFINITE = 2000
ALL_ZERO = -1500
NOT_MEASURED = -2000

_MIN_NORMAL = round(np.log2(FLOAT16.smallest_normal))  # -14
_MIN_SUBNORMAL = round(np.log2(FLOAT16.smallest_subnormal))  # -24
_MAX_EXPONENT = int(np.floor(np.log2(FLOAT16.max)))  # 15

_SCALE = np.array([[0, 34, 78], [53, 69, 108], [102, 105, 112], [148, 142, 119], [200, 183, 97], [254, 232, 56]], float)
_TOO_LARGE = (213, 94, 0)  # vermilion
_SUBNORMAL = (86, 180, 233)  # sky blue
_FLUSHED = (204, 121, 167)  # reddish purple
_BLACK, _WHITE, _GREY = (0, 0, 0), (255, 255, 255), (222, 222, 222)

_MAX_ROWS = 400
_LABEL_CHARACTERS = 40


@dataclass(slots=True)
class _Column:
    first: int
    last: int
    largest: dict[str, int]
    smallest: dict[str, int]  # of -exponent: the larger is the one worth showing here as well


def exponent_span(
    exponents: npt.NDArray[np.unsignedinteger[Any]], *, low_share: float = 0.01
) -> tuple[int, int] | None:
    """Return the binary exponents between which an output's values lie.

    Args:
        exponents: 256 counts by ``floor(log2|x|) + 127``.
        low_share: The lower end leaves out this share of the nonzero values, so that one stray value does not set it.

    Returns:
        (lower, upper) with lower ≤ upper; None where all counts are 0 (no finite nonzero value).
    """
    total = np.cumsum(exponents, dtype=np.int64)
    if not total[-1]:
        return None
    lower = int(np.searchsorted(total, low_share * total[-1], side="right"))
    upper = int(np.flatnonzero(exponents)[-1])
    return min(lower, upper) - EXPONENT_BIAS, upper - EXPONENT_BIAS


class ExponentMap:
    """Collects the exponents of each cell's output, step by step, and draws them; it does not grow with the steps.

    Args:
        columns: At most this many columns; where there are more steps, neighbours share one, which then shows the
            more extreme of its values.
    """

    def __init__(self, *, columns: int = 200) -> None:
        self._limit = columns
        self._columns: list[_Column] = []
        self._steps_a_column = 1
        self._in_last = 0
        self._rows: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._columns)

    def add(self, step: int, spans: Mapping[str, tuple[int, int] | int]) -> None:
        """Add one step: for each cell path (lower, upper) exponent, or `NONFINITE` or `ALL_ZERO`."""
        self._rows.update(dict.fromkeys(spans))
        largest = {path: span if isinstance(span, int) else span[1] for path, span in spans.items()}
        smallest = {path: span if isinstance(span, int) else -span[0] for path, span in spans.items()}
        fresh = _Column(step, step, largest, smallest)
        if self._columns and self._in_last < self._steps_a_column:
            self._columns[-1] = _merged(self._columns[-1], fresh)
            self._in_last += 1
            return
        self._columns.append(fresh)
        self._in_last = 1
        if len(self._columns) > self._limit:
            odd = self._columns[-1:] if len(self._columns) % 2 else []
            pairs = zip(self._columns[0::2], self._columns[1::2], strict=False)
            self._columns = [_merged(left, right) for left, right in pairs] + odd
            self._in_last = 1 if odd else self._steps_a_column + 1  # the newest holds one step yet
            self._steps_a_column *= 2

    def codes(self, which: Which) -> npt.NDArray[np.int16]:
        """Return the exponents, or codes, as int16 ``[cells, columns]`` in the order in which cells were first seen."""
        table = np.full((len(self._rows), len(self._columns)), NOT_MEASURED, np.int16)
        for x, column in enumerate(self._columns):
            values = column.largest if which == "largest" else column.smallest
            for y, path in enumerate(self._rows):
                code = values.get(path, NOT_MEASURED)
                table[y, x] = -code if which == "smallest" and abs(code) < abs(ALL_ZERO) else code
        return table

    def draw(self, which: Which) -> Image:
        """Return the picture, uint8 RGB ``[height, width, 3]``.

        A row a cell with its path, the steps from left to right, a legend below.

        Args:
            which: ``"largest"``: the largest exponent of each output (is it near overflow?); ``"smallest"``: the
                smallest, leaving out 1 % of the values (is it flushing to zero?).
        """
        codes = self.codes(which)
        names = list(self._rows)
        left_out = max(0, len(names) - _MAX_ROWS)
        codes, names = codes[:_MAX_ROWS], names[:_MAX_ROWS]
        labels = [_shorten(name or "(network)") for name in names]
        block = max(1, min(12, 600 // max(1, codes.shape[1])))
        area = np.repeat(np.repeat(colours(codes), HEIGHT, axis=0), block, axis=1)
        first, last = (self._columns[0].first, self._columns[-1].last) if self._columns else (0, 0)
        title = f"{which} binary exponent of each output, steps {first} to {last}"
        legend = _legend(which)
        notes = [f"{left_out} more cells are not drawn"] if left_out else []
        label_width = WIDTH * (max(map(len, labels), default=0) + 1)
        width = (
            max(label_width + area.shape[1], WIDTH * max(len(title), *(len(text) + 3 for _, text in legend))) + WIDTH
        )
        height = HEIGHT * (2 + len(labels) + len(notes) + 1 + len(legend))
        picture = np.full((height, width, 3), 255, np.uint8)
        write_text(picture, title, 0, 0)
        top = 2 * HEIGHT
        for y, label in enumerate(labels):
            write_text(picture, label, top + y * HEIGHT, 0)
        picture[top : top + area.shape[0], label_width : label_width + area.shape[1]] = area
        top += HEIGHT * len(labels)
        for note in notes:
            write_text(picture, note, top, 0)
            top += HEIGHT
        top += HEIGHT
        for colour, text in legend:
            picture[top : top + HEIGHT - 2, : 2 * WIDTH] = _GREY
            picture[top + 1 : top + HEIGHT - 3, 1 : 2 * WIDTH - 1] = colour
            write_text(picture, text, top, 3 * WIDTH)
            top += HEIGHT
        return picture


def _merged(left: _Column, right: _Column) -> _Column:
    def larger(mine: dict[str, int], other: dict[str, int]) -> dict[str, int]:
        return {path: max(mine.get(path, NOT_MEASURED), other.get(path, NOT_MEASURED)) for path in {**mine, **other}}

    return _Column(left.first, right.last, larger(left.largest, right.largest), larger(left.smallest, right.smallest))


def colours(codes: npt.NDArray[np.int16]) -> Image:
    """Return the colour of each code, uint8 ``codes.shape + (3,)``."""
    place = (codes.astype(float) - _MIN_NORMAL) / (_MAX_EXPONENT - _MIN_NORMAL) * (len(_SCALE) - 1)
    place = np.clip(place, 0, len(_SCALE) - 1)
    low = np.minimum(place.astype(int), len(_SCALE) - 2)
    share = (place - low)[..., None]
    result: Image = np.rint(_SCALE[low] * (1 - share) + _SCALE[low + 1] * share).astype(np.uint8)
    result[codes > _MAX_EXPONENT] = _TOO_LARGE
    result[codes < _MIN_NORMAL] = _SUBNORMAL
    result[codes < _MIN_SUBNORMAL - 1] = (
        _FLUSHED  # 2**-25 is the tie that rounds to zero; above it float16 keeps values
    )
    result[codes == NONFINITE] = _BLACK
    result[codes == ALL_ZERO] = _WHITE
    result[codes == NOT_MEASURED] = _GREY
    return result


def _legend(which: Which) -> list[tuple[tuple[int, ...], str]]:
    marks = [_MIN_NORMAL, -7, 0, 8, _MAX_EXPONENT]
    scale = [(tuple(colours(np.array(mark, np.int16)).tolist()), f"2**{mark}") for mark in reversed(marks)]
    return [
        (_BLACK, "NaN or infinity"),
        (_TOO_LARGE, f"2**{_MAX_EXPONENT + 1} and more: overflows in float16"),
        *scale,
        (_SUBNORMAL, f"below 2**{_MIN_NORMAL}: subnormal in float16, fewer digits"),
        (_FLUSHED, f"below 2**{_MIN_SUBNORMAL - 1}: zero in float16"),
        (_WHITE, "every value is 0"),
        (_GREY, "not measured"),
    ]


def _shorten(text: str) -> str:
    """Keep both ends: paths of one network differ at either."""
    if len(text) <= _LABEL_CHARACTERS:
        return text
    half = (_LABEL_CHARACTERS - 2) // 2
    return f"{text[:half]}..{text[-half:]}"


def write_text(picture: Image, text: str, top: int, left: int) -> None:
    """Writes black text into a picture; what does not fit is cut off."""
    mask = text_mask(text)
    target = picture[top : top + mask.shape[0], left : left + mask.shape[1]]
    target[mask[:, : target.shape[1]]] = _BLACK


def png(picture: Image) -> bytes:
    """Encode a uint8 RGB picture ``[height, width, 3]`` as a PNG file."""
    height, width, channels = picture.shape
    assert channels == 3
    assert picture.dtype == np.uint8

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each row starts with its filter type, 0: none
    rows[:, 1:] = picture.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows.tobytes(), 6)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body
