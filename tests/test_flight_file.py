"""Kept steps on disk: what is written comes back bit by bit, and no file does harm."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ampdebug import ArgumentError, FormatError, StoreError
from ampdebug._flight_file import (
    KeptArray,
    KeptStep,
    find_kept_steps,
    kept_step_file,
    read_kept_step,
    write_kept_step,
)

DTYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool", "complex64")


def same(ours: Any, theirs: Any) -> None:
    """Asserts that two values are of the same types and bits."""
    assert type(ours) is type(theirs)
    if isinstance(ours, KeptArray):
        assert ours.dtype == theirs.dtype
        assert ours.values.dtype == theirs.values.dtype
        assert ours.values.shape == theirs.values.shape
        assert ours.values.tobytes() == theirs.values.tobytes()
    elif isinstance(ours, (tuple, list)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        same(list(ours.values()), list(theirs.values()))
    elif isinstance(ours, float):
        assert np.float64(ours).tobytes() == np.float64(theirs).tobytes()
    else:
        assert ours == theirs


def an_array(*values: float, dtype: str = "float32") -> KeptArray:
    return KeptArray(np.array(values, dtype), dtype)


def a_step() -> KeptStep:
    return KeptStep(
        12,
        (an_array(1, 2, 3), an_array(1, 0, dtype="int32")),
        ("y",),
        {"fc.weight": an_array(0.5, -0.5), "bn.moving_mean": an_array(0)},
        11,
        {"numpy.keys": an_array(1, 2, dtype="uint32")},
        {"loss": float("nan"), "loss_scale": 1024.0, "not_training": []},
    )


# --- round trip -------------------------------------------------------------------------------------------------------

arrays = st.one_of(
    st.sampled_from(DTYPES).flatmap(
        lambda name: hnp.arrays(name, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)).map(
            lambda values: KeptArray(values, name)
        )
    ),
    # Every bit pattern of bfloat16, NaN with payload among them.
    hnp.arrays("uint16", hnp.array_shapes(min_dims=0, max_dims=2, min_side=0)).map(lambda v: KeptArray(v, "bfloat16")),
)
values = st.recursive(
    st.one_of(arrays, st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(), inner, max_size=3),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(batch=st.lists(values, max_size=4).map(tuple), parameters=st.dictionaries(st.text(), arrays, max_size=3))
def test_what_is_written_comes_back(
    tmp_path_factory: pytest.TempPathFactory, batch: tuple[Any, ...], parameters: dict[str, KeptArray]
) -> None:
    path = tmp_path_factory.getbasetemp() / "round.npz"
    size = write_kept_step(path, KeptStep(3, batch, (), parameters, 3, {}, {"loss": None}))
    found = read_kept_step(path)
    assert size == path.stat().st_size
    assert (found.step, found.state_step, found.keywords) == (3, 3, ())
    same(found.batch, batch)
    same(dict(found.parameters), parameters)


def test_numpy_reads_it_without_pickle(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    write_kept_step(path, a_step())
    with np.load(path, allow_pickle=False) as archive:
        meta = json.loads(bytes(archive["meta"]))
        weight = archive[f"array{meta['parameters']['fc.weight']['array']}"]
    np.testing.assert_array_equal(weight, [0.5, -0.5])
    assert meta["facts"] == {"loss": "nan", "loss_scale": 1024.0, "not_training": []}
    assert meta["step"] == 12


@pytest.mark.parametrize("count", [0, 1, 200])
def test_the_size_is_known_before_it_is_written(tmp_path: Path, count: int) -> None:
    many = {f"blocks.{i}.attention.ä.weight": an_array(*range(i)) for i in range(count)}
    wide = KeptArray(np.zeros((1,) * 30, np.float16), "float16")
    kept = KeptStep(1, (wide, {"a": [wide]}), (), many, 1, {}, {"not_training": list(many)})
    size = write_kept_step(tmp_path / "a.npz", kept)
    assert size <= kept.file_size <= size + 2048 + 600 * (count + 2)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (object(), "object"),
        ({1: 2}, "keys"),
        (KeptArray(np.array([None, 1]), "float32"), "no form"),
        (KeptArray(np.zeros(2), "float7"), "float7"),
        (KeptArray(np.zeros(2, [("a", "f4")]), "float32"), "no form"),
    ],
)
def test_what_has_no_form_is_refused_before_anything_is_written(tmp_path: Path, value: Any, word: str) -> None:
    with pytest.raises(ArgumentError, match=word):
        write_kept_step(tmp_path / "a.npz", KeptStep(1, (value,)))
    assert not list(tmp_path.iterdir())


def test_a_batch_nested_without_end_is_refused(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ArgumentError, match="nested"):
        write_kept_step(tmp_path / "a.npz", KeptStep(1, (loop,)))


# --- files ------------------------------------------------------------------------------------------------------------


def test_kept_steps_are_found_by_rank_in_order(tmp_path: Path) -> None:
    for rank, step in ((0, 12), (0, 2), (1, 3), (0, 1_234_567)):
        write_kept_step(kept_step_file(tmp_path, rank, step), a_step())
    (tmp_path / "ampdebug-rank0-step000099.npz.partial").write_bytes(b"half")
    (tmp_path / "ampdebug-rank0.sqlite").write_bytes(b"")
    assert list(find_kept_steps(tmp_path, 0)) == [2, 12, 1_234_567]
    assert list(find_kept_steps(tmp_path, 1)) == [3]
    with pytest.raises(StoreError, match="nowhere"):
        find_kept_steps(tmp_path / "nowhere", 0)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    path = tmp_path / "a.npz"
    (tmp_path / "a.npz.partial").symlink_to("/dev/full")
    with pytest.raises(StoreError, match=r"a\.npz.*No space"):
        write_kept_step(path, a_step())
    assert not list(tmp_path.iterdir())


def test_a_failed_write_keeps_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    write_kept_step(path, a_step())
    (tmp_path / "a.npz.partial").mkdir()
    with pytest.raises(StoreError):
        write_kept_step(path, KeptStep(13, ()))
    assert read_kept_step(path).step == 12


def test_a_process_killed_while_it_writes_leaves_no_file_that_is_read(tmp_path: Path) -> None:
    child = textwrap.dedent(
        """
        import os, signal, sys
        import numpy as np
        from ampdebug._flight_file import KeptArray, KeptStep, kept_step_file, write_kept_step
        write, seen = np.lib.format.write_array, []
        def write_or_die(file, array, **options):
            write(file, array, **options)
            seen.append(array)
            if len(seen) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        np.lib.format.write_array = write_or_die
        big = KeptArray(np.zeros(1 << 20, np.float32), "float32")
        write_kept_step(kept_step_file(sys.argv[1], 0, 5), KeptStep(5, (big, big, big)))
        """
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", child, str(tmp_path)], env=environment, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [file.name for file in tmp_path.iterdir()] == ["ampdebug-rank0-step000005.npz.partial"]
    assert find_kept_steps(tmp_path, 0) == {}


# --- files that are not ours, or not whole ----------------------------------------------------------------------------


def npy(array: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, **options)
    return stream.getvalue()


def archive(path: Path, entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compression) as made:
        for name, data in entries.items():
            made.writestr(name, data)


def meta_of(**changes: Any) -> dict[str, Any]:
    return {
        "format": "ampdebug-kept-step",
        "version": 1,
        "step": 1,
        "batch": [{"array": 0, "dtype": "float32"}],
        "keywords": [],
        "parameters": {},
        "state_step": None,
        "random": {},
        "facts": {},
        **changes,
    }


def with_meta(meta: Any, **more: bytes) -> dict[str, bytes]:
    text = meta if isinstance(meta, bytes) else json.dumps(meta).encode()
    entries = {"meta.npy": npy(np.frombuffer(text, np.uint8)), "array0.npy": npy(np.ones(2, np.float32))}
    return {**entries, **more}


def header(shape: str, descr: str = "'<f4'", data: bytes = b"\0" * 8) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (63 - (10 + len(text)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


class Bomb:
    """Says so when it is unpickled."""

    def __reduce__(self) -> Any:
        return (Path("unpickled").touch, ())


HOSTILE: dict[str, tuple[Callable[[], dict[str, bytes]], str]] = {
    "pickle": (
        lambda: with_meta(meta_of(), **{"array0.npy": npy(np.array([Bomb()], object), allow_pickle=True)}),
        "pickled Python objects",
    ),
    "pickled meta": (
        lambda: {"meta.npy": npy(np.array([Bomb()], object), allow_pickle=True)},
        "pickled Python objects",
    ),
    "object in a structure": (
        lambda: with_meta(meta_of(), **{"array0.npy": header("(1,)", "[('a', '|O')]")}),
        "pickled Python objects",
    ),
    "structure": (lambda: with_meta(meta_of(), **{"array0.npy": header("(1,)", "[('a', '<f8')]")}), "dtype"),
    "big-endian": (lambda: with_meta(meta_of(), **{"array0.npy": npy(np.ones(2, ">f4"))}), "dtype"),
    "huge shape": (lambda: with_meta(meta_of(), **{"array0.npy": header("(1 << 60,)")}), "header"),
    "huge number": (lambda: with_meta(meta_of(), **{"array0.npy": header("(1152921504606846976, 9)")}), "needs"),
    "negative shape": (lambda: with_meta(meta_of(), **{"array0.npy": header("(-2, -1)")}), "shape"),
    "header that calls": (lambda: with_meta(meta_of(), **{"array0.npy": header("(exit(),)")}), "header"),
    "no array at all": (lambda: with_meta(meta_of(), **{"array0.npy": b"hello"}), "header"),
    "too short": (lambda: with_meta(meta_of(), **{"array0.npy": header("(3,)")}), "needs 12"),
    "other dtype": (lambda: with_meta(meta_of(), **{"array0.npy": npy(np.ones(2, np.float64))}), "float64"),
    "no meta": (lambda: {"array0.npy": npy(np.ones(2))}, "no array 'meta'"),
    "missing array": (lambda: with_meta(meta_of(batch=[{"array": 7, "dtype": "float32"}])), "array7"),
    "array named twice": (lambda: with_meta(meta_of(batch=[{"array": 0, "dtype": "float32"}] * 2)), "twice"),
    "other format": (lambda: with_meta(meta_of(format="other")), "kept step"),
    "newer version": (lambda: with_meta(meta_of(version=2)), "version 2"),
    "meta is a list": (lambda: with_meta([]), "kept step"),
    "meta is no JSON": (lambda: with_meta(b"\xff\xfe"), "kept step"),
    "deep JSON": (lambda: with_meta(b'{"format":' + b"[" * 100_000), "kept step"),
    "deep batch": (lambda: with_meta(meta_of(batch=[_nested(40)])), "laid out"),
    "step is text": (lambda: with_meta(meta_of(step="1")), "'step'"),
    "unknown node": (lambda: with_meta(meta_of(batch=[{"call": "os.system"}])), "no part of a batch"),
    "parameter is a number": (lambda: with_meta(meta_of(parameters={"w": {"value": 1}})), "where an array belongs"),
    "too many keywords": (lambda: with_meta(meta_of(keywords=["a", "b"])), "keywords"),
}


def _nested(depth: int) -> Any:
    return {"list": [_nested(depth - 1)]} if depth else {"value": None}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_foreign_or_hostile_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    make, word = HOSTILE[name]
    archive(tmp_path / "a.npz", make())
    with pytest.raises(FormatError, match=word) as caught:
        read_kept_step(tmp_path / "a.npz")
    assert "a.npz" in str(caught.value)
    assert not (tmp_path / "unpickled").exists()


def test_the_files_of_those_tests_are_refused_for_their_fault_alone(tmp_path: Path) -> None:
    archive(tmp_path / "a.npz", with_meta(meta_of()))
    same(read_kept_step(tmp_path / "a.npz").batch, (an_array(1, 1),))


def test_a_compressed_file_is_refused_unread(tmp_path: Path) -> None:
    bomb = {"meta.npy": npy(np.zeros(1 << 24, np.uint8))}
    archive(tmp_path / "a.npz", bomb, zipfile.ZIP_DEFLATED)
    with pytest.raises(FormatError, match="compressed"):
        read_kept_step(tmp_path / "a.npz")


def test_an_entry_that_claims_more_than_the_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    archive(path, with_meta(meta_of()))
    data = bytearray(path.read_bytes())
    start = data.index(b"PK\x01\x02")  # an entry of the directory: its two sizes stand 20 bytes on
    data[start + 20 : start + 28] = (1 << 30).to_bytes(4, "little") * 2
    path.write_bytes(data)
    with pytest.raises(FormatError, match="add up"):
        read_kept_step(path)


def test_what_is_no_zip_and_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"no zip")
    with pytest.raises(FormatError, match="npz"):
        read_kept_step(tmp_path / "a.npz")
    with pytest.raises(StoreError, match=r"b\.npz"):
        read_kept_step(tmp_path / "b.npz")


def test_truncated_anywhere_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    write_kept_step(path, a_step())
    whole = path.read_bytes()
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError):
            read_kept_step(path)


def test_damaged_anywhere_it_is_read_right_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    write_kept_step(path, a_step())
    whole = path.read_bytes()
    rng = random.Random(0)
    refused = 0
    for _ in range(600):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 1, 3, 20))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            found = read_kept_step(path)
        except StoreError:
            refused += 1
        else:
            same(found.batch, a_step().batch)  # the CRC of each entry saw to it
    assert refused > 300


def test_every_nan_keeps_its_bits_and_a_damaged_one_is_said(tmp_path: Path) -> None:
    odd = np.frombuffer(bytes.fromhex("fff8000000000001"), ">f8")[0].item()
    path = tmp_path / "ampdebug-rank0-step000012.npz"
    kept = a_step()
    write_kept_step(path, KeptStep(kept.step, (odd,), (), kept.parameters, kept.state_step, kept.random, kept.facts))
    same(read_kept_step(path).batch[0], odd)
    for wrong in ("nan:fff800000000000x", "nan:fff8", "nan:"):
        archive(path, with_meta(meta_of(batch=[{"float": wrong}])))
        with pytest.raises(FormatError):
            read_kept_step(path)
    archive(path, with_meta(meta_of(batch=[{"float": "nan"}])))  # as the first files have it
    assert np.isnan(read_kept_step(path).batch[0])
