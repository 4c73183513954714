"""The heat map: what is collected, which colour says what, and that the file is a PNG that others read."""

from __future__ import annotations

import itertools
import struct
import zlib

import numpy as np
import pytest

from ampdebug._stats import summarize
from ampdebug.report.heatmap import (
    ALL_ZERO,
    NONFINITE,
    NOT_MEASURED,
    ExponentMap,
    colours,
    exponent_span,
    png,
)


def counts_of(values: list[float]) -> np.ndarray:
    return np.array(summarize(np.array(values, np.float32)).exponents, np.uint32)


@pytest.mark.parametrize(
    ("values", "span"),
    [
        ([1.0], (0, 0)),
        ([0.75, 6.0], (-1, 2)),
        ([0.0, 0.0], None),
        ([], None),
        ([2.0**-30, 65504.0], (-30, 15)),
        ([1.0] * 199 + [2.0**-20], (0, 0)),  # one stray value in 200 does not set the lower end
        ([1.0] * 49 + [2.0**-20], (-20, 0)),  # one in 50 does
        ([1.0] * 199 + [2.0**17], (0, 17)),  # every value counts at the upper end: one overflow is enough
    ],
)
def test_exponent_span(values: list[float], span: tuple[int, int] | None) -> None:
    assert exponent_span(counts_of(values)) == span


def test_codes_keep_the_order_of_cells_and_mark_what_is_missing() -> None:
    heat = ExponentMap()
    heat.add(1, {"b": (-3, 4), "a": ALL_ZERO})
    heat.add(2, {"c": NONFINITE, "b": (-5, 16)})
    assert heat.codes("largest").tolist() == [[4, 16], [ALL_ZERO, NOT_MEASURED], [NOT_MEASURED, NONFINITE]]
    assert heat.codes("smallest").tolist() == [[-3, -5], [ALL_ZERO, NOT_MEASURED], [NOT_MEASURED, NONFINITE]]


@pytest.mark.parametrize("columns", [9, 10])
@pytest.mark.parametrize("steps", [1, 9, 10, 11, 19, 20, 21, 57, 1000])
def test_many_steps_share_columns_and_lose_no_extreme(steps: int, columns: int) -> None:
    heat = ExponentMap(columns=columns)
    special = steps // 2 + 1
    for step in range(1, steps + 1):
        heat.add(step, {"a": (-9, 9) if step == special else (0, 1)})
    largest, smallest = heat.codes("largest")[0], heat.codes("smallest")[0]
    assert min(steps, columns // 2) <= len(largest) <= columns
    assert (largest == 9).sum() == 1
    assert (smallest == -9).sum() == 1
    edges = [(column.first, column.last) for column in heat._columns]
    assert edges[0][0] == 1
    assert edges[-1][1] == steps
    assert all(left[1] + 1 == right[0] for left, right in itertools.pairwise(edges))
    widths = [last - first + 1 for first, last in edges]
    assert len(set(widths[:-1])) <= 1
    assert widths[-1] <= widths[0]
    (at,) = np.flatnonzero(largest == 9)
    assert edges[at][0] <= special <= edges[at][1]


def test_colours_mark_what_float16_does_to_the_value() -> None:
    codes = np.array([NONFINITE, 16, 15, -14, -15, -25, -26, ALL_ZERO, NOT_MEASURED], np.int16)
    named = [tuple(colour) for colour in colours(codes).tolist()]
    assert len(set(named)) == 8  # -15 and -25 are both subnormal; 15 and -14 are the two ends of the scale
    assert named[4] == named[5]
    assert named[1] == (213, 94, 0)
    brightness = colours(np.arange(-14, 16, dtype=np.int16)).astype(float) @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(brightness) > 0).all()  # told apart without any colour


def test_draw_has_a_row_a_cell_and_a_legend() -> None:
    heat = ExponentMap()
    for step in (1, 2, 3):
        heat.add(step, {"": (0, 16), "conv": (-26, 3)})
    picture = heat.draw("largest")
    assert picture.dtype == np.uint8
    assert picture.shape[2] == 3
    rows = picture[18:36]  # after the title and an empty line
    assert (rows[:9] == (213, 94, 0)).all(axis=-1).sum() == 9 * 3 * 12
    assert not (rows[9:] == (213, 94, 0)).all(axis=-1).any()
    assert (heat.draw("smallest")[27:36] == (204, 121, 167)).all(axis=-1).sum() == 9 * 3 * 12


def test_a_large_network_is_cut_and_says_so() -> None:
    heat = ExponentMap()
    heat.add(1, {f"cell{k}": (0, 0) for k in range(403)})
    few = ExponentMap()
    few.add(1, {f"cell{k}": (0, 0) for k in range(400)})
    assert heat.draw("largest").shape[0] == few.draw("largest").shape[0] + 9


def test_png_is_read_back_the_same() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (7, 5, 3), dtype=np.uint8)
    data = png(picture)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = [], 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length]) == (zlib.crc32(kind + body),)
        chunks.append((kind, body))
        at += 12 + length
    assert [kind for kind, _ in chunks] == [b"IHDR", b"IDAT", b"IEND"]
    assert struct.unpack(">IIBBBBB", chunks[0][1]) == (5, 7, 8, 2, 0, 0, 0)
    rows = np.frombuffer(zlib.decompress(chunks[1][1]), np.uint8).reshape(7, 16)
    assert not rows[:, 0].any()
    assert (rows[:, 1:].reshape(7, 5, 3) == picture).all()


def test_pillow_reads_it(tmp_path) -> None:
    image = pytest.importorskip("PIL.Image")
    picture = np.random.default_rng(1).integers(0, 256, (9, 4, 3), dtype=np.uint8)
    (tmp_path / "a.png").write_bytes(png(picture))
    with image.open(tmp_path / "a.png") as read:
        assert (np.asarray(read) == picture).all()
