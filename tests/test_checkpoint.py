"""Checkpoint files read without MindSpore: written here byte by byte, measured against numpy, hostile ones refused."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ampdebug
from ampdebug import FormatError, audit_checkpoint, summarize
from ampdebug import _checkpoint_file as files
from ampdebug._checkpoint_file import open_checkpoint
from ampdebug._cli import main

Array = npt.NDArray[Any]
RNG = np.random.RandomState(0)


# --- writing the two formats ------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def value(name: str, dtype: str, shape: Sequence[int], content: bytes, *, packed: bool = False) -> bytes:
    if packed:
        dims = field(1, b"".join(varint(n) for n in shape))
    else:
        dims = b"".join(varint(1 << 3) + varint(n) for n in shape)
    tensor = dims + field(2, dtype.encode()) + field(3, content)
    return field(1, field(1, name.encode()) + field(2, tensor))


MS_NAMES = {"float16": "Float16", "float32": "Float32", "float64": "Float64", "int64": "Int64", "bool": "Bool"}
ST_NAMES = {"float16": "F16", "float32": "F32", "float64": "F64", "int64": "I64", "bool": "BOOL"}


def ckpt(path: Path, arrays: dict[str, Array]) -> Path:
    path.write_bytes(
        b"".join(value(n, MS_NAMES[str(a.dtype)], a.shape or (0,), a.tobytes()) for n, a in arrays.items())
    )
    return path


def header(told: Any) -> bytes:
    data = told if isinstance(told, bytes) else json.dumps(told).encode()
    return struct.pack("<Q", len(data)) + data


def safetensors(path: Path, arrays: dict[str, Array], metadata: dict[str, str] | None = None) -> Path:
    told: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, a in arrays.items():
        told[name] = {"dtype": ST_NAMES[str(a.dtype)], "shape": list(a.shape), "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
    path.write_bytes(header(told) + b"".join(a.tobytes() for a in arrays.values()))
    return path


WRITERS = {"net.ckpt": ckpt, "net.safetensors": safetensors}


def weights(*shape: int) -> Array:
    return np.asarray(RNG.randn(*shape), np.float32)


def slugs(report: ampdebug.CheckpointReport) -> list[str]:
    return [finding.slug for finding in report.findings]


# --- what is in a file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_both_formats_give_names_shapes_dtypes_and_statistics(tmp_path: Path, name: str) -> None:
    arrays = {
        "fc.weight": weights(4, 5),
        "half": weights(7).astype(np.float16),
        "wide": weights(3).astype(np.float64),
        "count": np.array([3], np.int64),
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((2, 0, 3), np.float32),
        "flags": np.array([True, False]),
    }
    report = audit_checkpoint(WRITERS[name](tmp_path / name, arrays))
    assert [(row.name, row.dtype, row.shape) for row in report.parameters] == [
        (n, str(a.dtype), a.shape) for n, a in arrays.items()
    ]
    for row in report.parameters:
        array = arrays[row.name]
        if array.dtype.kind == "f":
            assert row.stats == summarize(array) or array.size == 0  # NaN does not equal itself
        else:
            assert row.stats is None
    assert report.format == name.rpartition(".")[2]
    json.dumps(report.to_dict(), allow_nan=False)


def test_slices_of_one_parameter_are_joined(tmp_path: Path) -> None:
    whole = weights(6, 3)
    parts = [value("big", "Float32", (6, 3), part.tobytes()) for part in np.array_split(whole, 4)]
    path = tmp_path / "sliced.ckpt"
    path.write_bytes(b"".join([*parts, value("other", "Float32", (2,), weights(2).tobytes(), packed=True)]))
    big, other = audit_checkpoint(path).parameters
    assert (big.shape, other.shape) == ((6, 3), (2,))
    found, expected = big.stats, summarize(whole)
    assert found is not None
    assert (found.count, found.min, found.max, found.exponents) == (18, expected.min, expected.max, expected.exponents)
    assert found.mean == pytest.approx(float(whole.astype(np.float64).mean()), rel=1e-14)
    assert found.rms == pytest.approx(float(np.sqrt((whole.astype(np.float64) ** 2).mean())), rel=1e-14)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32) | st.sampled_from([0.0, -0.0, 65504.0, 1e-9, 3e38]), max_size=40), st.integers(1, 9)
)
def test_pieces_make_the_same_statistics_as_the_whole(numbers: list[float], size: int) -> None:
    """Read in chunks that even cut elements apart; against the statistics of the array at once."""
    array = np.array(numbers, np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "CHUNK", size)
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            path = ckpt(Path(folder) / "a.ckpt", {"p": array, "q": np.ones(1, np.float32)})
            found = audit_checkpoint(path).parameters[0].stats
    expected = summarize(array)
    assert found is not None
    for name in ("count", "zeros", "nan", "pos_inf", "neg_inf", "subnormal", "flushed", "exceeding", "saturated",
                 "mantissa_bits", "exponents"):  # fmt: skip
        assert getattr(found, name) == getattr(expected, name), name
    for name in ("min", "max", "mean", "rms"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-12, abs=1e-300, nan_ok=True)


def test_pieces_without_a_finite_element(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHUNK", 4)
    for numbers in ([np.nan, 1.0, np.inf, -2.0], [3.0, np.nan], [np.nan, np.nan]):
        array = np.array(numbers, np.float32)
        found = audit_checkpoint(ckpt(tmp_path / "a.ckpt", {"p": array})).parameters[0].stats
        expected = summarize(array)
        assert found is not None
        for name in ("min", "max", "mean", "rms"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-12, nan_ok=True), name


def test_bfloat16_is_read_by_its_bits(tmp_path: Path) -> None:
    exact = np.array([1.0, -2.5, 1e38, np.inf, 1e-20], np.float32)
    bits = (exact.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    path = tmp_path / "bf.ckpt"
    path.write_bytes(value("b", "BFloat16", (5,), bits.tobytes()))
    (row,) = audit_checkpoint(path).parameters
    assert row.stats == summarize(bits, bfloat16_bits=True)
    assert row.stats is not None
    assert (row.stats.pos_inf, row.stats.exceeding, row.stats.flushed) == (1, 1, 1)


def test_map_parameters_strings_and_unknown_types_are_told_and_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "odd.ckpt"
    path.write_bytes(
        field(1, field(1, b"table") + field(3, b""))
        + value("text", "str", (1,), "hi".encode("utf-32-le"))
        + value("packed", "Int4", (8,), b"1234")
    )
    report = audit_checkpoint(path)
    assert [(row.name, row.dtype, row.stats) for row in report.parameters] == [
        ("table", "maptensor", None),
        ("text", "str", None),
        ("packed", "Int4", None),
    ]
    assert report.ok


# --- findings ---------------------------------------------------------------------------------------------------------


def test_a_sound_checkpoint_has_no_finding(tmp_path: Path) -> None:
    path = ckpt(tmp_path / "a.ckpt", {"fc.weight": weights(40, 5), "bn.gamma": np.ones(80, np.float32)})
    report = audit_checkpoint(path)
    assert report.findings == ()
    assert str(report).startswith(f"Checkpoint {path}: no finding.")


def test_nonfinite_parameters(tmp_path: Path) -> None:
    bad = np.array([1.0, np.nan, np.inf], np.float32)
    report = audit_checkpoint(ckpt(tmp_path / "a.ckpt", {"fc.weight": weights(4), "bn.moving_variance": bad}))
    (found,) = report.findings
    assert (found.slug, found.severity, found.where) == ("nonfinite-parameters", "error", "bn.moving_variance")
    assert "moving statistics" in found.sentence
    assert found.evidence[0].text == "bn.moving_variance: 1 NaN, 1 +inf, 0 -inf of 3 elements"
    row = next(line for line in str(report).splitlines() if line.startswith("bn.moving_variance  "))
    assert row.split()[:5] == ["bn.moving_variance", "float32", "3", "1", "2"]


def test_float16_parameters_among_float32(tmp_path: Path) -> None:
    mixed = {"a": weights(8), "b": weights(8).astype(np.float16)}
    assert slugs(audit_checkpoint(ckpt(tmp_path / "a.ckpt", mixed))) == ["low-precision-parameters"]
    half = audit_checkpoint(ckpt(tmp_path / "b.ckpt", {"b": mixed["b"], "n": np.array([1], np.int64)}))
    assert slugs(half) == ["all-parameters-16-bit"]
    assert half.ok


def test_what_float16_would_do_to_the_values(tmp_path: Path) -> None:
    arrays = {
        "large": np.array([65504, 65505, 1], np.float32),
        "small": np.array([2.0**-25, 2.0**-24, 1, 0], np.float32),
        "moments.small": np.full(4, 1e-12, np.float32),
        "moments.large": np.full(4, 1e12, np.float32),
    }
    report = audit_checkpoint(ckpt(tmp_path / "a.ckpt", arrays))
    assert slugs(report) == ["parameters-beyond-float16", "parameters-zero-in-float16"]
    beyond, zero = report.findings
    assert beyond.evidence[0].text == "large: 1 of 3 elements, absmax 65505"
    assert zero.evidence[0].text == "small: 1 become 0 and 1 subnormal of 4"
    assert "33.3 % of its nonzero elements" in zero.sentence
    assert "moments" not in str(report)


def test_few_small_values_are_a_note(tmp_path: Path) -> None:
    array = weights(1000)
    array[:3] = 1e-9
    (found,) = audit_checkpoint(ckpt(tmp_path / "a.ckpt", {"w": array})).findings
    assert (found.slug, found.severity) == ("parameters-zero-in-float16", "note")


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (weights(100).astype(np.float16).astype(np.float32), "float16"),
        (((weights(100).view(np.uint32) >> 16) << 16).view(np.float32), "bfloat16"),
        (weights(100), None),
        (np.ones(100, np.float32), None),
        (np.arange(100, dtype=np.float32) % 8, None),
        (weights(20).astype(np.float16).astype(np.float32), None),
    ],
)
def test_float32_values_that_went_through_16_bits(tmp_path: Path, array: Array, expected: str | None) -> None:
    report = audit_checkpoint(ckpt(tmp_path / "a.ckpt", {"w": array}))
    assert report.parameters[0].passed_through == expected
    assert ("float32-holds-16-bit-values" in slugs(report)) == (expected is not None)


def test_a_name_twice(tmp_path: Path) -> None:
    path = tmp_path / "twice.ckpt"
    blocks = [value(n, "Float32", (2,), weights(2).tobytes()) for n in ("a", "b", "a")]
    path.write_bytes(b"".join(blocks))
    report = audit_checkpoint(path)
    assert slugs(report) == ["parameter-twice"]
    assert len(report.parameters) == 2


@pytest.mark.parametrize(("flip", "expected"), [(False, []), (True, ["checksum-wrong"])])
def test_the_checksum_at_the_end(tmp_path: Path, flip: bool, expected: list[str]) -> None:
    body = value("a", "Float32", (3,), weights(3).tobytes())
    crc = zlib.crc32(body)
    path = tmp_path / "crc.ckpt"
    path.write_bytes(body + b"crc_num" + (crc ^ flip).to_bytes(10, "big"))
    assert slugs(audit_checkpoint(path)) == expected


# --- two files --------------------------------------------------------------------------------------------------------


def test_against_another_file(tmp_path: Path) -> None:
    old = {"same": weights(5), "cast": weights(50), "moved": np.ones(4, np.float32), "gone": weights(2),
           "n": np.array([1], np.int64), "shape": weights(4)}  # fmt: skip
    new = {"same": old["same"], "cast": old["cast"].astype(np.float16), "moved": np.array([1, 1, 1.5, 1], np.float32),
           "new": weights(2), "n": old["n"], "shape": weights(2, 2)}  # fmt: skip
    report = audit_checkpoint(safetensors(tmp_path / "b.safetensors", new), against=ckpt(tmp_path / "a.ckpt", old))
    diff = report.against
    assert diff is not None
    kinds = {change.name: change.kind for change in diff.changes}
    assert kinds == {"same": "equal", "cast": "rounded", "moved": "different"}
    moved = next(change for change in diff.changes if change.name == "moved")
    assert (moved.differing, moved.largest, moved.relative) == (1, 0.5, 0.25)
    assert (diff.gone, diff.new, diff.uncompared) == (("gone",), ("new",), ("n",))
    assert diff.reshaped == (("shape", (4,), (2, 2)),)
    assert diff.kind == "different"
    assert "1 equal, 1 rounded, 1 different" in str(report)
    json.dumps(report.to_dict(), allow_nan=False)


def test_nan_equals_nan_and_a_value_that_became_inf_is_rounded(tmp_path: Path) -> None:
    old = ckpt(tmp_path / "a.ckpt", {"w": np.array([np.nan, 1e6, 1], np.float32)})
    with np.errstate(over="ignore"):
        half = np.array([np.nan, 1e6, 1], np.float32).astype(np.float16)
    diff = audit_checkpoint(ckpt(tmp_path / "b.ckpt", {"w": half}), against=old).against
    assert diff is not None
    assert [(c.kind, c.differing, c.nonfinite) for c in diff.changes] == [("rounded", 1, (1, 2))]


# --- hostile and broken files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_every_truncation_is_refused(tmp_path: Path, name: str) -> None:
    whole = WRITERS[name](tmp_path / name, {"fc.weight": weights(3, 2), "fc.bias": weights(2)}).read_bytes()
    path = tmp_path / f"cut.{name}"
    between = whole.find(b"fc.bias") - 4 if name == "net.ckpt" else -1  # the bytes before a name: two tags, two lengths
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        if end == between:
            assert len(open_checkpoint(path).entries) == 1  # a ckpt cut between two parameters is a whole one
            continue
        with pytest.raises(FormatError):
            open_checkpoint(path)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=120), st.sampled_from(["x.ckpt", "x.safetensors"]))
def test_arbitrary_bytes_are_refused_or_read(tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str) -> None:
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(data)
    try:
        audit_checkpoint(path)
    except FormatError as error:
        assert str(path) in str(error)  # noqa: PT017 - any other exception fails the test


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_changed_byte_never_raises_anything_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp()
    name = data.draw(st.sampled_from(sorted(WRITERS)))
    whole = bytearray(WRITERS[name](folder / name, {"a.b": np.ones((2, 3), np.float32)}).read_bytes())
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    (folder / name).write_bytes(whole)
    try:
        audit_checkpoint(folder / name)
    except FormatError as error:
        assert name in str(error)  # noqa: PT017


def one(**told: Any) -> bytes:
    return header({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **told}}) + b"\0" * 4


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (struct.pack("<Q", 1 << 60) + b"{}", "header would have 1152921504606846976 bytes"),
        (struct.pack("<Q", 50) + b"{}", "it is cut off"),
        (header(b"[" * 100_000), "its header is not JSON"),
        (header(b'{"w": NaN'), "its header is not JSON"),
        (header([1]), "its header is not a JSON object"),
        (header({"w": 3}), "the header says nothing of 'w'"),
        (header({"__metadata__": {"a": 1}}), "__metadata__ does not map names to texts"),
        (header(b'{"w": {}, "w": {}}'), "says a name twice"),
        (one(dtype=3), "'w' has no dtype"),
        (one(shape=[-1]), "the shape of 'w' is not a list of numbers"),
        (one(shape=[True]), "the shape of 'w' is not a list of numbers"),
        (one(shape=[1 << 70]), "takes 4722366482869645213696 bytes, and the file has 4"),
        (one(shape=[2]), "takes 8 bytes, and the file has 4"),
        (one(data_offsets=[4, 0]), "data_offsets of 'w' are not two numbers in order"),
        (one(data_offsets=[0, 1 << 62]), "the file, which is cut off"),
        (one(data_offsets=[1, 4]), "a gap of 1 bytes before 'w'"),
        (one() + b"more", "4 bytes at the end belong to no parameter"),
        (header({n: {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]} for n in "ab"}) + b"12", "an overlap of 2"),
    ],
)
def test_safetensors_that_contradict_themselves(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(FormatError) as caught:
        audit_checkpoint(path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\x03\x04rest", "a zip archive, as PyTorch's .pt"),
        (b"\x7f\x3a\x5e\xd8rest", "an encrypted MindSpore checkpoint"),
        (b"", "is empty"),
        (b"text of some kind", "is no MindSpore checkpoint, or damaged"),
        (b"\x0a\xff\xff\xff\xff\x7f", "ends"),
        (b"\x0a" + b"\xff" * 11, "a number has more than 10 bytes"),
        (field(1, b""), "a parameter has no name"),
        (field(1, field(1, b"w")), "parameter 'w' has no value"),
        (field(1, field(1, b"\xff") + field(2, b"")), "a name is not UTF-8"),
        (field(1, field(1, b"n" * 70_000) + field(2, b"")), "a name has 70000 bytes"),
        (field(2, b""), "field 2 stands where a parameter should"),
        (value("w", "Float32", (3,), b"1234"), "takes 12 bytes, and the file has 4"),
        (value("w", "Float32", (2**64 - 1,), b"1234"), "has a negative dimension"),
        (value("w", "Float32", (1,) * 65, b"1234"), "more than 64 dimensions"),
        (value("w", "", (1,), b"1234"), "has no dtype"),
        (value("w", "Float32", (4,), b"1234" * 2) + value("w", "Float16", (4,), b"1234"), "two slices of 'w' differ"),
    ],
)
def test_ckpt_that_contradict_themselves(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.ckpt"
    path.write_bytes(data)
    with pytest.raises(FormatError) as caught:
        audit_checkpoint(path)
    assert message in str(caught.value)


def test_a_large_parameter_is_read_in_pieces(tmp_path: Path) -> None:
    import tracemalloc

    path = safetensors(tmp_path / "large.safetensors", {"w": np.ones(12_000_000, np.float32)})
    audit_checkpoint(path)  # compiles what is compiled once
    tracemalloc.start()
    report = audit_checkpoint(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert report.parameters[0].stats is not None
    assert report.parameters[0].stats.count == 12_000_000
    assert peak < 40 << 20, f"{peak >> 20} MB for a file of 48 MB"


# --- the command line -------------------------------------------------------------------------------------------------


def test_exit_codes_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = str(ckpt(tmp_path / "good.ckpt", {"w": weights(100)}))
    bad = str(ckpt(tmp_path / "bad.ckpt", {"w": np.array([np.nan], np.float32)}))
    assert main(["checkpoint", good]) == 0
    assert "no finding" in capsys.readouterr().out
    assert main(["checkpoint", bad, "--json", "--against", good]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["findings"][0]["slug"] == "nonfinite-parameters"
    assert data["parameters"][0]["stats"]["min"] is None
    assert data["against"]["reshaped"] == [["w", [100], [1]]]
    assert main(["checkpoint", str(tmp_path / "none.ckpt")]) == 2
    assert main(["checkpoint", str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err
